/*
 * The sketch of an index: where it lies, how its basis is found, how it is kept current.  (What a sketch is: ekv_basis in
 * entmaxkv/kernels.h.  How bounds are read from it: certified.c.)
 *
 * The basis of a KV head is found from TRAINING tokens, evenly spread over the first sequence that has so many, or loaded (basis.c):
 * principal axes, then codes in turn, each where it takes away most of the variance that is left.  It serves all sequences of the pool.
 * Keys drift along a sequence, mostly by their mean, so each stretch of about 1,024 tokens has a center: the mean of the stretch before,
 * which is known when its first token comes, at whatever pace tokens are appended.  Neither fit nor centers matter for soundness.
 * What the codes leave of the keys is summed up while they are encoded: that tells when a basis no longer fits.
 *
 * Everything here is plain double arithmetic in a fixed order: the same bits on every machine.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TRAINING EKV_SKETCH_TRAINING
#define STRETCH 1024        /* tokens that share a center, rounded up to whole pages */
#define AXIS_STEPS 24       /* subspace iterations */
#define CLUSTER_STEPS 6     /* k-means iterations */
#define CLUSTER_STRIDE 2    /* k-means looks at every second training token */
#define LARGEST 1e17        /* keys up to here are trained on: squares and sums of x stay finite */

/* ---- memory ---- */

/* Codes per key: 20 for 64 dimensions, 1.25 bits per element. */
static int32_t codes_for(int32_t dim) {
    const int32_t codes = (20 * dim / 64 + 1) / 2 * 2;
    return codes < 8 ? 8 : codes > EKV_SKETCH_CODES ? EKV_SKETCH_CODES : codes;
}

void ekv_sketch_lay_out(ekv_index *index, ekv_arena *arena) {
    const ekv_index_params *s = &index->shape;
    if (!(s->statistics & EKV_STATISTICS_SKETCH)) return;
    const size_t heads = (size_t)s->kv_heads, padded = ekv_padded(s->k_dim);
    index->codes = codes_for(s->k_dim);
    index->stretch = ekv_ceil_div(STRETCH, s->page_size);
    index->sketch_bytes = (size_t)s->page_size * (size_t)(index->codes + EKV_SKETCH_NORMS) / 2;
    const size_t stretches = (size_t)ekv_index_stretches(index);
    /* In device memory four numbers make a unit, which may leave a half of the last one empty. */
    const size_t on_device = (size_t)s->page_size * 2 * (size_t)ekv_sketch_units(index->codes);
    index->sketches = ekv_take(arena, heads * (size_t)s->blocks, on_device);
    if (index->on_device) index->sketch_bytes = on_device;
    index->bases = ekv_take(arena, heads, sizeof *index->bases);
    index->rows = ekv_take(arena, heads * (size_t)ekv_sketch_axes(s->k_dim) * (size_t)s->k_dim, sizeof *index->rows);
    index->expanded = ekv_take(arena, heads * ekv_sketch_expanded(s->k_dim), sizeof(float));
    index->fits = ekv_take(arena, heads, sizeof *index->fits);
    index->centers = ekv_take(arena, heads * stretches * padded, sizeof(float));
    index->centered = ekv_take(arena, stretches, 1);
    index->sketched = ekv_take(arena, (size_t)s->blocks, sizeof *index->sketched);
    index->stretch_of = ekv_take(arena, (size_t)s->blocks, sizeof *index->stretch_of);
}

void ekv_sketch_clear(ekv_index *index) {
    if (!index->codes) return;
    memset(index->bases, 0, (size_t)index->shape.kv_heads * sizeof *index->bases);
    memset(index->fits, 0, (size_t)index->shape.kv_heads * sizeof *index->fits);
    index->basis_loaded = false;
    memset(index->centered, 0, (size_t)ekv_index_stretches(index));
    memset(index->sketched, 0, (size_t)index->shape.blocks * sizeof *index->sketched);
}

