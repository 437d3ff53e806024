/*
 * ekv_conform: every backend passes; kernels with one deliberate mistake are caught and named, with a case that shows the
 * mistake again; a table with gaps is unsupported there and fine elsewhere; the default sample holds every value of every
 * parameter.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "harness.h"

#include "dispatch/internal.h"
#include "entmaxkv/kernels.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a run reported. */
typedef struct outcome {
    ekv_conform_summary summary;
    int64_t failures;
    char kernel[32], what[160], text[256], replay[256]; /* of the first failure */
    int64_t number;
    char others[128]; /* kernels that failed besides that one, once each */
} outcome;

static void on_result(void *user, const ekv_conform_result *result) {
    outcome *o = user;
    if (result->status != EKV_CONFORM_FAIL)
        return;
    if (o->failures++ == 0) {
        snprintf(o->kernel, sizeof o->kernel, "%s", result->kernel);
        snprintf(o->what, sizeof o->what, "%s", result->what);
        snprintf(o->text, sizeof o->text, "%s", result->text);
        snprintf(o->replay, sizeof o->replay, "%s", result->replay);
        o->number = result->number;
    } else if (strcmp(o->kernel, result->kernel) != 0 && !strstr(o->others, result->kernel)) {
        const size_t used = strlen(o->others);
        snprintf(o->others + used, sizeof o->others - used, "%s ", result->kernel);
    }
}

static outcome run_cases(const ekv_kernels *table, const char *kernel, int64_t number, const char *text) {
    outcome o = {.summary = ekv_conform_summary_default()};
    char message[1400] = "";
    ekv_conform_options options = ekv_conform_options_default();
    options.table = table;
    options.kernel = kernel;
    options.number = number;
    options.text = text;
    options.result = on_result;
    options.user = &o;
    const ekv_status status = ekv_conform(&options, &o.summary, message, sizeof message);
    EXPECT(status == EKV_OK, "ekv_conform: %s", message);
    EXPECT(o.failures == o.summary.failed, "%lld failures reported, %lld in the summary", (long long)o.failures,
           (long long)o.summary.failed);
    return o;
}

static outcome run_table(const ekv_kernels *table, const char *kernel, int64_t number) {
    return run_cases(table, kernel, number, NULL);
}

/* ---- every backend passes ---- */

START_TEST(backends_pass) {
    outcome o = {.summary = ekv_conform_summary_default()};
    char message[1400] = "";
    ekv_conform_options options = ekv_conform_options_default();
    options.result = on_result;
    options.user = &o;
    EXPECT(ekv_conform(&options, &o.summary, message, sizeof message) == EKV_OK, "ekv_conform: %s", message);
    printf("conform: %lld passed, %lld failed, %lld unsupported\n", (long long)o.summary.passed, (long long)o.summary.failed,
           (long long)o.summary.unsupported);
    EXPECT(o.summary.failed == 0 && o.summary.unsupported == 0 && o.summary.passed > 1000,
           "%lld failures, the first in %s: %s (%s); replay: entmaxkv %s", (long long)o.summary.failed, o.kernel, o.what,
           o.text, o.replay);
}
END_TEST

/* ---- mistakes ---- */

static ekv_kernels good, bad;

static float perturb(float x, float relative) {
    return x == 0.0f ? relative : x + x * relative;
}

/* A wrapper of one kernel for all three types; `after` changes what the right kernel left in `a`. */
#define TYPED_MISTAKE(label, kernel, after)                                                                                    \
  static void label##_as(ekv_dtype dtype, ekv_##kernel##_args *a) {                                                            \
    good.kernel[dtype](a);                                                                                                     \
    (void)dtype;                                                                                                               \
    after;                                                                                                                     \
  }                                                                                                                            \
  static void label##_f32(ekv_##kernel##_args *a) {                                                                            \
    label##_as(EKV_F32, a);                                                                                                    \
  }                                                                                                                            \
  static void label##_f16(ekv_##kernel##_args *a) {                                                                            \
    label##_as(EKV_F16, a);                                                                                                    \
  }                                                                                                                            \
  static void label##_bf16(ekv_##kernel##_args *a) {                                                                           \
    label##_as(EKV_BF16, a);                                                                                                   \
  }                                                                                                                            \
  static void label(void) {                                                                                                    \
    bad.kernel[EKV_F32] = label##_f32;                                                                                         \
    bad.kernel[EKV_F16] = label##_f16;                                                                                         \
    bad.kernel[EKV_BF16] = label##_bf16;                                                                                       \
  }

