// DFlashPagedAttention: causal attention of packed queries over the paged cache (with or without writing this pass's
// K/V first), or the drafter's block attention.
#include <algorithm>
#include <cmath>

#include "logging.h"
#include "plugin.h"

namespace dflash::trt {
namespace {

class PagedAttention : public Plugin {
public:
    explicit PagedAttention(Fields given)
        : Plugin("DFlashPagedAttention", std::move(given), Signature({abi::DataType::kBF16, abi::DataType::kHALF})) {
        const Fields& f = fields();
        heads_ = f.integer("num_heads"), kv_heads_ = f.integer("num_kv_heads"), head_dim_ = f.integer("head_dim");
        block_size_ = f.integer("block_size"), rotary_dim_ = f.integer("rotary_dim");
        writes_ = f.flag("write_kv");
        budget_ = f.integer("max_splits") == 1 ? 0 : int64_t(f.integer("workspace_mib")) << 20;
        check_fields();
        declare_inputs();
        out_ = signature().output("out", Element::kCompute, {rows(), fixed(heads_), fixed(head_dim_)});
        if (writes_) {
            k_out_ = signature().output("k_cache_out", Element::kCache, cache_shape(), k_cache_);
            v_out_ = signature().output("v_cache_out", Element::kCache, cache_shape(), v_cache_);
        }
    }

protected:
    void check_sizes(const Sizes& sizes) const override {
        const int64_t page_tokens = sizes['G'];
        if (page_tokens >= 0 && (page_tokens < 16 || page_tokens % 16))
            refuse("the cache has %lld tokens per page, expected a multiple of 16", (long long)page_tokens);
        if (sizes['B'] > 65535) refuse("a batch of %lld requests, expected at most 65535", (long long)sizes['B']);
    }

    size_t workspace_bytes(const abi::DynamicPluginTensorDesc*, const Sizes& most) const override {
        return budget_ + (writes_ ? rotated_query_bytes(std::max<int64_t>(most['T'], 0)) : 0);
    }

    int32_t launch(const Call& call) const override {
        dflash_attention_params p = {};
        p.struct_size = sizeof(p);
        p.dtype = kernel_dtype(call.in[first_].type);
        p.kv_dtype = kernel_dtype(call.in[k_cache_].type);
        p.index_bytes = call.index_bytes(page_table_);
        p.batch = call.size('B');
        p.num_heads = heads_, p.num_kv_heads = kv_heads_, p.head_dim = head_dim_;
        p.page_tokens = call.size('G'), p.pages_per_request = call.size('P');
        p.block_size = block_size_, p.causal = fields().flag("causal");
        p.window_left = p.window_right = fields().integer("window") - 1;
        p.max_splits = fields().integer("max_splits");
        p.scale = fields().real("scale"), p.softcap = fields().real("softcap");
        p.k_scale = fields().real("k_scale"), p.v_scale = fields().real("v_scale");
        p.k_cache = call.input(k_cache_), p.v_cache = call.input(v_cache_);
        p.page_table = call.input(page_table_), p.page_table_stride = p.pages_per_request;
        p.context_lengths = call.input(context_lengths_);
        p.sinks = call.input_as<float>(sinks_);
        p.out = call.outputs[out_], p.out_stride = int64_t(heads_) * head_dim_;
        p.q = call.input(first_), p.q_stride = p.out_stride;
        const int32_t queries = block_size_ > 0 ? call.size('B') * block_size_ : call.size('T');
        if (queries == 0 || p.batch == 0) return DFLASH_OK;
        if (block_size_ > 0) {
            p.k_block = call.input(k_block_), p.v_block = call.input(v_block_);
            p.block_stride = int64_t(kv_heads_) * head_dim_;
            p.block_lengths = call.input(block_lengths_);
        } else {
            p.query_starts = call.input(query_starts_);
            p.max_query = most_queries(call, queries);
        }
        if (writes_) {
            require_in_place(call, k_out_);
            require_in_place(call, v_out_);
            void* rotated = call.workspace + budget_;
            if (const int32_t status = write_kv(call, queries, rotated)) return status;
            p.q = rotated;
        }
        if (const int32_t status = fit_workspace(p)) return status;
        p.workspace = p.workspace_bytes > 0 ? call.workspace : nullptr;
        return dflash_attention(&p, call.stream);
    }

