/*
 * How many threads: physical cores of synthetic machines (hwloc), CPU quotas of fake cgroup trees (v1, v2, nested, mixed),
 * masks; that a step leaves affinity, OpenMP settings and floating-point control as they were; that contexts may be created by
 * many threads at once; that ENTMAXKV_BACKEND and the option are strict.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#if defined(__linux__)
#  define _GNU_SOURCE
#endif
#include "harness.h"

#include "dispatch/internal.h"

#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#  include <sched.h>
#endif
#if EKV_WITH_OPENMP
#  include <omp.h>
#endif
#if EKV_WITH_HWLOC
#  include <hwloc.h>
#endif

/* ---- Cores ------------------------------------------------------------------------------------------------------------ */

#if EKV_WITH_HWLOC
/* Usable cores of a synthetic machine for a process bound to the CPUs of `mask` (a hwloc list, "0,2,4-7"; NULL: all). */
static int cores_of(const char *machine, const char *mask) {
    hwloc_topology_t topology;
    hwloc_cpuset_t process = NULL;
    EXPECT(hwloc_topology_init(&topology) == 0, "hwloc_topology_init");
    EXPECT(hwloc_topology_set_synthetic(topology, machine) == 0 && hwloc_topology_load(topology) == 0, "machine %s", machine);
    if (mask) {
        process = hwloc_bitmap_alloc();
        EXPECT(process && hwloc_bitmap_list_sscanf(process, mask) == 0, "mask %s", mask);
    }
    const int cores = ekv_cores_of(topology, process);
    hwloc_bitmap_free(process);
    hwloc_topology_destroy(topology);
    return cores;
}

START_TEST(cores_of_synthetic_machines) {
    static const struct {
        const char *machine, *mask;
        int cores;
    } cases[] = {
        {"package:1 core:4 pu:1", NULL, 4},
        {"package:1 core:4 pu:2", NULL, 4},      /* siblings are not cores */
        {"package:1 core:4 pu:2", "0,2,4,6", 4}, /* one sibling of each core */
        {"package:1 core:4 pu:2", "0-1", 1},     /* both of one core */
        {"package:1 core:4 pu:2", "1-2", 2},     /* one each of two cores */
        {"package:1 core:4 pu:2", "7", 1},
        {"package:2 numa:1 core:16 pu:2", NULL, 32},
        {"package:2 numa:1 core:16 pu:2", "32-63", 16}, /* the second package */
        {"package:2 l3:4 l2:4 core:1 pu:2", NULL, 32},  /* cores below caches */
        {"package:1 core:2 pu:4", "0-3", 1},
        {"package:1 core:64 pu:4", "0,4,8", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int cores = cores_of(cases[i].machine, cases[i].mask);
        EXPECT(cores == cases[i].cores, "%s, bound to %s: %d cores, expected %d", cases[i].machine,
               cases[i].mask ? cases[i].mask : "all", cores, cases[i].cores);
    }
}
END_TEST

/* CPUs that the machine's administrator has taken away (a cpuset) count no more than those outside the process's mask. */
START_TEST(disallowed_cpus_do_not_count) {
    hwloc_topology_t topology;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
    EXPECT(hwloc_topology_init(&topology) == 0, "hwloc_topology_init");
    EXPECT(hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) == 0, "flags");
    EXPECT(hwloc_topology_set_synthetic(topology, "package:1 core:8 pu:2") == 0, "synthetic");
    EXPECT(hwloc_topology_load(topology) == 0, "load");
    hwloc_bitmap_list_sscanf(allowed, "0-5");
    EXPECT(hwloc_topology_allow(topology, allowed, NULL, HWLOC_ALLOW_FLAG_CUSTOM) == 0, "allow");
    EXPECT(ekv_cores_of(topology, NULL) == 3, "%d cores of 3 allowed", ekv_cores_of(topology, NULL));
    hwloc_bitmap_free(allowed);
    hwloc_topology_destroy(topology);
}
END_TEST
#endif

