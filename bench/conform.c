/*
 * entmaxkv conform: ekv_conform() from the command line.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "command.h"

#include "entmaxkv/kernels.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char help[] = "Usage: entmaxkv conform [OPTION]...\n"
                           "Compares every kernel and every policy of every backend that this machine can run\n"
                           "with plain double-precision code: results, memory outside of buffers, NaN in\n"
                           "unused slots, misaligned pointers, ties, huge and infinite scores.\n"
                           "\n"
                           "  --backend NAME   only this backend (entmaxkv info lists them)\n"
                           "  --kernel NAME    only this kernel, \"entmax\", or policy (\"policy-topk\")\n"
                           "  --case CASE      only the case of that number, or the cases whose description\n"
                           "                   contains this text\n"
                           "  --seed S         of the numbers in the cases  [1]\n"
                           "  --require NAME   fail if this backend cannot run here; may be repeated\n"
                           "  --thorough       the whole grid of cases; the default is a sample of it that\n"
                           "                   holds every value of every parameter\n"
                           "  --pairwise       cases that hold every pair of values of two parameters\n"
                           "  --list           print the cases and run nothing\n"
                           "  --verbose        print each case, not only failures and totals\n"
                           "  --json           one JSON object a line: a case each, then the summary\n"
                           "  --help           this text\n"
                           "\n"
                           "A case passes, fails, or is unsupported (nothing was called).  After a failure\n"
                           "stand the first element that differs and the arguments that run this case alone.\n"
                           "Exit status: 0 nothing failed, 1 a failure or a required backend that is missing,\n"
                           "2 wrong command line.\n";

enum { MAX_REQUIRED = 8, MAX_TOTALS = 256, SHOWN_FAILURES = 20 };

/* Outcomes of one kernel of one backend. */
typedef struct total {
    char backend[32], kernel[32];
    int64_t count[3];
} total;

typedef struct run {
    ekv_conform_options options;
    const char *required[MAX_REQUIRED];
    int required_count;
    bool json, verbose;
    total totals[MAX_TOTALS];
    int total_count;
    int64_t failures;
} run;

static const char *const status_names[] = {"pass", "fail", "unsupported"};

static total *find_total(run *r, const ekv_conform_result *result) {
    for (int i = 0; i < r->total_count; i++)
        if (strcmp(r->totals[i].backend, result->backend) == 0 && strcmp(r->totals[i].kernel, result->kernel) == 0)
            return &r->totals[i];
    if (r->total_count == MAX_TOTALS) return &r->totals[MAX_TOTALS - 1];
    total *t = &r->totals[r->total_count++];
    snprintf(t->backend, sizeof t->backend, "%s", result->backend);
    snprintf(t->kernel, sizeof t->kernel, "%s", result->kernel);
    return t;
}

/* JSON has no infinity and no NaN: those become strings. */
static void add_number(cJSON *json, const char *name, double x) {
    if (isfinite(x))
        cJSON_AddNumberToObject(json, name, x);
    else
        cJSON_AddStringToObject(json, name, isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

static void print_result_json(const run *r, const ekv_conform_result *result) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "backend", result->backend);
    cJSON_AddStringToObject(json, "kernel", result->kernel);
    cJSON_AddNumberToObject(json, "case", (double)result->number);
    cJSON_AddStringToObject(json, "text", result->text);
    if (!r->options.list) cJSON_AddStringToObject(json, "status", status_names[result->status]);
    if (result->status == EKV_CONFORM_FAIL) {
        cJSON_AddStringToObject(json, "what", result->what);
        cJSON_AddNumberToObject(json, "index", (double)result->index);
        add_number(json, "got", result->got);
        add_number(json, "expected", result->expected);
        add_number(json, "error", result->error);
        add_number(json, "tolerance", result->tolerance);
    }
    cJSON_AddStringToObject(json, "replay", result->replay);
    command_print_json(json, false);
}

static void print_failure(const ekv_conform_result *result) {
    printf("FAIL %s %s, case %" PRId64 ": %s\n", result->backend, result->kernel, result->number, result->text);
    if (result->index >= 0)
        printf("     %s [%" PRId64 "]: %.9g, expected %.9g; error %.3g, allowed %.3g\n", result->what, result->index,
               result->got, result->expected, result->error, result->tolerance);
    else
        printf("     %s\n", result->what);
    printf("     replay: entmaxkv %s\n", result->replay);
}

static void on_result(void *user, const ekv_conform_result *result) {
    run *r = user;
    find_total(r, result)->count[result->status]++;
    if (r->json) {
        print_result_json(r, result);
    } else if (r->options.list || (r->verbose && result->status != EKV_CONFORM_FAIL)) {
        printf("%s %s %" PRId64 " %s%s%s\n", result->backend, result->kernel, result->number, result->text,
               r->options.list ? "" : ": ", r->options.list ? "" : status_names[result->status]);
    } else if (result->status == EKV_CONFORM_FAIL) {
        if (r->failures++ < SHOWN_FAILURES || r->verbose) print_failure(result);
        if (r->failures == SHOWN_FAILURES + 1 && !r->verbose)
            printf("further failures are only counted (--verbose shows them)\n");
        fflush(stdout);
    }
}

/* Says which required backends cannot run here; true if there are none. */
static bool check_required(const run *r) {
    bool all = true;
    for (int i = 0; i < r->required_count; i++) {
        ekv_backend_info info = {.size = sizeof info};
        const char *why = "it is not part of this build";
        bool available = false;
        for (int32_t b = 0; ekv_backend(b, &info) == EKV_OK; b++) {
            if (strcmp(info.name, r->required[i]) != 0) continue;
            available = info.available;
            why = info.note;
        }
        if (available) continue;
        all = false;
        fprintf(stderr, "entmaxkv: the required backend \"%s\" is not available: %s\n", r->required[i], why);
    }
    return all;
}

