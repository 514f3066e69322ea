// bfloat16 tokens as halves, without losing a bit that a float32 sum could show.
//
// A half has more fraction bits than a bfloat16 and less range. So each warp scales its part of a token by a power of
// two that brings the largest element to 2^15, and its sums back by the inverse. What is 2^32 times smaller than the
// largest loses bits, what is 2^40 times smaller is gone: float32 sums lose such terms as well. Infinities and NaN
// stay.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "mma.cuh"

namespace dflash {

__device__ __forceinline__ __nv_bfloat162 as_bfloat16_pair(uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}

__device__ __forceinline__ uint32_t bits_of(const __nv_bfloat162& pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Powers of two that sums are multiplied with, as eight bits of exponent each: registers are dear. Of token
// lane % 4 * 2 + i of every eight, which is where the matrix instruction leaves its sums.
template <int kTokenTiles>
struct TokenScales {
    uint32_t exponents[(kTokenTiles + 1) / 2];

    __device__ __forceinline__ void keep(int eight, int i, uint32_t exponent) {
        exponents[eight / 2] |= exponent << (eight % 2 * 16 + i * 8);
    }
    __device__ __forceinline__ float inverse(int eight, int i) const {
        return __uint_as_float((exponents[eight / 2] >> (eight % 2 * 16 + i * 8) & 0xff) << 23);
    }
};

// x[b][t] are pieces of token lane / 4 of the t-th eight. The whole warp calls.
template <int kBlocks, int kTokenTiles, int kPieces>
__device__ __forceinline__ TokenScales<kTokenTiles> bfloat16_tokens_to_halves(
    uint4 (&x)[kBlocks][kTokenTiles][kPieces]) {
    TokenScales<kTokenTiles> scales{};
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
        // Of absolute values, which are ordered as their bits are; NaN is the largest.
        uint32_t largest = 0;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const uint4& piece = x[b][t][i];
                const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
                for (int word = 0; word < 4; ++word)
                    largest = bits_of(__hmax2_nan(as_bfloat16_pair(largest), __habs2(as_bfloat16_pair(words[word]))));
            }
        int exponent = max(largest >> 23, largest << 16 >> 23);  // biased; 255 of infinity and NaN
        exponent = max(exponent, __shfl_xor_sync(kAll, exponent, 1));
        exponent = max(exponent, __shfl_xor_sync(kAll, exponent, 2));
        exponent = max(exponent, 16);  // the inverse of less is no normal number, and nothing so small matters
        const uint32_t factor = 127 + 15 + 127 - exponent;
        const __nv_bfloat162 factors = as_bfloat16_pair(factor << 7 | factor << 23);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales.keep(t, i, __shfl_sync(kAll, exponent - 15, (lane % 4 * 2 + i) * 4));
        auto convert = [&](uint32_t& word) {
            // By hand: what __bfloat1622float2 becomes takes half as many instructions again.
            const uint32_t scaled = bits_of(__hmul2(as_bfloat16_pair(word), factors));
            word = pack_pair<__half>(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xffff0000u));
        };
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
                convert(x[b][t][i].x), convert(x[b][t][i].y), convert(x[b][t][i].z), convert(x[b][t][i].w);
    }
    return scales;
}

}  // namespace dflash
