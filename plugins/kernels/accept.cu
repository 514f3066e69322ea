// Accept, first launch: each chunk of each row gives its largest keys and its softmax mass in one reading of the
// logits. The filters (accept_filter.cu) and the draw (accept_draw.cu) then touch the logits only where they must.
#include "accept_state.cuh"
#include "launch.h"
#include "overlapped_launch.cuh"
#include "select_dispatch.h"

namespace dflash {
namespace {

template <typename T>
__global__ void __launch_bounds__(kChunkThreads, 4)
    summarise_chunks(dflash_accept_params p, AcceptWorkspace workspace) {
    wait_for_previous_launch();
    __shared__ SelectStorage storage;
    __shared__ float warp_sums[kChunkThreads / 32];
    const int chunk = blockIdx.x, chunks = gridDim.x;
    const int request = blockIdx.y / p.block_size, row = blockIdx.y % p.block_size;
    if (!row_exists(p, request, row)) return;

    const ChunkValues<T> values(logit_row<T>(p, request, row), chunk, chunks);
    let_next_launch_start();
    const float temperature = p.temperatures[request];
    // Only filters look below the best token.
    const int count = temperature > 0.0f && is_filtered(p, request) ? kListKeys : 1;
    const int64_t entry = int64_t(blockIdx.y) * chunks + chunk;
    select_chunk(values, [](float value) { return value; }, count, storage, workspace.lists + entry * kListKeys);
    // A NaN in the chunk travels as its mass.
    const bool has_nan = __syncthreads_or(values.has_nan);
    if (temperature <= 0.0f || has_nan) {
        if (threadIdx.x == 0) workspace.masses[entry] = has_nan ? NAN : 0.0f;
        return;
    }

    static_assert(kGroups == 64, "two groups per lane");
    const int lane = threadIdx.x % 32;
    const uint32_t best =
        __reduce_max_sync(0xFFFFFFFFu, max(storage.group_value[lane], storage.group_value[lane + 32]));
    const float largest = usable_largest(ordered_value(best));
    const float scale = exponent_scale(temperature);
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kValuesPerThread; ++slot) sum += fast_exp2((values.values[slot] - largest) * scale);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float mass = 0.0f;
        for (float part : warp_sums) mass += part;
        workspace.masses[entry] = mass;
    }
}

int32_t validate(const dflash_accept_params& p) {
    if (p.struct_size != sizeof(p))
        return fail(DFLASH_INVALID_ARGUMENT, "accept: struct_size %u, expected %zu", p.struct_size, sizeof(p));
    if (p.batch < 0 || p.block_size < 1 || int64_t(p.batch) * p.block_size > 65535)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: batch %d, block_size %d, expected a product of at most 65535",
                    p.batch, p.block_size);
    if (p.count < 1 || p.count > DFLASH_MAX_CANDIDATES)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: count %d, expected 1..%d", p.count, DFLASH_MAX_CANDIDATES);
    if (p.valid_columns < 1 || p.valid_columns > p.columns || p.valid_columns > DFLASH_MAX_VOCABULARY)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: valid_columns %d, expected 1..min(columns %d, %d)",
                    p.valid_columns, p.columns, DFLASH_MAX_VOCABULARY);
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(accept, "accept");

int64_t dflash_accept_workspace_bytes(const dflash_accept_params* params) {
    if (validate(*params) != DFLASH_OK) return -1;
    return AcceptWorkspace::bytes(int64_t(params->batch) * params->block_size, chunks_of(params->valid_columns));
}

int32_t dflash_accept(const dflash_accept_params* params, dflash_stream stream) {
    const dflash_accept_params p = *params;
    const int64_t needed = dflash_accept_workspace_bytes(params);
    if (needed < 0) return DFLASH_INVALID_ARGUMENT;
    if (p.batch == 0) return DFLASH_OK;
    if (p.workspace_bytes < needed)
        return fail(DFLASH_INVALID_ARGUMENT, "accept: workspace of %lld bytes, expected %lld",
                    static_cast<long long>(p.workspace_bytes), static_cast<long long>(needed));
    const int chunks = chunks_of(p.valid_columns), rows = p.batch * p.block_size;
    const AcceptWorkspace workspace(p.workspace, rows, chunks);
    const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
    return dispatch_dtype("accept", p.dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_overlapped(summarise_chunks<T>, dim3(chunks, rows), kChunkThreads, 0, cuda_stream, p, workspace);
        launch_row_filter<T>(p, chunks, workspace, cuda_stream);
        launch_accept_draw<T>(p, chunks, workspace, cuda_stream);
        return check_launch("accept");
    });
}
