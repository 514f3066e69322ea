// Runs the kernels of dflash_select.h on a few awkward shapes with exactly sized buffers, for compute-sanitizer:
//
//   nvcc -std=c++17 -arch=native -Iplugins/include -Iplugins/kernels plugins/tests/sanitize_select.cu \
//        plugins/kernels/{library,candidates,selector_walk,grouped_conv,accept,accept_filter,accept_draw}.cu -o
//        sanitize
//   compute-sanitizer --tool memcheck ./sanitize && compute-sanitizer --tool racecheck ./sanitize
//
// The values are judged by tests/plugins; here only the accesses are.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "dflash_select.h"
#include "sanitize.h"

namespace {

template <typename T>
T* room(size_t count) {
    return upload(std::vector<T>(count));
}

std::vector<float> normal(size_t count, float scale = 1.0f) {
    std::normal_distribution<float> draw(0.0f, scale);
    std::vector<float> values(count);
    for (float& value : values) value = draw(generator);
    return values;
}

std::vector<int64_t> integers(size_t count, int64_t limit) {
    std::vector<int64_t> values(count);
    for (int64_t& value : values) value = int64_t(generator() % uint64_t(limit));
    return values;
}

void finish(int32_t status, const char* what) {
    check(status == DFLASH_OK && cudaDeviceSynchronize() == cudaSuccess, what);
    free_uploads();
}

void convolve(int rows, int block_size, int width, int groups, int taps, bool out_form) {
    dflash_grouped_conv_params p{};
    p.struct_size = sizeof(p);
    p.dtype = DFLASH_FLOAT32;
    p.rows = rows, p.block_size = block_size, p.width = width, p.groups = groups, p.taps = taps;
    p.eps = 1e-6f;
    p.x = upload(normal(size_t(rows) * width));
    p.dynamic = upload(normal(size_t(rows) * taps * groups));
    p.base = upload(normal(size_t(taps) * width));
    p.residual = out_form ? upload(normal(size_t(rows) * width)) : nullptr;
    p.norm_weight = out_form ? upload(normal(width)) : nullptr;
    p.out = room<float>(size_t(rows) * width);
    p.x_stride = width, p.dynamic_stride = taps * groups;
    finish(dflash_grouped_conv(&p, nullptr), "grouped_conv");
}

void candidates(int rows, int columns, int valid, int count) {
    dflash_candidates_params p{};
    p.struct_size = sizeof(p);
    p.dtype = DFLASH_FLOAT32;
    p.rows = rows, p.columns = columns, p.valid_columns = valid, p.count = count;
    p.multiplier = 1.0f;
    p.logits = upload(normal(size_t(rows) * columns));
    p.logits_stride = columns;
    p.values = room<float>(size_t(rows) * count);
    p.ids = room<int64_t>(size_t(rows) * count);
    p.workspace_bytes = dflash_candidates_workspace_bytes(&p);
    p.workspace = room<uint8_t>(size_t(p.workspace_bytes));
    const int32_t status = dflash_candidates(&p, nullptr);
    check(status == DFLASH_OK, "candidates");
    finish(dflash_merge_candidates(p.values, p.ids, p.values, p.ids, 1, rows, count, nullptr), "merge_candidates");
}

void walk(int batch, int positions, int count, int rank, float temperature) {
    const int64_t vocabulary = 200;
    dflash_walk_params p{};
    p.struct_size = sizeof(p);
    p.dtype = DFLASH_FLOAT32;
    p.batch = batch, p.positions = positions, p.count = count, p.rank = rank, p.vocabulary = vocabulary;
    const size_t entries = size_t(batch) * positions;
    p.unary = upload(normal(entries * count));
    p.candidates = upload(integers(entries * count, vocabulary));
    p.hidden = upload(normal(entries * rank));
    p.predecessor_codebook = upload(normal(size_t(vocabulary) * rank, 0.3f));
    p.successor_codebook = upload(normal(size_t(vocabulary) * rank, 0.3f));
    p.anchors = upload(integers(batch, vocabulary));
    p.temperatures = upload(std::vector<float>(batch, temperature));
    p.seeds = upload(integers(batch, 1000));
    p.first_positions = upload(integers(batch, 1000));
    p.tokens = room<int64_t>(entries);
    p.q_rows = room<float>(entries * count);
    finish(dflash_selector_walk(&p, nullptr), "selector_walk");
}

void accept(int batch, int block_size, int columns, float temperature, int64_t top_k, float top_p, float min_p) {
    const int count = 4;
    dflash_accept_params p{};
    p.struct_size = sizeof(p);
    p.dtype = DFLASH_FLOAT32;
    p.batch = batch, p.block_size = block_size, p.count = count, p.columns = columns, p.valid_columns = columns;
    const size_t drafts = size_t(batch) * (block_size - 1);
    p.logits = upload(normal(size_t(batch) * block_size * columns));
    p.logits_stride_batch = int64_t(block_size) * columns, p.logits_stride_row = columns;
    p.draft_tokens = upload(integers(drafts, columns));
    p.candidates = upload(integers(drafts * count, columns));
    p.q_rows = upload(std::vector<float>(drafts * count, 0.25f));
    std::vector<int64_t> lengths(batch, block_size);
    lengths[0] = 0;
    p.block_lengths = upload(lengths);
    p.temperatures = upload(std::vector<float>(batch, temperature));
    p.top_k = upload(std::vector<int64_t>(batch, top_k));
    p.top_p = upload(std::vector<float>(batch, top_p));
    p.min_p = upload(std::vector<float>(batch, min_p));
    p.seeds = upload(integers(batch, 1000));
    p.first_positions = upload(integers(batch, 1000));
    p.tokens = room<int64_t>(size_t(batch) * block_size);
    p.accepted = room<int64_t>(batch);
    p.committed = room<int64_t>(batch);
    p.faulty = room<uint8_t>(batch);
    p.workspace_bytes = dflash_accept_workspace_bytes(&p);
    p.workspace = room<uint8_t>(size_t(p.workspace_bytes));
    finish(dflash_accept(&p, nullptr), "accept");
}

}  // namespace

int main() {
    for (bool out_form : {false, true}) {
        convolve(16, 8, 576, 36, 2, out_form);
        convolve(14, 7, 8200, 1025, 3, out_form);
        convolve(3, 1, 24, 8, 8, out_form);
    }
    candidates(3, 8193, 8193, 16);
    candidates(2, 999, 700, 32);
    candidates(1, 3, 0, 4);
    walk(2, 7, 16, 64, 0.0f);
    walk(3, 15, 32, 256, 1.0f);
    walk(1, 1, 1, 8, 1.0f);
    accept(3, 4, 9001, 0.0f, 0, 1.0f, 0.0f);
    accept(3, 4, 9001, 1.0f, 0, 1.0f, 0.0f);
    accept(3, 4, 9001, 1.0f, 50, 0.9f, 0.05f);
    accept(2, 3, 20001, 1.5f, 0, 0.9f, 0.0f);
    accept(2, 3, 20001, 1.5f, 5000, 0.9f, 0.001f);
    accept(2, 1, 17, 1.0f, 0, 0.5f, 0.0f);
    std::printf("sanitize_select: done\n");
    return 0;
}
