/*
 * The basis of a sketch once it is found: what follows from its stored numbers, saving and loading it, how well it fits.
 *
 * A basis that is loaded is not trusted: whatever its bytes are, bounds stay sound, since all that they rest on (P, what rounding
 * adds, how far the axes are from orthonormal) is computed here from the numbers that a step will use.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/internal.h"

#include <math.h>
#include <string.h>

#define FAR_FROM_ORTHONORMAL (1.0 / 64) /* |I - Q Q^T| up to which the derivation below holds */

#define REQUIRE(condition, status, ...) \
    if (!(condition)) return ekv_fail(context, status, __VA_ARGS__)
#define VALID(condition, ...) REQUIRE(condition, EKV_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

/* ---- what follows from the stored numbers ---- */

void ekv_basis_attach(const ekv_index *index, int32_t head, ekv_basis *basis) {
    const int32_t dim = index->shape.k_dim, axes = ekv_sketch_axes(dim);
    float *expanded = index->expanded + (size_t)head * ekv_sketch_expanded(dim);
    memset(basis, 0, sizeof *basis);
    basis->dim = dim;
    basis->rows = index->rows + (size_t)head * (size_t)axes * (size_t)dim;
    basis->project = expanded;
    basis->restore = expanded + (size_t)axes * ekv_padded(dim);
}

static double product(const float *a, const float *b, int32_t dim) {
    double sum = 0.0;
    for (int32_t d = 0; d < dim; d++) sum += (double)a[d] * (double)b[d];
    return sum;
}

/* |I - A B^T| (Frobenius) of two sets of rows, and A B^T. */
static double gram(const float *a, const float *b, int32_t axes, int32_t dim, double *products) {
    const size_t padded = ekv_padded(dim);
    double squares = 0.0;
    for (int32_t i = 0; i < axes; i++)
        for (int32_t j = 0; j < axes; j++) {
            const double p = product(a + (size_t)i * padded, b + (size_t)j * padded, dim), off = p - (i == j ? 1.0 : 0.0);
            products[i * axes + j] = p;
            squares += off * off;
        }
    return sqrt(squares);
}

/* P = G^-1 Q, G = Q Q^T, by p <- p + (q - G p) for each column, which converges since |I - G| is small; returns |Q - G P| of the P that
 * is stored. */
static double find_projection(const double *g, const float *q, int32_t axes, int32_t dim, float *p) {
    const size_t padded = ekv_padded(dim);
    double squares = 0.0;
    for (int32_t d = 0; d < dim; d++) {
        double column[EKV_SKETCH_AXES], left[EKV_SKETCH_AXES];
        for (int32_t a = 0; a < axes; a++) column[a] = (double)q[(size_t)a * padded + (size_t)d];
        for (int step = 0; step < 10; step++) {
            if (step == 9) /* what is left counts for the P that is stored */
                for (int32_t a = 0; a < axes; a++) column[a] = (double)(p[(size_t)a * padded + (size_t)d] = (float)column[a]);
            for (int32_t a = 0; a < axes; a++) {
                left[a] = (double)q[(size_t)a * padded + (size_t)d];
                for (int32_t b = 0; b < axes; b++) left[a] -= g[a * axes + b] * column[b];
            }
            for (int32_t a = 0; a < axes && step < 9; a++) column[a] += left[a];
        }
        for (int32_t a = 0; a < axes; a++) squares += left[a] * left[a];
    }
    return sqrt(squares);
}

/*
 * What rounding while encoding adds.  Let X = |x|, u = 2^-24, K = dim / 32 + 5 additions on a product's way through a rotation, and let
 * the norms of Q, P and the inverse of P on its row space be below 1.01, which |I - Q Q^T| and |I - P P^T| <= 1/64 ensure.  Encoding
 * computes x, y', residuals r' = y' - c and w' in f32, and bounds are read from q . center + (Q q) . c + |(Q q)_b| |r'_b| + |q_rest| |w'|.
 *      x            is rounded once: u X.
 *      y'           differs from P x by at most sqrt(axes) (K + 1) 1.02 u X <= 8.2 (K + 1) u X.
 *      w            = x - Q^T y' exactly; let S be the row space of P and w_S the part of w in it.  P w = (P x - y') + (I - P Q^T) y', so
 *                   |w_S| <= 8.4 (K + 1) u X + 1.05 |I - P Q^T| X.  The rest of w meets only the part of q outside of S.
 *      q_rest       its square is |q|^2 - |q_S|^2, and |Q q| <= |Q| |q_S| + |Q - G P| |q| since Q = G P + (Q - G P) and P vanishes outside
 *                   of S; so |q_S|^2 >= |Q q|^2 - (|I - G| + 2 |Q - G P|) |q|^2: that is `skew`.
 *      w'           axes products and subtractions of vectors with norms below 10 X: 11 (axes + 2) u X.
 *      r'           along axis a: n_a subtractions, each of a number of at most |y'_a| + C_a, C_a the sum of the largest centroids of its
 *                   codes: in norm 1.1 max(n_a) u X + 1.1 u |n_a C_a|.
 * Products that underflow add less than 2^-125 to x.  Norms are rounded up by more than their own error.
 */
