/*
 * Progress on stderr while a task runs; silent unless stderr is a terminal.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_PROGRESS_H
#define LM_PROGRESS_H

#include "error.h"

#include <stdint.h>

typedef struct lm_progress {
    bool enabled;
    double shown; /* when the line was last drawn */
} lm_progress;

lm_progress lm_progress_start(void);
/* Redraws the line as "TASK ITEM/ITEMS: STAGE 37 %", at most a few times a second. */
void lm_progress_show(lm_progress *progress, const char *task, int64_t item, int64_t items, const char *stage, int64_t done,
                      int64_t total);
/* Clears the line. */
void lm_progress_end(lm_progress *progress);

#endif
