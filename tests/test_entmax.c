/*
 * ekv_entmax on every backend: against the reference, against closed forms, and its properties on random and adversarial rows.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cpu/reference.h"
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double alphas[] = {1, 1 + 1e-9, 1.0001, 1.01, 1.1, 1.25, 4.0 / 3, 1.5, 1.75, 2, 2.5, 3, 5, 10};

typedef enum distribution {
    PEAKED,
    NORMAL,
    FLAT,
    CLUSTERED,
    TIED,
    ALL_TIED,
    OFFSET_UP,
    OFFSET_DOWN,
    SOME_MINUS_INFINITY,
    HUGE_SCORES,
    DISTRIBUTIONS
} distribution;

static const char *const distribution_names[] = {"peaked",   "normal",    "flat",        "clustered",   "tied",
                                                 "all tied", "offset up", "offset down", "-infinities", "huge"};

static float one_score(distribution kind, rng *r) {
    const float x = rng_rough_normal(r);
    switch (kind) {
    case PEAKED:
        return 8 * x;
    case FLAT:
        return 1e-3f * x;
    case CLUSTERED:
        return (float)(1.5 * (double)rng_between(r, -2, 0)) + 1e-4f * x;
    case TIED:
        return 0.5f * (float)rng_between(r, -3, 1);
    case ALL_TIED:
        return 0.375f;
    case OFFSET_UP:
        return 1e5f + 2 * x;
    case OFFSET_DOWN:
        return -1e5f + 2 * x;
    case SOME_MINUS_INFINITY:
        return rng_chance(r, 0.5) ? -INFINITY : x;
    case HUGE_SCORES:
        return 1e37f * x;
    default:
        return x;
    }
}

static void fill_scores(distribution kind, float *scores, int64_t n, rng *r) {
    for (int64_t i = 0; i < n; i++) {
        scores[i] = one_score(kind, r);
    }
    if (n > 0 && kind == SOME_MINUS_INFINITY) {
        scores[rng_between(r, 0, n - 1)] = 0.25f;
    }
}

/* One row between guard pages. */
typedef struct row {
    double alpha;
    int64_t n, support;
    guard scores_memory, weights_memory;
    float *scores, *weights;
    double tau;
} row;

static void row_make(row *x, double alpha, int64_t n) {
    memset(x, 0, sizeof *x);
    x->alpha = alpha;
    x->n = n;
    x->scores_memory = guard_alloc((size_t)n * sizeof(float));
    x->weights_memory = guard_alloc((size_t)n * sizeof(float));
    x->scores = x->scores_memory.data;
    x->weights = x->weights_memory.data;
}

static void row_free(row *x) {
    guard_free(&x->scores_memory);
    guard_free(&x->weights_memory);
}

static void row_solve(row *x, ekv_context *context) {
    memset(x->weights, POISON, (size_t)x->n * sizeof(float));
    guard_read_only(&x->scores_memory, true);
    EXPECT_OK(context, ekv_entmax(context, x->alpha, x->scores, x->n, x->weights, &x->tau, &x->support));
    guard_read_only(&x->scores_memory, false);
}

static double largest(const float *scores, int64_t n) {
    double most = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        most = scores[i] > most ? scores[i] : most;
    }
    return most;
}

/* ---- Against the reference -------------------------------------------------------------------------------------------- */

/* The reference on the finite scores, shifted so that the largest is 0: z and tau of any magnitude then lose no digits. */
typedef struct answer {
    double *x, *p; /* z - tau and weights of all scores; -infinity and 0 where the score is -infinity */
    double tau;
    int64_t finite;
} answer;

static void answer_make(answer *a, const row *x) {
    const bool softmax = x->alpha < 1 + 1e-7;
    const double factor = softmax ? 1 : x->alpha - 1, top = largest(x->scores, x->n);
    a->x = calloc((size_t)x->n + 1, sizeof(double));
    a->p = calloc((size_t)x->n + 1, sizeof(double));
    double *z = calloc((size_t)x->n + 1, sizeof(double)), *p = calloc((size_t)x->n + 1, sizeof(double));
    a->finite = 0;
    for (int64_t i = 0; i < x->n; i++) {
        if (x->scores[i] != -INFINITY) {
            z[a->finite++] = factor * (x->scores[i] - top);
        }
    }
    const double tau = ekv_reference_entmax(softmax ? 1 : x->alpha, z, NULL, a->finite, p);
    a->tau = tau + factor * top;
    for (int64_t i = 0, k = 0; i < x->n; i++) {
        const bool is_finite = x->scores[i] != -INFINITY;
        a->x[i] = is_finite ? z[k] - tau : -INFINITY;
        a->p[i] = is_finite ? p[k] : 0;
        k += is_finite;
    }
    free(z);
    free(p);
}

