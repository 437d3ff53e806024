/*
 * entmaxkv bench: what its results hold and how they hang together, what it refuses, and recordings from entmaxkv-lm.  No time is
 * tested, only that the figures derived from it agree.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE
#endif

#include "harness.h"
#include "tool.h"

#include "dispatch/internal.h"
#include "gate.h"
#include "workload.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char output[1 << 20];
static char folder[64];

static void make_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/ekv-bench-XXXXXX");
    EXPECT(mkdtemp(folder) != NULL, "mkdtemp");
}

static void remove_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    EXPECT(system(command) == 0, "%s", command);
}

/* ---- reading results ---- */

/* The text behind "name": in a line of JSON. */
static const char *value_of(const char *line, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *at = strstr(line, key), *end = strchr(line, '\n');
    EXPECT(at != NULL && (end == NULL || at < end), "there is no %s in %.300s", name, line);
    return at + strlen(key);
}

static double number_of(const char *line, const char *name) {
    char *end;
    const char *text = value_of(line, name);
    const double x = strtod(text, &end);
    EXPECT(end != text, "%s is not a number in %.300s", name, line);
    return x;
}

static bool is(const char *line, const char *name, const char *text) {
    const char *value = value_of(line, name);
    return *value == '"' && strncmp(value + 1, text, strlen(text)) == 0 && value[1 + strlen(text)] == '"';
}

/* The next line that begins an object, or NULL. */
static const char *object_at(const char *text) {
    while (*text && *text != '{') {
        const char *end = strchr(text, '\n');
        text = end ? end + 1 : text + strlen(text);
    }
    return *text ? text : NULL;
}

static const char *line_after(const char *text) {
    const char *end = strchr(text, '\n');
    return end ? end + 1 : text + strlen(text);
}

static bool near(double a, double b, double relative) { return fabs(a - b) <= relative * fabs(b); }

/* Pairs of a query token and a token that it sees, of one query head: the last query token sees all, the one before all but one, ... */
static double pairs_of(const char *line) {
    const double context = number_of(line, "context"), queries = number_of(line, "queries");
    return queries * (context - (queries - 1) / 2);
}

/* What is so in every line of decode and prefill. */
static void check_figures(const char *line, const char *softmax) {
    const double ms = number_of(line, "ms"), bytes = number_of(line, "bytes"), flop = number_of(line, "flop");
    const double heads = number_of(line, "kv_heads") * number_of(line, "group") * number_of(line, "batch");
    const double keys = 2 * heads * pairs_of(line) * number_of(line, "key_dim");
    const double values = 2 * heads * pairs_of(line) * number_of(line, "value_dim") * number_of(line, "support_share");
    const double error = number_of(line, "relative_error"), worst = number_of(line, "worst_error");
    EXPECT(ms > 0 && number_of(line, "ms_min") > 0 && number_of(line, "ms_min") <= number_of(line, "ms_q1") &&
               number_of(line, "ms_q1") <= ms && ms <= number_of(line, "ms_q3") &&
               number_of(line, "ms_q3") <= number_of(line, "ms_max"),
           "times out of order: %.600s", line);
    EXPECT(near(number_of(line, "speedup_vs_softmax"), number_of(softmax, "ms") / ms, 1e-6), "%.600s", line);
    EXPECT(near(number_of(line, "bandwidth_share"), bytes / (1e-3 * ms) / number_of(line, "bandwidth"), 1e-6), "%.600s", line);
    EXPECT(near(number_of(line, "flop_rate"), flop / (1e-3 * ms), 1e-6), "%.900s", line);
    EXPECT(near(number_of(line, "flop_share"), number_of(line, "flop_rate") / number_of(line, "flop_peak"), 1e-6), "%.900s", line);
    EXPECT(number_of(line, "flop_peak") > 0 && number_of(line, "flop_peak_separate") > 0, "%.900s", line);
    EXPECT(near(number_of(line, "support_share") * pairs_of(line), number_of(line, "support") * number_of(line, "queries"), 1e-6),
           "%.600s", line);
    EXPECT(error > 0 && error <= worst * (1 + 1e-12), "errors %g and %g: %.600s", error, worst, line);
    if (is(line, "policy", "softmax"))
        EXPECT(number_of(line, "speedup_vs_softmax") == 1 && number_of(line, "support_share") == 1, "%.600s", line);
    if (is(line, "policy", "softmax") || is(line, "policy", "full")) {
        EXPECT(near(flop, keys + values, 1e-6), "%g operations, expected %g: %.900s", flop, keys + values, line);
    } else { /* some of the keys */
        EXPECT(flop > values && flop <= (keys + values) * (1 + 1e-9), "%g operations: %.900s", flop, line);
    }
    if (is(line, "policy", "softmax") || is(line, "policy", "full") || is(line, "policy", "certified")) {
        EXPECT(worst < 1e-4, "an exact policy is off by %g: %.600s", worst, line);
        EXPECT(number_of(line, "certified_share") == 1, "%.600s", line);
    }
}