static void print_summary(const run *r, const ekv_conform_summary *s, double seconds) {
    if (r->json) {
        cJSON *json = cJSON_CreateObject();
        cJSON *kernels = cJSON_AddArrayToObject(json, "kernels");
        for (int i = 0; i < r->total_count; i++) {
            cJSON *entry = cJSON_CreateObject();
            cJSON_AddStringToObject(entry, "backend", r->totals[i].backend);
            cJSON_AddStringToObject(entry, "kernel", r->totals[i].kernel);
            for (int k = 0; k < 3; k++) cJSON_AddNumberToObject(entry, status_names[k], (double)r->totals[i].count[k]);
            cJSON_AddItemToArray(kernels, entry);
        }
        cJSON_AddNumberToObject(json, "pass", (double)s->passed);
        cJSON_AddNumberToObject(json, "fail", (double)s->failed);
        cJSON_AddNumberToObject(json, "unsupported", (double)s->unsupported);
        cJSON_AddNumberToObject(json, "worst_error_over_tolerance", s->worst);
        cJSON_AddNumberToObject(json, "seconds", seconds);
        command_print_json(json, false);
        return;
    }
    printf("%-10s %-16s %8s %8s %12s\n", "backend", "kernel", "pass", "fail", "unsupported");
    for (int i = 0; i < r->total_count; i++) {
        const total *t = &r->totals[i];
        printf("%-10s %-16s %8" PRId64 " %8" PRId64 " %12" PRId64 "\n", t->backend, t->kernel, t->count[0], t->count[1],
               t->count[2]);
    }
    printf("%" PRId64 " passed, %" PRId64 " failed, %" PRId64 " unsupported; seed %" PRIu64
           "; largest error/tolerance %.2f; %.1f s\n",
           s->passed, s->failed, s->unsupported, r->options.seed, s->worst, seconds);
}

/* Exit status, or -1 to go on. */
static int parse(int argc, char **argv, run *r) {
    enum { BACKEND, KERNEL, CASE, SEED, REQUIRE, THOROUGH, PAIRWISE, LIST, VERBOSE, JSON, HELP };
    static const struct option options[] = {{"backend", required_argument, NULL, BACKEND},
                                            {"kernel", required_argument, NULL, KERNEL},
                                            {"case", required_argument, NULL, CASE},
                                            {"seed", required_argument, NULL, SEED},
                                            {"require", required_argument, NULL, REQUIRE},
                                            {"thorough", no_argument, NULL, THOROUGH},
                                            {"pairwise", no_argument, NULL, PAIRWISE},
                                            {"list", no_argument, NULL, LIST},
                                            {"verbose", no_argument, NULL, VERBOSE},
                                            {"json", no_argument, NULL, JSON},
                                            {"help", no_argument, NULL, HELP},
                                            {NULL, 0, NULL, 0}};
    int64_t seed;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case BACKEND:
            r->options.backend = optarg;
            break;
        case KERNEL:
            r->options.kernel = optarg;
            break;
        case CASE:
            if (!isdigit((unsigned char)optarg[0]))
                r->options.text = optarg;
            else if (!command_number("case", optarg, 0, INT64_MAX, &r->options.number))
                return EXIT_USAGE;
            break;
        case SEED:
            if (!command_number("seed", optarg, 0, INT64_MAX, &seed)) return EXIT_USAGE;
            r->options.seed = (uint64_t)seed;
            break;
        case REQUIRE:
            if (r->required_count == MAX_REQUIRED) {
                fprintf(stderr, "entmaxkv: --require: at most %d\n", MAX_REQUIRED);
                return EXIT_USAGE;
            }
            r->required[r->required_count++] = optarg;
            break;
        case THOROUGH:
            r->options.thorough = 1;
            break;
        case PAIRWISE:
            r->options.thorough = 2;
            break;
        case LIST:
            r->options.list = 1;
            break;
        case VERBOSE:
            r->verbose = true;
            break;
        case JSON:
            r->json = true;
            break;
        case HELP:
            fputs(help, stdout);
            return EXIT_PASSED;
        default:
            return EXIT_USAGE;
        }
    }
    if (optind == argc) return -1;
    fprintf(stderr, "entmaxkv: conform takes no argument '%s'\n", argv[optind]);
    return EXIT_USAGE;
}

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int command_conform(int argc, char **argv) {
    static run r;
    r.options = ekv_conform_options_default();
    r.options.result = on_result;
    r.options.user = &r;
    const int status = parse(argc, argv, &r);
    if (status >= 0) return status;
    if (!check_required(&r)) return EXIT_FAILED;

    char message[1400];
    ekv_conform_summary summary = ekv_conform_summary_default();
    const double begin = now();
    const ekv_status outcome = ekv_conform(&r.options, &summary, message, sizeof message);
    if (outcome != EKV_OK) {
        fprintf(stderr, "entmaxkv: %s\n", message);
        return outcome == EKV_ERROR_INVALID_ARGUMENT ? EXIT_USAGE : EXIT_FAILED;
    }
    if (!r.options.list) print_summary(&r, &summary, now() - begin);
    if (summary.passed + summary.failed + summary.unsupported == 0) {
        fprintf(stderr, "entmaxkv: no case is called that\n");
        return EXIT_FAILED;
    }
    return summary.failed ? EXIT_FAILED : EXIT_PASSED;
}
