// Which keys a tile of query rows sees, and how the tile's work divides among the splits. Everything here is read
// on the device, so one captured launch serves every context length.
#pragma once

#include <stdint.h>

#include "mma.cuh"
#include "tensor_copy.cuh"

namespace dflash {

// Fewer tiles than this per split cost more in start-up than they win in parallelism.
constexpr int kMinTilesPerSplit = 2;

struct AttentionArgs {
    int index_bytes, group, kv_heads, head_dim;
    int page_tokens, page_shift;  // page_shift: log2(page_tokens), or -1
    uint32_t page_inverse;        // 2^32 / (page_tokens / 16), rounded up, where there is no page_shift
    int pages_per_request;
    int block_size;  // 0: paged mode
    int window_left, window_right;
    int splits, row_tiles, stages;
    int settled;          // lengths, page table and cached context are older than the launches this one may overlap
    int join_in_cluster;  // the splits of a row tile are one thread block cluster and join before they end
    float scale_log2;     // scale * log2(e), or softcap * log2(e) when soft-capped
    float softcap_scale;  // scale / softcap, or 0
    float k_inverse_scale, v_inverse_scale, v_scale;
    const void *q, *k_cache, *v_cache, *k_block, *v_block;
    const float* sinks;
    const void *page_table, *context_lengths, *query_starts, *block_lengths;
    void* out;
    int64_t q_stride, out_stride, block_stride, page_table_stride;
    float* partial_out;     // [B, kv_heads, row_tiles, splits, rows, head_dim], not normalised
    float2* partial_stats;  // same without head_dim: (reference exponent, sum)
    // For the copy engine: the caches as [token rows, kv_heads, head_dim], boxes of 2^copy_shift x 1 x 64.
    TensorMap k_map, v_map;
    int copy_shift;
    uint32_t group_inverse;  // 2^32 / group, rounded up

    // An index of an index tensor. Numbers of tokens, requests and pages fit in 32 bits: of wider ones the lower half.
    __device__ __forceinline__ int index(const void* indices, int64_t i) const {
        return *reinterpret_cast<const int*>(static_cast<const char*>(indices) + i * index_bytes);
    }

    // Which page of its request a key is in.
    __device__ __forceinline__ int page_of(int key) const {
        return page_shift >= 0 ? key >> page_shift : static_cast<int>(__umulhi(key / 16u, page_inverse));
    }

    // Where the page table says what page a request has at `entry`: the lower half, where indices are wider than an
    // int.
    __device__ __forceinline__ const void* page_address(int request, int entry) const {
        return static_cast<const char*>(page_table) + (request * page_table_stride + entry) * index_bytes;
    }
    __device__ __forceinline__ int page(int request, int entry) const {
        return *static_cast<const int*>(page_address(request, entry));
    }

    // Which query of a request, and which head, one of its rows is. Rows are fewer than 2^32 / group.
    __device__ __forceinline__ int query_of(int row) const {
        return group == 1 ? row : static_cast<int>(__umulhi(row, group_inverse));
    }
    __device__ __forceinline__ int head_of(int kv_head, int row) const {
        return kv_head * group + row - query_of(row) * group;
    }
};

// Returns when the launch before this one is complete, if this one was allowed to overlap it: nothing that it wrote may
// be read earlier.
__device__ __forceinline__ void wait_for_launch_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Brings the request's lengths and page table into the L2, where later writes are seen, while the launch in front may
// still write them; then waits for its end.
__device__ __forceinline__ void begin_attention(const AttentionArgs& args, int request) {
    const int64_t row_bytes = static_cast<int64_t>(args.pages_per_request) * args.index_bytes;
    const char* row = static_cast<const char*>(args.page_table) + request * args.page_table_stride * args.index_bytes;
    const int64_t offset = static_cast<int64_t>(threadIdx.x) * 128;
    if (threadIdx.x == 0) {
        prefetch(static_cast<const char*>(args.context_lengths) + request * args.index_bytes);
        const void* lengths = args.block_size > 0 ? args.block_lengths : args.query_starts;
        if (lengths) prefetch(static_cast<const char*>(lengths) + request * args.index_bytes);
    }
    if (offset < row_bytes) prefetch(row + offset);
    wait_for_launch_in_front();
}

// The queries and keys of one (request, row tile). Rows of a tile are (query, head of the group), head fastest.
struct Extent {
    int64_t query_begin;      // first packed query of the request
    int context;              // cached positions before the pass
    int cached;               // keys below this come from the cache, the others from the block
    int total;                // keys at or above this do not exist
    int first_row;            // of the tile, counted inside the request
    int rows;                 // of the tile that exist; <= 0: nothing to do
    int low, high;            // keys that some row of the tile sees
    int full_low, full_high;  // keys that every row of the tile sees

    __device__ __forceinline__ Extent(const AttentionArgs& args, int request, int row_tile, int tile_rows) {
        context = args.index(args.context_lengths, request);
        int queries;
        if (args.block_size > 0) {
            queries = args.block_size;
            query_begin = static_cast<int64_t>(request) * queries;
            cached = context;
            total = context + (args.block_lengths ? args.index(args.block_lengths, request) : queries);
        } else {
            const int begin = args.index(args.query_starts, request);
            query_begin = begin;
            queries = args.index(args.query_starts, request + 1) - begin;
            cached = total = context + queries;
        }
        first_row = row_tile * tile_rows;
        rows = min(tile_rows, queries * args.group - first_row);
        const int first_query = args.query_of(first_row), last_query = args.query_of(first_row + max(rows, 1) - 1);
        low = key_low(args, first_query);
        high = key_high(args, last_query);
        full_low = key_low(args, last_query);
        full_high = key_high(args, first_query);
    }

    __device__ __forceinline__ int key_low(const AttentionArgs& args, int query) const {
        return args.window_left < 0 ? 0 : max(0, context + query - args.window_left);
    }

    __device__ __forceinline__ int key_high(const AttentionArgs& args, int query) const {
        // The window is compared before it is added: "no limit but large" must not overflow.
        const int position = context + query;
        return args.window_right < 0 || args.window_right >= total - position ? total
                                                                              : position + args.window_right + 1;
    }
};

// Where the partial rows of one split begin, in args.partial_out and args.partial_stats.
__device__ __forceinline__ int64_t first_partial_row(const AttentionArgs& args, int request, int kv_head, int row_tile,
                                                     int split, int tile_rows) {
    return (((static_cast<int64_t>(request) * args.kv_heads + kv_head) * args.row_tiles + row_tile) * args.splits +
            split) *
           tile_rows;
}

// The key tiles of a row tile.
struct TileRange {
    int begin, count;

    __device__ __forceinline__ TileRange(const Extent& extent, int tile_keys) {
        begin = extent.low / tile_keys;
        count = extent.high > extent.low ? (extent.high + tile_keys - 1) / tile_keys - begin : 0;
    }

    // Splits that have work; at least 1, split 0 always writes.
    __device__ __forceinline__ int active(int splits) const { return max(1, min(splits, count / kMinTilesPerSplit)); }
};

// The key tiles of one split.
struct SplitRange {
    int begin, end;  // tiles
    int active;      // splits that have work

    __device__ __forceinline__ SplitRange(const Extent& extent, int splits, int split, int tile_keys) {
        const TileRange all(extent, tile_keys);
        active = all.active(splits);
        // Shares differ by one tile at most.
        begin = all.begin + min(split, active) * all.count / active;
        end = all.begin + min(split + 1, active) * all.count / active;
    }
};

}  // namespace dflash
