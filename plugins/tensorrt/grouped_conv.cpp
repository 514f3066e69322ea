// DFlashGroupedConv: grouped dynamic convolution alone (in form), added to the residual, or added and normed (out
// form).
#include "dflash_select.h"
#include "logging.h"
#include "plugin.h"

namespace dflash::trt {
namespace {

class GroupedConv : public Plugin {
public:
    explicit GroupedConv(Fields given)
        : Plugin("DFlashGroupedConv", std::move(given),
                 Signature({abi::DataType::kBF16, abi::DataType::kHALF, abi::DataType::kFLOAT})) {
        const Fields& f = fields();
        block_size_ = f.integer("block_size"), groups_ = f.integer("groups"), taps_ = f.integer("taps");
        first_column_ = f.integer("first_column");
        const bool adds = f.flag("residual"), norms = f.flag("norm");
        if (norms && !adds) refuse("norm = 1 without residual = 1: the norm is that of the residual");
        Signature& s = signature();
        const std::vector<Extent> rows = {size_of('N'), size_of('H')};
        x_ = s.input("x", Element::kCompute, rows);
        dynamic_ = s.input("dynamic", Element::kCompute, {size_of('N'), size_of('D')});
        base_ = s.input("base", Element::kCompute, {fixed(taps_), size_of('H')});
        if (adds) residual_ = s.input("residual", Element::kFloat32, rows);
        if (norms) norm_ = s.input("norm_weight", Element::kCompute, {size_of('H')});
        if (!adds || norms) out_ = s.output("out", Element::kCompute, rows);
        if (adds) residual_out_ = s.output("residual_out", Element::kFloat32, rows, residual_);
    }

protected:
    void check_sizes(const Sizes& sizes) const override {
        const int64_t rows = sizes['N'], width = sizes['H'], columns = sizes['D'];
        if (rows >= 0 && rows % block_size_)
            refuse("%lld rows, expected a multiple of block_size %d", (long long)rows, block_size_);
        if (width >= 0 && (width % 8 || width > 32768 || width % groups_))
            refuse("width %lld, expected a multiple of 8 and of the %d groups, at most 32768", (long long)width,
                   groups_);
        if (columns >= 0 && columns < int64_t(first_column_) + int64_t(taps_) * groups_)
            refuse("dynamic has %lld columns, expected at least first_column %d + %d taps * %d groups",
                   (long long)columns, first_column_, taps_, groups_);
    }

    int32_t launch(const Call& call) const override {
        dflash_grouped_conv_params p = {};
        p.struct_size = sizeof(p);
        p.dtype = kernel_dtype(call.in[x_].type);
        p.rows = call.size('N'), p.width = call.size('H');
        p.block_size = block_size_, p.groups = groups_, p.taps = taps_;
        p.eps = fields().real("eps");
        p.x = call.input(x_), p.x_stride = p.width;
        const int element_bytes = p.dtype == DFLASH_FLOAT32 ? 4 : 2;
        p.dynamic = call.input_as<char>(dynamic_) + int64_t(first_column_) * element_bytes;
        p.dynamic_stride = call.size('D');
        p.base = call.input(base_);
        p.norm_weight = call.input(norm_);
        p.out = out_ < 0 ? nullptr : call.outputs[out_];
        if (residual_ >= 0) p.residual = residual_in_place(call);
        return dflash_grouped_conv(&p, call.stream);
    }

    std::unique_ptr<Plugin> copy() const override { return std::make_unique<GroupedConv>(*this); }

private:
    // The residual is an ordinary activation: where TensorRT gave the output its own memory, a copy keeps it right.
    float* residual_in_place(const Call& call) const {
        float* target = static_cast<float*>(call.outputs[residual_out_]);
        const void* source = call.input(residual_);
        if (target != source) {
            const size_t bytes = size_t(call.size('N')) * call.size('H') * sizeof(float);
            const cudaError_t error = cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice,
                                                      static_cast<cudaStream_t>(call.stream));
            if (error != cudaSuccess) refuse("copying the residual: %s", cudaGetErrorString(error));
        }
        return target;
    }

    int block_size_, groups_, taps_, first_column_;
    int x_ = -1, dynamic_ = -1, base_ = -1, residual_ = -1, norm_ = -1, out_ = -1, residual_out_ = -1;
};

}  // namespace

const PluginKind& grouped_conv_kind() {
    static const PluginKind kind = {
        "DFlashGroupedConv",
        {
            integer_field("block_size", kRequired, 1, 1024),
            integer_field("groups", kRequired, 1, 32768),
            integer_field("taps", kRequired, 1, DFLASH_MAX_CONV_TAPS),
            integer_field("first_column", 0, 0, kLargest),
            flag_field("residual"),
            flag_field("norm"),
            real_field("eps", 1e-6, 0, 1),
        },
        [](Fields fields) -> std::unique_ptr<Plugin> { return std::make_unique<GroupedConv>(std::move(fields)); }};
    return kind;
}

}  // namespace dflash::trt
