/*
 * Wrong arguments: the right status, a message that names the argument and its value, outputs untouched, and a context that
 * goes on working.  Memory: fixed scratch, allocators that fail, and no allocation in a step once scratch is reserved.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE
#endif

#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t all_statistics = EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS;

static void expect_message(const char *message, const char *name, const char *value) {
    EXPECT(strstr(message, name) != NULL, "the message \"%s\" does not name %s", message, name);
    EXPECT(value == NULL || strstr(message, value) != NULL, "the message \"%s\" does not say %s", message, value);
}

/* ---- Decode ----------------------------------------------------------------------------------------------------------- */

/* A step that is right until `spoil` changes one thing. */
typedef struct fixture {
    problem p;
    double alphas[4];
    float numbers[4];
    int32_t list[8];
} fixture;

static void fixture_make(fixture *f, ekv_context *context) {
    rng r = {{1, 2, 3, 4}}; /* always the same */
    shape s;
    memset(&s, 0, sizeof s);
    s.layout = LAYOUT_PAGE_HEADS;
    s.batch = 2;
    s.kv_heads = 2;
    s.group = 2;
    s.k_dim = s.v_dim = 8;
    s.page_size = 16;
    s.lengths[0] = 40;
    s.lengths[1] = 17;
    s.queries[0] = s.queries[1] = 1;
    s.ragged = true;
    s.q_size = 1;
    memset(f, 0, sizeof *f);
    problem_make(&f->p, &s, &r);
    problem_index(&f->p, context, all_statistics);
}

typedef struct spoiled {
    const char *name, *value; /* what the message must hold */
    void (*spoil)(fixture *f);
    ekv_status status; /* 0: EKV_ERROR_INVALID_ARGUMENT */
} spoiled;

#define SPOIL(function, statement)                                                                                             \
  static void function(fixture *f) {                                                                                           \
    statement;                                                                                                                 \
  }
#define STEP f->p.step

SPOIL(alpha_half, STEP.alpha = 0.5)
SPOIL(alpha_nan, STEP.alpha = NAN)
SPOIL(alpha_infinite, STEP.alpha = INFINITY)
SPOIL(alpha_negative, STEP.alpha = -2)
SPOIL(head_alpha_low, f->alphas[0] = f->alphas[1] = f->alphas[3] = 1.5; f->alphas[2] = 0.75; STEP.head_alpha = f->alphas)
SPOIL(head_alpha_nan, f->alphas[0] = f->alphas[1] = f->alphas[2] = 1.5; f->alphas[3] = NAN; STEP.head_alpha = f->alphas)
SPOIL(scale_infinite, STEP.scale = INFINITY)
SPOIL(scale_nan, STEP.scale = NAN)
SPOIL(head_scale_nan, f->numbers[1] = NAN; STEP.head_scale = f->numbers)
SPOIL(slope_infinite, f->numbers[3] = -INFINITY; STEP.slopes = f->numbers)
SPOIL(slope_nan, f->numbers[0] = NAN; STEP.slopes = f->numbers)
SPOIL(heads_divide, STEP.q_heads = 3)
SPOIL(heads_zero, STEP.q_heads = 0)
SPOIL(heads_negative, STEP.q_heads = -2)
SPOIL(batch_negative, STEP.batch = -1)
SPOIL(q_null, STEP.q = NULL)
SPOIL(out_null, STEP.out = NULL)
SPOIL(q_dtype_bad, STEP.q_dtype = (ekv_dtype)7)
SPOIL(out_dtype_bad, STEP.out_dtype = (ekv_dtype)-1)
SPOIL(policy_bad, STEP.policy = (ekv_policy)9)
SPOIL(kv_null, STEP.kv = NULL)
SPOIL(lengths_null, STEP.lengths = NULL)
SPOIL(length_negative, f->list[0] = 40; f->list[1] = -5; STEP.lengths = f->list)
SPOIL(length_long, f->list[0] = 40; f->list[1] = 16 * 5 + 1; STEP.lengths = f->list) /* the table has 5 entries a sequence */
SPOIL(q_start_first, f->list[0] = 1; f->list[1] = 1; f->list[2] = 2; STEP.q_start = f->list)
SPOIL(q_start_falls, f->list[0] = 0; f->list[1] = 2; f->list[2] = 1; STEP.q_start = f->list)
SPOIL(queries_exceed, f->list[0] = 0; f->list[1] = 1; f->list[2] = 1 + 18; STEP.q_start = f->list) /* 18 rows, 17 tokens */
SPOIL(kv_dtype_bad, f->p.kv.dtype = (ekv_dtype)5)
SPOIL(kv_heads_zero, f->p.kv.kv_heads = 0)
SPOIL(kv_heads_negative, f->p.kv.kv_heads = -4)
SPOIL(k_dim_zero, f->p.kv.k_dim = 0)
SPOIL(k_dim_large, f->p.kv.k_dim = 1025)
SPOIL(v_dim_zero, f->p.kv.v_dim = 0)
SPOIL(v_dim_large, f->p.kv.v_dim = 1025)
SPOIL(page_size_zero, f->p.kv.page_size = 0)
SPOIL(page_size_large, f->p.kv.page_size = 257)
SPOIL(page_size_negative, f->p.kv.page_size = -16)
SPOIL(blocks_negative, f->p.kv.blocks = -1)
SPOIL(k_null, f->p.kv.k = NULL)
SPOIL(v_null, f->p.kv.v = NULL)
SPOIL(block_large, ((int32_t *)f->p.table.data)[1] = 4321)
SPOIL(block_negative, ((int32_t *)f->p.table.data)[2] = -3)
SPOIL(quantile_zero, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.quantile = 0)
SPOIL(quantile_one, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.quantile = 1)
SPOIL(quantile_nan, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.quantile = NAN)
SPOIL(margin_sigma_negative, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.margin_sigma = -0.25)
SPOIL(margin_fraction_nan, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.margin_fraction = NAN)
SPOIL(gaussian_model_bad, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.gaussian_model = (ekv_gaussian_model)8)
SPOIL(gaussian_softmax, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.alpha = 1)
SPOIL(first_pages_negative, STEP.policy = EKV_POLICY_TOPK; STEP.first_pages = -6)
SPOIL(recent_tokens_negative, STEP.policy = EKV_POLICY_TOPK; STEP.recent_tokens = -7)
SPOIL(mask_null, STEP.policy = EKV_POLICY_PAGES; STEP.page_mask = NULL)
SPOIL(mask_stride_short, STEP.policy = EKV_POLICY_PAGES; STEP.page_mask = (const uint8_t *)f->list; STEP.page_mask_stride = 2)
SPOIL(topk_no_index, STEP.policy = EKV_POLICY_TOPK; STEP.index = NULL)
SPOIL(gaussian_no_index, STEP.policy = EKV_POLICY_GAUSSIAN; STEP.index = NULL)
SPOIL(mass_no_index, STEP.policy = EKV_POLICY_PAGES; problem_random_mask(&f->p, &(rng){{1, 2, 3, 4}}, 0.5); STEP.index = NULL;
      STEP.report_mass = 1)
