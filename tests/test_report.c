/*
 * What the report promises, on many small decode steps whose scores are exact in f32 (so that ties and thresholds can be
 * planted to the bit): true mass <= E <= the cheap sum, true output error <= 2 B E, certified means equal to the bit, and any
 * set of pages that holds the support gives the bits of the full policy.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t box_and_norms = EKV_STATISTICS_BOX | EKV_STATISTICS_NORMS;
static const double some_alphas[] = {1.01, 1.1, 1.25, 4.0 / 3, 1.5, 1.5, 1.75, 2, 2, 2.5, 3, 5, 10};

typedef enum kind { PEAKED, NORMAL, FLAT, CLUSTERED, TIED, AT_THRESHOLD, OFFSET_UP, OFFSET_DOWN, KINDS } kind;
static const char *const kind_names[] = {"peaked", "normal",       "flat",      "clustered",
                                         "tied",   "at threshold", "offset up", "offset down"};

/* Multiples of 1/64 below 2^17: exact in f32, and so is their sum with a slope of 1/2 times a distance. */
static float one_score(kind k, double alpha, rng *r) {
    const double step = 1.0 / 64;
    switch (k) {
    case PEAKED:
        return (float)(step * (double)rng_between(r, -2000, rng_chance(r, 0.1) ? 1000 : -900));
    case FLAT:
        return (float)(step * (double)rng_between(r, 0, 3));
    case CLUSTERED:
        return (float)(1.5 * (double)rng_between(r, -3, 0) + step * (double)rng_between(r, 0, 2));
    case TIED:
        return (float)(0.5 * (double)rng_between(r, -3, 1));
    case AT_THRESHOLD:
        return rng_chance(r, 0.2) ? 3 : (float)(3 - round(64 / (alpha - 1)) * step); /* the top's own threshold */
    case OFFSET_UP:
        return (float)(1e5 + step * (double)rng_between(r, 0, 128));
    case OFFSET_DOWN:
        return (float)(-1e5 + step * (double)rng_between(r, 0, 128));
    default:
        return (float)(step * round(64 * rng_normal(r)));
    }
}

static shape small_shape(rng *r) {
    static const int32_t pages[] = {1, 2, 3, 5, 8}, k_dims[] = {1, 2, 5, 33}, v_dims[] = {1, 3, 8, 40};
    shape s;
    memset(&s, 0, sizeof s);
    s.layout = (layout)rng_between(r, 0, LAYOUT_COUNT - 1);
    s.batch = s.kv_heads = 1;
    s.group = (int32_t)rng_between(r, 1, 2);
    s.page_size = RNG_PICK(r, pages);
    s.k_dim = RNG_PICK(r, k_dims);
    s.v_dim = RNG_PICK(r, v_dims);
    s.lengths[0] = (int32_t)rng_between(r, 1, 80);
    s.queries[0] = 1;
    s.q_size = 1;
    return s;
}

/* One KV head whose first key element is the score; query heads 0 and 1 read it with the signs + and -. */
static kind small_problem(problem *p, rng *r, int64_t index, bool softmax) {
    const shape s = small_shape(r);
    const kind k = (kind)(index % KINDS);
    problem_make(p, &s, r);
    p->step.alpha = softmax ? 1 : rng_chance(r, 0.2) ? 1 + exp(rng_range(r, -4.6, 2.2)) : RNG_PICK(r, some_alphas);
    p->step.scale = 1;
    float *q = p->q.data;
    for (int32_t i = 0; i < s.group * s.k_dim; i++) {
        q[i] = i == 0 ? 1.0f : i == s.k_dim ? -1.0f : 0.0f;
    }
    for (int32_t t = 0; t < s.lengths[0]; t++) {
        *(float *)problem_key(p, 0, t, 0) = one_score(k, p->step.alpha > 1 ? p->step.alpha : 1.5, r);
    }
    if (rng_chance(r, 0.3)) {
        const float up[] = {0.5f, -0.5f}, down[] = {-0.25f, 0};
        problem_set_heads(p, NULL, NULL, rng_chance(r, 0.5) ? up : down);
    }
    return k;
}

static void describe(const char *who, const problem *p, kind k) {
    case_note("%s, %s scores: %s", who, kind_names[k], problem_describe(p));
}

/* ---- E ---------------------------------------------------------------------------------------------------------------- */

/* tau, and E, from the exact scores that were read and the backend's own bounds of the pages that were not. */
typedef struct joint {
    double mass, room, cheap;
} joint;

