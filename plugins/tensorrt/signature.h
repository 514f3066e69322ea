// The inputs and outputs of one plugin: their element types and shapes as a small table, from which everything that
// TensorRT asks about types and shapes is answered.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "abi.h"

namespace dflash::trt {

// One dimension: `plus` where symbol is 0, else size_of(symbol) * times + plus.
struct Extent {
    char symbol;
    int64_t times, plus;
};

constexpr Extent fixed(int64_t size) { return {0, 0, size}; }
constexpr Extent size_of(char symbol, int64_t times = 1, int64_t plus = 0) { return {symbol, times, plus}; }

// What elements a tensor has. Tensors of one plugin that share a kind have the same type.
enum class Element {
    kCompute,  // one of Signature's compute types
    kCache,    // like kCompute, or float8 e4m3
    kIndex,    // int32 or int64
    kFloat32,
    kInt64,
};

struct Port {
    std::string name;
    Element element;
    std::vector<Extent> shape;
    int alias;  // outputs: the input that they are written in place of, or -1
};

// Sizes by symbol, -1 where a shape has not said yet.
class Sizes {
public:
    Sizes() { sizes_.fill(-1); }
    int64_t operator[](char symbol) const { return sizes_[static_cast<unsigned char>(symbol) % 128]; }
    int64_t& at(char symbol) { return sizes_[static_cast<unsigned char>(symbol) % 128]; }

private:
    std::array<int64_t, 128> sizes_;
};

class Signature {
public:
    explicit Signature(std::vector<abi::DataType> compute_types) : compute_types_(std::move(compute_types)) {}

    // Add a tensor and return its index. Where several inputs have a kind, the first one decides the type.
    int input(std::string name, Element element, std::vector<Extent> shape);
    int output(std::string name, Element element, std::vector<Extent> shape, int alias = -1);

    int inputs() const { return static_cast<int>(inputs_.size()); }
    int outputs() const { return static_cast<int>(outputs_.size()); }
    int alias_of(int output) const;

    // Throws Refusal unless there are as many tensors as expected.
    void check_counts(int inputs, int outputs) const;

    // Types of the outputs for these input types. Throws Refusal for a type that is not supported.
    std::vector<abi::DataType> output_types(const abi::DataType* in) const;

    // Whether tensor `position` (inputs, then outputs) may have its type and format, given the tensors before it.
    // Throws Refusal with the reason where it may not.
    void check_format(int position, const abi::DynamicPluginTensorDesc* all) const;

    // Sizes of all symbols. `dims(i)` are the dimensions of input i; negative ones are not known yet and agree with
    // everything. Throws Refusal where ranks or sizes contradict the table or each other.
    template <typename DimsOf>
    Sizes sizes(DimsOf&& dims) const {
        Sizes sizes;
        for (int i = 0; i < inputs(); ++i) collect(i, dims(i), sizes);
        for (int i = 0; i < inputs(); ++i) compare(inputs_[i], dims(i), sizes);
        return sizes;
    }

    // Throws Refusal where an output's dimensions are not those of the table.
    void check_output(int index, const abi::Dims& dims, const Sizes& sizes) const;

    void output_shapes(const abi::DimsExprs* in, abi::DimsExprs* out, abi::IExprBuilder& builder) const;

private:
    const Port& port(int position) const;
    void check_type(const Port& port, abi::DataType type, const abi::DataType* first_of_kind,
                    const abi::DataType* compute) const;
    void collect(int input, const abi::Dims& dims, Sizes& sizes) const;
    void compare(const Port& port, const abi::Dims& dims, const Sizes& sizes) const;
    const abi::IDimensionExpr* expression(const Extent& extent, const abi::DimsExprs* in,
                                          abi::IExprBuilder& builder) const;

    std::vector<abi::DataType> compute_types_;
    std::vector<Port> inputs_, outputs_;
};

const char* name_of(abi::DataType type);
std::string text_of(const abi::Dims& dims);

}  // namespace dflash::trt