/* Likewise, where `instead` does all of the work. */
#define TYPED_REPLACEMENT(label, kernel, instead)                                                                              \
  static void label##_as(ekv_dtype dtype, ekv_##kernel##_args *a) {                                                            \
    instead;                                                                                                                   \
  }                                                                                                                            \
  static void label##_f32(ekv_##kernel##_args *a) {                                                                            \
    label##_as(EKV_F32, a);                                                                                                    \
  }                                                                                                                            \
  static void label##_f16(ekv_##kernel##_args *a) {                                                                            \
    label##_as(EKV_F16, a);                                                                                                    \
  }                                                                                                                            \
  static void label##_bf16(ekv_##kernel##_args *a) {                                                                           \
    label##_as(EKV_BF16, a);                                                                                                   \
  }                                                                                                                            \
  static void label(void) {                                                                                                    \
    bad.kernel[EKV_F32] = label##_f32;                                                                                         \
    bad.kernel[EKV_F16] = label##_f16;                                                                                         \
    bad.kernel[EKV_BF16] = label##_bf16;                                                                                       \
  }

#define PLAIN_MISTAKE(label, kernel, after)                                                                                    \
  static void label##_run(ekv_##kernel##_args *a) {                                                                            \
    good.kernel(a);                                                                                                            \
    after;                                                                                                                     \
  }                                                                                                                            \
  static void label(void) {                                                                                                    \
    bad.kernel = label##_run;                                                                                                  \
  }

static void flip_last_bit(ekv_dtype dtype, void *row, int64_t i) {
    const size_t size = dtype_size(dtype);
    unsigned char *element = (unsigned char *)row + (size_t)i * size;
    element[0] ^= 1u; /* the lowest byte, on the little-endian machines that there are */
}

/* One element a little wrong. */
TYPED_MISTAKE(load_row_last, load_row, a->out[a->dim - 1] = nextafterf(a->out[a->dim - 1], 9.0f))
TYPED_MISTAKE(load_row_padding, load_row, if (a->dim % 32) a->out[a->dim] = -0x1p-140f)
TYPED_MISTAKE(store_row_last, store_row, flip_last_bit(dtype, a->row, a->dim - 1))
TYPED_MISTAKE(score_lane, score,
              a->z[(size_t)(a->rows - 1) * EKV_TILE + a->n - 1] = perturb(a->z[(size_t)(a->rows - 1) * EKV_TILE + a->n - 1],
                                                                          0x1p-17f))
TYPED_MISTAKE(accumulate_last, accumulate,
              a->sum[a->rows - 1][a->dim - 1] = perturb(a->sum[a->rows - 1][a->dim - 1], 0x1p-17f))
TYPED_MISTAKE(box_last, box, flip_last_bit(dtype, a->box, a->dim - 1))
TYPED_MISTAKE(moments_deviation, moments, flip_last_bit(ekv_moments_dtype(dtype), a->moments, 2 * a->dim - 1);
              flip_last_bit(ekv_moments_dtype(dtype), (char *)a->moments + 1, 2 * a->dim - 1))
TYPED_MISTAKE(norms_below, norms, *a->norm = perturb(*a->norm, -0x1p-20f))
TYPED_MISTAKE(bound_below, bound, a->bound[a->n - 1] = a->bound[a->n - 1] - fabsf(a->bound[a->n - 1]) * 0x1p-16f)
TYPED_MISTAKE(gaussian_mean, gaussian, a->mean[a->n - 1] = perturb(a->mean[a->n - 1], 0x1p-17f))
TYPED_MISTAKE(gaussian_deviation, gaussian, a->deviation[0] = perturb(a->deviation[0], 0x1p-18f))
PLAIN_MISTAKE(tau_lower_above, tau_lower, a->tau = a->tau + 0x1p-14f < 0.0f ? a->tau + 0x1p-14f : 0.0f)
PLAIN_MISTAKE(solve_weight, solve, if (a->support > 0) a->weight[a->support - 1] = perturb(a->weight[a->support - 1], 0x1p-21f))
PLAIN_MISTAKE(solve_tau, solve, a->tau += 1e-12)
PLAIN_MISTAKE(softmax_weight, softmax, a->weight[a->n - 1] = perturb(a->weight[a->n - 1], 0x1p-20f))
PLAIN_MISTAKE(softmax_sum, softmax, a->sum *= 1.0 + 0x1p-19)
PLAIN_MISTAKE(mass_value, mass, a->value *= 1.0 + 1e-11)