/* What is so in every line of decode, for elements of 2 bytes. */
static void check_line(const char *line, const char *softmax) {
    const double context = number_of(line, "context"), bytes = number_of(line, "bytes");
    const double heads = number_of(line, "kv_heads") * number_of(line, "batch");
    const double keys = heads * context * number_of(line, "key_dim") * 2, values = heads * context * number_of(line, "value_dim") * 2;
    check_figures(line, softmax);
    EXPECT(number_of(line, "queries") == 1, "%.900s", line);
    if (is(line, "policy", "softmax"))
        EXPECT(bytes == keys + values, "softmax reads %.0f bytes, expected %.0f", bytes, keys + values);
    if (is(line, "policy", "full")) { /* every key, and values of the support, which groups share */
        const double least = keys + values / context * number_of(line, "support") / number_of(line, "batch");
        EXPECT(bytes >= keys && bytes <= least * number_of(line, "group") + values, "full reads %.0f bytes", bytes);
        EXPECT(bytes < keys + values, "full reads all values of sparse attention: %.600s", line);
    }
    if (is(line, "policy", "topk")) {
        const double page = number_of(line, "page_size"), pages = ceil(context / page);
        const double read = fmin(ceil(number_of(line, "budget") / page), pages);
        EXPECT(near(number_of(line, "pages_share"), read / pages, 1e-9), "topk reads %g of the pages", number_of(line, "pages_share"));
    }
}

/* Checks all lines of a run with either; how many there are.  The first of each cell is softmax. */
static int check_lines(void (*check)(const char *line, const char *softmax)) {
    const char *softmax = NULL;
    int lines = 0;
    for (const char *line = output; (line = object_at(line)) != NULL; line = line_after(line), lines++) {
        if (is(line, "policy", "softmax")) softmax = line;
        EXPECT(softmax != NULL, "the first policy is not softmax: %.200s", line);
        check(line, softmax);
    }
    return lines;
}

/* ---- the tests ---- */

