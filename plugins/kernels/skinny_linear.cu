// Linear layers of a few rows: x [M, K] times a weight [N, K], M up to 32. The work is reading the weight once.
//
// A block takes 16 (or 8) rows of the weight, its warps take turns over K, and their sums meet in shared memory. Weight
// rows are the 16-row operand of the matrix instruction, so that eight tokens cost one instruction. A lane reads 16
// bytes of K at a time; both operands see K in that order, which a dot product does not mind. The first weights are
// asked for before the launch in front has finished: a weight is no result of it.
#include "dflash_select.h"
#include "launch.h"
#include "mma.cuh"
#include "overlapped_launch.cuh"

namespace dflash {

DFLASH_REGISTER_KERNEL(skinny_linear, "skinny_linear");
DFLASH_REGISTER_KERNEL(projected_conv, "projected_conv");

namespace {

constexpr int kChunk = 64;  // of K per warp and step: one 128-byte line of each weight row
constexpr int kMaxTokens = 32;

__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// kEights: eights of weight rows of a block. kAhead: steps whose weights are in flight.
template <typename T, int kTokenTiles_, int kWarps_, int kEights_, int kAhead_, int kBlocks_>
struct SkinnyShape {
    using Element = T;
    static constexpr int kTokenTiles = kTokenTiles_, kWarps = kWarps_, kTokens = 8 * kTokenTiles;
    static constexpr int kEights = kEights_, kRows = 8 * kEights, kThreads = 32 * kWarps, kAhead = kAhead_;
    static constexpr int kRowTiles = (kEights + 1) / 2;  // sixteen rows of the matrix instruction
    static constexpr int kBlocks = kBlocks_;
};

// Sums of every (weight row, token) of the block, [kTokens][kRows + 1], where the weight row of `row` is
// weight_row(row), negative for none. All threads call it; the result is ready for all of them on return.
template <typename Shape, typename WeightRow>
__device__ __forceinline__ void multiply_rows(const void* x, int64_t x_stride, int tokens, int depth,
                                              const void* weight, WeightRow&& weight_row,
                                              float (&sums)[Shape::kTokens][Shape::kRows + 1]) {
    using T = typename Shape::Element;
    constexpr int kTiles = Shape::kTokenTiles, kEights = Shape::kEights, kAhead = Shape::kAhead;
    __shared__ float parts[Shape::kWarps][kTiles][2 * kEights][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, piece = lane % 4 * 8;
    const T* weights[kEights];
    bool exists[kEights];
#pragma unroll
    for (int half = 0; half < kEights; ++half) {
        const int from = weight_row(row + half * 8);
        exists[half] = from >= 0;
        weights[half] = static_cast<const T*>(weight) + static_cast<int64_t>(max(from, 0)) * depth + piece;
    }
    const int chunks = depth / kChunk;
    uint4 w[kAhead][kEights][2];
    auto load_weights = [&](int first) {
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead)
#pragma unroll
            for (int half = 0; half < kEights; ++half)
#pragma unroll
                for (int line = 0; line < 2; ++line) {
                    const int chunk = first + ahead * Shape::kWarps;
                    w[ahead][half][line] = make_uint4(0, 0, 0, 0);
                    if (chunk < chunks && exists[half])
                        w[ahead][half][line] = load_once(weights[half] + chunk * kChunk + line * 32);
                }
    };
    load_weights(warp);
    wait_for_previous_launch();

    const T* rows = static_cast<const T*>(x) + static_cast<int64_t>(row) * x_stride + piece;
    float total[kTiles][Shape::kRowTiles][4] = {};
    for (int first = warp; first < chunks; first += kAhead * Shape::kWarps) {
        uint4 tokens_of[kAhead][kTiles][2];
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int line = 0; line < 2; ++line) {
                    const int chunk = first + ahead * Shape::kWarps;
                    tokens_of[ahead][tile][line] = make_uint4(0, 0, 0, 0);
                    if (chunk < chunks && tile * 8 + row < tokens)
                        tokens_of[ahead][tile][line] =
                            *reinterpret_cast<const uint4*>(rows + tile * 8 * x_stride + chunk * kChunk + line * 32);
                }
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead)
#pragma unroll
            for (int line = 0; line < 2; ++line)
#pragma unroll
                for (int rows16 = 0; rows16 < Shape::kRowTiles; ++rows16) {
                    const uint4 low = w[ahead][rows16 * 2][line];
                    const uint4 high = rows16 * 2 + 1 < kEights ? w[ahead][min(rows16 * 2 + 1, kEights - 1)][line]
                                                                : make_uint4(0, 0, 0, 0);
                    const uint32_t even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile) {
                        const uint4 token = tokens_of[ahead][tile][line];
                        mma_16x8x16<T>(total[tile][rows16], even, token.x, token.y);
                        mma_16x8x16<T>(total[tile][rows16], odd, token.z, token.w);
                    }
                }
        if (first + kAhead * Shape::kWarps < chunks) load_weights(first + kAhead * Shape::kWarps);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 2 * kEights; ++i) parts[warp][tile][i][lane] = total[tile][i / 4][i % 4];
    __syncthreads();
    constexpr int kSums = kTiles * 2 * kEights * 32;
    for (int i = threadIdx.x; i < kSums; i += Shape::kThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < Shape::kWarps; ++other) sum += (&parts[other][0][0][0])[i];
        const int from = i % 32, element = i / 32 % (2 * kEights), tile = i / (64 * kEights);
        sums[tile * 8 + from % 4 * 2 + element % 2][from / 4 + element / 2 * 8] = sum;
    }
    __syncthreads();
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) skinny_linear(const dflash_linear_params p) {
    using T = typename Shape::Element;
    __shared__ float sums[Shape::kTokens][Shape::kRows + 1];
    const int first = blockIdx.x * Shape::kRows;
    let_next_launch_start();
    multiply_rows<Shape>(
        p.x, p.x_stride, p.rows, p.depth, p.weight, [&](int row) { return first + row < p.columns ? first + row : -1; },
        sums);
    constexpr int kPairs = Shape::kRows / 2;
    for (int i = threadIdx.x; i < p.rows * kPairs; i += Shape::kThreads) {
        const int token = i / kPairs, row = i % kPairs * 2;
        if (first + row < p.columns)
            *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + token * p.out_stride + first + row) =
                pack_pair<T>(sums[token][row], sums[token][row + 1]);
    }
}

