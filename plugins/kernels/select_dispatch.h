// From a dflash_dtype of the C API to the C++ type of a kernel template.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace dflash {

// Calls launch(T{}) with the element type that `dtype` names and returns its status.
template <typename Launch>
int32_t dispatch_dtype(const char* kernel, int32_t dtype, Launch&& launch) {
    switch (dtype) {
        case DFLASH_BFLOAT16:
            return launch(__nv_bfloat16{});
        case DFLASH_FLOAT16:
            return launch(__half{});
        case DFLASH_FLOAT32:
            return launch(float{});
        default:
            return fail(DFLASH_UNSUPPORTED, "%s: dtype %d, expected bfloat16, float16 or float32", kernel, dtype);
    }
}

}  // namespace dflash
