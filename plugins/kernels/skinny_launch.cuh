// Dense products of a few rows: how a shape is spread over the multiprocessors, and the launch.
#pragma once

#include "skinny_gemm.cuh"

#include <algorithm>
#include <atomic>
#include <utility>

#include "dflash_dense.h"
#include "launch.h"
#include "tensor_map.h"

namespace dflash {

namespace {

constexpr int kWarps = 8;
constexpr int kDepthMultiple = 64;
constexpr int kMaxDepth = 16384;  // of the largest cluster, with x of 32 rows in registers

struct Plan {
    int cluster, blocks;  // blocks: per warp, one of those that are compiled
    int stages;           // copies in flight per warp
    bool start_next_at_once;
};

constexpr int rounded_up(int value, int unit) { return (value + unit - 1) / unit; }

constexpr int tile_depth(bool float8) { return kTileRowBytes / (float8 ? 1 : 2); }

// The numbers of blocks per warp that are compiled, up to most_blocks.
using CompiledBlocks = std::integer_sequence<int, 1, 2, 3, 4, 6, 8, 12>;

// The smallest that is enough, or 0.
template <int... kCompiled>
int compiled_blocks(int blocks, std::integer_sequence<int, kCompiled...>) {
    for (const int compiled : {kCompiled...})
        if (blocks <= compiled) return compiled;
    return 0;
}

// Blocks per warp whose x leaves registers for the product: 8 registers per 64 columns and eight tokens.
constexpr int most_blocks(int token_tiles, bool float8) {
    return (token_tiles == 1 ? 12 : token_tiles == 2 ? 8 : 4) / (float8 ? 2 : 1);
}

static_assert(kMaxDepth == kMaxCluster * kWarps * most_blocks(4, false) * tile_depth(false), "as dflash_dense.h says");
static_assert(kMaxDepth == kMaxCluster * kWarps * most_blocks(4, true) * tile_depth(true), "as dflash_dense.h says");

inline Plan make_plan(const dflash_skinny_params& p, bool float8, int tiles) {
    const int blocks = rounded_up(p.depth, tile_depth(float8)), token_tiles = rounded_up(p.rows, 8);
    auto per_warp = [&](int cluster) { return rounded_up(blocks, cluster * kWarps); };
    Plan plan{1, 0, p.stages, p.early == 2};
    if (p.cluster > 0) {
        plan.cluster = p.cluster;
    } else {
        // Large clusters leave multiprocessors out: no larger than x in registers asks for.
        while (plan.cluster < kMaxCluster && per_warp(plan.cluster) > most_blocks(token_tiles, float8))
            plan.cluster *= 2;
        // Few columns: the depth is what can be shared out. Messages eat what more than two blocks gain.
        if (plan.cluster == 1 && per_warp(1) > 1 && tiles * 2 <= multiprocessor_count()) plan.cluster = 2;
    }
    plan.blocks = compiled_blocks(per_warp(plan.cluster), CompiledBlocks{});
    // As fast as any inside a cycle of an H200: more copies in flight get in each other's way.
    if (p.stages == 0) plan.stages = 4;
    return plan;
}

// Describes the weight as [groups][columns][depth]; a tile is 128 bytes of depth and 16 rows, half of them of each
// group where there are two.
inline int32_t describe(const dflash_skinny_params& p, bool float8, CUtensorMap& map) {
    const cuuint64_t row_bytes = cuuint64_t(p.depth) * (float8 ? 1 : 2);
    const cuuint32_t groups = p.gated ? 2 : 1;
    return describe_tensor("skinny_gemm", "weight", float8 ? DFLASH_FLOAT8_E4M3 : p.dtype, p.weight,
                           {cuuint64_t(p.depth), cuuint64_t(p.columns), groups}, {row_bytes, row_bytes * p.columns},
                           {cuuint32_t(tile_depth(float8)), kTileRows / groups, groups}, map);
}

struct SharedMemory {
    int most;   // bytes a block can have
    int alone;  // bytes with which it has a multiprocessor to itself
};

inline SharedMemory shared_memory() {
    int device = 0, per_multiprocessor = 0, per_block = 0, reserved = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    return {per_block, per_multiprocessor / 2 - reserved + 128};
}

// Clusters that run at once, each block alone on its multiprocessor: fewer than the multiprocessors would make, as a
// cluster lives inside one GPC. Asked for once per kernel, cluster size and device.
inline int clusters_at_once(const void* kernel, cudaLaunchConfig_t config, int cluster, std::atomic<int>* known) {
    constexpr int kMaxDevices = 64;
    int device = 0;
    cudaGetDevice(&device);
    std::atomic<int>* place = device < kMaxDevices ? known + device * kMaxCluster + cluster - 1 : nullptr;
    if (place && place->load()) return place->load();
    int count = multiprocessor_count() / cluster;
    if (cluster > 1) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {unsigned(cluster), 1, 1};
        config.gridDim = dim3(cluster);
        config.attrs = &attribute;
        config.numAttrs = 1;
        if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) count = 0;
    }
    if (place) place->store(count);
    return count;
}

