/*
 * Conformance cases of the backend cuda on the emulated device (emulator.cpp): shows without a GPU that the kernels compile, stay
 * inside of their memory and give right results.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   test_emulated                 the selection below
 *   test_emulated KERNEL [CASE]   the cases of one kernel or policy, all or those whose text contains CASE, or of that number
 */
#include "entmaxkv/kernels.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Few of the long sequences: a key takes microseconds here. */
static const char *const selection[][2] = {
    {"policy-full", "length 130,"},  {"policy-topk", "length 130,"},       {"policy-gaussian", "length 130,"},
    {"policy-pages", "length 130,"}, {"policy-certified", "dim 33,"},
};

static void print_failure(void *user, const ekv_conform_result *r) {
    (void)user;
    if (r->status == EKV_CONFORM_FAIL)
        printf("%s %" PRId64 " %s: %s, element %" PRId64 ": got %.9g, expected %.9g, tolerance %.3g\n", r->kernel, r->number, r->text,
               r->what, r->index, r->got, r->expected, r->tolerance);
}

/* False if a case failed or none ran. */
static int run(const char *kernel, const char *text) {
    char message[1400];
    ekv_conform_options options = ekv_conform_options_default();
    ekv_conform_summary summary = ekv_conform_summary_default();
    options.backend = "cuda";
    options.kernel = kernel;
    if (text && isdigit((unsigned char)text[0]))
        options.number = strtoll(text, NULL, 10);
    else
        options.text = text;
    options.result = print_failure;
    if (ekv_conform(&options, &summary, message, sizeof message) != EKV_OK) {
        printf("%s: %s\n", kernel, message);
        return 0;
    }
    printf("%s, %s: %" PRId64 " passed, %" PRId64 " failed, %" PRId64 " unsupported\n", kernel, text ? text : "all cases", summary.passed,
           summary.failed, summary.unsupported);
    fflush(stdout);
    return summary.failed == 0 && summary.passed > 0;
}

int main(int argc, char **argv) {
    int ok = 1;
    if (argc > 1) return run(argv[1], argc > 2 ? argv[2] : NULL) ? EXIT_SUCCESS : EXIT_FAILURE;
    for (size_t i = 0; i < sizeof selection / sizeof selection[0]; i++) ok &= run(selection[i][0], selection[i][1]);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
