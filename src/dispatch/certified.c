/*
 * Policy certified: the output of `full`, from as few bytes as bounds allow.
 *
 * Any token whose upper bound lies at or below tau of the tokens read so far is outside the support: tau of a subset never exceeds tau.
 * Coarse bounds come first and each finer level only where it pays, which is decided within the step from a fixed sample of tokens:
 *      norms    |q| times the largest key norm of a page, plus ALiBi at the page's best token: rules out most of an ALiBi head
 *      boxes    per-dimension minimum and maximum of a page
 *      sketch   a bound for each token (sketch.c)
 *      keys     of whatever remains
 * Stages (step.h says in which order): begin reads the norms, the newest pages and a sample of tokens, and decides; boxes and settle
 * follow if boxes pay; then, if the sketch pays,
 *      sketch   a 16-bit sum for each token, which stands for its bound
 *      raise    tau from all that was read, and which sums the next round reads
 *      round    reads the tokens whose sums are that high; the last round whatever is not ruled out
 * and otherwise the pages that remain are scanned as for any policy.  Scores that were read and exceed the cut go to the span's
 * candidate list, in token order within a round; the last round sorts them.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>
#include <string.h>

#define NEWEST_PAGES 4     /* read before anything else, with the first page */
#define SAMPLE 64          /* keys that decisions are made from */
#define SAMPLE_GROUPS 128  /* most sketch groups that they are chosen from, so that they hold what matters where that is rare */
#define GROUP_TOKENS 256   /* needed tokens for each of them, at least LEAST_GROUPS in all */
#define LEAST_GROUPS 16
#define LEAST_TOKENS 1024  /* fewer remaining tokens are read without further ado */
#define PAYS 1.5           /* bytes that a level must save for each byte that it costs */
#define FIRST_SHARE 128    /* the first round reads one token in so many for each row */
#define NEXT_SHARE 4       /* the next ones one in so many of those that are not ruled out yet */
#define RUN_GROUPS 64      /* sketch groups in one look-up */
#define MUST_READ 65535    /* a sum that no limit rules out */

static ekv_part *parts_of(const ekv_item *item, const ekv_row *row) {
    return item->part + (int64_t)(row - item->row) * item->spans;
}

static int lowest_bit(uint64_t mask) {
#if defined(__GNUC__)
    return __builtin_ctzll(mask);
#else
    int i = 0;
    while (!(mask >> i & 1)) i++;
    return i;
#endif
}

/* ---- scores ---- */

/* Tokens of one span that are about to be scored, ascending: some wait while their successors are gathered, so that those can be
 * prefetched when the first are scored. */
typedef struct reader {
    int n[2], filling;
    int32_t token[2][EKV_TILE];
    const void *keys[2][EKV_TILE];
    int32_t span, page_begin, page_end; /* tokens of the page that the last token lies in */
    const char *page;                   /* its first key */
    const float *q[EKV_ITEM_ROWS];
    float slope[EKV_ITEM_ROWS];
    int32_t q_token[EKV_ITEM_ROWS];
} reader;

static void reader_begin(const ekv_item *item, reader *rd) {
    rd->n[0] = rd->n[1] = rd->filling = 0;
    rd->page_begin = rd->page_end = rd->span = 0;
    memset(rd->token, 0, sizeof rd->token);
    for (int32_t r = 0; r < item->rows; r++) {
        rd->q[r] = item->row[r].q;
        rd->slope[r] = item->row[r].slope;
        rd->q_token[r] = item->row[r].q_token;
    }
}

/* Scores those that wait for all rows of the item; what exceeds a row's cut (NaN does) joins its list. */
static void reader_turn(const ekv_step *step, ekv_item *item, reader *rd) {
    float z[EKV_ITEM_ROWS * EKV_TILE];
    const int waiting = 1 - rd->filling, n = rd->n[waiting];
    const int32_t *token = rd->token[waiting];
    rd->filling = waiting;
    if (n == 0) return;
    ekv_score_args score = {rd->q, rd->slope, rd->q_token, item->rows, rd->keys[waiting], token, n, step->kv.k_dim, z,
                            rd->n[1 - waiting] >= n ? rd->keys[1 - waiting] : NULL,
                            step->kv.k_dim * (int)ekv_element_bytes(step->kv.dtype)};
    step->kernels->score[step->kv.dtype](&score);
    const size_t at = (size_t)rd->span * EKV_SPAN;
    for (int32_t r = 0; r < item->rows; r++) {
        ekv_row *row = &item->row[r];
        ekv_part *part = parts_of(item, row) + rd->span;
        int seen = n;
        while (seen > 0 && token[seen - 1] >= row->n) seen--;
        ekv_keep_args keep = {z + r * EKV_TILE, token, seen, row->cut, row->list_z + at, row->list_token + at, part->count};
        step->kernels->keep(&keep);
        for (int32_t i = part->count; i < keep.count; i++)
            part->z_max = row->list_z[at + (size_t)i] > part->z_max ? row->list_z[at + (size_t)i] : part->z_max;
        part->count = keep.count;
    }
    rd->n[waiting] = 0;
}

static void reader_flush(const ekv_step *step, ekv_item *item, reader *rd) {
    reader_turn(step, item, rd);
    reader_turn(step, item, rd);
}

static void reader_add(const ekv_step *step, ekv_item *item, reader *rd, int32_t token) {
    const ekv_kv *kv = &step->kv;
    if (token >= rd->page_end || token < rd->page_begin) {
        const int32_t page = token / kv->page_size;
        rd->page_begin = page * kv->page_size;
        rd->page_end = rd->page_begin + kv->page_size;
        rd->page = ekv_key(kv, ekv_block(item, page), 0, item->head);
    }
    const void *key = ekv_at(rd->page, (token - rd->page_begin) * kv->k_token_stride, kv->dtype);
    const int to = rd->filling, n = rd->n[to]++;
    if (rd->n[1 - to] == 0) ekv_prefetch(key, (size_t)kv->k_dim * ekv_element_bytes(kv->dtype)); /* nothing to do meanwhile */
    rd->token[to][n] = token;
    rd->keys[to][n] = key;
    if (n + 1 == EKV_TILE) reader_turn(step, item, rd);
}

/* The tokens of a mask, bit 0 being `first`, that were not read yet. */
static void read_mask(const ekv_step *step, ekv_item *item, reader *rd, int32_t first, uint64_t mask) {
    mask &= ~item->read[first / 64];
    item->read[first / 64] |= mask;
    if (first / EKV_SPAN != rd->span) {
        reader_flush(step, item, rd);
        rd->span = first / EKV_SPAN;
    }
    for (; mask; mask &= mask - 1) reader_add(step, item, rd, first + lowest_bit(mask));
}

