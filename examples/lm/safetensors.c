/*
 * Reads *.safetensors files and checks them (see safetensors.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "safetensors.h"

#include "file.h"
#include "json.h"
#include "memory.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PREFIX_BYTES = 8 };

typedef struct tensor {
    const char *name; /* lives in the header's JSON tree */
    const char *dtype;
    int rank;
    int64_t shape[LM_TENSOR_MAX_RANK];
    size_t begin, end; /* bytes from the start of the data */
} tensor;

struct lm_safetensors {
    char *path;
    lm_file file;
    const unsigned char *data;
    size_t data_size;
    cJSON *header;
    tensor *tensors; /* by name */
    size_t count;
};

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
    {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8},
};

/* 0 for an unknown dtype. */
static size_t dtype_size(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            return dtypes[i].size;
        }
    }
    return 0;
}

static bool read_dtype(const lm_safetensors *file, tensor *t, const cJSON *json, lm_error *error) {
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(json, "dtype");
    if (!cJSON_IsString(dtype)) {
        return lm_fail(error, "%s: tensor %s: the header gives no dtype", file->path, t->name);
    }
    if (dtype_size(dtype->valuestring) == 0) {
        return lm_fail(error, "%s: tensor %s: unknown dtype \"%.32s\"", file->path, t->name, dtype->valuestring);
    }
    t->dtype = dtype->valuestring;
    return true;
}

static bool read_shape(const lm_safetensors *file, tensor *t, const cJSON *json, lm_error *error) {
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
    if (!cJSON_IsArray(shape)) {
        return lm_fail(error, "%s: tensor %s: the header gives no shape", file->path, t->name);
    }
    const cJSON *item;
    cJSON_ArrayForEach(item, shape) {
        if (t->rank == LM_TENSOR_MAX_RANK) {
            return lm_fail(error, "%s: tensor %s: more than %d dimensions", file->path, t->name, LM_TENSOR_MAX_RANK);
        }
        if (!lm_json_integer(item, 0, LM_JSON_MAX_INTEGER, &t->shape[t->rank])) {
            return lm_fail(error, "%s: tensor %s: dimension %d: expected a whole number from 0 to 2^53, found %g", file->path,
                           t->name, t->rank, cJSON_IsNumber(item) ? item->valuedouble : NAN);
        }
        t->rank++;
    }
    return true;
}

static bool read_offsets(const lm_safetensors *file, tensor *t, const cJSON *json, lm_error *error) {
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(json, "data_offsets");
    int64_t begin, end;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !lm_json_integer(cJSON_GetArrayItem(offsets, 0), 0, LM_JSON_MAX_INTEGER, &begin) ||
        !lm_json_integer(cJSON_GetArrayItem(offsets, 1), 0, LM_JSON_MAX_INTEGER, &end)) {
        return lm_fail(error, "%s: tensor %s: data_offsets are not two whole numbers from 0 to 2^53", file->path, t->name);
    }
    if (begin > end) {
        return lm_fail(error, "%s: tensor %s: its data begins at byte %" PRId64 ", after its end at %" PRId64, file->path,
                       t->name, begin, end);
    }
    if ((uint64_t)end > file->data_size) {
        return lm_fail(error,
                       "%s: tensor %s: its data ends at byte %" PRId64 ", but the file holds %zu bytes of data (truncated?)",
                       file->path, t->name, end, file->data_size);
    }
    t->begin = (size_t)begin;
    t->end = (size_t)end;
    return true;
}

/* Bytes of a tensor of this shape; false if that is no size_t. */
static bool shape_bytes(const tensor *t, size_t *bytes) {
    *bytes = dtype_size(t->dtype);
    for (int i = 0; i < t->rank; i++) {
        uint64_t dimension = (uint64_t)t->shape[i];
        if (dimension != 0 && *bytes > SIZE_MAX / dimension) {
            return false;
        }
        *bytes *= (size_t)dimension;
    }
    return true;
}

