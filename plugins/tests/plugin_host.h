// What a plugin needs of TensorRT, in the harness's own objects: expression builder and logger.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "abi.h"

namespace harness {

namespace abi = dflash::abi;

// A dimension whose value is known, as in a network without dynamic shapes.
class Dimension : public abi::IDimensionExpr, public abi::apiv::VDimensionExpr {
public:
    explicit Dimension(int64_t value) : value_(value) { mImpl = this; }
    bool isConstant() const override { return true; }
    int64_t getConstantValue() const override { return value_; }
    bool isSizeTensor() const override { return false; }

private:
    int64_t value_;
};

class ExpressionBuilder : public abi::IExprBuilder, public abi::apiv::VExprBuilder {
public:
    ExpressionBuilder() { mImpl = this; }

    abi::IDimensionExpr const* constant(int64_t value) override {
        made_.push_back(std::make_unique<Dimension>(value));
        return made_.back().get();
    }
    abi::IDimensionExpr const* operation(abi::DimensionOperation op, abi::IDimensionExpr const& first,
                                         abi::IDimensionExpr const& second) override {
        const int64_t a = first.getConstantValue(), b = second.getConstantValue();
        return constant(op == abi::DimensionOperation::kSUM ? a + b : a * b);
    }
    abi::IDimensionExpr const* declareSizeTensor(int32_t, abi::IDimensionExpr const&,
                                                 abi::IDimensionExpr const&) override {
        return nullptr;
    }

private:
    std::vector<std::unique_ptr<Dimension>> made_;
};

class Log : public abi::ILogger, public abi::ILoggerFinder {
public:
    abi::ILogger* findLogger() override { return this; }
    void log(Severity severity, char const* message) noexcept override {
        if (severity <= Severity::kERROR) errors.push_back(message);
        else remarks.push_back(message);
    }
    // The last error, forgotten by being read; "" when nothing was logged.
    std::string take_error() {
        const std::string text = errors.empty() ? "" : errors.back();
        errors.clear();
        return text;
    }

    std::vector<std::string> errors, remarks;
};

}  // namespace harness
