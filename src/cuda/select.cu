/*
 * Which pages a row reads, from the page bounds or moments that typed.cuh left in page_a and page_b.  The rules are those of
 * src/dispatch/select.c; every comparison is written so that a NaN reads the page.
 *
 *   norms     certified, per item and chunk of pages: bounds of the scores in pages, from norms alone
 *   cut       per row: the k-th largest bound (topk), or tau^ less its margin (gaussian); certified: `probe` in typed.cuh
 *   compact   per item and chunk of pages: the pages that some row reads, in order, with the rows that read them; where the sketch
 *             pays, the tokens
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/common.cuh"
#include "cuda/sketch.cuh"

namespace {

constexpr int CUT_THREADS = 512, COMPACT_THREADS = 256;
constexpr int AHEAD = 4; /* pages, or groups of tokens, that a thread of norms and compact loads at once */

__device__ __forceinline__ ekv_cuda_cut cut_at(double cut, uint32_t order, int tie) {
    ekv_cuda_cut c = {};
    c.cut = cut;
    c.order = order;
    c.tie = tie;
    return c;
}

/* ---- topk ---- */

constexpr int SHORT_LIST = 4096, BATCH = 8; /* BATCH loads of a thread are in flight at once */

struct topk_scratch {
    int count[2048];
    uint32_t order[SHORT_LIST];
    int page[SHORT_LIST];
    int listed, digit, left;
};

/* The order of the k-th largest of values(i), i < n (a value of 0 takes no part; no real bound has it), 11, 11 and 10 bits at a
 * time. k: in, at least 1 and at most the number of values; out, how many of exactly that order belong to the k.  *equal: their
 * number. */
template <typename F>
__device__ uint32_t kth_largest(F values, int n, int &k, int &equal, topk_scratch *w, block_reduce<CUT_THREADS> *reduce,
                                int &turn) {
    uint32_t prefix = 0;
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, width = pass == 2 ? 10 : 11;
        for (int i = threadIdx.x; i < 2048; i += CUT_THREADS) w->count[i] = 0;
        __syncthreads();
        for (int base = 0; base < n; base += CUT_THREADS * BATCH) {
            uint32_t order[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int at = base + i * CUT_THREADS + threadIdx.x;
                order[i] = at < n ? values(at) : 0u;
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (base + i * CUT_THREADS >= n) break;
                const bool in = order[i] && (unsigned long long)order[i] >> (shift + width) ==
                                                (unsigned long long)prefix >> (shift + width);
                const int digit = in ? (int)(order[i] >> shift & ((1u << width) - 1u)) : -1;
                const uint32_t same = __match_any_sync(ALL_LANES, digit); /* few leading digits occur: one addition for all */
                if (in && __ffs(same) - 1 == (int)(threadIdx.x & 31)) atomicAdd(&w->count[digit], __popc(same));
            }
        }
        __syncthreads();
        /* Digits from the top; thread t looks at DIGITS of them. */
        constexpr int DIGITS = 2048 / CUT_THREADS;
        const int first = (1 << width) - 1 - DIGITS * (int)threadIdx.x;
        int mine = 0, total;
#pragma unroll
        for (int i = 0; i < DIGITS; i++) mine += first - i >= 0 ? w->count[first - i] : 0;
        int before = reduce->prefix(mine, total, turn);
#pragma unroll
        for (int i = 0; i < DIGITS; i++) {
            const int here = first - i >= 0 ? w->count[first - i] : 0;
            if (before < k && k <= before + here) w->digit = first - i, w->left = k - before;
            before += here;
        }
        __syncthreads();
        prefix |= (uint32_t)w->digit << shift;
        k = w->left;
        equal = w->count[w->digit];
        __syncthreads();
    }
    return prefix;
}

/* The order of the k-th largest bound among the pages that are not forced, and the index of the last page of exactly that order
 * that still belongs to the k.
 *
 * Where there are at least k groups of pages, few pages are looked at: the k-th largest of the groups' largest bounds is a
 * lower bound of the cut, and only groups that reach it are opened. */