static void describe_shape(int rank, const int64_t *shape, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < rank && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%" PRId64, i > 0 ? ", " : "", shape[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
}

static bool read_tensor(const lm_safetensors *file, tensor *t, const cJSON *json, lm_error *error) {
    t->name = json->string;
    if (!cJSON_IsObject(json)) {
        return lm_fail(error, "%s: tensor %s: its entry in the header is not an object", file->path, t->name);
    }
    if (!read_dtype(file, t, json, error) || !read_shape(file, t, json, error) || !read_offsets(file, t, json, error)) {
        return false;
    }
    char shape[128];
    describe_shape(t->rank, t->shape, shape, sizeof shape);
    size_t bytes;
    if (!shape_bytes(t, &bytes)) {
        return lm_fail(error, "%s: tensor %s: the size of %s %s overflows", file->path, t->name, t->dtype, shape);
    }
    if (bytes != t->end - t->begin) {
        return lm_fail(error, "%s: tensor %s: %s %s takes %zu bytes, but data_offsets span %zu", file->path, t->name, t->dtype,
                       shape, bytes, t->end - t->begin);
    }
    return true;
}

static int compare_offsets(const void *left, const void *right) {
    const tensor *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return (a->end > b->end) - (a->end < b->end); /* empty tensors first: they overlap nothing */
}

static int compare_names(const void *left, const void *right) {
    const tensor *a = left, *b = right;
    return strcmp(a->name, b->name);
}

/* The format allows neither overlaps nor gaps.  Both are the mark of a damaged or a crafted file. */
static bool check_coverage(lm_safetensors *file, lm_error *error) {
    qsort(file->tensors, file->count, sizeof(tensor), compare_offsets);
    size_t end = 0;
    for (size_t i = 0; i < file->count; i++) {
        const tensor *t = &file->tensors[i];
        if (t->begin != end) {
            return lm_fail(error, "%s: tensor %s: its data begins at byte %zu, expected %zu (%s)", file->path, t->name,
                           t->begin, end, t->begin < end ? "it overlaps the tensor before it" : "a gap lies before it");
        }
        end = t->end;
    }
    if (end != file->data_size) {
        return lm_fail(error, "%s: the tensors end at byte %zu of the data, but the file holds %zu", file->path, end,
                       file->data_size);
    }
    return true;
}

static bool sort_names(lm_safetensors *file, lm_error *error) {
    qsort(file->tensors, file->count, sizeof(tensor), compare_names);
    for (size_t i = 1; i < file->count; i++) {
        if (compare_names(&file->tensors[i - 1], &file->tensors[i]) == 0) {
            return lm_fail(error, "%s: tensor %s: its name stands twice in the header", file->path, file->tensors[i].name);
        }
    }
    return true;
}

static bool parse_header(lm_safetensors *file, lm_error *error) {
    const unsigned char *bytes = file->file.bytes;
    size_t size = file->file.size;
    if (size < PREFIX_BYTES) {
        return lm_fail(error, "%s: %zu bytes are too few for a safetensors file (truncated?)", file->path, size);
    }
    uint64_t header_size = 0;
    for (int i = PREFIX_BYTES; i-- > 0;) {
        header_size = header_size << 8 | bytes[i];
    }
    if (header_size > size - PREFIX_BYTES) {
        return lm_fail(error,
                       "%s: the header is said to take %" PRIu64 " bytes, but only %zu follow (truncated, or not safetensors)",
                       file->path, header_size, size - PREFIX_BYTES);
    }
    file->header = lm_json_parse(file->path, "header", (const char *)bytes + PREFIX_BYTES, (size_t)header_size, error);
    file->data = bytes + PREFIX_BYTES + header_size;
    file->data_size = size - PREFIX_BYTES - (size_t)header_size;
    return file->header != NULL;
}

