// How one attention call is laid out on the device: which kernel, how many splits, how they are joined.
#pragma once

#include "attention_variant.h"
#include "dflash_kernels.h"

namespace dflash {

// Splits that one launch joins: four statistics per lane of a warp.
constexpr int kMaxSplits = 128;

struct Plan {
    const AttentionVariant* variant;
    int row_tiles, splits, stages, shared_bytes;
    bool join_in_cluster;
    int64_t workspace_bytes, partial_floats;
};

// Fills `plan` for the current device, or stores the reason of a refusal. Reads no pointer of the parameters.
int32_t make_plan(const dflash_attention_params& p, Plan& plan);

// The launch of one plan, without its stream and arguments.
struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2];

    Launch(const AttentionVariant& variant, int shared_bytes, dim3 grid, int cluster) {
        cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
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
