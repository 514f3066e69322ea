// The attention kernel for Hopper (SM 90a): as attention_kernel.cuh, with wgmma.
//
// mma.sync needs both operands in registers: at 64 rows it spends more issue slots and registers on fragments than a
// multiprocessor has while the memory system delivers a tile. wgmma reads K and V where they landed, so that one
// warpgroup per 64 rows keeps up with several times the memory bandwidth. Rows that do not exist cost matrix time
// that is free here, and no softmax.
#pragma once

#include "attention_stream.cuh"
#include "attention_variant.h"
#include "wgmma.cuh"

namespace dflash {

template <typename T_, int kHeadDim_, int kWarpgroups_>
struct HopperShape {
    using T = T_;
    static constexpr bool kFloat8 = false;
    static constexpr int kHeadDim = kHeadDim_, kWarpgroups = kWarpgroups_, kKeys = 64;
    static constexpr int kThreads = 128 * kWarpgroups, kRows = 64 * kWarpgroups;
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kPartBytes = kKeys * 128;  // all keys, 64 dimensions
    static constexpr int kValueOffset = kHeadDim / 64 * kPartBytes, kStageBytes = 2 * kValueOffset;
    static constexpr int kQueryPitch = (kHeadDim / 8 | 1) * 16, kQueryBytes = kRows * kQueryPitch;
    static constexpr int kAlignment = 1024;         // of the swizzle
    static constexpr int kOutPitch = kHeadDim + 4;  // floats, of partial results that meet in a cluster
    static_assert(kRows * kOutPitch * 4 <= 3 * kStageBytes, "partial results reuse the ring");

    static __device__ __forceinline__ int piece_offset(int key, int chunk) {
        return chunk / 8 * kPartBytes + key * 128 + (chunk % 8 ^ key % 8) * 16;
    }

