// Accept, second launch: where does each row's filtered distribution end?
//
// The chunk lists hold every key down to the largest of the lists' last keys: usually a few hundred tokens, enough for
// the filters people set. Where they are not (a high temperature with only top-p, a huge top-k) the row is read again
// and the end found by counting: first over bins of the exponent, then digit by digit inside the bin.
#include "accept_state.cuh"
#include "block_scan.cuh"
#include "launch.h"
#include "overlapped_launch.cuh"

namespace dflash {
namespace {

constexpr int kFilterThreads = 512;
constexpr int kMaxListed = kMaxChunks * kListKeys;
constexpr int kShallow = 12;  // keys of each chunk that are tried first
constexpr int kListedPerThread = (kMaxListed + kFilterThreads - 1) / kFilterThreads;
constexpr int kKeySharers = 4;
constexpr int kBins = 2048;
constexpr int kBinsPerThread = kBins / kFilterThreads;
constexpr int kMaxCollected = 2048;
// Masses are summed as integers, whose sum does not depend on the order of atomics; 2^-40 of the largest weight is far
// below float32 noise and V * 2^40 fits 64 bits.
constexpr float kMassUnit = 0x1p40f;
constexpr float kBinsPerNat = 100.0f;
// Narrow keys: 32 value bits over 22 inverted id bits, five digits of 11 bits.
constexpr int kIdBits = 22;
constexpr uint32_t kIdMask = (1u << kIdBits) - 1;
constexpr int kDigitBits = 11;
constexpr int kTopShift = 44;

__device__ __forceinline__ uint64_t narrow_key(float value, int id) {
    return (uint64_t(ordered_bits(value)) << kIdBits) | (kIdMask - uint32_t(id));
}

struct ListedStorage {
    uint64_t lists[kMaxListed];  // of the chunks, one after the other
    alignas(16) uint64_t keys[kMaxListed + 2];
    uint64_t sorted[kMaxListed];
    float weights[kMaxListed];
};

struct CountingStorage {
    uint64_t masses[kBins];
    uint32_t counts[kBins];
    uint64_t collected[kMaxCollected];
};

union FilterStorage {
    ListedStorage listed;
    CountingStorage counting;
};

struct ScanStorage {
    float floats[kFilterThreads / 32];
    uint64_t words[kFilterThreads / 32];
    int counts[kFilterThreads / 32];
    int first;
    float picked;
    uint64_t mass_before, count_before, bin_count, sum;
    int collected_count;
};

// Walks the elements of a row; f(value, id) runs once per valid column.
template <typename T, typename Function>
__device__ void for_each_token(const LogitRow<T>& row, Function&& f) {
    constexpr int kBatch = 16 / kVectorElements<T>;  // loads in flight per thread
    const int vectors = row.vectors();
    bool ignored = false;
    for (int start = threadIdx.x; start < vectors; start += kBatch * kFilterThreads) {
        float values[kBatch * kVectorElements<T>];
        row.template load<kBatch>(start, kFilterThreads, values, ignored);
#pragma unroll
        for (int batch = 0; batch < kBatch; ++batch) {
            const int first = row.first_column(start + batch * kFilterThreads);
#pragma unroll
            for (int i = 0; i < kVectorElements<T>; ++i)
                if (first + i >= 0 && first + i < row.columns) f(values[batch * kVectorElements<T> + i], first + i);
        }
    }
}

struct Cut {
    uint64_t threshold;  // narrow key of the last kept token, 0 when all are kept
    uint64_t mass;       // of the kept tokens
};

// The cut of one filter by counting. By count: the `wanted` largest. By mass: every token with less than `wanted` mass
// before it. One block; all threads call it.
template <typename T>
__device__ __noinline__ Cut count_cut(const LogitRow<T>& row, float largest, float scale, bool by_mass, uint64_t wanted,
                                      CountingStorage& store, ScanStorage& scan) {
    const float bin_scale = scale * (0.693147181f * kBinsPerNat);
    auto weight_of = [&](float value) { return uint64_t(fast_exp2((value - largest) * scale) * kMassUnit); };
    auto bin_of = [&](float value) { return int(fminf((largest - value) * bin_scale, float(kBins - 1))); };

    uint64_t mass_before = 0, count_before = 0, prefix = 0;
    int bin = 0;
    bool collected = false;
    for (int level = -1; level < 5; ++level) {
        const int shift = kTopShift - kDigitBits * level;
        for (int i = threadIdx.x; i < kBins; i += kFilterThreads) {
            store.masses[i] = 0;
            store.counts[i] = 0;
        }
        __syncthreads();
        uint64_t tail_mass = 0;
        uint32_t tail_count = 0;
        auto add = [&](float value, uint64_t key) {
            int index;
            if (level < 0) {
                index = bin_of(value);
                if (index == kBins - 1) {  // the far tail is most of a row: keep it off the atomics
                    tail_mass += weight_of(value);
                    ++tail_count;
                    return;
                }
            } else {
                if (level > 0 && (key >> (shift + kDigitBits)) != prefix) return;
                index = kBins - 1 - int((key >> shift) & (kBins - 1));
            }
            atomicAdd(reinterpret_cast<unsigned long long*>(&store.masses[index]), weight_of(value));
            atomicAdd(&store.counts[index], 1u);
        };
        if (collected) {
            for (int i = threadIdx.x; i < scan.collected_count; i += kFilterThreads) {
                const uint64_t key = store.collected[i];
                add(ordered_value(uint32_t(key >> kIdBits)), key);
            }
        } else {
            for_each_token(row, [&](float value, int id) {
                if (level < 0 || bin_of(value) == bin) add(value, narrow_key(value, id));
            });
        }
        if (tail_count != 0) {
            atomicAdd(reinterpret_cast<unsigned long long*>(&store.masses[kBins - 1]), tail_mass);
            atomicAdd(&store.counts[kBins - 1], tail_count);
        }
        __syncthreads();

        // Where does the running sum reach `wanted`?
        uint64_t masses = 0, counts = 0;
        const int mine = threadIdx.x * kBinsPerThread;
        for (int i = 0; i < kBinsPerThread; ++i) {
            masses += store.masses[mine + i];
            counts += store.counts[mine + i];
        }
        uint64_t level_mass, level_count;
        uint64_t running_mass = mass_before + exclusive_scan<kFilterThreads>(masses, scan.words, level_mass);
        uint64_t running_count = count_before + exclusive_scan<kFilterThreads>(counts, scan.words, level_count);
        int proposal = kBins;
        for (int i = 0; i < kBinsPerThread && proposal == kBins; ++i) {
            const uint64_t reached =
                by_mass ? running_mass + store.masses[mine + i] : running_count + store.counts[mine + i];
            if (store.counts[mine + i] != 0 && reached >= wanted) {
                proposal = mine + i;
            } else {
                running_mass += store.masses[mine + i];
                running_count += store.counts[mine + i];
            }
        }
        const int chosen = block_min(proposal, kBins, &scan.first);
        if (chosen == kBins) return Cut{0, mass_before + level_mass};  // never reached: all are kept
        if (chosen == proposal) {
            scan.mass_before = running_mass;
            scan.count_before = running_count;
            scan.bin_count = store.counts[chosen];
            scan.sum = store.masses[chosen];
        }
        __syncthreads();
        mass_before = scan.mass_before;
        count_before = scan.count_before;
        if (level < 0) {
            bin = chosen;
            if (scan.bin_count <= kMaxCollected) {
                if (threadIdx.x == 0) scan.collected_count = 0;
                __syncthreads();
                for_each_token(row, [&](float value, int id) {
                    if (bin_of(value) == bin)
                        store.collected[atomicAdd(&scan.collected_count, 1)] = narrow_key(value, id);
                });
                collected = true;
                __syncthreads();
            }
        } else {
            prefix = (prefix << kDigitBits) | uint64_t(kBins - 1 - chosen);
            // Keys are unique, so the last digit always ends here. An only key of its value ends earlier, but not
            // before all digits of the value are known: tokens outside the bin of the first level share the leading
            // ones.
            if (level >= 2 && scan.bin_count == 1) return Cut{prefix << shift, mass_before + scan.sum};
        }
    }
    return Cut{prefix, mass_before};
}

// The whole filter by counting, for rows whose kept tokens the lists do not hold.
template <typename T>
__device__ __noinline__ void filter_by_counting(const LogitRow<T>& row, float scale, uint64_t top_k, float top_p,
                                                RowDistribution& result, CountingStorage& store, ScanStorage& scan) {
    auto weight_of = [&](float value) { return uint64_t(fast_exp2((value - result.largest) * scale) * kMassUnit); };
    uint64_t threshold = 0;
    uint64_t mass = uint64_t(result.mass * kMassUnit);
    if (top_k > 0) {
        const Cut cut = count_cut(row, result.largest, scale, false, top_k, store, scan);
        threshold = cut.threshold;
        mass = cut.mass;
        __syncthreads();
    }
    if (top_p < 1.0f) {
        const uint64_t wanted = max(uint64_t(double(mass) * double(top_p)), uint64_t(1));
        const Cut cut = count_cut(row, result.largest, scale, true, wanted, store, scan);
        if (cut.threshold > threshold) {
            threshold = cut.threshold;
            mass = cut.mass;
        }
    }
    if (threshold != 0) {
        result.threshold_value = ordered_value(uint32_t(threshold >> kIdBits));
        result.threshold_token = kIdMask - (uint32_t(threshold) & kIdMask);
        result.mass = float(mass) / kMassUnit;
        // The last kept token outweighs min-p: nothing more to cut, and the mass is known.
        if (fast_exp2((result.threshold_value - result.largest) * scale) >= result.least_weight) return;
    }
    __syncthreads();
    if (threadIdx.x == 0) scan.sum = 0;
    __syncthreads();
    uint64_t kept = 0;
    for_each_token(row, [&](float value, int id) {
        if (token_weight(result, value, id, scale) > 0.0f) kept += weight_of(value);
    });
    if (kept != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&scan.sum), kept);
    __syncthreads();
    result.mass = float(scan.sum) / kMassUnit;
}

struct Filters {
    int top_k;  // 0 = off
    float top_p;
    int valid_columns;
};

// The filter by the first `depth` keys of each chunk's list; false when the kept tokens reach beyond them. On entry
// result holds the whole row's mass and the min-p bound.
__device__ bool filter_listed(int chunks, int depth, float scale, const Filters& filters, RowDistribution& result,
                              ListedStorage& listed, ScanStorage& scan) {
    // Down to here the lists are complete: a chunk's keys not taken are below the last one that is.
    uint64_t complete_from = kNoKey + 1;
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32)
        complete_from = max(complete_from, listed.lists[chunk * kListKeys + depth - 1]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        complete_from = max(complete_from, __shfl_xor_sync(0xFFFFFFFFu, complete_from, offset));
    const int total = chunks * depth;
    uint64_t found[kListedPerThread];
    int own_count = 0, complete;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        const int entry = i * kFilterThreads + threadIdx.x;
        found[i] = entry < total ? listed.lists[entry / depth * kListKeys + entry % depth] : kNoKey;
        if (found[i] < complete_from) found[i] = kNoKey;
        own_count += found[i] != kNoKey;
    }
    int place = exclusive_scan<kFilterThreads>(own_count, scan.counts, complete);
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i)
        if (found[i] != kNoKey) listed.keys[place++] = found[i];
    if (threadIdx.x == 0) listed.keys[complete] = kNoKey;  // pairs are read below
    __syncthreads();
    // Neighbouring threads share the counting for one key.
    for (int first = 0; first < complete; first += kFilterThreads / kKeySharers) {
        const int place = first + int(threadIdx.x) / kKeySharers, part = threadIdx.x % kKeySharers;
        const uint64_t key = listed.keys[min(place, complete)];
        int rank = 0;
#pragma unroll 4
        for (int i = 2 * part; i < complete; i += 2 * kKeySharers) {
            const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(&listed.keys[i]);
            rank += (pair.x > key) + (pair.y > key);
        }
#pragma unroll
        for (int offset = 1; offset < kKeySharers; offset *= 2) rank += __shfl_xor_sync(0xFFFFFFFFu, rank, offset);
        if (part == 0 && place < complete) {
            listed.sorted[rank] = key;
            listed.weights[rank] = fast_exp2((key_value(key) - result.largest) * scale);
        }
    }
    __syncthreads();
    // Beyond a last key of -infinity nothing has a weight.
    const bool all_listed =
        complete == filters.valid_columns || complete_from == kNoKey + 1 || key_value(complete_from) == -INFINITY;
    const bool k_listed = filters.top_k > 0 && filters.top_k <= complete;
    if (filters.top_k > 0 && !k_listed && !all_listed) return false;

    // Running masses of the sorted tokens; each thread owns a few neighbours.
    float mine[kListedPerThread], own = 0.0f, listed_mass;
    const int start = threadIdx.x * kListedPerThread;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        mine[i] = start + i < complete ? listed.weights[start + i] : 0.0f;
        own += mine[i];
    }
    const float before = exclusive_scan<kFilterThreads>(own, scan.floats, listed_mass);
    auto mass_through = [&](int index) {
        __syncthreads();
        float running = before;
#pragma unroll
        for (int i = 0; i < kListedPerThread; ++i) {
            running += mine[i];
            if (start + i == index) scan.picked = running;
        }
        __syncthreads();
        return scan.picked;
    };
    // What top-p is a share of: the mass that top-k left.
    const int limit = k_listed ? filters.top_k : complete;
    const float share_of = k_listed || all_listed ? mass_through(limit - 1) : result.mass;
    int cut = limit;
    float running = before;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        const bool outside =
            (filters.top_p < 1.0f && running >= filters.top_p * share_of) || mine[i] < result.least_weight;
        // The best token stays whatever the parameters say.
        if (start + i > 0 && start + i < limit && outside) cut = min(cut, start + i);
        running += mine[i];
    }
    cut = block_min(cut, limit, &scan.first);
    if (cut == limit && !k_listed && !all_listed) return false;
    result.threshold_value = key_value(listed.sorted[cut - 1]);
    result.threshold_token = key_id(listed.sorted[cut - 1]);
    result.kept_in_lists = 1;
    result.least_weight = 0.0f;  // already part of the cut
    result.mass = mass_through(cut - 1);
    return true;
}