static void answer_free(answer *a) {
    free(a->x);
    free(a->p);
}

/*
 * The scores are exact and the solve is in double, so a weight may differ by the rounding to f32 and of one power (1e-6 of it),
 * and by what an error of 2^-46 in z - tau makes of it: near the threshold, for alpha > 2, that is not small.
 */
static double weight_tolerance(double alpha, double x, double p) {
    const double slip = 0x1p-46, fixed = 1e-6 * p + 2e-38;
    if (alpha < 1 + 1e-7) {
        return fixed;
    }
    const double beta = 1 / (alpha - 1);
    return fixed + pow(fmax(x + slip, 0), beta) - pow(fmax(x - slip, 0), beta);
}

static void check_support(const row *x, const answer *a) {
    const double beta = x->alpha < 1 + 1e-7 ? 0 : 1 / (x->alpha - 1);
    int64_t least = 0, most = 0;
    for (int64_t i = 0; i < x->n; i++) {
        if (beta == 0) {
            least += a->x[i] > -600;
            most += a->x[i] > -INFINITY;
        } else { /* a weight too small for double may count or not */
            least += a->x[i] > 0x1p-46 && beta * log(a->x[i]) > -600;
            most += a->x[i] > -0x1p-46;
        }
    }
    EXPECT(x->support >= least && x->support <= most, "support %lld, expected %lld to %lld", (long long)x->support,
           (long long)least, (long long)most);
}

static void check_row(const row *x, const answer *a) {
    double sum = 0;
    for (int64_t i = 0; i < x->n; i++) {
        const double tolerance = weight_tolerance(x->alpha, a->x[i], a->p[i]);
        EXPECT(fabs(x->weights[i] - a->p[i]) <= tolerance,
               "weight %lld of %lld is %.9g, reference %.9g, allowed %.3g (z - tau %.9g)", (long long)i, (long long)x->n,
               x->weights[i], a->p[i], tolerance, a->x[i]);
        EXPECT(x->weights[i] >= 0, "weight %lld is %g", (long long)i, x->weights[i]);
        sum += x->weights[i];
    }
    EXPECT(fabs(sum - 1) <= 1e-6, "the weights sum to %.9g", sum);
    const double tau_tolerance = 1e-12 + 4 * 0x1p-52 * fabs(a->tau);
    EXPECT(fabs(x->tau - a->tau) <= tau_tolerance, "tau %.17g, reference %.17g, allowed %.3g", x->tau, a->tau, tau_tolerance);
    check_support(x, a);
}

static const int64_t sizes[] = {1, 2, 3, 17, 100, 4097};
enum { ALPHAS = sizeof alphas / sizeof *alphas, SIZES = sizeof sizes / sizeof *sizes };

START_TEST(matches_reference) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, (int64_t)ALPHAS * SIZES * DISTRIBUTIONS * 3) {
        rng r = case_begin("matches_reference", index);
        const distribution kind = (distribution)(index % DISTRIBUTIONS);
        row x;
        row_make(&x, alphas[index / DISTRIBUTIONS % ALPHAS], sizes[index / DISTRIBUTIONS / ALPHAS % SIZES]);
        fill_scores(kind, x.scores, x.n, &r);
        answer a;
        answer_make(&a, &x);
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha %.10g, n %lld, %s", backends.names[b], x.alpha, (long long)x.n, distribution_names[kind]);
            row_solve(&x, backends.contexts[b]);
            check_row(&x, &a);
        }
        answer_free(&a);
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Closed forms ----------------------------------------------------------------------------------------------------- */

static void solve_list(ekv_context *context, row *x, double alpha, const float *scores, int64_t n) {
    row_make(x, alpha, n);
    memcpy(x->scores, scores, (size_t)n * sizeof(float));
    row_solve(x, context);
}

