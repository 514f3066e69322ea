// C launch API of the DFlash kernels: no framework types, no exceptions, no host synchronisation.
//
// Every launch function validates its arguments, enqueues on `stream` and returns a dflash_status; the text of the
// last failure of the calling thread is dflash_last_error(). All launches may be captured in a CUDA graph: grids
// depend only on host-known bounds, lengths are read on the device.
//
// Words (docs/architecture.md): T packed tokens, B requests, S block size, P pages per request. Strides are in
// elements. Every data pointer must be 16-byte aligned, every stride a multiple of 16 bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or a signature in this header changes meaning; the Python loader insists on equality.
#define DFLASH_ABI_VERSION 3

#define DFLASH_EXPORT __attribute__((visibility("default")))

typedef void* dflash_stream;  // a cudaStream_t

typedef enum dflash_status {
    DFLASH_OK = 0,
    DFLASH_INVALID_ARGUMENT = 1,  // the caller passed something impossible
    DFLASH_UNSUPPORTED = 2,       // possible, but no kernel was compiled for it
    DFLASH_CUDA_ERROR = 3,        // CUDA refused the launch
} dflash_status;

typedef enum dflash_dtype {
    DFLASH_BFLOAT16 = 0,
    DFLASH_FLOAT16 = 1,
    DFLASH_FLOAT32 = 2,
    DFLASH_FLOAT8_E4M3 = 3,
} dflash_dtype;

DFLASH_EXPORT int32_t dflash_abi_version(void);
// Message of the last failed call of this thread; empty when none failed.
DFLASH_EXPORT const char* dflash_last_error(void);
// JSON: {"version", "abi", "cuda", "sm": [...], "kernels": [...], "plugins": [...]}.
DFLASH_EXPORT const char* dflash_library_info(void);

// Attention of packed queries over a paged cache and, in block mode, the block's own K/V.
//
// Query i of request b stands at position context_lengths[b] + i. Block mode (block_size > 0): every request has
// block_size queries, keys are the first context_lengths[b] cached rows followed by the first block_lengths[b] rows of
// k_block/v_block. Paged mode (block_size == 0): request b owns queries query_starts[b] .. query_starts[b+1], whose
// K/V rows are already in the cache.
// A query at p sees key k when p - k <= window_left, k - p <= window_right and, if causal, k <= p. A query that sees
// nothing returns zeros.
typedef struct dflash_attention_params {
    uint32_t struct_size;  // sizeof(dflash_attention_params)
    int32_t dtype;         // of q, k_block, v_block and out: bfloat16 or float16
    int32_t kv_dtype;      // of the cache: dtype, or float8_e4m3 (block K/V stay in dtype and are rounded to
                           // float8 with the same scales, as the cache would hold them)
    int32_t index_bytes;   // 4 or 8: page_table, context_lengths, query_starts, block_lengths
    int32_t batch;
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t page_tokens;        // multiple of 16
    int32_t pages_per_request;  // columns of page_table, the only host-known bound of the context length
    int32_t max_query;          // bound of queries per request; ignored in block mode
    int32_t block_size;
    int32_t causal;
    int32_t window_left, window_right;  // distance in tokens, -1 = unlimited
    int32_t max_splits;                 // 0 = chosen from batch, heads and multiprocessors; 1 = never split
    float scale;                        // on q.k
    float softcap;                      // tanh(s / softcap) * softcap after the scale; 0 = off
    float k_scale, v_scale;             // real value = stored value * scale; 1 unless the cache is float8
    const void* q;                      // [T, num_heads, head_dim], token stride q_stride
    const void* k_cache;                // [pages + 1, page_tokens, num_kv_heads, head_dim] contiguous
    const void* v_cache;
    const void* k_block;  // [B * block_size, num_kv_heads, head_dim], token stride block_stride
    const void* v_block;
    const float* sinks;           // [num_heads] logits that join every softmax, or NULL
    const void* page_table;       // [B, P], row stride page_table_stride
    const void* context_lengths;  // [B]
    const void* query_starts;     // [B + 1]; NULL in block mode
    const void* block_lengths;    // [B]; NULL = all block_size rows exist
    void* out;                    // [T, num_heads, head_dim], token stride out_stride
    int64_t q_stride, out_stride, block_stride, page_table_stride;
    void* workspace;  // at least dflash_attention_workspace_bytes; contents need no initialisation
    int64_t workspace_bytes;
    // 1: no launch since the last one that was not allowed to overlap the launch in front of it writes an index tensor
    // or a row of the caches below context_lengths. The kernel may then start to read those before the launch in front
    // has finished; queries, block rows and later cache rows may still come from it.
    int32_t context_settled;
    int32_t reserved;
} dflash_attention_params;