static void find_errors(ekv_basis *basis, double defect, double skew) {
    const double u = 0x1p-24, k = (double)(ekv_padded(basis->dim) / 32 + 5);
    double refined[EKV_SKETCH_AXES] = {0.0}, reach[EKV_SKETCH_AXES] = {0.0}, most = 0.0, squares = 0.0;
    for (int32_t c = 0; c < basis->codes; c++)
        for (int j = 0; j < ekv_code_axes(basis, c); j++) {
            float largest = 0.0f;
            for (int v = 0; v < 16; v++) largest = fmaxf(largest, fabsf(basis->centroid[c][v][j]));
            refined[basis->axis[c][j]] += 1.0;
            reach[basis->axis[c][j]] += (double)largest;
        }
    for (int32_t a = 0; a < basis->axes; a++) {
        most = fmax(most, refined[a]);
        squares += refined[a] * reach[a] * refined[a] * reach[a];
    }
    const double share = (2.0 + 9.0 * (k + 2.0) + 12.0 * (basis->axes + 2) + 2.0 * most) * u + 1.1 * defect;
    basis->error_share = (float)(share * (1.0 + 1e-6));
    basis->error = (float)(2.0 * u * sqrt(squares) * (1.0 + 1e-6) + 0x1p-120);
    basis->skew = (float)(skew * (1.0 + 1e-6) + 1e-12);
}

bool ekv_basis_complete(const ekv_kernels *kernels, ekv_basis *basis, int32_t codes) {
    const int32_t dim = basis->dim, axes = basis->axes;
    const size_t padded = ekv_padded(dim);
    float *p = (float *)(uintptr_t)basis->project, *q = (float *)(uintptr_t)basis->restore; /* the index' own memory */
    double g[EKV_SKETCH_AXES * EKV_SKETCH_AXES], products[EKV_SKETCH_AXES * EKV_SKETCH_AXES];
    basis->codes = 0;
    memset(p, 0, (size_t)axes * padded * sizeof *p);
    memset(q, 0, (size_t)axes * padded * sizeof *q);
    for (int32_t a = 0; a < axes; a++) {
        ekv_load_row_args load = {ekv_at(basis->rows, (int64_t)a * dim, EKV_F16), dim, 1.0f, q + (size_t)a * padded};
        kernels->load_row[EKV_F16](&load);
    }
    const double from_orthonormal = gram(q, q, axes, dim, g);
    if (!(from_orthonormal <= FAR_FROM_ORTHONORMAL)) return false; /* also for NaN */
    const double left = find_projection(g, q, axes, dim, p), defect = gram(p, q, axes, dim, products);
    if (!(gram(p, p, axes, dim, products) <= FAR_FROM_ORTHONORMAL * 1.02)) return false; /* follows from the above */
    memset(basis->centroid, 0, sizeof basis->centroid);
    for (int32_t c = 0; c < codes; c++) {
        basis->start[c] = c ? (uint16_t)(basis->start[c - 1] + 16 * ekv_code_axes(basis, c - 1)) : 0;
        for (int j = 0; j < ekv_code_axes(basis, c); j++)
            for (int v = 0; v < 16; v++) basis->centroid[c][v][j] = ekv_centroid(basis, c, j, v);
    }
    basis->codes = codes;
    find_errors(basis, defect, from_orthonormal + 2.0 * left);
    return true;
}

int64_t ekv_basis_bytes(const ekv_basis *basis) {
    const int64_t head = (int64_t)offsetof(ekv_basis, start), each = sizeof basis->start[0] + sizeof basis->unit[0] + sizeof basis->axis[0];
    int64_t numbers = 0;
    for (int32_t c = 0; c < basis->codes; c++) numbers += 16 * ekv_code_axes(basis, c);
    return head + basis->codes * each + numbers + (int64_t)basis->axes * basis->dim * (int64_t)ekv_element_bytes(EKV_F16);
}