    std::unique_ptr<Plugin> copy() const override { return std::make_unique<PagedAttention>(*this); }

private:
    void check_fields() const {
        const Fields& f = fields();
        if (heads_ % kv_heads_) refuse("%d heads over %d KV heads, expected a multiple", heads_, kv_heads_);
        const int compiled[] = {64, 80, 96, 128, 256};
        if (std::find(std::begin(compiled), std::end(compiled), head_dim_) == std::end(compiled))
            refuse("head_dim %d, compiled are 64, 80, 96, 128 and 256", head_dim_);
        if (rotary_dim_ > head_dim_ || rotary_dim_ % 16)
            refuse("rotary_dim %d, expected a multiple of 16 up to head_dim %d", rotary_dim_, head_dim_);
        if (!(f.real("scale") > 0)) refuse("scale %g, expected a positive number", f.real("scale"));
        if (block_size_ > 0 && (writes_ || f.flag("query_extent") || f.integer("max_query")))
            refuse(
                "block_size %d with write_kv, query_extent or max_query: a block is never written and always has "
                "block_size queries",
                block_size_);
        if (!writes_ && (f.flag("qk_norm") || rotary_dim_))
            refuse("qk_norm and rotary_dim belong to write_kv = 1; without it queries arrive normed and rotated");
    }

    void declare_inputs() {
        const Fields& f = fields();
        Signature& s = signature();
        if (writes_)
            first_ = s.input("qkv", Element::kCompute, {rows(), fixed(int64_t(heads_ + 2 * kv_heads_) * head_dim_)});
        else first_ = s.input("q", Element::kCompute, {rows(), fixed(heads_), fixed(head_dim_)});
        if (block_size_ > 0) {
            k_block_ = s.input("k_block", Element::kCompute, {rows(), fixed(kv_heads_), fixed(head_dim_)});
            v_block_ = s.input("v_block", Element::kCompute, {rows(), fixed(kv_heads_), fixed(head_dim_)});
        }
        k_cache_ = s.input("k_cache", Element::kCache, cache_shape());
        v_cache_ = s.input("v_cache", Element::kCache, cache_shape());
        page_table_ = s.input("page_table", Element::kIndex, {size_of('B'), size_of('P')});
        context_lengths_ = s.input("context_lengths", Element::kIndex, {size_of('B')});
        if (block_size_ > 0) block_lengths_ = s.input("block_lengths", Element::kIndex, {size_of('B')});
        else query_starts_ = s.input("query_starts", Element::kIndex, {size_of('B', 1, 1)});
        if (writes_) slots_ = s.input("slots", Element::kIndex, {size_of('T')});
        if (rotary_dim_ > 0) {
            positions_ = s.input("positions", Element::kIndex, {size_of('T')});
            cos_sin_ = s.input("cos_sin", Element::kFloat32, {size_of('M'), fixed(rotary_dim_)});
        }
        if (f.flag("qk_norm")) {
            q_norm_ = s.input("q_norm_weight", Element::kCompute, {fixed(head_dim_)});
            k_norm_ = s.input("k_norm_weight", Element::kCompute, {fixed(head_dim_)});
        }
        if (f.flag("sinks")) sinks_ = s.input("sinks", Element::kFloat32, {fixed(heads_)});
        if (f.flag("query_extent")) query_extent_ = s.input("query_extent", Element::kIndex, {size_of('Q')});
    }

    Extent rows() const { return block_size_ > 0 ? size_of('B', block_size_) : size_of('T'); }

    std::vector<Extent> cache_shape() const { return {size_of('C'), size_of('G'), fixed(kv_heads_), fixed(head_dim_)}; }

    int64_t rotated_query_bytes(int64_t tokens) const { return tokens * heads_ * head_dim_ * 2; }

