// What the three launches of accept hand to each other, and the probability they agree on.
#pragma once

#include "chunk_select.cuh"
#include "dflash_select.h"

namespace dflash {

// The filtered distribution of one row: a token weighs exp((x - largest) / T) when it is not below the threshold (the
// last kept value, up to that value's last kept token) and its weight not below `least_weight`; p is the weight over
// `mass`.
struct RowDistribution {
    float threshold_value;
    uint32_t threshold_token;
    float largest;
    float mass;
    float least_weight;
    int32_t best_token;
    int32_t kept_in_lists;  // every kept token is in the chunk lists
    int32_t faulty;         // the row holds a NaN; nothing is drawn from it
};

// Keys that accept keeps of each chunk. Fewer make the first launch cheaper and send more filters to counting.
constexpr int kListKeys = 16;

// Neighbouring columns whose mass is kept: what one vector of each of a chunk's threads covers, 4 KB of a row. Piece
// i * chunks + c of a row is the i-th of chunk c.
constexpr int kPieceVectors = kChunkThreads;
template <typename T>
constexpr int kPiecesPerChunk = ChunkValues<T>::kVectors;
constexpr int kMaxPieces = kMaxChunks * kPiecesPerChunk<float>;

struct AcceptWorkspace {
    uint64_t* lists;        // [B*S, chunks, kListKeys] descending keys of each chunk
    float* masses;          // [B*S, chunks] sum of exp((x - chunk's largest) / T); NaN marks a NaN
    float* pieces;          // [B*S, kPiecesPerChunk * chunks] the part of each piece in its chunk's mass
    RowDistribution* rows;  // [B*S]

    __host__ __device__ static int64_t bytes(int64_t rows, int chunks) {
        return rows * (chunks * int64_t(kListKeys * sizeof(uint64_t)) + int64_t(sizeof(RowDistribution)) +
                       chunks * (1 + kPiecesPerChunk<float>)*int64_t(sizeof(float)));
    }
    __host__ __device__ AcceptWorkspace(void* start, int64_t row_count, int chunks) {
        lists = static_cast<uint64_t*>(start);
        rows = reinterpret_cast<RowDistribution*>(lists + row_count * chunks * kListKeys);
        masses = reinterpret_cast<float*>(rows + row_count);
        pieces = masses + row_count * chunks;
    }
};

// No filter has cut the row: its pieces' masses are whole too.
__device__ __forceinline__ bool is_whole(const RowDistribution& d) {
    return d.threshold_value == -INFINITY && d.threshold_token == 0xFFFFFFFFu && d.least_weight <= 0.0f;
}

template <typename T>
__device__ __forceinline__ const float* row_pieces(const AcceptWorkspace& workspace, int64_t row, int chunks) {
    return workspace.pieces + row * (kPiecesPerChunk<T> * chunks);
}

__device__ __forceinline__ bool row_exists(const dflash_accept_params& p, int request, int row) {
    return p.block_lengths == nullptr || row < p.block_lengths[request];
}

__device__ __forceinline__ bool is_filtered(const dflash_accept_params& p, int request) {
    // Read before the first is judged: one after the other they would take three times as long.
    const int64_t top_k = p.top_k == nullptr ? 0 : p.top_k[request];
    const float top_p = p.top_p == nullptr ? 1.0f : p.top_p[request];
    const float min_p = p.min_p == nullptr ? 0.0f : p.min_p[request];
    return (top_k > 0 && top_k < p.valid_columns) || top_p < 1.0f || min_p > 0.0f;
}

template <typename T>
__device__ __forceinline__ LogitRow<T> logit_row(const dflash_accept_params& p, int request, int row) {
    return LogitRow<T>(static_cast<const T*>(p.logits) + request * p.logits_stride_batch + row * p.logits_stride_row,
                       p.valid_columns);
}

// exp(d / T) = exp2(d * exponent_scale(T)).
__device__ __forceinline__ float exponent_scale(float temperature) { return 1.44269504f / temperature; }

// A row without any finite logit has no largest; 0 keeps (-infinity) - largest from being NaN.
__device__ __forceinline__ float usable_largest(float largest) { return largest == -INFINITY ? 0.0f : largest; }

__device__ __forceinline__ bool reaches(float value, int token, float threshold_value, uint32_t threshold_token) {
    return value > threshold_value || (value == threshold_value && uint32_t(token) <= threshold_token);
}

__device__ __forceinline__ float token_weight(const RowDistribution& d, float value, int token, float scale) {
    const float weight = fast_exp2((value - d.largest) * scale);
    return reaches(value, token, d.threshold_value, d.threshold_token) && weight >= d.least_weight ? weight : 0.0f;
}

// Second and third launch; the first is the caller's. `T` is the element type of the logits.
template <typename T>
void launch_row_filter(const dflash_accept_params& p, int chunks, AcceptWorkspace workspace, cudaStream_t stream);
template <typename T>
void launch_accept_draw(const dflash_accept_params& p, int chunks, AcceptWorkspace workspace, cudaStream_t stream);

}  // namespace dflash
