/*
 * A decode step as the kernels see it: one plain struct, passed by value at every launch, and the launchers that host.c calls.
 * Readable by C and by CUDA C++; nothing here includes the CUDA headers.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An item is one KV head of one sequence with up to `rows` rows (query token, query head of the group): what shares reads of
 * keys. Items are numbered ((sequence * row_blocks) + row block) * kv_heads + head, with the largest number of query tokens
 * that the host was told, since the lengths and the query tokens of each sequence are known on the device alone.  A step runs
 * in rounds of round_items items, so that scratch memory has a ceiling.  Slot = (item within the round) * rows + row.
 *
 * A scan cuts an item's pages evenly over `splits` blocks of EKV_CUDA_WARPS warps.  Every warp owns a segment of the row's
 * candidate list, so that nothing is appended to by two writers and segments lie in token order.
 */
#ifndef EKV_CUDA_STEP_H
#define EKV_CUDA_STEP_H

#include <stdint.h>

#include "entmaxkv/entmaxkv.h"
#include "entmaxkv/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EKV_CUDA_WARPS         8    /* warps of a scanning block */
#define EKV_CUDA_MAX_ROWS      8    /* rows of an item */
#define EKV_CUDA_MAX_SPLITS    256  /* blocks of an item */
#define EKV_CUDA_MAX_CHUNKS    256  /* chunks of pages of an item in selection */
#define EKV_CUDA_SUPER         1024 /* ranks of the support whose values are one partial sum */
#define EKV_CUDA_LEAST_TOKENS  4096 /* certified: up to so many tokens are all read, which takes less time than to decide */
#define EKV_CUDA_SOFTMAX_BELOW (1.0 + 1e-7)
#define EKV_CUDA_STRETCHES     64   /* most stretches of sketch_pages pages that begin with one */
#define EKV_CUDA_SKETCH_PAGES  64   /* sketch_pages is a multiple of so many */
#define EKV_CUDA_UNITS         25   /* most units of a sketch: four numbers of 4 bits */

typedef struct ekv_cuda_head {
    double alpha;
    float scale, slope;
} ekv_cuda_head;

/* What selection found for a row.  topk: a page is read if the order of its bound is above `order`, or equal and its index at most
 * `tie`.  gaussian: if its value is above `cut`.  certified: if its bound is above `cut`, and by `relax` at least. */
typedef struct ekv_cuda_cut {
    double cut;     /* certified: no token that scores this or less is in the support */
    uint32_t order; /* of the k-th largest bound */
    int32_t tie;
    /* certified */
    double relax, skipped; /* max_mass: the mass of what is skipped though its bound is above the cut is at most `skipped` */
    double origin;         /* the cut that the bounds in `above` are relative to */
    float share;           /* of a sample: what boxes (of pages) or the sketch (of tokens) would not rule out */
    int32_t probed, sampled; /* keys scored by probes; boxes or sketches of the sample */
} ekv_cuda_cut;

/* A row's look-up table for sketches (sketch.cuh): what each number of a sketch adds to a bound, z units, rounded up. */
typedef struct ekv_cuda_table {
    double norm;  /* of the query */
    double moved; /* largest norm of a key less its center; how far rounding moves one */
    double error;
    double size; /* sum over the numbers of the largest magnitude of what they add */
    float entry[EKV_CUDA_UNITS * 4 * 16]; /* 0 behind the last number */
} ekv_cuda_table;

/* What page_scores says about 32 pages of a row (those that the row sees).
 * bounds: best is the largest bound among the pages that topk may choose, forced the number of the others.
 * moments: sums over the pages of tokens * mean, of tokens * (deviation^2 + mean^2) and of mean + 1.5 deviation (all but the
 * row's last page); best and reach the largest mean and mean + 40 deviation; forced is not 0 if a page is unknown or not
 * finite. */
#define EKV_CUDA_GROUP 32
typedef struct ekv_cuda_group {
    double sum, squares, typical;
    float best, reach;
    int32_t forced;
} ekv_cuda_group;

