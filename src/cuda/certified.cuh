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

constexpr int PROBE_WARPS = 32, PROBE_THREADS = 32 * PROBE_WARPS; /* a block for each row: what counts is how soon it is done */
constexpr int PROBE_TOKENS = 1024, PROBE_PAGES = 256;              /* most tokens that are scored; most pages that they come from */
constexpr int RUN = 8, SAMPLE_TOKENS = SAMPLED_PAGES * RUN;        /* tokens of a sampled page; of the sample */
constexpr int PROBE_GROUPS = 64, SHARES = 256; /* groups of pages that the best pages are taken from: each the best of a share */
constexpr int RELAX_BINS = 256;                /* max_mass: bins of bounds up to 1 above the cut */

static_assert(PROBE_GROUPS * EKV_CUDA_GROUP == 2 * PROBE_THREADS, "2 pages per thread");
static_assert(SAMPLED_PAGES == PROBE_WARPS, "a sampled page for each warp");

struct probe_scratch {
    uint32_t order[SHARES];
    int group[PROBE_GROUPS], page[PROBE_PAGES];
    int reach[32];                           /* pages that reach a trial of choose_pages */
    uint32_t least;                          /* order of the bounds of all chosen pages */
    int token[PROBE_TOKENS + SAMPLE_TOKENS]; /* to be scored; not below the row's n: none */
    long long row[PROBE_TOKENS + SAMPLE_TOKENS]; /* where its key lies; -1: nowhere */
    float z[PROBE_TOKENS + SAMPLE_TOKENS];
    float cut, tau; /* what the scores say: the cut, and an estimate of tau from the sample */
    center_part center[SAMPLED_PAGES];
    double mass[RELAX_BINS];
    int count[RELAX_BINS];
};

typedef block_reduce<PROBE_THREADS> probe_reduce;

__device__ __forceinline__ int sampled_page(int i, int pages) { return (int)((2ll * i + 1) * pages / (2 * SAMPLED_PAGES)); }

/* Up to `wanted` pages with the largest bounds, to w->page: from the best group of each share of the groups, and the 64 best of those; a
 * sound choice whichever it is.  Returns their number.  Ends in a barrier. */
__device__ int choose_pages(const float *bound, const ekv_cuda_group *group, int pages, int wanted, probe_scratch *w,
                            probe_reduce *reduce, int &turn) {
    const int groups = (pages + EKV_CUDA_GROUP - 1) / EKV_CUDA_GROUP;
    uint32_t best = 0, order[2], cut = 0;
    int mine = -1, rank = 0, chosen, total;
    if (threadIdx.x < SHARES) {
        for (int g = threadIdx.x; g < groups; g += SHARES) {
            const float x = group[g].best;
            const uint32_t o = x > -CUDART_INF_F ? order_of(x) : 0u;
            if (o > best) best = o, mine = g;
        }
        w->order[threadIdx.x] = best;
    }
    if (threadIdx.x < 32) w->reach[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < SHARES) {
#pragma unroll 8
        for (int i = 0; i < SHARES; i++) rank += w->order[i] > best || (w->order[i] == best && i < (int)threadIdx.x);
        if (mine >= 0 && rank < PROBE_GROUPS) w->group[rank] = mine;
    }
    reduce->prefix(mine >= 0, chosen, turn);
    chosen = min(chosen, PROBE_GROUPS);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int i = (int)threadIdx.x + k * PROBE_THREADS, in = i / EKV_CUDA_GROUP;
        const int page = in < chosen ? w->group[in] * EKV_CUDA_GROUP + i % EKV_CUDA_GROUP : pages;
        const float x = page < pages ? bound[page] : CUDART_NAN_F;
        order[k] = x == x && x > -CUDART_INF_F ? order_of(x) : 0u;
    }
    for (int bit = 31; bit >= 14; bit--) { /* the largest cut of 18 bits that `wanted` pages reach; 0 if there are fewer */
        const uint32_t trial = cut | 1u << bit;
        const int reach = __popc(__ballot_sync(ALL_LANES, order[0] >= trial)) + __popc(__ballot_sync(ALL_LANES, order[1] >= trial));
        if ((threadIdx.x & 31) == 0 && reach) atomicAdd(&w->reach[bit], reach);
        __syncthreads();
        if (w->reach[bit] >= wanted) cut = trial;
    }
    cut = max(cut, 1u);
    if (threadIdx.x == 0) w->least = cut;
    int to = reduce->prefix((order[0] >= cut) + (order[1] >= cut), total, turn);
