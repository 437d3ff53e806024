/*
 * The five things that entmaxkv-lm does.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_TASKS_H
#define LM_TASKS_H

#include "model.h"
#include "options.h"

/* What one policy achieved. */
typedef struct lm_result {
    ekv_policy policy;
    double score; /* perplexity: bits per byte; passkey: share of exact answers */
    lm_meter meter;
} lm_result;

/* Bits per byte over consecutive windows of the text: the first half of each is prefilled with full attention, each byte of the
 * second half is decoded alone with each policy in turn and counted.  results: [options->policy_count]. */
bool lm_perplexity(const lm_model *model, const lm_options *options, lm_result *results, lm_error *error);

/* Hides a random five-digit key in the text and asks for it: everything before the question is prefilled with full attention,
 * the question and the digits are decoded with each policy in turn.  results: [options->policy_count]. */
bool lm_passkey(const lm_model *model, const lm_options *options, lm_result *results, lm_error *error);

/* Prints the prompt and its greedy continuation. */
bool lm_generate(const lm_model *model, const lm_options *options, lm_error *error);

/* Runs the text with full attention and writes what attention saw: keys, values and the last queries of every layer. */
bool lm_record(const lm_model *model, const lm_options *options, lm_error *error);

/* Runs the model over a part of the text and writes the bases of its sketches, for --basis. */
bool lm_calibrate(const lm_model *model, const lm_options *options, lm_error *error);
enum { LM_CALIBRATION_LEAST = 2048 }; /* tokens that the library needs to find a basis */

/* A passkey context holds at least the sentence with the key, the question, the five digits and a byte of text. */
int64_t lm_passkey_least_context(void);

#endif
