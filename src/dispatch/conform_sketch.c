/*
 * Conformance of the kernels that make and read sketches of keys: encode, lookup, above.
 *
 * lookup and above are exact.  encode decides in floats what is nearest and how large a norm is; the oracle follows the decisions in
 * double and asks of each that it be right within the rounding of what it was made from: x = key - center              u |x_d|
 *   y = P x                       (ceil(dim / 32) + 5) u of sum |P_ad x_d|, as a score, and u of it for x: e_a
 *   a residual of y               another u of its size for each code that the axis has had
 *   x - Q^T y                     2 u of |x_d| and of each |y_a Q_ad| for each axis, and e_a |Q_ad|
 *   a norm, rounded up            2^-21 of it
 * P and Q are any two sets of rows here: nothing in encode depends on how they are related.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/conform.h"

#include <math.h>
#include <string.h>

/* ---- lookup ---- */

static const int lookup_rows[] = {1, 2, 3, 5}, code_counts[] = {2, 4, 6, 28, 52, 100}, group_counts[] = {1, 2, 3, 4, 7, 16};
static const char *const table_contents[] = {"small", "saturating", "all largest", "zero", "one byte alone"};

static void check_lookup(ekv_check *c) {
    const int rows = c->value[0], codes = c->value[1], groups = c->value[2], content = c->value[3];
    c->unsupported = !c->table->lookup;
    if (c->unsupported) return;
    const uint16_t **table = ekv_room_in(c, "table pointers", rows, sizeof *table);
    const uint16_t **start = ekv_room_in(c, "start pointers", rows, sizeof *start);
    uint16_t **sum = ekv_room_in(c, "sum pointers", rows, sizeof *sum);
    const uint8_t **group = ekv_room_in(c, "group pointers", groups, sizeof *group);
    uint8_t *codes_of[16];
    if (c->failed) return;
    for (int r = 0; r < rows; r++) {
        uint16_t *entries = ekv_room_in(c, "table", 16 * codes, sizeof *entries), *starts = ekv_room_in(c, "start", groups, sizeof *starts);
        table[r] = entries;
        start[r] = starts;
        sum[r] = ekv_room_out(c, "sum", (int64_t)groups * EKV_SKETCH_GROUP, sizeof **sum);
        if (c->failed) return;
        for (int g = 0; g < groups; g++) starts[g] = (uint16_t)(g % 3 == 0 ? 0 : ekv_below(c, g % 3 == 1 ? 100 : 65536));
        for (int i = 0; i < 16 * codes; i++) {
            const int low = content == 3 ? 0 : content == 2 ? 255 : ekv_below(c, 256);
            const int high = content == 3 || content == 4 ? 0 : content == 2 ? 255 : ekv_below(c, content == 1 ? 256 : 1 + 120 / codes);
            entries[i] = (uint16_t)(low + 256 * high);
        }
    }
    for (int g = 0; g < groups; g++) {
        group[g] = codes_of[g] = ekv_room_in(c, "group", codes / 2 * EKV_SKETCH_GROUP, 1);
        if (!codes_of[g]) return;
        for (int i = 0; i < codes / 2 * EKV_SKETCH_GROUP; i++) codes_of[g][i] = (uint8_t)ekv_below(c, 256);
    }
    ekv_seal(c);
    ekv_lookup_args a = {table, rows, codes, group, start, groups, sum};
    c->table->lookup(&a);
    for (int i = 0; i < rows * groups * EKV_SKETCH_GROUP; i++) {
        const int r = i / (groups * EKV_SKETCH_GROUP), t = i % (groups * EKV_SKETCH_GROUP), g = t / EKV_SKETCH_GROUP;
        int64_t total = start[r][g];
        for (int code = 0; code < codes; code++) {
            const uint8_t pair = codes_of[g][code / 2 * EKV_SKETCH_GROUP + t % EKV_SKETCH_GROUP];
            total += table[r][16 * code + (code % 2 ? pair >> 4 : pair & 15)];
        }
        ekv_expect(c, "sum", i, sum[r][t], (double)ekv_min64(total, 65535), 0.0);
    }
}

/* ---- above ---- */

static const int sum_counts[] = {16, 32, 48, 64, 80, 128, 208, 4096};
static const char *const limits[] = {"0", "an odd one of the sums", "32767", "65534", "65535"};

