/*
 * Queries, keys and values recorded from a model (entmaxkv-lm record); docs/reference-format.md describes the file.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_RECORDING_H
#define EKV_RECORDING_H

#include "entmaxkv/entmaxkv.h"
#include "safetensors.h"

typedef struct recording_layer {
    const unsigned char *k, *v; /* [length][kv_heads][k_dim or v_dim], elements of `dtype` */
    const unsigned char *q;     /* [queries][q_heads][k_dim], f32: of the last positions */
} recording_layer;

typedef struct recording {
    lm_safetensors *file;
    ekv_dtype dtype; /* of keys and values */
    int32_t layers, kv_heads, q_heads, k_dim, v_dim;
    int64_t length, queries;
    double alpha;
    float scale;
    float *slopes; /* [q_heads] */
    recording_layer *layer;
} recording;

/* Reads and checks a file; false with the error set. */
bool recording_open(const char *path, recording *r, lm_error *error);
void recording_close(recording *r); /* also after a failure */

#endif
