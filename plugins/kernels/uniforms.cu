// The uniform draws of one purpose at consecutive positions of each request's stream.
#include "dflash_select.h"
#include "launch.h"
#include "philox.cuh"

namespace dflash {
namespace {

__global__ void draw_uniforms(const int64_t* seeds, const int64_t* first_positions, float* out, int count, int total,
                              RandomWord word) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= total) return;
    const int request = index / count;
    out[index] = philox_uniform(seeds[request], first_positions[request] + index % count, word);
}

}  // namespace
}  // namespace dflash

using namespace dflash;

DFLASH_REGISTER_KERNEL(uniforms, "uniforms");

int32_t dflash_uniforms(const int64_t* seeds, const int64_t* first_positions, float* out, int32_t batch, int32_t count,
                        int32_t word, dflash_stream stream) {
    if (batch < 0 || count < 0 || int64_t(batch) * count > INT32_MAX || word < kWalkWord || word > kResidualWord)
        return fail(DFLASH_INVALID_ARGUMENT, "uniforms: batch %d, count %d, word %d (0..2)", batch, count, word);
    const int total = batch * count;
    if (total == 0) return DFLASH_OK;
    constexpr int kThreads = 128;
    draw_uniforms<<<(total + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        seeds, first_positions, out, count, total, static_cast<RandomWord>(word));
    return check_launch("uniforms");
}
