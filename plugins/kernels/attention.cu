// Host side of dflash_attention: validation, arguments, and the launch that joins the splits.
#include <algorithm>
#include <cmath>

#include "attention_extent.cuh"
#include "attention_plan.h"
#include "launch.h"
#include "tensor_map.h"

namespace dflash {

DFLASH_REGISTER_KERNEL(attention, "attention");

namespace {

constexpr float kLog2E = 1.4426950408889634f;

// The largest value of a warp. Order of floats as integers: those below zero turned around.
__device__ __forceinline__ float warp_max(float x) {
    const auto turned = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(turned(__reduce_max_sync(0xffffffffu, turned(__float_as_int(x)))));
}

// kRowWarps warps per query row: they take turns over the row's splits, four dimensions per lane. All parts of a row
// are on their way at the same time, to shared memory: they would not fit the registers that an attention block leaves.
template <typename T, int kRowWarps>
__global__ void __launch_bounds__(32 * kJoinWarps, 6)
    combine_splits(const __grid_constant__ AttentionArgs args, int tile_rows, int tile_keys, int row_blocks,
                   int spare_blocks) {
    constexpr int kHeld = kRowWarps == 4 ? kMaxSplits / 32 : 1;
    extern __shared__ float4 arrived[];  // [warps][parts][32]
    const int block = static_cast<int>(blockIdx.x) - spare_blocks;
    if (block < 0) {
        asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
        return;
    }
    const int kv_head = block % args.kv_heads, request = block / args.kv_heads / row_blocks;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % kRowWarps, parts = (args.splits + kRowWarps - 1) / kRowWarps;
    const int padded_row =
        block / args.kv_heads % row_blocks * (kJoinWarps / kRowWarps) + threadIdx.x / (32 * kRowWarps);
    const int row_tile = min(padded_row / tile_rows, args.row_tiles - 1), row = padded_row - row_tile * tile_rows;
    // The lengths are older than the launch that this one overlaps.
    const Extent extent(args, request, row_tile, tile_rows);
    const int active = TileRange(extent, tile_keys).active(args.splits);
    const int request_row = extent.first_row + row;
    const int head = args.head_of(kv_head, request_row);
    const float sink = args.sinks ? args.sinks[head] * kLog2E : -INFINITY;
    const int quads = args.head_dim / 4;
    const int64_t first = first_partial_row(args, request, kv_head, row_tile, 0, tile_rows) + row;
    const int64_t split_floats = static_cast<int64_t>(tile_rows) * args.head_dim;
    float4* const mine = arrived + threadIdx.x / 32 * parts * 32 + lane;
    T* const target = static_cast<T*>(args.out) + (extent.query_begin + args.query_of(request_row)) * args.out_stride +
                      head * args.head_dim;
    const float* column = args.partial_out + first * args.head_dim + warp * split_floats + min(lane, quads - 1) * 4;
    const float2* lane_stats = args.partial_stats + first + static_cast<int64_t>(lane) * tile_rows;
    const int own_parts = (active - warp + kRowWarps - 1) / kRowWarps;
    asm volatile("" : "+l"(column), "+l"(lane_stats));  // addresses first, then the wait
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
    // A single split has written the result itself. Whole warps leave; barriers do not count them.
    if (row >= extent.rows || active == 1) return;

    float2 stats[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        stats[i] = lane + i * 32 < active ? __ldcg(lane_stats + static_cast<int64_t>(i) * 32 * tile_rows)
                                          : make_float2(-INFINITY, 0.0f);
    const auto fetch = [&](const float* from) {
        for (int part = 0; part < own_parts; ++part)
            copy_async_16(shared_address(mine + part * 32), from + part * (kRowWarps * split_floats));
        copy_async_commit();
    };
    fetch(column);
    float most = sink;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) most = fmaxf(most, stats[i].x);
    most = warp_max(most);
    float weights[kHeld], total = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        weights[i] = exp2_fast(stats[i].x - most);
        total += weights[i] * stats[i].y;
    }
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
    total += exp2_fast(sink - most);
    const float factor = total > 0.0f ? args.v_scale / total : 0.0f;

