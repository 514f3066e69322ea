// x [M, K] times a weight [N, K] for a few rows M: the weight goes through shared memory once, x stays in registers.
//
// Weight rows are the 16-row operand of the matrix instruction, so that eight tokens cost one. Each warp of a cluster
// owns a range of K for the whole launch: its part of x is loaded once, into registers, and a weight tile meets it
// there. What is left per tile is a sum over the warps of the cluster, in a fixed order. The warps take turns with it,
// so that the others go on, and it stays tiles behind, so that nobody waits for a message.
//
// A float8 weight becomes halves in registers, exactly, and meets halves (skinny_tokens.cuh): the products are those of
// a float32 weight. Hopper's float8 form of the same instruction is that conversion of both sides too.
#pragma once

#include "cluster_messages.cuh"
#include "overlapped_launch.cuh"
#include "skinny_tokens.cuh"
#include "weight_stream.cuh"

namespace dflash {

constexpr int kMaxCluster = 8;
constexpr int kBehind = 1;  // tiles between the sum over a block's warps and the sum over the cluster

struct SkinnyArgs {
    const void* x;
    const void* bias;
    const float* scales;  // of the rows of a float8 weight
    void* out;
    int64_t x_stride, out_stride;
    int tokens, columns, depth;
    int blocks;  // of K, rounded up
    int tiles;   // of 16 weight rows
    int stages;
    bool start_next_at_once, gated;
};

template <typename T_, bool kFloat8_, int kTokenTiles_, int kBlocks_>
struct SkinnyShape {
    using T = T_;
    static constexpr bool kFloat8 = kFloat8_;  // the weight, else of type T
    static constexpr int kTileDepth = kTileRowBytes / (kFloat8 ? 1 : 2);
    static constexpr int kPieces = kTileDepth / 32;   // 16 bytes of x: a lane's of a block, per eight tokens
    static constexpr int kTokenTiles = kTokenTiles_;  // of eight tokens
    static constexpr int kBlocks = kBlocks_;          // of kTileDepth columns of K per warp, at most
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kSums = kTokenTiles * 8 * kTileRows;
    static constexpr int kBuffers = kTokenTiles <= 2 ? 3 : 2;  // of the warps' sums
    static constexpr int kSlots = 2;                           // of the cluster's sums
    static constexpr int kAlignment = 1024;                    // of the swizzle
    static constexpr int kBarrierBytes = (2 * kBuffers + (1 + kMaxCluster) * kSlots) * 8;

    static constexpr int fixed_bytes(int cluster) {
        return kAlignment + (kBuffers * kWarps + kSlots * cluster) * kSums * 4 + kBarrierBytes;
    }
    static constexpr int bytes_per_stage() { return kWarps * (kTileBytes + 8); }
};

// Sums travel from the warps of a block to the warp that adds them, and from there to the block of the cluster that
// finishes the tile. All sums of one tile are [kSums] floats: sum j is element j / 32 of lane j % 32's accumulators.
template <typename Shape>
struct SumBuffers {
    static constexpr int kBytes = Shape::kSums * 4;
    uint32_t parts, received;  // [kBuffers][kWarps] of this block, [kSlots][cluster] of the cluster
    uint32_t barriers;
    int cluster, rank;

    __device__ __forceinline__ uint32_t part(int buffer, int warp) const {
        return parts + (buffer * Shape::kWarps + warp) * kBytes;
    }
    __device__ __forceinline__ uint32_t from_block(int slot, int sender) const {
        return received + (slot * cluster + sender) * kBytes;
    }
    __device__ __forceinline__ uint32_t full(int buffer) const { return barriers + buffer * 8; }
    __device__ __forceinline__ uint32_t empty(int buffer) const { return barriers + (Shape::kBuffers + buffer) * 8; }
    __device__ __forceinline__ uint32_t arrived(int slot) const { return barriers + (2 * Shape::kBuffers + slot) * 8; }
    // That block `owner` of the cluster has read its slot.
    __device__ __forceinline__ uint32_t read(int owner, int slot) const {
        return barriers + (2 * Shape::kBuffers + (1 + owner) * Shape::kSlots + slot) * 8;
    }

