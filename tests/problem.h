/*
 * A `problem` is one decode step on random keys and values in any layout, between guard pages; an `oracle` is the
 * double-precision reference's answer for one of its rows.  Nothing here calls a fast kernel to decide what is right.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_TEST_PROBLEM_H
#define EKV_TEST_PROBLEM_H

#include "cpu/reference.h"
#include "harness.h"

typedef enum layout {
    LAYOUT_TOKENS_HEADS, /* [tokens][heads][dim], no block table */
    LAYOUT_HEADS_TOKENS, /* [heads][tokens][dim], no block table */
    LAYOUT_PAGE_HEADS,   /* [blocks][page][heads][dim], shuffled block table */
    LAYOUT_HEADS_PAGE,   /* [blocks][heads][page][dim], shuffled block table */
    LAYOUT_COUNT
} layout;
const char *layout_name(layout l);

typedef enum content {
    CONTENT_NORMAL,    /* keys independent */
    CONTENT_CLUSTERED, /* keys of a page share a mean */
    CONTENT_PEAKED,    /* a few keys along the query */
    CONTENT_FLAT,      /* nearly equal scores */
    CONTENT_TIED,      /* keys repeated exactly, so that scores tie */
    CONTENT_COUNT
} content;
const char *content_name(content c);

enum { MAX_BATCH = 6 };

typedef struct shape {
    layout layout;
    content content;
    ekv_dtype dtype, q_dtype, out_dtype;
    int32_t batch, kv_heads, group, k_dim, v_dim, page_size;
    int32_t lengths[MAX_BATCH];
    int32_t queries[MAX_BATCH]; /* query tokens of each sequence */
    bool ragged;                /* give q_start; otherwise queries must be 1 */
    bool padded;                /* strides of q, out, k and v larger than packed */
    bool spare_blocks;          /* blocks of the pool that belong to no sequence */
    double q_size;              /* standard deviation of the query's elements */
} shape;

typedef struct problem {
    shape shape;
    int32_t q_heads, q_tokens;
    int64_t rows;      /* q_tokens * q_heads */
    int64_t max_pages; /* of any sequence, at least 1 */
    guard k, v, q, out, table, lengths, q_start, head_alpha, head_scale, slopes, mask, report;
    int64_t k_end, v_end; /* elements of k and v */
    ekv_kv kv;
    ekv_decode_params step; /* wired to all of the above but mask; policy full */
    ekv_index *index;
    guard index_memory;
} problem;

/* Builds the memory and step of a problem: q f32 or 16-bit, NaN in all unused slots, output poisoned. */
void problem_make(problem *p, const shape *s, rng *r);
void problem_free(problem *p);
/* Queries, keys and values of a problem that differs in layout, padding and spare blocks alone. */
void problem_copy_content(problem *p, const problem *from);
/* Per-head alpha, scale and slopes; NULL leaves the step's own. */
void problem_set_heads(problem *p, const double *alpha, const float *scale, const float *slopes);
/* Creates the index in guarded memory of the test's own and updates it for all sequences. */
void problem_index(problem *p, ekv_context *context, uint32_t statistics);
void problem_drop_index(problem *p);

/* A point of the conformance grid: every dimension of the shape drawn from the values that the tests promise to cover.
 * max_length bounds the tokens of a sequence. */
shape shape_random(rng *r, int32_t max_length);
/* Draws alpha, scale and slopes (for all heads or each its own) and the policy with its parameters; sparse policies other than
 * pages need problem_index(). */
void problem_random_parameters(problem *p, rng *r);
void problem_random_policy(problem *p, rng *r, ekv_policy policy);
/* A mask for policy pages, at least one page in every row. */
void problem_random_mask(problem *p, rng *r, double density);
/* Shape and parameters in a line, for case_note(); valid until the next call. */
const char *problem_describe(const problem *p);

/* The reference backend is left out of the larger problems: every row there is an oracle of its own anyway. */
bool problem_too_slow_for(const problem *p, const backend_set *backends, int backend);
#define FOR_BACKENDS(i, backends, p)                                                                                           \
  for (int i = 0; i < (backends)->count; i++)                                                                                  \
    if (!problem_too_slow_for(p, backends, i))

/* Memory of one token of sequence b. */
void *problem_key(const problem *p, int32_t b, int64_t token, int32_t kv_head);
void *problem_value(const problem *p, int32_t b, int64_t token, int32_t kv_head);
int32_t problem_block(const problem *p, int32_t b, int64_t page);
int64_t pages_of(const problem *p, int64_t tokens);
/* The sequence of query token t and the number of tokens that it sees. */
void problem_locate(const problem *p, int32_t q_token, int32_t *sequence, int64_t *visible);
double problem_alpha(const problem *p, int32_t head);
double problem_scale(const problem *p, int32_t head);
double problem_slope(const problem *p, int32_t head);

/* Runs the step with every input read-only, on poisoned output and report; fails on any status but EKV_OK or written padding.
 */
void problem_decode(problem *p, ekv_context *context);
/* What the policy reads, [rows][problem_stride()], in guarded memory: 0 or 1 for a row's pages, POISON past them. */
guard problem_select(problem *p, ekv_context *context);
int64_t problem_stride(const problem *p);

/* Fills out with POISON and report with a pattern; problem_check_untouched fails unless they are still so. */
void problem_poison(problem *p);
void problem_check_untouched(const problem *p);
/* Output padding still holds the poison. */
void problem_check_padding(const problem *p);
void problem_out_row(const problem *p, int64_t row, double *out);
/* Packed copy of the whole output, for bitwise comparison; free() it. */
unsigned char *problem_copy_out(const problem *p, size_t *bytes);
/* Whether any row of the group of kv_head in sequence b reads the page: selected[row][problem_stride()]. */
bool problem_group_reads(const problem *p, const uint8_t *selected, int32_t b, int32_t kv_head, int64_t page);
/* NaN over keys and values of the pages that no row of a group reads. */
void problem_poison_unread(problem *p, const uint8_t *selected);

/* The reference's answer for one row. */
typedef struct oracle {
    int64_t n, pages;
    int32_t v_dim, page_size;
    double *out, *z, *p, *value_norms, *page_bound, *page_mean, *page_deviation;
    double *page_size_of_sum; /* sum over d of |scale q_d| max |k_d|, plus |slope| * distance */
    uint8_t *pages_read;
    ekv_reference_result result;
    double alpha, z_size; /* largest |z|, or norm of what was added up to it, among tokens with p >= 1e-9 */
    double out_size;      /* max(norm of out, sqrt(sum p^2 |v|^2)): what the relative error is relative to */
} oracle;

/* mask: the pages read (policy pages), or NULL for the step's own policy. */
void oracle_make(oracle *o, const problem *p, int32_t q_token, int32_t head, const uint8_t *mask);
void oracle_free(oracle *o);
bool oracle_reads(const oracle *o, int64_t token);
/* Tokens read with z > threshold. */
int64_t oracle_count_above(const oracle *o, double threshold);
/* Error of a score in z units that design section 6 grants: 8 ulp of f32 at the largest |z| that matters. */
double oracle_score_error(const oracle *o);
/* Absolute L2 tolerance of the row's output, see harness.c. */
double oracle_tolerance(const oracle *o);
/* Compares an output row with the oracle, in the output's type. */
void oracle_check_out(const oracle *o, const problem *p, int64_t row, const char *who);
/* tau, support, tokens and pages of a report. */
void oracle_check_report(const oracle *o, const ekv_report *report, const char *who);

#endif
