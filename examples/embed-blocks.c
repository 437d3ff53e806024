/*
 * Embedding: a server that owns a pool of blocks in vLLM's flash layout, [blocks][page][heads][dim], with a block table per sequence.
 *
 * Two sequences of different length decode in one batch, straight from the pool.  The statistics are keyed by block, so one index per
 * layer serves all sequences.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <entmaxkv/entmaxkv.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 6, K_DIM = 96, V_DIM = 64, PAGE = 32, BLOCKS = 64, BATCH = 2, PAGES = 24 };

static ekv_context *context;

static void check(ekv_status status) {
    if (status == EKV_OK) return;
    fprintf(stderr, "%s: %s\n", ekv_strerror(status), ekv_last_error(context));
    exit(1);
}

/* Stands for the app's model: some number in [-1, 1). */
static float number(void) {
    static unsigned state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

int main(void) {
    static float k[LAYERS][BLOCKS][PAGE][KV_HEADS][K_DIM], v[LAYERS][BLOCKS][PAGE][KV_HEADS][V_DIM];
    static float q[BATCH][Q_HEADS][K_DIM], out[BATCH][Q_HEADS][V_DIM];
    const int32_t length[BATCH] = {700, 33};
    int32_t table[BATCH][PAGES];
    for (int p = 0; p < PAGES; p++) { /* the two sequences' blocks, mixed as a running server mixes them */
        table[0][p] = 2 * p + 1;
        table[1][p] = 2 * p;
    }
    check(ekv_context_create(NULL, &context, NULL, 0));
    ekv_index_params shape = ekv_index_params_default();
    shape.dtype = EKV_F32;
    shape.kv_heads = KV_HEADS;
    shape.k_dim = K_DIM;
    shape.v_dim = V_DIM;
    shape.page_size = PAGE;
    shape.blocks = BLOCKS;
    ekv_kv kv = ekv_kv_default();
    kv.dtype = EKV_F32;
    kv.kv_heads = KV_HEADS;
    kv.k_dim = K_DIM;
    kv.v_dim = V_DIM;
    kv.page_size = PAGE;
    kv.blocks = BLOCKS;
    kv.k_head_stride = K_DIM;
    kv.k_token_stride = KV_HEADS * K_DIM;
    kv.k_block_stride = PAGE * KV_HEADS * K_DIM;
    kv.v_head_stride = V_DIM;
    kv.v_token_stride = KV_HEADS * V_DIM;
    kv.v_block_stride = PAGE * KV_HEADS * V_DIM;

    ekv_report report[BATCH][Q_HEADS];
    ekv_decode_params step = ekv_decode_params_default();
    step.batch = BATCH;
    step.kv = &kv;
    step.block_table = &table[0][0];
    step.block_table_stride = PAGES;
    step.lengths = length;
    step.q_heads = Q_HEADS;
    step.q = q;
    step.out = out;
    step.policy = EKV_POLICY_TOPK;
    step.budget = 128;
    step.report = &report[0][0];
    step.report_mass = 1;
    for (int l = 0; l < LAYERS; l++) {
        for (size_t i = 0; i < sizeof k[l] / sizeof(float); i++) (&k[l][0][0][0][0])[i] = number();
        for (size_t i = 0; i < sizeof v[l] / sizeof(float); i++) (&v[l][0][0][0][0])[i] = number();
        for (size_t i = 0; i < sizeof q / sizeof(float); i++) (&q[0][0][0])[i] = 4.0f * number();
        ekv_index *index;
        kv.k = k[l];
        kv.v = v[l];
        check(ekv_index_create(context, &shape, NULL, 0, &index)); /* kept for as long as the pool; made here for brevity */
        for (int b = 0; b < BATCH; b++) check(ekv_index_update(context, index, &kv, table[b], 0, length[b], length[b]));
        step.index = index;
        check(ekv_decode(context, &step));
        for (int b = 0; b < BATCH; b++)
            printf("layer %d, sequence %d: read %lld of %d tokens, at most %.3g of the probability mass missed\n", l, b,
                   (long long)report[b][0].tokens, (int)length[b], report[b][0].mass_bound);
        for (size_t i = 0; i < sizeof out / sizeof(float); i++)
            if (!isfinite((&out[0][0][0])[i])) return 1;
        ekv_index_destroy(index);
    }
    ekv_context_destroy(context);
    return 0;
}
