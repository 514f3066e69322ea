// The two symbols by which TensorRT finds the plugins of a library.
#include <exception>
#include <iterator>

#include "launch.h"
#include "logging.h"
#include "plugin.h"

namespace dflash::trt {
namespace {

class Creator : public abi::IPluginCreatorV3One {
public:
    explicit Creator(const PluginKind& kind) : kind_(kind), registration_("plugin", kind.name) {
        names_.push_back({"version", nullptr, abi::PluginFieldType::kINT32, 1});
        for (const FieldSpec& field : kind.fields)
            names_.push_back(
                {field.name, nullptr,
                 field.type == FieldType::kInteger ? abi::PluginFieldType::kINT32 : abi::PluginFieldType::kFLOAT32,
                 field.type == FieldType::kReals ? 0 : 1});
        collection_.nbFields = static_cast<int32_t>(names_.size());
        collection_.fields = names_.data();
    }

    abi::IPluginV3* createPlugin(char const* layer, abi::PluginFieldCollection const* fields,
                                 abi::TensorRTPhase phase) noexcept override {
        try {
            return kind_.make(Fields(kind_.fields, fields, phase)).release();
        } catch (const std::exception& error) {
            const std::string where = layer && *layer ? std::string(" (layer ") + layer + ")" : std::string();
            log_error(std::string(kind_.name) + where + ": " + error.what());
            return nullptr;
        }
    }
    abi::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
    char const* getPluginName() const noexcept override { return kind_.name; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

private:
    const PluginKind& kind_;
    // Names the plugin in dflash_library_info().
    Registration registration_;
    std::vector<abi::PluginField> names_;
    abi::PluginFieldCollection collection_{};
};

Creator paged_attention(paged_attention_kind());
Creator kv_injection(kv_injection_kind());
Creator grouped_conv(grouped_conv_kind());
Creator candidates(candidates_kind());
Creator selector_walk(selector_walk_kind());
abi::IPluginCreatorInterface* const creators[] = {&paged_attention, &kv_injection, &grouped_conv, &candidates,
                                                  &selector_walk};

}  // namespace
}  // namespace dflash::trt

extern "C" DFLASH_EXPORT dflash::abi::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    count = static_cast<int32_t>(std::size(dflash::trt::creators));
    return dflash::trt::creators;
}

extern "C" DFLASH_EXPORT void setLoggerFinder(dflash::abi::ILoggerFinder* finder) {
    dflash::trt::use_logger_finder(finder);
}
