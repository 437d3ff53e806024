/*
 * Whole files in memory (see file.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L

#include "file.h"

#include "memory.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The size of an open regular file.  Directories and pipes have none that could be trusted. */
static bool regular_size(FILE *stream, const char *path, size_t *size, lm_error *error) {
    struct stat status;
    if (fstat(fileno(stream), &status) != 0) {
        return lm_fail(error, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        return lm_fail(error, "%s: not a regular file", path);
    }
    if ((uintmax_t)status.st_size >= SIZE_MAX) {
        return lm_fail(error, "%s: too large for this machine's memory", path);
    }
    *size = (size_t)status.st_size;
    return true;
}

static bool read_stream(FILE *stream, const char *path, lm_file *file, lm_error *error) {
    if (!regular_size(stream, path, &file->size, error)) {
        return false;
    }
    file->bytes = lm_alloc(file->size + 1, 1, error);
    if (file->bytes == NULL) {
        return false;
    }
    size_t got = fread(file->bytes, 1, file->size, stream);
    if (got != file->size) {
        lm_file_free(file);
        return lm_fail(error, "%s: read %zu bytes, then: %s", path, got, ferror(stream) ? strerror(errno) : "end of file");
    }
    return true;
}

bool lm_file_read(const char *path, lm_file *file, lm_error *error) {
    file->bytes = NULL;
    file->size = 0;
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) {
        return lm_fail(error, "%s: %s", path, strerror(errno));
    }
    bool ok = read_stream(stream, path, file, error);
    fclose(stream);
    return ok;
}

void lm_file_free(lm_file *file) {
    free(file->bytes);
    file->bytes = NULL;
    file->size = 0;
}

char *lm_file_path(const char *directory, const char *name, lm_error *error) {
    size_t size = strlen(directory) + 1 + strlen(name) + 1;
    char *path = lm_alloc(size, 1, error);
    if (path != NULL) {
        snprintf(path, size, "%s/%s", directory, name);
    }
    return path;
}
