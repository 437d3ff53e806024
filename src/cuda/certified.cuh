/*
 * Policy certified: the probe of a row, which finds a lower bound of tau from a few tokens.
 *
 * tau of any part of the tokens is a lower bound of tau, so pages whose bound does not exceed it cannot matter.  The pages with the
 * best bounds are read for it, with the routine of the scan, so that the scores are those that the scan would find; once tokens have
 * bounds of their own, the best tokens of the best pages.  Coarse bounds come first (host.c): norms, a probe, boxes or sketches of what
 * the norms leave, a probe.  A sample of the first probe says whether boxes, or sketches, pay.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_CUDA_CERTIFIED_CUH
#define EKV_CUDA_CERTIFIED_CUH

#include "cuda/sketch.cuh"

namespace {

constexpr int PROBE_THREADS = 32 * EKV_CUDA_WARPS;
constexpr int RUN = 8;                            /* tokens that a probe takes together; divides every page size */
constexpr int PROBE_RUNS = 128, SAMPLE_RUNS = SAMPLED_PAGES; /* runs of the best pages; sampled pages, of which one run is scored */
constexpr int PROBE_TOKENS = PROBE_RUNS * RUN, PROBE_PAGES = PROBE_THREADS; /* most pages of which tokens are taken */
constexpr int PROBE_GROUPS = 64;                  /* groups of pages that the best pages are taken from */
constexpr int RELAX_BINS = 256;                   /* max_mass: bins of bounds up to 1 above the cut */

static_assert(SAMPLE_RUNS * RUN == PROBE_THREADS && PROBE_RUNS * RUN == 4 * PROBE_THREADS, "a fixed number of tokens per thread");
static_assert(PROBE_GROUPS * EKV_CUDA_GROUP == 8 * PROBE_THREADS, "8 pages per thread");

struct probe_scratch {
    uint32_t order[PROBE_THREADS];
    int group[PROBE_GROUPS], page[PROBE_PAGES];
    int token[PROBE_TOKENS + SAMPLE_RUNS * RUN]; /* to be scored; not below the row's n: none */
    float z[PROBE_TOKENS + SAMPLE_RUNS * RUN];
    uint32_t least; /* order of the bounds of all chosen pages */
    double mass[RELAX_BINS];
    int count[RELAX_BINS];
};

typedef block_reduce<PROBE_THREADS> probe_reduce;

__device__ __forceinline__ int sampled_page(int i, int pages) { return (int)((2ll * i + 1) * pages / (2 * SAMPLE_RUNS)); }

/* Up to `wanted` pages with the largest bounds, to w->page: from the best group of each thread's share of the groups, and the 64 best
 * of those; a sound choice whichever it is.  Returns their number.  Ends in a barrier. */
__device__ int choose_pages(const float *bound, const ekv_cuda_group *group, int pages, int wanted, probe_scratch *w,
                            probe_reduce *reduce, int &turn) {
    const int groups = (pages + EKV_CUDA_GROUP - 1) / EKV_CUDA_GROUP;
    uint32_t best = 0, order[8], cut = 0;
    int mine = -1, rank = 0, chosen, total;
    for (int g = threadIdx.x; g < groups; g += PROBE_THREADS) {
        const float x = group[g].best;
        const uint32_t o = x > -CUDART_INF_F ? order_of(x) : 0u;
        if (o > best) best = o, mine = g;
    }
    w->order[threadIdx.x] = best;
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < PROBE_THREADS; i++) rank += w->order[i] > best || (w->order[i] == best && i < (int)threadIdx.x);
    if (mine >= 0 && rank < PROBE_GROUPS) w->group[rank] = mine;
    reduce->prefix(mine >= 0, chosen, turn);
    chosen = min(chosen, PROBE_GROUPS);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int i = (int)threadIdx.x + k * PROBE_THREADS, in = i / EKV_CUDA_GROUP;
        const int page = in < chosen ? w->group[in] * EKV_CUDA_GROUP + i % EKV_CUDA_GROUP : pages;
        const float x = page < pages ? bound[page] : CUDART_NAN_F;
        order[k] = x == x && x > -CUDART_INF_F ? order_of(x) : 0u;
    }
    for (int bit = 31; bit >= 14; bit--) { /* the largest cut of 18 bits that `wanted` pages reach; 0 if there are fewer */
        const uint32_t trial = cut | 1u << bit;
        int reach = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) reach += order[k] >= trial;
        reduce->prefix(reach, total, turn);
        if (total >= wanted) cut = trial;
    }
    cut = max(cut, 1u);
    if (threadIdx.x == 0) w->least = cut;
    int reach = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) reach += order[k] >= cut;
    int to = reduce->prefix(reach, total, turn);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int i = (int)threadIdx.x + k * PROBE_THREADS;
        if (order[k] < cut) continue;
        if (to < wanted) w->page[to] = w->group[i / EKV_CUDA_GROUP] * EKV_CUDA_GROUP + i % EKV_CUDA_GROUP;
        to++;
    }
    __syncthreads();
    return min(total, wanted);
}

