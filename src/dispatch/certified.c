/*
 * Policy certified: the output of `full`, from as few bytes as bounds allow.
 *
 * Any token whose upper bound lies at or below tau of the tokens read so far is outside the support: tau of a subset never exceeds tau.
 * Coarse bounds come first and each finer level only where it pays, which is decided within the step from a fixed sample of tokens:
 *      norms    |q| times the largest key norm of a page, plus ALiBi at the page's best token: rules out most of an ALiBi head
 *      boxes    per-dimension minimum and maximum of a page
 *      sketch   a bound for each token (sketch.c)
 *      keys     of whatever remains
 * Stages of an item: begin (norms, the newest pages and a sample of tokens read, decisions), sketch (per span: bounds of all tokens,
 * the best few read), raise (tau from all that was read), more (per span: some more of the best), raise again, sweep (per span: every token
 * read whose bound is still above tau), and then finish, values and output as for every policy.  Scores that were read stand in row->weight[token], marked in item->read.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>
#include <string.h>

#define NEWEST_PAGES 4     /* read before anything else, with the first page */
#define SAMPLE 128         /* tokens that decisions are made from */
#define LEAST_TOKENS 1024  /* fewer remaining tokens are read without further ado */
#define PAYS 1.25          /* bytes that a level must save for each byte that it costs */

/* Tokens are read by falling bound in rounds, tau being raised after each: one in so many of a span's tokens per round. */
static const int32_t round_share[EKV_CERTIFY_ROUNDS] = {64, 16, 6};
#define RUN_GROUPS 64      /* sketch groups in one look-up */
/* ---- scores ---- */

static void mark_read(ekv_item *item, int32_t token) {
    item->read[token] = 1;
    atomic_store_explicit(&item->touched[token / EKV_TOUCHED], 1, memory_order_relaxed); /* spans may share one */
}

/* Scores up to EKV_TILE tokens, in any order, for all rows of the item. */
static void read_tokens(const ekv_step *step, ekv_item *item, const int32_t *tokens, int n) {
    const int32_t page_size = step->kv.page_size;
    float z[EKV_ITEM_ROWS * EKV_TILE], slope[EKV_ITEM_ROWS];
    const float *q[EKV_ITEM_ROWS];
    int32_t q_token[EKV_ITEM_ROWS], token[EKV_TILE] = {0};
    const void *keys[EKV_TILE];
    if (n == 0) return;
    for (int32_t r = 0; r < item->rows; r++) {
        q[r] = item->row[r].q;
        slope[r] = item->row[r].slope;
        q_token[r] = item->row[r].q_token;
    }
    for (int i = 0; i < n; i++) {
        token[i] = tokens[i];
        keys[i] = ekv_key(&step->kv, ekv_block(item, tokens[i] / page_size), tokens[i] % page_size, item->head);
        mark_read(item, tokens[i]);
    }
    ekv_score_args score = {q, slope, q_token, item->rows, keys, token, n, step->kv.k_dim, z};
    step->kernels->score[step->kv.dtype](&score);
    for (int32_t r = 0; r < item->rows; r++)
        for (int i = 0; i < n; i++) item->row[r].weight[tokens[i]] = z[r * EKV_TILE + i];
}

/* Tokens to read, gathered until a tile is full. */
typedef struct gather {
    int n;
    int32_t token[EKV_TILE];
} gather;

static void want(const ekv_step *step, ekv_item *item, gather *g, int32_t token) {
    if (item->read[token]) return;
    mark_read(item, token);
    ekv_prefetch(ekv_key(&step->kv, ekv_block(item, token / step->kv.page_size), token % step->kv.page_size, item->head),
                 (size_t)step->kv.k_dim * ekv_element_bytes(step->kv.dtype));
    g->token[g->n++] = token;
    if (g->n < EKV_TILE) return;
    read_tokens(step, item, g->token, g->n);
    g->n = 0;
}

static void want_page(const ekv_step *step, ekv_item *item, gather *g, int64_t page) {
    const int32_t first = (int32_t)page * step->kv.page_size, n = ekv_page_tokens(step, item->n, page);
    for (int32_t t = first; t < first + n; t++) want(step, item, g, t);
}