START_TEST(command_line) {
    EXPECT_TOOL("", "bench --help", 0, "--context N,...");
    EXPECT_TOOL("", "bench --nonsense", 2, "nonsense");
    EXPECT_TOOL("", "bench extra", 2, "'extra'");
    EXPECT_TOOL("", "bench --context 0", 2, "--context 0: expected a whole number from 1");
    EXPECT_TOOL("", "bench --context 16,x", 2, "--context x");
    EXPECT_TOOL("", "bench --context 16,", 2, "--context :");
    EXPECT_TOOL("", "bench --context 16,32,16", 2, "--context: 16 stands twice");
    EXPECT_TOOL("", "bench --prefill 1", 2, "--prefill 1: expected a whole number from 2");
    EXPECT_TOOL("", "bench --prefill 64 --queries 1", 2, "--queries 1: expected a whole number from 2");
    EXPECT_TOOL("", "bench --queries 64", 2, "--queries needs --prefill");
    EXPECT_TOOL("", "bench --prefill 64 --context 64", 2, "--prefill stands in place of --context");
    EXPECT_TOOL("", "bench --prefill 64 --policy full,topk", 2, "--prefill times the policies softmax and full alone");
    EXPECT_TOOL("", "bench --prefill 64 --plot x.svg", 2, "--plot draws decode steps");
    EXPECT_TOOL("", "bench --group 0", 2, "--group 0");
    EXPECT_TOOL("", "bench --batch -1", 2, "--batch -1");
    EXPECT_TOOL("", "bench --page-size 257", 2, "--page-size 257");
    EXPECT_TOOL("", "bench --threads 1,2,-3", 2, "--threads -3");
    EXPECT_TOOL("", "bench --key-dim 1025", 2, "--key-dim 1025");
    EXPECT_TOOL("", "bench --repeat 0", 2, "--repeat 0");
    EXPECT_TOOL("", "bench --alpha 1", 2, "--alpha 1: expected a number from 1.001");
    EXPECT_TOOL("", "bench --alpha nan", 2, "--alpha nan");
    EXPECT_TOOL("", "bench --alpha 1.5,1.50", 2, "--alpha: 1.50 stands twice");
    EXPECT_TOOL("", "bench --policy best", 2, "--policy best: expected one or more of softmax, full, topk, gaussian, certified");
    EXPECT_TOOL("", "bench --dtype f16,f8", 2, "--dtype f8");
    EXPECT_TOOL("", "bench --keys nonsense", 2, "--keys nonsense");
    EXPECT_TOOL("", "bench --keys recorded", 2, "--keys recorded needs --recorded FILE");
    EXPECT_TOOL("", "bench --keys random --recorded x", 2, "--keys does not hold recorded");
    EXPECT_TOOL("", "bench --recorded /nonexistent/file", 1, "/nonexistent/file");
    EXPECT_TOOL("", "bench --backend nonsense", 1, "backend \"nonsense\"");
    EXPECT_TOOL("", "bench --list --keys random --context 64,1000000000 --batch 2 --kv-heads 1024", 0,
                "skipped: random keys, f16, pages of 16, batch 2, context 1000000000: it takes");
    EXPECT(strstr(output, "context 64: 0.") != NULL, "%.400s", output);
    EXPECT_TOOL("", "bench --list --keys random --context 1000000000 --kv-heads 1024", 1, "nothing was run");
}
END_TEST

static const char small[] = "bench --context 256,1600 --group 1,3 --batch 2 --kv-heads 2 --key-dim 32 --value-dim 48 --budget 64"
                            " --repeat 3 --threads 2";