typedef struct ekv_cuda_result {
    double tau;
    int64_t support;
    double mass, error;
} ekv_cuda_result;

typedef struct ekv_cuda_step {
    /* KV memory */
    const void *k, *v;
    int64_t k_block_stride, k_token_stride, k_head_stride;
    int64_t v_block_stride, v_token_stride, v_head_stride;
    int64_t blocks;
    int32_t kv_heads, k_dim, v_dim, page_size, page_shift;
    int32_t dtype;
    /* batch; table, lengths and q_start are device memory */
    const int32_t *table, *lengths, *q_start;
    int64_t table_stride;
    int32_t batch, max_length, max_queries, max_pages;
    /* queries and output */
    const void *q;
    void *out;
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int32_t q_dtype, out_dtype, q_heads, group;
    /* mathematics */
    double alpha;
    float scale;
    const ekv_cuda_head *heads; /* [q_heads], NULL: alpha and scale for all, no slopes */
    /* policy */
    int32_t policy, first_pages, recent_tokens, gaussian_model;
    int64_t budget_pages;
    double zeta, margin_sigma, margin_fraction;
    const uint8_t *page_mask;
    int64_t page_mask_stride;
    /* index */
    const char *boxes, *moments;
    const float *norms;
    const uint16_t *counts;
    int64_t index_blocks, box_bytes, moments_bytes;
    const uint8_t *sketches; /* [kv_heads][index_blocks] of sketch_bytes: [page_size / 16][units][16 tokens] of 16 bits */
    const ekv_basis *bases;  /* [kv_heads]; pointers in it are those of the host */
    const uint16_t *basis_rows;
    const float *centers; /* [kv_heads][stretches][center_stride] */
    const uint16_t *sketched;
    const int32_t *stretch_of;
    int64_t sketch_bytes, stretch, stretches; /* pages that share a center; centers of a head */
    int32_t codes, units, center_stride;      /* codes without the norms */
    int32_t sketch_pages, sketch_chunks;      /* a block of the sketch kernel takes so many pages of an item, which are so many blocks */
    /* the cut of the work */
    int32_t rows, row_blocks, splits, chunks, chunk_pages, value_splits;
    int64_t first_item, round_items;
    int64_t segment;     /* entries of one segment of a candidate list */
    int64_t list_stride; /* entries of a slot's list: splits * EKV_CUDA_WARPS * segment */
    /* scratch memory */
    float *list_z, *weight; /* [slots][list_stride] */
    int32_t *list_token;
    int32_t *segment_count;  /* [slots][splits * EKV_CUDA_WARPS] */
    float *floor;            /* [slots][splits] what a block found that tau is above, less the margin */
    ekv_cuda_result *result; /* [slots] */
    double *value_part;      /* [slots][supers][v_dim] */
    int64_t supers;
    uint32_t *ticket;               /* [slots] blocks of the values kernel that are done; zeroed by finish */
    float *soft_max, *soft_values;  /* [slots][splits], [slots][splits][v_dim] */
    double *soft_sum;               /* [slots][splits] */
    float *page_a, *page_b;         /* [slots][max_pages] bounds, or means and deviations, z units; NaN: there is none */
    ekv_cuda_group *group_of_pages; /* [slots][groups] */
    int64_t groups;
    ekv_cuda_cut *cut;    /* [slots] */
    int32_t levels, pass; /* certified: EKV_CUDA_NORMS, ... that are used; the level whose bounds are there */
    double max_mass;
    int32_t *looked;       /* certified: [items][chunks] boxes, or groups of 16 sketches, that were read */
    ekv_cuda_table *lookup;/* [slots] */
    uint16_t *above;       /* [slots][max_pages * page_size] f16 bounds of tokens less cut->origin, rounded up; 0: not above */
    int32_t *read_entry;   /* [items][chunks][read_stride] what some row reads, per chunk in order: pages, or tokens where the sketch pays;
                              NULL: all */
    int64_t read_stride;
    uint32_t *read_mask;  /* [items][chunks][chunk_pages] which rows read the page */
    int32_t *read_count;  /* [items][chunks] entries */
    int32_t *read_pages, *read_tokens; /* [items][chunks] pages of which something is read, and tokens */
    int32_t *row_pages, *row_tokens; /* [slots][chunks] */
    ekv_report *report;
    int32_t report_mass, certify; /* certify: page_a holds bounds */
    void *query_a, *query_b;      /* ekv_page_bounds, ekv_page_moments, ekv_select_pages: where the answer goes */
    int64_t query_stride;
    int32_t query_kind;
    int32_t overlap; /* the device can start a kernel while the one before it ends */
} ekv_cuda_step;

