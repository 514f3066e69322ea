// Residual add + RMSNorm, and SwiGLU: one pass over their data each.
#include <algorithm>

#include "launch.h"
#include "mma.cuh"
#include "overlapped_launch.cuh"

namespace dflash {

DFLASH_REGISTER_KERNEL(add_rms_norm, "add_rms_norm");
DFLASH_REGISTER_KERNEL(swiglu, "swiglu");

namespace {

template <typename T>
__device__ __forceinline__ void unpack_eight(const uint4& bits, float (&v)[8]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair<T>(words[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
}

template <typename T>
__device__ __forceinline__ uint4 pack_eight(const float (&v)[8]) {
    return make_uint4(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]), pack_pair<T>(v[4], v[5]),
                      pack_pair<T>(v[6], v[7]));
}

// Eight consecutive residual values, kept in the activations' type or in float32.
template <typename T, bool kFloat32>
struct Residual {
    static __device__ __forceinline__ void load(const void* row, int chunk, float (&v)[8]) {
        if constexpr (kFloat32) {
            const float4* at = static_cast<const float4*>(row) + 2 * chunk;
            const float4 a = at[0], b = at[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            unpack_eight<T>(static_cast<const uint4*>(row)[chunk], v);
        }
    }

    // Leaves in `v` what was stored: the norm is of the residual that later layers will read.
    static __device__ __forceinline__ void store(void* row, int chunk, float (&v)[8]) {
        if constexpr (kFloat32) {
            float4* at = static_cast<float4*>(row) + 2 * chunk;
            at[0] = make_float4(v[0], v[1], v[2], v[3]);
            at[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            const uint4 bits = pack_eight<T>(v);
            static_cast<uint4*>(row)[chunk] = bits;
            unpack_eight<T>(bits, v);
        }
    }
};

template <typename T, bool kFloat32, int kChunks>
__global__ void __launch_bounds__(1024)
    add_rms_norm_kernel(const T* x, char* residual, const T* weight, T* out, char* kept, int64_t kept_stride, int width,
                        float eps) {
    let_next_launch_start();
    // The weight is nobody's result: it is here before the launch in front ends.
    uint4 weights[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int chunk = threadIdx.x + c * blockDim.x;
        weights[c] = make_uint4(0, 0, 0, 0);
        if (chunk * 8 < width) weights[c] = __ldg(reinterpret_cast<const uint4*>(weight) + chunk);
    }
    wait_for_previous_launch();
    __shared__ float warp_sums[32];
    const int64_t first = static_cast<int64_t>(blockIdx.x) * width;
    constexpr int kResidualBytes = kFloat32 ? 4 : static_cast<int>(sizeof(T));
    char* residual_row = residual + first * kResidualBytes;
    char* kept_row = kept + blockIdx.x * kept_stride * kResidualBytes;
    float values[kChunks][8];
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int chunk = threadIdx.x + c * blockDim.x;
        if (chunk * 8 >= width) break;
        Residual<T, kFloat32>::load(residual_row, chunk, values[c]);
        if (x) {
            float added[8];
            unpack_eight<T>(reinterpret_cast<const uint4*>(x + first)[chunk], added);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[c][i] += added[i];
            Residual<T, kFloat32>::store(residual_row, chunk, values[c]);
        }
        if (kept) Residual<T, kFloat32>::store(kept_row, chunk, values[c]);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += values[c][i] * values[c][i];
    }
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = threadIdx.x % 32 < blockDim.x / 32 ? warp_sums[threadIdx.x % 32] : 0.0f;
    for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    const float factor = rsqrtf(squares / width + eps);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int chunk = threadIdx.x + c * blockDim.x;
        if (chunk * 8 >= width) break;
        float scaled[8];
        unpack_eight<T>(weights[c], scaled);
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] *= values[c][i] * factor;
        reinterpret_cast<uint4*>(out + first)[chunk] = pack_eight<T>(scaled);
    }
}

template <typename T, bool kFloat32>
void launch_norm(const void* x, void* residual, const void* weight, void* out, void* kept, int64_t kept_stride, int rows,
                 int width, float eps, cudaStream_t stream) {
    const int chunks = width / 8;
    const int per_thread = chunks <= 512 ? 1 : chunks <= 2048 ? 2 : 4;
    const int threads = std::min(1024, ((chunks + per_thread - 1) / per_thread + 31) / 32 * 32);
    auto kernel = per_thread == 1   ? add_rms_norm_kernel<T, kFloat32, 1>
                  : per_thread == 2 ? add_rms_norm_kernel<T, kFloat32, 2>
                                    : add_rms_norm_kernel<T, kFloat32, 4>;
    launch_overlapped(kernel, dim3(rows), threads, 0, stream, static_cast<const T*>(x), static_cast<char*>(residual),
                      static_cast<const T*>(weight), static_cast<T*>(out), static_cast<char*>(kept), kept_stride, width,
                      eps);
}

template <typename T>
__global__ void __launch_bounds__(256) swiglu_kernel(const T* gate_up, T* out, int rows, int chunks) {
    let_next_launch_start();
    wait_for_previous_launch();
    const int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    const int64_t row = item / chunks;
    const int chunk = static_cast<int>(item % chunks);
    if (row >= rows) return;
    const uint4* source = reinterpret_cast<const uint4*>(gate_up) + row * 2 * chunks;
    float gate[8], up[8];
    unpack_eight<T>(__ldg(source + chunk), gate);
    unpack_eight<T>(__ldg(source + chunks + chunk), up);
#pragma unroll
    for (int i = 0; i < 8; ++i) up[i] *= gate[i] / (1.0f + __expf(-gate[i]));
    reinterpret_cast<uint4*>(out)[item] = pack_eight<T>(up);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace
}  // namespace dflash

int32_t dflash_add_rms_norm(int32_t dtype, int32_t residual_dtype, const void* x, void* residual, const void* weight,
                            void* out, void* kept, int64_t kept_stride, int32_t rows, int32_t width, float eps,
                            dflash_stream stream) {
    using namespace dflash;
    if ((dtype != DFLASH_BFLOAT16 && dtype != DFLASH_FLOAT16) ||
        (residual_dtype != dtype && residual_dtype != DFLASH_FLOAT32))
        return fail(DFLASH_UNSUPPORTED, "add_rms_norm: dtype %d with residual dtype %d", dtype, residual_dtype);
    if (rows < 0 || width < 8 || width % 8 || width > 32768)
        return fail(DFLASH_UNSUPPORTED, "add_rms_norm: rows %d, width %d (a multiple of 8 up to 32768)", rows, width);
    if (!aligned(x) || !aligned(residual) || !aligned(weight) || !aligned(out) || !aligned(kept) || kept_stride % 8)
        return fail(DFLASH_INVALID_ARGUMENT, "add_rms_norm: tensors must be 16-byte aligned, kept_stride (%lld) a "
                    "multiple of 8", static_cast<long long>(kept_stride));
    if (rows == 0) return DFLASH_OK;
    if (!residual || !weight || !out) return fail(DFLASH_INVALID_ARGUMENT, "add_rms_norm: a tensor is missing");
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    const bool wide = residual_dtype == DFLASH_FLOAT32;
    auto launch = dtype == DFLASH_BFLOAT16
                      ? (wide ? launch_norm<__nv_bfloat16, true> : launch_norm<__nv_bfloat16, false>)
                      : (wide ? launch_norm<__half, true> : launch_norm<__half, false>);
    launch(x, residual, weight, out, kept, kept_stride, rows, width, eps, cuda_stream);
    return check_launch("add_rms_norm");
}

int32_t dflash_swiglu(int32_t dtype, const void* gate_up, void* out, int32_t rows, int32_t width,
                      dflash_stream stream) {
    using namespace dflash;
    if (dtype != DFLASH_BFLOAT16 && dtype != DFLASH_FLOAT16)
        return fail(DFLASH_UNSUPPORTED, "swiglu: dtype %d, expected bfloat16 (0) or float16 (1)", dtype);
    if (rows < 0 || width < 8 || width % 8)
        return fail(DFLASH_UNSUPPORTED, "swiglu: rows %d, width %d (a multiple of 8)", rows, width);
    if (!aligned(gate_up) || !aligned(out))
        return fail(DFLASH_INVALID_ARGUMENT, "swiglu: tensors must be 16-byte aligned");
    if (rows == 0) return DFLASH_OK;
    if (!gate_up || !out) return fail(DFLASH_INVALID_ARGUMENT, "swiglu: a tensor is missing");
    const int chunks = width / 8;
    const unsigned blocks = static_cast<unsigned>((static_cast<int64_t>(rows) * chunks + 255) / 256);
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    if (dtype == DFLASH_BFLOAT16)
        launch_overlapped(swiglu_kernel<__nv_bfloat16>, dim3(blocks), 256, 0, cuda_stream,
                          static_cast<const __nv_bfloat16*>(gate_up), static_cast<__nv_bfloat16*>(out), rows, chunks);
    else
        launch_overlapped(swiglu_kernel<__half>, dim3(blocks), 256, 0, cuda_stream,
                          static_cast<const __half*>(gate_up), static_cast<__half*>(out), rows, chunks);
    return check_launch("swiglu");
}
