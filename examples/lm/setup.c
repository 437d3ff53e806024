/*
 * What a task starts from (see setup.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "setup.h"

#include <stdlib.h>

bool lm_setup_text(const lm_options *options, lm_file *text, lm_error *error) {
    if (options->text != NULL) {
        return lm_file_read(options->text, text, error);
    }
    char *path = lm_file_path(options->model, "persuasion-part1.txt", error);
    bool ok = path != NULL && lm_file_read(path, text, error);
    free(path);
    return ok;
}

lm_state *lm_setup_state(const lm_model *model, const lm_options *options, int64_t max_length, lm_error *error) {
    lm_state_params params = {options->kv_type, options->backend, (int32_t)options->threads, max_length};
    return lm_state_create(&model->config, &params, error);
}
