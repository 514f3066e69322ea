// Plugin fields: what a creator accepts, checked once, and what goes into the engine file.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "abi.h"

namespace dflash::trt {

// Serialised with every plugin. Raised when a field changes meaning; an engine with another version is refused.
constexpr int32_t kFieldsVersion = 1;

enum class FieldType { kInteger, kReal, kReals };

// One field. `fallback` NaN: the field must be given. A kReals field is a list that may be empty.
struct FieldSpec {
    const char* name;
    FieldType type;
    double fallback, lowest, highest;
};

constexpr double kRequired = std::numeric_limits<double>::quiet_NaN();
constexpr double kLargest = std::numeric_limits<int32_t>::max();

constexpr FieldSpec integer_field(const char* name, double fallback, double lowest, double highest) {
    return {name, FieldType::kInteger, fallback, lowest, highest};
}
constexpr FieldSpec flag_field(const char* name, double fallback = 0) {
    return {name, FieldType::kInteger, fallback, 0, 1};
}
constexpr FieldSpec real_field(const char* name, double fallback, double lowest, double highest) {
    return {name, FieldType::kReal, fallback, lowest, highest};
}
constexpr FieldSpec reals_field(const char* name, double lowest, double highest) {
    return {name, FieldType::kReals, 0, lowest, highest};
}

// The values of one plugin, every field of its specification present.
class Fields {
public:
    // Reads what TensorRT passes. Integers arrive as int32 or int64, reals as float32 or float64. Throws Refusal for
    // an unknown, repeated, missing, mistyped or out-of-range field, and in the runtime phase for another version.
    Fields(const std::vector<FieldSpec>& specs, const abi::PluginFieldCollection* given, abi::TensorRTPhase phase);

    int32_t integer(const char* name) const { return static_cast<int32_t>(value_of(name).integer); }
    bool flag(const char* name) const { return integer(name) != 0; }
    float real(const char* name) const { return value_of(name).reals.at(0); }
    const std::vector<float>& reals(const char* name) const { return value_of(name).reals; }

    // Every field and the version, pointing into this object: valid until it is changed or destroyed.
    std::vector<abi::PluginField> serialised() const;

    // "name=value,…": equal for equal fields.
    std::string text() const;

private:
    struct Value {
        const char* name;
        FieldType type;
        int32_t integer = 0;
        std::vector<float> reals;
    };

    const Value& value_of(const char* name) const;

    int32_t version_ = kFieldsVersion;
    std::vector<Value> values_;
};

}  // namespace dflash::trt
