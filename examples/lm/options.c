/*
 * The command line (see options.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "options.h"

#include "help.h"
#include "tasks.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const task_names[] = {
    [LM_PERPLEXITY] = "perplexity", [LM_PASSKEY] = "passkey",     [LM_GENERATE] = "generate",
    [LM_RECORD] = "record",         [LM_CALIBRATE] = "calibrate",
};
enum { TASKS = sizeof task_names / sizeof task_names[0] };

enum {
    PERPLEXITY = 1 << LM_PERPLEXITY,
    PASSKEY = 1 << LM_PASSKEY,
    GENERATE = 1 << LM_GENERATE,
    RECORD = 1 << LM_RECORD,
    CALIBRATE = 1 << LM_CALIBRATE,
    DECODING = PERPLEXITY | PASSKEY | GENERATE, /* what decodes with a policy */
    ALL = (1 << TASKS) - 1
};

/* Longer sequences than this no machine holds; the limit keeps sums of sizes within int64_t. */
#define MAX_TOKENS ((int64_t)1 << 30)

typedef enum value_kind {
    VALUE_HELP,
    VALUE_FLAG,
    VALUE_TEXT,
    VALUE_TEXT_FILE,
    VALUE_INTEGER,
    VALUE_POLICIES,
    VALUE_KV_TYPE
} value_kind;

/* Every option: the commands that have it, and where its value goes. */
typedef struct known_option {
    const char *name;
    int tasks;
    value_kind kind;
    size_t field;        /* FLAG, TEXT, INTEGER */
    int64_t least, most; /* INTEGER */
} known_option;

static const known_option known_options[] = {
    {"help", ALL, VALUE_HELP, 0, 0, 0},
    {"model", ALL, VALUE_TEXT, offsetof(lm_options, model), 0, 0},
    {"text", ALL, VALUE_TEXT_FILE, 0, 0, 0},
    {"policy", DECODING, VALUE_POLICIES, 0, 0, 0},
    {"budget", DECODING, VALUE_INTEGER, offsetof(lm_options, budget), 1, MAX_TOKENS},
    {"kv-type", ALL, VALUE_KV_TYPE, 0, 0, 0},
    {"backend", ALL, VALUE_TEXT, offsetof(lm_options, backend), 0, 0},
    {"threads", ALL, VALUE_INTEGER, offsetof(lm_options, threads), 0, 4096},
    {"basis", DECODING, VALUE_TEXT, offsetof(lm_options, basis), 0, 0},
    {"seed", DECODING, VALUE_INTEGER, offsetof(lm_options, seed), 0, INT64_MAX},
    {"json", DECODING, VALUE_FLAG, offsetof(lm_options, json), 0, 0},
    {"context", PERPLEXITY | PASSKEY, VALUE_INTEGER, offsetof(lm_options, context), 2, MAX_TOKENS},
    {"windows", PERPLEXITY, VALUE_INTEGER, offsetof(lm_options, windows), 1, MAX_TOKENS},
    {"offset", PERPLEXITY | RECORD | CALIBRATE, VALUE_INTEGER, offsetof(lm_options, offset), 0, INT64_MAX},
    {"trials", PASSKEY, VALUE_INTEGER, offsetof(lm_options, trials), 1, MAX_TOKENS},
    {"prompt", GENERATE, VALUE_TEXT, offsetof(lm_options, prompt), 0, 0},
    {"bytes", GENERATE, VALUE_INTEGER, offsetof(lm_options, bytes), 1, MAX_TOKENS},
    {"length", RECORD | CALIBRATE, VALUE_INTEGER, offsetof(lm_options, length), 1, MAX_TOKENS},
    {"queries", RECORD, VALUE_INTEGER, offsetof(lm_options, queries), 1, MAX_TOKENS},
    {"out", RECORD | CALIBRATE, VALUE_TEXT, offsetof(lm_options, out), 0, 0},
};
enum { KNOWN = sizeof known_options / sizeof known_options[0] };

static bool parse_integer(const known_option *option, const char *text, int64_t *value, lm_error *error) {
    char *end;
    errno = 0;
    intmax_t number = strtoimax(text, &end, 10);
    if (end == text || *end != '\0' || errno == ERANGE || number < option->least || number > option->most) {
        return lm_fail(error, "--%s %s: expected a whole number from %" PRId64 " to %" PRId64, option->name, text,
                       option->least, option->most);
    }
    *value = (int64_t)number;
    return true;
}

