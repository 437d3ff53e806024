/*
 * The two things about JSON input that cJSON leaves to its caller: saying where a text is wrong, and whole numbers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_JSON_H
#define LM_JSON_H

#include "error.h"

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

/* cJSON keeps numbers as doubles: whole numbers above 2^53 have lost their last digits already. */
#define LM_JSON_MAX_INTEGER ((int64_t)1 << 53)

/* Parses a text that must be one object and nothing more; NULL with the error set.  path and part ("header") name it in errors.
 * Release with cJSON_Delete(). */
cJSON *lm_json_parse(const char *path, const char *part, const char *text, size_t size, lm_error *error);

/* True if the item is a whole number in [least, most].  item may be NULL. */
bool lm_json_integer(const cJSON *item, int64_t least, int64_t most, int64_t *value);

#endif
