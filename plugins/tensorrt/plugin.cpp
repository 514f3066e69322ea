#include "plugin.h"

#include <exception>

#include "launch.h"
#include "logging.h"

namespace dflash::trt {
namespace {

constexpr int32_t kRefused = 1;

}  // namespace

int32_t Call::size(char symbol) const {
    const int64_t size = sizes[symbol];
    if (size < 0 || size > std::numeric_limits<int32_t>::max())
        refuse("size %c is %lld, expected 0 to 2^31 - 1", symbol, static_cast<long long>(size));
    return static_cast<int32_t>(size);
}

int32_t kernel_dtype(abi::DataType type) {
    switch (type) {
        case abi::DataType::kBF16:
            return DFLASH_BFLOAT16;
        case abi::DataType::kHALF:
            return DFLASH_FLOAT16;
        case abi::DataType::kFLOAT:
            return DFLASH_FLOAT32;
        case abi::DataType::kFP8:
            return DFLASH_FLOAT8_E4M3;
        default:
            refuse("%s is no type of the kernels", name_of(type));
    }
}

Plugin::Plugin(const char* name, Fields fields, Signature signature)
    : name_(name), fields_(std::move(fields)), signature_(std::move(signature)), text_(fields_.text()) {}

// TensorRT's methods are noexcept: whatever happens inside becomes a logged line and a non-zero result.
template <typename Body>
int32_t Plugin::guarded(const char* where, Body&& body) const noexcept {
    try {
        body();
        return 0;
    } catch (const std::exception& error) {
        log_error(std::string(name_) + ": " + where + ": " + error.what());
        return kRefused;
    }
}

abi::IPluginCapability* Plugin::getCapabilityInterface(abi::PluginCapabilityType type) noexcept {
    switch (type) {
        case abi::PluginCapabilityType::kCORE:
            return static_cast<abi::IPluginV3OneCore*>(this);
        case abi::PluginCapabilityType::kBUILD:
            return static_cast<abi::IPluginV3OneBuildV2*>(this);
        case abi::PluginCapabilityType::kRUNTIME:
            return static_cast<abi::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

abi::IPluginV3* Plugin::clone() noexcept {
    abi::IPluginV3* made = nullptr;
    guarded("clone", [&] { made = copy().release(); });
    return made;
}

int32_t Plugin::configurePlugin(abi::DynamicPluginTensorDesc const* in, int32_t inputs,
                                abi::DynamicPluginTensorDesc const*, int32_t outputs) noexcept {
    return guarded("configure", [&] {
        signature_.check_counts(inputs, outputs);
        std::vector<abi::DataType> types;
        for (int i = 0; i < inputs; ++i) types.push_back(in[i].desc.type);
        signature_.output_types(types.data());
        check_sizes(signature_.sizes([&](int i) -> const abi::Dims& { return in[i].desc.dims; }));
        check_sizes(signature_.sizes([&](int i) -> const abi::Dims& { return in[i].max; }));
    });
}

int32_t Plugin::getOutputDataTypes(abi::DataType* out, int32_t outputs, abi::DataType const* in,
                                   int32_t inputs) const noexcept {
    return guarded("output types", [&] {
        signature_.check_counts(inputs, outputs);
        const std::vector<abi::DataType> types = signature_.output_types(in);
        for (int i = 0; i < outputs; ++i) out[i] = types[i];
    });
}

int32_t Plugin::getOutputShapes(abi::DimsExprs const* in, int32_t inputs, abi::DimsExprs const*, int32_t,
                                abi::DimsExprs* out, int32_t outputs, abi::IExprBuilder& builder) noexcept {
    return guarded("output shapes", [&] {
        signature_.check_counts(inputs, outputs);
        signature_.output_shapes(in, out, builder);
    });
}

bool Plugin::supportsFormatCombination(int32_t position, abi::DynamicPluginTensorDesc const* all, int32_t inputs,
                                       int32_t outputs) noexcept {
    try {
        signature_.check_counts(inputs, outputs);
        if (position < 0 || position >= inputs + outputs) refuse("tensor %d of %d", position, inputs + outputs);
        signature_.check_format(position, all);
        return true;
    } catch (const std::exception& error) {
        log_verbose(std::string(name_) + ": format refused: " + error.what());
        return false;
    }
}

size_t Plugin::getWorkspaceSize(abi::DynamicPluginTensorDesc const* in, int32_t, abi::DynamicPluginTensorDesc const*,
                                int32_t) const noexcept {
    size_t bytes = 0;
    guarded("workspace size", [&] {
        bytes = workspace_bytes(in, signature_.sizes([&](int i) -> const abi::Dims& { return in[i].max; }));
    });
    return bytes;
}

int32_t Plugin::onShapeChange(abi::PluginTensorDesc const* in, int32_t inputs, abi::PluginTensorDesc const* out,
                              int32_t outputs) noexcept {
    return guarded("shapes", [&] {
        signature_.check_counts(inputs, outputs);
        const Sizes sizes = signature_.sizes([&](int i) -> const abi::Dims& { return in[i].dims; });
        for (int i = 0; i < outputs; ++i) signature_.check_output(i, out[i].dims, sizes);
        check_sizes(sizes);
    });
}

int32_t Plugin::enqueue(abi::PluginTensorDesc const* in, abi::PluginTensorDesc const* out,
                        void const* const* input_data, void* const* output_data, void* workspace,
                        cudaStream_t stream) noexcept {
    return guarded("enqueue", [&] {
        const Call call{in,
                        out,
                        input_data,
                        output_data,
                        static_cast<char*>(workspace),
                        stream,
                        signature_.sizes([&](int i) -> const abi::Dims& { return in[i].dims; })};
        if (launch(call) != DFLASH_OK) throw Refusal(dflash_last_error());
    });
}

abi::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept {
    if (guarded("serialise", [&] { serialised_ = fields_.serialised(); }) != 0) return nullptr;
    collection_.nbFields = static_cast<int32_t>(serialised_.size());
    collection_.fields = serialised_.data();
    return &collection_;
}

void Plugin::require_in_place(const Call& call, int output) const {
    if (call.outputs[output] != call.inputs[signature_.alias_of(output)])
        refuse(
            "cache output %d is not at its input's address: the engine must be built with "
            "PreviewFeature::kALIASED_PLUGIN_IO_10_03 and both bound to the same memory",
            output);
}

}  // namespace dflash::trt