    for (int first_quad = 0; first_quad < quads; first_quad += 32) {
        const int quad = first_quad + lane;
        if (first_quad > 0) fetch(column + (min(quad, quads - 1) - lane) * 4);
        copy_async_wait<0>();
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
#pragma unroll 8
            for (int part = i * (32 / kRowWarps); part < min(own_parts, (i + 1) * (32 / kRowWarps)); ++part) {
                const float weight = __shfl_sync(0xffffffffu, weights[i], (part * kRowWarps + warp) % 32);
                const float4 theirs = mine[part * 32];
                value.x += weight * theirs.x, value.y += weight * theirs.y;
                value.z += weight * theirs.z, value.w += weight * theirs.w;
            }
        }
        if constexpr (kRowWarps > 1) {
            *mine = value;
            __syncthreads();
            if (warp == 0)
                for (int other = 1; other < kRowWarps; ++other) {
                    const float4 theirs = mine[other * parts * 32];
                    value.x += theirs.x, value.y += theirs.y, value.z += theirs.z, value.w += theirs.w;
                }
            __syncthreads();
        }
        if (warp == 0 && quad < quads)
            *reinterpret_cast<uint2*>(target + quad * 4) = make_uint2(pack_pair<T>(value.x * factor, value.y * factor),
                                                                      pack_pair<T>(value.z * factor, value.w * factor));
    }
}

