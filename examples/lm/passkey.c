/*
 * Task passkey (see tasks.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tasks.h"

#include "decode.h"
#include "memory.h"
#include "progress.h"
#include "random.h"
#include "setup.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGITS = 5, NEEDLE_SPACE = 80 };

/* The wording that the model was trained on, the key twice. */
static const char needle_format[] = " The pass key is %s. Remember it. %s is the pass key. ";
static const char question[] = " What is the pass key? The pass key is ";

/* Each "%s" of the format, two bytes, gives way to the digits. */
enum {
    NEEDLE_BYTES = sizeof needle_format - 1 + 2 * (DIGITS - 2),
    QUESTION_BYTES = sizeof question - 1,
    EXTRA_BYTES = NEEDLE_BYTES + QUESTION_BYTES + DIGITS
};

typedef struct run {
    const lm_model *model;
    const lm_options *options;
    lm_state *state;
    lm_progress progress;
    uint64_t random;
    uint8_t *haystack; /* text and needle */
    int64_t haystack_bytes;
    int64_t trial;
} run;

int64_t lm_passkey_least_context(void) { return EXTRA_BYTES + 1; }

static void show(run *r, const char *stage, int64_t done, int64_t total) {
    lm_progress_show(&r->progress, "trial", r->trial + 1, r->options->trials, stage, done, total);
}

static void show_prefill(void *user, int64_t done) {
    run *r = user;
    show(r, "prefill", done, r->haystack_bytes);
}

/* Text from a random place, and the needle at this trial's depth in it. */
static void build_haystack(run *r, const lm_file *text, const char *key) {
    char needle[NEEDLE_SPACE];
    snprintf(needle, sizeof needle, needle_format, key, key);
    int64_t text_bytes = r->haystack_bytes - NEEDLE_BYTES;
    const uint8_t *from = text->bytes + lm_random_below(&r->random, (uint64_t)((int64_t)text->size - text_bytes) + 1);
    int64_t before = (int64_t)(((double)r->trial + 0.5) / (double)r->options->trials * (double)text_bytes);
    memcpy(r->haystack, from, (size_t)before);
    memcpy(r->haystack + before, needle, NEEDLE_BYTES);
    memcpy(r->haystack + before + NEEDLE_BYTES, from + before, (size_t)(text_bytes - before));
}

/* Asks the question and lets the model answer.  The digits are always decoded in full, so that every trial counts the same
 * number of tokens. */
static bool ask(run *r, const char *key, lm_result *result, lm_error *error) {
    float logits[LM_VOCABULARY];
    lm_state_use(r->state, result->policy, r->options->budget, &result->meter);
    for (int i = 0; i < QUESTION_BYTES; i++) {
        if (!lm_decode_step(r->model, r->state, (uint8_t)question[i], logits, error)) {
            return false;
        }
        show(r, ekv_policy_name(result->policy), i + 1, QUESTION_BYTES + DIGITS);
    }
    bool exact = true;
    for (int i = 0; i < DIGITS; i++) {
        uint8_t digit = lm_likeliest(logits);
        exact = exact && digit == (uint8_t)key[i];
        if (!lm_decode_step(r->model, r->state, digit, logits, error)) {
            return false;
        }
    }
    result->score += exact ? 1.0 : 0.0;
    return true;
}

/* One prefill serves all policies: each starts from the same cache. */
static bool run_trial(run *r, const lm_file *text, lm_result *results, lm_error *error) {
    char key[DIGITS + 1];
    snprintf(key, sizeof key, "%05u", 10000u + (unsigned)lm_random_below(&r->random, 90000));
    build_haystack(r, text, key);
    float unused[LM_VOCABULARY];
    lm_snapshot snapshot;
    if (!lm_state_reset(r->state, error) ||
        !lm_prefill(r->model, r->state, r->haystack, r->haystack_bytes, unused, show_prefill, r, error) ||
        !lm_snapshot_take(r->state, &snapshot, error)) {
        return false;
    }
    bool ok = true;
    for (int i = 0; ok && i < r->options->policy_count; i++) {
        ok = lm_snapshot_restore(r->state, &snapshot, error) && ask(r, key, &results[i], error);
    }
    lm_snapshot_free(&snapshot);
    return ok;
}

static bool run_trials(run *r, const lm_file *text, lm_result *results, lm_error *error) {
    bool ok = true;
    for (r->trial = 0; ok && r->trial < r->options->trials; r->trial++) {
        ok = run_trial(r, text, results, error);
    }
    lm_progress_end(&r->progress);
    for (int i = 0; i < r->options->policy_count; i++) {
        results[i].score /= (double)r->options->trials;
    }
    return ok;
}

static bool check_text(const lm_options *options, const lm_file *text, lm_error *error) {
    int64_t needed = options->context - EXTRA_BYTES;
    if ((int64_t)text->size < needed) {
        return lm_fail(error, "the text has %zu bytes, but a passkey context of %" PRId64 " needs %" PRId64 " bytes of text",
                       text->size, options->context, needed);
    }
    return true;
}

static bool prepare(run *r, lm_error *error) {
    r->haystack_bytes = r->options->context - QUESTION_BYTES - DIGITS;
    r->haystack = lm_alloc((size_t)r->haystack_bytes, 1, error);
    if (r->haystack == NULL) {
        return false;
    }
    r->state = lm_setup_state(r->model, r->options, r->options->context, error);
    return r->state != NULL;
}

bool lm_passkey(const lm_model *model, const lm_options *options, lm_result *results, lm_error *error) {
    lm_file text;
    if (!lm_setup_text(options, &text, error)) {
        return false;
    }
    run r = {.model = model, .options = options, .progress = lm_progress_start(), .random = (uint64_t)options->seed};
    bool ok = check_text(options, &text, error) && prepare(&r, error) && run_trials(&r, &text, results, error);
    lm_state_free(r.state);
    free(r.haystack);
    lm_file_free(&text);
    return ok;
}
