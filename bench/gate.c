/*
 * Conformance before timing (see gate.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "gate.h"

#include <inttypes.h>
#include <stdio.h>

static void on_result(void *user, const ekv_conform_result *r) {
    gate_result *result = user;
    if (r->status != EKV_CONFORM_FAIL || result->text[0]) return;
    if (r->index >= 0)
        snprintf(result->text, sizeof result->text,
                 "%s %s, case %" PRId64 ": %s: %s [%" PRId64 "] is %.9g, expected %.9g; replay: entmaxkv %s", r->backend, r->kernel,
                 r->number, r->text, r->what, r->index, r->got, r->expected, r->replay);
    else
        snprintf(result->text, sizeof result->text, "%s %s, case %" PRId64 ": %s: %s; replay: entmaxkv %s", r->backend, r->kernel,
                 r->number, r->text, r->what, r->replay);
}

static bool run(const ekv_conform_options *subject, const char *kernel, gate_result *result) {
    ekv_conform_options options = *subject;
    ekv_conform_summary summary = ekv_conform_summary_default();
    options.kernel = kernel;
    options.result = on_result;
    options.user = result;
    char message[1400];
    if (ekv_conform(&options, &summary, message, sizeof message) != EKV_OK) {
        snprintf(result->text, sizeof result->text, "%s", message);
        return false;
    }
    result->passed += summary.passed;
    result->failed += summary.failed;
    return summary.failed == 0;
}

bool gate_pass(const ekv_conform_options *subject, const ekv_policy *policies, int count, gate_result *result) {
    static const char *const kernels[] = {
#define EKV_NAME(kernel, description) #kernel,
        EKV_TYPED_KERNELS(EKV_NAME) EKV_PLAIN_KERNELS(EKV_NAME)
#undef EKV_NAME
            "entmax"};
    *result = (gate_result){0, 0, ""};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (!run(subject, kernels[i], result)) return false;
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "policy-%s", ekv_policy_name(policies[i]));
        const int64_t before = result->passed;
        if (!run(subject, name, result)) return false;
        if (result->passed == before) {
            snprintf(result->text, sizeof result->text, "no case of %s ran", name);
            return false;
        }
    }
    return true;
}
