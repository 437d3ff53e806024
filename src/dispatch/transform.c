/*
 * ekv_entmax: a row of scores to weights.  The support comes from the kernels of a decode step, tau and weights from double arithmetic.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>

typedef struct transform {
    const ekv_kernels *kernels;
    double alpha;
    const float *scores;
    int64_t n;
    float *weights;
    float *z, *weight; /* [n] scratch */
    int32_t *token;    /* [n] scratch */
    double tau;
    int64_t support;
} transform;

/* Largest score; NaN if there is one. */
static float largest(const transform *t) {
    float top = -INFINITY;
    for (int64_t i = 0; i < t->n; i++) top = t->scores[i] > top || isnan(t->scores[i]) ? t->scores[i] : top;
    return top;
}

static double power(double t, double beta) {
    if (beta == 1.0) return t;
    if (beta == 2.0) return t * t;
    return beta == 3.0 ? t * t * t : ekv_pow(t, beta);
}

/* Sums of max(d - tau, 0)^beta and of its slope's size over the candidates. */
static void sums(const transform *t, double origin, double tau, double beta, double *sum, double *slope) {
    *sum = *slope = 0.0;
    for (int64_t i = 0; i < t->support; i++) {
        const double d = (t->alpha - 1.0) * ((double)t->scores[t->token[i]] - origin) - tau, p = d > 0.0 ? power(d, beta) : 0.0;
        *sum += p;
        *slope += d > 0.0 ? beta * p / d : 0.0;
    }
}

#define REACH 1e-4 /* in scores, or relative to tau: far above what rounding z to float moves tau by */

/* tau over the candidates, in [*low, *high], which are narrowed until nothing lies between them or Newton stands still. */
static double refine(const transform *t, double origin, double beta, double *low, double *high) {
    double tau = *low; /* for beta >= 1 the steps from the left never pass the root */
    for (int step = 0; step < 200; step++) {
        double sum, slope;
        sums(t, origin, tau, beta, &sum, &slope);
        if (sum >= 1.0)
            *low = tau;
        else
            *high = tau;
        double next = tau + (sum - 1.0) / slope;
        if (beta < 1.0 || !(next > *low && next < *high)) next = *low + 0.5 * (*high - *low);
        if (next == tau || !(next > *low && next < *high)) break;
        tau = next;
    }
    return tau;
}

/* The kernels round z to float, as a decode step's scores are; a row of scores has them exactly.  So everything near the support is
 * solved again in double with exact distances. */
static void polish(transform *t, double origin, double tau) {
    const double factor = t->alpha - 1.0, exact = 1.0 / factor, whole = floor(exact + 0.5);
    const double beta = fabs(exact - whole) < 1e-12 ? whole : exact;
    const double reach = REACH * (factor < 1.0 ? factor : 1.0) * (fabs(tau) > 1.0 ? fabs(tau) : 1.0);
    t->support = 0;
    for (int64_t i = 0; i < t->n; i++)
        if (factor * ((double)t->scores[i] - origin) > tau - 2.0 * reach) t->token[t->support++] = (int32_t)i;
    double low = tau - reach, high = tau + reach, share = 1.0, sum_low, sum_high, slope;
    tau = refine(t, origin, beta, &low, &high);
    if (beta >= 1.0) {
        low = high = tau;
    } else { /* near tau a weight is steep: where the sum passes 1 between two numbers, so do the weights */
        sums(t, origin, low, beta, &sum_low, &slope);
        sums(t, origin, high, beta, &sum_high, &slope);
        share = sum_low > sum_high ? (1.0 - sum_high) / (sum_low - sum_high) : 1.0;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < t->support; i++) {
        const double d = factor * ((double)t->scores[t->token[i]] - origin), above = d - low, below = d - high;
        if (!(above > 0.0)) continue;
        t->token[kept] = t->token[i];
        t->weight[kept++] = (float)(share * power(above, beta) + (below > 0.0 ? (1.0 - share) * power(below, beta) : 0.0));
    }
    t->support = kept;
    t->tau = factor * origin + low;
}