__device__ void cut_topk(const ekv_cuda_step &s, const row_info &row, const float *bound, const ekv_cuda_group *group,
                         int pages, ekv_cuda_cut *out, topk_scratch *w, block_reduce<CUT_THREADS> *reduce) {
    const auto value = [&](int page) -> uint32_t {
        const float x = bound[page];
        return x != x || forced(s, row.n, pages, page) ? 0u : order_of(x);
    };
    const auto best = [&](int g) -> uint32_t { /* 0: no page to choose from */
                                               const int in_group = min(EKV_CUDA_GROUP, pages - g * EKV_CUDA_GROUP);
                                               return group[g].forced < in_group ? order_of(group[g].best) : 0u;
    };
    const int groups = (pages + EKV_CUDA_GROUP - 1) / EKV_CUDA_GROUP;
    int turn = 0, out_of_choice = 0, with_value = 0, total;
    for (int g = threadIdx.x; g < groups; g += CUT_THREADS) out_of_choice += group[g].forced, with_value += best(g) != 0;
    reduce->prefix(out_of_choice, total, turn);
    int k = (int)min((long long)s.budget_pages, (long long)pages) - total, equal;
    if (k <= 0) { /* nothing but the forced pages */
        if (threadIdx.x == 0) *out = cut_at(0.0, 0xffffffffu, -1);
        return;
    }
    if (pages - total <= k) {
        if (threadIdx.x == 0) *out = cut_at(0.0, 0u, 0x7fffffff);
        return;
    }
    uint32_t least = 1;
    reduce->prefix(with_value, total, turn);
    if (k <= total) {
        int rank = k;
        least = kth_largest(best, groups, rank, equal, w, reduce, turn);
    }
    if (threadIdx.x == 0) w->listed = 0;
    __syncthreads();
    const int lane = threadIdx.x & 31;
    for (int base = threadIdx.x - lane; base < groups;
         base += CUT_THREADS) { /* all pages that may belong to the k, in any order */
        uint32_t open = __ballot_sync(ALL_LANES, base + lane < groups && best(base + lane) >= least);
        for (; open; open &= open - 1) {
            const int page = (base + __ffs(open) - 1) * EKV_CUDA_GROUP + lane;
            const uint32_t order = page < pages ? value(page) : 0u;
            if (order < least) continue;
            const int at = atomicAdd(&w->listed, 1);
            if (at < SHORT_LIST) w->order[at] = order, w->page[at] = page;
        }
    }
    __syncthreads();
    const int listed = w->listed;
    uint32_t cut;
    if (listed <= SHORT_LIST)
        cut = kth_largest([&](int i) { return w->order[i]; }, listed, k, equal, w, reduce, turn);
    else
        cut = kth_largest(value, pages, k, equal, w, reduce, turn);
    if (equal == k) {
        if (threadIdx.x == 0) *out = cut_at(0.0, cut, 0x7fffffff);
        return;
    }
    /* The k-th page of that order: thread t counts its own run of pages. */
    const int run = (pages + CUT_THREADS - 1) / CUT_THREADS, begin = min(pages, (int)threadIdx.x * run),
              end = min(pages, begin + run);
    int here = 0;
    for (int page = begin; page < end; page++) here += value(page) == cut;
    const int before = reduce->prefix(here, total, turn);
    if (before < k && k <= before + here) {
        int left = k - before, page = begin;
        while (value(page) != cut || --left > 0) page++;
        *out = cut_at(0.0, cut, page);
    }
}

/* ---- gaussian ---- */

/* The scores that tau^ is estimated from: one normal, or a mixture with one per page. */
struct mixture {
    bool single;
    double mean, deviation, count;
    const float *means, *deviations;
    int pages, n;
    int per_bit;               /* a thread's pages threadIdx.x, + CUT_THREADS, ...: bit i stands for per_bit of them, */
    unsigned long long active; /* and is set if one of them can have mass above the lowest tau that is tried */
};

/* E[max(x - tau, 0)^b] for whole b and its slope, see src/cpu/page.h. */
__device__ __forceinline__ void whole_mass(double mean, double deviation, double tau, int beta, double &value, double &slope) {
    const double s = fmax(deviation, 1e-9), t = (tau - mean) / s, t2 = t * t;
    const double phi = exp(-0.5 * t2) * 0.3989422804014327, tail = 0.5 * erfc(t * 0.7071067811865476);
    const double g1 = fmax(phi - t * tail, 0.0);
    if (beta == 1) {
        value = s * g1;
        slope = tail;
        return;
    }
    const double g2 = fmax((1.0 + t2) * tail - t * phi, 0.0);
    if (beta == 2) {
        value = s * s * g2;
        slope = 2.0 * s * g1;
        return;
    }
    const double g3 = fmax((2.0 + t2) * phi - t * (3.0 + t2) * tail, 0.0);
    value = s * s * s * g3;
    slope = 3.0 * s * s * g2;
}

