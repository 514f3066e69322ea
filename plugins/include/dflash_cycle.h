// C launch API of a cycle's bookkeeping: gathering slot state, placing block rows in the cache, cutting and publishing.
// The conventions are those of dflash_kernels.h. The torch definitions are runtime/slots.py and runtime/cycle.py.
//
// Words: B requests of a batch, S block size, R rows of the slot state (slots and one idle slot). Indices are int64.
#pragma once

#include "dflash_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rows of the state matrices, in this order: runtime/slots.py.
#define DFLASH_STATE_INTS 7    // anchor, context length, remaining, generated, seed, top_k, min_tokens
#define DFLASH_STATE_FLOATS 6  // temperature, top_p, min_p, repetition, presence, frequency
#define DFLASH_MAX_STOP_IDS 64
#define DFLASH_MAX_CYCLE_BLOCK 64

// Copies the state of slots[b] to column b, and gives every request the length of its block: min(remaining + 1, S), or 0
// when nothing remains.
typedef struct dflash_cycle_gather_params {
    uint32_t struct_size;
    int32_t batch, state_rows, pages, block_size;
    const int64_t* slots;       // [B]
    const int64_t* ints;        // [DFLASH_STATE_INTS, R]
    const float* floats;        // [DFLASH_STATE_FLOATS, R]
    const int64_t* page_table;  // [R, pages], row stride page_stride
    int64_t page_stride;
    const int64_t* stop_ids;  // [R, DFLASH_MAX_STOP_IDS]
    int64_t* out_ints;        // [DFLASH_STATE_INTS, B]
    float* out_floats;        // [DFLASH_STATE_FLOATS, B]
    int64_t* out_pages;       // [B, pages]
    int64_t* out_stop_ids;    // [B, DFLASH_MAX_STOP_IDS]
    int64_t* block_lengths;   // [B]
} dflash_cycle_gather_params;

DFLASH_EXPORT int32_t dflash_cycle_gather(const dflash_cycle_gather_params* params, dflash_stream stream);

// positions[b, i] = context_lengths[b] + i, and the cache row of that position where i < lengths[b], else -1.
DFLASH_EXPORT int32_t dflash_block_rows(const int64_t* page_table, int64_t page_stride, int32_t pages,
                                        const int64_t* context_lengths, const int64_t* lengths, int32_t batch,
                                        int32_t block_size, int32_t page_tokens, int64_t* positions, int64_t* slots,
                                        dflash_stream stream);

// Cuts what was accepted after the first stop id and at the tokens still allowed. status: 0 running, 1 stopped, 2 out of
// length, 3 faulty (nothing is produced). packed[b] = tokens, produced, accepted, status: what the host reads.
typedef struct dflash_cycle_cut_params {
    uint32_t struct_size;
    int32_t batch, block_size;
    const int64_t* tokens;     // [B, S]: accepted drafts, the token after them, then anything
    const int64_t* accepted;   // [B]
    const uint8_t* faulty;     // [B]
    const int64_t* remaining;  // [B]
    const int64_t* stop_ids;   // [B, DFLASH_MAX_STOP_IDS], -1 = none
    int64_t* produced;         // [B]
    int64_t* status;           // [B]
    int64_t* packed;           // [B, S + 3]
} dflash_cycle_cut_params;

DFLASH_EXPORT int32_t dflash_cycle_cut(const dflash_cycle_cut_params* params, dflash_stream stream);

// Moves the slots forward: the last produced token is the anchor, context and generated grow by produced, remaining
// shrinks by it, to 0 unless the status is running.
typedef struct dflash_cycle_publish_params {
    uint32_t struct_size;
    int32_t batch, block_size, state_rows;
    const int64_t* slots;     // [B]; repeated slots must produce nothing
    const int64_t* rows;      // [DFLASH_STATE_INTS, B] as gathered
    const int64_t* tokens;    // [B, S]
    const int64_t* produced;  // [B]
    const int64_t* status;    // [B]
    int64_t* ints;            // [DFLASH_STATE_INTS, R], updated
} dflash_cycle_publish_params;

DFLASH_EXPORT int32_t dflash_cycle_publish(const dflash_cycle_publish_params* params, dflash_stream stream);

#ifdef __cplusplus
}
#endif
