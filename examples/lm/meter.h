/*
 * Sums over the tokens that were decoded with a policy: what was read, how far the result is from full attention, and the time.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_METER_H
#define LM_METER_H

#include <entmaxkv/entmaxkv.h>

typedef struct lm_meter {
    int64_t tokens;
    double step_seconds;      /* whole token steps, without the measuring calls */
    double attention_seconds; /* the policy's own ekv_decode calls */
    double measuring_seconds; /* the calls that exist only to measure */
    double bytes_read, bytes_dense;
    double pages_read, pages_total;
    double mass_sum, mass_max; /* E, per query head, layer and token */
    int64_t mass_count;
    double output_error_max; /* L2 distance of a head's output from its output under `full`, for the same query */
} lm_meter;

/* The larger of two numbers; NaN if either is: a defect must not hide in a maximum. */
double lm_worst(double a, double b);

/* Adds the reads of one attention call: one report per query head. */
void lm_meter_add_reads(lm_meter *meter, const ekv_report *reports, int32_t heads);
/* Adds the mass bounds of one attention call. */
void lm_meter_add_mass(lm_meter *meter, const ekv_report *reports, int32_t heads);
/* Adds the distance between two outputs [heads][dim] of one attention call. */
void lm_meter_add_error(lm_meter *meter, const float *output, const float *full_output, int32_t heads, int32_t dim);

#endif
