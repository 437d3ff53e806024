/*
 * entmaxkv-lm: a small language model that embeds EntmaxKV.  Runs the task that the command line asks for.
 *
 * To see how a program embeds the library, read state.c (context, cache, truncation) and attention.c (append, decode, report);
 * model.c is the forward pass around them.  perplexity.c, passkey.c, generate.c, record.c and calibrate.c are the tasks; the
 * rest serves these.
 *
 * Exit status: 0 success, 1 failure, 2 wrong command line.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "model.h"
#include "options.h"
#include "output.h"
#include "tasks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static bool run_measured(const lm_model *model, const lm_options *options, lm_error *error) {
    lm_result results[LM_MAX_POLICIES];
    memset(results, 0, sizeof results);
    for (int i = 0; i < options->policy_count; i++) {
        results[i].policy = options->policies[i];
    }
    bool ok = options->task == LM_PERPLEXITY ? lm_perplexity(model, options, results, error)
                                             : lm_passkey(model, options, results, error);
    return ok && lm_output_results(options, results, error);
}

static bool run(const lm_options *options, lm_error *error) {
    lm_model *model = lm_model_load(options->model, error);
    if (model == NULL) {
        return false;
    }
    bool ok = options->task == LM_GENERATE    ? lm_generate(model, options, error)
              : options->task == LM_RECORD    ? lm_record(model, options, error)
              : options->task == LM_CALIBRATE ? lm_calibrate(model, options, error)
                                              : run_measured(model, options, error);
    lm_model_free(model);
    return ok;
}

/* A full disk or a closed pipe must not look like success. */
static bool flush_output(lm_error *error) {
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return lm_fail(error, "cannot write the output: %s", strerror(errno));
    }
    return true;
}

static int report(const char *text, int status) {
    fprintf(stderr, "entmaxkv-lm: %s\n", text);
    return status;
}

int main(int argc, char **argv) {
    lm_options options;
    lm_error error = {""};
    lm_parsed parsed = lm_options_parse(argc, argv, &options, &error);
    if (parsed == LM_PARSED_USAGE) {
        report(error.text, EXIT_USAGE);
        return report("--help shows the command line", EXIT_USAGE);
    }
    if ((parsed == LM_PARSED_RUN && !run(&options, &error)) || !flush_output(&error)) {
        return report(error.text, EXIT_FAILED);
    }
    return EXIT_OK;
}
