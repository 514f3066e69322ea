// Accept, third launch: one cluster of blocks per request decides how many drafts survive and draws the token that
// follows. Every block decides alike; they share the reading of a row, and the first one draws.
#include <cooperative_groups.h>

#include "accept_state.cuh"
#include "block_scan.cuh"
#include "launch.h"
#include "overlapped_launch.cuh"
#include "philox.cuh"

namespace cg = cooperative_groups;

namespace dflash {
namespace {

constexpr int kDrawThreads = 512;
constexpr int kDrawBlocks = 8;
constexpr int kDrawWarps = kDrawThreads / 32;
// A segment is what one warp loads at once; the smallest holds 32 * 4 columns.
constexpr int kMaxSegments = kMaxChunks * kChunkColumns / 128;
constexpr int kSegmentsPerThread = (kMaxSegments + kDrawThreads - 1) / kDrawThreads;
constexpr int kMaxListed = kMaxChunks * kListKeys;
constexpr int kListedPerThread = (kMaxListed + kDrawThreads - 1) / kDrawThreads;
constexpr int kNothing = 0x7FFFFFFF;

struct DrawStorage {
    float p_sums[kMaxSegments];  // of segments, or weights of listed tokens
    float residual_sums[kMaxSegments];
    int tokens[kMaxListed];
    uint8_t holds_candidate[kMaxSegments];
    float warp_sums[32];
    int warp_counts[32];
    int candidates[DFLASH_MAX_CANDIDATES];
    float q[DFLASH_MAX_CANDIDATES];
    int found;
    int drawn;
    float before;
};

// The distribution to draw from: p, or [p - q]+ with q on `candidates` entries of the storage.
struct Target {
    RowDistribution row;
    float scale;
    float inverse_mass;
    int candidates;

    __device__ float p(float value, int token) const { return token_weight(row, value, token, scale) * inverse_mass; }

    __device__ float residual(float p, int token, const DrawStorage& store) const {
        for (int i = 0; i < candidates; ++i)
            if (store.candidates[i] == token) p -= store.q[i];
        return fmaxf(p, 0.0f);
    }
};

// Inverse CDF over token ids among the kept tokens of the chunk lists; -1 when all weights are 0.
__device__ int draw_from_lists(const Target& target, bool residual, const uint64_t* lists, int chunks, float uniform,
                               DrawStorage& store) {
    const int start = threadIdx.x * kListedPerThread, total = chunks * kListKeys;
    uint64_t keys[kListedPerThread];
    int kept = 0, listed;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        keys[i] = start + i < total ? lists[start + i] : kNoKey;
        // Below a chunk's own keys its list ends in kNoKey.
        if (keys[i] != kNoKey &&
            !reaches(key_value(keys[i]), int(key_id(keys[i])), target.row.threshold_value, target.row.threshold_token))
            keys[i] = kNoKey;
        kept += keys[i] != kNoKey;
    }
    int slot = exclusive_scan(kept, store.warp_counts, listed);
    float own = 0.0f, mass;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        if (keys[i] == kNoKey) continue;
        const int token = int(key_id(keys[i]));
        float weight = target.p(key_value(keys[i]), token);
        if (residual) weight = target.residual(weight, token, store);
        store.tokens[slot] = token;
        store.p_sums[slot++] = weight;
        own += weight;
    }
    exclusive_scan(own, store.warp_sums, mass);  // its barriers also publish the tokens
    if (!(mass > 0.0f)) return -1;
    int first_beyond = kNothing, last_possible = kNothing;
    for (int i = threadIdx.x; i < listed; i += kDrawThreads) {
        const int token = store.tokens[i];
        if (!(store.p_sums[i] > 0.0f)) continue;
        float cumulative = 0.0f;
        for (int j = 0; j < listed; ++j) cumulative += store.tokens[j] <= token ? store.p_sums[j] : 0.0f;
        if (cumulative > uniform * mass) first_beyond = min(first_beyond, token);
        last_possible = min(last_possible, -token);
    }
    const int token = block_min(first_beyond, kNothing, &store.found);
    if (token != kNothing) return token;
    return -block_min(last_possible, kNothing, &store.found);
}

