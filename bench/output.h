/*
 * The benchmark's results as a table, as JSON, as CSV, and as a plot.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_OUTPUT_H
#define EKV_OUTPUT_H

#include "measure.h"

#include <stdio.h>

/* The policies of one cell, under a line that says which. */
void output_table(const measurement *results, int count);
/* One flat JSON object a line.  False when memory or the output fails. */
bool output_json(const measurement *results, int count);
/* The names of the columns, which are those of the JSON, and lines of values. */
void output_csv_head(void);
void output_csv(const measurement *results, int count);

/* Whether gnuplot can be run; false with the error set. */
bool plot_available(lm_error *error);
/* Draws the speed-up over softmax against the context, a line for each policy and whatever else differs, as SVG. */
bool plot_draw(const char *path, const measurement *results, int count, lm_error *error);

#endif
