/*
 * What the files of src/dispatch share: the opaque types of the public header, error reporting, memory, tasks.
 *
 * This folder is the only code that knows which backends exist.  A decode step goes
 *      validate.c  checks the call once
 *      decode.c    cuts it into items and runs their stages (step.h lists them)
 *      select.c    which pages each row reads
 *      certified.c or, with policy certified, which tokens, by bounds from norms, boxes and sketches
 *      attend.c    scores, candidate lists, solution, values, output of one item
 *      mass.c      the bound E on what was not read
 * over the kernels of the chosen backend (entmaxkv/kernels.h), or through oracle.c for the backend `reference`.  What it reads is kept
 * by cache.c (sequences and pages), index.c (statistics), sketch.c and basis.c (sketches); placement.c puts it on NUMA nodes.
 */
#ifndef EKV_INTERNAL_H
#define EKV_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "entmaxkv/kernels.h"
#include "entmaxkv/entmaxkv.h"

#define EKV_ALIGNMENT 64
#define EKV_MESSAGE_SIZE 320
#define EKV_SOFTMAX_BELOW (1.0 + 1e-7) /* alpha below it is treated as 1 */

/* A backend: its kernels, or NULL for the reference. */
typedef struct ekv_backend_entry {
    const char *name;
    const ekv_kernels *kernels;
    bool compiled, available, worthwhile;
    const char *note;
} ekv_backend_entry;

struct ekv_context {
    char message[EKV_MESSAGE_SIZE];
    ekv_allocator allocator;
    ekv_parallel_for parallel_for;
    void *parallel_user;
    int32_t threads;
    bool fixed_scratch;
    size_t max_scratch;
    const ekv_kernels *kernels; /* NULL: the reference.  Backend cuda: those of the best CPU backend, for ekv_entmax */
    void *cuda;                 /* the CUDA backend's state, or NULL: cuda/host.c */
    const char *backend;
    char reason[160];
    void *scratch;
    size_t scratch_bytes;
    atomic_int *slots; /* [threads] claimed by the tasks that run at the same time */
};

/* How well the basis of a KV head describes its keys: the share of the norm of x that codes leave, as a root of mean squares. */
typedef struct ekv_fit {
    double found;       /* of the tokens that the basis was found from */
    double recent;      /* of the last whole window of sketched tokens */
    int64_t tokens;     /* in that window; 0: none is whole yet */
    double left, total; /* sums of the window that is being filled */
    int64_t count;      /* and its tokens */
} ekv_fit;

struct ekv_index {
    ekv_index_params shape;
    ekv_allocator allocator; /* of memory, when owned */
    void *memory;
    size_t memory_bytes;
    bool owned;
    bool on_device;                  /* memory is that of a CUDA device */
    int device;
    ekv_index *mirror;               /* with a sketch: a host index that holds the basis (device_sketch.c) */
    size_t box_bytes, moments_bytes; /* per page and head, 0 when not kept */
    char *boxes, *moments;           /* [kv_heads][blocks] */
    float *norms;                    /* [2][kv_heads][blocks]: keys, then values (in device memory pairs, [kv_heads][blocks][2]) */
    uint16_t *counts;                /* [blocks] tokens that the statistics cover; 0: unknown page */
    /* The sketch, see sketch.c. */
    int32_t codes;        /* per key, without the norms; 0: no sketch is kept */
    int64_t stretch;      /* pages that share a center */
    size_t sketch_bytes;  /* of a page and head */
    uint8_t *sketches;    /* [kv_heads][blocks] */
    ekv_basis *bases;     /* [kv_heads] */
    uint16_t *rows;       /* [kv_heads][ekv_sketch_axes()][k_dim] f16: Q of the bases */
    float *expanded;      /* [kv_heads][ekv_sketch_expanded()] what encode reads of them: P, then Q */
    ekv_fit *fits;        /* [kv_heads] */
    bool basis_loaded;    /* the bases were loaded, not found here */
    float *centers;       /* [kv_heads][stretches][k_dim padded] */
    uint8_t *centered;    /* [stretches] 1: its centers are known */
    uint16_t *sketched;   /* [blocks] tokens that are sketched */
    int32_t *stretch_of;  /* [blocks] whose center they refer to */
};

