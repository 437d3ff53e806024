/*
 * Files of bases (see basis.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "basis.h"

#include "memory.h"
#include "safetensors.h"
#include "safetensors_write.h"

#include <stdlib.h>
#include <string.h>

static const char format[] = "entmaxkv-basis";

static void layer_name(char name[32], int32_t layer) { snprintf(name, 32, "layer.%d", layer); }

static const ekv_index *index_of(const lm_state *state, int32_t layer) {
    const ekv_index *index = NULL;
    ekv_cache_layer(state->cache, layer, NULL, &index);
    return index;
}

/* All layers' bases, one after the other. */
typedef struct bases {
    unsigned char *bytes;
    size_t size;
} bases;

static bool write_bytes(FILE *file, void *user) {
    const bases *b = user;
    return fwrite(b->bytes, 1, b->size, file) == b->size;
}

static bool collect(const lm_state *state, bases *b, lm_error *error) {
    int32_t layers = state->config.layers;
    size_t each = ekv_index_basis_bytes(index_of(state, 0));
    b->size = (size_t)layers * each;
    b->bytes = lm_alloc(b->size, 1, error);
    bool ok = b->bytes != NULL;
    for (int32_t layer = 0; ok && layer < layers; layer++) {
        ok = ekv_index_save_basis(state->context, index_of(state, layer), b->bytes + (size_t)layer * each, each) == EKV_OK ||
             lm_fail(error, "layer %d: cannot save the basis: %s", layer, ekv_last_error(state->context));
    }
    return ok;
}

static bool describe(const lm_state *state, cJSON *header) {
    cJSON *metadata = cJSON_AddObjectToObject(header, "__metadata__");
    bool ok = metadata != NULL && cJSON_AddStringToObject(metadata, "format", format) != NULL;
    double end = 0.0;
    for (int32_t layer = 0; ok && layer < state->config.layers; layer++) {
        const int64_t shape[1] = {(int64_t)ekv_index_basis_bytes(index_of(state, layer))};
        char name[32];
        layer_name(name, layer);
        ok = lm_safetensors_add(header, name, "U8", shape, 1, &end);
    }
    return ok;
}

bool lm_basis_write(const lm_state *state, const char *path, lm_error *error) {
    bases b = {NULL, 0};
    cJSON *header = cJSON_CreateObject();
    bool ok = collect(state, &b, error) &&
              ((header != NULL && describe(state, header)) || lm_fail(error, "out of memory while writing JSON")) &&
              lm_safetensors_write(path, header, write_bytes, &b, error);
    cJSON_Delete(header);
    free(b.bytes);
    return ok;
}

bool lm_basis_load(lm_state *state, const char *path, lm_error *error) {
    lm_safetensors *file = lm_safetensors_open(path, error);
    if (file == NULL) {
        return false;
    }
    const char *found = lm_safetensors_metadata(file, "format");
    bool ok = (found != NULL && strcmp(found, format) == 0) ||
              lm_fail(error, "%s: its metadata do not say \"format\": \"%s\": not a file of bases", path, format);
    for (int32_t layer = 0; ok && layer < state->config.layers; layer++) {
        const int64_t shape[1] = {(int64_t)ekv_index_basis_bytes(index_of(state, layer))};
        char name[32];
        layer_name(name, layer);
        const unsigned char *bytes = lm_safetensors_data(file, name, "U8", 1, shape, error);
        ok = bytes != NULL && (ekv_cache_load_basis(state->context, state->cache, layer, bytes, (size_t)shape[0]) == EKV_OK ||
                               lm_fail(error, "%s: tensor %s: %s", path, name, ekv_last_error(state->context)));
    }
    lm_safetensors_close(file);
    return ok;
}
