// Grouped dynamic convolution inside each draft block; the out form goes on to the float32 residual and the next
// RMSNorm, so that a sublayer's result is read once.
#include "dflash_select.h"
#include "launch.h"
#include "ordered_key.cuh"
#include "overlapped_launch.cuh"
#include "select_dispatch.h"

namespace dflash {
namespace {

constexpr int kColumns = 8;  // per thread: one 16-byte vector of 2-byte elements
constexpr int kInThreads = 128;
constexpr int kMaxOutThreads = 1024;

template <typename T>
__device__ void load_columns(const T* address, float (&values)[kColumns]) {
#pragma unroll
    for (int first = 0; first < kColumns; first += kVectorElements<T>) {
        float part[kVectorElements<T>];
        load_vector(address + first, part);
#pragma unroll
        for (int i = 0; i < kVectorElements<T>; ++i) values[first + i] = part[i];
    }
}

template <typename T>
__device__ void store_columns(T* address, const float (&values)[kColumns]) {
    constexpr int kVec = kVectorElements<T>;
#pragma unroll
    for (int first = 0; first < kColumns; first += kVec) {
        uint4 packed;
        T* elements = reinterpret_cast<T*>(&packed);
#pragma unroll
        for (int i = 0; i < kVec; ++i) elements[i] = from_float<T>(values[first + i]);
        *reinterpret_cast<uint4*>(address + first) = packed;
    }
}

template <typename T>
__device__ void convolve(const dflash_grouped_conv_params& p, int row, int column, float (&sum)[kColumns]) {
    const int group_size = p.width / p.groups;
    const int taps = min(p.taps, row % p.block_size + 1);  // rows before the block count as zero
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride + column;
    const T* dynamic = static_cast<const T*>(p.dynamic) + row * p.dynamic_stride;
    const T* base = static_cast<const T*>(p.base) + column;
#pragma unroll
    for (float& value : sum) value = 0.0f;
#pragma unroll 2
    for (int tap = 0; tap < taps; ++tap) {
        float input[kColumns], kernel[kColumns];
        load_columns(x - tap * p.x_stride, input);
        load_columns(base + int64_t(tap) * p.width, kernel);
        const T* delta = dynamic + tap * p.groups;
        if (group_size % kColumns == 0) {
            const float shift = to_float(delta[column / group_size]);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sum[i] = fmaf(kernel[i] + shift, input[i], sum[i]);
        } else {
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                sum[i] = fmaf(kernel[i] + to_float(delta[(column + i) / group_size]), input[i], sum[i]);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(kInThreads) conv_in(dflash_grouped_conv_params p) {
    let_next_launch_start();
    wait_for_previous_launch();
    const int column = int(blockIdx.y * kInThreads + threadIdx.x) * kColumns, row = blockIdx.x;
    if (column >= p.width) return;
    float sum[kColumns];
    convolve<T>(p, row, column, sum);
    store_columns(static_cast<T*>(p.out) + int64_t(row) * p.width + column, sum);
}

__device__ float block_sum(float value) {
    __shared__ float warp_sums[32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? warp_sums[threadIdx.x % 32] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    return value;
}

// One block per row; a thread keeps its Pieces * 8 columns in registers between the residual and the norm.
template <typename T, int Pieces>
__global__ void __launch_bounds__(kMaxOutThreads) conv_out(dflash_grouped_conv_params p) {
    let_next_launch_start();
    float weight[Pieces][kColumns] = {};  // nobody's result: here before the launch in front ends
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
        const int column = int(piece * blockDim.x + threadIdx.x) * kColumns;
        if (p.norm_weight == nullptr || column >= p.width) break;
        load_columns(static_cast<const T*>(p.norm_weight) + column, weight[piece]);
    }
    wait_for_previous_launch();
    const int row = blockIdx.x;
    float* residual = p.residual + int64_t(row) * p.width;
    float kept[Pieces][kColumns];
    float squares = 0.0f;
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
        const int column = int(piece * blockDim.x + threadIdx.x) * kColumns;
        if (column >= p.width) break;
        float old[kColumns];
        load_columns(residual + column, old);
        convolve<T>(p, row, column, kept[piece]);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            kept[piece][i] += old[i];
            squares = fmaf(kept[piece][i], kept[piece][i], squares);
        }
        store_columns(residual + column, kept[piece]);
    }
    if (p.norm_weight == nullptr) return;
    const float scale = rsqrtf(block_sum(squares) / float(p.width) + p.eps);
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
        const int column = int(piece * blockDim.x + threadIdx.x) * kColumns;
        if (column >= p.width) break;
        // Rounded before the weight, as the torch dialect and Hugging Face do.
#pragma unroll
        for (int i = 0; i < kColumns; ++i) weight[piece][i] *= to_float(from_float<T>(kept[piece][i] * scale));
        store_columns(static_cast<T*>(p.out) + int64_t(row) * p.width + column, weight[piece]);
    }
}

bool aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

int32_t validate(const dflash_grouped_conv_params& p) {
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (p.width < 8 || p.width % 8 != 0 || p.width > 4 * kMaxOutThreads * kColumns)
        return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: width %d, expected a multiple of 8 up to %d", p.width,
                    4 * kMaxOutThreads * kColumns);
    if (p.groups < 1 || p.width % p.groups != 0)
        return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: groups %d does not divide width %d", p.groups, p.width);
    if (p.taps < 1 || p.taps > DFLASH_MAX_CONV_TAPS)
        return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: taps %d, expected 1..%d", p.taps, DFLASH_MAX_CONV_TAPS);
    if (p.rows < 0 || p.block_size < 1 || p.rows % p.block_size != 0)
        return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: rows %d is not a whole number of blocks of %d", p.rows,
                    p.block_size);
    if (p.x_stride % 8 != 0 || !aligned(p.x) || !aligned(p.base) || !aligned(p.residual) || !aligned(p.norm_weight) ||
        !aligned(p.out))
        return fail(
            DFLASH_INVALID_ARGUMENT,
            "grouped_conv: x, base, residual, norm_weight and out must be 16-byte aligned and x_stride (%lld) a "
            "multiple of 8",
            static_cast<long long>(p.x_stride));
    if (p.residual == nullptr && p.norm_weight != nullptr)
        return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: norm_weight given without residual");
    if (p.out == p.x) return fail(DFLASH_INVALID_ARGUMENT, "grouped_conv: out overlaps x, whose earlier rows are read");
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(grouped_conv, "grouped_conv");

int32_t dflash_grouped_conv(const dflash_grouped_conv_params* params, dflash_stream stream) {
    const dflash_grouped_conv_params p = *params;
    const int32_t valid = validate(p);
    if (valid != DFLASH_OK || p.rows == 0) return valid;
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    const int vectors = p.width / kColumns;
    return dispatch_dtype("grouped_conv", p.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (p.residual == nullptr) {
            const dim3 grid(p.rows, (vectors + kInThreads - 1) / kInThreads);
            launch_overlapped(conv_in<T>, grid, kInThreads, 0, cuda_stream, p);
            return check_launch("grouped_conv in");
        }
        const int threads = vectors < kMaxOutThreads ? (vectors + 31) / 32 * 32 : kMaxOutThreads;
        const int pieces = (vectors + threads - 1) / threads;
        if (pieces == 1) {
            launch_overlapped(conv_out<T, 1>, p.rows, threads, 0, cuda_stream, p);
        } else if (pieces == 2) {
            launch_overlapped(conv_out<T, 2>, p.rows, threads, 0, cuda_stream, p);
        } else {
            launch_overlapped(conv_out<T, 4>, p.rows, threads, 0, cuda_stream, p);
        }
        return check_launch("grouped_conv out");
    });
}
