/*
 * The context: backend, threads, allocator, scratch memory, the last error; and the names of enums.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"
#include "dispatch/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *ekv_strerror(ekv_status status) {
    switch (status) {
    case EKV_OK: return "success";
    case EKV_ERROR_INVALID_ARGUMENT: return "invalid argument";
    case EKV_ERROR_UNSUPPORTED: return "unsupported";
    case EKV_ERROR_OUT_OF_MEMORY: return "out of memory";
    case EKV_ERROR_CAPACITY: return "capacity exceeded";
    case EKV_ERROR_UNAVAILABLE: return "backend unavailable";
    case EKV_ERROR_INTERNAL: return "internal error";
    }
    return "unknown status";
}

const char *ekv_dtype_name(ekv_dtype dtype) {
    static const char *const names[] = {"f32", "f16", "bf16"};
    return ekv_dtype_valid(dtype) ? names[dtype] : "?";
}

const char *ekv_policy_name(ekv_policy policy) {
    static const char *const names[] = {"full", "topk", "gaussian", "pages", "certified"};
    return (int)policy >= 0 && (size_t)policy < sizeof names / sizeof names[0] ? names[policy] : "?";
}

int ekv_version(void) { return EKV_VERSION; }

ekv_status ekv_fail(ekv_context *context, ekv_status status, const char *format, ...) {
    if (context) {
        va_list list;
        va_start(list, format);
        vsnprintf(context->message, sizeof context->message, format, list);
        va_end(list);
    }
    return status;
}

bool ekv_copy_params(void *to, size_t to_size, const void *from, size_t least) {
    size_t size;
    memcpy(&size, from, sizeof size);
    if (size < least || size > 65536) return false;
    memcpy(to, from, size < to_size ? size : to_size);
    memcpy(to, &to_size, sizeof to_size);
    return true;
}

/* ---- memory ---- */

/* Caches and indexes are read in small pieces all over, so large blocks ask for huge pages.  So large, malloc maps a block of its own
 * and unmaps it when it is freed: the host's heap is not touched. */
static void *default_allocate(void *user, size_t bytes, size_t alignment) {
    const size_t huge_page = (size_t)2 << 20, least = (size_t)64 << 20;
    (void)user;
    if (bytes >= least) alignment = huge_page;
    void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (memory && bytes >= least) ekv_prefer_huge_pages(memory, bytes);
    return memory;
}

static void default_release(void *user, void *memory, size_t bytes) {
    (void)user;
    (void)bytes;
    free(memory);
}

void *ekv_allocate(const ekv_allocator *allocator, size_t bytes) {
    return allocator->allocate(allocator->user, bytes ? bytes : 1, EKV_ALIGNMENT);
}

void ekv_release(const ekv_allocator *allocator, void *memory, size_t bytes) {
    if (memory) allocator->release(allocator->user, memory, bytes ? bytes : 1);
}

void *ekv_take(ekv_arena *arena, size_t count, size_t size) {
    const size_t bytes = (count * size + EKV_ALIGNMENT - 1) / EKV_ALIGNMENT * EKV_ALIGNMENT;
    void *memory = arena->base ? arena->base + arena->used : NULL;
    arena->used += bytes;
    return memory;
}

