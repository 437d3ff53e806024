/*
 * Task calibrate (see tasks.h): prefill, then a basis for each layer and head from all keys that are there.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tasks.h"

#include "basis.h"
#include "decode.h"
#include "progress.h"
#include "setup.h"

#include <inttypes.h>
#include <stdio.h>

typedef struct run {
    const lm_options *options;
    lm_progress progress;
} run;

static void show_prefill(void *user, int64_t done) {
    run *r = user;
    lm_progress_show(&r->progress, "calibration", 1, 1, "prefill", done, r->options->length);
}

/* The largest share over the heads of a layer. */
static bool largest_share(const lm_state *state, int32_t layer, double *share, lm_error *error) {
    const ekv_index *index = NULL;
    ekv_cache_layer(state->cache, layer, NULL, &index);
    *share = 0.0;
    for (int32_t head = 0; head < state->config.kv_heads; head++) {
        ekv_sketch_fit fit = {.size = sizeof fit};
        if (ekv_index_sketch_fit(state->context, index, head, &fit) != EKV_OK) {
            return lm_fail(error, "layer %d: %s", layer, ekv_last_error(state->context));
        }
        *share = fit.found > *share ? fit.found : *share;
    }
    return true;
}

static bool find_bases(lm_state *state, lm_error *error) {
    printf("layer  share of the keys' norm that the sketch leaves unexplained, worst KV head\n");
    for (int32_t layer = 0; layer < state->config.layers; layer++) {
        double share;
        if (ekv_cache_find_basis(state->context, state->cache, state->sequence, layer) != EKV_OK) {
            return lm_fail(error, "layer %d: no basis was found: %s", layer, ekv_last_error(state->context));
        }
        if (!largest_share(state, layer, &share, error)) {
            return false;
        }
        printf("%5d  %.4f\n", layer, share);
    }
    return true;
}

bool lm_calibrate(const lm_model *model, const lm_options *options, lm_error *error) {
    lm_file text;
    if (!lm_setup_text(options, &text, error)) {
        return false;
    }
    run r = {options, lm_progress_start()};
    float unused[LM_VOCABULARY];
    lm_state *state = NULL;
    bool ok = lm_setup_check_text(options, &text, error);
    if (ok) {
        state = lm_setup_state(model, options, options->length, error);
        ok = state != NULL &&
             lm_prefill(model, state, text.bytes + options->offset, options->length, unused, show_prefill, &r, error);
        lm_progress_end(&r.progress);
    }
    ok = ok && find_bases(state, error) && lm_basis_write(state, options->out, error);
    lm_state_free(state);
    lm_file_free(&text);
    return ok;
}