START_TEST(results) {
    char arguments[400];
    snprintf(arguments, sizeof arguments, "%s --alpha 1.5,2 --warm --json", small);
    EXPECT_TOOL("", arguments, 0, "conformance: every kernel and the policies to be timed");
    EXPECT(strstr(output, "read bandwidth: ") != NULL && strstr(output, "caches: warm") != NULL, "%.900s", output);
    const int lines = check_lines(check_line); /* 2 kinds of keys, contexts and groups; softmax and 4 policies at 2 alphas */
    EXPECT(lines == 2 * 2 * 2 * 9, "%d lines", lines);
    static const char *const texts[] = {"\"keys\":\"random\"", "\"keys\":\"planted\"", "\"context\":256", "\"context\":1600",
                                        "\"group\":1", "\"group\":3", "\"alpha\":2", "\"caches\":\"warm\"", "\"threads\":2"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        EXPECT(strstr(output, texts[i]) != NULL, "no %s", texts[i]);

    /* What topk leaves out shows. */
    double most = 0;
    for (const char *line = output; (line = object_at(line)) != NULL; line = line_after(line))
        if (is(line, "policy", "topk") && number_of(line, "context") == 1600) most = fmax(most, number_of(line, "relative_error"));
    EXPECT(most > 1e-3, "topk with 64 of 1,600 tokens has an error of %g at most", most);
}
END_TEST

/* Planted keys: the clusters, and nothing else, are in the support of a query that looks for them: 2 runs of 16 tokens for each of two
 * directions in 3,200 tokens.  One query head sees one direction. */
START_TEST(planted_support) {
    EXPECT_TOOL("", "bench --keys planted --context 3200 --group 2 --kv-heads 2 --dim 64 --repeat 1 --threads 1 --policy full --json", 0,
                "\"policy\":\"full\"");
    const char *line = strstr(output, "{\"policy\":\"full\"");
    const double support = number_of(line, "support");
    EXPECT(support > 8 && support <= 32, "a support of %g tokens, expected up to 32", support);
    EXPECT(check_lines(check_line) == 2, "%.300s", output);
    EXPECT(is(line, "caches", "cold"), "%.300s", line);
}
END_TEST

START_TEST(tables) {
    EXPECT_TOOL("", "bench --keys random --context 64,1000000000 --kv-heads 1 --dim 1024 --repeat 2 --threads 1 --policy softmax --csv", 0,
                "\npolicy,context,group,batch,threads,ms,bytes,bandwidth_share,speedup_vs_softmax,relative_error,");
    EXPECT(strstr(output, "\nsoftmax,64,1,1,1,") && strstr(output, "\nsoftmax,64,4,1,1,"), "%.2000s", output);
    EXPECT(strstr(output, "skipped: random keys") != NULL, "%.2000s", output);
}
END_TEST

START_TEST(prefill) {
    EXPECT_TOOL("", "bench --prefill 256,100 --queries 160 --batch 1,2 --kv-heads 2 --group 3 --key-dim 32 --value-dim 48 --repeat 2 "
                    "--threads 2 --alpha 1.5,2 --json", 0, "multiply-adds: ");
    EXPECT(check_lines(check_figures) == 2 * 2 * 3, "%.900s", output); /* random keys alone; softmax, and full at 2 alphas */
    for (const char *line = output; (line = object_at(line)) != NULL; line = line_after(line)) {
        const double context = number_of(line, "context");
        EXPECT(is(line, "keys", "random") && number_of(line, "queries") == fmin(context, 160), "%.900s", line);
        EXPECT(is(line, "policy", "softmax") || number_of(line, "support_share") < 0.9, "%.900s", line);
        EXPECT(number_of(line, "pages_share") == 1, "%.900s", line);
    }
    EXPECT_TOOL("", "bench --prefill 64 --keys planted --group 1 --kv-heads 1 --dim 8 --repeat 1 --threads 1", 0,
                "\nplanted keys, context 64, the last 64 query tokens, group 1,");
    EXPECT(strstr(output, " GFLOP/s   of peak / softmax ") && strstr(output, "\nfull         1.5 "), "%.2000s", output);
}
END_TEST

/* ---- the plot ---- */

/* A program "gnuplot" in the folder. */
static void write_gnuplot(const char *text) {
    char path[128];
    snprintf(path, sizeof path, "%s/gnuplot", folder);
    FILE *file = fopen(path, "w");
    EXPECT(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0 && chmod(path, 0755) == 0, "%s", path);
}

START_TEST(plots) {
    char environment[160], script[1 << 14], path[128];
    static const char arguments[] = "bench --keys random --context 32,64 --group 1,2 --kv-heads 1 --dim 8 --repeat 1 --threads 1 "
                                    "--policy full --plot \"it's.svg\"";
    make_folder();
    snprintf(environment, sizeof environment, "PATH=\"%s:$PATH\"", folder);
    write_gnuplot("#!/bin/sh\nexit 1\n");
    EXPECT_TOOL(environment, arguments, 1, "--plot needs gnuplot");

    snprintf(script, sizeof script, "#!/bin/sh\n[ $# -gt 0 ] || cat > '%s/script'\n", folder);
    write_gnuplot(script);
    EXPECT_TOOL(environment, arguments, 0, "speed-up");
    snprintf(path, sizeof path, "%s/script", folder);
    FILE *file = fopen(path, "r");
    EXPECT(file != NULL, "%s", path);
    script[fread(script, 1, sizeof script - 1, file)] = 0;
    fclose(file);
    EXPECT(strstr(script, "set output 'it''s.svg'\n") && strstr(script, "set logscale x 2"), "%s", script);
    EXPECT(strstr(script, "title 'softmax, group 1'") && strstr(script, "title 'full, group 2'"), "%s", script);
    /* Four lines of two points each; softmax is where speed-up is 1. */
    int blocks = 0;
    for (const char *at = script; (at = strstr(at, " << END\n")) != NULL; at++, blocks++) {
        long first, second;
        double x, y;
        EXPECT(sscanf(at, " << END\n%ld %lf\n%ld %lf\nEND", &first, &x, &second, &y) == 4 && first == 32 && second == 64 && x > 0 && y > 0,
               "%.100s", at);
        EXPECT(blocks % 2 || (x == 1 && y == 1), "softmax is %g and %g times as fast as itself", x, y);
    }
    EXPECT(blocks == 4, "%d lines", blocks);

    write_gnuplot("#!/bin/sh\n[ $# -gt 0 ] || exit 3\n");
    EXPECT_TOOL(environment, arguments, 1, "gnuplot could not draw it's.svg");
    remove_folder();
}
END_TEST

/* ---- the gate ---- */

static ekv_kernels good;

static void wrong_load_row(ekv_load_row_args *a) {
    good.load_row[EKV_F16](a);
    a->out[a->dim - 1] += 0.01f;
}

static void wrong_keep(ekv_keep_args *a) {
    const int before = a->count;
    good.keep(a);
    if (a->count > before + 3) a->count--; /* loses a candidate now and then */
}

START_TEST(wrong_kernels_are_not_timed) {
    static const ekv_policy full[] = {EKV_POLICY_FULL};
    ekv_backend_entry scalar;
    EXPECT(ekv_find_backend("scalar", &scalar), "no backend scalar");
    good = *scalar.kernels;
    ekv_conform_options subject = ekv_conform_options_default();
    gate_result result;
    ekv_kernels table = good;
    subject.table = &table;
    table.load_row[EKV_F16] = wrong_load_row;
    EXPECT(!gate_pass(&subject, full, 1, &result) && result.failed > 0, "%s", result.text);
    EXPECT(strstr(result.text, "load_row, case") && strstr(result.text, "dtype f16"), "%s", result.text);
    table = good;
    table.keep = wrong_keep;
    EXPECT(!gate_pass(&subject, full, 1, &result) && result.failed > 0, "%s", result.text);
    EXPECT(strstr(result.text, "keep, case") != NULL, "%s", result.text);
    subject.table = NULL;
    subject.backend = "nonsense";
    EXPECT(!gate_pass(&subject, full, 1, &result) && strstr(result.text, "nonsense"), "%s", result.text);
    /* The policies count too, and one without a case is not let through. */
    subject.backend = "scalar";
    subject.text = "no case says this";
    EXPECT(!gate_pass(&subject, full, 1, &result) && strstr(result.text, "no case of policy-full ran"), "%s", result.text);
}
END_TEST

/* ---- workloads ---- */

static ekv_context *open_context(void) {
    ekv_context *context = NULL;
    EXPECT(ekv_context_create(NULL, &context, NULL, 0) == EKV_OK, "no context");
    return context;
}

/* An element of a key (or value) as a float; the cache holds f32. */
static float element_of(const workload *w, int32_t layer, int32_t sequence, int64_t token, int32_t head, int32_t d, bool value) {
    ekv_kv kv;
    ekv_cache_layer(w->cache, layer, &kv, NULL);
    const int64_t page = ekv_cache_block_table(w->cache, w->sequences[sequence])[token / kv.page_size], slot = token % kv.page_size;
    return value ? ((const float *)kv.v)[page * kv.v_block_stride + slot * kv.v_token_stride + head * kv.v_head_stride + d]
                 : ((const float *)kv.k)[page * kv.k_block_stride + slot * kv.k_token_stride + head * kv.k_head_stride + d];
}

/* The definitions in workload.h: deviations, the share of clusters and their scores, and that nothing depends on chance. */
static void check_keys(ekv_context *context, key_kind keys) {
    enum { CONTEXT = 8000, DIM = 48 };
    static float q[2 * 4 * DIM], again[2 * 4 * DIM], many[2 * 3 * 4 * DIM];
    const workload_shape shape = {.keys = keys, .dtype = EKV_F32, .layers = 1, .kv_heads = 2, .k_dim = DIM, .v_dim = 3, .page_size = 8,
                                  .batch = 2, .context = CONTEXT, .seed = 5};
    workload w, same;
    lm_error error = {""};
    EXPECT(workload_create(context, &shape, &w, &error) && workload_create(context, &shape, &same, &error), "%s", error.text);
    workload_queries(&w, 0, 2, 1, q);
    workload_queries(&same, 0, 2, 1, again);
    EXPECT(memcmp(q, again, sizeof q) == 0, "other queries the second time");
    workload_queries(&w, 0, 2, 3, many); /* the last of three tokens has the queries of one, the others have their own */
    for (int b = 0; b < 2; b++) {
        const size_t row = 4 * DIM, bytes = row * sizeof *q;
        const float *of_sequence = many + (size_t)b * 3 * row;
        EXPECT(memcmp(of_sequence + 2 * row, q + (size_t)b * row, bytes) == 0, "the last query token of sequence %d", b);
        EXPECT(memcmp(of_sequence, of_sequence + row, bytes) != 0 && memcmp(of_sequence + row, of_sequence + 2 * row, bytes) != 0,
               "two query tokens of sequence %d are alike", b);
    }
    for (int row = 0; row < 8; row++) { /* [batch][kv_heads][group] */
        const int32_t sequence = row / 4, head = row / 2 % 2;
        const double strength = 0.9 * (head ? 2.0 : 1.25) * sqrt((double)DIM);
        double sum = 0, squares = 0, values = 0;
        int clustered = 0, others = 0;
        for (int64_t t = 0; t < CONTEXT; t++) {
            double score = 0;
            for (int32_t d = 0; d < DIM; d++) {
                const float x = element_of(&w, 0, sequence, t, head, d, false);
                EXPECT(x == element_of(&same, 0, sequence, t, head, d, false), "another key the second time");
                score += (double)q[row * DIM + d] * (double)x / sqrt((double)DIM);
            }
            values += pow((double)element_of(&w, 0, sequence, t, head, 1, true), 2);
            if (keys == KEYS_PLANTED && fabs(score - strength) < 0.35 * strength) {
                clustered++;
                continue;
            }
            others++;
            sum += score;
            squares += score * score;
        }
        case_note("%s keys, row %d: mean %g, deviation %g, %d in clusters", key_kind_names[keys], row, sum / others,
                  sqrt(squares / others), clustered);
        EXPECT(fabs(sum / others) < 0.25 && fabs(sqrt(squares / others) - 1) < 0.4, "scores are not of deviation 1");
        EXPECT(fabs(sqrt(values / CONTEXT) - 1) < 0.05, "values of deviation %g", sqrt(values / CONTEXT));
        /* one of the two directions: 16 of each second stretch of 800 tokens */
        EXPECT(clustered >= (keys == KEYS_PLANTED ? 80 : 0) && clustered <= (keys == KEYS_PLANTED ? 96 : 0), "%d in clusters", clustered);
    }
    workload_free(&w);
    workload_free(&same);
}

START_TEST(keys_are_as_described) {
    ekv_context *context = open_context();
    check_keys(context, KEYS_RANDOM);
    check_keys(context, KEYS_PLANTED);
    ekv_context_destroy(context);
}
END_TEST

/* A recording of 2 layers, 7 tokens, 2 KV heads of 1 + 2, 4 query heads, 3 query positions: each element says where it belongs. */
static void write_recording(const char *path) {
    static const char header[] =
        "{\"__metadata__\":{\"layers\":\"2\",\"alpha\":\"1.5\",\"scale\":\"1\"},"
        "\"slopes\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"
        "\"layers.0.k\":{\"dtype\":\"F32\",\"shape\":[7,2,1],\"data_offsets\":[16,72]},"
        "\"layers.0.v\":{\"dtype\":\"F32\",\"shape\":[7,2,2],\"data_offsets\":[72,184]},"
        "\"layers.0.q\":{\"dtype\":\"F32\",\"shape\":[3,4,1],\"data_offsets\":[184,232]},"
        "\"layers.1.k\":{\"dtype\":\"F32\",\"shape\":[7,2,1],\"data_offsets\":[232,288]},"
        "\"layers.1.v\":{\"dtype\":\"F32\",\"shape\":[7,2,2],\"data_offsets\":[288,400]},"
        "\"layers.1.q\":{\"dtype\":\"F32\",\"shape\":[3,4,1],\"data_offsets\":[400,448]}}";
    const float slopes[4] = {1, 0.5f, 0, -1};
    unsigned char length[8] = {(unsigned char)(strlen(header) & 0xff), (unsigned char)(strlen(header) >> 8)};
    FILE *file = fopen(path, "wb");
    EXPECT(file != NULL, "%s", path);
    fwrite(length, 1, sizeof length, file);
    fputs(header, file);
    fwrite(slopes, sizeof *slopes, 4, file);
    for (int layer = 0; layer < 2; layer++) {
        for (int kind = 0; kind < 3; kind++) {
            const int rows = kind < 2 ? 7 : 3, heads = kind < 2 ? 2 : 4, dim = kind == 1 ? 2 : 1;
            for (int i = 0; i < rows * heads * dim; i++) {
                const float x = (float)(1000 * layer + 100 * (i / (heads * dim)) + 10 * (i / dim % heads) + i % dim);
                fwrite(&x, sizeof x, 1, file);
            }
        }
    }
    EXPECT(fclose(file) == 0, "%s", path);
}

START_TEST(recordings_are_cut_at_the_end) {
    char path[128];
    ekv_context *context = open_context();
    recording r;
    workload w;
    lm_error error = {""};
    float q[8], many[16];
    make_folder();
    snprintf(path, sizeof path, "%s/small.safetensors", folder);
    write_recording(path);
    EXPECT(recording_open(path, &r, &error), "%s", error.text);
    EXPECT(r.layers == 2 && r.kv_heads == 2 && r.q_heads == 4 && r.k_dim == 1 && r.v_dim == 2 && r.length == 7 && r.queries == 3 &&
               r.alpha == 1.5 && r.scale == 1 && r.slopes[1] == 0.5f && r.slopes[3] == -1,
           "a recording of another shape");
    const workload_shape shape = {.keys = KEYS_RECORDED, .dtype = EKV_F32, .layers = 2, .kv_heads = 2, .k_dim = 1, .v_dim = 2,
                                  .page_size = 4, .batch = 2, .context = 5, .recording = &r};
    EXPECT(workload_create(context, &shape, &w, &error), "%s", error.text);
    for (int layer = 0; layer < 2; layer++) {
        workload_queries(&w, layer, 2, 1, q);
        workload_queries(&w, layer, 2, 2, many);
        for (int b = 0; b < 2; b++) {
            for (int h = 0; h < 4; h++) { /* positions 6 and 5 are queries 2 and 1 of the file */
                EXPECT(q[4 * b + h] == (float)(1000 * layer + 100 * (2 - b) + 10 * h), "query %d of sequence %d is %g", h, b,
                       (double)q[4 * b + h]);
                EXPECT(many[8 * b + 4 + h] == q[4 * b + h] && many[8 * b + h] == q[4 * b + h] - 100,
                       "queries %d of the last two tokens of sequence %d are %g and %g", h, b, (double)many[8 * b + h],
                       (double)many[8 * b + 4 + h]);
            }
            for (int t = 0; t < 5; t++)
                for (int h = 0; h < 2; h++)
                    for (int d = 0; d < 2; d++) {
                        const float expected = (float)(1000 * layer + 100 * (7 - b - 5 + t) + 10 * h);
                        EXPECT(element_of(&w, layer, b, t, h, 0, false) == expected, "layer %d, sequence %d, key %d", layer, b, t);
                        EXPECT(element_of(&w, layer, b, t, h, d, true) == expected + (float)d, "value %d of sequence %d", t, b);
                    }
        }
    }
    workload_free(&w);
    recording_close(&r);
    ekv_context_destroy(context);
    remove_folder();
}
END_TEST

/* ---- recordings ---- */

#ifdef EKV_LM
START_TEST(recordings) {
    char arguments[400], path[128];
    make_folder();
    snprintf(path, sizeof path, "%s/recording.safetensors", folder);
    snprintf(arguments, sizeof arguments, "record --length 300 --queries 4 --offset 100 --model %s --out %s", EKV_MODEL_DIR, path);
    EXPECT_PROGRAM("", EKV_LM, "record --length 300", 2, "--out FILE is missing");
    EXPECT_PROGRAM("", EKV_LM, "record --out x", 2, "--length N is missing");
    EXPECT_PROGRAM("", EKV_LM, "record --out x --length 10 --queries 11", 2, "--queries 11: expected at most --length, which is 10");
    EXPECT_PROGRAM("", EKV_LM, "record --out x --length 10 --policy full", 2, "--policy: record has no such option");
    EXPECT_PROGRAM("", EKV_LM, arguments, 0, "");

    snprintf(arguments, sizeof arguments, "bench --recorded %s --context 300,200,301 --batch 1,4,5 --repeat 2 --threads 2 --json", path);
    EXPECT_TOOL("", arguments, 0, "batch 1, context 301: the recording has 300 tokens");
    EXPECT(strstr(output, "batch 5, context 200: the recording has queries of 4 positions") != NULL, "%.3000s", output);
    EXPECT(strstr(output, "batch 4, context 300: the recording has 300 tokens") != NULL, "%.3000s", output);
    const int lines = check_lines(check_line);
    EXPECT(lines == 3 * 5, "%d lines", lines);
    const char *line = object_at(output);
    EXPECT(number_of(line, "layers") == 6 && number_of(line, "kv_heads") == 4 && number_of(line, "group") == 2 &&
               number_of(line, "key_dim") == 64 && is(line, "keys", "recorded"),
           "%.600s", line);
    EXPECT(number_of(line_after(line), "alpha") == 1.5, "%.600s", line_after(line));

    /* Of four positions with queries, three sequences, each of which ends a token earlier, leave two to the last. */
    snprintf(arguments, sizeof arguments, "bench --recorded %s --prefill 256 --queries 3 --batch 2,3 --repeat 1 --threads 2 --json", path);
    EXPECT_TOOL("", arguments, 0, "batch 3, context 256: the recording has queries of 4 positions");
    EXPECT(check_lines(check_figures) == 2, "%.900s", output);
    line = object_at(output);
    EXPECT(number_of(line, "queries") == 3 && number_of(line, "batch") == 2 && number_of(line, "layers") == 6, "%.900s", line);

    /* Half a file, and another kind of file. */
    EXPECT(truncate(path, 100000) == 0, "truncate");
    snprintf(arguments, sizeof arguments, "bench --recorded %s", path);
    EXPECT_TOOL("", arguments, 1, path);
    snprintf(arguments, sizeof arguments, "bench --recorded %s/model.safetensors", EKV_MODEL_DIR);
    EXPECT_TOOL("", arguments, 1, "not a recording");
    remove_folder();
}
END_TEST
#endif

int main(void) {
    const test_entry tests[] = {TEST_ENTRY(command_line), TEST_ENTRY(results), TEST_ENTRY(planted_support), TEST_ENTRY(tables),
                                TEST_ENTRY(prefill), TEST_ENTRY(plots), TEST_ENTRY(wrong_kernels_are_not_timed),
                                TEST_ENTRY(keys_are_as_described), TEST_ENTRY(recordings_are_cut_at_the_end),
#ifdef EKV_LM
                                TEST_ENTRY(recordings),
#endif
    };
    return HARNESS_MAIN("test_tool_bench", tests);
}