static void check_above(ekv_check *c) {
    const int n = c->value[0], kind = c->value[1];
    c->unsupported = !c->table->above;
    if (c->unsupported) return;
    uint16_t *sum = ekv_room_in(c, "sum", n, sizeof *sum);
    uint64_t *bits = ekv_room_inout(c, "bits", (n + 63) / 64, sizeof *bits), before[64];
    if (c->failed) return;
    for (int t = 0; t < n; t++) sum[t] = (uint16_t)(t % 5 == 0 ? 65535 : t % 7 == 0 ? 0 : ekv_below(c, 65536));
    for (int w = 0; w < (n + 63) / 64; w++) before[w] = bits[w] = UINT64_C(1) << ekv_below(c, 64);
    const uint16_t limit = (uint16_t)(kind == 0 ? 0 : kind == 1 ? sum[n / 2 + 1] : kind == 2 ? 32767 : kind == 3 ? 65534 : 65535);
    ekv_seal(c);
    ekv_above_args a = {sum, n, limit, bits};
    c->table->above(&a);
    for (int t = 0; t < (n + 63) / 64 * 64; t++)
        ekv_expect(c, "bits", t, (double)(bits[t / 64] >> t % 64 & 1),
                   (double)((before[t / 64] >> t % 64 & 1) | (t < n && sum[t] > limit)), 0.0);
}

/* ---- encode ---- */

static const int sketch_dims[] = {1, 16, 33, 64, 128, 256}, sketch_codes[] = {2, 10, 24, 96}, key_counts[] = {1, 3, 16};
static const int slots[] = {0, 5, 15, 17};
static const char *const key_contents[] = {"normal", "far from 0", "on the center", "huge", "NaN", "infinity"};
enum { NORMAL, FAR, CENTER, HUGE_KEYS, NANS, INFINITE };

/* A case's basis, and what the oracle found for one key. */
typedef struct sketch {
    ekv_basis *basis;
    float *project, *restore, *center;
    int padded;
    double x[EKV_MAX_DIM], y[EKV_SKETCH_AXES], error[EKV_SKETCH_AXES], residual[EKV_SKETCH_AXES];
} sketch;

/* Rows are random and nearly of length 1, not orthogonal. */
static void make_basis(ekv_check *c, sketch *s, int dim, int codes) {
    ekv_basis *b = s->basis;
    memset(b, 0, sizeof *b);
    s->padded = (dim + 31) / 32 * 32;
    b->dim = dim;
    b->axes = dim < EKV_SKETCH_AXES ? dim : EKV_SKETCH_AXES - ekv_below(c, 9);
    b->codes = codes;
    for (int i = 0; i < EKV_SKETCH_NORMS - 1; i++) b->block_end[i] = b->axes * (i + 1) / (EKV_SKETCH_NORMS - 1);
    for (int code = 0; code < codes; code++) {
        const int together = 1 << ekv_below(c, 3);
        for (int j = 0; j < 4; j++) {
            b->axis[code][j] = (int8_t)(j < together && j < b->axes ? (code * 4 + j) % b->axes : -1);
            for (int v = 0; v < 16; v++) b->centroid[code][v][j] = b->axis[code][j] >= 0 ? (float)ekv_normal(c) : 0.0f;
        }
    }
    for (int i = 0; i < EKV_SKETCH_NORMS; i++)
        for (int v = 0; v < 16; v++) b->level[i][v] = (float)(0.1 + 0.25 * v * (1.0 + i)) * sqrtf((float)dim) * 0.2f;
    b->largest = INFINITY;
    for (int i = 0; i < b->axes * s->padded; i++) {
        s->project[i] = i % s->padded < dim ? (float)(ekv_normal(c) / sqrt((double)dim)) : 0.0f;
        s->restore[i] = i % s->padded < dim ? (float)(ekv_normal(c) / sqrt((double)dim)) : 0.0f;
    }
    for (int d = 0; d < s->padded; d++) s->center[d] = d < dim ? (float)ekv_normal(c) : 0.0f;
    b->project = s->project;
    b->restore = s->restore;
}

