// Paged block attention: a tile of query rows of one KV head group against a stream of key tiles.
//
// The work is bound by reading the cache once, so the shape follows the memory system: the rows of all queries and
// all heads that share a KV head are one tile (each key is read once), keys stream through a ring of shared-memory
// stages by cp.async, and long contexts split over blocks. Inside a block, warps are row groups x key groups: key
// groups take different 16-key chunks of a tile, so that shared memory is re-read only once per row group; their
// partial results meet once, at the end.
#pragma once

#include "attention_stream.cuh"
#include "attention_variant.h"

namespace dflash {

// kRowTiles: 16-row matrix tiles per warp. kRowGroups x kKeyGroups warps.
template <typename T_, bool kFloat8_, int kHeadDim_, int kRowTiles_, int kRowGroups_, int kKeyGroups_, int kKeys_>
struct AttentionShape {
    using T = T_;
    static constexpr bool kFloat8 = kFloat8_;
    // e4m3 is exact in half, so float8 K/V are multiplied as halves whatever the query's type.
    using Mma = typename std::conditional<kFloat8, __half, T>::type;
    static constexpr int kHeadDim = kHeadDim_, kRowTiles = kRowTiles_, kRowGroups = kRowGroups_;
    static constexpr int kKeyGroups = kKeyGroups_, kKeys = kKeys_;
    static constexpr int kThreads = 32 * kRowGroups * kKeyGroups;
    static constexpr int kRows = 16 * kRowTiles * kRowGroups;
    static constexpr int kRowBytes = kHeadDim * (kFloat8 ? 1 : 2);
    static constexpr int kChunks = kRowBytes / 16;  // 16-byte pieces of one key
    // An odd number of 16-byte pieces per row spreads the eight rows of an ldmatrix over all banks.
    static constexpr int kPitch = (kChunks | 1) * 16;
    static constexpr int kStageBytes = 2 * kKeys * kPitch, kValueOffset = kKeys * kPitch;
    static constexpr int kQueryPitch = (kHeadDim / 8 | 1) * 16;
    static constexpr int kQueryBytes = kRows * kQueryPitch;
    static constexpr int kOutPitch = kHeadDim + 4;  // floats
    static constexpr int kOutBytes = kKeyGroups * kRows * kOutPitch * 4;
    static_assert(kKeys % (16 * kKeyGroups) == 0, "every key group takes whole 16-key chunks");
    static_assert(kHeadDim % 16 == 0, "a matrix step is 16 dimensions");

    static __device__ __forceinline__ int piece_offset(int key, int chunk) { return key * kPitch + chunk * 16; }

