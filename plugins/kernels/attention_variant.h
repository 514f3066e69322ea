// The compiled instances of the attention kernel, as data: the host picks one, no nested switches.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

namespace dflash {

struct AttentionArgs;

// Pairs always find two neighbouring multiprocessors; clusters of four and more left multiprocessors empty (measured:
// up to 1.4 times slower than a separate launch that joins the splits).
constexpr int kClusterSplits = 2;

struct AttentionVariant {
    int dtype, kv_dtype, head_dim;
    int rows;  // query rows of one tile
    int keys;  // keys of one tile
    int threads;
    bool clusters;  // can join kClusterSplits splits inside a thread block cluster
    int (*shared_bytes)(int stages);
    void (*kernel)(AttentionArgs);
};

struct AttentionVariants {
    const AttentionVariant* first;
    int count;
};

// One file each, so that they compile in parallel. Within a head_dim, rows ascend.
AttentionVariants attention_variants_bfloat16();
AttentionVariants attention_variants_float16();
AttentionVariants attention_variants_bfloat16_float8();
AttentionVariants attention_variants_float16_float8();
// wgmma kernels: run on compute capability 9.0 only, both types.
AttentionVariants attention_variants_hopper();

}  // namespace dflash
