/*
 * The model's weights (see weights.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "weights.h"

#include "file.h"
#include "memory.h"
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Reads tensors one after the other until the first error. */
typedef struct reader {
    const lm_safetensors *file;
    lm_error *error;
    int layer; /* -1: names are used as they are, else they follow "layers.N." */
    bool ok;
} reader;

/* columns = 0: a vector of `rows`. */
static void read_into(reader *r, const char *name, int64_t rows, int64_t columns, float *target) {
    if (!r->ok) {
        return;
    }
    char full_name[96];
    if (r->layer >= 0) {
        snprintf(full_name, sizeof full_name, "layers.%d.%s", r->layer, name);
    } else {
        snprintf(full_name, sizeof full_name, "%s", name);
    }
    int64_t shape[2] = {rows, columns};
    int rank = columns > 0 ? 2 : 1;
    const unsigned char *data = lm_safetensors_data(r->file, full_name, "F16", rank, shape, r->error);
    r->ok = data != NULL;
    if (r->ok) {
        lm_floats_from_f16(data, (size_t)(columns > 0 ? rows * columns : rows), target);
    }
}

static float *allocate(reader *r, int64_t rows, int64_t columns) {
    float *memory = r->ok ? lm_alloc((size_t)(columns > 0 ? rows * columns : rows), sizeof(float), r->error) : NULL;
    r->ok = memory != NULL;
    return memory;
}

static float *read_new(reader *r, const char *name, int64_t rows, int64_t columns) {
    float *target = allocate(r, rows, columns);
    read_into(r, name, rows, columns, target);
    return target;
}

/* The file holds [width][taps]; the convolution runs along the width, so that must be innermost. */
static void read_convolution(reader *r, const lm_config *config, lm_layer *layer) {
    layer->conv = allocate(r, config->taps, config->width);
    float *by_channel = read_new(r, "attn_conv.weight", config->width, config->taps);
    for (int32_t c = 0; r->ok && c < config->width; c++) {
        for (int32_t j = 0; j < config->taps; j++) {
            layer->conv[(int64_t)j * config->width + c] = by_channel[(int64_t)c * config->taps + j];
        }
    }
    free(by_channel);
}

static void read_layer(reader *r, const lm_config *config, lm_layer *layer) {
    int64_t width = config->width, q_width = lm_q_width(config), kv_width = lm_kv_width(config), inner = config->intermediate;
    layer->attn_norm = read_new(r, "attn_norm.weight", width, 0);
    read_convolution(r, config, layer);
    layer->qkv = allocate(r, q_width + 2 * kv_width, width);
    read_into(r, "q_proj.weight", q_width, width, layer->qkv);
    read_into(r, "k_proj.weight", kv_width, width, layer->qkv + q_width * width);
    read_into(r, "v_proj.weight", kv_width, width, layer->qkv + (q_width + kv_width) * width);
    layer->length_gain = read_new(r, "length_gain", config->heads, 0);
    layer->o = read_new(r, "o_proj.weight", width, q_width);
    layer->mlp_norm = read_new(r, "mlp_norm.weight", width, 0);
    layer->gate_up = allocate(r, 2 * inner, width);
    read_into(r, "gate_proj.weight", inner, width, layer->gate_up);
    read_into(r, "up_proj.weight", inner, width, layer->gate_up + inner * width);
    layer->down = read_new(r, "down_proj.weight", width, inner);
}

static bool read_all(const lm_safetensors *file, const lm_config *config, lm_weights *weights, lm_error *error) {
    weights->layers = lm_alloc((size_t)config->layers, sizeof(lm_layer), error);
    reader r = {file, error, -1, weights->layers != NULL};
    weights->embedding = read_new(&r, "embed.weight", LM_VOCABULARY, config->width);
    weights->norm = read_new(&r, "norm.weight", config->width, 0);
    weights->slopes = read_new(&r, "alibi_slopes", config->heads, 0);
    for (r.layer = 0; r.ok && r.layer < config->layers; r.layer++) {
        read_layer(&r, config, &weights->layers[r.layer]);
    }
    return r.ok;
}

bool lm_weights_read(const char *directory, const lm_config *config, lm_weights *weights, lm_error *error) {
    memset(weights, 0, sizeof *weights);
    char *path = lm_file_path(directory, "model.safetensors", error);
    lm_safetensors *file = path != NULL ? lm_safetensors_open(path, error) : NULL;
    bool ok = file != NULL && read_all(file, config, weights, error);
    if (!ok) {
        lm_weights_free(config, weights);
    }
    lm_safetensors_close(file);
    free(path);
    return ok;
}

static void free_layer(lm_layer *layer) {
    free(layer->attn_norm);
    free(layer->conv);
    free(layer->qkv);
    free(layer->length_gain);
    free(layer->o);
    free(layer->mlp_norm);
    free(layer->gate_up);
    free(layer->down);
}

void lm_weights_free(const lm_config *config, lm_weights *weights) {
    for (int32_t i = 0; weights->layers != NULL && i < config->layers; i++) {
        free_layer(&weights->layers[i]);
    }
    free(weights->layers);
    free(weights->embedding);
    free(weights->norm);
    free(weights->slopes);
    memset(weights, 0, sizeof *weights);
}
