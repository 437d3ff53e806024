/*
 * Results on stdout: an aligned table, or one flat JSON object a line.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_OUTPUT_H
#define LM_OUTPUT_H

#include "tasks.h"

#include <stddef.h>

/* Prints the results of perplexity or passkey, one line per policy. */
bool lm_output_results(const lm_options *options, const lm_result *results, lm_error *error);

/* Prints what generate made as a JSON object.  Bytes that are not UTF-8, and zero bytes, appear as U+FFFD. */
bool lm_output_generated(const lm_options *options, const unsigned char *text, size_t size, lm_error *error);

#endif
