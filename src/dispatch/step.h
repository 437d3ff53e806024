/*
 * A decode step while it runs: the validated call, and the items that it is cut into.
 *
 * An item is one KV head of one sequence with up to EKV_ITEM_ROWS rows (query token, query head of the group): what shares reads.
 * Its stages, each a loop of independent tasks:
 *      prepare     items   queries to float
 *      statistics  spans   bounds or moments of pages; norms for policy certified (policies that use them)
 *      select_row  rows    which pages a row reads (policies that select)
 *      select_item items   what the item reads; policy certified: its first reads and decisions
 *      scan        spans   scores; candidate lists (entmax) or running sums (softmax)
 *      finish      rows    tau, support, weights, E
 *      values      spans   weighted sums of the support's values
 *      output      items   adds the spans, writes output and report
 * In place of scan, policy certified has, where they pay (certified.c):
 *      boxes       spans   bounds from page boxes
 *      settle      items   what they left
 *      sketch      spans   a bound for each token
 *      raise       rows    tau from what was read, and what the next round reads   } EKV_CERTIFY_ROUNDS times
 *      round       spans   reads it                                                }
 * A span is EKV_SPAN tokens, fixed, so that partial sums do not depend on the number of threads.  With many items a task runs all
 * stages of one item; with few, each stage is a loop over all items and spans.  The results are the same bits.
 */
#ifndef EKV_STEP_H
#define EKV_STEP_H

#include "dispatch/internal.h"

#define EKV_ITEM_ROWS 32
#define EKV_SPAN 4096
#define EKV_VALUE_CHUNK 128 /* tokens whose weighted values are summed from zero; divides EKV_SPAN */

typedef struct ekv_step {
    ekv_context *context;
    const ekv_kernels *kernels;
    ekv_decode_params p;     /* strides and defaults filled in */
    ekv_kv kv;
    const ekv_index *index;  /* NULL if there is none */
    int32_t group;
    int64_t tokens;          /* query tokens */
    bool sparse;             /* the policy selects pages */
    bool bounds;             /* page bounds are needed: topk or report_mass */
    bool moments;            /* page moments are needed: gaussian */
    bool certified;
    bool lists;              /* some head has alpha > 1 */
    bool by_stages;          /* never run whole items as tasks */
    int32_t item_rows;       /* most rows of an item */
    float *zeta;             /* gaussian: Phi^-1(quantile^(1/page_size)); a page that is not full is the last, which is read anyway */
} ekv_step;

/* A row's look-up table for sketches: bound <= origin + step * (sum - 1). */
#define EKV_BINS 512
#define EKV_BIN_WIDTH (65536 / EKV_BINS)
typedef struct ekv_table {
    uint16_t entry[(EKV_SKETCH_CODES + EKV_SKETCH_NORMS) * 16];
    double base, origin, step;    /* base: sum of the smallest entries */
    uint16_t histogram[EKV_BINS]; /* of a sample of the sums */
    int32_t counted;
} ekv_table;

/* One row of an item. */
typedef struct ekv_row {
    int32_t token, head;   /* query token in the batch, query head */
    int32_t n;             /* tokens that it sees */
    int32_t q_token;       /* n - 1: its own index in the sequence */
    int32_t pages;         /* pages that it sees */
    double alpha, scale;   /* scale with its default filled in */
    const void *query;     /* as given */
    bool softmax;
    int32_t power;         /* smallest whole number >= beta and >= 1 */
    float slope;           /* z units */
    float *q;
    uint8_t *selected;     /* [pages] or NULL: all */
    float *bound;          /* [pages] z units, or NULL */
    uint32_t *order;       /* [pages] topk */
    float *mean, *deviation;
    float *count;          /* gaussian: [4][pages] tokens per page, and a mixture's mean, deviation and count */
    /* certified */
    float cut;             /* no token with z <= cut is in the support; -infinity for other policies */
    ekv_table *table;
    double *center;        /* [stretches] bounds from each center, slack included */
    uint16_t *start;       /* [stretches] what sums start from, without ALiBi */
    uint16_t *sum;         /* [n, in whole groups] stand for bounds; in weight's memory */
    uint16_t limit, take;  /* sums at or below limit are ruled out; the next round reads sums above take */
    /* results */
    double tau, mass, error;
    double top, total;     /* softmax: the largest score and the sum of exp(z - top) */
    bool certified;        /* nothing unread can be in the support */
    int64_t support, read_tokens, read_pages;
    int64_t list_count;    /* support list in list_z, list_token, weight */
    float *list_z;
    int32_t *list_token;
    float *weight;
} ekv_row;

/* One row and span: between scan and output. */
typedef struct ekv_part {
    int32_t count;    /* candidates in the span's list */
    int32_t looked, boxed; /* certified, row 0: sketch groups and boxes that were read */
    float z_max;
    double sum;       /* softmax: sum of exp(z - z_max); certified: mass that was skipped */
    bool used;        /* `values` has been added to */
} ekv_part;

