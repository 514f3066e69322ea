#include "signature.h"

#include <algorithm>

#include "logging.h"

namespace dflash::trt {
namespace {

using Type = abi::DataType;

std::string names_of(const std::vector<Type>& types) {
    std::string names;
    for (const Type type : types) names += (names.empty() ? "" : " or ") + std::string(name_of(type));
    return names;
}

}  // namespace

const char* name_of(Type type) {
    switch (type) {
        case Type::kFLOAT:
            return "float32";
        case Type::kHALF:
            return "float16";
        case Type::kBF16:
            return "bfloat16";
        case Type::kFP8:
            return "float8_e4m3";
        case Type::kINT32:
            return "int32";
        case Type::kINT64:
            return "int64";
        case Type::kINT8:
            return "int8";
        case Type::kBOOL:
            return "bool";
        default:
            return "another type";
    }
}

std::string text_of(const abi::Dims& dims) {
    std::string text = "[";
    for (int i = 0; i < dims.nbDims; ++i) text += (i ? ", " : "") + std::to_string(dims.d[i]);
    return text + "]";
}

int Signature::input(std::string name, Element element, std::vector<Extent> shape) {
    inputs_.push_back({std::move(name), element, std::move(shape), -1});
    return inputs() - 1;
}

int Signature::output(std::string name, Element element, std::vector<Extent> shape, int alias) {
    outputs_.push_back({std::move(name), element, std::move(shape), alias});
    return outputs() - 1;
}

int Signature::alias_of(int output) const { return output >= 0 && output < outputs() ? outputs_[output].alias : -1; }

const Port& Signature::port(int position) const {
    return position < inputs() ? inputs_[position] : outputs_[position - inputs()];
}

void Signature::check_counts(int inputs, int outputs) const {
    if (inputs == this->inputs() && outputs == this->outputs()) return;
    std::string expected;
    for (const Port& port : inputs_) expected += (expected.empty() ? "" : ", ") + port.name;
    refuse("%d inputs and %d outputs, these fields mean %d and %d; inputs: %s", inputs, outputs, this->inputs(),
           this->outputs(), expected.c_str());
}

void Signature::check_type(const Port& port, Type type, const Type* first_of_kind, const Type* compute) const {
    std::vector<Type> allowed;
    switch (port.element) {
        case Element::kCompute:
            allowed = compute_types_;
            break;
        case Element::kCache:
            allowed = {Type::kFP8};
            if (compute) allowed.insert(allowed.begin(), *compute);
            break;
        case Element::kIndex:
            allowed = {Type::kINT32, Type::kINT64};
            break;
        case Element::kFloat32:
            allowed = {Type::kFLOAT};
            break;
        case Element::kInt64:
            allowed = {Type::kINT64};
            break;
    }
    if (first_of_kind) allowed = {*first_of_kind};
    if (std::find(allowed.begin(), allowed.end(), type) == allowed.end())
        refuse("%s is %s, expected %s", port.name.c_str(), name_of(type), names_of(allowed).c_str());
}

std::vector<Type> Signature::output_types(const Type* in) const {
    const auto first = [&](Element element, int before) -> const Type* {
        for (int i = 0; i < before; ++i)
            if (inputs_[i].element == element) return in + i;
        return nullptr;
    };
    for (int i = 0; i < inputs(); ++i)
        check_type(inputs_[i], in[i], first(inputs_[i].element, i), first(Element::kCompute, i));
    std::vector<Type> types;
    for (const Port& output : outputs_) {
        const Type* same = first(output.element, inputs());
        types.push_back(same ? *same : output.element == Element::kInt64 ? Type::kINT64 : Type::kFLOAT);
    }
    return types;
}

void Signature::check_format(int position, const abi::DynamicPluginTensorDesc* all) const {
    const auto first = [&](Element element) -> const Type* {
        for (int i = 0; i < position; ++i)
            if (port(i).element == element) return &all[i].desc.type;
        return nullptr;
    };
    const Port& asked = port(position);
    if (all[position].desc.format != abi::TensorFormat::kLINEAR)
        refuse("%s has format %d, expected kLINEAR", asked.name.c_str(), static_cast<int>(all[position].desc.format));
    check_type(asked, all[position].desc.type, first(asked.element), first(Element::kCompute));
}

void Signature::collect(int input, const abi::Dims& dims, Sizes& sizes) const {
    const Port& port = inputs_[input];
    if (dims.nbDims != static_cast<int>(port.shape.size()))
        refuse("%s has shape %s, expected %zu dimensions", port.name.c_str(), text_of(dims).c_str(), port.shape.size());
    for (int i = 0; i < dims.nbDims; ++i) {
        const Extent& extent = port.shape[i];
        if (extent.symbol && extent.times == 1 && extent.plus == 0 && dims.d[i] >= 0 && sizes[extent.symbol] < 0)
            sizes.at(extent.symbol) = dims.d[i];
    }
}

void Signature::compare(const Port& port, const abi::Dims& dims, const Sizes& sizes) const {
    if (dims.nbDims != static_cast<int>(port.shape.size()))
        refuse("%s has shape %s, expected %zu dimensions", port.name.c_str(), text_of(dims).c_str(), port.shape.size());
    for (int i = 0; i < dims.nbDims; ++i) {
        const Extent& extent = port.shape[i];
        if (dims.d[i] < 0 || (extent.symbol && sizes[extent.symbol] < 0)) continue;
        const int64_t expected = extent.plus + (extent.symbol ? extent.times * sizes[extent.symbol] : 0);
        if (dims.d[i] != expected)
            refuse("%s has shape %s, expected %lld in dimension %d", port.name.c_str(), text_of(dims).c_str(),
                   static_cast<long long>(expected), i);
    }
}

void Signature::check_output(int index, const abi::Dims& dims, const Sizes& sizes) const {
    compare(outputs_[index], dims, sizes);
}

const abi::IDimensionExpr* Signature::expression(const Extent& extent, const abi::DimsExprs* in,
                                                 abi::IExprBuilder& builder) const {
    if (!extent.symbol) return builder.constant(extent.plus);
    for (int i = 0; i < inputs(); ++i)
        for (size_t j = 0; j < inputs_[i].shape.size(); ++j) {
            const Extent& source = inputs_[i].shape[j];
            if (source.symbol != extent.symbol || source.times != 1 || source.plus != 0) continue;
            const abi::IDimensionExpr* size = in[i].d[j];
            if (extent.times != 1)
                size = builder.operation(abi::DimensionOperation::kPROD, *size, *builder.constant(extent.times));
            if (extent.plus != 0)
                size = builder.operation(abi::DimensionOperation::kSUM, *size, *builder.constant(extent.plus));
            return size;
        }
    refuse("no input tells the size %c", extent.symbol);
}

void Signature::output_shapes(const abi::DimsExprs* in, abi::DimsExprs* out, abi::IExprBuilder& builder) const {
    for (int i = 0; i < inputs(); ++i)
        if (in[i].nbDims != static_cast<int>(inputs_[i].shape.size()))
            refuse("%s has %d dimensions, expected %zu", inputs_[i].name.c_str(), in[i].nbDims,
                   inputs_[i].shape.size());
    for (int o = 0; o < outputs(); ++o) {
        out[o].nbDims = static_cast<int32_t>(outputs_[o].shape.size());
        for (size_t j = 0; j < outputs_[o].shape.size(); ++j)
            out[o].d[j] = expression(outputs_[o].shape[j], in, builder);
    }
}

}  // namespace dflash::trt
