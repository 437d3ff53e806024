/*
 * Task perplexity (see tasks.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tasks.h"

#include "decode.h"
#include "progress.h"
#include "setup.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

typedef struct run {
    const lm_model *model;
    const lm_options *options;
    lm_state *state;
    lm_progress progress;
    int64_t window;
} run;

/* -log2 of the probability of a byte: log2(sum of exp(logit)) - logit of that byte. */
static double bits_of(const float *logits, uint8_t id) {
    double largest = logits[lm_likeliest(logits)], sum = 0.0;
    for (int i = 0; i < LM_VOCABULARY; i++) {
        sum += exp((double)logits[i] - largest);
    }
    return log2(sum) - ((double)logits[id] - largest) / log(2.0);
}

static void show(run *r, const char *stage, int64_t done, int64_t total) {
    lm_progress_show(&r->progress, "window", r->window + 1, r->options->windows, stage, done, total);
}

static void show_prefill(void *user, int64_t done) {
    run *r = user;
    show(r, "prefill", done, r->options->context / 2);
}

/* Decodes the second half of a window.  logits hold the prediction of its first byte and are used up. */
static bool decode_half(run *r, const uint8_t *ids, int64_t n, float *logits, lm_result *result, lm_error *error) {
    lm_state_use(r->state, result->policy, r->options->budget, &result->meter);
    for (int64_t i = 0; i < n; i++) {
        result->score += bits_of(logits, ids[i]);
        if (!lm_decode_step(r->model, r->state, ids[i], logits, error)) {
            return false;
        }
        show(r, ekv_policy_name(result->policy), i + 1, n);
    }
    return true;
}

/* One prefill serves all policies: each starts from the same cache. */
static bool run_window(run *r, const uint8_t *ids, lm_result *results, lm_error *error) {
    int64_t half = r->options->context / 2;
    float predicted[LM_VOCABULARY], logits[LM_VOCABULARY];
    lm_snapshot snapshot;
    if (!lm_state_reset(r->state, error) || !lm_prefill(r->model, r->state, ids, half, predicted, show_prefill, r, error) ||
        !lm_snapshot_take(r->state, &snapshot, error)) {
        return false;
    }
    bool ok = true;
    for (int i = 0; ok && i < r->options->policy_count; i++) {
        memcpy(logits, predicted, sizeof logits);
        ok = lm_snapshot_restore(r->state, &snapshot, error) &&
             decode_half(r, ids + half, r->options->context - half, logits, &results[i], error);
    }
    lm_snapshot_free(&snapshot);
    return ok;
}

static bool run_windows(run *r, const lm_file *text, lm_result *results, lm_error *error) {
    const lm_options *options = r->options;
    bool ok = true;
    for (r->window = 0; ok && r->window < options->windows; r->window++) {
        ok = run_window(r, text->bytes + options->offset + r->window * options->context, results, error);
    }
    lm_progress_end(&r->progress);
    double counted = (double)options->windows * (double)(options->context - options->context / 2);
    for (int i = 0; i < options->policy_count; i++) {
        results[i].score /= counted;
    }
    return ok;
}

/* Written without products and sums that could overflow. */
static bool check_text(const lm_options *options, const lm_file *text, lm_error *error) {
    int64_t size = (int64_t)text->size;
    if (options->offset > size || options->windows > (size - options->offset) / options->context) {
        return lm_fail(error,
                       "the text has %" PRId64 " bytes, too few for %" PRId64 " windows of %" PRId64 " from offset %" PRId64,
                       size, options->windows, options->context, options->offset);
    }
    return true;
}

bool lm_perplexity(const lm_model *model, const lm_options *options, lm_result *results, lm_error *error) {
    lm_file text;
    if (!lm_setup_text(options, &text, error)) {
        return false;
    }
    run r = {model, options, NULL, lm_progress_start(), 0};
    bool ok = check_text(options, &text, error);
    if (ok) {
        r.state = lm_setup_state(model, options, options->context, error);
        ok = r.state != NULL && run_windows(&r, &text, results, error);
    }
    lm_state_free(r.state);
    lm_file_free(&text);
    return ok;
}
