/*
 * EntmaxKV: alpha-entmax attention decoded from a paged KV cache.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * INTRODUCTION
 *
 * A decode step of attention reads the whole KV cache, so memory traffic sets its speed.  With alpha-entmax (alpha > 1) most
 * tokens get a weight of exactly zero; a step that reads only the others returns the same result.  This library keeps small
 * statistics for every page of the cache, decides from them what to read, reads that, and solves the entmax exactly on what it
 * read (Duarte, Couceiro, Treviso 2026).
 *
 * The three levels of the interface, each usable without the next:
 *
 *   1. ekv_entmax()            a row of scores to weights
 *   2. ekv_kv, ekv_index,      kernels on the caller's memory: page statistics, page bounds and moments, selection, decoding
 *      ekv_decode()
 *   3. ekv_cache               a managed cache: sequences, append, truncate; ekv_decode() takes it in place of the caller's memory
 *
 * A first program (README shows it whole):
 *
 *      ekv_context *context = NULL;
 *      ekv_context_create(NULL, &context, NULL, 0);            // best backend, all physical cores
 *      ekv_cache_params shape = ekv_cache_params_default();    // then layers, heads, dims, blocks
 *      ekv_cache *cache = NULL;
 *      ekv_cache_create(context, &shape, &cache);
 *      int32_t sequence;
 *      ekv_sequence_create(context, cache, &sequence);
 *      ekv_cache_append(context, cache, sequence, layer, &rows);
 *      ekv_decode_params step = ekv_decode_params_default();   // then cache, layer, q, out, alpha, policy
 *      ekv_decode(context, &step);
 *
 * TERMS
 *
 *   score       s_i = scale * (q . k_i) + slope * (i - i_q): i is a token's index in its sequence, i_q the query token's own
 *               index, slope the ALiBi slope of the query head (0: no position).  Positions enter as differences alone, so a
 *               sequence whose first token is not at position 0 needs no base.
 *   z, beta     z_i = (alpha - 1) * s_i, beta = 1 / (alpha - 1)
 *   weights     p_i = max(z_i - tau, 0)^beta with sum 1; tau is the threshold.  alpha = 2 is sparsemax.  alpha = 1 is softmax,
 *               for which z_i = s_i and tau is reported as the log of the sum of exp(s_i).
 *   support     the tokens with p_i > 0
 *   page        page_size consecutive tokens of a sequence.  It lies in one block of a pool; a block table maps page to block.
 *   group       the q_heads / kv_heads query heads that share one KV head: query head h reads KV head h / group
 *   E           a bound on the probability mass of the tokens that were not read (their true mass under the full-cache weights
 *               is at most E <= 1).  The output then differs from the full-cache output by at most 2 * B * E in L2 norm, B the
 *               largest norm of a value vector.
 *
 * CONVENTIONS
 *
 *   Status    Every call that can fail returns ekv_status; EKV_OK is 0.  On any other value the outputs are untouched and
 *             ekv_last_error() says which argument was wrong, with its value.
 *   Structs   Parameter structs begin with their own size.  Start from the *_default() function, then set fields: a program
 *             compiled against an older header keeps working with a newer library.
 *   Strides   int64_t, in elements, never bytes.  The innermost dimension is always contiguous.  In q, out and append a stride
 *             of 0 means packed.
 *   Threads   A context serves one call at a time.  Contexts share nothing writable.  Many contexts may read one cache, index
 *             or KV memory at once; none may read while another appends, updates, truncates or frees.
 *   Process   The library never prints, exits, or installs handlers, and leaves affinity, OpenMP settings and floating-point
 *             modes as they were.
 *   Same bits With one build and one backend list, outputs, selections and reports do not depend on the number of threads, on
 *             where the KV memory lies, or on which CPU backend ran (scalar, avx2, ...).  The `reference` backend is separate
 *             code in double precision and agrees within rounding only; it looks at keys where others look at an index.
 *             Builds with and without SLEEF differ in the last bits where exp, pow or the normal distribution enter: alpha = 1,
 *             alpha outside {4/3, 1.5, 2}, policy gaussian.
 *   Device    What differs with the backend cuda stands under DEVICE MEMORY.
 *   NaN       A NaN or +infinity among the scores that a head reads makes that head's output and tau NaN and touches no other
 *             head (NaN or infinite keys always count as worth reading).  Unused slots of a page are never read.
 *
 * DEVICE MEMORY
 *
 * The backend "cuda" is never chosen by default, since it takes pointers to device memory; ask for it by name.  Its context
 * belongs to the device that is current when it is created.  Then:
 *
 *   Device    In ekv_decode: k, v, q, out, block_table, lengths, q_start, page_mask, report.  In the index calls: k, v,
 *             block_table, lengths, q_start and `memory`.  In ekv_page_bounds and the like: the results.
 *   Host      Every struct, and in ekv_decode head_alpha, head_scale and slopes, which are copied before the call returns.
 *   Sizes     batch, max_queries and max_length are host values from which the work is cut; lengths and q_start are read on the
 *             device, so that a captured CUDA graph may be replayed after they, the block table and the keys have changed.
 *   Trust     Device tables cannot be checked: a block outside of the pool, or a length above max_length, makes the heads that
 *             read it NaN.
 *   Streams   Work is enqueued on the call's stream and nothing waits for it; outputs are there when the stream has got that
 *             far.  A context serves one stream at a time (its scratch memory is shared by its steps).
 *   Memory    ekv_reserve allocates; a step does so only when it is larger than all before it, and never during stream capture.
 *             The scratch memory of a step has a ceiling of 2 GiB, past which the step runs in rounds.
 *   Limits    page_size 8, 16, ..., 256.  Fast for rows of keys and values that are aligned to 16 bytes with dimensions that
 *             are multiples of 8 and k_dim <= 256; correct for all others.
 *   Sketch    A basis is loaded, or found by ekv_index_find_basis, which here takes the sequence's first 2,048 tokens; both wait for
 *             the device.  From then on update and append sketch keys on the device; `recent` of ekv_index_sketch_fit stays as it
 *             was then.  A step certifies by sketches or by boxes: where there is a basis and NORMS, boxes are not looked at.
 *   Not there the managed cache: EKV_ERROR_UNSUPPORTED.  ekv_entmax works on host memory, on the CPU.
 *   Bits      The same call gives the same bits every time.  Entmax outputs depend on the support alone, not on the policy or
 *             on what max_length says; results differ from the CPU's within rounding.
 */
