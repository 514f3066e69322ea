// DFlashKVInjection: K norm, RoPE and paged write of the K and V of all drafter layers, in place.
#include "logging.h"
#include "plugin.h"

namespace dflash::trt {
namespace {

class KVInjection : public Plugin {
public:
    explicit KVInjection(Fields given)
        : Plugin("DFlashKVInjection", std::move(given), Signature({abi::DataType::kBF16, abi::DataType::kHALF})) {
        const Fields& f = fields();
        layers_ = f.integer("layers"), kv_heads_ = f.integer("num_kv_heads"), head_dim_ = f.integer("head_dim");
        rotary_dim_ = f.integer("rotary_dim");
        check_fields();
        Signature& s = signature();
        kv_ = s.input("kv", Element::kCompute, {size_of('N'), fixed(int64_t(layers_) * 2 * kv_heads_ * head_dim_)});
        slots_ = s.input("slots", Element::kIndex, {size_of('N')});
        if (rotary_dim_ > 0) {
            positions_ = s.input("positions", Element::kIndex, {size_of('N')});
            cos_sin_ = s.input("cos_sin", Element::kFloat32, {size_of('M'), fixed(rotary_dim_)});
        }
        if (f.flag("k_norm")) k_norm_ = s.input("k_norm_weight", Element::kCompute, {fixed(layers_), fixed(head_dim_)});
        const std::vector<Extent> cache = {size_of('C'), size_of('G'), fixed(kv_heads_), fixed(head_dim_)};
        first_cache_ = s.inputs();
        for (int layer = 0; layer < layers_; ++layer)
            for (const char* name : {"k_cache_", "v_cache_"})
                s.input(name + std::to_string(layer), Element::kCache, cache);
        for (int layer = 0; layer < layers_; ++layer)
            for (int side = 0; side < 2; ++side)
                s.output((side ? "v_cache_out_" : "k_cache_out_") + std::to_string(layer), Element::kCache, cache,
                         first_cache_ + 2 * layer + side);
    }

protected:
    int32_t launch(const Call& call) const override {
        dflash_inject_params p = {};
        p.struct_size = sizeof(p);
        p.dtype = kernel_dtype(call.in[kv_].type);
        p.cache_dtype = kernel_dtype(call.in[first_cache_].type);
        p.index_bytes = call.index_bytes(slots_);
        p.rows = call.size('N'), p.layers = layers_;
        p.num_kv_heads = kv_heads_, p.head_dim = head_dim_, p.rotary_dim = rotary_dim_;
        p.eps = fields().real("eps");
        const int64_t side = int64_t(kv_heads_) * head_dim_;
        p.kv = call.input(kv_);
        p.v_offset = side, p.layer_stride = 2 * side, p.token_stride = layers_ * 2 * side;
        p.k_norm_weight = call.input(k_norm_);
        p.cos_sin = call.input_as<float>(cos_sin_);
        p.positions = call.input(positions_), p.slots = call.input(slots_);
        for (int layer = 0; layer < layers_; ++layer) {
            require_in_place(call, 2 * layer);
            require_in_place(call, 2 * layer + 1);
            p.k_caches[layer] = call.outputs[2 * layer], p.v_caches[layer] = call.outputs[2 * layer + 1];
            p.k_inverse_scale[layer] = inverse_scale("k_scales", layer);
            p.v_inverse_scale[layer] = inverse_scale("v_scales", layer);
        }
        return dflash_inject_kv(&p, call.stream);
    }

    std::unique_ptr<Plugin> copy() const override { return std::make_unique<KVInjection>(*this); }

private:
    void check_fields() const {
        if (head_dim_ % 8) refuse("head_dim %d, expected a multiple of 8", head_dim_);
        if (rotary_dim_ > head_dim_ || rotary_dim_ % 16)
            refuse("rotary_dim %d, expected a multiple of 16 up to head_dim %d", rotary_dim_, head_dim_);
        for (const char* name : {"k_scales", "v_scales"}) {
            const size_t count = fields().reals(name).size();
            if (count != 0 && count != static_cast<size_t>(layers_))
                refuse("%s has %zu values, expected none or one for each of %d layers", name, count, layers_);
        }
    }

    float inverse_scale(const char* name, int layer) const {
        const std::vector<float>& scales = fields().reals(name);
        return scales.empty() ? 1.0f : 1.0f / scales[layer];
    }

    int layers_, kv_heads_, head_dim_, rotary_dim_;
    int kv_ = -1, slots_ = -1, positions_ = -1, cos_sin_ = -1, k_norm_ = -1, first_cache_ = -1;
};

}  // namespace

const PluginKind& kv_injection_kind() {
    static const PluginKind kind = {
        "DFlashKVInjection",
        {
            integer_field("layers", kRequired, 1, DFLASH_MAX_INJECT_LAYERS),
            integer_field("num_kv_heads", kRequired, 1, 65535),
            integer_field("head_dim", kRequired, 8, 256),
            integer_field("rotary_dim", 0, 0, 256),
            flag_field("k_norm"),
            real_field("eps", 1e-6, 0, 1),
            reals_field("k_scales", 1e-30, 1e30),
            reals_field("v_scales", 1e-30, 1e30),
        },
        [](Fields fields) -> std::unique_ptr<Plugin> { return std::make_unique<KVInjection>(std::move(fields)); }};
    return kind;
}

}  // namespace dflash::trt
