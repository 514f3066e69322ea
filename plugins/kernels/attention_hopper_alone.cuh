// The Hopper kernel for work that fits one wave: a block fills a multiprocessor, and the tensor copy engine feeds it.
//
// One warp asks for key tiles, a few instructions each, where copies by threads spend most of a warp's time on
// addresses; two warpgroups take half the keys of each tile, so that the last one is done soon after it has come.
// Splits of a row tile that find room as one thread block cluster join by messages through the cluster's network. Large
// clusters often do not, since the multiprocessors of a chip are not spread evenly (measured on an H200: 7 clusters of
// 16, 15 of 8, 30 of 4, 66 of 2); then a second launch joins them.
//
// The copy engine takes tiles whose 64 keys are all in the cache and in sight. The others, at the ends, are copied by
// the warpgroups themselves, while the first tiles are on their way: their order does not matter.
#pragma once

#include "attention_hopper_tile.cuh"
#include "attention_inbox.cuh"
#include "attention_stream.cuh"
#include "attention_variant.h"
#include "overlapped_launch.cuh"
#include "tensor_copy.cuh"

namespace dflash {

template <typename T_, int kHeadDim_>
struct AloneShape {
    using T = T_;
    static constexpr bool kFloat8 = false;
    static constexpr int kHeadDim = kHeadDim_, kKeys = 64, kKeyGroups = 2, kGroupKeys = kKeys / kKeyGroups, kRows = 64;
    static constexpr int kThreads = 128 * kKeyGroups;  // of the warpgroups
    // The warp that fetches has its own warpgroup, whose registers the others take over.
    static constexpr int kLaunchThreads = kThreads + 128;
    static constexpr int kFetchRegisters = 40, kRegisters = 232;
    // The last stages first serve tiles at the ends.
    static constexpr int kStages = 6, kLentStages = 2;
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kPartBytes = kKeys * 128;  // all keys, 64 dimensions
    static constexpr int kValueOffset = kHeadDim / 64 * kPartBytes, kStageBytes = 2 * kValueOffset;
    static constexpr int kQueryPitch = (kHeadDim / 8 | 1) * 16, kQueryBytes = kRows * kQueryPitch;
    static constexpr int kAlignment = 1024;  // of the swizzle
    // Where other blocks' partial rows arrive: over the queries, which are in registers by then. 65 rows hold what a
    // block receives in clusters of all sizes but 12 and 15.
    static constexpr int kHeldRows = 65, kInboxBytes = kHeldRows * (kHeadDim * 4 + 8);
    static constexpr int kAfterRingBytes = kInboxBytes > kQueryBytes ? kInboxBytes : kQueryBytes;
    // After the last tile the ring holds what the warpgroups give each other, a stage for the sums of each and one for
    // the rest, and the block's own rows for the join.
    static constexpr int kStatsStage = kKeyGroups, kOwnStage = kStatsStage + 1;
    static_assert(kHeadDim / 8 * 128 * 8 <= kStageBytes && kOwnStage < kStages, "one stage holds what is given");

    static __device__ __forceinline__ int piece_offset(int key, int chunk) {
        return chunk / 8 * kPartBytes + key * 128 + (chunk % 8 ^ key % 8) * 16;
    }

    static constexpr int shared_bytes(int) { return kStages * kStageBytes + kAfterRingBytes + kAlignment - 16; }
};

// Which tiles of a split the copy engine takes: `count` from `first`. The others are those before and after.
struct WholeTiles {
    int first, count, edges;

    // With a settled context only that: rows of the pass itself may still be on their way to the cache.
    __device__ __forceinline__ WholeTiles(const Extent& extent, const SplitRange& range, int tile_keys, bool settled) {
        first = max(range.begin, (extent.low + tile_keys - 1) / tile_keys);
        count = max(0, min(range.end, (settled ? extent.context : extent.cached) / tile_keys) - first);
        edges = range.end - range.begin - count;
    }

