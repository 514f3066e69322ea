// The K largest keys that 256 threads hold in registers: 32 values each of one chunk of a row, or a few keys each of
// lists to be merged.
//
// The K-th largest of 64 group maxima is a threshold that at least K keys reach, and only the K groups whose maximum
// reaches it can hold such keys: the survivors are bounded whatever the data, and on ordinary logits they are barely
// more than K. That holds for keys, which are unique. Values are cheaper to compare, and tie: chunks try values first
// and start again with keys in the rare case that ties overflow the room for survivors.
#pragma once

#include "ordered_key.cuh"

namespace dflash {

constexpr int kChunkThreads = 256;
constexpr int kValuesPerThread = 32;
constexpr int kChunkColumns = kChunkThreads * kValuesPerThread;
constexpr int kMaxChunks = 40;
constexpr int kMaxCount = 32;

// A row that starts off a 16-byte boundary may need up to 7 columns of skew. The chunk count must not depend on a
// row's address: sums are combined chunk by chunk and a request's tokens may not depend on its place in the batch.
inline int chunks_of(int columns) { return (columns + 7 + kChunkColumns - 1) / kChunkColumns; }

constexpr int kGroupThreads = 4;
constexpr int kGroups = kChunkThreads / kGroupThreads;

constexpr int kSurvivorRoom = kMaxCount * kGroupThreads * kValuesPerThread;

struct SelectStorage {
    uint64_t survivors[kSurvivorRoom];
    uint64_t group_best[kGroups];
    uint32_t group_value[kGroups];
    uint64_t threshold;
    float threshold_value;
    int survivor_count;
};

// Values of chunk `chunk` of `chunks`. Chunks interleave in pieces of 4 KB, because neighbouring ids are often likely
// together and would otherwise crowd one chunk's list.
template <typename T>
struct ChunkValues {
    static constexpr int kVectors = kValuesPerThread / kVectorElements<T>;
    float values[kValuesPerThread];
    LogitRow<T> row;
    int chunk, chunks;
    bool has_nan = false;

    __device__ ChunkValues(const LogitRow<T>& row_, int chunk_, int chunks_)
        : row(row_), chunk(chunk_), chunks(chunks_) {
        row.template load<kVectors>(vector_index(0), chunks * kChunkThreads, values, has_nan);
    }

    __device__ int vector_index(int i) const { return (i * chunks + chunk) * kChunkThreads + int(threadIdx.x); }
    __device__ int column(int slot) const {
        return row.first_column(vector_index(slot / kVectorElements<T>)) + slot % kVectorElements<T>;
    }
    __device__ float largest() const {
        float best = -INFINITY;
#pragma unroll
        for (int slot = 0; slot < kValuesPerThread; ++slot) best = fmaxf(best, values[slot]);
        return best;
    }
};

// atomicAdd(counter, 1) in shared memory without the warp-wide vote that the compiler adds: in code unrolled 32 times
// it would be most of the instructions, for one or two lanes.
__device__ __forceinline__ int take_place(int* counter) {
    int place;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;"
                 : "=r"(place)
                 : "r"(uint32_t(__cvta_generic_to_shared(counter)))
                 : "memory");
    return place;
}

// Position of group `group`'s maximum `best` among all groups' (ties to the lower group), in every thread of the group.
template <typename Number>
__device__ __forceinline__ int group_rank(const Number* bests, Number best) {
    const int group = threadIdx.x / kGroupThreads, part = threadIdx.x % kGroupThreads;
    int rank = 0;
#pragma unroll
    for (int i = 0; i < kGroups / kGroupThreads; ++i) {
        const int other_group = i * kGroupThreads + part;
        const Number other = bests[other_group];
        rank += other > best || (other == best && other_group < group);
    }
#pragma unroll
    for (int offset = 1; offset < kGroupThreads; offset *= 2) rank += __shfl_xor_sync(0xFFFFFFFFu, rank, offset);
    return rank;
}

// Sorts the survivors into the `count` largest, descending (kNoKey where there are fewer).
__device__ __forceinline__ void write_survivors(const SelectStorage& storage, int count, uint64_t* out) {
    const int survivors = storage.survivor_count;
    for (int i = threadIdx.x; i < survivors; i += kChunkThreads) {
        const uint64_t key = storage.survivors[i];
        int position = 0;
        for (int j = 0; j < survivors; ++j) position += storage.survivors[j] > key;
        if (position < count) out[position] = key;
    }
    for (int i = survivors + threadIdx.x; i < count; i += kChunkThreads) out[i] = kNoKey;
}