/* NaN is dropped instead of kept. */
static void keep_drops_nan_run(ekv_keep_args *a) {
    for (int i = 0; i < a->n; i++) {
        if (!(a->z[i] > a->threshold))
            continue;
        a->list_z[a->count] = a->z[i];
        a->list_token[a->count++] = a->token[i];
    }
}
static void keep_drops_nan(void) {
    bad.keep = keep_drops_nan_run;
}

/* The tail past the last whole vector is left out. */
static void score_without_tail(ekv_dtype dtype, ekv_score_args *a) {
    ekv_score_args whole = *a;
    whole.dim = a->dim >= 32 ? a->dim / 32 * 32 : a->dim;
    good.score[dtype](&whole);
}
TYPED_REPLACEMENT(score_drops_tail, score, score_without_tail(dtype, a))

/* Whole vectors are stored where a part of one is meant. */
static void accumulate_too_far(ekv_dtype dtype, ekv_accumulate_args *a) {
    good.accumulate[dtype](a);
    volatile float *sum = a->sum[a->rows - 1];
    for (int d = a->dim; d < (a->dim + 31) / 32 * 32; d++)
        sum[d] = 0.0f;
}
TYPED_REPLACEMENT(accumulate_writes_past, accumulate, accumulate_too_far(dtype, a))

/* Whole vectors are loaded, and what lies past the key is multiplied by zero: fine unless it is NaN, or not there. */
static void score_too_far(ekv_dtype dtype, ekv_score_args *a) {
    ekv_score_args whole = *a;
    whole.dim = (a->dim + 31) / 32 * 32;
    good.score[dtype](&whole);
}
TYPED_REPLACEMENT(score_reads_past, score, score_too_far(dtype, a))

/* Values of weight zero are multiplied, not skipped. */
static void accumulate_unskipped(ekv_dtype dtype, ekv_accumulate_args *a) {
    for (int r = 0; r < a->rows; r++)
        for (int d = 0; d < a->dim; d++) {
            float sum = 0.0f;
            for (int i = 0; i < a->n; i++)
                sum += a->weight[r][i] * (float)dtype_load(dtype, a->values[i], d);
            a->sum[r][d] += sum;
        }
}
TYPED_REPLACEMENT(accumulate_reads_nan, accumulate, accumulate_unskipped(dtype, a))

/* An input is used as scratch. */
static void softmax_scribbles_run(ekv_softmax_args *a) {
    good.softmax(a);
    ((float *)(uintptr_t)a->z)[0] = 0.25f;
}
static void softmax_scribbles(void) {
    bad.softmax = softmax_scribbles_run;
}

/* The last group of a look-up forgets what its sums start from. */
static void lookup_forgets_start_run(ekv_lookup_args *a) {
    good.lookup(a);
    for (int t = 0; t < 16; t++) {
        uint16_t *sum = &a->sum[a->rows - 1][(a->groups - 1) * 16 + t];
        *sum = (uint16_t)(*sum - a->start[a->rows - 1][a->groups - 1]);
    }
}
static void lookup_forgets_start(void) {
    bad.lookup = lookup_forgets_start_run;
}

/* Sums at the limit count as above it. */
static void above_or_equal_run(ekv_above_args *a) {
    for (int t = 0; t < a->n; t++)
        a->bits[t / 64] |= (uint64_t)(a->sum[t] >= a->limit) << t % 64;
}
static void above_or_equal(void) {
    bad.above = above_or_equal_run;
}