    __device__ __forceinline__ void start() const {
        for (int i = 0; i < Shape::kBarrierBytes / 8; ++i)
            start_barrier(barriers + i * 8, i < Shape::kBuffers ? Shape::kWarps : 1);
        publish_barriers();
    }
};

template <typename T>
__device__ __forceinline__ float rounded(float value) {
    return unpack_pair<T>(pack_pair<T>(value, 0.0f)).x;
}

// What the sums of this lane's weight row (see finish_tile) of a tile are multiplied with. Asked for before anything
// that is waited for.
template <typename Shape>
__device__ __forceinline__ float scale_of_row(const SkinnyArgs& args, int tile) {
    float scale = 1.0f;
    if constexpr (Shape::kFloat8) {
        const int lane = threadIdx.x % 32;
        const int column = args.gated ? tile * (kTileRows / 2) + lane % 8 : tile * kTileRows + lane % 8 + lane / 16 * 8;
        const float* at = args.scales + column + (args.gated && lane >= 16 ? args.columns : 0);
        if (column < args.columns) asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"(at));
    }
    return scale;
}

// The scales of this block's rows, on their way to the L2 while the first tiles are.
template <typename Shape>
__device__ __forceinline__ void fetch_scales(const SkinnyArgs& args, int first_tile, int end_tile) {
    if constexpr (Shape::kFloat8) {
        const int rows = args.gated ? kTileRows / 2 : kTileRows, end = min(end_tile * rows, args.columns);
        for (int row = first_tile * rows + threadIdx.x * 16; row < end; row += Shape::kThreads * 16) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(args.scales + row));
            if (args.gated) asm volatile("prefetch.global.L2 [%0];" ::"l"(args.scales + args.columns + row));
        }
    }
}

// Writes one tile of the result. Lane l has, of every eight tokens, those of parity l / 8 % 2, of weight row
// l % 8 + l / 16 * 8.
template <typename Shape>
__device__ __forceinline__ void finish_tile(const SkinnyArgs& args, int tile, float scale,
                                            float4 (&sums)[Shape::kTokenTiles]) {
    using T = typename Shape::T;
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    const int column = tile * (args.gated ? kTileRows / 2 : kTileRows) + row;
    const bool writes = column < args.columns && !(args.gated && lane >= 16);
    const float bias = args.bias && writes ? static_cast<float>(static_cast<const T*>(args.bias)[column]) : 0.0f;
    T* target = static_cast<T*>(args.out) + column;
#pragma unroll
    for (int tokens = 0; tokens < Shape::kTokenTiles; ++tokens) {
        const float values[4] = {sums[tokens].x, sums[tokens].y, sums[tokens].z, sums[tokens].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = tokens * 8 + i * 2 + lane / 8 % 2;
            float value = (Shape::kFloat8 ? values[i] * scale : values[i]) + bias;
            if (args.gated) {
                const float up = rounded<T>(__shfl_down_sync(0xffffffffu, value, 16)), gate = rounded<T>(value);
                value = up * (gate / (1.0f + __expf(-gate)));
            }
            if (writes && token < args.tokens) target[token * args.out_stride] = static_cast<T>(value);
        }
    }
}

// Adds what the warps of this block have of the tile with this index, and hands it to the block that finishes it.
template <typename Shape>
__device__ __forceinline__ void add_warps(const SkinnyArgs& args, const SumBuffers<Shape>& buffers, int first_tile,
                                          int index) {
    const int lane = threadIdx.x % 32, buffer = index % Shape::kBuffers;
    const float scale = buffers.cluster == 1 ? scale_of_row<Shape>(args, first_tile + index) : 1.0f;
    float4 sums[Shape::kTokenTiles];
    wait_for_phase(buffers.full(buffer), index / Shape::kBuffers % 2);
#pragma unroll
    for (int t = 0; t < Shape::kTokenTiles; ++t) {
        sums[t] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int warp = 0; warp < Shape::kWarps; ++warp)
            add(sums[t], load_shared_floats(buffers.part(buffer, warp) + (t * 32 + lane) * 16));
    }
    __syncwarp();
    if (lane == 0) arrive(buffers.empty(buffer));
    if (buffers.cluster == 1) {
        finish_tile<Shape>(args, first_tile + index, scale, sums);
        return;
    }
    const int owner = index % buffers.cluster, turn = index / buffers.cluster, slot = turn % Shape::kSlots;
    if (turn >= Shape::kSlots) wait_for_phase_in_cluster(buffers.read(owner, slot), (turn / Shape::kSlots - 1) % 2);
    const uint32_t target = in_block(buffers.from_block(slot, buffers.rank) + lane * 16, owner);
    const uint32_t barrier = in_block(buffers.arrived(slot), owner);
#pragma unroll
    for (int t = 0; t < Shape::kTokenTiles; ++t) send(target + t * 512, sums[t], barrier);
}

