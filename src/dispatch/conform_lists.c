/*
 * Conformance of the kernels that go from scores to weights: keep, tau_lower, solve, softmax; and of the call ekv_entmax.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/conform.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const contents[] = {
    "normal",        "ties",     "peaked", "near tau", "huge", "-infinity among them", "NaN among them", "+infinity among them",
    "all -infinity", "all equal"};

enum { NORMAL, TIES, PEAKED, NEAR, HUGE_SCORES, LOW, NANS, HIGH, ALL_LOW, ALL_EQUAL };

/* Scores in z units.  NEAR puts many within rounding of max - 1 and of one another. */
static void fill_scores(ekv_check *c, float *z, int n, int content) {
    for (int i = 0; i < n; i++) {
        double x = ekv_normal(c);
        if (content == TIES) x = 0.25 * (double)ekv_below(c, 5);
        if (content == PEAKED) x = i % 7 == 0 ? 4.0 + 0.3 * x : x;
        if (content == NEAR)
            x = ekv_below(c, 3) ? 2.0 + ldexp((double)(ekv_below(c, 9) - 4), -23) : 3.0 - ekv_below(c, 2) * 0.5;
        if (content == HUGE_SCORES) x = (double)ekv_below(c, 3) * 1e30 - 1e30;
        if (content == ALL_EQUAL) x = 1.5;
        if (content == LOW && i % 3 == 1) x = -(double)INFINITY;
        if (content == ALL_LOW) x = -(double)INFINITY;
        z[i] = (float)x;
    }
    if (content == NANS && n > 0) z[ekv_below(c, n)] = NAN;
    if (content == HIGH && n > 0) z[ekv_below(c, n)] = INFINITY;
}

/* ---- keep: exact ---- */

static const int keep_counts[] = {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 1000};
static const char *const thresholds[] = {"median", "a tie", "-infinity", "above all", "infinity"};
static const char *const targets[] = {"another list", "a list with entries", "in place"};

static void check_keep(ekv_check *c) {
    const int n = c->value[0], content = c->value[1], target = c->value[3];
    c->unsupported = !c->table->keep;
    if (c->unsupported) return;
    const bool in_place = target == 2;
    const int before = target == 1 ? 5 : 0, room = before + n;
    float *z = in_place ? ekv_room_inout(c, "list_z", n, sizeof *z) : ekv_room_in(c, "z", n, sizeof *z);
    int32_t *token = in_place ? ekv_room_inout(c, "list_token", n, sizeof *token) : ekv_room_in(c, "token", n, sizeof *token);
    float *list_z = in_place ? z : ekv_room_inout(c, "list_z", room, sizeof *list_z), kept[1000];
    int32_t *list_token = in_place ? token : ekv_room_inout(c, "list_token", room, sizeof *list_token), kept_token[1000];
    if (c->failed) return;
    fill_scores(c, z, n, content);
    for (int i = 0; i < n; i++) token[i] = 3 * i + 7;
    for (int i = 0; i < before; i++) list_z[i] = 100.0f + (float)i, list_token[i] = i;
    const float levels[] = {0.1f, z[n / 2], -INFINITY, 2e30f, INFINITY};
    const float threshold = levels[c->value[2]];
    int expected = 0;
    for (int i = 0; i < n; i++) {
        if (z[i] <= threshold) continue;
        kept[expected] = z[i];
        kept_token[expected++] = token[i];
    }
    ekv_seal(c);
    ekv_keep_args a = {z, token, n, threshold, list_z, list_token, before};
    c->table->keep(&a);
    ekv_expect(c, "count", 0, a.count, before + expected, 0.0);
    for (int i = 0; i < before; i++) {
        ekv_expect(c, "list_z, entries before the call", i, (double)list_z[i], 100.0 + i, 0.0);
        ekv_expect(c, "list_token, entries before the call", i, list_token[i], i, 0.0);
    }
    for (int i = 0; i < expected && !c->failed; i++) {
        ekv_expect(c, "list_z", before + i, (double)list_z[before + i], (double)kept[i], 0.0);
        ekv_expect(c, "list_token", before + i, list_token[before + i], kept_token[i], 0.0);
    }
}

