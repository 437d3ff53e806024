/*
 * The language model's forward pass (see model.h); models/nape-entmax-14m/forward.py is the same in NumPy.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "model.h"

#include "attention.h"
#include "linalg.h"
#include "memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

lm_model *lm_model_load(const char *directory, lm_error *error) {
    lm_model *model = lm_alloc(1, sizeof *model, error);
    if (model != NULL && !(lm_config_read(directory, &model->config, error) &&
                           lm_weights_read(directory, &model->config, &model->weights, error))) {
        free(model); /* a failed read keeps nothing */
        model = NULL;
    }
    return model;
}

void lm_model_free(lm_model *model) {
    if (model != NULL) {
        lm_weights_free(&model->config, &model->weights);
        free(model);
    }
}

/* Normalises the residual stream and convolves it with the tokens before, which the tail remembers across calls. */
static void normalise_and_convolve(const lm_model *model, lm_state *state, int32_t layer, int32_t n) {
    const lm_config *config = &model->config;
    const lm_layer *weights = &model->weights.layers[layer];
    size_t tail_floats = (size_t)(config->taps - 1) * (size_t)config->width;
    float *tail = state->tails + (size_t)layer * tail_floats;
    memcpy(state->window, tail, tail_floats * sizeof(float));
    lm_rms_norm(state->x, weights->attn_norm, config->norm_epsilon, n, config->width, state->window + tail_floats,
                state->threads);
    lm_convolve(state->window, weights->conv, config->taps, n, config->width, state->normed, state->threads);
    memcpy(tail, state->window + (size_t)n * (size_t)config->width, tail_floats * sizeof(float));
}

/* Length-aware temperature: a query that sees m tokens, itself included, is scaled by 1 + gain * ln m, per head. */
static void scale_queries(const lm_model *model, lm_state *state, int32_t layer, int32_t n) {
    const lm_config *config = &model->config;
    const float *gain = model->weights.layers[layer].length_gain;
    int64_t stride = lm_q_width(config) + 2 * lm_kv_width(config);
    for (int32_t t = 0; t < n; t++) {
        float log_visible = (float)log((double)(state->length + t + 1));
        for (int32_t h = 0; h < config->heads; h++) {
            float *q = state->qkv + t * stride + (int64_t)h * config->head_dim;
            float factor = 1.0f + gain[h] * log_visible;
            for (int32_t d = 0; d < config->head_dim; d++) {
                q[d] *= factor;
            }
        }
    }
}

static bool attention_block(const lm_model *model, lm_state *state, int32_t layer, int32_t n, lm_error *error) {
    const lm_config *config = &model->config;
    const lm_layer *weights = &model->weights.layers[layer];
    int32_t q_width = lm_q_width(config), qkv_width = q_width + 2 * lm_kv_width(config);
    normalise_and_convolve(model, state, layer, n);
    lm_matmul(weights->qkv, qkv_width, config->width, state->normed, config->width, n, state->qkv, qkv_width, false,
              state->threads);
    scale_queries(model, state, layer, n);
    if (!lm_attend(state, layer, model->weights.slopes, n, error)) {
        return false;
    }
    lm_matmul(weights->o, config->width, q_width, state->attended, q_width, n, state->x, config->width, true, state->threads);
    return true;
}

static void mlp_block(const lm_model *model, lm_state *state, int32_t layer, int32_t n) {
    const lm_config *config = &model->config;
    const lm_layer *weights = &model->weights.layers[layer];
    int32_t inner = config->intermediate;
    lm_rms_norm(state->x, weights->mlp_norm, config->norm_epsilon, n, config->width, state->normed, state->threads);
    lm_matmul(weights->gate_up, 2 * inner, config->width, state->normed, config->width, n, state->gate_up, 2 * inner, false,
              state->threads);
    lm_silu_gate(state->gate_up, n, inner, state->threads);
    lm_matmul(weights->down, config->width, inner, state->gate_up, 2 * inner, n, state->x, config->width, true, state->threads);
}

static void embed(const lm_model *model, lm_state *state, const uint8_t *ids, int32_t n) {
    size_t width = (size_t)model->config.width;
    for (int32_t t = 0; t < n; t++) {
        memcpy(state->x + (size_t)t * width, model->weights.embedding + ids[t] * width, width * sizeof(float));
    }
}

static bool forward_chunk(const lm_model *model, lm_state *state, const uint8_t *ids, int32_t n, float *logits,
                          lm_error *error) {
    const lm_config *config = &model->config;
    embed(model, state, ids, n);
    for (int32_t layer = 0; layer < config->layers; layer++) {
        if (!attention_block(model, state, layer, n, error)) {
            return false;
        }
        mlp_block(model, state, layer, n);
    }
    state->length += n;
    if (logits != NULL) {
        lm_rms_norm(state->x, model->weights.norm, config->norm_epsilon, n, config->width, state->normed, state->threads);
        lm_matmul(model->weights.embedding, LM_VOCABULARY, config->width, state->normed, config->width, n, logits,
                  LM_VOCABULARY, false, state->threads);
    }
    return true;
}

bool lm_model_forward(const lm_model *model, lm_state *state, const uint8_t *ids, int64_t n, float *logits, lm_error *error) {
    if (state->meter != NULL && n > 1) {
        return lm_fail(error, "%" PRId64 " tokens in one step cannot be measured, only one", n);
    }
    for (int64_t done = 0; done < n; done += LM_CHUNK) {
        int32_t count = n - done < LM_CHUNK ? (int32_t)(n - done) : LM_CHUNK;
        float *rows = logits != NULL ? logits + done * LM_VOCABULARY : NULL;
        if (!forward_chunk(model, state, ids + done, count, rows, error)) {
            return false;
        }
    }
    return true;
}
