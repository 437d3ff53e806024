/*
 * Policy certified: the bits of full on every input, never much more read, and bounds that hold whatever the keys are.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/reference.h"
#include "dispatch/step.h"
#include "problem.h"

enum { ALL = EKV_STATISTICS_BOX | EKV_STATISTICS_GAUSSIAN | EKV_STATISTICS_NORMS | EKV_STATISTICS_SKETCH };

/* A shape long enough for a sketch now and then, alpha > 1, a page size that a sketch can have. */
static void certified_problem(problem *p, rng *r) {
    shape s = shape_random(r, rng_between(r, 0, 3) == 0 ? 2500 : 600);
    if (s.page_size % 16)
        s.page_size = 16 * (int32_t)rng_between(r, 1, 4);
    if (rng_between(r, 0, 2) == 0) {
        s.batch = 1;
        s.ragged = false;
        s.queries[0] = 1;
        s.lengths[0] = (int32_t)rng_between(r, 2048, 4500);
    }
    problem_make(p, &s, r);
    problem_random_parameters(p, r);
    if (p->step.alpha < 1.001)
        p->step.alpha = 1.5;
    for (int32_t h = 0; p->step.head_alpha && h < p->q_heads; h++)
        if (p->step.head_alpha[h] < 1.001)
            ((double *)p->head_alpha.data)[h] = 1.5;
}

/* A few channels fifty times larger than the rest, or constant, or zero, or at the end of the type's range. */
static void adversarial_keys(problem *p, rng *r) {
    const int kind = (int)rng_between(r, 0, 5);
    for (int32_t b = 0; b < p->shape.batch; b++)
        for (int64_t t = 0; t < p->shape.lengths[b]; t++)
            for (int32_t h = 0; h < p->shape.kv_heads; h++) {
                void *key = problem_key(p, b, t, h);
                for (int32_t d = 0; d < p->shape.k_dim; d++) {
                    const double x = ekv_reference_load(p->shape.dtype, key, d);
                    double y = x;
                    if (kind == 0 && d % 13 == 3)
                        y = 50.0 * x;
                    if (kind == 1 && d % 5 == 0)
                        y = 7.25;
                    if (kind == 2 && d % 3 == 0)
                        y = 0.0;
                    if (kind == 3)
                        y = x * 1e-6;
                    if (kind == 4 && (t + d) % 97 == 0)
                        y = x < 0 ? -60000.0 : 60000.0;
                    if (kind == 5)
                        y = x + (double)t * 0.01; /* drift */
                    dtype_store(p->shape.dtype, key, d, (float)y);
                }
            }
}

static int64_t bytes_of(const problem *p) {
    const ekv_report *e = p->step.report;
    int64_t bytes = 0;
    for (int64_t row = 0; row < p->rows; row++)
        bytes += e[row].bytes_statistics + e[row].bytes_sketch + e[row].bytes_keys + e[row].bytes_values;
    return bytes;
}

/* Runs one policy and keeps what it wrote. */
static void run_policy(problem *p, ekv_context *context, ekv_policy policy, guard *out, guard *report) {
    p->step.policy = policy;
    problem_decode(p, context);
    *out = guard_alloc(p->out.size);
    *report = guard_alloc(p->report.size);
    memcpy(out->data, p->out.data, p->out.size);
    memcpy(report->data, p->report.data, p->report.size);
}

static void compare_with_full(problem *p, ekv_context *context, const char *backend) {
    static const uint32_t statistics[] = {ALL, EKV_STATISTICS_NORMS, EKV_STATISTICS_BOX,
                                          EKV_STATISTICS_NORMS | EKV_STATISTICS_SKETCH};
    guard full, full_report, out, report;
    for (size_t i = 0; i < sizeof statistics / sizeof statistics[0]; i++) {
        case_note("%s, statistics 0x%x: %s", backend, (unsigned)statistics[i], problem_describe(p));
        problem_drop_index(p);
        problem_index(p, context, statistics[i]);
        p->step.max_mass = 0.0;
        run_policy(p, context, EKV_POLICY_FULL, &full, &full_report);
        run_policy(p, context, EKV_POLICY_CERTIFIED, &out, &report);
        EXPECT(memcmp(full.data, out.data, out.size) == 0, "certified differs from full");
        for (int64_t row = 0; row < p->rows; row++) {
            const ekv_report *f = (const ekv_report *)full_report.data + row, *c = (const ekv_report *)report.data + row;
            EXPECT(memcmp(&f->tau, &c->tau, sizeof f->tau) == 0, "row %lld: tau %.17g, of full %.17g", (long long)row, c->tau,
                   f->tau);
            EXPECT(f->support == c->support, "row %lld: support %lld, of full %lld", (long long)row, (long long)c->support,
                   (long long)f->support);
            EXPECT(c->certified == 1 && c->mass_bound == 0.0 && c->error_bound == 0.0, "row %lld is not certified",
                   (long long)row);
            EXPECT(c->tokens >= c->support && c->tokens <= f->tokens, "row %lld: %lld tokens read", (long long)row,
                   (long long)c->tokens);
        }
        guard_free(&full);
        guard_free(&full_report);
        guard_free(&out);
        guard_free(&report);
    }
}

