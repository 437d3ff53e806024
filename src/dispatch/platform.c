/*
 * Everything that depends on the operating system: the affinity mask and the container's CPU quota.  Other systems get plain
 * fallbacks here, and nowhere else.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "dispatch/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#elif defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

int ekv_allowed_cpus(void) {
#if defined(__linux__)
    /* The set grows until it holds the machine's highest CPU number. */
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (!set) break;
        const size_t bytes = CPU_ALLOC_SIZE(cpus);
        const int ok = sched_getaffinity(0, bytes, set) == 0, count = ok ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (ok && count > 0) return count;
    }
#endif
#if defined(_SC_NPROCESSORS_ONLN)
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (online > 0) return (int)online;
#endif
    return 1;
}

/* The first line of root/name, false if there is none. */
static bool read_line(const char *root, const char *name, char *line, int size) {
    char path[512];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", root, name) >= sizeof path) return false;
    FILE *file = fopen(path, "r");
    if (!file) return false;
    const bool ok = fgets(line, size, file) != NULL;
    fclose(file);
    return ok;
}

double ekv_cpu_quota(const char *root) {
    char line[128];
    double quota = 0.0, period = 0.0;
    if (read_line(root, "cpu.max", line, sizeof line)) /* v2: "max 100000" or "50000 100000" */
        return sscanf(line, "%lf %lf", &quota, &period) == 2 && quota > 0.0 && period > 0.0 ? quota / period : 0.0;
    static const char *const v1[] = {"cpu", "cpu,cpuacct", "."};
    for (size_t i = 0; i < sizeof v1 / sizeof v1[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s/cpu.cfs_quota_us", v1[i]);
        if (!read_line(root, name, line, sizeof line)) continue;
        quota = atof(line); /* -1: no limit */
        snprintf(name, sizeof name, "%s/cpu.cfs_period_us", v1[i]);
        if (!read_line(root, name, line, sizeof line)) continue;
        period = atof(line);
        return quota > 0.0 && period > 0.0 ? quota / period : 0.0;
    }
    return 0.0;
}
