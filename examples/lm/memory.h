/*
 * Checked allocation.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_MEMORY_H
#define LM_MEMORY_H

#include "error.h"

#include <stddef.h>

/* Zeroed memory for count elements, to be released with free(); NULL, with the error set, when the size overflows or memory is
 * out.  A count of 0 gives memory too, so that NULL always means failure. */
void *lm_alloc(size_t count, size_t element_size, lm_error *error);

#endif