#ifndef ENTMAXKV_H
#define ENTMAXKV_H

#include <stddef.h>
#include <stdint.h>

#define EKV_VERSION_MAJOR 0
#define EKV_VERSION_MINOR 1
#define EKV_VERSION_PATCH 0
/* One comparable number.  While the major version is 0 a minor version may change the interface; patch versions never do. */
#define EKV_VERSION (EKV_VERSION_MAJOR * 10000 + EKV_VERSION_MINOR * 100 + EKV_VERSION_PATCH)

#if defined(_WIN32) && defined(ENTMAXKV_SHARED)
#  ifdef ENTMAXKV_BUILDING
#    define EKV_API __declspec(dllexport)
#  else
#    define EKV_API __declspec(dllimport)
#  endif
#elif defined(__GNUC__)
#  define EKV_API __attribute__((visibility("default")))
#else
#  define EKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------------------------
 * Status, types, limits
 * --------------------------------------------------------------------------------------------------------------------- */

typedef enum ekv_status {
    EKV_OK = 0,
    EKV_ERROR_INVALID_ARGUMENT = 1, /* a value out of range, a NULL that may not be, sizes that do not fit each other */
    EKV_ERROR_UNSUPPORTED = 2,      /* a valid request that this library, build or backend does not serve */
    EKV_ERROR_OUT_OF_MEMORY = 3,    /* the allocator returned NULL */
    EKV_ERROR_CAPACITY = 4,         /* the cache has no free block or sequence left, or fixed scratch is too small */
    EKV_ERROR_UNAVAILABLE = 5,      /* a backend was asked for by name and cannot run here */
    EKV_ERROR_INTERNAL = 6          /* a defect of the library */
} ekv_status;

typedef enum ekv_dtype { EKV_F32 = 0, EKV_F16 = 1, EKV_BF16 = 2 } ekv_dtype;

/* What a decode step reads.  All but `full` need an index with the statistics named (ekv_statistics). */
typedef enum ekv_policy {
    EKV_POLICY_FULL = 0,     /* every key; values of the support alone */
    EKV_POLICY_TOPK = 1,     /* the pages with the largest box bounds, `budget` tokens of them; needs BOX */
    EKV_POLICY_GAUSSIAN = 2, /* pages likely to reach an estimate of tau; needs GAUSSIAN; alpha > 1 */
    EKV_POLICY_PAGES = 3,    /* the pages that the caller marks in `page_mask` */
    EKV_POLICY_CERTIFIED = 4 /* what bounds cannot rule out: the output of `full`, bit for bit; alpha > 1; the more statistics
                                (NORMS, BOX, SKETCH) there are, the less is read */
} ekv_policy;

/* How policy gaussian estimates tau: one normal distribution for all scores, or a mixture with one per page. */
typedef enum ekv_gaussian_model {
    EKV_GAUSSIAN_AUTO = 0, /* per query head: SINGLE where its slope is 0, MIXTURE elsewhere */
    EKV_GAUSSIAN_SINGLE = 1,
    EKV_GAUSSIAN_MIXTURE = 2
} ekv_gaussian_model;

