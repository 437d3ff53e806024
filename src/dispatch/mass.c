/*
 * E: a bound on the probability mass of the tokens that were not read, and from it the error bound of the output.
 *
 * Every unread token is given its page's bound as its score, and tau is solved jointly over read scores and bounds; E is the share
 * of the unread.  Since a larger score of one token never lowers its own weight, E is at least the true mass delta.  The L1 distance of
 * the weights is exactly 2 delta, so the output moves by at most 2 B delta <= 2 B E, B the largest norm of a value vector.
 *
 * Policy certified brings its own, from the bounds that it skipped tokens by.  Asked for by the report only; not tuned.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>

static bool unread(const ekv_row *row, int64_t page) { return row->selected && !row->selected[page]; }

/* A bound that proves its tokens to be outside the support; the margin is far above the rounding of tau. */
static bool excluded(const ekv_row *row, int64_t page) {
    const double u = (double)row->bound[page];
    const double margin = 0x1p-22 * (fabs(row->tau) > 1.0 ? fabs(row->tau) + 1.0 : 2.0);
    return u <= row->tau - margin;
}

/* Largest bound of the unread pages; -infinity if there are none. */
static double largest_bound(const ekv_row *row) {
    double largest = -(double)INFINITY;
    for (int32_t p = 0; p < row->pages; p++)
        if (unread(row, p) && (double)row->bound[p] > largest) largest = (double)row->bound[p];
    return largest;
}

/* Mass of the unread and of the read at tau, entmax. */
static void masses_at(const ekv_step *step, const ekv_row *row, double tau, double beta, double *unread_mass, double *read_mass) {
    *unread_mass = *read_mass = 0.0;
    for (int64_t i = 0; i < row->list_count; i++)
        if ((double)row->list_z[i] > tau) *read_mass += ekv_pow((double)row->list_z[i] - tau, beta);
    for (int32_t p = 0; p < row->pages; p++)
        if (unread(row, p) && (double)row->bound[p] > tau)
            *unread_mass += (double)ekv_page_tokens(step, row->n, p) * ekv_pow((double)row->bound[p] - tau, beta);
}

/* Bisection between tau of what was read, where the joint mass is at least 1, and the largest score, where it is 0.  At the lower
 * end the unread have no less mass than at the root. */
static double entmax_mass(const ekv_step *step, const ekv_row *row, double top) {
    const double beta = 1.0 / (row->alpha - 1.0);
    double low = row->tau, high = top, unread_mass, read_mass;
    for (int64_t i = 0; i < row->list_count; i++) high = (double)row->list_z[i] > high ? (double)row->list_z[i] : high;
    for (int i = 0; i < 200; i++) {
        const double middle = low + 0.5 * (high - low);
        if (!(middle > low && middle < high)) break;
        masses_at(step, row, middle, beta, &unread_mass, &read_mass);
        if (unread_mass + read_mass >= 1.0)
            low = middle;
        else
            high = middle;
    }
    masses_at(step, row, low, beta, &unread_mass, &read_mass);
    return unread_mass;
}

static double softmax_mass(const ekv_step *step, const ekv_row *row, double top) {
    const double shift = top > row->tau ? top : row->tau;
    double unread_mass = 0.0;
    for (int32_t p = 0; p < row->pages; p++)
        if (unread(row, p)) unread_mass += (double)ekv_page_tokens(step, row->n, p) * ekv_exp((double)row->bound[p] - shift);
    return unread_mass / (unread_mass + ekv_exp(row->tau - shift));
}

static double largest_value_norm(const ekv_step *step, const ekv_item *item, const ekv_row *row) {
    double largest = 0.0;
    for (int32_t p = 0; p < row->pages; p++) {
        const int64_t block = ekv_block(item, p);
        const bool known = step->index->counts[block] >= ekv_page_tokens(step, row->n, p);
        const double norm = known ? (double)*ekv_index_value_norm(step->index, item->head, block) : (double)INFINITY;
        largest = norm > largest ? norm : largest;
    }
    return largest;
}

void ekv_bound_mass(const ekv_step *step, const ekv_item *item, ekv_row *row, double skipped) {
    if (row->read_tokens == row->n || (step->certified && skipped == 0.0)) {
        row->mass = row->error = 0.0;
        row->certified = true;
        return;
    }
    if (step->certified) {
        row->mass = skipped;
        if (step->index->norms) row->error = 2.0 * largest_value_norm(step, item, row) * skipped;
        return;
    }
    if (!row->bound) return; /* not asked for: NaN */
    const double top = largest_bound(row);
    bool certified = !row->softmax && !isnan(row->tau);
    for (int32_t p = 0; p < row->pages && certified; p++) certified = !unread(row, p) || excluded(row, p);
    row->certified = certified;
    if (certified) {
        row->mass = row->error = 0.0;
        return;
    }
    if (!step->p.report_mass) return;
    if (isnan(row->tau) || top == (double)INFINITY || row->read_tokens == 0)
        row->mass = isnan(row->tau) ? row->tau : 1.0;
    else
        row->mass = row->softmax ? softmax_mass(step, row, top) : entmax_mass(step, row, top);
    row->mass *= 1.0 + 1e-9; /* the sums' rounding */
    if (row->mass > 1.0) row->mass = 1.0;
    if (step->index->norms) row->error = 2.0 * largest_value_norm(step, item, row) * row->mass;
}