SPOIL(table_stride_short, STEP.block_table_stride = 2) /* 40 tokens need three entries */
SPOIL(struct_size_zero, STEP.size = 0)
SPOIL(cache_and_kv, STEP.cache = (const ekv_cache *)(const void *)&f->p; STEP.sequences = f->list)

static const spoiled decode_errors[] = {
    {"alpha", "0.5", alpha_half, 0},
    {"alpha", "nan", alpha_nan, 0},
    {"alpha", "inf", alpha_infinite, 0},
    {"alpha", "-2", alpha_negative, 0},
    {"alpha", "0.75", head_alpha_low, 0},
    {"alpha", "nan", head_alpha_nan, 0},
    {"scale", "inf", scale_infinite, 0},
    {"scale", "nan", scale_nan, 0},
    {"scale", "nan", head_scale_nan, 0},
    {"slopes", "-inf", slope_infinite, 0},
    {"slopes", "nan", slope_nan, 0},
    {"q_heads", "3", heads_divide, 0},
    {"q_heads", "0", heads_zero, 0},
    {"q_heads", "-2", heads_negative, 0},
    {"batch", "-1", batch_negative, 0},
    {"q", "NULL", q_null, 0},
    {"out", "NULL", out_null, 0},
    {"q_dtype", "7", q_dtype_bad, 0},
    {"out_dtype", "-1", out_dtype_bad, 0},
    {"policy", "9", policy_bad, 0},
    {"kv", "NULL", kv_null, 0},
    {"lengths", "NULL", lengths_null, 0},
    {"lengths", "-5", length_negative, 0},
    {"lengths", "81", length_long, 0},
    {"q_start", "1", q_start_first, 0},
    {"q_start", "1", q_start_falls, 0},
    {"q_start", "18", queries_exceed, 0},
    {"dtype", "5", kv_dtype_bad, 0},
    {"kv_heads", "0", kv_heads_zero, 0},
    {"kv_heads", "-4", kv_heads_negative, 0},
    {"k_dim", "0", k_dim_zero, 0},
    {"k_dim", "1025", k_dim_large, 0},
    {"v_dim", "0", v_dim_zero, 0},
    {"v_dim", "1025", v_dim_large, 0},
    {"page_size", "0", page_size_zero, 0},
    {"page_size", "257", page_size_large, 0},
    {"page_size", "-16", page_size_negative, 0},
    {"blocks", "-1", blocks_negative, 0},
    {"k", "NULL", k_null, 0},
    {"v", "NULL", v_null, 0},
    {"block_table", "4321", block_large, 0},
    {"block_table", "-3", block_negative, 0},
    {"quantile", "0", quantile_zero, 0},
    {"quantile", "1", quantile_one, 0},
    {"quantile", "nan", quantile_nan, 0},
    {"margin_sigma", "-0.25", margin_sigma_negative, 0},
    {"margin_fraction", "nan", margin_fraction_nan, 0},
    {"gaussian_model", "8", gaussian_model_bad, 0},
    {"alpha", "1", gaussian_softmax, EKV_ERROR_UNSUPPORTED},
    {"first_pages", "-6", first_pages_negative, 0},
    {"recent_tokens", "-7", recent_tokens_negative, 0},
    {"page_mask", "NULL", mask_null, 0},
    {"page_mask_stride", "2", mask_stride_short, 0},
    {"index", NULL, topk_no_index, 0},
    {"index", NULL, gaussian_no_index, 0},
    {"index", NULL, mass_no_index, 0},
    {"block_table_stride", "2", table_stride_short, 0},
    {"size", "0", struct_size_zero, 0},
    {"cache", NULL, cache_and_kv, 0},
};
enum { DECODE_ERRORS = sizeof decode_errors / sizeof *decode_errors };

static bool is_status(ekv_status status, ekv_status wanted) {
    return status == (wanted ? wanted : EKV_ERROR_INVALID_ARGUMENT);
}

static void check_spoiled_step(ekv_context *context, const char *backend, const spoiled *error, int64_t index) {
    case_begin("decode_arguments", index);
    fixture *f = calloc(1, sizeof *f);
    fixture_make(f, context);
    case_note("%s: %s %s", backend, error->name, error->value ? error->value : "");
    problem_decode(&f->p, context); /* right as it is */
    problem_poison(&f->p);
    error->spoil(f);
    const ekv_status status = ekv_decode(context, &STEP);
    EXPECT(is_status(status, error->status), "returned %d (%s): %s", (int)status, ekv_strerror(status),
           ekv_last_error(context));
    expect_message(ekv_last_error(context), error->name, error->value);
    problem_check_untouched(&f->p);
    problem_free(&f->p);
    fixture_make(f, context); /* and the context goes on */
    problem_decode(&f->p, context);
    problem_free(&f->p);
    free(f);
}

START_TEST(decode_arguments) {
    backend_set backends;
    backends_open(&backends, 2);
    for (int b = 0; b < backends.count; b++) {
        FOR_CASES(index, DECODE_ERRORS) {
            if (index < DECODE_ERRORS) {
                check_spoiled_step(backends.contexts[b], backends.names[b], &decode_errors[index], index);
            }
        }
    }
    backends_close(&backends);
}
END_TEST

