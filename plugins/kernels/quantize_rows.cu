// Rows of activations as float8 with one scale each: what the row-wise scaled product of many rows takes.
#include "launch.h"
#include "mma.cuh"
#include "overlapped_launch.cuh"

#include "dflash_dense.h"

namespace dflash {

DFLASH_REGISTER_KERNEL(quantize_rows, "quantize_rows");

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLargest = 448.0f, kSmallestScale = 1e-12f;

// The larger, or NaN where there is one.
__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// One block per row, which it reads twice: the second time from the L1.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const T* x, int64_t x_stride, uint2* values, float* scales, int chunks) {
    let_next_launch_start();
    wait_for_previous_launch();
    __shared__ float warp_largest[kWarps];
    const uint4* row = reinterpret_cast<const uint4*>(x + blockIdx.x * x_stride);
    float largest = 0.0f;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
        const uint4 bits = row[chunk];
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_pair<T>(words[i]);
            largest = larger(largest, larger(fabsf(pair.x), fabsf(pair.y)));
        }
    }
    for (int offset = 16; offset > 0; offset /= 2)
        largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) largest = larger(largest, warp_largest[warp]);
    const float scale = larger(largest * (1.0f / kLargest), kSmallestScale);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    uint2* out = values + static_cast<int64_t>(blockIdx.x) * chunks;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
        const uint4 bits = row[chunk];
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_pair<T>(words[i]);
            // A division, not a product with the inverse: a value between two float8 numbers goes where torch sends it.
            pairs[i] = pack_e4m3_pair(__fdiv_rn(pair.x, scale), __fdiv_rn(pair.y, scale));
        }
        out[chunk] = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    }
}

}  // namespace
}  // namespace dflash

int32_t dflash_quantize_rows(int32_t dtype, const void* x, int64_t x_stride, void* values, float* scales, int32_t rows,
                             int32_t width, dflash_stream stream) {
    using namespace dflash;
    if (dtype != DFLASH_BFLOAT16 && dtype != DFLASH_FLOAT16)
        return fail(DFLASH_UNSUPPORTED, "quantize_rows: dtype %d, expected bfloat16 (0) or float16 (1)", dtype);
    if (rows < 0 || width < 8 || width % 8)
        return fail(DFLASH_UNSUPPORTED, "quantize_rows: rows %d, width %d (a multiple of 8)", rows, width);
    if (reinterpret_cast<uintptr_t>(x) % 16 || reinterpret_cast<uintptr_t>(values) % 16 || x_stride % 8)
        return fail(DFLASH_INVALID_ARGUMENT,
                    "quantize_rows: tensors must be 16-byte aligned, x_stride (%lld) a multiple of 8",
                    static_cast<long long>(x_stride));
    if (rows == 0) return DFLASH_OK;
    if (!x || !values || !scales) return fail(DFLASH_INVALID_ARGUMENT, "quantize_rows: a tensor is missing");
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    if (dtype == DFLASH_BFLOAT16)
        launch_overlapped(quantize_rows_kernel<__nv_bfloat16>, dim3(rows), kThreads, 0, cuda_stream,
                          static_cast<const __nv_bfloat16*>(x), x_stride, static_cast<uint2*>(values), scales,
                          width / 8);
    else
        launch_overlapped(quantize_rows_kernel<__half>, dim3(rows), kThreads, 0, cuda_stream,
                          static_cast<const __half*>(x), x_stride, static_cast<uint2*>(values), scales, width / 8);
    return check_launch("quantize_rows");
}