/* Page statistics, a set of flags.  Memory per page and KV head, with D = k_dim and e the bytes of an element:
 * BOX 2*D*e; GAUSSIAN 2*D*2 for f16 keys, else 2*D*4; NORMS 8; SKETCH page_size * (5*D/32 + 2 to 4), at least 6 a token, and per KV
 * head once a basis of at most 640*D + 36,000 bytes, of which a step reads at most 128*D + 8,000, and one center of 4*D bytes for every
 * 1,024 tokens.  The basis is found from 2,048 tokens, evenly spread over the first sequence that has so many, or loaded
 * (ekv_index_load_basis); until there is one nothing is sketched.  (Backend cuda: it is loaded, or found when ekv_index_find_basis is
 * called.) */
enum ekv_statistics {
    EKV_STATISTICS_BOX = 1,      /* per-dimension minimum and maximum: bounds for topk and for E */
    EKV_STATISTICS_GAUSSIAN = 2, /* per-dimension mean and standard deviation */
    EKV_STATISTICS_NORMS = 4,    /* largest key norm and largest value norm: first bounds, and the output error bound */
    EKV_STATISTICS_SKETCH = 8    /* a few bits per key element, for bounds of single tokens; page_size must be a multiple of 16 */
};

#define EKV_MAX_DIM 1024       /* k_dim and v_dim: 1 to EKV_MAX_DIM */
#define EKV_MAX_PAGE_SIZE 256  /* page_size: 1 to EKV_MAX_PAGE_SIZE */

/* A short English text for a status; never NULL. */
EKV_API const char *ekv_strerror(ekv_status status);
/* "f32", "topk", ...; "?" for a value outside the enum. */
EKV_API const char *ekv_dtype_name(ekv_dtype dtype);
EKV_API const char *ekv_policy_name(ekv_policy policy);
/* The version of the library that runs, to compare with EKV_VERSION, the version of the header that was compiled. */
EKV_API int ekv_version(void);

/* ------------------------------------------------------------------------------------------------------------------------
 * Context: backend, threads, scratch memory
 * --------------------------------------------------------------------------------------------------------------------- */

/* Where the library gets memory.  `allocate` returns memory aligned to `alignment` (a power of two) or NULL; `release` gets
 * what `allocate` returned, with the same size.  NULL functions: the C library's. */
typedef struct ekv_allocator {
    void *user;
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *memory, size_t bytes);
} ekv_allocator;

/* A host's own thread pool: run task(arg, i) once for each i in [0, n), in any order, on any threads, and return when all are
 * done.  At most `threads` tasks may run at once. */
typedef void (*ekv_task)(void *arg, int64_t i);
typedef void (*ekv_parallel_for)(void *user, int64_t n, ekv_task task, void *arg);

typedef struct ekv_context_params {
    size_t size;
    const char *backend;   /* NULL: the environment variable ENTMAXKV_BACKEND, and without it the best available.
                              A name ("reference", "scalar", "avx2", ...) is strict: EKV_ERROR_UNAVAILABLE if it cannot run. */
    int32_t threads;       /* 0: the physical cores that this process may use */
    int32_t fixed_scratch; /* 0: a step larger than any before it enlarges the scratch memory; 1: it fails with
                              EKV_ERROR_CAPACITY, so that ekv_reserve() is the only call that allocates */
    ekv_allocator allocator;
    ekv_parallel_for parallel_for; /* NULL: OpenMP, or one thread in a build without it */
    void *parallel_user;
    void *stream; /* cuda: a cudaStream_t for the calls that have no stream of their own; NULL: the default stream */
    size_t max_scratch; /* bytes: the ceiling on a step's scratch memory on the CPU; 0: EKV_DEFAULT_MAX_SCRATCH.  A step that would take
                           more runs its KV heads in waves instead of side by side, and where one KV head of a sequence alone is too much
                           its query rows apart, each reading the keys anew: slower, with the same result (for softmax under a sparse
                           policy up to the last bits).  EKV_ERROR_CAPACITY if it is too small for one row: 13 bytes for each token of
                           the longest sequence (14.2 with policy certified), 30 for each page, 4 (v_dim + 32) for each 4,096 tokens,
                           and 4,096. */
} ekv_context_params;

#define EKV_DEFAULT_MAX_SCRATCH ((size_t)1 << 30)

static inline ekv_context_params ekv_context_params_default(void) {
    ekv_context_params p = {sizeof(ekv_context_params), NULL, 0, 0, {NULL, NULL, NULL}, NULL, NULL, NULL, 0};
    return p;
}

typedef struct ekv_context ekv_context;

/* Creates a context.  params may be NULL for the defaults.  On failure *context is NULL, and since there is then no context to
 * hold the message, up to message_size bytes of it go to `message` (may be NULL). */
EKV_API ekv_status ekv_context_create(const ekv_context_params *params, ekv_context **context, char *message,
                                      size_t message_size);
