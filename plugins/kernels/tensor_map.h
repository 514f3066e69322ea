// Describing a tensor to the copy engine, on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "launch.h"

namespace dflash {

// Fills `map` for boxes of a bfloat16, float16 or float8 tensor of three dimensions, fastest first; strides are in bytes,
// from the second dimension on. A box's first dimension is 128 bytes, which land in the swizzle of that width.
// The L2 fetches no more than those: with 256 it brings a neighbour that others are about to ask for, and everything
// that read through such a map was slower on an H200. `kernel` and `what` name the caller and the tensor in failures.
inline int32_t describe_tensor(const char* kernel, const char* what, int32_t dtype, const void* data,
                               const cuuint64_t (&sizes)[3], const cuuint64_t (&strides)[2], const cuuint32_t (&box)[3],
                               CUtensorMap& map) {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        return found == cudaDriverEntryPointSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                                                    : nullptr;
    }();
    if (!encode)
        return fail(DFLASH_UNSUPPORTED, "%s: the driver has no cuTensorMapEncodeTiled, expected CUDA 12 or newer",
                    kernel);
    const cuuint32_t steps[] = {1, 1, 1};
    const auto type = dtype == DFLASH_FLOAT16       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                      : dtype == DFLASH_FLOAT8_E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult status =
        encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        return fail(DFLASH_CUDA_ERROR, "%s: the driver refused to describe the %s (CUresult %d)", kernel, what,
                    int(status));
    return DFLASH_OK;
}

}  // namespace dflash
