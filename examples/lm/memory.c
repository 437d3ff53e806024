/*
 * Checked allocation (see memory.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory.h"

#include <stdlib.h>

void *lm_alloc(size_t count, size_t element_size, lm_error *error) {
    void *memory = calloc(count > 0 ? count : 1, element_size); /* calloc checks the product */
    if (memory == NULL) {
        lm_fail(error, "out of memory: %zu elements of %zu bytes", count, element_size);
    }
    return memory;
}
