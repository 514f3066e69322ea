// Top-K candidates over the vocabulary: each chunk's K best, then one merge per row; and the merge of vocabulary
// shards.
#include "chunk_select.cuh"
#include "dflash_select.h"
#include "launch.h"
#include "overlapped_launch.cuh"
#include "select_dispatch.h"

namespace dflash {
namespace {

constexpr int kMergeThreads = kChunkThreads;

// Transformed is a template parameter because tanh costs registers, and with them loads in flight.
template <typename T, bool Transformed>
__global__ void __launch_bounds__(kChunkThreads)
    chunk_candidates(const T* logits, int64_t stride, int valid_columns, int count, float multiplier, float softcap,
                     uint64_t* lists) {
    __shared__ SelectStorage<kMaxCount> storage;
    const int row = blockIdx.y, chunk = blockIdx.x, chunks = gridDim.x;
    wait_for_previous_launch();
    ChunkValues<T> values(LogitRow<T>(logits + row * stride, valid_columns), chunk, chunks);
    values.load();
    let_next_launch_start();
    const auto transform = [=](float value) {
        if (!Transformed) return value;
        value = fmaxf(value * multiplier, -INFINITY);
        // -infinity stays: it stands for columns outside the row and for banned tokens.
        return softcap > 0.0f && value > -INFINITY ? tanhf(value / softcap) * softcap : value;
    };
    if (Transformed) {
#pragma unroll
        for (int slot = 0; slot < kValuesPerThread; ++slot) values.values[slot] = transform(values.values[slot]);
    }
    select_chunk<Keys::kAll>(values, transform, count, storage, lists + (int64_t(row) * chunks + chunk) * count);
}

__device__ void write_candidates(const uint64_t* best, int row, int count, int64_t id_offset, float* values,
                                 int64_t* ids) {
    for (int i = threadIdx.x; i < count; i += kMergeThreads) {
        const uint64_t key = best[i];
        values[int64_t(row) * count + i] = key == kNoKey ? -INFINITY : key_value(key);
        ids[int64_t(row) * count + i] = key == kNoKey ? -1 : int64_t(key_id(key)) + id_offset;
    }
}

__global__ void __launch_bounds__(kMergeThreads)
    merge_chunks(uint64_t* lists, int chunks, int count, int64_t id_offset, float* values, int64_t* ids) {
    wait_for_previous_launch();
    let_next_launch_start();
    constexpr int kKeys = (kMaxChunks * kMaxCount + kMergeThreads - 1) / kMergeThreads;
    __shared__ SelectStorage<kMaxCount> storage;
    __shared__ uint64_t best[kMaxCount];
    const int row = blockIdx.x, total = chunks * count;
    uint64_t keys[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        const int entry = i * kMergeThreads + threadIdx.x;
        keys[i] = entry < total ? lists[int64_t(row) * total + entry] : kNoKey;
    }
    select_keys<kGroupThreads, kKeys>(
        [&](int slot) {
            uint64_t key = kNoKey;
#pragma unroll
            for (int i = 0; i < kKeys; ++i) key = i == slot ? keys[i] : key;
            return key;
        },
        count, storage, best);
    __syncthreads();
    write_candidates(best, row, count, id_offset, values, ids);
}

__global__ void __launch_bounds__(kMergeThreads)
    merge_shards(const float* shard_values, const int64_t* shard_ids, int shards, int rows, int count, float* values,
                 int64_t* ids) {
    extern __shared__ uint64_t keys[];
    __shared__ uint64_t best[kMaxCount];
    const int row = blockIdx.x, total = shards * count;
    for (int i = threadIdx.x; i < total; i += kMergeThreads) {
        const int64_t source = (int64_t(i / count) * rows + row) * count + i % count;
        const int64_t id = shard_ids[source];
        keys[i] = id < 0 ? kNoKey : make_key(fmaxf(shard_values[source], -INFINITY), uint32_t(id));
    }
    if (threadIdx.x < kMaxCount) best[threadIdx.x] = kNoKey;
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += kMergeThreads) {
        const uint64_t key = keys[i];
        if (key == kNoKey) continue;
        int rank = 0;
        for (int j = 0; j < total; ++j) rank += keys[j] > key;
        if (rank < count) best[rank] = key;
    }
    __syncthreads();
    write_candidates(best, row, count, 0, values, ids);
}

int32_t validate(const dflash_candidates_params& p) {
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (p.rows < 0 || p.rows > 65535)
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: rows %d, expected 0..65535", p.rows);
    if (p.count < 1 || p.count > kMaxCount)
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: count %d, expected 1..%d", p.count, kMaxCount);
    if (p.valid_columns < 0 || p.valid_columns > p.columns || p.valid_columns > DFLASH_MAX_VOCABULARY)
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: valid_columns %d, expected 0..min(columns %d, %d)",
                    p.valid_columns, p.columns, DFLASH_MAX_VOCABULARY);
    if (!(p.multiplier > 0.0f) || !(p.softcap >= 0.0f))
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: multiplier %g, softcap %g, expected > 0 and >= 0",
                    p.multiplier, p.softcap);
    if (p.id_offset < 0 || p.id_offset + p.valid_columns >= (int64_t(1) << 32) - 1)
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: id_offset %lld, expected ids within 32 bits",
                    static_cast<long long>(p.id_offset));
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(candidates, "candidates");

