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
constexpr int kMaxListed = kMaxChunks * kListKeys;
constexpr int kListedPerThread = (kMaxListed + kDrawThreads - 1) / kDrawThreads;
constexpr int kNothing = 0x7FFFFFFF;
static_assert(kMaxPieces <= kDrawThreads && kPieceVectors <= kDrawThreads, "a thread per piece, and per vector of one");
static_assert(DFLASH_MAX_CANDIDATES <= 32, "a lane per candidate");

struct DrawStorage {
    float p_sums[kMaxPieces];
    float residual_sums[kMaxPieces];
    float listed_weights[kMaxListed];
    int listed_tokens[kMaxListed];
    float warp_sums[kDrawWarps];
    int warp_counts[kDrawWarps];
    int candidates[DFLASH_MAX_CANDIDATES];
    float q[DFLASH_MAX_CANDIDATES];
    int found;
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
    int slot = exclusive_scan<kDrawThreads>(kept, store.warp_counts, listed);
    float own = 0.0f, mass;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        if (keys[i] == kNoKey) continue;
        const int token = int(key_id(keys[i]));
        float weight = target.p(key_value(keys[i]), token);
        if (residual) weight = target.residual(weight, token, store);
        store.listed_tokens[slot] = token;
        store.listed_weights[slot++] = weight;
        own += weight;
    }
    exclusive_scan<kDrawThreads>(own, store.warp_sums, mass);  // its barriers also publish the tokens
    if (!(mass > 0.0f)) return -1;
    int first_beyond = kNothing, last_possible = kNothing;
    for (int i = threadIdx.x; i < listed; i += kDrawThreads) {
        const int token = store.listed_tokens[i];
        if (!(store.listed_weights[i] > 0.0f)) continue;
        float cumulative = 0.0f;
        for (int j = 0; j < listed; ++j) cumulative += store.listed_tokens[j] <= token ? store.listed_weights[j] : 0.0f;
        if (cumulative > uniform * mass) first_beyond = min(first_beyond, token);
        last_possible = min(last_possible, -token);
    }
    const int token = block_min(first_beyond, kNothing, &store.found);
    if (token != kNothing) return token;
    return -block_min(last_possible, kNothing, &store.found);
}

// Sums p and the residual over one piece of the row. A warp calls it, and all its lanes receive the sums.
template <typename T>
__device__ void sum_piece(const Target& target, const LogitRow<T>& row, int piece, const DrawStorage& store,
                          float& p_sum, float& residual_sum) {
    constexpr int kVec = kVectorElements<T>, kValues = 16;
    constexpr int kBatch = kValues / kVec;  // loads in flight per thread
    bool ignored = false;
    p_sum = residual_sum = 0.0f;
#pragma unroll 1
    for (int batch = 0; batch < kPieceVectors / 32 / kBatch; ++batch) {
        const int start = piece * kPieceVectors + batch * kBatch * 32 + int(threadIdx.x % 32);
        float values[kValues];
        row.template load<kBatch>(start, 32, values, ignored);
        // Columns outside the row read as -infinity and weigh 0.
#pragma unroll
        for (int slot = 0; slot < kValues; ++slot) {
            values[slot] = target.p(values[slot], row.first_column(start + slot / kVec * 32) + slot % kVec);
            p_sum += values[slot];
        }
        for (int i = 0; i < target.candidates; ++i) {
            if (store.candidates[i] < 0) continue;
            const int column = store.candidates[i] + row.skew, vector = column / kVec - start;
            if (vector < 0 || vector % 32 != 0 || vector / 32 >= kBatch) continue;
            const int owned = vector / 32 * kVec + column % kVec;
#pragma unroll
            for (int slot = 0; slot < kValues; ++slot) values[slot] -= slot == owned ? store.q[i] : 0.0f;
        }
#pragma unroll
        for (int slot = 0; slot < kValues; ++slot) residual_sum += fmaxf(values[slot], 0.0f);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        p_sum += __shfl_xor_sync(0xFFFFFFFFu, p_sum, offset);
        residual_sum += __shfl_xor_sync(0xFFFFFFFFu, residual_sum, offset);
    }
}

// The sums of all pieces of a row that no filter has cut: p from what the first launch kept of them, the residual by
// reading the few that hold candidates. One block.
template <typename T>
__device__ void sums_of_whole_row(const Target& target, const LogitRow<T>& row, const uint64_t* lists,
                                  const float* pieces, int chunks, DrawStorage& store) {
    const int piece = threadIdx.x;
    if (piece < chunks * kPiecesPerChunk<T>) {
        const uint64_t best = lists[piece % chunks * kListKeys];
        const float largest = best == kNoKey ? -INFINITY : key_value(best);
        float p = 0.0f;
        if (largest > -INFINITY)
            p = pieces[piece] * fast_exp2((largest - target.row.largest) * target.scale) * target.inverse_mass;
        store.p_sums[piece] = store.residual_sums[piece] = p;
    }
    __syncthreads();
    auto piece_of = [&](int i) { return (store.candidates[i] + row.skew) / kVectorElements<T> / kPieceVectors; };
    for (int i = threadIdx.x / 32; i < target.candidates; i += kDrawWarps) {
        // The first candidate of a piece has it summed.
        const int lane = threadIdx.x % 32;
        const bool earlier = lane < i && store.candidates[lane] >= 0 && piece_of(lane) == piece_of(i);
        if (store.candidates[i] < 0 || __any_sync(0xFFFFFFFFu, earlier)) continue;
        float p_sum, residual_sum;
        sum_piece(target, row, piece_of(i), store, p_sum, residual_sum);
        if (lane == 0) store.residual_sums[piece_of(i)] = residual_sum;
    }
    __syncthreads();
}

