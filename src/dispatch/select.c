/*
 * Which pages a row reads, decided from page statistics before any page is read.
 *
 *   topk      the pages with the largest box bounds (Quest's criterion), ties to the lower page
 *   gaussian  the pages whose largest score may reach an estimate of tau (EntmaxKV's Gaussian-aware selection): tau^ solves
 *             sum_p n_p E[max(z - tau^, 0)^beta] = 1 for normal z, and page p stays if mean_p + zeta_p deviation_p > tau^ - margin,
 *             zeta_p = Phi^-1(quantile^(1/n_p)), the quantile of the largest of n_p scores
 *
 * All quantities are in z units.  Every comparison is written so that a NaN reads the page.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>
#include <string.h>

/* ---- statistics of a row's pages ---- */

/* Whether the statistics cover all of the page's tokens that the row sees; an unknown page does not. */
static bool known(const ekv_step *step, const ekv_item *item, const ekv_row *row, int64_t page) {
    return step->index->counts[ekv_block(item, page)] >= ekv_page_tokens(step, row->n, page);
}

/* First and last token of pages [page, page + n). */
static void page_ends(const ekv_step *step, const ekv_row *row, int64_t page, int n, int32_t *first, int32_t *last) {
    for (int i = 0; i < n; i++) {
        first[i] = (int32_t)(page + i) * step->kv.page_size;
        last[i] = first[i] + ekv_page_tokens(step, row->n, page + i) - 1;
    }
}

void ekv_page_bounds_of(const ekv_step *step, const ekv_item *item, ekv_row *row, int64_t page, int64_t end) {
    for (end = ekv_min64(end, row->pages); page < end; page += EKV_PAGE_BATCH) {
        const int n = (int)ekv_min64(EKV_PAGE_BATCH, end - page);
        const void *boxes[EKV_PAGE_BATCH];
        int32_t first[EKV_PAGE_BATCH], last[EKV_PAGE_BATCH];
        for (int i = 0; i < n; i++) boxes[i] = ekv_index_box(step->index, item->head, ekv_block(item, page + i));
        page_ends(step, row, page, n, first, last);
        ekv_bound_args a = {row->q, row->slope, row->q_token, boxes, first, last, n, step->kv.k_dim, row->bound + page};
        step->kernels->bound[step->kv.dtype](&a);
        for (int i = 0; i < n; i++)
            if (!known(step, item, row, page + i)) row->bound[page + i] = INFINITY;
    }
}

void ekv_page_bounds_at(const ekv_step *step, const ekv_item *item, const ekv_row *row, const int32_t *page, int n, float *bound) {
    const void *boxes[EKV_PAGE_BATCH];
    int32_t first[EKV_PAGE_BATCH], last[EKV_PAGE_BATCH];
    for (int i = 0; i < n; i++) {
        boxes[i] = ekv_index_box(step->index, item->head, ekv_block(item, page[i]));
        page_ends(step, row, page[i], 1, first + i, last + i);
    }
    ekv_bound_args a = {row->q, row->slope, row->q_token, boxes, first, last, n, step->kv.k_dim, bound};
    step->kernels->bound[step->kv.dtype](&a);
    for (int i = 0; i < n; i++)
        if (!known(step, item, row, page[i])) bound[i] = INFINITY;
}

void ekv_page_moments_of(const ekv_step *step, const ekv_item *item, ekv_row *row, int64_t page, int64_t end) {
    for (end = ekv_min64(end, row->pages); page < end; page += EKV_PAGE_BATCH) {
        const int n = (int)ekv_min64(EKV_PAGE_BATCH, end - page);
        const void *moments[EKV_PAGE_BATCH];
        int32_t first[EKV_PAGE_BATCH], last[EKV_PAGE_BATCH];
        for (int i = 0; i < n; i++) moments[i] = ekv_index_moments(step->index, item->head, ekv_block(item, page + i));
        page_ends(step, row, page, n, first, last);
        ekv_gaussian_args a = {row->q, row->slope, row->q_token, moments, first, last, n, step->kv.k_dim, row->mean + page,
                               row->deviation + page};
        step->kernels->gaussian[ekv_moments_dtype(step->kv.dtype)](&a);
        for (int i = 0; i < n; i++)
            if (!known(step, item, row, page + i)) row->mean[page + i] = row->deviation[page + i] = NAN;
    }
}

/* ---- forced pages ---- */

