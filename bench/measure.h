/*
 * One cell of the benchmark: all policies on one workload with one group size and number of threads, timed in turn.
 *
 * A step is one ekv_decode call per layer, with the last query token of each sequence (decode) or many at its end (prefill), of which
 * each sees the tokens up to itself; all its figures are means over the layers.  Before each
 * timed step the caches are filled with other data, unless the cell is warm.  Policies take turns within each repetition, so that
 * what else happens on the machine meets all of them.  Bytes, pages, support and errors come from a step before, which is not timed.
 *
 * The error is the relative L2 distance of the outputs from full attention computed in double precision from the stored keys and
 * values, over a sample of rows (query tokens and heads) of every layer: for topk and gaussian it includes what they did not read.
 *
 * Operations are those that the result is made of, two for a multiplication and an addition: the scores of the tokens whose keys a row
 * used, and the values of its support, which for softmax is all that it used.  What statistics, sketches and the transform take is
 * not counted, nor what a kernel computes in vain.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_MEASURE_H
#define EKV_MEASURE_H

#include "machine.h"
#include "workload.h"

/* A policy as it is timed; full at alpha = 1 is called softmax. */
typedef struct measured_policy {
    const char *name;
    ekv_policy policy;
    double alpha;
} measured_policy;

typedef struct cell {
    const workload *workload;
    ekv_context *context;
    const machine_stream *stream; /* read by the context's number of threads */
    double bandwidth;             /* bytes per second */
    machine_peak peak;
    const measured_policy *policies; /* the first is softmax, which the others are compared with */
    int policy_count;
    int32_t group;
    int64_t queries; /* query tokens at the end of each sequence, at most its context */
    int64_t budget;  /* topk: tokens */
    int repeats;
    bool warm;
} cell;

typedef struct measurement {
    /* what */
    const char *policy, *keys, *dtype, *backend, *caches;
    double alpha;
    int64_t context, queries, group, batch, threads, layers, kv_heads, key_dim, value_dim, page_size, budget, repeats;
    /* how fast: median, least, quartiles, most */
    double ms, ms_min, ms_q1, ms_q3, ms_max;
    double bytes, bandwidth, bandwidth_share, speedup_vs_softmax; /* bandwidth in bytes per second */
    double flop, flop_rate;                                       /* of a step, and per second */
    double flop_peak, flop_peak_separate, flop_share;             /* machine_peak; the share of the first of them */
    /* what for */
    double relative_error, worst_error;         /* over the sample together, and of its worst row */
    double pages_share, support, support_share; /* means over rows; shares of what a row sees */
    double certified_share;                     /* of the rows */
} measurement;

/* Memory that a cell takes besides its workload and the library's scratch memory, in bytes. */
double measure_bytes(const workload_shape *shape, int32_t group, int64_t queries, int policy_count);
/* Fills results[policy_count].  False with the error set when a call fails, or when certified's output is not full's, bit for bit. */
bool measure_cell(const cell *c, measurement *results, lm_error *error);

#endif
