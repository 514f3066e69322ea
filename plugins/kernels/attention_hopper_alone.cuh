// The Hopper kernel for up to 64 rows: a block fills a multiprocessor, and the tensor copy engine feeds it.
//
// One warp asks for key tiles, a few instructions each, where copies by threads spend most of a warp's time on
// addresses; two warpgroups take turns with the tiles, and half each of the last one, so that it is done soon after it
// has come. Splits of a row tile that find room as one thread block cluster join by messages through the cluster's
// network. Large clusters often do not, since the multiprocessors of a chip are not spread evenly (measured on an H200:
// 7 clusters of 16, 15 of 8, 30 of 4, 66 of 2); then a second launch joins them, whose blocks wait beside ours.
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
    static constexpr int kHeadDim = kHeadDim_, kKeys = 64, kRows = 64;
    static constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups;
    static constexpr int kReturningWarps = 4;  // those of one warpgroup say that K or V of a stage is done with
    // The warp that fetches has its own warpgroup, whose registers the others take over. Threads start with fewer than
    // they could: the rest is room for a block of the launch that joins splits.
    static constexpr int kLaunchThreads = kThreads + 128;
    static constexpr int kStartRegisters = 136, kFetchRegisters = 40, kRegisters = 184;
    // With fewer than all stages, blocks of the launch that joins splits wait beside. Those above kLeastRing are lent
    // to tiles at the ends, where there are such; the others are the ring.
    static constexpr int kStages = 6, kStagesBesideJoin = 5, kLeastRing = 4;
    // Tiles that are on their way at a time; K and V of each are waited for apart. More come no faster, but many of
    // them at once, and unevenly among the multiprocessors; and everything else that is read waits behind them. Only a
    // split with many tiles gains by some more.
    static constexpr int kAhead = 2, kAheadLong = 3;
    // A wait for a phase is over at once while the phase before has not ended. So whoever waits for a tile must know
    // that the tile before it in the stage has come: it was its own, or its own last tile was asked for after that one
    // came.
    static_assert(kLeastRing % kWarpgroups == 0 && kLeastRing + 1 >= kWarpgroups + kAheadLong &&
                      kStages <= kLeastRing + 2,
                  "odd rings are long enough");
    // By then the edges have come, which wait behind the first tiles of everybody.
    static constexpr int kTilesBeforeEdges = 2, kTilesBeforeEdgesBesideJoin = 4;
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kPartBytes = kKeys * 128;  // all keys, 64 dimensions
    static constexpr int kValueOffset = kHeadDim / 64 * kPartBytes, kStageBytes = 2 * kValueOffset;
    static constexpr int kQueryPitch = (kHeadDim / 8 | 1) * 16, kQueryBytes = kRows * kQueryPitch;
    static constexpr int kAlignment = 1024;  // of the swizzle
    // Where other blocks' partial rows arrive: over the queries, which are in registers by then. 65 rows hold what a
    // block receives in clusters of all sizes but 12 and 15.
    static constexpr int kHeldRows = 65, kInboxBytes = kHeldRows * (kHeadDim * 4 + 8);
    static constexpr int kMoreInCluster = kInboxBytes > kQueryBytes ? kInboxBytes - kQueryBytes : 0;
    // After the last tile the ring holds what the warpgroups give each other, a stage for the sums of each and one for
    // the rest, and the block's own rows for the join, or what the warps write them through.
    static constexpr int kStatsStage = kWarpgroups, kOwnStage = kStatsStage + 1;
    static_assert(kHeadDim / 8 * 128 * 8 <= kStageBytes && kOwnStage < kStagesBesideJoin &&
                      kStagesBesideJoin <= kStages,
                  "one stage holds what is given");
    static_assert(4 * kWarpgroups * 8 * (kHeadDim + 8) * 4 <= (kStagesBesideJoin - kOwnStage) * kStageBytes,
                  "rows are written through the last stages");

    static __device__ __forceinline__ int piece_offset(int key, int chunk) {
        return chunk / 8 * kPartBytes + key * 128 + (chunk % 8 ^ key % 8) * 16;
    }

    static constexpr int shared_bytes(int stages) { return stages * kStageBytes + kQueryBytes + kAlignment - 16; }
};

