/*
 * The scalar reference: plain double-precision code, one row (query token, query head) at a time, that every backend is checked
 * against.  It shares nothing with the fast code: no kernel, no vector header, no solver.  It is never optimised and never
 * compiled with relaxed floating point.
 */
#ifndef EKV_REFERENCE_H
#define EKV_REFERENCE_H

#include "entmaxkv/entmaxkv.h"

/* One row of attention.  Keys and values are given by a pointer per token, so that no layout logic is shared either. */
typedef struct ekv_reference_problem {
    int64_t n;                  /* tokens that the row sees; the query token is token n - 1 */
    int32_t page_size, k_dim, v_dim;
    ekv_dtype dtype;            /* of keys and values */
    const void *const *keys;    /* [n] */
    const void *const *values;  /* [n] */
    const double *q;            /* [k_dim] */
    double alpha, scale, slope;
    ekv_policy policy;          /* the fields below as in ekv_decode_params */
    int64_t budget;
    int32_t first_pages, recent_tokens;
    ekv_gaussian_model gaussian_model;
    double quantile, margin_sigma, margin_fraction;
    const uint8_t *page_mask;   /* policy pages: [ceil(n / page_size)] */
} ekv_reference_problem;

typedef struct ekv_reference_result {
    double *out;        /* [v_dim] or NULL */
    double *z;          /* [n] or NULL: scaled scores of all tokens */
    double *p;          /* [n] or NULL: weights, 0 for tokens that were not read */
    uint8_t *pages;     /* [ceil(n / page_size)] or NULL: 1 where the policy reads the page */
    double *page_bound; /* [ceil(n / page_size)] or NULL: exact box bound of the scores s (not z) */
    double *page_mean, *page_deviation; /* likewise, Gaussian moments of the scores s */
    double tau, tau_full;       /* thresholds over the tokens read and over all tokens */
    double delta;       /* mass, under the full-cache weights, of the tokens that were not read */
    double mass_bound;  /* E, from the exact box bounds of the unread pages */
    double value_norm;  /* B over all tokens */
    int64_t support;
} ekv_reference_result;

/* Solves one row.  0, or -1 when it cannot allocate. */
int ekv_reference_row(const ekv_reference_problem *problem, ekv_reference_result *result);

/* Policy gaussian from given page moments of the scores s (keys are not looked at): lead[p] is how far, in z units, a page's quantile
 * lies above what it must exceed to be read; NaN if a moment is not finite.  0, or -1 when it cannot allocate. */
int ekv_reference_leads(const ekv_reference_problem *problem, const double *mean, const double *deviation, double *lead);

/* tau of z[0..n) and the weights (may be NULL); alpha = 1 gives the log-sum-exp.  mass[i] (may be NULL: all 1) multiplies the
 * i-th term of the sum, as in the joint solve of E. */
double ekv_reference_entmax(double alpha, const double *z, const double *mass, int64_t n, double *p);

/* One stored element as a double. */
double ekv_reference_load(ekv_dtype dtype, const void *row, int64_t i);

#endif