template <typename T>
auto combine_kernel(int row_warps) {
    return row_warps == 1 ? combine_splits<T, 1> : row_warps == 2 ? combine_splits<T, 2> : combine_splits<T, 4>;
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

int32_t check_shapes(const dflash_attention_params& p) {
    if (p.struct_size != sizeof(dflash_attention_params))
        return fail(DFLASH_INVALID_ARGUMENT, "attention: parameter block of %u bytes, this library expects %zu",
                    p.struct_size, sizeof(dflash_attention_params));
    if (p.dtype != DFLASH_BFLOAT16 && p.dtype != DFLASH_FLOAT16)
        return fail(DFLASH_UNSUPPORTED, "attention: dtype %d, expected bfloat16 (0) or float16 (1)", p.dtype);
    if (p.kv_dtype != p.dtype && p.kv_dtype != DFLASH_FLOAT8_E4M3)
        return fail(DFLASH_UNSUPPORTED, "attention: kv_dtype %d, expected %d like the queries or float8_e4m3 (3)",
                    p.kv_dtype, p.dtype);
    if (p.index_bytes != 4 && p.index_bytes != 8)
        return fail(DFLASH_INVALID_ARGUMENT, "attention: index_bytes %d, expected 4 or 8", p.index_bytes);
    if (p.batch < 1 || p.batch > 65535)
        return fail(DFLASH_INVALID_ARGUMENT, "attention: batch %d, expected 1..65535", p.batch);
    if (p.num_kv_heads < 1 || p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0)
        return fail(DFLASH_INVALID_ARGUMENT, "attention: %d heads over %d KV heads, expected a multiple", p.num_heads,
                    p.num_kv_heads);
    if (p.page_tokens < 16 || p.page_tokens % 16 != 0)
        return fail(DFLASH_UNSUPPORTED, "attention: page_tokens %d, expected a multiple of 16", p.page_tokens);
    if (p.pages_per_request < 0 || p.block_size < 0 || (p.block_size == 0 && p.max_query < 1))
        return fail(DFLASH_INVALID_ARGUMENT, "attention: pages_per_request %d, block_size %d, max_query %d",
                    p.pages_per_request, p.block_size, p.max_query);
    if (!(p.softcap >= 0.0f) || !(p.scale > 0.0f) || !std::isfinite(p.scale) || p.max_splits < 0)
        return fail(DFLASH_INVALID_ARGUMENT, "attention: scale %g (positive), softcap %g (0 = off), max_splits %d",
                    p.scale, p.softcap, p.max_splits);
    return DFLASH_OK;
}

int32_t check_pointers(const dflash_attention_params& p) {
    if (!p.q || !p.k_cache || !p.v_cache || !p.out || !p.context_lengths || !p.page_table)
        return fail(DFLASH_INVALID_ARGUMENT, "attention: q, caches, out, page_table and context_lengths must be set");
    if (p.block_size > 0 ? (!p.k_block || !p.v_block) : !p.query_starts)
        return fail(DFLASH_INVALID_ARGUMENT,
                    "attention: block mode needs k_block and v_block, paged mode query_starts");
    if (!aligned(p.q) || !aligned(p.k_cache) || !aligned(p.v_cache) || !aligned(p.out) || !aligned(p.k_block) ||
        !aligned(p.v_block) || !aligned(p.workspace))
        return fail(DFLASH_INVALID_ARGUMENT, "attention: data pointers must be 16-byte aligned");
    if (p.q_stride % 8 || p.out_stride % 8 || (p.block_size > 0 && p.block_stride % 8))
        return fail(DFLASH_INVALID_ARGUMENT,
                    "attention: token strides must be multiples of 8 elements, got %lld %lld %lld",
                    (long long)p.q_stride, (long long)p.out_stride, (long long)p.block_stride);
    return DFLASH_OK;
}

// Describes a cache [rows of tokens, kv_heads, head_dim] to the copy engine, in boxes of `keys` rows of one head and 64
// dimensions. How many rows there are is the page table's business.
int32_t describe_cache(const dflash_attention_params& p, const void* cache, int keys, TensorMap& map) {
    static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap), "one layout");
    constexpr cuuint64_t kAllRows = 1ull << 31;
    return describe_tensor("attention", "cache", p.dtype, cache,
                           {cuuint64_t(p.head_dim), cuuint64_t(p.num_kv_heads), kAllRows},
                           {cuuint64_t(p.head_dim) * 2, cuuint64_t(p.num_kv_heads) * p.head_dim * 2},
                           {64, 1, cuuint32_t(keys)}, reinterpret_cast<CUtensorMap&>(map));
}

// For division by `divisor`, 2 or more, through the upper half of a product: exact below 2^32 / divisor.
uint32_t inverse_of(int divisor) { return static_cast<uint32_t>(((1ull << 32) + divisor - 1) / divisor); }

AttentionArgs make_args(const dflash_attention_params& p, const Plan& plan) {
    AttentionArgs args = {};
    args.index_bytes = p.index_bytes;
    args.group = p.num_heads / p.num_kv_heads;
    args.group_inverse = inverse_of(args.group);
    args.kv_heads = p.num_kv_heads;
    args.head_dim = p.head_dim;
    args.page_tokens = p.page_tokens;
    args.pages_per_request = p.pages_per_request;
    args.page_shift = -1;
    for (int shift = 4; shift < 31; ++shift)
        if (1 << shift == p.page_tokens) args.page_shift = shift;
    if (args.page_shift < 0) args.page_inverse = inverse_of(p.page_tokens / 16);
    args.block_size = p.block_size;
    args.window_left = p.window_left;
    args.window_right = p.causal ? 0 : p.window_right;
    args.splits = plan.splits;
    args.row_tiles = plan.row_tiles;
    args.stages = plan.stages;
    args.join_in_cluster = plan.join_in_cluster;
    args.settled = p.context_settled;
    const bool float8 = p.kv_dtype == DFLASH_FLOAT8_E4M3;
    const float scale = p.scale * (float8 ? p.k_scale : 1.0f);
    args.scale_log2 = (p.softcap > 0.0f ? p.softcap : scale) * kLog2E;
    args.softcap_scale = p.softcap > 0.0f ? scale / p.softcap : 0.0f;
    args.k_inverse_scale = float8 ? 1.0f / p.k_scale : 1.0f;
    args.v_inverse_scale = float8 ? 1.0f / p.v_scale : 1.0f;
    args.v_scale = float8 ? p.v_scale : 1.0f;
    args.q = p.q, args.k_cache = p.k_cache, args.v_cache = p.v_cache;
    args.k_block = p.k_block, args.v_block = p.v_block, args.sinks = p.sinks;
    args.page_table = p.page_table, args.context_lengths = p.context_lengths;
    args.query_starts = p.query_starts, args.block_lengths = p.block_lengths;
    args.out = p.out;
    args.q_stride = p.q_stride, args.out_stride = p.out_stride, args.block_stride = p.block_stride;
    args.page_table_stride = p.page_table_stride;
    args.partial_out = static_cast<float*>(p.workspace);
    args.partial_stats = reinterpret_cast<float2*>(args.partial_out + plan.partial_floats);
    return args;
}

}  // namespace
}  // namespace dflash