/* ---- saving ---- */

#define MAGIC 0x31424B45u /* "EKB1" where the least significant byte comes first */

typedef struct header {
    uint32_t magic;
    int32_t kv_heads, k_dim, codes;
} header;

/* What is saved of one head, followed by [codes] of unit, axis and number[4 * 16], the first center and the rows. */
typedef struct saved_head {
    int32_t axes, block_end[EKV_SKETCH_NORMS - 1];
    double found;
    float level[EKV_SKETCH_NORMS][15]; /* the last one follows from the keys that are encoded */
} saved_head;

/* Where the parts of a head lie, in bytes. */
typedef struct places {
    size_t unit, axis, number, center, rows, total;
} places;

static places places_of(const ekv_index *index) {
    const size_t codes = (size_t)index->codes, dim = (size_t)index->shape.k_dim;
    places p;
    p.unit = sizeof(saved_head);
    p.axis = p.unit + codes * sizeof(float);
    p.number = p.axis + codes * 4;
    p.center = p.number + codes * 4 * 16;
    p.rows = p.center + dim * sizeof(float);
    p.total = p.rows + (size_t)ekv_sketch_axes(index->shape.k_dim) * dim * sizeof(uint16_t);
    return p;
}

size_t ekv_index_basis_bytes(const ekv_index *index) {
    return index && index->codes ? sizeof(header) + (size_t)index->shape.kv_heads * places_of(index).total : 0;
}

static void save_head(const ekv_index *index, int32_t head, char *to) {
    const ekv_basis *basis = &index->bases[head];
    const places at = places_of(index);
    const size_t codes = (size_t)index->codes;
    saved_head h = {.axes = basis->axes, .found = index->fits[head].found};
    memset(to, 0, at.total);
    memcpy(h.block_end, basis->block_end, sizeof h.block_end);
    for (int b = 0; b < EKV_SKETCH_NORMS; b++) memcpy(h.level[b], basis->level[b], sizeof h.level[b]);
    memcpy(to, &h, sizeof h);
    memcpy(to + at.unit, basis->unit, codes * sizeof basis->unit[0]);
    memcpy(to + at.axis, basis->axis, codes * sizeof basis->axis[0]);
    for (size_t c = 0; c < codes; c++)
        memcpy(to + at.number + c * 64, basis->number + basis->start[c], 16 * (size_t)ekv_code_axes(basis, (int)c));
    memcpy(to + at.center, ekv_index_center(index, head, 0), (size_t)basis->dim * sizeof(float));
    memcpy(to + at.rows, basis->rows, (size_t)basis->axes * (size_t)basis->dim * sizeof(uint16_t));
}

ekv_status ekv_index_save_basis(ekv_context *context, const ekv_index *index, void *data, size_t bytes) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(index, "index is NULL");
    VALID(data, "data is NULL");
    REQUIRE(index->codes, EKV_ERROR_UNSUPPORTED, "index keeps no SKETCH statistics");
    VALID(bytes == ekv_index_basis_bytes(index), "bytes is %zu, the basis has %zu", bytes, ekv_index_basis_bytes(index));
    if (index->on_device) return ekv_index_save_basis(context, index->mirror, data, bytes);
    VALID(index->bases[0].codes, "index has no basis yet: it is found from the first sequence with %d tokens", EKV_SKETCH_TRAINING);
    const header h = {MAGIC, index->shape.kv_heads, index->shape.k_dim, index->codes};
    memcpy(data, &h, sizeof h);
    for (int32_t head = 0; head < index->shape.kv_heads; head++)
        save_head(index, head, (char *)data + sizeof h + (size_t)head * places_of(index).total);
    return EKV_OK;
}

/* ---- loading ---- */