/* The scores that were read and exceed the row's cut (NaN does), in token order, to row->list_z and list_token. */
void ekv_certify_list(const ekv_item *item, ekv_row *row, bool tokens) {
    int64_t count = 0;
    for (int32_t begin = 0; begin < row->n; begin += EKV_TOUCHED) {
        if (!atomic_load_explicit(&item->touched[begin / EKV_TOUCHED], memory_order_relaxed)) continue;
        const int32_t end = row->n - begin < EKV_TOUCHED ? row->n : begin + EKV_TOUCHED;
        for (int32_t token = begin; token < end; token++) {
            if (!item->read[token] || row->weight[token] <= row->cut) continue;
            row->list_z[count] = row->weight[token];
            if (tokens) row->list_token[count] = token;
            count++;
        }
    }
    row->list_count = count;
}

/* Raises the row's cut: at and below it no token can be in the support. */
static void raise_cut(const ekv_step *step, ekv_item *item, ekv_row *row) {
    float z_max = -INFINITY;
    ekv_certify_list(item, row, false); /* list_token holds the sketch's sums */
    for (int64_t i = 0; i < row->list_count; i++) z_max = row->list_z[i] > z_max ? row->list_z[i] : z_max;
    if (!(z_max > -INFINITY) || z_max == INFINITY) return;
    const double before = (double)row->cut - (double)z_max; /* the cut is a lower bound already */
    const float start = before > -1.0 ? ekv_round_down(before) : -1.0f;
    ekv_tau_lower_args lower = {row->list_z, (int)row->list_count, z_max, row->power, 12, start};
    step->kernels->tau_lower(&lower);
    const double slack = 0x1p-20 * fabs((double)z_max);
    const float cut = ekv_threshold(z_max, (double)lower.tau - (slack > EKV_MARGIN ? slack : EKV_MARGIN));
    if (cut > row->cut) row->cut = cut;
}

/* ---- norms ---- */

static double norm_of_query(const ekv_step *step, const ekv_row *row) {
    double squares = 0.0;
    for (int32_t d = 0; d < step->kv.k_dim; d++) squares += (double)row->q[d] * (double)row->q[d];
    return sqrt(squares) * (1.0 + 1e-12);
}

/* ALiBi at the best token of a page, z units. */
static double best_bias(const ekv_step *step, const ekv_row *row, int64_t page) {
    if (row->slope == 0.0f) return 0.0;
    const int64_t first = page * step->kv.page_size, last = first + ekv_page_tokens(step, row->n, page) - 1;
    return (double)row->slope * (double)((row->slope > 0.0f ? last : first) - row->q_token);
}

/* What the f32 score may exceed the exact one by: (K + 8) u (|q| |k| + |bias|), K additions on a product's way (see `bound`). */
static double rounding(const ekv_step *step) { return (double)(ekv_padded(step->kv.k_dim) / 32 + 5 + 16) * 0x1p-24; }

static bool page_known(const ekv_step *step, const ekv_item *item, const ekv_row *row, int64_t page) {
    return step->index->counts[ekv_block(item, page)] >= ekv_page_tokens(step, row->n, page);
}

static void bound_by_norms(const ekv_step *step, ekv_item *item, ekv_row *row) {
    const double norm = norm_of_query(step, row), u = rounding(step);
    for (int32_t p = 0; p < row->pages; p++) {
        row->bound[p] = INFINITY;
        if (!step->index || !step->index->norms || !page_known(step, item, row, p)) continue;
        const double dot = norm * (double)*ekv_index_key_norm(step->index, item->head, ekv_block(item, p));
        const double bias = best_bias(step, row, p), bound = dot + bias + u * (dot + fabs(bias)) + 0x1p-120;
        if (bound < 3e38) row->bound[p] = nextafterf((float)bound, INFINITY);
    }
}