// Bytes of workspace that dflash_attention needs for these shapes on the current device (pointers are not read), or
// -1 with dflash_last_error() set.
DFLASH_EXPORT int64_t dflash_attention_workspace_bytes(const dflash_attention_params* params);
DFLASH_EXPORT int32_t dflash_attention(const dflash_attention_params* params, dflash_stream stream);

#define DFLASH_MAX_INJECT_LAYERS 64

// K norm, RoPE and paged write of K and V of all drafter layers from one stacked projection.
// Row n of layer l: K at kv + n * token_stride + l * layer_stride, V v_offset elements later.
typedef struct dflash_inject_params {
    uint32_t struct_size;
    int32_t dtype;        // of kv and k_norm_weight
    int32_t cache_dtype;  // dtype or float8_e4m3
    int32_t index_bytes;  // of positions and slots
    int32_t rows, layers;
    int32_t num_kv_heads, head_dim;
    int32_t rotary_dim;  // leading dimensions that rotate, multiple of 16; 0 = none
    float eps;
    const void* kv;
    int64_t token_stride, layer_stride, v_offset;
    const void* k_norm_weight;  // [layers, head_dim] or NULL (no norm)
    const float* cos_sin;       // [max_positions, rotary_dim]: cos half then sin half
    const void* positions;      // [rows]
    const void* slots;          // [rows], -1 drops the row
    void* k_caches[DFLASH_MAX_INJECT_LAYERS];
    void* v_caches[DFLASH_MAX_INJECT_LAYERS];
    float k_inverse_scale[DFLASH_MAX_INJECT_LAYERS];  // stored = real * inverse scale; float8 only
    float v_inverse_scale[DFLASH_MAX_INJECT_LAYERS];
} dflash_inject_params;

DFLASH_EXPORT int32_t dflash_inject_kv(const dflash_inject_params* params, dflash_stream stream);

// Target layer: q and k norm + RoPE, q written out, K and V written to the paged cache.
typedef struct dflash_qk_rope_params {
    uint32_t struct_size;
    int32_t dtype, cache_dtype, index_bytes;
    int32_t tokens;
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
    const void* qkv;  // [T, (num_heads + 2 num_kv_heads) * head_dim], token stride qkv_stride
    int64_t qkv_stride;
    const void* q_norm_weight;  // [head_dim] or NULL
    const void* k_norm_weight;
    const float* cos_sin;
    const void* positions;
    const void* slots;
    void* q_out;  // [T, num_heads, head_dim], token stride q_out_stride; may be the q part of qkv
    int64_t q_out_stride;
    void* k_cache;
    void* v_cache;
    float k_inverse_scale, v_inverse_scale;
    int32_t settled;  // 1: positions and slots may be read while earlier launches still run
} dflash_qk_rope_params;

DFLASH_EXPORT int32_t dflash_qk_norm_rope_write(const dflash_qk_rope_params* params, dflash_stream stream);

// residual += x (in place, dtype residual_dtype: dtype or float32), out = rms_norm(residual) * weight.
// x NULL: plain RMSNorm of residual. width a multiple of 8, at most 32768. kept: NULL, or where the new residual is
// written once more, rows kept_stride elements apart. The weight is read while the launch in front may still run.
DFLASH_EXPORT int32_t dflash_add_rms_norm(int32_t dtype, int32_t residual_dtype, const void* x, void* residual,
                                          const void* weight, void* out, void* kept, int64_t kept_stride, int32_t rows,
                                          int32_t width, float eps, dflash_stream stream);

// out[n, i] = silu(gate_up[n, i]) * gate_up[n, width + i]; width a multiple of 8.
DFLASH_EXPORT int32_t dflash_swiglu(int32_t dtype, const void* gate_up, void* out, int32_t rows, int32_t width,
                                    dflash_stream stream);

#ifdef __cplusplus
}
#endif