/* The same for any beta: point i of the trapezoid rule in log t, see src/dispatch/select.c. */
constexpr int POINTS = 96;
__device__ __forceinline__ void quadrature_range(double mean, double deviation, double beta, double tau, int first, int step,
                                                 double &value, double &slope) {
    const double s = fmax(deviation, 1e-9), a = (tau - mean) / s, root = sqrt(a * a + 4.0 * (beta + 1.0));
    const double peak = a > 0.0 ? 2.0 * (beta + 1.0) / (a + root) : 0.5 * (root - a);
    const double least = peak * exp(-35.0 / (beta + 1.0));
    const double low = log(fmax(peak - 9.0, least)), high = log(peak + 9.0), h = (high - low) / (POINTS - 1),
                 scale = beta * log(s);
    double m0 = 0.0, m1 = 0.0;
    for (int i = first; i < POINTS; i += step) {
        const double log_t = low + h * i, t = exp(log_t);
        const double f = exp((beta + 1.0) * log_t + scale - 0.5 * (a + t) * (a + t));
        m0 += f;
        m1 += f / t;
    }
    value = m0 * h * 0.3989422804014327;
    slope = beta * m1 * h * 0.3989422804014327 / s;
}

/* Less than 1e-19 of the page's tokens lie above tau. */
__device__ __forceinline__ bool no_mass(double mean, double deviation, double tau) {
    return mean - tau < -9.0 * deviation - 1e-8;
}

