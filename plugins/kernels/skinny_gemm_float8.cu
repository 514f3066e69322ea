// Dense products of a few rows with a float8 weight.
#include "skinny_launch.cuh"

namespace dflash {

DFLASH_REGISTER_KERNEL(skinny_gemm_float8, "skinny_gemm_float8");

}  // namespace dflash

int32_t dflash_skinny_gemm_float8(const dflash_skinny_params* params, const float* scales, dflash_stream stream) {
    using namespace dflash;
    if (params->rows > 0 && !scales) return fail(DFLASH_INVALID_ARGUMENT, "skinny_gemm_float8: the scales are missing");
    return skinny_gemm<true>(*params, scales, static_cast<cudaStream_t>(stream));
}
