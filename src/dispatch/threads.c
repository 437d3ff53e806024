/*
 * Tasks: how many threads, and running a loop on them without leaving a trace in the host process.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/internal.h"

#if EKV_WITH_OPENMP
#include <omp.h>
#endif
#if EKV_WITH_HWLOC
#include <hwloc.h>
#endif
#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

/* ---- floating-point control: results must not depend on the rounding or flush-to-zero mode of the calling thread ---- */

#if defined(__SSE__) || defined(_M_X64)
typedef unsigned fp_control;
static fp_control fp_enter(void) {
    const fp_control saved = _mm_getcsr();
    _mm_setcsr(0x1f80); /* round to nearest, subnormals kept, exceptions masked */
    return saved;
}
static void fp_leave(fp_control saved) { _mm_setcsr(saved); }
#elif defined(__aarch64__)
typedef struct { uint64_t control, status; } fp_control;
static fp_control fp_enter(void) {
    fp_control saved;
    const uint64_t standard = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved.control));
    __asm__ volatile("mrs %0, fpsr" : "=r"(saved.status));
    __asm__ volatile("msr fpcr, %0" : : "r"(standard));
    return saved;
}
static void fp_leave(fp_control saved) {
    __asm__ volatile("msr fpcr, %0" : : "r"(saved.control));
    __asm__ volatile("msr fpsr, %0" : : "r"(saved.status));
}
#else
#include <fenv.h>
typedef fenv_t fp_control;
static fp_control fp_enter(void) {
    fp_control saved;
    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
    return saved;
}
static void fp_leave(fp_control saved) { fesetenv(&saved); }
#endif

/* ---- loops ---- */

typedef struct loop {
    ekv_task task;
    void *arg;
} loop;

static void run_task(void *arg, int64_t i) {
    const loop *l = arg;
    const fp_control saved = fp_enter();
    l->task(l->arg, i);
    fp_leave(saved);
}

void ekv_parallel(ekv_context *context, int64_t n, ekv_task task, void *arg) {
    loop l = {task, arg};
    if (n <= 1 || context->threads == 1) {
        for (int64_t i = 0; i < n; i++) run_task(&l, i);
    } else if (context->parallel_for) {
        context->parallel_for(context->parallel_user, n, run_task, &l);
    } else {
#if EKV_WITH_OPENMP
        /* Always the whole team, also for few tasks: libgomp ends and starts threads when the size of a team changes. */
#pragma omp parallel for schedule(dynamic, 1) num_threads(context->threads)
        for (int64_t i = 0; i < n; i++) run_task(&l, i);
#else
        for (int64_t i = 0; i < n; i++) run_task(&l, i);
#endif
    }
}

int ekv_claim_slot(ekv_context *context) {
    for (int i = 0;; i = i + 1 < context->threads ? i + 1 : 0)
        if (!atomic_exchange_explicit(&context->slots[i], 1, memory_order_acquire)) return i;
}

void ekv_release_slot(ekv_context *context, int slot) { atomic_store_explicit(&context->slots[slot], 0, memory_order_release); }

/* ---- the default number ---- */

int32_t ekv_threads_for(int cores, int cpus, double quota) {
    int threads = cores >= 1 ? cores : cpus;
    if (quota > 0.0 && quota < threads) threads = quota < 1.0 ? 1 : (int)quota;
    return threads < 1 ? 1 : threads;
}

#if EKV_WITH_HWLOC
int ekv_cores_of(void *machine, void *process) {
    const hwloc_topology_t topology = machine;
    hwloc_cpuset_t usable = hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology));
    int cores = 0;
    if (usable && process) hwloc_bitmap_and(usable, usable, process);
    for (hwloc_obj_t core = NULL; usable && (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core));)
        cores += hwloc_bitmap_intersects(core->cpuset, usable);
    hwloc_bitmap_free(usable);
    return cores;
}

/* The same of this machine and thread; 0 if the topology cannot be read. */
static int physical_cores(void) {
    hwloc_topology_t topology;
    int cores = 0;
    if (hwloc_topology_init(&topology)) return 0;
    if (!hwloc_topology_load(topology)) {
        hwloc_cpuset_t process = hwloc_bitmap_alloc();
        const int bound = process && !hwloc_get_cpubind(topology, process, HWLOC_CPUBIND_THREAD);
        cores = ekv_cores_of(topology, bound ? process : NULL);
        hwloc_bitmap_free(process);
    }
    hwloc_topology_destroy(topology);
    return cores;
}
#else
static int physical_cores(void) { return 0; }
#endif

int32_t ekv_default_threads(void) {
    return ekv_threads_for(physical_cores(), ekv_allowed_cpus(), ekv_cpu_quota("/sys/fs/cgroup", "/proc/self/cgroup"));
}
