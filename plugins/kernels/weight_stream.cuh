// A warp's private stream of weight tiles: the copy engine fills a ring in shared memory, the warp empties it.
//
// No other warp takes part, so that a stream starts a few instructions into the kernel and never waits for a block-wide
// barrier. A tile is 16 rows of 64 columns; 16-byte piece c of row r lies at piece c ^ (r % 8).
#pragma once

#include <cuda.h>

#include "mma.cuh"

namespace dflash {

constexpr int kTileDepth = 64;  // 128 bytes: what the swizzle permutes
constexpr int kTileRows = 16;
constexpr int kTileBytes = kTileRows * kTileDepth * 2;

// Fails to compile on nothing older: every generation this library is built for has the copy engine.
struct WeightStream {
    const CUtensorMap* map;
    uint32_t ring, barriers;  // this warp's, in shared memory
    int stages, first_depth, blocks, rows_per_tile;
    int ask_tile, ask_block, asked, items;  // what is asked for next
    int slot, parity, ask_slot;

    // `blocks` tiles of 64 columns from column `first_depth`, for each of the row tiles first .. end.
    __device__ __forceinline__ WeightStream(const CUtensorMap* map, uint32_t ring, uint32_t barriers, int stages,
                                            int first_depth, int blocks, int rows_per_tile, int first, int end)
        : map(map), ring(ring), barriers(barriers), stages(stages), first_depth(first_depth), blocks(blocks),
          rows_per_tile(rows_per_tile), ask_tile(first), ask_block(0), asked(0), items((end - first) * blocks), slot(0),
          parity(0), ask_slot(0) {}

    // Fills the ring, and asks the L2 for `prefetch` tiles more. The whole warp calls it, once.
    __device__ __forceinline__ void start(int prefetch) {
        if (threadIdx.x % 32 == 0) {
            for (int i = 0; i < stages; ++i)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + i * 8) : "memory");
            // The copy engine sees the barriers before it counts on them.
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
        for (int i = 0; i < stages; ++i) ask();
        int tile = ask_tile, block = ask_block;
        for (int i = asked; i < min(items, asked + prefetch); ++i) {
            if (threadIdx.x % 32 == 0)
                asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map),
                             "r"(first_depth + block * kTileDepth), "r"(tile * rows_per_tile), "r"(0)
                             : "memory");
            if (++block == blocks) block = 0, ++tile;
        }
    }

    __device__ __forceinline__ bool all_asked() const { return asked == items; }

    // Address of the oldest tile, once it is there.
    __device__ __forceinline__ uint32_t wait() const {
        asm volatile(
            "{ .reg .pred done;\n"
            "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again_%=; }" ::"r"(barriers + slot * 8),
            "r"(parity)
            : "memory");
        return ring + slot * kTileBytes;
    }

    // The oldest tile was read by every lane: its place is filled with the next one.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (++slot == stages) slot = 0, parity ^= 1;
        ask();
    }

  private:
    __device__ __forceinline__ void ask() {
        if (asked == items) return;
        if (threadIdx.x % 32 == 0) {
            constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // what createpolicy makes of evict_first
            const uint32_t barrier = barriers + ask_slot * 8;
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kTileBytes)
                         : "memory");
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(ring + ask_slot * kTileBytes),
                "l"(map), "r"(first_depth + ask_block * kTileDepth), "r"(ask_tile * rows_per_tile), "r"(0),
                "r"(barrier), "l"(kEvictFirst)
                : "memory");
        }
        if (++ask_slot == stages) ask_slot = 0;
        if (++ask_block == blocks) ask_block = 0, ++ask_tile;
        ++asked;
    }
};

}  // namespace dflash
