/*
 * The subcommands of the command-line tool `entmaxkv`, and what they share.
 *
 * To add a subcommand: a file of its own here, its line in EKV_COMMANDS, and its source file in CMakeLists.txt.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_COMMAND_H
#define EKV_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, what it does) defines the function command_<name>(argc, argv), argv[0] being the subcommand's name.  It returns the
 * program's exit status. */
#define EKV_COMMANDS(X)                                                                                                        \
  X(info, "shows version, build options, CPU, backends, threads, caches, NUMA nodes, GPUs")                                    \
  X(conform, "compares kernels and policies with plain double-precision code")                                                 \
  X(bench, "times decode and prefill against softmax, memory bandwidth and multiply-adds")                                          \
  X(reference, "computes attention in double precision from a safetensors file")

#define EKV_DECLARE(name, text) int command_##name(int argc, char **argv);
EKV_COMMANDS(EKV_DECLARE)
#undef EKV_DECLARE

enum { EXIT_PASSED = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* Parses a whole number in [least, most], or says on stderr what is wrong with the option and returns false. */
bool command_number(const char *option, const char *text, int64_t least, int64_t most, int64_t *value);

struct cJSON;
/* Prints a JSON value and a line end, and deletes it; false if that fails. */
bool command_print_json(struct cJSON *json, bool indented);

#endif
