// Dense products of a few rows with a weight of their own type.
#include "skinny_launch.cuh"

namespace dflash {

DFLASH_REGISTER_KERNEL(skinny_gemm, "skinny_gemm");

}  // namespace dflash

int32_t dflash_skinny_gemm(const dflash_skinny_params* params, dflash_stream stream) {
    return dflash::skinny_gemm<false>(*params, nullptr, static_cast<cudaStream_t>(stream));
}