/* ---- finding the basis of one head ---- */

/* Work space of one head. */
typedef struct trainer {
    int32_t dim, axes;
    float *x;           /* [TRAINING][dim] keys less their mean */
    float *y;           /* [TRAINING][axes] coordinates, then what is left of them */
    double *length;     /* [TRAINING] squares of x, then of what no axis sees */
    double *covariance; /* [dim][dim] */
    double *axis;       /* [axes][dim] orthonormal */
    double *moved;      /* [axes][dim] */
    float *norms;       /* [TRAINING] */
    double total, left; /* sums over the tokens: squares of x, and of what the codes leave */
} trainer;

static size_t trainer_lay_out(trainer *t, int32_t dim, char *base) {
    ekv_arena arena = {base, 0};
    const size_t d = (size_t)dim;
    t->dim = dim;
    t->axes = ekv_sketch_axes(dim);
    const size_t axes = (size_t)t->axes;
    t->x = ekv_take(&arena, TRAINING * d, sizeof(float));
    t->y = ekv_take(&arena, TRAINING * axes, sizeof(float));
    t->length = ekv_take(&arena, TRAINING, sizeof(double));
    t->covariance = ekv_take(&arena, d * d, sizeof(double));
    t->axis = ekv_take(&arena, axes * d, sizeof(double));
    t->moved = ekv_take(&arena, axes * d, sizeof(double));
    t->norms = ekv_take(&arena, TRAINING, sizeof(float));
    return arena.used;
}

static double dot(const double *a, const double *b, int32_t n) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void find_covariance(trainer *t) {
    const int32_t dim = t->dim;
    memset(t->covariance, 0, (size_t)dim * (size_t)dim * sizeof(double));
    for (int k = 0; k < TRAINING; k++) {
        const float *x = t->x + (size_t)k * (size_t)dim;
        for (int32_t i = 0; i < dim; i++)
            for (int32_t j = 0; j < dim; j++) t->covariance[(size_t)i * (size_t)dim + (size_t)j] += (double)x[i] * (double)x[j];
    }
}

/* Makes the rows orthonormal, in order (Gram-Schmidt, twice over).  A row that vanishes becomes a unit vector first. */
static void orthonormalise(double *rows, int32_t n, int32_t dim) {
    for (int32_t i = 0; i < n; i++) {
        double *row = rows + (size_t)i * (size_t)dim, length = sqrt(dot(row, row, dim));
        double left = length > 0.0 ? 1.0 : 0.0; /* the share of the row's length that the rows before it do not take away */
        for (int pass = 0, unit = i; (pass < 2 || !(left > 1e-6)) && unit <= 2 * dim; pass++) {
            if (!(left > 1e-9)) { /* nothing: try the next unit vector */
                memset(row, 0, (size_t)dim * sizeof *row);
                row[unit++ % dim] = 1.0;
                length = 1.0;
                pass = 0;
            }
            for (int32_t j = 0; j < i; j++) {
                const double *other = rows + (size_t)j * (size_t)dim, along = dot(row, other, dim);
                for (int32_t d = 0; d < dim; d++) row[d] -= along * other[d];
            }
            const double rest = sqrt(dot(row, row, dim));
            for (int32_t d = 0; d < dim && rest > 0.0; d++) row[d] /= rest;
            left = rest / length;
            length = 1.0;
        }
    }
}

/* Sorts axes by the value that `key` holds for each, largest first; ties stay in order. */
static void sort_axes(double *rows, double *key, int32_t n, int32_t dim) {
    for (int32_t i = 1; i < n; i++)
        for (int32_t j = i; j > 0 && key[j] > key[j - 1]; j--) {
            const double k = key[j];
            key[j] = key[j - 1];
            key[j - 1] = k;
            for (int32_t d = 0; d < dim; d++) {
                double *a = rows + (size_t)j * (size_t)dim + d, *b = a - dim, swap = *a;
                *a = *b;
                *b = swap;
            }
        }
}