/* ---- tau_lower ----
 *
 * Let N be the norm (sum t^power)^(1/power); tau's root has N = 1, and N falls at a slope of at least 1.  So an error of the
 * sum that is e in relative terms moves the root by at most e / power.  In floats: t carries u of each of its two differences,
 * absolute since |d|, |tau| <= 1, thus 3 u of tau; the power costs `power` units and the sum n / 32 + 5 of them; storing tau,
 * u. */

static const int lower_counts[] = {1, 2, 31, 32, 33, 100, 512, 2000};
static const int powers[] = {1, 2, 3, 4, 5, 9, 10, 33, 64};
static const int steps[] = {1, 2, 4, 12};
static const char *const starts[] = {"-1", "half way"};

static double power_sum(const float *z, int n, double z_max, double tau, double power, double *slope) {
    double sum = 0.0;
    *slope = 0.0;
    for (int i = 0; i < n; i++) {
        const double t = (double)z[i] - z_max - tau;
        if (!(t > 0.0)) continue;
        sum += pow(t, power);
        *slope += power * pow(t, power - 1.0);
    }
    return sum;
}

static void check_tau_lower(ekv_check *c) {
    const int n = c->value[0], power = c->value[1];
    double slope;
    float z_max = -INFINITY;
    c->unsupported = !c->table->tau_lower;
    if (c->unsupported) return;
    float *z = ekv_room_in(c, "z", n, sizeof *z);
    if (c->failed) return;
    fill_scores(c, z, n, c->value[2]);
    for (int i = 0; i < n; i++) z_max = z[i] > z_max ? z[i] : z_max;
    ekv_seal(c);
    double low = -1.0, high = 0.0; /* the root */
    for (int i = 0; i < 60; i++) {
        const double middle = 0.5 * (low + high);
        if (power_sum(z, n, (double)z_max, middle, power, &slope) >= 1.0)
            low = middle;
        else
            high = middle;
    }
    const float start = c->value[4] ? (float)(0.5 * (low - 1.0)) : -1.0f;
    ekv_tau_lower_args a = {z, n, z_max, power, c->value[3], start};
    c->table->tau_lower(&a);
    const double room = 1.001 * EKV_U * (4.0 + ((double)n / 32.0 + 6.0 + power) / power);
    ekv_expect_in(c, "tau is a lower bound", 0, (double)a.tau, -1.0, fmin(high + room, 0.0));
    /* and of use: at least as high as one exact step of Newton's on the sum, the slowest of the methods that the contract
     * allows */
    const double sum = power_sum(z, n, (double)z_max, (double)start, power, &slope);
    const double step = sum > 1.0 ? (sum - 1.0) / slope : 0.0;
    ekv_expect_in(c, "tau rises by a Newton step", 0, (double)a.tau, (double)start + step - room - 1e-5 * step, 0.0);
}

/* ---- solve, and ekv_entmax ----
 *
 * Against the reference's bisection in double.  tau: the sum's rounding of n 2^-53 divided by its slope, which at sum 1 is at
 * least min(1, beta), and the rounding of z_max + tau.  Weights: rounded to float, and what that error e of tau does to t^beta:
 * at most e^beta for beta < 1, where a token that lies within e of tau may weigh much, and e times the largest slope.  For beta
 * < 1 weights are divided by their sum, which takes the errors of all. */

static const int solve_counts[] = {0, 1, 2, 7, 8, 9, 31, 32, 33, 100, 513, 2000};
static const char *const alpha_names[] = {"1.02", "1.1", "1.25", "4/3", "1.5", "1.75", "2", "2.5", "3", "6", "10"};
static const double alphas[] = {1.02, 1.1, 1.25, 4.0 / 3.0, 1.5, 1.75, 2.0, 2.5, 3.0, 6.0, 10.0};
/* Exact scores relative to their maximum, and the solution in the same units. */
typedef struct solution {
    double *d, *p;     /* [n] z - z_max and weights */
    double z_max, tau; /* tau - z_max; or NaN or -infinity, as z_max is */
    double error;      /* of tau - z_max */
    double spread;     /* beta < 1: what that does to the sum of the weights, by which they are divided */
    double beta;
} solution;

/* What the error of tau does to the weight of a token before normalisation. */
static double power_error(const solution *s, double d) {
    const double t = d - s->tau, e = s->error;
    if (t <= -e) return 0.0;
    if (s->beta >= 1.0) return e * s->beta * pow(t + e, s->beta - 1.0);
    return t > 2.0 * e ? fmin(pow(e, s->beta), e * s->beta * pow(t - e, s->beta - 1.0)) : pow(2.0 * e, s->beta);
}