/* Whether some row may need a token of this page. */
static bool page_needed(const ekv_item *item, int64_t page) {
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        if (page < row->pages && !(row->bound[page] <= row->cut)) return true;
    }
    return false;
}

static int64_t pages_needed(const ekv_item *item) {
    int64_t count = 0;
    for (int32_t p = 0; p < item->pages; p++) count += page_needed(item, p);
    return count;
}

/* ---- the sample ---- */

/* Sampled tokens, evenly spread over the pages that are still needed, and what each stands for. */
typedef struct sample {
    int n;
    int32_t token[SAMPLE];
    double weight;
} sample;

static void take_sample(const ekv_step *step, ekv_item *item, int64_t pages, sample *s) {
    int64_t seen = 0;
    gather g = {0};
    s->n = 0;
    for (int32_t p = 0; p < item->pages && s->n < SAMPLE; p++) {
        if (!page_needed(item, p)) continue;
        const int64_t target = (2 * (int64_t)s->n + 1) * pages / (2 * SAMPLE); /* may repeat for few pages */
        if (seen++ < target) continue;
        const int32_t tokens = ekv_page_tokens(step, item->n, p);
        s->token[s->n] = p * step->kv.page_size + (int32_t)((s->n * 7) % tokens);
        want(step, item, &g, s->token[s->n++]);
    }
    read_tokens(step, item, g.token, g.n);
    s->weight = s->n ? (double)(pages * step->kv.page_size) / s->n : 1.0;
}

/* An estimate of the row's final tau: every sampled token counted for all that it stands for.  For decisions alone. */
static double estimate_tau(const ekv_step *step, const ekv_row *row, const sample *s) {
    const double beta = 1.0 / (row->alpha - 1.0);
    double top = -(double)INFINITY, low, high;
    (void)step;
    for (int i = 0; i < s->n; i++)
        if (s->token[i] < row->n && (double)row->weight[s->token[i]] > top) top = (double)row->weight[s->token[i]];
    if (!(top > -(double)INFINITY) || !(top < (double)INFINITY)) return (double)row->cut;
    low = top - 1.0;
    high = top;
    for (int i = 0; i < 30; i++) {
        const double tau = 0.5 * (low + high);
        double sum = 0.0;
        for (int j = 0; j < s->n; j++) {
            const double t = s->token[j] < row->n ? (double)row->weight[s->token[j]] - tau : 0.0;
            if (t > 0.0) sum += s->weight * (beta == 2.0 ? t * t : beta == 1.0 ? t : ekv_pow(t, beta));
        }
        if (sum >= 1.0)
            low = tau;
        else
            high = tau;
    }
    return low > (double)row->cut ? low : (double)row->cut;
}

/* ---- sketch ---- */

/* Largest value of the table of one code or norm, and its entries, in z units before quantisation. */
static void table_entries(const ekv_basis *basis, int code, const double *rotated, const double *block_norm, double entry[16]) {
    for (int v = 0; v < 16; v++) {
        entry[v] = 0.0;
        if (code >= basis->codes) {
            const int b = code - basis->codes;
            entry[v] = block_norm[b] * (double)basis->level[b][v];
            if (!(entry[v] < 1e300)) entry[v] = (double)INFINITY; /* also 0 * infinity */
            continue;
        }
        for (int j = 0; j < 4; j++)
            if (basis->axis[code][j] >= 0) entry[v] += rotated[basis->axis[code][j]] * (double)ekv_centroid(basis, code, j, v);
    }
}

/*
 * The row's table.  With x = k - center, y any coordinates, c the sum of centroids, w = x - Q^T y:
 *      q . k = q . center + (Q q) . c + (Q q) . (y - c) + q . w
 * |(Q q) . (y - c)| is at most the sum over blocks of |(Q q)_b| |(y - c)_b|.  y = P x, which is what keeps w outside of the axes, so
 * that only the part of q that the axes do not see counts in q . w: its square is at most |q|^2 - |Q q|^2 + skew |q|^2.  What the
 * rounding while encoding adds to all this is derived in basis.c: |q| (error_share largest + error).
 * The f32 score adds (K + 8) u |q| |k|, |k| <= |x| + |center|; if that could overflow, nothing is ruled out.
 * Entries are rounded up to whole steps, so that the integer sum is never below the real one.
 */
