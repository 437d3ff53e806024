/*
 * What the benchmark decodes: caches filled with random, planted or recorded keys, and the queries that go with them.
 *
 * random    Elements of queries, keys and values are independent and normal, so that with the usual scale 1/sqrt(k_dim) scores are
 *           normal with deviation about 1.  Few tokens are in the support of alpha > 1, but nothing short of the keys tells which:
 *           bounds rule out nothing.
 *
 * planted   As random, but in each stretch of 800 tokens of each sequence and KV head one run of 16, at a random place, is a
 *           cluster: 2 % of the tokens.  A KV head has two directions u_0, u_1, unit vectors of its own; runs take them in turn,
 *           and their keys are  strength sqrt(k_dim) u + 0.02 g,  g normal.  Query head i of a group in sequence b looks for direction
 *           c = (i + b) mod 2:  q = sqrt(k_dim) (0.9 u_c + sqrt(1 - 0.9^2) w),  w a random unit vector.  So other tokens' scores
 *           have deviation 1, the clusters score alike, strength 0.9 sqrt(k_dim) or so, and the support lies among them: up to 1 % of
 *           the tokens for a head, 2 % for a group.  The strength is 1.25 for even KV heads, where page boxes do not see
 *           the clusters (noise that is independent in every dimension makes boxes wide) and a sketch does, and 2 for odd ones,
 *           where boxes do: the two kinds of heads that a trained model has.
 *
 * recorded  What entmaxkv-lm record wrote: every layer, its own heads, dimensions, scale, slopes and alpha.  A context of N is the last
 *           N tokens, and the queries those of the last positions; sequence b of a batch ends b tokens earlier.
 *
 * Query tokens have queries of their own; a planted head looks for the same direction at all of them.  Values are normal, except for
 * recorded ones.  All numbers depend on the seed and the place alone, not on threads.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_WORKLOAD_H
#define EKV_WORKLOAD_H

#include "entmaxkv/entmaxkv.h"
#include "recording.h"

typedef enum key_kind { KEYS_RANDOM, KEYS_PLANTED, KEYS_RECORDED, KEY_KINDS } key_kind;
extern const char *const key_kind_names[KEY_KINDS];

typedef struct workload_shape {
    key_kind keys;
    ekv_dtype dtype;
    int32_t layers, kv_heads, k_dim, v_dim, page_size, batch;
    int64_t context; /* tokens of each sequence */
    uint64_t seed;
    const recording *recording; /* keys recorded: the shape above is its shape, but for dtype, page_size, batch and context */
} workload_shape;

typedef struct workload {
    workload_shape shape;
    ekv_cache *cache;
    int32_t *sequences; /* [batch] */
} workload;

/* Memory that a workload takes, in bytes, with all statistics. */
double workload_bytes(const workload_shape *shape);
/* Creates and fills the cache, with the statistics that the policies need.  False with the error set. */
bool workload_create(ekv_context *context, const workload_shape *shape, workload *w, lm_error *error);
void workload_free(workload *w); /* also after a failure */
/* The queries of a step of one layer: [batch][tokens][kv_heads * group][k_dim], `tokens` at the end of each sequence. */
void workload_queries(const workload *w, int32_t layer, int32_t group, int64_t tokens, float *q);

#endif
