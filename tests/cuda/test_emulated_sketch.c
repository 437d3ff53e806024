/*
 * Sketches in emulated device memory: no bound of a token may lie below its exact score, whatever the keys, and steps give the bits of
 * policy full, before and after appends, with pages that were given to other tokens, and with max_mass.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 1, DIM = 64, PAGE = 16, TOKENS = 4112, MORE = 3, GROUP = 2, Q_HEADS = HEADS * GROUP };
enum { BLOCKS = (TOKENS + MORE + PAGE - 1) / PAGE + 4, ROWS = 2, STRIDE = (TOKENS + PAGE - 1) / PAGE * PAGE };

static const char *const kinds[] = {"falling spread", "one channel fifty times larger", "constant channels", "the ends of the range",
                                    "drift",          "few distinct keys",              "a bad key"};
enum { FALLING, LARGE, CONSTANT, ENDS, DRIFT, FEW, BAD, KINDS };

#define TRY(call)                                                                     \
    do {                                                                              \
        if ((call) != EKV_OK) {                                                       \
            printf("%s: %s\n", #call, ekv_last_error(context));                       \
            exit(EXIT_FAILURE);                                                       \
        }                                                                             \
    } while (0)

static ekv_context *context;
static uint64_t seed = 1;

static double uniform(void) {
    uint64_t x = seed += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}
static double normal(void) { return uniform() + uniform() + uniform() + uniform() + uniform() + uniform() - 3.0; }

/* f32 keys on the host, as the cache has them: [block][token][head][dim]. */
typedef struct problem {
    float *k, *v, *q;
    int32_t table[BLOCKS], length;
    float *device_k, *device_v, *device_q, *device_out;
    int32_t *device_table, *device_length;
    ekv_report *device_report;
    ekv_kv kv;
    ekv_index *index;
} problem;

static float *key_of(const problem *p, int token, int head) {
    return p->k + (((int64_t)p->table[token / PAGE] * PAGE + token % PAGE) * HEADS + head) * DIM;
}

static void make_key(problem *p, int kind, int token, int head) {
    float *key = key_of(p, token, head);
    for (int d = 0; d < DIM; d++) {
        double x = normal() * exp(-0.15 * d);
        if (kind == LARGE && d == 5) x *= 50.0;
        if (kind == CONSTANT && d % 3 == 0) x = d;
        if (kind == ENDS) x *= d % 2 ? 1e15 : 1e-30;
        if (kind == DRIFT) x += token * 0.002 * (d % 5);
        if (kind == FEW) x = sin((double)(token % 7 * 31 + d));
        if (kind == BAD && token == 2100 && head == 0 && d == 3) x = (double)INFINITY;
        key[d] = (float)x;
    }
}

static void *on_device(const void *from, size_t bytes) {
    void *memory;
    TRY(ekv_cuda_allocate(context, bytes, &memory));
    if (from) TRY(ekv_cuda_copy(context, memory, from, bytes));
    return memory;
}

static void make(problem *p, int kind) {
    const size_t elements = (size_t)BLOCKS * PAGE * HEADS * DIM;
    memset(p, 0, sizeof *p);
    p->k = calloc(elements, sizeof(float));
    p->v = calloc(elements, sizeof(float));
    p->q = calloc((size_t)Q_HEADS * DIM, sizeof(float));
    for (int i = 0; i < BLOCKS; i++) p->table[i] = i * 5 % BLOCKS;
    for (int t = 0; t < TOKENS + MORE; t++)
        for (int h = 0; h < HEADS; h++) make_key(p, kind, t, h);
    for (size_t i = 0; i < elements; i++) p->v[i] = (float)normal();
    for (int i = 0; i < Q_HEADS * DIM; i++) p->q[i] = (float)(4.0 * normal() * (kind == ENDS ? 1e-15 : 1.0));
    p->length = TOKENS;
    p->device_k = on_device(p->k, elements * sizeof(float));
    p->device_v = on_device(p->v, elements * sizeof(float));
    p->device_q = on_device(p->q, (size_t)Q_HEADS * DIM * sizeof(float));
    p->device_out = on_device(NULL, (size_t)Q_HEADS * DIM * sizeof(float));
    p->device_report = on_device(NULL, Q_HEADS * sizeof *p->device_report);
    p->device_table = on_device(p->table, sizeof p->table);
    p->device_length = on_device(&p->length, sizeof p->length);
    p->kv = ekv_kv_default();
    p->kv.dtype = EKV_F32;
    p->kv.kv_heads = HEADS;
    p->kv.k_dim = p->kv.v_dim = DIM;
    p->kv.blocks = BLOCKS;
    p->kv.k = p->device_k;
    p->kv.v = p->device_v;
    p->kv.k_head_stride = p->kv.v_head_stride = DIM;
    p->kv.k_token_stride = p->kv.v_token_stride = HEADS * DIM;
    p->kv.k_block_stride = p->kv.v_block_stride = PAGE * HEADS * DIM;
    ekv_index_params shape = ekv_index_params_default();
    shape.dtype = EKV_F32;
    shape.kv_heads = HEADS;
    shape.k_dim = shape.v_dim = DIM;
    shape.blocks = BLOCKS;
    shape.statistics = EKV_STATISTICS_NORMS | EKV_STATISTICS_SKETCH;
    TRY(ekv_index_create(context, &shape, NULL, 0, &p->index));
    TRY(ekv_index_find_basis(context, p->index, &p->kv, p->device_table, kind == BAD ? 2048 : TOKENS));
    TRY(ekv_index_update(context, p->index, &p->kv, p->device_table, 0, TOKENS, TOKENS));
}

