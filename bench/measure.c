/*
 * One cell of the benchmark (see measure.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "measure.h"

#include "cpu/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLE = 4, PREFILL_SAMPLE = 16 }; /* rows of each layer that are computed in double precision */

typedef struct job {
    const cell *cell;
    int32_t q_heads;
    int64_t rows;        /* of a step: batch * queries * q_heads */
    int samples;         /* of them that are checked */
    int32_t *q_start;    /* [batch + 1] */
    float *q;            /* [layers][rows][k_dim] */
    float *out;          /* [policies][layers][rows][v_dim] */
    ekv_report *reports; /* [rows] */
    double *expected;    /* [policies][layers][samples][v_dim] */
    double *seconds;     /* [policies][repeats] */
    double *scores, *z, *weights; /* [context] */
} job;

/* ---- memory ---- */

static void *room(size_t a, size_t b, size_t c, size_t size) { return calloc(a * b * c + 1, size); }

static void release(job *j) {
    free(j->q_start);
    free(j->q);
    free(j->out);
    free(j->reports);
    free(j->expected);
    free(j->seconds);
    free(j->scores);
    free(j->z);
    free(j->weights);
}

static bool allocate(job *j) {
    const cell *c = j->cell;
    const workload_shape *s = &c->workload->shape;
    const size_t policies = (size_t)c->policy_count, layers = (size_t)s->layers, rows = (size_t)j->rows;
    j->q_start = room(1, 1, (size_t)s->batch + 1, sizeof *j->q_start);
    j->q = room(layers, rows, (size_t)s->k_dim, sizeof *j->q);
    j->out = room(policies * layers, rows, (size_t)s->v_dim, sizeof *j->out);
    j->reports = room(1, 1, rows, sizeof *j->reports);
    j->expected = room(policies * layers, (size_t)j->samples, (size_t)s->v_dim, sizeof *j->expected);
    j->seconds = room(1, policies, (size_t)c->repeats, sizeof *j->seconds);
    j->scores = room(1, 1, (size_t)s->context, sizeof *j->scores);
    j->z = room(1, 1, (size_t)s->context, sizeof *j->z);
    j->weights = room(1, 1, (size_t)s->context, sizeof *j->weights);
    return j->q_start && j->q && j->out && j->reports && j->expected && j->seconds && j->scores && j->z && j->weights;
}

double measure_bytes(const workload_shape *shape, int32_t group, int64_t queries, int policy_count) {
    const double rows = (double)shape->batch * (double)queries * shape->kv_heads * group;
    return rows * ((double)shape->layers * (shape->k_dim + (double)policy_count * shape->v_dim) * sizeof(float) + sizeof(ekv_report));
}

static float *out_of(const job *j, int policy, int32_t layer) {
    const workload_shape *s = &j->cell->workload->shape;
    return j->out + ((size_t)policy * (size_t)s->layers + (size_t)layer) * (size_t)j->rows * (size_t)s->v_dim;
}

static double *expected_of(const job *j, int policy, int32_t layer, int sample) {
    const workload_shape *s = &j->cell->workload->shape;
    const size_t at = ((size_t)policy * (size_t)s->layers + (size_t)layer) * (size_t)j->samples + (size_t)sample;
    return j->expected + at * (size_t)s->v_dim;
}

static int64_t sampled_row(const job *j, int sample) { return j->samples > 1 ? sample * (j->rows - 1) / (j->samples - 1) : 0; }

/* Where a row stands, and what it sees: the tokens up to its own. */
static int64_t sequence_of(const job *j, int64_t row) { return row / (j->cell->queries * j->q_heads); }
static int64_t seen_by(const job *j, int64_t row) {
    return j->cell->workload->shape.context - j->cell->queries + 1 + row / j->q_heads % j->cell->queries;
}

/* ---- the library's steps ---- */

static float scale_of(const workload_shape *s) {
    return s->recording ? s->recording->scale : (float)(1.0 / sqrt((double)s->k_dim));
}

