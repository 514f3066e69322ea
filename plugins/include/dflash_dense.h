// C launch API of the dense products of decoding: a few rows of activations times a weight matrix that is read once, and
// what a float8 product of many rows needs besides a library's matrix product.
// Conventions as in dflash_kernels.h.
#pragma once

#include "dflash_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DFLASH_MAX_SKINNY_ROWS 32

// out = x weight^T + bias, or, gated, out = silu(x gate^T) * (x up^T) with `gate` the first `columns` rows of the weight
// and `up` the next; both products are rounded to dtype first, as a product that is stored in between would be.
// float32 accumulation; the order of additions depends on shapes and plan alone.
//
// The launch may start while earlier launches of its stream still run, and reads the weight at once: the weight must
// not be a result of the launch in front of it. x, bias and out may.
typedef struct dflash_skinny_params {
    uint32_t struct_size;  // sizeof(dflash_skinny_params)
    int32_t dtype;         // of all tensors: bfloat16 or float16
    int32_t rows;          // M, at most DFLASH_MAX_SKINNY_ROWS
    int32_t columns;       // of out
    int32_t depth;         // K, a multiple of 64, at most 16384
    int32_t gated;         // 1: weight [2 * columns, depth], no bias
    // Plan; 0 = chosen from the shape.
    int32_t cluster;           // blocks that share one range of columns and divide the depth: 1, 2, 4 or 8
    int32_t stages;            // copies in flight per warp
    int32_t early;             // when the next launch may start: 1 (chosen) = with the last copy asked for, 2 = at once
    const void* x;             // [rows, depth], 16-byte aligned, x_stride a multiple of 8
    const void* weight;        // [columns or 2 * columns, depth] contiguous, 16-byte aligned
    const void* bias;          // [columns] or NULL
    void* out;                 // [rows, columns]
    int64_t x_stride, out_stride;
} dflash_skinny_params;

DFLASH_EXPORT int32_t dflash_skinny_gemm(const dflash_skinny_params* params, dflash_stream stream);

// As dflash_skinny_gemm with a weight of float8_e4m3 (dtype is that of x, bias and out) whose rows are scaled: real value =
// stored value * scale of its row. `scales` [columns or 2 * columns] float32 are read as early as the weight. x is not
// rounded: the result is that of the same product with the weight in float32.
DFLASH_EXPORT int32_t dflash_skinny_gemm_float8(const dflash_skinny_params* params, const float* scales,
                                                dflash_stream stream);

// float8_e4m3 values [rows, width] contiguous and float32 scales [rows] with x = values * scales: the largest magnitude of a
// row becomes 448. For products of many rows. width a multiple of 8; x and values 16-byte aligned, x_stride a multiple of 8.
DFLASH_EXPORT int32_t dflash_quantize_rows(int32_t dtype, const void* x, int64_t x_stride, void* values, float* scales,
                                           int32_t rows, int32_t width, dflash_stream stream);

#ifdef __cplusplus
}
#endif
