// C launch API of the kernels around proposing and accepting: grouped dynamic convolution, top-K candidates, selector
// walk, accept. The conventions are those of dflash_kernels.h: arguments are validated, work is enqueued on `stream`,
// a dflash_status is returned, nothing synchronises, every launch may be captured in a CUDA graph.
//
// Words (docs/architecture.md): B requests, S block size, R rows, H hidden, V vocabulary, K candidates. Strides are in
// elements; index tensors are int64. Pointers need the alignment of their element unless said otherwise.
#pragma once

#include "dflash_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DFLASH_MAX_CANDIDATES 32
#define DFLASH_MAX_VOCABULARY 327672
#define DFLASH_MAX_CONV_TAPS 8

// conv(x)[t] = sum_i (base[i] + dynamic[t, i, group]) * x[t - i] inside each block of block_size rows, float32 inside.
// In form (residual NULL): out = conv(x).
// Out form (residual given): residual += conv(x), then out = rms_norm(residual) * norm_weight, or no out at all when
// norm_weight is NULL. out must not overlap x.
typedef struct dflash_grouped_conv_params {
    uint32_t struct_size;  // sizeof(dflash_grouped_conv_params)
    int32_t dtype;         // of x, dynamic, base, norm_weight and out: bfloat16, float16 or float32
    int32_t rows;          // B * S
    int32_t block_size;    // S; divides rows
    int32_t width;         // H; multiple of 8, at most 32768
    int32_t groups;        // divides width
    int32_t taps;          // 1 .. DFLASH_MAX_CONV_TAPS
    float eps;
    const void* x;            // [rows, width], 16-byte aligned, x_stride a multiple of 8
    const void* dynamic;      // [rows, taps * groups] tap-major, row stride dynamic_stride (a slice of a wider matrix)
    const void* base;         // [taps, width] contiguous, 16-byte aligned
    float* residual;          // [rows, width] contiguous float32, 16-byte aligned, or NULL
    const void* norm_weight;  // [width], 16-byte aligned, or NULL
    void* out;                // [rows, width] contiguous, 16-byte aligned
    int64_t x_stride, dynamic_stride;
} dflash_grouped_conv_params;

DFLASH_EXPORT int32_t dflash_grouped_conv(const dflash_grouped_conv_params* params, dflash_stream stream);

// The K largest of each row, descending, ties to the lowest id; NaN ranks as -infinity. Columns at or beyond
// valid_columns are padding and never chosen; a row with fewer than K valid columns ends in (-infinity, -1).
typedef struct dflash_candidates_params {
    uint32_t struct_size;
    int32_t dtype;  // of logits
    int32_t rows, columns, valid_columns, count;
    float multiplier;    // on the logits first; 1 = none
    float softcap;       // then tanh(x / softcap) * softcap; 0 = none
    const void* logits;  // [rows, columns], row stride logits_stride
    int64_t logits_stride;
    int64_t id_offset;  // id of column 0: the first id of this vocabulary shard
    float* values;      // [rows, count] after multiplier and softcap
    int64_t* ids;       // [rows, count]
    void* workspace;    // 16-byte aligned; contents need no initialisation
    int64_t workspace_bytes;
} dflash_candidates_params;

DFLASH_EXPORT int64_t dflash_candidates_workspace_bytes(const dflash_candidates_params* params);
DFLASH_EXPORT int32_t dflash_candidates(const dflash_candidates_params* params, dflash_stream stream);

// Merges the candidates of vocabulary shards, gathered as values and ids [shards, rows, count]; id -1 is no candidate.
DFLASH_EXPORT int32_t dflash_merge_candidates(const float* shard_values, const int64_t* shard_ids, float* values,
                                              int64_t* ids, int32_t shards, int32_t rows, int32_t count,
                                              dflash_stream stream);