/* Which of the thread's pages can have mass above `low`. */
__device__ void find_active(mixture &m, double low) {
    const int mine = (m.pages + CUT_THREADS - 1) / CUT_THREADS;
    m.per_bit = (mine + 63) / 64;
    m.active = 0;
    for (int base = 0; base < mine; base += BATCH) {
        float mean[BATCH], deviation[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int p = (base + i) * CUT_THREADS + threadIdx.x;
            mean[i] = p < m.pages ? m.means[p] : -CUDART_INF_F;
            deviation[i] = p < m.pages ? m.deviations[p] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (base + i < mine && !no_mass((double)mean[i], (double)deviation[i], low))
                m.active |= 1ull << (base + i) / m.per_bit;
    }
}

/* The mass of the mixture above tau and its slope, the same in all threads. */
__device__ void mixture_mass(const ekv_cuda_step &s, const mixture &m, double beta, double tau, double &value, double &slope,
                             block_reduce<CUT_THREADS> *reduce, int &turn) {
    const int whole = whole_beta(beta);
    if (m.single) {
        if (whole) {
            whole_mass(m.mean, m.deviation, tau, whole, value, slope);
        } else {
            value = slope = 0.0;
            if (threadIdx.x < POINTS) quadrature_range(m.mean, m.deviation, beta, tau, threadIdx.x, POINTS, value, slope);
            reduce->sum2(value, slope, turn);
        }
        value *= m.count;
        slope *= m.count;
        return;
    }
    double sum0 = 0.0, sum1 = 0.0;
    for (unsigned long long bits = m.active; bits; bits &= bits - 1) {
        const int first = (__ffsll((long long)bits) - 1) * m.per_bit;
        for (int i = first; i < first + m.per_bit; i++) {
            const int p = i * CUT_THREADS + threadIdx.x;
            if (p >= m.pages) break;
            const double mean = (double)m.means[p], deviation = (double)m.deviations[p], count = (double)page_tokens(s, m.n, p);
            double v, d;
            if (no_mass(mean, deviation, tau)) continue;
            if (whole)
                whole_mass(mean, deviation, tau, whole, v, d);
            else
                quadrature_range(mean, deviation, beta, tau, 0, 1, v, d);
            sum0 += count * v;
            sum1 += count * d;
        }
    }
    reduce->sum2(sum0, sum1, turn);
    value = sum0;
    slope = sum1;
}

/* value^(1 - 1/beta) */
__device__ __forceinline__ double norm_target(double value, double beta, int whole) {
    return whole == 1 ? 1.0 : whole == 2 ? sqrt(value) : whole == 3 ? cbrt(value) * cbrt(value) : pow(value, 1.0 - 1.0 / beta);
}

/* One normal and a whole beta, by one warp: Newton in f32 finds the neighbourhood, where few steps in double are left to do. */
__device__ double estimate_single(const mixture &m, int whole, double low, double high) {
    const float mean = (float)m.mean, s = fmaxf((float)m.deviation, 1e-9f), n = (float)m.count, b = (float)whole;
    float x = (float)low;
    for (int i = 0; i < 40; i++) {
        const float t = (x - mean) / s, t2 = t * t, phi = expf(-0.5f * t2) * 0.39894228f, tail = 0.5f * erfcf(t * 0.70710678f);
        const float g1 = fmaxf(phi - t * tail, 0.0f), g2 = fmaxf((1.0f + t2) * tail - t * phi, 0.0f);
        const float g3 = fmaxf((2.0f + t2) * phi - t * (3.0f + t2) * tail, 0.0f);
        const float value = n * (whole == 1 ? s * g1 : whole == 2 ? s * s * g2 : s * s * s * g3);
        const float slope = n * b * (whole == 1 ? tail : whole == 2 ? s * g1 : s * s * g2);
        const float next = x + b * (value - (whole == 1 ? 1.0f : whole == 2 ? sqrtf(value) : cbrtf(value * value))) / slope;
        if (!(next > (float)low && next < (float)high)) break;
        const float step = fabsf(next - x);
        x = next;
        if (step <= 1e-5f * (s + fabsf(x))) break;
    }
    double tau = (double)x, value, slope;
    for (int i = 0; i < 200; i++) {
        whole_mass(m.mean, m.deviation, tau, whole, value, slope);
        value *= m.count;
        slope *= m.count;
        if (value >= 1.0)
            low = tau;
        else
            high = tau;
        double next = tau + (double)whole * (value - norm_target(value, 0.0, whole)) / slope;
        if (!(next > low && next < high)) {
            if (next <= low && next > low - 1e6 && value < 1.0)
                low = next - m.deviation; /* the given lower end was no bound */
            else
                next = low + 0.5 * (high - low);
        }
        const bool done = fabs(next - tau) <= 1e-10 * (1.0 + fabs(tau));
        tau = next;
        if (done || !(high - low > 1e-12 * (1.0 + fabs(low)))) break;
    }
    return tau;
}

/* tau^: the mass falls with tau; Newton inside a bracket.  All threads take the same steps. */
__device__ double estimate_tau(const ekv_cuda_step &s, mixture &m, double beta, double low, double high,
                               block_reduce<CUT_THREADS> *reduce, int &turn) {
    __shared__ double s_tau;
    const int whole = whole_beta(beta);
    double value, slope;
    low -= 2.0;
    if (m.single && whole) {
        if (threadIdx.x < 32) {
            const double tau = estimate_single(m, whole, low, high);
            if (threadIdx.x == 0) s_tau = tau;
        }
        __syncthreads();
        return s_tau;
    }
    if (!m.single) find_active(m, low);
    for (int i = 0; i < 60; i++) {
        mixture_mass(s, m, beta, low, value, slope, reduce, turn);
        if (value >= 1.0) break;
        low -= 2.0 * (double)(i + 1);
        if (!m.single) find_active(m, low);
    }
    double tau = low;
    for (int i = 0; i < 100; i++) {
        if (i > 0) mixture_mass(s, m, beta, tau, value, slope, reduce, turn);
        if (value >= 1.0)
            low = tau;
        else
            high = tau;
        double next = tau + beta * (value - norm_target(value, beta, whole)) / slope;
        if (!(next > low && next < high)) next = low + 0.5 * (high - low);
        if (fabs(next - tau) <= 1e-12 * (1.0 + fabs(tau)) || !(high - low > 1e-12 * (1.0 + fabs(low)))) break;
        tau = next;
    }
    return tau;
}

__device__ void cut_gaussian(const ekv_cuda_step &s, const row_info &row, const float *mean, const float *deviation,
                             const ekv_cuda_group *group, int pages, ekv_cuda_cut *out, block_reduce<CUT_THREADS> *reduce) {
    int turn = 0;
    double sum = 0.0, squares = 0.0, typical = 0.0, bad = 0.0, best = -CUDART_INF, reach = -CUDART_INF;
    const int groups = (pages + EKV_CUDA_GROUP - 1) / EKV_CUDA_GROUP;
    for (int g = threadIdx.x; g < groups; g += CUT_THREADS) {
        const ekv_cuda_group x = group[g];
        sum += x.sum;
        squares += x.squares;
        typical += x.typical;
        bad += (double)x.forced;
        best = fmax(best, (double)x.best);
        reach = fmax(reach, (double)x.reach);
    }
    reduce->sum2(sum, squares, turn);
    reduce->sum2(typical, bad, turn);
    best = reduce->max1(best, turn);
    reach = reduce->max1(reach, turn);
    if (bad > 0.0) { /* an unknown or infinite page: no estimate, so read everything */
        if (threadIdx.x == 0) *out = cut_at(-CUDART_INF, 0u, 0);
        return;
    }
    const double n = (double)row.n, one_mean = sum / n, variance = squares / n - one_mean * one_mean; /* of floats, in double */
    const double one_deviation = sqrt(fmax(variance, 0.0));
    mixture m;
    m.single = s.gaussian_model == EKV_GAUSSIAN_SINGLE || (s.gaussian_model == EKV_GAUSSIAN_AUTO && row.slope == 0.0f);
    m.mean = (double)(float)one_mean;
    m.deviation = (double)(float)one_deviation;
    m.count = n;
    m.means = mean;
    m.deviations = deviation;
    m.pages = pages;
    m.n = row.n;
    if (m.single) best = m.mean, reach = m.mean + 40.0 * m.deviation + 1.0;
    const double tau = estimate_tau(s, m, 1.0 / (row.alpha - 1.0), best, reach, reduce, turn);
    const double above = pages > 1 ? tau - typical / (double)(pages - 1) : 0.0;
    const double margin = fmax(s.margin_sigma * one_deviation, s.margin_fraction * fmax(above, 0.0));
    if (threadIdx.x == 0) *out = cut_at(tau - margin, 0u, 0);
}

__global__ void __launch_bounds__(CUT_THREADS) cut_rows(const ekv_cuda_step s) {
    __shared__ topk_scratch s_topk;
    __shared__ block_reduce<CUT_THREADS> s_reduce;
    begin_kernel();
    const long long slot = blockIdx.x;
    const item_info it = describe_item(s, s.first_item + slot / s.rows);
    const row_info row = describe_row(s, it, (int)(slot % s.rows));
    const int pages = (row.n + s.page_size - 1) >> s.page_shift;
    if (pages == 0) return;
    const float *a = s.page_a + slot * s.max_pages;
    const ekv_cuda_group *group = s.group_of_pages + slot * s.groups;
    if (s.policy == EKV_POLICY_TOPK)
        cut_topk(s, row, a, group, pages, s.cut + slot, &s_topk, &s_reduce);
    else
        cut_gaussian(s, row, a, s.page_b + slot * s.max_pages, group, pages, s.cut + slot, &s_reduce);
}

/* ---- certified: bounds by norms ---- */

/* For each row |q| times the largest key norm of each page, ALiBi at the page's best token, and slack: above the exact scores and the
 * scan's, z units; NaN for an unknown page or a norm that is not finite.  The scan's order of additions gives an error of
 * at most (8 CH + 5) <= 37 u |q| |k| before the bias is added (bound_slack in typed.cuh); the bias here is rounded too. */
__global__ void __launch_bounds__(COMPACT_THREADS) norm_bounds(const ekv_cuda_step s) {
    __shared__ row_info s_row[EKV_CUDA_MAX_ROWS];
    __shared__ float s_norm[EKV_CUDA_MAX_ROWS];
    static_assert(COMPACT_THREADS / 32 >= EKV_CUDA_MAX_ROWS, "a warp for each row");
    begin_kernel();
    const long long local_item = blockIdx.x / (unsigned)s.chunks;
    const int chunk = (int)(blockIdx.x % (unsigned)s.chunks), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const item_info it = describe_item(s, s.first_item + local_item);
    if (threadIdx.x == 0) s.looked[local_item * s.chunks + chunk] = 0;
    const int end = min(it.pages, (chunk + 1) * s.chunk_pages);
    if (!(s.levels & EKV_CUDA_NORMS) || chunk * s.chunk_pages >= end) return;
    if (warp < it.rows) {
        const row_info row = describe_row(s, it, warp);
        double squares = 0.0;
        for (int d = lane; d < s.k_dim; d += 32) {
            const float x = load_any(s.q, row.token * s.q_token_stride + row.head * s.q_head_stride + d, s.q_dtype) * row.factor;
            squares += (double)x * (double)x;
        }
        squares = warp_sum(squares);
        if (lane == 0) s_row[warp] = row, s_norm[warp] = __double2float_ru(sqrt(squares) * (1.0 + 1e-12));
    }
    __syncthreads();
    for (int base = chunk * s.chunk_pages + warp * 32; base < end; base += AHEAD * COMPACT_THREADS) {
        int block[AHEAD], count[AHEAD];
        float norm[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int page = base + k * COMPACT_THREADS + lane;
            block[k] = page < end ? block_of(s, it, page) : -1;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            count[k] = block[k] >= 0 ? s.counts[block[k]] : 0;
            norm[k] = block[k] >= 0 ? s.norms[(it.head * s.index_blocks + block[k]) * 2] : 0.0f; /* of an unknown page: not used */
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int p0 = base + k * COMPACT_THREADS, page = p0 + lane, first = page << s.page_shift;
            if (p0 >= end) break;
            for (int r = 0; r < it.rows; r++) {
                const row_info &row = s_row[r];
                if (page >= end || first >= row.n) continue;
                const int tokens = page_tokens(s, row.n, page);
                const float bias = row.slope * (float)((row.slope > 0.0f ? first + tokens - 1 : first) - row.q_token);
                const float dot = __fmul_ru(s_norm[r], norm[k]), slack = (dot + fabsf(bias)) * 0x1p-17f + 0x1p-110f;
                const float bound = __fadd_ru(__fadd_ru(dot, bias), slack);
                s.page_a[(local_item * s.rows + r) * s.max_pages + page] = count[k] >= tokens && bound < 3e38f ? bound : CUDART_NAN_F;
            }
            __syncwarp();
            for (int r = 0; r < it.rows; r++) summarize<true>(s, s_row[r], local_item * s.rows + r, p0);
        }
    }
}

/* ---- compaction ---- */

__device__ __forceinline__ bool selected(const ekv_cuda_step &s, const row_info &row, long long slot, int pages, int page,
                                         const ekv_cuda_cut &cut) {
    if (page >= pages) return false;
    if (s.policy == EKV_POLICY_FULL) return true;
    if (s.policy == EKV_POLICY_PAGES)
        return s.page_mask[((long long)row.token * s.q_heads + row.head) * s.page_mask_stride + page] != 0;
    if (s.policy != EKV_POLICY_CERTIFIED && forced(s, row.n, pages, page)) return true;
    const float a = s.page_a[slot * s.max_pages + page];
    if (a != a) return true;
    if (s.policy == EKV_POLICY_CERTIFIED) { /* the second comparison is that of relax_cut */
        const double above = (double)a - cut.cut;
        return !(above <= 0.0 || above < cut.relax);
    }
    if (s.policy == EKV_POLICY_TOPK) {
        const uint32_t order = order_of(a);
        return order > cut.order || (order == cut.order && page <= cut.tie);
    }
    return !((double)a + s.zeta * (double)s.page_b[slot * s.max_pages + page] <= cut.cut);
}

/* How many pages, counted once each by one lane, have tokens in masks of consecutive groups, AHEAD to a lane.  A page has 1 << shift
 * groups, at most 16. */
__device__ __forceinline__ int pages_of_masks(const uint32_t (&mask)[AHEAD], int shift) {
    int pages = 0;
    uint32_t any = 0;
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        any |= mask[k];
        if ((k + 1) % (1 << min(shift, 2)) == 0) pages += any != 0, any = 0;
    }
    if (shift <= 2) return pages;
    const int lanes = 1 << (shift - 2), lane = threadIdx.x & 31; /* of a page */
    const uint32_t same = __ballot_sync(ALL_LANES, pages != 0) & ((1u << lanes) - 1u) << (lane & ~(lanes - 1));
    return __ffs((int)same) == lane + 1;
}
static_assert(AHEAD == 4, "the shifts by 2");

