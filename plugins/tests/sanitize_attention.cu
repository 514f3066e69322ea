// Runs the attention kernels of compute capability 9.0 on a few awkward shapes with exactly sized buffers, for
// compute-sanitizer:
//
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -lineinfo -Iplugins/include -Iplugins/kernels
//        plugins/tests/sanitize_attention.cu plugins/kernels/{library,attention*}.cu -o sanitize
//   compute-sanitizer --tool memcheck ./sanitize && compute-sanitizer --tool racecheck ./sanitize
//
// The values are judged by tests/plugins; here only that splitting the keys changes nothing but rounding.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "sanitize.h"

namespace {

// Of 65536 numbers drawn once, in another order each time: drawing millions takes longer than what is tested.
__nv_bfloat16* normal(size_t count) {
    static const std::vector<__nv_bfloat16> drawn = [] {
        std::normal_distribution<float> draw(0.0f, 1.0f);
        std::vector<__nv_bfloat16> numbers(1 << 16);
        for (auto& number : numbers) number = __float2bfloat16(draw(generator));
        return numbers;
    }();
    const uint32_t first = generator(), step = generator() | 1;
    std::vector<__nv_bfloat16> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = drawn[(first + uint32_t(i) * step) % drawn.size()];
    return upload(values);
}

struct Case {
    int head_dim, kv_heads, group, page_tokens;
    bool block_mode, settled;
    int queries, window;
    std::vector<int> contexts;
};

// The result of one call.
std::vector<__nv_bfloat16> attend(dflash_attention_params p, size_t count) {
    std::vector<__nv_bfloat16> out(count, __float2bfloat16(NAN));
    p.out = upload(out);
    p.workspace_bytes = dflash_attention_workspace_bytes(&p);
    check(p.workspace_bytes >= 0, "workspace");
    p.workspace = upload(std::vector<char>(p.workspace_bytes));
    check(dflash_attention(&p, nullptr) == DFLASH_OK && cudaDeviceSynchronize() == cudaSuccess, "attention");
    check(cudaMemcpy(out.data(), p.out, count * 2, cudaMemcpyDeviceToHost) == cudaSuccess, "result");
    return out;
}

void run(const Case& c) {
    const int batch = static_cast<int>(c.contexts.size()), heads = c.kv_heads * c.group, tokens = batch * c.queries;
    const int longest = *std::max_element(c.contexts.begin(), c.contexts.end());
    const int columns = (longest + c.queries + c.page_tokens - 1) / c.page_tokens;
    std::vector<int64_t> pages(size_t(batch) * columns), contexts(c.contexts.begin(), c.contexts.end()), starts;
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), generator);
    for (int i = 0; i <= batch; ++i) starts.push_back(int64_t(i) * c.queries);
    const size_t cache = pages.size() * c.page_tokens * c.kv_heads * c.head_dim;

    dflash_attention_params p{};
    p.struct_size = sizeof(p);
    p.dtype = p.kv_dtype = DFLASH_BFLOAT16;
    p.index_bytes = 8;
    p.batch = batch, p.num_heads = heads, p.num_kv_heads = c.kv_heads, p.head_dim = c.head_dim;
    p.page_tokens = c.page_tokens, p.pages_per_request = columns, p.max_query = c.queries;
    p.block_size = c.block_mode ? c.queries : 0;
    p.causal = !c.block_mode;
    p.window_left = p.window_right = c.window;
    p.scale = 1.0f / std::sqrt(float(c.head_dim));
    p.k_scale = p.v_scale = 1.0f;
    p.context_settled = c.settled;
    p.q = normal(size_t(tokens) * heads * c.head_dim);
    p.k_cache = normal(cache), p.v_cache = normal(cache);
    p.page_table = upload(pages), p.context_lengths = upload(contexts);
    if (c.block_mode) {
        p.k_block = normal(size_t(tokens) * c.kv_heads * c.head_dim);
        p.v_block = normal(size_t(tokens) * c.kv_heads * c.head_dim);
    } else {
        p.query_starts = upload(starts);
    }
    p.q_stride = p.out_stride = heads * c.head_dim, p.block_stride = c.kv_heads * c.head_dim;
    p.page_table_stride = columns;

    const size_t count = size_t(tokens) * heads * c.head_dim;
    const std::vector<__nv_bfloat16> split = attend(p, count);
    p.max_splits = 1;
    const std::vector<__nv_bfloat16> whole = attend(p, count);
    float most = 0.0f;
    for (size_t i = 0; i < count; ++i) {
        const float difference = std::fabs(__bfloat162float(split[i]) - __bfloat162float(whole[i]));
        most = difference <= most ? most : difference;  // NaN stays
    }
    std::printf("head_dim %d, %d KV heads, group %d, pages of %d, %s%s, %d x %d queries, context %d: %.4f\n",
                c.head_dim, c.kv_heads, c.group, c.page_tokens, c.block_mode ? "block" : "paged",
                c.settled ? " settled" : "", batch, c.queries, longest, most);
    check(most < 0.02f, "splits disagree");
    free_uploads();
}

}  // namespace

// With a number: that many of the cases, since racecheck takes seconds for each.
int main(int count, char** arguments) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    int left = count > 1 ? std::atoi(arguments[1]) : 1000;
    const auto next = [&](const Case& c) {
        if (left-- > 0) run(c);
    };
    // Splits that a second launch joins, which waits beside them; two ends of tiles. Clusters of many sizes, with whole
    // tiles only and with ends, with blocks that have no keys, and none at all; row tiles in waves.
    for (bool settled : {true, false})
        for (int queries : {8, 16}) {
            next({128, 8, 4, 32, true, settled, queries, -1, {2048}});
            next({128, 8, 4, 32, true, settled, queries, -1, {4090}});
            next({128, 8, 4, 64, true, settled, queries, -1, {1024, 130}});
            next({128, 8, 4, 32, false, settled, queries, -1, {515, 7, 300}});
            next({128, 8, 4, 16, false, settled, queries, -1, {2001}});
            next({128, 8, 4, 32, true, settled, queries, 100, {900, 40, 1, 600}});
            next({128, 8, 4, 32, false, settled, queries, 100, {890}});  // 16 new rows: three ends
            next({128, 8, 3, 32, true, settled, queries, -1, {257, 256, 255, 254, 0, 512, 64, 63}});
            next({64, 4, 2, 32, true, settled, queries, -1, {1500}});
            next({128, 8, 4, 32, false, settled, queries, -1, std::vector<int>(20, 190)});
        }
    std::puts("done");
    return 0;
}