static void build_table(const ekv_step *step, ekv_item *item, ekv_row *row) {
    const ekv_index *index = step->index;
    const ekv_basis *basis = &index->bases[item->head];
    const int32_t dim = step->kv.k_dim, codes = basis->codes + EKV_SKETCH_NORMS;
    double rotated[EKV_SKETCH_AXES], block_norm[EKV_SKETCH_NORMS], seen = 0.0;
    for (int32_t a = 0; a < basis->axes; a++) {
        float axis[EKV_MAX_DIM];
        ekv_load_row_args load = {ekv_at(basis->rows, (int64_t)a * dim, EKV_F16), dim, 1.0f, axis};
        step->kernels->load_row[EKV_F16](&load);
        rotated[a] = 0.0;
        for (int32_t d = 0; d < dim; d++) rotated[a] += (double)axis[d] * (double)row->q[d];
        seen += rotated[a] * rotated[a];
    }
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
    row->table->step = range / (65000.0 - codes) + 1e-30;
    for (int c = 0; c < codes; c++)
        for (int v = 0; v < 16; v++) {
            const double steps = ceil((entry[c][v] - least[c]) / row->table->step);
            const unsigned whole = steps < 65535.0 ? (unsigned)steps : 65535u;
            row->table->low[c * 16 + v] = (uint8_t)(whole & 255u);
            row->table->high[c * 16 + v] = (uint8_t)(whole >> 8);
        }
    const double largest = (double)basis->largest, encoding = (double)basis->error_share * largest + (double)basis->error;
    for (int64_t s = 0; s * index->stretch < item->pages; s++) {
        const float *center = ekv_index_center(index, item->head, s);
        double dot = 0.0, squares = 0.0;
        for (int32_t d = 0; d < dim; d++) {
            dot += (double)row->q[d] * (double)center[d];
            squares += (double)center[d] * (double)center[d];
        }
        const double length = largest + sqrt(squares);
        row->center[s] = dot + norm * (encoding + 2.0 * rounding(step) * length) + 1e-30;
        if (!(norm * length < 3e38)) row->center[s] = (double)INFINITY;
    }
}

static bool page_sketched(const ekv_step *step, const ekv_item *item, int64_t page) {
    const int64_t block = ekv_block(item, page);
    return step->index->sketched[block] >= ekv_page_tokens(step, item->n, page) &&
           step->index->stretch_of[block] * step->index->stretch < item->pages;
}

/* The largest sum of table entries with which a token of the page is still ruled out at `cut`; -1 if none is. */
static int32_t sum_limit(const ekv_step *step, const ekv_item *item, const ekv_row *row, int64_t page, double cut) {
    const int64_t stretch = step->index->stretch_of[ekv_block(item, page)];
    const double bias = best_bias(step, row, page);
    const double base = row->center[stretch] + row->table->base + bias + fabs(bias) * 0x1p-19;
    const double limit = floor((cut - base) / row->table->step * (1.0 - 1e-9) - 1e-6);
    if (!(limit >= 0.0)) return -1; /* also for NaN: everything is read */
    return limit < 65534.0 ? (int32_t)limit : 65534;
}

/* Sums for all tokens of pages [page, page + pages), which follow each other. */
static void look_up(const ekv_step *step, const ekv_item *item, int64_t page, int64_t pages) {
    const int32_t groups_per_page = step->kv.page_size / EKV_SKETCH_GROUP, codes = step->index->codes + EKV_SKETCH_NORMS;
    const size_t group_bytes = (size_t)codes / 2 * EKV_SKETCH_GROUP;
    const uint8_t *group[RUN_GROUPS];
    const int64_t total = pages * groups_per_page;
    for (int64_t at = 0; at < total; at += RUN_GROUPS) {
        const int n = (int)ekv_min64(RUN_GROUPS, total - at);
        for (int i = 0; i < n; i++) {
            const int64_t p = page + (at + i) / groups_per_page;
            group[i] = ekv_index_sketch(step->index, item->head, ekv_block(item, p)) + (size_t)((at + i) % groups_per_page) * group_bytes;
        }
        for (int32_t r = 0; r < item->rows; r++) {
            const ekv_row *row = &item->row[r];
            ekv_lookup_args a = {row->table->low, row->table->high, codes, group, n,
                                 row->sum + page * step->kv.page_size + at * EKV_SKETCH_GROUP};
            step->kernels->lookup(&a);
        }
    }
}

