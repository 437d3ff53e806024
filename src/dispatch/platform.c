/*
 * Everything that depends on the operating system: the affinity mask, the container's CPU quota, and for conformance memory
 * between inaccessible pages and the catching of faults.  Other systems get plain fallbacks here, and nowhere else.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#if defined(__linux__)
#  define _GNU_SOURCE
#endif
#include "dispatch/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#  include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#  define EKV_POSIX 1
#  include <setjmp.h>
#  include <signal.h>
#  include <sys/mman.h>
#  include <unistd.h>
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

/* The first line of directory/name, false if there is none. */
static bool read_line(const char *directory, const char *name, char *line, int size) {
    char path[1024];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, name) >= sizeof path) return false;
    FILE *file = fopen(path, "r");
    if (!file) return false;
    const bool ok = fgets(line, size, file) != NULL;
    fclose(file);
    return ok;
}

/* The quota that one cgroup sets, 0 if none. */
static double quota_v2(const char *directory) { /* cpu.max: "max 100000" or "50000 100000" */
    char line[128];
    double quota = 0.0, period = 0.0;
    if (!read_line(directory, "cpu.max", line, sizeof line) || sscanf(line, "%lf %lf", &quota, &period) != 2) return 0.0;
    return quota > 0.0 && period > 0.0 ? quota / period : 0.0;
}

static double quota_v1(const char *directory) { /* cfs_quota_us: -1, or microseconds per period */
    char line[128];
    if (!read_line(directory, "cpu.cfs_quota_us", line, sizeof line)) return 0.0;
    const double quota = atof(line);
    if (!read_line(directory, "cpu.cfs_period_us", line, sizeof line)) return 0.0;
    const double period = atof(line);
    return quota > 0.0 && period > 0.0 ? quota / period : 0.0;
}

/* The least quota of a cgroup and its ancestors, up to where they are mounted. */
static double least_quota(const char *mount, const char *group, double (*quota_of)(const char *)) {
    char path[768];
    double least = 0.0;
    if ((size_t)snprintf(path, sizeof path, "%s%s", mount, group) >= sizeof path) return 0.0;
    for (;;) {
        const double quota = quota_of(path);
        if (quota > 0.0 && (least == 0.0 || quota < least)) least = quota;
        if (strlen(path) <= strlen(mount)) return least;
        *strrchr(path, '/') = 0;
    }
}

static double least_positive(double a, double b) { return a == 0.0 ? b : b == 0.0 ? a : a < b ? a : b; }

/* Whether `cpu` is among the names of a line's controllers, "cpu,cpuacct". */
static bool has_cpu(const char *controllers) {
    for (const char *at = controllers; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, "cpu", 3) == 0 && (at[3] == 0 || at[3] == ',')) return true;
    }
    return false;
}

/* One line of /proc/self/cgroup, "number:controllers:path"; v2 has number 0 and no controllers. */
static double quota_of_line(const char *root, char *line) {
    static const char *const mounts[] = {"cpu", "cpu,cpuacct", "cpuacct,cpu"};
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL, mount[512];
    double quota = 0.0;
    if (!path) return 0.0;
    *controllers++ = 0;
    *path++ = 0;
    path[strcspn(path, "\n")] = 0;
    if (path[0] != '/') return 0.0;
    if (strcmp(path, "/") == 0) path[0] = 0;
    if (controllers[0] == 0) { /* v2, alone or beside v1 */
        quota = least_quota(root, path, quota_v2);
        if ((size_t)snprintf(mount, sizeof mount, "%s/unified", root) < sizeof mount)
            quota = least_positive(quota, least_quota(mount, path, quota_v2));
    } else if (has_cpu(controllers)) {
        for (size_t i = 0; i < sizeof mounts / sizeof mounts[0]; i++)
            if ((size_t)snprintf(mount, sizeof mount, "%s/%s", root, mounts[i]) < sizeof mount)
                quota = least_positive(quota, least_quota(mount, path, quota_v1));
    }
    return quota;
}