/* Principal axes by subspace iteration from the coordinate axes of largest variance.  Any orthonormal rows would do. */
static void find_axes(trainer *t) {
    const int32_t dim = t->dim, axes = t->axes;
    double key[EKV_SKETCH_AXES];
    uint8_t taken[EKV_MAX_DIM] = {0};
    memset(t->axis, 0, (size_t)axes * (size_t)dim * sizeof(double));
    for (int32_t a = 0; a < axes; a++) {
        int32_t best = -1;
        for (int32_t d = 0; d < dim; d++)
            if (!taken[d] && (best < 0 || t->covariance[(size_t)d * (size_t)(dim + 1)] > t->covariance[(size_t)best * (size_t)(dim + 1)]))
                best = d;
        taken[best] = 1;
        t->axis[(size_t)a * (size_t)dim + (size_t)best] = 1.0;
    }
    for (int step = 0; step < AXIS_STEPS; step++) {
        for (int32_t a = 0; a < axes; a++) {
            const double *row = t->axis + (size_t)a * (size_t)dim;
            double *to = t->moved + (size_t)a * (size_t)dim;
            for (int32_t d = 0; d < dim; d++) to[d] = dot(row, t->covariance + (size_t)d * (size_t)dim, dim);
            key[a] = dot(to, to, dim);
        }
        sort_axes(t->moved, key, axes, dim);
        orthonormalise(t->moved, axes, dim);
        memcpy(t->axis, t->moved, (size_t)axes * (size_t)dim * sizeof(double));
    }
}

static void project(trainer *t) {
    t->total = 0.0;
    for (int k = 0; k < TRAINING; k++) {
        const float *x = t->x + (size_t)k * (size_t)t->dim;
        t->length[k] = 0.0;
        for (int32_t d = 0; d < t->dim; d++) t->length[k] += (double)x[d] * (double)x[d];
        t->total += t->length[k];
        for (int32_t a = 0; a < t->axes; a++) {
            const double *row = t->axis + (size_t)a * (size_t)t->dim;
            double sum = 0.0;
            for (int32_t d = 0; d < t->dim; d++) sum += row[d] * (double)x[d];
            t->y[(size_t)k * (size_t)t->axes + (size_t)a] = (float)sum;
        }
    }
}

/* ---- codes ---- */

/* The axes that the next code takes: one, two or four of largest remaining variance, whichever takes away most.  A code of 16 levels
 * leaves about 1 % of the variance of one axis, 12 % of two (4 levels each), 36 % of four (2 each). */
static void choose_axes(const trainer *t, int32_t axis[4]) {
    static const double gain[3] = {0.99, 0.88, 0.64};
    double variance[EKV_SKETCH_AXES], top[4] = {0.0};
    for (int j = 0; j < 4; j++) axis[j] = -1;
    for (int32_t a = 0; a < t->axes; a++) {
        variance[a] = 0.0;
        for (int k = 0; k < TRAINING; k++) {
            const double y = (double)t->y[(size_t)k * (size_t)t->axes + (size_t)a];
            variance[a] += y * y;
        }
    }
    int32_t best[4] = {-1, -1, -1, -1};
    for (int j = 0; j < 4 && j < t->axes; j++) {
        for (int32_t a = 0; a < t->axes; a++)
            if (a != best[0] && a != best[1] && a != best[2] && (best[j] < 0 || variance[a] > variance[best[j]])) best[j] = a;
        top[j] = variance[best[j]];
    }
    const double sums[3] = {top[0], top[0] + top[1], top[0] + top[1] + top[2] + top[3]};
    int choice = 0;
    for (int c = 1; c < 3; c++)
        if (gain[c] * sums[c] > gain[choice] * sums[choice]) choice = c;
    for (int j = 0; j < 1 << choice && j < t->axes; j++) axis[j] = best[j];
}

