/*
 * The texts of --help and --version.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_HELP_H
#define LM_HELP_H

#include "options.h"

void lm_help_program(void);
void lm_help_task(lm_task task);
void lm_help_version(void);

#endif