/* Bytes that every use of the sketch reads once: basis and centers. */
static int64_t basis_bytes(const ekv_step *step, const ekv_item *item) {
    const int64_t stretches = ekv_ceil_div(item->pages, step->index->stretch);
    return ekv_basis_bytes(&step->index->bases[item->head]) + stretches * step->kv.k_dim * 4;
}

/* The share of sampled tokens that the sketch cannot rule out at the estimates of tau. */
static double surviving_share(const ekv_step *step, ekv_item *item, const sample *s, const double *tau) {
    int survivors = 0, looked = 0;
    for (int i = 0; i < s->n; i++) {
        const int64_t page = s->token[i] / step->kv.page_size;
        if (!page_sketched(step, item, page)) continue;
        bool needed = false;
        look_up(step, item, page, 1);
        for (int32_t r = 0; r < item->rows; r++) {
            const ekv_row *row = &item->row[r];
            needed |= s->token[i] < row->n && (int32_t)row->sum[s->token[i]] > sum_limit(step, item, row, page, tau[r]);
        }
        survivors += needed;
        looked++;
    }
    item->bytes_sampled = looked * (int64_t)step->index->sketch_bytes;
    return looked ? (double)survivors / looked : 1.0;
}

/* ---- boxes ---- */

/* The share of needed pages, of about 16 looked at, that boxes rule out for every row. */
static double boxed_share(const ekv_step *step, ekv_item *item, int64_t pages, const double *tau) {
    const int64_t stride = ekv_max64(1, pages / 16);
    int64_t seen = 0;
    int looked = 0, ruled_out = 0;
    for (int32_t p = 0; p < item->pages; p++) {
        if (!page_needed(item, p) || seen++ % stride) continue;
        bool needed = false;
        for (int32_t r = 0; r < item->rows; r++)
            needed |= p < item->row[r].pages && !((double)ekv_page_bound_of(step, item, &item->row[r], p) <= tau[r]);
        looked++;
        ruled_out += !needed;
    }
    item->bytes_statistics += looked * (int64_t)step->index->box_bytes;
    return looked ? (double)ruled_out / looked : 0.0;
}

static void bound_by_boxes(const ekv_step *step, ekv_item *item) {
    for (int32_t p = 0; p < item->pages; p++) {
        if (!page_needed(item, p)) continue;
        for (int32_t r = 0; r < item->rows; r++) {
            ekv_row *row = &item->row[r];
            if (p >= row->pages) continue;
            const float bound = ekv_page_bound_of(step, item, row, p);
            if (bound < row->bound[p]) row->bound[p] = bound;
        }
        item->bytes_statistics += (int64_t)step->index->box_bytes;
    }
}

/* ---- stages ---- */

static void read_first(const ekv_step *step, ekv_item *item) {
    gather g = {0};
    want_page(step, item, &g, 0);
    for (int64_t p = ekv_max64(0, item->pages - NEWEST_PAGES); p < item->pages; p++) want_page(step, item, &g, p);
    read_tokens(step, item, g.token, g.n);
    for (int32_t r = 0; r < item->rows; r++) raise_cut(step, item, &item->row[r]);
}

static bool has_basis(const ekv_step *step, const ekv_item *item) {
    return step->index && step->index->codes && step->index->bases[item->head].codes > 0;
}