typedef struct ekv_item {
    int32_t sequence, head, first_row, rows;
    int32_t n, pages, spans;  /* of its last row, which sees most */
    const int32_t *table;     /* NULL: page p is block table_base + p */
    int64_t table_base;
    ekv_row *row;             /* [rows] */
    ekv_part *part;           /* [rows][spans] */
    float *values;            /* [rows][spans][v_dim rounded up to 32] */
    uint64_t *seen;           /* [n / 64 + 1] union of supports, for the report's bytes */
    uint64_t *read;           /* certified: [n / 64 + 1] a bit for each token whose key was read */
    uint8_t *needed;          /* certified: [pages] what norms and boxes left */
    int32_t needed_pages;     /* how many */
    bool use_boxes, use_sketch;
    int32_t round;            /* certified: rounds that were read */
    int64_t bytes_statistics, bytes_sketch, bytes_sampled, read_tokens, read_pages;
} ekv_item;

static inline int64_t ekv_block(const ekv_item *item, int64_t page) {
    return item->table ? item->table[page] : item->table_base + page;
}

/* Tokens of page p that a row which sees n tokens sees. */
static inline int32_t ekv_page_tokens(const ekv_step *step, int32_t n, int64_t page) {
    return (int32_t)ekv_min64(step->kv.page_size, n - page * step->kv.page_size);
}

typedef void ekv_on_item(const ekv_step *step, ekv_item *item);
typedef void ekv_on_span(const ekv_step *step, ekv_item *item, int32_t span);
typedef void ekv_on_row(const ekv_step *step, ekv_item *item, ekv_row *row);

/* select.c */
void ekv_page_bounds_of(const ekv_step *step, const ekv_item *item, ekv_row *row, int64_t page, int64_t end);
void ekv_page_moments_of(const ekv_step *step, const ekv_item *item, ekv_row *row, int64_t page, int64_t end);
ekv_on_span ekv_statistics;
ekv_on_row ekv_select_row;
ekv_on_item ekv_select_item;
#define EKV_PAGE_BATCH 256 /* pages in one call of the bound and moments kernels */
/* From the boxes of n <= EKV_PAGE_BATCH pages, all of which the row sees. */
void ekv_page_bounds_at(const ekv_step *step, const ekv_item *item, const ekv_row *row, const int32_t *page, int n, float *bound);
/* The quantile function of the standard normal distribution, 0 < p < 1. */
double ekv_normal_quantile(double p);

/* attend.c */
ekv_on_span ekv_scan;
ekv_on_row ekv_finish;
ekv_on_span ekv_values;
ekv_on_item ekv_output;

/* certified.c */
#define EKV_CERTIFY_ROUNDS 3
#define EKV_CERTIFY_SPARE 512 /* floats behind row->weight, see `spare` */
/* The bounds from the norms of pages [page, end), for all rows. */
void ekv_certify_bounds(const ekv_step *step, ekv_item *item, int64_t page, int64_t end);
ekv_on_item ekv_certify_begin, ekv_certify_settle;
ekv_on_span ekv_certify_boxes, ekv_certify_sketch, ekv_certify_round;
ekv_on_row ekv_certify_raise;
/* For tests: the tables of all rows; the sums of all sketched tokens from them; whether the policy rules a token out at a cut. */
void ekv_certify_tables(const ekv_step *step, ekv_item *item);
void ekv_certify_sums(const ekv_step *step, ekv_item *item);
bool ekv_certify_rules_out(const ekv_row *row, int32_t token, double cut);

/* mass.c */
void ekv_bound_mass(const ekv_step *step, const ekv_item *item, ekv_row *row, double skipped);

/* validate.c */
ekv_status ekv_validate(ekv_context *context, const ekv_decode_params *params, ekv_step *step);
int64_t ekv_length_of(const ekv_step *step, int32_t b);
const int32_t *ekv_table_of(const ekv_step *step, int32_t b);
static inline int64_t ekv_q_begin(const ekv_decode_params *p, int32_t b) { return p->q_start ? p->q_start[b] : b; }
static inline double ekv_alpha_of(const ekv_decode_params *p, int32_t head) { return p->head_alpha ? p->head_alpha[head] : p->alpha; }

/* decode.c: fills in which query, head and tokens row r of an item is. */
void ekv_describe_row(const ekv_step *step, const ekv_item *item, int32_t r, ekv_row *row);

/* oracle.c: the same items through the reference. */
ekv_status ekv_reference_decode(const ekv_step *step, const ekv_item *items, int64_t n);
ekv_status ekv_reference_query(const ekv_step *step, const ekv_item *items, int64_t n, float *bounds, float *mean, float *deviation,
                               uint8_t *selected, int64_t stride);
ekv_status ekv_reference_transform(ekv_context *context, double alpha, const float *scores, int64_t n, float *weights, double *tau,
                                   int64_t *support);

/* The largest float <= x. */
float ekv_round_down(double x);
/* The same for z_max + offset, offset < 0, but always below z_max. */
float ekv_threshold(float z_max, double offset);

/* math.c: scalar functions with the same bits on every machine (SLEEF), or libm's. */
double ekv_exp(double x);
double ekv_log(double x);
double ekv_pow(double x, double y);
double ekv_erfc(double x);

#endif
