/*
 * ekv_entmax: a row of scores to weights, through the same kernels as a decode step.
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
    for (int64_t i = 0; i < t->n; i++) t->weights[i] = isnan(solve.tau) ? NAN : 0.0f;
    for (int64_t i = 0; i < solve.support; i++) t->weights[t->token[i]] = t->weight[i];
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
    for (int64_t i = 0; i < t->n; i += EKV_TILE) {
        ekv_softmax_args a = {t->scores + i, (int)ekv_min64(EKV_TILE, t->n - i), z_max, t->weight + i, 0.0};
        t->kernels->softmax(&a);
        total += a.sum;
    }
    t->tau = (double)z_max + ekv_log(total);
    for (int64_t i = 0; i < t->n; i++) {
        t->weights[i] = (float)((double)t->weight[i] / total);
        t->support += t->weight[i] > 0.0f;
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