START_TEST(equals_full) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 14) {
        rng r = case_begin("equals_full", index);
        problem p;
        certified_problem(&p, &r);
        if (index % 2)
            adversarial_keys(&p, &r);
        FOR_BACKENDS(b, &backends, &p) {
            if (strcmp(backends.names[b], "reference") == 0)
                continue; /* it takes certified as full */
            compare_with_full(&p, backends.contexts[b], backends.names[b]);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* At most 1.10 of full's bytes, norms and the fixed sample of 128 tokens apart, on keys that no bound helps with. */
START_TEST(never_reads_much_more) {
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 10) {
        rng r = case_begin("never_reads_much_more", index);
        problem p;
        certified_problem(&p, &r);
        if (p.shape.lengths[0] >= 2048 && p.shape.batch == 1) {
            ekv_context *context = backends.contexts[0];
            case_note("%s: %s", backends.names[0], problem_describe(&p));
            problem_index(&p, context, ALL);
            p.step.policy = EKV_POLICY_FULL;
            problem_decode(&p, context);
            const int64_t full = bytes_of(&p);
            p.step.policy = EKV_POLICY_CERTIFIED;
            problem_decode(&p, context);
            const int64_t bytes = bytes_of(&p);
            EXPECT((double)bytes <= 1.10 * (double)full, "certified read %lld bytes, full %lld", (long long)bytes,
                   (long long)full);
        }
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

/* max_mass: E is at most that, at least the true mass, and the error bound holds. */
START_TEST(max_mass_bounds) {
    static const double masses[] = {0.001, 0.01, 0.1, 0.5};
    backend_set backends;
    backends_open(&backends, 2);
    FOR_CASES(index, 12) {
        rng r = case_begin("max_mass_bounds", index);
        problem p;
        certified_problem(&p, &r);
        ekv_context *context = backends.contexts[0];
        case_note("%s: %s", backends.names[0], problem_describe(&p));
        problem_index(&p, context, ALL);
        guard full, full_report, out, report;
        run_policy(&p, context, EKV_POLICY_FULL, &full, &full_report);
        p.step.max_mass = masses[index % 4];
        run_policy(&p, context, EKV_POLICY_CERTIFIED, &out, &report);
        for (int64_t row = 0; row < p.rows; row++) {
            const ekv_report *c = (const ekv_report *)report.data + row, *f = (const ekv_report *)full_report.data + row;
            EXPECT(c->mass_bound >= 0.0 && c->mass_bound <= p.step.max_mass * (1.0 + 1e-9), "row %lld: E %g of %g",
                   (long long)row, c->mass_bound, p.step.max_mass);
            EXPECT(!isfinite(f->tau) || c->tau <= f->tau + 1e-12, "row %lld: tau %.17g, of full %.17g", (long long)row, c->tau,
                   f->tau);
            EXPECT(c->certified == (c->mass_bound == 0.0), "row %lld: certified %d, E %g", (long long)row, (int)c->certified,
                   c->mass_bound);
        }
        guard_free(&full);
        guard_free(&full_report);
        guard_free(&out);
        guard_free(&report);
        problem_free(&p);
    }
    backends_close(&backends);
}
END_TEST

START_TEST(softmax_cannot_be_certified) {
    backend_set backends;
    backends_open(&backends, 1);
    rng r = case_begin("softmax_cannot_be_certified", 0);
    problem p;
    certified_problem(&p, &r);
    p.step.alpha = 1.0;
    p.step.head_alpha = NULL;
    p.step.policy = EKV_POLICY_CERTIFIED;
    EXPECT_STATUS(backends.contexts[0], EKV_ERROR_UNSUPPORTED, ekv_decode(backends.contexts[0], &p.step));
    EXPECT(strstr(ekv_last_error(backends.contexts[0]), "alpha"), "the message is \"%s\"",
           ekv_last_error(backends.contexts[0]));
    problem_free(&p);
    backends_close(&backends);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(equals_full), TEST_ENTRY(never_reads_much_more), TEST_ENTRY(max_mass_bounds),
                                TEST_ENTRY(softmax_cannot_be_certified)};
    return HARNESS_MAIN(argv[0], tests);
}
