/*
 * Reads recordings (see recording.h).  The file is untrusted input: shapes are checked against each other.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "recording.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool read_number(const recording *r, const char *path, const char *name, double least, double most, double *value,
                        lm_error *error) {
    const char *text = lm_safetensors_metadata(r->file, name);
    char *end = NULL;
    if (!text) return lm_fail(error, "%s: metadata %s is missing: not a recording of entmaxkv-lm", path, name);
    *value = strtod(text, &end);
    if (end == text || *end || !(*value >= least && *value <= most))
        return lm_fail(error, "%s: metadata %s is \"%s\": expected a number from %g to %g", path, name, text, least, most);
    return true;
}

/* The first layer's tensors say how large all are. */
static bool read_shape(recording *r, const char *path, lm_error *error) {
    lm_tensor k, v, q;
    if (!lm_safetensors_find(r->file, "layers.0.k", &k) || !lm_safetensors_find(r->file, "layers.0.v", &v) ||
        !lm_safetensors_find(r->file, "layers.0.q", &q))
        return lm_fail(error, "%s: expected the tensors layers.0.k, layers.0.v and layers.0.q", path);
    if (k.rank != 3 || v.rank != 3 || q.rank != 3)
        return lm_fail(error, "%s: layers.0.k, .v and .q have %d, %d and %d dimensions: expected 3", path, k.rank, v.rank, q.rank);
    static const char *const dtypes[] = {"F32", "F16", "BF16"};
    int dtype = 0;
    while (dtype < 3 && strcmp(dtypes[dtype], k.dtype) != 0) dtype++;
    if (dtype == 3) return lm_fail(error, "%s: tensor layers.0.k: expected F32, F16 or BF16, found %s", path, k.dtype);
    const int64_t sizes[5] = {k.shape[1], q.shape[1], k.shape[2], v.shape[2], k.shape[0]};
    for (int i = 0; i < 5; i++)
        if (sizes[i] < 1 || sizes[i] > (i < 2 ? 65536 : i < 4 ? EKV_MAX_DIM : INT32_MAX))
            return lm_fail(error, "%s: tensors of layer 0: a size of %" PRId64 " is out of range", path, sizes[i]);
    r->dtype = (ekv_dtype)dtype;
    r->kv_heads = (int32_t)k.shape[1];
    r->q_heads = (int32_t)q.shape[1];
    r->k_dim = (int32_t)k.shape[2];
    r->v_dim = (int32_t)v.shape[2];
    r->length = k.shape[0];
    r->queries = q.shape[0];
    if (r->q_heads % r->kv_heads)
        return lm_fail(error, "%s: %d query heads are not a multiple of %d KV heads", path, r->q_heads, r->kv_heads);
    if (r->queries < 1 || r->queries > r->length)
        return lm_fail(error, "%s: queries of %" PRId64 " positions for a length of %" PRId64, path, r->queries, r->length);
    return true;
}

static const unsigned char *tensor(const recording *r, int32_t layer, const char *name, const char *dtype, int64_t rows,
                                   int32_t heads, int32_t dim, lm_error *error) {
    const int64_t shape[3] = {rows, heads, dim};
    char full[48];
    snprintf(full, sizeof full, "layers.%d.%s", layer, name);
    return lm_safetensors_data(r->file, full, dtype, 3, shape, error);
}

static bool read_layers(recording *r, lm_error *error) {
    static const char *const dtypes[] = {"F32", "F16", "BF16"};
    r->layer = calloc((size_t)r->layers, sizeof *r->layer);
    if (!r->layer) return lm_fail(error, "out of memory");
    for (int32_t i = 0; i < r->layers; i++) {
        recording_layer *l = &r->layer[i];
        l->k = tensor(r, i, "k", dtypes[r->dtype], r->length, r->kv_heads, r->k_dim, error);
        l->v = l->k ? tensor(r, i, "v", dtypes[r->dtype], r->length, r->kv_heads, r->v_dim, error) : NULL;
        l->q = l->v ? tensor(r, i, "q", "F32", r->queries, r->q_heads, r->k_dim, error) : NULL;
        if (!l->q) return false;
    }
    return true;
}

static bool read_slopes(recording *r, const char *path, lm_error *error) {
    const int64_t heads[1] = {r->q_heads};
    const unsigned char *data = lm_safetensors_data(r->file, "slopes", "F32", 1, heads, error);
    if (!data) return false;
    r->slopes = malloc((size_t)r->q_heads * sizeof *r->slopes);
    if (!r->slopes) return lm_fail(error, "out of memory");
    memcpy(r->slopes, data, (size_t)r->q_heads * sizeof *r->slopes);
    for (int32_t h = 0; h < r->q_heads; h++)
        if (!isfinite(r->slopes[h]))
            return lm_fail(error, "%s: tensor slopes: element %d is %g, not finite", path, h, (double)r->slopes[h]);
    return true;
}

bool recording_open(const char *path, recording *r, lm_error *error) {
    double layers = 0, scale = 0;
    *r = (recording){0};
    r->file = lm_safetensors_open(path, error);
    if (!r->file || !read_number(r, path, "layers", 1, 65536, &layers, error) ||
        !read_number(r, path, "alpha", 1, 1e6, &r->alpha, error) || !read_number(r, path, "scale", 1e-30, 1e30, &scale, error) ||
        !read_shape(r, path, error))
        return false;
    r->layers = (int32_t)layers;
    r->scale = (float)scale;
    return read_layers(r, error) && read_slopes(r, path, error);
}

void recording_close(recording *r) {
    lm_safetensors_close(r->file);
    free(r->slopes);
    free(r->layer);
    *r = (recording){0};
}
