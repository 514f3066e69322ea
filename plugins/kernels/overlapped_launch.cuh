// Launches of one operation that follow each other: the next grid is set up while the previous one drains.
#pragma once

#include <cuda_runtime.h>

namespace dflash {

// Launches `kernel` so that it may be set up before the launch in front of it has finished. It must call
// wait_for_previous_launch() before it touches what other launches write or read. Errors stay with cudaGetLastError().
template <typename... Parameters>
void launch_overlapped(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                       Parameters... parameters) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, parameters...);
}

// Returns when everything before this launch is complete and visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// The next launch may be set up once every block has come here. It waits for the whole of this one where it calls
// wait_for_previous_launch().
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace dflash