static ekv_status check_header(ekv_context *context, const ekv_index *index, const void *data, size_t bytes) {
    const uint32_t swapped = MAGIC << 24 | (MAGIC & 0xff00u) << 8 | (MAGIC >> 8 & 0xff00u) | MAGIC >> 24;
    header h;
    VALID(bytes >= sizeof h, "bytes is %zu, a basis for this index has %zu", bytes, ekv_index_basis_bytes(index));
    memcpy(&h, data, sizeof h);
    VALID(h.magic != swapped, "data was saved on a machine with the other byte order");
    VALID(h.magic == MAGIC, "data begins with 0x%08x: not a basis, or one of another version", (unsigned)h.magic);
    VALID(h.kv_heads == index->shape.kv_heads, "data is for kv_heads %d, the index has %d", (int)h.kv_heads, (int)index->shape.kv_heads);
    VALID(h.k_dim == index->shape.k_dim, "data is for k_dim %d, the index has %d", (int)h.k_dim, (int)index->shape.k_dim);
    VALID(h.codes == index->codes, "data has %d codes, the index %d", (int)h.codes, (int)index->codes);
    VALID(bytes == ekv_index_basis_bytes(index), "bytes is %zu, a basis for this index has %zu", bytes, ekv_index_basis_bytes(index));
    return EKV_OK;
}

static ekv_status check_saved(ekv_context *context, const saved_head *h, int32_t head, int32_t dim) {
    VALID(h->axes >= 1 && h->axes <= ekv_sketch_axes(dim), "data, KV head %d: axes is %d, not in 1..%d", (int)head, (int)h->axes,
          (int)ekv_sketch_axes(dim));
    int32_t before = 0;
    for (int b = 0; b < EKV_SKETCH_NORMS - 1; before = h->block_end[b++])
        VALID(h->block_end[b] >= before && h->block_end[b] <= h->axes, "data, KV head %d: block_end[%d] is %d, not in %d..%d", (int)head, b,
              (int)h->block_end[b], (int)before, (int)h->axes);
    VALID(before == h->axes, "data, KV head %d: the last block ends at axis %d of %d", (int)head, (int)before, (int)h->axes);
    VALID(h->found >= 0.0 && h->found < 1e6, "data, KV head %d: the unexplained share is %g", (int)head, h->found);
    for (int b = 0; b < EKV_SKETCH_NORMS; b++)
        for (int v = 0; v < 15; v++)
            VALID(h->level[b][v] >= (v ? h->level[b][v - 1] : 0.0f) && h->level[b][v] < INFINITY,
                  "data, KV head %d: level[%d][%d] is %g: levels must ascend and be finite", (int)head, b, v, (double)h->level[b][v]);
    return EKV_OK;
}

static ekv_status check_codes(ekv_context *context, const ekv_basis *basis, int32_t codes, int32_t head) {
    for (int32_t c = 0; c < codes; c++) {
        VALID(basis->unit[c] >= 0.0f && basis->unit[c] < 1e36f, "data, KV head %d: unit[%d] is %g", (int)head, (int)c,
              (double)basis->unit[c]);
        for (int j = 0; j < 4; j++)
            VALID(basis->axis[c][j] >= (j ? -1 : 0) && basis->axis[c][j] < basis->axes &&
                      (!j || basis->axis[c][j] < 0 || basis->axis[c][j - 1] >= 0),
                  "data, KV head %d: axis[%d][%d] is %d", (int)head, (int)c, j, (int)basis->axis[c][j]);
    }
    return EKV_OK;
}

/* Reads one head into an attached basis; its center and fit. */
static ekv_status load_head(ekv_context *context, const ekv_index *index, const char *from, int32_t head, ekv_basis *basis, float *center,
                            ekv_fit *fit) {
    const places at = places_of(index);
    const size_t codes = (size_t)index->codes, dim = (size_t)index->shape.k_dim;
    saved_head h;
    memcpy(&h, from, sizeof h);
    ekv_status status = check_saved(context, &h, head, index->shape.k_dim);
    if (status != EKV_OK) return status;
    basis->axes = h.axes;
    memcpy(basis->block_end, h.block_end, sizeof h.block_end);
    for (int b = 0; b < EKV_SKETCH_NORMS; b++) {
        memcpy(basis->level[b], h.level[b], sizeof h.level[b]);
        basis->level[b][15] = basis->level[b][14];
    }
    memcpy(basis->unit, from + at.unit, codes * sizeof basis->unit[0]);
    memcpy(basis->axis, from + at.axis, codes * sizeof basis->axis[0]);
    status = check_codes(context, basis, index->codes, head);
    if (status != EKV_OK) return status;
    size_t start = 0;
    for (size_t c = 0; c < codes; c++) {
        const size_t count = 16 * (size_t)ekv_code_axes(basis, (int)c);
        memcpy(basis->number + start, from + at.number + c * 64, count);
        start += count;
    }
    memset(center, 0, ekv_padded(index->shape.k_dim) * sizeof *center);
    memcpy(center, from + at.center, dim * sizeof *center);
    for (size_t d = 0; d < dim; d++)
        VALID(isfinite(center[d]), "data, KV head %d: center[%zu] is %g", (int)head, d, (double)center[d]);
    memcpy((void *)(uintptr_t)basis->rows, from + at.rows, (size_t)h.axes * dim * sizeof(uint16_t));
    *fit = (ekv_fit){.found = h.found};
    VALID(ekv_basis_complete(ekv_statistics_kernels(context), basis, index->codes),
          "data, KV head %d: its axes are not orthonormal", (int)head);
    return EKV_OK;
}

