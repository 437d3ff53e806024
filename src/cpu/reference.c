/*
 * The scalar reference: one row of entmax attention in plain double precision, written to be checked by eye.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Notation as in entmaxkv.h: s is a score, a = alpha - 1, beta = 1 / a, z = a * s; softmax is a = 0, with z = s.
 */
#include "cpu/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Stored elements ---- */

/* IEEE 754 binary16: 1 sign, 5 exponent and 10 fraction bits. */
static double half_to_double(uint16_t bits) {
    const int exponent = (bits >> 10) & 0x1f, fraction = bits & 0x3ff;
    double magnitude;
    if (exponent == 0)
        magnitude = ldexp(fraction, -24); /* zero and subnormals: fraction * 2^-10 * 2^-14 */
    else if (exponent == 31)
        magnitude = fraction ? (double)NAN : (double)INFINITY;
    else
        magnitude = ldexp(1024 + fraction, exponent - 25); /* (1 + fraction * 2^-10) * 2^(exponent - 15) */
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* Elements are copied out rather than dereferenced: nothing is assumed about the caller's alignment. */
double ekv_reference_load(ekv_dtype dtype, const void *row, int64_t i) {
    uint16_t half;
    uint32_t word;
    float value;
    if (dtype == EKV_F32) {
        memcpy(&value, (const char *)row + i * 4, 4);
        return value;
    }
    memcpy(&half, (const char *)row + i * 2, 2);
    if (dtype == EKV_F16)
        return half_to_double(half);
    word = (uint32_t)half << 16; /* a bf16 is the upper half of a float */
    memcpy(&value, &word, 4);
    return value;
}

/* ---- The entmax transform ----
 *
 * tau lies between top - 1 and top - N^(1 - alpha), top = max z, N the total mass.  It is sought as
 *      tau = top - exp(-a * lambda),    hence    p(top) = exp(-lambda),    log(mass at top) <= lambda <= log N,
 * because lambda stays well scaled where tau does not: near alpha = 1 all of 1 - (top - tau) lies in tau's last digits and beta
 * magnifies their error; at alpha = 10 top - tau may be 1e-30.  Softmax is the limit a = 0: tau = top + lambda. */

typedef struct solution {
    double a;
    double top;           /* -infinity if no token can have weight, NaN if a score is NaN or +infinity */
    double lambda, below; /* the end of the bisected interval where the weights sum to less than 1, and the other end */
} solution;

static double alpha_minus_one(double alpha) {
    return alpha < 1 + 1e-7 ? 0 : alpha - 1;
}

static double threshold(const solution *s) {
    return s->a > 0 ? s->top - exp(-s->a * s->lambda) : s->top + s->lambda;
}

/* log p = beta * log(z - tau), -infinity outside the support.  With d = z - top and w = top - tau, z - tau is d + w, taken as
 * 1 + (d + (w - 1)) when w is near 1. */
static double log_weight(const solution *s, double z) {
    const double d = z - s->top, log_w = -s->a * s->lambda;
    double rest;
    if (isnan(s->top))
        return NAN;
    if (z == -INFINITY)
        return -INFINITY;
    if (s->a == 0 || d == 0) /* d = 0 needs no power, and holds even where w underflows */
        return d - s->lambda;
    if (log_w > -0.5) {
        rest = d + expm1(log_w);
        return rest <= -1 ? -INFINITY : log1p(rest) / s->a;
    }
    rest = d + exp(log_w);
    return rest <= 0 ? -INFINITY : log(rest) / s->a;
}

static double mass_of(const double *mass, int64_t i) {
    return mass ? mass[i] : 1;
}

/* max z over tokens that have mass; NaN as soon as one of them is NaN or +infinity. */
static double find_top(const double *z, const double *mass, int64_t n) {
    double top = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (mass_of(mass, i) == 0)
            continue;
        if (isnan(z[i]) || z[i] == INFINITY)
            return NAN;
        top = fmax(top, z[i]);
    }
    return top;
}

