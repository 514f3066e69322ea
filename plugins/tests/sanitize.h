// What the programs for compute-sanitizer share: exactly sized device buffers, and stopping at the first failure.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "dflash_kernels.h"

inline std::mt19937 generator(7);
inline std::vector<void*> allocations;

inline void check(bool ok, const char* what) {
    if (ok) return;
    std::printf("%s: %s %s\n", what, dflash_last_error(), cudaGetErrorString(cudaGetLastError()));
    std::exit(1);
}

template <typename T>
T* upload(const std::vector<T>& values) {
    T* pointer = nullptr;
    check(cudaMalloc(&pointer, std::max<size_t>(values.size() * sizeof(T), 1)) == cudaSuccess, "cudaMalloc");
    check(cudaMemcpy(pointer, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    allocations.push_back(pointer);
    return pointer;
}

inline void free_uploads() {
    for (void* pointer : allocations) cudaFree(pointer);
    allocations.clear();
}
