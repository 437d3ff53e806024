/*
 * Attention through EntmaxKV (see attention.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "attention.h"

#include "clock.h"

#include <inttypes.h>
#include <string.h>

static bool append(lm_state *state, int32_t layer, int32_t n, lm_error *error) {
    int32_t q_width = lm_q_width(&state->config), kv_width = lm_kv_width(&state->config);
    ekv_append_params rows = ekv_append_params_default();
    rows.count = n;
    rows.k = state->qkv + q_width;
    rows.v = state->qkv + q_width + kv_width;
    rows.k_token_stride = rows.v_token_stride = q_width + 2 * kv_width;
    rows.k_head_stride = rows.v_head_stride = state->config.head_dim;
    if (ekv_cache_append(state->context, state->cache, state->sequence, layer, &rows) != EKV_OK) {
        return lm_fail(error, "token %" PRId64 ", layer %d: cannot append to the KV cache: %s", state->length, layer,
                       ekv_last_error(state->context));
    }
    return true;
}

static bool decode(const lm_state *state, const ekv_decode_params *step, lm_error *error) {
    if (ekv_decode(state->context, step) != EKV_OK) {
        return lm_fail(error, "token %" PRId64 ", layer %d: attention failed: %s", state->length, step->layer,
                       ekv_last_error(state->context));
    }
    return true;
}

/* The step as the model runs it: with the reports of its reads, which cost next to nothing, and timed.  Then, untimed, once
 * more for E, whose bounds of the unread pages a user would not pay for, and once with full attention for the error. */
static bool decode_measured(lm_state *state, ekv_decode_params *step, lm_error *error) {
    lm_meter *meter = state->meter;
    int32_t heads = state->config.heads;
    step->report = state->reports;
    double start = lm_seconds();
    if (!decode(state, step, error)) {
        return false;
    }
    double end = lm_seconds();
    meter->attention_seconds += end - start;
    lm_meter_add_reads(meter, state->reports, heads);
    if (step->policy == EKV_POLICY_FULL) {
        meter->mass_count += heads; /* everything was read: E is 0, and so is the error */
        return true;
    }
    step->out = state->check;
    step->report_mass = 1;
    if (!decode(state, step, error)) {
        return false;
    }
    lm_meter_add_mass(meter, state->reports, heads);
    step->policy = EKV_POLICY_FULL;
    step->report = NULL;
    step->report_mass = 0;
    if (!decode(state, step, error)) {
        return false;
    }
    lm_meter_add_error(meter, state->attended, state->check, heads, state->config.head_dim);
    meter->measuring_seconds += lm_seconds() - end;
    return true;
}

/* Keeps those queries of a chunk that are asked for. */
static void keep_queries(const lm_state *state, int32_t layer, int32_t n) {
    const lm_queries *kept = state->queries;
    int64_t q_width = lm_q_width(&state->config), stride = q_width + 2 * lm_kv_width(&state->config);
    for (int32_t t = 0; t < n; t++) {
        int64_t place = state->length + t - kept->first;
        if (place >= 0 && place < kept->count) {
            memcpy(kept->rows + (layer * kept->count + place) * q_width, state->qkv + t * stride,
                   (size_t)q_width * sizeof(float));
        }
    }
}

bool lm_attend(lm_state *state, int32_t layer, const float *slopes, int32_t n, lm_error *error) {
    if (!append(state, layer, n, error)) {
        return false;
    }
    if (state->queries != NULL) {
        keep_queries(state, layer, n);
    }
    const int32_t q_start[2] = {0, n};
    ekv_decode_params step = ekv_decode_params_default();
    step.cache = state->cache;
    step.layer = layer;
    step.sequences = &state->sequence;
    step.q_heads = state->config.heads;
    step.q_start = q_start;
    step.q = state->qkv;
    step.q_token_stride = lm_q_width(&state->config) + 2 * lm_kv_width(&state->config);
    step.q_head_stride = state->config.head_dim;
    step.out = state->attended;
    step.alpha = state->config.alpha;
    step.slopes = slopes;
    step.policy = state->policy;
    step.budget = state->budget;
    return state->meter != NULL ? decode_measured(state, &step, error) : decode(state, &step, error);
}