/* The tokens of `chosen` whole pages, in w->token; returns how many places that are. */
__device__ int take_pages(const ekv_cuda_step &s, int chosen, probe_scratch *w) {
    const int n = chosen << s.page_shift;
    for (int i = threadIdx.x; i < n; i += PROBE_THREADS)
        w->token[i] = (w->page[i >> s.page_shift] << s.page_shift) + (i & (s.page_size - 1));
    return n;
}

/* The best tokens of `chosen` pages by their own bounds, in w->token; returns their number.  A thread takes a page. */
__device__ int take_tokens(const ekv_cuda_step &s, const row_info &row, const uint16_t *above, double origin, int chosen,
                           probe_scratch *w, probe_reduce *reduce, int &turn) {
    const int most = max(4, PROBE_TOKENS / max(chosen, 1)), mine = (int)threadIdx.x;
    const double least = (double)from_order(w->least);
    const int first = mine < chosen ? w->page[mine] << s.page_shift : 0;
    const int tokens = mine < chosen ? page_tokens(s, row.n, first >> s.page_shift) : 0;
    int taken = 0, total;
    for (int i = 0; i < tokens; i++) taken += origin + (double)half_of_bits(above[first + i]) >= least;
    taken = min(taken, most);
    int to = reduce->prefix(taken, total, turn);
    for (int i = 0; i < tokens && taken > 0; i++) {
        if (!(origin + (double)half_of_bits(above[first + i]) >= least)) continue;
        if (to < PROBE_TOKENS) w->token[to] = first + i;
        to++, taken--;
    }
    return min(total, PROBE_TOKENS);
}

/* x^m for a whole m >= 0. */
__device__ __forceinline__ double whole_power(double x, int m) {
    double y = 1.0;
    for (; m > 0; m >>= 1, x *= x)
        if (m & 1) y *= x;
    return y;
}

/* A lower bound of tau from the first n scores in w->z, and from `before`, another one.  Newton from the left on the norm, as
 * raise_floor in typed.cuh.  NaN and infinity do not count. */
__device__ float floor_of_probe(const probe_scratch *w, int n, float before, int power, probe_reduce *reduce, int &turn) {
    float z[4];
    double top = -CUDART_INF;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int i = (int)threadIdx.x + k * PROBE_THREADS;
        z[k] = i < n ? w->z[i] : -CUDART_INF_F;
        if (!(z[k] < CUDART_INF_F)) z[k] = -CUDART_INF_F;
        top = fmax(top, (double)z[k]);
    }
    top = reduce->max1(top, turn);
    if (!(top > -CUDART_INF)) return before;
    double tau = fmax(-1.0, (double)before - top);
    for (int step = 0; power <= 64 && step < 16; step++) {
        double s0 = 0.0, s1 = 0.0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const double t = (double)z[k] - top - tau;
            if (!(t > 0.0)) continue;
            const double u = whole_power(t, power - 1);
            s0 += u * t;
            s1 += u;
        }
        reduce->sum2(s0, s1, turn);
        if (!(s0 > 1.0)) break;
        const double target = power == 1 ? 1.0 : power == 2 ? sqrt(s0) : pow(s0, 1.0 - 1.0 / (double)power);
        const double delta = (s0 - target) / s1;
        if (!(delta > 0.0)) break;
        tau = fmin(tau + delta, 0.0);
        if (delta < 1e-6) break;
    }
    return fmaxf(before, threshold_of(__double2float_rd(top + tau)));
}

/* An estimate of tau, for the decision about boxes alone: each sampled token stands for n / PROBE_THREADS tokens. */
__device__ double tau_of_sample(const float *sample, int n, double alpha, float cut, probe_reduce *reduce, int &turn) {
    const double beta = 1.0 / (alpha - 1.0), weight = (double)n / PROBE_THREADS;
    const int whole = whole_beta(beta);
    const float x = sample[threadIdx.x];
    const double z = x < CUDART_INF_F ? (double)x : -CUDART_INF, top = reduce->max1(z, turn);
    if (!(top > -CUDART_INF)) return (double)cut;
    double low = top - 1.0, high = top;
    for (int step = 0; step < 16; step++) {
        const double tau = 0.5 * (low + high), t = z - tau;
        double sum = !(t > 0.0) ? 0.0 : weight * (whole == 1 ? t : whole == 2 ? t * t : pow(t, beta)), unused = 0.0;
        reduce->sum2(sum, unused, turn);
        if (sum >= 1.0)
            low = tau;
        else
            high = tau;
    }
    return fmax(low, (double)cut);
}

