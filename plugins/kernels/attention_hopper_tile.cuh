// What a warpgroup of either Hopper kernel does with keys that lie in shared memory, and how its result leaves it.
#pragma once

#include "attention_extent.cuh"
#include "wgmma.cuh"

namespace dflash {

// What four lanes have summed up for one row: lane % 4 holds columns lane % 4 * 2 and the next of every eight.
template <typename Shape>
struct RowSums {
    using T = typename Shape::T;
    static constexpr int kHeadDim = Shape::kHeadDim, kTiles = kHeadDim / 8;

    int row;  // of the tile
    float reference, total;
    float2 values[kTiles];

    // Writes the finished row.
    __device__ __forceinline__ void write_result(const AttentionArgs& args, const Extent& extent, int kv_head) const {
        const int request_row = extent.first_row + row;
        const int head = args.head_of(kv_head, request_row);
        const float sink = args.sinks ? args.sinks[head] * 1.4426950408889634f : -INFINITY;
        // A sink far above every key would overflow relative to the reference: take the larger of the two.
        const float top = fmaxf(reference, sink);
        const float weight = exp2_fast(reference - top);
        const float sum = total * weight + exp2_fast(sink - top);
        const float factor = sum > 0.0f ? weight / sum : 0.0f;
        T* target = static_cast<T*>(args.out) + (extent.query_begin + args.query_of(request_row)) * args.out_stride +
                    head * Shape::kHeadDim + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
            *reinterpret_cast<uint32_t*>(target + n * 8) = pack_pair<T>(values[n].x * factor, values[n].y * factor);
    }

    // The sums, not normalised, to `target` [kHeadDim] and `stats`.
    __device__ __forceinline__ void write_partial(float* target, float2* stats) const {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) *reinterpret_cast<float2*>(target + n * 8 + threadIdx.x % 4 * 2) = values[n];
        if (threadIdx.x % 4 == 0) *stats = make_float2(reference, total);
    }

    // As write_partial, of a whole warp: eight rows from the one at `target` on, of which `rows` exist, go through
    // `room` in shared memory and leave it one after the other. A store of everybody's own values touches all eight.
    static constexpr int kRoomPitch = kHeadDim + 8, kRoomBytes = 8 * kRoomPitch * 4;
    __device__ __forceinline__ void write_partial_rows(int rows, float* target, float2* stats, float* room) const {
        constexpr int kLanes = kHeadDim / 4;  // of a row
        const int lane = threadIdx.x % 32, own = lane / 4;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
            *reinterpret_cast<float2*>(room + own * kRoomPitch + n * 8 + lane % 4 * 2) = values[n];
        if (lane % 4 == 0 && own < rows) stats[own] = make_float2(reference, total);
        __syncwarp();
#pragma unroll
        for (int first = 0; first < 8; first += 32 / kLanes) {
            const int row = first + lane / kLanes, column = lane % kLanes * 4;
            if (row < rows)
                *reinterpret_cast<float4*>(target + row * kHeadDim + column) =
                    *reinterpret_cast<const float4*>(room + row * kRoomPitch + column);
        }
    }

    // Four neighbouring values each: lane pairs hold four of two 8-column tiles each and swap, so that each lane has
    // all four of one. fours[i] begins at column fours_column(i). The whole warp calls it.
    __device__ __forceinline__ void in_fours(float4 (&fours)[kTiles / 2]) const {
        const bool odd = threadIdx.x % 2;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            const float2 mine = odd ? values[n + 1] : values[n];
            const float2 given = odd ? values[n] : values[n + 1];
            const float2 taken =
                make_float2(__shfl_xor_sync(0xffffffffu, given.x, 1), __shfl_xor_sync(0xffffffffu, given.y, 1));
            fours[n / 2] =
                odd ? make_float4(taken.x, taken.y, mine.x, mine.y) : make_float4(mine.x, mine.y, taken.x, taken.y);
        }
    }

    static __device__ __forceinline__ int fours_column(int i) {
        return (2 * i + static_cast<int>(threadIdx.x) % 2) * 8 + threadIdx.x % 4 / 2 * 4;
    }

    // For the same thread of the other warpgroup: sums [kTiles][128] and stats [128].
    __device__ __forceinline__ void give(float2* sums, float2* stats) const {
        const int thread = threadIdx.x % 128;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) sums[n * 128 + thread] = values[n];
        stats[thread] = make_float2(reference, total);
    }

    // Adds what the same thread of the other warpgroup gave.
    __device__ __forceinline__ void take(const float2* sums, const float2* stats) {
        const int thread = threadIdx.x % 128;
        const float2 theirs = stats[thread];
        const float top = fmaxf(reference, theirs.x);
        const float mine = exp2_fast(reference - top), share = exp2_fast(theirs.x - top);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float2 value = sums[n * 128 + thread];
            values[n].x = values[n].x * mine + value.x * share;
            values[n].y = values[n].y * mine + value.y * share;
        }
        reference = top;
        total = total * mine + theirs.y * share;
    }
};