static bool parse_kv_type(const char *text, ekv_dtype *type, lm_error *error) {
    static const ekv_dtype types[] = {EKV_F16, EKV_F32, EKV_BF16};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (strcmp(text, ekv_dtype_name(types[i])) == 0) {
            *type = types[i];
            return true;
        }
    }
    return lm_fail(error, "--kv-type %s: expected f16, f32 or bf16", text);
}

static bool find_policy(const char *name, size_t length, ekv_policy *policy, lm_error *error) {
    static const ekv_policy policies[LM_MAX_POLICIES] = {EKV_POLICY_FULL, EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN,
                                                         EKV_POLICY_CERTIFIED};
    for (int i = 0; i < LM_MAX_POLICIES; i++) {
        const char *known = ekv_policy_name(policies[i]);
        if (strlen(known) == length && strncmp(name, known, length) == 0) {
            *policy = policies[i];
            return true;
        }
    }
    return lm_fail(error, "--policy %.*s: expected full, topk, gaussian or certified, or several with commas between",
                   (int)length, name);
}

/* No policy stands twice, so that the list is never longer than there are policies. */
static bool add_policy(lm_options *options, ekv_policy policy, lm_error *error) {
    for (int i = 0; i < options->policy_count; i++) {
        if (options->policies[i] == policy) {
            return lm_fail(error, "--policy: %s stands twice", ekv_policy_name(policy));
        }
    }
    options->policies[options->policy_count++] = policy;
    return true;
}

static bool parse_policies(const char *list, lm_options *options, lm_error *error) {
    options->policy_count = 0;
    for (const char *name = list;; name++) {
        size_t length = strcspn(name, ",");
        ekv_policy policy = EKV_POLICY_FULL;
        if (!find_policy(name, length, &policy, error) || !add_policy(options, policy, error)) {
            return false;
        }
        name += length;
        if (*name == '\0') {
            return true;
        }
    }
}

static bool add_text(lm_options *options, const char *path, lm_error *error) {
    if (options->text_count == LM_MAX_TEXTS) {
        return lm_fail(error, "--text %s: at most %d texts", path, LM_MAX_TEXTS);
    }
    options->texts[options->text_count++] = path;
    return true;
}

static bool parse_value(const known_option *option, const char *text, lm_options *options, lm_error *error) {
    char *field = (char *)options + option->field;
    switch (option->kind) {
    case VALUE_FLAG:
        *(bool *)field = true;
        return true;
    case VALUE_TEXT:
        *(const char **)field = text;
        return true;
    case VALUE_TEXT_FILE:
        return add_text(options, text, error);
    case VALUE_INTEGER:
        return parse_integer(option, text, (int64_t *)field, error);
    case VALUE_POLICIES:
        return parse_policies(text, options, error);
    case VALUE_KV_TYPE:
        return parse_kv_type(text, &options->kv_type, error);
    case VALUE_HELP:
        break; /* handled by the caller */
    }
    return true;
}

/* The other policies are measured against full, so it is always there and runs first. */
static void put_full_first(lm_options *options) {
    ekv_policy ordered[LM_MAX_POLICIES] = {EKV_POLICY_FULL};
    int count = 1;
    for (int i = 0; i < options->policy_count; i++) {
        if (options->policies[i] != EKV_POLICY_FULL) {
            ordered[count++] = options->policies[i];
        }
    }
    memcpy(options->policies, ordered, sizeof ordered);
    options->policy_count = count;
}

static bool need(bool given, const char *option, lm_error *error) { return given || lm_fail(error, "%s is missing", option); }

static bool check_generate(const lm_options *options, lm_error *error) {
    if (options->policy_count != 1) {
        return lm_fail(error, "--policy: generate runs one policy");
    }
    return need(options->prompt != NULL && options->prompt[0] != '\0', "--prompt TEXT", error) &&
           need(options->bytes > 0, "--bytes N", error);
}

