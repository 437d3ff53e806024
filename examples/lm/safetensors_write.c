/*
 * Writes *.safetensors files (see safetensors_write.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "safetensors_write.h"

#include <errno.h>
#include <string.h>

bool lm_safetensors_add(cJSON *header, const char *name, const char *dtype, const int64_t *shape, int rank, double *end) {
    double bytes = strcmp(dtype, "U8") == 0 ? 1.0 : strcmp(dtype, "F32") == 0 ? 4.0 : 2.0;
    cJSON *entry = cJSON_AddObjectToObject(header, name);
    if (entry == NULL || cJSON_AddStringToObject(entry, "dtype", dtype) == NULL) {
        return false;
    }
    cJSON *sizes = cJSON_AddArrayToObject(entry, "shape"), *offsets = cJSON_AddArrayToObject(entry, "data_offsets");
    bool ok = sizes != NULL && offsets != NULL;
    for (int i = 0; ok && i < rank; i++) {
        bytes *= (double)shape[i];
        ok = cJSON_AddItemToArray(sizes, cJSON_CreateNumber((double)shape[i]));
    }
    ok = ok && cJSON_AddItemToArray(offsets, cJSON_CreateNumber(*end)) &&
         cJSON_AddItemToArray(offsets, cJSON_CreateNumber(*end + bytes));
    *end += bytes;
    return ok;
}

static bool write_header(FILE *file, const char *header) {
    size_t size = strlen(header), padded = (size + 7) / 8 * 8;
    bool ok = true;
    for (int i = 0; ok && i < 8; i++) {
        ok = fputc((int)((uint64_t)padded >> (8 * i) & 0xff), file) != EOF;
    }
    ok = ok && fputs(header, file) >= 0;
    for (; ok && size < padded; size++) {
        ok = fputc(' ', file) != EOF;
    }
    return ok;
}

bool lm_safetensors_write(const char *path, const cJSON *header, bool (*write_data)(FILE *file, void *user), void *user,
                          lm_error *error) {
    char *text = cJSON_PrintUnformatted(header);
    if (text == NULL) {
        return lm_fail(error, "out of memory while writing JSON");
    }
    FILE *file = fopen(path, "wb");
    bool ok = file != NULL && write_header(file, text) && write_data(file, user);
    int reason = errno;
    if (file != NULL && fclose(file) != 0 && ok) {
        ok = false;
        reason = errno;
    }
    cJSON_free(text);
    return ok || lm_fail(error, "cannot write %s: %s", path, strerror(reason));
}