static void check_list(ekv_context *context, double alpha, const float *scores, int64_t n, const double *weights, double tau,
                       int64_t support) {
    row x;
    solve_list(context, &x, alpha, scores, n);
    for (int64_t i = 0; i < n; i++) {
        EXPECT(fabs(x.weights[i] - weights[i]) <= 1.2e-7 * weights[i], "alpha %g: weight %lld is %.9g, expected %.9g", alpha,
               (long long)i, x.weights[i], weights[i]);
    }
    EXPECT(fabs(x.tau - tau) <= 1e-13 * fmax(1, fabs(tau)), "alpha %g: tau %.17g, expected %.17g", alpha, x.tau, tau);
    EXPECT(x.support == support, "alpha %g: support %lld, expected %lld", alpha, (long long)x.support, (long long)support);
    row_free(&x);
}

static void check_single(ekv_context *context) {
    for (size_t i = 0; i < ALPHAS; i++) {
        const double alpha = alphas[i], one[] = {1};
        const float score[] = {-3.25f};
        const double tau = alpha < 1 + 1e-7 ? -3.25 : (alpha - 1) * -3.25 - 1;
        check_list(context, alpha, score, 1, one, tau, 1);
    }
}

/* n equal scores: 1/n each, tau = z - n^(1-alpha), or s + log(n). */
static void check_equal(ekv_context *context) {
    for (size_t i = 0; i < ALPHAS; i++) {
        for (int64_t n = 2; n <= 64; n *= 2) {
            const double alpha = alphas[i];
            float scores[64];
            double weights[64];
            for (int64_t k = 0; k < n; k++) {
                scores[k] = 2.5f;
                weights[k] = 1.0 / (double)n;
            }
            const double tau = alpha < 1 + 1e-7 ? 2.5 + log((double)n) : (alpha - 1) * 2.5 - pow((double)n, 1 - alpha);
            check_list(context, alpha, scores, n, weights, tau, n);
        }
    }
}

/* The second score lies exactly on, or beyond, the threshold of the first alone. */
static void check_one_hot(ekv_context *context) {
    const double sharp[] = {1.25, 1.5, 2, 3, 5}, weights[] = {1, 0, 0};
    for (size_t i = 0; i < sizeof sharp / sizeof *sharp; i++) {
        const double gap = 1 / (sharp[i] - 1); /* exact in binary for these */
        const float scores[] = {(float)(1 + gap), 1, -7};
        check_list(context, sharp[i], scores, 3, weights, (sharp[i] - 1) * (1 + gap) - 1, 1);
    }
}

static void check_two(ekv_context *context) {
    const float scores[] = {0.75f, 0.25f};
    const double sparsemax[] = {0.75, 0.25};
    check_list(context, 2, scores, 2, sparsemax, 0, 2);
    /* alpha = 1.5: (a - t)^2 + (b - t)^2 = 1 with a = 0.375, b = 0.125; m = 0.25, h = 0.125: t = m - sqrt(1/2 - h^2). */
    const double t = 0.25 - sqrt(0.5 - 0.125 * 0.125);
    const double root[] = {(0.375 - t) * (0.375 - t), (0.125 - t) * (0.125 - t)};
    check_list(context, 1.5, scores, 2, root, t, 2);
    /* alpha = 3: sqrt(x) + sqrt(y) = 1 with x - y = z_0 - z_1 = 2 * 0.25: x = ((1 + 0.5) / 2)^2. */
    const float near[] = {1.25f, 1.0f};
    const double square[] = {0.75, 0.25};
    check_list(context, 3, near, 2, square, 2.5 - 0.5625, 2);
    const double logistic[] = {1 / (1 + exp(-0.5)), 1 / (1 + exp(0.5))};
    check_list(context, 1, scores, 2, logistic, 0.75 + log1p(exp(-0.5)), 2);
}