/* The tokens of a chunk that some row's sketch bounds do not rule out, in order.  A thread takes AHEAD groups of 16 at once. */
__device__ void compact_tokens(const ekv_cuda_step &s, const item_info &it, long long local_item, int chunk, const row_info *rows,
                               const ekv_cuda_cut *cuts, int *row_pages, int *row_tokens, block_reduce<COMPACT_THREADS> *reduce) {
    __shared__ uint32_t s_skipped[EKV_CUDA_MAX_ROWS];
    __shared__ int s_union_pages;
    if ((int)threadIdx.x < it.rows) s_skipped[threadIdx.x] = skipped_bits(cuts[threadIdx.x]);
    if (threadIdx.x == 0) s_union_pages = 0;
    __syncthreads();
    const int shift = s.page_shift - 4, lane = threadIdx.x & 31; /* groups of a page: 1 << shift */
    const int begin = chunk * s.chunk_pages << shift, end = min(it.pages, (chunk + 1) * s.chunk_pages) << shift;
    int32_t *list = s.read_entry + (local_item * s.chunks + chunk) * s.read_stride;
    int kept = 0, turn = 0;
    for (int base = begin; base < end; base += AHEAD * COMPACT_THREADS) {
        const int group = base + (int)threadIdx.x * AHEAD;
        uint32_t mask[AHEAD] = {};
        for (int r = 0; r < it.rows; r++) {
            const long long slot = local_item * s.rows + r;
            const float cut = (float)cuts[r].cut;
            const uint32_t skipped = s_skipped[r];
            bool needed[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                needed[k] = group + k < end && (group + k) * GROUP < rows[r].n &&
                            !(s.page_a[slot * s.max_pages + ((group + k) >> shift)] <= cut);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (!needed[k]) continue;
                const uint4 *bits = (const uint4 *)(s.above + slot * s.max_pages * s.page_size + (group + k) * GROUP);
                const uint4 low = bits[0], high = bits[1];
                const uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    mask[k] |= (uint32_t)((word[i] & 0xffffu) > skipped) << (2 * i);
                    mask[k] |= (uint32_t)((word[i] >> 16) > skipped) << (2 * i + 1);
                }
            }
        }
        int mine = 0;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            mask[k] &= (1u << max(0, min(GROUP, it.n - (group + k) * GROUP))) - 1u;
            mine += __popc(mask[k]);
        }
        int total, to = kept + reduce->prefix(mine, total, turn);
        kept += total;
        if (total == 0) continue;
        for (int r = 0; r < it.rows; r++) {
            uint32_t own[AHEAD];
            int tokens = 0;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                own[k] = mask[k] & ((1u << max(0, min(GROUP, rows[r].n - (group + k) * GROUP))) - 1u);
                tokens += __popc(own[k]);
            }
            tokens = warp_sum(tokens);
            const int pages = warp_sum(pages_of_masks(own, shift));
            if (lane == 0 && tokens) {
                atomicAdd(&row_tokens[r], tokens);
                atomicAdd(&row_pages[r], pages);
            }
        }
        const int pages = warp_sum(pages_of_masks(mask, shift));
        if (lane == 0 && pages) atomicAdd(&s_union_pages, pages);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            for (; mask[k]; mask[k] &= mask[k] - 1) list[to++] = (group + k) * GROUP + __ffs((int)mask[k]) - 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s.read_count[local_item * s.chunks + chunk] = s.read_tokens[local_item * s.chunks + chunk] = kept;
        s.read_pages[local_item * s.chunks + chunk] = s_union_pages;
    }
}