int64_t dflash_candidates_workspace_bytes(const dflash_candidates_params* params) {
    if (validate(*params) != DFLASH_OK) return -1;
    return int64_t(params->rows) * chunks_of(params->valid_columns) * params->count * int64_t(sizeof(uint64_t));
}

int32_t dflash_candidates(const dflash_candidates_params* params, dflash_stream stream) {
    const dflash_candidates_params& p = *params;
    const int64_t needed = dflash_candidates_workspace_bytes(params);
    if (needed < 0) return DFLASH_INVALID_ARGUMENT;
    if (p.rows == 0) return DFLASH_OK;
    if (p.workspace_bytes < needed)
        return fail(DFLASH_INVALID_ARGUMENT, "candidates: workspace of %lld bytes, expected %lld",
                    static_cast<long long>(p.workspace_bytes), static_cast<long long>(needed));
    const int chunks = chunks_of(p.valid_columns);
    uint64_t* lists = static_cast<uint64_t*>(p.workspace);
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    const int32_t status = dispatch_dtype("candidates", p.dtype, [&](auto zero) {
        using T = decltype(zero);
        const auto kernel =
            p.multiplier != 1.0f || p.softcap > 0.0f ? chunk_candidates<T, true> : chunk_candidates<T, false>;
        launch_overlapped(kernel, dim3(chunks, p.rows), kChunkThreads, 0, cuda_stream, static_cast<const T*>(p.logits),
                          p.logits_stride, p.valid_columns, p.count, p.multiplier, p.softcap, lists);
        return check_launch("candidates");
    });
    if (status != DFLASH_OK) return status;
    launch_overlapped(merge_chunks, p.rows, kMergeThreads, 0, cuda_stream, lists, chunks, p.count, p.id_offset,
                      p.values, p.ids);
    return check_launch("candidates merge");
}

int32_t dflash_merge_candidates(const float* shard_values, const int64_t* shard_ids, float* values, int64_t* ids,
                                int32_t shards, int32_t rows, int32_t count, dflash_stream stream) {
    if (shards < 1 || shards > 128 || count < 1 || count > kMaxCount || rows < 0)
        return fail(DFLASH_INVALID_ARGUMENT,
                    "merge_candidates: shards %d, rows %d, count %d, expected 1..128, >= 0, 1..%d", shards, rows, count,
                    kMaxCount);
    if (rows == 0) return DFLASH_OK;
    merge_shards<<<rows, kMergeThreads, size_t(shards) * count * sizeof(uint64_t), static_cast<cudaStream_t>(stream)>>>(
        shard_values, shard_ids, shards, rows, count, values, ids);
    return check_launch("merge_candidates");
}
