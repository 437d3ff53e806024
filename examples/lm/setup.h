/*
 * What a task starts from: the text that the options name, and a state for a sequence of the right length.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_SETUP_H
#define LM_SETUP_H

#include "file.h"
#include "model.h"
#include "options.h"

bool lm_setup_text(const lm_options *options, lm_file *text, lm_error *error);
/* That the text holds --length bytes from --offset on. */
bool lm_setup_check_text(const lm_options *options, const lm_file *text, lm_error *error);
/* With --basis its bases are loaded. */
lm_state *lm_setup_state(const lm_model *model, const lm_options *options, int64_t max_length, lm_error *error);

#endif
