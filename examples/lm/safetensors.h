/*
 * Reads *.safetensors files and checks them: 8 bytes header length (little-endian), a JSON header, then the tensors' data.
 *
 * The file is untrusted input.  Everything that the header says is checked against the file when it is opened, and against what
 * the caller expects when a tensor is asked for; every error names the file, the tensor, what was expected and what was found.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_SAFETENSORS_H
#define LM_SAFETENSORS_H

#include "error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LM_TENSOR_MAX_RANK = 8 };

typedef struct lm_safetensors lm_safetensors;

/* Opens a file; NULL with the error set.  Refused are: a truncated file, a header that does not fit the file, is not JSON or
 * lacks a field, unknown dtypes, sizes that overflow or that dtype and shape contradict, duplicate names, and data that
 * overlaps, leaves gaps or does not end where the file does. */
lm_safetensors *lm_safetensors_open(const char *path, lm_error *error);
void lm_safetensors_close(lm_safetensors *file); /* NULL is allowed */

/* The data of a tensor that must have this dtype ("F16", "F32", "U8", ...) and shape; NULL with the error set.  Elements are
 * little-endian and not aligned: copy them out, or use the function below.  Valid until the file is closed. */
const unsigned char *lm_safetensors_data(const lm_safetensors *file, const char *name, const char *dtype, int rank,
                                         const int64_t *shape, lm_error *error);

/* A tensor whatever its dtype and shape; false, with nothing set, if there is none of that name. */
typedef struct lm_tensor {
    const char *dtype;
    int rank;
    int64_t shape[LM_TENSOR_MAX_RANK];
    const unsigned char *data; /* as above */
} lm_tensor;
bool lm_safetensors_find(const lm_safetensors *file, const char *name, lm_tensor *tensor);

/* An entry of the header's __metadata__, which maps names to texts; NULL if there is none.  Valid until the file is closed. */
const char *lm_safetensors_metadata(const lm_safetensors *file, const char *name);

/* Converts `count` little-endian f16 values; exact. */
void lm_floats_from_f16(const unsigned char *source, size_t count, float *target);

#endif
