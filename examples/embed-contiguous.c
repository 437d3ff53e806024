/*
 * Embedding: an app that owns its KV cache, one contiguous sequence per layer, [tokens][heads][dim].
 *
 * The library reads that memory in place.  The app keeps an index of page statistics for each layer and tells it which tokens are
 * new.  Here two policies decode the same step and must agree: certified proves its result equal to full's.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <entmaxkv/entmaxkv.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 4, DIM = 64, PAGE = 16, TOKENS = 4000, CAPACITY = 4096 };

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
    static float k[LAYERS][CAPACITY][KV_HEADS][DIM], v[LAYERS][CAPACITY][KV_HEADS][DIM];
    static float q[Q_HEADS][DIM], full[Q_HEADS][DIM], out[Q_HEADS][DIM];
    ekv_kv kv[LAYERS];
    ekv_index *index[LAYERS];
    check(ekv_context_create(NULL, &context, NULL, 0));

    ekv_index_params shape = ekv_index_params_default();
    shape.dtype = EKV_F32;
    shape.kv_heads = KV_HEADS;
    shape.k_dim = shape.v_dim = DIM;
    shape.page_size = PAGE;
    shape.blocks = CAPACITY / PAGE;
    shape.statistics = EKV_STATISTICS_NORMS | EKV_STATISTICS_BOX | EKV_STATISTICS_SKETCH;
    for (int l = 0; l < LAYERS; l++) {
        kv[l] = ekv_kv_default();
        kv[l].dtype = EKV_F32;
        kv[l].kv_heads = KV_HEADS;
        kv[l].k_dim = kv[l].v_dim = DIM;
        kv[l].page_size = PAGE;
        kv[l].blocks = CAPACITY / PAGE;
        kv[l].k = k[l];
        kv[l].v = v[l];
        kv[l].k_head_stride = kv[l].v_head_stride = DIM;
        kv[l].k_token_stride = kv[l].v_token_stride = KV_HEADS * DIM;
        kv[l].k_block_stride = kv[l].v_block_stride = PAGE * KV_HEADS * DIM;
        check(ekv_index_create(context, &shape, NULL, 0, &index[l]));
    }
    for (int l = 0; l < LAYERS; l++) { /* the app writes tokens wherever it likes ... */
        for (size_t i = 0; i < (size_t)TOKENS * KV_HEADS * DIM; i++) {
            (&k[l][0][0][0])[i] = number();
            (&v[l][0][0][0])[i] = number();
        }
        check(ekv_index_update(context, index[l], &kv[l], NULL, 0, TOKENS, TOKENS)); /* ... and says which are new */
    }

    const int32_t length = TOKENS;
    ekv_report report[Q_HEADS];
    ekv_decode_params step = ekv_decode_params_default();
    step.lengths = &length;
    step.q_heads = Q_HEADS;
    step.q = q;
    step.report = report;
    for (int l = 0; l < LAYERS; l++) {
        for (int i = 0; i < Q_HEADS * DIM; i++) (&q[0][0])[i] = 4.0f * number();
        step.kv = &kv[l];
        step.index = index[l];
        step.policy = EKV_POLICY_FULL;
        step.out = full;
        check(ekv_decode(context, &step));
        step.policy = EKV_POLICY_CERTIFIED;
        step.out = out;
        check(ekv_decode(context, &step));
        printf("layer %d: support %lld of %d tokens, outputs %s\n", l, (long long)report[0].support, TOKENS,
               memcmp(full, out, sizeof out) == 0 ? "identical" : "DIFFERENT");
        if (memcmp(full, out, sizeof out) != 0) return 1;
    }
    for (int l = 0; l < LAYERS; l++) ekv_index_destroy(index[l]);
    ekv_context_destroy(context);
    return 0;
}