__global__ void __launch_bounds__(COMPACT_THREADS) compact_pages(const ekv_cuda_step s) {
    __shared__ row_info s_row[EKV_CUDA_MAX_ROWS];
    __shared__ ekv_cuda_cut s_cut[EKV_CUDA_MAX_ROWS];
    __shared__ int s_pages[EKV_CUDA_MAX_ROWS], s_tokens[EKV_CUDA_MAX_ROWS], s_union;
    __shared__ block_reduce<COMPACT_THREADS> s_reduce;
    begin_kernel();
    const long long local_item = blockIdx.x / (unsigned)s.chunks;
    const int chunk = (int)(blockIdx.x % (unsigned)s.chunks);
    const item_info it = describe_item(s, s.first_item + local_item);
    if ((int)threadIdx.x < s.rows) {
        const int r = threadIdx.x;
        s_row[r] = describe_row(s, it, r);
        if (s.cut && s_row[r].n > 0) s_cut[r] = s.cut[local_item * s.rows + r];
        s_pages[r] = s_tokens[r] = 0;
    }
    if (threadIdx.x == 0) s_union = 0;
    __syncthreads();
    const bool tokens_alone = sketch_pays(s, local_item);
    if (tokens_alone) compact_tokens(s, it, local_item, chunk, s_row, s_cut, s_pages, s_tokens, &s_reduce);
    const int begin = chunk * s.chunk_pages, end = tokens_alone ? begin : min(it.pages, begin + s.chunk_pages);
    int32_t *read_page = s.read_entry + (local_item * s.chunks + chunk) * s.read_stride;
    uint32_t *read_mask = s.read_mask + (local_item * s.chunks + chunk) * s.chunk_pages;
    int kept = 0, turn = 0;
    for (int base = begin; base < end; base += COMPACT_THREADS) {
        const int page = base + threadIdx.x;
        uint32_t mask = 0;
        int most = 0;
        for (int r = 0; r < it.rows; r++) {
            const int pages = (s_row[r].n + s.page_size - 1) >> s.page_shift;
            const bool take = page < end && selected(s, s_row[r], local_item * s.rows + r, pages, page, s_cut[r]);
            const int tokens = take ? page_tokens(s, s_row[r].n, page) : 0;
            mask |= (uint32_t)take << r;
            most = max(most, tokens);
            const int warp_pages = __popc(__ballot_sync(ALL_LANES, take)), warp_tokens = warp_sum(tokens);
            if ((threadIdx.x & 31) == 0 && warp_pages) {
                atomicAdd(&s_pages[r], warp_pages);
                atomicAdd(&s_tokens[r], warp_tokens);
            }
        }
        const int union_tokens = warp_sum(most);
        if ((threadIdx.x & 31) == 0 && union_tokens) atomicAdd(&s_union, union_tokens);
        int total;
        const int before = s_reduce.prefix(mask != 0, total, turn);
        if (mask) {
            read_page[kept + before] = page;
            read_mask[kept + before] = mask;
        }
        kept += total;
    }
    __syncthreads();
    if (threadIdx.x == 0 && !tokens_alone) {
        s.read_count[local_item * s.chunks + chunk] = s.read_pages[local_item * s.chunks + chunk] = kept;
        s.read_tokens[local_item * s.chunks + chunk] = s_union;
    }
    if ((int)threadIdx.x < s.rows) {
        s.row_pages[(local_item * s.rows + threadIdx.x) * s.chunks + chunk] = s_pages[threadIdx.x];
        s.row_tokens[(local_item * s.rows + threadIdx.x) * s.chunks + chunk] = s_tokens[threadIdx.x];
    }
}