START_TEST(closed_forms) {
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        case_begin("closed_forms", b);
        case_note("%s", backends.names[b]);
        check_single(backends.contexts[b]);
        check_equal(backends.contexts[b]);
        check_one_hot(backends.contexts[b]);
        check_two(backends.contexts[b]);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Continuity ------------------------------------------------------------------------------------------------------- */

/* Largest difference of the weights at two alphas. */
static double distance(ekv_context *context, const row *x, double alpha, double other) {
    row left, right;
    solve_list(context, &left, alpha, x->scores, x->n);
    solve_list(context, &right, other, x->scores, x->n);
    double most = 0;
    for (int64_t i = 0; i < x->n; i++) {
        const double difference = fabs((double)left.weights[i] - right.weights[i]);
        EXPECT(difference <= 1, "alpha %.10g and %.10g: weights %g and %g", alpha, other, left.weights[i], right.weights[i]);
        most = fmax(most, difference);
    }
    row_free(&left);
    row_free(&right);
    return most;
}

/* The closed forms against the general solver beside them. */
START_TEST(continuous_around_the_closed_forms) {
    static const double centres[] = {4.0 / 3, 1.5, 2};
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 3000) {
        rng r = case_begin("continuous_around_the_closed_forms", index);
        const distribution kind = (distribution)(index % HUGE_SCORES);
        row x;
        row_make(&x, 0, rng_between(&r, 1, 300));
        fill_scores(kind, x.scores, x.n, &r);
        const double centre = centres[index / HUGE_SCORES % 3];
        for (int b = 0; b < backends.count; b++) {
            for (int side = -1; side <= 1; side += 2) {
                case_note("%s: alpha %g %+d e-9, %s", backends.names[b], centre, side, distribution_names[kind]);
                /* A row's spread within the support is below 3 / (alpha - 1), so 1e-9 moves no weight by more than 1e-7;
                 * an equal amount for rounding both to f32. */
                const double d = distance(backends.contexts[b], &x, centre, centre + side * 1e-9);
                EXPECT(d <= 2e-7, "n %lld: a weight jumps by %.3g", (long long)x.n, d);
            }
        }
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

static double distance_to_softmax(double alpha, const row *x) {
    row at = *x, one = *x;
    at.alpha = alpha;
    one.alpha = 1;
    answer a, softmax;
    answer_make(&a, &at);
    answer_make(&softmax, &one);
    double most = 0;
    for (int64_t i = 0; i < x->n; i++) {
        most = fmax(most, fabs(a.p[i] - softmax.p[i]));
    }
    answer_free(&a);
    answer_free(&softmax);
    return most;
}

/*
 * alpha -> 1.  The exact alpha-entmax itself lies (alpha - 1)/2 * p * ((s - lse)^2 - mean) from softmax; what the library
 * returns may be no farther than that and rounding.  For two scores that is at most 2.4e-5 at 1 + 1e-4; with more the exact
 * value can pass 3e-5 (4.2e-5 for weights .8, .1, .1).
 */
START_TEST(approaches_softmax) {
    static const double near_one[] = {1 + 1e-15, 1 + 1e-9, 1 + 0.99e-7, 1 + 1.01e-7, 1 + 1e-6, 1 + 1e-5, 1.0001};
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 3000) {
        rng r = case_begin("approaches_softmax", index);
        const double alpha = near_one[index % 7];
        const bool small = index % 2;
        row x;
        row_make(&x, alpha, small ? rng_between(&r, 1, 2) : rng_between(&r, 4, 400));
        fill_scores(small ? NORMAL : (distribution)(index / 7 % HUGE_SCORES), x.scores, x.n, &r);
        const double exact = distance_to_softmax(alpha, &x);
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha 1 + %.3g, n %lld", backends.names[b], alpha - 1, (long long)x.n);
            const double d = distance(backends.contexts[b], &x, 1, alpha);
            EXPECT(d <= exact + 1e-6, "%.3g from softmax, the exact transform %.3g", d, exact);
            EXPECT(!small || d <= 3e-5, "%.3g from softmax", d);
        }
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Special values --------------------------------------------------------------------------------------------------- */

START_TEST(in_place_gives_the_same_bits) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 600) {
        rng r = case_begin("in_place_gives_the_same_bits", index);
        row x;
        row_make(&x, RNG_PICK(&r, alphas), rng_between(&r, 0, 200));
        fill_scores((distribution)(index % DISTRIBUTIONS), x.scores, x.n, &r);
        guard copy = guard_alloc((size_t)x.n * sizeof(float));
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha %g n %lld", backends.names[b], x.alpha, (long long)x.n);
            memcpy(copy.data, x.scores, copy.size);
            row_solve(&x, backends.contexts[b]);
            double tau;
            int64_t support;
            EXPECT_OK(backends.contexts[b],
                      ekv_entmax(backends.contexts[b], x.alpha, copy.data, x.n, copy.data, &tau, &support));
            EXPECT(memcmp(copy.data, x.weights, copy.size) == 0, "weights differ in place");
            EXPECT(memcmp(&tau, &x.tau, sizeof tau) == 0 && support == x.support, "tau %.17g and %.17g", tau, x.tau);
            memcpy(copy.data, x.scores, copy.size);
            EXPECT_OK(backends.contexts[b], ekv_entmax(backends.contexts[b], x.alpha, copy.data, x.n, copy.data, NULL, NULL));
            EXPECT(memcmp(copy.data, x.weights, copy.size) == 0, "weights differ without tau and support");
        }
        guard_free(&copy);
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

static void check_all_nan(const row *x) {
    EXPECT(isnan(x->tau), "tau is %g", x->tau);
    for (int64_t i = 0; i < x->n; i++) {
        EXPECT(isnan(x->weights[i]), "weight %lld of %lld is %g", (long long)i, (long long)x->n, x->weights[i]);
    }
}

START_TEST(nan_and_infinity_make_everything_nan) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 1500) {
        rng r = case_begin("nan_and_infinity_make_everything_nan", index);
        const float bad = index % 3 == 0 ? NAN : index % 3 == 1 ? -NAN : INFINITY;
        row x;
        row_make(&x, alphas[index / 3 % ALPHAS], rng_between(&r, 1, 150));
        fill_scores((distribution)(index % DISTRIBUTIONS), x.scores, x.n, &r);
        x.scores[rng_between(&r, 0, x.n - 1)] = bad;
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha %g, n %lld, a score of %g", backends.names[b], x.alpha, (long long)x.n, bad);
            row_solve(&x, backends.contexts[b]);
            check_all_nan(&x);
        }
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

