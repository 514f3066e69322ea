// Joins the partial results of a thread block cluster through its blocks' shared memory.
#pragma once

#include "attention_extent.cuh"
#include "cluster_messages.cuh"

namespace dflash {

template <int kThreads>
__device__ __forceinline__ void named_barrier(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void arrive_at_named_barrier(int name) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

__device__ __forceinline__ float4 load_peer(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 load_peer_pair(uint32_t address) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// Joins the splits of a row tile, which are one cluster: each block finishes every splits-th row. A block without keys
// helps, too. Nothing is read before wait_until_ready() has returned; stats(place, part) loads the reference exponent
// and the sum of row split + place * splits in one split, values(place, part, offset) 16 of its kHeadDim * 4 bytes.
// Sixteen lanes per row; Shape::kThreads threads call it, at most kMaxParts splits are active.
template <typename Shape, int kMaxParts, typename Ready, typename Stats, typename Values>
__device__ __forceinline__ void finish_rows(const AttentionArgs& args, const Extent& extent, int kv_head, int split,
                                            int active, Ready wait_until_ready, Stats stats, Values values) {
    constexpr int kLanes = 16, kPieces = Shape::kHeadDim / (4 * kLanes), kAhead = kMaxParts < 8 ? kMaxParts : 8;
    static_assert(kMaxParts <= kLanes && kPieces * 4 * kLanes == Shape::kHeadDim, "a lane weighs one part");
    const int lane = threadIdx.x % kLanes;
    // Whole warps stay in the loop while one of their rows exists.
    for (int turn = 0;; ++turn) {
        const int place = turn * (Shape::kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
        const int row = split + place * args.splits;
        const bool exists = row < extent.rows;
        const int request_row = extent.first_row + (exists ? row : 0);
        const int head = args.head_of(kv_head, request_row);
        const float sink = args.sinks ? args.sinks[head] * 1.4426950408889634f : -INFINITY;
        auto* target = static_cast<typename Shape::T*>(args.out) +
                       (extent.query_begin + args.query_of(request_row)) * args.out_stride + head * Shape::kHeadDim;
        if (turn == 0) wait_until_ready();  // with everything else at hand
        if (split + (place & ~1) * args.splits >= extent.rows) break;
        float2 stat = make_float2(-INFINITY, 0.0f);
        if (exists && lane < active) stat = stats(place, lane);
        float4 value[kPieces] = {};
        float most = fmaxf(fmaxf(sink, stat.x), -1e30f), weight = 0.0f, total = 0.0f;
        for (int first = 0; first < active; first += kAhead) {
            float4 part[kAhead][kPieces];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
#pragma unroll
                for (int piece = 0; piece < kPieces; ++piece) {
                    part[i][piece] = make_float4(0, 0, 0, 0);
                    if (exists && first + i < active)
                        part[i][piece] = values(place, first + i, (piece * kLanes + lane) * 16);
                }
            if (first == 0) {  // while the first parts are on their way
                for (int offset = kLanes / 2; offset > 0; offset /= 2)
                    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
                weight = exp2_fast(stat.x - most);
                total = weight * stat.y;
                for (int offset = kLanes / 2; offset > 0; offset /= 2)
                    total += __shfl_xor_sync(0xffffffffu, total, offset);
                total += exp2_fast(sink - most);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                // Parts that do not exist have weight 0.
                const float share = __shfl_sync(0xffffffffu, weight, first + i, kLanes);
#pragma unroll
                for (int piece = 0; piece < kPieces; ++piece) {
                    value[piece].x += share * part[i][piece].x, value[piece].y += share * part[i][piece].y;
                    value[piece].z += share * part[i][piece].z, value[piece].w += share * part[i][piece].w;
                }
            }
        }
        if (!exists) continue;
        const float factor = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
            reinterpret_cast<uint2*>(target)[piece * kLanes + lane] =
                make_uint2(pack_pair<typename Shape::T>(value[piece].x * factor, value[piece].y * factor),
                           pack_pair<typename Shape::T>(value[piece].z * factor, value[piece].w * factor));
    }
}

// Joins partial rows that each block left in its own shared memory, `outs` of pitch kOutPitch and `stats`.
template <typename Shape, int kMaxParts>
__device__ __forceinline__ void join_cluster(const AttentionArgs& args, const Extent& extent, int kv_head, int split,
                                             int active, uint32_t outs, uint32_t stats) {
    arrive_in_cluster();
    finish_rows<Shape, kMaxParts>(
        args, extent, kv_head, split, active, wait_for_cluster,
        [&](int place, int part) { return load_peer_pair(in_block(stats + (split + place * args.splits) * 8, part)); },
        [&](int place, int part, int offset) {
            const int row = split + place * args.splits;
            return load_peer(in_block(outs + row * Shape::kOutPitch * 4 + offset, part));
        });
    arrive_in_cluster();
    wait_for_cluster();  // nobody's shared memory goes away while a peer may read it
}

}  // namespace dflash
