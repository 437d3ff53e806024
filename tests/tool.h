/*
 * Running programs of this repository from a test.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_TEST_TOOL_H
#define EKV_TEST_TOOL_H

#include <stddef.h>

/* Runs "ENVIRONMENT PROGRAM ARGUMENTS" in a shell; its exit status and what it printed, errors included unless the arguments send
 * them elsewhere. */
int run_program(const char *environment, const char *program, const char *arguments, char *output, size_t size);

/* Runs it into `output`, an array, and expects an exit status and a text. */
#define EXPECT_PROGRAM(environment, program, arguments, expected, text)                                                        \
  do {                                                                                                                         \
    const int status_ = run_program(environment, program, arguments, output, sizeof output);                                   \
    EXPECT(status_ == (expected), "%s: exit status %d, expected %d; output: %.400s", arguments, status_, expected, output);    \
    EXPECT(strstr(output, text) != NULL, "%s: no \"%s\" in: %.400s", arguments, text, output);                                 \
  } while (0)
#define EXPECT_TOOL(environment, arguments, expected, text) EXPECT_PROGRAM(environment, EKV_TOOL, arguments, expected, text)

#endif
