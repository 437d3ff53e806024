/*
 * What the benchmark decodes (see workload.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workload.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const key_kind_names[KEY_KINDS] = {"random", "planted", "recorded"};

enum { RUN = 16, STRETCH = 800, ROWS = 1024 /* most tokens that are filled at once */, MOST_IN_GROUP = 256 };

static const double query_share = 0.9, cluster_noise = 0.02;

/* ---- numbers ---- */

/* Places of a stream of random numbers. */
typedef enum purpose { KEYS, VALUES, QUERIES, DIRECTIONS, RUNS } purpose;

static uint64_t next(uint64_t *state) { /* splitmix64 */
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t stream_of(uint64_t seed, purpose what, int64_t sequence, int64_t head, int64_t place) {
    const uint64_t parts[5] = {seed, (uint64_t)what, (uint64_t)sequence, (uint64_t)head, (uint64_t)place};
    uint64_t state = 0;
    for (int i = 0; i < 5; i++) {
        state += parts[i];
        state = next(&state);
    }
    return state;
}

/* Normal numbers by table: the quantiles at the middles of 65,536 equal steps.  It is filled before threads use it. */
static float quantile[1 << 16];

static void fill_quantiles(void) {
    double x = 0;
    if (quantile[0] != 0) return;
    for (int i = 1 << 15; i < 1 << 16; i++) { /* Newton's method from the neighbour */
        const double p = (i + 0.5) / (1 << 16);
        for (int step = 0; step < 6; step++) x -= (1 - 0.5 * erfc(x / sqrt(2.0)) - p) / (exp(-x * x / 2) * 0.3989422804014327);
        quantile[i] = (float)x;
        quantile[(1 << 16) - 1 - i] = (float)-x;
    }
}

static void normal_row(uint64_t state, int32_t dim, float *row) {
    uint64_t bits = 0;
    for (int32_t d = 0; d < dim; d++, bits >>= 16) {
        if (d % 4 == 0) bits = next(&state);
        row[d] = quantile[bits & 0xffff];
    }
}

static void unit_row(uint64_t state, int32_t dim, float *row) {
    double squares = 0;
    normal_row(state, dim, row);
    for (int32_t d = 0; d < dim; d++) squares += (double)row[d] * row[d];
    for (int32_t d = 0; d < dim; d++) row[d] = (float)(row[d] / sqrt(squares));
}

/* ---- random and planted rows ---- */

/* Direction 0 or 1 of a planted token; -1 for the others. */
static int planted_direction(const workload_shape *s, int32_t sequence, int32_t head, int64_t token) {
    uint64_t state = stream_of(s->seed, RUNS, sequence, head, token / STRETCH);
    const int64_t place = token % STRETCH - (int64_t)(next(&state) % (STRETCH - RUN + 1));
    return place >= 0 && place < RUN ? (int)(token / STRETCH % 2) : -1;
}

static void direction(const workload_shape *s, int32_t head, int which, float *row) {
    unit_row(stream_of(s->seed, DIRECTIONS, 0, head, which), s->k_dim, row);
}

static void fill_key(const workload_shape *s, int32_t sequence, int32_t head, int64_t token, float *row) {
    const int planted = s->keys == KEYS_PLANTED ? planted_direction(s, sequence, head, token) : -1;
    float u[EKV_MAX_DIM];
    normal_row(stream_of(s->seed, KEYS, sequence, head, token), s->k_dim, row);
    if (planted < 0) return;
    const double strength = (head % 2 ? 2.0 : 1.25) * sqrt((double)s->k_dim);
    direction(s, head, planted, u);
    for (int32_t d = 0; d < s->k_dim; d++) row[d] = (float)(strength * u[d] + cluster_noise * row[d]);
}

/* Of query head `group` of a KV head, `back` tokens before the last one. */
static void fill_query(const workload_shape *s, int32_t sequence, int32_t head, int32_t group, int64_t back, float *row) {
    const uint64_t stream = stream_of(s->seed, QUERIES, sequence, head, back * MOST_IN_GROUP + group);
    float u[EKV_MAX_DIM];
    if (s->keys == KEYS_RANDOM) {
        normal_row(stream, s->k_dim, row);
        return;
    }
    unit_row(stream, s->k_dim, row);
    direction(s, head, (group + sequence) % 2, u);
    const double length = sqrt((double)s->k_dim), rest = sqrt(1 - query_share * query_share);
    for (int32_t d = 0; d < s->k_dim; d++) row[d] = (float)(length * (query_share * u[d] + rest * row[d]));
}

/* Tokens [first, first + count) of a sequence. */
static void fill_rows(const workload_shape *s, int32_t sequence, int64_t first, int64_t count, float *k, float *v) {
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static)
#endif
    for (int64_t t = 0; t < count; t++) {
        for (int32_t h = 0; h < s->kv_heads; h++) {
            const int64_t row = t * s->kv_heads + h;
            fill_key(s, sequence, h, first + t, k + row * s->k_dim);
            normal_row(stream_of(s->seed, VALUES, sequence, h, first + t), s->v_dim, v + row * s->v_dim);
        }
    }
}

/* ---- the cache ---- */

static size_t element_bytes(ekv_dtype dtype) { return dtype == EKV_F32 ? 4 : 2; }

/* Tokens that are filled at once. */
static int64_t rows_of(const workload_shape *s) { return s->context < ROWS ? s->context : ROWS; }

static int64_t pages_of(const workload_shape *s) { return (s->context + s->page_size - 1) / s->page_size * s->batch; }

