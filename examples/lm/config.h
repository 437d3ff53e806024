/*
 * The model's config.json.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_CONFIG_H
#define LM_CONFIG_H

#include "error.h"

#include <stdint.h>

enum { LM_VOCABULARY = 256 }; /* tokens are bytes */

typedef struct lm_config {
    int32_t layers;
    int32_t width;        /* of the residual stream */
    int32_t heads;        /* query heads */
    int32_t kv_heads;     /* divides heads */
    int32_t head_dim;     /* of keys, queries and values */
    int32_t intermediate; /* of the gated MLP */
    int32_t taps;         /* of the causal convolution before the QKV projections */
    double alpha;         /* of the entmax in every head, >= 1 */
    double norm_epsilon;
} lm_config;

/* Reads and checks DIRECTORY/config.json. */
bool lm_config_read(const char *directory, lm_config *config, lm_error *error);

/* Floats in one token's query, and in one token's keys or values. */
static inline int32_t lm_q_width(const lm_config *config) { return config->heads * config->head_dim; }
static inline int32_t lm_kv_width(const lm_config *config) { return config->kv_heads * config->head_dim; }

#endif
