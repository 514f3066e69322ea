// Reads a buffer once and does nothing with it: what is left of an attention call without attention.
//
// One block fills each multiprocessor, as hopper_alone_kernel does: a thread asks the tensor copy engine for pieces, a
// ring of 192 KB deep, and looks at one float of each. benchmarks/read_floor.py compiles and times it.
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kPieceBytes = 8192, kStages = 24;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Piece i of a block starts at (first + i * step) * kPieceBytes.
__global__ void __launch_bounds__(32, 1) read_pieces(const char* data, int64_t pieces, bool interleaved, float* out) {
    extern __shared__ char unaligned[];
    __shared__ alignas(8) uint64_t full[kStages];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x != 0) return;
    const uint32_t ring = (shared_address(unaligned) + 127) / 128 * 128, barriers = shared_address(full);
    for (int stage = 0; stage < kStages; ++stage)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + stage * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const int64_t begin = pieces * blockIdx.x / gridDim.x, end = pieces * (blockIdx.x + 1) / gridDim.x;
    const int64_t first = interleaved ? blockIdx.x : begin, step = interleaved ? gridDim.x : 1;
    const int count = static_cast<int>(interleaved ? (pieces - blockIdx.x + gridDim.x - 1) / gridDim.x : end - begin);
    auto ask = [&](int i) {
        const uint32_t barrier = barriers + i % kStages * 8;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kPieceBytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         ring + i % kStages * kPieceBytes),
                     "l"(data + (first + i * step) * kPieceBytes), "r"(kPieceBytes), "r"(barrier)
                     : "memory");
    };
    for (int i = 0; i < min(count, kStages); ++i) ask(i);
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) {
        asm volatile(
            "{ .reg .pred done;\n"
            "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again_%=; }" ::"r"(barriers + i % kStages * 8),
            "r"(i / kStages & 1)
            : "memory");
        float value;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(ring + i % kStages * kPieceBytes) : "memory");
        sum += value;
        if (i + kStages < count) ask(i + kStages);
    }
    out[blockIdx.x] = sum;
}

}  // namespace

// Reads `bytes`, a multiple of 8192, from `data` (16-byte aligned); out: one float per multiprocessor. Returns a
// cudaError_t.
extern "C" int read_floor(const void* data, int64_t bytes, int interleaved, float* out, void* stream) {
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    constexpr int kSharedBytes = kStages * kPieceBytes + 128;
    cudaFuncSetAttribute(read_pieces, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    cudaLaunchAttribute overlapped{};
    overlapped.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlapped.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(multiprocessors);
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlapped;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, read_pieces, static_cast<const char*>(data), bytes / kPieceBytes, interleaved != 0,
                       out);
    return cudaGetLastError();
}