EKV_API void ekv_context_destroy(ekv_context *context); /* NULL is allowed */

/* What went wrong in this context's last failed call: the argument's name and value.  Valid until the context's next call;
 * never NULL. */
EKV_API const char *ekv_last_error(const ekv_context *context);

/* What the context runs on. */
EKV_API const char *ekv_context_backend(const ekv_context *context);
EKV_API const char *ekv_context_backend_reason(const ekv_context *context); /* why that one: "forced by ...", "best of ..." */
EKV_API int32_t ekv_context_threads(const ekv_context *context);

typedef struct ekv_backend_info {
    size_t size;
    const char *name;
    int32_t compiled;   /* part of this build */
    int32_t available;  /* this processor and operating system can run it */
    int32_t worthwhile; /* chosen by default when nothing better is available */
    const char *note;   /* what is missing, or why it is not worthwhile; "" if neither */
} ekv_backend_info;

/* Backend number i = 0, 1, ...; EKV_ERROR_INVALID_ARGUMENT past the last.  Needs no context and may be called by any thread. */
EKV_API ekv_status ekv_backend(int32_t i, ekv_backend_info *info);

/* ------------------------------------------------------------------------------------------------------------------------
 * Level 1: the transform
 * --------------------------------------------------------------------------------------------------------------------- */

/* alpha-entmax of a row: weights[i] = max((alpha-1) scores[i] - tau, 0)^(1/(alpha-1)), sum 1.
 *   alpha     finite, >= 1; 1 is softmax
 *   scores    [n]; -infinity gets weight 0; NaN or +infinity makes all weights and tau NaN
 *   n         >= 0; with 0 tau is -infinity and the support 0
 *   weights   [n], may be the same memory as scores
 *   tau       may be NULL; in z units, see TERMS
 *   support   may be NULL; the number of weights > 0 before they are rounded to float
 * Method: closed forms for alpha = 1.5, 2 and 4/3, a safeguarded Newton iteration for the others. */
EKV_API ekv_status ekv_entmax(ekv_context *context, double alpha, const float *scores, int64_t n, float *weights, double *tau,
                              int64_t *support);

/* ------------------------------------------------------------------------------------------------------------------------
 * Level 2: the caller's KV memory and its page statistics
 * --------------------------------------------------------------------------------------------------------------------- */

/* One layer's keys and values, read in place.  Element d of token t of block b of KV head h is
 *      k[b * k_block_stride + t * k_token_stride + h * k_head_stride + d],   0 <= t < page_size
 * and likewise for v.  Some layouts, with H = kv_heads, P = page_size, D the dimension:
 *      [tokens][heads][dim]            block P*H*D, token H*D, head D          (a contiguous sequence)
 *      [heads][tokens][dim]            block P*D,   token D,   head tokens*D
 *      [blocks][page][heads][dim]      block P*H*D, token H*D, head D          (vLLM's flash layout)
 *      [blocks][heads][page][dim]      block P*H*D, token D,   head P*D
 * Layouts that split a key's dimensions or transpose values cannot be expressed: no stride separates the innermost dimension. */
typedef struct ekv_kv {
    size_t size;
    ekv_dtype dtype; /* of k and v */
    int32_t kv_heads;
    int32_t k_dim, v_dim; /* may differ; 1 to EKV_MAX_DIM */
    int32_t page_size;    /* tokens per block, 1 to EKV_MAX_PAGE_SIZE */
    int64_t blocks;       /* blocks in the pool: block table entries are checked against it */
    const void *k, *v;
    int64_t k_block_stride, k_token_stride, k_head_stride;
    int64_t v_block_stride, v_token_stride, v_head_stride;
} ekv_kv;

static inline ekv_kv ekv_kv_default(void) {
    ekv_kv p = {sizeof(ekv_kv), EKV_F16, 0, 0, 0, 16, 0, NULL, NULL, 0, 0, 0, 0, 0, 0};
    return p;
}

/* Statistics of the pages of one ekv_kv, keyed by physical block: sequences that share a block share its statistics. */
typedef struct ekv_index ekv_index;

typedef struct ekv_index_params {
    size_t size;
    ekv_dtype dtype;
    int32_t kv_heads, k_dim, v_dim, page_size;
    int64_t blocks;
    uint32_t statistics; /* flags of ekv_statistics */
} ekv_index_params;

static inline ekv_index_params ekv_index_params_default(void) {
    ekv_index_params p = {sizeof(ekv_index_params), EKV_F16, 0, 0, 0, 16, 0,
                          EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS};
    return p;
}

/* Bytes that ekv_index_create needs for these parameters; 0 if they are invalid. */
EKV_API size_t ekv_index_bytes(const ekv_index_params *params);

/* Creates an index whose pages are all unknown (an unknown page is always read).  memory: NULL to use the context's allocator,
 * or the caller's, aligned to 64 bytes, `bytes` long, which must outlive the index. */
