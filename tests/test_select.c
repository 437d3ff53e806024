/*
 * Which pages the policies read: page bounds and moments against the reference, top-k against its own and the reference's
 * bounds, gaussian against an independent solve of its equation, forced pages, budgets, and pages that the index does not know.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t all_statistics = EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS;

/* Rows of the last query token of each sequence see all of it, so that index and reference describe the same tokens. */
static bool sees_everything(const problem *p, int64_t row, int64_t *n) {
    int32_t b;
    problem_locate(p, (int32_t)(row / p->q_heads), &b, n);
    return *n == p->shape.lengths[b];
}

static guard page_floats(const problem *p) {
    guard g = guard_alloc((size_t)(p->rows * problem_stride(p)) * sizeof(float));
    memset(g.data, POISON, g.size);
    return g;
}

static void check_past_the_end(const problem *p, const guard *g) {
    const float *entry = g->data;
    for (int64_t row = 0; row < p->rows; row++, entry += problem_stride(p)) {
        int64_t n;
        sees_everything(p, row, &n);
        const int64_t pages = pages_of(p, n);
        EXPECT(is_poison(entry + pages, (size_t)(problem_stride(p) - pages) * sizeof(float)),
               "row %lld: entries past its pages", (long long)row);
    }
}

/* ---- Bounds and moments ----------------------------------------------------------------------------------------------- */

/*
 * The bound of a page is at least the exact box bound (whatever the box holds, and the f32 sum of up to k_dim products with
 * it), and above it by no more than summation slack: (2 k_dim + 64) units of 2^-24 of the sum of absolute products.
 */
static void check_bounds_row(const problem *p, const oracle *o, const float *bounds, const char *who) {
    for (int64_t page = 0; page < o->pages; page++) {
        const double exact = o->page_bound[page], room = (2.0 * p->shape.k_dim + 64) * 0x1p-24 * o->page_size_of_sum[page];
        EXPECT(bounds[page] >= exact - 1e-14 * o->page_size_of_sum[page], "%s: bound of page %lld is %.9g, exact %.17g", who,
               (long long)page, bounds[page], exact);
        EXPECT(bounds[page] <= exact + room + 1e-34 * p->shape.k_dim, "%s: bound of page %lld is %.9g, exact %.9g, room %.3g",
               who, (long long)page, bounds[page], exact, room);
    }
}

/* Moments are kept in f16 for f16 keys, else in f32: half an ulp of each entry, and the summation of f32. */
static void check_moments_row(const problem *p, const oracle *o, const float *mean, const float *deviation, const char *who) {
    const bool narrow = p->shape.dtype == EKV_F16;
    const double stored = narrow ? 0x1p-11 : 0x1p-24, summed = (p->shape.k_dim + 64) * 0x1p-24;
    for (int64_t page = 0; page < o->pages; page++) {
        const double size = o->page_size_of_sum[page];
        const double mean_room = (stored + summed) * size + (narrow ? 0x1p-25 * size : 0);
        /* a deviation of 0 may be the square root of a rounding error of the mean of equal keys: none with two passes */
        const double deviation_room = (2 * stored + summed) * o->page_deviation[page] + (narrow ? 0x1p-14 : 4e-7) * size;
        EXPECT(fabs(mean[page] - o->page_mean[page]) <= mean_room + 1e-36,
               "%s: mean of page %lld is %.9g, exact %.9g, room %.3g", who, (long long)page, mean[page], o->page_mean[page],
               mean_room);
        EXPECT(fabs(deviation[page] - o->page_deviation[page]) <= deviation_room + 1e-36,
               "%s: deviation of page %lld is %.9g, exact %.9g, room %.3g", who, (long long)page, deviation[page],
               o->page_deviation[page], deviation_room);
    }
}