static bool decode(const job *j, int policy, int32_t layer, ekv_report *reports, lm_error *error) {
    const cell *c = j->cell;
    const workload_shape *s = &c->workload->shape;
    ekv_decode_params p = ekv_decode_params_default();
    p.batch = s->batch;
    p.cache = c->workload->cache;
    p.layer = layer;
    p.sequences = c->workload->sequences;
    p.q_heads = j->q_heads;
    p.q_start = j->q_start;
    p.q = j->q + (size_t)layer * (size_t)j->rows * (size_t)s->k_dim;
    p.out = out_of(j, policy, layer);
    p.alpha = c->policies[policy].alpha;
    p.scale = scale_of(s);
    p.slopes = s->recording ? s->recording->slopes : NULL;
    p.policy = c->policies[policy].policy;
    p.budget = c->budget;
    p.report = reports;
    return ekv_decode(c->context, &p) == EKV_OK ||
           lm_fail(error, "policy %s: %s", c->policies[policy].name, ekv_last_error(c->context));
}

/* The step that is not timed: it also gets the library its scratch memory. */
static bool describe(const job *j, int policy, measurement *m, lm_error *error) {
    const workload_shape *s = &j->cell->workload->shape;
    double pages = 0, total_pages = 0, seen = 0;
    for (int32_t layer = 0; layer < s->layers; layer++) {
        if (!decode(j, policy, layer, j->reports, error)) return false;
        for (int64_t i = 0; i < j->rows; i++) {
            const ekv_report *r = &j->reports[i];
            m->bytes += (double)(r->bytes_statistics + r->bytes_sketch + r->bytes_keys + r->bytes_values);
            m->flop += 2 * ((double)r->tokens * s->k_dim + (double)r->support * s->v_dim);
            m->support += (double)r->support;
            seen += (double)seen_by(j, i);
            m->certified_share += r->certified;
            pages += (double)r->pages;
            total_pages += (double)((seen_by(j, i) + s->page_size - 1) / s->page_size);
        }
    }
    const double rows = (double)j->rows * s->layers;
    m->bytes /= s->layers;
    m->flop /= s->layers;
    m->support_share = m->support / seen;
    m->support /= rows;
    m->certified_share /= rows;
    m->pages_share = pages / total_pages;
    return true;
}

static bool time_all(job *j, lm_error *error) {
    const cell *c = j->cell;
    for (int i = 0; i < c->repeats; i++) {
        for (int policy = 0; policy < c->policy_count; policy++) {
            if (!c->warm) machine_stream_read(c->stream);
            const double begin = machine_seconds();
            for (int32_t layer = 0; layer < c->workload->shape.layers; layer++)
                if (!decode(j, policy, layer, NULL, error)) return false;
            j->seconds[policy * c->repeats + i] = machine_seconds() - begin;
        }
    }
    return true;
}

/* ---- double precision ---- */

/* Scores of one row, s = scale q.k + slope (i - i_q), from the cache's memory. */
static void score_row(const job *j, int32_t layer, int64_t row) {
    const workload *w = j->cell->workload;
    const workload_shape *s = &w->shape;
    const int64_t head = row % j->q_heads, seen = seen_by(j, row);
    const int32_t *table = ekv_cache_block_table(w->cache, w->sequences[sequence_of(j, row)]);
    const float *q = j->q + ((size_t)layer * (size_t)j->rows + (size_t)row) * (size_t)s->k_dim;
    const double slope = s->recording ? (double)s->recording->slopes[head] : 0, scale = (double)scale_of(s);
    ekv_kv kv;
    ekv_cache_layer(w->cache, layer, &kv, NULL);
    for (int64_t t = 0; t < seen; t++) {
        const int64_t at = table[t / s->page_size] * kv.k_block_stride + t % s->page_size * kv.k_token_stride +
                           head / j->cell->group * kv.k_head_stride;
        double sum = 0;
        for (int32_t d = 0; d < s->k_dim; d++) sum += (double)q[d] * ekv_reference_load(kv.dtype, kv.k, at + d);
        j->scores[t] = scale * sum + slope * (double)(t - (seen - 1));
    }
}

