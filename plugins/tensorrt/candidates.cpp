// DFlashCandidates: the K largest logits of each row, ties to the lowest id.
#include "dflash_select.h"
#include "logging.h"
#include "plugin.h"

namespace dflash::trt {
namespace {

class Candidates : public Plugin {
public:
    explicit Candidates(Fields given)
        : Plugin("DFlashCandidates", std::move(given),
                 Signature({abi::DataType::kBF16, abi::DataType::kHALF, abi::DataType::kFLOAT})) {
        count_ = fields().integer("count");
        logits_ = signature().input("logits", Element::kCompute, {size_of('R'), size_of('V')});
        values_ = signature().output("values", Element::kFloat32, {size_of('R'), fixed(count_)});
        ids_ = signature().output("ids", Element::kInt64, {size_of('R'), fixed(count_)});
    }

protected:
    void check_sizes(const Sizes& sizes) const override {
        if (sizes['V'] > DFLASH_MAX_VOCABULARY)
            refuse("%lld columns, expected at most %d", (long long)sizes['V'], DFLASH_MAX_VOCABULARY);
        if (sizes['V'] >= 0 && fields().integer("valid_columns") > sizes['V'])
            refuse("valid_columns %d of %lld columns", fields().integer("valid_columns"), (long long)sizes['V']);
    }

    size_t workspace_bytes(const abi::DynamicPluginTensorDesc* in, const Sizes& most) const override {
        const int64_t bytes = needed(parameters(in[logits_].desc.type, most['R'], most['V']));
        return static_cast<size_t>(bytes);
    }

    int32_t launch(const Call& call) const override {
        dflash_candidates_params p = parameters(call.in[logits_].type, call.size('R'), call.size('V'));
        p.logits = call.input(logits_);
        p.values = static_cast<float*>(call.outputs[values_]);
        p.ids = static_cast<int64_t*>(call.outputs[ids_]);
        p.workspace = call.workspace;
        p.workspace_bytes = needed(p);
        return dflash_candidates(&p, call.stream);
    }

    std::unique_ptr<Plugin> copy() const override { return std::make_unique<Candidates>(*this); }

private:
    dflash_candidates_params parameters(abi::DataType type, int64_t rows, int64_t columns) const {
        dflash_candidates_params p = {};
        p.struct_size = sizeof(p);
        p.dtype = kernel_dtype(type);
        p.rows = static_cast<int32_t>(rows), p.columns = static_cast<int32_t>(columns);
        p.logits_stride = columns;
        p.valid_columns = fields().integer("valid_columns") ? fields().integer("valid_columns") : p.columns;
        p.count = count_;
        p.multiplier = fields().real("multiplier"), p.softcap = fields().real("softcap");
        p.id_offset = fields().integer("id_offset");
        return p;
    }

    static int64_t needed(const dflash_candidates_params& p) {
        const int64_t bytes = dflash_candidates_workspace_bytes(&p);
        if (bytes < 0) throw Refusal(dflash_last_error());
        return bytes;
    }

    int count_, logits_ = -1, values_ = -1, ids_ = -1;
};

}  // namespace

const PluginKind& candidates_kind() {
    static const PluginKind kind = {
        "DFlashCandidates",
        {
            integer_field("count", kRequired, 1, DFLASH_MAX_CANDIDATES),
            integer_field("valid_columns", 0, 0, DFLASH_MAX_VOCABULARY),
            integer_field("id_offset", 0, 0, kLargest),
            real_field("multiplier", 1, -1e30, 1e30),
            real_field("softcap", 0, 0, 1e30),
        },
        [](Fields fields) -> std::unique_ptr<Plugin> { return std::make_unique<Candidates>(std::move(fields)); }};
    return kind;
}

}  // namespace dflash::trt