static void read_page(const ekv_step *step, ekv_item *item, reader *rd, int64_t page) {
    const int32_t begin = (int32_t)page * step->kv.page_size, end = begin + ekv_page_tokens(step, item->n, page);
    for (int32_t t = begin; t < end; t++) read_mask(step, item, rd, t / 64 * 64, UINT64_C(1) << t % 64);
}

/* Scores that were read are kept here while sums are in the first half of the row's weights: any of them give a lower bound of tau. */
static float *spare(const ekv_item *item, const ekv_row *row, int64_t *room) {
    const int64_t sums = ekv_ceil_div(item->n, EKV_SKETCH_GROUP) * EKV_SKETCH_GROUP / 2;
    *room = item->n + EKV_CERTIFY_SPARE - sums;
    return row->weight + sums;
}

/* Raises the row's cut: at and below it no token can be in the support. */
static void raise_cut(const ekv_step *step, ekv_item *item, ekv_row *row) {
    const ekv_part *part = parts_of(item, row);
    int64_t room, count = 0;
    float *z = spare(item, row, &room), z_max = -INFINITY;
    for (int32_t s = 0; s < item->spans; s++) {
        const int64_t n = ekv_min64(part[s].count, room - count);
        memcpy(z + count, row->list_z + (size_t)s * EKV_SPAN, (size_t)n * sizeof *z);
        count += n;
        z_max = part[s].z_max > z_max ? part[s].z_max : z_max;
    }
    if (!(z_max > -INFINITY) || z_max == INFINITY) return;
    const double before = (double)row->cut - (double)z_max; /* the cut is a lower bound already */
    const float start = before > -1.0 ? ekv_round_down(before) : -1.0f;
    ekv_tau_lower_args lower = {z, (int)count, z_max, row->power, 12, start};
    step->kernels->tau_lower(&lower);
    const double slack = 0x1p-20 * fabs((double)z_max);
    const float cut = ekv_threshold(z_max, (double)lower.tau - (slack > EKV_MARGIN ? slack : EKV_MARGIN));
    if (cut > row->cut) row->cut = cut;
}

/* ---- norms ---- */