/* The weights of alpha times the values. */
static void attend_row(const job *j, int32_t layer, int64_t row, double alpha, double *out) {
    const workload *w = j->cell->workload;
    const workload_shape *s = &w->shape;
    const int64_t head = row % j->q_heads, seen = seen_by(j, row);
    const int32_t *table = ekv_cache_block_table(w->cache, w->sequences[sequence_of(j, row)]);
    ekv_kv kv;
    ekv_cache_layer(w->cache, layer, &kv, NULL);
    for (int64_t t = 0; t < seen; t++) j->z[t] = alpha > 1 ? (alpha - 1) * j->scores[t] : j->scores[t];
    ekv_reference_entmax(alpha, j->z, NULL, seen, j->weights);
    for (int64_t t = 0; t < seen; t++) {
        const int64_t at = table[t / s->page_size] * kv.v_block_stride + t % s->page_size * kv.v_token_stride +
                           head / j->cell->group * kv.v_head_stride;
        if (j->weights[t] == 0) continue;
        for (int32_t d = 0; d < s->v_dim; d++) out[d] += j->weights[t] * ekv_reference_load(kv.dtype, kv.v, at + d);
    }
}

/* Each alpha once. */
static void expect_row(const job *j, int32_t layer, int sample) {
    const cell *c = j->cell;
    const workload_shape *s = &c->workload->shape;
    score_row(j, layer, sampled_row(j, sample));
    for (int policy = 0; policy < c->policy_count; policy++) {
        int same = 0;
        while (c->policies[same].alpha != c->policies[policy].alpha) same++;
        double *out = expected_of(j, policy, layer, sample);
        if (same < policy)
            memcpy(out, expected_of(j, same, layer, sample), (size_t)s->v_dim * sizeof *out);
        else
            attend_row(j, layer, sampled_row(j, sample), c->policies[policy].alpha, out);
    }
}

/* A NaN anywhere makes the error NaN. */
static void compare(const job *j, int policy, measurement *m) {
    const workload_shape *s = &j->cell->workload->shape;
    double distance = 0, length = 0;
    for (int32_t layer = 0; layer < s->layers; layer++) {
        for (int sample = 0; sample < j->samples; sample++) {
            const float *got = out_of(j, policy, layer) + sampled_row(j, sample) * s->v_dim;
            const double *expected = expected_of(j, policy, layer, sample);
            double row_distance = 0, row_length = 0;
            for (int32_t d = 0; d < s->v_dim; d++) {
                row_distance += (got[d] - expected[d]) * (got[d] - expected[d]);
                row_length += expected[d] * expected[d];
            }
            const double error = sqrt(row_distance / row_length);
            if (!(error <= m->worst_error)) m->worst_error = error;
            distance += row_distance;
            length += row_length;
        }
    }
    m->relative_error = sqrt(distance / length);
}

static bool check_certified(const job *j, lm_error *error) {
    const cell *c = j->cell;
    const workload_shape *s = &c->workload->shape;
    const size_t bytes = (size_t)s->layers * (size_t)j->rows * (size_t)s->v_dim * sizeof(float);
    for (int i = 0; i < c->policy_count; i++) {
        if (c->policies[i].policy != EKV_POLICY_CERTIFIED) continue;
        for (int k = 0; k < c->policy_count; k++) {
            if (c->policies[k].policy != EKV_POLICY_FULL || c->policies[k].alpha != c->policies[i].alpha) continue;
            if (memcmp(out_of(j, i, 0), out_of(j, k, 0), bytes) != 0)
                return lm_fail(error, "policy certified gave another output than full at alpha %g: a defect, nothing was timed",
                               c->policies[i].alpha);
        }
    }
    return true;
}