// The projection of both sides, and the first side's convolution of the channels that the block's groups cover.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    projected_conv(const dflash_projected_conv_params p) {
    using T = typename Shape::Element;
    __shared__ float sums[Shape::kTokens][Shape::kRows + 1];
    const int block_groups = Shape::kRows / (2 * p.taps), first_group = blockIdx.x * block_groups;
    const int groups = min(block_groups, p.groups - first_group), side = p.taps * p.groups;
    let_next_launch_start();
    // Row (s * taps + tap) * block_groups + g of the block.
    multiply_rows<Shape>(
        p.x, p.x_stride, p.rows, p.width, p.weight,
        [&](int row) {
            const int group = row % block_groups, line = row / block_groups;
            return line < 2 * p.taps && group < groups ? line * p.groups + first_group + group : -1;
        },
        sums);
    auto dynamic = [&](int token, int line, int group) {
        const float sum = sums[token][line * block_groups + group];
        return unpack_pair<T>(pack_pair<T>(sum, 0.0f)).x;  // rounded, as a linear layer's result is
    };
    for (int i = threadIdx.x; i < p.rows * p.taps * groups; i += Shape::kThreads) {
        const int group = i % groups, tap = i / groups % p.taps, token = i / (groups * p.taps);
        static_cast<T*>(p.dynamic_out)[static_cast<int64_t>(token) * side + tap * p.groups + first_group + group] =
            static_cast<T>(dynamic(token, p.taps + tap, group));
    }
    const int group_size = p.width / p.groups, channels = groups * group_size;
    const T* x = static_cast<const T*>(p.x);
    const T* base = static_cast<const T*>(p.base);
    for (int i = threadIdx.x; i < p.rows * channels; i += Shape::kThreads) {
        const int token = i / channels, channel = i % channels, column = first_group * group_size + channel;
        const int taps = min(p.taps, token % p.block_size + 1);  // rows before the block count as zero
        float sum = 0.0f;
        for (int tap = 0; tap < taps; ++tap)
            sum = fmaf(static_cast<float>(base[static_cast<int64_t>(tap) * p.width + column]) +
                           dynamic(token, tap, channel / group_size),
                       static_cast<float>(x[(token - tap) * p.x_stride + column]), sum);
        static_cast<T*>(p.out)[static_cast<int64_t>(token) * p.width + column] = static_cast<T>(sum);
    }
}

bool aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

int32_t check_operands(const char* name, int32_t dtype, int32_t rows, int32_t depth, const void* x, int64_t x_stride,
                       const void* weight) {
    if (dtype != DFLASH_BFLOAT16 && dtype != DFLASH_FLOAT16)
        return fail(DFLASH_UNSUPPORTED, "%s: dtype %d, expected bfloat16 (0) or float16 (1)", name, dtype);
    if (rows < 0 || rows > DFLASH_MAX_SKINNY_ROWS)
        return fail(DFLASH_UNSUPPORTED, "%s: %d rows, expected 0..%d", name, rows, DFLASH_MAX_SKINNY_ROWS);
    if (depth < kChunk || depth % kChunk != 0)
        return fail(DFLASH_UNSUPPORTED, "%s: %d input columns, expected a multiple of %d", name, depth, kChunk);
    if (!aligned(x) || !aligned(weight) || x_stride % 8 != 0)
        return fail(DFLASH_INVALID_ARGUMENT,
                    "%s: x and weight must be 16-byte aligned and x_stride (%lld) a multiple of 8", name,
                    static_cast<long long>(x_stride));
    return DFLASH_OK;
}

