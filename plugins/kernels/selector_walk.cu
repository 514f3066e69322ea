// Selector walk: one cluster of 8 blocks per request scores every edge of the lattice, then one warp walks it.
//
// Scoring all K * K edges of a position costs less than waiting, position after position, for the codebook row of a
// choice just made: the dependent chain holds only shared-memory reads of finished scores.
#include <cooperative_groups.h>

#include "dflash_select.h"
#include "launch.h"
#include "ordered_key.cuh"
#include "overlapped_launch.cuh"
#include "philox.cuh"
#include "select_dispatch.h"

namespace cg = cooperative_groups;

namespace dflash {
namespace {

constexpr int kWalkThreads = 256;
constexpr int kLanesPerEdge = 2;
constexpr int kClusterBlocks = 8;
constexpr int kMaxCandidates = DFLASH_MAX_CANDIDATES;
constexpr int kMaxPositions = 32;  // one lane each
constexpr int kRowPad = 4;         // floats: rows of one column then start in different banks
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct WalkShape {
    int positions, count, rank;
    __host__ __device__ int score_floats() const { return positions * count * count; }
    __host__ __device__ int row_floats() const { return rank + kRowPad; }
    __host__ __device__ size_t shared_bytes() const {
        return sizeof(int64_t) * size_t(positions + 1) / 2 * 2 * count +
               sizeof(float) * (size_t(score_floats() + 3) / 4 * 4 + 2 * size_t(count) * row_floats());
    }
};

template <typename T>
__device__ __forceinline__ void load_row_part(const T* codebook, int64_t id, int64_t vocabulary, int rank, int column,
                                              float (&values)[kVectorElements<T>]) {
    if (id >= 0 && id < vocabulary) {
        load_vector(codebook + id * rank + column, values);
    } else {
#pragma unroll
        for (float& value : values) value = 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void store_row_part(float* address, const float (&values)[kVectorElements<T>]) {
#pragma unroll
    for (int j = 0; j < kVectorElements<T>; j += 4)
        *reinterpret_cast<float4*>(address + j) = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
}

// Stages the codebook rows of one position as float32: left = A[previous] * hidden, right = B[next]. Both are fetched
// before either is stored: the rows come from far memory.
template <typename T>
__device__ void stage_rows(const dflash_walk_params& p, int64_t entry, const int64_t* previous, int previous_count,
                           float* left, float* right, int row_floats) {
    constexpr int kVec = kVectorElements<T>;
    const int64_t* next = p.candidates + entry * p.count;
    const T* hidden = static_cast<const T*>(p.hidden) + entry * p.rank;
    const int vectors = p.rank / kVec;
    for (int i = threadIdx.x; i < p.count * vectors; i += kWalkThreads) {
        const int row = i / vectors, column = (i % vectors) * kVec;
        float left_part[kVec], right_part[kVec], scales[kVec];
        load_row_part(static_cast<const T*>(p.predecessor_codebook), row < previous_count ? previous[row] : -1,
                      p.vocabulary, p.rank, column, left_part);
        load_row_part(static_cast<const T*>(p.successor_codebook), next[row], p.vocabulary, p.rank, column, right_part);
        load_vector(hidden + column, scales);
#pragma unroll
        for (int j = 0; j < kVec; ++j) left_part[j] *= scales[j];
        store_row_part<T>(left + row * row_floats + column, left_part);
        store_row_part<T>(right + row * row_floats + column, right_part);
    }
}

// <left, right>, in every one of the kLanesPerEdge neighbouring lanes that share it.
__device__ float row_product(const float* left, const float* right, int rank) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int i = int(threadIdx.x % kLanesPerEdge) * 4; i < rank; i += kLanesPerEdge * 4) {
        const float4 a = *reinterpret_cast<const float4*>(left + i);
        const float4 b = *reinterpret_cast<const float4*>(right + i);
        sum[0] = fmaf(a.x, b.x, sum[0]);
        sum[1] = fmaf(a.y, b.y, sum[1]);
        sum[2] = fmaf(a.z, b.z, sum[2]);
        sum[3] = fmaf(a.w, b.w, sum[3]);
    }
    float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int offset = 1; offset < kLanesPerEdge; offset *= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
    return total;
}

// The lane chosen from one row of scores (lane k holds candidate k); q receives the lane's share of the proposal.
__device__ int choose(float score, int count, float temperature, float uniform, float& q) {
    const int lane = threadIdx.x;
    const bool exists = lane < count;
    const uint32_t ordered = exists ? ordered_bits(score) : 0;
    const uint32_t best = __reduce_max_sync(kAllLanes, ordered);
    const int first_best = __ffs(__ballot_sync(kAllLanes, ordered == best)) - 1;
    if (temperature <= 0.0f) {
        q = lane == first_best ? 1.0f : 0.0f;
        return first_best;
    }
    const float largest = ordered_value(best);
    const float weight = exists && score > -INFINITY ? expf((score - largest) / temperature) : 0.0f;
    float cumulative = weight;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const float below = __shfl_up_sync(kAllLanes, cumulative, offset);
        if (lane >= offset) cumulative += below;
    }
    const float total = __shfl_sync(kAllLanes, cumulative, 31);
    q = total > 0.0f ? weight / total : (lane == first_best ? 1.0f : 0.0f);
    // Only lanes with q > 0 may be drawn: a proposal with q = 0 would be accepted whatever the target thinks of it.
    const unsigned possible = __ballot_sync(kAllLanes, q > 0.0f);
    const unsigned beyond = possible & __ballot_sync(kAllLanes, cumulative > uniform * total);
    return beyond ? __ffs(beyond) - 1 : 31 - __clz(possible);
}

template <typename T>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kWalkThreads)
    selector_walk(dflash_walk_params p) {
    let_next_launch_start();
    wait_for_previous_launch();
    extern __shared__ __align__(16) int64_t candidate_ids[];  // the walker's copy
    const WalkShape shape{p.positions, p.count, p.rank};
    float* scores = reinterpret_cast<float*>(candidate_ids + (p.positions + 1) / 2 * 2 * p.count);
    float* left = scores + (shape.score_floats() + 3) / 4 * 4;
    float* right = left + shape.count * shape.row_floats();

    cg::cluster_group cluster = cg::this_cluster();
    const int member = int(cluster.block_rank());
    const int64_t request = blockIdx.y;
    float* walker_scores = cluster.map_shared_rank(scores, 0);
    // A remote block's shared memory may be written only once it is known to run: arrive here, wait before the first
    // write.
    cluster.barrier_arrive();

    // What the walk will need is fetched now: its dependent chain then waits for no global memory.
    const int lane = threadIdx.x % 32;
    float temperature = 0.0f, uniform = 0.0f;
    if (member == 0) {
        for (int i = threadIdx.x; i < p.positions * p.count; i += kWalkThreads)
            candidate_ids[i] = p.candidates[request * p.positions * p.count + i];
        temperature = p.temperatures[request];
        if (lane < p.positions)
            uniform = p.uniforms != nullptr
                          ? p.uniforms[request * p.positions + lane]
                          : philox_uniform(p.seeds[request], p.first_positions[request] + lane, kWalkWord);
    }

    bool walker_runs = false;
    for (int position = member; position < p.positions; position += kClusterBlocks) {
        const int64_t entry = request * p.positions + position;
        const int64_t* next = p.candidates + entry * p.count;
        const int64_t* previous = position == 0 ? p.anchors + request : next - p.count;
        const int previous_count = position == 0 ? 1 : p.count;
        stage_rows<T>(p, entry, previous, previous_count, left, right, shape.row_floats());
        __syncthreads();
        if (!walker_runs) {
            cluster.barrier_wait();
            walker_runs = true;
        }
        // Whole warps take part in the last round, for the shuffles.
        const int lanes = previous_count * p.count * kLanesPerEdge;
        for (int i = threadIdx.x; i < (lanes + 31) / 32 * 32; i += kWalkThreads) {
            const int edge = min(i, lanes - 1) / kLanesPerEdge, a = edge / p.count, b = edge % p.count;
            const float product = row_product(left + a * shape.row_floats(), right + b * shape.row_floats(), p.rank);
            if (i < lanes && i % kLanesPerEdge == 0) {
                const bool exists = next[b] >= 0 && next[b] < p.vocabulary;
                walker_scores[(position * p.count + a) * p.count + b] =
                    exists ? p.unary[entry * p.count + b] + product : -INFINITY;
            }
        }
        __syncthreads();
    }
    if (!walker_runs) cluster.barrier_wait();
    cluster.sync();

    if (member != 0 || threadIdx.x >= 32) return;
    int choice = 0;
    int64_t token = -1;
    for (int position = 0; position < p.positions; ++position) {
        const float score = lane < p.count ? scores[(position * p.count + choice) * p.count + lane] : -INFINITY;
        float q;
        choice = choose(score, p.count, temperature, __shfl_sync(kAllLanes, uniform, position), q);
        const int64_t entry = request * p.positions + position;
        if (lane < p.count) p.q_rows[entry * p.count + lane] = q;
        if (position == lane) token = candidate_ids[position * p.count + choice];
    }
    if (lane < p.positions) p.tokens[request * p.positions + lane] = token;
}

