// The choice of kernel, splits and join for one attention call, from shapes and the device alone.
#include "attention_plan.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "attention_extent.cuh"
#include "launch.h"

namespace dflash {
namespace {

// The smallest tile of `all` that holds `rows`, else the largest there is; null without the type or head size.
const AttentionVariant* smallest_holding(const AttentionVariants& all, const dflash_attention_params& p, int rows) {
    const AttentionVariant* best = nullptr;
    for (int i = 0; i < all.count; ++i) {
        const AttentionVariant& variant = all.first[i];
        if (variant.dtype != p.dtype || variant.kv_dtype != p.kv_dtype || variant.head_dim != p.head_dim) continue;
        best = &variant;
        if (best->rows >= rows) break;
    }
    return best;
}

const AttentionVariant* choose_variant(const dflash_attention_params& p, int rows, bool hopper) {
    if (hopper)
        if (const AttentionVariant* variant = smallest_holding(attention_variants_hopper(), p, rows)) return variant;
    const bool half = p.dtype == DFLASH_FLOAT16, float8 = p.kv_dtype == DFLASH_FLOAT8_E4M3;
    return smallest_holding(float8 ? (half ? attention_variants_float16_float8() : attention_variants_bfloat16_float8())
                                   : (half ? attention_variants_float16() : attention_variants_bfloat16()),
                            p, rows);
}

// Clusters of `splits` blocks that run at the same time; asked of the driver once per device.
int resident_clusters(int device, const AttentionVariant& variant, int shared_bytes, int splits) {
    if (splits == 1) return multiprocessor_count() * variant.blocks_per_multiprocessor;
    static std::mutex mutex;
    static std::map<std::tuple<int, const AttentionVariant*, int, int>, int> known;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_tuple(device, &variant, shared_bytes, splits);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    const Launch launch(variant, shared_bytes, shared_bytes, dim3(1, splits, 1), splits);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, variant.kernel, &launch.config) != cudaSuccess) {
        cudaGetLastError();  // this size does not exist on this device
        clusters = 0;
    }
    return known[key] = clusters;
}

// Whether a block has room for what the others of a cluster of `splits` blocks send it.
bool holds_cluster(const AttentionVariant& variant, int rows, int splits) {
    const int per_block = (std::min(rows, variant.rows) + splits - 1) / splits;
    return variant.held_rows == 0 || (splits - 1) * per_block <= variant.held_rows;
}

// What a choice of splits costs, in units of the time in which the whole device reads its fill of key tiles. The
// constants were fitted on an H200.
struct Choice {
    const AttentionVariant* variant;
    int splits;
    bool in_cluster;
    double cost;
};

// Whole waves of blocks, each as long as its share of tiles plus filling and draining the pipeline, plus joining the
// results in pairs or by a second launch.
Choice choose_splits(const AttentionVariant* variant, int64_t blocks, int64_t slots, int tiles, int limit) {
    constexpr double kFillAndDrain = 2.5, kJoinInPairs = 0.3, kJoinByLaunch = 1.7;
    Choice best = {};
    for (int splits = 1; splits <= limit; ++splits) {
        const bool in_pairs = splits == kPairSplits && variant->cluster_limit >= kPairSplits;
        const double waves = static_cast<double>((blocks * splits + slots - 1) / slots);
        const double share = static_cast<double>(tiles) / splits;
        const double join = splits == 1 ? 0.0 : in_pairs ? kJoinInPairs : kJoinByLaunch;
        const double cost = waves * (share + kFillAndDrain) + join;
        if (splits == 1 || cost < best.cost) best = {variant, splits, in_pairs, cost};
    }
    return best;
}