/* The sum of a[d] b[d], in eight sums side by side: one would wait for each addition. */
static double dot(const float *a, const float *b, int32_t n) {
    double sum[8] = {0.0};
    int32_t d = 0;
    for (; d + 8 <= n; d += 8)
        for (int j = 0; j < 8; j++) sum[j] += (double)a[d + j] * (double)b[d + j];
    for (; d < n; d++) sum[d % 8] += (double)a[d] * (double)b[d];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* Whether bounds are looked at at all. */
static bool has_bounds(const ekv_step *step, const ekv_item *item) { return step->index && item->n >= LEAST_TOKENS; }

static double norm_of_query(const ekv_step *step, const ekv_row *row) {
    return sqrt(dot(row->q, row->q, step->kv.k_dim)) * (1.0 + 1e-12);
}

/* ALiBi at the best of the tokens [first, last], z units. */
static double best_bias(const ekv_row *row, int64_t first, int64_t last) {
    if (row->slope == 0.0f) return 0.0;
    return (double)row->slope * (double)((row->slope > 0.0f ? last : first) - row->q_token);
}

/* The bounds of pages' norms, in float.  The f32 score may exceed the exact one by (K + 8) u (|q| |k| + |bias|), K additions on a
 * product's way (see `bound`), u = 2^-24; the roundings here by less than 8 u of the same. */
static void bound_by_norms(const ekv_step *step, ekv_row *row, int32_t at, int32_t n, const float *largest) {
    const float slack = 1.0f + (float)(ekv_padded(step->kv.k_dim) / 32 + 5 + 24) * 0x1p-24f, down = 2.0f - slack;
    const double exact = norm_of_query(step, row);
    const float norm = exact < 3e38 ? nextafterf((float)exact, INFINITY) : INFINITY;
    const int32_t page_size = step->kv.page_size;
    float *restrict bound = row->bound + at;
    for (int32_t i = 0; i < n; i++) bound[i] = slack * (norm * largest[i]) + 0x1p-120f;
    if (row->slope != 0.0f) { /* of a page that is not full this takes a token that is not there, no worse than the last */
        const int32_t best = at * page_size + (row->slope > 0.0f ? page_size - 1 : 0) - row->q_token;
        const float slope = row->slope;
        for (int32_t i = 0; i < n; i++) {
            const float bias = slope * (float)(best + i * page_size);
            bound[i] += bias * (bias > 0.0f ? slack : down);
        }
    }
    for (int32_t i = 0; i < n; i++) bound[i] = bound[i] < INFINITY ? bound[i] : INFINITY; /* NaN too */
}

void ekv_certify_bounds(const ekv_step *step, ekv_item *item, int64_t page, int64_t end) {
    enum { PAGES = 256 };
    if (!has_bounds(step, item)) return;
    const ekv_index *index = step->index;
    end = ekv_min64(end, item->pages);
    for (int32_t at = (int32_t)page; at < end; at += PAGES) {
        const int32_t n = (int32_t)ekv_min64(end - at, PAGES);
        float largest[PAGES];
        for (int32_t i = 0; i < n; i++) {
            const int64_t block = ekv_block(item, at + i);
            const int32_t tokens = at + i == item->pages - 1 ? ekv_page_tokens(step, item->n, at + i) : step->kv.page_size;
            largest[i] = index->norms && index->counts[block] >= tokens ? *ekv_index_key_norm(index, item->head, block) : INFINITY;
        }
        for (int32_t r = 0; r < item->rows; r++) {
            ekv_row *row = &item->row[r];
            if (at < row->pages) bound_by_norms(step, row, at, (int32_t)ekv_min64(n, row->pages - at), largest);
        }
    }
}

static int64_t stretches_of(const ekv_step *step, const ekv_item *item) { return ekv_ceil_div(item->pages, step->index->stretch); }

static bool page_sketched(const ekv_step *step, const ekv_item *item, int64_t page, int64_t stretches) {
    const int64_t block = ekv_block(item, page);
    return step->index->sketched[block] >= ekv_page_tokens(step, item->n, page) &&
           step->index->stretch_of[block] < stretches;
}

/* Marks the pages of which some row may need a token, and counts them. */
static int64_t find_needed(ekv_item *item) {
    uint8_t *restrict needed = item->needed;
    const int32_t pages = item->pages;
    int32_t count = 0;
    memset(needed, 0, (size_t)pages);
    for (int32_t r = 0; r < item->rows && count < pages; r++) {
        const float *restrict bound = item->row[r].bound, cut = item->row[r].cut;
        for (int32_t p = 0; p < item->row[r].pages; p++) needed[p] |= !(bound[p] <= cut);
        count = 0;
        for (int32_t p = 0; p < pages; p++) count += needed[p];
    }
    item->needed_pages = count;
    return count;
}

/* The needed page of that rank, of `all`; ranks are asked for in ascending order.  item->pages if there is none. */
typedef struct needed_pages {
    int64_t all, rank; /* of the first needed page from `page` on */
    int32_t page;
} needed_pages;

static int32_t needed_page(const ekv_item *item, needed_pages *at, int64_t rank) {
    if (at->all == item->pages) return (int32_t)ekv_min64(rank, item->pages);
    for (uint64_t eight; at->page + 8 <= item->pages; at->page += 8) {
        memcpy(&eight, item->needed + at->page, 8);
        const int64_t count = (int64_t)(eight * UINT64_C(0x0101010101010101) >> 56);
        if (at->rank + count > rank) break;
        at->rank += count;
    }
    for (; at->page < item->pages; at->page++) {
        if (!item->needed[at->page]) continue;
        if (at->rank == rank) break;
        at->rank++;
    }
    return at->page;
}

/* ---- sketch ---- */

/* The entries of the table of one code or norm, in z units before quantisation. */
static void table_entries(const ekv_basis *basis, int code, const double *rotated, const double *block_norm, double entry[16]) {
    if (code >= basis->codes) {
        const int b = code - basis->codes;
        for (int v = 0; v < 16; v++) {
            entry[v] = block_norm[b] * (double)basis->level[b][v];
            if (!(entry[v] < 1e300)) entry[v] = (double)INFINITY; /* also 0 * infinity */
        }
        return;
    }
    for (int v = 0; v < 16; v++) entry[v] = 0.0;
    for (int j = 0; j < 4 && basis->axis[code][j] >= 0; j++) {
        const double along = rotated[basis->axis[code][j]];
        for (int v = 0; v < 16; v++) entry[v] += along * (double)ekv_centroid(basis, code, j, v);
    }
}

/* What the sums of tokens of a stretch start from, given their best ALiBi term: the integer above everything in their bound but the
 * table's entries.  What lies below the origin is taken for the origin, which is sound. */
static uint16_t start_from(const ekv_row *row, int64_t stretch, double bias) {
    const double base = row->center[stretch] + row->table->base + bias + fabs(bias) * 0x1p-19;
    const double steps = ceil((base - row->table->origin) / row->table->step * (1.0 + 1e-12));
    if (!(steps < MUST_READ - 1)) return MUST_READ; /* also for NaN */
    return (uint16_t)(steps > 0.0 ? steps + 1.0 : 1.0);
}

/*
 * The row's table.  With x = k - center, y any coordinates, c the sum of centroids, w = x - Q^T y:
 *      q . k = q . center + (Q q) . c + (Q q) . (y - c) + q . w
 * |(Q q) . (y - c)| is at most the sum over blocks of |(Q q)_b| |(y - c)_b|.  y = P x, which is what keeps w outside of the axes, so
 * that only the part of q that the axes do not see counts in q . w: its square is at most |q|^2 - |Q q|^2 + skew |q|^2.  What the
 * rounding while encoding adds to all this is derived in basis.c: |q| (error_share largest + error).
 * The f32 score adds (K + 8) u |q| |k|, |k| <= |x| + |center|; if that could overflow, nothing is ruled out.
 * Entries are rounded up to whole steps, so that the integer sum is never below the real one:  bound <= origin + step (sum - 1).
 */
static void build_table(const ekv_step *step, const ekv_item *item, ekv_row *row, const double *rotated) {
    const ekv_index *index = step->index;
    const ekv_basis *basis = &index->bases[item->head];
    const int32_t dim = step->kv.k_dim, codes = basis->codes + EKV_SKETCH_NORMS;
    double block_norm[EKV_SKETCH_NORMS], seen = 0.0;
    for (int32_t a = 0; a < basis->axes; a++) seen += rotated[a] * rotated[a];
    const double norm = norm_of_query(step, row);
    for (int b = 0; b < EKV_SKETCH_NORMS - 1; b++) {
        double squares = 0.0;
        for (int32_t a = b ? basis->block_end[b - 1] : 0; a < basis->block_end[b]; a++) squares += rotated[a] * rotated[a];
        block_norm[b] = sqrt(squares) * (1.0 + 1e-6) + 1e-30;
    }
    const double rest = norm * norm - seen + ((double)basis->skew + 1e-12) * norm * norm;
    block_norm[EKV_SKETCH_NORMS - 1] = sqrt(rest > 0.0 ? rest : 0.0) * (1.0 + 1e-6) + 1e-30;

    double entry[EKV_SKETCH_CODES + EKV_SKETCH_NORMS][16], least[EKV_SKETCH_CODES + EKV_SKETCH_NORMS], range = 0.0;
    row->table->base = 0.0;
    for (int c = 0; c < codes; c++) {
        double most = -(double)INFINITY;
        table_entries(basis, c, rotated, block_norm, entry[c]);
        least[c] = entry[c][0];
        for (int v = 0; v < 16; v++) {
            least[c] = entry[c][v] < least[c] ? entry[c][v] : least[c];
            if (entry[c][v] < (double)INFINITY && entry[c][v] > most) most = entry[c][v];
        }
        if (least[c] == (double)INFINITY) least[c] = most = 0.0;
        range += most - least[c];
        row->table->base += least[c];
    }
    const double scoring = 2.0 * (double)(ekv_padded(dim) / 32 + 5 + 16) * 0x1p-24;
    const double largest = (double)basis->largest, encoding = (double)basis->error_share * largest + (double)basis->error;
    const int64_t stretches = stretches_of(step, item);
    double top = -(double)INFINITY, bottom = (double)INFINITY; /* of the centers' parts */
    for (int64_t s = 0; s < stretches; s++) {
        const float *center = ekv_index_center(index, item->head, s);
        row->center[s] = (double)INFINITY;
        if (!index->centered[s]) continue; /* nothing refers to it */
        const double length = largest + sqrt(dot(center, center, dim));
        if (!(norm * length < 3e38)) continue; /* a score might overflow */
        row->center[s] = dot(row->q, center, dim) + norm * (encoding + scoring * length) + 1e-30;
        top = row->center[s] > top ? row->center[s] : top;
        bottom = row->center[s] < bottom ? row->center[s] : bottom;
    }
    const double near = best_bias(row, 0, row->n - 1), far = row->slope == 0.0f ? 0.0 : -(double)row->slope * (row->n - 1.0);
    top += row->table->base + (near > 0.0 ? near : 0.0);
    bottom += row->table->base + (far < 0.0 && near <= 0.0 ? far : 0.0);
    const double window = top - bottom < range + 2.0 ? top - bottom : range + 2.0;
    row->table->origin = top - window;
    row->table->step = (range + window) / (64000.0 - codes) + 1e-30;
    const double per_step = (1.0 + 1e-12) / row->table->step;
    for (int c = 0; c < codes; c++)
        for (int v = 0; v < 16; v++) { /* rounded up */
            const double steps = (entry[c][v] - least[c]) * per_step;
            const uint16_t whole = steps < MUST_READ - 1 ? (uint16_t)steps : MUST_READ - 1; /* also for NaN */
            row->table->entry[c * 16 + v] = (uint16_t)(whole + !(steps <= (double)whole));
        }
    for (int64_t s = 0; s < stretches; s++) row->start[s] = start_from(row, s, 0.0);
}

/* Those of rows [begin, end). */
static void build_tables(const ekv_step *step, const ekv_item *item, int32_t begin, int32_t end) {
    const ekv_basis *basis = &step->index->bases[item->head];
    const int32_t dim = step->kv.k_dim;
    double rotated[EKV_ITEM_ROWS][EKV_SKETCH_AXES];
    for (int32_t a = 0; a < basis->axes; a++) {
        float axis[EKV_MAX_DIM];
        ekv_load_row_args load = {ekv_at(basis->rows, (int64_t)a * dim, EKV_F16), dim, 1.0f, axis};
        step->kernels->load_row[EKV_F16](&load);
        for (int32_t r = begin; r < end; r++) rotated[r][a] = dot(axis, item->row[r].q, dim);
    }
    for (int32_t r = begin; r < end; r++) build_table(step, item, &item->row[r], rotated[r]);
}

/* The largest sum with which a token is ruled out at `cut`.  A sum of 0 always is. */
static uint16_t limit_at(const ekv_row *row, double cut) {
    const double limit = floor((cut - row->table->origin) / row->table->step * (1.0 - 1e-9) - 1e-6) + 1.0;
    if (!(limit >= 1.0)) return 0; /* also for NaN */
    return limit < MUST_READ - 1 ? (uint16_t)limit : MUST_READ - 1;
}

static int64_t group_bytes(const ekv_step *step) { return (int64_t)(step->index->codes + EKV_SKETCH_NORMS) / 2 * EKV_SKETCH_GROUP; }
static int32_t page_groups(const ekv_step *step) { return step->kv.page_size / EKV_SKETCH_GROUP; }

/* Groups whose sketches are looked up together, for rows [begin, end); their sums lie together from `to` on. */
typedef struct run {
    int32_t begin, end;
    int n;
    int64_t to; /* in groups */
    int32_t page[RUN_GROUPS], first[RUN_GROUPS]; /* page, and first token */
    int32_t stretch[RUN_GROUPS];
    const uint8_t *group[RUN_GROUPS];
} run;

static void fill_sums(const ekv_row *row, int64_t group, uint16_t value) {
    for (int t = 0; t < EKV_SKETCH_GROUP; t++) row->sum[group * EKV_SKETCH_GROUP + t] = value;
}

static void look_up(const ekv_step *step, const ekv_item *item, run *run) {
    uint16_t start[EKV_ITEM_ROWS][RUN_GROUPS], *sum[EKV_ITEM_ROWS];
    const uint16_t *table[EKV_ITEM_ROWS], *starts[EKV_ITEM_ROWS];
    if (run->n == 0) return;
    for (int32_t r = run->begin; r < run->end; r++) {
        const ekv_row *row = &item->row[r];
        for (int i = 0; i < run->n; i++) {
            const int64_t first = run->first[i], last = ekv_min64(first + EKV_SKETCH_GROUP, row->n) - 1;
            const int32_t stretch = run->stretch[i];
            start[r][i] = row->slope == 0.0f ? row->start[stretch] : start_from(row, stretch, best_bias(row, first, last));
        }
        table[r] = row->table->entry;
        starts[r] = start[r];
        sum[r] = row->sum + run->to * EKV_SKETCH_GROUP;
    }
    ekv_lookup_args a = {table + run->begin, run->end - run->begin, step->index->codes + EKV_SKETCH_NORMS,
                         run->group, starts + run->begin, run->n, sum + run->begin};
    step->kernels->lookup(&a);
    for (int32_t r = run->begin; r < run->end; r++) {
        const ekv_row *row = &item->row[r];
        if (row->slope == 0.0f && !item->use_boxes && row->pages == item->pages) continue; /* `needed` says it all */
        for (int i = 0; i < run->n; i++)
            if (run->page[i] >= row->pages || row->bound[run->page[i]] <= row->cut) fill_sums(row, run->to + i, 0);
    }
    run->n = 0;
}

/* Group `within` of a page, its sums to go to group `to`. */
static inline void run_add(const ekv_step *step, const ekv_item *item, run *run, int32_t page, int32_t within, int64_t to) {
    if (run->n == RUN_GROUPS || (run->n > 0 && run->to + run->n != to)) look_up(step, item, run);
    if (run->n == 0) run->to = to;
    const int64_t block = ekv_block(item, page);
    const int i = run->n++;
    run->page[i] = page;
    run->first[i] = page * step->kv.page_size + within * EKV_SKETCH_GROUP;
    run->stretch[i] = step->index->stretch_of[block];
    run->group[i] = ekv_index_sketch(step->index, item->head, block) + within * group_bytes(step);
}

/* Bytes that every use of the sketch reads once: basis and centers. */
static int64_t basis_bytes(const ekv_step *step, const ekv_item *item) {
    return ekv_basis_bytes(&step->index->bases[item->head]) + stretches_of(step, item) * step->kv.k_dim * 4;
}

/* ---- the sample ---- */

/* Sampled keys, and how many tokens each stands for. */
typedef struct sample {
    int n;
    int32_t token[SAMPLE];
    float z[EKV_ITEM_ROWS * EKV_TILE];
    double weight;
    /* With a sketch: groups whose bounds the keys were chosen by; their sums are the rows' first ones. */
    int groups;
    int32_t first[SAMPLE_GROUPS];
    int32_t at[SAMPLE];        /* of each key among those sums */
    uint64_t chosen[SAMPLE_GROUPS * EKV_SKETCH_GROUP / 64]; /* a bit for each sum */
    int bin[EKV_ITEM_ROWS];    /* sums in higher bins are of keys that were read for the row */
} sample;

/* Sampled tokens without a sketch: evenly spread over the `pages` that are still needed; they repeat where those are few. */
static void spread_sample(const ekv_step *step, const ekv_item *item, int64_t pages, sample *s) {
    needed_pages at = {.all = pages};
    for (; s->n < SAMPLE; s->n++) {
        const int32_t p = needed_page(item, &at, (2 * (int64_t)s->n + 1) * pages / (2 * SAMPLE));
        s->token[s->n] = p * step->kv.page_size + (int32_t)((s->n * 7) % ekv_page_tokens(step, item->n, p));
    }
    s->weight = (double)(pages * step->kv.page_size) / s->n;
}

/* Looks up groups, evenly spread over the `pages` that are still needed, for rows [begin, end). */
static void look_up_sample(const ekv_step *step, ekv_item *item, int64_t pages, sample *s, int32_t begin, int32_t end) {
    const int64_t tokens = pages * step->kv.page_size;
    const int64_t wanted = ekv_min64(ekv_max64(tokens / GROUP_TOKENS, LEAST_GROUPS), ekv_min64(SAMPLE_GROUPS, pages));
    const int64_t stretches = stretches_of(step, item);
    needed_pages at = {.all = pages};
    run run = {.begin = begin, .end = end};
    s->groups = 0;
    for (int64_t i = 0; i < wanted; i++) {
        const int32_t p = needed_page(item, &at, (2 * i + 1) * pages / (2 * wanted)), within = (int32_t)(i % page_groups(step));
        if (!page_sketched(step, item, p, stretches) || ekv_page_tokens(step, item->n, p) < step->kv.page_size) continue;
        run_add(step, item, &run, p, within, s->groups);
        s->first[s->groups++] = p * step->kv.page_size + within * EKV_SKETCH_GROUP;
    }
    look_up(step, item, &run);
    for (int32_t r = begin; r < end; r++) /* what the row does not see */
        for (int g = s->groups - 1; g >= 0 && s->first[g] + EKV_SKETCH_GROUP > item->row[r].n; g--)
            for (int t = 0; t < EKV_SKETCH_GROUP; t++)
                if (s->first[g] + t >= item->row[r].n) item->row[r].sum[g * EKV_SKETCH_GROUP + t] = 0;
    item->bytes_sampled = s->groups * group_bytes(step);
}

/* Adds the keys whose sums are the highest for rows [begin, end), the same number for every row. */
static void choose_sample(const ekv_step *step, const ekv_item *item, sample *s, int32_t begin, int32_t end) {
    enum { WORDS = SAMPLE_GROUPS * EKV_SKETCH_GROUP / 64 };
    uint64_t chosen[WORDS] = {0};
    const int n = s->groups * EKV_SKETCH_GROUP, wanted = SAMPLE / item->rows;
    for (int32_t r = begin; r < end; r++) {
        const ekv_row *row = &item->row[r];
        uint16_t *histogram = row->table->histogram;
        uint64_t high[WORDS] = {0};
        int bin = EKV_BINS - 1, taken = 0, left = wanted;
        memset(histogram, 0, sizeof row->table->histogram);
        for (int i = 0; i < n; i++) histogram[row->sum[i] / EKV_BIN_WIDTH]++;
        while (bin > 0 && (taken == 0 || taken + histogram[bin] <= wanted)) taken += histogram[bin--];
        ekv_above_args above = {row->sum, n, (uint16_t)((bin + 1) * EKV_BIN_WIDTH - 1), high};
        step->kernels->above(&above);
        for (int w = 0; w * 64 < n && left > 0; w++)
            for (; high[w] && left > 0; high[w] &= high[w] - 1, left--) chosen[w] |= high[w] & (~high[w] + 1);
        s->bin[r] = bin;
    }
    for (int w = 0; w * 64 < n; w++) {
        uint64_t mask = chosen[w] & ~s->chosen[w];
        s->chosen[w] |= mask;
        for (; mask; mask &= mask - 1) {
            const int i = w * 64 + lowest_bit(mask);
            s->at[s->n] = i;
            s->token[s->n++] = s->first[i / EKV_SKETCH_GROUP] + i % EKV_SKETCH_GROUP;
        }
    }
}

/* Reads those from `from` on; then every row's cut is raised. */
static void read_sample(const ekv_step *step, ekv_item *item, sample *s, int from) {
    const void *keys[EKV_TILE];
    reader rd;
    reader_begin(item, &rd);
    for (int i = 0; i < s->n; i++) {
        const int32_t token = s->token[i], page_size = step->kv.page_size;
        if (i >= from) read_mask(step, item, &rd, token / 64 * 64, UINT64_C(1) << token % 64);
        keys[i] = ekv_key(&step->kv, ekv_block(item, token / page_size), token % page_size, item->head);
    }
    reader_flush(step, item, &rd);
    ekv_score_args score = {rd.q, rd.slope, rd.q_token, item->rows, keys, s->token, s->n, step->kv.k_dim, s->z, NULL, 0};
    if (s->n) step->kernels->score[step->kv.dtype](&score); /* once more, since the lists leave out what is low */
    for (int32_t r = 0; r < item->rows; r++) raise_cut(step, item, &item->row[r]);
}

/* Scores, and how many tokens have each. */
#define POINT_BINS 4 /* of a histogram, in one point */
typedef struct mass_points {
    int n;
    float z[SAMPLE + EKV_BINS / POINT_BINS], tokens[SAMPLE + EKV_BINS / POINT_BINS];
} mass_points;

/* Sampled groups hold more tokens than were read: the others' scores are taken to lie as far below their bounds as those that were read
 * do on average. */
static void guess_unread(const ekv_row *row, int32_t r, const sample *s, double above, mass_points *p) {
    const ekv_table *t = row->table;
    double gap = 0.0;
    for (int i = 0; i < s->n; i++) gap += t->origin + t->step * (double)row->sum[s->at[i]] - (double)s->z[r * EKV_TILE + i];
    for (int b = s->bin[r] / POINT_BINS * POINT_BINS; b >= 0; b -= POINT_BINS) {
        const double z = t->origin + t->step * (b + 0.5 * POINT_BINS) * EKV_BIN_WIDTH - gap / s->n;
        int tokens = 0;
        if (!(z > above)) break; /* NaN too */
        for (int i = b; i < b + POINT_BINS && i <= s->bin[r]; i++) tokens += t->histogram[i];
        p->z[p->n] = (float)z;
        p->tokens[p->n] = (float)(s->weight * tokens);
        p->n += tokens > 0;
    }
}

/* sum of tokens max(z - tau, 0)^power. */
static float mass_above(const mass_points *p, float tau, int32_t power) {
    float sum = 0.0f;
    for (int j = 0; j < p->n; j++) {
        const float t = p->z[j] > tau ? p->z[j] - tau : 0.0f;
        float mass = p->tokens[j] * t;
        if (power == 2)
            mass *= t;
        else
            for (int32_t k = 1; k < power && mass > 1e-9f; k++) mass *= t;
        sum += mass;
    }
    return sum;
}

/* An estimate of row r's final tau: every sampled token counted for all that it stands for, those that were not read as well if their
 * bounds are known; beta rounded up, which at most lowers it.  For decisions alone. */
static double estimate_tau(const ekv_item *item, int32_t r, const sample *s, bool bounds) {
    const ekv_row *row = &item->row[r];
    mass_points p = {.n = 0};
    float top = -INFINITY, low, high;
    for (int i = 0; i < s->n; i++) {
        const float z = s->z[r * EKV_TILE + i];
        if (s->token[i] >= row->n) continue;
        if (z > top) top = z;
        p.z[p.n] = z;
        p.tokens[p.n++] = (float)s->weight;
    }
    if (!(top > -INFINITY) || !(top < INFINITY)) return (double)row->cut;
    if (bounds) guess_unread(row, r, s, (double)top - 1.0, &p);
    low = top - 1.0f;
    high = top;
    for (int i = 0; i < 10; i++) {
        const float tau = 0.5f * (low + high);
        if (mass_above(&p, tau, row->power) >= 1.0f)
            low = tau;
        else
            high = tau;
    }
    return (double)(low > row->cut ? low : row->cut);
}

/* The share of the tokens in the sampled groups that the sketch cannot rule out for rows [0, end) at the estimates of tau. */
static double surviving_share(const ekv_step *step, const ekv_item *item, const sample *s, const double *tau, int32_t end) {
    uint64_t needed[SAMPLE_GROUPS * EKV_SKETCH_GROUP / 64] = {0};
    const int n = s->groups * EKV_SKETCH_GROUP;
    int survivors = 0;
    for (int32_t r = 0; r < end; r++) {
        ekv_above_args above = {item->row[r].sum, n, limit_at(&item->row[r], tau[r]), needed};
        step->kernels->above(&above);
    }
    for (int w = 0; w * 64 < n; w++)
        for (uint64_t mask = needed[w]; mask; mask &= mask - 1) survivors++;
    return (double)survivors / n;
}

/* ---- boxes ---- */

/* The share of needed pages, of up to 16 looked at, that boxes rule out for every row. */
static double boxed_share(const ekv_step *step, ekv_item *item, int64_t pages, const double *tau) {
    enum { MOST = 16 };
    const int looked = (int)ekv_min64(pages, MOST);
    needed_pages at = {.all = pages};
    int32_t page[MOST];
    bool needed[MOST] = {false};
    float bound[MOST];
    int ruled_out = 0;
    for (int i = 0; i < looked; i++) page[i] = needed_page(item, &at, i * pages / looked);
    for (int32_t r = 0; r < item->rows; r++) {
        int n = looked;
        while (n > 0 && page[n - 1] >= item->row[r].pages) n--;
        if (n > 0) ekv_page_bounds_at(step, item, &item->row[r], page, n, bound);
        for (int i = 0; i < n; i++) needed[i] |= !((double)bound[i] <= tau[r]);
    }
    for (int i = 0; i < looked; i++) ruled_out += !needed[i];
    item->bytes_statistics += looked * (int64_t)step->index->box_bytes;
    return (double)ruled_out / looked;
}

void ekv_certify_boxes(const ekv_step *step, ekv_item *item, int32_t span) {
    if (!item->use_boxes) return;
    const int64_t begin = ekv_ceil_div((int64_t)span * EKV_SPAN, step->kv.page_size),
                  end = ekv_min64(item->pages, ekv_ceil_div(((int64_t)span + 1) * EKV_SPAN, step->kv.page_size));
    for (int32_t p = (int32_t)begin; p < end;) {
        int32_t page[EKV_PAGE_BATCH];
        float bound[EKV_PAGE_BATCH];
        int count = 0;
        for (; p < end && count < EKV_PAGE_BATCH; p++)
            if (item->needed[p]) page[count++] = p;
        for (int32_t r = 0; r < item->rows; r++) {
            ekv_row *row = &item->row[r];
            int n = count;
            while (n > 0 && page[n - 1] >= row->pages) n--;
            if (n > 0) ekv_page_bounds_at(step, item, row, page, n, bound);
            for (int i = 0; i < n; i++)
                if (bound[i] < row->bound[page[i]]) row->bound[page[i]] = bound[i];
        }
        item->part[span].boxed += count;
    }
}

/* ---- stages ---- */

static void read_first(const ekv_step *step, ekv_item *item) {
    reader rd;
    reader_begin(item, &rd);
    read_page(step, item, &rd, 0);
    for (int64_t p = ekv_max64(1, item->pages - NEWEST_PAGES); p < item->pages; p++) read_page(step, item, &rd, p);
    reader_flush(step, item, &rd);
    for (int32_t r = 0; r < item->rows; r++) raise_cut(step, item, &item->row[r]);
}

static bool has_basis(const ekv_step *step, const ekv_item *item) {
    return step->index->codes && step->index->bases[item->head].codes > 0;
}

/* Bytes saved for a token of a needed page by looking its sketch up, if so large a share of the tokens remains. */
static double saved_by_sketch(const ekv_step *step, double share) {
    const double key = (double)step->kv.k_dim * (double)ekv_element_bytes(step->kv.dtype);
    return key * (1.0 - share) - PAYS * (double)step->index->sketch_bytes / step->kv.page_size;
}

/* Whether the sketch pays, from a sample: of many rows first for one alone, since what remains for all is no less.  Returns the share of
 * the tokens that remains, and estimates of the rows' tau. */
static bool sketch_pays(const ekv_step *step, ekv_item *item, int64_t pages, sample *s, double *tau, double *share) {
    int32_t end = item->rows < 4 ? item->rows : 1, begin = 0;
    for (;; begin = end, end = item->rows) {
        const int from = s->n;
        build_tables(step, item, begin, end);
        look_up_sample(step, item, pages, s, begin, end);
        if (s->groups == 0) return false;
        s->weight = (double)(pages * step->kv.page_size) / (s->groups * EKV_SKETCH_GROUP);
        choose_sample(step, item, s, begin, end);
        read_sample(step, item, s, from);
        for (int32_t r = 0; r < item->rows; r++) tau[r] = estimate_tau(item, r, s, r < end);
        *share = surviving_share(step, item, s, tau, end);
        if (saved_by_sketch(step, *share) <= 0.0) return false;
        if (end == item->rows) return true;
    }
}

/* Decides which of boxes and sketch pay for what the norms left. */
static void choose_levels(const ekv_step *step, ekv_item *item) {
    sample s = {.n = 0};
    double tau[EKV_ITEM_ROWS], share = 1.0;
    const int64_t pages = find_needed(item);
    const double page_size = step->kv.page_size, key = (double)step->kv.k_dim * (double)ekv_element_bytes(step->kv.dtype);
    if ((double)pages * page_size < LEAST_TOKENS) return;
    if (has_basis(step, item) && (double)pages * page_size * key > 4.0 * (double)basis_bytes(step, item)) {
        item->bytes_sketch += basis_bytes(step, item);
        item->use_sketch = sketch_pays(step, item, pages, &s, tau, &share);
    }
    if (s.groups == 0) {
        spread_sample(step, item, pages, &s);
        read_sample(step, item, &s, 0);
        for (int32_t r = 0; r < item->rows; r++) tau[r] = estimate_tau(item, r, &s, false);
    }
    /* bytes for a token of a needed page */
    const double token_cost = item->use_sketch ? (double)step->index->sketch_bytes / page_size + share * key : key;
    item->use_boxes = step->index->box_bytes && boxed_share(step, item, pages, tau) * page_size * token_cost >
                                                    PAYS * (double)step->index->box_bytes;
}

static void set_bits(uint64_t *bits, int64_t begin, int64_t end) {
    for (; begin < end && begin % 64; begin++) bits[begin / 64] |= UINT64_C(1) << begin % 64;
    for (; begin + 64 <= end; begin += 64) bits[begin / 64] = ~UINT64_C(0);
    for (; begin < end; begin++) bits[begin / 64] |= UINT64_C(1) << begin % 64;
}

/* What is left is scanned: all rows read all pages that some row needs. */
static void leave_to_scan(const ekv_step *step, ekv_item *item) {
    for (int32_t r = 0; r < item->rows; r++) item->row[r].selected = item->needed;
    for (int32_t p = 0; p < item->pages; p++) {
        if (!item->needed[p]) continue;
        int32_t run = 1;
        while (p + run < item->pages && item->needed[p + run]) run++;
        set_bits(item->read, (int64_t)p * step->kv.page_size, ekv_min64(item->n, (int64_t)(p + run) * step->kv.page_size));
        p += run;
    }
}

/* What norms and boxes left: too little for the sketch, or all that it looks at. */
static void settle(const ekv_step *step, ekv_item *item) {
    const int64_t box_bytes = step->index ? (int64_t)step->index->box_bytes : 0;
    for (int32_t s = 0; s < item->spans; s++) item->bytes_statistics += item->part[s].boxed * box_bytes;
    if (item->use_boxes || (!item->use_sketch && item->needed_pages < item->pages)) /* else nothing new is ruled out worth a look */
        item->use_sketch &= find_needed(item) * step->kv.page_size >= LEAST_TOKENS;
    if (item->use_boxes || !item->use_sketch) item->bytes_sketch += item->bytes_sampled; /* otherwise they are looked up once more */
    if (!item->use_sketch) leave_to_scan(step, item);
}

void ekv_certify_begin(const ekv_step *step, ekv_item *item) {
    item->use_boxes = item->use_sketch = false;
    item->round = 0;
    item->needed_pages = item->pages;
    item->bytes_statistics = item->bytes_sketch = item->bytes_sampled = 0;
    if (item->n == 0) return;
    memset(item->read, 0, ((size_t)item->n / 64 + 1) * sizeof *item->read);
    memset(item->needed, 1, (size_t)item->pages);
    for (int64_t i = 0; i < (int64_t)item->rows * item->spans; i++) item->part[i] = (ekv_part){.z_max = -INFINITY};
    if (has_bounds(step, item)) {
        if (step->index->norms) item->bytes_statistics += item->pages * (int64_t)sizeof(float);
        read_first(step, item);
        choose_levels(step, item);
    }
    if (!item->use_boxes) settle(step, item);
}

void ekv_certify_settle(const ekv_step *step, ekv_item *item) {
    if (item->use_boxes) settle(step, item);
}

/* Groups of a span. */
static int64_t first_group(int32_t span) { return (int64_t)span * (EKV_SPAN / EKV_SKETCH_GROUP); }
static int64_t end_group(const ekv_item *item, int32_t span) {
    return ekv_min64(first_group(span + 1), ekv_ceil_div(item->n, EKV_SKETCH_GROUP));
}

void ekv_certify_sketch(const ekv_step *step, ekv_item *item, int32_t span) {
    if (!item->use_sketch) return;
    const int32_t per_page = page_groups(step);
    const int64_t stretches = stretches_of(step, item);
    int32_t page = (int32_t)(first_group(span) / per_page), within = (int32_t)(first_group(span) % per_page);
    run run = {.end = item->rows};
    for (int64_t group = first_group(span); group < end_group(item, span); group++) {
        if (!item->needed[page])
            for (int32_t r = 0; r < item->rows; r++) fill_sums(&item->row[r], group, 0);
        else if (!page_sketched(step, item, page, stretches))
            for (int32_t r = 0; r < item->rows; r++) fill_sums(&item->row[r], group, MUST_READ);
        else {
            run_add(step, item, &run, page, within, group);
            item->part[span].looked++;
        }
        if (++within == per_page) page++, within = 0;
    }
    look_up(step, item, &run);
}

/* Counts a sample of the row's sums, so that a round can read about so many of the highest. */
static void count_sums(ekv_row *row) {
    const int32_t stride = (int32_t)ekv_max64(1, row->n / 2048);
    ekv_table *t = row->table;
    memset(t->histogram, 0, sizeof t->histogram);
    t->counted = 0;
    for (int32_t i = 0; i < row->n; i += stride, t->counted++) t->histogram[row->sum[i] / EKV_BIN_WIDTH]++;
}

/* The next round reads sums above row->take: few at first, since tau is low and many that look good are not; then a share of those that
 * are not ruled out, at least one token in 64; all if not many are left. */
static void choose_take(ekv_row *row, int round) {
    const ekv_table *t = row->table;
    int32_t survivors = 0, bin = row->limit / EKV_BIN_WIDTH, taken = 0;
    for (int32_t b = bin; b < EKV_BINS; b++) survivors += t->histogram[b];
    const int32_t wanted = round == 0 ? t->counted / FIRST_SHARE : (int32_t)ekv_max64(t->counted / 64, survivors / NEXT_SHARE);
    if (survivors <= 2 * wanted) return;
    for (bin = EKV_BINS - 1; bin > 0 && taken < wanted; bin--) taken += t->histogram[bin];
    const int32_t take = (bin + 1) * EKV_BIN_WIDTH - 1;
    if (take > row->limit) row->take = (uint16_t)take;
}

void ekv_certify_raise(const ekv_step *step, ekv_item *item, ekv_row *row) {
    if (!item->use_sketch) return;
    if (item->round == 0)
        count_sums(row);
    else
        raise_cut(step, item, row);
    row->limit = limit_at(row, (double)row->cut);
    row->take = row->limit;
    if (item->round < EKV_CERTIFY_ROUNDS - 1) choose_take(row, item->round);
}

/*
 * With max_mass > 0: how far the row's limit may be raised in this span.  The tokens that are skipped for it, each given its bound u,
 * hold at most sum (u - cut)^beta of the mass, since cut <= tau of what was read; each span may skip its share of max_mass.
 * part->sum: what this span skips.
 */
static uint16_t relaxed_limit(const ekv_step *step, const ekv_item *item, const ekv_row *row, int32_t span, ekv_part *part) {
    enum { BINS = 256 };
    if (row->limit == 0) return 0; /* the cut lies below the table, and how far is not known here */
    int32_t count[BINS] = {0}, bin = 0;
    const int32_t first = span * EKV_SPAN, end = (int32_t)ekv_min64(row->n, (int64_t)first + EKV_SPAN);
    const double beta = 1.0 / (row->alpha - 1.0), allowed = step->p.max_mass * (double)(end - first) / row->n;
    const int32_t width = (int32_t)ekv_max64(1, (int64_t)(1.0 / row->table->step / BINS)); /* bins up to cut + 1 */
    for (int32_t t = first; t < end; t++) {
        const int32_t over = (int32_t)row->sum[t] - row->limit - 1;
        if (over >= 0 && over / width < BINS && row->sum[t] < MUST_READ && !(item->read[t / 64] >> t % 64 & 1)) count[over / width]++;
    }
    for (; bin < BINS; bin++) {
        const double excess = (double)(bin + 1) * width * row->table->step * (1.0 + 1e-6);
        const double more = count[bin] ? count[bin] * ekv_pow(excess, beta) : 0.0;
        if (!(part->sum + more <= allowed)) break;
        part->sum += more;
    }
    return (uint16_t)ekv_min64((int64_t)row->limit + (int64_t)bin * width, MUST_READ - 1);
}

/* Puts a span's list into token order, leaving out what the cut rules out. */
static void sort_list(const ekv_step *step, ekv_row *row, int32_t span, ekv_part *part) {
    float *z = row->list_z + (size_t)span * EKV_SPAN, dense[EKV_SPAN];
    int32_t *token = row->list_token + (size_t)span * EKV_SPAN, count = 0;
    uint64_t bits[EKV_SPAN / 64] = {0};
    bool ordered = true;
    ekv_keep_args keep = {z, token, part->count, row->cut, z, token, 0};
    step->kernels->keep(&keep);
    part->count = keep.count;
    for (int32_t i = 1; i < keep.count; i++) ordered &= token[i] > token[i - 1];
    if (ordered) return;
    for (int32_t i = 0; i < keep.count; i++) {
        const int32_t at = token[i] % EKV_SPAN;
        dense[at] = z[i];
        bits[at / 64] |= UINT64_C(1) << at % 64;
    }
    for (int32_t w = 0; w < EKV_SPAN / 64; w++)
        for (uint64_t mask = bits[w]; mask; mask &= mask - 1) {
            const int32_t at = w * 64 + lowest_bit(mask);
            z[count] = dense[at];
            token[count++] = span * EKV_SPAN + at;
        }
}

void ekv_certify_round(const ekv_step *step, ekv_item *item, int32_t span) {
    const bool last = item->round == EKV_CERTIFY_ROUNDS - 1;
    if (!item->use_sketch) return;
    const int32_t first = span * EKV_SPAN, n = (int32_t)ekv_min64(item->n - (int64_t)first, EKV_SPAN);
    uint64_t needed[EKV_SPAN / 64] = {0};
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        const bool relaxed = last && step->p.max_mass > 0.0;
        const uint16_t limit = relaxed ? relaxed_limit(step, item, row, span, parts_of(item, row) + span) : row->take;
        ekv_above_args above = {row->sum + first, (n + EKV_SKETCH_GROUP - 1) / EKV_SKETCH_GROUP * EKV_SKETCH_GROUP, limit, needed};
        step->kernels->above(&above);
    }
    if (n % 64) needed[n / 64] &= (UINT64_C(1) << n % 64) - 1;
    reader rd;
    reader_begin(item, &rd);
    rd.span = span;
    for (int32_t w = 0; w * 64 < n; w++)
        if (needed[w]) read_mask(step, item, &rd, first + w * 64, needed[w]);
    reader_flush(step, item, &rd);
    for (int32_t r = 0; r < item->rows && last; r++) sort_list(step, &item->row[r], span, parts_of(item, &item->row[r]) + span);
}

/* ---- for tests ---- */

void ekv_certify_tables(const ekv_step *step, ekv_item *item) { build_tables(step, item, 0, item->rows); }

void ekv_certify_sums(const ekv_step *step, ekv_item *item) {
    const int32_t per_page = page_groups(step);
    run run = {.end = item->rows};
    for (int64_t group = 0; group * EKV_SKETCH_GROUP < item->n; group++)
        if (page_sketched(step, item, group / per_page, stretches_of(step, item)))
            run_add(step, item, &run, (int32_t)(group / per_page), (int32_t)(group % per_page), group);
    look_up(step, item, &run);
}

bool ekv_certify_rules_out(const ekv_row *row, int32_t token, double cut) { return row->sum[token] <= limit_at(row, cut); }
