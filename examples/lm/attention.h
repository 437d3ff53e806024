/*
 * Attention through EntmaxKV: the one place where the model calls ekv_cache_append and ekv_decode.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_ATTENTION_H
#define LM_ATTENTION_H

#include "error.h"
#include "state.h"
#include "weights.h"

/* Appends the keys and values of n new tokens to one layer of the cache and attends from their queries.
 * Reads state->qkv, rows of queries, keys and values; writes state->attended.  slopes: [heads].
 * With state->meter set, n must be 1: the reads, E and the output's error are added to the meter. */
bool lm_attend(lm_state *state, int32_t layer, const float *slopes, int32_t n, lm_error *error);

#endif
