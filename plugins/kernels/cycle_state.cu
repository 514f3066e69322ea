// A cycle's bookkeeping. Each of these is a dozen element-wise launches when written with a tensor library; in one graph
// they cost more than their bytes by the time it takes to start them.
#include "dflash_cycle.h"
#include "launch.h"
#include "overlapped_launch.cuh"

namespace dflash {
namespace {

constexpr int kThreads = 128;
enum StateRow { kAnchor, kContext, kRemaining, kGenerated };
enum Status : int64_t { kRunning, kStopped, kOutOfLength, kFaulty };

__global__ void __launch_bounds__(kThreads) gather_state(const __grid_constant__ dflash_cycle_gather_params p) {
    wait_for_previous_launch();
    const int request = blockIdx.x;
    const int64_t slot = p.slots[request];
    for (int page = threadIdx.x; page < p.pages; page += kThreads)
        p.out_pages[int64_t(request) * p.pages + page] = p.page_table[slot * p.page_stride + page];
    if (threadIdx.x < DFLASH_MAX_STOP_IDS)
        p.out_stop_ids[request * DFLASH_MAX_STOP_IDS + threadIdx.x] =
            p.stop_ids[slot * DFLASH_MAX_STOP_IDS + threadIdx.x];
    if (threadIdx.x < DFLASH_STATE_INTS)
        p.out_ints[threadIdx.x * p.batch + request] = p.ints[int64_t(threadIdx.x) * p.state_rows + slot];
    if (threadIdx.x < DFLASH_STATE_FLOATS)
        p.out_floats[threadIdx.x * p.batch + request] = p.floats[int64_t(threadIdx.x) * p.state_rows + slot];
    if (threadIdx.x == 0) {
        const int64_t remaining = p.ints[int64_t(kRemaining) * p.state_rows + slot];
        p.block_lengths[request] = remaining > 0 ? min(remaining + 1, int64_t(p.block_size)) : 0;
    }
}

__global__ void __launch_bounds__(kThreads)
    place_rows(const int64_t* page_table, int64_t page_stride, int pages, const int64_t* context_lengths,
               const int64_t* lengths, int rows, int block_size, int page_tokens, int64_t* positions, int64_t* slots) {
    wait_for_previous_launch();
    const int row = blockIdx.x * kThreads + threadIdx.x;
    if (row >= rows) return;
    const int request = row / block_size, offset = row % block_size;
    const int64_t position = context_lengths[request] + offset;
    positions[row] = position;
    if (offset >= lengths[request]) {
        slots[row] = -1;
        return;
    }
    const int64_t column = min(position / page_tokens, int64_t(pages) - 1);
    slots[row] = page_table[request * page_stride + column] * page_tokens + position % page_tokens;
}

// One warp per request; the lanes look at the stop ids.
__global__ void __launch_bounds__(kThreads) cut_results(const __grid_constant__ dflash_cycle_cut_params p) {
    wait_for_previous_launch();
    const int request = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (request >= p.batch) return;
    const int64_t* tokens = p.tokens + int64_t(request) * p.block_size;
    const int64_t* stops = p.stop_ids + int64_t(request) * DFLASH_MAX_STOP_IDS;
    const int64_t first_stop_id = stops[lane], second_stop_id = stops[lane + 32];
    const int64_t remaining = p.remaining[request], accepted = p.accepted[request];
    const int allowed = int(min(accepted + 1, remaining));
    int produced = allowed;
    bool stopped = false;
    for (int i = 0; i < allowed && !stopped; ++i) {
        stopped = __any_sync(0xFFFFFFFFu, tokens[i] == first_stop_id || tokens[i] == second_stop_id);
        if (stopped) produced = i + 1;
    }
    int64_t status = stopped ? kStopped : produced >= remaining ? kOutOfLength : kRunning;
    if (p.faulty[request]) produced = 0, status = kFaulty;
    int64_t* packed = p.packed + int64_t(request) * (p.block_size + 3);
    for (int i = lane; i < p.block_size; i += 32) packed[i] = tokens[i];
    if (lane == 0) {
        p.produced[request] = packed[p.block_size] = produced;
        packed[p.block_size + 1] = accepted;
        p.status[request] = packed[p.block_size + 2] = status;
    }
}

__global__ void __launch_bounds__(kThreads) publish_state(const __grid_constant__ dflash_cycle_publish_params p) {
    wait_for_previous_launch();
    const int request = blockIdx.x * kThreads + threadIdx.x;
    if (request >= p.batch) return;
    const int64_t slot = p.slots[request], produced = p.produced[request];
    const auto gathered = [&](StateRow row) { return p.rows[int64_t(row) * p.batch + request]; };
    const auto state = [&](StateRow row) -> int64_t& { return p.ints[int64_t(row) * p.state_rows + slot]; };
    state(kAnchor) = produced > 0 ? p.tokens[int64_t(request) * p.block_size + produced - 1] : gathered(kAnchor);
    state(kContext) = gathered(kContext) + produced;
    state(kRemaining) = p.status[request] == kRunning ? gathered(kRemaining) - produced : 0;
    state(kGenerated) = gathered(kGenerated) + produced;
}

int blocks_for(int64_t threads) { return static_cast<int>((threads + kThreads - 1) / kThreads); }

int32_t check_batch(const char* what, uint32_t found, size_t expected, int batch, int block_size) {
    if (found != expected)
        return fail(DFLASH_INVALID_ARGUMENT, "%s: struct_size %u, expected %zu", what, found, expected);
    if (batch < 0 || block_size < 1 || block_size > DFLASH_MAX_CYCLE_BLOCK)
        return fail(DFLASH_INVALID_ARGUMENT, "%s: batch %d, block_size %d, expected 1..%d", what, batch, block_size,
                    DFLASH_MAX_CYCLE_BLOCK);
    return DFLASH_OK;
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(cycle_state, "cycle_state");

int32_t dflash_cycle_gather(const dflash_cycle_gather_params* params, dflash_stream stream) {
    const int32_t status =
        check_batch("cycle_gather", params->struct_size, sizeof(*params), params->batch, params->block_size);
    if (status != DFLASH_OK || params->batch == 0) return status;
    launch_overlapped(gather_state, dim3(params->batch), kThreads, 0, static_cast<cudaStream_t>(stream), *params);
    return check_launch("cycle_gather");
}

int32_t dflash_block_rows(const int64_t* page_table, int64_t page_stride, int32_t pages, const int64_t* context_lengths,
                          const int64_t* lengths, int32_t batch, int32_t block_size, int32_t page_tokens,
                          int64_t* positions, int64_t* slots, dflash_stream stream) {
    if (batch < 0 || block_size < 1 || page_tokens < 1 || pages < 1)
        return fail(DFLASH_INVALID_ARGUMENT, "block_rows: batch %d, block_size %d, page_tokens %d, pages %d", batch,
                    block_size, page_tokens, pages);
    const int rows = batch * block_size;
    if (rows == 0) return DFLASH_OK;
    launch_overlapped(place_rows, dim3(blocks_for(rows)), kThreads, 0, static_cast<cudaStream_t>(stream), page_table,
                      page_stride, pages, context_lengths, lengths, rows, block_size, page_tokens, positions, slots);
    return check_launch("block_rows");
}

int32_t dflash_cycle_cut(const dflash_cycle_cut_params* params, dflash_stream stream) {
    const int32_t status =
        check_batch("cycle_cut", params->struct_size, sizeof(*params), params->batch, params->block_size);
    if (status != DFLASH_OK || params->batch == 0) return status;
    launch_overlapped(cut_results, dim3(blocks_for(int64_t(params->batch) * 32)), kThreads, 0,
                      static_cast<cudaStream_t>(stream), *params);
    return check_launch("cycle_cut");
}

int32_t dflash_cycle_publish(const dflash_cycle_publish_params* params, dflash_stream stream) {
    const int32_t status =
        check_batch("cycle_publish", params->struct_size, sizeof(*params), params->batch, params->block_size);
    if (status != DFLASH_OK || params->batch == 0) return status;
    launch_overlapped(publish_state, dim3(blocks_for(params->batch)), kThreads, 0, static_cast<cudaStream_t>(stream),
                      *params);
    return check_launch("cycle_publish");
}
