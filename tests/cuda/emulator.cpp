/*
 * A CUDA device made of coroutines, so that the CUDA backend can be tested where there is no GPU.
 *
 * Blocks run one after another, their threads as coroutines that switch at the collectives of a warp or of the block.  The order of
 * blocks and of warps is reversed from one launch to the next, so that results which depend on it differ.  A collective that not
 * all lanes reach, or that they reach under different names, ends the program with a message.  Device memory can be accessed
 * during launches and copies alone and ends at an inaccessible page: host code that follows a device pointer, or a kernel that
 * leaves its buffers, faults.  What it cannot show: races between blocks and between warps that lie between two collectives,
 * memory ordering, speed.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda_runtime.h"

#include <cstdio>
#include <cstdlib>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned MOST_THREADS = 1024;
constexpr size_t STACK = 256 << 10;
constexpr int PROCESSORS = 4, MAJOR = 9;

[[noreturn]] void give_up(const char *format, const char *a, const char *b, unsigned thread) {
    fprintf(stderr, "emulated device: ");
    fprintf(stderr, format, a, b, thread, blockIdx.x);
    fprintf(stderr, "\n");
    abort();
}

/* ---- coroutines ---- */

struct coroutine {
    ucontext_t first;
    jmp_buf place;
    char *stack;
    bool made, done;
    const unsigned *event; /* waits until *event is no longer `seen` */
    unsigned seen;
    unsigned exchanges;
};

struct warp_state {
    uint64_t value[2][32]; /* two in turn: a lane writes the next while others still read */
    const char *what;
    unsigned arrived, live, event;
};

coroutine routine[MOST_THREADS];
warp_state warps[MOST_THREADS / 32];
unsigned block_arrived, block_live, block_event, current;
jmp_buf scheduler;
bool running;
void (*body)(void *);
void *body_arg;
unsigned launches;

void suspend() {
    if (!_setjmp(routine[current].place)) _longjmp(scheduler, 1);
}

void leave() {
    coroutine &c = routine[current];
    warp_state &w = warps[current / 32];
    c.done = true;
    if (--w.live > 0 && w.arrived == w.live) w.arrived = 0, w.event++; /* threads that have ended count as arrived */
    if (--block_live > 0 && block_arrived == block_live) block_arrived = 0, block_event++;
    suspend();
}

void run_thread() {
    for (;;) {
        body(body_arg);
        leave();
    }
}

void resume(unsigned thread) {
    coroutine &c = routine[thread];
    current = thread;
    threadIdx = dim3(thread, 0, 0);
    if (_setjmp(scheduler)) return;
    if (c.made) _longjmp(c.place, 1);
    c.made = true;
    if (!c.stack) c.stack = (char *)malloc(STACK);
    getcontext(&c.first);
    c.first.uc_stack.ss_sp = c.stack;
    c.first.uc_stack.ss_size = STACK;
    makecontext(&c.first, run_thread, 0);
    setcontext(&c.first);
}

void wait_for(const unsigned *event, unsigned seen) {
    coroutine &c = routine[current];
    c.event = event;
    c.seen = seen;
    suspend();
}

/* Runs a warp until none of its threads can go on; says whether any could. */
bool run_warp(unsigned warp) {
    bool any = false;
    for (bool again = true; again;) {
        again = false;
        for (unsigned t = warp * 32; t < warp * 32 + 32; t++) {
            coroutine &c = routine[t];
            if (c.done || (c.event && *c.event == c.seen)) continue;
            c.event = nullptr;
            resume(t);
            any = again = true;
        }
    }
    return any;
}

void run_block(unsigned threads, bool backwards) {
    const unsigned count = threads / 32;
    block_arrived = block_event = 0;
    block_live = threads;
    for (unsigned w = 0; w < count; w++) warps[w].arrived = warps[w].event = 0, warps[w].live = 32;
    for (unsigned t = 0; t < threads; t++) routine[t].done = false, routine[t].event = nullptr, routine[t].exchanges = 0;
    for (bool any = true; any;) {
        any = false;
        for (unsigned w = 0; w < count; w++) any |= run_warp(backwards ? count - 1 - w : w);
    }
    if (block_live) give_up("a collective is not reached by all%s%s: thread %u of block %u", "", "", current);
}

