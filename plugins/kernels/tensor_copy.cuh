// Hopper's tensor copy engine; the barriers that count its bytes are those of cluster_messages.cuh.
#pragma once

#include <stdint.h>

#include "cluster_messages.cuh"

namespace dflash {

// A CUtensorMap, without cuda.h: 128 bytes that the driver fills and the copy engine reads from parameter memory.
struct alignas(128) TensorMap {
    uint64_t words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// For data that nobody reads twice: it leaves the L2 before anything else.
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies the box of `map` at (c0, c1, c2), fastest dimension first, and counts its bytes on `barrier`.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap* map, int c0, int c1, int c2,
                                         uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
        : "memory");
}

}  // namespace dflash
