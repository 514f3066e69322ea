// x [M, K] times a weight [N, K] for a few rows M: the weight goes through shared memory once, x stays in registers.
//
// Weight rows are the 16-row operand of the matrix instruction, so that eight tokens cost one. Each warp of a cluster
// owns a range of K for the whole launch: its part of x is loaded once, into registers, and a weight tile meets it
// there. What is left per tile is a sum over the warps of the cluster, in a fixed order.
#pragma once

#include "overlapped_launch.cuh"
#include "weight_stream.cuh"

namespace dflash {

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
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kSums = kTokenTiles * 8 * kTileRows;
    // x takes 8 registers per block and token tile. Where two blocks fit, the next launch fills its ring beside this one.
    static constexpr int kResident = kBlocks * kTokenTiles <= 8 ? 2 : 1;
    static constexpr int kAlignment = 1024;  // of the swizzle

    static constexpr int fixed_bytes(int cluster) { return kAlignment + 2 * (kWarps + cluster) * kSums * 4; }
    static constexpr int bytes_per_stage() { return kWarps * (kTileBytes + 8); }
};

__device__ __forceinline__ int cluster_blocks() {
    int count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void store_in_block(uint32_t shared, int rank, float value) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

template <typename T>
__device__ __forceinline__ float rounded(float value) {
    return unpack_pair<T>(pack_pair<T>(value, 0.0f)).x;
}

// Writes one tile of the result from the sums of the cluster's blocks, [cluster][kSums]. Sum j is element j / 32 of
// lane j % 32's accumulators.
template <typename Shape>
__device__ __forceinline__ void finish_tile(const SkinnyArgs& args, int tile, const float* sums, int cluster) {
    using T = typename Shape::T;
    for (int j = threadIdx.x; j < Shape::kSums; j += Shape::kThreads) {
        const int element = j / 32 % 4, row = j % 32 / 4 + element / 2 * 8;
        const int token = j / 128 * 8 + j % 4 * 2 + element % 2;
        if (args.gated && element >= 2) continue;
        const int column = tile * (args.gated ? kTileRows / 2 : kTileRows) + row;
        if (token >= args.tokens || column >= args.columns) continue;
        float value = 0.0f;
        for (int rank = 0; rank < cluster; ++rank) value += sums[rank * Shape::kSums + j];
        if (args.gated) {
            float up = 0.0f;
            for (int rank = 0; rank < cluster; ++rank) up += sums[rank * Shape::kSums + j + 64];
            const float gate = rounded<T>(value);
            value = rounded<T>(up) * (gate / (1.0f + __expf(-gate)));
        } else if (args.bias) {
            value += static_cast<float>(static_cast<const T*>(args.bias)[column]);
        }
        static_cast<T*>(args.out)[token * args.out_stride + column] = static_cast<T>(value);
    }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    skinny_gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ SkinnyArgs args) {
#if __CUDA_ARCH__ >= 900
    using T = typename Shape::T;
    constexpr int kTiles = Shape::kTokenTiles, kBlocks = Shape::kBlocks;
    extern __shared__ char unaligned[];
    const uint32_t misalignment = shared_address(unaligned) % Shape::kAlignment;
    char* shared = unaligned + (misalignment ? Shape::kAlignment - misalignment : 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int cluster = cluster_blocks(), rank = cluster_rank();
    const int range = blockIdx.x / cluster, ranges = gridDim.x / cluster;
    const int first_tile = static_cast<int>(static_cast<int64_t>(args.tiles) * range / ranges);
    const int end_tile = static_cast<int>(static_cast<int64_t>(args.tiles) * (range + 1) / ranges);
    const int first_block = (rank * Shape::kWarps + warp) * kBlocks;
    const int blocks = max(0, min(kBlocks, args.blocks - first_block));
    const int ring_bytes = args.stages * kTileBytes;
    float* parts = reinterpret_cast<float*>(shared + Shape::kWarps * (ring_bytes + args.stages * 8));
    float* received = parts + 2 * Shape::kWarps * Shape::kSums;

    WeightStream stream(&weight, shared_address(shared) + warp * ring_bytes,
                        shared_address(shared) + Shape::kWarps * ring_bytes + warp * args.stages * 8, args.stages,
                        first_block * kTileDepth, blocks, args.gated ? kTileRows / 2 : kTileRows, first_tile, end_tile);
    stream.start(args.prefetch);
    if (cluster > 1) arrive_in_cluster();  // from here on the others may write to this block
    bool next_may_start = args.start_next_at_once || stream.all_asked();
    if (next_may_start) let_next_launch_start();
    wait_for_previous_launch();

    // Lane (g, t) holds token g of each eight; of every 64 columns it owns 16 from t * 16 on. Which 16 does not matter
    // to a sum, as long as the weight is read the same way.
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
    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int parity = (tile - first_tile) % 2;
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
                for (int t = 0; t < kTiles; ++t) {
                    mma_16x8x16<T>(total[t], even, x[b][t][half].x, x[b][t][half].y);
                    mma_16x8x16<T>(total[t], odd, x[b][t][half].z, x[b][t][half].w);
                }
            }
            stream.release();
        }
        if (!next_may_start && stream.all_asked()) {
            next_may_start = true;
            let_next_launch_start();
        }
        float* mine = parts + (parity * Shape::kWarps + warp) * Shape::kSums + lane;
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) mine[(t * 4 + i) * 32] = total[t][i];
        __syncthreads();
        // The sums of the tile before are complete now: they were sent before this barrier, or the cluster's.
        if (cluster > 1) wait_for_cluster();
        if (tile > first_tile && (tile - 1 - first_tile) % cluster == rank)
            finish_tile<Shape>(args, tile - 1, received + (1 - parity) * cluster * Shape::kSums, cluster);
        const float* all = parts + parity * Shape::kWarps * Shape::kSums;
        float* target = received + (parity * cluster + rank) * Shape::kSums;
        for (int j = threadIdx.x; j < Shape::kSums; j += Shape::kThreads) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < Shape::kWarps; ++w) sum += all[w * Shape::kSums + j];
            if (cluster > 1)
                store_in_block(shared_address(target + j), (tile - first_tile) % cluster, sum);
            else
                target[j] = sum;
        }
        __syncwarp();
        if (cluster > 1) arrive_in_cluster();
    }
    if (cluster > 1) wait_for_cluster();
    else __syncthreads();
    const int last = end_tile - 1 - first_tile;
    if (last % cluster == rank)
        finish_tile<Shape>(args, end_tile - 1, received + last % 2 * cluster * Shape::kSums, cluster);
#endif
}

}  // namespace dflash