START_TEST(empty_row) {
    backend_set backends;
    backends_open(&backends, 1);
    for (int b = 0; b < backends.count; b++) {
        for (size_t i = 0; i < ALPHAS; i++) {
            case_begin("empty_row", (int64_t)i);
            case_note("%s: alpha %g", backends.names[b], alphas[i]);
            row x;
            row_make(&x, alphas[i], 0);
            x.tau = 5;
            x.support = 5;
            row_solve(&x, backends.contexts[b]);
            EXPECT(x.tau == -INFINITY && x.support == 0, "tau %g support %lld", x.tau, (long long)x.support);
            EXPECT_OK(backends.contexts[b], ekv_entmax(backends.contexts[b], alphas[i], NULL, 0, NULL, NULL, NULL));
            row_free(&x);
        }
    }
    backends_close(&backends);
}
END_TEST

/* ---- Properties ------------------------------------------------------------------------------------------------------- */

static double property_alpha(rng *r) {
    return rng_chance(r, 0.3) ? 1 + exp(rng_range(r, -4.6, 2.2)) : alphas[rng_between(r, 3, ALPHAS - 1)];
}

static int64_t property_size(rng *r) {
    return rng_chance(r, 0.02) ? rng_between(r, 500, 3000) : rng_between(r, 1, 90);
}

/* max z - 1 <= tau <= max z - n^(1-alpha); weights ordered as the scores, equal where they tie. */
START_TEST(tau_bounds) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 10000) {
        rng r = case_begin("tau_bounds", index);
        const distribution kind = (distribution)(index % DISTRIBUTIONS);
        row x;
        row_make(&x, property_alpha(&r), property_size(&r));
        fill_scores(kind, x.scores, x.n, &r);
        const double top = (x.alpha - 1) * largest(x.scores, x.n), slip = 4 * 0x1p-52 * fmax(1, fabs(top));
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha %.10g, n %lld, %s", backends.names[b], x.alpha, (long long)x.n, distribution_names[kind]);
            row_solve(&x, backends.contexts[b]);
            const double high = top - pow((double)x.n, 1 - x.alpha);
            EXPECT(x.tau >= top - 1 - slip, "tau %.17g below max z - 1 = %.17g", x.tau, top - 1);
            EXPECT(x.tau <= high + slip, "tau %.17g above max z - n^(1-alpha) = %.17g", x.tau, high);
            for (int64_t i = 1; i < x.n; i++) {
                const float left = x.scores[i - 1], right = x.scores[i];
                const bool ordered = left < right ? x.weights[i - 1] <= x.weights[i] : x.weights[i - 1] >= x.weights[i];
                EXPECT(ordered && (left != right || x.weights[i - 1] == x.weights[i]), "scores %.9g, %.9g weights %.9g, %.9g",
                       left, right, x.weights[i - 1], x.weights[i]);
            }
        }
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