EKV_API ekv_status ekv_index_create(ekv_context *context, const ekv_index_params *params, void *memory, size_t bytes,
                                    ekv_index **index);
EKV_API void ekv_index_destroy(ekv_index *index); /* NULL is allowed; memory of the caller's is not released */

/* Rebuilds the statistics of the pages that hold tokens [first, first + count) of a sequence, from that page's tokens below
 * `length`, the sequence's present length.  Call it after writing those keys and values.
 *   block_table   [ceil(length / page_size)] blocks of the sequence; NULL: page p lies in block p
 * Cost: reads each touched page once.  Threads: one caller per index at a time. */
EKV_API ekv_status ekv_index_update(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table,
                                    int64_t first, int64_t count, int64_t length);

/* The same for the newest tokens of many sequences: the query tokens of a step, after their keys have been written and before it.
 * Sequence b's tokens [lengths[b] - count, lengths[b]) are new, count = q_start[b + 1] - q_start[b], or max_count for all if q_start
 * is NULL.  With the backend cuda block_table, lengths and q_start are device memory and the call may be captured in a graph. */
typedef struct ekv_index_append_params {
    size_t size;
    int32_t batch;
    const int32_t *block_table; /* [batch][block_table_stride]; NULL: page p of b lies in block b * block_table_stride + p */
    int64_t block_table_stride;
    const int32_t *lengths; /* [batch] */
    const int32_t *q_start; /* [batch + 1] or NULL */
    int32_t max_count;      /* at least the new tokens of any sequence */
    void *stream;           /* cuda */
} ekv_index_append_params;

static inline ekv_index_append_params ekv_index_append_params_default(void) {
    ekv_index_append_params p = {sizeof(ekv_index_append_params), 1, NULL, 0, NULL, NULL, 1, NULL};
    return p;
}

EKV_API ekv_status ekv_index_append(ekv_context *context, ekv_index *index, const ekv_kv *kv, const ekv_index_append_params *params);

/* Forgets the statistics of those pages (keys are being rewritten, blocks are given to another sequence): until the next update
 * they count as unknown and are read.  The basis of their sketches stays. */
EKV_API ekv_status ekv_index_invalidate(ekv_context *context, ekv_index *index, const int32_t *block_table, int64_t first,
                                        int64_t count);

/* The basis of SKETCH statistics: how keys are described, one basis for each KV head, which serves all sequences of the index.  It
 * decides how much a step reads, never what it returns: results are those of any other basis, or of none, bit for bit.
 *
 * A saved basis is a block of bytes without pointers, good for every index with the same kv_heads and k_dim whatever its dtype and page
 * size, in the byte order of the machine (another one is refused, as are other versions).  Loading trusts nothing: a block that is not
 * a basis is an error that names what is wrong and leaves the index as it was; one that is merely unsuitable costs speed.
 *   ekv_index_basis_bytes   size of the block; 0 if the index keeps no SKETCH statistics
 *   ekv_index_save_basis    `bytes` must be that size; EKV_ERROR_INVALID_ARGUMENT while the index has no basis
 *   ekv_index_load_basis    before the first token: EKV_ERROR_INVALID_ARGUMENT while the index knows any page.  A basis that it has
 *                           already is replaced.  From then on tokens are sketched from the first one.
 *   ekv_index_find_basis    finds the basis anew from 2,048 tokens, evenly spread over a sequence of `length` >= 2,048 tokens (backend
 *                           cuda: its first), and sketches this sequence with it.  All other pages count as not sketched until
 *                           their next update.  On any error the old basis stays.  Reads the sequence's keys twice.
 * Threads: loading and finding as ekv_index_update, saving as ekv_decode. */
EKV_API size_t ekv_index_basis_bytes(const ekv_index *index);
EKV_API ekv_status ekv_index_save_basis(ekv_context *context, const ekv_index *index, void *data, size_t bytes);
EKV_API ekv_status ekv_index_load_basis(ekv_context *context, ekv_index *index, const void *data, size_t bytes);
EKV_API ekv_status ekv_index_find_basis(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table,
                                        int64_t length);

/* Whether the basis still fits the keys.  A share is the norm of what the sketch leaves unexplained of the keys, less their centers,
 * over the norm of those (roots of the mean squares over the tokens): 0 is perfect, 1 useless.  A step finds out on its own from a
 * sample whether its sketch pays; when `recent` stays well above `found` (a half more, say), a new basis may save bytes:
 * ekv_index_find_basis. */
enum { EKV_BASIS_NONE = 0, EKV_BASIS_FOUND = 1, EKV_BASIS_LOADED = 2 };
typedef struct ekv_sketch_fit {
    size_t size;     /* set before the call */
    int32_t kv_head; /* that this is about */
    int32_t basis;   /* EKV_BASIS_NONE: there is none, and what follows is 0 */
    double found;    /* share, of the tokens that the basis was found from */
    double recent;   /* share, of the last 1,024 tokens that were sketched, counted in whole windows */
    int64_t tokens;  /* that `recent` covers: 1,024, or less before so many were sketched */
} ekv_sketch_fit;

