#include "fields.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "logging.h"

namespace dflash::trt {
namespace {

constexpr const char* kVersionName = "version";

std::vector<double> numbers_of(const abi::PluginField& field, bool integers) {
    using Type = abi::PluginFieldType;
    std::vector<double> numbers;
    const auto take = [&](auto zero) {
        using T = decltype(zero);
        numbers.resize(field.length);
        for (int32_t i = 0; i < field.length; ++i)
            numbers[i] = static_cast<double>(static_cast<const T*>(field.data)[i]);
    };
    if (field.length < 0 || (field.length > 0 && !field.data))
        refuse("field %s: length %d without data", field.name, field.length);
    if (integers && field.type == Type::kINT32) take(int32_t{});
    else if (integers && field.type == Type::kINT64) take(int64_t{});
    else if (!integers && field.type == Type::kFLOAT32) take(float{});
    else if (!integers && field.type == Type::kFLOAT64) take(double{});
    else
        refuse("field %s: type %d, expected %s", field.name, static_cast<int>(field.type),
               integers ? "kINT32 (5) or kINT64 (10)" : "kFLOAT32 (1) or kFLOAT64 (2)");
    return numbers;
}

double only_number(const abi::PluginField& field, bool integer) {
    const std::vector<double> numbers = numbers_of(field, integer);
    if (numbers.size() != 1) refuse("field %s: %zu values, expected one", field.name, numbers.size());
    return numbers[0];
}

void check_range(const FieldSpec& spec, double number) {
    // Written so that NaN fails.
    if (!(number >= spec.lowest && number <= spec.highest))
        refuse("field %s: %g, expected %g to %g", spec.name, number, spec.lowest, spec.highest);
}

std::string names_of(const std::vector<FieldSpec>& specs) {
    std::string names = kVersionName;
    for (const FieldSpec& spec : specs) names += std::string(", ") + spec.name;
    return names;
}

}  // namespace

Fields::Fields(const std::vector<FieldSpec>& specs, const abi::PluginFieldCollection* given, abi::TensorRTPhase phase) {
    const int32_t count = given ? given->nbFields : 0;
    std::vector<const abi::PluginField*> found(specs.size(), nullptr);
    const abi::PluginField* version = nullptr;
    for (int32_t i = 0; i < count; ++i) {
        const abi::PluginField& field = given->fields[i];
        if (!field.name) refuse("a field has no name");
        const auto spec = std::find_if(specs.begin(), specs.end(),
                                       [&](const FieldSpec& known) { return strcmp(known.name, field.name) == 0; });
        const bool is_version = strcmp(field.name, kVersionName) == 0;
        if (!is_version && spec == specs.end())
            refuse("unknown field %s, known are %s", field.name, names_of(specs).c_str());
        const abi::PluginField*& place = is_version ? version : found[spec - specs.begin()];
        if (place) refuse("field %s is given twice", field.name);
        place = &field;
    }
    if (version) {
        const double number = only_number(*version, true);
        if (number != kFieldsVersion)
            refuse("the fields have version %g, this library reads version %d: build the engine again with it", number,
                   kFieldsVersion);
    } else if (phase == abi::TensorRTPhase::kRUNTIME) {
        refuse("the engine holds no field version: it was not written by this plugin");
    }
    for (size_t i = 0; i < specs.size(); ++i) {
        const FieldSpec& spec = specs[i];
        const abi::PluginField* field = found[i];
        Value value{spec.name, spec.type, 0, {}};
        if (spec.type == FieldType::kReals) {
            if (field)
                for (const double number : numbers_of(*field, false)) {
                    check_range(spec, number);
                    value.reals.push_back(static_cast<float>(number));
                }
        } else {
            if (!field && std::isnan(spec.fallback)) refuse("field %s is missing", spec.name);
            const double number = field ? only_number(*field, spec.type == FieldType::kInteger) : spec.fallback;
            check_range(spec, number);
            if (spec.type == FieldType::kInteger) value.integer = static_cast<int32_t>(number);
            else value.reals.push_back(static_cast<float>(number));
        }
        values_.push_back(std::move(value));
    }
}

const Fields::Value& Fields::value_of(const char* name) const {
    const auto found =
        std::find_if(values_.begin(), values_.end(), [&](const Value& value) { return strcmp(value.name, name) == 0; });
    if (found == values_.end()) refuse("no field %s is specified", name);
    return *found;
}

std::vector<abi::PluginField> Fields::serialised() const {
    std::vector<abi::PluginField> fields;
    fields.push_back({kVersionName, &version_, abi::PluginFieldType::kINT32, 1});
    for (const Value& value : values_) {
        if (value.type == FieldType::kInteger)
            fields.push_back({value.name, &value.integer, abi::PluginFieldType::kINT32, 1});
        else if (!value.reals.empty())
            fields.push_back({value.name, value.reals.data(), abi::PluginFieldType::kFLOAT32,
                              static_cast<int32_t>(value.reals.size())});
    }
    return fields;
}

std::string Fields::text() const {
    std::string text = std::string(kVersionName) + "=" + std::to_string(version_);
    for (const Value& value : values_) {
        text += std::string(",") + value.name + "=";
        if (value.type == FieldType::kInteger) text += std::to_string(value.integer);
        for (size_t i = 0; i < value.reals.size(); ++i) {
            char number[32];
            snprintf(number, sizeof(number), "%s%.9g", i ? " " : "", value.reals[i]);
            text += number;
        }
    }
    return text;
}

}  // namespace dflash::trt
