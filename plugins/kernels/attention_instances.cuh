// Which tile shapes are compiled. Rows are (queries of the block) x (heads of a KV group); 80 and 96 are rare head
// sizes, which do without the widest tile.
#pragma once

#include "attention_kernel.cuh"
#include "dflash_kernels.h"

namespace dflash {

template <typename Shape>
constexpr AttentionVariant variant() {
    return {std::is_same<typename Shape::T, __half>::value ? DFLASH_FLOAT16 : DFLASH_BFLOAT16,
            Shape::kFloat8 ? DFLASH_FLOAT8_E4M3
                           : (std::is_same<typename Shape::T, __half>::value ? DFLASH_FLOAT16 : DFLASH_BFLOAT16),
            Shape::kHeadDim,
            Shape::kRows,
            Shape::kKeys,
            Shape::kThreads,
            Shape::kThreads <= 128 ? 2 : 1,
            1,
            0,
            0,
            5,
            0,
            false,
            [](int stages) { return Shape::shared_bytes(stages); },
            attention_kernel<Shape>};
}

// A warp holds 32 rows of up to 128 dimensions in registers, or 16 rows of 256.
template <typename T, bool kFloat8, int kHeadDim>
using Rows16 = AttentionShape<T, kFloat8, kHeadDim, 1, 1, 4, 64>;
template <typename T, bool kFloat8, int kHeadDim>
using Rows32 = AttentionShape<T, kFloat8, kHeadDim, 2, 1, 4, 64>;
template <typename T, bool kFloat8, int kHeadDim>
using Rows64 = AttentionShape<T, kFloat8, kHeadDim, 2, 2, 2, 64>;
template <typename T, bool kFloat8, int kHeadDim>
using Rows128 = AttentionShape<T, kFloat8, kHeadDim, 2, 4, 1, 64>;
template <typename T, bool kFloat8>
using Wide16 = AttentionShape<T, kFloat8, 256, 1, 1, 2, 32>;
template <typename T, bool kFloat8>
using Wide32 = AttentionShape<T, kFloat8, 256, 1, 2, 2, 32>;
template <typename T, bool kFloat8>
using Wide64 = AttentionShape<T, kFloat8, 256, 1, 4, 1, 32>;

template <typename T, bool kFloat8>
AttentionVariants variants() {
    static constexpr AttentionVariant all[] = {
        variant<Rows16<T, kFloat8, 64>>(),  variant<Rows32<T, kFloat8, 64>>(),   variant<Rows64<T, kFloat8, 64>>(),
        variant<Rows128<T, kFloat8, 64>>(), variant<Rows16<T, kFloat8, 80>>(),   variant<Rows32<T, kFloat8, 80>>(),
        variant<Rows64<T, kFloat8, 80>>(),  variant<Rows16<T, kFloat8, 96>>(),   variant<Rows32<T, kFloat8, 96>>(),
        variant<Rows64<T, kFloat8, 96>>(),  variant<Rows16<T, kFloat8, 128>>(),  variant<Rows32<T, kFloat8, 128>>(),
        variant<Rows64<T, kFloat8, 128>>(), variant<Rows128<T, kFloat8, 128>>(), variant<Wide16<T, kFloat8>>(),
        variant<Wide32<T, kFloat8>>(),      variant<Wide64<T, kFloat8>>(),
    };
    return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace dflash
