/*
 * Task record (see tasks.h): prefill, then a safetensors file, written tensor by tensor from the cache.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tasks.h"

#include "memory.h"
#include "progress.h"
#include "safetensors_write.h"
#include "setup.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const dtype_names[] = {[EKV_F32] = "F32", [EKV_F16] = "F16", [EKV_BF16] = "BF16"};

/* ---- the header ---- */

static bool add_text(cJSON *object, const char *name, const char *format, double number) {
    char text[40];
    snprintf(text, sizeof text, format, number);
    return cJSON_AddStringToObject(object, name, text) != NULL;
}

static bool add_metadata(cJSON *header, const lm_config *config, const lm_options *options) {
    cJSON *metadata = cJSON_AddObjectToObject(header, "__metadata__");
    return metadata != NULL && cJSON_AddStringToObject(metadata, "format", "entmaxkv-recording") != NULL &&
           add_text(metadata, "layers", "%.0f", config->layers) && add_text(metadata, "alpha", "%.17g", config->alpha) &&
           add_text(metadata, "scale", "%.9g", 1.0 / sqrt((double)config->head_dim)) &&
           add_text(metadata, "text_offset", "%.0f", (double)options->offset);
}

/* The order of the entries is the order of the data. */
static bool add_tensors(cJSON *header, const lm_config *config, const lm_options *options) {
    const int64_t rows[3] = {options->length, config->kv_heads, config->head_dim};
    const int64_t queries[3] = {options->queries, config->heads, config->head_dim}, heads[1] = {config->heads};
    const char *dtype = dtype_names[options->kv_type];
    double end = 0.0;
    bool ok = lm_safetensors_add(header, "slopes", "F32", heads, 1, &end);
    for (int32_t layer = 0; ok && layer < config->layers; layer++) {
        char k[32], v[32], q[32];
        snprintf(k, sizeof k, "layers.%d.k", layer);
        snprintf(v, sizeof v, "layers.%d.v", layer);
        snprintf(q, sizeof q, "layers.%d.q", layer);
        ok = lm_safetensors_add(header, k, dtype, rows, 3, &end) && lm_safetensors_add(header, v, dtype, rows, 3, &end) &&
             lm_safetensors_add(header, q, "F32", queries, 3, &end);
    }
    return ok;
}

/* ---- the data ---- */

/* Elements of 2 or 4 bytes, least byte first whatever the machine. */
static bool write_elements(FILE *file, const void *elements, int64_t count, size_t bytes) {
    unsigned char buffer[4096];
    for (int64_t done = 0; done < count;) {
        size_t used = 0;
        for (; done < count && used + bytes <= sizeof buffer; done++) {
            const char *at = (const char *)elements + (size_t)done * bytes;
            uint32_t wide = 0;
            uint16_t narrow;
            memcpy(bytes == 4 ? (void *)&wide : (void *)&narrow, at, bytes);
            if (bytes == 2) {
                wide = narrow;
            }
            for (size_t b = 0; b < bytes; b++) {
                buffer[used++] = (unsigned char)(wide >> (8 * b));
            }
        }
        if (fwrite(buffer, 1, used, file) != used) {
            return false;
        }
    }
    return true;
}

/* One layer's keys or values, [length][kv_heads][dim], from the blocks of the cache. */
static bool write_rows(FILE *file, const lm_state *state, const ekv_kv *kv, bool values, int64_t length) {
    const int32_t *table = ekv_cache_block_table(state->cache, state->sequence);
    const char *base = values ? kv->v : kv->k;
    int64_t block_stride = values ? kv->v_block_stride : kv->k_block_stride;
    int64_t token_stride = values ? kv->v_token_stride : kv->k_token_stride;
    int64_t head_stride = values ? kv->v_head_stride : kv->k_head_stride;
    size_t bytes = kv->dtype == EKV_F32 ? 4 : 2;
    for (int64_t t = 0; t < length; t++) {
        for (int32_t h = 0; h < kv->kv_heads; h++) {
            int64_t element = table[t / kv->page_size] * block_stride + t % kv->page_size * token_stride + h * head_stride;
            if (!write_elements(file, base + element * (int64_t)bytes, values ? kv->v_dim : kv->k_dim, bytes)) {
                return false;
            }
        }
    }
    return true;
}

/* What write_layers needs. */
typedef struct recording {
    const lm_model *model;
    const lm_state *state;
    int64_t length;
} recording;

static bool write_layers(FILE *file, void *user) {
    const recording *r = user;
    const lm_queries *queries = r->state->queries;
    int64_t q_floats = queries->count * lm_q_width(&r->model->config);
    bool ok = write_elements(file, r->model->weights.slopes, r->model->config.heads, 4);
    for (int32_t layer = 0; ok && layer < r->model->config.layers; layer++) {
        ekv_kv kv;
        ok = ekv_cache_layer(r->state->cache, layer, &kv, NULL) == EKV_OK && write_rows(file, r->state, &kv, false, r->length) &&
             write_rows(file, r->state, &kv, true, r->length) &&
             write_elements(file, queries->rows + layer * q_floats, q_floats, 4);
    }
    return ok;
}

static bool write_file(const lm_model *model, const lm_options *options, const lm_state *state, lm_error *error) {
    recording r = {model, state, options->length};
    cJSON *header = cJSON_CreateObject();
    bool ok = header != NULL && add_metadata(header, &model->config, options) && add_tensors(header, &model->config, options);
    ok = ok ? lm_safetensors_write(options->out, header, write_layers, &r, error)
            : lm_fail(error, "out of memory while writing JSON");
    cJSON_Delete(header);
    return ok;
}

/* ---- the task ---- */

static bool prefill(const lm_model *model, lm_state *state, const uint8_t *ids, int64_t length, lm_error *error) {
    lm_progress progress = lm_progress_start();
    bool ok = true;
    for (int64_t done = 0; ok && done < length; done += LM_CHUNK) {
        int64_t count = length - done < LM_CHUNK ? length - done : LM_CHUNK;
        ok = lm_model_forward(model, state, ids + done, count, NULL, error);
        lm_progress_show(&progress, "recording", 1, 1, "prefill", done + count, length);
    }
    lm_progress_end(&progress);
    return ok;
}

bool lm_record(const lm_model *model, const lm_options *options, lm_error *error) {
    lm_file text;
    if (!lm_setup_text(options, &text, error)) {
        return false;
    }
    lm_queries queries = {options->length - options->queries, options->queries, NULL};
    lm_state *state = NULL;
    bool ok = lm_setup_check_text(options, &text, error);
    if (ok) {
        size_t rows = (size_t)model->config.layers * (size_t)options->queries;
        queries.rows = lm_alloc(rows * (size_t)lm_q_width(&model->config), sizeof(float), error);
        state = queries.rows != NULL ? lm_setup_state(model, options, options->length, error) : NULL;
        ok = state != NULL;
    }
    if (ok) {
        state->queries = &queries;
        ok = prefill(model, state, text.bytes + options->offset, options->length, error) &&
             write_file(model, options, state, error);
    }
    lm_state_free(state);
    free(queries.rows);
    lm_file_free(&text);
    return ok;
}
