/*
 * The same bits, whatever runs: all CPU backends but the reference, any number of threads, the host's own thread pool, any
 * layout, any group, the caller's floating-point modes.  And what a call must leave as it was: those modes, the affinity,
 * OpenMP's settings, signal handlers, stdout and stderr.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE
#endif

#include "problem.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

static const uint32_t all_statistics = EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS;

/* ---- Thread pools of the test's own ----------------------------------------------------------------------------------- */

static void run_in_reverse(void *user, int64_t n, ekv_task task, void *arg) {
    *(int64_t *)user += n;
    for (int64_t i = n - 1; i >= 0; i--) {
        task(arg, i);
    }
}

enum { POOL = 4 };

typedef struct pool_share {
    ekv_task task;
    void *arg;
    int64_t n, first;
} pool_share;

static void *run_share(void *memory) {
    const pool_share *s = memory;
    for (int64_t i = s->first; i < s->n; i += POOL) {
        s->task(s->arg, i);
    }
    return NULL;
}

/* Tasks dealt out like cards to new threads. */
static void run_on_threads(void *user, int64_t n, ekv_task task, void *arg) {
    pthread_t threads[POOL];
    pool_share shares[POOL];
    *(int64_t *)user += n;
    for (int i = 0; i < POOL; i++) {
        shares[i] = (pool_share){task, arg, n, i};
        EXPECT(pthread_create(&threads[i], NULL, run_share, &shares[i]) == 0, "no thread");
    }
    for (int i = 0; i < POOL; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* ---- Configurations --------------------------------------------------------------------------------------------------- */

enum { MAX_CONFIGURATIONS = 64 };

typedef struct configuration {
    char name[64];
    ekv_context *context;
    int64_t tasks; /* run through a pool of the test's own */
    bool pool;
} configuration;

typedef struct configurations {
    int count;
    configuration list[MAX_CONFIGURATIONS];
} configurations;

static void add_configuration(configurations *all, const char *backend, int32_t threads, ekv_parallel_for pool,
                              const char *pool_name) {
    EXPECT(all->count < MAX_CONFIGURATIONS, "too many configurations");
    configuration *c = &all->list[all->count++];
    ekv_context_params params = ekv_context_params_default();
    params.backend = backend;
    params.threads = threads;
    params.parallel_for = pool;
    params.parallel_user = &c->tasks;
    c->pool = pool != NULL;
    snprintf(c->name, sizeof c->name, "%s with %d threads%s", backend, threads, pool_name);
    char message[256] = "";
    EXPECT(ekv_context_create(&params, &c->context, message, sizeof message) == EKV_OK, "%s: %s", c->name, message);
    EXPECT(ekv_context_threads(c->context) == threads, "%s: the context has %d", c->name, ekv_context_threads(c->context));
}

static void configurations_open(configurations *all) {
    static const int32_t threads[] = {1, 2, 3, 5};
    backend_set backends;
    backends_open(&backends, 1);
    memset(all, 0, sizeof *all);
    for (int b = 0; b < backends.count; b++) {
        if (backend_is_reference(&backends, b)) {
            continue;
        }
        for (int i = 0; i < 4; i++) {
            add_configuration(all, backends.names[b], threads[i], NULL, "");
        }
        add_configuration(all, backends.names[b], 3, run_in_reverse, ", tasks in reverse");
        add_configuration(all, backends.names[b], POOL, run_on_threads, ", a pool of the test's own");
    }
    backends_close(&backends);
}

static void configurations_destroy(configurations *all) {
    for (int i = 0; i < all->count; i++) {
        ekv_context_destroy(all->list[i].context);
    }
}

/* After decode steps every pool of the test's own must have been used. */
static void configurations_close(configurations *all) {
    for (int i = 0; i < all->count; i++) {
        EXPECT(!all->list[i].pool || all->list[i].tasks > 0, "%s: parallel_for was never called", all->list[i].name);
    }
    configurations_destroy(all);
}

/* ---- Everything that a step returns ----------------------------------------------------------------------------------- */

typedef struct result {
    unsigned char *out;
    size_t out_bytes, page_entries;
    ekv_report *report;
    int64_t rows;
    uint8_t *selected;
    float *bounds, *mean, *deviation;
} result;

static float *page_values(const problem *p) {
    float *values = malloc((size_t)(p->rows * problem_stride(p)) * sizeof *values + 1);
    memset(values, POISON, (size_t)(p->rows * problem_stride(p)) * sizeof *values);
    return values;
}

/* Pages, bounds and moments need no index under policy full. */
static void result_make(result *x, problem *p, ekv_context *context, bool index) {
    memset(x, 0, sizeof *x);
    x->rows = p->rows;
    x->page_entries = (size_t)(p->rows * problem_stride(p));
    if (index) {
        problem_index(p, context, all_statistics);
        x->bounds = page_values(p);
        x->mean = page_values(p);
        x->deviation = page_values(p);
        EXPECT_OK(context, ekv_page_bounds(context, &p->step, x->bounds, problem_stride(p)));
        EXPECT_OK(context, ekv_page_moments(context, &p->step, x->mean, x->deviation, problem_stride(p)));
    }
    guard selected = problem_select(p, context);
    x->selected = malloc(selected.size + 1);
    memcpy(x->selected, selected.data, selected.size);
    guard_free(&selected);
    problem_decode(p, context);
    x->out = problem_copy_out(p, &x->out_bytes);
    x->report = malloc(p->report.size + 1);
    memcpy(x->report, p->report.data, p->report.size);
}

static void result_free(result *x) {
    free(x->out);
    free(x->report);
    free(x->selected);
    free(x->bounds);
    free(x->mean);
    free(x->deviation);
}

static bool same_double(double a, double b) {
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

static void compare_reports(const ekv_report *a, const ekv_report *b, int64_t row) {
    EXPECT(same_double(a->tau, b->tau), "row %lld: tau %.17g and %.17g", (long long)row, a->tau, b->tau);
    EXPECT(same_double(a->mass_bound, b->mass_bound) && same_double(a->error_bound, b->error_bound),
           "row %lld: E %.17g and %.17g, error bounds %.17g and %.17g", (long long)row, a->mass_bound, b->mass_bound,
           a->error_bound, b->error_bound);
    EXPECT(a->support == b->support && a->tokens == b->tokens && a->pages == b->pages && a->certified == b->certified,
           "row %lld: support %lld and %lld, tokens %lld and %lld, pages %lld and %lld, certified %d and %d", (long long)row,
           (long long)a->support, (long long)b->support, (long long)a->tokens, (long long)b->tokens, (long long)a->pages,
           (long long)b->pages, a->certified, b->certified);
    EXPECT(a->group_pages == b->group_pages && a->total_pages == b->total_pages && a->bytes_statistics == b->bytes_statistics &&
               a->bytes_keys == b->bytes_keys && a->bytes_values == b->bytes_values && a->bytes_dense == b->bytes_dense,
           "row %lld: bytes differ: statistics %lld and %lld, keys %lld and %lld, values %lld and %lld", (long long)row,
           (long long)a->bytes_statistics, (long long)b->bytes_statistics, (long long)a->bytes_keys, (long long)b->bytes_keys,
           (long long)a->bytes_values, (long long)b->bytes_values);
}

static void compare_pages(const float *a, const float *b, size_t n, const char *what) {
    for (size_t i = 0; a != NULL && i < n; i++) {
        EXPECT(memcmp(&a[i], &b[i], sizeof a[i]) == 0, "%s %zu: %.9g and %.9g", what, i, a[i], b[i]);
    }
}

static void compare_results(const result *a, const result *b) {
    compare_pages(a->bounds, b->bounds, a->page_entries, "bound");
    compare_pages(a->mean, b->mean, a->page_entries, "mean");
    compare_pages(a->deviation, b->deviation, a->page_entries, "deviation");
    EXPECT(memcmp(a->selected, b->selected, a->page_entries) == 0, "the selections differ");
    for (int64_t row = 0; row < a->rows; row++) {
        compare_reports(&a->report[row], &b->report[row], row);
    }
    EXPECT(memcmp(a->out, b->out, a->out_bytes) == 0, "the outputs differ");
}

/* ---- Backends and threads --------------------------------------------------------------------------------------------- */

static void random_step(problem *p, rng *r, int32_t max_length) {
    static const ekv_policy policies[] = {EKV_POLICY_FULL, EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN, EKV_POLICY_PAGES};
    const shape s = shape_random(r, max_length);
    problem_make(p, &s, r);
    problem_random_parameters(p, r);
    problem_random_policy(p, r, policies[rng_between(r, 0, 3)]);
    p->step.report_mass = p->step.policy != EKV_POLICY_FULL && rng_chance(r, 0.5);
}

static void check_configurations(configurations *all, problem *p) {
    result first, other;
    case_note("%s: %s", all->list[0].name, problem_describe(p));
    result_make(&first, p, all->list[0].context, true);
    for (int i = 1; i < all->count; i++) {
        case_note("%s against %s: %s", all->list[i].name, all->list[0].name, problem_describe(p));
        result_make(&other, p, all->list[i].context, true);
        compare_results(&first, &other);
        result_free(&other);
    }
    result_free(&first);
}

START_TEST(backends_and_threads) {
    configurations all;
    configurations_open(&all);
    FOR_CASES(index, 120) {
        rng r = case_begin("backends_and_threads", index);
        problem p;
        random_step(&p, &r, 300);
        check_configurations(&all, &p);
        problem_free(&p);
    }
    configurations_close(&all);
}
END_TEST

/* One long sequence: cut into spans, which depend on its length alone. */
START_TEST(long_sequence) {
    static const double alphas[] = {1, 1.1, 4.0 / 3, 1.5, 2, 3};
    configurations all;
    configurations_open(&all);
    FOR_CASES(index, 36) {
        rng r = case_begin("long_sequence", index);
        shape s;
        memset(&s, 0, sizeof s);
        s.content = (content)(index % CONTENT_COUNT);
        s.dtype = (ekv_dtype)(index % 3);
        s.batch = s.kv_heads = 1;
        s.group = (int32_t)(1 + index % 2);
        s.k_dim = s.v_dim = 16;
        s.page_size = 16;
        s.lengths[0] = (int32_t)rng_between(&r, 12000, 24000);
        s.queries[0] = 1;
        s.q_size = index % 2 ? 1 : 6;
        problem p;
        problem_make(&p, &s, &r);
        p.step.alpha = alphas[index % 6];
        p.step.policy = index / 6 % 3 == 0 || p.step.alpha == 1 ? EKV_POLICY_FULL
                        : index / 6 % 3 == 1                    ? EKV_POLICY_TOPK
                                                                : EKV_POLICY_GAUSSIAN;
        p.step.budget = 4000;
        check_configurations(&all, &p);
        problem_free(&p);
    }
    configurations_close(&all);
}
END_TEST

static const double transform_alphas[] = {1, 1 + 1e-9, 1.0001, 1.1, 1.25, 4.0 / 3, 1.5, 1.75, 2, 3, 10};

START_TEST(transforms) {
    configurations all;
    configurations_open(&all);
    FOR_CASES(index, 700) {
        rng r = case_begin("transforms", index);
        const double alpha = RNG_PICK(&r, transform_alphas), size = RNG_PICK(&r, ((const double[]){1e-3, 1, 10, 1000}));
        const int64_t n = rng_chance(&r, 0.1) ? rng_between(&r, 1000, 20000) : rng_between(&r, 0, 200);
        float *scores = malloc((size_t)n * sizeof *scores + 1), *first = malloc((size_t)n * sizeof *first + 1);
        float *weights = malloc((size_t)n * sizeof *weights + 1);
        for (int64_t i = 0; i < n; i++) {
            scores[i] = (float)size * rng_rough_normal(&r);
        }
        double tau, first_tau = 0;
        int64_t support, first_support = 0;
        for (int i = 0; i < all.count; i++) {
            case_note("%s: alpha %.10g n %lld", all.list[i].name, alpha, (long long)n);
            EXPECT_OK(all.list[i].context, ekv_entmax(all.list[i].context, alpha, scores, n, weights, &tau, &support));
            if (i == 0) {
                memcpy(first, weights, (size_t)n * sizeof *first);
                first_tau = tau;
                first_support = support;
            }
            EXPECT(memcmp(first, weights, (size_t)n * sizeof *first) == 0, "the weights differ");
            EXPECT(same_double(tau, first_tau) && support == first_support, "tau %.17g and %.17g", first_tau, tau);
        }
        free(scores);
        free(first);
        free(weights);
    }
    configurations_destroy(&all); /* a transform need not use the pool */
}
END_TEST

/* ---- Layout and group ------------------------------------------------------------------------------------------------- */

/* The same keys, values and queries in every layout, packed and padded. */
START_TEST(layouts) {
    backend_set backends;
    backends_open(&backends, 3);
    FOR_CASES(index, 100) {
        rng r = case_begin("layouts", index);
        shape s = shape_random(&r, 300);
        s.layout = LAYOUT_TOKENS_HEADS;
        s.padded = s.spare_blocks = false;
        problem plain;
        problem_make(&plain, &s, &r);
        for (int b = 0; b < backends.count; b++) {
            result first = {0};
            for (int l = 0; l < LAYOUT_COUNT * 2 && !backend_is_reference(&backends, b); l++) {
                s.layout = (layout)(l / 2);
                s.padded = s.spare_blocks = l % 2;
                problem p;
                rng same = r;
                problem_make(&p, &s, &same);
                problem_copy_content(&p, &plain);
                same = r;
                problem_random_parameters(&p, &same);
                problem_random_policy(&p, &same, (ekv_policy)(index % 4));
                case_note("%s: %s", backends.names[b], problem_describe(&p));
                result other;
                result_make(&other, &p, backends.contexts[b], true);
                if (l == 0) {
                    first = other;
                } else {
                    compare_results(&first, &other);
                    result_free(&other);
                }
                problem_free(&p);
            }
            result_free(&first);
        }
        problem_free(&plain);
    }
    backends_close(&backends);
}
END_TEST

/*
 * A query head's output does not depend on the heads that share its KV head, nor on the other KV heads.  Softmax over selected
 * pages is left out: its sums follow the union of the group's pages.
 */
START_TEST(groups) {
    backend_set backends;
    backends_open(&backends, 3);
    FOR_CASES(index, 200) {
        rng r = case_begin("groups", index);
        shape s = shape_random(&r, 500);
        s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.padded = false;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, (ekv_policy)(index % 4));
        for (int b = 0; b < backends.count; b++) {
            if (backend_is_reference(&backends, b)) {
                continue;
            }
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_index(&p, backends.contexts[b], all_statistics);
            problem_decode(&p, backends.contexts[b]);
            const size_t row_bytes = (size_t)s.v_dim * dtype_size(s.out_dtype);
            unsigned char *alone = malloc(row_bytes * (size_t)s.kv_heads);
            for (int32_t g = 0; g < s.group; g++) { /* head g of every group, as if groups had one head */
                double alphas[3];
                float scales[3], slopes[3];
                unsigned char *q = malloc((size_t)(s.kv_heads * s.k_dim) * 4),
                              *mask = malloc((size_t)(s.kv_heads * p.step.page_mask_stride) + 1);
                for (int32_t h = 0; h < s.kv_heads; h++) {
                    const int32_t head = h * s.group + g;
                    alphas[h] = p.step.head_alpha ? p.step.head_alpha[head] : p.step.alpha;
                    scales[h] = p.step.head_scale ? p.step.head_scale[head] : 0;
                    slopes[h] = p.step.slopes ? p.step.slopes[head] : 0;
                    const size_t q_row = (size_t)s.k_dim * dtype_size(s.q_dtype);
                    memcpy(q + (size_t)h * q_row, (const char *)p.q.data + (size_t)head * q_row, q_row);
                    if (p.step.page_mask) {
                        memcpy(mask + h * p.step.page_mask_stride, p.step.page_mask + head * p.step.page_mask_stride,
                               (size_t)p.step.page_mask_stride);
                    }
                }
                ekv_decode_params step = p.step;
                step.q_heads = s.kv_heads;
                step.q = q;
                step.out = alone;
                step.report = NULL;
                step.head_alpha = alphas;
                step.head_scale = p.step.head_scale ? scales : NULL;
                step.slopes = p.step.slopes ? slopes : NULL;
                step.page_mask = p.step.page_mask ? mask : NULL;
                EXPECT_OK(backends.contexts[b], ekv_decode(backends.contexts[b], &step));
                for (int32_t h = 0; h < s.kv_heads; h++) {
                    const unsigned char *row = (const unsigned char *)p.out.data + (size_t)(h * s.group + g) * row_bytes;
                    EXPECT((alphas[h] == 1 && p.step.policy != EKV_POLICY_FULL) ||
                               memcmp(row, alone + (size_t)h * row_bytes, row_bytes) == 0,
                           "head %d of KV head %d differs alone", g, h);
                }
                free(q);
                free(mask);
            }
            free(alone);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Floating-point modes --------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
typedef uint32_t control;
static const control control_mask = 0xFFC0; /* all but the sticky flags */
static control control_get(void) {
    return _mm_getcsr() & control_mask;
}
static void control_set(control c) {
    _mm_setcsr(c);
}
static const control control_flush = 0x8040; /* flush to zero, denormals are zero */
#  define HAVE_CONTROL 1
#elif defined(__aarch64__)
typedef uint64_t control;
static control control_get(void) {
    control c;
    __asm__ volatile("mrs %0, fpcr" : "=r"(c));
    return c;
}
static void control_set(control c) {
    __asm__ volatile("msr fpcr, %0" : : "r"(c));
}
static const control control_flush = 1u << 24;
#  define HAVE_CONTROL 1
#endif

#ifdef HAVE_CONTROL

/* Subnormal numbers flush when they should: else the test below would test nothing.  Not inline: the compiler would move the
 * product past the change of mode. */
__attribute__((noinline)) static bool flushes(void) {
    volatile float small = 1e-30f;
    volatile float product = small * 1e-10f;
    uint32_t bits;
    memcpy(&bits, (const void *)(uintptr_t)&product, sizeof bits);
    return bits == 0;
}

/* Keys, queries and values whose products and sums are subnormal. */
static void make_subnormal(problem *p, rng *r) {
    for (int32_t h = 0; h < p->shape.kv_heads; h++) {
        for (int64_t t = 0; t < p->shape.lengths[0]; t++) {
            for (int32_t d = 0; d < p->shape.v_dim; d++) {
                dtype_store(p->shape.dtype, problem_value(p, 0, t, h), d,
                            (p->shape.dtype == EKV_F16 ? 1e-6f : 1e-40f) * rng_rough_normal(r));
            }
            for (int32_t d = 0; d < p->shape.k_dim && t % 3 == 0; d++) {
                dtype_store(p->shape.dtype, problem_key(p, 0, t, h), d,
                            (p->shape.dtype == EKV_F16 ? 1e-6f : 1e-39f) * rng_rough_normal(r));
            }
        }
    }
}

/* A step and a transform under one of eight modes of the caller's: the control word stays, the bits are those of the default.
 */
static void check_mode(configuration *c, problem *p, int mode, const result *expected, const float *expected_weights) {
    static const int roundings[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    const float scores[] = {0.3f, 1e-40f, -0.7f, 0.29f};
    const control usual = control_get();
    float weights[4];
    result under;
    fesetround(roundings[mode / 2]);
    control_set(control_get() | (mode % 2 ? control_flush : 0));
    const bool flushing = flushes();
    const control before = control_get();
    result_make(&under, p, c->context, true);
    const control between = control_get();
    EXPECT_OK(c->context, ekv_entmax(c->context, 1.25, scores, 4, weights, NULL, NULL));
    const control after = control_get();
    fesetround(FE_TONEAREST);
    control_set(usual);
    EXPECT(flushing == (mode % 2), "the mode is not what the test thinks");
    EXPECT(before == between && before == after, "the control word was %llx, after a step %llx, after a transform %llx",
           (unsigned long long)before, (unsigned long long)between, (unsigned long long)after);
    compare_results(expected, &under);
    EXPECT(memcmp(weights, expected_weights, sizeof weights) == 0, "the transform differs");
    result_free(&under);
}

START_TEST(floating_point_modes) {
    configurations all;
    configurations_open(&all);
    FOR_CASES(index, 60) {
        rng r = case_begin("floating_point_modes", index);
        shape s = shape_random(&r, 400);
        s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.out_dtype = EKV_F32;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, (ekv_policy)(index % 4));
        if (index % 2) {
            make_subnormal(&p, &r);
        }
        const float scores[] = {0.3f, 1e-40f, -0.7f, 0.29f};
        for (int i = (int)(index % 3); i < all.count; i += 3) {
            configuration *c = &all.list[i];
            result usual;
            float weights[4];
            case_note("%s: %s", c->name, problem_describe(&p));
            result_make(&usual, &p, c->context, true);
            EXPECT_OK(c->context, ekv_entmax(c->context, 1.25, scores, 4, weights, NULL, NULL));
            for (int mode = 0; mode < 8; mode++) {
                case_note("%s: rounding %d%s: %s", c->name, mode / 2, mode % 2 ? ", flushing" : "", problem_describe(&p));
                check_mode(c, &p, mode, &usual, weights);
            }
            result_free(&usual);
        }
        problem_free(&p);
    }
    configurations_destroy(&all);
}
END_TEST

#  if defined(__x86_64__) && defined(__GLIBC__)
/* A host that traps invalid operations, divisions by zero and overflows is not killed by ours. */
START_TEST(unmasked_exceptions) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 200) {
        rng r = case_begin("unmasked_exceptions", index);
        problem p;
        random_step(&p, &r, 300);
        if (index % 3 == 0 && p.shape.lengths[0] > 0) {
            dtype_store(p.shape.dtype, problem_key(&p, 0, 0, 0), 0, index % 2 ? NAN : INFINITY);
        }
        for (int b = 0; b < backends.count; b++) {
            if (backend_is_reference(&backends, b)) {
                continue;
            }
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            const int enabled = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW;
            feclearexcept(FE_ALL_EXCEPT);
            feenableexcept(enabled);
            problem_index(&p, backends.contexts[b], all_statistics);
            const ekv_status status = ekv_decode(backends.contexts[b], &p.step);
            const int after = fegetexcept();
            fedisableexcept(FE_ALL_EXCEPT);
            EXPECT(status == EKV_OK, "%s", ekv_last_error(backends.contexts[b]));
            EXPECT(after == enabled, "the enabled exceptions were %x and are %x", enabled, after);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST
#    define HAVE_TRAPS 1
#  endif
#endif

/* ---- The process ------------------------------------------------------------------------------------------------------ */

typedef int (*omp_query)(void);

/* OpenMP's settings, where the library brought it into the process. */
static omp_query find_omp(const char *name) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    omp_query query = NULL;
    memcpy(&query, &symbol, sizeof query);
    return query;
}

static const char *const omp_names[] = {"omp_get_max_threads", "omp_get_dynamic", "omp_get_nested",
                                        "omp_get_max_active_levels"};
enum { OMP_NAMES = 4 };

typedef struct process_state {
    int omp[OMP_NAMES];
    cpu_set_t affinity;
    struct sigaction actions[64];
    sigset_t blocked;
} process_state;

static void process_read(process_state *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < OMP_NAMES; i++) {
        const omp_query query = find_omp(omp_names[i]);
        s->omp[i] = query ? query() : -1;
    }
    sched_getaffinity(0, sizeof s->affinity, &s->affinity);
    for (int i = 1; i < 64; i++) {
        sigaction(i, NULL, &s->actions[i]);
    }
    sigprocmask(SIG_SETMASK, NULL, &s->blocked);
}

static void process_compare(const process_state *a, const process_state *b) {
    for (int i = 0; i < OMP_NAMES; i++) {
        EXPECT(a->omp[i] == b->omp[i], "%s was %d and is %d", omp_names[i], a->omp[i], b->omp[i]);
    }
    EXPECT(CPU_EQUAL(&a->affinity, &b->affinity), "the affinity changed");
    for (int i = 1; i < 64; i++) {
        EXPECT(a->actions[i].sa_handler == b->actions[i].sa_handler, "the handler of signal %d changed", i);
        EXPECT(sigismember(&a->blocked, i) == sigismember(&b->blocked, i), "signal %d was blocked or unblocked", i);
    }
}

/* Contexts, caches, steps and failures, with stdout and stderr in a file. */
static void use_everything(rng *r) {
    backend_set backends;
    backends_open(&backends, 3);
    for (int b = 0; b < backends.count; b++) {
        problem p;
        random_step(&p, r, 200);
        problem_index(&p, backends.contexts[b], all_statistics);
        problem_decode(&p, backends.contexts[b]);
        p.step.alpha = 0.5;
        EXPECT_STATUS(backends.contexts[b], EKV_ERROR_INVALID_ARGUMENT, ekv_decode(backends.contexts[b], &p.step));
        problem_free(&p);
    }
    ekv_context_params params = ekv_context_params_default();
    params.backend = "abacus";
    ekv_context *none = NULL;
    EXPECT(ekv_context_create(&params, &none, NULL, 0) == EKV_ERROR_UNAVAILABLE, "a backend named abacus");
    backends_close(&backends);
}

START_TEST(process_is_left_alone) {
    void (*set_threads)(int) = NULL;
    void *symbol = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    memcpy(&set_threads, &symbol, sizeof set_threads);
    printf("OpenMP is %s this process\n", symbol ? "in" : "not in");
    FOR_CASES(index, 10) {
        rng r = case_begin("process_is_left_alone", index);
        process_state before, after;
        if (set_threads) {
            set_threads((int)(1 + index % 7));
        }
        process_read(&before);
        use_everything(&r);
        process_read(&after);
        process_compare(&before, &after);
    }
}
END_TEST

START_TEST(nothing_is_printed) {
    fflush(stdout);
    fflush(stderr);
    FOR_CASES(index, 10) {
        rng r = case_begin("nothing_is_printed", index);
        char name[] = "/tmp/entmaxkv-test-XXXXXX";
        const int file = mkstemp(name), out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
        EXPECT(file >= 0 && out >= 0 && err >= 0, "no temporary file");
        ekv_context *context = context_open(NULL, 3);
        problem p;
        random_step(&p, &r, 200);
        dup2(file, STDOUT_FILENO);
        dup2(file, STDERR_FILENO);
        problem_index(&p, context, all_statistics);
        problem_decode(&p, context);
        p.step.q_heads = -3;
        const ekv_status status = ekv_decode(context, &p.step);
        fflush(stdout);
        fflush(stderr);
        dup2(out, STDOUT_FILENO);
        dup2(err, STDERR_FILENO);
        const off_t size = lseek(file, 0, SEEK_END);
        close(file);
        close(out);
        close(err);
        unlink(name);
        EXPECT(status == EKV_ERROR_INVALID_ARGUMENT, "q_heads -3 is %d", (int)status);
        EXPECT(size == 0, "%lld bytes were printed", (long long)size);
        problem_free(&p);
        ekv_context_destroy(context);
    }
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {
        TEST_ENTRY(backends_and_threads),
        TEST_ENTRY(long_sequence),
        TEST_ENTRY(transforms),
        TEST_ENTRY(layouts),
        TEST_ENTRY(groups),
#ifdef HAVE_CONTROL
        TEST_ENTRY(floating_point_modes),
#endif
#ifdef HAVE_TRAPS
        TEST_ENTRY(unmasked_exceptions),
#endif
        TEST_ENTRY(process_is_left_alone),
        TEST_ENTRY(nothing_is_printed),
    };
    return HARNESS_MAIN(argv[0], tests);
}