/* ---- results ---- */

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Between the two nearest of n sorted numbers. */
static double quantile(const double *sorted, int n, double share) {
    const double place = share * (n - 1);
    const int below = (int)place;
    return below + 1 < n ? sorted[below] + (place - below) * (sorted[below + 1] - sorted[below]) : sorted[n - 1];
}

static void summarise(job *j, measurement *results) {
    const cell *c = j->cell;
    const workload_shape *s = &c->workload->shape;
    for (int i = 0; i < c->policy_count; i++) {
        measurement *m = &results[i];
        double *seconds = j->seconds + i * c->repeats;
        const double unit = 1e3 / s->layers;
        qsort(seconds, (size_t)c->repeats, sizeof *seconds, by_size);
        m->policy = c->policies[i].name;
        m->keys = key_kind_names[s->keys];
        m->dtype = ekv_dtype_name(s->dtype);
        m->backend = ekv_context_backend(c->context);
        m->caches = c->warm ? "warm" : "cold";
        m->alpha = c->policies[i].alpha;
        m->context = s->context;
        m->queries = c->queries;
        m->group = c->group;
        m->batch = s->batch;
        m->threads = ekv_context_threads(c->context);
        m->layers = s->layers;
        m->kv_heads = s->kv_heads;
        m->key_dim = s->k_dim;
        m->value_dim = s->v_dim;
        m->page_size = s->page_size;
        m->budget = c->budget;
        m->repeats = c->repeats;
        m->ms = unit * quantile(seconds, c->repeats, 0.5);
        m->ms_min = unit * seconds[0];
        m->ms_q1 = unit * quantile(seconds, c->repeats, 0.25);
        m->ms_q3 = unit * quantile(seconds, c->repeats, 0.75);
        m->ms_max = unit * seconds[c->repeats - 1];
        m->bandwidth = c->bandwidth;
        m->bandwidth_share = m->bytes / (1e-3 * m->ms) / c->bandwidth;
        m->flop_rate = m->flop / (1e-3 * m->ms);
        m->flop_peak = c->peak.fused;
        m->flop_peak_separate = c->peak.separate;
        m->flop_share = m->flop_rate / c->peak.fused;
        m->speedup_vs_softmax = results[0].ms / m->ms;
    }
}

static bool run(job *j, measurement *results, lm_error *error) {
    const cell *c = j->cell;
    const workload_shape *s = &c->workload->shape;
    for (int32_t b = 0; b <= s->batch; b++) j->q_start[b] = (int32_t)(b * c->queries);
    for (int32_t layer = 0; layer < s->layers; layer++)
        workload_queries(c->workload, layer, c->group, c->queries, j->q + (size_t)layer * (size_t)j->rows * (size_t)s->k_dim);
    for (int i = 0; i < c->policy_count; i++)
        if (!describe(j, i, &results[i], error)) return false;
    if (!check_certified(j, error)) return false;
    for (int32_t layer = 0; layer < s->layers; layer++)
        for (int sample = 0; sample < j->samples; sample++) expect_row(j, layer, sample);
    for (int i = 0; i < c->policy_count; i++) compare(j, i, &results[i]);
    if (!time_all(j, error)) return false;
    summarise(j, results);
    return true;
}

bool measure_cell(const cell *c, measurement *results, lm_error *error) {
    const workload_shape *s = &c->workload->shape;
    const int samples = c->queries > 1 ? PREFILL_SAMPLE : SAMPLE;
    job j = {.cell = c, .q_heads = s->kv_heads * c->group};
    j.rows = s->batch * c->queries * j.q_heads;
    j.samples = j.rows < samples ? (int)j.rows : samples;
    memset(results, 0, (size_t)c->policy_count * sizeof *results);
    const bool ok = (allocate(&j) || lm_fail(error, "out of memory")) && run(&j, results, error);
    release(&j);
    return ok;
}