// Blocks that fill a multiprocessor each: one wave of splits, or whole row tiles in waves. Splits that find room as
// clusters join in them, others by a second launch.
Choice choose_alone(const AttentionVariant* variant, int device, int shared_bytes, int64_t blocks, int rows, int tiles,
                    int limit) {
    // A tile takes a block as long as if all multiprocessors read. What is left for a last wave has more of the memory
    // to itself, up to what one multiprocessor can take.
    constexpr double kFillAndDrain = 3.0, kFillAgain = 2.0, kJoinInCluster = 0.2, kJoinByLaunch = 0.85;
    constexpr double kTile = 0.48, kFastestTile = 0.3;
    const int64_t waves = (blocks - 1) / multiprocessor_count(), rest = blocks - waves * multiprocessor_count();
    const double last_tile = std::max(kFastestTile, kTile * static_cast<double>(rest) / multiprocessor_count());
    Choice best = {variant, 1, false,
                   static_cast<double>(waves) * (kTile * tiles + kFillAgain) + last_tile * tiles + kFillAndDrain};
    if (waves == 0) best.cost = kTile * tiles + kFillAndDrain;
    for (int splits = 2; splits <= limit && blocks * splits <= multiprocessor_count(); ++splits) {
        const bool in_cluster = splits <= variant->cluster_limit && holds_cluster(*variant, rows, splits) &&
                                blocks <= resident_clusters(device, *variant, shared_bytes, splits);
        const double join = in_cluster ? kJoinInCluster : kJoinByLaunch;
        const double cost = kTile * ((tiles + splits - 1) / splits) + kFillAndDrain + join;
        if (cost < best.cost) best = {variant, splits, in_cluster, cost};
    }
    return best;
}

constexpr int kReserve = 1024;  // shared memory that the driver keeps of every block

// As many warps per row as find room at the same time, one block per multiprocessor if that is enough. The blocks start
// while those in front still end, and the few multiprocessors that are free first would take most of them: so each asks
// for as much shared memory as spreads them.
Join choose_join(const dflash_attention_params& p, int splits, int64_t rows, int shared_of_sm, int shared_of_block) {
    constexpr int kMostPerMultiprocessor = 4, kColumns = 128, kLanes = 32;
    const auto row_blocks = [&](int warps) { return static_cast<int>((rows * warps + kJoinWarps - 1) / kJoinWarps); };
    const auto blocks = [&](int warps) { return int64_t(row_blocks(warps)) * p.num_kv_heads * p.batch; };
    Join join = {};
    // With fewer warps than kJoinWarps a lane holds the statistics of one split.
    join.row_warps = splits > kLanes ? kJoinWarps : 1;
    while (join.row_warps < kJoinWarps && 2 * join.row_warps <= splits &&
           blocks(2 * join.row_warps) <= multiprocessor_count())
        join.row_warps *= 2;
    join.row_blocks = row_blocks(join.row_warps);
    join.blocks = blocks(join.row_warps);
    join.least_bytes = kJoinWarps * ((splits + join.row_warps - 1) / join.row_warps) * kColumns * 4;
    join.shared_limit = shared_of_block - kReserve;
    const int64_t each = (join.blocks + multiprocessor_count() - 1) / multiprocessor_count();
    const int share = each > kMostPerMultiprocessor ? 0 : shared_of_sm / static_cast<int>(each) - kReserve;
    join.shared_bytes = std::max(join.least_bytes, std::min(join.shared_limit, share));
    return join;
}

// A launch leaves `left` bytes of each multiprocessor, but `free` of them altogether: whether the blocks that join its
// splits can wait beside it, one each. Then `join` becomes such a launch.
bool fits_beside(Join& join, int left, int free, int shared_of_sm) {
    if (join.blocks > multiprocessor_count() || left - kReserve < join.least_bytes) return false;
    join.shared_bytes = left - kReserve;
    // Blocks are sent where most room is. On a free multiprocessor all but one only hold their place.
    join.spare_blocks = free * (shared_of_sm / left - 1);
    return true;
}

}  // namespace