/* Decides which of boxes and sketch pay for what the norms left, and applies the boxes. */
static void choose_levels(const ekv_step *step, ekv_item *item) {
    sample s;
    double tau[EKV_ITEM_ROWS];
    int64_t pages = pages_needed(item);
    const double page_size = step->kv.page_size, key = (double)step->kv.k_dim * (double)ekv_element_bytes(step->kv.dtype);
    if ((double)pages * page_size < LEAST_TOKENS || !step->index) return;
    take_sample(step, item, pages, &s);
    for (int32_t r = 0; r < item->rows; r++) {
        raise_cut(step, item, &item->row[r]);
        tau[r] = estimate_tau(step, &item->row[r], &s);
    }
    double token_cost = key, share = 1.0; /* bytes for a token of a needed page */
    const double sketch = has_basis(step, item) ? (double)step->index->sketch_bytes / page_size : 0.0;
    const bool tables = has_basis(step, item) && (double)pages * page_size * key > 4.0 * (double)basis_bytes(step, item);
    if (tables) {
        for (int32_t r = 0; r < item->rows; r++) build_table(step, item, &item->row[r]);
        item->bytes_sketch += basis_bytes(step, item);
        share = surviving_share(step, item, &s, tau);
        if (key * (1.0 - share) > PAYS * sketch) token_cost = sketch + share * key;
    }
    if (step->index->box_bytes && boxed_share(step, item, pages, tau) * page_size * token_cost > PAYS * (double)step->index->box_bytes) {
        bound_by_boxes(step, item);
        pages = pages_needed(item);
    }
    item->use_sketch = tables && (double)pages * page_size >= LEAST_TOKENS && key * (1.0 - share) > PAYS * sketch;
    if (!item->use_sketch) item->bytes_sketch += item->bytes_sampled; /* otherwise the stage reads them once more, from cache */
}

void ekv_certify_begin(const ekv_step *step, ekv_item *item) {
    item->use_sketch = false;
    item->bytes_statistics = item->bytes_sketch = item->bytes_sampled = 0;
    if (item->n == 0) return;
    memset(item->read, 0, (size_t)item->n);
    for (int32_t c = 0; c <= item->n / EKV_TOUCHED; c++) atomic_init(&item->touched[c], 0);
    for (int32_t r = 0; r < item->rows; r++) {
        item->row[r].cut = -INFINITY;
        bound_by_norms(step, item, &item->row[r]);
    }
    if (step->index && step->index->norms) item->bytes_statistics += item->pages * (int64_t)sizeof(float);
    read_first(step, item);
    choose_levels(step, item);
}

#define SPAN_PAGES (EKV_SPAN / EKV_SKETCH_GROUP + 1)

/* The row's limit for every page of the span whose sketch was read; INT32_MAX for the others. */
static void span_limits(const ekv_step *step, const ekv_item *item, const ekv_row *row, int64_t first_page, int64_t end_page,
                        int32_t *limit) {
    for (int64_t p = first_page; p < end_page; p++)
        limit[p - first_page] = item->looked[p] && p < row->pages ? sum_limit(step, item, row, p, (double)row->cut) : INT32_MAX;
}

/* Largest sum of n. */
static uint16_t largest_sum(const uint16_t *sum, int32_t n) {
    uint16_t largest = 0;
    for (int32_t t = 0; t < n; t++) largest = sum[t] > largest ? sum[t] : largest;
    return largest;
}

/* The largest sum of each group of the pages [page, page + pages), for every row; tokens that a row does not see are left out. */
static void find_tops(const ekv_step *step, const ekv_item *item, int64_t page, int64_t pages) {
    const int64_t first = page * step->kv.page_size, end = (page + pages) * step->kv.page_size;
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        for (int64_t t = first; t < end; t += EKV_SKETCH_GROUP)
            row->top[t / EKV_SKETCH_GROUP] =
                largest_sum(row->sum + t, (int32_t)ekv_max64(0, ekv_min64(EKV_SKETCH_GROUP, (int64_t)row->n - t)));
    }
}