START_TEST(threads_for_cores_and_quota) {
    static const struct {
        int cores, cpus;
        double quota;
        int threads;
    } cases[] = {
        {8, 16, 0, 8},    {8, 16, 0.5, 1}, {8, 16, 1, 1},    {8, 16, 2.7, 2},
        {8, 16, 7.99, 7}, {8, 16, 8, 8},   {8, 16, 100, 8},  {0, 16, 0, 16}, /* cores unknown: logical CPUs */
        {0, 16, 3.5, 3},  {0, 0, 0, 1},    {1, 1, 0.001, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int threads = ekv_threads_for(cases[i].cores, cases[i].cpus, cases[i].quota);
        EXPECT(threads == cases[i].threads, "%d cores, %d CPUs, quota %g: %d threads, expected %d", cases[i].cores,
               cases[i].cpus, cases[i].quota, threads, cases[i].threads);
    }
}
END_TEST

/* ---- Quotas ----------------------------------------------------------------------------------------------------------- */

typedef struct tree {
    char root[64], self[80];
} tree;

static tree tree_make(void) {
    tree t;
    const char *base = getenv("TMPDIR");
    snprintf(t.root, sizeof t.root, "%.30s/ekv-cgroup-XXXXXX", base ? base : "/tmp");
    EXPECT(mkdtemp(t.root) != NULL, "mkdtemp %s", t.root);
    snprintf(t.self, sizeof t.self, "%s/self", t.root);
    return t;
}

static void tree_free(const tree *t) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", t->root);
    EXPECT(system(command) == 0, "%s", command);
}

