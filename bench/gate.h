/*
 * Nothing is timed that computes wrong results: every kernel, and the policies that are about to be timed, must pass conformance in
 * this process first.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_GATE_H
#define EKV_GATE_H

#include "entmaxkv/kernels.h"

#include <stdbool.h>

/* What was run. */
typedef struct gate_result {
    int64_t passed, failed;
    char text[2048]; /* the first failure, or what is wrong with the options; else "" */
} gate_result;

/* Runs the default sample of conformance cases on the subject's backend (or table of kernels): all kernels of the list, the transform
 * and these policies.  False if a case fails, or none could run. */
bool gate_pass(const ekv_conform_options *subject, const ekv_policy *policies, int count, gate_result *result);

#endif
