// What all five plugins share: the TensorRT interfaces, answered from Fields and a Signature. A plugin adds its table,
// its limits and its launch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "dflash_kernels.h"
#include "fields.h"
#include "signature.h"

namespace dflash::trt {

constexpr const char* kPluginVersion = "1";
constexpr const char* kPluginNamespace = "";

// One enqueue: shapes, addresses and stream. Tensors are contiguous, dimensions agree with the plugin's Signature.
struct Call {
    const abi::PluginTensorDesc* in;
    const abi::PluginTensorDesc* out;
    const void* const* inputs;
    void* const* outputs;
    char* workspace;
    dflash_stream stream;
    Sizes sizes;

    const void* input(int index) const { return index < 0 ? nullptr : inputs[index]; }
    template <typename T>
    const T* input_as(int index) const {
        return static_cast<const T*>(input(index));
    }
    int32_t index_bytes(int index) const { return in[index].type == abi::DataType::kINT64 ? 8 : 4; }
    // A size that the C API takes as int32; throws Refusal when it does not fit.
    int32_t size(char symbol) const;
};

// bfloat16, float16, float32 or float8 as the C API numbers them.
int32_t kernel_dtype(abi::DataType type);

// IPluginV3 and its three capabilities in one object. getInterfaceInfo is never overridden here: each capability must
// keep reporting its own kind, which is how TensorRT knows them apart.
class Plugin : public abi::IPluginV3,
               public abi::IPluginV3OneCore,
               public abi::IPluginV3OneBuildV2,
               public abi::IPluginV3OneRuntime {
public:
    abi::IPluginCapability* getCapabilityInterface(abi::PluginCapabilityType type) noexcept final;
    abi::IPluginV3* clone() noexcept final;

    char const* getPluginName() const noexcept final { return name_; }
    char const* getPluginVersion() const noexcept final { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept final { return kPluginNamespace; }

    int32_t configurePlugin(abi::DynamicPluginTensorDesc const* in, int32_t inputs,
                            abi::DynamicPluginTensorDesc const* out, int32_t outputs) noexcept final;
    int32_t getOutputDataTypes(abi::DataType* out, int32_t outputs, abi::DataType const* in,
                               int32_t inputs) const noexcept final;
    int32_t getOutputShapes(abi::DimsExprs const* in, int32_t inputs, abi::DimsExprs const* shape_values,
                            int32_t shape_inputs, abi::DimsExprs* out, int32_t outputs,
                            abi::IExprBuilder& builder) noexcept final;
    bool supportsFormatCombination(int32_t position, abi::DynamicPluginTensorDesc const* all, int32_t inputs,
                                   int32_t outputs) noexcept final;
    int32_t getNbOutputs() const noexcept final { return signature_.outputs(); }
    size_t getWorkspaceSize(abi::DynamicPluginTensorDesc const* in, int32_t inputs,
                            abi::DynamicPluginTensorDesc const* out, int32_t outputs) const noexcept final;
    char const* getTimingCacheID() noexcept final { return text_.c_str(); }
    char const* getMetadataString() noexcept final { return text_.c_str(); }
    int32_t getAliasedInput(int32_t output) noexcept final { return signature_.alias_of(output); }

    int32_t onShapeChange(abi::PluginTensorDesc const* in, int32_t inputs, abi::PluginTensorDesc const* out,
                          int32_t outputs) noexcept final;
    int32_t enqueue(abi::PluginTensorDesc const* in, abi::PluginTensorDesc const* out, void const* const* input_data,
                    void* const* output_data, void* workspace, cudaStream_t stream) noexcept final;
    abi::IPluginV3* attachToContext(abi::IPluginResourceContext*) noexcept final { return clone(); }
    abi::PluginFieldCollection const* getFieldsToSerialize() noexcept final;

protected:
    Plugin(const char* name, Fields fields, Signature signature);

    // Throws Refusal for sizes that the kernels do not take; -1 is a size that is not known yet.
    virtual void check_sizes(const Sizes&) const {}
    // Bytes of workspace for inputs of these types and these or smaller sizes.
    virtual size_t workspace_bytes(const abi::DynamicPluginTensorDesc*, const Sizes&) const { return 0; }
    // Enqueues on call.stream and returns the dflash_status; dflash_last_error() holds the reason of a failure.
    virtual int32_t launch(const Call& call) const = 0;
    virtual std::unique_ptr<Plugin> copy() const = 0;

    // Throws Refusal where output `output` is not at the address of the input that it aliases.
    void require_in_place(const Call& call, int output) const;

    const Fields& fields() const { return fields_; }
    Signature& signature() { return signature_; }

private:
    template <typename Body>
    int32_t guarded(const char* where, Body&& body) const noexcept;

    const char* name_;
    Fields fields_;
    Signature signature_;
    std::string text_;
    std::vector<abi::PluginField> serialised_;
    abi::PluginFieldCollection collection_{};
};

// What the registry knows of a plugin.
struct PluginKind {
    const char* name;
    std::vector<FieldSpec> fields;
    std::unique_ptr<Plugin> (*make)(Fields fields);
};

const PluginKind& paged_attention_kind();
const PluginKind& kv_injection_kind();
const PluginKind& grouped_conv_kind();
const PluginKind& candidates_kind();
const PluginKind& selector_walk_kind();

}  // namespace dflash::trt