static void destroy(problem *p) {
    void *const memory[] = {p->device_k, p->device_v, p->device_q, p->device_out, p->device_report, p->device_table, p->device_length};
    ekv_index_destroy(p->index);
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) ekv_cuda_release(ekv_cuda_device(context), memory[i]);
    free(p->k);
    free(p->v);
    free(p->q);
}

static ekv_decode_params step_of(const problem *p, ekv_policy policy, const float *slopes) {
    ekv_decode_params s = ekv_decode_params_default();
    s.kv = &p->kv;
    s.index = p->index;
    s.policy = policy;
    s.alpha = 1.5;
    s.block_table = p->device_table;
    s.block_table_stride = BLOCKS;
    s.lengths = p->device_length;
    s.max_length = p->length;
    s.q_heads = Q_HEADS;
    s.q = p->device_q;
    s.out = p->device_out;
    s.slopes = slopes;
    return s;
}

static double half_value(uint16_t bits) { /* not negative, no NaN */
    if (bits == 0x7c00) return (double)INFINITY;
    return bits >> 10 ? ldexp(1024 + (bits & 1023), (bits >> 10) - 25) : ldexp(bits, -24);
}

/* Every bound against the exact score; how far above the mean bound lies tells that the test is not idle. */
static int check_bounds(problem *p, const char *name, const float *slopes, bool all_infinite) {
    static uint16_t above[HEADS * ROWS * STRIDE];
    double z_of[Q_HEADS][TOKENS], lowest = 0.0, highest = 0.0, excess = 0.0;
    int wrong = 0, finite = 0;
    ekv_step step;
    const ekv_decode_params params = step_of(p, EKV_POLICY_CERTIFIED, slopes);
    const double scale = 0.5 / sqrt((double)DIM); /* z units of alpha 1.5 */
    for (int h = 0; h < Q_HEADS; h++)
        for (int t = 0; t < TOKENS; t++) {
            const float *key = key_of(p, t, h / GROUP), *q = p->q + h * DIM;
            double z = 0.0;
            for (int d = 0; d < DIM; d++) z += (double)(float)(q[d] * (float)scale) * (double)key[d];
            if (slopes) z += 0.5 * (double)slopes[h] * (t - (TOKENS - 1));
            z_of[h][t] = z;
            if (isfinite(z)) lowest = fmin(lowest, z), highest = fmax(highest, z);
        }
    const double origin = (double)(float)(lowest - 0.5 * (highest - lowest) - 1e-6);
    TRY(ekv_validate(context, &params, &step));
    TRY(ekv_cuda_token_bounds(context, &step, origin, above, sizeof above));
    for (int h = 0; h < Q_HEADS; h++)
        for (int t = 0; t < TOKENS; t++) {
            const double bound = origin + half_value(above[(h / GROUP * ROWS + h % GROUP) * STRIDE + t]);
            if (!isfinite(bound)) continue;
            finite++;
            excess += (bound - z_of[h][t]) / (highest - lowest);
            if (!(bound >= z_of[h][t]) && wrong++ < 5)
                printf("%s: head %d, token %d: score %.9g above its bound %.9g\n", name, h, t, z_of[h][t], bound);
        }
    printf("%s%s: %d finite bounds, mean excess %.3f of the scores' range, %d wrong\n", name, slopes ? ", slopes" : "", finite,
           finite ? excess / finite : 0.0, wrong);
    return wrong + ((finite == 0) != all_infinite);
}