/* The last page, the first pages, the recent window, and pages without statistics. */
static void select_forced(const ekv_step *step, const ekv_item *item, ekv_row *row) {
    const int64_t page_size = step->kv.page_size, pages = row->pages;
    memset(row->selected, 0, (size_t)pages);
    row->selected[pages - 1] = 1;
    for (int64_t page = 0; page < ekv_min64(step->p.first_pages, pages); page++) row->selected[page] = 1;
    const int64_t recent = ekv_max64(0, row->n - (int64_t)step->p.recent_tokens) / page_size;
    if (step->p.recent_tokens > 0) memset(row->selected + recent, 1, (size_t)(pages - recent));
    const float *statistic = step->bounds ? row->bound : row->mean; /* not finite where the page is unknown */
    for (int64_t page = 0; page < pages; page++)
        if (!(statistic[page] < INFINITY) && !known(step, item, row, page)) row->selected[page] = 1;
}

/* ---- topk ---- */

/* A whole number above 0 that orders floats; NaN counts as +infinity, and -0 as 0. */
static uint32_t order_of(float x) {
    uint32_t bits;
    x = x != x ? INFINITY : x + 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

/* The k-th largest of n > 0 numbers, 11, 11 and 10 bits at a time: each pass looks at those alone that share the bits found so far,
 * which move to the front.  *ties: how many numbers of exactly that size belong to the k. */
static uint32_t kth_largest(uint32_t *order, int64_t n, int64_t k, int64_t *ties) {
    static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    uint32_t prefix = 0;
    for (int pass = 0; pass < 3; pass++) {
        int32_t histogram[2048] = {0};
        const int shift = shifts[pass];
        const uint32_t mask = (1u << widths[pass]) - 1u;
        for (int64_t i = 0; i < n; i++) histogram[order[i] >> shift & mask]++;
        uint32_t digit = mask;
        while (digit > 0 && histogram[digit] < k) k -= histogram[digit--];
        prefix |= digit << shift;
        int64_t left = 0;
        for (int64_t i = 0; i < n; i++)
            if ((order[i] >> shift & mask) == digit) order[left++] = order[i];
        n = left;
    }
    *ties = k;
    return prefix;
}

/* Moves numbers that may be among the k largest of n to the front and returns how many: the k-th largest of the maxima of groups is a
 * lower bound of what is looked for. */
static int64_t narrow(uint32_t *order, int64_t n, int64_t k) {
    enum { GROUPS = 1024 };
    uint32_t most[GROUPS], sorted[GROUPS];
    const int64_t size = ekv_ceil_div(n, GROUPS), groups = ekv_ceil_div(n, size);
    int64_t ties, left = 0;
    if (k > groups / 2) return n;
    for (int64_t g = 0; g < groups; g++) {
        uint32_t largest = 0;
        for (int64_t i = g * size; i < ekv_min64(n, (g + 1) * size); i++) largest = order[i] > largest ? order[i] : largest;
        most[g] = sorted[g] = largest;
    }
    const uint32_t floor = kth_largest(sorted, groups, k, &ties);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t i = g * size; most[g] >= floor && i < ekv_min64(n, (g + 1) * size); i++)
            if (order[i] >= floor) order[left++] = order[i];
    return left;
}

static void select_topk(const ekv_step *step, ekv_row *row) {
    const int64_t budget = ekv_max64(1, step->p.budget / step->kv.page_size + (step->p.budget % step->kv.page_size != 0));
    const int32_t pages = row->pages;
    uint8_t *restrict selected = row->selected;
    uint32_t *restrict order = row->order;
    const float *restrict bound = row->bound;
    int64_t k = ekv_min64(budget, pages), ties;
    int32_t forced = 0;
    for (int32_t page = 0; page < pages; page++) {
        selected[page] |= bound[page] == INFINITY; /* a key that is not finite: always read */
        forced += selected[page];
    }
    k -= forced;
    if (k <= 0) return;
    for (int32_t page = 0; page < pages; page++) order[page] = selected[page] ? 0 : order_of(bound[page]);
    const uint32_t cut = kth_largest(order, narrow(order, pages, k), k, &ties);
    for (int32_t page = 0; page < pages && ties > 0; page++) { /* ties go to the lower pages */
        if (selected[page] || order_of(bound[page]) != cut) continue;
        selected[page] = 1;
        ties--;
    }
    for (int32_t page = 0; page < pages; page++) selected[page] |= order_of(bound[page]) > cut;
}

/* ---- gaussian ---- */

