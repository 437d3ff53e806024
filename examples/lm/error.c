/*
 * Error texts (see error.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

bool lm_fail(lm_error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    /* Names out of a damaged or crafted file reach the terminal through here: no control characters. */
    for (char *c = error->text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
    return false;
}