/* The share of the sampled pages above the cut that boxes would not rule out at `tau`; a warp takes a page at a time. */
template <typename T>
__device__ float share_of_boxes(const ekv_cuda_step &s, const item_info &it, const row_info &row, const float *q,
                                const float *bound, int pages, float cut, double tau, int &sampled, probe_reduce *reduce,
                                int &turn) {
    const int lane = threadIdx.x & 31;
    double needed = 0.0, left = 0.0;
    for (int i = threadIdx.x >> 5; i < SAMPLE_RUNS; i += EKV_CUDA_WARPS) {
        const int page = sampled_page(i, pages), block = block_of(s, it, page);
        if (block < 0 || bound[page] <= cut) continue;
        const T *box = (const T *)(s.boxes + (it.head * s.index_blocks + block) * s.box_bytes);
        float x = 0.0f;
        for (int d = lane; d < s.k_dim; d += 32) {
            const float low = q[d] * to_float(box[d]), high = q[d] * to_float(box[s.k_dim + d]);
            x += low > high || low != low ? low : high;
        }
        x = warp_sum(x);
        const int first = page << s.page_shift, last = first + page_tokens(s, row.n, page) - 1;
        x += row.slope * (float)((row.slope > 0.0f ? last : first) - row.q_token);
        if (lane == 0) needed += 1.0, left += !((double)x <= tau);
    }
    reduce->sum2(needed, left, turn);
    sampled = (int)needed;
    return needed > 0.0 ? (float)(left / needed) : 0.0f;
}

/* The share of the sampled tokens in pages above the cut that the sketch would not rule out at `tau`.  Needs the row's table. */
__device__ float share_of_sketch(const ekv_cuda_step &s, const item_info &it, const row_info &row, const ekv_cuda_table &table,
                                 const float *bound, int pages, float cut, double tau, int &sampled, probe_reduce *reduce, int &turn) {
    __shared__ float s_start[SAMPLE_RUNS];
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < SAMPLE_RUNS; i += EKV_CUDA_WARPS) {
        const float start = start_of_stretch(s, it, row, table, (int)(sampled_page(i, pages) / s.stretch));
        if (lane == 0) s_start[i] = start;
    }
    __syncthreads();
    const int i = (int)threadIdx.x / RUN, page = sampled_page(i, pages), block = block_of(s, it, page), slot = (int)threadIdx.x % RUN;
    const int token = (page << s.page_shift) + slot;
    double looked = 0.0, left = 0.0;
    if (token < row.n && !(bound[page] <= cut)) {
        float sum = CUDART_INF_F;
        if (page_sketched(s, block, page, page_tokens(s, it.n, page))) {
            const uint16_t *codes = (const uint16_t *)sketch_group(s, it, block, 0) + slot;
            sum = s_start[i];
            for (int u = 0; u < s.units; u++) {
                const uint32_t word = codes[u * GROUP];
#pragma unroll
                for (int k = 0; k < 4; k++) sum += table.entry[(u * 4 + k) * 16 + (word >> 4 * k & 15u)];
            }
        }
        looked = 1.0;
        left = !((double)add_bias(sum, row, token) <= tau);
    }
    reduce->sum2(looked, left, turn);
    sampled = (int)looked;
    return looked > 0.0 ? (float)(left / looked) : 1.0f;
}

/* max_mass: how far above the cut bounds may lie and their pages, or tokens where those have bounds (`above`, else NULL), still be
 * skipped.  A token with bound u has at most the mass max(u - cut, 0)^beta, since cut <= tau.  All threads; the answer in thread 0. */
__device__ void relax_cut(const ekv_cuda_step &s, const row_info &row, const float *bound, const uint16_t *bits, double origin, int pages,
                          double cut, double &relax, double &skipped, probe_scratch *w) {
    const double beta = 1.0 / (row.alpha - 1.0);
    w->count[threadIdx.x] = 0;
    __syncthreads();
    for (int page = threadIdx.x; page < pages && !bits; page += PROBE_THREADS) {
        const double above = (double)bound[page] - cut; /* NaN is in no bin */
        if (above > 0.0 && above < 1.0) atomicAdd(&w->count[(int)(above * RELAX_BINS)], page_tokens(s, row.n, page));
    }
    for (int token = threadIdx.x; token < row.n && bits; token += PROBE_THREADS) {
        if (bound[token >> s.page_shift] <= (float)cut) continue; /* the sketches of such a page need not have been looked at */
        const double above = (double)half_of_bits(bits[token]) - (cut - origin);
        if (above > 0.0 && above < 1.0) atomicAdd(&w->count[(int)(above * RELAX_BINS)], 1);
    }
    __syncthreads();
    const int count = w->count[threadIdx.x];
    w->mass[threadIdx.x] = count ? (double)count * pow((double)(threadIdx.x + 1) / RELAX_BINS, beta) * (1.0 + 1e-9) : 0.0;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int bin = 0;
    skipped = 0.0;
    for (; bin < RELAX_BINS && skipped + w->mass[bin] <= s.max_mass; bin++) skipped += w->mass[bin];
    relax = (double)bin / RELAX_BINS;
}
static_assert(RELAX_BINS == PROBE_THREADS, "a bin per thread");

} // namespace

#endif