/* kv_head: 0 to kv_heads - 1, or -1 for the head with the largest recent - found.  Threads: as ekv_decode. */
EKV_API ekv_status ekv_index_sketch_fit(ekv_context *context, const ekv_index *index, int32_t kv_head, ekv_sketch_fit *fit);

/* ------------------------------------------------------------------------------------------------------------------------
 * Level 3: the managed cache
 * --------------------------------------------------------------------------------------------------------------------- */

typedef struct ekv_cache ekv_cache;

/* Where the memory of a cache (keys, values, page statistics) lies on a machine with several NUMA nodes: with DEFAULT a cache that one
 * thread fills is on that thread's node, and a step is bound by the bandwidth of that node alone.  The others do nothing, at no cost
 * but that of asking the system once, where the CPUs that this process's threads may use belong to a single node.  None changes a
 * result, or any binding or memory policy of the process or its threads.
 *   FIRST_TOUCH  ekv_cache_create writes to every page of the memory from the context's threads, in the spans of 4,096 tokens in which
 *                they will read it: the system then puts each span on the node of the thread that wrote it.  All memory is taken at
 *                once, not as the cache fills.  Bind the threads to cores (OMP_PROC_BIND=spread), or they may all begin on one node.
 *                Without hwloc the nodes are unknown, and the memory is touched on any machine.
 *   INTERLEAVE   asks the system to place the pages on the nodes in turn, over those from which the process's CPUs get memory first
 *                (memory of a second kind, slower or faster, at the same CPUs is left out); pages are taken as the cache fills.
 *                ekv_cache_destroy sets the memory back to the system's default policy before it is released.
 *                EKV_ERROR_UNSUPPORTED in a build without hwloc, on any machine, and where the system refuses (as some containers do).
 * With a caller's allocator both act on the memory that it returned, and only on pages that were not written before; INTERLEAVE replaces
 * a policy that the caller gave to that memory. */
typedef enum ekv_placement {
    EKV_PLACEMENT_DEFAULT = 0, /* what the allocator and the system do */
    EKV_PLACEMENT_FIRST_TOUCH = 1,
    EKV_PLACEMENT_INTERLEAVE = 2
} ekv_placement;

typedef struct ekv_cache_params {
    size_t size;
    ekv_dtype dtype; /* storage of keys and values */
    int32_t layers, kv_heads, k_dim, v_dim;
    int32_t page_size;
    int64_t blocks;        /* capacity: pages shared by all sequences; every layer holds that many */
    int32_t max_sequences; /* >= 1 */
    int64_t max_length;    /* longest sequence in tokens; 0: blocks * page_size */
    uint32_t statistics;   /* flags of ekv_statistics, kept current by append and truncate; 0: none */
    int32_t reserved;      /* not read: in older headers this was padding, with any content */
    ekv_placement placement;
} ekv_cache_params;

static inline ekv_cache_params ekv_cache_params_default(void) {
    ekv_cache_params p = {sizeof(ekv_cache_params), EKV_F16, 1, 0, 0, 0, 16, 0, 1, 0,
                          EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS, 0, EKV_PLACEMENT_DEFAULT};
    return p;
}

/* Allocates everything at once, through the context's allocator, which must outlive the cache (the context need not). */
EKV_API ekv_status ekv_cache_create(ekv_context *context, const ekv_cache_params *params, ekv_cache **cache);
EKV_API void ekv_cache_destroy(ekv_cache *cache); /* NULL is allowed */

/* A new empty sequence.  EKV_ERROR_CAPACITY when max_sequences exist. */
EKV_API ekv_status ekv_sequence_create(ekv_context *context, ekv_cache *cache, int32_t *sequence);
/* Ends a sequence and frees its blocks. */
EKV_API ekv_status ekv_sequence_free(ekv_context *context, ekv_cache *cache, int32_t sequence);
/* Tokens of a sequence in a layer (layers may differ while a model runs through them); -1 for an unknown sequence or layer. */
EKV_API int64_t ekv_sequence_length(const ekv_cache *cache, int32_t sequence, int32_t layer);

/* New keys and values, [count][kv_heads][k_dim] and [count][kv_heads][v_dim] with any token and head strides. */
typedef struct ekv_append_params {
    size_t size;
    int64_t count; /* tokens, >= 0 */
    const void *k, *v;
    ekv_dtype dtype; /* of k and v as given; rounded to nearest even into the cache's dtype (f16 overflow becomes infinity) */
    int64_t k_token_stride, k_head_stride; /* 0: packed */
    int64_t v_token_stride, v_head_stride;
} ekv_append_params;

