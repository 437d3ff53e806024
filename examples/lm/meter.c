/*
 * Sums over the decoded tokens (see meter.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "meter.h"

#include <math.h>

double lm_worst(double a, double b) { return isnan(a) || a > b ? a : b; }

void lm_meter_add_reads(lm_meter *meter, const ekv_report *reports, int32_t heads) {
    for (int32_t h = 0; h < heads; h++) {
        const ekv_report *r = &reports[h];
        meter->bytes_read += (double)(r->bytes_statistics + r->bytes_sketch + r->bytes_keys + r->bytes_values);
        meter->bytes_dense += (double)r->bytes_dense;
        meter->pages_read += (double)r->group_pages;
        meter->pages_total += (double)r->total_pages;
    }
}

void lm_meter_add_mass(lm_meter *meter, const ekv_report *reports, int32_t heads) {
    for (int32_t h = 0; h < heads; h++) {
        meter->mass_sum += reports[h].mass_bound;
        meter->mass_max = lm_worst(meter->mass_max, reports[h].mass_bound);
    }
    meter->mass_count += heads;
}

void lm_meter_add_error(lm_meter *meter, const float *output, const float *full_output, int32_t heads, int32_t dim) {
    for (int32_t h = 0; h < heads; h++) {
        double squares = 0.0;
        for (int32_t d = 0; d < dim; d++) {
            double difference = (double)output[h * dim + d] - (double)full_output[h * dim + d];
            squares += difference * difference;
        }
        meter->output_error_max = lm_worst(meter->output_error_max, sqrt(squares));
    }
}
