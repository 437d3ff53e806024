/*
 * Writes *.safetensors files: a JSON header that is built entry by entry, then the caller's data in the same order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_SAFETENSORS_WRITE_H
#define LM_SAFETENSORS_WRITE_H

#include "error.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Adds a tensor's entry ("U8", or an f32 or 16-bit dtype); *end is where the data so far ends.  False when memory is out. */
bool lm_safetensors_add(cJSON *header, const char *name, const char *dtype, const int64_t *shape, int rank, double *end);

/* Writes path: eight bytes of header length, the header with spaces up to a multiple of eight, and what write_data writes. */
bool lm_safetensors_write(const char *path, const cJSON *header, bool (*write_data)(FILE *file, void *user), void *user,
                          lm_error *error);

#endif
