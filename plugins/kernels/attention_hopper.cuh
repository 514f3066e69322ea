// The attention kernel for Hopper (SM 90a): as attention_kernel.cuh, with wgmma.
//
// mma.sync needs both operands in registers: at 64 rows it spends more issue slots and registers on fragments than a
// multiprocessor has while the memory system delivers a tile. wgmma reads K and V where they landed, so that one
// warpgroup per 64 rows keeps up with several times the memory bandwidth. Rows that do not exist cost matrix time
// that is free here, and no softmax.
#pragma once

#include "attention_hopper_tile.cuh"
#include "attention_join.cuh"
#include "attention_stream.cuh"
#include "attention_variant.h"

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
    static constexpr int kOutPitch = kHeadDim + 4;  // floats, of partial results that meet in shared memory
    static_assert(kRows * kOutPitch * 4 <= 3 * kStageBytes, "partial results reuse the ring");

    static __device__ __forceinline__ int piece_offset(int key, int chunk) {
        return chunk / 8 * kPartBytes + key * 128 + (chunk % 8 ^ key % 8) * 16;
    }

    static constexpr int shared_bytes(int stages) {
        const int ring = stages * kStageBytes, with_queries = (stages - 1) * kStageBytes + kQueryBytes;
        return (ring > with_queries ? ring : with_queries) + kAlignment;
    }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kWarpgroups == 1 ? 2 : 1)
    hopper_attention_kernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
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
        join_cluster<Shape, kPairSplits>(args, extent, kv_head, split, range.active, ring, shared_address(row_stats));
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
        const int query = args.query_of(extent.first_row + row);
        row_low[row] = row < extent.rows ? extent.key_low(args, query) : 0;
        row_high[row] = row < extent.rows ? extent.key_high(args, query) : 0;
    }
    wait_for_queries(stages - 1);
    __syncthreads();

    RowAccumulator<Shape> rows(static_cast<int>(threadIdx.x) / 32 * 16, extent);
    rows.load_queries(shared_address(query_stage));
    int stage = 0;
    for (int tile = range.begin; tile < range.end; ++tile) {
        wait_for_oldest_of(stages);
        publish_to_wgmma();
        __syncthreads();  // the tile has landed for everyone, and everyone is done with the stage refilled next
        stream.issue(tile + stages - 1, stage == 0 ? stages - 1 : stage - 1);
        copy_async_commit();
        const uint32_t k_stage = ring + stage * Shape::kStageBytes;
        stage = stage + 1 == stages ? 0 : stage + 1;
        rows.template attend<Shape::kKeys>(args, extent, row_low, row_high, k_stage, tile * Shape::kKeys, [] {});
    }
    // The combining launch may take its place on the multiprocessors now; it waits for our writes before it reads.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (joins) {
        copy_async_wait<0>();
        __syncthreads();  // every warp is done with the ring
    } else if (!rows.warp_has_rows) {
        return;
    }

    const int64_t partial_row = first_partial_row(args, request, kv_head, row_tile, split, Shape::kRows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const RowSums<Shape> sums = rows.half(half);
        if (sums.row >= extent.rows) continue;
        if (joins) {
            sums.write_partial(reinterpret_cast<float*>(shared) + sums.row * Shape::kOutPitch, row_stats + sums.row);
        } else if (range.active > 1) {
            sums.write_partial(args.partial_out + (partial_row + sums.row) * Shape::kHeadDim,
                               args.partial_stats + partial_row + sums.row);
        } else {
            sums.write_result(args, extent, kv_head);
        }
    }
    if (joins)
        join_cluster<Shape, kPairSplits>(args, extent, kv_head, split, range.active, ring, shared_address(row_stats));
#endif
}

}  // namespace dflash
