/*
 * Writing *.safetensors files (see tensors.h): 8 bytes of header length, a JSON header padded to a multiple of 8, the data.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static size_t element_bytes(const out_tensor *t) { return strcmp(t->dtype, "U8") == 0 ? 1 : 8; }

static size_t element_count(const out_tensor *t) {
    size_t count = 1;
    for (int i = 0; i < t->rank; i++) count *= (size_t)t->shape[i];
    return count;
}

static char *make_header(const out_tensor *tensors, int count, const out_text *texts, int text_count) {
    cJSON *json = cJSON_CreateObject(), *metadata = cJSON_AddObjectToObject(json, "__metadata__");
    size_t offset = 0;
    for (int i = 0; i < text_count; i++) cJSON_AddStringToObject(metadata, texts[i].name, texts[i].value);
    for (int i = 0; i < count; i++) {
        const out_tensor *t = &tensors[i];
        cJSON *entry = cJSON_AddObjectToObject(json, t->name), *shape, *offsets;
        cJSON_AddStringToObject(entry, "dtype", t->dtype);
        shape = cJSON_AddArrayToObject(entry, "shape");
        for (int d = 0; d < t->rank; d++) cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[d]));
        offsets = cJSON_AddArrayToObject(entry, "data_offsets");
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
        offset += element_count(t) * element_bytes(t);
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)offset));
    }
    char *text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    return text;
}

static bool write_number(FILE *file, uint64_t x) {
    for (int i = 0; i < 8; i++)
        if (fputc((int)(x >> (8 * i) & 0xff), file) == EOF) return false;
    return true;
}

/* Elements of eight bytes are written least byte first, whatever the machine. */
static bool write_data(FILE *file, const out_tensor *t) {
    const size_t count = element_count(t);
    if (element_bytes(t) == 1) return fwrite(t->data, 1, count, file) == count;
    for (size_t i = 0; i < count; i++) {
        uint64_t x;
        memcpy(&x, (const char *)t->data + 8 * i, sizeof x);
        if (!write_number(file, x)) return false;
    }
    return true;
}

static bool write_all(FILE *file, const char *header, const out_tensor *tensors, int count) {
    const size_t length = strlen(header), padding = (8 - length % 8) % 8;
    bool ok = write_number(file, length + padding) && fputs(header, file) >= 0;
    for (size_t i = 0; i < padding && ok; i++) ok = fputc(' ', file) != EOF;
    for (int i = 0; i < count && ok; i++) ok = write_data(file, &tensors[i]);
    return ok;
}

bool tensors_write(const char *path, const out_tensor *tensors, int count, const out_text *texts, int text_count, char *error,
                   size_t error_size) {
    char *header = make_header(tensors, count, texts, text_count);
    FILE *file = header ? fopen(path, "wb") : NULL;
    bool ok = file && write_all(file, header, tensors, count);
    if (file && fclose(file) != 0) ok = false;
    if (!ok) snprintf(error, error_size, "cannot write %s: %s", path, header ? strerror(errno) : "out of memory");
    cJSON_free(header);
    return ok;
}