/* Works with distances from the largest score, so that a common offset of the scores costs no precision. */
static void entmax(transform *t) {
    ekv_solve_args solve = {t->z, t->token, t->n, t->alpha, t->weight, 0, 0.0};
    const float top = largest(t);
    const double origin = top > -INFINITY && top < INFINITY ? (double)top : 0.0;
    for (int64_t i = 0; i < t->n; i++) {
        t->z[i] = (float)((t->alpha - 1.0) * ((double)t->scores[i] - origin));
        t->token[i] = (int32_t)i;
    }
    t->kernels->solve(&solve);
    t->tau = (t->alpha - 1.0) * origin + solve.tau;
    t->support = solve.support;
    if (t->support > 0) polish(t, origin, solve.tau);
    /* polish reads the scores, which may be the same memory as the weights: written only now */
    for (int64_t i = 0; i < t->n; i++) t->weights[i] = isnan(solve.tau) ? NAN : 0.0f;
    for (int64_t i = 0; i < t->support; i++) t->weights[t->token[i]] = t->weight[i];
}

static void softmax(transform *t) {
    const float z_max = largest(t);
    double total = 0.0;
    t->support = 0;
    t->tau = -INFINITY;
    if (z_max == -INFINITY) {
        for (int64_t i = 0; i < t->n; i++) t->weights[i] = 0.0f;
        return;
    }
    for (int64_t i = 0; i < t->n; i++) total += ekv_exp((double)t->scores[i] - (double)z_max);
    t->tau = (double)z_max + ekv_log(total);
    for (int64_t i = 0; i < t->n; i++) {
        const double p = ekv_exp((double)t->scores[i] - (double)z_max) / total;
        t->weights[i] = (float)p;
        t->support += p > 0.0;
    }
}

static void run(void *arg, int64_t i) {
    transform *t = arg;
    (void)i;
    if (t->alpha < EKV_SOFTMAX_BELOW)
        softmax(t);
    else
        entmax(t);
}

ekv_status ekv_entmax(ekv_context *context, double alpha, const float *scores, int64_t n, float *weights, double *tau,
                      int64_t *support) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    if (!(alpha >= 1.0 && alpha < (double)INFINITY))
        return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "alpha is %g, not a finite number >= 1", alpha);
    if (n < 0 || n > INT32_MAX) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "n is %lld, not in 0..2^31-1", (long long)n);
    if (n > 0 && !scores) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "scores is NULL");
    if (n > 0 && !weights) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, "weights is NULL");
    transform t = {.kernels = context->kernels, .alpha = alpha, .scores = scores, .n = n, .weights = weights, .tau = -INFINITY};
    if (n > 0 && !context->kernels) {
        const ekv_status status = ekv_reference_transform(context, alpha, scores, n, weights, &t.tau, &t.support);
        if (status != EKV_OK) return status;
    } else if (n > 0) {
        ekv_arena arena = {NULL, 0};
        for (int attempt = 0; attempt < 2; attempt++) {
            t.z = ekv_take(&arena, (size_t)n, sizeof(float));
            t.weight = ekv_take(&arena, (size_t)n, sizeof(float));
            t.token = ekv_take(&arena, (size_t)n, sizeof(int32_t));
            if (attempt == 1) break;
            if (arena.used > context->scratch_bytes && context->fixed_scratch)
                return ekv_fail(context, EKV_ERROR_CAPACITY, "n is %lld: more scratch is needed and fixed_scratch is set", (long long)n);
            const ekv_status status = ekv_need_scratch(context, arena.used);
            if (status != EKV_OK) return status;
            arena = (ekv_arena){context->scratch, 0};
        }
        ekv_parallel(context, 1, run, &t);
    }
    if (tau) *tau = t.tau;
    if (support) *support = t.support;
    return EKV_OK;
}