template <typename Shape>
int32_t launch(const dflash_skinny_params& p, const Plan& plan, const CUtensorMap& map, SkinnyArgs args,
               cudaStream_t stream) {
    const int fixed = Shape::fixed_bytes(plan.cluster), per_stage = Shape::bytes_per_stage();
    const SharedMemory available = shared_memory();
    args.stages = std::min((available.most - fixed) / per_stage, plan.stages);
    if (args.stages < 2)
        return fail(DFLASH_UNSUPPORTED, "skinny_gemm: shared memory for %d stages, 2 are needed", args.stages);
    const auto kernel = skinny_gemm_kernel<Shape>;
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(Shape::kThreads);
    // Two blocks of one launch on a multiprocessor would leave another one without work.
    config.dynamicSmemBytes = std::min(available.most, std::max(available.alone, fixed + args.stages * per_stage));
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes));

    // As few clusters as end at the same time as the most there is room for.
    static std::atomic<int> known[64 * kMaxCluster];
    const int room = clusters_at_once(reinterpret_cast<const void*>(kernel), config, plan.cluster, known);
    if (room < 1) return fail(DFLASH_UNSUPPORTED, "skinny_gemm: no room for a cluster of %d blocks", plan.cluster);
    const int clusters = rounded_up(args.tiles, rounded_up(args.tiles, room));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {unsigned(plan.cluster), 1, 1};
    config.gridDim = dim3(clusters * plan.cluster);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaLaunchKernelEx(&config, kernel, map, args);
    return check_launch("skinny_gemm");
}

template <typename T, bool kFloat8, int kTokenTiles, int... kCompiled>
int32_t launch_for_blocks(const dflash_skinny_params& p, const Plan& plan, const CUtensorMap& map,
                          const SkinnyArgs& args, cudaStream_t stream, std::integer_sequence<int, kCompiled...>) {
    int32_t status = DFLASH_OK;
    auto is_it = [&](auto number) {
        constexpr int kBlocks = decltype(number)::value;
        if constexpr (kBlocks <= most_blocks(kTokenTiles, kFloat8)) {
            if (plan.blocks != kBlocks) return false;
            status = launch<SkinnyShape<T, kFloat8, kTokenTiles, kBlocks>>(p, plan, map, args, stream);
            return true;
        }
        return false;
    };
    if ((is_it(std::integral_constant<int, kCompiled>{}) || ...)) return status;
    return fail(DFLASH_UNSUPPORTED, "skinny_gemm: a cluster of %d is too small for a depth of %d", plan.cluster,
                p.depth);
}

template <typename T, bool kFloat8>
int32_t launch_for_tokens(const dflash_skinny_params& p, const Plan& plan, const CUtensorMap& map,
                          const SkinnyArgs& args, cudaStream_t stream) {
    constexpr CompiledBlocks kCompiled{};
    if (p.rows <= 8) return launch_for_blocks<T, kFloat8, 1>(p, plan, map, args, stream, kCompiled);
    if (p.rows <= 16) return launch_for_blocks<T, kFloat8, 2>(p, plan, map, args, stream, kCompiled);
    return launch_for_blocks<T, kFloat8, 4>(p, plan, map, args, stream, kCompiled);
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline int32_t check(const dflash_skinny_params& p) {
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "skinny_gemm: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (p.dtype != DFLASH_BFLOAT16 && p.dtype != DFLASH_FLOAT16)
        return fail(DFLASH_UNSUPPORTED, "skinny_gemm: dtype %d, expected bfloat16 (0) or float16 (1)", p.dtype);
    if (p.rows < 0 || p.rows > DFLASH_MAX_SKINNY_ROWS)
        return fail(DFLASH_UNSUPPORTED, "skinny_gemm: %d rows, expected 0..%d", p.rows, DFLASH_MAX_SKINNY_ROWS);
    if (p.columns < 1 || p.depth < kDepthMultiple || p.depth % kDepthMultiple || p.depth > kMaxDepth)
        return fail(DFLASH_UNSUPPORTED, "skinny_gemm: columns %d, depth %d, expected a multiple of %d up to %d",
                    p.columns, p.depth, kDepthMultiple, kMaxDepth);
    if (!aligned(p.x) || !aligned(p.weight) || p.x_stride % 8)
        return fail(DFLASH_INVALID_ARGUMENT,
                    "skinny_gemm: x and weight must be 16-byte aligned and x_stride (%lld) a multiple of 8",
                    static_cast<long long>(p.x_stride));
    if (p.rows > 0 && (!p.x || !p.weight || !p.out))
        return fail(DFLASH_INVALID_ARGUMENT, "skinny_gemm: a tensor is missing");
    if (p.gated && p.bias) return fail(DFLASH_UNSUPPORTED, "skinny_gemm: a gated product has no bias");
    if (p.cluster != 0 && p.cluster != 1 && p.cluster != 2 && p.cluster != 4 && p.cluster != 8)
        return fail(DFLASH_INVALID_ARGUMENT, "skinny_gemm: cluster %d, expected 0, 1, 2, 4 or 8", p.cluster);
    return DFLASH_OK;
}

// The product with a weight of p.dtype (scales NULL), or of float8.
template <bool kFloat8>
int32_t skinny_gemm(const dflash_skinny_params& p, const float* scales, cudaStream_t stream) {
    if (int32_t status = check(p)) return status;
    if (p.rows == 0) return DFLASH_OK;
    CUtensorMap map;
    if (int32_t status = describe(p, kFloat8, map)) return status;
    SkinnyArgs args{};
    args.x = p.x;
    args.bias = p.bias;
    args.scales = scales;
    args.out = p.out;
    args.x_stride = p.x_stride;
    args.out_stride = p.out_stride;
    args.tokens = p.rows;
    args.columns = p.columns;
    args.depth = p.depth;
    args.blocks = rounded_up(p.depth, tile_depth(kFloat8));
    args.tiles = rounded_up(p.columns, p.gated ? kTileRows / 2 : kTileRows);
    args.gated = p.gated != 0;
    const Plan plan = make_plan(p, kFloat8, args.tiles);
    args.start_next_at_once = plan.start_next_at_once;
    return p.dtype == DFLASH_BFLOAT16 ? launch_for_tokens<__nv_bfloat16, kFloat8>(p, plan, map, args, stream)
                                      : launch_for_tokens<__half, kFloat8>(p, plan, map, args, stream);
}

}  // namespace
}  // namespace dflash
