/*
 * Task generate (see tasks.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tasks.h"

#include "decode.h"
#include "memory.h"
#include "output.h"
#include "setup.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Writes a byte as soon as it is known, unless everything goes into one JSON object at the end. */
static void emit(const lm_options *options, const uint8_t *bytes, size_t count) {
    if (!options->json) {
        fwrite(bytes, 1, count, stdout);
        fflush(stdout);
    }
}

/* text: [options->bytes]. */
static bool continue_prompt(const lm_model *model, lm_state *state, const lm_options *options, uint8_t *text, lm_error *error) {
    float logits[LM_VOCABULARY];
    const uint8_t *prompt = (const uint8_t *)options->prompt;
    size_t prompt_bytes = strlen(options->prompt);
    emit(options, prompt, prompt_bytes);
    if (!lm_prefill(model, state, prompt, (int64_t)prompt_bytes, logits, NULL, NULL, error)) {
        return false;
    }
    lm_state_use(state, options->policies[0], options->budget, NULL);
    for (int64_t i = 0; i < options->bytes; i++) {
        text[i] = lm_likeliest(logits);
        emit(options, &text[i], 1);
        bool last = i + 1 == options->bytes;
        if (!last && !lm_decode_step(model, state, text[i], logits, error)) {
            return false;
        }
    }
    return true;
}

bool lm_generate(const lm_model *model, const lm_options *options, lm_error *error) {
    uint8_t *text = lm_alloc((size_t)options->bytes, 1, error);
    if (text == NULL) {
        return false;
    }
    lm_state *state = lm_setup_state(model, options, (int64_t)strlen(options->prompt) + options->bytes, error);
    bool ok = state != NULL && continue_prompt(model, state, options, text, error);
    if (ok && options->json) {
        ok = lm_output_generated(options, text, (size_t)options->bytes, error);
    } else if (ok) {
        putchar('\n');
    }
    lm_state_free(state);
    free(text);
    return ok;
}