static int compare_floats(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Quantile of sorted values. */
static float quantile(const float *sorted, double p) { return sorted[(int)(p * (TRAINING - 1) + 0.5)]; }

static void coordinate(const trainer *t, int k, const int32_t axis[4], float r[4]) {
    for (int j = 0; j < 4; j++) r[j] = axis[j] >= 0 ? t->y[(size_t)k * (size_t)t->axes + (size_t)axis[j]] : 0.0f;
}

static int nearest(const float centroid[16][4], const float r[4]) {
    int best = 0;
    float least = INFINITY;
    for (int v = 0; v < 16; v++) {
        float distance = 0.0f;
        for (int j = 0; j < 4; j++) distance += (r[j] - centroid[v][j]) * (r[j] - centroid[v][j]);
        if (distance < least) {
            least = distance;
            best = v;
        }
    }
    return best;
}

/* Centroids on a grid of quantiles, 16, 4 x 4 or 2 x 2 x 2 x 2 of them, then k-means. */
static void find_centroids(trainer *t, const int32_t axis[4], float centroid[16][4]) {
    const int count = axis[1] < 0 ? 1 : axis[2] < 0 ? 2 : 4, bits = 4 / count, levels = 1 << bits;
    memset(centroid, 0, 16 * sizeof *centroid);
    for (int j = 0; j < count && axis[j] >= 0; j++) {
        for (int k = 0; k < TRAINING; k++) t->norms[k] = t->y[(size_t)k * (size_t)t->axes + (size_t)axis[j]];
        qsort(t->norms, TRAINING, sizeof *t->norms, compare_floats);
        for (int v = 0; v < 16; v++) centroid[v][j] = quantile(t->norms, ((v >> j * bits & (levels - 1)) + 0.5) / levels);
    }
    for (int step = 0; step < CLUSTER_STEPS; step++) {
        double sum[16][4] = {{0.0}};
        int members[16] = {0};
        for (int k = 0; k < TRAINING; k += CLUSTER_STRIDE) {
            float r[4];
            coordinate(t, k, axis, r);
            const int v = nearest((const float(*)[4])centroid, r);
            members[v]++;
            for (int j = 0; j < 4; j++) sum[v][j] += (double)r[j];
        }
        for (int v = 0; v < 16; v++)
            for (int j = 0; j < 4 && members[v]; j++) centroid[v][j] = (float)(sum[v][j] / members[v]);
    }
}

/* Rounds a code's centroids to whole numbers of a unit, and puts those behind the codes before it. */
static void round_centroids(ekv_basis *basis, int32_t code, float centroid[16][4]) {
    float most = 0.0f;
    for (int v = 0; v < 16; v++)
        for (int j = 0; j < 4; j++) most = fabsf(centroid[v][j]) > most ? fabsf(centroid[v][j]) : most;
    const float unit = most > 1e-30f ? most / 127.0f : 0.0f;
    basis->start[code] = code ? (uint16_t)(basis->start[code - 1] + 16 * ekv_code_axes(basis, code - 1)) : 0;
    basis->unit[code] = unit;
    for (int j = 0; j < 4; j++)
        for (int v = 0; v < 16; v++) {
            if (basis->axis[code][j] < 0) continue;
            const float steps = unit > 0.0f ? rintf(centroid[v][j] / unit) : 0.0f;
            basis->number[basis->start[code] + 16 * j + v] = (int8_t)(steps > 127.0f ? 127.0f : steps < -127.0f ? -127.0f : steps);
            centroid[v][j] = ekv_centroid(basis, code, j, v);
        }
}

static void find_codes(trainer *t, ekv_basis *basis, int32_t codes) {
    int32_t used = 0;
    for (int32_t c = 0; c < codes; c++) {
        int32_t axis[4];
        float centroid[16][4];
        choose_axes(t, axis);
        find_centroids(t, axis, centroid);
        for (int j = 0; j < 4; j++) basis->axis[c][j] = (int8_t)axis[j];
        round_centroids(basis, c, centroid);
        for (int k = 0; k < TRAINING; k++) {
            float r[4];
            coordinate(t, k, axis, r);
            const int v = nearest((const float(*)[4])centroid, r);
            for (int j = 0; j < 4; j++)
                if (axis[j] >= 0) t->y[(size_t)k * (size_t)t->axes + (size_t)axis[j]] -= centroid[v][j];
        }
        for (int j = 0; j < 4; j++) used = axis[j] >= used ? axis[j] + 1 : used;
    }
    basis->axes = used; /* axes that no code looks at belong to the rest */
}

/* ---- norms ---- */

/* Levels in geometric order between the extremes, the last for whatever is larger. */
static void find_levels(float *norms, float *level) {
    qsort(norms, TRAINING, sizeof *norms, compare_floats);
    const double high = (double)quantile(norms, 0.999) * (1.0 + 1e-6), floor = 1e-3 * high;
    const double least = (double)quantile(norms, 0.001), low = least > floor ? least : floor;
    for (int v = 0; v < 15; v++) level[v] = high > 0.0 ? (float)(low * pow(high / low, v / 14.0)) : 0.0f;
    level[15] = norms[TRAINING - 1] > level[14] ? norms[TRAINING - 1] : level[14];
}

static void find_norms(trainer *t, ekv_basis *basis) {
    const int last = EKV_SKETCH_NORMS - 1;
    t->left = 0.0;
    for (int b = 0; b < last; b++) basis->block_end[b] = basis->axes * (b + 1) / last;
    for (int b = 0; b <= last; b++) {
        for (int k = 0; k < TRAINING; k++) {
            const float *y = t->y + (size_t)k * (size_t)t->axes;
            double sum = b == last ? t->length[k] : 0.0; /* what the used axes do not see */
            for (int32_t a = b == last ? basis->axes : b ? basis->block_end[b - 1] : 0; b < last && a < basis->block_end[b]; a++)
                sum += (double)y[a] * (double)y[a];
            t->norms[k] = (float)sqrt(sum > 0.0 ? sum : 0.0);
            t->left += sum > 0.0 ? sum : 0.0;
        }
        find_levels(t->norms, basis->level[b]);
    }
}

/* Squares of what the first `axes` coordinates do not see. */
static void rest_lengths(trainer *t, int32_t axes) {
    for (int k = 0; k < TRAINING; k++) {
        const float *x = t->x + (size_t)k * (size_t)t->dim;
        for (int32_t a = 0; a < axes; a++) {
            const double *row = t->axis + (size_t)a * (size_t)t->dim;
            double sum = 0.0;
            for (int32_t d = 0; d < t->dim; d++) sum += row[d] * (double)x[d];
            t->length[k] -= sum * sum;
        }
    }
}

/* The basis, from t->x.  Its memory is in place.  False if its axes cannot be stored, which no keys are known to bring about. */
static bool find_basis(trainer *t, const ekv_kernels *kernels, int32_t codes, ekv_basis *basis, ekv_fit *fit) {
    find_covariance(t);
    find_axes(t);
    project(t);
    find_codes(t, basis, codes);
    rest_lengths(t, basis->axes);
    find_norms(t, basis);
    for (int32_t a = 0; a < basis->axes; a++) {
        float row[EKV_MAX_DIM];
        for (int32_t d = 0; d < t->dim; d++) row[d] = (float)t->axis[(size_t)a * (size_t)t->dim + (size_t)d];
        ekv_store_row_args store = {row, t->dim, (uint16_t *)(uintptr_t)basis->rows + (size_t)a * (size_t)t->dim};
        kernels->store_row[EKV_F16](&store);
    }
    *fit = (ekv_fit){.found = t->total > 0.0 ? sqrt(t->left / t->total) : 0.0};
    return ekv_basis_complete(kernels, basis, codes);
}

/* ---- keeping the sketch current ---- */

typedef struct update {
    const ekv_kernels *kernels;
    ekv_index *index;
    const ekv_kv *kv;
    const int32_t *table;
    int64_t base; /* added to every block number */
    int64_t first_page, end_page, length;
    char *memory; /* trainers */
    uint8_t *usable; /* [heads] */
    int32_t wrong;   /* first head that is not */
    size_t trainer_bytes;
    int64_t stretch; /* whose centers are being found */
} update;

static int64_t block_at(const update *u, int64_t page) { return u->base + (u->table ? u->table[page] : page); }

static const void *key_at(const update *u, int64_t token, int head) {
    return ekv_key(u->kv, block_at(u, token / u->kv->page_size), token % u->kv->page_size, head);
}

/* Mean of tokens [begin, end) of a head, in `center` (padded with zeros). */
static void mean_key(const update *u, int head, int64_t begin, int64_t end, float *center) {
    const int32_t dim = u->kv->k_dim;
    double sum[EKV_MAX_DIM] = {0.0};
    float x[EKV_MAX_DIM];
    for (int64_t t = begin; t < end; t++) {
        ekv_load_row_args load = {key_at(u, t, head), dim, 1.0f, x};
        u->kernels->load_row[u->kv->dtype](&load);
        for (int32_t d = 0; d < dim; d++) sum[d] += (double)x[d];
    }
    memset(center, 0, ekv_padded(dim) * sizeof *center);
    for (int32_t d = 0; d < dim; d++) center[d] = (float)(sum[d] / (double)(end - begin));
}

/* The training tokens, evenly spread over the sequence. */
static int64_t training_token(const update *u, int64_t k) { return k * u->length / TRAINING; }

static void check_head(void *arg, int64_t head) {
    const update *u = arg;
    bool usable = true;
    for (int64_t k = 0; k < TRAINING && usable; k++) {
        float x[EKV_MAX_DIM];
        ekv_load_row_args load = {key_at(u, training_token(u, k), (int)head), u->kv->k_dim, 1.0f, x};
        u->kernels->load_row[u->kv->dtype](&load);
        for (int32_t d = 0; d < u->kv->k_dim; d++) usable = usable && (double)fabsf(x[d]) < LARGEST;
    }
    u->usable[head] = usable;
}

static void train_head(void *arg, int64_t head) {
    const update *u = arg;
    const int64_t stretch_tokens = u->index->stretch * u->kv->page_size;
    trainer t;
    trainer_lay_out(&t, u->kv->k_dim, u->memory + (size_t)head * u->trainer_bytes);
    for (int64_t k = 0; k < TRAINING; k++) {
        const int64_t token = training_token(u, k);
        const float *center = ekv_index_center(u->index, (int)head, token / stretch_tokens);
        float x[EKV_MAX_DIM];
        ekv_load_row_args load = {key_at(u, token, (int)head), t.dim, 1.0f, x};
        u->kernels->load_row[u->kv->dtype](&load);
        for (int32_t d = 0; d < t.dim; d++) t.x[(size_t)k * (size_t)t.dim + (size_t)d] = x[d] - center[d];
    }
    ekv_basis *basis = &u->index->bases[head];
    ekv_basis_attach(u->index, (int32_t)head, basis);
    if (!find_basis(&t, u->kernels, u->index->codes, basis, &u->index->fits[head])) basis->codes = 0;
}

static void center_head(void *arg, int64_t head) {
    const update *u = arg;
    const int64_t tokens = u->index->stretch * u->kv->page_size, before = u->stretch > 0 ? u->stretch - 1 : 0;
    mean_key(u, (int)head, before * tokens, (before + 1) * tokens, (float *)ekv_index_center(u->index, (int)head, u->stretch));
}

/* The center of a stretch, unless it is known: the mean of the stretch before; of the first, its own. */
static void find_center(ekv_context *context, update *u, int64_t stretch) {
    if (u->index->centered[stretch]) return;
    u->stretch = stretch;
    ekv_parallel(context, u->kv->kv_heads, center_head, u);
    u->index->centered[stretch] = 1;
}

/* Forgets all that the sketch knows and finds the basis of every head and the centers from the sequence's u->length >= TRAINING
 * tokens.  EKV_ERROR_INVALID_ARGUMENT: a key of head u->wrong is not finite; then, and without memory, nothing has changed. */
static ekv_status train(ekv_context *context, update *u) {
    const int32_t heads = u->kv->kv_heads;
    const int64_t stretch_tokens = u->index->stretch * u->kv->page_size;
    trainer measure;
    u->trainer_bytes = trainer_lay_out(&measure, u->kv->k_dim, NULL);
    const size_t bytes = (u->trainer_bytes + 1) * (size_t)heads;
    u->memory = ekv_allocate(&context->allocator, bytes);
    if (!u->memory) return EKV_ERROR_OUT_OF_MEMORY;
    u->usable = (uint8_t *)u->memory + u->trainer_bytes * (size_t)heads;
    ekv_parallel(context, heads, check_head, u);
    u->wrong = 0;
    while (u->wrong < heads && u->usable[u->wrong]) u->wrong++;
    if (u->wrong == heads) {
        ekv_sketch_clear(u->index);
        for (int64_t s = 0; s * stretch_tokens < u->length; s++) find_center(context, u, s);
        ekv_parallel(context, heads, train_head, u);
    }
    ekv_release(&context->allocator, u->memory, bytes);
    if (u->wrong < heads) return EKV_ERROR_INVALID_ARGUMENT;
    bool ok = true;
    for (int32_t h = 0; h < heads; h++) ok = ok && u->index->bases[h].codes > 0;
    if (ok) return EKV_OK;
    ekv_sketch_clear(u->index);
    return EKV_ERROR_INTERNAL; /* the axes could not be stored */
}

/* Counts the n tokens that were encoded last into the window, and closes it when it is full. */
static void count_window(ekv_fit *fit, ekv_encode_args *a, int64_t window) {
    fit->left += a->left;
    fit->total += a->total;
    fit->count += a->n;
    a->left = a->total = 0.0;
    if (fit->count < window) return;
    fit->recent = fit->total > 0.0 ? sqrt(fit->left / fit->total) : 0.0;
    fit->tokens = fit->count;
    fit->left = fit->total = 0.0;
    fit->count = 0;
}

/* One head: the slots of each page that are not sketched yet.  Raises the basis' last levels to what was encoded. */
static void encode_head(void *arg, int64_t head) {
    const update *u = arg;
    const ekv_kv *kv = u->kv;
    ekv_basis *basis = &u->index->bases[head];
    ekv_fit *fit = &u->index->fits[head];
    ekv_encode_args a = {.basis = basis};
    for (int64_t page = u->first_page; page < u->end_page; page++) {
        const int64_t block = block_at(u, page);
        const int end = (int)ekv_min64(kv->page_size, u->length - page * kv->page_size);
        a.center = ekv_index_center(u->index, (int)head, u->index->stretch_of[block]);
        a.page = (uint8_t *)ekv_index_sketch(u->index, (int)head, block);
        for (a.slot = u->index->sketched[block]; a.slot < end; a.slot += a.n) {
            const void *keys[EKV_MAX_PAGE_SIZE];
            a.n = (int)ekv_min64(end - a.slot, EKV_SKETCH_WINDOW - fit->count); /* windows do not depend on the pace of updates */
            for (int t = 0; t < a.n; t++) keys[t] = ekv_key(kv, block, a.slot + t, (int)head);
            a.keys = keys;
            u->kernels->encode[kv->dtype](&a);
            count_window(fit, &a, EKV_SKETCH_WINDOW);
        }
    }
    for (int b = 0; b < EKV_SKETCH_NORMS; b++) basis->level[b][15] = a.norms[b] > basis->level[b][15] ? a.norms[b] : basis->level[b][15];
    basis->largest = a.length > basis->largest ? a.length : basis->largest;
}

/* Forgets the sketches of the tokens that were rewritten, gives new pages their stretch, finds centers. */
static void begin_pages(ekv_context *context, update *u, int64_t first) {
    ekv_index *index = u->index;
    for (int64_t page = u->first_page; page < u->end_page; page++) {
        const int64_t block = block_at(u, page), kept = ekv_max64(0, first - page * u->kv->page_size);
        if (index->sketched[block] > kept) index->sketched[block] = (uint16_t)kept;
        if (index->sketched[block] > 0) continue;
        index->stretch_of[block] = (int32_t)(page / index->stretch);
        find_center(context, u, page / index->stretch);
    }
}

/* Sketches tokens [first, end of the pages). */
static void sketch_pages(ekv_context *context, update *u, int64_t first) {
    begin_pages(context, u, first);
    ekv_parallel(context, u->kv->kv_heads, encode_head, u);
    for (int64_t page = u->first_page; page < u->end_page; page++)
        u->index->sketched[block_at(u, page)] = (uint16_t)ekv_min64(u->kv->page_size, u->length - page * u->kv->page_size);
}

void ekv_sketch_reads(const ekv_index *index, int64_t *first, int64_t *end, int64_t length) {
    if (!index->codes) return;
    if (!index->bases[0].codes && length >= TRAINING) {
        *first = 0;
        *end = length;
        return;
    }
    const int64_t stretch_tokens = index->stretch * index->shape.page_size;
    *first = ekv_max64(0, (*first / stretch_tokens - 1) * stretch_tokens);
}

void ekv_sketch_update(ekv_context *context, ekv_index *index, const ekv_kernels *kernels, const ekv_kv *kv, const int32_t *block_table,
                       int64_t base, int64_t first, int64_t count, int64_t length) {
    if (!index->codes) return;
    update u = {.kernels = kernels, .index = index, .kv = kv, .table = block_table, .base = base, .length = length};
    int64_t from = first;
    u.first_page = first / kv->page_size;
    u.end_page = ekv_ceil_div(ekv_min64(first + count, length), kv->page_size);
    if (u.end_page > index->shape.blocks) { /* a table that names blocks twice: there are no centers for so many pages */
        for (int64_t page = u.first_page; page < u.end_page; page++) index->sketched[block_at(&u, page)] = 0;
        return;
    }
    if (!index->bases[0].codes) {
        /* Without a basis, since memory is short or a key not finite, nothing is sketched: the next update tries again. */
        if (length < TRAINING || length > index->shape.blocks * kv->page_size || train(context, &u) != EKV_OK) return;
        from = 0; /* everything that this sequence has is sketched now */
    }
    u.first_page = from / kv->page_size;
    sketch_pages(context, &u, from);
}

ekv_status ekv_sketch_find(ekv_context *context, ekv_index *index, const ekv_kernels *kernels, const ekv_kv *kv,
                           const int32_t *block_table, int64_t length) {
    update u = {.kernels = kernels, .index = index, .kv = kv, .table = block_table, .length = length};
    const ekv_status status = train(context, &u);
    if (status == EKV_ERROR_INVALID_ARGUMENT)
        return ekv_fail(context, status, "kv: a key of KV head %d is not finite, or above %g: no basis can be found", (int)u.wrong,
                        LARGEST);
    if (status != EKV_OK)
        return ekv_fail(context, status, "no basis was found: %s",
                        status == EKV_ERROR_OUT_OF_MEMORY ? "out of memory" : "its axes are degenerate");
    u.end_page = ekv_ceil_div(length, kv->page_size);
    sketch_pages(context, &u, 0);
    return EKV_OK;
}