    // Tile number of edge `i`.
    __device__ __forceinline__ int edge(const SplitRange& range, int i) const {
        const int before = min(first, range.end) - range.begin;
        return i < before ? range.begin + i : first + count + i - before;
    }
};

// Runs as one warp: fetches the whole tiles in order, lane i the i-th part of each.
template <typename Shape>
__device__ __forceinline__ void fetch_tiles(const AttentionArgs& args, const Extent& extent, const WholeTiles& whole,
                                            int request, int kv_head, uint32_t ring, uint32_t full, uint32_t empty) {
    constexpr int kHalves = Shape::kHeadDim / 64, kGroups = Shape::kKeys / 16, kBatch = 32 / kGroups;
    const int lane = threadIdx.x % 32;
    const int copies = Shape::kKeys / args.copy_keys * kHalves * 2;  // at most 16
    // The halves of a row follow each other: they are neighbours in memory.
    const int half = lane % kHalves, values = lane / kHalves % 2, part = lane / kHalves / 2 * args.copy_keys;
    const TensorMap* map = values ? &args.v_map : &args.k_map;
    const uint32_t target = ring + values * Shape::kValueOffset + half * Shape::kPartBytes + part * 128;
    const uint64_t policy = evict_first_policy();
    // Lane l holds the cache row of key group l % kGroups of tile first + l / kGroups; the next batch's pages are on
    // their way.
    auto key_of = [&](int first) { return (whole.first + first) * Shape::kKeys + lane * 16; };
    auto page_of = [&](int key) { return args.page_shift >= 0 ? key >> args.page_shift : key / args.page_tokens; };
    const int end_key = (whole.first + whole.count) * Shape::kKeys;
    auto read_page = [&](int first) {
        const int key = key_of(first);
        if (key >= end_key) return 0;
        const int64_t entry = request * args.page_table_stride + page_of(key);
        return static_cast<int>(load_index(args.page_table, entry, args.index_bytes));
    };
    int page = read_page(0), next_page = read_page(kBatch), rows = 0;
    for (int i = 0; i < whole.count; ++i) {
        const int in_batch = i % kBatch;
        if (in_batch == 0) {
            if (i > 0) {
                page = next_page;
                next_page = read_page(i + kBatch);
            }
            const int key = key_of(i);
            rows = page * args.page_tokens + key - page_of(key) * args.page_tokens;
        }
        const int row = __shfl_sync(0xffffffffu, rows, in_batch * kGroups + min(part, Shape::kKeys - 16) / 16);
        const int stage = i % Shape::kStages, turn = i / Shape::kStages;
        const bool lent = stage >= Shape::kStages - Shape::kLentStages;
        if (lent || turn > 0) wait_for_phase(empty + stage * 8, lent ? turn & 1 : (turn - 1) & 1);
        if (lane == 0) expect_bytes(full + stage * 8, Shape::kStageBytes);
        __syncwarp();
        if (lane < copies)
            copy_box(target + stage * Shape::kStageBytes, map, half * 64, kv_head, row, full + stage * 8, policy);
    }
}

// Copies the keys of one tile that exist and are in sight, by the threads of both warpgroups; zeros elsewhere.
template <typename Shape>
__device__ __forceinline__ void copy_edge_tile(const AttentionArgs& args, const Extent& extent, int request,
                                               int kv_head, int tile, uint32_t stage) {
    const int64_t row_elements = static_cast<int64_t>(args.kv_heads) * Shape::kHeadDim;
    const int64_t head = static_cast<int64_t>(kv_head) * Shape::kHeadDim;
#pragma unroll 4
    for (int piece = threadIdx.x; piece < Shape::kKeys * Shape::kChunks; piece += Shape::kThreads) {
        const int key = piece / Shape::kChunks, chunk = piece % Shape::kChunks;
        const int position = tile * Shape::kKeys + key;
        const void *k = args.k_cache, *v = args.v_cache;
        int64_t element = 0;
        bool present = false;
        if (position >= extent.low && position < extent.cached) {
            const int page = args.page_shift >= 0 ? position >> args.page_shift : position / args.page_tokens;
            const int64_t entry = request * args.page_table_stride + page;
            const int64_t physical = load_index(args.page_table, entry, args.index_bytes);
            element = (physical * args.page_tokens + position - page * args.page_tokens) * row_elements + head;
            present = true;
        } else if (position >= extent.cached && position < extent.total) {
            k = args.k_block, v = args.v_block;
            element =
                (static_cast<int64_t>(request) * args.block_size + position - extent.cached) * args.block_stride + head;
            present = true;
        }
        const int64_t offset = present ? element * 2 + chunk * 16 : 0;
        const uint32_t shared = stage + Shape::piece_offset(key, chunk);
        copy_async_16_or_zero(shared, static_cast<const char*>(k) + offset, present);
        copy_async_16_or_zero(shared + Shape::kValueOffset, static_cast<const char*>(v) + offset, present);
    }
    copy_async_commit();
}

// Adds the sums of both warpgroups: each finishes half the rows, and gives the other half away.
template <typename Shape>
__device__ __forceinline__ RowSums<Shape> meet_other_warpgroup(const RowAccumulator<Shape>& rows, int key_group,
                                                               char* ring) {
    const auto sums_of = [&](int group) { return reinterpret_cast<float2*>(ring + group * Shape::kStageBytes); };
    const auto stats_of = [&](int group) {
        return reinterpret_cast<float2*>(ring + Shape::kStatsStage * Shape::kStageBytes) + group * 128;
    };
    RowSums<Shape> kept = rows.half(key_group);
    named_barrier<Shape::kThreads>(1);  // everybody is done with the ring
    if (rows.warp_has_rows) rows.half(1 - key_group).give(sums_of(key_group), stats_of(key_group));
    named_barrier<Shape::kThreads>(1);
    if (rows.warp_has_rows) kept.take(sums_of(1 - key_group), stats_of(1 - key_group));
    return kept;
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kLaunchThreads, 1)
    hopper_alone_kernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kStages = Shape::kStages;
    extern __shared__ char unaligned[];
    __shared__ int row_low[Shape::kRows], row_high[Shape::kRows];
    __shared__ alignas(8) uint64_t barriers[2 * kStages + 1];
    const uint32_t full = shared_address(barriers), empty = full + kStages * 8, arrived = empty + kStages * 8;
    // The next launch is set up early: its blocks find room as ours leave. One that joins our splits must find lengths
    // that nobody writes any more.
    const bool joined_by_launch = args.splits > 1 && !args.join_in_cluster;
    if (!joined_by_launch) let_next_launch_start();
    if (threadIdx.x == 0) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
        for (int stage = 0; stage < kStages; ++stage) {
            start_barrier(full + stage * 8, 1);
            start_barrier(empty + stage * 8, Shape::kThreads / 32);
        }
        start_barrier(arrived, 1);
        publish_barriers();
    }
    const uint32_t misalignment = shared_address(unaligned) % Shape::kAlignment;
    char* shared = unaligned + (misalignment ? Shape::kAlignment - misalignment : 0);
    const uint32_t ring = shared_address(shared);
    char* after_ring = shared + kStages * Shape::kStageBytes;
    __syncthreads();

    const int kv_head = blockIdx.x, request = blockIdx.z;
    const int split = blockIdx.y % args.splits;
    const int row_tile = args.row_tiles - 1 - static_cast<int>(blockIdx.y) / args.splits;
    if (args.settled) {
        prefetch_indices(args, request);
    } else {
        begin_attention(args, request);
    }
    const Extent extent(args, request, row_tile, Shape::kRows);
    const SplitRange range(extent, args.splits, split, Shape::kKeys);
    const bool joins = args.join_in_cluster && range.active > 1, has_tiles = split < range.active;
    if (extent.rows <= 0 || (!has_tiles && !joins)) {
        // Nobody leaves early: this launch is complete only after the one in front of it.
        if (args.settled) wait_for_launch_in_front();
        return;
    }
    const WholeTiles whole(extent, range, Shape::kKeys, args.settled);
    if (threadIdx.x >= Shape::kThreads) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kFetchRegisters));
        if (has_tiles && threadIdx.x < Shape::kThreads + 32)
            fetch_tiles<Shape>(args, extent, whole, request, kv_head, ring, full, empty);
        if (args.settled) wait_for_launch_in_front();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kRegisters));
        // Queries and new keys may come from the launch in front, whatever is settled.
        if (args.settled) wait_for_launch_in_front();
        const Inbox<Shape> inbox(extent, split, args.splits, range.active, shared_address(after_ring),
                                 ring + Shape::kOwnStage * Shape::kStageBytes, arrived);
        if (joins && threadIdx.x == 0) inbox.expect(extent);
        if (has_tiles) {
            const int key_group = threadIdx.x / 128;
            const auto lent_stage = [](int edge) { return kStages - Shape::kLentStages + edge % Shape::kLentStages; };
            const auto copy_edge = [&](int edge) {
                copy_edge_tile<Shape>(args, extent, request, kv_head, whole.edge(range, edge),
                                      ring + lent_stage(edge) * Shape::kStageBytes);
            };
            stage_queries<Shape>(args, extent, kv_head, after_ring);
            copy_async_commit();
            for (int edge = 0; edge < min(whole.edges, Shape::kLentStages); ++edge) copy_edge(edge);
            for (int row = threadIdx.x; row < Shape::kRows; row += Shape::kThreads) {
                const int query = (extent.first_row + row) / args.group;
                row_low[row] = row < extent.rows ? extent.key_low(args, query) : 0;
                row_high[row] = row < extent.rows ? extent.key_high(args, query) : 0;
            }
            copy_async_wait<0>();
            publish_to_wgmma();
            named_barrier<Shape::kThreads>(1);
            RowAccumulator<Shape> rows(threadIdx.x % 128 / 32 * 16, extent);
            rows.load_queries(shared_address(after_ring));

            const int steps = whole.edges + whole.count;
            for (int edge = whole.edges; edge < Shape::kLentStages; ++edge)
                if (rows.lane == 0) arrive(empty + lent_stage(edge) * 8);
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                const bool edge = step < whole.edges;
                const int index = edge ? step : step - whole.edges;
                const int stage = edge ? lent_stage(index) : index % kStages;
                const int tile = edge ? whole.edge(range, index) : whole.first + index;
                if (!edge) {
                    wait_for_phase(full + stage * 8, index / kStages & 1);
                } else if (index >= Shape::kLentStages) {
                    publish_to_wgmma();
                    named_barrier<Shape::kThreads>(1);  // everybody is done with the stage
                    copy_edge(index);
                    copy_async_wait<0>();
                    publish_to_wgmma();
                    named_barrier<Shape::kThreads>(1);
                }
                rows.attend(args, extent, row_low, row_high,
                            ring + stage * Shape::kStageBytes + key_group * Shape::kGroupKeys * 128,
                            tile * Shape::kKeys + key_group * Shape::kGroupKeys);
                if ((!edge || index + Shape::kLentStages >= whole.edges) && rows.lane == 0) arrive(empty + stage * 8);
                // The queries are in registers: messages may take their place.
                if (joins && step == 0) arrive_in_cluster_relaxed();
            }
            if (joins && steps == 0) arrive_in_cluster_relaxed();
            if (joined_by_launch) let_next_launch_start();
            const RowSums<Shape> sums = meet_other_warpgroup(rows, key_group, shared);
            if (joins) {
                wait_for_cluster();
                if (rows.warp_has_rows) inbox.send_row(sums, extent);
            } else if (sums.row < extent.rows) {
                if (range.active > 1) {
                    const int64_t row =
                        first_partial_row(args, request, kv_head, row_tile, split, Shape::kRows) + sums.row;
                    sums.write_partial(args.partial_out + row * Shape::kHeadDim, args.partial_stats + row);
                } else {
                    sums.write_result(args, extent, kv_head);
                }
            }
        } else {
            arrive_in_cluster_relaxed();
            wait_for_cluster();
        }
        if (joins) inbox.finish(args, extent, kv_head);
    }
#endif
}

}  // namespace dflash
