// Hopper's tensor copy engine and the barriers in shared memory that count its bytes.
#pragma once

#include <stdint.h>

#include "mma.cuh"

namespace dflash {

// A CUtensorMap, without cuda.h: 128 bytes that the driver fills and the copy engine reads from parameter memory.
struct alignas(128) TensorMap {
    uint64_t words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void start_barrier(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// New barriers become visible to the copy engine; other threads need a __syncthreads() as well.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and lets the phase end only when `bytes` more have been copied.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Returns when the phase of this parity has ended (phases count from 0).
__device__ __forceinline__ void wait_for_phase(uint64_t* barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Copies the box of `map` at (c0, c1, c2), fastest dimension first, and counts its bytes on `barrier`.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap* map, int c0, int c1, int c2,
                                         uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(shared),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(barrier))
        : "memory");
}

}  // namespace dflash