static double weight_error(const solution *s, double d, double p) {
    return 1.001 * EKV_U * p + power_error(s, d) + p * s->spread + 0x1p-149;
}

/* Whether a token belongs to the support: 1, 0, or -1 where rounding decides. */
static int belongs(const solution *s, int n, int i) {
    double sum = 0.0;
    if (s->d[i] - s->tau > 0x1p-29 + s->error) return 1;
    if (s->d[i] - s->tau < -(0x1p-29 + s->error)) return 0;
    for (int j = 0; j < n; j++)
        if (s->d[j] > s->d[i]) sum += pow(s->d[j] - s->d[i], s->beta);
    if (fabs(sum - 1.0) > (double)(n + 16) * 0x1p-50) return sum < 1.0;
    return sum == 1.0 && (s->beta == 1.0 || s->beta == 2.0) ? 0 : -1;
}

static void set_error(solution *s, int n, double error) {
    s->error = error;
    s->spread = 0.0;
    for (int i = 0; i < n && s->beta < 1.0; i++) s->spread += power_error(s, s->d[i]);
}

static bool solve_exactly(ekv_check *c, const float *z, int n, double alpha, solution *s) {
    s->d = ekv_scratch(c, 2 * ((size_t)n + 1) * sizeof(double));
    if (!s->d) return false;
    s->p = s->d + n + 1;
    s->beta = 1.0 / (alpha - 1.0);
    s->z_max = -(double)INFINITY;
    s->error = (double)(n + 64) * 0x1p-53 * fmax(1.0, alpha - 1.0);
    for (int i = 0; i < n; i++) s->z_max = (double)z[i] > s->z_max || isnan(z[i]) ? (double)z[i] : s->z_max;
    if (s->z_max == (double)INFINITY) s->z_max = (double)NAN;
    s->tau = s->z_max;
    if (!isfinite(s->z_max)) return true;
    for (int i = 0; i < n; i++) s->d[i] = (double)z[i] - s->z_max;
    s->tau = ekv_reference_entmax(alpha, s->d, NULL, n, s->p);
    set_error(s, n, s->error);
    return true;
}

static void expect_tau(ekv_check *c, const solution *s, double tau, double error) {
    const double right = isfinite(s->z_max) ? s->z_max + s->tau : s->z_max;
    ekv_expect(c, "tau", 0, tau, right, error + 0x1p-52 * fabs(right));
}

static void expect_solution(ekv_check *c, const solution *s, int n, const ekv_solve_args *a) {
    int64_t next = 0;
    expect_tau(c, s, a->tau, s->error);
    if (!isfinite(s->z_max)) {
        ekv_expect(c, "support", 0, (double)a->support, 0.0, 0.0);
        return;
    }
    ekv_expect_in(c, "support", 0, (double)a->support, 1.0, n);
    for (int i = 0; i < n && !c->failed; i++) {
        const bool in = next < a->support && a->token[next] == 2 * i + 1;
        const int right = belongs(s, n, i);
        if (right >= 0) ekv_expect(c, "token is in the support", i, in, right, 0.0);
        if (!in) continue;
        ekv_expect(c, "weight", next, (double)a->weight[next], s->p[i], weight_error(s, s->d[i], s->p[i]));
        next++;
    }
    ekv_expect(c, "support's tokens, ascending", next, (double)next, (double)a->support, 0.0);
}