/* Reads every head into memory of its own, to see whether it is right. */
static ekv_status check_heads(ekv_context *context, const ekv_index *index, const char *from) {
    const int32_t dim = index->shape.k_dim;
    ekv_basis *basis = NULL;
    float *expanded = NULL, *center = NULL;
    uint16_t *rows = NULL;
    char *memory = NULL;
    size_t bytes = 0;
    for (int pass = 0; pass < 2; pass++) {
        ekv_arena arena = {memory, 0};
        basis = ekv_take(&arena, 1, sizeof *basis);
        expanded = ekv_take(&arena, ekv_sketch_expanded(dim), sizeof *expanded);
        center = ekv_take(&arena, ekv_padded(dim), sizeof *center);
        rows = ekv_take(&arena, (size_t)ekv_sketch_axes(dim) * (size_t)dim, sizeof *rows);
        if (pass) break;
        bytes = arena.used;
        memory = ekv_allocate(&context->allocator, bytes);
        REQUIRE(memory, EKV_ERROR_OUT_OF_MEMORY, "out of memory: %zu bytes to check a basis", bytes);
    }
    ekv_status status = EKV_OK;
    for (int32_t head = 0; head < index->shape.kv_heads && status == EKV_OK; head++) {
        ekv_fit fit;
        memset(basis, 0, sizeof *basis);
        basis->dim = dim;
        basis->rows = rows;
        basis->project = expanded;
        basis->restore = expanded + ekv_sketch_expanded(dim) / 2;
        status = load_head(context, index, from + (size_t)head * places_of(index).total, head, basis, center, &fit);
    }
    ekv_release(&context->allocator, memory, bytes);
    return status;
}

ekv_status ekv_index_load_basis(ekv_context *context, ekv_index *index, const void *data, size_t bytes) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(index, "index is NULL");
    VALID(data, "data is NULL");
    REQUIRE(index->codes, EKV_ERROR_UNSUPPORTED, "index keeps no SKETCH statistics");
    if (index->on_device) return ekv_device_load_basis(context, index, data, bytes);
    for (int64_t block = 0; block < index->shape.blocks; block++)
        VALID(!index->counts[block], "index holds tokens (%d in block %lld): a basis is loaded before the first one",
              (int)index->counts[block], (long long)block);
    ekv_status status = check_header(context, index, data, bytes);
    const char *from = (const char *)data + sizeof(header);
    if (status == EKV_OK) status = check_heads(context, index, from);
    if (status != EKV_OK) return status;
    ekv_sketch_clear(index);
    for (int32_t head = 0; head < index->shape.kv_heads; head++) {
        ekv_basis_attach(index, head, &index->bases[head]);
        status = load_head(context, index, from + (size_t)head * places_of(index).total, head, &index->bases[head],
                           (float *)(uintptr_t)ekv_index_center(index, head, 0), &index->fits[head]);
        if (status != EKV_OK) return ekv_sketch_clear(index), status; /* data changed under our hands */
    }
    index->centered[0] = 1;
    index->basis_loaded = true;
    return EKV_OK;
}

ekv_status ekv_cache_load_basis(ekv_context *context, ekv_cache *cache, int32_t layer, const void *data, size_t bytes) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(cache, "cache is NULL");
    VALID(layer >= 0 && layer < cache->shape.layers, "layer is %d, not in 0..%d", (int)layer, (int)cache->shape.layers - 1);
    REQUIRE(cache->indexes, EKV_ERROR_UNSUPPORTED, "cache keeps no SKETCH statistics");
    return ekv_index_load_basis(context, cache->indexes[layer], data, bytes);
}

/* ---- finding it anew ---- */

