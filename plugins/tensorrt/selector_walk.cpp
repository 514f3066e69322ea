// DFlashSelectorWalk: chooses one of the K candidates at each position of every block and reports the realised q rows.
#include "dflash_select.h"
#include "logging.h"
#include "plugin.h"

namespace dflash::trt {
namespace {

class SelectorWalk : public Plugin {
public:
    explicit SelectorWalk(Fields given)
        : Plugin("DFlashSelectorWalk", std::move(given),
                 Signature({abi::DataType::kBF16, abi::DataType::kHALF, abi::DataType::kFLOAT})) {
        Signature& s = signature();
        const std::vector<Extent> lattice = {size_of('B'), size_of('J'), size_of('K')};
        const std::vector<Extent> codebook = {size_of('V'), size_of('r')};
        unary_ = s.input("unary", Element::kFloat32, lattice);
        candidates_ = s.input("candidates", Element::kInt64, lattice);
        hidden_ = s.input("hidden", Element::kCompute, {size_of('B'), size_of('J'), size_of('r')});
        predecessor_ = s.input("predecessor_codebook", Element::kCompute, codebook);
        successor_ = s.input("successor_codebook", Element::kCompute, codebook);
        anchors_ = s.input("anchors", Element::kInt64, {size_of('B')});
        temperatures_ = s.input("temperatures", Element::kFloat32, {size_of('B')});
        if (fields().flag("seeded")) {
            seeds_ = s.input("seeds", Element::kInt64, {size_of('B')});
            first_positions_ = s.input("first_positions", Element::kInt64, {size_of('B')});
        } else {
            uniforms_ = s.input("uniforms", Element::kFloat32, {size_of('B'), size_of('J')});
        }
        tokens_ = s.output("tokens", Element::kInt64, {size_of('B'), size_of('J')});
        q_rows_ = s.output("q_rows", Element::kFloat32, lattice);
    }

protected:
    void check_sizes(const Sizes& sizes) const override {
        if (sizes['J'] > 32 || sizes['J'] == 0) refuse("%lld positions, expected 1 to 32", (long long)sizes['J']);
        if (sizes['K'] > DFLASH_MAX_CANDIDATES || sizes['K'] == 0)
            refuse("%lld candidates, expected 1 to %d", (long long)sizes['K'], DFLASH_MAX_CANDIDATES);
        if (sizes['r'] >= 0 && (sizes['r'] % 8 || sizes['r'] == 0))
            refuse("rank %lld, expected a multiple of 8", (long long)sizes['r']);
    }

    int32_t launch(const Call& call) const override {
        dflash_walk_params p = {};
        p.struct_size = sizeof(p);
        p.dtype = kernel_dtype(call.in[hidden_].type);
        p.batch = call.size('B'), p.positions = call.size('J'), p.count = call.size('K'), p.rank = call.size('r');
        p.vocabulary = call.sizes['V'];
        p.unary = call.input_as<float>(unary_);
        p.candidates = call.input_as<int64_t>(candidates_);
        p.hidden = call.input(hidden_);
        p.predecessor_codebook = call.input(predecessor_), p.successor_codebook = call.input(successor_);
        p.anchors = call.input_as<int64_t>(anchors_);
        p.temperatures = call.input_as<float>(temperatures_);
        p.uniforms = call.input_as<float>(uniforms_);
        p.seeds = call.input_as<int64_t>(seeds_);
        p.first_positions = call.input_as<int64_t>(first_positions_);
        p.tokens = static_cast<int64_t*>(call.outputs[tokens_]);
        p.q_rows = static_cast<float*>(call.outputs[q_rows_]);
        return dflash_selector_walk(&p, call.stream);
    }

    std::unique_ptr<Plugin> copy() const override { return std::make_unique<SelectorWalk>(*this); }

private:
    int hidden_ = -1, predecessor_ = -1, successor_ = -1, unary_ = -1, candidates_ = -1, anchors_ = -1;
    int temperatures_ = -1, uniforms_ = -1, seeds_ = -1, first_positions_ = -1, tokens_ = -1, q_rows_ = -1;
};

}  // namespace

const PluginKind& selector_walk_kind() {
    static const PluginKind kind = {
        "DFlashSelectorWalk", {flag_field("seeded")}, [](Fields fields) -> std::unique_ptr<Plugin> {
            return std::make_unique<SelectorWalk>(std::move(fields));
        }};
    return kind;
}

}  // namespace dflash::trt
