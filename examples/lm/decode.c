/*
 * What the tasks share (see decode.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "decode.h"

#include "clock.h"

bool lm_prefill(const lm_model *model, lm_state *state, const uint8_t *ids, int64_t n, float *logits,
                lm_prefill_watcher watcher, void *user, lm_error *error) {
    lm_state_use(state, EKV_POLICY_FULL, 0, NULL);
    /* The last byte goes alone: only its logits are wanted. */
    for (int64_t done = 0; done < n - 1; done += LM_CHUNK) {
        int64_t count = n - 1 - done < LM_CHUNK ? n - 1 - done : LM_CHUNK;
        if (!lm_model_forward(model, state, ids + done, count, NULL, error)) {
            return false;
        }
        if (watcher != NULL) {
            watcher(user, done + count);
        }
    }
    return lm_model_forward(model, state, ids + n - 1, 1, logits, error);
}

bool lm_decode_step(const lm_model *model, lm_state *state, uint8_t id, float *logits, lm_error *error) {
    lm_meter *meter = state->meter;
    double start = lm_seconds();
    double measuring = meter != NULL ? meter->measuring_seconds : 0.0;
    if (!lm_model_forward(model, state, &id, 1, logits, error)) {
        return false;
    }
    if (meter != NULL) {
        meter->step_seconds += lm_seconds() - start - (meter->measuring_seconds - measuring);
        meter->tokens++;
    }
    return true;
}

uint8_t lm_likeliest(const float *logits) {
    int best = 0;
    for (int i = 1; i < LM_VOCABULARY; i++) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return (uint8_t)best;
}