// Which key tiles the splits of a row tile take. The copy engine fetches the whole ones, which the splits deal out in
// turn, so that a split knows its first before it has seen a length. The few others, before and after those, go to the
// last split, which has the fewest whole tiles.
struct TileShares {
    int active;                  // splits that have work; at least 1, split 0 always writes
    int whole_begin, whole_end;  // whole tiles; split s takes whole_begin + s and every active-th from there
    int edges_before, edges_after;

    // With a settled context only its tiles are whole: rows of the pass itself may still be on their way to the cache.
    __device__ __forceinline__ TileShares(const Extent& extent, int splits, int tile_keys, bool settled) {
        const TileRange all(extent, tile_keys);
        active = all.active(splits);
        whole_begin = min((extent.low + tile_keys - 1) / tile_keys, all.begin + all.count);
        whole_end =
            max(whole_begin, min(all.begin + all.count, (settled ? extent.context : extent.cached) / tile_keys));
        edges_before = whole_begin - all.begin;
        edges_after = all.begin + all.count - whole_end;
    }

    __device__ __forceinline__ int edges(int split) const {
        return split == active - 1 ? edges_before + edges_after : 0;
    }

    // Tile number of edge `i`.
    __device__ __forceinline__ int edge(int i) const {
        return i < edges_before ? whole_begin - edges_before + i : whole_end + i - edges_before;
    }
};

// The usual case, in few instructions, since the first fetch waits for them: whether rows of the tile exist, see the
// whole context, and all whole tiles are `end` ones of it, enough for every split; `edges` follow. TileShares says the
// same of it.
template <typename Shape>
__device__ __forceinline__ bool all_context_is_seen(const AttentionArgs& args, int request, int& end, int& edges) {
    const int context = args.index(args.context_lengths, request);
    int queries = args.block_size, cached = context, total = context;
    if (args.block_size == 0) {
        queries = args.index(args.query_starts, request + 1) - args.index(args.query_starts, request);
        total += queries;
        if (!args.settled) cached = total;
    } else {
        total += args.block_lengths ? args.index(args.block_lengths, request) : queries;
    }
    end = context / Shape::kKeys;
    edges = (total + Shape::kKeys - 1) / Shape::kKeys - end;
    return args.window_left < 0 && queries > 0 && end >= kMinTilesPerSplit * args.splits &&
           cached / Shape::kKeys == end;
}

// The warp that fetches whole tiles, K and V of each on barriers of their own: lane i the i-th part of either.
template <typename Shape>
struct TileFetcher {
    static constexpr int kHalves = Shape::kHeadDim / 64, kGroups = Shape::kKeys / 16, kBatch = 32 / kGroups;

    const AttentionArgs& args;
    const int request, split, kv_head, lane;
    const uint64_t policy = evict_first_policy();
    int column, group;  // where this lane's part begins in a row; with which key group of a tile
    bool copies;
    uint32_t target;      // of this lane's part of a stage
    int rows = 0;         // cache row of key group lane % kGroups of the lane / kGroups-th tile of a batch
    int tile, step, end;  // the next tile; the split takes every step-th below `end`
    int stages;           // of the ring

    __device__ __forceinline__ TileFetcher(const AttentionArgs& args, int request, int split, int kv_head,
                                           uint32_t ring)
        : args(args), request(request), split(split), kv_head(kv_head), lane(threadIdx.x % 32) {
        // The halves of a row follow each other: they are neighbours in memory.
        column = lane % kHalves * 64;
        group = lane / kHalves << (args.copy_shift - 4);
        copies = group < kGroups;
        group = min(group, kGroups - 1);
        target = ring + lane % kHalves * Shape::kPartBytes + group * (16 * 128);
        tile = split, step = args.splits, end = 0;
        find_tiles();
    }

    __device__ __forceinline__ int key_of(int first, int step) const {
        return (first + lane / kGroups * step) * Shape::kKeys + lane % kGroups * 16;
    }

    // Of the batch that begins with tile `first`; 0 at and above `end_page` of the request.
    __device__ __forceinline__ int page_from(int first, int step, int end_page) const {
        const int entry = args.page_of(key_of(first, step));
        return entry < end_page ? args.page(request, entry) : 0;
    }

    __device__ __forceinline__ int row_of(int page, int first, int step) const {
        const int key = key_of(first, step);
        return (page - args.page_of(key)) * args.page_tokens + key;
    }