static void check_solve(ekv_check *c) {
    const int n = c->value[0];
    const double alpha = alphas[c->value[1]];
    solution s;
    c->unsupported = !c->table->solve;
    if (c->unsupported) return;
    float *given = ekv_room_in(c, "scores", n, sizeof *given), *z = ekv_room_inout(c, "z", n, sizeof *z),
          *weight = ekv_room_out(c, "weight", n, sizeof *weight);
    int32_t *token = ekv_room_inout(c, "token", n, sizeof *token);
    if (c->failed) return;
    fill_scores(c, given, n, c->value[2]);
    ekv_seal(c);
    float *first = ekv_scratch(c, ((size_t)n + 1) * sizeof *first);
    if (!first || !solve_exactly(c, given, n, alpha, &s)) return;
    for (int i = 0; i < n; i++) z[i] = given[i], token[i] = 2 * i + 1;
    ekv_solve_args all = {z, token, n, alpha, weight, -1, 0.0};
    c->table->solve(&all);
    expect_solution(c, &s, n, &all);
    if (c->failed || !isfinite(s.z_max)) return;
    /* A shorter list that holds the support gives the same bits. */
    int count = 0;
    memcpy(first, weight, (size_t)all.support * sizeof *first);
    for (int i = 0; i < n; i++) {
        if (s.d[i] < s.tau - 0x1p-28) continue;
        z[count] = given[i];
        token[count++] = 2 * i + 1;
    }
    ekv_solve_args some = {z, token, count, alpha, weight, -1, 0.0};
    c->table->solve(&some);
    ekv_expect(c, "tau from a shorter list", 0, some.tau, all.tau, 0.0);
    ekv_expect(c, "support from a shorter list", 0, (double)some.support, (double)all.support, 0.0);
    for (int64_t i = 0; i < all.support && !c->failed; i++)
        ekv_expect(c, "weight from a shorter list", i, (double)weight[i], (double)first[i], 0.0);
}

static const double all_alphas[] = {1.0, 1.02, 1.25, 4.0 / 3.0, 1.5, 2.0, 3.0, 10.0};
static const char *const all_alpha_names[] = {"1", "1.02", "1.25", "4/3", "1.5", "2", "3", "10"};

/* The call rounds alpha - 1 to float and its product with a score: 2 u |z|.  Softmax rounds the difference to the maximum, u
 * |d|, its exponential, 2 u, and the sum of n of them, in 64 per call, 6 u.  Equal scores stay equal, so that huge ones, whose
 * distances are either 0 or far above 1, lose nothing. */
static void check_entmax(ekv_check *c) {
    const int n = c->value[0], content = c->value[2];
    const double alpha = all_alphas[c->value[1]], factor = alpha > 1.0 ? alpha - 1.0 : 1.0;
    float *scores = ekv_room_in(c, "scores", n, sizeof *scores), *weights = ekv_room_out(c, "weights", n, sizeof *weights);
    float *z = ekv_room_in(c, "scaled scores", n, sizeof *z);
    double tau = 0.0, size = 0.0, sum = 0.0;
    int64_t support = -1;
    solution s;
    c->unsupported = c->table && !(c->table->solve && c->table->softmax);
    if (c->failed || c->unsupported) return;
    fill_scores(c, scores, n, content);
    for (int i = 0; i < n; i++) {
        z[i] = (float)(factor * (double)scores[i]);
        if (isfinite(z[i]) && content != HUGE_SCORES) size = fmax(size, fabs((double)z[i]));
    }
    ekv_seal(c);
    if (ekv_entmax(c->context, alpha, scores, n, weights, &tau, &support) != EKV_OK) {
        ekv_expect_true(c, ekv_last_error(c->context), -1, false);
        return;
    }
    if (!solve_exactly(c, z, n, alpha, &s)) return;
    if (alpha > 1.0 && isfinite(s.z_max)) set_error(&s, n, s.error + 4.0 * EKV_U * size);
    expect_tau(c, &s, tau, alpha > 1.0 ? s.error + 2.0 * EKV_U * fabs(s.z_max) : EKV_U * (2.0 * size + 10.0));
    if (!isfinite(s.z_max)) {
        for (int i = 0; i < n; i++) ekv_expect(c, "weights", i, (double)weights[i], isnan(s.z_max) ? (double)NAN : 0.0, 0.0);
        ekv_expect(c, "support", 0, (double)support, 0.0, 0.0);
        return;
    }
    for (int i = 0; i < n; i++) {
        const double softmax_error = s.p[i] == 0.0 ? 0.0 : s.p[i] * EKV_U * (fabs(s.d[i]) + 12.0) + 0x1p-148;
        ekv_expect(c, "weights", i, (double)weights[i], s.p[i], alpha > 1.0 ? weight_error(&s, s.d[i], s.p[i]) : softmax_error);
        sum += (double)weights[i];
    }
    ekv_expect(c, "sum of the weights", -1, sum, 1.0, 8.0 * EKV_U);
}