double ekv_normal_quantile(double p) {
    double low = -40.0, high = 40.0;
    for (int i = 0; i < 100; i++) { /* 1 - p is kept exact enough by the complementary tail on either side */
        const double x = 0.5 * (low + high);
        const double below = 0.5 * ekv_erfc(-x * 0.7071067811865476);
        const double above = 0.5 * ekv_erfc(x * 0.7071067811865476);
        if (p < 0.5 ? below < p : above > 1.0 - p)
            low = x;
        else
            high = x;
    }
    return 0.5 * (low + high);
}

/* The scores that tau^ is estimated from: a mixture of normals. */
typedef struct mixture {
    float *mean, *deviation, *count; /* [n] */
    int64_t n;
} mixture;

/* E[max(x - tau, 0)^beta] and its slope for any beta, x normal: deviation^beta times the integral of t^beta phi(a + t) over t > 0,
 * a = (tau - mean) / deviation, by the trapezoid rule in log t.  The integrand is log-concave in t with a curvature of at least 1, so
 * nine deviations around its peak hold it; towards 0 it falls like t^(beta + 1) in log t. */
static void quadrature(double mean, double deviation, double beta, double tau, double *value, double *slope) {
    enum { POINTS = 96 };
    const double s = deviation > 1e-9 ? deviation : 1e-9, a = (tau - mean) / s, root = sqrt(a * a + 4.0 * (beta + 1.0));
    const double peak = a > 0.0 ? 2.0 * (beta + 1.0) / (a + root) : 0.5 * (root - a);
    const double least = peak * ekv_exp(-35.0 / (beta + 1.0));
    const double low = ekv_log(peak - 9.0 > least ? peak - 9.0 : least), high = ekv_log(peak + 9.0);
    const double h = (high - low) / (POINTS - 1), scale = beta * ekv_log(s);
    double m0 = 0.0, m1 = 0.0;
    for (int i = 0; i < POINTS; i++) {
        const double log_t = low + h * i, t = ekv_exp(log_t);
        const double f = ekv_exp((beta + 1.0) * log_t + scale - 0.5 * (a + t) * (a + t));
        m0 += f;
        m1 += f / t;
    }
    *value = m0 * h * 0.3989422804014327;
    *slope = beta * m1 * h * 0.3989422804014327 / s;
}

static void mixture_mass(const ekv_step *step, const mixture *m, double beta, double tau, double *value, double *slope) {
    const double whole = floor(beta + 0.5);
    if (fabs(beta - whole) < 1e-12 && whole >= 1.0 && whole <= 3.0) {
        ekv_mass_args a = {m->mean, m->deviation, m->count, m->n, (int)whole, tau, 0.0, 0.0};
        step->kernels->mass(&a);
        *value = a.value;
        *slope = a.slope;
        return;
    }
    *value = *slope = 0.0;
    for (int64_t p = 0; p < m->n; p++) {
        double v, d;
        if (((double)m->mean[p] - tau) < -9.0 * (double)m->deviation[p] - 1e-8) continue; /* less than 1e-19 of its tokens */
        quadrature((double)m->mean[p], (double)m->deviation[p], beta, tau, &v, &d);
        *value += (double)m->count[p] * v;
        *slope += (double)m->count[p] * d;
    }
}

/* Leaves out the pages whose scores stay below `low` (by nine deviations, all but 1e-19 of their mass).  Compacts in place. */
static void prune(mixture *m, double low) {
    int64_t kept = 0;
    for (int64_t p = 0; p < m->n; p++) {
        if (!((double)m->mean[p] + 9.0 * (double)m->deviation[p] > low)) continue;
        m->mean[kept] = m->mean[p];
        m->deviation[kept] = m->deviation[p];
        m->count[kept++] = m->count[p];
    }
    m->n = kept;
}

/* tau^: the mass falls with tau; Newton inside a bracket.  Overwrites the mixture. */
static double estimate_tau(const ekv_step *step, mixture *m, double beta) {
    double best = -(double)INFINITY, high = -(double)INFINITY, value, slope;
    for (int64_t p = 0; p < m->n; p++) {
        const double mean = (double)m->mean[p], reach = mean + 40.0 * (double)m->deviation[p] + 1.0;
        best = mean > best ? mean : best;
        high = reach > high ? reach : high;
    }
    double low = best - 1.0; /* by Jensen's inequality enough for beta >= 1; otherwise, or if rounding decides, lower */
    for (int i = 0; i < 60; i++) {
        mixture_mass(step, m, beta, low, &value, &slope);
        if (value >= 1.0) break;
        low -= 2.0 * (double)(i + 1);
    }
    prune(m, low);
    double tau = low;
    for (int steps = 0; steps < 100; steps++) {
        mixture_mass(step, m, beta, tau, &value, &slope);
        if (value >= 1.0) {
            low = tau;
            if (steps % 4 == 3) prune(m, low);
        } else {
            high = tau;
        }
        /* the norm of the masses is straighter than their sum: (value^(1/beta) - 1) / (d value^(1/beta) / d tau) */
        double next = tau + beta * (value - ekv_pow(value, 1.0 - 1.0 / beta)) / slope;
        if (!(next > low && next < high)) next = low + 0.5 * (high - low);
        if (fabs(next - tau) <= 1e-12 * (1.0 + fabs(tau)) || !(high - low > 1e-12 * (1.0 + fabs(low)))) break;
        tau = next;
    }
    return tau;
}

