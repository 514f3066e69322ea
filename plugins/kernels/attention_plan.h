// How one attention call is laid out on the device: which kernel, how many splits, how they are joined.
#pragma once

#include "attention_variant.h"
#include "dflash_kernels.h"

namespace dflash {

// Splits that one launch joins: four statistics per lane of a warp.
constexpr int kMaxSplits = 128;

// The launch that joins splits: blocks of kJoinWarps warps, row_warps of them for a query row.
constexpr int kJoinWarps = 4;
struct Join {
    int row_warps, row_blocks;  // row_blocks of a request and KV head
    int64_t blocks;
    int spare_blocks;                             // that only hold their place, in front of the others
    int shared_bytes, least_bytes, shared_limit;  // of a block; what it needs; the largest of any plan
};

struct Plan {
    const AttentionVariant* variant;
    int row_tiles, splits, stages;
    int shared_bytes, shared_limit;  // of a block in this launch; the largest of any plan with this kernel
    bool join_in_cluster;
    Join join;  // of a second launch, where there are splits and they do not join in clusters
    int64_t workspace_bytes, partial_floats;
};

// Fills `plan` for the current device, or stores the reason of a refusal. Reads no pointer of the parameters.
int32_t make_plan(const dflash_attention_params& p, Plan& plan);

// The launch of one plan, without its stream and arguments.
struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2];

    // The limit is the function's and not the launch's: always the same, whoever launches beside us.
    Launch(const AttentionVariant& variant, int shared_bytes, int shared_limit, dim3 grid, int cluster) {
        cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit);
        cudaFuncSetAttribute(variant.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared);
        if (cluster > 8) cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        config.gridDim = grid;
        config.blockDim = dim3(variant.threads);
        config.dynamicSmemBytes = shared_bytes;
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        attributes[1].id = cudaLaunchAttributeClusterDimension;
        attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.z = 1;
        attributes[1].val.clusterDim.y = cluster;
        config.attrs = attributes;
        config.numAttrs = cluster > 1 ? 2 : 1;
    }
    Launch(const Launch&) = delete;  // config points into it
};

}  // namespace dflash