/* The stages check the same arguments; their outputs too stay as they were. */
START_TEST(stage_arguments) {
    backend_set backends;
    backends_open(&backends, 2);
    for (int b = 0; b < backends.count; b++) {
        ekv_context *context = backends.contexts[b];
        FOR_CASES(index, DECODE_ERRORS) {
            if (index >= DECODE_ERRORS || decode_errors[index].spoil == out_null ||
                decode_errors[index].spoil == out_dtype_bad) {
                continue; /* the stages do not use out */
            }
            fixture *f = calloc(1, sizeof *f);
            fixture_make(f, context);
            STEP.report = NULL;
            decode_errors[index].spoil(f);
            STEP.report_mass = 0;
            case_note("%s: %s %s", backends.names[b], decode_errors[index].name,
                      decode_errors[index].value ? decode_errors[index].value : "");
            uint8_t selected[64];
            float bounds[64], mean[64], deviation[64];
            memset(selected, POISON, sizeof selected);
            memset(bounds, POISON, sizeof bounds);
            memset(mean, POISON, sizeof mean);
            memset(deviation, POISON, sizeof deviation);
            if (decode_errors[index].spoil != mass_no_index) {
                const ekv_status status = ekv_select_pages(context, &STEP, selected, 5);
                EXPECT(is_status(status, decode_errors[index].status), "ekv_select_pages returned %d: %s", (int)status,
                       ekv_last_error(context));
                expect_message(ekv_last_error(context), decode_errors[index].name, decode_errors[index].value);
            }
            const bool about_policy = STEP.policy != EKV_POLICY_FULL && STEP.index != NULL;
            if (!about_policy) { /* bounds and moments do not depend on the policy */
                STEP.policy = EKV_POLICY_FULL;
                EXPECT(ekv_page_bounds(context, &STEP, bounds, 5) == EKV_ERROR_INVALID_ARGUMENT, "ekv_page_bounds accepts it");
                EXPECT(ekv_page_moments(context, &STEP, mean, deviation, 5) == EKV_ERROR_INVALID_ARGUMENT,
                       "ekv_page_moments accepts it");
            }
            EXPECT(is_poison(selected, sizeof selected) && is_poison(bounds, sizeof bounds) && is_poison(mean, sizeof mean) &&
                       is_poison(deviation, sizeof deviation),
                   "an output was written");
            problem_free(&f->p);
            free(f);
        }
        fixture *f = calloc(1, sizeof *f);
        fixture_make(f, context);
        case_note("%s: outputs of the stages", backends.names[b]);
        float numbers[64];
        uint8_t selected[64];
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_bounds(context, &STEP, NULL, 5));
        expect_message(ekv_last_error(context), "bounds", NULL);
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_bounds(context, &STEP, numbers, 2));
        expect_message(ekv_last_error(context), "stride", "2");
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_moments(context, &STEP, NULL, numbers, 5));
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_moments(context, &STEP, numbers, NULL, 5));
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_moments(context, &STEP, numbers, numbers + 32, 2));
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_select_pages(context, &STEP, NULL, 5));
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_select_pages(context, &STEP, selected, 2));
        expect_message(ekv_last_error(context), "stride", "2");
        problem_free(&f->p);
        free(f);
    }
    backends_close(&backends);
}
END_TEST

/* Each policy needs its statistics, and says which. */
START_TEST(missing_statistics) {
    static const struct {
        ekv_policy policy;
        int32_t report_mass;
        uint32_t has;
        const char *missing;
    } cases[] = {
        {EKV_POLICY_TOPK, 0, EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS, "BOX"},
        {EKV_POLICY_GAUSSIAN, 0, EKV_STATISTICS_BOX | EKV_STATISTICS_NORMS, "GAUSSIAN"},
        {EKV_POLICY_GAUSSIAN, 1, EKV_STATISTICS_GAUSSIAN, "BOX"},
        {EKV_POLICY_PAGES, 1, EKV_STATISTICS_NORMS, "BOX"},
    };
    backend_set backends;
    backends_open(&backends, 2);
    for (int b = 0; b < backends.count; b++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            ekv_context *context = backends.contexts[b];
            fixture *f = calloc(1, sizeof *f);
            fixture_make(f, context);
            rng r = case_begin("missing_statistics", (int64_t)i);
            case_note("%s: %s, report_mass %d", backends.names[b], ekv_policy_name(cases[i].policy), cases[i].report_mass);
            problem_index(&f->p, context, cases[i].has);
            problem_random_policy(&f->p, &r, cases[i].policy);
            STEP.report_mass = cases[i].report_mass;
            problem_poison(&f->p);
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_decode(context, &STEP));
            expect_message(ekv_last_error(context), cases[i].missing, NULL);
            problem_check_untouched(&f->p);
            float numbers[64];
            if (!(cases[i].has & EKV_STATISTICS_BOX)) {
                STEP.report_mass = 0;
                STEP.policy = EKV_POLICY_FULL;
                EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_bounds(context, &STEP, numbers, 5));
            }
            if (!(cases[i].has & EKV_STATISTICS_GAUSSIAN)) {
                STEP.report_mass = 0;
                STEP.policy = EKV_POLICY_FULL;
                EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_page_moments(context, &STEP, numbers, numbers + 32, 5));
            }
            problem_free(&f->p);
            free(f);
        }
    }
    backends_close(&backends);
}
END_TEST

/* An index of another shape than the memory. */
START_TEST(index_that_does_not_fit) {
    ekv_context *context = context_open("scalar", 1);
    for (int i = 0; i < 6; i++) {
        fixture *f = calloc(1, sizeof *f);
        fixture_make(f, context);
        case_note("index mismatch %d", i);
        ekv_index_params params = ekv_index_params_default();
        params.dtype = i == 0 ? EKV_BF16 : EKV_F32;
        params.kv_heads = i == 1 ? 1 : 2;
        params.k_dim = i == 2 ? 9 : 8;
        params.v_dim = i == 3 ? 9 : 8;
        params.page_size = i == 4 ? 8 : 16;
        params.blocks = i == 5 ? 2 : f->p.kv.blocks;
        ekv_index *index = NULL;
        EXPECT_OK(context, ekv_index_create(context, &params, NULL, 0, &index));
        STEP.index = index;
        STEP.policy = EKV_POLICY_TOPK;
        problem_poison(&f->p);
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_decode(context, &STEP));
        expect_message(ekv_last_error(context), "index", NULL);
        problem_check_untouched(&f->p);
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT,
                      ekv_index_update(context, index, &f->p.kv, f->p.table.data, 0, 40, 40));
        STEP.index = f->p.index;
        ekv_index_destroy(index);
        problem_free(&f->p);
        free(f);
    }
    ekv_context_destroy(context);
}
END_TEST

