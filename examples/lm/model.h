/*
 * The language model: weights that any number of sequences can share, and its forward pass.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_MODEL_H
#define LM_MODEL_H

#include "config.h"
#include "error.h"
#include "state.h"
#include "weights.h"

typedef struct lm_model {
    lm_config config;
    lm_weights weights;
} lm_model;

/* Loads DIRECTORY/config.json and DIRECTORY/model.safetensors; NULL with the error set. */
lm_model *lm_model_load(const char *directory, lm_error *error);
void lm_model_free(lm_model *model); /* NULL is allowed */

/* Runs n more bytes of the state's sequence through the model, in chunks of at most LM_CHUNK tokens, with the state's policy.
 * logits: [n][LM_VOCABULARY], row t predicts the byte after ids[t]; or NULL if they are not wanted.
 * After a failure the layers may differ in length: restore a snapshot or reset the state before going on. */
bool lm_model_forward(const lm_model *model, lm_state *state, const uint8_t *ids, int64_t n, float *logits, lm_error *error);

#endif
