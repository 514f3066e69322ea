// A warp's private stream of weight tiles: the copy engine fills a ring in shared memory, the warp empties it.
//
// No other warp takes part, so that a stream starts a few instructions into the kernel and never waits for a block-wide
// barrier. A tile is 16 rows of 128 bytes; 16-byte piece c of row r lies at piece c ^ (r % 8).
#pragma once

#include <cuda.h>

#include "cluster_messages.cuh"
#include "mma.cuh"

namespace dflash {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 128;  // what the swizzle permutes
constexpr int kTileBytes = kTileRows * kTileRowBytes;

// Tiles of kTileDepth columns come in the order of their columns, then of their rows.
template <int kTileDepth>
struct WeightStream {
    const CUtensorMap* map;
    uint32_t ring, barriers;  // this warp's, in shared memory
    int stages, slot, parity;
    int first_depth, end_depth, rows_per_tile;  // of the weight
    int next_depth, next_row, left;             // to ask for

    // Columns first_depth .. end_depth of `count` row tiles from `first` on. Fills the ring. The
    // whole warp calls it, once.
    __device__ __forceinline__ void start(int first, int count) {
        slot = parity = 0;
        next_depth = first_depth, next_row = first * rows_per_tile;
        left = (end_depth - first_depth) / kTileDepth * count;
        if (left == 0) return;
        if (threadIdx.x % 32 == 0) {
            for (int i = 0; i < stages; ++i) start_barrier(barriers + i * 8, 1);
            publish_barriers();
        }
        __syncwarp();
        for (int i = 0; i < stages; ++i) ask(i);
    }

    // Address of the oldest tile, or with `behind` 1 of the next, once it is there.
    __device__ __forceinline__ uint32_t wait(int behind) const {
        const bool wraps = slot + behind == stages;
        const int at = wraps ? 0 : slot + behind;
        wait_for_phase(barriers + at * 8, wraps ? parity ^ 1 : parity);
        return ring + at * kTileBytes;
    }

    // The oldest `count` tiles were read by every lane: their places are filled with the next ones.
    __device__ __forceinline__ void release(int count) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i == count) break;
            ask(slot);
            if (++slot == stages) slot = 0, parity ^= 1;
        }
    }

  private:
    __device__ __forceinline__ void ask(int place) {
        if (left == 0) return;
        if (threadIdx.x % 32 == 0) {
            constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // what createpolicy makes of evict_first
            const uint32_t barrier = barriers + place * 8;
            expect_bytes(barrier, kTileBytes);
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(ring + place * kTileBytes),
                "l"(map), "r"(next_depth), "r"(next_row), "r"(0), "r"(barrier), "l"(kEvictFirst)
                : "memory");
        }
        next_depth += kTileDepth;
        if (next_depth == end_depth) next_depth = first_depth, next_row += rows_per_tile;
        --left;
    }
};

}  // namespace dflash