/* ---- Transform, index, cache ------------------------------------------------------------------------------------------ */

START_TEST(transform_arguments) {
    static const double alphas[] = {0.999999, 0, -1, NAN, INFINITY, -INFINITY};
    static const char *const values[] = {"0.999999", "0", "-1", "nan", "inf", "-inf"};
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        ekv_context *context = backends.contexts[b];
        const float scores[] = {1, 2, 3};
        float weights[3];
        double tau;
        int64_t support;
        memset(weights, POISON, sizeof weights);
        memset(&tau, POISON, sizeof tau);
        memset(&support, POISON, sizeof support);
        for (int i = 0; i < 6; i++) {
            case_begin("transform_arguments", i);
            case_note("%s: alpha %s", backends.names[b], values[i]);
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT,
                          ekv_entmax(context, alphas[i], scores, 3, weights, &tau, &support));
            expect_message(ekv_last_error(context), "alpha", values[i]);
        }
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_entmax(context, 1.5, NULL, 3, weights, &tau, &support));
        expect_message(ekv_last_error(context), "scores", NULL);
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_entmax(context, 1.5, scores, 3, NULL, &tau, &support));
        expect_message(ekv_last_error(context), "weights", NULL);
        EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_entmax(context, 1.5, scores, -4, weights, &tau, &support));
        expect_message(ekv_last_error(context), "n", "-4");
        EXPECT(is_poison(weights, sizeof weights) && is_poison(&tau, sizeof tau) && is_poison(&support, sizeof support),
               "an output was written");
        EXPECT_OK(context, ekv_entmax(context, 1.5, scores, 3, weights, &tau, &support));
    }
    backends_close(&backends);
}
END_TEST

static ekv_index_params index_params(void) {
    ekv_index_params params = ekv_index_params_default();
    params.kv_heads = 2;
    params.k_dim = params.v_dim = 8;
    params.blocks = 4;
    return params;
}

static void check_index_error(ekv_context *context, ekv_index_params params, const char *name, const char *value) {
    ekv_index *index = (ekv_index *)(void *)&params;
    case_note("index with %s %s", name, value);
    EXPECT(ekv_index_bytes(&params) == 0, "ekv_index_bytes is %zu", ekv_index_bytes(&params));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_create(context, &params, NULL, 0, &index));
    EXPECT(index == NULL || index == (ekv_index *)(void *)&params, "the output is neither NULL nor untouched");
    expect_message(ekv_last_error(context), name, value);
}

START_TEST(index_arguments) {
    case_begin("index_arguments", 0);
    ekv_context *context = context_open("scalar", 1);
    ekv_index_params params = index_params();
    EXPECT(ekv_index_bytes(&params) > 0, "a valid index needs no bytes");
    params.dtype = (ekv_dtype)3;
    check_index_error(context, params, "dtype", "3");
    params = index_params(), params.kv_heads = 0;
    check_index_error(context, params, "kv_heads", "0");
    params = index_params(), params.k_dim = 1025;
    check_index_error(context, params, "k_dim", "1025");
    params = index_params(), params.v_dim = -1;
    check_index_error(context, params, "v_dim", "-1");
    params = index_params(), params.page_size = 257;
    check_index_error(context, params, "page_size", "257");
    params = index_params(), params.blocks = -2;
    check_index_error(context, params, "blocks", "-2");
    params = index_params(), params.statistics = 16;
    check_index_error(context, params, "statistics", "0x10");
    params = index_params();
    guard memory = guard_alloc_aligned(ekv_index_bytes(&params), 64);
    ekv_index *index = NULL;
    case_note("index memory");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT,
                  ekv_index_create(context, &params, memory.data, memory.size - 1, &index));
    expect_message(ekv_last_error(context), "bytes", NULL);
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT,
                  ekv_index_create(context, &params, (char *)memory.data + 4, memory.size, &index));
    expect_message(ekv_last_error(context), "memory", NULL);
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_create(context, &params, NULL, 0, NULL));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_create(context, NULL, NULL, 0, &index));
    EXPECT_OK(context, ekv_index_create(context, &params, memory.data, memory.size, &index));
    const int32_t outside[] = {0, 4}, negative[] = {-1, 0};
    case_note("index invalidate");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_invalidate(context, index, outside, 0, 32));
    expect_message(ekv_last_error(context), "block_table", "4");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_invalidate(context, index, negative, 0, 1));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_invalidate(context, index, NULL, 0, 4 * 16 + 1));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_invalidate(context, index, NULL, -1, 3));
    expect_message(ekv_last_error(context), "first", "-1");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_invalidate(context, index, NULL, 0, -3));
    expect_message(ekv_last_error(context), "count", "-3");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_invalidate(context, NULL, NULL, 0, 3));
    EXPECT_OK(context, ekv_index_invalidate(context, index, NULL, 0, 64));
    ekv_index_destroy(index);
    ekv_index_destroy(NULL);
    guard_free(&memory);
    ekv_context_destroy(context);
}
END_TEST

START_TEST(index_update_arguments) {
    ekv_context *context = context_open("scalar", 1);
    fixture *f = calloc(1, sizeof *f);
    fixture_make(f, context);
    ekv_index *index = f->p.index;
    const ekv_kv *kv = &f->p.kv;
    const int32_t *table = f->p.table.data;
    const int32_t outside[] = {0, 9999, 1};
    case_note("ekv_index_update");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, outside, 0, 40, 40));
    expect_message(ekv_last_error(context), "block_table", "9999");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, table, -1, 4, 40));
    expect_message(ekv_last_error(context), "first", "-1");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, table, 0, -4, 40));
    expect_message(ekv_last_error(context), "count", "-4");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, table, 30, 11, 40));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, table, INT64_MAX, 2, 40));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, table, 0, 1, -1));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, NULL, kv, table, 0, 40, 40));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, NULL, table, 0, 40, 40));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_update(context, index, kv, NULL, 0, 16 * 100, 16 * 100));
    EXPECT_OK(context, ekv_index_update(context, index, kv, table, 40, 0, 40));
    problem_free(&f->p);
    free(f);
    ekv_context_destroy(context);
}
END_TEST