double ekv_cpu_quota(const char *root, const char *self) {
    static const char *const mounts[] = {"cpu", "cpu,cpuacct", "cpuacct,cpu", "."};
    char text[2048];
    double quota = quota_v2(root);
    for (size_t i = 0; i < sizeof mounts / sizeof mounts[0]; i++)
        if ((size_t)snprintf(text, sizeof text, "%s/%s", root, mounts[i]) < sizeof text)
            quota = least_positive(quota, quota_v1(text));
    FILE *file = fopen(self, "r");
    if (!file) return quota;
    while (fgets(text, sizeof text, file)) quota = least_positive(quota, quota_of_line(root, text));
    fclose(file);
    return quota;
}

/* ---- conformance: guarded memory and faults ---- */

void ekv_prefer_huge_pages(void *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    (void)madvise(memory, bytes, MADV_HUGEPAGE); /* a wish: kernels without them refuse */
#else
    (void)memory;
    (void)bytes;
#endif
}

#if EKV_POSIX
size_t ekv_memory_page(void) {
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? (size_t)page : 4096;
}

unsigned char *ekv_guarded_allocate(size_t span) {
    const size_t page = ekv_memory_page();
    unsigned char *memory = mmap(NULL, span + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (mprotect(memory + page, span, PROT_READ | PROT_WRITE) != 0) {
        munmap(memory, span + 2 * page);
        return NULL;
    }
    return memory + page;
}

void ekv_guarded_release(unsigned char *base, size_t span) {
    const size_t page = ekv_memory_page();
    if (base) munmap(base - page, span + 2 * page);
}

#  define FAULTS 4
static const int fault_signals[FAULTS] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
static struct sigaction fault_previous[FAULTS];

/* The place to return to, for the thread that runs a case; NULL in all others. */
typedef struct fault_frame {
    sigjmp_buf place;
    volatile int signal;
    void *volatile address;
} fault_frame;
static _Thread_local fault_frame *volatile fault_current;

static void on_fault(int number, siginfo_t *info, void *machine) {
    fault_frame *frame = fault_current;
    (void)machine;
    if (frame) {
        frame->signal = number;
        frame->address = info->si_addr;
        siglongjmp(frame->place, 1);
    }
    /* Not ours: with the former handler back in its place the instruction faults again. */
    for (int i = 0; i < FAULTS; i++)
        if (fault_signals[i] == number) sigaction(number, &fault_previous[i], NULL);
}

void ekv_faults_begin(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < FAULTS; i++) sigaction(fault_signals[i], &action, &fault_previous[i]);
}

void ekv_faults_end(void) {
    for (int i = 0; i < FAULTS; i++) sigaction(fault_signals[i], &fault_previous[i], NULL);
}

const char *ekv_catch_fault(void (*call)(void *arg), void *arg, const void **address) {
    fault_frame frame;
    frame.signal = 0;
    frame.address = NULL;
    if (sigsetjmp(frame.place, 1) == 0) {
        fault_current = &frame;
        call(arg);
    }
    fault_current = NULL;
    *address = frame.address;
    return frame.signal == 0        ? NULL
           : frame.signal == SIGILL ? "illegal instruction"
           : frame.signal == SIGFPE ? "arithmetic fault"
                                    : "memory fault";
}
#else
size_t ekv_memory_page(void) { return 4096; }
unsigned char *ekv_guarded_allocate(size_t span) { return malloc(span); }
void ekv_guarded_release(unsigned char *base, size_t span) {
    (void)span;
    free(base);
}
void ekv_faults_begin(void) {}
void ekv_faults_end(void) {}
const char *ekv_catch_fault(void (*call)(void *arg), void *arg, const void **address) {
    *address = NULL;
    call(arg);
    return NULL;
}
#endif
