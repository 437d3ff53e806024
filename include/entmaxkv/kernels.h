/*
 * UNSTABLE: not part of the interface that EKV_VERSION promises.  EKV_KERNELS_VERSION changes whenever anything here does.
 *
 * Every kernel with its contract: the one list from which the function tables of the backends, the dispatcher and the conformance
 * cases are generated.  A kernel takes one argument struct.  "Typed" kernels exist once per storage type.
 *
 * To add a kernel: write its struct and its line here, its body in the header of src/cpu that the line's comment names, and its cases
 * in a conform_*.c of src/dispatch.  ekv_conform(), at the end, compares any table of kernels, also one of yours, with plain code.
 *
 * Shared rules.  Pointers are non-NULL, sizes are as said, nothing is validated (the dispatcher did).  Rows of keys and values may be
 * unaligned; nothing past an element count is read or written.  Results have the same bits for every instruction set.  z units are
 * scores times (alpha - 1), or plain scores for alpha = 1.
 */
#ifndef ENTMAXKV_KERNELS_H
#define ENTMAXKV_KERNELS_H

#include <stdint.h>

#include "entmaxkv/entmaxkv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EKV_KERNELS_VERSION 3
#define EKV_TILE 64      /* most tokens in one call of score */
#define EKV_MARGIN 0x1p-12 /* z units: what `keep` leaves below a lower bound of tau, so that rounding never drops a candidate */

/* X(name, description) */
#define EKV_TYPED_KERNELS(X)                                              \
    X(load_row, "stored row to scaled floats")            /* convert.h */ \
    X(store_row, "floats to a stored row")                /* convert.h */ \
    X(score, "scores of a tile of keys for several rows") /* score.h */   \
    X(accumulate, "weighted sum of value rows")           /* values.h */  \
    X(box, "minimum and maximum of a page's keys")        /* page.h */    \
    X(moments, "mean and deviation of a page's keys")     /* page.h */    \
    X(norms, "largest norm of a page's rows")             /* page.h */    \
    X(bound, "upper bounds of the scores in pages")       /* page.h */    \
    X(gaussian, "mean and deviation of the scores in pages") /* page.h */ \
    X(encode, "sketch codes of keys")                     /* sketch.h */

#define EKV_PLAIN_KERNELS(X)                                                             \
    X(keep, "append the scores above a threshold to a candidate list") /* entmax.h */    \
    X(tau_lower, "a lower bound of tau from a candidate list")         /* entmax.h */    \
    X(solve, "tau, support and weights from a candidate list")         /* entmax.h */    \
    X(softmax, "exponential weights of a tile")                        /* entmax.h */    \
    X(mass, "expected mass above a threshold of a mixture of normals") /* page.h */    \
    X(lookup, "sums of table entries: bounds of the scores of sketched keys") /* sketch.h */ \
    X(above, "which sums exceed a limit")                              /* sketch.h */

/* load_row: out[d] = (float)row[d] * factor for d < dim, and zeros up to the next multiple of 32. */
typedef struct ekv_load_row_args {
    const void *row;
    int dim;
    float factor;
    float *out; /* [dim rounded up to 32] */
} ekv_load_row_args;

/* store_row: row[d] = x[d] rounded to nearest even, d < dim. */
typedef struct ekv_store_row_args {
    const float *x;
    int dim;
    void *row;
} ekv_store_row_args;

/* score: z[r][i] = sum_d q[r][d] keys[i][d]  +  slope[r] * (token[i] - q_token[r])   (no second term where slope[r] is 0)
 * The sum runs in 32 lanes, then by the tree of vec.h; it depends on (q[r], keys[i]) alone, not on what else is in the tile. */
typedef struct ekv_score_args {
    const float *const *q;    /* [rows] from load_row: scaled, padded with zeros */
    const float *slope;       /* [rows] in z units */
    const int32_t *q_token;   /* [rows] index of the query token */
    int rows;
    const void *const *keys;  /* [n] */
    const int32_t *token;     /* [EKV_TILE] index of each key's token; entries past n are readable */
    int n, dim;               /* 1 <= n <= EKV_TILE */
    float *z;                 /* [rows][EKV_TILE]; entries past n are unspecified */
    const void *const *ahead; /* [n] addresses that are read soon after this call, or NULL: they are prefetched meanwhile */
    int ahead_bytes;          /* at each of them */
} ekv_score_args;

/* accumulate: for each row r, sum[r][d] += (sum over i < n, in order and from zero, of weight[r][i] * values[i][d]).  Weights of zero
 * are skipped. */
typedef struct ekv_accumulate_args {
    const void *const *values;   /* [n] */
    const float *const *weight;  /* [rows][n] */
    int rows, n, dim;
    float *const *sum;           /* [rows][dim] */
    const void *const *ahead;    /* [n] as in score */
    int ahead_bytes;
} ekv_accumulate_args;

