// One head of one token, spread over a group of lanes, eight dimensions each: norm, rotation, paged write.
#pragma once

#include "mma.cuh"

namespace dflash {

// kLanes: a power of two, at least head_dim / 8; lanes beyond head_dim / 8 hold zeros and write nothing. All lanes of
// a warp must call these together, also for heads that are dropped.
template <typename T, int kLanes>
struct HeadRow {
    float values[8];

    static __device__ __forceinline__ int chunk() { return threadIdx.x % kLanes; }

    __device__ __forceinline__ void unpack(const uint4& bits) {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_pair<T>(words[i]);
            values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
        }
    }

    __device__ __forceinline__ uint4 pack() const {
        return make_uint4(pack_pair<T>(values[0], values[1]), pack_pair<T>(values[2], values[3]),
                          pack_pair<T>(values[4], values[5]), pack_pair<T>(values[6], values[7]));
    }

    // This lane's part of a norm weight, zeros where there is none.
    static __device__ __forceinline__ uint4 load_weight(const void* weight, int head_dim) {
        if (weight == nullptr || chunk() * 8 >= head_dim) return make_uint4(0, 0, 0, 0);
        return __ldg(static_cast<const uint4*>(weight) + chunk());
    }

    // RMSNorm over the head, in float32, with what load_weight() gave.
    __device__ __forceinline__ void normalise(const uint4& weight, int head_dim, float eps, bool enabled) {
        float squares = 0.0f;
#pragma unroll
        for (float x : values) squares += x * x;
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        if (!enabled || chunk() * 8 >= head_dim) return;
        const float factor = rsqrtf(squares / head_dim + eps);
        HeadRow weights;
        weights.unpack(weight);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= factor * weights.values[i];
    }

    // Half-split rotation (Hugging Face): x cos - partner sin below rotary_dim / 2, x cos + partner sin above.
    __device__ __forceinline__ void rotate(const float (&cosines)[8], const float (&sines)[8], int rotary_dim) {
        const int half = rotary_dim / 16;  // chunks of one half
        const int partner = chunk() < half ? chunk() + half : chunk() - half;
        const bool rotates = chunk() < 2 * half;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = __shfl_sync(0xffffffffu, values[i], rotates ? partner : chunk(), kLanes);
            if (rotates) values[i] = values[i] * cosines[i] + (chunk() < half ? -other : other) * sines[i];
        }
    }

    static __device__ __forceinline__ void load_rotation(const float* row, int rotary_dim, bool present,
                                                         float (&cosines)[8], float (&sines)[8]) {
        if (!present || chunk() * 8 >= rotary_dim) return;
        const int column = chunk() * 8 % (rotary_dim / 2);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 c = __ldg(reinterpret_cast<const float4*>(row + column + i));
            const float4 s = __ldg(reinterpret_cast<const float4*>(row + rotary_dim / 2 + column + i));
            cosines[i] = c.x, cosines[i + 1] = c.y, cosines[i + 2] = c.z, cosines[i + 3] = c.w;
            sines[i] = s.x, sines[i + 1] = s.y, sines[i + 2] = s.z, sines[i + 3] = s.w;
        }
    }
};

// Writes one lane's eight dimensions of the head whose first element is `element`.
template <typename T, bool kFloat8>
__device__ __forceinline__ void write_chunk(void* cache, int64_t element, int chunk, const uint4& bits,
                                            float inverse_scale) {
    if constexpr (kFloat8) {
        reinterpret_cast<uint2*>(static_cast<char*>(cache) + element)[chunk] = pack_e4m3_eight<T>(bits, inverse_scale);
    } else {
        reinterpret_cast<uint4*>(static_cast<T*>(cache) + element)[chunk] = bits;
    }
}

// As above from float32, so that a rotated key is rounded to float8 once.
template <typename T, bool kFloat8, int kLanes>
__device__ __forceinline__ void write_row(void* cache, int64_t element, const HeadRow<T, kLanes>& row,
                                          float inverse_scale) {
    if constexpr (kFloat8) {
        const float (&v)[8] = row.values;
        reinterpret_cast<uint2*>(static_cast<char*>(cache) + element)[row.chunk()] =
            make_uint2(pack_e4m3_pair(v[0] * inverse_scale, v[1] * inverse_scale) |
                           pack_e4m3_pair(v[2] * inverse_scale, v[3] * inverse_scale) << 16,
                       pack_e4m3_pair(v[4] * inverse_scale, v[5] * inverse_scale) |
                           pack_e4m3_pair(v[6] * inverse_scale, v[7] * inverse_scale) << 16);
    } else {
        reinterpret_cast<uint4*>(static_cast<T*>(cache) + element)[row.chunk()] = row.pack();
    }
}

}  // namespace dflash
