// Moves key tiles and queries of one (request, KV head) from device memory to shared memory.
//
// A Shape says how a tile lies there: kKeys, kHeadDim, kChunks (16-byte pieces of a key), kThreads, kFloat8,
// kStageBytes, kValueOffset (from K to V inside a stage) and piece_offset(key, chunk).
#pragma once

#include "attention_extent.cuh"

namespace dflash {

__device__ __forceinline__ void wait_for_oldest_of(int stages) {
    switch (stages) {
        case 2:
            copy_async_wait<0>();
            break;
        case 3:
            copy_async_wait<1>();
            break;
        case 4:
            copy_async_wait<2>();
            break;
        default:
            copy_async_wait<3>();
            break;
    }
}

template <typename Shape>
struct KeyStream {
    // Sixteen keys share a page (page_tokens is a multiple of 16). One read of the page table by a warp serves
    // kBatch tiles: lane l holds the cache row of group l % kGroups of tile first + l / kGroups. The page numbers of
    // the next batch stay raw until then: arithmetic on them would wait for the load at once.
    static constexpr int kGroups = Shape::kKeys / 16;
    static constexpr int kBatch = 32 / kGroups;

    const AttentionArgs& args;
    const Extent& extent;
    const int request, kv_head, first_tile, end_tile;
    const uint32_t ring;
    int rows, next_pages;

    __device__ __forceinline__ KeyStream(const AttentionArgs& args, const Extent& extent, const SplitRange& range,
                                         int request, int kv_head, uint32_t ring)
        : args(args),
          extent(extent),
          request(request),
          kv_head(kv_head),
          first_tile(range.begin),
          end_tile(range.end),
          ring(ring) {
        const int pages = read_pages(first_tile);
        next_pages = read_pages(first_tile + kBatch);
        rows = cache_row(first_tile, pages);
    }

    __device__ __forceinline__ int group_key(int tile) const {
        return tile * Shape::kKeys + static_cast<int>(threadIdx.x % 32) * 16;
    }

    __device__ __forceinline__ int read_pages(int tile) const {
        const int key = group_key(tile);
        if (key + 16 <= extent.low || key >= extent.cached) return 0;
        return args.page(request, args.page_of(key));
    }

    __device__ __forceinline__ int cache_row(int tile, int page) const {
        const int key = group_key(tile);
        return page * args.page_tokens + key - args.page_of(key) * args.page_tokens;
    }

    // Starts the copy of `tile` into `stage`, if the split has such a tile. Tiles are asked for in order.
    __device__ __forceinline__ void issue(int tile, int stage) {
        if (tile >= end_tile) return;
        const int in_batch = (tile - first_tile) % kBatch;
        if (in_batch == 0 && tile != first_tile) {
            rows = cache_row(tile, next_pages);
            next_pages = read_pages(tile + kBatch);
        }
        const uint32_t k_stage = ring + stage * Shape::kStageBytes;
        const int key0 = tile * Shape::kKeys, group0 = in_batch * kGroups;
        const int64_t row_bytes = static_cast<int64_t>(args.kv_heads) * (Shape::kChunks * 16);
        const int64_t head_bytes = static_cast<int64_t>(kv_head) * (Shape::kChunks * 16);
        const char* k_cache = static_cast<const char*>(args.k_cache) + head_bytes;
        const char* v_cache = static_cast<const char*>(args.v_cache) + head_bytes;
        constexpr int kPieces = Shape::kKeys * Shape::kChunks;
        if (key0 >= extent.low && key0 + Shape::kKeys <= extent.cached) {
#pragma unroll
            for (int i = 0; i < (kPieces + Shape::kThreads - 1) / Shape::kThreads; ++i) {
                const int piece = threadIdx.x + i * Shape::kThreads;
                const int key = piece / Shape::kChunks, chunk = piece % Shape::kChunks;
                const int row = __shfl_sync(0xffffffffu, rows, group0 + key / 16) + key % 16;
                if (kPieces % Shape::kThreads != 0 && piece >= kPieces) break;
                const int64_t offset = row * row_bytes + chunk * 16;
                const uint32_t shared = k_stage + Shape::piece_offset(key, chunk);
                copy_async_16(shared, k_cache + offset);
                copy_async_16(shared + Shape::kValueOffset, v_cache + offset);
            }
        } else {
            issue_edge(k_stage, key0, group0, k_cache, v_cache, row_bytes);
        }
    }

