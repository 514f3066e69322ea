// x [M, K] times a weight [N, K] for a few rows M: the weight goes through shared memory once, x stays in registers.
//
// Weight rows are the 16-row operand of the matrix instruction, so that eight tokens cost one. Each warp of a cluster
// owns a range of K for the whole launch: its part of x is loaded once, into registers, and a weight tile meets it
// there. What is left per tile is a sum over the warps of the cluster, in a fixed order, which one more warp does while
// the others go on.
#pragma once

#include "cluster_messages.cuh"
#include "overlapped_launch.cuh"
#include "weight_stream.cuh"

namespace dflash {

constexpr int kMaxCluster = 8;

struct SkinnyArgs {
    const void* x;
    const void* bias;
    void* out;
    int64_t x_stride, out_stride;
    int tokens, columns;
    int blocks;  // K / 64
    int tiles;   // of 16 weight rows
    int stages, prefetch;
    bool start_next_at_once, gated;
};

template <typename T_, int kTokenTiles_, int kBlocks_>
struct SkinnyShape {
    using T = T_;
    static constexpr int kTokenTiles = kTokenTiles_;  // of eight tokens
    static constexpr int kBlocks = kBlocks_;          // of 64 columns of K per warp, at most
    static constexpr int kWarps = 8, kThreads = 32 * (kWarps + 1);  // the last warp adds
    static constexpr int kSums = kTokenTiles * 8 * kTileRows;
    static constexpr int kBuffers = 2;  // of sums: of the warps, and of the cluster
    // x takes 8 registers per block and token tile. Where two launches fit, the next one fills its ring beside this one.
    static constexpr int kResident = kBlocks * kTokenTiles <= 6 ? 2 : 1;
    static constexpr int kAlignment = 1024;  // of the swizzle
    static constexpr int kBarrierBytes = (3 * kBuffers + kMaxCluster * kBuffers) * 8;

    static constexpr int fixed_bytes(int cluster) {
        return kAlignment + kBuffers * (kWarps + cluster) * kSums * 4 + kBarrierBytes;
    }
    static constexpr int bytes_per_stage() { return kWarps * (kTileBytes + 8); }
};

// Sums travel from the warps of a block to its adding warp, and from there to the block of the cluster that finishes
// the tile. All sums of one tile are [kSums] floats: sum j is element j / 32 of lane j % 32's accumulators.
template <typename Shape>
struct SumBuffers {
    static constexpr int kBytes = Shape::kSums * 4;
    uint32_t parts, received;  // [kBuffers][kWarps], [kBuffers][cluster]
    uint32_t barriers;

    __device__ __forceinline__ uint32_t part(int buffer, int warp) const {
        return parts + (buffer * Shape::kWarps + warp) * kBytes;
    }
    __device__ __forceinline__ uint32_t full(int buffer) const { return barriers + buffer * 8; }
    __device__ __forceinline__ uint32_t empty(int buffer) const { return barriers + (Shape::kBuffers + buffer) * 8; }
    __device__ __forceinline__ uint32_t arrived(int slot) const { return barriers + (2 * Shape::kBuffers + slot) * 8; }
    // That block `owner` of the cluster has read its slot.
    __device__ __forceinline__ uint32_t read(int owner, int slot) const {
        return barriers + (3 * Shape::kBuffers + owner * Shape::kBuffers + slot) * 8;
    }

    __device__ __forceinline__ void start() const {
        for (int i = 0; i < Shape::kBuffers; ++i) start_barrier(full(i), Shape::kWarps);
        for (int i = 0; i < 2 * Shape::kBuffers + kMaxCluster * Shape::kBuffers; ++i)
            start_barrier(barriers + (Shape::kBuffers + i) * 8, 1);
        publish_barriers();
    }
};

template <typename T>
__device__ __forceinline__ float rounded(float value) {
    return unpack_pair<T>(pack_pair<T>(value, 0.0f)).x;
}

// Writes one tile of the result. Lane l has, of every eight tokens, those of parity l / 8 % 2, of weight row
// l % 8 + l / 16 * 8.
template <typename Shape>
__device__ __forceinline__ void finish_tile(const SkinnyArgs& args, int tile, float4 (&sums)[Shape::kTokenTiles]) {
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
            float value = values[i] + bias;
            if (args.gated) {
                const float up = rounded<T>(__shfl_down_sync(0xffffffffu, value, 16)), gate = rounded<T>(value);
                value = up * (gate / (1.0f + __expf(-gate)));
            }
            if (writes && token < args.tokens) target[token * args.out_stride] = static_cast<T>(value);
        }
    }
}