// Sums p and the residual over this block's share of the row's segments into the first block's storage.
template <typename T>
__device__ void sum_segments(const Target& target, const LogitRow<T>& row, int member, DrawStorage& store,
                             DrawStorage& first_store) {
    constexpr int kVec = kVectorElements<T>;
    constexpr int kBatch = 16 / kVec;  // loads in flight per thread
    constexpr int kWarps = kDrawBlocks * kDrawWarps;
    const int lane = threadIdx.x % 32, segments = (row.vectors() + 31) / 32;
    for (int i = threadIdx.x; i < segments; i += kDrawThreads) store.holds_candidate[i] = 0;
    __syncthreads();
    if (threadIdx.x < target.candidates) {
        const int token = store.candidates[threadIdx.x];
        if (token >= 0) store.holds_candidate[(token + row.skew) / kVec / 32] = 1;
    }
    __syncthreads();
    bool ignored = false;
    for (int start = member * kDrawWarps + int(threadIdx.x / 32); start < segments; start += kBatch * kWarps) {
        float values[kBatch * kVec];
        row.template load<kBatch>(start * 32 + lane, kWarps * 32, values, ignored);
#pragma unroll
        for (int batch = 0; batch < kBatch; ++batch) {
            const int segment = start + batch * kWarps;
            if (segment >= segments) break;
            const int first = row.first_column(segment * 32 + lane);
            float p_sum = 0.0f, residual_sum = 0.0f;
            // Columns outside the row read as -infinity and weigh 0.
#pragma unroll
            for (int i = 0; i < kVec; ++i)
                p_sum += values[batch * kVec + i] = target.p(values[batch * kVec + i], first + i);
            if (store.holds_candidate[segment]) {
                for (int i = 0; i < kVec; ++i)
                    residual_sum += target.residual(values[batch * kVec + i], first + i, store);
            } else {
                residual_sum = p_sum;
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                p_sum += __shfl_xor_sync(0xFFFFFFFFu, p_sum, offset);
                residual_sum += __shfl_xor_sync(0xFFFFFFFFu, residual_sum, offset);
            }
            if (lane == 0) {
                first_store.p_sums[segment] = p_sum;
                first_store.residual_sums[segment] = residual_sum;
            }
        }
    }
}

// Inverse CDF over token ids, given the sums of all segments; -1 when all weights are 0.
template <typename T>
__device__ int draw_from_row(const Target& target, bool residual, const LogitRow<T>& row, float uniform,
                             DrawStorage& store) {
    const int lane = threadIdx.x % 32, segments = (row.vectors() + 31) / 32;
    const float* sums = residual ? store.residual_sums : store.p_sums;
    float own = 0.0f, mass;
    const int start = threadIdx.x * kSegmentsPerThread, end = min(start + kSegmentsPerThread, segments);
    for (int i = start; i < end; ++i) own += sums[i];
    float running = exclusive_scan(own, store.warp_sums, mass);
    if (!(mass > 0.0f)) return -1;
    const float wanted = uniform * mass;
    int crossing = kNothing, last_possible = kNothing;
    float before_crossing = 0.0f;
    for (int i = start; i < end; ++i) {
        if (sums[i] > 0.0f) {
            last_possible = -i;
            if (crossing == kNothing && running + sums[i] > wanted) {
                crossing = i;
                before_crossing = running;
            }
        }
        running += sums[i];
    }
    int segment = block_min(crossing, kNothing, &store.found);
    if (segment == kNothing) {
        segment = -block_min(last_possible, kNothing, &store.found);
        if (threadIdx.x == 0) store.before = wanted;  // then the last possible token of that segment is taken
    } else if (crossing == segment) {
        store.before = before_crossing;
    }
    __syncthreads();

    if (threadIdx.x < 32) {
        bool ignored = false;
        float weights[kVectorElements<T>], sum = 0.0f;
        row.template load<1>(segment * 32 + lane, 0, weights, ignored);
        const int first = row.first_column(segment * 32 + lane);
#pragma unroll
        for (int i = 0; i < kVectorElements<T>; ++i) {
            weights[i] = target.p(weights[i], first + i);
            if (residual) weights[i] = target.residual(weights[i], first + i, store);
            sum += weights[i];
        }
        float inclusive = sum;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const float below = __shfl_up_sync(0xFFFFFFFFu, inclusive, offset);
            if (lane >= offset) inclusive += below;
        }
        float cumulative = store.before + (inclusive - sum);
        int first_beyond = kNothing, last = -1;
#pragma unroll
        for (int i = 0; i < kVectorElements<T>; ++i) {
            cumulative += weights[i];
            if (weights[i] > 0.0f) {
                last = first + i;
                if (first_beyond == kNothing && cumulative > wanted) first_beyond = last;
            }
        }
        first_beyond = __reduce_min_sync(0xFFFFFFFFu, first_beyond);
        last = __reduce_max_sync(0xFFFFFFFFu, last);
        if (lane == 0) store.drawn = first_beyond != kNothing ? first_beyond : last;
    }
    __syncthreads();
    return store.drawn;
}

