/*
 * What the tasks share: prefill with full attention, one decoded token, and picking the likeliest byte.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_DECODE_H
#define LM_DECODE_H

#include "model.h"

/* Told after every chunk how many of the tokens are prefilled; may be NULL. */
typedef void (*lm_prefill_watcher)(void *user, int64_t done);

/* Runs n >= 1 bytes with policy full, unmeasured.  logits: [LM_VOCABULARY], what follows the last byte. */
bool lm_prefill(const lm_model *model, lm_state *state, const uint8_t *ids, int64_t n, float *logits,
                lm_prefill_watcher watcher, void *user, lm_error *error);

/* Runs one byte with the state's policy and, if it has a meter, counts the token and its time.  logits as above. */
bool lm_decode_step(const lm_model *model, lm_state *state, uint8_t id, float *logits, lm_error *error);

/* The byte with the largest logit; the lowest such byte if there are several. */
uint8_t lm_likeliest(const float *logits);

#endif
