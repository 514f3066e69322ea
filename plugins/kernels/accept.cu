// Accept, first launch: each chunk of each row gives its largest keys and its softmax mass in one reading of the
// logits. The filters (accept_filter.cu) and the draw (accept_draw.cu) then touch the logits only where they must.
#include <algorithm>

#include "accept_state.cuh"
#include "chunk_stream.cuh"
#include "launch.h"
#include "overlapped_launch.cuh"
#include "select_dispatch.h"

namespace dflash {
namespace {

// With fewer blocks the reading of one chunk does not cover the work on another; registers allow no more.
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kRounds = 64;  // chunks of a block whose facts are looked up together

// One chunk of one row, and what is wanted of it.
struct alignas(16) ChunkTask {
    const void* row;
    float scale;  // exponent_scale(temperature), negative for greedy requests
    int16_t chunk;
    int16_t keys;  // 0: the row does not exist
};

template <typename T>
struct SummaryStorage {
    typename ChunkStream<T>::Buffer buffer;
    SelectStorage<kListKeys> select;
    ChunkTask tasks[kRounds];
    float piece_sums[kPiecesPerChunk<T>][kChunkThreads / 32];  // of each warp
};

template <typename T>
__device__ ChunkTask chunk_task(const dflash_accept_params& p, int item, int chunks) {
    const int entry = item / chunks, request = entry / p.block_size, row = entry % p.block_size;
    const bool exists = row_exists(p, request, row), filtered = is_filtered(p, request);
    const float temperature = p.temperatures[request];
    // Only filters look below the best token.
    const int keys = temperature > 0.0f && filtered ? kListKeys : 1;
    return {logit_row<T>(p, request, row).row, temperature > 0.0f ? exponent_scale(temperature) : -1.0f,
            int16_t(item - entry * chunks), int16_t(exists ? keys : 0)};
}

// Sums each of a lane's kCount numbers over the warp. Lane l receives the sum of number l / (32 / kCount).
template <int kCount>
__device__ __forceinline__ float sum_each(float (&numbers)[kCount]) {
    const int lane = threadIdx.x % 32;
    int offset = 16;
    // Lanes with the bit of `offset` go on with the upper half of the numbers, the others with the lower.
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2, offset /= 2) {
        const bool upper = (lane & offset) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float given = upper ? numbers[i] : numbers[i + half];
            const float kept = upper ? numbers[i + half] : numbers[i];
            numbers[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, offset);
        }
    }
#pragma unroll
    for (; offset > 0; offset /= 2) numbers[0] += __shfl_xor_sync(0xFFFFFFFFu, numbers[0], offset);
    return numbers[0];
}

// Largest keys and masses of the chunk in registers, to the list, mass and first piece of its own.
template <typename T>
__device__ void summarise(const ChunkValues<T>& values, const ChunkTask& task, uint64_t* list, float* mass_out,
                          float* pieces, SummaryStorage<T>& storage) {
    const bool has_nan =
        select_chunk<Keys::kFinite>(values, [](float value) { return value; }, task.keys, storage.select, list);
    // A NaN in the chunk travels as its mass.
    if (task.scale < 0.0f || has_nan) {
        if (threadIdx.x == 0) *mass_out = has_nan ? NAN : 0.0f;
        __syncthreads();  // the storage is free again
        return;
    }
    constexpr int kPieces = kPiecesPerChunk<T>, kVec = kVectorElements<T>, kLanes = 32 / kPieces;
    const float largest = usable_largest(largest_of(storage.select.group_value)), scale = task.scale;
    float sums[kPieces];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
        sums[piece] = 0.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[piece] += fast_exp2((values.values[piece * kVec + i] - largest) * scale);
    }
    const float sum = sum_each(sums);
    const int lane = threadIdx.x % 32;
    if (lane % kLanes == 0) storage.piece_sums[lane / kLanes][threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        float mass = 0.0f;
        if (lane < kPieces) {
#pragma unroll
            for (int warp = 0; warp < kChunkThreads / 32; ++warp) mass += storage.piece_sums[lane][warp];
            pieces[lane * values.chunks] = mass;
        }
#pragma unroll
        for (int offset = kPieces / 2; offset > 0; offset /= 2) mass += __shfl_xor_sync(0xFFFFFFFFu, mass, offset);
        if (lane == 0) *mass_out = mass;
    }
}