ekv_status ekv_need_scratch(ekv_context *context, size_t bytes) {
    if (bytes <= context->scratch_bytes) return EKV_OK;
    void *memory = ekv_allocate(&context->allocator, bytes);
    if (!memory) return ekv_fail(context, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes of scratch", bytes);
    ekv_release(&context->allocator, context->scratch, context->scratch_bytes);
    context->scratch = memory;
    context->scratch_bytes = bytes;
    return EKV_OK;
}

/* ---- the context ---- */

static ekv_status set_message(char *message, size_t size, ekv_status status, const char *text, const char *name) {
    char available[128];
    if (!message || !size) return status;
    if (status == EKV_ERROR_UNAVAILABLE) {
        ekv_list_available(available, sizeof available);
        snprintf(message, size, "backend \"%s\" %s; available: %s", name, text, available);
    } else {
        snprintf(message, size, "%s", text);
    }
    return status;
}

static ekv_status bad_threads(char *message, size_t size, int32_t threads) {
    if (message && size) snprintf(message, size, "params->threads is %d, not in 0..4096", (int)threads);
    return EKV_ERROR_INVALID_ARGUMENT;
}

/* The backend that was asked for, by option or environment, or the best. */
static ekv_status choose_backend(ekv_context *context, const char *option, void *stream, char *message, size_t size) {
    const char *environment = option ? NULL : getenv("ENTMAXKV_BACKEND");
    const char *name = option ? option : environment && environment[0] ? environment : NULL;
    ekv_backend_entry entry;
    if (!ekv_find_backend(name, &entry)) return set_message(message, size, EKV_ERROR_UNAVAILABLE, "is not part of this build", name);
    if (!entry.available) return set_message(message, size, EKV_ERROR_UNAVAILABLE, entry.note, name);
    context->kernels = entry.kernels;
    if (strcmp(entry.name, "cuda") == 0) {
        ekv_backend_entry cpu;
        if (ekv_cuda_open(context, stream) != EKV_OK) return set_message(message, size, EKV_ERROR_UNAVAILABLE, context->message, name);
        if (ekv_find_backend(NULL, &cpu)) context->kernels = cpu.kernels;
    }
    context->backend = entry.name;
    snprintf(context->reason, sizeof context->reason, "%s",
             option ? "asked for by the context's parameters" : name ? "asked for by ENTMAXKV_BACKEND"
                                                                     : "the best that this machine can run");
    return EKV_OK;
}

ekv_status ekv_context_create(const ekv_context_params *params, ekv_context **context, char *message, size_t message_size) {
    ekv_context_params p = ekv_context_params_default();
    if (!context) return set_message(message, message_size, EKV_ERROR_INVALID_ARGUMENT, "context is NULL", NULL);
    *context = NULL;
    if (params && !ekv_copy_params(&p, sizeof p, params, sizeof(size_t)))
        return set_message(message, message_size, EKV_ERROR_INVALID_ARGUMENT, "params->size is not that of an ekv_context_params", NULL);
    if (p.threads < 0 || p.threads > 4096)
        return bad_threads(message, message_size, p.threads);
    if (!p.allocator.allocate != !p.allocator.release)
        return set_message(message, message_size, EKV_ERROR_INVALID_ARGUMENT,
                           "params->allocator has only one of allocate and release", NULL);
    if (!p.allocator.allocate) {
        p.allocator.allocate = default_allocate;
        p.allocator.release = default_release;
    }
    ekv_context *c = ekv_allocate(&p.allocator, sizeof *c);
    if (!c) return set_message(message, message_size, EKV_ERROR_OUT_OF_MEMORY, "out of memory for the context", NULL);
    memset(c, 0, sizeof *c);
    c->allocator = p.allocator;
    c->parallel_for = p.parallel_for;
    c->parallel_user = p.parallel_user;
    c->fixed_scratch = p.fixed_scratch != 0;
    c->max_scratch = p.max_scratch ? p.max_scratch : EKV_DEFAULT_MAX_SCRATCH;
    const ekv_status status = choose_backend(c, p.backend, p.stream, message, message_size);
    if (status != EKV_OK) {
        ekv_release(&p.allocator, c, sizeof *c);
        return status;
    }
    c->threads = p.threads ? p.threads : ekv_default_threads();
    c->slots = ekv_allocate(&c->allocator, (size_t)c->threads * sizeof *c->slots);
    if (!c->slots) {
        ekv_cuda_close(c);
        ekv_release(&p.allocator, c, sizeof *c);
        return set_message(message, message_size, EKV_ERROR_OUT_OF_MEMORY, "out of memory for the context", NULL);
    }
    for (int i = 0; i < c->threads; i++) atomic_init(&c->slots[i], 0);
    *context = c;
    return EKV_OK;
}

void ekv_context_destroy(ekv_context *context) {
    if (!context) return;
    const ekv_allocator allocator = context->allocator;
    if (context->cuda) ekv_cuda_close(context);
    ekv_release(&allocator, context->scratch, context->scratch_bytes);
    ekv_release(&allocator, context->slots, (size_t)context->threads * sizeof *context->slots);
    ekv_release(&allocator, context, sizeof *context);
}

const char *ekv_last_error(const ekv_context *context) { return context ? context->message : "context is NULL"; }
const char *ekv_context_backend(const ekv_context *context) { return context ? context->backend : ""; }
const char *ekv_context_backend_reason(const ekv_context *context) { return context ? context->reason : ""; }
int32_t ekv_context_threads(const ekv_context *context) { return context ? context->threads : 0; }