    // A bound of the queries of one request, from shapes alone.
    int32_t most_queries(const Call& call, int32_t queries) const {
        int32_t most = queries;
        if (fields().integer("max_query") > 0) most = std::min(most, fields().integer("max_query"));
        if (query_extent_ >= 0) most = std::min(most, call.size('Q'));
        return std::max(most, 1);
    }

    int32_t write_kv(const Call& call, int32_t tokens, void* rotated) const {
        dflash_qk_rope_params p = {};
        p.struct_size = sizeof(p);
        p.dtype = kernel_dtype(call.in[first_].type);
        p.cache_dtype = kernel_dtype(call.in[k_cache_].type);
        p.index_bytes = call.index_bytes(slots_);
        p.tokens = tokens;
        p.num_heads = heads_, p.num_kv_heads = kv_heads_, p.head_dim = head_dim_, p.rotary_dim = rotary_dim_;
        p.eps = fields().real("eps");
        p.qkv = call.input(first_), p.qkv_stride = int64_t(heads_ + 2 * kv_heads_) * head_dim_;
        p.q_norm_weight = call.input(q_norm_), p.k_norm_weight = call.input(k_norm_);
        p.cos_sin = call.input_as<float>(cos_sin_);
        p.positions = call.input(positions_), p.slots = call.input(slots_);
        p.q_out = rotated, p.q_out_stride = int64_t(heads_) * head_dim_;
        p.k_cache = call.outputs[k_out_], p.v_cache = call.outputs[v_out_];
        p.k_inverse_scale = 1.0f / fields().real("k_scale"), p.v_inverse_scale = 1.0f / fields().real("v_scale");
        return dflash_qk_norm_rope_write(&p, call.stream);
    }

    // Partial results of a split are bounded by the budget that getWorkspaceSize promised, whatever the shapes: what
    // does not fit runs with fewer splits, and one split needs none.
    int32_t fit_workspace(dflash_attention_params& p) const {
        constexpr int32_t kFirstTried = 32;
        for (int32_t splits = p.max_splits;; splits = splits == 0 ? kFirstTried : splits / 2) {
            p.max_splits = splits;
            p.workspace_bytes = dflash_attention_workspace_bytes(&p);
            if (p.workspace_bytes < 0) return DFLASH_INVALID_ARGUMENT;
            if (p.workspace_bytes <= budget_) return DFLASH_OK;
        }
    }

    int heads_, kv_heads_, head_dim_, block_size_, rotary_dim_;
    bool writes_;
    int64_t budget_;
    int first_ = -1, k_block_ = -1, v_block_ = -1, k_cache_ = -1, v_cache_ = -1, page_table_ = -1;
    int context_lengths_ = -1, block_lengths_ = -1, query_starts_ = -1, slots_ = -1, positions_ = -1, cos_sin_ = -1;
    int q_norm_ = -1, k_norm_ = -1, sinks_ = -1, query_extent_ = -1;
    int out_ = -1, k_out_ = -1, v_out_ = -1;
};

}  // namespace

const PluginKind& paged_attention_kind() {
    static const PluginKind kind = {
        "DFlashPagedAttention",
        {
            integer_field("num_heads", kRequired, 1, 65535),
            integer_field("num_kv_heads", kRequired, 1, 65535),
            integer_field("head_dim", kRequired, 1, 256),
            real_field("scale", kRequired, 0, 1e6),
            integer_field("block_size", 0, 0, 1024),
            flag_field("write_kv"),
            flag_field("causal", 1),
            integer_field("window", 0, 0, kLargest),
            real_field("softcap", 0, 0, 1e9),
            real_field("k_scale", 1, 1e-30, 1e30),
            real_field("v_scale", 1, 1e-30, 1e30),
            flag_field("qk_norm"),
            real_field("eps", 1e-6, 0, 1),
            integer_field("rotary_dim", 0, 0, 256),
            flag_field("sinks"),
            flag_field("query_extent"),
            integer_field("max_query", 0, 0, kLargest),
            integer_field("max_splits", 0, 0, 1024),
            integer_field("workspace_mib", 64, 0, 4096),
        },
        [](Fields fields) -> std::unique_ptr<Plugin> { return std::make_unique<PagedAttention>(std::move(fields)); }};
    return kind;
}

}  // namespace dflash::trt