/* Writes a file below the root, with the folders above it. */
static void tree_write(const tree *t, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", t->root, name);
    for (char *slash = path + strlen(t->root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    EXPECT(file && fputs(text, file) >= 0, "%s", path);
    fclose(file);
}

/* A tree of (file, text) pairs, the last pair NULL, and the quota that it grants. */
static void check_quota(const char *what, double expected, ...) {
    va_list list;
    const tree t = tree_make();
    va_start(list, expected);
    for (const char *name; (name = va_arg(list, const char *));)
        tree_write(&t, name, va_arg(list, const char *));
    va_end(list);
    const double quota = ekv_cpu_quota(t.root, t.self);
    EXPECT(fabs(quota - expected) < 1e-12, "%s: quota %g, expected %g", what, quota, expected);
    tree_free(&t);
}

#define END ((const char *)NULL)

START_TEST(quotas) {
    check_quota("nothing there", 0, END);
    check_quota("v2, no limit", 0.0, "cpu.max", "max 100000\n", END);
    check_quota("v2, half a CPU, inside a container", 0.5, "cpu.max", "50000 100000\n", END);
    check_quota("v2, own cgroup is the root", 2.5, "cpu.max", "250000 100000\n", "self", "0::/\n", END);
    check_quota("v2, nested", 1.5, "self", "0::/user.slice/app.scope\n", "user.slice/app.scope/cpu.max", "150000 100000\n",
                END);
    check_quota("v2, the parent is tighter", 0.5, "self", "0::/a/b/c\n", "a/b/c/cpu.max", "400000 100000\n", "a/b/cpu.max",
                "max 100000\n", "a/cpu.max", "50000 100000\n", END);
    check_quota("v2, the child is tighter", 3.0, "self", "0::/a/b\n", "a/b/cpu.max", "300000 100000\n", "a/cpu.max",
                "800000 100000\n", END);
    check_quota("v2, a path that is not there", 0.0, "self", "0::/../outside\n", "cpu.max", "max 100000\n", END);
    check_quota("v1, no limit", 0.0, "cpu/cpu.cfs_quota_us", "-1\n", "cpu/cpu.cfs_period_us", "100000\n", END);
    check_quota("v1, at the mount", 0.5, "cpu/cpu.cfs_quota_us", "50000\n", "cpu/cpu.cfs_period_us", "100000\n", END);
    check_quota("v1, both controllers in one mount", 2.0, "cpu,cpuacct/cpu.cfs_quota_us", "200000\n",
                "cpu,cpuacct/cpu.cfs_period_us", "100000\n", END);
    check_quota("v1, nested", 1.25, "self", "11:memory:/m\n4:cpu,cpuacct:/docker/1234\n1:name=systemd:/x\n",
                "cpu,cpuacct/docker/1234/cpu.cfs_quota_us", "125000\n", "cpu,cpuacct/docker/1234/cpu.cfs_period_us", "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us", "-1\n", "cpu,cpuacct/cpu.cfs_period_us", "100000\n", END);
    check_quota("v1, controllers in the other order", 0.75, "self", "4:cpuacct,cpu:/g\n", "cpuacct,cpu/g/cpu.cfs_quota_us",
                "75000\n", "cpuacct,cpu/g/cpu.cfs_period_us", "100000\n", END);
    check_quota("v1, cpuset is not cpu", 0.0, "self", "3:cpuset:/g\n", "cpu/g/cpu.cfs_quota_us", "75000\n",
                "cpu/g/cpu.cfs_period_us", "100000\n", END);
    check_quota("v1 and v2 side by side", 2.0, "self", "1:cpu:/g\n0::/g\n", "cpu/g/cpu.cfs_quota_us", "200000\n",
                "cpu/g/cpu.cfs_period_us", "100000\n", "unified/g/cpu.max", "max 100000\n", END);
    check_quota("garbage", 0.0, "cpu.max", "what?\n", "self", "no colons\n:\n::\n", END);
    check_quota("a period of zero", 0.0, "cpu.max", "100 0\n", END);
}
END_TEST

/* ---- This process ----------------------------------------------------------------------------------------------------- */

START_TEST(default_threads_respect_the_mask) {
    const int32_t all = ekv_default_threads();
    EXPECT(all >= 1, "%d threads", all);
#if defined(__linux__)
    cpu_set_t before, one;
    EXPECT(sched_getaffinity(0, sizeof before, &before) == 0, "sched_getaffinity");
    int first = 0;
    while (!CPU_ISSET(first, &before))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    EXPECT(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
    EXPECT(ekv_allowed_cpus() == 1, "%d CPUs of a mask of one", ekv_allowed_cpus());
    EXPECT(ekv_default_threads() == 1, "%d threads on a mask of one CPU", ekv_default_threads());
    sched_setaffinity(0, sizeof before, &before);
    EXPECT(ekv_default_threads() == all, "%d threads, %d before", ekv_default_threads(), all);
#endif
}
END_TEST

/* A step on 4,992 tokens in 4 heads, on data that no rounding mode changes. */
static void run_step(ekv_context *context, float out[4][8]) {
    enum { TOKENS = 4992, DIM = 8, HEADS = 4 };
    float *k = calloc((size_t)TOKENS * DIM * HEADS, sizeof *k), q[HEADS * DIM];
    const int32_t length = TOKENS;
    ekv_kv kv = ekv_kv_default();
    ekv_decode_params step = ekv_decode_params_default();
    for (int i = 0; i < TOKENS * DIM * HEADS; i++)
        k[i] = (float)((i * 37) % 101) * 0.015625f - 0.75f; /* exact */
    for (int i = 0; i < HEADS * DIM; i++)
        q[i] = (float)(i % 7) * 0.25f - 1.0f;
    kv.dtype = EKV_F32;
    kv.kv_heads = HEADS;
    kv.k_dim = kv.v_dim = DIM;
    kv.page_size = 16;
    kv.k = kv.v = k;
    kv.k_head_stride = kv.v_head_stride = DIM;
    kv.k_token_stride = kv.v_token_stride = DIM * HEADS;
    kv.k_block_stride = kv.v_block_stride = 16 * DIM * HEADS;
    kv.blocks = TOKENS / 16;
    step.kv = &kv;
    step.lengths = &length;
    step.block_table_stride = kv.blocks;
    step.q_heads = HEADS;
    step.q = q;
    step.out = out;
    EXPECT_OK(context, ekv_decode(context, &step));
    free(k);
}

/* Flush-to-zero and a rounding mode that is not the default: kept for the caller, and without influence on results. */
START_TEST(a_step_leaves_no_trace) {
    float right[4][8], got[4][8];
    ekv_context *context = context_open(NULL, 3);
    run_step(context, right);
    fenv_t before;
    EXPECT(fesetround(FE_UPWARD) == 0, "fesetround");
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u); /* flush to zero, denormals are zero */
    const unsigned control = __builtin_ia32_stmxcsr();
#endif
    fegetenv(&before);
#if defined(__linux__)
    cpu_set_t affinity, now;
    sched_getaffinity(0, sizeof affinity, &affinity);
#endif
#if EKV_WITH_OPENMP
    omp_set_num_threads(2);
    const int most = omp_get_max_threads(), dynamic = omp_get_dynamic(), levels = omp_get_max_active_levels();
#endif
    run_step(context, got);
#if EKV_WITH_OPENMP
    EXPECT(omp_get_max_threads() == most && omp_get_dynamic() == dynamic && omp_get_max_active_levels() == levels,
           "OpenMP settings changed");
#endif
#if defined(__linux__)
    sched_getaffinity(0, sizeof now, &now);
    EXPECT(CPU_EQUAL(&affinity, &now), "the affinity mask changed");
#endif
#if defined(__SSE__)
    EXPECT((__builtin_ia32_stmxcsr() & ~0x3fu) == (control & ~0x3fu), "MXCSR is %x, was %x", __builtin_ia32_stmxcsr(), control);
    __builtin_ia32_ldmxcsr(0x1f80);
#endif
    EXPECT(fegetround() == FE_UPWARD || fegetround() == FE_TONEAREST, "rounding mode %d", fegetround());
    fesetround(FE_TONEAREST);
    EXPECT(memcmp(right, got, sizeof right) == 0, "the caller's floating-point modes changed the result");
    ekv_context_destroy(context);
}
END_TEST

static void *create_and_run(void *arg) {
    float out[4][8];
    ekv_context_params params = ekv_context_params_default();
    ekv_context *context = NULL;
    params.threads = 1;
    if (ekv_context_create(&params, &context, NULL, 0) != EKV_OK)
        return NULL;
    run_step(context, out);
    ekv_context_destroy(context);
    return arg;
}

START_TEST(first_use_by_many_threads) {
    enum { THREADS = 12 };
    pthread_t thread[THREADS];
    int mark[THREADS];
    for (int i = 0; i < THREADS; i++)
        EXPECT(pthread_create(&thread[i], NULL, create_and_run, &mark[i]) == 0, "thread %d", i);
    for (int i = 0; i < THREADS; i++) {
        void *result = NULL;
        pthread_join(thread[i], &result);
        EXPECT(result == &mark[i], "thread %d could not create a context", i);
    }
}
END_TEST

/* ---- Which backend ---------------------------------------------------------------------------------------------------- */

static ekv_status create(const char *option, const char *environment, char *message, size_t size, char name[32]) {
    ekv_context_params params = ekv_context_params_default();
    ekv_context *context = NULL;
    params.backend = option;
    if (environment)
        setenv("ENTMAXKV_BACKEND", environment, 1);
    else
        unsetenv("ENTMAXKV_BACKEND");
    message[0] = 0;
    const ekv_status status = ekv_context_create(&params, &context, message, size);
    snprintf(name, 32, "%s", context ? ekv_context_backend(context) : "");
    ekv_context_destroy(context);
    unsetenv("ENTMAXKV_BACKEND");
    return status;
}

START_TEST(a_forced_backend_is_strict) {
    char message[512], name[32];
    EXPECT(create(NULL, "scalar", message, sizeof message, name) == EKV_OK && strcmp(name, "scalar") == 0, "%s %s", name,
           message);
    EXPECT(create("reference", "scalar", message, sizeof message, name) == EKV_OK && strcmp(name, "reference") == 0,
           "the option goes before the environment: %s %s", name, message);
    EXPECT(create(NULL, "", message, sizeof message, name) == EKV_OK && strcmp(name, "reference") != 0,
           "an empty variable is none: %s", name);
    const char *const unknown[] = {"avx1024", "Scalar", " scalar"};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        EXPECT(create(NULL, unknown[i], message, sizeof message, name) == EKV_ERROR_UNAVAILABLE, "%s was taken", unknown[i]);
        EXPECT(strstr(message, unknown[i]) && strstr(message, "scalar, reference"), "message: %s", message);
        EXPECT(create(unknown[i], NULL, message, sizeof message, name) == EKV_ERROR_UNAVAILABLE, "%s was taken", unknown[i]);
    }
    ekv_backend_info info = {.size = sizeof info};
    for (int32_t i = 0; ekv_backend(i, &info) == EKV_OK; i++) {
        const ekv_status status = create(info.name, NULL, message, sizeof message, name);
        EXPECT(status == (info.available ? EKV_OK : EKV_ERROR_UNAVAILABLE), "%s: %s", info.name, message);
        EXPECT(!info.available || strcmp(name, info.name) == 0, "asked for %s, got %s", info.name, name);
    }
}
END_TEST

int main(void) {
    const test_entry tests[] = {
#if EKV_WITH_HWLOC
        TEST_ENTRY(cores_of_synthetic_machines),
        TEST_ENTRY(disallowed_cpus_do_not_count),
#endif
        TEST_ENTRY(threads_for_cores_and_quota),
        TEST_ENTRY(quotas),
        TEST_ENTRY(default_threads_respect_the_mask),
        TEST_ENTRY(a_step_leaves_no_trace),
        TEST_ENTRY(first_use_by_many_threads),
        TEST_ENTRY(a_forced_backend_is_strict),
    };
    return HARNESS_MAIN("test_threads", tests);
}