/* The sketch exists for pages of whole groups of 16 tokens alone. */
static uint32_t statistics_of(const workload_shape *s) {
    return EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS |
           (s->page_size % 16 == 0 ? (uint32_t)EKV_STATISTICS_SKETCH : 0u);
}

double workload_bytes(const workload_shape *s) {
    ekv_index_params index = ekv_index_params_default();
    index.dtype = s->dtype;
    index.kv_heads = s->kv_heads;
    index.k_dim = s->k_dim;
    index.v_dim = s->v_dim;
    index.page_size = s->page_size;
    index.blocks = pages_of(s);
    index.statistics = statistics_of(s);
    const double rows = (double)pages_of(s) * s->page_size * s->kv_heads;
    const double chunk = 4.0 * (double)rows_of(s) * s->kv_heads * (s->k_dim + s->v_dim);
    return s->layers * (rows * (s->k_dim + s->v_dim) * (double)element_bytes(s->dtype) + (double)ekv_index_bytes(&index)) + chunk;
}

static bool append(ekv_context *context, workload *w, int32_t sequence, int32_t layer, int64_t count, const void *k,
                   const void *v, ekv_dtype dtype, lm_error *error) {
    ekv_append_params rows = ekv_append_params_default();
    rows.count = count;
    rows.k = k;
    rows.v = v;
    rows.dtype = dtype;
    return ekv_cache_append(context, w->cache, w->sequences[sequence], layer, &rows) == EKV_OK ||
           lm_fail(error, "cannot fill the cache: %s", ekv_last_error(context));
}

/* k and v have room for rows_of() tokens, in whatever type. */
static bool fill_sequence(ekv_context *context, workload *w, int32_t sequence, int32_t layer, float *k, float *v,
                          lm_error *error) {
    const workload_shape *s = &w->shape;
    const recording *r = s->recording;
    for (int64_t done = 0, count; done < s->context; done += count) {
        count = s->context - done < ROWS ? s->context - done : ROWS;
        ekv_dtype dtype = EKV_F32;
        if (s->keys == KEYS_RECORDED) { /* copied, since the file's data need not be aligned */
            const size_t first = (size_t)(r->length - sequence - s->context + done), bytes = element_bytes(r->dtype);
            const size_t k_row = (size_t)(r->kv_heads * r->k_dim) * bytes, v_row = (size_t)(r->kv_heads * r->v_dim) * bytes;
            memcpy(k, r->layer[layer].k + first * k_row, (size_t)count * k_row);
            memcpy(v, r->layer[layer].v + first * v_row, (size_t)count * v_row);
            dtype = r->dtype;
        } else {
            fill_rows(s, sequence, done, count, k, v);
        }
        if (!append(context, w, sequence, layer, count, k, v, dtype, error)) return false;
    }
    return true;
}

static bool fill(ekv_context *context, workload *w, lm_error *error) {
    const workload_shape *s = &w->shape;
    const size_t rows = (size_t)rows_of(s) * (size_t)s->kv_heads;
    float *k = malloc(rows * (size_t)s->k_dim * sizeof *k), *v = malloc(rows * (size_t)s->v_dim * sizeof *v);
    bool ok = (k && v) || lm_fail(error, "out of memory");
    for (int32_t b = 0; ok && b < s->batch; b++)
        ok = ekv_sequence_create(context, w->cache, &w->sequences[b]) == EKV_OK || lm_fail(error, "%s", ekv_last_error(context));
    for (int32_t b = 0; ok && b < s->batch; b++)
        for (int32_t layer = 0; ok && layer < s->layers; layer++) ok = fill_sequence(context, w, b, layer, k, v, error);
    free(k);
    free(v);
    return ok;
}

bool workload_create(ekv_context *context, const workload_shape *shape, workload *w, lm_error *error) {
    ekv_cache_params params = ekv_cache_params_default();
    *w = (workload){.shape = *shape};
    params.dtype = shape->dtype;
    params.layers = shape->layers;
    params.kv_heads = shape->kv_heads;
    params.k_dim = shape->k_dim;
    params.v_dim = shape->v_dim;
    params.page_size = shape->page_size;
    params.blocks = pages_of(shape);
    params.max_sequences = shape->batch;
    params.statistics = statistics_of(shape);
    fill_quantiles();
    w->sequences = calloc((size_t)shape->batch, sizeof *w->sequences);
    if (!w->sequences) return lm_fail(error, "out of memory");
    if (ekv_cache_create(context, &params, &w->cache) != EKV_OK)
        return lm_fail(error, "cannot create the cache: %s", ekv_last_error(context));
    return fill(context, w, error);
}

void workload_free(workload *w) {
    ekv_cache_destroy(w->cache);
    free(w->sequences);
    *w = (workload){0};
}

void workload_queries(const workload *w, int32_t layer, int32_t group, int64_t tokens, float *q) {
    const workload_shape *s = &w->shape;
    const recording *r = s->recording;
    const size_t row = (size_t)(s->kv_heads * group) * (size_t)s->k_dim; /* of a token */
    for (int32_t b = 0; b < s->batch; b++) {
        float *of_sequence = q + (size_t)b * (size_t)tokens * row;
        if (s->keys == KEYS_RECORDED) {
            const size_t first = (size_t)(r->queries - b - tokens);
            memcpy(of_sequence, r->layer[layer].q + first * row * sizeof *q, (size_t)tokens * row * sizeof *q);
            continue;
        }
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static)
#endif
        for (int64_t t = 0; t < tokens; t++)
            for (int32_t h = 0; h < s->kv_heads * group; h++)
                fill_query(s, b, h / group, h % group, tokens - 1 - t, of_sequence + (size_t)t * row + (size_t)h * (size_t)s->k_dim);
    }
}
