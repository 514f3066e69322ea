// The K largest keys that 256 threads hold in registers: 32 values each of one chunk of a row, or a few keys each of
// lists to be merged.
//
// The K-th largest of 64 group maxima is a threshold that at least K keys reach, and only the K groups whose maximum
// reaches it can hold such keys: the survivors are bounded whatever the data, and on ordinary logits they are barely
// more than K. That holds for keys, which are unique. Values are cheaper to compare, and tie: chunks try values first
// and start again with keys in the rare cases that ties overflow the room for survivors or that there is a NaN.
#pragma once

#include <float.h>

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

// Beyond this, sorting survivors by counting would be slower than starting again with keys.
constexpr int kMostSorted = 512;
// Smaller groups for chunks of keys: fewer survivors to make room for, more groups to compare.
constexpr int kKeyGroupThreads = 2;

// For selections of at most kMost.
template <int kMost>
struct SelectStorage {
    static constexpr int kRoom = kMost * kKeyGroupThreads * kValuesPerThread;
    static_assert(kRoom >= kMostSorted, "room for what is sorted");
    uint64_t survivors[kRoom];
    uint64_t group_best[kChunkThreads / kKeyGroupThreads];
    uint64_t threshold;
    alignas(16) float group_value[kGroups];
    float leading[kGroups];  // of the groups that may hold one of the largest; +infinity of the others
    int survivor_count;
};

__device__ __forceinline__ float one_if_above(float a, float b) {
    float result;
    asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Values of chunk `chunk` of `chunks`. Chunks interleave in pieces of 4 KB, because neighbouring ids are often likely
// together and would otherwise crowd one chunk's list. Columns outside the row are -infinity.
template <typename T>
struct ChunkValues {
    static constexpr int kVectors = kValuesPerThread / kVectorElements<T>;
    float values[kValuesPerThread];
    LogitRow<T> row;
    int chunk, chunks;

    __device__ ChunkValues(const LogitRow<T>& row_, int chunk_, int chunks_)
        : row(row_), chunk(chunk_), chunks(chunks_) {}

    // From device memory; NaN becomes -infinity.
    __device__ void load() {
        bool ignored = false;
        row.template load<kVectors>(vector_index(0), chunks * kChunkThreads, values, ignored);
    }

    __device__ int vector_index(int i) const { return (i * chunks + chunk) * kChunkThreads + int(threadIdx.x); }
    __device__ int column(int slot) const {
        return row.first_column(vector_index(slot / kVectorElements<T>)) + slot % kVectorElements<T>;
    }
    // NaN where a value is.
    __device__ float largest() const {
        float best = -INFINITY;
#pragma unroll
        for (int slot = 0; slot < kValuesPerThread; ++slot) best = max_or_nan(best, values[slot]);
        return best;
    }
    // values[slot] of a slot that the compiler does not know, without sending the values through memory.
    __device__ float at(int slot) const {
        float value = values[0];
#pragma unroll
        for (int i = 1; i < kValuesPerThread; ++i) value = i == slot ? values[i] : value;
        return value;
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

// How many groups have a larger maximum than `best`, that of the calling thread's group: the same in all its threads.
template <int kThreads>
__device__ __forceinline__ int groups_above(const uint64_t* bests, uint64_t best) {
    int above = 0;
#pragma unroll 16
    for (int i = 0; i < kChunkThreads / kThreads / kThreads; ++i)
        above += bests[i * kThreads + threadIdx.x % kThreads] > best;
#pragma unroll
    for (int offset = 1; offset < kThreads; offset *= 2) above += __shfl_xor_sync(0xFFFFFFFFu, above, offset);
    return above;
}

// The same of the groups of a chunk's values. Comparing into floats takes an instruction less per group than counting.
__device__ __forceinline__ float groups_above(const float (&bests)[kGroups], float best) {
    static_assert(kGroups == 16 * kGroupThreads, "sixteen groups per thread");
    float above = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 four = reinterpret_cast<const float4*>(bests)[i * kGroupThreads + threadIdx.x % kGroupThreads];
        above += one_if_above(four.x, best);
        above += one_if_above(four.y, best);
        above += one_if_above(four.z, best);
        above += one_if_above(four.w, best);
    }
#pragma unroll
    for (int offset = 1; offset < kGroupThreads; offset *= 2) above += __shfl_xor_sync(0xFFFFFFFFu, above, offset);
    return above;
}

// Sorts the survivors into the `count` largest, descending (kNoKey where there are fewer).
template <int kMost>
__device__ __forceinline__ void write_survivors(const SelectStorage<kMost>& storage, int count, uint64_t* out) {
    const int survivors = storage.survivor_count;
    for (int i = threadIdx.x; i < survivors; i += kChunkThreads) {
        const uint64_t key = storage.survivors[i];
        int position = 0;
        for (int j = 0; j < survivors; ++j) position += storage.survivors[j] > key;
        if (position < count) out[position] = key;
    }
    if (threadIdx.x < count && int(threadIdx.x) >= survivors) out[threadIdx.x] = kNoKey;
}

// Writes the `count` largest of the block's keys to `out`; key_of(slot) gives the calling thread's kSlots keys. All 256
// threads call it.
template <int kThreads, int kSlots, int kMost, typename KeyOf>
__device__ void select_keys(KeyOf&& key_of, int count, SelectStorage<kMost>& storage, uint64_t* out) {
    static_assert(kThreads * kSlots <= kKeyGroupThreads * kValuesPerThread, "room for the survivors of a group");
    static_assert(kThreads >= kKeyGroupThreads, "room for the groups");
    uint64_t best = kNoKey;
    constexpr int kUnrolled = kSlots <= 8 ? kSlots : 4;
#pragma unroll kUnrolled
    for (int slot = 0; slot < kSlots; ++slot) best = max(best, key_of(slot));
    const uint64_t thread_best = best;
#pragma unroll
    for (int offset = 1; offset < kThreads; offset *= 2) best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, offset));
    __syncthreads();
    if (threadIdx.x % kThreads == 0) storage.group_best[threadIdx.x / kThreads] = best;
    if (threadIdx.x == 0) {
        storage.survivor_count = 0;
        storage.threshold = kNoKey + 1;
    }
    __syncthreads();
    // Keys are unique: one group is at this rank, or fewer groups have keys and all of them are kept.
    if (groups_above<kThreads>(storage.group_best, best) == count - 1 && best != kNoKey) storage.threshold = best;
    __syncthreads();
    const uint64_t threshold = storage.threshold;
    if (thread_best >= threshold) {
#pragma unroll kUnrolled
        for (int slot = 0; slot < kSlots; ++slot) {
            const uint64_t key = key_of(slot);
            if (key >= threshold) storage.survivors[atomicAdd(&storage.survivor_count, 1)] = key;
        }
    }
    __syncthreads();
    write_survivors(storage, count, out);
}