// Adds what the blocks of the cluster have of a tile that is this block's to finish. One warp does all of a slot.
template <typename Shape>
__device__ __forceinline__ void add_blocks(const SkinnyArgs& args, const SumBuffers<Shape>& buffers, int first_tile,
                                           int index) {
    const int lane = threadIdx.x % 32, turn = index / buffers.cluster, slot = turn % Shape::kSlots;
    const float scale = scale_of_row<Shape>(args, first_tile + index);
    if (lane == 0) expect_bytes(buffers.arrived(slot), buffers.cluster * SumBuffers<Shape>::kBytes);
    wait_for_phase_in_cluster(buffers.arrived(slot), turn / Shape::kSlots % 2);
    float4 sums[Shape::kTokenTiles];
#pragma unroll
    for (int t = 0; t < Shape::kTokenTiles; ++t) {
        sums[t] = make_float4(0, 0, 0, 0);
        for (int sender = 0; sender < buffers.cluster; ++sender)
            add(sums[t], load_shared_floats(buffers.from_block(slot, sender) + (t * 32 + lane) * 16));
    }
    __syncwarp();
    if (lane < buffers.cluster) arrive_in_block(in_block(buffers.read(buffers.rank, slot), lane));
    finish_tile<Shape>(args, first_tile + index, scale, sums);
}

// What `warp` adds after its part of the tile with this index: of earlier tiles, which the others have had time for.
template <typename Shape>
__device__ __forceinline__ void add_earlier(const SkinnyArgs& args, const SumBuffers<Shape>& buffers, int first_tile,
                                            int tiles, int index, int warp) {
    const int own = index - 1, joint = index - 1 - kBehind;
    if (own >= 0 && own < tiles && own % Shape::kWarps == warp) add_warps(args, buffers, first_tile, own);
    if (buffers.cluster > 1 && joint >= 0 && joint % buffers.cluster == buffers.rank &&
        joint / buffers.cluster % Shape::kSlots * (Shape::kWarps / 2) + 1 == warp)
        add_blocks(args, buffers, first_tile, joint);
}

// Adds a lane's 16 bytes of two weight rows, eight apart, times the tokens that x holds of the same columns. Two sums
// per result: a warp has little else to hide the latency of an instruction with.
template <typename Shape>
__device__ __forceinline__ void multiply(const uint4& low, const uint4& high,
                                         const uint4 (&x)[Shape::kTokenTiles][Shape::kPieces], int half,
                                         float (&even_total)[Shape::kTokenTiles][4],
                                         float (&total)[Shape::kTokenTiles][4]) {
    if constexpr (Shape::kFloat8) {
        const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int word = 0; word < 4; word += 2) {
            uint32_t even[4], odd[4];
            e4m3_four_to_halves(lows[word], even[0], even[2]);
            e4m3_four_to_halves(highs[word], even[1], even[3]);
            e4m3_four_to_halves(lows[word + 1], odd[0], odd[2]);
            e4m3_four_to_halves(highs[word + 1], odd[1], odd[3]);
#pragma unroll
            for (int t = 0; t < Shape::kTokenTiles; ++t) {
                const uint4& tokens = x[t][half * 2 + word / 2];
                mma_16x8x16<__half>(even_total[t], even, tokens.x, tokens.y);
                mma_16x8x16<__half>(total[t], odd, tokens.z, tokens.w);
            }
        }
    } else {
        const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int t = 0; t < Shape::kTokenTiles; ++t) {
            const uint4& tokens = x[t][half];
            mma_16x8x16<typename Shape::T>(even_total[t], even, tokens.x, tokens.y);
            mma_16x8x16<typename Shape::T>(total[t], odd, tokens.z, tokens.w);
        }
    }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    skinny_gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ SkinnyArgs args) {
#if __CUDA_ARCH__ >= 900
    using T = typename Shape::T;
    constexpr int kTiles = Shape::kTokenTiles, kBlocks = Shape::kBlocks, kTileDepth = Shape::kTileDepth;
    extern __shared__ char unaligned[];
    const uint32_t shared = (shared_address(unaligned) + Shape::kAlignment - 1) / Shape::kAlignment * Shape::kAlignment;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int cluster = cluster_blocks(), rank = cluster_rank();
    const int range = blockIdx.x / cluster, ranges = gridDim.x / cluster;
    const int first_tile = static_cast<int>(static_cast<int64_t>(args.tiles) * range / ranges);
    const int end_tile = static_cast<int>(static_cast<int64_t>(args.tiles) * (range + 1) / ranges);
    const int first_block = (rank * Shape::kWarps + warp) * kBlocks;
    const int blocks = max(0, min(kBlocks, args.blocks - first_block));
    const int ring_bytes = args.stages * kTileBytes;
    SumBuffers<Shape> buffers;
    buffers.cluster = cluster;
    buffers.rank = rank;
    buffers.parts = shared + Shape::kWarps * ring_bytes;
    buffers.received = buffers.parts + Shape::kBuffers * Shape::kWarps * Shape::kSums * 4;
    buffers.barriers = buffers.received + Shape::kSlots * cluster * Shape::kSums * 4;

    WeightStream<kTileDepth> stream;
    stream.map = &weight;
    stream.ring = shared + warp * ring_bytes;
    stream.barriers = buffers.barriers + Shape::kBarrierBytes + warp * args.stages * 8;
    stream.stages = args.stages;
    stream.first_depth = first_block * kTileDepth;
    stream.end_depth = stream.first_depth + blocks * kTileDepth;
    stream.rows_per_tile = args.gated ? kTileRows / 2 : kTileRows;
    stream.start(first_tile, end_tile - first_tile);
    fetch_scales<Shape>(args, first_tile, end_tile);
    if (threadIdx.x == 0) buffers.start();
    __syncthreads();
    if (cluster > 1) arrive_in_cluster();  // the others' sums may come from here on
    if (args.start_next_at_once || (blocks > 0 && stream.left == 0)) let_next_launch_start();
    wait_for_previous_launch();

    // Lane (g, t) holds token g of each eight; of every block's columns it owns a quarter, from the t-th on. Which ones
    // does not matter to a sum, as long as the weight is read the same way.
    const int group = lane / 4, quarter = lane % 4;
    uint4 x[kBlocks][kTiles][Shape::kPieces];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < Shape::kPieces; ++i) {
                const int column = (first_block + b) * kTileDepth + quarter * (kTileDepth / 4) + i * 8;
                x[b][t][i] = make_uint4(0, 0, 0, 0);
                // The last block of a float8 weight may be half a block; the copy engine fills the rest with zeros.
                if (b < blocks && column < args.depth && t * 8 + group < args.tokens)
                    x[b][t][i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.x) +
                                                                 (t * 8 + group) * args.x_stride + column);
            }
    constexpr bool kScaleTokens = Shape::kFloat8 && std::is_same_v<T, __nv_bfloat16>;
    TokenScales<kTiles> token_scales;
    if constexpr (kScaleTokens) token_scales = bfloat16_tokens_to_halves(x);
    if (cluster > 1) wait_for_cluster();

    const uint32_t piece = group * 128 + ((quarter * 2) ^ group) * 16;
    const int tiles = end_tile - first_tile;
    int buffer = 0, parity = 1;  // a buffer that was never used counts as empty
