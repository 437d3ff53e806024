/*
 * Plots through gnuplot (see output.h): the script and its data go through a pipe.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L
#include "output.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

bool plot_available(lm_error *error) {
    return system("gnuplot --version >/dev/null 2>&1") == 0 ||
           lm_fail(error, "--plot needs gnuplot, which was not found (Debian and Ubuntu: apt-get install gnuplot-nox)");
}

/* Whether two results lie on one line of the plot: all but the context is the same. */
static bool same_line(const measurement *a, const measurement *b) {
    return strcmp(a->policy, b->policy) == 0 && strcmp(a->keys, b->keys) == 0 && strcmp(a->dtype, b->dtype) == 0 &&
           a->alpha == b->alpha && a->group == b->group && a->batch == b->batch && a->threads == b->threads &&
           a->page_size == b->page_size;
}

/* The policy, and of the rest what is not the same in all results. */
static void line_name(const measurement *m, const measurement *results, int count, char *name, size_t size) {
    bool keys = false, dtype = false, alpha = false, group = false, batch = false, threads = false, page = false;
    for (int i = 0; i < count; i++) {
        const measurement *r = &results[i];
        keys |= strcmp(r->keys, m->keys) != 0;
        dtype |= strcmp(r->dtype, m->dtype) != 0;
        alpha |= r->alpha != m->alpha && r->alpha != 1 && m->alpha != 1; /* softmax has its own */
        group |= r->group != m->group;
        batch |= r->batch != m->batch;
        threads |= r->threads != m->threads;
        page |= r->page_size != m->page_size;
    }
    char part[7][40] = {""};
    if (keys) snprintf(part[0], sizeof part[0], ", %s keys", m->keys);
    if (alpha) snprintf(part[1], sizeof part[1], ", alpha %g", m->alpha);
    if (group) snprintf(part[2], sizeof part[2], ", group %" PRId64, m->group);
    if (batch) snprintf(part[3], sizeof part[3], ", batch %" PRId64, m->batch);
    if (threads) snprintf(part[4], sizeof part[4], ", %" PRId64 " threads", m->threads);
    if (dtype) snprintf(part[5], sizeof part[5], ", %s", m->dtype);
    if (page) snprintf(part[6], sizeof part[6], ", pages of %" PRId64, m->page_size);
    snprintf(name, size, "%s%s%s%s%s%s%s%s", m->policy, part[0], part[1], part[2], part[3], part[4], part[5], part[6]);
}

static bool is_first(const measurement *results, int i) {
    int first = 0;
    while (!same_line(&results[first], &results[i])) first++;
    return first == i;
}

/* A text in single quotes, which gnuplot takes as it is but for quotes, doubled. */
static void write_quoted(FILE *to, const char *text) {
    fputc('\'', to);
    for (; *text; text++) {
        if (*text == '\'') fputc('\'', to);
        fputc(*text, to);
    }
    fputc('\'', to);
}

static void write_data(FILE *to, const measurement *results, int count) {
    for (int i = 0; i < count; i++) {
        if (!is_first(results, i)) continue;
        fprintf(to, "$line%d << END\n", i);
        for (int k = i; k < count; k++)
            if (same_line(&results[i], &results[k]))
                fprintf(to, "%" PRId64 " %.6g\n", results[k].context, results[k].speedup_vs_softmax);
        fputs("END\n", to);
    }
}

static void write_script(FILE *to, const char *path, const measurement *results, int count) {
    int lines = 0;
    char name[320];
    write_data(to, results, count);
    for (int i = 0; i < count; i++) lines += is_first(results, i);
    fprintf(to, "set terminal svg size 900,%d background 'white'\nset output ", 480 + 18 * lines);
    write_quoted(to, path);
    fputs("\nset logscale x 2\nset logscale y 2\nset grid\nset key below\n"
          "set xlabel 'context (tokens)'\nset ylabel 'speed-up over softmax'\nset title ",
          to);
    snprintf(name, sizeof name, "EntmaxKV, backend %s, %s caches", results[0].backend, results[0].caches);
    write_quoted(to, name);
    fputs("\nplot ", to);
    for (int i = 0, written = 0; i < count; i++) {
        if (!is_first(results, i)) continue;
        line_name(&results[i], results, count, name, sizeof name);
        fprintf(to, "%s$line%d using 1:2 with linespoints title ", written++ ? ", " : "", i);
        write_quoted(to, name);
    }
    fputs("\nset output\n", to);
}

bool plot_draw(const char *path, const measurement *results, int count, lm_error *error) {
    struct sigaction ignore = {.sa_handler = SIG_IGN}, before;
    sigaction(SIGPIPE, &ignore, &before); /* a gnuplot that ends early is an error, not a signal */
    fflush(stdout);
    FILE *pipe = popen("gnuplot", "w");
    if (pipe) write_script(pipe, path, results, count);
    const bool written = pipe && fflush(pipe) == 0;
    const int status = pipe ? pclose(pipe) : -1;
    sigaction(SIGPIPE, &before, NULL);
    return (written && WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
           lm_fail(error, "gnuplot could not draw %s (its message is above)", path);
}