// The rare way of select_chunk: the chunk is read again, key by key, which keeps its registers out of the common one.
template <typename T, typename Transform, int kMost>
__device__ __noinline__ void select_chunk_by_keys(LogitRow<T> row, int chunk, int chunks, Transform transform,
                                                  int count, SelectStorage<kMost>& storage, uint64_t* out) {
    select_keys<kKeyGroupThreads, kValuesPerThread>(
        [&](int slot) {
            const int vector = (slot / kVectorElements<T> * chunks + chunk) * kChunkThreads + int(threadIdx.x);
            const int column = row.first_column(vector) + slot % kVectorElements<T>;
            return column >= 0 && column < row.columns ? make_key(transform(row.at(column)), uint32_t(column)) : kNoKey;
        },
        count, storage, out);
}

// Extremes of one value per group. Every lane of a warp calls them.
__device__ __forceinline__ float largest_of(const float (&values)[kGroups]) {
    static_assert(kGroups == 64, "two groups per lane");
    const float own = fmaxf(values[threadIdx.x % 32], values[threadIdx.x % 32 + 32]);
    return ordered_value(__reduce_max_sync(0xFFFFFFFFu, ordered_bits(own)));
}
__device__ __forceinline__ float smallest_of(const float (&values)[kGroups]) {
    const float own = fminf(values[threadIdx.x % 32], values[threadIdx.x % 32 + 32]);
    return ordered_value(__reduce_min_sync(0xFFFFFFFFu, ordered_bits(own)));
}

// Which keys of a chunk a selection is about. kFinite leaves -infinity out, except that a chunk of nothing else gives
// its lowest id: rows under a grammar's mask are -infinity nearly everywhere, and sorting those ties by id is slow.
enum class Keys { kAll, kFinite };

// Writes the `count` largest keys of the chunk to `out` and says whether the chunk holds a NaN, which ranks as
// -infinity. All threads call it; `transform` is what was applied to the values. Unless there is a NaN, every group's
// largest value is left in storage.group_value.
template <Keys kWanted, typename T, typename Transform, int kMost>
__device__ bool select_chunk(const ChunkValues<T>& chunk, Transform transform, int count, SelectStorage<kMost>& storage,
                             uint64_t* out) {
    const float thread_largest = chunk.largest();
    float largest = thread_largest;
#pragma unroll
    for (int offset = 1; offset < kGroupThreads; offset *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
    if (threadIdx.x % kGroupThreads == 0) storage.group_value[threadIdx.x / kGroupThreads] = largest;
    if (threadIdx.x == 0) storage.survivor_count = 0;
    const bool has_nan = __syncthreads_or(isnan(thread_largest));
    bool sorted = false;
    if (!has_nan) {
        float threshold;
        if (count == 1) {
            threshold = largest_of(storage.group_value);
        } else {
            const bool leads = groups_above(storage.group_value, largest) < float(count);
            if (threadIdx.x % kGroupThreads == 0)
                storage.leading[threadIdx.x / kGroupThreads] = leads ? largest : INFINITY;
            __syncthreads();
            threshold = smallest_of(storage.leading);
        }
        if (kWanted == Keys::kFinite) threshold = fmaxf(threshold, -FLT_MAX);
        if (thread_largest >= threshold) {
            // Usually one slot of few threads: a bit for each keeps the warp together and the code short.
            uint32_t reaching = 0;
#pragma unroll
            for (int slot = 0; slot < kValuesPerThread; ++slot)
                reaching |= chunk.values[slot] >= threshold ? 1u << slot : 0;
            const bool only = (reaching & (reaching - 1)) == 0;
            while (reaching != 0) {
                const int slot = __ffs(int(reaching)) - 1, column = chunk.column(slot);
                reaching &= reaching - 1;
                if (column < 0 || column >= chunk.row.columns) continue;
                const int place = take_place(&storage.survivor_count);
                if (place >= kMostSorted) break;
                storage.survivors[place] = make_key(only ? thread_largest : chunk.at(slot), uint32_t(column));
            }
        }
        __syncthreads();
        sorted = storage.survivor_count <= kMostSorted;
        if (sorted) write_survivors(storage, count, out);
        if (kWanted == Keys::kFinite && storage.survivor_count == 0 && threadIdx.x == 0) {
            const int column = max(chunk.row.first_column(chunk.vector_index(0)), 0);
            if (column < chunk.row.columns) out[0] = make_key(-INFINITY, uint32_t(column));
        }
    }
    if (!sorted) select_chunk_by_keys(chunk.row, chunk.chunk, chunk.chunks, transform, count, storage, out);
    return has_nan;
}

}  // namespace dflash