/* sum of mass * p */
static double total_weight(const solution *s, const double *z, const double *mass, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (mass_of(mass, i) != 0)
            sum += mass_of(mass, i) * exp(log_weight(s, z[i]));
    return sum;
}

/* The lambda at which the weights sum to 1: bisection until no double is left inside the interval.  The end with a sum below 1
 * is the one that counts, so that a token at exactly tau stays outside the support. */
static void bisect_lambda(solution *s, const double *z, const double *mass, int64_t n) {
    double at_top = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        all += mass_of(mass, i);
        at_top += z[i] == s->top ? mass_of(mass, i) : 0;
    }
    double low = log(at_top), high = log(all);
    s->lambda = low;
    if (total_weight(s, z, mass, n) <= 1) /* the top alone has all weight */
        high = low;
    for (double middle = low + (high - low) / 2; middle > low && middle < high; middle = low + (high - low) / 2) {
        s->lambda = middle;
        if (total_weight(s, z, mass, n) >= 1)
            low = middle;
        else
            high = middle;
    }
    s->lambda = high;
    s->below = low;
}

static solution solve(double alpha, const double *z, const double *mass, int64_t n) {
    solution s = {alpha_minus_one(alpha), find_top(z, mass, n), 0, 0};
    if (!isfinite(s.top))
        return s;
    if (s.a == 0) /* with lambda = 0 the weights are exp(z - top) */
        s.below = s.lambda = log(total_weight(&s, z, mass, n));
    else
        bisect_lambda(&s, z, mass, n);
    return s;
}

/* Writes p, normalised, and returns the size of the support: z > tau, even where p is too small for a double.
 *
 * For alpha > 2 a token that lies within a rounding error of tau may still weigh much (1e-16^(1/9) = 0.017), and the sum jumps
 * from above to below 1 between neighbouring lambdas.  What is missing from 1 then belongs to the tokens that jumped, not to
 * all: weights are interpolated between the two ends.  (Below 1e-13 it is only the rounding of the sum.) */
static int64_t write_weights(const solution *s, const double *z, const double *mass, int64_t n, double *p) {
    const solution other = {s->a, s->top, s->below, s->below};
    const double sum = total_weight(s, z, mass, n), missing = 1 - sum;
    const double jump = total_weight(&other, z, mass, n) - sum;
    const double share = missing > 1e-13 && jump >= missing ? missing / jump : 0;
    int64_t support = 0;
    for (int64_t i = 0; i < n; i++) {
        const int absent = mass_of(mass, i) == 0;
        const double log_p = absent ? -INFINITY : log_weight(s, z[i]);
        double weight = exp(log_p);
        if (share > 0 && !absent)
            weight += share * (exp(log_weight(&other, z[i])) - weight);
        support += weight > 0 || (s->a > 0 && log_p > -INFINITY);
        p[i] = weight == 0 ? 0 : weight / (sum + share * jump);
    }
    return support;
}

double ekv_reference_entmax(double alpha, const double *z, const double *mass, int64_t n, double *p) {
    const solution s = solve(alpha, z, mass, n);
    if (p)
        write_weights(&s, z, mass, n, p);
    return threshold(&s);
}

/* ---- Scores and pages ---- */

/* A page, or a normal distribution that stands for `tokens` scores.  All in units of s. */
typedef struct page {
    double tokens, mean, deviation, bound;
    int64_t first, end; /* its tokens: first <= i < end */
    uint8_t read;
} page;

static double score(const ekv_reference_problem *r, int64_t i) {
    double dot = 0;
    for (int32_t d = 0; d < r->k_dim; d++)
        dot += r->q[d] * ekv_reference_load(r->dtype, r->keys[i], d);
    return r->scale * dot + r->slope * (double)(i - (r->n - 1));
}

