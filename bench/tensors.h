/*
 * Writing *.safetensors files.  (They are read by examples/lm/safetensors.h.)
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_TENSORS_H
#define EKV_TENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A tensor to be written; data is in this machine's byte order. */
typedef struct out_tensor {
    const char *name, *dtype; /* "F64", "I64" or "U8" */
    int rank;
    int64_t shape[4];
    const void *data;
} out_tensor;

/* A text of the header's __metadata__. */
typedef struct out_text {
    const char *name, *value;
} out_text;

/* Writes the file; false, with the reason in `error`, if that fails. */
bool tensors_write(const char *path, const out_tensor *tensors, int count, const out_text *texts, int text_count, char *error,
                   size_t error_size);

#endif