#pragma unroll 1
    for (int index = 0; index < tiles; ++index) {
        // Two tiles of the stream at a time, for their latency's sake.
        float even_total[kTiles][4] = {}, total[kTiles][4] = {};
#pragma unroll
        for (int b = 0; b < kBlocks; b += 2) {
            if (b >= blocks) break;
            const bool second = b + 1 < kBlocks && b + 1 < blocks;
            uint4 low[2][2], high[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (i == 1 && !second) break;
                const uint32_t at = stream.wait(i) + piece;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    low[i][half] = load_shared(at ^ half * 16);
                    high[i][half] = load_shared((at ^ half * 16) + 1024);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (i == 1 && !second) break;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    multiply<Shape>(low[i][half], high[i][half], x[min(b + i, kBlocks - 1)], half, even_total, total);
            }
            stream.release(second ? 2 : 1);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                total[t][i] += even_total[t][i];
                if constexpr (kScaleTokens) total[t][i] *= token_scales.inverse(t, i % 2);
            }
        if (blocks > 0 && stream.left == 0) let_next_launch_start();  // at most a few times; again does nothing
        wait_for_phase(buffers.empty(buffer), parity);
        const uint32_t mine = buffers.part(buffer, warp) + lane * 4;
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine + (t * 4 + i) * 128), "f"(total[t][i]) : "memory");
        __syncwarp();
        if (lane == 0) arrive(buffers.full(buffer));
        if (++buffer == Shape::kBuffers) buffer = 0, parity ^= 1;
        add_earlier(args, buffers, first_tile, tiles, index, warp);
    }
#pragma unroll 1
    for (int index = tiles; index <= tiles + kBehind; ++index)
        add_earlier(args, buffers, first_tile, tiles, index, warp);
    // Nobody's shared memory goes away while sums or answers are on their way to it.
    if (cluster > 1) {
        __syncwarp();
        arrive_in_cluster();
        wait_for_cluster();
    }
#endif
}

}  // namespace dflash