struct ekv_cache {
    ekv_cache_params shape;
    ekv_allocator allocator;
    char *k, *v;          /* [layers][kv_heads][blocks][page_size][dim] */
    size_t k_bytes, v_bytes;
    ekv_index **indexes;  /* [layers], or NULL */
    int64_t table_stride; /* pages that the longest sequence has */
    int32_t *tables;      /* [max_sequences][table_stride] */
    int64_t *pages;       /* [max_sequences] blocks in use; -1: no such sequence */
    int64_t *lengths;     /* [max_sequences][layers] */
    int32_t *free_blocks; /* stack */
    int64_t free_count;
    void *topology;       /* hwloc's, while the memory is interleaved */
};

/* ---- context.c ---- */

/* Records the message and returns status.  context may be NULL. */
ekv_status ekv_fail(ekv_context *context, ekv_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
void *ekv_allocate(const ekv_allocator *allocator, size_t bytes);
void ekv_release(const ekv_allocator *allocator, void *memory, size_t bytes);
/* Scratch of at least this size; its contents are undefined. */
ekv_status ekv_need_scratch(ekv_context *context, size_t bytes);

/* A bump allocator over one block of memory; with base NULL it only measures. */
typedef struct ekv_arena {
    char *base;
    size_t used;
} ekv_arena;
void *ekv_take(ekv_arena *arena, size_t count, size_t size);

/* ---- backend.c ---- */

/* The backend of that name, or with NULL the best that is available and worthwhile; 0 if there is none. */
int ekv_find_backend(const char *name, ekv_backend_entry *entry);
/* The names of the backends that can run here, separated by ", ". */
void ekv_list_available(char *text, size_t size);

/* ---- threads.c ---- */

/* Runs task(arg, i) for i in [0, n) with default floating-point control, on the context's threads. */
void ekv_parallel(ekv_context *context, int64_t n, ekv_task task, void *arg);
/* A number below context->threads that no other running task has, and its return. */
int ekv_claim_slot(ekv_context *context);
void ekv_release_slot(ekv_context *context, int slot);
/* Physical cores that this process may use, cut by the container's CPU quota; at least 1. */
int32_t ekv_default_threads(void);
/* Its arithmetic: usable cores (0: unknown, then usable logical CPUs), cut by the quota in CPUs (0: none; below 1 counts as 1). */
int32_t ekv_threads_for(int cores, int cpus, double quota);
#if EKV_WITH_HWLOC
/* Cores of a loaded hwloc_topology_t of which at least one hardware thread is both allowed there and in the hwloc_cpuset_t
 * `process` (NULL: all). */
int ekv_cores_of(void *topology, void *process);
#endif

/* ---- placement.c ---- */

/* Puts the memory of a cache that was just made where its parameters say, and undoes that before the memory is released. */
ekv_status ekv_cache_place(ekv_context *context, ekv_cache *cache);
void ekv_cache_unplace(ekv_cache *cache);
/* How many nodes a cache of this context can be spread over, and a list of them ("0-1,4") as text; 0, without text: unknown. */
int ekv_placement_nodes(ekv_context *context, char *text, size_t size);
#if EKV_WITH_HWLOC
/* Sets the hwloc_nodeset_t `nodes` to those of a loaded hwloc_topology_t that threads on the allowed CPUs in the hwloc_cpuset_t
 * `process` (NULL: all) get memory from first, and returns how many.  Of several kinds of memory at the same CPUs the first counts. */
int ekv_nodes_of(void *topology, void *process, void *nodes);
#endif

/* ---- platform.c ---- */

/* CPUs' worth of time that the cgroups of this process grant; 0: no limit.  `root` is where cgroups are mounted, usually
 * "/sys/fs/cgroup", and `self` the file that says which ones the process is in, usually "/proc/self/cgroup".  Every ancestor limits,
 * so the least of the path counts.  v1 and v2; a process inside a container, which sees its own cgroup as the root, is covered. */
double ekv_cpu_quota(const char *root, const char *self);
/* Logical CPUs in this process's affinity mask. */
int ekv_allowed_cpus(void);
/* Asks for huge pages behind memory that was not written yet, where the system has them. */
void ekv_prefer_huge_pages(void *memory, size_t bytes);
/* Bytes of a page of memory; and for conformance memory of `span` bytes, a multiple of it, between inaccessible pages; NULL if there
 * is none. */
size_t ekv_memory_page(void);
unsigned char *ekv_guarded_allocate(size_t span);
void ekv_guarded_release(unsigned char *base, size_t span); /* NULL is allowed */
/* Between begin and end, ekv_catch_fault() runs a call and returns NULL, or what ended it ("memory fault") and at which address. */
void ekv_faults_begin(void);
void ekv_faults_end(void);
const char *ekv_catch_fault(void (*call)(void *arg), void *arg, const void **address);

/* ---- sketch.c ---- */

#define EKV_SKETCH_TRAINING 2048 /* tokens that a basis is found from */
#define EKV_SKETCH_WINDOW 1024   /* tokens over which the fit is taken */

static inline int32_t ekv_sketch_axes(int32_t dim) { return dim < EKV_SKETCH_AXES ? dim : EKV_SKETCH_AXES; }
/* Floats per head that encode reads. */
static inline size_t ekv_sketch_expanded(int32_t dim) { return 2 * (size_t)ekv_sketch_axes(dim) * (((size_t)dim + 31) / 32 * 32); }
static inline int ekv_code_axes(const ekv_basis *basis, int code) {
    int n = 0;
    while (n < 4 && basis->axis[code][n] >= 0) n++;
    return n;
}

/* Takes the sketch's arrays from the arena that lays out an index (or measures). */
void ekv_sketch_lay_out(ekv_index *index, ekv_arena *arena);
/* No basis, no centers, nothing sketched. */
void ekv_sketch_clear(ekv_index *index);
/* Sketches tokens [first, first + count) of a sequence of `length` tokens, first finding the basis if it is time to. */
void ekv_sketch_update(ekv_context *context, ekv_index *index, const ekv_kernels *kernels, const ekv_kv *kv, const int32_t *block_table,
                       int64_t base, int64_t first, int64_t count, int64_t length);
/* Widens the tokens [*first, *end) of such an update to all whose keys it may read (for centers and to find a basis). */
void ekv_sketch_reads(const ekv_index *index, int64_t *first, int64_t *end, int64_t length);
/* Finds the basis anew from a sequence of at least EKV_SKETCH_TRAINING tokens and sketches it; forgets all other sketches.  On an error
 * nothing has changed. */
ekv_status ekv_sketch_find(ekv_context *context, ekv_index *index, const ekv_kernels *kernels, const ekv_kv *kv,
                           const int32_t *block_table, int64_t length);

/* ---- device_sketch.c: what the host does for a sketch in device memory; these wait for the device ---- */

/* The number of 16-bit units of a key's sketch there. */
static inline int32_t ekv_sketch_units(int32_t codes) { return (codes + EKV_SKETCH_NORMS + 3) / 4; }
static inline bool ekv_device_basis(const ekv_index *index) { return index->mirror && index->mirror->bases[0].codes > 0; }
/* The mirror and an empty sketch; sets index->mirror, which the caller destroys. */
ekv_status ekv_device_sketch_create(ekv_context *context, ekv_index *index);
ekv_status ekv_device_load_basis(ekv_context *context, ekv_index *index, const void *data, size_t bytes);
ekv_status ekv_device_find_basis(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t length);

/* ---- basis.c ---- */

/* Points a basis to the memory that the index has for it, as an empty one. */
void ekv_basis_attach(const ekv_index *index, int32_t head, ekv_basis *basis);
/* Finds what encode reads, error_share, error and skew, and sets `codes`, given dim, axes, block_end, level, rows, unit, axis and
 * number.  False, with codes 0, if the rows are too far from orthonormal for the bounds of the rounding to hold. */
bool ekv_basis_complete(const ekv_kernels *kernels, ekv_basis *basis, int32_t codes);
/* Bytes that a step reads of a basis. */
int64_t ekv_basis_bytes(const ekv_basis *basis);

/* ---- index.c ---- */

/* An index in host memory, whatever the context's backend. */
ekv_status ekv_index_create_on_host(ekv_context *context, const ekv_index_params *shape, void *memory, ekv_index **out);

/* The kernels that keep statistics: the context's; the reference uses those of the best CPU backend, since all give the same bits. */
const ekv_kernels *ekv_statistics_kernels(const ekv_context *context);

static inline size_t ekv_padded(int32_t dim) { return ((size_t)dim + 31) / 32 * 32; }
static inline int64_t ekv_index_stretches(const ekv_index *index) { return index->shape.blocks / index->stretch + 1; }
static inline const void *ekv_index_box(const ekv_index *index, int head, int64_t block) {
    return index->boxes + (size_t)(head * index->shape.blocks + block) * index->box_bytes;
}
static inline const void *ekv_index_moments(const ekv_index *index, int head, int64_t block) {
    return index->moments + (size_t)(head * index->shape.blocks + block) * index->moments_bytes;
}
static inline float *ekv_index_key_norm(const ekv_index *index, int head, int64_t block) {
    return index->norms + (head * index->shape.blocks + block);
}
static inline float *ekv_index_value_norm(const ekv_index *index, int head, int64_t block) {
    return index->norms + ((index->shape.kv_heads + head) * index->shape.blocks + block);
}
/* EKV_ERROR_INVALID_ARGUMENT if the index was made for another shape than kv's, or if kv itself is wrong. */
ekv_status ekv_check_index(ekv_context *context, const ekv_index *index, const ekv_kv *kv);
ekv_status ekv_check_kv(ekv_context *context, const ekv_kv *kv); /* decode.c */
/* That the blocks of tokens [first, first + count) lie in the index. */
ekv_status ekv_check_blocks(ekv_context *context, const ekv_index *index, const int32_t *block_table, int64_t first, int64_t count);
/* From now on the block's page is unknown. */
void ekv_index_forget(ekv_index *index, int64_t block);
/* ekv_index_update for arguments that are known to be right. */
void ekv_index_rebuild(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t first,
                       int64_t count, int64_t length);
static inline const float *ekv_index_center(const ekv_index *index, int head, int64_t stretch) {
    const int64_t stretches = ekv_index_stretches(index);
    return index->centers + (size_t)(head * stretches + stretch) * ekv_padded(index->shape.k_dim);
}
static inline const uint8_t *ekv_index_sketch(const ekv_index *index, int head, int64_t block) {
    return index->sketches + (size_t)(head * index->shape.blocks + block) * index->sketch_bytes;
}
static inline ekv_dtype ekv_moments_dtype(ekv_dtype dtype) { return dtype == EKV_F16 ? EKV_F16 : EKV_F32; }

/* ---- shared by several files ---- */

static inline size_t ekv_element_bytes(ekv_dtype dtype) { return dtype == EKV_F32 ? 4 : 2; }
static inline bool ekv_dtype_valid(ekv_dtype dtype) { return dtype == EKV_F32 || dtype == EKV_F16 || dtype == EKV_BF16; }
static inline int64_t ekv_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t ekv_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ekv_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline const char *ekv_at(const void *base, int64_t element, ekv_dtype dtype) {
    return (const char *)base + element * (int64_t)ekv_element_bytes(dtype);
}
static inline const void *ekv_key(const ekv_kv *kv, int64_t block, int64_t slot, int head) {
    return ekv_at(kv->k, block * kv->k_block_stride + slot * kv->k_token_stride + head * kv->k_head_stride, kv->dtype);
}
static inline const void *ekv_value(const ekv_kv *kv, int64_t block, int64_t slot, int head) {
    return ekv_at(kv->v, block * kv->v_block_stride + slot * kv->v_token_stride + head * kv->v_head_stride, kv->dtype);
}

/* Asks for a row that will be read soon; scattered rows defeat the hardware's own prefetching. */
static inline void ekv_prefetch(const void *row, size_t bytes) {
#if defined(__GNUC__)
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i);
#else
    (void)row;
    (void)bytes;
#endif
}

/* Copies a parameter struct of the caller's header version over the defaults of this one.  False if its size is impossible. */
bool ekv_copy_params(void *to, size_t to_size, const void *from, size_t least);

#endif
