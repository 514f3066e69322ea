// How the blocks of a cluster send each other the partial rows of one row tile: no block reads another's memory.
//
// A row is finished by the block of rank row % splits. Its partial sums travel there from the registers that hold them,
// and a barrier in the receiver counts the bytes: one trip through the cluster's network is all that the join waits
// for, and nobody has to stay for the sake of a reader.
#pragma once

#include "attention_hopper_tile.cuh"
#include "attention_join.cuh"
#include "attention_variant.h"

namespace dflash {

// Room for kHeldRows rows of others in `others`, [sender][place] without the owner itself, and for the block's own rows
// in `own`; a row's place is row / splits. The addresses are the same in every block.
template <typename Shape>
struct Inbox {
    static constexpr int kRowBytes = Shape::kHeadDim * 4, kMaxOwnRows = Shape::kRows / 2;

    uint32_t others, own, barrier;
    int rank, splits, active, places;

    __device__ __forceinline__ Inbox(const Extent& extent, int rank, int splits, int active, uint32_t others,
                                     uint32_t own, uint32_t barrier)
        : others(others),
          own(own),
          barrier(barrier),
          rank(rank),
          splits(splits),
          active(active),
          places((extent.rows + splits - 1) / splits) {}

    // Of the row at `place` of block `owner`, as `sender` has it.
    __device__ __forceinline__ uint32_t row_address(int owner, int sender, int place) const {
        return sender == owner ? own + place * kRowBytes
                               : others + ((sender - (sender > owner)) * places + place) * kRowBytes;
    }

    __device__ __forceinline__ uint32_t stat_address(int owner, int sender, int place) const {
        return sender == owner
                   ? own + kMaxOwnRows * kRowBytes + place * 8
                   : others + Shape::kHeldRows * kRowBytes + ((sender - (sender > owner)) * places + place) * 8;
    }

    // What this block will receive, its own rows included. One thread calls it, once.
    __device__ __forceinline__ void expect(const Extent& extent) const {
        const int rows = max(0, (extent.rows - rank + splits - 1) / splits);
        expect_bytes(barrier, rows * active * (kRowBytes + 8));
    }

    // Sends each row to the block that finishes it. The whole warp calls it.
    __device__ __forceinline__ void send_row(const RowSums<Shape>& sums, const Extent& extent) const {
        const int owner = sums.row % splits, place = sums.row / splits;
        float4 fours[RowSums<Shape>::kTiles / 2];
        sums.in_fours(fours);
        if (sums.row >= extent.rows) return;
        const uint32_t target = in_block(row_address(owner, rank, place), owner);
        const uint32_t counted = in_block(barrier, owner);
#pragma unroll
        for (int i = 0; i < RowSums<Shape>::kTiles / 2; ++i)
            send(target + RowSums<Shape>::fours_column(i) * 4, fours[i], counted);
        if (threadIdx.x % 4 == 0)
            send_pair(in_block(stat_address(owner, rank, place), owner), sums.reference, sums.total, counted);
    }

    // Waits for everybody's rows and finishes this block's.
    __device__ __forceinline__ void finish(const AttentionArgs& args, const Extent& extent, int kv_head) const {
        finish_rows<Shape, kMaxClusterSplits>(
            args, extent, kv_head, rank, active, [&] { wait_for_phase_in_cluster(barrier, 0); },
            [&](int place, int part) { return load_shared_pair(stat_address(rank, part, place)); },
            [&](int place, int part, int offset) {
                return load_shared_floats(row_address(rank, part, place) + offset);
            });
    }
};

}  // namespace dflash