    // Waits for the launch in front, unless what it reads is settled; says which tiles the split has. Reads the pages
    // of the first ones under the assumption that all splits have work and that the first key is in sight: beside the
    // lengths, not after them.
    __device__ __forceinline__ void find_tiles() {
        const int entry = args.page_of(key_of(split, args.splits));
        const void* address = args.page_address(request, entry);
        asm volatile("" : "+l"(address));  // before the wait
        if (!args.settled) wait_for_launch_in_front();
        const int page = entry < args.pages_per_request ? *static_cast<const int*>(address) : 0;
        rows = row_of(page, split, args.splits);
        int edges;
        stages = args.stages;
        if (all_context_is_seen<Shape>(args, request, end, edges)) {
            if (split == args.splits - 1) stages -= min(edges, args.stages - Shape::kLeastRing);
            return;
        }
        const Extent extent(args, request, 0, Shape::kRows);
        const TileShares shares(extent, args.splits, Shape::kKeys, args.settled);
        tile = shares.whole_begin + split, step = shares.active;
        end = extent.rows > 0 && split < shares.active ? shares.whole_end : 0;
        stages -= min(shares.edges(split), args.stages - Shape::kLeastRing);
        if (tile < end && (tile != split || step != args.splits))
            rows = row_of(page_from(tile, step, args.page_of(end * Shape::kKeys - 1) + 1), tile, step);
    }

    // Fetches the split's tiles.
    __device__ __forceinline__ void run(uint32_t full, uint32_t empty) {
        const int end_page = args.page_of(max(end * Shape::kKeys - 1, 0)) + 1;
        const int ahead = end - tile >= kLongShare * step ? Shape::kAheadLong : Shape::kAhead;
        int next_page = 0, stage = 0, turn = 0, landed_stage = 0, landed_turn = 0;
#pragma unroll 1
        for (int i = 0; tile < end; ++i, tile += step) {
            if (i % kBatch == 0 && i > 0) rows = row_of(next_page, tile, step);
            const int row = __shfl_sync(0xffffffffu, rows, i % kBatch * kGroups + group);
#pragma unroll
            for (int values = 0; values < 2; ++values) {
                const uint32_t slot = (stage * 2 + values) * 8;
                if (turn > 0) wait_for_phase(empty + slot, (turn - 1) & 1);
                if (i >= ahead) wait_for_phase(full + (landed_stage * 2 + values) * 8, landed_turn & 1);
                if (lane == 0) expect_bytes(full + slot, Shape::kStageBytes / 2);
                __syncwarp();
                if (copies)
                    copy_box(target + stage * Shape::kStageBytes + values * Shape::kValueOffset,
                             values ? &args.v_map : &args.k_map, column, kv_head, row, full + slot, policy);
            }
            // The next batch's pages are on their way.
            if (i % kBatch == 0) next_page = page_from(tile + kBatch * step, step, end_page);
            if (i >= ahead && ++landed_stage == stages) landed_stage = 0, ++landed_turn;
            if (++stage == stages) stage = 0, ++turn;
        }
    }
};