/* box: per-dimension minimum, then maximum, of n keys, in the storage type (exact).  If a key has a NaN or an infinity all of the
 * box is NaN, which makes every bound from it +infinity. */
typedef struct ekv_box_args {
    const void *const *rows; /* [n], n >= 1 */
    int n, dim;
    void *box; /* [2][dim] */
} ekv_box_args;

/* moments: per-dimension mean, then standard deviation (population, two passes), of n keys.  Stored as f16 for f16 keys, else as
 * f32: a 16-bit type would overflow on the others.  NaN if a key has one. */
typedef struct ekv_moments_args {
    const void *const *rows; /* [n], n >= 1 */
    int n, dim;
    void *moments; /* [2][dim] */
} ekv_moments_args;

/* norms: the largest L2 norm of n rows, never below the exact one; +infinity if a row has a NaN or an infinity. */
typedef struct ekv_norms_args {
    const void *const *rows; /* [n], n >= 1 */
    int n, dim;
    float *norm;
} ekv_norms_args;

/* bound: for each page an upper bound, in z units, of what `score` returns for its tokens and of the exact scores.
 *      sum_d max(q[d] min[d], q[d] max[d]) + slope * (best token - q_token) + slack      (slack: see page.h)
 * +infinity if the box is NaN.  Typed by the storage type of the box. */
typedef struct ekv_bound_args {
    const float *q;
    float slope;
    int32_t q_token;
    const void *const *boxes;      /* [n] */
    const int32_t *first, *last;   /* [n] first and last token of each page */
    int n, dim;
    float *bound;                  /* [n] */
} ekv_bound_args;

/* gaussian: mean[p] = q . mean_p + slope * ((first + last)/2 - q_token), deviation[p] = sqrt(sum_d (q[d] deviation_p[d])^2), z units.
 * Typed by the storage type of the moments: f16 or f32. */
typedef struct ekv_gaussian_args {
    const float *q;
    float slope;
    int32_t q_token;
    const void *const *moments;  /* [n] */
    const int32_t *first, *last; /* [n] */
    int n, dim;
    float *mean, *deviation;     /* [n] */
} ekv_gaussian_args;

/* keep: appends (z[i], token[i]) to the list unless z[i] <= threshold; NaN is kept. */
typedef struct ekv_keep_args {
    const float *z;
    const int32_t *token;
    int n;
    float threshold;
    float *list_z;        /* room for n more, and z and list may be the same memory: the list is then compacted in place */
    int32_t *list_token;
    int count;            /* in and out */
} ekv_keep_args;

/* tau_lower: a lower bound of tau - z_max over the list, by `steps` Newton steps on  sum max(z - z_max - tau, 0)^power = 1  from
 * `tau`, itself a lower bound.  An integer power >= beta makes the sum smaller than the true one, so its root lies below tau; and
 * Newton's iterates on a convex decreasing function never pass the root. */
typedef struct ekv_tau_lower_args {
    const float *z;
    int n;
    float z_max;
    int power; /* >= max(beta, 1) */
    int steps;
    float tau; /* in and out, relative to z_max, in [-1, 0] */
} ekv_tau_lower_args;

/* solve: the canonical finish (design: the result depends on the support alone).  On return the list holds the support, in ascending
 * token order, with its weights.
 * If a z is NaN or +infinity: support 0 and tau NaN.  If all are -infinity or n is 0: support 0 and tau -infinity. */
typedef struct ekv_solve_args {
    float *z;       /* in: candidates, a superset of the support.  out: the support's */
    int32_t *token; /* [n] ascending */
    int64_t n;
    double alpha;   /* > 1 */
    float *weight;  /* out [support] */
    int64_t support;
    double tau;     /* out, z units */
} ekv_solve_args;

/* softmax: raises z_max to the largest z (NaN if there is one), then weight[i] = exp(z[i] - z_max) as float; returns their sum (tree
 * order) in `sum`.  If z_max is -infinity then, weights and sum are 0. */
typedef struct ekv_softmax_args {
    const float *z;
    int n; /* <= EKV_TILE */
    float z_max;   /* in and out */
    float *weight; /* [n]; may be z */
    double sum;    /* out */
} ekv_softmax_args;

/* mass: value = sum_p count[p] E[max(x_p - tau, 0)^beta], slope = -d value / d tau, x_p normal with the given mean and deviation.
 * Closed forms for beta = 1, 2, 3. */
typedef struct ekv_mass_args {
    const float *mean, *deviation, *count; /* [n] */
    int64_t n;
    int beta;
    double tau;
    double value, slope; /* out */
} ekv_mass_args;