    static constexpr int shared_bytes(int stages) {
        const int ring = stages * kStageBytes, with_queries = (stages - 1) * kStageBytes + kQueryBytes;
        return (ring > with_queries ? ring : with_queries) + kAlignment;
    }
};

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t peer_address(uint32_t shared, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

__device__ __forceinline__ float4 load_peer(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_peer_pair(uint32_t address) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// Joins the two splits of a row tile, which are one cluster: each block has its partial rows in shared memory (`outs`,
// `stats`) and finishes every other row, a warp per row. A block without keys helps, too.
template <typename Shape>
__device__ __forceinline__ void join_cluster(const AttentionArgs& args, const Extent& extent, int kv_head, int split,
                                             int active, uint32_t outs, uint32_t stats) {
    constexpr int kMaxPeers = kClusterSplits, kQuads = Shape::kHeadDim / 4;
    const int lane = threadIdx.x % 32;
    cluster_barrier();
    for (int row = split + static_cast<int>(threadIdx.x) / 32 * args.splits; row < extent.rows;
         row += Shape::kThreads / 32 * args.splits) {
        const int request_row = extent.first_row + row;
        const int head = kv_head * args.group + request_row % args.group;
        const float sink = args.sinks ? args.sinks[head] * 1.4426950408889634f : -INFINITY;
        float2 peer[kMaxPeers];
        float4 part[kMaxPeers];
        float most = sink;
#pragma unroll
        for (int i = 0; i < kMaxPeers; ++i) {
            peer[i] = make_float2(-INFINITY, 0.0f);
            part[i] = make_float4(0, 0, 0, 0);
            if (i >= active) continue;
            peer[i] = load_peer_pair(peer_address(stats + row * 8, i));
            if (lane < kQuads) part[i] = load_peer(peer_address(outs + (row * Shape::kOutPitch + lane * 4) * 4, i));
            most = fmaxf(most, peer[i].x);
        }
        float total = exp2_fast(sink - most);
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < kMaxPeers; ++i) {
            const float weight = exp2_fast(peer[i].x - most);
            total += weight * peer[i].y;
            value.x += weight * part[i].x, value.y += weight * part[i].y;
            value.z += weight * part[i].z, value.w += weight * part[i].w;
        }
        const float factor = total > 0.0f ? 1.0f / total : 0.0f;
        auto* target = static_cast<typename Shape::T*>(args.out) +
                       (extent.query_begin + request_row / args.group) * args.out_stride + head * Shape::kHeadDim;
        if (lane < kQuads)
            reinterpret_cast<uint2*>(target)[lane] =
                make_uint2(pack_pair<typename Shape::T>(value.x * factor, value.y * factor),
                           pack_pair<typename Shape::T>(value.z * factor, value.w * factor));
    }
    cluster_barrier();  // nobody's shared memory goes away while a peer may read it
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kWarpgroups == 1 ? 2 : 1)
    hopper_attention_kernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using T = typename Shape::T;
    constexpr int kSteps = Shape::kHeadDim / 16, kKeyTiles = Shape::kKeys / 8;
    extern __shared__ char unaligned[];
    __shared__ int row_low[Shape::kRows], row_high[Shape::kRows];
    __shared__ float2 row_stats[Shape::kRows];

    const int kv_head = blockIdx.x, request = blockIdx.z;
    const int split = blockIdx.y % args.splits;
    const int row_tile = args.row_tiles - 1 - static_cast<int>(blockIdx.y) / args.splits;
    begin_attention(args, request);
    const Extent extent(args, request, row_tile, Shape::kRows);
    if (extent.rows <= 0) return;
    const SplitRange range(extent, args.splits, split, Shape::kKeys);
    const bool joins = args.join_in_cluster && range.active > 1;
    if (split >= range.active && !joins) return;

    const uint32_t misalignment = shared_address(unaligned) % Shape::kAlignment;
    char* shared = unaligned + (misalignment ? Shape::kAlignment - misalignment : 0);
    const uint32_t ring = shared_address(shared);
    if (split >= range.active) {
        join_cluster<Shape>(args, extent, kv_head, split, range.active, ring, shared_address(row_stats));
        return;
    }
    KeyStream<Shape> stream(args, extent, range, request, kv_head, ring);
    const int stages = args.stages;
    char* query_stage = shared + (stages - 1) * Shape::kStageBytes;
    stage_queries<Shape>(args, extent, kv_head, query_stage);
    copy_async_commit();
#pragma unroll 1
    for (int s = 0; s < stages - 1; ++s) {
        stream.issue(range.begin + s, s);
        copy_async_commit();
    }
    for (int row = threadIdx.x; row < Shape::kRows; row += Shape::kThreads) {
        const int query = (extent.first_row + row) / args.group;
        row_low[row] = row < extent.rows ? extent.key_low(args, query) : 0;
        row_high[row] = row < extent.rows ? extent.key_high(args, query) : 0;
    }
    wait_for_queries(stages - 1);
    __syncthreads();

    const int lane = threadIdx.x % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
    const bool warp_has_rows = warp_row < extent.rows;
    uint32_t queries[kSteps][4];
    const uint32_t query_address =
        shared_address(query_stage) + (warp_row + lane % 16) * Shape::kQueryPitch + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ldmatrix_x4(queries[k], query_address + k * 32);

    float out[2 * kSteps][4] = {};
    float sum[2] = {}, reference[2] = {-1e30f, -1e30f};
    int stage = 0;
    for (int tile = range.begin; tile < range.end; ++tile) {
        wait_for_oldest_of(stages);
        publish_to_wgmma();
        __syncthreads();  // the tile has landed for everyone, and everyone is done with the stage refilled next
        stream.issue(tile + stages - 1, stage == 0 ? stages - 1 : stage - 1);
        copy_async_commit();
        const uint32_t k_stage = ring + stage * Shape::kStageBytes;
        stage = stage + 1 == stages ? 0 : stage + 1;

        float score[kKeyTiles][4];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
            Wgmma<T, Shape::kKeys>::template multiply<0>(
                score, queries[k], wgmma_operand(k_stage + k / 4 * Shape::kPartBytes + k % 4 * 32, 16, 1024), k > 0);
        wgmma_finish();

        uint32_t weights[kKeyTiles / 2][4] = {};
        if (warp_has_rows) {
            if (args.softcap_scale != 0.0f) {
#pragma unroll
                for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                    for (float& x : score[n]) x = tanh_fast(x * args.softcap_scale);
            }
            const int key0 = tile * Shape::kKeys;
            if (key0 < extent.full_low || key0 + Shape::kKeys > extent.full_high) {
                const int row = warp_row + lane / 4;
                const int low[2] = {row_low[row] - key0, row_low[row + 8] - key0};
                const int high[2] = {row_high[row] - key0, row_high[row + 8] - key0};
#pragma unroll
                for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int key = n * 8 + lane % 4 * 2 + i % 2;
                        if (key < low[i / 2] || key >= high[i / 2]) score[n][i] = -INFINITY;
                    }
            }
            float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
                most[0] = fmaxf(most[0], fmaxf(score[n][0], score[n][1]));
                most[1] = fmaxf(most[1], fmaxf(score[n][2], score[n][3]));
            }
            most[0] *= args.scale_log2, most[1] *= args.scale_log2;
            // Any reference within 2^8 of the maximum is as exact in float32 as the maximum itself, so that the
            // accumulators are rescaled a few times per pass and not at every tile.
            if (__any_sync(0xffffffffu, most[0] > reference[0] + 8.0f || most[1] > reference[1] + 8.0f)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float top = fmaxf(most[half], reference[half]);
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                    const float factor = exp2_fast(reference[half] - top);
                    reference[half] = top;
                    sum[half] *= factor;
#pragma unroll
                    for (int n = 0; n < 2 * kSteps; ++n) {
                        out[n][half * 2] *= factor;
                        out[n][half * 2 + 1] *= factor;
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float low = exp2_fast(fmaf(score[n][half * 2], args.scale_log2, -reference[half]));
                    const float high = exp2_fast(fmaf(score[n][half * 2 + 1], args.scale_log2, -reference[half]));
                    sum[half] += low + high;
                    weights[n / 2][n % 2 * 2 + half] = pack_pair<T>(low, high);
                }
        }
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kKeyTiles / 2; ++k)
            Wgmma<T, Shape::kHeadDim>::template multiply<1>(
                out, weights[k], wgmma_operand(k_stage + Shape::kValueOffset + k * 2048, Shape::kPartBytes, 1024), 1);
        wgmma_finish();
    }
    // The combining launch may take its place on the multiprocessors now; it waits for our writes before it reads.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (joins) {
        copy_async_wait<0>();
        __syncthreads();  // every warp is done with the ring
    } else if (!warp_has_rows) {
        return;
    }

    const int64_t partial_row =
        (((static_cast<int64_t>(request) * args.kv_heads + kv_head) * args.row_tiles + row_tile) * args.splits +
         split) *
        Shape::kRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = sum[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const int row = warp_row + half * 8 + lane / 4;
        if (row >= extent.rows) continue;
        if (joins) {
            float* target = reinterpret_cast<float*>(shared) + row * Shape::kOutPitch + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 2 * kSteps; ++n)
                *reinterpret_cast<float2*>(target + n * 8) = make_float2(out[n][half * 2], out[n][half * 2 + 1]);
            if (lane % 4 == 0) row_stats[row] = make_float2(reference[half], total);
            continue;
        }
        if (range.active > 1) {
            float* target = args.partial_out + (partial_row + row) * Shape::kHeadDim + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 2 * kSteps; ++n)
                *reinterpret_cast<float2*>(target + n * 8) = make_float2(out[n][half * 2], out[n][half * 2 + 1]);
            if (lane % 4 == 0) args.partial_stats[partial_row + row] = make_float2(reference[half], total);
            continue;
        }
        const int request_row = extent.first_row + row;
        const int head = kv_head * args.group + request_row % args.group;
        const float sink = args.sinks ? args.sinks[head] * 1.4426950408889634f : -INFINITY;
        // A sink far above every key would overflow relative to the reference: take the larger of the two.
        const float top = fmaxf(reference[half], sink);
        const float weight = exp2_fast(reference[half] - top);
        total = total * weight + exp2_fast(sink - top);
        const float factor = total > 0.0f ? weight / total : 0.0f;
        T* target = static_cast<T*>(args.out) + (extent.query_begin + request_row / args.group) * args.out_stride +
                    head * Shape::kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n)
            *reinterpret_cast<uint32_t*>(target + n * 8) =
                pack_pair<T>(out[n][half * 2] * factor, out[n][half * 2 + 1] * factor);
    }
    if (joins) join_cluster<Shape>(args, extent, kv_head, split, range.active, ring, shared_address(row_stats));
#endif
}

}  // namespace dflash