    // Queries are read while the first stages are in flight, hence they sit behind all stages but the last.
    static constexpr int shared_bytes(int stages) {
        const int ring = stages * kStageBytes, with_queries = (stages - 1) * kStageBytes + kQueryBytes;
        const int most = ring > with_queries ? ring : with_queries;
        return most > kOutBytes ? most : kOutBytes;
    }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2) attention_kernel(const __grid_constant__ AttentionArgs args) {
    using Mma = typename Shape::Mma;
    constexpr int kSteps = Shape::kHeadDim / 16;  // 16-dimension matrix steps
    constexpr int kRowTiles = Shape::kRowTiles;
    extern __shared__ __align__(128) char shared[];
    __shared__ int row_low[Shape::kRows], row_high[Shape::kRows];
    __shared__ float2 row_stats[Shape::kKeyGroups][Shape::kRows];

    const int kv_head = blockIdx.x, request = blockIdx.z;
    const int split = blockIdx.y % args.splits;
    // Later rows of a causal pass see more keys: they start first.
    const int row_tile = args.row_tiles - 1 - static_cast<int>(blockIdx.y) / args.splits;
    begin_attention(args, request);
    const Extent extent(args, request, row_tile, Shape::kRows);
    if (extent.rows <= 0) return;
    const SplitRange range(extent, args.splits, split, Shape::kKeys);
    if (split >= range.active) return;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_group = warp / Shape::kKeyGroups, key_group = warp % Shape::kKeyGroups;
    const uint32_t ring = shared_address(shared);
    KeyStream<Shape> stream(args, extent, range, request, kv_head, ring);
    const int stages = args.stages;
    char* query_stage = shared + (stages - 1) * Shape::kStageBytes;
    stage_queries<Shape>(args, extent, kv_head, query_stage);
    copy_async_commit();
#pragma unroll 1
    for (int s = 0; s < stages - 1; ++s) {
        stream.issue(range.begin + s, s);
        copy_async_commit();
    }
    for (int row = threadIdx.x; row < Shape::kRows; row += Shape::kThreads) {
        const int query = args.query_of(extent.first_row + row);
        row_low[row] = row < extent.rows ? extent.key_low(args, query) : 0;
        row_high[row] = row < extent.rows ? extent.key_high(args, query) : 0;
    }
    wait_for_queries(stages - 1);
    __syncthreads();
    uint32_t queries[kRowTiles][kSteps][4];
    const int warp_row = row_group * kRowTiles * 16;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
        const uint32_t address =
            shared_address(query_stage) + (warp_row + m * 16 + lane % 16) * Shape::kQueryPitch + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) ldmatrix_x4(queries[m][k], address + k * 32);
    }

    float out[kRowTiles][2 * kSteps][4] = {};
    float sum[kRowTiles][2] = {};
    float reference[kRowTiles][2];  // exponents are taken relative to this, in powers of two
    for (auto& pair : reference) pair[0] = pair[1] = -1e30f;

    // Lane offsets of the fragment loads inside a 16-key chunk.
    const int k_lane =
        Shape::kFloat8 ? (lane % 16) * Shape::kPitch : (lane / 16 * 8 + lane % 8) * Shape::kPitch + lane / 8 % 2 * 16;
    const int v_lane =
        Shape::kKeys * Shape::kPitch +
        (Shape::kFloat8 ? (lane % 16) * Shape::kPitch : (lane / 8 % 2 * 8 + lane % 8) * Shape::kPitch + lane / 16 * 16);

    int stage = 0;
    for (int tile = range.begin; tile < range.end; ++tile) {
        wait_for_oldest_of(stages);
        __syncthreads();  // the tile has landed for everyone, and everyone is done with the stage refilled next
        stream.issue(tile + stages - 1, stage == 0 ? stages - 1 : stage - 1);
        copy_async_commit();
        const uint32_t k_stage = ring + stage * Shape::kStageBytes;
        stage = stage + 1 == stages ? 0 : stage + 1;

#pragma unroll 1
        for (int chunk = key_group; chunk < Shape::kKeys / 16; chunk += Shape::kKeyGroups) {
            const int key0 = tile * Shape::kKeys + chunk * 16;
            if (key0 >= extent.high || key0 + 16 <= extent.low) continue;
            const uint32_t k_address = k_stage + chunk * 16 * Shape::kPitch + k_lane;
            const uint32_t v_address = k_stage + chunk * 16 * Shape::kPitch + v_lane;

            float score[kRowTiles][2][4] = {};
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                uint32_t b[4];
                if constexpr (Shape::kFloat8) {
                    uint32_t bytes[2];
                    ldmatrix_x2(bytes, k_address + k * 16);
                    b[0] = e4m3_pair_to_half(bytes[0]), b[1] = e4m3_pair_to_half(bytes[0] >> 16);
                    b[2] = e4m3_pair_to_half(bytes[1]), b[3] = e4m3_pair_to_half(bytes[1] >> 16);
                } else {
                    ldmatrix_x4(b, k_address + k * 32);
                }
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    mma_16x8x16<Mma>(score[m][0], queries[m][k], b[0], b[1]);
                    mma_16x8x16<Mma>(score[m][1], queries[m][k], b[2], b[3]);
                }
            }

            if (args.softcap_scale != 0.0f) {
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        score[m][i / 4][i % 4] = tanh_fast(score[m][i / 4][i % 4] * args.softcap_scale);
            }
            const bool masked = key0 < extent.full_low || key0 + 16 > extent.full_high;
            bool grows = false;
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float most = -INFINITY;
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        float& x = score[m][n / 2][half * 2 + n % 2];
                        if (masked) {
                            const int row = warp_row + m * 16 + half * 8 + lane / 4;
                            const int key = key0 + n / 2 * 8 + lane % 4 * 2 + n % 2;
                            if (key < row_low[row] || key >= row_high[row]) x = -INFINITY;
                        }
                        most = fmaxf(most, x);
                    }
                    // Any reference within 2^8 of the maximum is as exact in float32 as the maximum itself, so
                    // that the accumulators are rescaled a few times per pass and not at every chunk.
                    grows |= most * args.scale_log2 > reference[m][half] + 8.0f;
                }
            if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float most = reference[m][half];
#pragma unroll
                        for (int n = 0; n < 4; ++n)
                            most = fmaxf(most, score[m][n / 2][half * 2 + n % 2] * args.scale_log2);
                        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                        const float factor = exp2_fast(reference[m][half] - most);
                        reference[m][half] = most;
                        sum[m][half] *= factor;
#pragma unroll
                        for (int n = 0; n < 2 * kSteps; ++n) {
                            out[m][n][half * 2] *= factor;
                            out[m][n][half * 2 + 1] *= factor;
                        }
                    }
            }
            uint32_t weights[kRowTiles][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float low = exp2_fast(fmaf(score[m][n][half * 2], args.scale_log2, -reference[m][half]));
                        const float high =
                            exp2_fast(fmaf(score[m][n][half * 2 + 1], args.scale_log2, -reference[m][half]));
                        sum[m][half] += low + high;
                        weights[m][n * 2 + half] = pack_pair<Mma>(low, high);
                    }

