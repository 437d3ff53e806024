/*
 * entmaxkv, the command-line tool: picks the subcommand.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "command.h"

#include "entmaxkv/entmaxkv.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *text;
    int (*run)(int argc, char **argv);
} commands[] = {
#define EKV_ENTRY(name, text) {#name, text, command_##name},
    EKV_COMMANDS(EKV_ENTRY)
#undef EKV_ENTRY
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

bool command_number(const char *option, const char *text, int64_t least, int64_t most, int64_t *value) {
    char *end;
    errno = 0;
    const intmax_t number = strtoimax(text, &end, 10);
    if (end == text || *end != '\0' || errno == ERANGE || number < least || number > most) {
        fprintf(stderr, "entmaxkv: --%s %s: expected a whole number from %" PRId64 " to %" PRId64 "\n", option, text, least,
                most);
        return false;
    }
    *value = (int64_t)number;
    return true;
}

bool command_print_json(cJSON *json, bool indented) {
    char *text = indented ? cJSON_Print(json) : cJSON_PrintUnformatted(json);
    const bool printed = text && puts(text) >= 0;
    cJSON_free(text);
    cJSON_Delete(json);
    return printed;
}

static void print_help(FILE *to) {
    fprintf(to, "Usage: entmaxkv COMMAND [OPTION]...\n"
                "Checks and measures the library EntmaxKV.\n"
                "\n"
                "Commands:\n");
    for (int i = 0; i < COMMANDS; i++) fprintf(to, "  %-10s  %s\n", commands[i].name, commands[i].text);
    fprintf(to, "\n"
                "entmaxkv COMMAND --help says more about a command; entmaxkv --version prints the\n"
                "version.  Exit status: 0 success, 1 failure, 2 wrong command line.\n");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return EXIT_PASSED;
    }
    if (strcmp(argv[1], "--version") == 0) {
        const int version = ekv_version();
        printf("entmaxkv %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
        return EXIT_PASSED;
    }
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) != 0) continue;
        const int status = commands[i].run(argc - 1, argv + 1);
        if (fflush(stdout) != 0 || ferror(stdout)) {
            fprintf(stderr, "entmaxkv: cannot write to standard output: %s\n", strerror(errno));
            return EXIT_FAILED;
        }
        return status;
    }
    fprintf(stderr, "entmaxkv: unknown command '%s'; entmaxkv --help lists them\n", argv[1]);
    return EXIT_USAGE;
}