static double power_between(double x, double error, double beta) {
    return pow(fmax(x + 2 * error, 0), beta) - pow(fmax(x - 2 * error, 0), beta);
}

static joint solve_joint(const problem *p, const oracle *o, const float *bounds) {
    const double factor = o->alpha == 1 ? 1 : o->alpha - 1, beta = 1 / factor;
    double *z = calloc((size_t)(o->n + o->pages) + 1, sizeof *z), *mass = calloc((size_t)(o->n + o->pages) + 1, sizeof *mass);
    double *weights = calloc((size_t)(o->n + o->pages) + 1, sizeof *weights);
    int64_t count = 0;
    for (int64_t i = 0; i < o->n; i++) {
        if (oracle_reads(o, i)) {
            z[count] = o->z[i];
            mass[count++] = 1;
        }
    }
    const int64_t read = count;
    for (int64_t page = 0; page < o->pages; page++) {
        if (!o->pages_read[page]) {
            z[count] = factor * bounds[page];
            mass[count++] = (double)(page + 1 < o->pages ? p->shape.page_size : o->n - page * p->shape.page_size);
        }
    }
    const double tau = ekv_reference_entmax(o->alpha, z, mass, count, weights);
    joint j = {0, 1e-9, 0};
    for (int64_t i = read; i < count; i++) {
        const double x = z[i] - tau, error = 0x1p-22 * fmax(1, fabs(z[i])), over = z[i] - o->result.tau;
        j.mass += mass[i] * (o->alpha == 1 ? exp(x) : pow(fmax(x, 0), beta));
        j.room += mass[i] * (o->alpha == 1 ? exp(x) * expm1(4 * error) : power_between(x, error, beta));
        j.cheap += mass[i] * (o->alpha == 1 ? exp(over) : pow(fmax(over + 2 * error, 0), beta));
    }
    free(z);
    free(mass);
    free(weights);
    return j;
}

/* What rounding of the scores can change in delta. */
static double delta_room(const oracle *o) {
    double room = 1e-9;
    for (int64_t i = 0; i < o->n; i++) {
        const double x = o->z[i] - o->result.tau_full, error = 0x1p-24 * fmax(1, fabs(o->z[i]));
        if (!oracle_reads(o, i)) {
            room += o->alpha == 1 ? exp(x) * expm1(4 * error) : power_between(x, error, 1 / (o->alpha - 1));
        }
    }
    return room;
}

static void check_mass_row(problem *p, int64_t row, const uint8_t *mask, const float *bounds, const oracle *full) {
    const ekv_report *e = (const ekv_report *)p->report.data + row;
    oracle o;
    oracle_make(&o, p, 0, (int32_t)row, mask);
    const joint j = solve_joint(p, &o, bounds);
    EXPECT(e->mass_bound <= 1 && e->mass_bound >= 0, "E is %.17g", e->mass_bound);
    EXPECT(e->mass_bound >= o.result.delta - delta_room(&o), "E is %.9g, the true delta %.9g", e->mass_bound, o.result.delta);
    EXPECT(fabs(e->mass_bound - j.mass) <= j.room, "E is %.9g, the joint solve gives %.9g, allowed %.3g", e->mass_bound, j.mass,
           j.room);
    EXPECT(e->mass_bound <= j.cheap * (1 + 1e-6) + 1e-9, "E is %.9g, the cheap sum %.9g", e->mass_bound, j.cheap);
    const double bound = 2 * o.result.value_norm * e->mass_bound;
    EXPECT(e->error_bound >= bound * (1 - 1e-12) && e->error_bound <= bound * (1 + 1e-5), "error bound %.9g, 2 B E is %.9g",
           e->error_bound, bound);
    double *out = calloc((size_t)p->shape.v_dim, sizeof *out), square = 0;
    problem_out_row(p, row, out);
    for (int32_t d = 0; d < p->shape.v_dim; d++) {
        square += (out[d] - full->out[d]) * (out[d] - full->out[d]);
    }
    EXPECT(sqrt(square) <= e->error_bound + oracle_tolerance(&o) + oracle_tolerance(full),
           "output error %.9g, error bound %.9g", sqrt(square), e->error_bound);
    free(out);
    oracle_free(&o);
}