/* How far above its page's limit a sum must be for about one token in `share` to be so: from every fourth token. */
static int32_t best_distance(const ekv_step *step, const ekv_row *row, int64_t first_page, int64_t end_page, const int32_t *limit,
                             int32_t share) {
    enum { BINS = 256, EVERY = 4 };
    const int32_t per_page = step->kv.page_size / EKV_SKETCH_GROUP;
    int32_t histogram[BINS] = {0}, top = 0, groups = 0, bin = BINS - 1;
    for (int64_t i = 0; i < end_page - first_page; i++) {
        if (limit[i] == INT32_MAX) continue;
        const int32_t above = (int32_t)largest_sum(row->top + (first_page + i) * per_page, per_page) - limit[i];
        top = above > top ? above : top;
        groups += per_page;
    }
    const int32_t width = top / BINS + 1;
    for (int64_t i = 0; i < end_page - first_page; i++)
        for (int64_t group = (first_page + i) * per_page; group < (first_page + i + 1) * per_page && limit[i] != INT32_MAX; group++) {
            if ((int32_t)row->top[group] <= limit[i]) continue;
            for (int32_t t = 0; t < EKV_SKETCH_GROUP; t += EVERY) {
                const int32_t above = (int32_t)row->sum[group * EKV_SKETCH_GROUP + t] - limit[i];
                if (above > 0 && above <= top) histogram[above / width]++;
            }
        }
    const int32_t wanted = groups * EKV_SKETCH_GROUP / (share * EVERY);
    for (int32_t count = histogram[bin]; bin > 0 && count < wanted; count += histogram[bin]) bin--;
    return bin * width;
}

/* Reads the tokens of a span with the highest bounds above the cut, about one in `share` for each row. */
static void read_best(const ekv_step *step, ekv_item *item, int64_t first_page, int64_t end_page, int32_t share) {
    const int32_t per_page = step->kv.page_size / EKV_SKETCH_GROUP;
    int32_t limit[SPAN_PAGES];
    gather g = {0};
    for (int32_t r = 0; r < item->rows; r++) {
        const ekv_row *row = &item->row[r];
        span_limits(step, item, row, first_page, end_page, limit);
        const int32_t distance = best_distance(step, row, first_page, end_page, limit, share);
        for (int64_t i = 0; i < end_page - first_page; i++) {
            if (limit[i] == INT32_MAX) continue;
            const int32_t least = limit[i] + (distance > 1 ? distance : 1);
            for (int64_t group = (first_page + i) * per_page; group < (first_page + i + 1) * per_page; group++) {
                if ((int32_t)row->top[group] < least) continue;
                const int64_t first = group * EKV_SKETCH_GROUP, end = ekv_min64(first + EKV_SKETCH_GROUP, row->n);
                for (int64_t t = first; t < end; t++)
                    if ((int32_t)row->sum[t] >= least) want(step, item, &g, (int32_t)t);
            }
        }
    }
    read_tokens(step, item, g.token, g.n);
}

void ekv_certify_sketch(const ekv_step *step, ekv_item *item, int32_t span) {
    item->part[span].count = 0;
    if (!item->use_sketch) return;
    const int32_t page_size = step->kv.page_size;
    const int64_t first = ekv_ceil_div((int64_t)span * EKV_SPAN, page_size);
    const int64_t end = ekv_min64(item->pages, ekv_ceil_div(((int64_t)span + 1) * EKV_SPAN, page_size));
    for (int64_t p = first; p < end; p++) item->looked[p] = page_needed(item, p) && page_sketched(step, item, p);
    for (int64_t p = first; p < end;) {
        int64_t run = 0;
        while (p + run < end && item->looked[p + run]) run++;
        if (run) look_up(step, item, p, run);
        if (run) find_tops(step, item, p, run);
        item->part[span].count += (int32_t)run;
        p += run ? run : 1;
    }
}

void ekv_certify_raise(const ekv_step *step, ekv_item *item, ekv_row *row) {
    if (item->use_sketch) raise_cut(step, item, row); /* otherwise no round has read anything */
}

