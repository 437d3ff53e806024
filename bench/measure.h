/*
 * One cell of the benchmark: all policies on one workload with one group size and number of threads, timed in turn.
 *
 * A step is one ekv_decode call per layer, one query token per sequence; all its figures are means over the layers.  Before each
 * timed step the caches are filled with other data, unless the cell is warm.  Policies take turns within each repetition, so that
 * what else happens on the machine meets all of them.  Bytes, pages, support and errors come from a step before, which is not timed.
 *
 * The error is the relative L2 distance of the outputs from full attention computed in double precision from the stored keys and
 * values, over a sample of rows (sequences and heads) of every layer: for topk and gaussian it includes what they did not read.
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
    const measured_policy *policies; /* the first is softmax, which the others are compared with */
    int policy_count;
    int32_t group;
    int64_t budget; /* topk: tokens */
    int repeats;
    bool warm;
} cell;

typedef struct measurement {
    /* what */
    const char *policy, *keys, *dtype, *backend, *caches;
    double alpha;
    int64_t context, group, batch, threads, layers, kv_heads, key_dim, value_dim, page_size, budget, repeats;
    /* how fast: median, least, quartiles, most */
    double ms, ms_min, ms_q1, ms_q3, ms_max;
    double bytes, bandwidth, bandwidth_share, speedup_vs_softmax; /* bandwidth in bytes per second */
    /* what for */
    double relative_error, worst_error;         /* over the sample together, and of its worst row */
    double pages_share, support, support_share; /* means over query heads */
    double certified_share;                     /* of the rows */
} measurement;

/* Fills results[policy_count].  False with the error set when a call fails, or when certified's output is not full's, bit for bit. */
bool measure_cell(const cell *c, measurement *results, lm_error *error);

#endif