START_TEST(bounds_and_moments) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 500) {
        rng r = case_begin("bounds_and_moments", index);
        shape s = shape_random(&r, 900);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        FOR_BACKENDS(b, &backends, &p) {
            ekv_context *context = backends.contexts[b];
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_index(&p, context, all_statistics);
            guard bounds = page_floats(&p), mean = page_floats(&p), deviation = page_floats(&p);
            EXPECT_OK(context, ekv_page_bounds(context, &p.step, bounds.data, problem_stride(&p)));
            EXPECT_OK(context, ekv_page_moments(context, &p.step, mean.data, deviation.data, problem_stride(&p)));
            check_past_the_end(&p, &bounds);
            check_past_the_end(&p, &mean);
            check_past_the_end(&p, &deviation);
            const int64_t step = 1 + p.rows / 24;
            for (int64_t row = rng_between(&r, 0, step - 1); row < p.rows; row += step) {
                int64_t n;
                if (sees_everything(&p, row, &n) && n > 0) {
                    const int64_t at = row * problem_stride(&p);
                    oracle o;
                    oracle_make(&o, &p, (int32_t)(row / p.q_heads), (int32_t)(row % p.q_heads), NULL);
                    check_bounds_row(&p, &o, (float *)bounds.data + at, backends.names[b]);
                    check_moments_row(&p, &o, (float *)mean.data + at, (float *)deviation.data + at, backends.names[b]);
                    oracle_free(&o);
                }
            }
            guard_free(&bounds);
            guard_free(&mean);
            guard_free(&deviation);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Forced pages ----------------------------------------------------------------------------------------------------- */

static bool is_forced(const problem *p, int64_t page, int64_t n) {
    const int64_t pages = pages_of(p, n), recent = p->step.recent_tokens;
    const int64_t from = recent > 0 ? (n - recent > 0 ? n - recent : 0) / p->shape.page_size : pages - 1;
    return page < p->step.first_pages || page >= from || page == pages - 1;
}

static int64_t forced_count(const problem *p, int64_t n) {
    int64_t count = 0;
    for (int64_t page = 0; page < pages_of(p, n); page++) {
        count += is_forced(p, page, n);
    }
    return count;
}

static int64_t check_forced(const problem *p, const uint8_t *selected, int64_t n, const char *who) {
    int64_t count = 0;
    for (int64_t page = 0; page < pages_of(p, n); page++) {
        EXPECT(!is_forced(p, page, n) || selected[page], "%s: page %lld of %lld is forced and was not selected", who,
               (long long)page, (long long)pages_of(p, n));
        count += selected[page];
    }
    return count;
}

/* ---- Top-k ------------------------------------------------------------------------------------------------------------ */

static int64_t topk_count(const problem *p, int64_t n) {
    const int64_t pages = pages_of(p, n), forced = forced_count(p, n), size = p->shape.page_size;
    int64_t k = p->step.budget < 1 ? 1 : p->step.budget / size + (p->step.budget % size != 0); /* no overflow near the top */
    k = k < pages ? k : pages;
    return k > forced ? k : forced;
}

/* No page left out has a larger bound than one taken, unless that one is forced; among equals the lower index is taken. */
static void check_topk_order(const problem *p, const uint8_t *selected, const float *bounds, int64_t n, bool ties,
                             const char *who) {
    double least = INFINITY, most = -INFINITY;
    int64_t last_least = -1, first_most = -1;
    for (int64_t page = 0; page < pages_of(p, n); page++) {
        if (selected[page] && !is_forced(p, page, n) && bounds[page] <= least) {
            least = bounds[page];
            last_least = page;
        }
        if (!selected[page] && bounds[page] > most) {
            most = bounds[page];
            first_most = page;
        }
    }
    EXPECT(least > most || (least == most && (!ties || last_least < first_most)) || last_least < 0 || first_most < 0,
           "%s: page %lld with bound %.9g was taken, page %lld with %.9g was not", who, (long long)last_least, least,
           (long long)first_most, most);
}

/* The reference's choice, but for pages whose exact bound lies within rounding of the cut. */
static void check_topk_reference(const problem *p, const oracle *o, const uint8_t *selected, const char *who) {
    double cut = INFINITY, room = 0;
    for (int64_t page = 0; page < o->pages; page++) {
        if (o->pages_read[page] && !is_forced(p, page, o->n)) {
            cut = fmin(cut, o->page_bound[page]);
        }
        room = fmax(room, (2.0 * p->shape.k_dim + 64) * 0x1p-24 * o->page_size_of_sum[page]);
    }
    for (int64_t page = 0; page < o->pages; page++) {
        EXPECT(selected[page] == o->pages_read[page] || fabs(o->page_bound[page] - cut) <= room,
               "%s: page %lld of %lld, bound %.9g, cut %.9g: %s, by the reference %s", who, (long long)page,
               (long long)o->pages, o->page_bound[page], cut, selected[page] ? "taken" : "left",
               o->pages_read[page] ? "taken" : "left");
    }
}

static void check_topk(problem *p, ekv_context *context, bool reference, const char *who, rng *r) {
    problem_index(p, context, EKV_STATISTICS_BOX);
    guard bounds = page_floats(p), selected = problem_select(p, context);
    EXPECT_OK(context, ekv_page_bounds(context, &p->step, bounds.data, problem_stride(p)));
    const int64_t sample = 1 + p->rows / 16;
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t n;
        const bool all = sees_everything(p, row, &n);
        const uint8_t *chosen = (uint8_t *)selected.data + row * problem_stride(p);
        const int64_t count = check_forced(p, chosen, n, who);
        EXPECT(n == 0 || count == topk_count(p, n), "%s: %lld pages selected, expected %lld", who, (long long)count,
               (long long)topk_count(p, n));
        check_topk_order(p, chosen, (float *)bounds.data + row * problem_stride(p), n, !reference, who);
        if (all && n > 0 && rng_between(r, 0, sample - 1) == 0) {
            oracle o;
            oracle_make(&o, p, (int32_t)(row / p->q_heads), (int32_t)(row % p->q_heads), NULL);
            check_topk_reference(p, &o, chosen, who);
            oracle_free(&o);
        }
    }
    guard_free(&bounds);
    guard_free(&selected);
}

START_TEST(topk) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 600) {
        rng r = case_begin("topk", index);
        shape s = shape_random(&r, 1500);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, EKV_POLICY_TOPK);
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            check_topk(&p, backends.contexts[b], backend_is_reference(&backends, b), backends.names[b], &r);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* Budgets past both ends are clamped, never an error; all pages within the budget means the full result. */
START_TEST(budgets_are_clamped) {
    static const int64_t budgets[] = {0, 1, 15, 16, 17, 1 << 20, INT64_MAX - 8, INT64_MAX};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 60) {
        rng r = case_begin("budgets_are_clamped", index);
        shape s = shape_random(&r, 600);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        FOR_BACKENDS(b, &backends, &p) {
            ekv_context *context = backends.contexts[b];
            problem_decode(&p, context);
            size_t bytes;
            unsigned char *full = problem_copy_out(&p, &bytes);
            p.step.policy = EKV_POLICY_TOPK;
            for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
                p.step.budget = budgets[i];
                case_note("%s: %s", backends.names[b], problem_describe(&p));
                check_topk(&p, context, backend_is_reference(&backends, b), backends.names[b], &r);
                problem_decode(&p, context);
                if (budgets[i] >= 1 << 20) {
                    unsigned char *out = problem_copy_out(&p, &bytes);
                    EXPECT(memcmp(out, full, bytes) == 0, "budget %lld covers everything and differs from full",
                           (long long)budgets[i]);
                    free(out);
                }
            }
            p.step.policy = EKV_POLICY_FULL;
            free(full);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* A negative budget is clamped too: one page, and what is forced. */
START_TEST(negative_budgets_are_clamped) {
    static const int64_t budgets[] = {INT64_MIN, -1};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 20) {
        rng r = case_begin("negative_budgets_are_clamped", index);
        shape s = shape_random(&r, 300);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_policy(&p, &r, EKV_POLICY_TOPK);
        p.step.budget = budgets[index % 2];
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            check_topk(&p, backends.contexts[b], backend_is_reference(&backends, b), backends.names[b], &r);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* Forced pages of any number, past both ends too. */
START_TEST(forced_pages) {
    static const int32_t counts[] = {0, 1, 2, 5, 1000, INT32_MAX};
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 72 * 3) {
        rng r = case_begin("forced_pages", index);
        shape s = shape_random(&r, 400);
        s.content = CONTENT_PEAKED;
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, policies[index % 2]);
        p.step.budget = 1;
        p.step.first_pages = counts[index / 2 % 6];
        p.step.recent_tokens = counts[index / 12 % 6];
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_index(&p, backends.contexts[b], all_statistics);
            guard selected = problem_select(&p, backends.contexts[b]);
            problem_decode(&p, backends.contexts[b]);
            for (int64_t row = 0; row < p.rows; row++) {
                int64_t n;
                sees_everything(&p, row, &n);
                const int64_t count =
                    check_forced(&p, (uint8_t *)selected.data + row * problem_stride(&p), n, backends.names[b]);
                const int64_t reported = ((const ekv_report *)p.report.data)[row].pages;
                EXPECT(reported == count, "row %lld: %lld pages reported, %lld selected", (long long)row, (long long)reported,
                       (long long)count);
            }
            guard_free(&selected);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Gaussian --------------------------------------------------------------------------------------------------------- */

/* E[max(X - t, 0)^beta] of a standard normal X: Gauss-Legendre in w with x = t + w^2, which is smooth for any beta. */
static double truncated_moment(double t, double beta) {
    static const double node[] = {0.1252334085114689, 0.3678314989981802, 0.5873179542866175,
                                  0.7699026741943047, 0.9041172563704749, 0.9815606342467193};
    static const double weight[] = {0.2491470458134028, 0.2334925365383548, 0.2031674267230659,
                                    0.1600783285433462, 0.1069393259953184, 0.0471753363865118};
    const double low = t < -9.5 ? -9.5 - t : 0, high = 9.5 - t;
    if (high <= 0) {
        return 0;
    }
    const int panels = 12;
    const double first = sqrt(low), width = (sqrt(high) - first) / panels;
    double sum = 0;
    for (int i = 0; i < panels; i++) {
        for (int k = 0; k < 12; k++) {
            const double w = first + width * (i + 0.5 * (1 + (k < 6 ? -node[k] : node[k - 6])));
            const double x = t + w * w;
            sum += weight[k % 6] * 2 * w * pow(w, 2 * beta) * exp(-0.5 * x * x);
        }
    }
    return sum * width / 2 / sqrt(6.283185307179586);
}

/* x with P(X > x) = u. */
static double upper_quantile(double u) {
    double low = -40, high = 40;
    for (int i = 0; i < 200; i++) {
        const double middle = (low + high) / 2;
        if (0.5 * erfc(middle / sqrt(2.0)) > u) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

typedef struct gaussian_row {
    const problem *p;
    int64_t n, pages;
    double alpha;
    bool mixture;
    const double *mean, *deviation; /* of s */
    double global_mean, global_deviation;
} gaussian_row;

static double page_tokens(const gaussian_row *g, int64_t page) {
    const int64_t size = g->p->shape.page_size;
    return (double)(page + 1 < g->pages ? size : g->n - page * size);
}

static void global_moments(gaussian_row *g) {
    double sum = 0, square = 0, within = 0;
    for (int64_t page = 0; page < g->pages; page++) {
        sum += page_tokens(g, page) * g->mean[page];
    }
    g->global_mean = sum / (double)g->n;
    for (int64_t page = 0; page < g->pages; page++) {
        const double off = g->mean[page] - g->global_mean;
        square += page_tokens(g, page) * off * off;
        within += page_tokens(g, page) * g->deviation[page] * g->deviation[page];
    }
    g->global_deviation = sqrt((square + within) / (double)g->n);
}

static double one_term(const gaussian_row *g, double count, double mean, double deviation, double tau) {
    const double beta = 1 / (g->alpha - 1), m = (g->alpha - 1) * mean, s = (g->alpha - 1) * deviation;
    if (s < 1e-9 * fmax(1, fabs(m))) {
        return count * pow(fmax(m - tau, 0), beta);
    }
    return count * pow(s, beta) * truncated_moment((tau - m) / s, beta);
}

static double expected_sum(const gaussian_row *g, double tau) {
    if (!g->mixture) {
        return one_term(g, (double)g->n, g->global_mean, g->global_deviation, tau);
    }
    double sum = 0;
    for (int64_t page = 0; page < g->pages; page++) {
        sum += one_term(g, page_tokens(g, page), g->mean[page], g->deviation[page], tau);
    }
    return sum;
}

static double solve_tau(const gaussian_row *g) {
    double top = g->global_mean + 10 * g->global_deviation;
    for (int64_t page = 0; g->mixture && page < g->pages; page++) {
        top = fmax(top, g->mean[page] + 10 * g->deviation[page]);
    }
    double low = (g->alpha - 1) * g->global_mean - 1, high = (g->alpha - 1) * top;
    while (expected_sum(g, low) < 1) {
        low -= 1;
    }
    double at_low = log(expected_sum(g, low)), at_high = -700;
    for (int i = 0; i < 200 && high - low > 1e-11 * fmax(1, fabs(high)); i++) { /* Illinois on the logarithm, kept inside */
        double middle = i % 3 == 2 ? (low + high) / 2 : low + (high - low) * at_low / (at_low - at_high);
        const double value = log(fmax(expected_sum(g, middle), 1e-300));
        if (value > 0) {
            low = middle, at_low = value, at_high /= 2;
        } else {
            high = middle, at_high = value, at_low /= 2;
        }
    }
    return (low + high) / 2;
}

/* Keep page if lead[page] > 0: (alpha-1)(mu + zeta sigma) - (tau - margin). */
static void gaussian_leads(gaussian_row *g, double *lead) {
    const ekv_decode_params *step = &g->p->step;
    global_moments(g);
    const double tau = solve_tau(g), factor = g->alpha - 1;
    double typical = 0;
    for (int64_t page = 0; page + 1 < g->pages; page++) {
        typical += g->mean[page] + 1.5 * g->deviation[page];
    }
    typical = g->pages > 1 ? typical / (double)(g->pages - 1) : 0;
    const double fraction = g->pages > 1 ? step->margin_fraction * fmax(tau / factor - typical, 0) : 0;
    const double margin = factor * fmax(step->margin_sigma * g->global_deviation, fraction);
    for (int64_t page = 0; page < g->pages; page++) {
        const double zeta = upper_quantile(-expm1(log(step->quantile) / page_tokens(g, page)));
        lead[page] = factor * (g->mean[page] + zeta * g->deviation[page]) - (tau - margin);
    }
}

static void check_gaussian_row(gaussian_row *g, const uint8_t *selected, double room, const char *who) {
    double *lead = calloc((size_t)g->pages + 1, sizeof *lead);
    gaussian_leads(g, lead);
    for (int64_t page = 0; page < g->pages; page++) {
        const bool kept = lead[page] > 0 || is_forced(g->p, page, g->n);
        EXPECT(selected[page] == kept || fabs(lead[page]) <= room, "%s: page %lld of %lld leads by %.6g (%s model): %s", who,
               (long long)page, (long long)g->pages, lead[page], g->mixture ? "mixture" : "single",
               selected[page] ? "taken" : "left");
    }
    free(lead);
}

static void gaussian_start(gaussian_row *g, const problem *p, int64_t row, const double *mean, const double *deviation) {
    const int32_t head = (int32_t)(row % p->q_heads);
    int32_t b;
    memset(g, 0, sizeof *g);
    g->p = p;
    problem_locate(p, (int32_t)(row / p->q_heads), &b, &g->n);
    g->pages = pages_of(p, g->n);
    g->alpha = problem_alpha(p, head);
    g->mixture = p->step.gaussian_model == EKV_GAUSSIAN_MIXTURE ||
                 (p->step.gaussian_model == EKV_GAUSSIAN_AUTO && problem_slope(p, head) != 0);
    g->mean = mean;
    g->deviation = deviation;
}

/* The backend's choice from its own moments; f32 in places: 1e-5 of the largest score that enters. */
static void check_gaussian_backend(const problem *p, int64_t row, const float *mean, const float *deviation,
                                   const uint8_t *selected, const char *who) {
    gaussian_row g;
    double *moments = calloc((size_t)problem_stride(p) * 2, sizeof *moments), *spread = moments + problem_stride(p), size = 1;
    gaussian_start(&g, p, row, moments, spread);
    for (int64_t page = 0; page < g.pages; page++) {
        moments[page] = mean[page];
        spread[page] = deviation[page];
        size = fmax(size, (g.alpha - 1) * (fabs(moments[page]) + 4 * spread[page]));
    }
    check_gaussian_row(&g, selected, 1e-5 * size, who);
    free(moments);
}

static void check_gaussian_reference(const problem *p, int64_t row) {
    oracle o;
    oracle_make(&o, p, (int32_t)(row / p->q_heads), (int32_t)(row % p->q_heads), NULL);
    gaussian_row g;
    gaussian_start(&g, p, row, o.page_mean, o.page_deviation);
    check_gaussian_row(&g, o.pages_read, 1e-8 * fmax(1, o.z_size), "reference row");
    oracle_free(&o);
}

static void check_gaussian(problem *p, ekv_context *context, const char *who, rng *r) {
    problem_index(p, context, EKV_STATISTICS_GAUSSIAN);
    guard mean = page_floats(p), deviation = page_floats(p), selected = problem_select(p, context);
    EXPECT_OK(context, ekv_page_moments(context, &p->step, mean.data, deviation.data, problem_stride(p)));
    const int64_t sample = 1 + p->rows / 3;
    for (int64_t row = 0; row < p->rows; row++) {
        int64_t n;
        sees_everything(p, row, &n);
        const int64_t at = row * problem_stride(p);
        check_forced(p, (uint8_t *)selected.data + at, n, who);
        if (n > 0 && rng_between(r, 0, sample - 1) == 0) {
            check_gaussian_backend(p, row, (float *)mean.data + at, (float *)deviation.data + at, (uint8_t *)selected.data + at,
                                   who);
        }
    }
    guard_free(&mean);
    guard_free(&deviation);
    guard_free(&selected);
}

START_TEST(gaussian) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 300) {
        rng r = case_begin("gaussian", index);
        shape s = shape_random(&r, 1000);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, EKV_POLICY_GAUSSIAN);
        case_note("%s", problem_describe(&p));
        const int64_t row = p.rows > 0 ? rng_between(&r, 0, p.rows - 1) : 0;
        int64_t n = 0;
        if (p.rows > 0 && sees_everything(&p, row, &n) && n > 0) {
            check_gaussian_reference(&p, row);
        }
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            check_gaussian(&p, backends.contexts[b], backends.names[b], &r);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* Selection is of use: on clustered keys gaussian and top-k leave most pages alone and keep most of the mass. */
START_TEST(selection_drops_pages_and_keeps_mass) {
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 20) {
        rng r = case_begin("selection_drops_pages_and_keeps_mass", index);
        shape s;
        memset(&s, 0, sizeof s);
        s.content = CONTENT_CLUSTERED;
        s.dtype = (ekv_dtype)(index % 3);
        s.batch = s.kv_heads = s.group = 1;
        s.k_dim = s.v_dim = 32;
        s.page_size = 16;
        s.lengths[0] = 4000;
        s.queries[0] = 1;
        s.q_size = 4;
        problem p;
        problem_make(&p, &s, &r);
        p.step.policy = policies[index % 2];
        p.step.budget = 1000;
        p.step.gaussian_model = EKV_GAUSSIAN_MIXTURE; /* pages differ in their means */
        FOR_BACKENDS(b, &backends, &p) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            problem_index(&p, backends.contexts[b], all_statistics);
            guard selected = problem_select(&p, backends.contexts[b]);
            oracle o;
            oracle_make(&o, &p, 0, 0, selected.data);
            int64_t count = 0;
            for (int64_t page = 0; page < o.pages; page++) {
                count += o.pages_read[page];
            }
            EXPECT(count < o.pages / 2 && o.result.delta < 0.1, "%lld of %lld pages read, %.3g of the mass dropped",
                   (long long)count, (long long)o.pages, o.result.delta);
            oracle_free(&o);
            guard_free(&selected);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Pages that the index does not know ------------------------------------------------------------------------------- */

/* Unknown pages are read whatever the budget; their bound is +infinity.  The reference looks at keys, not at an index. */
START_TEST(unknown_pages_are_read) {
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 200) {
        rng r = case_begin("unknown_pages_are_read", index);
        shape s = shape_random(&r, 500);
        s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.lengths[0] = (int32_t)rng_between(&r, 1, 500);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, policies[index % 2]);
        p.step.budget = s.page_size;
        const int64_t pages = pages_of(&p, s.lengths[0]), first = rng_between(&r, 0, pages - 1);
        const int64_t count = rng_between(&r, 1, pages - first);
        FOR_BACKENDS(b, &backends, &p) {
            if (backend_is_reference(&backends, b)) {
                continue;
            }
            if (strcmp(backends.names[b], "reference") == 0)
                continue; /* it looks at keys, not at the index */
            ekv_context *context = backends.contexts[b];
            case_note("%s: pages %lld to %lld unknown: %s", backends.names[b], (long long)first, (long long)(first + count - 1),
                      problem_describe(&p));
            problem_index(&p, context, all_statistics);
            const int64_t from = first * s.page_size + rng_between(&r, 0, s.page_size - 1),
                          last = (first + count - 1) * s.page_size;
            EXPECT_OK(context, ekv_index_invalidate(context, p.index, p.step.block_table, from < last ? from : last,
                                                    last < from ? 1 : last - from + 1));
            guard selected = problem_select(&p, context), bounds = page_floats(&p);
            EXPECT_OK(context, ekv_page_bounds(context, &p.step, bounds.data, problem_stride(&p)));
            for (int64_t row = 0; row < p.rows; row++) {
                for (int64_t page = 0; page < pages; page++) {
                    const bool unknown = page >= first && page < first + count;
                    const float bound = ((const float *)bounds.data)[row * problem_stride(&p) + page];
                    EXPECT(unknown == (bound == INFINITY), "page %lld has the bound %g", (long long)page, bound);
                    EXPECT(!unknown || ((const uint8_t *)selected.data)[row * problem_stride(&p) + page],
                           "page %lld is unknown and was not selected", (long long)page);
                }
            }
            problem_decode(&p, context);
            guard_free(&bounds);
            guard_free(&selected);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* A NaN or infinity in a key makes its page worth reading, whatever the budget. */
START_TEST(bad_keys_are_read) {
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN};
    static const float values[] = {NAN, INFINITY, -INFINITY};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 300) {
        rng r = case_begin("bad_keys_are_read", index);
        shape s = shape_random(&r, 500);
        s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.lengths[0] = (int32_t)rng_between(&r, 1, 500);
        problem p;
        problem_make(&p, &s, &r);
        problem_random_parameters(&p, &r);
        problem_random_policy(&p, &r, policies[index % 2]);
        p.step.budget = 1;
        const int64_t token = rng_between(&r, 0, s.lengths[0] - 1), page = token / s.page_size;
        const int32_t kv_head = (int32_t)rng_between(&r, 0, s.kv_heads - 1);
        const float value = values[index / 2 % 3];
        dtype_store(s.dtype, problem_key(&p, 0, token, kv_head), rng_between(&r, 0, s.k_dim - 1), value);
        FOR_BACKENDS(b, &backends, &p) {
            ekv_context *context = backends.contexts[b];
            case_note("%s: %g in a key of page %lld: %s", backends.names[b], value, (long long)page, problem_describe(&p));
            problem_index(&p, context, all_statistics);
            guard selected = problem_select(&p, context), bounds = page_floats(&p);
            EXPECT_OK(context, ekv_page_bounds(context, &p.step, bounds.data, problem_stride(&p)));
            for (int32_t g = 0; g < s.group; g++) {
                const int64_t at = (int64_t)(kv_head * s.group + g) * problem_stride(&p) + page;
                EXPECT(((const uint8_t *)selected.data)[at] == 1, "the page was not selected by head %d of its group", g);
                EXPECT(((const float *)bounds.data)[at] == INFINITY, "its bound is %g", ((const float *)bounds.data)[at]);
            }
            guard_free(&bounds);
            guard_free(&selected);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(bounds_and_moments),
                                TEST_ENTRY(topk),
                                TEST_ENTRY(budgets_are_clamped),
                                TEST_ENTRY(negative_budgets_are_clamped),
                                TEST_ENTRY(forced_pages),
                                TEST_ENTRY(gaussian),
                                TEST_ENTRY(selection_drops_pages_and_keeps_mass),
                                TEST_ENTRY(unknown_pages_are_read),
                                TEST_ENTRY(bad_keys_are_read)};
    return HARNESS_MAIN(argv[0], tests);
}