/* A basis: how the keys of one KV head are sketched.  With x = key - center (a center for each stretch of a sequence),
 *      y = P x                      coordinates along `axes` directions; P Q^T = I but for rounding
 *      code c, 4 bits               adds one of 16 centroids to the approximation of y along 1, 2 or 4 axes; codes are taken in turn
 *                                   and several may refine the same axis
 *      norm b, 4 bits               the norm of what is left of y in a block of axes, and last of x - Q^T y, what is outside of all
 *                                   axes, as the number of the smallest of 16 levels that is not below it
 * so a sketch is codes + norms numbers of 4 bits, and any upper bound of a score is a sum of one table entry for each.
 *
 * A decode step reads the first part alone: Q in f16 and centroids of a byte, whatever their rounding is, since P and what is left
 * are found from the rounded ones. */
#define EKV_SKETCH_AXES 64  /* most axes; at most EKV_TILE */
#define EKV_SKETCH_CODES 96 /* most codes */
#define EKV_SKETCH_NORMS 4  /* norms: three blocks of axes and the rest */
#define EKV_SKETCH_GROUP 16 /* tokens whose codes lie together */
typedef struct ekv_basis {
    int32_t dim, axes, codes; /* codes is even; 0: no basis yet */
    int32_t block_end[EKV_SKETCH_NORMS - 1];    /* axes of norm b: [block_end[b - 1], block_end[b]) */
    float largest;                              /* at least every norm of x that was encoded; infinity if a key was not finite */
    float error_share, error;                   /* rounding while encoding moves x by a vector of at most error_share * largest + error */
    float skew;                                 /* the axes see at least |Q q|^2 - skew |q|^2 of the square of any q */
    float level[EKV_SKETCH_NORMS][16];          /* ascending; the last is at least every norm that was encoded */
    const void *rows;                           /* Q: [axes][dim] in f16, nearly orthonormal */
    uint16_t start[EKV_SKETCH_CODES];           /* of each code's centroids in `number` */
    float unit[EKV_SKETCH_CODES];               /* of each code's centroids, see ekv_centroid */
    int8_t axis[EKV_SKETCH_CODES][4];           /* of each code; -1: none, and then none after it */
    int8_t number[EKV_SKETCH_CODES * 4 * 16];   /* [axes of the code][16] for each code, without gaps */
    /* From here on what only encode reads: the same, expanded. */
    float centroid[EKV_SKETCH_CODES][16][4];    /* 0 where there is no axis */
    const float *project;                       /* P: [axes][dim rounded up to 32], zeros behind dim */
    const float *restore;                       /* Q again, laid out like P */
} ekv_basis;

/* Centroid v of a code along its axis number j. */
static inline float ekv_centroid(const ekv_basis *basis, int code, int j, int v) {
    return basis->unit[code] * (float)basis->number[basis->start[code] + 16 * j + v];
}

/* encode: sketches n keys.  Code c of the key in slot t of a page goes to byte [t / 16][c / 2][t % 16] of `page`, low half for even
 * c; the norms follow the codes.  A key that is not finite gets the highest norm numbers.  Typed by the storage type of the keys.
 * `norms` and `length` return the largest norm in each block and of x (infinity if a key was not finite): the caller raises the basis'
 * last levels to them before the page is used. */
typedef struct ekv_encode_args {
    const ekv_basis *basis;
    const float *center;       /* [dim rounded up to 32], zeros behind dim */
    const void *const *keys;   /* [n] */
    int n, slot;               /* the slots [slot, slot + n) of the page are written, others stay */
    uint8_t *page;             /* [page slots / 16 rounded up][(codes + norms) / 2][16] */
    float norms[EKV_SKETCH_NORMS], length; /* in and out: raised */
    double left, total; /* in and out: squares of all norms, and of x, of the finite keys are added, rounded up */
} ekv_encode_args;

/* lookup: for each row r, sum[r][t] = start[r] of its group + sum over codes of table[r][code][its number], saturating at 65535, for
 * `groups` groups of 16 tokens. */
typedef struct ekv_lookup_args {
    const uint16_t *const *table;  /* [rows] each [codes][16] */
    int rows;
    int codes;                     /* norms included; even; at most EKV_SKETCH_CODES + EKV_SKETCH_NORMS */
    const uint8_t *const *group;   /* [groups] each [codes / 2][16] */
    const uint16_t *const *start;  /* [rows] each [groups] */
    int groups;
    uint16_t *const *sum;          /* [rows] each [groups][16] */
} ekv_lookup_args;

/* above: sets bit t % 64 of bits[t / 64] for every t < n with sum[t] > limit; other bits stay.  n is a multiple of 16. */
typedef struct ekv_above_args {
    const uint16_t *sum; /* [n] */
    int n;
    uint16_t limit;
    uint64_t *bits; /* [n / 64 rounded up] in and out */
} ekv_above_args;

