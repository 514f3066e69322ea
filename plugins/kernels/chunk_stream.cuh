// Chunks of logits on their way from device memory while the block still works on the one before.
//
// Every thread copies its own 16-byte vectors and reads them back itself, so that no barrier is needed: the copy of the
// next chunk is asked for when the current one is in registers.
#pragma once

#include "chunk_select.cuh"
#include "mma.cuh"

namespace dflash {

template <typename T>
struct ChunkStream {
    static constexpr int kVectors = ChunkValues<T>::kVectors;
    using Buffer = uint4[kVectors][kChunkThreads];  // 32 KB of float32, 16 KB of the others

    Buffer& buffer;

    // Starts to copy the calling thread's part of a chunk. What was copied before must have been taken.
    __device__ void ask(const LogitRow<T>& row, int chunk, int chunks) {
        const ChunkValues<T> wanted(row, chunk, chunks);
        const int first = wanted.vector_index(0);
        if (row.is_inside(first) && row.is_inside(wanted.vector_index(kVectors - 1))) {
            const char* source = reinterpret_cast<const char*>(row.row + row.first_column(first));
#pragma unroll
            for (int i = 0; i < kVectors; ++i)
                copy_async_16(place(i), source + int64_t(i) * (chunks * kChunkThreads * int(sizeof(uint4))));
        } else {
#pragma unroll 1
            for (int i = 0; i < kVectors; ++i) {
                const int vector = wanted.vector_index(i);
                if (row.is_inside(vector)) {
                    copy_async_16(place(i), row.row + row.first_column(vector));
                } else {
                    buffer[i][threadIdx.x] = row.edge_vector(vector);
                }
            }
        }
        copy_async_commit();
    }

    // Waits for the chunk asked for last and puts it into registers; NaN stays.
    __device__ void take(ChunkValues<T>& chunk) {
        copy_async_wait<0>();
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint4 packed = buffer[i][threadIdx.x];
            const T* elements = reinterpret_cast<const T*>(&packed);
#pragma unroll
            for (int j = 0; j < kVectorElements<T>; ++j)
                chunk.values[i * kVectorElements<T> + j] = to_float(elements[j]);
        }
    }

private:
    __device__ uint32_t place(int i) const { return shared_address(&buffer[i][threadIdx.x]); }
};

}  // namespace dflash