// The same of any row: this block's share of the pieces, into the first block's storage.
template <typename T>
__device__ void sum_pieces(const Target& target, const LogitRow<T>& row, int chunks, int member,
                           const DrawStorage& store, DrawStorage& first_store) {
    const int warp = member * kDrawWarps + int(threadIdx.x / 32);
    for (int piece = warp; piece < chunks * kPiecesPerChunk<T>; piece += kDrawBlocks * kDrawWarps) {
        float p_sum, residual_sum;
        sum_piece(target, row, piece, store, p_sum, residual_sum);
        if (threadIdx.x % 32 == 0) {
            first_store.p_sums[piece] = p_sum;
            first_store.residual_sums[piece] = residual_sum;
        }
    }
}

// Inverse CDF over token ids, given the sums of all pieces; -1 when all weights are 0.
template <typename T>
__device__ int draw_from_row(const Target& target, bool residual, const LogitRow<T>& row, int pieces, float uniform,
                             DrawStorage& store) {
    const int piece = threadIdx.x;
    const float own = piece >= pieces ? 0.0f : residual ? store.residual_sums[piece] : store.p_sums[piece];
    float mass, ignored_mass;
    const float running = exclusive_scan<kDrawThreads>(own, store.warp_sums, mass);
    if (!(mass > 0.0f)) return -1;
    const float wanted = uniform * mass;
    int chosen = block_min(own > 0.0f && running + own > wanted ? piece : kNothing, kNothing, &store.found);
    // Rounding may put `wanted` beyond the last piece: then its last possible token is taken.
    const bool beyond = chosen == kNothing;
    if (beyond) chosen = -block_min(own > 0.0f ? -piece : kNothing, kNothing, &store.found);
    if (piece == chosen) store.before = running;

    constexpr int kVec = kVectorElements<T>;
    float weights[kVec] = {}, sum = 0.0f;
    const int vector = chosen * kPieceVectors + int(threadIdx.x), first = row.first_column(vector);
    if (threadIdx.x < kPieceVectors) {
        bool ignored = false;
        row.template load<1>(vector, 0, weights, ignored);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            weights[i] = target.p(weights[i], first + i);
            if (residual) weights[i] = target.residual(weights[i], first + i, store);
            sum += weights[i];
        }
    }
    float cumulative = exclusive_scan<kDrawThreads>(sum, store.warp_sums, ignored_mass);
    cumulative += store.before;  // published by the barriers of the scan
    int first_beyond = kNothing, last_possible = kNothing;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
        cumulative += weights[i];
        if (!(weights[i] > 0.0f)) continue;
        last_possible = -(first + i);
        if (first_beyond == kNothing && !beyond && cumulative > wanted) first_beyond = first + i;
    }
    const int token = block_min(first_beyond, kNothing, &store.found);
    if (token != kNothing) return token;
    const int last = block_min(last_possible, kNothing, &store.found);
    // A piece whose weights all vanish against the row's largest has a sum that only just does not.
    return last == kNothing ? target.row.best_token : -last;
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

    // A warp per draft, a lane per candidate.
    int rejected = existing - 1;
    for (int j = threadIdx.x / 32; j < existing - 1; j += kDrawWarps) {
        const int lane = threadIdx.x % 32;
        const int64_t entry = (request * drafts + j) * p.count + lane;
        const int64_t candidate = lane < p.count ? p.candidates[entry] : -1;
        const float q = lane < p.count ? p.q_rows[entry] : 0.0f;
        const int64_t draft = draft_tokens[j];
        const RowDistribution row = rows[j];
        bool keep;
        if (temperature <= 0.0f) {
            keep = draft == row.best_token;
        } else {
            float target = 0.0f, proposed = candidate == draft ? q : 0.0f;
            if (!row.faulty && draft >= 0 && draft < p.valid_columns)
                target = token_weight(row, logit_row<T>(p, request, j).at(int(draft)), int(draft), scale) / row.mass;
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) proposed += __shfl_xor_sync(0xFFFFFFFFu, proposed, offset);
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
        const int64_t row_index = int64_t(request) * p.block_size + accepted;
        const uint64_t* lists = workspace.lists + row_index * chunks * kListKeys;
        __syncthreads();
        if (!target.row.kept_in_lists && is_whole(target.row)) {
            if (member == 0)
                sums_of_whole_row(target, row, lists, row_pieces<T>(workspace, row_index, chunks), chunks, store);
        } else if (!target.row.kept_in_lists) {
            // Another block's shared memory may be written once it is known to run, and read once all have written.
            cluster.sync();
            sum_pieces(target, row, chunks, member, store, *cluster.map_shared_rank(&store, 0));
            cluster.sync();
        }
        if (member != 0) return;
        // A residual without mass (p = q, to rounding) falls back to p.
        int drawn = -1;
        for (int attempt = residual ? 0 : 1; attempt < 2 && drawn < 0; ++attempt) {
            drawn = target.row.kept_in_lists
                        ? draw_from_lists(target, attempt == 0, lists, chunks, uniform, store)
                        : draw_from_row(target, attempt == 0, row, chunks * kPiecesPerChunk<T>, uniform, store);
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