static inline ekv_append_params ekv_append_params_default(void) {
    ekv_append_params p = {sizeof(ekv_append_params), 0, NULL, NULL, EKV_F32, 0, 0, 0, 0};
    return p;
}

/* Appends tokens to one layer of a sequence and brings the statistics of the touched pages up to date.  Blocks are taken when the
 * first layer needs them.  EKV_ERROR_CAPACITY, with nothing changed, when too few are free or max_length would be passed. */
EKV_API ekv_status ekv_cache_append(ekv_context *context, ekv_cache *cache, int32_t sequence, int32_t layer,
                                    const ekv_append_params *rows);

/* Cuts every layer of a sequence down to `length` tokens (layers that are shorter stay), frees the blocks past it and rebuilds the
 * statistics of the page that was cut. */
EKV_API ekv_status ekv_cache_truncate(ekv_context *context, ekv_cache *cache, int32_t sequence, int64_t length);

/* The cache as level 2 sees it: a layer's memory, its index (NULL without statistics) and a sequence's block table. */
EKV_API ekv_status ekv_cache_layer(const ekv_cache *cache, int32_t layer, ekv_kv *kv, const ekv_index **index);
EKV_API const int32_t *ekv_cache_block_table(const ekv_cache *cache, int32_t sequence); /* NULL for an unknown sequence */
EKV_API int64_t ekv_cache_free_blocks(const ekv_cache *cache);

/* The basis of one layer, as ekv_index_load_basis (before the layer's first token) and ekv_index_find_basis (from one sequence; the
 * others are sketched with it, too).  To save it and to ask for its fit, take the index from ekv_cache_layer. */
EKV_API ekv_status ekv_cache_load_basis(ekv_context *context, ekv_cache *cache, int32_t layer, const void *data, size_t bytes);
EKV_API ekv_status ekv_cache_find_basis(ekv_context *context, ekv_cache *cache, int32_t sequence, int32_t layer);

/* ------------------------------------------------------------------------------------------------------------------------
 * The decode step
 * --------------------------------------------------------------------------------------------------------------------- */

/* What was read for one query token and one query head, and what that guarantees.  Reads are shared by a group, so the fields
 * marked (G) stand in the entry of the group's first query head, at the first query token of those that were handled together,
 * and are 0 in the others: a sum over all entries counts each byte once. */
typedef struct ekv_report {
    double tau;         /* threshold in z units (alpha = 1: log-sum-exp); -infinity for an empty sequence */
    double mass_bound;  /* E; 0 when everything was read; NaN unless report_mass was set */
    double error_bound; /* 2 * B * E; NaN unless report_mass was set and the index has NORMS */
    int64_t support;    /* tokens with a weight > 0; alpha = 1: the tokens read */
    int64_t tokens;     /* tokens whose key this head used */
    int64_t pages;      /* pages that this head used */
    int64_t group_pages;      /* (G) pages of which a key was read, the union over the group */
    int64_t total_pages;      /* (G) pages that the sequence has */
    int64_t bytes_statistics; /* (G) page statistics read: boxes, moments, norms */
    int64_t bytes_sketch;     /* (G) sketches, basis and centers read */
    int64_t bytes_keys;       /* (G) */
    int64_t bytes_values;     /* (G) */
    int64_t bytes_dense;      /* (G) what dense attention would read: tokens * (k_dim + v_dim) * element size */
    int32_t certified;  /* 1: proven equal to the full-cache result (every token that was not read has a bound <= tau) */
} ekv_report;

/* One attention step over a batch of sequences.
 *
 * Rows.  Sequence b brings the query tokens q_start[b] .. q_start[b+1]-1 (one each if q_start is NULL).  They are the last tokens
 * of the sequence: its length includes them, their keys are already in the cache, and each sees the tokens up to itself.  Decode
 * and prefill are therefore the same call.  A row is one query token and one query head.
 *
 * Either the managed cache (cache, layer, sequences) or the caller's memory (kv, index, block_table, lengths) is given. */
