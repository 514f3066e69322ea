// The part of TensorRT's plugin interface that the wrappers implement or call, so that they compile without TensorRT.
//
// With DFLASH_TENSORRT_HEADERS (a build with --tensorrt-root) the real headers take this file's place; everything else
// in this folder says `abi::` and compiles against either. TensorRT finds methods by vtable slot and interfaces by the
// kind string of getInterfaceInfo, never by C++ type, so a library built against this file works in TensorRT 11 and in
// TensorRT-RTX 1.7. abi_layout.cpp fails to compile when sizes, offsets or slots differ from theirs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#ifdef DFLASH_TENSORRT_HEADERS

#include <NvInferRuntime.h>

// TensorRT 10 has another ILogger, and later major versions may change more.
static_assert(NV_TENSORRT_MAJOR == 11, "the wrappers are written for the plugin interface of TensorRT 11");

namespace dflash {
namespace abi = nvinfer1;
}

#else

namespace dflash::abi {

enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64 };
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class PluginFieldType : int32_t { kFLOAT32 = 1, kFLOAT64 = 2, kINT32 = 5, kUNKNOWN = 8, kINT64 = 10 };
enum class DimensionOperation : int32_t { kSUM = 0, kPROD = 1 };
enum class APILanguage : int32_t { kCPP = 0 };

struct Dims {
    static constexpr int32_t MAX_DIMS = 8;
    int32_t nbDims;
    int64_t d[MAX_DIMS];
};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min, max, opt;
};

struct PluginField {
    char const* name;
    void const* data;
    PluginFieldType type;
    int32_t length;
};

struct PluginFieldCollection {
    int32_t nbFields;
    PluginField const* fields;
};

struct InterfaceInfo {
    char const* kind;
    int32_t major, minor;
};

class IVersionedInterface {
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

class ILogger : public IVersionedInterface {
public:
    enum class Severity : int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
    virtual void log(Severity severity, char const* message) noexcept = 0;
};

class ILoggerFinder : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
    virtual ILogger* findLogger() = 0;
};

// Dimension expressions live in TensorRT: an object is its own vtable pointer and a pointer to an implementation, and
// every call goes through the implementation's vtable.
class IDimensionExpr;

namespace apiv {

class VRoot {
public:
    virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot {
public:
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot {
public:
    virtual IDimensionExpr const* constant(int64_t value) = 0;
    virtual IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                            IDimensionExpr const& second) = 0;
    virtual IDimensionExpr const* declareSizeTensor(int32_t output, IDimensionExpr const& opt,
                                                    IDimensionExpr const& upper) = 0;
};

}  // namespace apiv

class IDimensionExpr {
public:
    bool isConstant() const noexcept { return mImpl->isConstant(); }
    int64_t getConstantValue() const noexcept { return mImpl->getConstantValue(); }

protected:
    virtual ~IDimensionExpr() noexcept = default;
    apiv::VDimensionExpr* mImpl;
};

class IExprBuilder {
public:
    IDimensionExpr const* constant(int64_t value) noexcept { return mImpl->constant(value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                    IDimensionExpr const& second) noexcept {
        return mImpl->operation(op, first, second);
    }

protected:
    virtual ~IExprBuilder() noexcept = default;
    apiv::VExprBuilder* mImpl;
};

struct DimsExprs {
    int32_t nbDims;
    IDimensionExpr const* d[Dims::MAX_DIMS];
};

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};
class IPluginResourceContext;

class IPluginV3 : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuildV2 : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs,
                                    DynamicPluginTensorDesc const* out, int32_t outputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(DataType* out, int32_t outputs, DataType const* in,
                                       int32_t inputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* in, int32_t inputs, DimsExprs const* shape_values,
                                    int32_t shape_inputs, DimsExprs* out, int32_t outputs,
                                    IExprBuilder& builder) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* all, int32_t inputs,
                                           int32_t outputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                    int32_t) const noexcept {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const* getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const* getMetadataString() noexcept { return nullptr; }
    virtual int32_t getAliasedInput(int32_t) noexcept { return -1; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const* out,
                                  int32_t outputs) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* input_data,
                            void* const* output_data, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fields,
                                    TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

}  // namespace dflash::abi

#endif