static void make_sketched_key(ekv_check *c, const sketch *s, ekv_dtype dtype, void *key, int content) {
    for (int d = 0; d < s->basis->dim; d++) {
        double x = ekv_normal(c);
        if (content == FAR) x += 200.0;
        if (content == CENTER) x = (double)s->center[d];
        if (content == HUGE_KEYS) x *= dtype == EKV_F16 ? 1e4 : 1e15;
        ekv_put(dtype, key, d, x);
    }
    if (content == NANS) ekv_put(dtype, key, ekv_below(c, s->basis->dim), (double)NAN);
    if (content == INFINITE) ekv_put(dtype, key, ekv_below(c, s->basis->dim), -(double)INFINITY);
}

static int number_of(const ekv_encode_args *a, int slot, int code) {
    const int bytes = (a->basis->codes + EKV_SKETCH_NORMS) / 2 * EKV_SKETCH_GROUP;
    const uint8_t pair = a->page[slot / EKV_SKETCH_GROUP * bytes + code / 2 * EKV_SKETCH_GROUP + slot % EKV_SKETCH_GROUP];
    return code % 2 ? pair >> 4 : pair & 15;
}

/* x, y and its error. */
static void project(sketch *s, ekv_dtype dtype, const void *key) {
    const ekv_basis *b = s->basis;
    const double steps = (double)(s->padded / 32 + 5);
    for (int d = 0; d < b->dim; d++) s->x[d] = ekv_reference_load(dtype, key, d) - (double)s->center[d];
    for (int i = 0; i < b->axes; i++) {
        double size = 0.0;
        s->y[i] = 0.0;
        for (int d = 0; d < b->dim; d++) {
            s->y[i] += (double)s->project[i * s->padded + d] * s->x[d];
            size += fabs((double)s->project[i * s->padded + d] * s->x[d]);
        }
        s->error[i] = 1.01 * (steps + 1.0) * EKV_U * size;
        s->residual[i] = s->y[i];
    }
}

/* Each code is a nearest centroid to what the codes before it left. */
static void check_codes(ekv_check *c, sketch *s, const ekv_encode_args *a, int slot) {
    const ekv_basis *b = s->basis;
    for (int code = 0; code < b->codes && !c->failed; code++) {
        const int number = number_of(a, slot, code);
        double error = 0.0, chosen = 0.0, least = (double)INFINITY;
        for (int j = 0; j < 4; j++)
            if (b->axis[code][j] >= 0) error += s->error[b->axis[code][j]];
        for (int v = 0; v < 16; v++) {
            double distance = 0.0;
            for (int j = 0; j < 4; j++) {
                const double r = b->axis[code][j] >= 0 ? s->residual[b->axis[code][j]] : 0.0;
                distance += (r - (double)b->centroid[code][v][j]) * (r - (double)b->centroid[code][v][j]);
            }
            least = fmin(least, distance);
            if (v == number) chosen = distance;
        }
        /* either distance is off by twice its root times the error of r, its square, and 6 u of itself */
        const double room = 2.0 * error * (sqrt(chosen) + sqrt(least)) + 2.0 * error * error + 8.0 * EKV_U * (chosen + least);
        ekv_expect_in(c, "squared distance to the chosen centroid", slot * 256 + code, chosen, least, least + room);
        for (int j = 0; j < 4; j++) {
            const int axis = b->axis[code][j];
            if (axis < 0) continue;
            s->residual[axis] -= (double)b->centroid[code][number][j];
            s->error[axis] += EKV_U * (fabs(s->residual[axis]) + s->error[axis]);
        }
    }
}

/* The norm outside of all axes, and its error. */
static double rest_norm(const sketch *s, const double *y_error, double *error) {
    const ekv_basis *b = s->basis;
    double squares = 0.0, errors = 0.0;
    for (int d = 0; d < b->dim; d++) {
        double x = s->x[d], off = EKV_U * fabs(x), size = fabs(x);
        for (int i = 0; i < b->axes; i++) {
            const double r = (double)s->restore[i * s->padded + d];
            x -= s->y[i] * r;
            size += fabs(s->y[i] * r);
            off += y_error[i] * fabs(r) + 2.0 * EKV_U * size;
        }
        squares += x * x;
        errors += off * off;
    }
    *error = sqrt(errors);
    return sqrt(squares);
}