typedef struct ekv_decode_params {
    size_t size;

    int32_t batch; /* sequences, >= 0 */

    /* A managed cache ... */
    const ekv_cache *cache;
    int32_t layer;
    const int32_t *sequences; /* [batch] */
    /* ... or the caller's memory. */
    const ekv_kv *kv;
    const ekv_index *index;      /* may be NULL for policies full and pages */
    const int32_t *block_table;  /* [batch][block_table_stride]; NULL: page p of sequence b lies in block b * block_table_stride + p */
    int64_t block_table_stride;
    const int32_t *lengths;      /* [batch] tokens, the new ones included; 0 is allowed */

    /* Queries and output: element d of head h of query token t is q[t * q_token_stride + h * q_head_stride + d]. */
    int32_t q_heads;         /* a multiple of kv_heads */
    const int32_t *q_start;  /* [batch + 1], q_start[0] = 0, ascending; NULL: one query token per sequence */
    const void *q;           /* [tokens][q_heads][k_dim] */
    ekv_dtype q_dtype;
    int64_t q_token_stride, q_head_stride; /* 0: packed */
    void *out;               /* [tokens][q_heads][v_dim]; zeros for rows of an empty sequence */
    ekv_dtype out_dtype;
    int64_t out_token_stride, out_head_stride; /* 0: packed */

    /* Mathematics. */
    double alpha;             /* >= 1, finite; below 1 + 1e-7 it is treated as 1 */
    const double *head_alpha; /* [q_heads], or NULL: alpha for all */
    float scale;              /* finite; 0: 1 / sqrt(k_dim) */
    const float *head_scale;  /* [q_heads], or NULL: scale for all */
    const float *slopes;      /* [q_heads] ALiBi slopes, finite, any sign; NULL: none */

    /* Policy. */
    ekv_policy policy;
    int64_t budget;        /* topk: tokens to read per row, rounded up to pages and clamped to what there is; forced pages included */
    int32_t first_pages;   /* topk, gaussian: the first pages are always read */
    int32_t recent_tokens; /* topk, gaussian: and the pages of the last tokens; the last page always is */
    ekv_gaussian_model gaussian_model;
    double quantile;        /* gaussian: in (0, 1); a page is kept if this quantile of its largest score may reach tau */
    double margin_sigma;    /* gaussian: safety margin below the estimated tau, in standard deviations of all scores, >= 0 */
    double margin_fraction; /* gaussian: and as a fraction of tau's distance above the typical page, >= 0 */
    double max_mass;           /* certified: in [0, 1): stop once E is at most this; 0: exact */
    const uint8_t *page_mask;  /* pages: [tokens * q_heads][page_mask_stride], nonzero: read that page for that row */
    int64_t page_mask_stride;

    /* Report. */
    ekv_report *report;  /* [tokens * q_heads], row-major, or NULL */
    int32_t report_mass; /* 1: also E and the error bound; reads the box of every unread page; needs BOX */

    /* Backend cuda, see DEVICE MEMORY; ignored by the others. */
    int32_t max_queries; /* with q_start: at least the query tokens of any sequence */
    int64_t max_length;  /* at least every entry of lengths; 0: block_table_stride * page_size */
    void *stream;        /* a cudaStream_t of the context's device; NULL: the default stream */
} ekv_decode_params;

static inline ekv_decode_params ekv_decode_params_default(void) {
    ekv_decode_params p = {sizeof(ekv_decode_params), 1,
                           NULL, 0, NULL, NULL, NULL, NULL, 0, NULL,
                           0, NULL, NULL, EKV_F32, 0, 0, NULL, EKV_F32, 0, 0,
                           1.5, NULL, 0.0f, NULL, NULL,
                           EKV_POLICY_FULL, 1024, 0, 0, EKV_GAUSSIAN_AUTO, 0.995, 0.0, 0.1, 0.0, NULL, 0,
                           NULL, 0, 0, 0, NULL};
    return p;
}

/* Runs the step.  Nothing is allocated if ekv_reserve() was called for a step at least as large, or an earlier step was. */
EKV_API ekv_status ekv_decode(ekv_context *context, const ekv_decode_params *params);

/* Bytes of scratch memory that ekv_decode would use for these parameters (pointers to q, out and report are not read), and the
 * call that gets them in advance, for ekv_decode and for the stages below: fill in the largest batch and lengths that are to come. */
EKV_API ekv_status ekv_scratch_bytes(ekv_context *context, const ekv_decode_params *params, size_t *bytes);
EKV_API ekv_status ekv_reserve(ekv_context *context, const ekv_decode_params *params);

/* The stages of a step on their own, for the same parameters (q must be given, out is not used).  Each row's page p stands at
 * [row * stride + p], stride >= the most pages of any sequence; entries past a row's pages are not written.
 *   ekv_page_bounds    an upper bound of the scores s in each page, rounding included; +infinity for an unknown page.  Needs BOX.
 *   ekv_page_moments   mean and standard deviation of the scores s in each page.  Needs GAUSSIAN.
 *   ekv_select_pages   1 where the policy would read the page, else 0; EKV_ERROR_UNSUPPORTED for policy certified, which decides
 *                      while it reads */
EKV_API ekv_status ekv_page_bounds(ekv_context *context, const ekv_decode_params *params, float *bounds, int64_t stride);
EKV_API ekv_status ekv_page_moments(ekv_context *context, const ekv_decode_params *params, float *mean, float *deviation,
                                    int64_t stride);
EKV_API ekv_status ekv_select_pages(ekv_context *context, const ekv_decode_params *params, uint8_t *selected, int64_t stride);

#ifdef __cplusplus
}
#endif

#endif /* ENTMAXKV_H */