/* Least, largest, mean and population variance (two passes) of one dimension of a page's keys. */
static void describe_dimension(const ekv_reference_problem *r, const page *g, int32_t d, double box[2], double moments[2]) {
    double sum = 0, squares = 0;
    box[0] = INFINITY;
    box[1] = -INFINITY;
    for (int64_t i = g->first; i < g->end; i++) {
        const double x = ekv_reference_load(r->dtype, r->keys[i], d);
        box[0] = fmin(box[0], x);
        box[1] = fmax(box[1], x);
        sum += x;
    }
    moments[0] = sum / g->tokens;
    for (int64_t i = g->first; i < g->end; i++) {
        const double x = ekv_reference_load(r->dtype, r->keys[i], d) - moments[0];
        squares += x * x;
    }
    moments[1] = squares / g->tokens;
}

/* bound = sum_d max(q'_d min_d, q'_d max_d) + slope * (best position), q' = scale * q (whose sign decides which end counts);
 * mean = q' . mean_d + slope * (mean position); deviation^2 = sum_d q'_d^2 variance_d, without the spread of positions. */
static void describe_page(const ekv_reference_problem *r, page *g) {
    const double query = (double)(r->n - 1), first = (double)g->first - query, last = (double)(g->end - 1) - query;
    double variance = 0;
    int finite = 1;
    g->bound = r->slope * (r->slope > 0 ? last : first);
    g->mean = r->slope * (first + last) / 2;
    for (int32_t d = 0; d < r->k_dim; d++) {
        const double q = r->scale * r->q[d];
        double box[2], moments[2];
        describe_dimension(r, g, d, box, moments);
        g->bound += fmax(q * box[0], q * box[1]);
        g->mean += q * moments[0];
        variance += q * q * moments[1];
        finite = finite && isfinite(q) && isfinite(moments[0]); /* fmin and fmax skip a NaN, the mean does not */
    }
    g->deviation = sqrt(variance);
    if (!finite)
        g->bound = INFINITY;
}

static void describe_pages(const ekv_reference_problem *r, page *pages, int64_t count) {
    for (int64_t p = 0; p < count; p++) {
        page *g = &pages[p];
        g->first = p * r->page_size;
        g->end = p == count - 1 ? r->n : g->first + r->page_size;
        g->tokens = (double)(g->end - g->first);
        describe_page(r, g);
    }
}

/* ---- Selection: full, pages, topk ---- */

static int is_forced(const ekv_reference_problem *r, const page *pages, int64_t count, int64_t p) {
    return p == count - 1 || p < r->first_pages || pages[p].end > r->n - r->recent_tokens;
}

/* Quest's criterion: pages by falling bound until the budget is used up.  Forced pages, already marked, count. */
static void select_topk(const ekv_reference_problem *r, page *pages, int64_t count) {
    int64_t wanted = r->budget > 0 ? r->budget / r->page_size + (r->budget % r->page_size != 0) : 1;
    for (int64_t p = 0; p < count; p++) {
        pages[p].read |= pages[p].bound == INFINITY; /* a key that is not finite: always read */
        wanted -= pages[p].read;
    }
    for (; wanted > 0; wanted--) {
        page *best = NULL;
        for (int64_t p = 0; p < count; p++)
            if (!pages[p].read && (!best || pages[p].bound > best->bound)) /* a tie leaves the lower index */
                best = &pages[p];
        if (!best)
            return;
        best->read = 1;
    }
}

/* ---- Selection: gaussian ---- */

/* E[max(x, 0)^beta] for x normal with mean `gap` and deviation sigma, by the trapezoidal rule.
 *
 * With x = sigma * y, y = peak * e^v the integral over all v of peak / sqrt(2 pi) * exp(h(v)) has
 *      h(v) = beta log(sigma y) + v - (y - gap / sigma)^2 / 2,
 * which is smooth even at x = 0 and has one maximum, at v = 0 if peak solves peak * (peak - gap / sigma) = beta + 1; there
 * h'' = -(peak^2 + beta + 1).  On such a function the rule converges exponentially: steps of an eighth of the width give
 * all digits.  Summation goes outward from the maximum until terms no longer count. */
