/*
 * The model's config.json (see config.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "config.h"

#include "file.h"
#include "json.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A reader that stops at the first error, so that the fields can be listed one below the other. */
typedef struct reader {
    const char *path;
    const cJSON *json;
    lm_error *error;
    bool ok;
} reader;

/* "config.json: "key": expected ..., found ..." */
static void fail_field(reader *r, const char *key, const cJSON *item, const char *expected) {
    char *found = item != NULL ? cJSON_PrintUnformatted(item) : NULL;
    r->ok =
        lm_fail(r->error, "%s: \"%s\": expected %s, found %.64s", r->path, key, expected, found != NULL ? found : "nothing");
    cJSON_free(found);
}

static int32_t read_size(reader *r, const char *key, int32_t most) {
    int64_t value = 0;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    if (r->ok && !lm_json_integer(item, 1, most, &value)) {
        char expected[64];
        snprintf(expected, sizeof expected, "a whole number from 1 to %d", most);
        fail_field(r, key, item, expected);
    }
    return (int32_t)value;
}

static double read_number(reader *r, const char *key, double least) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(r->json, key);
    double value = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (r->ok && !(value >= least && value <= DBL_MAX)) {
        char expected[64];
        snprintf(expected, sizeof expected, "a number >= %g", least);
        fail_field(r, key, item, expected);
    }
    return value;
}

/* The forward pass is written for one architecture, whose embedding is its output matrix and whose tokens are bytes. */
static void check_architecture(reader *r) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(r->json, "model_type");
    if (r->ok && !(cJSON_IsString(type) && strcmp(type->valuestring, "nape-entmax") == 0)) {
        fail_field(r, "model_type", type, "\"nape-entmax\"");
    }
    const cJSON *tied = cJSON_GetObjectItemCaseSensitive(r->json, "tie_embeddings");
    if (r->ok && !cJSON_IsTrue(tied)) {
        fail_field(r, "tie_embeddings", tied, "true");
    }
    const cJSON *vocabulary = cJSON_GetObjectItemCaseSensitive(r->json, "vocab_size");
    int64_t size;
    if (r->ok && !lm_json_integer(vocabulary, LM_VOCABULARY, LM_VOCABULARY, &size)) {
        fail_field(r, "vocab_size", vocabulary, "256 (tokens are bytes)");
    }
}

/* The limits keep every product of two sizes within int32_t. */
static void read_fields(reader *r, lm_config *config) {
    check_architecture(r);
    config->layers = read_size(r, "num_layers", 1024);
    config->width = read_size(r, "hidden_size", 1 << 15);
    config->heads = read_size(r, "num_heads", 1024);
    config->kv_heads = read_size(r, "num_kv_heads", 1024);
    config->head_dim = read_size(r, "head_dim", 1024);
    config->intermediate = read_size(r, "intermediate_size", 1 << 15);
    config->taps = read_size(r, "conv_kernel", 64);
    config->alpha = read_number(r, "alpha", 1.0);
    config->norm_epsilon = read_number(r, "rms_norm_eps", 0.0);
    if (r->ok && config->heads % config->kv_heads != 0) {
        r->ok =
            lm_fail(r->error, "%s: %d query heads cannot share %d KV heads evenly", r->path, config->heads, config->kv_heads);
    }
}

bool lm_config_read(const char *directory, lm_config *config, lm_error *error) {
    lm_file file = {NULL, 0};
    cJSON *json = NULL;
    char *path = lm_file_path(directory, "config.json", error);
    if (path != NULL && lm_file_read(path, &file, error)) {
        json = lm_json_parse(path, "file", (const char *)file.bytes, file.size, error);
    }
    bool ok = json != NULL;
    if (ok) {
        reader r = {path, json, error, true};
        read_fields(&r, config);
        ok = r.ok;
    }
    cJSON_Delete(json);
    lm_file_free(&file);
    free(path);
    return ok;
}
