// Sums over a block in a fixed order: the same inputs give the same bits, in any batch.
#pragma once

#include <stdint.h>

namespace dflash {

// Exclusive prefix of `value` over the block's kThreads threads; `total` receives the sum. `warp_sums` holds one entry
// per warp and may be reused after the next __syncthreads().
template <int kThreads, typename Number>
__device__ Number exclusive_scan(Number value, Number* warp_sums, Number& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Number inclusive = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const Number below = __shfl_up_sync(0xFFFFFFFFu, inclusive, offset);
        if (lane >= offset) inclusive += below;
    }
    Number exclusive = __shfl_up_sync(0xFFFFFFFFu, inclusive, 1);
    if (lane == 0) exclusive = Number(0);
    __syncthreads();
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    Number before = Number(0), all = Number(0);
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
        if (i == warp) before = all;
        all += warp_sums[i];
    }
    total = all;
    return before + exclusive;
}

// The smallest proposal of any thread, `none` where nobody proposes less. `slot` is shared.
__device__ __forceinline__ int block_min(int proposal, int none, int* slot) {
    __syncthreads();
    if (threadIdx.x == 0) *slot = none;
    __syncthreads();
    if (proposal < none) atomicMin(slot, proposal);
    __syncthreads();
    return *slot;
}

}  // namespace dflash
