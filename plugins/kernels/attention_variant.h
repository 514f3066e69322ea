// The compiled instances of the attention kernel, as data: the host picks one, no nested switches.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

namespace dflash {

struct AttentionArgs;

// Pairs of blocks that share multiprocessors always find room. Larger clusters of such blocks left multiprocessors
// empty (measured: up to 1.4 times slower than a separate launch that joins the splits); blocks that fill a
// multiprocessor form clusters of up to 16.
constexpr int kPairSplits = 2;
constexpr int kMaxClusterSplits = 16;
constexpr int kLongShare = 64;  // key tiles of a split that is worth all of a multiprocessor

struct AttentionVariant {
    int dtype, kv_dtype, head_dim;
    int rows;  // query rows of one tile
    int keys;  // keys of one tile
    int threads;
    int blocks_per_multiprocessor;
    int cluster_limit;    // splits that can be one thread block cluster; 1: none
    int held_rows;        // partial rows of other blocks of the cluster that a block has room for; 0: it needs none
    int more_in_cluster;  // bytes of shared memory for them
    int most_stages;
    int stages_beside_join;  // with which a block leaves room for one of the launch that joins splits; 0: it does not
    bool tensor_maps;        // reads the caches through AttentionArgs::k_map and v_map
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
// wgmma kernels: run on compute capability 9.0 only, both types. Of the second kind a block fills a multiprocessor.
AttentionVariants attention_variants_hopper();
AttentionVariants attention_variants_hopper_alone();

}  // namespace dflash