int32_t make_plan(const dflash_attention_params& p, Plan& plan) {
    const int group = p.num_heads / p.num_kv_heads;
    const int queries = p.block_size > 0 ? p.block_size : p.max_query;
    const int64_t rows = static_cast<int64_t>(queries) * group;
    int device = 0, major = 0, shared_of_sm = 0, shared_of_block = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return check_launch("attention: no CUDA device");
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&shared_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const AttentionVariant* variant = choose_variant(p, queries * group, major == 9);
    if (!variant)
        return fail(DFLASH_UNSUPPORTED, "attention: head_dim %d, compiled are 64, 80, 96, 128 and 256", p.head_dim);

    // 4 KB cover the static shared memory of a block and the driver's reserve.
    auto stages_within = [](const AttentionVariant& of, int bytes) {
        int stages = of.most_stages;
        while (stages > 2 && of.shared_bytes(stages) > bytes - 4096) --stages;
        return stages;
    };
    auto tiles_of = [&](const AttentionVariant& of) {
        int64_t keys = static_cast<int64_t>(p.pages_per_request) * p.page_tokens + p.block_size;
        if (p.window_left >= 0) {
            const int tile_queries = std::min(queries, (of.rows + group - 1) / group + 1);
            keys = std::min<int64_t>(keys, static_cast<int64_t>(p.window_left) + tile_queries + p.block_size);
        }
        return static_cast<int>((keys + of.keys - 1) / of.keys) + 1;
    };
    const int most_splits = p.max_splits > 0 ? std::min(p.max_splits, kMaxSplits) : kMaxSplits;
    // Two blocks per multiprocessor, so that one streams while the other starts or ends.
    plan.stages = stages_within(*variant, shared_of_sm / 2);
    plan.shared_bytes = plan.shared_limit = variant->shared_bytes(plan.stages);
    if (plan.shared_bytes + 2048 > shared_of_block)
        return fail(DFLASH_UNSUPPORTED, "attention: head_dim %d needs %d bytes of shared memory, the device has %d",
                    p.head_dim, plan.shared_bytes + 2048, shared_of_block);
    const int tiles = tiles_of(*variant);
    const bool two = variant->blocks_per_multiprocessor == 2 && plan.shared_bytes + 4096 <= shared_of_sm / 2;
    plan.row_tiles = static_cast<int>((rows + variant->rows - 1) / variant->rows);
    const int64_t blocks = static_cast<int64_t>(p.batch) * p.num_kv_heads * plan.row_tiles;
    // Joining takes up to a block per row.
    const bool can_join = rows * p.num_kv_heads * p.batch <= INT32_MAX;
    const int limit =
        std::max(1, std::min({tiles / kMinTilesPerSplit, can_join ? most_splits : 1, 65535 / plan.row_tiles}));
    Choice choice = choose_splits(variant, blocks, int64_t(multiprocessor_count()) * (two ? 2 : 1), tiles, limit);
    if (p.max_splits > 1) {
        choice.splits = limit;
        choice.in_cluster = limit == kPairSplits && variant->cluster_limit >= kPairSplits;
    } else if (const AttentionVariant* alone =
                   major == 9 ? smallest_holding(attention_variants_hopper_alone(), p, static_cast<int>(rows))
                              : nullptr) {
        const int shared_bytes = alone->shared_bytes(alone->most_stages) + alone->more_in_cluster;
        const int alone_tiles = tiles_of(*alone);
        if (alone->rows >= rows && plan.row_tiles == 1 && shared_bytes + 1024 <= shared_of_block) {
            const int most = std::max(1, std::min(alone_tiles / kMinTilesPerSplit, most_splits));
            const Choice by_engine =
                choose_alone(alone, device, shared_bytes, blocks, static_cast<int>(rows), alone_tiles, most);
            if (by_engine.cost < choice.cost) {
                choice = by_engine;
                plan.stages = alone->most_stages;
                plan.shared_bytes = plan.shared_limit = shared_bytes;
            }
        }
    }
    plan.variant = choice.variant;
    plan.splits = choice.splits;
    plan.join_in_cluster = choice.in_cluster;
    plan.join = {};
    if (plan.splits > 1 && !plan.join_in_cluster) {
        plan.join = choose_join(p, plan.splits, rows, shared_of_sm, shared_of_block);
        const AttentionVariant& chosen = *plan.variant;
        const int beside = chosen.stages_beside_join, bytes = chosen.shared_bytes(beside);
        const int free = multiprocessor_count() - static_cast<int>(blocks) * plan.splits;
        if (beside > 0 && tiles_of(chosen) < kLongShare * plan.splits &&
            fits_beside(plan.join, shared_of_sm - bytes - 2 * kReserve, free, shared_of_sm)) {
            plan.stages = beside;
            plan.shared_bytes = bytes;
        }
    }
    const int64_t partial_rows =
        plan.splits > 1 && !plan.join_in_cluster ? blocks * plan.splits * plan.variant->rows : 0;
    plan.partial_floats = partial_rows * p.head_dim;
    plan.workspace_bytes = plan.partial_floats * 4 + partial_rows * 8;
    if (int64_t(plan.splits) * plan.row_tiles > 65535)
        return fail(DFLASH_UNSUPPORTED,
                    "attention: max_query %d with %d heads per KV head is more than one launch "
                    "covers; pass the prompt in smaller chunks",
                    queries, group);
    return DFLASH_OK;
}

}  // namespace dflash