static bool check_record(const lm_options *options, lm_error *error) {
    if (!need(options->length > 0, "--length N", error) || !need(options->out != NULL, "--out FILE", error)) {
        return false;
    }
    if (options->queries > options->length) {
        return lm_fail(error, "--queries %" PRId64 ": expected at most --length, which is %" PRId64, options->queries,
                       options->length);
    }
    return true;
}

static bool check_calibrate(const lm_options *options, lm_error *error) {
    if (!need(options->length > 0, "--length N", error) || !need(options->out != NULL, "--out FILE", error)) {
        return false;
    }
    return options->length >= LM_CALIBRATION_LEAST ||
           lm_fail(error, "--length %" PRId64 ": expected at least %d", options->length, LM_CALIBRATION_LEAST);
}

static bool check_passkey(const lm_options *options, lm_error *error) {
    int64_t least = lm_passkey_least_context();
    if (options->context < least) {
        return lm_fail(error, "--context %" PRId64 ": expected at least %" PRId64 ", room for the passkey and its question",
                       options->context, least);
    }
    return true;
}

static bool check_task(lm_options *options, lm_error *error) {
    if (options->task == LM_GENERATE) {
        return check_generate(options, error);
    }
    if (options->task == LM_RECORD) {
        return check_record(options, error);
    }
    if (options->task == LM_CALIBRATE) {
        return check_calibrate(options, error);
    }
    put_full_first(options);
    if (!need(options->context > 0, "--context N", error)) {
        return false;
    }
    if (options->task == LM_PERPLEXITY) {
        return need(options->windows > 0, "--windows W", error);
    }
    return need(options->trials > 0, "--trials T", error) && check_passkey(options, error);
}

/* The options of one command as getopt wants them; each is known by its place in known_options, counted from 1. */
static void list_options(lm_task task, struct option list[KNOWN + 1]) {
    int count = 0;
    for (int i = 0; i < KNOWN; i++) {
        const known_option *known = &known_options[i];
        if ((known->tasks & 1 << task) != 0) {
            bool plain = known->kind == VALUE_HELP || known->kind == VALUE_FLAG;
            list[count++] = (struct option){known->name, plain ? no_argument : required_argument, NULL, i + 1};
        }
    }
    list[count] = (struct option){NULL, 0, NULL, 0};
}

/* argv begins at the command. */
static lm_parsed parse_task(int argc, char **argv, lm_options *options, lm_error *error) {
    struct option list[KNOWN + 1];
    list_options(options->task, list);
    opterr = 0; /* errors go where all others go */
    int place;
    while ((place = getopt_long(argc, argv, ":", list, NULL)) != -1) {
        if (place == ':' || place == '?') {
            lm_fail(error, place == ':' ? "%s needs a value" : "%s: %s has no such option", argv[optind - 1], argv[0]);
            return LM_PARSED_USAGE;
        }
        const known_option *option = &known_options[place - 1];
        if (option->kind == VALUE_HELP) {
            lm_help_task(options->task);
            return LM_PARSED_DONE;
        }
        if (!parse_value(option, optarg, options, error)) {
            return LM_PARSED_USAGE;
        }
    }
    if (optind < argc) {
        lm_fail(error, "%s: not expected here", argv[optind]);
        return LM_PARSED_USAGE;
    }
    return check_task(options, error) ? LM_PARSED_RUN : LM_PARSED_USAGE;
}

static const lm_options defaults = {
    .model = "models/nape-entmax-14m",
    .policies = {EKV_POLICY_GAUSSIAN},
    .policy_count = 1,
    .budget = 1024,
    .kv_type = EKV_F16,
    .seed = 1,
    .queries = 64,
};

lm_parsed lm_options_parse(int argc, char **argv, lm_options *options, lm_error *error) {
    *options = defaults;
    const char *command = argc > 1 ? argv[1] : "nothing";
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0) {
        lm_help_program();
        return LM_PARSED_DONE;
    }
    if (strcmp(command, "--version") == 0) {
        lm_help_version();
        return LM_PARSED_DONE;
    }
    for (int i = 0; i < TASKS; i++) {
        if (strcmp(command, task_names[i]) == 0) {
            options->task = (lm_task)i;
            return parse_task(argc - 1, argv + 1, options, error);
        }
    }
    lm_fail(error, "expected perplexity, passkey, generate, record or calibrate, found %s", command);
    return LM_PARSED_USAGE;
}