    // A tile that holds keys outside the window, of the block, or past the end. Missing keys become zeros: their
    // probability is zero, and zero times whatever the cache held there (NaN after a poisoned start) must stay zero.
    __device__ __forceinline__ void issue_edge(uint32_t k_stage, int key0, int group0, const char* k_cache,
                                               const char* v_cache, int64_t row_bytes) const {
        constexpr int kPieces = Shape::kKeys * Shape::kChunks;
#pragma unroll 1
        for (int i = 0; i < (kPieces + Shape::kThreads - 1) / Shape::kThreads; ++i) {
            const int piece = threadIdx.x + i * Shape::kThreads;
            const int key = piece / Shape::kChunks, chunk = piece % Shape::kChunks;
            const int row = __shfl_sync(0xffffffffu, rows, group0 + key / 16) + key % 16;
            if (piece >= kPieces) continue;
            const int position = key0 + key;
            const uint32_t k_shared = k_stage + Shape::piece_offset(key, chunk);
            const uint32_t v_shared = k_shared + Shape::kValueOffset;
            if (position >= extent.cached && position < extent.total) {
                const int64_t element =
                    (static_cast<int64_t>(request) * args.block_size + position - extent.cached) * args.block_stride +
                    static_cast<int64_t>(kv_head) * Shape::kHeadDim;
                copy_block_piece(k_shared, args.k_block, element, chunk, args.k_inverse_scale);
                copy_block_piece(v_shared, args.v_block, element, chunk, args.v_inverse_scale);
            } else {
                const bool present = position >= extent.low && position < extent.cached;
                const int64_t offset = present ? row * row_bytes + chunk * 16 : 0;
                copy_async_16_or_zero(k_shared, k_cache + offset, present);
                copy_async_16_or_zero(v_shared, v_cache + offset, present);
            }
        }
    }

    static __device__ __forceinline__ void copy_block_piece(uint32_t shared, const void* block, int64_t element,
                                                            int chunk, float inverse_scale) {
        const char* source = static_cast<const char*>(block) + element * 2;
        if constexpr (Shape::kFloat8) {
            const uint4* values = reinterpret_cast<const uint4*>(source + chunk * 32);
            const uint2 low = pack_e4m3_eight<typename Shape::T>(values[0], inverse_scale);
            const uint2 high = pack_e4m3_eight<typename Shape::T>(values[1], inverse_scale);
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(low.x), "r"(low.y), "r"(high.x),
                         "r"(high.y)
                         : "memory");
        } else {
            copy_async_16(shared, source + chunk * 16);
        }
    }
};

// Query rows of the tile into shared memory, pitch kQueryPitch, rows that do not exist as zeros; asynchronous unless
// they must be converted. With float8 keys the dimensions of each 16-group are reordered to the order in which
// ldmatrix delivers byte elements (pairs 0,1 2,3 of lane t).
template <typename Shape>
__device__ __forceinline__ void stage_queries(const AttentionArgs& args, const Extent& extent, int kv_head, char* to) {
    constexpr int kPieces = Shape::kHeadDim / 8;
    const auto* q = static_cast<const typename Shape::T*>(args.q);
#pragma unroll
    for (int i = 0; i < (Shape::kRows * kPieces + Shape::kThreads - 1) / Shape::kThreads; ++i) {
        const int piece = threadIdx.x + i * Shape::kThreads;
        if (Shape::kRows * kPieces % Shape::kThreads != 0 && piece >= Shape::kRows * kPieces) break;
        const int row = piece / kPieces, column = piece % kPieces;
        const bool present = row < extent.rows;
        const int request_row = extent.first_row + (present ? row : 0);
        const int query = args.query_of(request_row), head = args.head_of(kv_head, request_row);
        const auto* source = q + (extent.query_begin + query) * args.q_stride + head * Shape::kHeadDim + column * 8;
        char* target = to + row * Shape::kQueryPitch;
        if constexpr (Shape::kFloat8) {
            const uint4 values = present ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
            auto as_half = [](uint32_t bits) {
                const float2 pair = unpack_pair<typename Shape::T>(bits);
                return pack_pair<__half>(fminf(fmaxf(pair.x, -65504.f), 65504.f),
                                         fminf(fmaxf(pair.y, -65504.f), 65504.f));
            };
            auto* words = reinterpret_cast<uint32_t*>(target + column / 2 * 32) + column % 2 * 2;
            words[0] = as_half(values.x);
            words[4] = as_half(values.y);
            words[1] = as_half(values.z);
            words[5] = as_half(values.w);
        } else {
            copy_async_16_or_zero(shared_address(target) + column * 16, source, present);
        }
    }
}

// Waits for the copies of stage_queries, the oldest group, while those of `newer` = stages - 1 tiles stay in flight.
__device__ __forceinline__ void wait_for_queries(int newer) { wait_for_oldest_of(newer + 2); }

}  // namespace dflash