// Blocks stay and take every gridDim.x-th chunk of all rows, so that the next one is read while the last is worked on.
template <typename T>
__global__ void __launch_bounds__(kChunkThreads, kBlocksPerMultiprocessor)
    summarise_chunks(dflash_accept_params p, int chunks, AcceptWorkspace workspace) {
    __shared__ SummaryStorage<T> storage;
    wait_for_previous_launch();
    ChunkStream<T> stream{storage.buffer};
    const int items = p.batch * p.block_size * chunks, rounds = (items - int(blockIdx.x) - 1) / int(gridDim.x) + 1;
    auto item_of = [&](int round) { return int(blockIdx.x) + round * int(gridDim.x); };
    auto ask_for = [&](const ChunkTask& task) {
        stream.ask(LogitRow<T>(static_cast<const T*>(task.row), p.valid_columns), task.chunk, chunks);
    };
    // The first chunk is asked for before it is known to exist: its memory does.
    ask_for(chunk_task<T>(p, item_of(0), chunks));
    let_next_launch_start();
    for (int first = 0; first < rounds; first += kRounds) {
        const int known = min(rounds - first, kRounds);
        if (first > 0) __syncthreads();
        if (int(threadIdx.x) < known)
            storage.tasks[threadIdx.x] = chunk_task<T>(p, item_of(first + int(threadIdx.x)), chunks);
        __syncthreads();
        auto existing_from = [&](int round) {
            while (round < known && storage.tasks[round].keys == 0) ++round;
            return round;
        };
        int round = existing_from(0);
        if (round < known && first + round > 0) {
            copy_async_wait<0>();
            ask_for(storage.tasks[round]);
        }
        while (round < known) {
            const ChunkTask task = storage.tasks[round];
            ChunkValues<T> values(LogitRow<T>(static_cast<const T*>(task.row), p.valid_columns), task.chunk, chunks);
            stream.take(values);
            const int64_t entry = item_of(first + round);
            round = existing_from(round + 1);
            if (round < known) ask_for(storage.tasks[round]);
            summarise(values, task, workspace.lists + entry * kListKeys, workspace.masses + entry,
                      workspace.pieces + (entry - task.chunk) * kPiecesPerChunk<T> + task.chunk, storage);
        }
    }
    copy_async_wait<0>();  // of a chunk that does not exist
}

int32_t validate(const dflash_accept_params& p) {
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "accept: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (p.batch < 0 || p.block_size < 1 || int64_t(p.batch) * p.block_size > 65535)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: batch %d, block_size %d, expected a product of at most 65535",
                    p.batch, p.block_size);
    if (p.count < 1 || p.count > DFLASH_MAX_CANDIDATES)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: count %d, expected 1..%d", p.count, DFLASH_MAX_CANDIDATES);
    if (p.valid_columns < 1 || p.valid_columns > p.columns || p.valid_columns > DFLASH_MAX_VOCABULARY)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: valid_columns %d, expected 1..min(columns %d, %d)",
                    p.valid_columns, p.columns, DFLASH_MAX_VOCABULARY);
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(accept, "accept");

int64_t dflash_accept_workspace_bytes(const dflash_accept_params* params) {
    if (validate(*params) != DFLASH_OK) return -1;
    return AcceptWorkspace::bytes(int64_t(params->batch) * params->block_size, chunks_of(params->valid_columns));
}

int32_t dflash_accept(const dflash_accept_params* params, dflash_stream stream) {
    const dflash_accept_params p = *params;
    const int64_t needed = dflash_accept_workspace_bytes(params);
    if (needed < 0) return DFLASH_INVALID_ARGUMENT;
    if (p.batch == 0) return DFLASH_OK;
    if (p.workspace_bytes < needed)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: workspace of %lld bytes, expected %lld",
                    static_cast<long long>(p.workspace_bytes), static_cast<long long>(needed));
    const int chunks = chunks_of(p.valid_columns), rows = p.batch * p.block_size;
    const AcceptWorkspace workspace(p.workspace, rows, chunks);
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    return dispatch_dtype("accept", p.dtype, [&](auto zero) {
        using T = decltype(zero);
        const int blocks = std::min(rows * chunks, kBlocksPerMultiprocessor * std::max(multiprocessor_count(), 1));
        launch_overlapped(summarise_chunks<T>, blocks, kChunkThreads, 0, cuda_stream, p, chunks, workspace);
        launch_row_filter<T>(p, chunks, workspace, cuda_stream);
        launch_accept_draw<T>(p, chunks, workspace, cuda_stream);
        return check_launch("accept");
    });
}