#pragma unroll
    for (int k = 0; k < 2; k++) {
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
#pragma unroll 8
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

/* A lower bound of tau from the first n scores in w->z, and from `before`, another one.  NaN and infinity do not count.  By one warp. */
__device__ __forceinline__ float floor_of_probe(const probe_scratch *w, int n, float before, int power) {
    float top = -CUDART_INF_F;
    for (int i = threadIdx.x & 31; i < n; i += 32) top = fmaxf(top, w->z[i] < CUDART_INF_F ? w->z[i] : -CUDART_INF_F);
    top = warp_max(top);
    if (!(top > -CUDART_INF_F)) return before;
    const float low = fmaxf(before, __double2float_rd((double)top - 1.0));
    return fmaxf(before, threshold_of(raise_floor(w->z, n, top, low, power, 8)));
}

/* An estimate of tau, for decisions alone: each sampled token stands for n / SAMPLE_TOKENS tokens.  By one warp. */
__device__ __forceinline__ float tau_of_sample(const float *sample, int n, double alpha) {
    const float beta = (float)(1.0 / (alpha - 1.0)), weight = (float)n / SAMPLE_TOKENS;
    const int whole = whole_beta(1.0 / (alpha - 1.0));
    float z[SAMPLE_TOKENS / 32], top = -CUDART_INF_F;
#pragma unroll
    for (int k = 0; k < SAMPLE_TOKENS / 32; k++) {
        const float x = sample[k * 32 + (int)(threadIdx.x & 31)];
        z[k] = x < CUDART_INF_F ? x : -CUDART_INF_F;
        top = fmaxf(top, z[k]);
    }
    top = warp_max(top);
    if (!(top > -CUDART_INF_F)) return top;
    float low = top - 1.0f, high = top;
    for (int step = 0; step < 12; step++) {
        const float tau = 0.5f * (low + high);
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < SAMPLE_TOKENS / 32; k++) {
            const float t = fmaxf(z[k] - tau, 0.0f);
            sum += whole == 1 ? t : whole == 2 ? t * t : t > 0.0f ? powf(t, beta) : 0.0f;
        }
        if (weight * warp_sum(sum) >= 1.0f)
            low = tau;
        else
            high = tau;
    }
    return low;
}

/* The share of the sampled pages above the cut that boxes would not rule out at `tau`; a warp takes a page at a time. */
template <typename T>
__device__ float share_of_boxes(const ekv_cuda_step &s, const item_info &it, const row_info &row, const float *q,
                                const float *bound, int pages, float cut, float tau, int &sampled, probe_reduce *reduce,
                                int &turn) {
    const int lane = threadIdx.x & 31, page = sampled_page((int)threadIdx.x >> 5, pages), block = block_of(s, it, page);
    double needed = 0.0, left = 0.0;
    if (block >= 0 && !(bound[page] <= cut)) {
        const T *box = (const T *)(s.boxes + (it.head * s.index_blocks + block) * s.box_bytes);
        float x = 0.0f;
        for (int d = lane; d < s.k_dim; d += 32) {
            const float low = q[d] * to_float(box[d]), high = q[d] * to_float(box[s.k_dim + d]);
            x += low > high || low != low ? low : high;
        }
        x = warp_sum(x);
        const int first = page << s.page_shift, last = first + page_tokens(s, row.n, page) - 1;
        x += row.slope * (float)((row.slope > 0.0f ? last : first) - row.q_token);
        if (lane == 0) needed = 1.0, left = !(x <= tau);
    }
    reduce->sum2(needed, left, turn);
    sampled = (int)needed;
    return needed > 0.0 ? (float)(left / needed) : 0.0f;
}

/* The share of the sampled tokens in pages above the cut that the sketch would not rule out at `tau`.  Needs the row's table, and
 * w->center. */
__device__ float share_of_sketch(const ekv_cuda_step &s, const item_info &it, const row_info &row, const ekv_cuda_table &table,
                                 const float *bound, int pages, float cut, float tau, const probe_scratch *w, int &sampled,
                                 probe_reduce *reduce, int &turn) {
    double looked = 0.0, left = 0.0;
    if (threadIdx.x < SAMPLE_TOKENS) {
        const int i = (int)threadIdx.x / RUN, slot = (int)threadIdx.x % RUN, page = sampled_page(i, pages), block = block_of(s, it, page);
        const int token = (page << s.page_shift) + slot;
        if (token < row.n && !(bound[page] <= cut)) {
            float sum = CUDART_INF_F;
            if (page_sketched(s, block, page, page_tokens(s, it.n, page))) {
                const uint16_t *codes = (const uint16_t *)sketch_group(s, it, block, 0) + slot;
                sum = start_of_stretch(s, table, w->center[i]);
#pragma unroll 4
                for (int u = 0; u < s.units; u++) {
                    const uint32_t word = codes[u * GROUP];
#pragma unroll
                    for (int k = 0; k < 4; k++) sum += table.entry[(u * 4 + k) * 16 + (word >> 4 * k & 15u)];
                }
            }
            looked = 1.0;
            left = !(add_bias(sum, row, token) <= tau);
        }
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
    if (threadIdx.x < RELAX_BINS) w->count[threadIdx.x] = 0;
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
    const int count = threadIdx.x < RELAX_BINS ? w->count[threadIdx.x] : 0;
    if (threadIdx.x < RELAX_BINS)
        w->mass[threadIdx.x] = count ? (double)count * pow((double)(threadIdx.x + 1) / RELAX_BINS, beta) * (1.0 + 1e-9) : 0.0;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int bin = 0;
    skipped = 0.0;
    for (; bin < RELAX_BINS && skipped + w->mass[bin] <= s.max_mass; bin++) skipped += w->mass[bin];
    relax = (double)bin / RELAX_BINS;
}

} // namespace

#endif