static ekv_cache_params cache_params(void) {
    ekv_cache_params params = ekv_cache_params_default();
    params.layers = 2;
    params.kv_heads = 2;
    params.k_dim = params.v_dim = 8;
    params.blocks = 6;
    return params;
}

static void check_cache_error(ekv_context *context, ekv_cache_params params, const char *name, const char *value) {
    ekv_cache *cache = NULL;
    case_note("cache with %s %s", name, value);
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_create(context, &params, &cache));
    EXPECT(cache == NULL, "a cache came back");
    expect_message(ekv_last_error(context), name, value);
}

START_TEST(cache_arguments) {
    case_begin("cache_arguments", 0);
    ekv_context *context = context_open("scalar", 1);
    ekv_cache_params params;
    params = cache_params(), params.dtype = (ekv_dtype)4;
    check_cache_error(context, params, "dtype", "4");
    params = cache_params(), params.layers = 0;
    check_cache_error(context, params, "layers", "0");
    params = cache_params(), params.kv_heads = -1;
    check_cache_error(context, params, "kv_heads", "-1");
    params = cache_params(), params.k_dim = 0;
    check_cache_error(context, params, "k_dim", "0");
    params = cache_params(), params.v_dim = 2000;
    check_cache_error(context, params, "v_dim", "2000");
    params = cache_params(), params.page_size = 300;
    check_cache_error(context, params, "page_size", "300");
    params = cache_params(), params.blocks = -1;
    check_cache_error(context, params, "blocks", "-1");
    params = cache_params(), params.max_sequences = 0;
    check_cache_error(context, params, "max_sequences", "0");
    params = cache_params(), params.max_length = -5;
    check_cache_error(context, params, "max_length", "-5");
    params = cache_params(), params.statistics = 16;
    check_cache_error(context, params, "statistics", "0x10");
    params = cache_params(), params.placement = (ekv_placement)3;
    check_cache_error(context, params, "placement", "3");
    params = cache_params(), params.placement = (ekv_placement)-1;
    check_cache_error(context, params, "placement", "-1");
    params = cache_params();
    ekv_cache *cache = NULL;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_create(context, NULL, &cache));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_create(context, &params, NULL));
    params.blocks = INT64_MAX / 4; /* sizes that overflow are not allocated */
    ekv_status status = ekv_cache_create(context, &params, &cache);
    EXPECT(status == EKV_ERROR_INVALID_ARGUMENT || status == EKV_ERROR_OUT_OF_MEMORY, "a cache of %lld blocks: %d",
           (long long)params.blocks, (int)status);
    ekv_cache_destroy(NULL);
    ekv_context_destroy(context);
}
END_TEST

START_TEST(append_arguments) {
    case_begin("append_arguments", 0);
    ekv_context *context = context_open("scalar", 1);
    ekv_cache_params params = cache_params();
    ekv_cache *cache = NULL;
    int32_t sequence;
    EXPECT_OK(context, ekv_cache_create(context, &params, &cache));
    EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence));
    const float data[64] = {0};
    ekv_append_params good = ekv_append_params_default(), rows;
    good.count = 2;
    good.k = good.v = data;
    rows = good, rows.count = -2;
    case_note("append");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence, 0, &rows));
    expect_message(ekv_last_error(context), "count", "-2");
    rows = good, rows.k = NULL;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence, 0, &rows));
    expect_message(ekv_last_error(context), "k", NULL);
    rows = good, rows.v = NULL;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence, 0, &rows));
    rows = good, rows.dtype = (ekv_dtype)12;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence, 0, &rows));
    expect_message(ekv_last_error(context), "dtype", "12");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence, 5, &good));
    expect_message(ekv_last_error(context), "layer", "5");
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence + 3, 0, &good));
    expect_message(ekv_last_error(context), "sequence", NULL);
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, NULL, sequence, 0, &good));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_append(context, cache, sequence, 0, NULL));
    EXPECT(ekv_sequence_length(cache, sequence, 0) == 0 && ekv_cache_free_blocks(cache) == 6, "a failed append left something");
    rows = good, rows.count = 0, rows.k = rows.v = NULL;
    EXPECT_OK(context, ekv_cache_append(context, cache, sequence, 0, &rows));
    EXPECT_OK(context, ekv_cache_append(context, cache, sequence, 0, &good));
    const int32_t unknown = sequence + 3;
    float out[16], q[16] = {0};
    ekv_decode_params step = ekv_decode_params_default();
    step.cache = cache;
    step.q_heads = 2;
    step.q = q;
    step.out = out;
    memset(out, POISON, sizeof out);
    case_note("decode with a cache");
    step.sequences = NULL;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_decode(context, &step));
    expect_message(ekv_last_error(context), "sequences", NULL);
    step.sequences = &unknown;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_decode(context, &step));
    expect_message(ekv_last_error(context), "sequence", NULL);
    step.sequences = &sequence;
    step.layer = 2;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_decode(context, &step));
    expect_message(ekv_last_error(context), "layer", "2");
    EXPECT(is_poison(out, sizeof out), "out was written");
    step.layer = 0;
    EXPECT_OK(context, ekv_decode(context, &step));
    ekv_cache_destroy(cache);
    ekv_context_destroy(context);
}
END_TEST

/* ---- Backends by name ------------------------------------------------------------------------------------------------- */

static void check_unknown_backend(const char *backend, const char *name) {
    ekv_context_params params = ekv_context_params_default();
    params.backend = backend;
    ekv_context *context = (ekv_context *)(void *)&params;
    char message[400] = "";
    const ekv_status status = ekv_context_create(&params, &context, message, sizeof message);
    EXPECT(status == EKV_ERROR_UNAVAILABLE, "backend %s: %d %s", name, (int)status, message);
    EXPECT(context == NULL, "*context is not NULL after a failure");
    expect_message(message, name, "scalar"); /* the message lists what there is */
    expect_message(message, name, "reference");
    char little[8];
    memset(little, 'x', sizeof little);
    EXPECT(ekv_context_create(&params, &context, little, 4) == EKV_ERROR_UNAVAILABLE, "with a short message");
    EXPECT(little[3] == '\0' && little[4] == 'x', "message_size is not respected");
    EXPECT(ekv_context_create(&params, &context, NULL, 0) == EKV_ERROR_UNAVAILABLE, "without a message");
}

