/*
 * The benchmark's results as a table, as JSON and as CSV (see output.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "output.h"

#include "command.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>

typedef enum field_kind { TEXT, WHOLE, REAL } field_kind;

/* Every column, in order. */
static const struct {
    const char *name;
    field_kind kind;
    size_t offset;
} fields[] = {
#define FIELD(kind, name) {#name, kind, offsetof(measurement, name)}
    FIELD(TEXT, policy),          FIELD(WHOLE, context),     FIELD(WHOLE, group),
    FIELD(WHOLE, batch),          FIELD(WHOLE, threads),     FIELD(REAL, ms),
    FIELD(REAL, bytes),           FIELD(REAL, bandwidth_share), FIELD(REAL, speedup_vs_softmax),
    FIELD(REAL, relative_error),  FIELD(REAL, worst_error),  FIELD(REAL, ms_min),
    FIELD(REAL, ms_q1),           FIELD(REAL, ms_q3),        FIELD(REAL, ms_max),
    FIELD(WHOLE, repeats),        FIELD(TEXT, keys),         FIELD(REAL, alpha),
    FIELD(TEXT, dtype),           FIELD(WHOLE, page_size),   FIELD(WHOLE, layers),
    FIELD(WHOLE, kv_heads),       FIELD(WHOLE, key_dim),     FIELD(WHOLE, value_dim),
    FIELD(WHOLE, budget),         FIELD(REAL, pages_share),  FIELD(REAL, support),
    FIELD(REAL, support_share),   FIELD(REAL, certified_share), FIELD(REAL, bandwidth),
    FIELD(TEXT, backend),         FIELD(TEXT, caches),       FIELD(WHOLE, queries),
    FIELD(REAL, flop),            FIELD(REAL, flop_rate),    FIELD(REAL, flop_share),
    FIELD(REAL, flop_peak),       FIELD(REAL, flop_peak_separate),
#undef FIELD
};
enum { FIELDS = sizeof fields / sizeof fields[0] };

static const void *field_of(const measurement *m, int field) { return (const char *)m + fields[field].offset; }

bool output_json(const measurement *results, int count) {
    bool ok = true;
    for (int i = 0; ok && i < count; i++) {
        cJSON *json = cJSON_CreateObject();
        for (int f = 0; ok && f < FIELDS; f++) {
            const void *value = field_of(&results[i], f);
            const cJSON *added = NULL;
            switch (fields[f].kind) {
            case TEXT:
                added = cJSON_AddStringToObject(json, fields[f].name, *(const char *const *)value);
                break;
            case WHOLE:
                added = cJSON_AddNumberToObject(json, fields[f].name, (double)*(const int64_t *)value);
                break;
            case REAL: /* NaN and infinity become null */
                added = cJSON_AddNumberToObject(json, fields[f].name, *(const double *)value);
                break;
            }
            ok = added != NULL;
        }
        if (ok)
            ok = command_print_json(json, false);
        else
            cJSON_Delete(json);
    }
    return ok;
}

void output_csv_head(void) {
    for (int f = 0; f < FIELDS; f++) printf("%s%s", f ? "," : "", fields[f].name);
    putchar('\n');
}

void output_csv(const measurement *results, int count) {
    for (int i = 0; i < count; i++) {
        for (int f = 0; f < FIELDS; f++) {
            const void *value = field_of(&results[i], f);
            if (f) putchar(',');
            if (fields[f].kind == TEXT)
                fputs(*(const char *const *)value, stdout);
            else if (fields[f].kind == WHOLE)
                printf("%" PRId64, *(const int64_t *)value);
            else
                printf("%.9g", *(const double *)value);
        }
        putchar('\n');
    }
}

/* Decode reads memory, and prefill computes: what is shown is how well they do it. */
void output_table(const measurement *results, int count) {
    const measurement *m = &results[0];
    const bool prefill = m->queries > 1;
    printf("\n%s keys, context %" PRId64, m->keys, m->context);
    if (prefill) printf(", the last %" PRId64 " query tokens", m->queries);
    printf(", group %" PRId64 ", batch %" PRId64 ", %" PRId64 " thread%s, %s, pages of %" PRId64 ", %" PRId64 " KV heads of %" PRId64
           " + %" PRId64,
           m->group, m->batch, m->threads, m->threads == 1 ? "" : "s", m->dtype, m->page_size, m->kv_heads, m->key_dim, m->value_dim);
    if (m->layers > 1) printf(", mean of %" PRId64 " layers", m->layers);
    printf("\n%-9s %6s %10s %21s ", "policy", "alpha", "ms", "middle half");
    if (prefill)
        printf("%10s %9s %9s %9s %9s\n", "GFLOP/s", "of peak", "/ softmax", "error", "support");
    else
        printf("%10s %9s %8s %9s %8s %9s\n", "MB read", "bandwidth", "speed-up", "error", "pages", "support");
    for (int i = 0; i < count; i++) {
        m = &results[i];
        printf("%-9s %6.4g %10.3f %10.3f-%-10.3f ", m->policy, m->alpha, m->ms, m->ms_q1, m->ms_q3);
        if (prefill)
            printf("%10.1f %7.1f %% %9.2f %9.2g %7.3f %%\n", 1e-9 * m->flop_rate, 100 * m->flop_share, 1 / m->speedup_vs_softmax,
                   m->relative_error, 100 * m->support_share);
        else
            printf("%10.3f %7.1f %% %8.2f %9.2g %6.2f %% %7.3f %%\n", 1e-6 * m->bytes, 100 * m->bandwidth_share,
                   m->speedup_vs_softmax, m->relative_error, 100 * m->pages_share, 100 * m->support_share);
    }
}