// Calls launch(Shape) for the type and the number of tokens. The three shapes were the fastest of many on an H200.
template <template <typename, int> class ShapeOf, typename Function>
void dispatch_shape(int32_t dtype, int tokens, Function&& launch) {
    auto of_type = [&](auto zero) {
        using T = decltype(zero);
        if (tokens <= 8) {
            launch(ShapeOf<T, 1>());
        } else if (tokens <= 16) {
            launch(ShapeOf<T, 2>());
        } else {
            launch(ShapeOf<T, kMaxTokens / 8>());
        }
    };
    if (dtype == DFLASH_BFLOAT16) {
        of_type(__nv_bfloat16());
    } else {
        of_type(__half());
    }
}

// Few columns: small tiles reach more multiprocessors, each of which must then read faster; half of a weight row of
// 4096 is asked for before the launch in front is complete, all of it where the tokens leave registers for that.
template <typename T, int kTokenTiles>
using Narrow = SkinnyShape<T, kTokenTiles, 16, 1, kTokenTiles == 1 ? 4 : 2, 1>;
template <typename T, int kTokenTiles>
using Middle = SkinnyShape<T, kTokenTiles, 8, 2, 2, kTokenTiles == 4 ? 2 : 3>;
// Many columns: the rows of x are read half as often.
template <typename T, int kTokenTiles>
using Wide = SkinnyShape<T, kTokenTiles, 8, 4, 1, kTokenTiles == 4 ? 2 : 3>;

}  // namespace
}  // namespace dflash

using namespace dflash;

int32_t dflash_skinny_linear(const dflash_linear_params* params, dflash_stream stream) {
    const dflash_linear_params p = *params;
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "skinny_linear: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (int32_t status = check_operands("skinny_linear", p.dtype, p.rows, p.depth, p.x, p.x_stride, p.weight))
        return status;
    if (p.columns < 2 || p.columns % 2 != 0 || p.out_stride % 2 != 0 || reinterpret_cast<uintptr_t>(p.out) % 4 != 0)
        return fail(DFLASH_INVALID_ARGUMENT,
                    "skinny_linear: %d output columns, stride %lld: expected even numbers and a 4-byte aligned out",
                    p.columns, static_cast<long long>(p.out_stride));
    if (p.rows == 0) return DFLASH_OK;
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    auto launch = [&](auto shape) {
        using Shape = decltype(shape);
        launch_overlapped(skinny_linear<Shape>, dim3((p.columns + Shape::kRows - 1) / Shape::kRows), Shape::kThreads, 0,
                          cuda_stream, p);
    };
    if (p.columns < 16 * multiprocessor_count()) {
        dispatch_shape<Narrow>(p.dtype, p.rows, launch);
    } else if (p.columns < 32 * multiprocessor_count()) {
        dispatch_shape<Middle>(p.dtype, p.rows, launch);
    } else {
        dispatch_shape<Wide>(p.dtype, p.rows, launch);
    }
    return check_launch("skinny_linear");
}

int32_t dflash_projected_conv(const dflash_projected_conv_params* params, dflash_stream stream) {
    const dflash_projected_conv_params p = *params;
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "projected_conv: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (int32_t status = check_operands("projected_conv", p.dtype, p.rows, p.width, p.x, p.x_stride, p.weight))
        return status;
    if (p.groups < 1 || p.width % p.groups != 0)
        return fail(DFLASH_INVALID_ARGUMENT, "projected_conv: groups %d does not divide width %d", p.groups, p.width);
    if (p.taps < 1 || p.taps > 4) return fail(DFLASH_UNSUPPORTED, "projected_conv: taps %d, expected 1..4", p.taps);
    if (p.block_size < 1 || p.rows % p.block_size != 0)
        return fail(DFLASH_INVALID_ARGUMENT, "projected_conv: rows %d is not a whole number of blocks of %d", p.rows,
                    p.block_size);
    if (p.out == p.x)
        return fail(DFLASH_INVALID_ARGUMENT, "projected_conv: out overlaps x, whose earlier rows are read");
    if (p.rows == 0) return DFLASH_OK;
    dispatch_shape<Narrow>(p.dtype, p.rows, [&](auto shape) {
        using Shape = decltype(shape);
        const int groups = Shape::kRows / (2 * p.taps);
        launch_overlapped(projected_conv<Shape>, dim3((p.groups + groups - 1) / groups), Shape::kThreads, 0,
                          static_cast<cudaStream_t>(stream), p);
    });
    return check_launch("projected_conv");
}