ekv_status ekv_index_find_basis(ekv_context *context, ekv_index *index, const ekv_kv *kv, const int32_t *block_table, int64_t length) {
    ekv_kv view = ekv_kv_default();
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(index, "index is NULL");
    VALID(kv, "kv is NULL");
    VALID(ekv_copy_params(&view, sizeof view, kv, sizeof(size_t)), "kv->size is %zu, not that of an ekv_kv", kv->size);
    REQUIRE(index->codes, EKV_ERROR_UNSUPPORTED, "index keeps no SKETCH statistics");
    VALID(length >= EKV_SKETCH_TRAINING, "length is %lld: a basis is found from at least %d tokens", (long long)length,
          EKV_SKETCH_TRAINING);
    VALID(ekv_ceil_div(length, index->shape.page_size) <= index->shape.blocks, "length is %lld, the index has %lld blocks of %d tokens",
          (long long)length, (long long)index->shape.blocks, (int)index->shape.page_size);
    ekv_status status = ekv_check_kv(context, &view);
    if (status == EKV_OK) status = ekv_check_index(context, index, &view);
    if (status == EKV_OK) status = ekv_check_blocks(context, index, block_table, 0, length);
    if (status != EKV_OK) return status;
    if (index->on_device) return ekv_device_find_basis(context, index, &view, block_table, length);
    return ekv_sketch_find(context, index, ekv_statistics_kernels(context), &view, block_table, length);
}

/* From the sequence given; the others are sketched with it, too. */
ekv_status ekv_cache_find_basis(ekv_context *context, ekv_cache *cache, int32_t sequence, int32_t layer) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(cache, "cache is NULL");
    const int64_t length = ekv_sequence_length(cache, sequence, 0);
    VALID(length >= 0, "sequence is %d, which does not exist", (int)sequence);
    VALID(layer >= 0 && layer < cache->shape.layers, "layer is %d, not in 0..%d", (int)layer, (int)cache->shape.layers - 1);
    REQUIRE(cache->indexes, EKV_ERROR_UNSUPPORTED, "cache keeps no SKETCH statistics");
    ekv_kv kv;
    ekv_index *index = cache->indexes[layer];
    ekv_cache_layer(cache, layer, &kv, NULL);
    ekv_status status = ekv_index_find_basis(context, index, &kv, ekv_cache_block_table(cache, sequence),
                                             ekv_sequence_length(cache, sequence, layer));
    for (int32_t other = 0; other < cache->shape.max_sequences && status == EKV_OK; other++) {
        const int64_t tokens = other == sequence ? 0 : ekv_sequence_length(cache, other, layer);
        if (tokens > 0)
            ekv_sketch_update(context, index, ekv_statistics_kernels(context), &kv, ekv_cache_block_table(cache, other), 0, 0, tokens,
                              tokens);
    }
    return status;
}

/* ---- how well it fits ---- */

static void fill_fit(const ekv_index *index, int32_t head, ekv_sketch_fit *out) {
    const ekv_fit *fit = &index->fits[head];
    const bool whole = fit->tokens > 0;
    out->kv_head = head;
    out->basis = index->basis_loaded ? EKV_BASIS_LOADED : EKV_BASIS_FOUND;
    out->found = fit->found;
    out->tokens = whole ? fit->tokens : fit->count;
    out->recent = whole ? fit->recent : fit->total > 0.0 ? sqrt(fit->left / fit->total) : 0.0;
}

ekv_status ekv_index_sketch_fit(ekv_context *context, const ekv_index *index, int32_t kv_head, ekv_sketch_fit *fit) {
    if (!context) return EKV_ERROR_INVALID_ARGUMENT;
    VALID(index, "index is NULL");
    VALID(fit, "fit is NULL");
    VALID(fit->size == sizeof *fit, "fit->size is %zu, not that of an ekv_sketch_fit", fit->size);
    REQUIRE(index->codes, EKV_ERROR_UNSUPPORTED, "index keeps no SKETCH statistics");
    VALID(kv_head >= -1 && kv_head < index->shape.kv_heads, "kv_head is %d, not in -1..%d", (int)kv_head,
          (int)index->shape.kv_heads - 1);
    if (index->on_device) return ekv_index_sketch_fit(context, index->mirror, kv_head, fit);
    *fit = (ekv_sketch_fit){.size = sizeof *fit, .kv_head = kv_head > 0 ? kv_head : 0};
    if (!index->bases[0].codes) return EKV_OK;
    fill_fit(index, fit->kv_head, fit);
    for (int32_t head = 1; kv_head < 0 && head < index->shape.kv_heads; head++) {
        ekv_sketch_fit other = {.size = sizeof other};
        fill_fit(index, head, &other);
        if (other.recent - other.found > fit->recent - fit->found) *fit = other;
    }
    return EKV_OK;
}