// The adding warp: sums of the block's warps, then of the cluster's blocks in turn.
template <typename Shape>
__device__ __forceinline__ void add_tiles(const SkinnyArgs& args, const SumBuffers<Shape>& buffers, int first, int end,
                                          int cluster, int rank) {
    const int lane = threadIdx.x % 32;
    for (int tile = first; tile < end; ++tile) {
        const int index = tile - first, buffer = index % Shape::kBuffers;
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
        if (cluster == 1) {
            finish_tile<Shape>(args, tile, sums);
            continue;
        }
        const int owner = index % cluster, turn = index / cluster, slot = turn % Shape::kBuffers;
        const int use = turn / Shape::kBuffers;  // of this slot
        const uint32_t place = buffers.received + slot * cluster * SumBuffers<Shape>::kBytes + lane * 16;
        if (owner != rank) {
            if (use > 0) wait_for_phase_in_cluster(buffers.read(owner, slot), (use - 1) % 2);
#pragma unroll
            for (int t = 0; t < Shape::kTokenTiles; ++t)
                send(in_block(place + rank * SumBuffers<Shape>::kBytes + t * 512, owner), sums[t],
                     in_block(buffers.arrived(slot), owner));
            continue;
        }
        if (lane == 0) expect_bytes(buffers.arrived(slot), (cluster - 1) * SumBuffers<Shape>::kBytes);
        wait_for_phase_in_cluster(buffers.arrived(slot), use % 2);
#pragma unroll
        for (int t = 0; t < Shape::kTokenTiles; ++t) {
            float4 total = make_float4(0, 0, 0, 0);
            for (int from = 0; from < cluster; ++from)
                add(total, from == rank
                               ? sums[t]
                               : load_shared_floats(place + from * SumBuffers<Shape>::kBytes + t * 512));
            sums[t] = total;
        }
        __syncwarp();
        if (lane < cluster && lane != rank) arrive_in_block(in_block(buffers.read(rank, slot), lane));
        finish_tile<Shape>(args, tile, sums);
    }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    skinny_gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ SkinnyArgs args) {
#if __CUDA_ARCH__ >= 900
    using T = typename Shape::T;
    constexpr int kTiles = Shape::kTokenTiles, kBlocks = Shape::kBlocks;
    extern __shared__ char unaligned[];
    const uint32_t shared = (shared_address(unaligned) + Shape::kAlignment - 1) / Shape::kAlignment * Shape::kAlignment;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int cluster = cluster_blocks(), rank = cluster_rank();
    const int range = blockIdx.x / cluster, ranges = gridDim.x / cluster;
    const int first_tile = static_cast<int>(static_cast<int64_t>(args.tiles) * range / ranges);
    const int end_tile = static_cast<int>(static_cast<int64_t>(args.tiles) * (range + 1) / ranges);
    const int first_block = (rank * Shape::kWarps + warp) * kBlocks;
    const int blocks = warp == Shape::kWarps ? 0 : max(0, min(kBlocks, args.blocks - first_block));
    const int ring_bytes = args.stages * kTileBytes;
    SumBuffers<Shape> buffers;
    buffers.parts = shared + Shape::kWarps * ring_bytes;
    buffers.received = buffers.parts + Shape::kBuffers * Shape::kWarps * Shape::kSums * 4;
    buffers.barriers = buffers.received + Shape::kBuffers * cluster * Shape::kSums * 4;

    WeightStream stream;
    stream.map = &weight;
    stream.ring = shared + warp * ring_bytes;
    stream.barriers = buffers.barriers + Shape::kBarrierBytes + warp * args.stages * 8;
    stream.stages = args.stages;
    stream.first_depth = first_block * kTileDepth;
    stream.end_depth = stream.first_depth + blocks * kTileDepth;
    stream.rows_per_tile = args.gated ? kTileRows / 2 : kTileRows;
    stream.start(first_tile, end_tile - first_tile, args.prefetch);
    if (warp == Shape::kWarps && lane == 0) buffers.start();
    __syncthreads();
    if (cluster > 1) arrive_in_cluster();  // the others' sums may come from here on
    if (args.start_next_at_once || (blocks > 0 && stream.left == 0)) let_next_launch_start();
    wait_for_previous_launch();

    if (warp == Shape::kWarps) {
        if (cluster > 1) wait_for_cluster();
        add_tiles(args, buffers, first_tile, end_tile, cluster, rank);
    } else {
        // Lane (g, t) holds token g of each eight; of every 64 columns it owns 16 from t * 16 on. Which 16 does not
        // matter to a sum, as long as the weight is read the same way.
        const int group = lane / 4, quarter = lane % 4;
        uint4 x[kBlocks][kTiles][2];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    x[b][tile][half] = make_uint4(0, 0, 0, 0);
                    if (b < blocks && tile * 8 + group < args.tokens)
                        x[b][tile][half] = reinterpret_cast<const uint4*>(
                            static_cast<const T*>(args.x) + (tile * 8 + group) * args.x_stride +
                            (first_block + b) * kTileDepth + quarter * 16)[half];
                }

        const uint32_t piece = group * 128 + ((quarter * 2) ^ group) * 16;
        int buffer = 0, parity = 1;  // a buffer that was never used counts as empty
        for (int tile = first_tile; tile < end_tile; ++tile) {
            float total[kTiles][4] = {};
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                if (b >= blocks) break;
                const uint32_t at = stream.wait() + piece;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 low = load_shared(at ^ half * 16), high = load_shared((at ^ half * 16) + 1024);
                    const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int t = 0; t < kTiles; ++t) mma_16x8x16<T>(total[t], even, x[b][t][half].x, x[b][t][half].y);
#pragma unroll
                    for (int t = 0; t < kTiles; ++t) mma_16x8x16<T>(total[t], odd, x[b][t][half].z, x[b][t][half].w);
                }
                stream.release();
            }
            if (stream.left == 0) let_next_launch_start();  // again at most a few times, which does nothing
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
        }
        if (cluster > 1) wait_for_cluster();
    }
    // Nobody's shared memory goes away while sums or answers are on their way to it.
    if (cluster > 1) {
        __syncwarp();
        arrive_in_cluster();
        wait_for_cluster();
    }
#endif
}

}  // namespace dflash
