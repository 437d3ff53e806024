/*
 * JSON input (see json.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "json.h"

#include <string.h>

/* Only white space may follow the object: safetensors pads its header with blanks. */
static bool only_space(const char *text, const char *end) {
    while (text < end && memchr(" \t\r\n", *text, 4) != NULL) {
        text++;
    }
    return text == end;
}

cJSON *lm_json_parse(const char *path, const char *part, const char *text, size_t size, lm_error *error) {
    const char *rest = text;
    cJSON *json = cJSON_ParseWithLengthOpts(text, size, &rest, 0);
    if (json == NULL || !only_space(rest, text + size)) {
        size_t at = rest >= text && rest <= text + size ? (size_t)(rest - text) : 0;
        lm_fail(error, "%s: the %s is not valid JSON near byte %zu of %zu", path, part, at, size);
        cJSON_Delete(json);
        return NULL;
    }
    if (!cJSON_IsObject(json)) {
        lm_fail(error, "%s: the %s is not a JSON object", path, part);
        cJSON_Delete(json);
        return NULL;
    }
    return json;
}

bool lm_json_integer(const cJSON *item, int64_t least, int64_t most, int64_t *value) {
    if (!cJSON_IsNumber(item)) {
        return false;
    }
    double number = item->valuedouble;
    if (!(number >= (double)least && number <= (double)most)) {
        return false;
    }
    *value = (int64_t)number;
    return (double)*value == number;
}
