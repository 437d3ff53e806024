/*
 * Any bytes as a UTF-8 string (see utf8.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "utf8.h"

#include "memory.h"

#include <stdint.h>
#include <string.h>

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */
enum { REPLACEMENT_BYTES = sizeof replacement - 1 };

/* The range of the second byte excludes overlong forms, surrogates and values above U+10FFFF (Unicode, table 3-7). */
static bool second_byte_fits(unsigned char first, unsigned char second) {
    unsigned char least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    unsigned char most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    return second >= least && second <= most;
}

/* Bytes of the character that begins here; 0 if it is not valid. */
static size_t character_bytes(const unsigned char *bytes, size_t left) {
    unsigned char first = bytes[0];
    size_t length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
    if (first == 0 || length > left || (length > 1 && !second_byte_fits(first, bytes[1]))) {
        return 0;
    }
    for (size_t i = 2; i < length; i++) {
        if ((bytes[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    return length;
}

char *lm_utf8_string(const unsigned char *bytes, size_t size, lm_error *error) {
    if (size > SIZE_MAX / REPLACEMENT_BYTES - 1) {
        lm_fail(error, "%zu bytes are too many for one string", size);
        return NULL;
    }
    char *text = lm_alloc(REPLACEMENT_BYTES * size + 1, 1, error);
    size_t used = 0;
    for (size_t i = 0; text != NULL && i < size;) {
        size_t length = character_bytes(bytes + i, size - i);
        memcpy(text + used, length > 0 ? bytes + i : (const unsigned char *)replacement,
               length > 0 ? length : REPLACEMENT_BYTES);
        used += length > 0 ? length : REPLACEMENT_BYTES;
        i += length > 0 ? length : 1;
    }
    return text;
}