START_TEST(backend_names_are_strict) {
    static const char *const unknown[] = {"abacus", "", "AVX2", "scalar ", "scala"};
    case_begin("backend_names_are_strict", 0);
    unsetenv("ENTMAXKV_BACKEND");
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        case_note("backend \"%s\"", unknown[i]);
        check_unknown_backend(unknown[i], unknown[i]);
    }
    for (int32_t i = 0;; i++) { /* known, but not able to run here */
        ekv_backend_info info = {.size = sizeof info};
        if (ekv_backend(i, &info) != EKV_OK) {
            EXPECT(i >= 2, "%d backends", i);
            break;
        }
        case_note("backend %s", info.name);
        EXPECT(info.note != NULL && info.name != NULL, "NULL in the description");
        EXPECT(!info.available || info.compiled, "available and not compiled");
        if (!info.compiled || !info.available) {
            EXPECT(strlen(info.note) > 0, "no note says what is missing");
            check_unknown_backend(info.name, info.name);
        }
    }
    ekv_backend_info info = {.size = sizeof info};
    EXPECT(ekv_backend(-1, &info) == EKV_ERROR_INVALID_ARGUMENT && ekv_backend(1000, &info) == EKV_ERROR_INVALID_ARGUMENT,
           "a backend number out of range");
    EXPECT(ekv_backend(0, NULL) == EKV_ERROR_INVALID_ARGUMENT, "NULL info");
}
END_TEST

START_TEST(the_environment_names_a_backend) {
    case_begin("the_environment_names_a_backend", 0);
    case_note("ENTMAXKV_BACKEND");
    setenv("ENTMAXKV_BACKEND", "scalar", 1);
    ekv_context *context = context_open(NULL, 1);
    EXPECT(strcmp(ekv_context_backend(context), "scalar") == 0, "got %s", ekv_context_backend(context));
    expect_message(ekv_context_backend_reason(context), "ENTMAXKV_BACKEND", NULL);
    ekv_context_destroy(context);
    context = context_open("reference", 1); /* the option is stronger */
    EXPECT(strcmp(ekv_context_backend(context), "reference") == 0, "got %s", ekv_context_backend(context));
    EXPECT(strlen(ekv_context_backend_reason(context)) > 0, "no reason");
    ekv_context_destroy(context);
    setenv("ENTMAXKV_BACKEND", "abacus", 1);
    check_unknown_backend(NULL, "abacus");
    unsetenv("ENTMAXKV_BACKEND");
    context = context_open(NULL, 0); /* the best: never the reference */
    EXPECT(strcmp(ekv_context_backend(context), "reference") != 0, "the default is the reference");
    EXPECT(ekv_context_threads(context) >= 1, "%d threads", ekv_context_threads(context));
    EXPECT(ekv_last_error(context) != NULL, "NULL error text");
    ekv_context_destroy(context);
    ekv_context_destroy(NULL);
}
END_TEST