int32_t validate(const dflash_walk_params& p) {
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "selector_walk: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (p.batch < 0 || p.batch > 65535)
        return fail(DFLASH_INVALID_ARGUMENT, "selector_walk: batch %d, expected 0..65535", p.batch);
    if (p.positions < 1 || p.positions > kMaxPositions || p.count < 1 || p.count > kMaxCandidates)
        return fail(DFLASH_INVALID_ARGUMENT, "selector_walk: positions %d, count %d, expected 1..%d and 1..%d",
                    p.positions, p.count, kMaxPositions, kMaxCandidates);
    if (p.rank < 8 || p.rank % 8 != 0)
        return fail(DFLASH_INVALID_ARGUMENT, "selector_walk: rank %d, expected a multiple of 8", p.rank);
    if (p.uniforms == nullptr && (p.seeds == nullptr || p.first_positions == nullptr))
        return fail(DFLASH_INVALID_ARGUMENT, "selector_walk: neither uniforms nor seeds with first_positions given");
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(selector_walk, "selector_walk");

int32_t dflash_selector_walk(const dflash_walk_params* params, dflash_stream stream) {
    const dflash_walk_params p = *params;
    const int32_t valid = validate(p);
    if (valid != DFLASH_OK || p.batch == 0) return valid;
    const size_t shared_bytes = WalkShape{p.positions, p.count, p.rank}.shared_bytes();
    return dispatch_dtype("selector_walk", p.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (shared_bytes > 48 * 1024) {
            int device = 0, limit = 0;
            cudaGetDevice(&device);
            cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
            if (shared_bytes > size_t(limit))
                return fail(
                    DFLASH_UNSUPPORTED,
                    "selector_walk: positions %d, count %d, rank %d need %zu bytes of shared memory, the device "
                    "has %d",
                    p.positions, p.count, p.rank, shared_bytes, limit);
            cudaFuncSetAttribute(selector_walk<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, limit);
        }
        launch_overlapped(selector_walk<T>, dim3(kClusterBlocks, p.batch), kWalkThreads, shared_bytes,
                          static_cast<cudaStream_t>(stream), p);
        return check_launch("selector_walk");
    });
}