static double expected_power(double beta, double gap, double sigma) {
    if (sigma == 0)
        return gap > 0 ? pow(gap, beta) : 0;
    const double root = hypot(gap, 2 * sigma * sqrt(beta + 1));
    const double reach = gap > 0 ? (gap + root) / 2 : (beta + 1) * sigma * (2 * sigma / (root - gap)); /* sigma * peak */
    const double peak = reach / sigma, centre = (beta + 1) / peak; /* centre = peak - gap / sigma, without cancellation */
    const double step = 1 / (8 * hypot(peak, sqrt(beta + 1)));
    double sum = 0;
    for (int side = -1; side <= 1; side += 2) {
        double term = INFINITY;
        for (int64_t j = side < 0 ? -1 : 0; j == 0 || term > 1e-18 * sum; j += side) {
            const double v = (double)j * step, y = centre + peak * expm1(v); /* y: in deviations from the mean */
            term = exp(beta * log(reach) + (beta + 1) * v - y * y / 2);
            sum += term;
        }
    }
    return peak * step * sum / sqrt(2 * acos(-1));
}

/* Solves sum_p n_p E[max(z - tau, 0)^beta] = 1 for z normal per page; NaN if a moment is not finite. */
static double estimate_tau(double a, const page *pages, int64_t count) {
    double top = -INFINITY;
    for (int64_t p = 0; p < count; p++) {
        if (!isfinite(pages[p].mean) || !isfinite(pages[p].deviation))
            return NAN;
        top = fmax(top, a * pages[p].mean);
    }
    /* tau is sought relative to top.  At -1 the sum is at least 1: either the top page has deviation 0, or it has two tokens or
     * more and half of its mass lies above its mean. */
    double low = -1, high = INFINITY;
    for (double t = 1; t > low && t < high; t = isinf(high) ? 2 * t : low + (high - low) / 2) {
        double sum = 0;
        for (int64_t p = 0; p < count; p++)
            sum += pages[p].tokens * expected_power(1 / a, (a * pages[p].mean - top) - t, a * pages[p].deviation);
        if (sum >= 1)
            low = t;
        else
            high = t;
    }
    return top + high;
}

/* x with upper tail Phi(-x) = tail, for tail <= 1/2 (where erfc keeps its relative precision). */
static double tail_quantile(double tail) {
    double low = 0, high = 40;
    for (double x = 20; x > low && x < high; x = low + (high - low) / 2) {
        if (erfc(x / sqrt(2)) / 2 > tail)
            low = x;
        else
            high = x;
    }
    return high;
}

/* zeta = Phi^-1(quantile^(1/tokens)): the quantile of the largest of that many normal variables, in deviations. */
static double largest_quantile(double quantile, double tokens) {
    const double below = exp(log(quantile) / tokens), above = -expm1(log(quantile) / tokens);
    return above <= 0.5 ? tail_quantile(above) : -tail_quantile(below);
}

/* All scores as one normal: token-weighted mean of the means; mean of the variances plus variance of the means. */
static page pool_pages(const ekv_reference_problem *r, const page *pages, int64_t count) {
    page all = {0};
    double variance = 0;
    all.tokens = (double)r->n;
    for (int64_t p = 0; p < count; p++)
        all.mean += pages[p].tokens * pages[p].mean / all.tokens;
    for (int64_t p = 0; p < count; p++) {
        const double apart = pages[p].mean - all.mean;
        variance += pages[p].tokens * (pages[p].deviation * pages[p].deviation + apart * apart) / all.tokens;
    }
    all.deviation = sqrt(variance);
    return all;
}

/* tau's distance (in s) above the typical page, mean_p(mu_p + 1.5 sigma_p) over all pages but the last. */
static double distance_above_pages(double tau, const page *pages, int64_t count) {
    double sum = 0;
    if (count < 2)
        return 0;
    for (int64_t p = 0; p < count - 1; p++)
        sum += pages[p].mean + 1.5 * pages[p].deviation;
    return fmax(tau - sum / (double)(count - 1), 0);
}

