/*
 * Error texts: a function that can fail takes an lm_error and returns false (or NULL) after writing what went wrong into it.
 * Nothing here prints; main.c does.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_ERROR_H
#define LM_ERROR_H

#include <stdbool.h>

typedef struct lm_error {
    char text[512];
} lm_error;

#if defined(__GNUC__)
#  define LM_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#  define LM_PRINTF(text, first)
#endif

/* Writes the text and returns false, so that callers can `return lm_fail(error, ...)`. */
bool lm_fail(lm_error *error, const char *format, ...) LM_PRINTF(2, 3);

#endif