int64_t dflash_attention_workspace_bytes(const dflash_attention_params* params) {
    dflash::Plan plan;
    if (dflash::check_shapes(*params) != DFLASH_OK || dflash::make_plan(*params, plan) != DFLASH_OK) return -1;
    return plan.workspace_bytes;
}

int32_t dflash_attention(const dflash_attention_params* params, dflash_stream stream) {
    using namespace dflash;
    const dflash_attention_params& p = *params;
    Plan plan;
    if (int32_t status = check_shapes(p)) return status;
    if (int32_t status = check_pointers(p)) return status;
    if (int32_t status = make_plan(p, plan)) return status;
    if (plan.workspace_bytes > 0 && (!p.workspace || p.workspace_bytes < plan.workspace_bytes))
        return fail(DFLASH_INVALID_ARGUMENT, "attention: workspace of %lld bytes, needs %lld",
                    (long long)(p.workspace ? p.workspace_bytes : 0), (long long)plan.workspace_bytes);
    AttentionArgs args = make_args(p, plan);
    if (plan.variant->tensor_maps) {
        args.copy_shift = p.page_tokens % 64 == 0 ? 6 : p.page_tokens % 32 == 0 ? 5 : 4;
        if (int32_t status = describe_cache(p, p.k_cache, 1 << args.copy_shift, args.k_map)) return status;
        if (int32_t status = describe_cache(p, p.v_cache, 1 << args.copy_shift, args.v_map)) return status;
    }
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    Launch launch(*plan.variant, plan.shared_bytes, plan.shared_limit,
                  dim3(p.num_kv_heads, plan.row_tiles * plan.splits, p.batch), plan.join_in_cluster ? plan.splits : 1);
    cudaLaunchConfig_t& config = launch.config;
    config.stream = cuda_stream;
    cudaLaunchKernelEx(&config, plan.variant->kernel, args);
    if (int32_t status = check_launch("attention")) return status;
    if (plan.splits == 1 || plan.join_in_cluster) return DFLASH_OK;

    config.gridDim = dim3(plan.join.spare_blocks + plan.join.blocks);
    config.blockDim = dim3(32 * kJoinWarps);
    config.dynamicSmemBytes = plan.join.shared_bytes;
    config.numAttrs = 1;
    const auto combine = p.dtype == DFLASH_FLOAT16 ? combine_kernel<__half>(plan.join.row_warps)
                                                   : combine_kernel<__nv_bfloat16>(plan.join.row_warps);
    cudaFuncSetAttribute(combine, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.join.shared_limit);
    cudaFuncSetAttribute(combine, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    cudaLaunchKernelEx(&config, combine, args, plan.variant->rows, plan.variant->keys, plan.join.row_blocks,
                       plan.join.spare_blocks);
    return check_launch("attention: joining the splits");
}
