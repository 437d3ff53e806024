/*
 * Everything that depends on the operating system: the affinity mask, the container's CPU quota, and for conformance memory between
 * inaccessible pages and the catching of faults.  Other systems get plain fallbacks here, and nowhere else.
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
#endif
#if defined(__unix__) || defined(__APPLE__)
#define EKV_POSIX 1
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
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

/* ---- conformance: guarded memory and faults ---- */

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

#define FAULTS 4
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
