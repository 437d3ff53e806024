/*
 * Progress on stderr (see progress.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L

#include "progress.h"

#include "clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

lm_progress lm_progress_start(void) {
    lm_progress progress = {isatty(STDERR_FILENO) != 0, 0.0};
    return progress;
}

void lm_progress_show(lm_progress *progress, const char *task, int64_t item, int64_t items, const char *stage, int64_t done,
                      int64_t total) {
    if (!progress->enabled || lm_seconds() - progress->shown < 0.2) {
        return;
    }
    int64_t percent = total > 0 ? 100 * done / total : 100;
    fprintf(stderr, "\r\033[K%s %" PRId64 "/%" PRId64 ": %s %" PRId64 " %%", task, item, items, stage, percent);
    fflush(stderr);
    progress->shown = lm_seconds();
}

void lm_progress_end(lm_progress *progress) {
    if (progress->enabled) {
        fprintf(stderr, "\r\033[K");
        fflush(stderr);
    }
}