/* Sums run in eight parts side by side, page p in part p % 8: one alone would wait for each addition. */
static double sum8(const double *sum) { return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7])); }

/* Mean and variance of all scores: the pages' variances plus the variance of their means. */
static void global_normal(const ekv_row *row, double *mean, double *deviation) {
    double total[8] = {0.0}, sum[8] = {0.0}, spread[8] = {0.0};
    for (int32_t p = 0; p < row->pages; p += 8)
        for (int32_t j = 0; j < 8 && p + j < row->pages; j++) {
            total[j] += (double)row->count[p + j];
            sum[j] += (double)row->count[p + j] * (double)row->mean[p + j];
        }
    const double center = sum8(sum) / sum8(total);
    for (int32_t p = 0; p < row->pages; p += 8)
        for (int32_t j = 0; j < 8 && p + j < row->pages; j++) {
            const double c = (double)row->mean[p + j] - center, s = (double)row->deviation[p + j];
            spread[j] += (double)row->count[p + j] * (s * s + c * c);
        }
    *mean = center;
    *deviation = sqrt(sum8(spread) / sum8(total));
}

static bool all_finite(const ekv_row *row) {
    bool finite = true;
    for (int32_t p = 0; p < row->pages; p++) finite &= fabsf(row->mean[p]) < INFINITY && row->deviation[p] < INFINITY;
    return finite;
}

/* How far below tau^ a page may stay. */
static double margin_below(const ekv_step *step, const ekv_row *row, double tau, double deviation) {
    double typical[8] = {0.0};
    const int32_t pages = row->pages - 1;
    for (int32_t p = 0; p < pages; p += 8)
        for (int32_t j = 0; j < 8 && p + j < pages; j++) typical[j] += (double)row->mean[p + j] + 1.5 * (double)row->deviation[p + j];
    const double above = pages > 0 ? tau - sum8(typical) / pages : 0.0;
    const double a = step->p.margin_sigma * deviation, b = step->p.margin_fraction * (above > 0.0 ? above : 0.0);
    return a > b ? a : b;
}

static void select_gaussian(const ekv_step *step, ekv_row *row) {
    if (!all_finite(row)) { /* an unknown or infinite page: no estimate, so read everything */
        memset(row->selected, 1, (size_t)row->pages);
        return;
    }
    for (int32_t p = 0; p < row->pages; p++) row->count[p] = (float)step->kv.page_size;
    row->count[row->pages - 1] = (float)ekv_page_tokens(step, row->n, row->pages - 1);
    double mean, deviation;
    global_normal(row, &mean, &deviation);
    float one_mean = (float)mean, one_deviation = (float)deviation, one_count = (float)row->n;
    const bool single = step->p.gaussian_model == EKV_GAUSSIAN_SINGLE ||
                        (step->p.gaussian_model == EKV_GAUSSIAN_AUTO && row->slope == 0.0f);
    mixture m = {&one_mean, &one_deviation, &one_count, 1};
    if (!single) { /* a copy, which estimate_tau shortens as it goes */
        const size_t bytes = (size_t)row->pages * sizeof(float);
        m = (mixture){row->count + row->pages, row->count + 2 * (int64_t)row->pages, row->count + 3 * (int64_t)row->pages, row->pages};
        memcpy(m.mean, row->mean, bytes);
        memcpy(m.deviation, row->deviation, bytes);
        memcpy(m.count, row->count, bytes);
    }
    const double tau = estimate_tau(step, &m, 1.0 / (row->alpha - 1.0));
    const double cut = tau - margin_below(step, row, tau, deviation);
    for (int32_t p = 0; p < row->pages; p++) {
        const double reach = (double)row->mean[p] + (double)*step->zeta * (double)row->deviation[p];
        if (!(reach <= cut)) row->selected[p] = 1;
    }
}

