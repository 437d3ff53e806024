/*
 * The state of one sequence that a model is running over: the KV cache, what the convolutions remember, and scratch memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_STATE_H
#define LM_STATE_H

#include "config.h"
#include "error.h"
#include "meter.h"

#include <entmaxkv/entmaxkv.h>

enum { LM_CHUNK = 256 }; /* most tokens of one prefill step: enough for BLAS, little scratch memory */

/* The queries that attention got, as it got them, at consecutive positions. */
typedef struct lm_queries {
    int64_t first, count; /* positions */
    float *rows;          /* [layers][count][q_width] */
} lm_queries;

typedef struct lm_state_params {
    ekv_dtype kv_type;
    const char *backend; /* NULL: the library's choice */
    int32_t threads;     /* 0: the library's choice; BLAS and the elementwise functions use as many */
    int64_t max_length;  /* longest sequence in tokens */
} lm_state_params;

typedef struct lm_state {
    lm_config config;
    ekv_context *context;
    ekv_cache *cache;
    int32_t sequence;
    int32_t threads;
    int64_t length; /* tokens so far */

    /* How attention runs from now on. */
    ekv_policy policy;
    int64_t budget;  /* tokens, for topk */
    lm_meter *meter; /* NULL: nothing is measured; else one token at a time */
    lm_queries *queries; /* NULL: queries are not kept */

    float *tails; /* [layers][taps - 1][width]: the last normalised inputs, which the next token's convolution sees */

    /* Scratch for one chunk. */
    float *x;        /* [LM_CHUNK][width], the residual stream */
    float *window;   /* [taps - 1 + LM_CHUNK][width]: a layer's tail, then the normalised inputs */
    float *normed;   /* [LM_CHUNK][width] */
    float *qkv;      /* [LM_CHUNK][q_width + 2 * kv_width] */
    float *attended; /* [LM_CHUNK][q_width] */
    float *gate_up;  /* [LM_CHUNK][2 * intermediate] */

    /* Scratch for measuring one token. */
    float *check;        /* [q_width] */
    ekv_report *reports; /* [heads] */
} lm_state;

/* Creates the library context, the cache and an empty sequence; NULL with the error set. */
lm_state *lm_state_create(const lm_config *config, const lm_state_params *params, lm_error *error);
void lm_state_free(lm_state *state); /* NULL is allowed */

/* Chooses the policy of the following forward passes and where they are measured (NULL: nowhere). */
void lm_state_use(lm_state *state, ekv_policy policy, int64_t budget, lm_meter *meter);

/* Forgets all tokens. */
bool lm_state_reset(lm_state *state, lm_error *error);

/* A point to come back to.  It holds the length and the convolutions' memory, a few kilobytes; the keys and values stay in the
 * cache, so a snapshot is good for as long as the state is not reset or restored to an earlier one. */
typedef struct lm_snapshot {
    int64_t length;
    float *tails;
} lm_snapshot;

bool lm_snapshot_take(const lm_state *state, lm_snapshot *snapshot, lm_error *error);
bool lm_snapshot_restore(lm_state *state, const lm_snapshot *snapshot, lm_error *error);
void lm_snapshot_free(lm_snapshot *snapshot);

#endif
