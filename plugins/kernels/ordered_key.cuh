// A (value, id) pair as one 64-bit key whose order is "larger value first, ties to the lowest id", and the 16-byte
// loads and conversions that feed it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace dflash {

constexpr uint64_t kNoKey = 0;  // below every real key

__device__ __forceinline__ uint32_t ordered_bits(float value) {
    // Adding +0 folds -0 into +0: the two compare equal and must tie.
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits ^ ((bits >> 31) ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ __forceinline__ float ordered_value(uint32_t ordered) {
    return __uint_as_float(ordered ^ ((ordered >> 31) ? 0x80000000u : 0xFFFFFFFFu));
}

__device__ __forceinline__ uint64_t make_key(float value, uint32_t id) {
    return (uint64_t(ordered_bits(value)) << 32) | (0xFFFFFFFFu - id);
}

__device__ __forceinline__ float key_value(uint64_t key) { return ordered_value(uint32_t(key >> 32)); }
__device__ __forceinline__ uint32_t key_id(uint64_t key) { return 0xFFFFFFFFu - uint32_t(key); }

// 2^x to 2 units in the last place. exp2f() would spend four more instructions on results below 2^-126.
__device__ __forceinline__ float fast_exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Elements of a 16-byte vector.
template <typename T>
constexpr int kVectorElements = 16 / sizeof(T);

template <typename T>
__device__ __forceinline__ void load_vector(const T* address, float (&values)[kVectorElements<T>]) {
    const uint4 packed = *reinterpret_cast<const uint4*>(address);
    const T* elements = reinterpret_cast<const T*>(&packed);
#pragma unroll
    for (int i = 0; i < kVectorElements<T>; ++i) values[i] = to_float(elements[i]);
}

// One row of logits read in aligned 16-byte vectors even when the row itself starts off a 16-byte boundary: vector 0
// then begins before column 0, and columns outside [0, columns) read as -infinity without being touched.
template <typename T>
struct LogitRow {
    const T* row;
    int columns;  // valid ones
    int skew;     // columns between the aligned address and column 0

    __device__ LogitRow(const T* row_, int columns_)
        : row(row_), columns(columns_), skew(int((reinterpret_cast<uintptr_t>(row_) & 15) / sizeof(T))) {}

    __device__ int first_column(int vector) const { return vector * kVectorElements<T> - skew; }
    __device__ int vectors() const { return (columns + skew + kVectorElements<T> - 1) / kVectorElements<T>; }

    __device__ bool is_inside(int vector) const {
        const int first = skew > 0, end = (columns + skew) / kVectorElements<T>;
        return vector >= first && vector < end;
    }

    // Loads vectors `vector`, `vector + step`, …: all 16-byte loads are in flight before the first is used, and nothing
    // branches unless the thread holds a vector on the row's edge. NaN becomes -infinity and sets `has_nan`.
    template <int Count>
    __device__ void load(int vector, int step, float (&values)[Count * kVectorElements<T>], bool& has_nan) const {
        constexpr int kVec = kVectorElements<T>;
        uint4 packed[Count];
        bool all_inside = true;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            packed[i] = make_uint4(0, 0, 0, 0);
            const bool inside = is_inside(vector + i * step);
            all_inside &= inside;
            if (inside) packed[i] = *reinterpret_cast<const uint4*>(row + first_column(vector + i * step));
        }
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const T* elements = reinterpret_cast<const T*>(&packed[i]);
#pragma unroll
            for (int j = 0; j < kVec; ++j) values[i * kVec + j] = to_float(elements[j]);
        }
        if (!all_inside) {
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                if (is_inside(vector + i * step)) continue;
#pragma unroll
                for (int j = 0; j < kVec; ++j) {
                    const int column = first_column(vector + i * step) + j;
                    values[i * kVec + j] = column >= 0 && column < columns ? to_float(row[column]) : -INFINITY;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < Count * kVec; ++i) {
            has_nan |= values[i] != values[i];
            values[i] = fmaxf(values[i], -INFINITY);
        }
    }

    // A vector that is not inside, its columns outside the row as -infinity; NaN stays.
    __device__ uint4 edge_vector(int vector) const {
        uint4 packed;
        T* elements = reinterpret_cast<T*>(&packed);
#pragma unroll
        for (int j = 0; j < kVectorElements<T>; ++j) {
            const int column = first_column(vector) + j;
            elements[j] = column >= 0 && column < columns ? row[column] : from_float<T>(-INFINITY);
        }
        return packed;
    }

    // A single valid column, as load() would give it.
    __device__ float at(int column) const { return fmaxf(to_float(row[column]), -INFINITY); }
};

}  // namespace dflash
