#include "attention_hopper.cuh"
#include "attention_hopper_alone.cuh"
#include "dflash_kernels.h"

namespace dflash {

namespace {

template <typename Shape>
constexpr int dtype_of = std::is_same<typename Shape::T, __half>::value ? DFLASH_FLOAT16 : DFLASH_BFLOAT16;

template <typename Shape>
constexpr AttentionVariant variant() {
    return {dtype_of<Shape>,
            dtype_of<Shape>,
            Shape::kHeadDim,
            Shape::kRows,
            Shape::kKeys,
            Shape::kThreads,
            Shape::kWarpgroups == 1 ? 2 : 1,
            kPairSplits,
            0,
            0,
            5,
            0,
            false,
            [](int stages) { return Shape::shared_bytes(stages); },
            hopper_attention_kernel<Shape>};
}

template <typename Shape>
constexpr AttentionVariant variant_alone() {
    return {dtype_of<Shape>,
            dtype_of<Shape>,
            Shape::kHeadDim,
            Shape::kRows,
            Shape::kKeys,
            Shape::kLaunchThreads,
            1,
            kMaxClusterSplits,
            Shape::kHeldRows,
            Shape::kMoreInCluster,
            Shape::kStages,
            Shape::kStagesBesideJoin,
            true,
            [](int stages) { return Shape::shared_bytes(stages); },
            hopper_alone_kernel<Shape>};
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

AttentionVariants attention_variants_hopper_alone() {
    static constexpr AttentionVariant all[] = {
        variant_alone<AloneShape<__nv_bfloat16, 64>>(),
        variant_alone<AloneShape<__nv_bfloat16, 128>>(),
        variant_alone<AloneShape<__half, 64>>(),
        variant_alone<AloneShape<__half, 128>>(),
    };
    return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace dflash