/* The table of a backend's kernels. */
typedef struct ekv_kernels {
    const char *name;
#define EKV_TYPED_FIELD(name, description) void (*name[3])(ekv_##name##_args *); /* indexed by ekv_dtype */
#define EKV_PLAIN_FIELD(name, description) void (*name)(ekv_##name##_args *);
    EKV_TYPED_KERNELS(EKV_TYPED_FIELD)
    EKV_PLAIN_KERNELS(EKV_PLAIN_FIELD)
#undef EKV_TYPED_FIELD
#undef EKV_PLAIN_FIELD
} ekv_kernels;

/* ------------------------------------------------------------------------------------------------------------------------
 * Conformance: kernels and policies against plain double-precision code
 * --------------------------------------------------------------------------------------------------------------------- */

typedef enum ekv_conform_status {
    EKV_CONFORM_PASS = 0,
    EKV_CONFORM_FAIL = 1,
    EKV_CONFORM_UNSUPPORTED = 2 /* the table has no such kernel (a NULL entry), so nothing was called */
} ekv_conform_status;

/* The outcome of one case.  Pointers are valid during the callback alone. */
typedef struct ekv_conform_result {
    size_t size;
    const char *backend; /* or the table's name */
    const char *kernel;  /* a kernel of the list, "entmax" (the transform), or "policy-" and a policy's name */
    int64_t number;      /* of the case: its place in the kernel's grid, the same in default and thorough runs */
    const char *text;    /* the case in words: "dtype f16, dim 33, ..." */
    ekv_conform_status status;
    const char *what;    /* on failure: which output, buffer or property; else "" */
    int64_t index;       /* on failure: the first differing element of it; -1 if no element is meant */
    double got, expected, error, tolerance;
    const char *replay;  /* the arguments of `entmaxkv` that run this case alone */
} ekv_conform_result;

typedef struct ekv_conform_options {
    size_t size;
    const char *backend;      /* a backend by name; NULL: every backend that is available */
    const ekv_kernels *table; /* or these kernels (backend must be NULL).  Entries may be NULL: unsupported.  Policies run on the
                                 table only if it is complete. */
    const char *kernel;       /* only the kernel, "entmax" or "policy-<name>" of that name; NULL: all */
    int64_t number;           /* only the case of that number; -1: all */
    const char *text;         /* only cases whose text contains this; NULL: all */
    uint64_t seed;            /* of the numbers in the cases */
    int32_t thorough;         /* 0: a sample of each kernel's grid that holds every value of every axis; 1: the whole grid; 2: cases
                                 that together hold every pair of values of two axes */
    int32_t list;             /* 1: report what would run, as passed, and run nothing */
    void (*result)(void *user, const ekv_conform_result *result); /* called after each case; may be NULL */
    void *user;
} ekv_conform_options;

static inline ekv_conform_options ekv_conform_options_default(void) {
    ekv_conform_options p = {sizeof(ekv_conform_options), NULL, NULL, NULL, -1, NULL, 1, 0, 0, NULL, NULL};
    return p;
}

typedef struct ekv_conform_summary {
    size_t size;
    int64_t passed, failed, unsupported;
    double worst; /* largest error / tolerance of a comparison that passed: how much room is left */
} ekv_conform_summary;

static inline ekv_conform_summary ekv_conform_summary_default(void) {
    ekv_conform_summary p = {sizeof(ekv_conform_summary), 0, 0, 0, 0.0};
    return p;
}

/* Compares kernels and whole decode steps with independent code in double precision.
 *
 * Every buffer lies between inaccessible pages, flush with its end, flush with its start, or one element off; what is left of its
 * pages, unused page slots, tails and unread rows hold NaN, outputs hold a pattern that must survive past their end, and inputs must
 * come back unchanged.  Tolerances are derived from the arithmetic that each kernel's contract states (see conform_*.c), and a NaN
 * passes only where a NaN is right.  A kernel of the list without cases counts as a failure.
 *
 *   summary  may be NULL
 *   message  on an error, up to message_size bytes of what is wrong with the options; may be NULL
 * EKV_OK when the cases ran, whatever their outcome.  EKV_ERROR_UNAVAILABLE for a backend that cannot run here,
 * EKV_ERROR_INVALID_ARGUMENT for an unknown kernel or case.
 *
 * On POSIX systems a memory fault (SIGSEGV, SIGBUS) or an illegal instruction (SIGILL, SIGFPE) inside a case is caught and reported as
 * its failure: for as long as the call lasts, and only then, these signals have handlers of the library's, which pass on what
 * comes from other threads.  One call at a time per process. */
EKV_API ekv_status ekv_conform(const ekv_conform_options *options, ekv_conform_summary *summary, char *message, size_t message_size);

#ifdef __cplusplus
}
#endif

#endif