static bool read_tensors(lm_safetensors *file, lm_error *error) {
    file->tensors = lm_alloc((size_t)cJSON_GetArraySize(file->header), sizeof(tensor), error);
    if (file->tensors == NULL) {
        return false;
    }
    const cJSON *item;
    cJSON_ArrayForEach(item, file->header) {
        if (strcmp(item->string, "__metadata__") == 0) {
            continue;
        }
        if (!read_tensor(file, &file->tensors[file->count], item, error)) {
            return false;
        }
        file->count++;
    }
    return check_coverage(file, error) && sort_names(file, error);
}

static bool open_file(lm_safetensors *file, const char *path, lm_error *error) {
    file->path = lm_alloc(strlen(path) + 1, 1, error);
    if (file->path == NULL) {
        return false;
    }
    memcpy(file->path, path, strlen(path));
    return lm_file_read(path, &file->file, error) && parse_header(file, error) && read_tensors(file, error);
}

lm_safetensors *lm_safetensors_open(const char *path, lm_error *error) {
    lm_safetensors *file = lm_alloc(1, sizeof *file, error);
    if (file != NULL && !open_file(file, path, error)) {
        lm_safetensors_close(file);
        file = NULL;
    }
    return file;
}

void lm_safetensors_close(lm_safetensors *file) {
    if (file != NULL) {
        cJSON_Delete(file->header);
        lm_file_free(&file->file);
        free(file->tensors);
        free(file->path);
        free(file);
    }
}

static bool same_shape(const tensor *t, int rank, const int64_t *shape) {
    if (t->rank != rank) {
        return false;
    }
    for (int i = 0; i < rank; i++) {
        if (t->shape[i] != shape[i]) {
            return false;
        }
    }
    return true;
}

const unsigned char *lm_safetensors_data(const lm_safetensors *file, const char *name, const char *dtype, int rank,
                                         const int64_t *shape, lm_error *error) {
    tensor key = {.name = name};
    const tensor *t = bsearch(&key, file->tensors, file->count, sizeof(tensor), compare_names);
    char expected[128], found[128];
    describe_shape(rank, shape, expected, sizeof expected);
    if (t == NULL) {
        lm_fail(error, "%s: tensor %s: expected %s %s, found no tensor of that name", file->path, name, dtype, expected);
        return NULL;
    }
    describe_shape(t->rank, t->shape, found, sizeof found);
    if (strcmp(t->dtype, dtype) != 0) {
        lm_fail(error, "%s: tensor %s: expected dtype %s, found %s (shape %s)", file->path, name, dtype, t->dtype, found);
        return NULL;
    }
    if (!same_shape(t, rank, shape)) {
        lm_fail(error, "%s: tensor %s: expected shape %s, found %s", file->path, name, expected, found);
        return NULL;
    }
    return file->data + t->begin;
}

bool lm_safetensors_find(const lm_safetensors *file, const char *name, lm_tensor *found) {
    tensor key = {.name = name};
    const tensor *t = bsearch(&key, file->tensors, file->count, sizeof(tensor), compare_names);
    if (t == NULL) {
        return false;
    }
    found->dtype = t->dtype;
    found->rank = t->rank;
    memcpy(found->shape, t->shape, sizeof found->shape);
    found->data = file->data + t->begin;
    return true;
}

const char *lm_safetensors_metadata(const lm_safetensors *file, const char *name) {
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(file->header, "__metadata__");
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, name));
}

/* Exact for every f16 value: the exponent is moved from bias 15 to bias 127, and subnormals are scaled by a power of two. */
static float float_from_f16(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, fraction = half & 0x3ffu;
    if (exponent == 0) {
        float magnitude = (float)fraction * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    uint32_t wide = exponent == 0x1f ? 0xffu : exponent + (127 - 15);
    uint32_t bits = sign | wide << 23 | fraction << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void lm_floats_from_f16(const unsigned char *source, size_t count, float *target) {
    for (size_t i = 0; i < count; i++) {
        target[i] = float_from_f16(source[2 * i] | (uint32_t)source[2 * i + 1] << 8);
    }
}