/* What the sums may be: from the norms' errors. */
typedef struct sums {
    double least_left, most_left, least_total, most_total;
} sums;

static void add_square(double *least, double *most, double norm, double error) {
    const double low = fmax(norm - error, 0.0) * (1.0 - 0x1p-40), high = (norm + error) * (1.0 + 0x1p-21) + 0x1p-130;
    *least += low * low;
    *most += high * high;
}

static void check_norm(ekv_check *c, const sketch *s, const ekv_encode_args *a, int slot, int block, double norm,
                       double error) {
    const ekv_basis *b = s->basis;
    const int number = number_of(a, slot, b->codes + block);
    const double high = (norm + error) * (1.0 + 0x1p-21) + 0x1p-130, low = fmax(norm - error, 0.0) * (1.0 - 0x1p-40);
    if (number < 15)
        ekv_expect_in(c, "the level of a norm is not below it", slot * 4 + block, (double)b->level[block][number], low,
                      (double)INFINITY);
    if (number > 0)
        ekv_expect_in(c, "the level before it is below the norm", slot * 4 + block, (double)b->level[block][number - 1], 0.0,
                      high);
    ekv_expect_in(c, "norms", block, (double)a->norms[block], low, (double)INFINITY);
}

/* One key; `most` collects upper limits of what norms and length may return. */
static void check_sketch(ekv_check *c, sketch *s, ekv_dtype dtype, const ekv_encode_args *a, int i,
                         double most[EKV_SKETCH_NORMS + 1], sums *sum) {
    const ekv_basis *b = s->basis;
    const int slot = a->slot + i;
    double y_error[EKV_SKETCH_AXES], length = 0.0, error;
    project(s, dtype, a->keys[i]);
    for (int d = 0; d < b->dim; d++) length += s->x[d] * s->x[d];
    length = sqrt(length);
    if (!isfinite(length)) {
        for (int block = 0; block < EKV_SKETCH_NORMS; block++) {
            ekv_expect(c, "norm number of a key that is not finite", slot * 4 + block, number_of(a, slot, b->codes + block),
                       15.0, 0.0);
            ekv_expect(c, "norms with a key that is not finite", block, (double)a->norms[block], (double)INFINITY, 0.0);
        }
        ekv_expect(c, "length with a key that is not finite", 0, (double)a->length, (double)INFINITY, 0.0);
        return;
    }
    memcpy(y_error, s->error, sizeof y_error);
    check_codes(c, s, a, slot);
    for (int block = 0; block < EKV_SKETCH_NORMS - 1; block++) {
        double squares = 0.0, errors = 0.0;
        for (int axis = block ? b->block_end[block - 1] : 0; axis < b->block_end[block]; axis++) {
            squares += s->residual[axis] * s->residual[axis];
            errors += s->error[axis] * s->error[axis];
        }
        check_norm(c, s, a, slot, block, sqrt(squares), sqrt(errors));
        most[block] = fmax(most[block], sqrt(squares) + sqrt(errors));
        add_square(&sum->least_left, &sum->most_left, sqrt(squares), sqrt(errors));
    }
    const double rest = rest_norm(s, y_error, &error);
    check_norm(c, s, a, slot, EKV_SKETCH_NORMS - 1, rest, error);
    most[EKV_SKETCH_NORMS - 1] = fmax(most[EKV_SKETCH_NORMS - 1], rest + error);
    add_square(&sum->least_left, &sum->most_left, rest, error);
    add_square(&sum->least_total, &sum->most_total, length, 2.0 * EKV_U * length);
    ekv_expect_in(c, "length", 0, (double)a->length, length * (1.0 - 2.0 * EKV_U), (double)INFINITY);
    most[EKV_SKETCH_NORMS] = fmax(most[EKV_SKETCH_NORMS], length * (1.0 + 2.0 * EKV_U));
}

