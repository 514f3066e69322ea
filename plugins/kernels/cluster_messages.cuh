// Barriers in shared memory, and messages between the blocks of a cluster that they count.
#pragma once

#include <stdint.h>

namespace dflash {

__device__ __forceinline__ int cluster_blocks() {
    int count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// As arrive_in_cluster, without waiting for this thread's reads and writes, which may be slow to end under load: says
// only that barriers are ready (publish_barriers) and that whatever was waited for is over.
__device__ __forceinline__ void arrive_in_cluster_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same place in the shared memory of block `rank`.
__device__ __forceinline__ uint32_t in_block(uint32_t shared, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

__device__ __forceinline__ void start_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// New barriers become visible to the copy engine and to the cluster; other threads need a barrier as well.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As arrive, on a barrier of another block (in_block).
__device__ __forceinline__ void arrive_in_block(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only when `bytes` more have come.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns when the phase of this parity has ended (phases count from 0).
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// As wait_for_phase, where other blocks arrived.
__device__ __forceinline__ void wait_for_phase_in_cluster(uint32_t barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Stores in another block's shared memory; 16 bytes are counted on its barrier when they are there.
__device__ __forceinline__ void send(uint32_t address, const float4& v, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
}

// As send, 8 bytes.
__device__ __forceinline__ void send_pair(uint32_t address, float x, float y, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address), "f"(x),
        "f"(y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float4 load_shared_floats(uint32_t address) {
    const uint4 v = load_shared(address);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

__device__ __forceinline__ void add(float4& sum, const float4& v) {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

}  // namespace dflash