/* ---- memory ---- */

struct allocation {
    char *base, *memory; /* mapped; handed out */
    size_t mapped, usable;
    allocation *next;
};
allocation *allocations;

void protect(int access) {
    for (allocation *a = allocations; a; a = a->next) mprotect(a->base, a->usable, access);
}

} // namespace

extern "C" {

void emulator_sync_block(void) {
    if (++block_arrived == block_live) {
        block_arrived = 0;
        block_event++;
    } else {
        wait_for(&block_event, block_event);
    }
}

const uint64_t *emulator_exchange(const char *what, uint64_t value) {
    coroutine &c = routine[current];
    warp_state &w = warps[current / 32];
    uint64_t *values = w.value[c.exchanges++ & 1];
    if (w.arrived == 0)
        w.what = what;
    else if (w.what != what && strcmp(w.what, what) != 0)
        give_up("lanes of a warp meet in %s and in %s: thread %u of block %u", w.what, what, current);
    values[current & 31] = value;
    if (++w.arrived == w.live) {
        w.arrived = 0;
        w.event++;
    } else {
        wait_for(&w.event, w.event);
    }
    return values;
}

cudaError_t emulator_launch(unsigned blocks, unsigned threads, void (*thread)(void *), void *arg) {
    if (blocks == 0 || threads == 0 || threads > MOST_THREADS || threads % 32) return cudaErrorInvalidConfiguration;
    if (running) /* a fault ended the launch before */
        for (coroutine &c : routine) c.made = false;
    const bool backwards = launches++ & 1;
    running = true;
    body = thread;
    body_arg = arg;
    blockDim = dim3(threads);
    gridDim = dim3(blocks);
    protect(PROT_READ | PROT_WRITE);
    for (unsigned b = 0; b < blocks; b++) {
        blockIdx = dim3(backwards ? blocks - 1 - b : b, 0, 0);
        run_block(threads, backwards);
    }
    protect(PROT_NONE);
    running = false;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess                     ? "no error"
           : error == cudaErrorMemoryAllocation     ? "out of memory"
           : error == cudaErrorInvalidConfiguration ? "invalid configuration"
                                                    : "error";
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? PROCESSORS : MAJOR;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int) {
    *properties = {"emulated", (size_t)1 << 30, MAJOR, 0, PROCESSORS};
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), rounded = (bytes + 255) / 256 * 256;
    allocation *a = (allocation *)malloc(sizeof *a);
    a->usable = (rounded + page - 1) / page * page;
    a->mapped = a->usable + page;
    a->base = (char *)mmap(NULL, a->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a->base == MAP_FAILED) return free(a), cudaErrorMemoryAllocation;
    a->memory = a->base + a->usable - rounded;
    a->next = allocations;
    allocations = a;
    mprotect(a->base, a->usable, PROT_READ | PROT_WRITE);
    memset(a->base, 0xFF, a->usable); /* NaN in every type */
    mprotect(a->base, a->usable, PROT_NONE);
    *memory = a->memory;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    for (allocation **p = &allocations; *p; p = &(*p)->next) {
        allocation *a = *p;
        if (a->memory != memory) continue;
        *p = a->next;
        munmap(a->base, a->mapped);
        free(a);
        return cudaSuccess;
    }
    return memory ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t) {
    protect(PROT_READ | PROT_WRITE);
    memset(memory, value, bytes);
    protect(PROT_NONE);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind, cudaStream_t) {
    protect(PROT_READ | PROT_WRITE);
    memcpy(to, from, bytes);
    protect(PROT_NONE);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind, cudaStream_t) {
    protect(PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < height; i++) memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    protect(PROT_NONE);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
}