START_TEST(context_arguments) {
    case_begin("context_arguments", 0);
    ekv_context_params params = ekv_context_params_default();
    ekv_context *context = NULL;
    char message[256] = "";
    case_note("context");
    params.threads = -1;
    EXPECT(ekv_context_create(&params, &context, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT && context == NULL,
           "%s", message);
    expect_message(message, "threads", "-1");
    params = ekv_context_params_default();
    params.size = 0;
    EXPECT(ekv_context_create(&params, &context, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "%s", message);
    expect_message(message, "size", NULL);
    EXPECT(ekv_context_create(NULL, NULL, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "%s", message);
    counting_allocator state;
    params = ekv_context_params_default();
    params.allocator = counting_allocator_make(&state);
    params.allocator.release = NULL; /* one without the other */
    EXPECT(ekv_context_create(&params, &context, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "%s", message);
    expect_message(message, "allocator", NULL);
    for (int status = -1; status < 10; status++) {
        EXPECT(ekv_strerror((ekv_status)status) != NULL && strlen(ekv_strerror((ekv_status)status)) > 0, "status %d", status);
    }
    EXPECT(strcmp(ekv_dtype_name(EKV_F16), "f16") == 0 && strcmp(ekv_dtype_name((ekv_dtype)9), "?") == 0, "dtype names");
    EXPECT(strcmp(ekv_dtype_name(EKV_F32), "f32") == 0 && strcmp(ekv_dtype_name(EKV_BF16), "bf16") == 0, "dtype names");
    EXPECT(strcmp(ekv_policy_name(EKV_POLICY_TOPK), "topk") == 0 && strcmp(ekv_policy_name((ekv_policy)9), "?") == 0,
           "policy names");
}
END_TEST

/* ---- Memory ----------------------------------------------------------------------------------------------------------- */

static ekv_context *counting_context(counting_allocator *state, const char *backend, int32_t fixed_scratch) {
    ekv_context_params params = ekv_context_params_default();
    params.backend = backend;
    params.threads = 2;
    params.fixed_scratch = fixed_scratch;
    params.allocator = counting_allocator_make(state);
    ekv_context *context = NULL;
    char message[256] = "";
    EXPECT(ekv_context_create(&params, &context, message, sizeof message) == EKV_OK, "%s", message);
    return context;
}

static void random_policy_step(problem *p, rng *r, ekv_context *context, int64_t index) {
    const shape s = shape_random(r, 900);
    problem_make(p, &s, r);
    problem_random_parameters(p, r);
    problem_random_policy(p, r, (ekv_policy)(index % 4));
    problem_index(p, context, all_statistics);
    p->step.report_mass = p->step.policy != EKV_POLICY_FULL && rng_chance(r, 0.5);
}

/* Under a ceiling the items of a step follow each other, and at last their rows: the same bits from less memory, down to what one row
 * needs. */
START_TEST(scratch_ceiling) {
    int64_t lowered = 0, refused = 0;
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 200) {
        for (int b = 0; b < backends.count; b++) {
            rng r = case_begin("scratch_ceiling", index);
            if (backend_is_reference(&backends, b)) {
                continue;
            }
            problem p;
            random_policy_step(&p, &r, backends.contexts[b], index);
            bool softmax = false;
            for (int32_t h = 0; h < p.step.q_heads; h++) {
                softmax |= problem_alpha(&p, h) < 1.0 + 1e-7;
            }
            if (index % 5 == 4 && !softmax) {
                p.step.policy = EKV_POLICY_CERTIFIED;
            }
            if (softmax) { /* with a sparse policy its sums depend on which rows are read together */
                p.step.policy = EKV_POLICY_FULL;
            }
            size_t whole = 0, size = 0;
            EXPECT_OK(backends.contexts[b], ekv_scratch_bytes(backends.contexts[b], &p.step, &whole));
            problem_decode(&p, backends.contexts[b]);
            unsigned char *right = problem_copy_out(&p, &size);
            bool fits = true;
            for (size_t ceiling = whole; fits && ceiling > 64; ceiling = ceiling * 3 / 4) {
                case_note("%s: ceiling %zu of %zu, %s", backends.names[b], ceiling, whole, problem_describe(&p));
                counting_allocator state;
                ekv_context_params params = ekv_context_params_default();
                params.backend = backends.names[b];
                params.threads = 1 + (int32_t)(index % 3);
                params.allocator = counting_allocator_make(&state);
                params.max_scratch = ceiling;
                ekv_context *context = NULL;
                char message[256] = "", value[32];
                EXPECT(ekv_context_create(&params, &context, message, sizeof message) == EKV_OK, "%s", message);
                const int64_t before = state.live_bytes;
                size_t bytes = 0;
                const ekv_status announced = ekv_scratch_bytes(context, &p.step, &bytes);
                problem_poison(&p);
                const ekv_status status = ekv_decode(context, &p.step);
                EXPECT(status == announced, "ekv_scratch_bytes returned %d, ekv_decode %d", (int)announced, (int)status);
                if (status == EKV_OK) {
                    unsigned char *out = problem_copy_out(&p, &size);
                    EXPECT(bytes <= ceiling, "%zu bytes announced", bytes);
                    EXPECT(state.live_bytes - before <= (int64_t)ceiling, "%lld bytes allocated",
                           (long long)(state.live_bytes - before));
                    EXPECT(memcmp(out, right, size) == 0, "the output differs");
                    free(out);
                    lowered += ceiling < whole;
                } else {
                    EXPECT(status == EKV_ERROR_CAPACITY, "status %d", (int)status);
                    snprintf(value, sizeof value, "%zu", ceiling);
                    expect_message(ekv_last_error(context), "max_scratch", value);
                    problem_check_untouched(&p);
                    fits = false;
                    refused++;
                }
                ekv_context_destroy(context);
                EXPECT(state.live == 0 && !state.mismatch, "%lld allocations were not released", (long long)state.live);
            }
            free(right);
            problem_free(&p);
        }
    }
    printf("scratch_ceiling: %lld steps under a lower ceiling, %lld refused\n", (long long)lowered, (long long)refused);
    const int64_t cases = case_end(200) - case_first();
    EXPECT(cases < 10 || (lowered > cases && refused > cases / 2), "%lld steps ran under a lower ceiling, %lld were refused",
           (long long)lowered, (long long)refused);
    backends_close(&backends);
}
END_TEST

/* What the header says one row needs, at lengths that are long enough for the rest not to count. */
START_TEST(scratch_of_one_row) {
    static float k[1], v[1], out[64], q[64];
    for (int certified = 0; certified < 2; certified++) {
        case_begin("scratch_of_one_row", certified);
        ekv_context_params params = ekv_context_params_default();
        params.backend = "scalar";
        params.threads = 1;
        ekv_context *context = NULL;
        EXPECT(ekv_context_create(&params, &context, NULL, 0) == EKV_OK, "no context");
        ekv_kv kv = ekv_kv_default();
        const int32_t length = 1 << 20;
        kv.dtype = EKV_F32;
        kv.kv_heads = 1;
        kv.k_dim = kv.v_dim = 64;
        kv.page_size = 16;
        kv.blocks = length / 16;
        kv.k = k;
        kv.v = v;
        kv.k_block_stride = kv.v_block_stride = 1024;
        kv.k_token_stride = kv.v_token_stride = 64;
        ekv_decode_params step = ekv_decode_params_default();
        step.batch = 1;
        step.kv = &kv;
        step.lengths = &length;
        step.q_heads = 1;
        step.q = q;
        step.out = out;
        step.alpha = 1.5;
        step.policy = certified ? EKV_POLICY_CERTIFIED : EKV_POLICY_FULL;
        size_t bytes = 0;
        EXPECT_OK(context, ekv_scratch_bytes(context, &step, &bytes));
        const double spans = length / 4096.0, room = length * (certified ? 14.2 : 13.0) + spans * 4 * (64 + 32) + 4096;
        printf("scratch_of_one_row: %zu bytes for %d tokens, %s\n", bytes, (int)length, certified ? "certified" : "full");
        EXPECT((double)bytes <= room && (double)bytes > 0.8 * room, "%zu bytes, the header says %.0f", bytes, room);
        ekv_context_destroy(context);
    }
}
END_TEST

/* The reference is slow and says so: it may allocate. */
START_TEST(fixed_scratch) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 200) {
        for (int b = 0; b < backends.count; b++) {
            rng r = case_begin("fixed_scratch", index);
            if (backend_is_reference(&backends, b)) {
                continue;
            }
            counting_allocator state;
            ekv_context *context = counting_context(&state, backends.names[b], 1);
            problem p;
            random_policy_step(&p, &r, context, index);
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            size_t bytes = 0;
            EXPECT_OK(context, ekv_scratch_bytes(context, &p.step, &bytes));
            problem_poison(&p);
            const int64_t before = state.allocations;
            const ekv_status status = ekv_decode(context, &p.step);
            EXPECT(status == (bytes > 0 ? EKV_ERROR_CAPACITY : EKV_OK), "needs %zu bytes and returned %d: %s", bytes,
                   (int)status, ekv_last_error(context));
            EXPECT(state.allocations == before, "a step with fixed scratch allocated");
            if (bytes > 0) {
                problem_check_untouched(&p);
            }
            const int64_t live = state.live_bytes;
            EXPECT_OK(context, ekv_reserve(context, &p.step));
            EXPECT(state.live_bytes - live >= (int64_t)bytes || bytes == 0, "%zu bytes announced, %lld allocated", bytes,
                   (long long)(state.live_bytes - live));
            const int64_t reserved = state.allocations;
            problem_decode(&p, context);
            problem_decode(&p, context);
            guard selected = problem_select(&p, context);
            guard_free(&selected);
            EXPECT(state.allocations == reserved, "%lld allocations in steps after ekv_reserve",
                   (long long)(state.allocations - reserved));
            problem_free(&p);
            ekv_context_destroy(context);
            EXPECT(state.live == 0 && !state.mismatch, "%lld allocations were not released", (long long)state.live);
        }
    }
    backends_close(&backends);
}
END_TEST

/* Reserved for the largest batch and lengths: no smaller step allocates, in a context that may. */
START_TEST(no_allocation_after_reserve) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 200) {
        for (int b = 0; b < backends.count; b++) {
            rng r = case_begin("no_allocation_after_reserve", index);
            if (backend_is_reference(&backends, b)) {
                continue;
            }
            counting_allocator state;
            ekv_context *context = counting_context(&state, backends.names[b], 0);
            problem p;
            random_policy_step(&p, &r, context, index);
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            ekv_decode_params shape_only = p.step; /* pointers to q, out and report are not read */
            shape_only.q = NULL;
            shape_only.out = NULL;
            EXPECT_OK(context, ekv_reserve(context, &shape_only));
            const int64_t reserved = state.allocations, bytes = state.live_bytes;
            problem_decode(&p, context);
            p.step.batch = 1 + (int32_t)rng_between(&r, 0, p.shape.batch - 1);
            EXPECT_OK(context, ekv_decode(context, &p.step));
            EXPECT(state.allocations == reserved && state.live_bytes == bytes, "%lld allocations after ekv_reserve",
                   (long long)(state.allocations - reserved));
            problem_free(&p);
            ekv_context_destroy(context);
            EXPECT(state.live == 0 && !state.mismatch, "%lld allocations were not released", (long long)state.live);
        }
    }
    backends_close(&backends);
}
END_TEST

