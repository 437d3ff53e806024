/*
 * Results on stdout (see output.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "output.h"

#include "memory.h"
#include "utf8.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A result as it is printed. */
typedef struct row {
    const char *policy;
    int64_t context;
    const char *count_name, *score_name;
    int64_t count;
    double score, kv_bytes_share, pages_share, mean_e, max_e, max_output_error, ms_per_token, attention_ms_per_token;
} row;

static row make_row(const lm_options *options, const lm_result *result) {
    const lm_meter *m = &result->meter;
    bool perplexity = options->task == LM_PERPLEXITY;
    row r = {
        .policy = ekv_policy_name(result->policy),
        .context = options->context,
        .count_name = perplexity ? "windows" : "trials",
        .score_name = perplexity ? "bits_per_byte" : "accuracy",
        .count = perplexity ? options->windows : options->trials,
        .score = result->score,
        .kv_bytes_share = m->bytes_read / m->bytes_dense,
        .pages_share = m->pages_read / m->pages_total,
        .mean_e = m->mass_sum / (double)m->mass_count,
        .max_e = m->mass_max,
        .max_output_error = m->output_error_max,
        .ms_per_token = 1e3 * m->step_seconds / (double)m->tokens,
        .attention_ms_per_token = 1e3 * m->attention_seconds / (double)m->tokens,
    };
    return r;
}

/* The columns are the JSON fields; the longer names take two lines. */
static void print_table(const lm_options *options, const lm_result *results) {
    bool perplexity = options->task == LM_PERPLEXITY;
    const char *layout = "%-9s  %7s  %7s  %9s  %9s  %7s  %9s  %9s  %10s  %8s  %12s\n";
    printf(layout, "policy", "context", perplexity ? "windows" : "trials", perplexity ? "bits_per" : "accuracy", "kv_bytes",
           "pages", "mean_E", "max_E", "max_output", "ms_per", "attention_ms");
    printf(layout, "", "", "", perplexity ? "_byte" : "", "_share", "_share", "", "", "_error", "_token", "_per_token");
    for (int i = 0; i < options->policy_count; i++) {
        row r = make_row(options, &results[i]);
        printf("%-9s  %7" PRId64 "  %7" PRId64 "  %9.4f  %9.4f  %7.4f  %9.3g  %9.3g  %10.3g  %8.3f  %12.3f\n", r.policy,
               r.context, r.count, r.score, r.kv_bytes_share, r.pages_share, r.mean_e, r.max_e, r.max_output_error,
               r.ms_per_token, r.attention_ms_per_token);
    }
}

/* 17 significant digits give a double back exactly; cJSON alone prints as few as it can. */
static bool add_exact(cJSON *object, const char *name, double value) {
    char text[40];
    snprintf(text, sizeof text, isfinite(value) ? "%.17g" : "null", value);
    return cJSON_AddRawToObject(object, name, text) != NULL;
}

static bool add_number(cJSON *object, const char *name, double value) {
    return cJSON_AddNumberToObject(object, name, value) != NULL; /* null for NaN */
}

static bool fill_row(cJSON *object, const row *r) {
    return cJSON_AddStringToObject(object, "policy", r->policy) != NULL && add_number(object, "context", (double)r->context) &&
           add_number(object, r->count_name, (double)r->count) && add_exact(object, r->score_name, r->score) &&
           add_number(object, "kv_bytes_share", r->kv_bytes_share) && add_number(object, "pages_share", r->pages_share) &&
           add_number(object, "mean_E", r->mean_e) && add_number(object, "max_E", r->max_e) &&
           add_number(object, "max_output_error", r->max_output_error) && add_number(object, "ms_per_token", r->ms_per_token) &&
           add_number(object, "attention_ms_per_token", r->attention_ms_per_token);
}

/* Prints a finished object on one line and frees it. */
static bool print_object(cJSON *object, bool complete, lm_error *error) {
    char *line = complete ? cJSON_PrintUnformatted(object) : NULL;
    cJSON_Delete(object);
    if (line == NULL) {
        return lm_fail(error, "out of memory while writing JSON");
    }
    puts(line);
    cJSON_free(line);
    return true;
}

static bool print_json(const lm_options *options, const lm_result *results, lm_error *error) {
    bool ok = true;
    for (int i = 0; ok && i < options->policy_count; i++) {
        row r = make_row(options, &results[i]);
        cJSON *object = cJSON_CreateObject();
        ok = print_object(object, object != NULL && fill_row(object, &r), error);
    }
    return ok;
}

bool lm_output_results(const lm_options *options, const lm_result *results, lm_error *error) {
    if (options->json) {
        return print_json(options, results, error);
    }
    print_table(options, results);
    return true;
}

static bool add_text(cJSON *object, const char *name, const unsigned char *bytes, size_t size, lm_error *error) {
    char *text = lm_utf8_string(bytes, size, error);
    bool ok = text != NULL && cJSON_AddStringToObject(object, name, text) != NULL;
    free(text);
    return ok;
}

bool lm_output_generated(const lm_options *options, const unsigned char *text, size_t size, lm_error *error) {
    cJSON *object = cJSON_CreateObject();
    const unsigned char *prompt = (const unsigned char *)options->prompt;
    bool complete = object != NULL && add_text(object, "prompt", prompt, strlen(options->prompt), error) &&
                    add_text(object, "text", text, size, error) &&
                    cJSON_AddStringToObject(object, "policy", ekv_policy_name(options->policies[0])) != NULL;
    return print_object(object, complete, error);
}
