/*
 * Running programs from a test (see tool.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE
#endif

#include "tool.h"

#include "harness.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

int run_program(const char *environment, const char *program, const char *arguments, char *output, size_t size) {
    char command[4096];
    const int length = snprintf(command, sizeof command, "{ %s %s %s; } 2>&1", environment, program, arguments);
    EXPECT(length > 0 && (size_t)length < sizeof command, "a command of %d bytes", length);
    FILE *pipe = popen(command, "r");
    EXPECT(pipe != NULL, "%s", command);
    size_t used = 0;
    char rest[4096];
    for (size_t n; (n = fread(rest, 1, sizeof rest, pipe)) > 0;) {
        const size_t room = size - 1 - used, kept = n < room ? n : room;
        memcpy(output + used, rest, kept);
        used += kept;
    }
    output[used] = 0;
    const int status = pclose(pipe);
    EXPECT(WIFEXITED(status), "%s was ended by a signal", command);
    return WEXITSTATUS(status);
}