/* tau - Delta: what a page's quantile must exceed, in units of z. */
static double gaussian_cut(const ekv_reference_problem *r, const page *pages, int64_t count) {
    const double a = alpha_minus_one(r->alpha);
    const page all = pool_pages(r, pages, count);
    const int single = r->gaussian_model == EKV_GAUSSIAN_SINGLE || (r->gaussian_model == EKV_GAUSSIAN_AUTO && r->slope == 0);
    const double tau = single ? estimate_tau(a, &all, 1) : estimate_tau(a, pages, count);
    const double above = distance_above_pages(tau / a, pages, count);
    return tau - a * fmax(r->margin_sigma * all.deviation, r->margin_fraction * above);
}

/* a * (mu_p + zeta_p sigma_p), zeta for the page's number of tokens. */
static double page_quantile(const ekv_reference_problem *r, const page *g) {
    return alpha_minus_one(r->alpha) * (g->mean + largest_quantile(r->quantile, g->tokens) * g->deviation);
}

/* Keep page p if a * (mu_p + zeta_p sigma_p) > tau - Delta.  NaN on either side keeps it. */
static void select_gaussian(const ekv_reference_problem *r, page *pages, int64_t count) {
    const double cut = gaussian_cut(r, pages, count);
    for (int64_t p = 0; p < count; p++)
        if (!(page_quantile(r, &pages[p]) <= cut))
            pages[p].read = 1;
}

int ekv_reference_leads(const ekv_reference_problem *problem, const double *mean, const double *deviation, double *lead) {
    const int64_t count = problem->n / problem->page_size + (problem->n % problem->page_size != 0);
    page *pages = calloc((size_t)count + 1, sizeof(page));
    if (!pages)
        return -1;
    for (int64_t p = 0; p < count; p++) {
        const int64_t left = problem->n - p * problem->page_size;
        pages[p] = (page){.tokens = (double)(left < problem->page_size ? left : problem->page_size), .mean = mean[p],
                          .deviation = deviation[p]};
    }
    const double cut = gaussian_cut(problem, pages, count);
    for (int64_t p = 0; p < count; p++)
        lead[p] = page_quantile(problem, &pages[p]) - cut;
    free(pages);
    return 0;
}

static void select_pages(const ekv_reference_problem *r, page *pages, int64_t count) {
    for (int64_t p = 0; p < count; p++) {
        if (r->policy == EKV_POLICY_PAGES)
            pages[p].read = r->page_mask[p] != 0;
        else
            pages[p].read = r->policy == EKV_POLICY_FULL || is_forced(r, pages, count, p);
    }
    if (r->policy == EKV_POLICY_TOPK)
        select_topk(r, pages, count);
    if (r->policy == EKV_POLICY_GAUSSIAN && count > 0)
        select_gaussian(r, pages, count);
}

/* ---- A row ----
 *
 * z and mass hold n tokens and after them one entry per page: the page's bound in z units, with mass = its tokens if it is
 * unread.  A token that was not read has mass 0.  The first n entries are thus the row over what was read, and all of them the
 * joint problem of E: read tokens at their scores, unread tokens at their bounds. */

typedef struct workspace {
    double *z, *mass, *p;
    page *pages;
    int64_t count; /* of pages */
} workspace;

static void pose(const ekv_reference_problem *r, workspace *w) {
    const double a = alpha_minus_one(r->alpha), unit = a > 0 ? a : 1;
    for (int64_t p = 0; p < w->count; p++) {
        const page *g = &w->pages[p];
        for (int64_t i = g->first; i < g->end; i++) {
            w->z[i] = unit * score(r, i);
            w->mass[i] = g->read;
        }
        w->z[r->n + p] = unit * g->bound;
        w->mass[r->n + p] = g->read ? 0 : g->tokens;
    }
}