/* Policy certified against full: bits, and what it read. */
static int check_step(problem *p, const char *name, const float *slopes, bool must_rule_out) {
    float full[Q_HEADS * DIM], certified[Q_HEADS * DIM];
    ekv_report report[Q_HEADS];
    ekv_decode_params s = step_of(p, EKV_POLICY_FULL, slopes);
    TRY(ekv_decode(context, &s));
    TRY(ekv_cuda_copy(context, full, p->device_out, sizeof full));
    s.policy = EKV_POLICY_CERTIFIED;
    s.report = p->device_report;
    TRY(ekv_decode(context, &s));
    TRY(ekv_cuda_copy(context, certified, p->device_out, sizeof certified));
    TRY(ekv_cuda_copy(context, report, p->device_report, sizeof report));
    const bool same = memcmp(full, certified, sizeof full) == 0;
    int64_t tokens = 0, sketch = 0;
    for (int h = 0; h < Q_HEADS; h++) tokens += report[h].tokens, sketch += report[h].bytes_sketch;
    const bool ruled_out = tokens < (int64_t)Q_HEADS * p->length * 9 / 10 && sketch > 0;
    /* With max_mass the error stays within what the report says. */
    s.max_mass = 0.01;
    TRY(ekv_decode(context, &s));
    TRY(ekv_cuda_copy(context, certified, p->device_out, sizeof certified));
    TRY(ekv_cuda_copy(context, report, p->device_report, sizeof report));
    bool within = true;
    for (int h = 0; h < Q_HEADS; h++) {
        double squares = 0.0;
        for (int d = 0; d < DIM; d++) {
            const double x = (double)certified[h * DIM + d], y = (double)full[h * DIM + d];
            if (!(isnan(x) && isnan(y))) squares += (x - y) * (x - y);
        }
        within &= (squares == 0.0 || sqrt(squares) <= report[h].error_bound + 1e-5) && report[h].mass_bound <= 0.01;
    }
    if (!same || !within || (must_rule_out && !ruled_out))
        printf("%s, %d tokens: %s, %s; %lld tokens read, %lld bytes of sketches\n", name, (int)p->length,
               same ? "the bits of full" : "not the bits of full", within ? "within E" : "E is wrong", (long long)tokens,
               (long long)sketch);
    return !same + !within + (must_rule_out && !ruled_out);
}

/* New tokens at the end by append; then the first pages, given to other tokens, by update. */
static int check_changes(problem *p, const char *name, int kind, bool must_rule_out) {
    int wrong = 0;
    for (int i = 1; i <= MORE; i++) {
        p->length = TOKENS + i;
        TRY(ekv_cuda_copy(context, p->device_length, &p->length, sizeof p->length));
        ekv_index_append_params append = ekv_index_append_params_default();
        append.block_table = p->device_table;
        append.block_table_stride = BLOCKS;
        append.lengths = p->device_length;
        TRY(ekv_index_append(context, p->index, &p->kv, &append));
    }
    wrong += check_step(p, name, NULL, must_rule_out);
    for (int t = 5; t < 3 * PAGE + 1; t++)
        for (int h = 0; h < HEADS; h++) make_key(p, kind, t, h);
    TRY(ekv_cuda_copy(context, p->device_k, p->k, (size_t)BLOCKS * PAGE * HEADS * DIM * sizeof(float)));
    TRY(ekv_index_update(context, p->index, &p->kv, p->device_table, 5, 3 * PAGE - 4, p->length));
    return wrong + check_step(p, name, NULL, must_rule_out);
}

int main(void) {
    static problem p;
    const float slopes[Q_HEADS] = {0.01f, -0.003f};
    char message[256];
    int wrong = 0;
    ekv_context_params params = ekv_context_params_default();
    params.backend = "cuda";
    if (ekv_context_create(&params, &context, message, sizeof message) != EKV_OK) {
        printf("%s\n", message);
        return EXIT_FAILURE;
    }
    printf("seed %llu\n", (unsigned long long)seed);
    for (int kind = 0; kind < KINDS; kind++) {
        const bool structured = kind == FALLING || kind == DRIFT || kind == FEW;
        make(&p, kind);
        wrong += check_bounds(&p, kinds[kind], NULL, kind == BAD); /* such a key leaves its head without bounds */
        wrong += check_bounds(&p, kinds[kind], slopes, kind == BAD);
        wrong += check_step(&p, kinds[kind], NULL, structured);
        wrong += check_step(&p, kinds[kind], slopes, false);
        wrong += check_changes(&p, kinds[kind], kind, structured);
        destroy(&p);
    }
    ekv_context_destroy(context);
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