/* ---- softmax ----
 *
 * The difference to z_max is rounded, which the exponential turns into u |d|; the exponential itself is within one unit in the
 * last place, 2 u.  The sum is of weights: at most 1 + 5 additions. */

static const int softmax_counts[] = {1, 2, 3, 7, 8, 31, 32, 33, 63, 64};
static const char *const softmax_contents[] = {"normal", "ties", "wide", "huge", "-infinity among them", "NaN among them"};

static void check_softmax(ekv_check *c) {
    static const int as_scores[] = {NORMAL, TIES, NORMAL, HUGE_SCORES, LOW, NANS};
    const int n = c->value[0], content = c->value[1];
    c->unsupported = !c->table->softmax;
    if (c->unsupported) return;
    float *z = ekv_room_in(c, "z", n, sizeof *z), z_max = -INFINITY;
    ekv_softmax_args a = {z, n, 0.0f, ekv_room_out(c, "weight", n, sizeof(float)), -1.0};
    if (c->failed) return;
    fill_scores(c, z, n, as_scores[content]);
    for (int i = 0; i < n; i++) {
        if (content == 2) z[i] *= 40.0f;
        z_max = z[i] > z_max ? z[i] : z_max;
    }
    if (z_max == -INFINITY) z_max = 0.0f;
    a.z_max = c->value[2] == 0 ? z_max : c->value[2] == 1 ? z_max + 3.5f : -INFINITY;
    ekv_seal(c);
    c->table->softmax(&a);
    bool number = true;
    float largest = c->value[2] == 0 ? z_max : c->value[2] == 1 ? z_max + 3.5f : -INFINITY;
    for (int i = 0; i < n; i++) {
        number = number && z[i] == z[i];
        largest = z[i] > largest ? z[i] : largest;
    }
    ekv_expect(c, "z_max", 0, (double)a.z_max, number ? (double)largest : (double)NAN, 0.0);
    if (number && largest == -INFINITY) {
        for (int i = 0; i < n; i++) ekv_expect(c, "weight", i, (double)a.weight[i], 0.0, 0.0);
        ekv_expect(c, "sum", 0, a.sum, 0.0, 0.0);
        return;
    }
    double sum = 0.0, room = 0.0;
    for (int i = 0; i < n; i++) {
        const double d = (double)z[i] - (double)a.z_max, right = exp(d);
        const double tolerance = d < -200.0 ? 0.0 : 1.001 * EKV_U * (fabs(d) + 2.0) * right + 0x1p-149;
        ekv_expect(c, "weight", i, (double)a.weight[i], d < -200.0 ? 0.0 : right, tolerance);
        sum += right;
        room += tolerance;
    }
    ekv_expect(c, "sum", 0, a.sum, sum, room + 6.0 * EKV_U * sum);
}

static const char *const maxima[] = {"their maximum", "above it", "-infinity"};

const ekv_family ekv_list_families[] = {
    {"keep",
     900,
     check_keep,
     {EKV_NUMBERS("scores", keep_counts), EKV_NAMES("content", contents), EKV_NAMES("threshold", thresholds),
      EKV_NAMES("to", targets), EKV_NAMES("memory", ekv_placements)}},
    {"tau_lower",
     900,
     check_tau_lower,
     {EKV_NUMBERS("scores", lower_counts),
      EKV_NUMBERS("power", powers),
      {"content", 4, contents, NULL},
      EKV_NUMBERS("steps", steps),
      EKV_NAMES("start", starts),
      EKV_NAMES("memory", ekv_placements)}},
    {"solve",
     900,
     check_solve,
     {EKV_NUMBERS("scores", solve_counts), EKV_NAMES("alpha", alpha_names), EKV_NAMES("content", contents),
      EKV_NAMES("memory", ekv_placements)}},
    {"softmax",
     300,
     check_softmax,
     {EKV_NUMBERS("scores", softmax_counts), EKV_NAMES("content", softmax_contents), EKV_NAMES("z_max", maxima),
      EKV_NAMES("memory", ekv_placements)}},
    {"entmax",
     600,
     check_entmax,
     {EKV_NUMBERS("scores", solve_counts), EKV_NAMES("alpha", all_alpha_names), EKV_NAMES("content", contents),
      EKV_NAMES("memory", ekv_placements)}},
    {0}};
