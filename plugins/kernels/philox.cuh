// Philox4x32-10 on the device; the definition and the meaning of its words are runtime/random_streams.py.
#pragma once

#include <stdint.h>

namespace dflash {

enum RandomWord { kWalkWord = 0, kAcceptWord = 1, kResidualWord = 2 };

// The uniform in [0, 1) of one purpose of (seed, position).
__device__ __forceinline__ float philox_uniform(int64_t seed, int64_t position, RandomWord word) {
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(uint64_t(seed) >> 32);
    uint32_t c[4] = {uint32_t(position), uint32_t(uint64_t(position) >> 32), 0, 0};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
        c[0] = high1 ^ c[1] ^ key0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ key1;
        c[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const uint32_t chosen = word == kWalkWord ? c[0] : word == kAcceptWord ? c[1] : c[2];
    return float(chosen >> 8) * 0x1p-24f;
}

}  // namespace dflash