static void illegal_run(ekv_mass_args *a) {
    (void)a;
    raise(SIGILL);
}
static void mass_illegal(void) {
    bad.mass = illegal_run;
}

static const struct {
    const char *kernel, *what; /* what: a part of the failure's text, or NULL */
    void (*install)(void);
} mistakes[] = {
    {"load_row", "out", load_row_last},
    {"load_row", "padding", load_row_padding},
    {"store_row", "row", store_row_last},
    {"score", "z", score_lane},
    {"score", "z", score_drops_tail},
    {"score", NULL, score_reads_past},
    {"lookup", "sum", lookup_forgets_start},
    {"above", "bits", above_or_equal},
    {"accumulate", "sum", accumulate_last},
    {"accumulate", NULL, accumulate_writes_past},
    {"accumulate", "sum", accumulate_reads_nan},
    {"box", "minimum", box_last},
    {"moments", "deviation", moments_deviation},
    {"norms", "norm", norms_below},
    {"bound", "bound", bound_below},
    {"gaussian", "mean", gaussian_mean},
    {"gaussian", "deviation", gaussian_deviation},
    {"keep", NULL, keep_drops_nan},
    {"tau_lower", "lower bound", tau_lower_above},
    {"solve", "weight", solve_weight},
    {"solve", "tau", solve_tau},
    {"softmax", "weight", softmax_weight},
    {"softmax", "sum", softmax_sum},
    {"softmax", "unchanged", softmax_scribbles},
    {"mass", "value", mass_value},
    {"mass", "illegal instruction", mass_illegal},
};

static void load_good(void) {
    ekv_backend_entry entry;
    EXPECT(ekv_find_backend("scalar", &entry), "there is no scalar backend");
    good = bad = *entry.kernels;
    bad.name = "broken";
}

START_TEST(mistakes_are_caught) {
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        load_good();
        mistakes[i].install();
        case_note("mistake %zu, in %s", i, mistakes[i].kernel);
        const outcome o = run_table(&bad, mistakes[i].kernel, -1);
        EXPECT(o.failures > 0, "%s: the mistake was not caught", mistakes[i].kernel);
        EXPECT(strcmp(o.kernel, mistakes[i].kernel) == 0, "%s was blamed", o.kernel);
        EXPECT(!mistakes[i].what || strstr(o.what, mistakes[i].what), "\"%s\" was found wrong", o.what);
        char number[32];
        snprintf(number, sizeof number, "--case %lld", (long long)o.number);
        EXPECT(strstr(o.replay, number) && strstr(o.replay, mistakes[i].kernel), "replay line: %s", o.replay);
        const outcome again = run_table(&bad, mistakes[i].kernel, o.number);
        EXPECT(again.failures == 1 && strcmp(again.what, o.what) == 0, "case %lld alone: \"%s\" instead of \"%s\"",
               (long long)o.number, again.what, o.what);
    }
}
END_TEST

/* Among all kernels and policies the right one is blamed, and with it nothing but what is built on it.  A third of each one's cases. */
START_TEST(the_kernel_is_named) {
    load_good();
    score_drops_tail();
    const outcome o = run_cases(&bad, NULL, -1, "memory at the end");
    EXPECT(strcmp(o.kernel, "score") == 0, "%s was blamed first", o.kernel);
    char others[sizeof o.others];
    snprintf(others, sizeof others, "%s", o.others);
    for (const char *name = strtok(others, " "); name; name = strtok(NULL, " "))
        EXPECT(strncmp(name, "policy-", 7) == 0 || strcmp(name, "bound") == 0, "%s was blamed too", name);
    EXPECT(strstr(o.others, "policy-full") != NULL, "policy full passed with a broken score");
}
END_TEST

/* ---- tables with gaps, options ---- */