/* ---- the stages on their own ---- */

/* From z units to scores, to the caller's memory; or the selection as bytes.  A block takes a chunk of an item's pages. */
__global__ void __launch_bounds__(COMPACT_THREADS) write_query(const ekv_cuda_step s) {
    begin_kernel();
    const long long local_item = blockIdx.x / (unsigned)s.chunks;
    const int chunk = (int)(blockIdx.x % (unsigned)s.chunks);
    const item_info it = describe_item(s, s.first_item + local_item);
    const int begin = chunk * s.chunk_pages, end = min(it.pages, begin + s.chunk_pages);
    for (int r = 0; r < it.rows; r++) {
        const row_info row = describe_row(s, it, r);
        const int pages = (row.n + s.page_size - 1) >> s.page_shift;
        const long long slot = local_item * s.rows + r, at = ((long long)row.token * s.q_heads + row.head) * s.query_stride;
        const double unit = row.softmax ? 1.0 : 1.0 / (row.alpha - 1.0);
        ekv_cuda_cut cut = {};
        if (s.cut && row.n > 0) cut = s.cut[slot];
        for (int page = begin + threadIdx.x; page < min(end, pages); page += COMPACT_THREADS) {
            if (s.query_kind == EKV_CUDA_QUERY_SELECTION) {
                ((uint8_t *)s.query_a)[at + page] = selected(s, row, slot, pages, page, cut);
            } else if (s.query_kind == EKV_CUDA_QUERY_BOUNDS) {
                const float bound = s.page_a[slot * s.max_pages + page];
                const float score = (float)((bound != bound ? CUDART_INF : (double)bound) * unit);
                ((float *)s.query_a)[at + page] = score < CUDART_INF_F ? nextafterf(score, CUDART_INF_F) : score;
            } else {
                ((float *)s.query_a)[at + page] = (float)((double)s.page_a[slot * s.max_pages + page] * unit);
                ((float *)s.query_b)[at + page] = (float)((double)s.page_b[slot * s.max_pages + page] * unit);
            }
        }
    }
}