// Copies the keys of one tile that exist and are in sight, by the threads of both warpgroups; zeros elsewhere.
template <typename Shape>
__device__ __forceinline__ void copy_edge_tile(const AttentionArgs& args, const Extent& extent, int request,
                                               int kv_head, int tile, uint32_t stage) {
    const int64_t row_elements = static_cast<int64_t>(args.kv_heads) * Shape::kHeadDim;
    const int64_t head = static_cast<int64_t>(kv_head) * Shape::kHeadDim;
#pragma unroll 2
    for (int piece = threadIdx.x; piece < Shape::kKeys * Shape::kChunks; piece += Shape::kThreads) {
        const int key = piece / Shape::kChunks, chunk = piece % Shape::kChunks;
        const int position = tile * Shape::kKeys + key;
        const void *k = args.k_cache, *v = args.v_cache;
        int64_t element = 0;
        bool present = false;
        if (position >= extent.low && position < extent.cached) {
            const int page = args.page_of(position);
            const int row = (args.page(request, page) - page) * args.page_tokens + position;
            element = row * row_elements + head;
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
}

// Adds the sums of both warpgroups: each finishes half the rows, and gives the other half away.
template <typename Shape>
__device__ __forceinline__ RowSums<Shape> meet_other_warpgroup(const RowAccumulator<Shape>& rows, int warpgroup,
                                                               char* ring) {
    const auto sums_of = [&](int group) { return reinterpret_cast<float2*>(ring + group * Shape::kStageBytes); };
    const auto stats_of = [&](int group) {
        return reinterpret_cast<float2*>(ring + Shape::kStatsStage * Shape::kStageBytes) + group * 128;
    };
    RowSums<Shape> kept = rows.half(warpgroup);
    named_barrier<Shape::kThreads>(1);  // everybody is done with the ring
    if (rows.warp_has_rows) rows.half(1 - warpgroup).give(sums_of(warpgroup), stats_of(warpgroup));
    named_barrier<Shape::kThreads>(1);
    if (rows.warp_has_rows) kept.take(sums_of(1 - warpgroup), stats_of(1 - warpgroup));
    return kept;
}

template <typename Shape>
__global__ void __maxnreg__(Shape::kStartRegisters) hopper_alone_kernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char unaligned[];
    __shared__ int row_low[Shape::kRows], row_high[Shape::kRows];
    __shared__ alignas(8) uint64_t barriers[4 * Shape::kStages + 1];
    const uint32_t full = shared_address(barriers), empty = full + Shape::kStages * 16;
    const uint32_t arrived = empty + Shape::kStages * 16;
    const uint32_t misalignment = shared_address(unaligned) % Shape::kAlignment;
    char* shared = unaligned + (misalignment ? Shape::kAlignment - misalignment : 0);
    const uint32_t ring = shared_address(shared);
    char* after_ring = shared + args.stages * Shape::kStageBytes;
    const int kv_head = blockIdx.x, request = blockIdx.z;
    const int split = blockIdx.y;
    constexpr int row_tile = 0;
    // The next launch is set up early: its blocks find room as ours leave. One that joins our splits reads lengths at
    // once: for it we first wait until nobody writes them any more.
    const bool joined_by_launch = args.splits > 1 && !args.join_in_cluster;
    if (!joined_by_launch) let_next_launch_start();

    if (threadIdx.x >= Shape::kThreads) {
        // Of this warpgroup one warp works: it makes the barriers and fetches, as soon as it knows what.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kFetchRegisters));
        if (threadIdx.x >= Shape::kThreads + 32) return;
        if (threadIdx.x == Shape::kThreads) {
            prefetch_map(&args.k_map);
            prefetch_map(&args.v_map);
            for (int half = 0; half < 2 * args.stages; ++half) {
                start_barrier(full + half * 8, 1);
                start_barrier(empty + half * 8, Shape::kReturningWarps);
            }
            start_barrier(arrived, 1);
            publish_barriers();
        }
        __syncwarp();
        arrive_at_named_barrier<Shape::kThreads + 32>(2);
        TileFetcher<Shape>(args, request, split, kv_head, ring).run(full, empty);
    } else {
        // Queries and new keys may come from the launch in front, whatever is settled; and nobody leaves early, since
        // this launch must be complete only after that one.
        if (!args.settled) begin_attention(args, request);
        const Extent extent(args, request, row_tile, Shape::kRows);
        const TileShares shares(extent, args.splits, Shape::kKeys, args.settled);
        if (args.settled) wait_for_launch_in_front();
        if (joined_by_launch) let_next_launch_start();
        const bool joins = args.join_in_cluster && shares.active > 1, has_tiles = split < shares.active;
        if (extent.rows <= 0 || (!has_tiles && !joins)) return;
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kRegisters));
        named_barrier<Shape::kThreads + 32>(2);
        const Inbox<Shape> inbox(extent, split, args.splits, shares.active, shared_address(after_ring),
                                 ring + Shape::kOwnStage * Shape::kStageBytes, arrived);
        if (joins && threadIdx.x == 0) inbox.expect(extent);
        if (has_tiles) {
            const int warpgroup = threadIdx.x / 128;
            stage_queries<Shape>(args, extent, kv_head, after_ring);
            copy_async_commit();
            for (int row = threadIdx.x; row < Shape::kRows; row += Shape::kThreads) {
                const int query = args.query_of(extent.first_row + row);
                row_low[row] = row < extent.rows ? extent.key_low(args, query) : 0;
                row_high[row] = row < extent.rows ? extent.key_high(args, query) : 0;
            }
            copy_async_wait<0>();
            publish_to_wgmma();
            named_barrier<Shape::kThreads>(1);
            RowAccumulator<Shape> rows(threadIdx.x % 128 / 32 * 16, extent);
            rows.load_queries(shared_address(after_ring));

            // The edges are copied now and looked at after the first whole tiles, by both warpgroups.
            const int edges = shares.edges(split), lendable = args.stages - Shape::kLeastRing;
            const int lent = min(edges, lendable), stages = args.stages - lent;
            const auto lent_stage = [&](int edge) { return stages + edge % lendable; };
            const auto copy_edge = [&](int edge) {
                copy_edge_tile<Shape>(args, extent, request, kv_head, shares.edge(edge),
                                      ring + lent_stage(edge) * Shape::kStageBytes);
                copy_async_commit();
            };
#pragma unroll 1
            for (int edge = 0; edge < lent; ++edge) copy_edge(edge);
            bool announced = !joins;
            const auto announce = [&] {  // the queries are in registers: messages may take their place
                if (!announced) arrive_in_cluster_relaxed();
                announced = true;
            };
            // The warpgroups take turns with the whole tiles. To the edges, after the first whole tiles, and to the
            // last whole tile both attend, to half of the keys each. Code of one kind is there once: it must fit the
            // cache.
            const int first = shares.whole_begin + split;
            const int whole = max(0, shares.whole_end - first + shares.active - 1) / shares.active;
            const int before_edges =
                args.stages < Shape::kStages ? Shape::kTilesBeforeEdgesBesideJoin : Shape::kTilesBeforeEdges;
            const int last_stage = max(0, whole - 1) % stages, last_parity = max(0, whole - 1) / stages & 1;
            int index = warpgroup, stage = warpgroup, parity = 0;
#pragma unroll 1
            for (int round = 0; round < 2; ++round) {
                const int end = round == 0 ? min(whole - 1, before_edges) : whole - 1;
#pragma unroll 1
                for (; index < end; index += Shape::kWarpgroups) {
                    wait_for_phase(full + stage * 16, parity);
                    rows.template attend<Shape::kKeys>(args, extent, row_low, row_high,
                                                       ring + stage * Shape::kStageBytes,
                                                       (first + index * shares.active) * Shape::kKeys, [&] {
                                                           if (rows.lane == 0) arrive(empty + stage * 16);
                                                           wait_for_phase(full + stage * 16 + 8, parity);
                                                       });
                    if (rows.lane == 0) arrive(empty + stage * 16 + 8);
                    if ((stage += Shape::kWarpgroups) >= stages) stage -= stages, parity ^= 1;
                    announce();
                }
                const bool edge = round == 0;
                const int together = edge ? edges : min(whole, 1);
#pragma unroll 1
                for (int i = 0; i < together; ++i) {
                    const int stage = edge ? lent_stage(i) : last_stage;
                    if (!edge) wait_for_phase(full + stage * 16, last_parity);
                    if (edge && i >= lent) {
                        named_barrier<Shape::kThreads>(1);  // everybody is done with the stage
                        copy_edge(i);
                    }
                    if (edge && (i == 0 || i >= lent)) {
                        copy_async_wait<0>();
                        publish_to_wgmma();
                        named_barrier<Shape::kThreads>(1);
                    }
                    constexpr int kKeys = Shape::kKeys / Shape::kWarpgroups;
                    const int tile = edge ? shares.edge(i) : first + (whole - 1) * shares.active;
                    rows.template attend<kKeys>(args, extent, row_low, row_high,
                                                ring + stage * Shape::kStageBytes + warpgroup * kKeys * 128,
                                                tile * Shape::kKeys + warpgroup * kKeys, [&] {
                                                    if (!edge) wait_for_phase(full + stage * 16 + 8, last_parity);
                                                });
                    announce();
                }
            }
            announce();
            const RowSums<Shape> sums = meet_other_warpgroup(rows, warpgroup, shared);
            if (joins) {
                wait_for_cluster();
                if (rows.warp_has_rows) inbox.send_row(sums, extent);
            } else if (shares.active > 1) {
                const int first_row = sums.row - rows.lane / 4;  // of the warp
                const int64_t row =
                    first_partial_row(args, request, kv_head, row_tile, split, Shape::kRows) + first_row;
                char* room =
                    shared + Shape::kOwnStage * Shape::kStageBytes + threadIdx.x / 32 * RowSums<Shape>::kRoomBytes;
                if (rows.warp_has_rows)
                    sums.write_partial_rows(extent.rows - first_row, args.partial_out + row * Shape::kHeadDim,
                                            args.partial_stats + row, reinterpret_cast<float*>(room));
            } else if (sums.row < extent.rows) {
                sums.write_result(args, extent, kv_head);
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