void ekv_certify_round(const ekv_step *step, ekv_item *item, int32_t span, int round) {
    const int32_t page_size = step->kv.page_size;
    const int64_t first = ekv_ceil_div((int64_t)span * EKV_SPAN, page_size);
    if (!item->use_sketch) return;
    read_best(step, item, first, ekv_min64(item->pages, ekv_ceil_div(((int64_t)span + 1) * EKV_SPAN, page_size)), round_share[round]);
}

/*
 * With max_mass > 0: how many steps of the row's table the limit may be raised in this span.  The tokens that are skipped for it, each
 * given its bound u, hold at most sum (u - cut)^beta of the mass, since cut <= tau of what was read; each span may skip its share of
 * max_mass.  *skipped: what this span skips.
 */
static int32_t relaxed_steps(const ekv_step *step, const ekv_item *item, const ekv_row *row, int64_t first_page, int64_t end_page,
                             double *skipped) {
    enum { BINS = 256 };
    int32_t count[BINS] = {0};
    const double beta = 1.0 / (row->alpha - 1.0), allowed = step->p.max_mass * (double)((end_page - first_page) * step->kv.page_size) / row->n;
    const int32_t width = (int32_t)ekv_max64(1, (int64_t)(1.0 / row->table->step / BINS)); /* bins up to cut + 1 */
    *skipped = 0.0;
    for (int64_t p = first_page; p < end_page && p < row->pages; p++) {
        if (!item->looked[p]) continue;
        const int32_t limit = sum_limit(step, item, row, p, (double)row->cut), first = (int32_t)p * step->kv.page_size;
        for (int32_t t = first; t < first + ekv_page_tokens(step, row->n, p); t++) {
            const int32_t above = (int32_t)row->sum[t] - limit;
            if (above > 0 && above / width < BINS && !item->read[t]) count[above / width]++;
        }
    }
    for (int32_t bin = 0; bin < BINS; bin++) {
        const double excess = (double)(bin + 1) * width * row->table->step * (1.0 + 1e-6);
        const double more = count[bin] ? count[bin] * ekv_pow(excess, beta) : 0.0;
        if (!(*skipped + more <= allowed)) return bin * width - 1 > 0 ? bin * width - 1 : 0;
        *skipped += more;
    }
    return BINS * width - 1;
}

void ekv_certify_sweep(const ekv_step *step, ekv_item *item, int32_t span) {
    const int32_t page_size = step->kv.page_size;
    const int64_t first_page = ekv_ceil_div((int64_t)span * EKV_SPAN, page_size);
    const int64_t end_page = ekv_min64(item->pages, ekv_ceil_div(((int64_t)span + 1) * EKV_SPAN, page_size));
    int32_t relaxed[EKV_ITEM_ROWS] = {0};
    gather g = {0};
    for (int32_t r = 0; r < item->rows; r++) {
        ekv_part *part = &item->part[(int64_t)r * item->spans + span];
        part->sum = 0.0;
        if (step->p.max_mass > 0.0 && item->use_sketch)
            relaxed[r] = relaxed_steps(step, item, &item->row[r], first_page, end_page, &part->sum);
    }
    for (int64_t p = first_page; p < end_page; p++) {
        if (!page_needed(item, p)) continue;
        if (!item->use_sketch || !item->looked[p]) {
            want_page(step, item, &g, p);
            continue;
        }
        const int32_t first = (int32_t)p * page_size, n = ekv_page_tokens(step, item->n, p);
        uint8_t needed[EKV_MAX_PAGE_SIZE] = {0};
        for (int32_t r = 0; r < item->rows; r++) {
            const ekv_row *row = &item->row[r];
            if (p >= row->pages) continue;
            const int32_t limit = sum_limit(step, item, row, p, (double)row->cut), seen = ekv_page_tokens(step, row->n, p);
            const int32_t raised = limit < 0 ? limit : limit + relaxed[r] < 65534 ? limit + relaxed[r] : 65534;
            for (int32_t t = 0; t < seen; t++) needed[t] |= (int32_t)row->sum[first + t] > raised;
        }
        for (int32_t t = 0; t < n; t++)
            if (needed[t]) want(step, item, &g, first + t);
    }
    read_tokens(step, item, g.token, g.n);
}
