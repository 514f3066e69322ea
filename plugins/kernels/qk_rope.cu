// QK norm + RoPE + paged write: what a target layer does between its QKV projection and attention.
#include "head_row.cuh"
#include "launch.h"
#include "overlapped_launch.cuh"

namespace dflash {

DFLASH_REGISTER_KERNEL(qk_norm_rope_write, "qk_norm_rope_write");

namespace {

constexpr int kThreads = 256;

// A lane group owns `heads_per_group` heads of one token (query, key and value heads in the order of qkv), so that
// position, slot and rotation are read once. The next head is loaded before the current one is worked on.
template <typename T, bool kFloat8, int kLanes>
__global__ void __launch_bounds__(kThreads)
    qk_rope_kernel(const __grid_constant__ dflash_qk_rope_params p, int heads_per_group) {
    let_next_launch_start();  // attention may read the settled part of the cache meanwhile
    using Row = HeadRow<T, kLanes>;
    const int heads = p.num_heads + 2 * p.num_kv_heads;
    const int groups = (heads + heads_per_group - 1) / heads_per_group;
    const int64_t item = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int token = static_cast<int>(item / groups);
    const int first = static_cast<int>(item % groups) * heads_per_group;
    const int chunk = Row::chunk();
    const bool present = token < p.tokens && chunk * 8 < p.head_dim;

    float cosines[8] = {}, sines[8] = {};
    int64_t slot = -1;
    auto load_place = [&] {
        if (!present) return;
        slot = load_index(p.slots, token, p.index_bytes);
        if (p.rotary_dim > 0 && first < p.num_heads + p.num_kv_heads)
            Row::load_rotation(p.cos_sin + load_index(p.positions, token, p.index_bytes) * p.rotary_dim, p.rotary_dim,
                               true, cosines, sines);
    };
    // What a projection did not write is here before it ends.
    const uint4 q_weight = Row::load_weight(p.q_norm_weight, p.head_dim);
    const uint4 k_weight = Row::load_weight(p.k_norm_weight, p.head_dim);
    if (p.settled) load_place();
    wait_for_previous_launch();
    if (!p.settled) load_place();

    const T* source = static_cast<const T*>(p.qkv) + token * p.qkv_stride + chunk * 8;
    uint4 next = make_uint4(0, 0, 0, 0);
    if (present) next = __ldg(reinterpret_cast<const uint4*>(source + first * p.head_dim));
    for (int head = first; head < first + heads_per_group; ++head) {
        const uint4 bits = next;
        if (present && head + 1 < min(first + heads_per_group, heads))
            next = __ldg(reinterpret_cast<const uint4*>(source + (head + 1) * p.head_dim));
        const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
        Row row;
        row.unpack(bits);
        const bool normed = (is_query ? p.q_norm_weight : p.k_norm_weight) != nullptr && !is_value;
        row.normalise(is_query ? q_weight : k_weight, p.head_dim, p.eps, normed);
        row.rotate(cosines, sines, p.rotary_dim);
        if (!present || head >= heads) continue;
        if (is_query) {
            T* target = static_cast<T*>(p.q_out) + token * p.q_out_stride + head * p.head_dim;
            reinterpret_cast<uint4*>(target)[chunk] = row.pack();
        } else if (slot >= 0) {
            const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
            const int64_t element = (slot * p.num_kv_heads + kv_head) * p.head_dim;
            if (is_value) write_chunk<T, kFloat8>(p.v_cache, element, chunk, bits, p.v_inverse_scale);
            else write_row<T, kFloat8>(p.k_cache, element, row, p.k_inverse_scale);
        }
    }
}

template <typename T, bool kFloat8, int kLanes>
void launch(const dflash_qk_rope_params& p, cudaStream_t stream) {
    const int heads = p.num_heads + 2 * p.num_kv_heads;
    // Few tokens: one head per group, for latency. Many: reuse of the rotation, for bandwidth.
    const int64_t resident = int64_t(multiprocessor_count()) * 2048;
    const int heads_per_group = static_cast<int64_t>(p.tokens) * heads * kLanes > 2 * resident ? 6 : 1;
    const int groups = (heads + heads_per_group - 1) / heads_per_group;
    const int64_t threads = static_cast<int64_t>(p.tokens) * groups * kLanes;
    launch_overlapped(qk_rope_kernel<T, kFloat8, kLanes>,
                      dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), kThreads, 0, stream, p,
                      heads_per_group);
}

template <typename T, bool kFloat8>
void launch_for_head(const dflash_qk_rope_params& p, cudaStream_t stream) {
    if (p.head_dim <= 64) launch<T, kFloat8, 8>(p, stream);
    else if (p.head_dim <= 128) launch<T, kFloat8, 16>(p, stream);
    else launch<T, kFloat8, 32>(p, stream);
}

int32_t check(const dflash_qk_rope_params& p) {
    if (p.struct_size != sizeof(dflash_qk_rope_params))
        return fail(DFLASH_INVALID_ARGUMENT,
                    "qk_norm_rope_write: parameter block of %u bytes, this library expects %zu", p.struct_size,
                    sizeof(dflash_qk_rope_params));
    if ((p.dtype != DFLASH_BFLOAT16 && p.dtype != DFLASH_FLOAT16) ||
        (p.cache_dtype != p.dtype && p.cache_dtype != DFLASH_FLOAT8_E4M3))
        return fail(DFLASH_UNSUPPORTED, "qk_norm_rope_write: dtype %d with cache dtype %d", p.dtype, p.cache_dtype);
    if (p.head_dim < 8 || p.head_dim > 256 || p.head_dim % 8 || p.rotary_dim < 0 || p.rotary_dim > p.head_dim ||
        p.rotary_dim % 16)
        return fail(
            DFLASH_UNSUPPORTED,
            "qk_norm_rope_write: head_dim %d (a multiple of 8 up to 256), rotary_dim %d (a multiple of 16 up to "
            "head_dim)",
            p.head_dim, p.rotary_dim);
    if (p.tokens < 0 || p.num_heads < 1 || p.num_kv_heads < 1 || (p.index_bytes != 4 && p.index_bytes != 8))
        return fail(DFLASH_INVALID_ARGUMENT, "qk_norm_rope_write: tokens %d, heads %d and %d, index_bytes %d", p.tokens,
                    p.num_heads, p.num_kv_heads, p.index_bytes);
    if (p.qkv_stride % 8 || p.q_out_stride % 8 || reinterpret_cast<uintptr_t>(p.qkv) % 16 ||
        reinterpret_cast<uintptr_t>(p.q_out) % 16)
        return fail(DFLASH_INVALID_ARGUMENT, "qk_norm_rope_write: 16-byte aligned tensors with strides of 8 elements");
    if (p.tokens > 0 && (!p.qkv || !p.q_out || !p.k_cache || !p.v_cache || !p.slots ||
                         (p.rotary_dim > 0 && (!p.cos_sin || !p.positions))))
        return fail(DFLASH_INVALID_ARGUMENT, "qk_norm_rope_write: a tensor is missing");
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

int32_t dflash_qk_norm_rope_write(const dflash_qk_rope_params* params, dflash_stream stream) {
    using namespace dflash;
    const dflash_qk_rope_params& p = *params;
    if (int32_t status = check(p)) return status;
    if (p.tokens == 0) return DFLASH_OK;
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    const bool float8 = p.cache_dtype == DFLASH_FLOAT8_E4M3;
    if (p.dtype == DFLASH_BFLOAT16)
        float8 ? launch_for_head<__nv_bfloat16, true>(p, cuda_stream)
               : launch_for_head<__nv_bfloat16, false>(p, cuda_stream);
    else float8 ? launch_for_head<__half, true>(p, cuda_stream) : launch_for_head<__half, false>(p, cuda_stream);
    return check_launch("qk_norm_rope_write");
}