/* A subset of B, taken at random or from the top, never has the larger tau; dropping nothing but weight zero changes nothing.
 */
START_TEST(tau_grows_with_the_set) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 10000) {
        rng r = case_begin("tau_grows_with_the_set", index);
        const distribution kind = (distribution)(index % DISTRIBUTIONS);
        row all;
        row_make(&all, index % 11 == 0 ? 1 : property_alpha(&r), property_size(&r));
        fill_scores(kind, all.scores, all.n, &r);
        const double keep = rng_uniform(&r);
        bool *kept = calloc((size_t)all.n, sizeof *kept);
        int64_t n = 0;
        for (int64_t i = 0; i < all.n; i++) {
            kept[i] = rng_chance(&r, keep);
            n += kept[i];
        }
        row some;
        row_make(&some, all.alpha, n);
        for (int64_t i = 0, k = 0; i < all.n; i++) {
            if (kept[i]) {
                some.scores[k++] = all.scores[i];
            }
        }
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha %.10g, %lld of %lld, %s", backends.names[b], all.alpha, (long long)n, (long long)all.n,
                      distribution_names[kind]);
            row_solve(&all, backends.contexts[b]);
            if (n > 0 && largest(some.scores, n) == -INFINITY) {
                continue; /* nothing but -infinity: no entmax */
            }
            row_solve(&some, backends.contexts[b]);
            const double slip = 4 * 0x1p-52 * fmax(1, fabs(all.tau));
            EXPECT(some.tau <= all.tau + slip, "tau of the subset %.17g, of all %.17g", some.tau, all.tau);
        }
        free(kept);
        row_free(&some);
        row_free(&all);
    }
    backends_close(&backends);
}
END_TEST

/* tau is the solution: with the returned tau, in double, the weights sum to one. */
START_TEST(tau_solves_the_equation) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 10000) {
        rng r = case_begin("tau_solves_the_equation", index);
        row x;
        row_make(&x, property_alpha(&r), property_size(&r));
        fill_scores((distribution)(index % OFFSET_UP), x.scores, x.n, &r);
        const double beta = 1 / (x.alpha - 1);
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: alpha %.10g, n %lld, %s", backends.names[b], x.alpha, (long long)x.n,
                      distribution_names[index % OFFSET_UP]);
            row_solve(&x, backends.contexts[b]);
            double low = 0, high = 0;
            for (int64_t i = 0; i < x.n; i++) {
                const double z = (x.alpha - 1) * x.scores[i];
                low += pow(fmax(z - x.tau - 1e-13 * fmax(1, fabs(z)), 0), beta);
                high += pow(fmax(z - x.tau + 1e-13 * fmax(1, fabs(z)), 0), beta);
            }
            EXPECT(low <= 1 + 1e-13 && high >= 1 - 1e-13, "the weights sum to between %.17g and %.17g", low, high);
        }
        row_free(&x);
    }
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry list[] = {TEST_ENTRY(matches_reference),
                               TEST_ENTRY(closed_forms),
                               TEST_ENTRY(continuous_around_the_closed_forms),
                               TEST_ENTRY(approaches_softmax),
                               TEST_ENTRY(in_place_gives_the_same_bits),
                               TEST_ENTRY(nan_and_infinity_make_everything_nan),
                               TEST_ENTRY(empty_row),
                               TEST_ENTRY(tau_bounds),
                               TEST_ENTRY(tau_grows_with_the_set),
                               TEST_ENTRY(tau_solves_the_equation)};
    return HARNESS_MAIN(argv[0], list);
}
