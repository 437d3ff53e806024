/*
 * Any bytes as a UTF-8 string: the model makes bytes, JSON wants text.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_UTF8_H
#define LM_UTF8_H

#include "error.h"

#include <stddef.h>

/* A zero-terminated copy in new memory (release with free()) in which every byte that is not part of valid UTF-8, and every
 * zero byte, is replaced by U+FFFD; NULL with the error set. */
char *lm_utf8_string(const unsigned char *bytes, size_t size, lm_error *error);

#endif