// The query rows of one warp in registers, and what it has summed up. Shape: T, kHeadDim, kPartBytes (64 dimensions of
// a tile's keys), kValueOffset (from K to V of a tile).
template <typename Shape>
struct RowAccumulator {
    using T = typename Shape::T;
    static constexpr int kSteps = Shape::kHeadDim / 16;

    const int warp_row, lane;
    const bool warp_has_rows;
    uint32_t queries[kSteps][4];
    float out[2 * kSteps][4] = {};
    float sum[2] = {}, reference[2] = {-1e30f, -1e30f};  // exponents are relative to the reference, in powers of two

    __device__ __forceinline__ RowAccumulator(int warp_row, const Extent& extent)
        : warp_row(warp_row), lane(threadIdx.x % 32), warp_has_rows(warp_row < extent.rows) {}

    // From the rows that stage_queries wrote.
    __device__ __forceinline__ void load_queries(uint32_t staged) {
        const uint32_t address = staged + (warp_row + lane % 16) * Shape::kQueryPitch + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) ldmatrix_x4(queries[k], address + k * 32);
    }

    // kKeys keys from key0 on, which start at `keys` in shared memory. All four warps of the warpgroup
    // call it. V is not looked at before wait_for_values() has returned.
    template <int kKeys, typename Wait>
    __device__ __forceinline__ void attend(const AttentionArgs& args, const Extent& extent, const int* row_low,
                                           const int* row_high, uint32_t keys, int key0, Wait wait_for_values) {
        constexpr int kKeyTiles = kKeys / 8;
        float score[kKeyTiles][4];
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
            Wgmma<T, kKeys>::template multiply<0>(
                score, queries[k], wgmma_operand(keys + k / 4 * Shape::kPartBytes + k % 4 * 32, 16, 1024), k > 0);
        wgmma_finish();

        uint32_t weights[kKeyTiles / 2][4] = {};
        if (warp_has_rows) {
            if (args.softcap_scale != 0.0f) {
#pragma unroll
                for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                    for (float& x : score[n]) x = tanh_fast(x * args.softcap_scale);
            }
            if (key0 < extent.full_low || key0 + kKeys > extent.full_high) {
                const int row = warp_row + lane / 4;
                const int low[2] = {row_low[row] - key0, row_low[row + 8] - key0};
                const int high[2] = {row_high[row] - key0, row_high[row + 8] - key0};
#pragma unroll
                for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int key = n * 8 + lane % 4 * 2 + i % 2;
                        if (key < low[i / 2] || key >= high[i / 2]) score[n][i] = -INFINITY;
                    }
            }
            float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
                most[0] = fmaxf(most[0], fmaxf(score[n][0], score[n][1]));
                most[1] = fmaxf(most[1], fmaxf(score[n][2], score[n][3]));
            }
            most[0] *= args.scale_log2, most[1] *= args.scale_log2;
            // Any reference within 2^8 of the maximum is as exact in float32 as the maximum itself, so that the
            // accumulators are rescaled a few times per pass and not at every tile.
            if (__any_sync(0xffffffffu, most[0] > reference[0] + 8.0f || most[1] > reference[1] + 8.0f)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float top = fmaxf(most[half], reference[half]);
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                    const float factor = exp2_fast(reference[half] - top);
                    reference[half] = top;
                    sum[half] *= factor;
#pragma unroll
                    for (int n = 0; n < 2 * kSteps; ++n) {
                        out[n][half * 2] *= factor;
                        out[n][half * 2 + 1] *= factor;
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float low = exp2_fast(fmaf(score[n][half * 2], args.scale_log2, -reference[half]));
                    const float high = exp2_fast(fmaf(score[n][half * 2 + 1], args.scale_log2, -reference[half]));
                    sum[half] += low + high;
                    weights[n / 2][n % 2 * 2 + half] = pack_pair<T>(low, high);
                }
        }
        wait_for_values();
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kKeyTiles / 2; ++k)
            Wgmma<T, Shape::kHeadDim>::template multiply<1>(
                out, weights[k], wgmma_operand(keys + Shape::kValueOffset + k * 2048, Shape::kPartBytes, 1024), 1);
        wgmma_finish();
    }

    // What this thread has of the first (0) or second half of the warp's rows: row lane / 4 of eight.
    __device__ __forceinline__ RowSums<Shape> half(int second) const {
        RowSums<Shape> part;
        part.row = warp_row + second * 8 + lane / 4;
        part.reference = second ? reference[1] : reference[0];
        part.total = second ? sum[1] : sum[0];
        part.total += __shfl_xor_sync(0xffffffffu, part.total, 1);
        part.total += __shfl_xor_sync(0xffffffffu, part.total, 2);
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n)
            part.values[n] = make_float2(second ? out[n][2] : out[n][0], second ? out[n][3] : out[n][1]);
        return part;
    }
};

}  // namespace dflash