// Walks the lattice: score(a, b) = unary[b] + <A[a] * h, B[b]> in float32, a = the previous choice (the anchor first).
// temperature <= 0: the first of the best, q one-hot. Otherwise q = softmax(score / temperature) and the choice is the
// inverse CDF of q at a uniform: uniforms[b, j], or, where uniforms is NULL, word 0 of Philox4x32-10 with key seeds[b]
// and counter first_positions[b] + j. A choice always has q > 0.
typedef struct dflash_walk_params {
    uint32_t struct_size;
    int32_t dtype;                          // of hidden and of the codebooks
    int32_t batch, positions, count, rank;  // positions = S - 1, at most 32; rank a multiple of 8
    int64_t vocabulary;                     // rows of the codebooks; other ids score -infinity
    const float* unary;                     // [B, S-1, K]
    const int64_t* candidates;              // [B, S-1, K]
    const void* hidden;                     // [B, S-1, rank], 16-byte aligned
    const void* predecessor_codebook;       // [V, rank], 16-byte aligned
    const void* successor_codebook;         // [V, rank], 16-byte aligned
    const int64_t* anchors;                 // [B]
    const float* temperatures;              // [B]
    const float* uniforms;                  // [B, S-1] in [0, 1), or NULL
    const int64_t* seeds;                   // [B]; read when uniforms is NULL
    const int64_t* first_positions;         // [B] position of the first proposed token; read when uniforms is NULL
    int64_t* tokens;                        // [B, S-1]
    float* q_rows;                          // [B, S-1, K]
} dflash_walk_params;

DFLASH_EXPORT int32_t dflash_selector_walk(const dflash_walk_params* params, dflash_stream stream);

// out[b, j] = the uniform of `word` (0 walk, 1 accept, 2 residual) of the stream seeds[b] at first_positions[b] + j, for
// j < count: what the walk and accept draw inside, for readers that want the draws themselves.
DFLASH_EXPORT int32_t dflash_uniforms(const int64_t* seeds, const int64_t* first_positions, float* out, int32_t batch,
                                      int32_t count, int32_t word, dflash_stream stream);

// Verifies S-1 draft tokens against S rows of logits (already penalised) and draws the token that follows.
//
// p of a row: temperature, top-k (largest k, ties to the lowest id), softmax, top-p (descending, kept while the mass
// before the token is below top_p), min-p (p >= min_p * largest p), renormalised. Draft j is kept when
// u * q < p with u = Philox word 1 at first_positions[b] + j. The first rejection draws from [p - q]+ (q lives on the K
// candidates; a sum of 0 falls back to p), all kept draws from p of the last row; both by inverse CDF over token ids
// with word 2 at the position drawn. temperature <= 0: argmax, ties to the lowest id, draft kept when equal.
// Key = the request's seed, counter = position: trtllm_dflash/runtime/random_streams.py.
typedef struct dflash_accept_params {
    uint32_t struct_size;
    int32_t dtype;  // of logits
    int32_t batch, block_size, count;
    int32_t columns, valid_columns;  // padding columns at or beyond valid_columns have no probability
    const void* logits;              // [B, S, V], strides logits_stride_batch and logits_stride_row
    int64_t logits_stride_batch, logits_stride_row;
    const int64_t* draft_tokens;     // [B, S-1]
    const int64_t* candidates;       // [B, S-1, K]
    const float* q_rows;             // [B, S-1, K]
    const int64_t* block_lengths;    // [B] rows that exist, 0 = idle request; NULL = S everywhere
    const float* temperatures;       // [B]
    const int64_t* top_k;            // [B], <= 0 is off; NULL = off everywhere
    const float* top_p;              // [B], >= 1 is off; NULL likewise
    const float* min_p;              // [B], <= 0 is off; NULL likewise
    const int64_t* seeds;            // [B]
    const int64_t* first_positions;  // [B] absolute position of draft 0
    int64_t* tokens;                 // [B, S]: committed tokens, then -1
    int64_t* accepted;               // [B]
    int64_t* committed;              // [B] accepted + 1, 0 when idle
    uint8_t* faulty;                 // [B] 1 where an existing row holds a NaN, or NULL
    void* workspace;                 // 16-byte aligned; contents need no initialisation
    int64_t workspace_bytes;
} dflash_accept_params;

DFLASH_EXPORT int64_t dflash_accept_workspace_bytes(const dflash_accept_params* params);
DFLASH_EXPORT int32_t dflash_accept(const dflash_accept_params* params, dflash_stream stream);

#ifdef __cplusplus
}
#endif