/* ---- per-head parameters ---- */

struct head_block {
    ekv_cuda_head head[EKV_CUDA_HEADS_PER_LAUNCH];
};
__global__ void copy_heads(ekv_cuda_head *to, const head_block from, int n) {
    begin_kernel();
    if ((int)threadIdx.x < n) to[threadIdx.x] = from.head[threadIdx.x];
}

} // namespace

extern "C" int ekv_cuda_launch_norms(const ekv_cuda_step *s, void *stream) {
    return (int)start(norm_bounds, *s, s->round_items * s->chunks, COMPACT_THREADS, stream);
}

extern "C" int ekv_cuda_launch_cut(const ekv_cuda_step *s, void *stream) {
    return (int)start(cut_rows, *s, s->round_items * s->rows, CUT_THREADS, stream);
}

extern "C" int ekv_cuda_launch_compact(const ekv_cuda_step *s, void *stream) {
    return (int)start(compact_pages, *s, s->round_items * s->chunks, COMPACT_THREADS, stream);
}

extern "C" int ekv_cuda_launch_query(const ekv_cuda_step *s, void *stream) {
    return (int)start(write_query, *s, s->round_items * s->chunks, COMPACT_THREADS, stream);
}

/* The values travel in the launch itself, so that a captured graph keeps them. */
extern "C" int ekv_cuda_launch_heads(ekv_cuda_head *to, const ekv_cuda_head *from, int32_t n, void *stream) {
    for (int32_t first = 0; first < n; first += EKV_CUDA_HEADS_PER_LAUNCH) {
        head_block block;
        const int32_t count = n - first < EKV_CUDA_HEADS_PER_LAUNCH ? n - first : EKV_CUDA_HEADS_PER_LAUNCH;
        for (int32_t i = 0; i < EKV_CUDA_HEADS_PER_LAUNCH; i++) block.head[i] = from[first + (i < count ? i : 0)];
        const cudaError_t error = start_plain(copy_heads, 1, EKV_CUDA_HEADS_PER_LAUNCH, stream, to + first, block, count);
        if (error != cudaSuccess) return (int)error;
    }
    return 0;
}