// Writes the `count` largest of the block's keys to `out`; key_of(slot) gives the calling thread's `slots` keys.
// All 256 threads call it. At most kValuesPerThread slots.
template <typename KeyOf>
__device__ void select_keys(int slots, KeyOf&& key_of, int count, SelectStorage& storage, uint64_t* out) {
    uint64_t best = kNoKey;
    for (int slot = 0; slot < slots; ++slot) best = max(best, key_of(slot));
    const uint64_t thread_best = best;
#pragma unroll
    for (int offset = 1; offset < kGroupThreads; offset *= 2)
        best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, offset));
    __syncthreads();
    if (threadIdx.x % kGroupThreads == 0) storage.group_best[threadIdx.x / kGroupThreads] = best;
    if (threadIdx.x == 0) storage.survivor_count = 0;
    __syncthreads();
    const int rank = group_rank(storage.group_best, best);
    if (threadIdx.x % kGroupThreads == 0 && rank == count - 1) storage.threshold = best;
    __syncthreads();
    const uint64_t threshold = max(storage.threshold, kNoKey + 1);
    if (thread_best >= threshold) {
        for (int slot = 0; slot < slots; ++slot) {
            const uint64_t key = key_of(slot);
            if (key >= threshold) storage.survivors[atomicAdd(&storage.survivor_count, 1)] = key;
        }
    }
    __syncthreads();
    write_survivors(storage, count, out);
}

// The rare way of select_chunk: the chunk is read again, key by key, which keeps its registers out of the common one.
template <typename T, typename Transform>
__device__ __noinline__ void select_chunk_by_keys(LogitRow<T> row, int chunk, int chunks, Transform transform,
                                                  int count, SelectStorage& storage, uint64_t* out) {
    select_keys(
        kValuesPerThread,
        [&](int slot) {
            const int vector = (slot / kVectorElements<T> * chunks + chunk) * kChunkThreads + int(threadIdx.x);
            const int column = row.first_column(vector) + slot % kVectorElements<T>;
            return column >= 0 && column < row.columns ? make_key(transform(row.at(column)), uint32_t(column)) : kNoKey;
        },
        count, storage, out);
}

// Writes the `count` largest keys of the chunk to `out`. All threads call it; `transform` is what was applied to the
// values. Leaves every group's largest value in storage.group_value.
template <typename T, typename Transform>
__device__ void select_chunk(const ChunkValues<T>& chunk, Transform transform, int count, SelectStorage& storage,
                             uint64_t* out) {
    const float thread_largest = chunk.largest();
    float largest = thread_largest;
#pragma unroll
    for (int offset = 1; offset < kGroupThreads; offset *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
    const uint32_t ordered = ordered_bits(largest);
    if (threadIdx.x % kGroupThreads == 0) storage.group_value[threadIdx.x / kGroupThreads] = ordered;
    if (threadIdx.x == 0) storage.survivor_count = 0;
    __syncthreads();
    const int rank = group_rank(storage.group_value, ordered);
    if (threadIdx.x % kGroupThreads == 0 && rank == count - 1) storage.threshold_value = largest;
    __syncthreads();
    const float threshold = storage.threshold_value;
    if (thread_largest >= threshold) {
#pragma unroll
        for (int slot = 0; slot < kValuesPerThread; ++slot) {
            if (chunk.values[slot] < threshold) continue;
            const int column = chunk.column(slot);
            if (column < 0 || column >= chunk.row.columns) continue;
            const int place = take_place(&storage.survivor_count);
            if (place < kSurvivorRoom) storage.survivors[place] = make_key(chunk.values[slot], uint32_t(column));
        }
    }
    __syncthreads();
    // Beyond a few hundred, sorting by counting would be slower than starting again.
    if (storage.survivor_count <= kSurvivorRoom / 8) {
        write_survivors(storage, count, out);
    } else {
        select_chunk_by_keys(chunk.row, chunk.chunk, chunk.chunks, transform, count, storage, out);
    }
}

}  // namespace dflash