/* delta, and tau of all tokens. */
static void compare_with_full(const ekv_reference_problem *r, workspace *w, ekv_reference_result *result) {
    result->tau_full = ekv_reference_entmax(r->alpha, w->z, NULL, r->n, w->p);
    result->delta = 0;
    for (int64_t i = 0; i < r->n; i++)
        result->delta += w->mass[i] == 0 ? w->p[i] : 0;
}

/* E, the unread pages' share of the joint problem.  An unread bound of +infinity takes everything. */
static double joint_share(const ekv_reference_problem *r, workspace *w, double tau) {
    double share = 0;
    int64_t unread = 0;
    for (int64_t p = 0; p < w->count; p++) {
        unread += !w->pages[p].read;
        if (!w->pages[p].read && w->pages[p].bound == INFINITY && !isnan(tau))
            return 1;
    }
    if (unread == 0)
        return 0;
    ekv_reference_entmax(r->alpha, w->z, w->mass, r->n + w->count, w->p);
    for (int64_t i = r->n; i < r->n + w->count; i++)
        share += w->mass[i] * w->p[i];
    return share;
}

/* sum p_i v_i; values without weight are skipped, so that a NaN among them does no harm. */
static void write_output(const ekv_reference_problem *r, const double *p, double *out) {
    for (int32_t d = 0; d < r->v_dim; d++) {
        out[d] = 0;
        for (int64_t i = 0; i < r->n; i++)
            if (p[i] != 0)
                out[d] += p[i] * ekv_reference_load(r->dtype, r->values[i], d);
    }
}

/* The largest norm of a value; as in any bound a NaN counts as +infinity. */
static double largest_value_norm(const ekv_reference_problem *r) {
    double largest = 0;
    for (int64_t i = 0; i < r->n; i++) {
        double squares = 0;
        for (int32_t d = 0; d < r->v_dim; d++) {
            const double x = ekv_reference_load(r->dtype, r->values[i], d);
            squares += x * x;
        }
        largest = fmax(largest, isnan(squares) ? (double)INFINITY : sqrt(squares));
    }
    return largest;
}

static void copy(double *to, const double *from, int64_t n) {
    for (int64_t i = 0; to && i < n; i++)
        to[i] = from[i];
}

static void copy_pages(const workspace *w, ekv_reference_result *result) {
    for (int64_t p = 0; p < w->count; p++) {
        if (result->pages)
            result->pages[p] = w->pages[p].read;
        if (result->page_bound)
            result->page_bound[p] = w->pages[p].bound;
        if (result->page_mean)
            result->page_mean[p] = w->pages[p].mean;
        if (result->page_deviation)
            result->page_deviation[p] = w->pages[p].deviation;
    }
}

static void solve_row(const ekv_reference_problem *r, workspace *w, ekv_reference_result *result) {
    describe_pages(r, w->pages, w->count);
    select_pages(r, w->pages, w->count);
    copy_pages(w, result);

    pose(r, w);
    const solution read = solve(r->alpha, w->z, w->mass, r->n);
    result->tau = threshold(&read);
    result->support = write_weights(&read, w->z, w->mass, r->n, w->p);
    copy(result->z, w->z, r->n);
    copy(result->p, w->p, r->n);
    if (result->out)
        write_output(r, w->p, result->out);

    compare_with_full(r, w, result);
    result->mass_bound = joint_share(r, w, result->tau);
    result->value_norm = largest_value_norm(r);
}

int ekv_reference_row(const ekv_reference_problem *problem, ekv_reference_result *result) {
    const int64_t count = problem->n / problem->page_size + (problem->n % problem->page_size != 0);
    const size_t entries = (size_t)problem->n + (size_t)count + 1; /* + 1: malloc(0) may return NULL */
    double *memory = malloc(3 * entries * sizeof(double));
    page *pages = malloc(((size_t)count + 1) * sizeof(page));
    const int ok = memory && pages;
    if (ok) {
        workspace w = {memory, memory + entries, memory + 2 * entries, pages, count};
        solve_row(problem, &w, result);
    }
    free(memory);
    free(pages);
    return ok ? 0 : -1;
}