/* A small program: everything that allocates.  Stops at the first failure, which it returns; gives all of it back. */
static ekv_status small_program(const ekv_allocator *allocator, const char *backend, const problem *p) {
    ekv_context_params params = ekv_context_params_default();
    params.backend = backend;
    params.threads = 2;
    params.allocator = *allocator;
    ekv_context *context = NULL;
    ekv_cache *cache = NULL;
    ekv_index *index = NULL;
    int32_t sequence = 0;
    const ekv_cache_params shape = cache_params();
    ekv_index_params index_shape = index_params();
    index_shape.dtype = p->shape.dtype;
    index_shape.blocks = p->kv.blocks;
    const float data[64] = {0};
    ekv_append_params rows = ekv_append_params_default();
    rows.count = 2;
    rows.k = rows.v = data;
    ekv_status status = ekv_context_create(&params, &context, NULL, 0);
    EXPECT((status == EKV_OK) == (context != NULL), "status %d and context %p", (int)status, (void *)context);
    if (status == EKV_OK) {
        status = ekv_index_create(context, &index_shape, NULL, 0, &index);
    }
    if (status == EKV_OK) {
        status = ekv_cache_create(context, &shape, &cache);
    }
    if (status == EKV_OK) {
        status = ekv_sequence_create(context, cache, &sequence);
    }
    if (status == EKV_OK) {
        status = ekv_cache_append(context, cache, sequence, 1, &rows);
    }
    if (status == EKV_OK) {
        status = ekv_index_update(context, index, &p->kv, p->step.block_table, 0, 40, 40);
    }
    if (status == EKV_OK) {
        float weights[64];
        status = ekv_entmax(context, 1.3, data, 64, weights, NULL, NULL);
    }
    if (status == EKV_OK) {
        ekv_decode_params step = p->step;
        step.index = index;
        status = ekv_decode(context, &step);
    }
    if (status != EKV_OK && context != NULL) {
        EXPECT(strlen(ekv_last_error(context)) > 0, "no message for status %d", (int)status);
    }
    ekv_index_destroy(index);
    ekv_cache_destroy(cache);
    ekv_context_destroy(context);
    return status;
}

START_TEST(out_of_memory) {
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        case_begin("out_of_memory", b);
        fixture *f = calloc(1, sizeof *f);
        fixture_make(f, backends.contexts[b]);
        bool done = false;
        for (int64_t fail = 0; !done; fail++) {
            counting_allocator state;
            const ekv_allocator allocator = counting_allocator_make(&state);
            state.fail_at = fail;
            case_note("%s: allocation %lld fails", backends.names[b], (long long)fail);
            problem_poison(&f->p);
            const ekv_status status = small_program(&allocator, backends.names[b], &f->p);
            done = state.allocations <= fail; /* it needed fewer: nothing failed */
            EXPECT(status == (done ? EKV_OK : EKV_ERROR_OUT_OF_MEMORY), "status %d (%s)", (int)status, ekv_strerror(status));
            EXPECT(state.live == 0 && state.live_bytes == 0, "%lld allocations, %lld bytes were not released",
                   (long long)state.live, (long long)state.live_bytes);
            EXPECT(!state.mismatch, "a release did not match its allocation");
            if (!done) {
                problem_check_untouched(&f->p);
            }
            EXPECT(!done || fail > 2, "the program allocates %lld times", (long long)fail);
        }
        problem_free(&f->p);
        free(f);
    }
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(decode_arguments),
                                TEST_ENTRY(stage_arguments),
                                TEST_ENTRY(missing_statistics),
                                TEST_ENTRY(index_that_does_not_fit),
                                TEST_ENTRY(transform_arguments),
                                TEST_ENTRY(index_arguments),
                                TEST_ENTRY(index_update_arguments),
                                TEST_ENTRY(cache_arguments),
                                TEST_ENTRY(append_arguments),
                                TEST_ENTRY(backend_names_are_strict),
                                TEST_ENTRY(the_environment_names_a_backend),
                                TEST_ENTRY(context_arguments),
                                TEST_ENTRY(scratch_ceiling),
                                TEST_ENTRY(scratch_of_one_row),
                                TEST_ENTRY(fixed_scratch),
                                TEST_ENTRY(no_allocation_after_reserve),
                                TEST_ENTRY(out_of_memory)};
    return HARNESS_MAIN(argv[0], tests);
}
