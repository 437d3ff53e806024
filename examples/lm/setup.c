/*
 * What a task starts from (see setup.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "setup.h"

#include "basis.h"
#include "memory.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Joins a file to the text. */
static bool add_file(const char *path, lm_file *text, lm_error *error) {
    lm_file more;
    if (!lm_file_read(path, &more, error)) {
        return false;
    }
    unsigned char *joined = lm_alloc(text->size + more.size + 1, 1, error);
    if (joined != NULL) {
        memcpy(joined, text->bytes, text->size);
        memcpy(joined + text->size, more.bytes, more.size);
        free(text->bytes);
        text->bytes = joined;
        text->size += more.size;
    }
    lm_file_free(&more);
    return joined != NULL;
}

static bool read_texts(const lm_options *options, lm_file *text, lm_error *error) {
    bool ok = lm_file_read(options->texts[0], text, error);
    for (int i = 1; ok && i < options->text_count; i++) {
        ok = add_file(options->texts[i], text, error);
        if (!ok) {
            lm_file_free(text);
        }
    }
    return ok;
}

bool lm_setup_text(const lm_options *options, lm_file *text, lm_error *error) {
    if (options->text_count > 0) {
        return read_texts(options, text, error);
    }
    char *path = lm_file_path(options->model, "persuasion-part1.txt", error);
    bool ok = path != NULL && lm_file_read(path, text, error);
    free(path);
    return ok;
}

bool lm_setup_check_text(const lm_options *options, const lm_file *text, lm_error *error) {
    int64_t size = (int64_t)text->size;
    if (options->offset > size || options->length > size - options->offset) {
        return lm_fail(error,
                       "the text has %" PRId64 " bytes, too few for --length %" PRId64 " from --offset %" PRId64
                       ": add another with --text (a text is not repeated)",
                       size, options->length, options->offset);
    }
    return true;
}

lm_state *lm_setup_state(const lm_model *model, const lm_options *options, int64_t max_length, lm_error *error) {
    lm_state_params params = {options->kv_type, options->backend, (int32_t)options->threads, max_length};
    lm_state *state = lm_state_create(&model->config, &params, error);
    if (state != NULL && options->basis != NULL && !lm_basis_load(state, options->basis, error)) {
        lm_state_free(state);
        state = NULL;
    }
    return state;
}