/* What the index kernels get. */
typedef struct ekv_cuda_build {
    const void *k, *v;
    int64_t k_block_stride, k_token_stride, k_head_stride;
    int64_t v_block_stride, v_token_stride, v_head_stride;
    int64_t blocks;
    int32_t kv_heads, k_dim, v_dim, page_size, dtype;
    const int32_t *table, *lengths, *counts_in; /* lengths NULL: `length` and `first` of one sequence */
    int64_t table_stride;
    int64_t first, first_page, pages, length; /* first: token */
    int32_t batch, max_count;
    char *boxes, *moments;
    float *norms;
    uint16_t *counts;
    int64_t index_blocks, box_bytes, moments_bytes;
    /* The sketch, as in ekv_cuda_step; bases NULL: there is no basis.  expanded: [kv_heads][2][axes][center_stride] P, then Q. */
    uint8_t *sketches;
    ekv_basis *bases;
    const float *expanded;
    float *centers;
    uint16_t *sketched; /* NULL: no sketch is kept */
    int32_t *stretch_of;
    int64_t sketch_bytes, stretch, stretches, touched; /* touched: most stretches that a sequence's new tokens lie in */
    int32_t codes, units, axes, center_stride;
} ekv_cuda_build;

enum { EKV_CUDA_QUERY_NONE, EKV_CUDA_QUERY_BOUNDS, EKV_CUDA_QUERY_MOMENTS, EKV_CUDA_QUERY_SELECTION };
enum { EKV_CUDA_SCAN_ENTMAX, EKV_CUDA_SCAN_SOFTMAX, EKV_CUDA_PAGE_BOUNDS, EKV_CUDA_PAGE_MOMENTS, EKV_CUDA_PROBE };
enum { EKV_CUDA_NORMS = 1, EKV_CUDA_BOXES = 2, EKV_CUDA_SKETCH = 4 }; /* boxes or the sketch, not both */

/* All launchers enqueue on `stream` (a cudaStream_t) and return a cudaError_t as int. */
int ekv_cuda_launch_scan_f32(const ekv_cuda_step *s, int kind, void *stream);
int ekv_cuda_launch_scan_f16(const ekv_cuda_step *s, int kind, void *stream);
int ekv_cuda_launch_scan_bf16(const ekv_cuda_step *s, int kind, void *stream);
int ekv_cuda_launch_finish(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_values(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_combine(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_mass(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_report(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_norms(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_sketch(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_cut(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_compact(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_query(const ekv_cuda_step *s, void *stream);
int ekv_cuda_launch_heads(ekv_cuda_head *to, const ekv_cuda_head *from, int32_t n, void *stream);
int ekv_cuda_launch_centers(const ekv_cuda_build *b, void *stream);
int ekv_cuda_launch_encode(const ekv_cuda_build *b, void *stream);
int ekv_cuda_launch_build(const ekv_cuda_build *b, void *stream);
int ekv_cuda_launch_forget(const ekv_cuda_build *b, void *stream);
#define EKV_CUDA_HEADS_PER_LAUNCH 128

#ifdef __cplusplus
}
#endif

#endif