START_TEST(gaps_are_unsupported) {
    load_good();
    bad.keep = NULL;
    bad.score[EKV_BF16] = NULL;
    const outcome keep = run_table(&bad, "keep", -1), score = run_table(&bad, "score", -1),
                  full = run_table(&bad, "policy-full", -1);
    EXPECT(keep.summary.unsupported > 0 && keep.summary.passed == 0 && keep.failures == 0,
           "keep: %lld unsupported, %lld passed", (long long)keep.summary.unsupported, (long long)keep.summary.passed);
    EXPECT(score.summary.unsupported > 0 && score.summary.passed > score.summary.unsupported && score.failures == 0,
           "score: %lld unsupported, %lld passed", (long long)score.summary.unsupported, (long long)score.summary.passed);
    EXPECT(full.summary.unsupported > 0 && full.summary.passed == 0 && full.failures == 0, "policy-full: %lld unsupported",
           (long long)full.summary.unsupported);
    static const ekv_kernels empty = {.name = "empty"};
    const outcome none = run_table(&empty, NULL, -1);
    EXPECT(none.summary.passed == 0 && none.failures == 0,
           "without a kernel %lld cases passed, %lld failed, the first in %s: %s", (long long)none.summary.passed,
           (long long)none.failures, none.kernel, none.what);
}
END_TEST