static void check_encode(ekv_check *c) {
    const ekv_dtype dtype = (ekv_dtype)c->value[0];
    const int dim = c->value[1], codes = c->value[2], n = c->value[3], slot = c->value[4], content = c->value[5];
    const int groups = (slot + n + EKV_SKETCH_GROUP - 1) / EKV_SKETCH_GROUP;
    const int64_t bytes = (int64_t)groups * ((codes + EKV_SKETCH_NORMS) / 2) * EKV_SKETCH_GROUP;
    c->unsupported = !c->table->encode[dtype];
    if (c->unsupported) return;
    sketch *s = ekv_scratch(c, sizeof *s);
    uint8_t *before = ekv_scratch(c, (size_t)bytes);
    if (!s || !before) return;
    s->basis = ekv_room_in(c, "basis", 1, sizeof *s->basis);
    s->project = ekv_room_in(c, "basis P", (int64_t)EKV_SKETCH_AXES * ((dim + 31) / 32 * 32), sizeof *s->project);
    s->restore = ekv_room_in(c, "basis Q", (int64_t)EKV_SKETCH_AXES * ((dim + 31) / 32 * 32), sizeof *s->restore);
    s->center = ekv_room_in(c, "center", (dim + 31) / 32 * 32, sizeof *s->center);
    const void **keys = ekv_rows(c, "key", n, dim, dtype);
    uint8_t *page = ekv_room_inout(c, "page", bytes, 1);
    if (c->failed) return;
    make_basis(c, s, dim, codes);
    for (int i = 0; i < n; i++) make_sketched_key(c, s, dtype, (void *)(uintptr_t)keys[i], i % 2 ? NORMAL : content);
    for (int64_t i = 0; i < bytes; i++) before[i] = page[i] = (uint8_t)ekv_below(c, 256);
    ekv_seal(c);
    ekv_encode_args a = {s->basis, s->center, keys, n, slot, page, {0.01f, 0.01f, 0.01f, 0.01f}, 0.01f, 3.0, 5.0};
    c->table->encode[dtype](&a);
    double most[EKV_SKETCH_NORMS + 1] = {0.01, 0.01, 0.01, 0.01, 0.01};
    sums sum = {3.0, 3.0, 5.0, 5.0};
    bool finite = true;
    for (int i = 0; i < n && !c->failed; i++) {
        check_sketch(c, s, dtype, &a, i, most, &sum);
        for (int d = 0; d < dim; d++) finite = finite && isfinite(ekv_reference_load(dtype, keys[i], d));
    }
    for (int i = 0; finite && i <= EKV_SKETCH_NORMS; i++)
        ekv_expect_in(c, i < EKV_SKETCH_NORMS ? "norms are not above the largest" : "length is not above the largest", i,
                      (double)(i < EKV_SKETCH_NORMS ? a.norms[i] : a.length), 0.0, most[i] * (1.0 + 0x1p-20) + 0x1p-120);
    if (!c->failed) {
        ekv_expect_in(c, "left", 0, a.left, sum.least_left * (1.0 - 0x1p-40), sum.most_left * (1.0 + 0x1p-40));
        ekv_expect_in(c, "total", 0, a.total, sum.least_total * (1.0 - 0x1p-40), sum.most_total * (1.0 + 0x1p-40));
    }
    for (int64_t i = 0; i < bytes; i++) {
        const int64_t group = i / ((codes + EKV_SKETCH_NORMS) / 2 * EKV_SKETCH_GROUP),
                      at = group * EKV_SKETCH_GROUP + i % EKV_SKETCH_GROUP;
        if (at < slot || at >= slot + n) ekv_expect(c, "slots of other keys in the page", i, page[i], before[i], 0.0);
    }
}

const ekv_family ekv_sketch_families[] = {
    {"encode",
     500,
     check_encode,
     {EKV_NAMES("dtype", ekv_dtypes), EKV_NUMBERS("dim", sketch_dims), EKV_NUMBERS("codes", sketch_codes),
      EKV_NUMBERS("keys", key_counts), EKV_NUMBERS("slot", slots), EKV_NAMES("content", key_contents),
      EKV_NAMES("memory", ekv_placements)}},
    {"lookup",
     400,
     check_lookup,
     {EKV_NUMBERS("rows", lookup_rows), EKV_NUMBERS("codes", code_counts), EKV_NUMBERS("groups", group_counts),
      EKV_NAMES("tables", table_contents), EKV_NAMES("memory", ekv_placements)}},
    {"above", 120, check_above, {EKV_NUMBERS("sums", sum_counts), EKV_NAMES("limit", limits), EKV_NAMES("memory", ekv_placements)}},
    {0}};