template <typename T>
__global__ void __launch_bounds__(kFilterThreads, 2)
    filter_rows(dflash_accept_params p, int chunks, AcceptWorkspace workspace) {
    wait_for_previous_launch();
    let_next_launch_start();
    __shared__ FilterStorage storage;
    __shared__ ScanStorage scan;
    __shared__ float masses[kMaxChunks];
    const int request = blockIdx.x / p.block_size, row = blockIdx.x % p.block_size;

    // Everything is asked for before the first of it is looked at. Lists of requests without filters hold one key.
    const int total = chunks * kListKeys;
    uint64_t keys[kListedPerThread];
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        const int entry = i * kFilterThreads + threadIdx.x;
        keys[i] = entry < total ? workspace.lists[int64_t(blockIdx.x) * total + entry] : kNoKey;
    }
    const float own_mass =
        int(threadIdx.x) < chunks ? workspace.masses[int64_t(blockIdx.x) * chunks + threadIdx.x] : 0.0f;
    const float temperature = p.temperatures[request];
    const int64_t asked_top_k = p.top_k == nullptr ? 0 : p.top_k[request];
    const float top_p = p.top_p == nullptr ? 1.0f : p.top_p[request];
    const float min_p = p.min_p == nullptr ? 0.0f : fmaxf(p.min_p[request], 0.0f);
    if (!row_exists(p, request, row)) return;