START_TEST(options_are_checked) {
    char message[1400];
    load_good();
    ekv_conform_options o = ekv_conform_options_default();
    o.backend = "no such backend";
    EXPECT(ekv_conform(&o, NULL, message, sizeof message) == EKV_ERROR_UNAVAILABLE, "an unknown backend");
    EXPECT(strstr(message, "scalar"), "what is available: %s", message);
    o.backend = NULL;
    o.kernel = "no such kernel";
    EXPECT(ekv_conform(&o, NULL, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "an unknown kernel");
    EXPECT(strstr(message, "accumulate") && strstr(message, "policy-topk"), "what is known: %s", message);
    o.kernel = "mass";
    o.number = 1000000;
    EXPECT(ekv_conform(&o, NULL, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "a case past the last");
    o = ekv_conform_options_default();
    o.table = &good;
    o.backend = "scalar";
    EXPECT(ekv_conform(&o, NULL, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "a table and a backend");
    o = ekv_conform_options_default();
    o.size = 3;
    EXPECT(ekv_conform(&o, NULL, message, sizeof message) == EKV_ERROR_INVALID_ARGUMENT, "a wrong size");
}
END_TEST

START_TEST(handlers_are_restored) {
    struct sigaction before, after;
    load_good();
    sigaction(SIGSEGV, NULL, &before);
    run_table(&good, "softmax", -1);
    sigaction(SIGSEGV, NULL, &after);
    EXPECT(before.sa_handler == after.sa_handler && before.sa_flags == after.sa_flags, "the handler of SIGSEGV changed");
}
END_TEST

/* ---- the sample ---- */

enum { MAX_VALUES = 2048 };
typedef struct values {
    char *text[MAX_VALUES]; /* "kernel: axis value" */
    int count;
    int64_t cases;
} values;

static void collect(void *user, const ekv_conform_result *result) {
    values *v = user;
    char text[256];
    snprintf(text, sizeof text, "%s", result->text);
    v->cases++;
    for (char *part = strtok(text, ","); part; part = strtok(NULL, ",")) {
        char name[128];
        int i = 0;
        snprintf(name, sizeof name, "%s:%s%s", result->kernel, *part == ' ' ? "" : " ", part);
        while (i < v->count && strcmp(v->text[i], name) != 0)
            i++;
        if (i < v->count)
            continue;
        EXPECT(v->count < MAX_VALUES, "too many values");
        v->text[v->count] = malloc(strlen(name) + 1);
        memcpy(v->text[v->count++], name, strlen(name) + 1);
    }
}

static values *list_cases(const char *kernel, int thorough) {
    values *v = calloc(1, sizeof *v);
    ekv_conform_options o = ekv_conform_options_default();
    o.backend = "scalar";
    o.kernel = kernel;
    o.list = 1;
    o.thorough = thorough;
    o.result = collect;
    o.user = v;
    EXPECT(ekv_conform(&o, NULL, NULL, 0) == EKV_OK, "ekv_conform");
    return v;
}

static void free_values(values *v) {
    for (int i = 0; i < v->count; i++)
        free(v->text[i]);
    free(v);
}

START_TEST(sample_holds_every_value) {
#define NAME(kernel, description) #kernel,
    static const char *const kernels[] = {EKV_TYPED_KERNELS(NAME) EKV_PLAIN_KERNELS(NAME) "entmax", "policy-full",
                                          "policy-gaussian"};
#undef NAME
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        values *sample = list_cases(kernels[i], 0), *all = list_cases(kernels[i], 1);
        EXPECT(sample->cases > 0, "%s has no cases", kernels[i]);
        EXPECT(all->cases > sample->cases || all->cases == sample->cases, "%s", kernels[i]);
        EXPECT(sample->count == all->count, "%s: the %lld cases of the sample hold %d of the %d values of the grid of %lld",
               kernels[i], (long long)sample->cases, sample->count, all->count, (long long)all->cases);
        free_values(sample);
        free_values(all);
    }
}
END_TEST

/* Every pair of values of two axes stands in a case of the pairwise list; "axis" is the place in a case's text. */
enum { PAIR_AXES = 12, PAIR_VALUES = 64 };
typedef struct pair_table {
    char *value[PAIR_AXES][PAIR_VALUES];
    int n[PAIR_AXES], axes;
    bool seen[PAIR_AXES][PAIR_VALUES][PAIR_AXES][PAIR_VALUES];
    int64_t cases;
} pair_table;

static void collect_pairs(void *user, const ekv_conform_result *result) {
    pair_table *t = user;
    char text[256];
    int index[PAIR_AXES], axes = 0;
    snprintf(text, sizeof text, "%s", result->text);
    for (char *part = strtok(text, ","); part; part = strtok(NULL, ","), axes++) {
        EXPECT(axes < PAIR_AXES, "too many axes");
        int i = 0;
        while (i < t->n[axes] && strcmp(t->value[axes][i], part) != 0)
            i++;
        if (i == t->n[axes]) {
            EXPECT(i < PAIR_VALUES, "too many values");
            t->value[axes][i] = malloc(strlen(part) + 1);
            memcpy(t->value[axes][t->n[axes]++], part, strlen(part) + 1);
        }
        index[axes] = i;
    }
    t->axes = axes;
    t->cases++;
    for (int a = 0; a < axes; a++)
        for (int b = 0; b < axes; b++)
            t->seen[a][index[a]][b][index[b]] = true;
}

START_TEST(pairwise_holds_every_pair) {
#define NAME(kernel, description) #kernel,
    static const char *const kernels[] = {EKV_TYPED_KERNELS(NAME) EKV_PLAIN_KERNELS(NAME) "entmax", "policy-full",
                                          "policy-certified"};
#undef NAME
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        pair_table *t = calloc(1, sizeof *t);
        values *all = list_cases(kernels[i], 0); /* which holds every value, see above */
        ekv_conform_options o = ekv_conform_options_default();
        o.backend = "scalar";
        o.kernel = kernels[i];
        o.list = 1;
        o.thorough = 2;
        o.result = collect_pairs;
        o.user = t;
        EXPECT(ekv_conform(&o, NULL, NULL, 0) == EKV_OK, "ekv_conform");
        int total = 0;
        for (int a = 0; a < t->axes; a++)
            total += t->n[a];
        EXPECT(total == all->count, "%s: the pairwise list holds %d of %d values", kernels[i], total, all->count);
        for (int a = 0; a < t->axes; a++)
            for (int b = a + 1; b < t->axes; b++)
                for (int v = 0; v < t->n[a]; v++)
                    for (int w = 0; w < t->n[b]; w++)
                        EXPECT(t->seen[a][v][b][w], "%s: no case has \"%s\" with \"%s\"", kernels[i], t->value[a][v], t->value[b][w]);
        for (int a = 0; a < t->axes; a++)
            for (int v = 0; v < t->n[a]; v++)
                free(t->value[a][v]);
        free(t);
        free_values(all);
    }
}
END_TEST

int main(void) {
    const test_entry tests[] = {TEST_ENTRY(backends_pass),           TEST_ENTRY(mistakes_are_caught),
                                TEST_ENTRY(the_kernel_is_named),     TEST_ENTRY(gaps_are_unsupported),
                                TEST_ENTRY(options_are_checked),     TEST_ENTRY(handlers_are_restored),
                                TEST_ENTRY(sample_holds_every_value), TEST_ENTRY(pairwise_holds_every_pair)};
    return HARNESS_MAIN("test_conform", tests);
}
