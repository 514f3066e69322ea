// Holds both forms of abi.h to one layout: sizes and offsets of what crosses the boundary, vtable slots of every
// method.
#include <cstring>
#include <type_traits>

#include "abi.h"

namespace dflash {

#if defined(__GNUC__) && !defined(__clang__)
[[gnu::error("a vtable slot differs from TensorRT 11")]] void vtable_slot_differs();
#endif

namespace {

using namespace abi;

static_assert(sizeof(Dims) == 72 && offsetof(Dims, d) == 8);
static_assert(sizeof(PluginTensorDesc) == 88 && offsetof(PluginTensorDesc, type) == 72);
static_assert(offsetof(PluginTensorDesc, format) == 76 && offsetof(PluginTensorDesc, scale) == 80);
static_assert(sizeof(DynamicPluginTensorDesc) == 304 && offsetof(DynamicPluginTensorDesc, min) == 88);
static_assert(offsetof(DynamicPluginTensorDesc, max) == 160 && offsetof(DynamicPluginTensorDesc, opt) == 232);
static_assert(sizeof(PluginField) == 24 && offsetof(PluginField, data) == 8);
static_assert(offsetof(PluginField, type) == 16 && offsetof(PluginField, length) == 20);
static_assert(sizeof(PluginFieldCollection) == 16 && offsetof(PluginFieldCollection, fields) == 8);
static_assert(sizeof(InterfaceInfo) == 16 && offsetof(InterfaceInfo, major) == 8);
static_assert(offsetof(InterfaceInfo, minor) == 12 && std::is_trivially_copyable_v<InterfaceInfo>);
static_assert(sizeof(DimsExprs) == 72 && offsetof(DimsExprs, d) == 8);
static_assert(sizeof(IDimensionExpr) == 16 && sizeof(IExprBuilder) == 16);
static_assert(sizeof(IPluginV3) == 8 && sizeof(IPluginV3OneCore) == 8 && sizeof(IPluginV3OneBuildV2) == 8);
static_assert(sizeof(IPluginV3OneRuntime) == 8 && sizeof(IPluginCreatorV3One) == 8);

static_assert(int(DataType::kFLOAT) == 0 && int(DataType::kHALF) == 1 && int(DataType::kINT32) == 3);
static_assert(int(DataType::kFP8) == 6 && int(DataType::kBF16) == 7 && int(DataType::kINT64) == 8);
static_assert(int(PluginFieldType::kFLOAT32) == 1 && int(PluginFieldType::kFLOAT64) == 2);
static_assert(int(PluginFieldType::kINT32) == 5 && int(PluginFieldType::kINT64) == 10);
static_assert(int(TensorFormat::kLINEAR) == 0 && int(TensorRTPhase::kRUNTIME) == 1);
static_assert(int(PluginCapabilityType::kBUILD) == 1 && int(PluginCapabilityType::kRUNTIME) == 2);
static_assert(int(DimensionOperation::kSUM) == 0 && int(DimensionOperation::kPROD) == 1);
static_assert(int(ILogger::Severity::kERROR) == 1 && int(ILogger::Severity::kVERBOSE) == 4);

#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
// A pointer to a virtual method holds 1 + its byte offset in the vtable (Itanium C++ ABI), but the language does not
// let a static_assert read it. The optimizer does: a slot in its place leaves no call, any other slot stops the
// compilation.
template <typename Method>
inline __attribute__((always_inline)) void expect_slot(Method method, long slot) {
    long words[2];
    static_assert(sizeof(method) == sizeof(words));
    memcpy(words, &method, sizeof(words));
    if (words[0] != 1 + slot * 8 || words[1] != 0) vtable_slot_differs();
}

[[gnu::used]] void expect_all_slots() {
    expect_slot(&IVersionedInterface::getAPILanguage, 0);
    expect_slot(&IVersionedInterface::getInterfaceInfo, 1);
    expect_slot(&ILogger::log, 4);
    expect_slot(&ILoggerFinder::findLogger, 4);
    expect_slot(&apiv::VDimensionExpr::isConstant, 2);
    expect_slot(&apiv::VDimensionExpr::getConstantValue, 3);
    expect_slot(&apiv::VExprBuilder::constant, 2);
    expect_slot(&apiv::VExprBuilder::operation, 3);
    expect_slot(&apiv::VExprBuilder::declareSizeTensor, 4);
    expect_slot(&IPluginV3::getCapabilityInterface, 4);
    expect_slot(&IPluginV3::clone, 5);
    expect_slot(&IPluginV3OneCore::getPluginName, 4);
    expect_slot(&IPluginV3OneCore::getPluginVersion, 5);
    expect_slot(&IPluginV3OneCore::getPluginNamespace, 6);
    expect_slot(&IPluginV3OneBuildV2::configurePlugin, 4);
    expect_slot(&IPluginV3OneBuildV2::getOutputDataTypes, 5);
    expect_slot(&IPluginV3OneBuildV2::getOutputShapes, 6);
    expect_slot(&IPluginV3OneBuildV2::supportsFormatCombination, 7);
    expect_slot(&IPluginV3OneBuildV2::getNbOutputs, 8);
    expect_slot(&IPluginV3OneBuildV2::getWorkspaceSize, 9);
    expect_slot(&IPluginV3OneBuildV2::getValidTactics, 10);
    expect_slot(&IPluginV3OneBuildV2::getNbTactics, 11);
    expect_slot(&IPluginV3OneBuildV2::getTimingCacheID, 12);
    expect_slot(&IPluginV3OneBuildV2::getFormatCombinationLimit, 13);
    expect_slot(&IPluginV3OneBuildV2::getMetadataString, 14);
    expect_slot(&IPluginV3OneBuildV2::getAliasedInput, 15);
    expect_slot(&IPluginV3OneRuntime::setTactic, 4);
    expect_slot(&IPluginV3OneRuntime::onShapeChange, 5);
    expect_slot(&IPluginV3OneRuntime::enqueue, 6);
    expect_slot(&IPluginV3OneRuntime::attachToContext, 7);
    expect_slot(&IPluginV3OneRuntime::getFieldsToSerialize, 8);
    expect_slot(&IPluginCreatorV3One::createPlugin, 4);
    expect_slot(&IPluginCreatorV3One::getFieldNames, 5);
    expect_slot(&IPluginCreatorV3One::getPluginName, 6);
    expect_slot(&IPluginCreatorV3One::getPluginVersion, 7);
    expect_slot(&IPluginCreatorV3One::getPluginNamespace, 8);
}
#endif

}  // namespace
}  // namespace dflash
