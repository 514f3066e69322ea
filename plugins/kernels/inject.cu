// KV injection: K norm + RoPE + paged write of K and V for all drafter layers in one launch.
#include "head_row.cuh"
#include "launch.h"
#include "overlapped_launch.cuh"

namespace dflash {

DFLASH_REGISTER_KERNEL(inject, "inject_kv");

namespace {

constexpr int kThreads = 256;

// A lane group owns one (token, KV head) and walks the layers: position, slot and rotation are read once. The next
// layer's K and V are loaded before the current one is worked on, to keep enough reads in flight.
template <typename T, bool kFloat8, int kLanes>
__global__ void __launch_bounds__(kThreads) inject_kernel(const __grid_constant__ dflash_inject_params p) {
    let_next_launch_start();
    wait_for_previous_launch();
    using Row = HeadRow<T, kLanes>;
    const int64_t item = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int token = static_cast<int>(item / p.num_kv_heads), head = static_cast<int>(item % p.num_kv_heads);
    const int chunk = Row::chunk();
    const int64_t slot = token < p.rows ? load_index(p.slots, token, p.index_bytes) : -1;
    const bool present = slot >= 0 && chunk * 8 < p.head_dim;
    if (!__any_sync(0xffffffffu, present)) return;

    float cosines[8] = {}, sines[8] = {};
    if (present && p.rotary_dim > 0)
        Row::load_rotation(p.cos_sin + load_index(p.positions, token, p.index_bytes) * p.rotary_dim, p.rotary_dim, true,
                           cosines, sines);
    const T* source = static_cast<const T*>(p.kv) + token * p.token_stride + head * p.head_dim + chunk * 8;
    const int64_t element = (slot * p.num_kv_heads + head) * p.head_dim;

    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 k_next = present ? __ldg(reinterpret_cast<const uint4*>(source)) : zeros;
    uint4 v_next = present ? __ldg(reinterpret_cast<const uint4*>(source + p.v_offset)) : zeros;
    for (int layer = 0; layer < p.layers; ++layer) {
        const uint4 k_bits = k_next, v_bits = v_next;
        if (present && layer + 1 < p.layers) {
            const T* next = source + (layer + 1) * p.layer_stride;
            k_next = __ldg(reinterpret_cast<const uint4*>(next));
            v_next = __ldg(reinterpret_cast<const uint4*>(next + p.v_offset));
        }
        Row row;
        row.unpack(k_bits);
        const bool normed = p.k_norm_weight != nullptr;
        const T* weight = static_cast<const T*>(p.k_norm_weight) + (normed ? layer * p.head_dim : 0);
        row.normalise(Row::load_weight(weight, p.head_dim), p.head_dim, p.eps, normed);
        row.rotate(cosines, sines, p.rotary_dim);
        if (present) {
            write_row<T, kFloat8>(p.k_caches[layer], element, row, p.k_inverse_scale[layer]);
            write_chunk<T, kFloat8>(p.v_caches[layer], element, chunk, v_bits, p.v_inverse_scale[layer]);
        }
    }
}

template <typename T, bool kFloat8, int kLanes>
void launch_inject(const dflash_inject_params& p, cudaStream_t stream) {
    const int64_t threads = static_cast<int64_t>(p.rows) * p.num_kv_heads * kLanes;
    launch_overlapped(inject_kernel<T, kFloat8, kLanes>,
                      dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), kThreads, 0, stream, p);
}

template <typename T, bool kFloat8>
void launch_for_head(const dflash_inject_params& p, cudaStream_t stream) {
    if (p.head_dim <= 64) launch_inject<T, kFloat8, 8>(p, stream);
    else if (p.head_dim <= 128) launch_inject<T, kFloat8, 16>(p, stream);
    else launch_inject<T, kFloat8, 32>(p, stream);
}

int32_t check(const dflash_inject_params& p) {
    if (p.struct_size != sizeof(dflash_inject_params))
        return fail(DFLASH_INVALID_ARGUMENT, "inject_kv: parameter block of %u bytes, this library expects %zu",
                    p.struct_size, sizeof(dflash_inject_params));
    if ((p.dtype != DFLASH_BFLOAT16 && p.dtype != DFLASH_FLOAT16) ||
        (p.cache_dtype != p.dtype && p.cache_dtype != DFLASH_FLOAT8_E4M3))
        return fail(DFLASH_UNSUPPORTED, "inject_kv: dtype %d with cache dtype %d", p.dtype, p.cache_dtype);
    if (p.layers < 1 || p.layers > DFLASH_MAX_INJECT_LAYERS)
        return fail(DFLASH_UNSUPPORTED, "inject_kv: %d layers, expected 1..%d", p.layers, DFLASH_MAX_INJECT_LAYERS);
    if (p.head_dim < 8 || p.head_dim > 256 || p.head_dim % 8 || p.rotary_dim < 0 || p.rotary_dim > p.head_dim ||
        p.rotary_dim % 16)
        return fail(
            DFLASH_UNSUPPORTED,
            "inject_kv: head_dim %d (a multiple of 8 up to 256), rotary_dim %d (a multiple of 16 up to head_dim)",
            p.head_dim, p.rotary_dim);
    if (p.rows < 0 || p.num_kv_heads < 1 || (p.index_bytes != 4 && p.index_bytes != 8))
        return fail(DFLASH_INVALID_ARGUMENT, "inject_kv: rows %d, num_kv_heads %d, index_bytes %d", p.rows,
                    p.num_kv_heads, p.index_bytes);
    if (p.token_stride % 8 || p.layer_stride % 8 || p.v_offset % 8 || reinterpret_cast<uintptr_t>(p.kv) % 16)
        return fail(DFLASH_INVALID_ARGUMENT, "inject_kv: kv must be 16-byte aligned with strides of 8 elements");
    if (p.rows > 0 && (!p.kv || !p.slots || (p.rotary_dim > 0 && (!p.cos_sin || !p.positions))))
        return fail(DFLASH_INVALID_ARGUMENT, "inject_kv: kv, slots, positions and cos_sin must be set");
    for (int layer = 0; layer < p.layers; ++layer)
        if (!p.k_caches[layer] || !p.v_caches[layer])
            return fail(DFLASH_INVALID_ARGUMENT, "inject_kv: layer %d has no cache", layer);
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

int32_t dflash_inject_kv(const dflash_inject_params* params, dflash_stream stream) {
    using namespace dflash;
    const dflash_inject_params& p = *params;
    if (int32_t status = check(p)) return status;
    if (p.rows == 0) return DFLASH_OK;
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    const bool float8 = p.cache_dtype == DFLASH_FLOAT8_E4M3;
    if (p.dtype == DFLASH_BFLOAT16)
        float8 ? launch_for_head<__nv_bfloat16, true>(p, cuda_stream)
               : launch_for_head<__nv_bfloat16, false>(p, cuda_stream);
    else float8 ? launch_for_head<__half, true>(p, cuda_stream) : launch_for_head<__half, false>(p, cuda_stream);
    return check_launch("inject_kv");
}