/* ---- */

static void select_mask(const ekv_step *step, ekv_row *row) {
    const uint8_t *mask = step->p.page_mask + ((int64_t)row->token * step->p.q_heads + row->head) * step->p.page_mask_stride;
    for (int32_t p = 0; p < row->pages; p++) row->selected[p] = mask[p] != 0;
}

/* Pages [begin, end) that the row reads. */
static int32_t count_selected(const ekv_row *row, int32_t begin, int32_t end) {
    int32_t count = 0;
    if (!row->selected) return end - begin;
    for (int32_t p = begin; p < end; p++) count += row->selected[p];
    return count;
}

/* Pages [begin, end) that some row of the item reads; all rows see them. */
static int32_t count_union(const ekv_item *item, int32_t begin, int32_t end) {
    enum { PAGES = 512 };
    int32_t count = 0;
    for (int32_t at = begin; at < end; at += PAGES) {
        const int32_t n = end - at < PAGES ? end - at : PAGES;
        uint8_t any[PAGES] = {0};
        for (int32_t r = 0; r < item->rows; r++) {
            const uint8_t *selected = item->row[r].selected;
            for (int32_t i = 0; i < n; i++) any[i] |= selected ? selected[at + i] : 1;
        }
        for (int32_t i = 0; i < n; i++) count += any[i];
    }
    return count;
}

static void count_reads(const ekv_step *step, ekv_item *item) {
    const int32_t page_size = step->kv.page_size;
    int32_t whole = item->pages; /* pages that all rows see whole */
    for (int32_t r = 0; r < item->rows; r++) {
        ekv_row *row = &item->row[r];
        if (row->pages == 0) {
            whole = 0;
            continue;
        }
        const int32_t last = row->pages - 1;
        row->read_pages = count_selected(row, 0, row->pages);
        row->read_tokens = row->read_pages * page_size;
        if (!row->selected || row->selected[last]) row->read_tokens -= page_size - ekv_page_tokens(step, row->n, last);
        whole = last < whole ? last : whole;
    }
    item->read_pages = count_union(item, 0, whole);
    item->read_tokens = item->read_pages * page_size;
    for (int32_t p = whole; p < item->pages; p++) { /* tokens of the row that sees most of the page */
        int32_t most = 0;
        for (int32_t r = 0; r < item->rows; r++) {
            const ekv_row *row = &item->row[r];
            if (p >= row->pages || (row->selected && !row->selected[p])) continue;
            const int32_t tokens = ekv_page_tokens(step, row->n, p);
            most = tokens > most ? tokens : most;
        }
        item->read_pages += most > 0;
        item->read_tokens += most;
    }
}

void ekv_statistics(const ekv_step *step, ekv_item *item, int32_t span) {
    const int64_t page = ekv_ceil_div((int64_t)span * EKV_SPAN, step->kv.page_size),
                  end = ekv_ceil_div(((int64_t)span + 1) * EKV_SPAN, step->kv.page_size);
    for (int32_t r = 0; r < item->rows; r++) {
        if (step->bounds) ekv_page_bounds_of(step, item, &item->row[r], page, end);
        if (step->moments) ekv_page_moments_of(step, item, &item->row[r], page, end);
    }
    if (step->certified) ekv_certify_bounds(step, item, page, end);
}

void ekv_select_row(const ekv_step *step, ekv_item *item, ekv_row *row) {
    if (!step->sparse || row->pages == 0) return;
    if (step->p.policy == EKV_POLICY_PAGES) {
        select_mask(step, row);
        return;
    }
    select_forced(step, item, row);
    if (step->p.policy == EKV_POLICY_TOPK)
        select_topk(step, row);
    else
        select_gaussian(step, row);
}

void ekv_select_item(const ekv_step *step, ekv_item *item) {
    if (step->certified) {
        ekv_certify_begin(step, item);
        return;
    }
    count_reads(step, item);
    /* report_mass with a policy other than topk reads the boxes of the unread pages only, but looks at all here: count as read
     * what the bound needs. */
    const int64_t boxes = !step->bounds ? 0 : step->p.policy == EKV_POLICY_TOPK ? item->pages : item->pages - item->read_pages;
    const int64_t norms = step->p.report_mass && step->index && step->index->norms && boxes > 0 ? item->pages : 0;
    item->bytes_statistics = boxes * (int64_t)(step->index ? step->index->box_bytes : 0) +
                             (step->moments ? item->pages * (int64_t)step->index->moments_bytes : 0) +
                             norms * (int64_t)sizeof(float);
}