#pragma unroll
            for (int n = 0; n < kSteps; ++n) {
                uint32_t b[4];
                if constexpr (Shape::kFloat8) {
                    uint32_t bytes[2];
                    ldmatrix_x2_transposed(bytes, v_address + n * 16);
                    // A transposed 16-bit element is two dimensions of one key: even and odd dimensions part ways.
                    b[0] = e4m3_pair_to_half(__byte_perm(bytes[0], 0, 0x4420));
                    b[1] = e4m3_pair_to_half(__byte_perm(bytes[1], 0, 0x4420));
                    b[2] = e4m3_pair_to_half(__byte_perm(bytes[0], 0, 0x4431));
                    b[3] = e4m3_pair_to_half(__byte_perm(bytes[1], 0, 0x4431));
                } else {
                    ldmatrix_x4_transposed(b, v_address + n * 32);
                }
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    mma_16x8x16<Mma>(out[m][2 * n], weights[m], b[0], b[1]);
                    mma_16x8x16<Mma>(out[m][2 * n + 1], weights[m], b[2], b[3]);
                }
            }
        }
    }
    // The combining launch may take its place on the multiprocessors now; it waits for our writes before it reads.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    copy_async_wait<0>();
    __syncthreads();

    float* outs = reinterpret_cast<float*>(shared) + key_group * Shape::kRows * Shape::kOutPitch;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[m][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const int row = warp_row + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0) row_stats[key_group][row] = make_float2(reference[m][half], total);
            float* row_out = outs + row * Shape::kOutPitch;
#pragma unroll
            for (int n = 0; n < kSteps; ++n) {
                const float* even = &out[m][2 * n][half * 2];
                const float* odd = &out[m][2 * n + 1][half * 2];
                if constexpr (Shape::kFloat8) {
                    *reinterpret_cast<float4*>(row_out + n * 16 + lane % 4 * 4) =
                        make_float4(even[0], odd[0], even[1], odd[1]);
                } else {
                    *reinterpret_cast<float2*>(row_out + n * 16 + lane % 4 * 2) = make_float2(even[0], even[1]);
                    *reinterpret_cast<float2*>(row_out + n * 16 + 8 + lane % 4 * 2) = make_float2(odd[0], odd[1]);
                }
            }
        }
    __syncthreads();

    constexpr int kQuads = Shape::kHeadDim / 4;
    const bool final_result = range.active == 1;
    const int64_t partial_row =
        (((static_cast<int64_t>(request) * args.kv_heads + kv_head) * args.row_tiles + row_tile) * args.splits +
         split) *
        Shape::kRows;
    for (int piece = threadIdx.x; piece < extent.rows * kQuads; piece += Shape::kThreads) {
        const int row = piece / kQuads, quad = piece % kQuads;
        const int request_row = extent.first_row + row;
        const int head = args.head_of(kv_head, request_row);
        float most = row_stats[0][row].x;
#pragma unroll
        for (int g = 1; g < Shape::kKeyGroups; ++g) most = fmaxf(most, row_stats[g][row].x);
        const float sink = final_result && args.sinks ? args.sinks[head] * 1.4426950408889634f : -INFINITY;
        most = fmaxf(most, sink);
        float total = final_result ? exp2_fast(sink - most) : 0.0f;
        float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int g = 0; g < Shape::kKeyGroups; ++g) {
            const float weight = exp2_fast(row_stats[g][row].x - most);
            const float4 part = *reinterpret_cast<const float4*>(
                reinterpret_cast<const float*>(shared) + (g * Shape::kRows + row) * Shape::kOutPitch + quad * 4);
            total += weight * row_stats[g][row].y;
            value.x += weight * part.x, value.y += weight * part.y;
            value.z += weight * part.z, value.w += weight * part.w;
        }
        if (final_result) {
            const float factor = total > 0.0f ? args.v_scale / total : 0.0f;
            auto* target = static_cast<typename Shape::T*>(args.out) +
                           (extent.query_begin + args.query_of(request_row)) * args.out_stride +
                           head * Shape::kHeadDim + quad * 4;
            *reinterpret_cast<uint2*>(target) =
                make_uint2(pack_pair<typename Shape::T>(value.x * factor, value.y * factor),
                           pack_pair<typename Shape::T>(value.z * factor, value.w * factor));
        } else {
            *reinterpret_cast<float4*>(args.partial_out + (partial_row + row) * Shape::kHeadDim + quad * 4) = value;
            if (quad == 0) args.partial_stats[partial_row + row] = make_float2(most, total);
        }
    }
}

}  // namespace dflash