#pragma unroll
    for (int i = 0; i < kListedPerThread; ++i) {
        const int entry = i * kFilterThreads + threadIdx.x;
        if (entry < kMaxListed) storage.listed.lists[entry] = keys[i];
    }
    if (int(threadIdx.x) < kMaxChunks) masses[threadIdx.x] = own_mass;
    const bool has_nan = __syncthreads_or(isnan(own_mass));

    // The best token, and the mass of the whole row relative to it: every warp computes the same.
    const uint64_t* lists = storage.listed.lists;
    uint64_t best = kNoKey;
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) best = max(best, lists[chunk * kListKeys]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, offset));
    RowDistribution result{};
    result.best_token = int(key_id(best));
    result.largest = usable_largest(key_value(best));
    result.threshold_value = -INFINITY;
    result.threshold_token = 0xFFFFFFFFu;
    result.faulty = has_nan;
    if (temperature <= 0.0f || result.faulty) {
        if (threadIdx.x == 0) workspace.rows[blockIdx.x] = result;
        return;
    }
    const float scale = exponent_scale(temperature);
    float mass = 0.0f;
    for (int chunk = threadIdx.x % 32; chunk < chunks; chunk += 32) {
        const uint64_t chunk_best = lists[chunk * kListKeys];
        const float chunk_largest = chunk_best == kNoKey ? -INFINITY : key_value(chunk_best);
        if (chunk_largest > -INFINITY) mass += masses[chunk] * fast_exp2((chunk_largest - result.largest) * scale);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) mass += __shfl_xor_sync(0xFFFFFFFFu, mass, offset);
    result.mass = mass;
    const int top_k = asked_top_k > 0 && asked_top_k < p.valid_columns ? int(asked_top_k) : 0;
    if (top_k == 0 && !(top_p < 1.0f) && min_p == 0.0f) {
        if (threadIdx.x == 0) workspace.rows[blockIdx.x] = result;
        return;
    }
    result.least_weight = min_p;
    const Filters filters{top_k, top_p, p.valid_columns};
    // A few keys of each chunk end most filters; sorting them all takes several times as long.
    if (!filter_listed(chunks, kShallow, scale, filters, result, storage.listed, scan) &&
        !filter_listed(chunks, kListKeys, scale, filters, result, storage.listed, scan))
        filter_by_counting(logit_row<T>(p, request, row), scale, uint64_t(top_k), top_p, result, storage.counting,
                           scan);
    if (threadIdx.x == 0) workspace.rows[blockIdx.x] = result;
}

}  // namespace

template <typename T>
void launch_row_filter(const dflash_accept_params& p, int chunks, AcceptWorkspace workspace, cudaStream_t stream) {
    launch_overlapped(filter_rows<T>, p.batch * p.block_size, kFilterThreads, 0, stream, p, chunks, workspace);
}

template void launch_row_filter<float>(const dflash_accept_params&, int, AcceptWorkspace, cudaStream_t);
template void launch_row_filter<__half>(const dflash_accept_params&, int, AcceptWorkspace, cudaStream_t);
template void launch_row_filter<__nv_bfloat16>(const dflash_accept_params&, int, AcceptWorkspace, cudaStream_t);

}  // namespace dflash
