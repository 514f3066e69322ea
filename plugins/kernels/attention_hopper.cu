#include "attention_hopper.cuh"
#include "dflash_kernels.h"

namespace dflash {

namespace {

template <typename Shape>
constexpr AttentionVariant variant() {
    constexpr int dtype = std::is_same<typename Shape::T, __half>::value ? DFLASH_FLOAT16 : DFLASH_BFLOAT16;
    return {dtype,
            dtype,
            Shape::kHeadDim,
            Shape::kRows,
            Shape::kKeys,
            Shape::kThreads,
            true,
            [](int stages) { return Shape::shared_bytes(stages); },
            hopper_attention_kernel<Shape>};
}

}  // namespace

AttentionVariants attention_variants_hopper() {
    static constexpr AttentionVariant all[] = {
        variant<HopperShape<__nv_bfloat16, 64, 1>>(),  variant<HopperShape<__nv_bfloat16, 64, 2>>(),
        variant<HopperShape<__nv_bfloat16, 128, 1>>(), variant<HopperShape<__nv_bfloat16, 128, 2>>(),
        variant<HopperShape<__half, 64, 1>>(),         variant<HopperShape<__half, 64, 2>>(),
        variant<HopperShape<__half, 128, 1>>(),        variant<HopperShape<__half, 128, 2>>(),
    };
    return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace dflash
