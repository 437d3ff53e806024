/*
 * The state of one sequence (see state.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "state.h"

#include "linalg.h"
#include "memory.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static size_t tail_floats(const lm_config *config) {
    return (size_t)config->layers * (size_t)(config->taps - 1) * (size_t)config->width;
}

static bool create_context(lm_state *state, const lm_state_params *params, lm_error *error) {
    ekv_context_params context = ekv_context_params_default();
    context.backend = params->backend;
    context.threads = params->threads;
    char message[256] = "";
    ekv_status status = ekv_context_create(&context, &state->context, message, sizeof message);
    if (status != EKV_OK) {
        return lm_fail(error, "cannot start EntmaxKV: %s: %s", ekv_strerror(status), message);
    }
    state->threads = ekv_context_threads(state->context);
    lm_linalg_setup(state->threads);
    return true;
}

static bool create_cache(lm_state *state, const lm_state_params *params, lm_error *error) {
    ekv_cache_params shape = ekv_cache_params_default();
    shape.dtype = params->kv_type;
    shape.layers = state->config.layers;
    shape.kv_heads = state->config.kv_heads;
    shape.k_dim = state->config.head_dim;
    shape.v_dim = state->config.head_dim;
    shape.statistics |= EKV_STATISTICS_SKETCH; /* for policy certified */
    shape.blocks = (params->max_length + shape.page_size - 1) / shape.page_size;
    if (ekv_cache_create(state->context, &shape, &state->cache) != EKV_OK ||
        ekv_sequence_create(state->context, state->cache, &state->sequence) != EKV_OK) {
        return lm_fail(error, "cannot create a KV cache for %" PRId64 " tokens: %s", params->max_length,
                       ekv_last_error(state->context));
    }
    return true;
}

static float *floats(size_t rows, int32_t columns, lm_error *error) {
    return lm_alloc(rows * (size_t)columns, sizeof(float), error);
}

static bool create_scratch(lm_state *state, lm_error *error) {
    const lm_config *config = &state->config;
    int32_t q_width = lm_q_width(config), kv_width = lm_kv_width(config);
    state->tails = lm_alloc(tail_floats(config), sizeof(float), error);
    state->x = floats(LM_CHUNK, config->width, error);
    state->window = floats((size_t)config->taps - 1 + LM_CHUNK, config->width, error);
    state->normed = floats(LM_CHUNK, config->width, error);
    state->qkv = floats(LM_CHUNK, q_width + 2 * kv_width, error);
    state->attended = floats(LM_CHUNK, q_width, error);
    state->gate_up = floats(LM_CHUNK, 2 * config->intermediate, error);
    state->check = floats(1, q_width, error);
    state->reports = lm_alloc((size_t)config->heads, sizeof(ekv_report), error);
    return state->tails != NULL && state->x != NULL && state->window != NULL && state->normed != NULL && state->qkv != NULL &&
           state->attended != NULL && state->gate_up != NULL && state->check != NULL && state->reports != NULL;
}

lm_state *lm_state_create(const lm_config *config, const lm_state_params *params, lm_error *error) {
    lm_state *state = lm_alloc(1, sizeof *state, error);
    if (state == NULL) {
        return NULL;
    }
    state->config = *config;
    lm_state_use(state, EKV_POLICY_FULL, 0, NULL);
    if (!create_context(state, params, error) || !create_cache(state, params, error) || !create_scratch(state, error)) {
        lm_state_free(state);
        return NULL;
    }
    return state;
}

void lm_state_free(lm_state *state) {
    if (state == NULL) {
        return;
    }
    free(state->tails);
    free(state->x);
    free(state->window);
    free(state->normed);
    free(state->qkv);
    free(state->attended);
    free(state->gate_up);
    free(state->check);
    free(state->reports);
    ekv_cache_destroy(state->cache);
    ekv_context_destroy(state->context);
    free(state);
}

void lm_state_use(lm_state *state, ekv_policy policy, int64_t budget, lm_meter *meter) {
    state->policy = policy;
    state->budget = budget;
    state->meter = meter;
}

static bool truncate_to(lm_state *state, int64_t length, lm_error *error) {
    ekv_status status = ekv_cache_truncate(state->context, state->cache, state->sequence, length);
    if (status != EKV_OK) {
        return lm_fail(error, "cannot truncate the KV cache to %" PRId64 " tokens: %s", length, ekv_last_error(state->context));
    }
    state->length = length;
    return true;
}

bool lm_state_reset(lm_state *state, lm_error *error) {
    memset(state->tails, 0, tail_floats(&state->config) * sizeof(float));
    return truncate_to(state, 0, error);
}

bool lm_snapshot_take(const lm_state *state, lm_snapshot *snapshot, lm_error *error) {
    snapshot->length = state->length;
    snapshot->tails = lm_alloc(tail_floats(&state->config), sizeof(float), error);
    if (snapshot->tails == NULL) {
        return false;
    }
    memcpy(snapshot->tails, state->tails, tail_floats(&state->config) * sizeof(float));
    return true;
}

bool lm_snapshot_restore(lm_state *state, const lm_snapshot *snapshot, lm_error *error) {
    memcpy(state->tails, snapshot->tails, tail_floats(&state->config) * sizeof(float));
    return truncate_to(state, snapshot->length, error);
}

void lm_snapshot_free(lm_snapshot *snapshot) {
    free(snapshot->tails);
    snapshot->tails = NULL;
}