template <typename T>
__global__ void __cluster_dims__(kDrawBlocks, 1, 1) __launch_bounds__(kDrawThreads, 2)
    accept_and_draw(dflash_accept_params p, int chunks, AcceptWorkspace workspace) {
    wait_for_previous_launch();
    __shared__ DrawStorage store;
    cg::cluster_group cluster = cg::this_cluster();
    const int member = int(cluster.block_rank());
    const int request = blockIdx.y;
    const int64_t drafts = p.block_size - 1;
    int64_t* tokens = p.tokens + int64_t(request) * p.block_size;
    const int existing =
        p.block_lengths == nullptr ? p.block_size : int(min(p.block_lengths[request], int64_t(p.block_size)));
    if (existing <= 0) {
        if (member != 0) return;
        for (int i = threadIdx.x; i < p.block_size; i += kDrawThreads) tokens[i] = -1;
        if (threadIdx.x == 0) {
            p.accepted[request] = p.committed[request] = 0;
            if (p.faulty != nullptr) p.faulty[request] = 0;
        }
        return;
    }
    const float temperature = p.temperatures[request];
    const float scale = temperature > 0.0f ? exponent_scale(temperature) : 1.0f;
    const int64_t* draft_tokens = p.draft_tokens + request * drafts;
    const RowDistribution* rows = workspace.rows + int64_t(request) * p.block_size;

    int rejected = existing - 1;
    for (int j = threadIdx.x; j < existing - 1; j += kDrawThreads) {
        const RowDistribution row = rows[j];
        const int64_t draft = draft_tokens[j];
        bool keep;
        if (temperature <= 0.0f) {
            keep = draft == row.best_token;
        } else {
            float target = 0.0f, proposed = 0.0f;
            if (!row.faulty && draft >= 0 && draft < p.valid_columns)
                target = token_weight(row, logit_row<T>(p, request, j).at(int(draft)), int(draft), scale) / row.mass;
            const int64_t entry = (request * drafts + j) * p.count;
            for (int k = 0; k < p.count; ++k)
                if (p.candidates[entry + k] == draft) proposed += p.q_rows[entry + k];
            const float uniform = philox_uniform(p.seeds[request], p.first_positions[request] + j, kAcceptWord);
            keep = uniform * proposed < target;
        }
        if (!keep) rejected = min(rejected, j);
    }
    const int accepted = block_min(rejected, existing - 1, &store.found);

    Target target{rows[accepted], scale, 0.0f, 0};
    int next = target.row.best_token;
    if (temperature > 0.0f && !target.row.faulty) {
        target.inverse_mass = target.row.mass > 0.0f ? 1.0f / target.row.mass : 0.0f;
        const bool residual = accepted < existing - 1;
        if (residual && threadIdx.x < p.count) {
            const int64_t entry = (request * drafts + accepted) * p.count + threadIdx.x;
            const int64_t candidate = p.candidates[entry];
            store.candidates[threadIdx.x] = candidate >= 0 && candidate < p.valid_columns ? int(candidate) : -1;
            store.q[threadIdx.x] = p.q_rows[entry];
        }
        target.candidates = residual ? p.count : 0;
        const float uniform = philox_uniform(p.seeds[request], p.first_positions[request] + accepted, kResidualWord);
        const LogitRow<T> row = logit_row<T>(p, request, accepted);
        const uint64_t* lists = workspace.lists + (int64_t(request) * p.block_size + accepted) * chunks * kListKeys;
        __syncthreads();
        if (!target.row.kept_in_lists) {
            // Another block's shared memory may be written once it is known to run, and read once all have written.
            cluster.sync();
            sum_segments(target, row, member, store, *cluster.map_shared_rank(&store, 0));
            cluster.sync();
        }
        if (member != 0) return;
        // A residual without mass (p = q, to rounding) falls back to p.
        int drawn = -1;
        for (int attempt = residual ? 0 : 1; attempt < 2 && drawn < 0; ++attempt) {
            drawn = target.row.kept_in_lists ? draw_from_lists(target, attempt == 0, lists, chunks, uniform, store)
                                             : draw_from_row(target, attempt == 0, row, uniform, store);
            __syncthreads();
        }
        if (drawn >= 0) next = drawn;
    }
    if (member != 0) return;
    bool faulty = false;
    for (int j = threadIdx.x; j < existing; j += kDrawThreads) faulty |= rows[j].faulty != 0;
    faulty = __syncthreads_or(faulty);
    for (int i = threadIdx.x; i < p.block_size; i += kDrawThreads)
        tokens[i] = i < accepted ? draft_tokens[i] : i == accepted ? next : -1;
    if (threadIdx.x == 0) {
        p.accepted[request] = accepted;
        p.committed[request] = accepted + 1;
        if (p.faulty != nullptr) p.faulty[request] = faulty;
    }
}

}  // namespace

template <typename T>
void launch_accept_draw(const dflash_accept_params& p, int chunks, AcceptWorkspace workspace, cudaStream_t stream) {
    launch_overlapped(accept_and_draw<T>, dim3(kDrawBlocks, p.batch), kDrawThreads, 0, stream, p, chunks, workspace);
}

template void launch_accept_draw<float>(const dflash_accept_params&, int, AcceptWorkspace, cudaStream_t);
template void launch_accept_draw<__half>(const dflash_accept_params&, int, AcceptWorkspace, cudaStream_t);
template void launch_accept_draw<__nv_bfloat16>(const dflash_accept_params&, int, AcceptWorkspace, cudaStream_t);

}  // namespace dflash
