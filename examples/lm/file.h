/*
 * Whole files in memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_FILE_H
#define LM_FILE_H

#include "error.h"

#include <stddef.h>

typedef struct lm_file {
    unsigned char *bytes; /* followed by a zero byte that `size` does not count */
    size_t size;
} lm_file;

/* Reads a regular file; false, with the error naming the path, if that fails.  Release with lm_file_free(). */
bool lm_file_read(const char *path, lm_file *file, lm_error *error);
void lm_file_free(lm_file *file);

/* "directory/name" in new memory, to be released with free(); NULL with the error set. */
char *lm_file_path(const char *directory, const char *name, lm_error *error);

#endif