static void check_masses(problem *p, ekv_context *context, rng *r) {
    problem_index(p, context, box_and_norms);
    p->step.report_mass = 1;
    guard selected = problem_select(p, context), bounds = guard_alloc((size_t)(p->rows * problem_stride(p)) * sizeof(float));
    EXPECT_OK(context, ekv_page_bounds(context, &p->step, bounds.data, problem_stride(p)));
    problem_decode(p, context);
    uint8_t *all = malloc((size_t)problem_stride(p));
    memset(all, 1, (size_t)problem_stride(p));
    const int64_t row = rng_between(r, 0, p->rows - 1), at = row * problem_stride(p);
    oracle full;
    oracle_make(&full, p, 0, (int32_t)row, all);
    check_mass_row(p, row, (uint8_t *)selected.data + at, (float *)bounds.data + at, &full);
    oracle_free(&full);
    free(all);
    guard_free(&selected);
    guard_free(&bounds);
}

START_TEST(mass_bounds) {
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_PAGES};
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 12000) {
        rng r = case_begin("mass_bounds", index);
        problem p;
        const kind k = small_problem(&p, &r, index, index % 9 == 0);
        problem_random_policy(&p, &r, policies[index / KINDS % 2]);
        p.step.budget = rng_between(&r, 1, p.shape.lengths[0]);
        p.step.first_pages = 0;
        for (int b = 0; b < backends.count; b++) {
            describe(backends.names[b], &p, k);
            check_masses(&p, backends.contexts[b], &r);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- The certificate -------------------------------------------------------------------------------------------------- */

typedef struct bits {
    unsigned char *out;
    size_t bytes;
    ekv_report reports[2];
} bits;

static bits decode_bits(problem *p, ekv_context *context) {
    bits b;
    problem_decode(p, context);
    b.out = problem_copy_out(p, &b.bytes);
    memcpy(b.reports, p->report.data, p->report.size);
    return b;
}

/* The reference solves each set of tokens afresh: within rounding of double, then of the f32 output. */
static void check_close(const problem *p, const bits *full, const bits *some, int64_t row, const char *why) {
    const float *a = (const float *)(const void *)full->out + row * p->shape.v_dim;
    const float *b = (const float *)(const void *)some->out + row * p->shape.v_dim;
    const double tau = full->reports[row].tau;
    EXPECT(fabs(some->reports[row].tau - tau) <= 1e-12 * fmax(1, fabs(tau)), "%s: row %lld: tau %.17g, of full %.17g", why,
           (long long)row, some->reports[row].tau, tau);
    for (int32_t d = 0; p->step.alpha <= 2 && d < p->shape.v_dim; d++) { /* beyond 2 weights on the threshold magnify it */
        EXPECT(fabs((double)a[d] - b[d]) <= 1e-6 * fmax(1, fabs((double)a[d])), "%s: out of row %lld differs from full", why,
               (long long)row);
    }
}

static void check_same(const problem *p, const bits *full, const bits *some, int64_t row, const char *why) {
    if (strcmp(why, "reference") == 0) {
        check_close(p, full, some, row, why);
        return;
    }
    const size_t size = full->bytes / (size_t)p->rows;
    const ekv_report *a = &full->reports[row], *b = &some->reports[row];
    EXPECT(memcmp(full->out + (size_t)row * size, some->out + (size_t)row * size, size) == 0,
           "%s: out of row %lld differs from full", why, (long long)row);
    EXPECT(memcmp(&a->tau, &b->tau, sizeof a->tau) == 0 && a->support == b->support,
           "%s: row %lld: tau %.17g support %lld, of full %.17g %lld", why, (long long)row, b->tau, (long long)b->support,
           a->tau, (long long)a->support);
}

/* Whether every page that was not read lies below tau by more than rounding: then the row must be certified. */
static bool clearly_certain(const problem *p, const bits *some, const uint8_t *selected, const float *bounds, int64_t row) {
    const double tau = some->reports[row].tau, factor = p->step.alpha - 1;
    for (int64_t page = 0; page < pages_of(p, p->shape.lengths[0]); page++) {
        if (!selected[page] && factor * bounds[page] > tau - 1e-5 * fmax(1, fabs(tau))) {
            return false;
        }
    }
    return true;
}

START_TEST(certified_equals_full) {
    /* gaussian solves an equation by quadrature in every row: now and then */
    static const ekv_policy policies[] = {EKV_POLICY_TOPK, EKV_POLICY_PAGES, EKV_POLICY_TOPK, EKV_POLICY_PAGES,
                                          EKV_POLICY_TOPK, EKV_POLICY_PAGES, EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN};
    int64_t certified = 0, others = 0;
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 12000) {
        rng r = case_begin("certified_equals_full", index);
        problem p;
        const kind k = small_problem(&p, &r, index, false);
        for (int b = 0; b < backends.count; b++) {
            ekv_context *context = backends.contexts[b];
            problem_index(&p, context, box_and_norms | EKV_STATISTICS_GAUSSIAN);
            p.step.policy = EKV_POLICY_FULL;
            p.step.report_mass = 0;
            bits full = decode_bits(&p, context);
            rng same = r;
            problem_random_policy(&p, &same, policies[index / KINDS % 8]);
            p.step.budget = rng_between(&same, 1, p.shape.lengths[0]);
            p.step.report_mass = rng_chance(&same, 0.8);
            describe(backends.names[b], &p, k);
            guard selected = problem_select(&p, context),
                  bounds = guard_alloc((size_t)(p.rows * problem_stride(&p)) * sizeof(float));
            EXPECT_OK(context, ekv_page_bounds(context, &p.step, bounds.data, problem_stride(&p)));
            bits some = decode_bits(&p, context);
            for (int64_t row = 0; row < p.rows; row++) {
                const int64_t at = row * problem_stride(&p);
                const ekv_report *e = &some.reports[row];
                EXPECT(full.reports[row].certified == 1, "full is not certified");
                EXPECT(e->certified == 0 || e->certified == 1, "certified is %d", e->certified);
                if (e->certified) {
                    check_same(&p, &full, &some, row, backends.names[b]);
                }
                EXPECT(e->certified || !p.step.report_mass ||
                           !clearly_certain(&p, &some, (uint8_t *)selected.data + at, (float *)bounds.data + at, row),
                       "row %lld: every bound lies below tau = %.9g and it is not certified", (long long)row, e->tau);
                certified += e->certified && e->tokens < p.shape.lengths[0];
                others += !e->certified;
            }
            free(full.out);
            free(some.out);
            guard_free(&selected);
            guard_free(&bounds);
        }
        problem_free(&p);
    }
    printf("certified without reading everything: %lld rows, not certified: %lld\n", (long long)certified, (long long)others);
    EXPECT(case_end(12000) - case_first() < 500 || (certified > 50 && others > 50), "one of the two outcomes was hardly seen");
    backends_close(&backends);
}
END_TEST

/* ---- The canonical finish --------------------------------------------------------------------------------------------- */

/* Marks the pages that hold the support, or a token within rounding of the threshold, and each other page with a probability.
 */
static void mark_superset(problem *p, const oracle *o, uint8_t *mask, double others, rng *r) {
    const double edge = o->result.tau - 4 * 0x1p-23 * fmax(1, o->z_size);
    memset(mask, 0, (size_t)p->step.page_mask_stride);
    for (int64_t i = 0; i < o->n; i++) {
        if (o->z[i] > edge) {
            mask[i / p->shape.page_size] = 1;
        }
    }
    for (int64_t page = 0; page < o->pages; page++) {
        mask[page] = mask[page] || rng_chance(r, others);
    }
}

START_TEST(any_superset_of_the_support_gives_the_same_bits) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 12000) {
        rng r = case_begin("any_superset_of_the_support_gives_the_same_bits", index);
        problem p;
        const kind k = small_problem(&p, &r, index, false);
        oracle oracles[2];
        for (int64_t row = 0; row < p.rows; row++) {
            oracle_make(&oracles[row], &p, 0, (int32_t)row, NULL);
        }
        for (int b = 0; b < backends.count; b++) {
            describe(backends.names[b], &p, k);
            p.step.policy = EKV_POLICY_FULL;
            bits full = decode_bits(&p, backends.contexts[b]);
            problem_random_policy(&p, &r, EKV_POLICY_PAGES);
            for (int round = 0; round < 2; round++) {
                const double others = round == 0 ? 0 : rng_uniform(&r);
                for (int64_t row = 0; row < p.rows; row++) {
                    mark_superset(&p, &oracles[row], (uint8_t *)p.mask.data + row * p.step.page_mask_stride, others, &r);
                }
                bits some = decode_bits(&p, backends.contexts[b]);
                for (int64_t row = 0; row < p.rows; row++) {
                    check_same(&p, &full, &some, row, backends.names[b]);
                }
                free(some.out);
            }
            free(full.out);
        }
        for (int64_t row = 0; row < p.rows; row++) {
            oracle_free(&oracles[row]);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* The support is exact where the scores are: tokens planted on the threshold of the rest have weight zero and do not count. */
START_TEST(tokens_on_the_threshold_are_out) {
    static const double exact_alphas[] = {1.25, 1.5, 2, 3, 5};
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 300) {
        rng r = case_begin("tokens_on_the_threshold_are_out", index);
        problem p;
        shape s = small_shape(&r);
        s.group = 1;
        s.lengths[0] = (int32_t)rng_between(&r, 2, 80);
        problem_make(&p, &s, &r);
        p.step.alpha = exact_alphas[index % 5];
        p.step.scale = 1;
        /* one winner, the others at (or, every third case, one step above) its threshold */
        const int64_t winner = rng_between(&r, 0, s.lengths[0] - 1);
        const double gap = 1 / (p.step.alpha - 1) - (index % 3 == 0 ? 0x1p-20 : 0);
        memset(p.q.data, 0, p.q.size);
        *(float *)p.q.data = 1;
        for (int32_t t = 0; t < s.lengths[0]; t++) {
            *(float *)problem_key(&p, 0, t, 0) = (float)(t == winner ? 2 : 2 - gap);
        }
        const int64_t expected = index % 3 == 0 ? s.lengths[0] : 1;
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: winner %lld: %s", backends.names[b], (long long)winner, problem_describe(&p));
            problem_decode(&p, backends.contexts[b]);
            const ekv_report *e = p.report.data;
            EXPECT(e->support == expected, "support %lld, expected %lld, tau %.17g", (long long)e->support, (long long)expected,
                   e->tau);
            EXPECT(index % 3 == 0 || fabs(e->tau - ((p.step.alpha - 1) * 2 - 1)) <= 1e-15, "tau %.17g", e->tau);
            if (index % 3 != 0) {
                double out[40];
                problem_out_row(&p, 0, out);
                EXPECT(memcmp(p.out.data, problem_value(&p, 0, winner, 0), (size_t)s.v_dim * sizeof(float)) == 0,
                       "the output is not the winner's value: %.9g", out[0]);
            }
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* ---- Fields that were not asked for ----------------------------------------------------------------------------------- */

START_TEST(what_was_not_asked_for_is_nan) {
    backend_set backends;
    backends_open(&backends, 1);
    FOR_CASES(index, 200) {
        rng r = case_begin("what_was_not_asked_for_is_nan", index);
        problem p;
        small_problem(&p, &r, index, false);
        problem_random_policy(&p, &r, EKV_POLICY_TOPK);
        for (int b = 0; b < backends.count; b++) {
            case_note("%s: %s", backends.names[b], problem_describe(&p));
            const ekv_report *e = p.report.data;
            problem_index(&p, backends.contexts[b], box_and_norms);
            p.step.report_mass = 0;
            problem_decode(&p, backends.contexts[b]);
            const bool all = e->tokens == p.shape.lengths[0] || e->certified;
            EXPECT(all ? e->mass_bound == 0 && e->error_bound == 0 : isnan(e->mass_bound) && isnan(e->error_bound),
                   "E %g and error bound %g, %lld of %d tokens read", e->mass_bound, e->error_bound, (long long)e->tokens,
                   p.shape.lengths[0]);
            problem_index(&p, backends.contexts[b], EKV_STATISTICS_BOX);
            p.step.report_mass = 1;
            problem_decode(&p, backends.contexts[b]);
            EXPECT(all ? e->mass_bound == 0 : e->mass_bound >= 0 && isnan(e->error_bound),
                   "without NORMS: E %g and error bound %g", e->mass_bound, e->error_bound);
            /* without a report: the same output */
            size_t bytes;
            unsigned char *with = problem_copy_out(&p, &bytes);
            p.step.report = NULL;
            p.step.report_mass = 0;
            problem_decode(&p, backends.contexts[b]);
            unsigned char *without = problem_copy_out(&p, &bytes);
            EXPECT(memcmp(with, without, bytes) == 0, "the output depends on the report");
            EXPECT(is_poison(p.report.data, p.report.size), "a report that was not given was written");
            p.step.report = p.report.data;
            free(with);
            free(without);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(mass_bounds), TEST_ENTRY(certified_equals_full),
                                TEST_ENTRY(any_superset_of_the_support_gives_the_same_bits),
                                TEST_ENTRY(tokens_on_the_threshold_are_out), TEST_ENTRY(what_was_not_asked_for_is_nan)};
    return HARNESS_MAIN(argv[0], tests);
}
