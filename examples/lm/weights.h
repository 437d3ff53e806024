/*
 * The model's weights, as float, read from model.safetensors.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_WEIGHTS_H
#define LM_WEIGHTS_H

#include "config.h"
#include "error.h"

/* One layer.  Projections that share their input are joined, one below the other, so that each pair or triple is one product.
 */
typedef struct lm_layer {
    float *attn_norm;   /* [width] */
    float *conv;        /* [taps][width]: transposed from the file, tap j sees token t - (taps - 1 - j) */
    float *qkv;         /* [q_width + 2 * kv_width][width] */
    float *length_gain; /* [heads] */
    float *o;           /* [width][q_width] */
    float *mlp_norm;    /* [width] */
    float *gate_up;     /* [2 * intermediate][width] */
    float *down;        /* [width][intermediate] */
} lm_layer;

typedef struct lm_weights {
    float *embedding; /* [LM_VOCABULARY][width], also the output matrix */
    float *norm;      /* [width] */
    float *slopes;    /* [heads] ALiBi slopes; 0 for heads without position */
    lm_layer *layers;
} lm_weights;

/* Reads DIRECTORY/model.safetensors; every tensor must be there, be F16 and have the shape that the configuration implies.  On
 * failure nothing is kept. */
bool lm_weights_read(const char *directory, const lm_config *config, lm_weights *weights, lm_error *error);
void lm_weights_free(const lm_config *config, lm_weights *weights);

#endif
