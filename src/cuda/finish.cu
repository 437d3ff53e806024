/*
 * From candidate lists to the output: the exact solution of each row, the values of its support, softmax's combination, the
 * bound E and the report.
 *
 * The solution is canonical (src/cpu/entmax.h): it has the same bits for every list that contains the support.  Sums over the
 * support are taken by rank, thread t of a team of N adding the ranks t, t + N, ...; values are summed by rank too, in units of
 * EKV_CUDA_SUPER ranks, so that it does not matter how many blocks share the work.  The sum that decides about a doubtful token
 * (step 2 there) is taken in fixed point, where order does not matter.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/common.cuh"
#include "cuda/sketch.cuh"

namespace {

constexpr int FINISH_THREADS = 512, MASS_THREADS = 256;
constexpr int HELD = 2048;    /* candidates that are kept in shared memory */
constexpr int PER_THREAD = 4; /* list entries that a thread takes at once when a list is compacted */
constexpr int MAX_SEGMENTS = EKV_CUDA_MAX_SPLITS * EKV_CUDA_WARPS;

/* Lists of up to SMALL_LIST, and supports of up to SMALL, are the work of one warp: they are short after a first estimate, and
 * then barriers and block-wide sums would take most of the time. */
constexpr int SMALL_LIST = 1024, SMALL = 256;

typedef block_reduce<FINISH_THREADS> finish_reduce;

/* Who solves a row: one warp, or the block.  Sums and maxima come back in all threads of the team. */
struct warp_team {
    static constexpr int SIZE = 32;
    __device__ __forceinline__ int rank() const { return threadIdx.x & 31; }
    __device__ __forceinline__ void sync() { __syncwarp(); }
    __device__ __forceinline__ void sum2(double &x, double &y) {
        x = warp_sum(x);
        y = warp_sum(y);
    }
    __device__ __forceinline__ void sum2(float &x, float &y) {
        x = warp_sum(x);
        y = warp_sum(y);
    }
    __device__ __forceinline__ double max1(double x) {
#pragma unroll
        for (int m = 16; m > 0; m >>= 1) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, m));
        return x;
    }
    __device__ __forceinline__ unsigned long long sum_u64(unsigned long long x) { return warp_sum(x); }
    __device__ __forceinline__ int prefix(int x, int &total) {
        int sum = x;
#pragma unroll
        for (int m = 1; m < 32; m <<= 1) {
            const int other = __shfl_up_sync(ALL_LANES, sum, m);
            if (rank() >= m) sum += other;
        }
        total = __shfl_sync(ALL_LANES, sum, 31);
        return sum - x;
    }
};

struct block_team {
    static constexpr int SIZE = FINISH_THREADS;
    finish_reduce *reduce;
    int turn;
    __device__ __forceinline__ int rank() const { return threadIdx.x; }
    __device__ __forceinline__ void sync() { __syncthreads(); }
    __device__ __forceinline__ void sum2(double &x, double &y) { reduce->sum2(x, y, turn); }
    __device__ __forceinline__ void sum2(float &x, float &y) {
        double a = (double)x, b = (double)y;
        reduce->sum2(a, b, turn);
        x = (float)a;
        y = (float)b;
    }
    __device__ __forceinline__ double max1(double x) { return reduce->max1(x, turn); }
    __device__ __forceinline__ unsigned long long sum_u64(unsigned long long x) { return reduce->sum_u64(x, turn); }
    __device__ __forceinline__ int prefix(int x, int &total) { return reduce->prefix(x, total, turn); }
};

/* A row's list: in shared memory if it is short, else where the scan left it. */
struct row_list {
    float *z;
    int *token;
    float *weight;
    int n;
};

/* ---- values ---- */

/* The weighted sum of up to EKV_CUDA_SUPER value rows, ranks in order: group g of the block takes ranks g, g + groups, ... in
 * f32, the groups are added in double.  out[i] is element threadIdx.x + i * FINISH_THREADS.  Ends in a barrier. */
template <typename T, bool VEC>
__device__ void sum_values(const ekv_cuda_step &s, const item_info &it, const int *token, const float *weight, int count,
                           float *scratch, double (&out)[2]) {
    constexpr int UNROLL = 4;
    int lanes = 1;
    while (lanes * 8 < s.v_dim) lanes <<= 1;
    const int groups = FINISH_THREADS / lanes, group = threadIdx.x / lanes, first = threadIdx.x % lanes * 8,
              left = s.v_dim - first;
    const T *values = (const T *)s.v + it.head * s.v_head_stride + first;
    float sum[8];
#pragma unroll
    for (int e = 0; e < 8; e++) sum[e] = 0.0f;
    for (int i0 = group; i0 < count; i0 += groups * UNROLL) {
        chunk8<T, VEC> raw[UNROLL];
        float w[UNROLL];
        long long at[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const int i = i0 + k * groups;
            w[k] = i < count ? weight[i] : 0.0f;
            at[k] = -1;
            if (w[k] != 0.0f) {
                const int t = token[i], block = block_of(s, it, t >> s.page_shift);
                at[k] = block * s.v_block_stride + (t & (s.page_size - 1)) * s.v_token_stride;
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (at[k] >= 0 && left > 0)
                raw[k].load(values + at[k], left);
            else
                raw[k].clear();
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            float x[8];
            raw[k].get(x);
            if (w[k] != 0.0f)
#pragma unroll
                for (int e = 0; e < 8; e++) sum[e] = fmaf(w[k], x[e], sum[e]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 8; e++) scratch[threadIdx.x * 8 + e] = sum[e];
    __syncthreads();
    out[0] = out[1] = 0.0;
    const int used = min(groups, count);
    for (int i = 0, d = threadIdx.x; d < s.v_dim; i++, d += FINISH_THREADS)
        for (int k = 0; k < used; k++) out[i] += (double)scratch[k * lanes * 8 + d];
    __syncthreads();
}

__device__ __forceinline__ void write_out(const ekv_cuda_step &s, const row_info &row, int d, float x) {
    store_any(s.out, row.token * s.out_token_stride + row.head * s.out_head_stride + d, s.out_dtype, x);
}

/* ---- lists ---- */

/* The candidates of all segments above the threshold, in token order, to the beginning of the slot's list: what is written
 * never passes what has been read.  Short lists end in shared memory too. */
__device__ int gather_candidates(const ekv_cuda_step &s, long long slot, const int *prefix, int segments, float threshold,
                                 float *held_z, int *held_token, finish_reduce *reduce, int &turn) {
    float *z = s.list_z + slot * s.list_stride;
    int *token = s.list_token + slot * s.list_stride;
    const int total = prefix[segments];
    int kept = 0;
    for (int base = 0; base < total; base += FINISH_THREADS * PER_THREAD) {
        const int first = base + threadIdx.x * PER_THREAD, last = min(first + PER_THREAD, total);
        float my_z[PER_THREAD];
        int my_token[PER_THREAD], mine = 0;
        uint32_t keep = 0;
        if (first < total) {
            int low = 0, high = segments - 1; /* the last segment that begins at or before `first` */
            while (low < high) {
                const int middle = (low + high + 1) >> 1;
                if (prefix[middle] <= first)
                    low = middle;
                else
                    high = middle - 1;
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                if (first + i >= last) continue;
                while (prefix[low + 1] <= first + i) low++;
                const long long at = low * s.segment + (first + i - prefix[low]);
                my_z[i] = z[at];
                my_token[i] = token[at];
                const bool k = !(my_z[i] <= threshold);
                keep |= (uint32_t)k << i;
                mine += k;
            }
        }
        int sum;
        int to = kept + reduce->prefix(mine, sum, turn);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (!(keep >> i & 1)) continue;
            z[to] = my_z[i];
            token[to] = my_token[i];
            if (to < HELD) held_z[to] = my_z[i], held_token[to] = my_token[i];
            to++;
        }
        kept += sum;
    }
    __syncthreads();
    return kept;
}

/* Keeps the entries with z >= lowest, in place and in order; returns their number. */
template <typename Team> __device__ int compact_support(row_list &a, float lowest, Team &team) {
    int kept = 0;
    for (int base = 0; base < a.n; base += Team::SIZE * PER_THREAD) {
        float my_z[PER_THREAD];
        int my_token[PER_THREAD], mine = 0;
        uint32_t keep = 0;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int at = base + team.rank() * PER_THREAD + i;
            if (at >= a.n) continue;
            my_z[i] = a.z[at];
            my_token[i] = a.token[at];
            const bool k = my_z[i] >= lowest;
            keep |= (uint32_t)k << i;
            mine += k;
        }
        int sum;
        team.sync(); /* all have read what may now be overwritten */
        int to = kept + team.prefix(mine, sum);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (!(keep >> i & 1)) continue;
            a.z[to] = my_z[i];
            a.token[to++] = my_token[i];
        }
        kept += sum;
        team.sync();
    }
    return kept;
}

/* ---- the solution ---- */

/* Out of line: unrolled into every loop it would make most of the kernel's code. */
__device__ __noinline__ double any_power(double x, double y) { return x > 0.0 ? pow(x, y) : 0.0; }

__device__ __forceinline__ double beta_power(double t, double beta, int whole) {
    return whole == 1 ? t : whole == 2 ? t * t : whole == 3 ? t * t * t : any_power(t, beta);
}

/* Sums of t^beta and of t^(beta - 1) over t = d - tau > 0, by position in the list. */
template <typename Team>
__device__ void list_sums(const row_list &a, double z_max, double tau, double beta, int whole, double &s0, double &s1,
                          Team &team) {
    s0 = s1 = 0.0;
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE) {
        const double t = (double)a.z[i] - z_max - tau;
        if (!(t > 0.0)) continue;
        const double p = beta_power(t, beta, whole);
        s0 += p;
        s1 += whole == 1 ? 1.0 : whole == 2 ? t : whole == 3 ? t * t : p / fmax(t, 1e-300);
    }
    team.sum2(s0, s1);
}

/* beta >= 1: Newton from the left on the norm, which never passes the root. */
template <typename Team>
__device__ double newton_from_left(const row_list &a, double z_max, double beta, int whole, double tau, double enough,
                                   Team &team) {
    for (int step = 0; step < 100; step++) {
        double s0, s1;
        list_sums(a, z_max, tau, beta, whole, s0, s1, team);
        const double target = whole == 1 ? 1.0 : whole == 2 ? sqrt(s0) : any_power(s0, 1.0 - 1.0 / beta);
        const double delta = (s0 - target) / s1;
        if (!(tau + delta > tau)) break;
        tau += delta;
        if (delta < enough) break;
    }
    return tau;
}

/* beta < 1: the sum is not convex; Newton steps inside a bracket that is halved when they leave it. */
template <typename Team>
__device__ __noinline__ double safeguarded(const row_list &a, double z_max, double beta, double low, double high, Team &team) {
    double tau = low;
    for (int step = 0; step < 200; step++) {
        double s0, s1;
        list_sums(a, z_max, tau, beta, 0, s0, s1, team);
        if (s0 >= 1.0)
            low = tau;
        else
            high = tau;
        double next = tau + (s0 - 1.0) / (beta * s1);
        if (!(next > low && next < high)) next = low + 0.5 * (high - low);
        if (next == tau || next == low || next == high) break;
        tau = next;
    }
    return low;
}

/* Whether a token of score z would belong: sum over z_j > z of (z_j - z)^beta < 1, in units of 2^-52.  Near tau the sum is near
 * 1, so it does not overflow; terms are clamped so that it cannot. */
template <typename Team> __device__ __noinline__ bool belongs(const row_list &a, float z, double beta, int whole, Team &team) {
    unsigned long long sum = 0;
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE) {
        const double t = (double)a.z[i] - (double)z;
        if (t > 0.0) sum += (unsigned long long)(fmin(beta_power(t, beta, whole), 2.0) * 0x1p52);
        sum = min(sum, 1ull << 53);
    }
    return team.sum_u64(sum) < 1ull << 52;
}

/* The lowest score that belongs to the support, given tau to within TAU_SLACK / 4. */
template <typename Team>
__device__ float lowest_of_support(const row_list &a, double z_max, double tau, double beta, int whole, Team &team) {
    double doubtful = 0.0, unused = 0.0;
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE) {
        const double d = (double)a.z[i] - z_max;
        doubtful += d >= tau - TAU_SLACK && d <= tau + TAU_SLACK;
    }
    team.sum2(doubtful, unused);
    if (doubtful == 0.0) return __double2float_ru(z_max + tau); /* nothing lies between tau and there, wherever it rounds */
    uint32_t low = order_of(__double2float_rd(z_max + tau - TAU_SLACK)),
             high = order_of(__double2float_ru(z_max + tau + TAU_SLACK));
    while (low + 1 < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (belongs(a, from_order(middle), beta, whole, team))
            high = middle;
        else
            low = middle;
    }
    return from_order(high);
}

/* tau - z_max from the support alone (step 3). */
template <typename Team> __device__ double tau_of_support(const row_list &a, double z_max, double beta, int whole, Team &team) {
    if (beta < 1.0) {
        double lowest = 0.0;
#pragma unroll 1
        for (int i = team.rank(); i < a.n; i += Team::SIZE) lowest = fmin(lowest, (double)a.z[i] - z_max);
        lowest = -team.max1(-lowest);
        return safeguarded(a, z_max, beta, -1.0, lowest, team);
    }
    if (whole == 0) return newton_from_left(a, z_max, beta, 0, -1.0, 0.0, team);
    const double n = (double)a.n;
    double sum = 0.0, unused = 0.0, squares = 0.0, cubes = 0.0;
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE) sum += (double)a.z[i] - z_max;
    team.sum2(sum, unused);
    const double mean = sum / n;
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE) {
        const double c = (double)a.z[i] - z_max - mean;
        squares += c * c;
        cubes += c * c * c;
    }
    team.sum2(squares, cubes);
    if (whole == 1) return mean - 1.0 / n;
    if (whole == 2) {
        const double rest = 1.0 - squares;
        return mean - sqrt(rest > 0.0 ? rest / n : 0.0);
    }
    double x = 1.0 + mean;
    for (int step = 0; step < 100; step++) {
        const double f = (n * x * x + 3.0 * squares) * x + cubes - 1.0, slope = 3.0 * (n * x * x + squares);
        const double next = x - f / slope;
        if (!(next < x)) break;
        x = next;
    }
    return mean - x;
}

/* A lower bound of tau - top in f32, but for rounding: the iteration of raise_floor (typed.cuh).  Whole powers up to 3 are near
 * the root after it; with a power above 64 nothing is gained. */
template <typename Team>
__device__ __forceinline__ float estimate_tau(const row_list &a, float top, float tau, int power, Team &team) {
    if (power > 64) return tau;
#pragma unroll 1
    for (int step = 0; step < 6; step++) {
        float f0 = 0.0f, f1 = 0.0f;
#pragma unroll 4
        for (int i = team.rank(); i < a.n; i += Team::SIZE) {
            const float t = fmaxf(a.z[i] - top - tau, 0.0f);
            float u = 1.0f; /* t^(power - 1) */
            if (power == 2) {
                u = t;
            } else if (power > 2) {
                float x = t;
                for (int k = power - 1; k > 0; k >>= 1, x *= x)
                    if (k & 1) u *= x;
            }
            f0 = fmaf(u, t, f0);
            f1 += power == 1 ? (t > 0.0f ? 1.0f : 0.0f) : u;
        }
        team.sum2(f0, f1);
        if (!(f0 > 1.0f)) break;
        const float target = power == 1 ? 1.0f : power == 2 ? sqrtf(f0) : powf(f0, 1.0f - 1.0f / (float)power);
        const float delta = (f0 - target) / f1;
        if (!(delta > 0.0f)) break;
        tau = fminf(tau + delta, 0.0f);
        if (delta < 1e-5f) break;
    }
    return tau;
}

/* Steps 1 and 2: the list becomes the support.  Returns its largest score; NaN if there is a NaN or +infinity, -infinity if
 * nothing can have weight, and then the list is empty. */
template <typename Team>
__device__ __forceinline__ double find_support(row_list &a, double alpha, int power, float threshold, Team &team) {
    const double beta = 1.0 / (alpha - 1.0);
    const int whole = whole_beta(beta);
    double top = -CUDART_INF;
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE) { /* +infinity stands for a NaN too */
        const float z = a.z[i];
        top = fmax(top, z < CUDART_INF_F ? (double)z : CUDART_INF);
    }
    top = team.max1(top);
    if (!(fabs(top) < CUDART_INF)) {
        a.n = 0;
        return top > 0.0 ? CUDART_NAN : top;
    }
    double tau = fmax(-1.0, (double)threshold - top);
    if (a.n > 64 && beta >= 1.0) { /* a lower bound in f32 leaves little to do in double */
        tau = fmax(tau, (double)estimate_tau(a, (float)top, (float)tau, power, team) - LIST_MARGIN);
        a.n = compact_support(a, __double2float_rd(top + tau), team);
    }
    if (beta < 1.0)
        tau = safeguarded(a, top, beta, tau, -any_power((double)a.n, 1.0 - alpha), team);
    else
        tau = newton_from_left(a, top, beta, whole, tau, 1e-13, team);
    a.n = compact_support(a, lowest_of_support(a, top, tau, beta, whole, team), team);
    return top;
}

/* Step 3: weights and tau (absolute) from the support alone. */
template <typename Team>
__device__ __forceinline__ double weigh_support(const row_list &a, double top, double alpha, Team &team) {
    const double beta = 1.0 / (alpha - 1.0);
    const int whole = whole_beta(beta);
    const double tau = tau_of_support(a, top, beta, whole, team);
    double scale = 1.0, unused = 0.0;
    if (beta < 1.0) { /* the slope is unbounded at tau, so the last rounding of tau shows: normalise */
        double sum = 0.0;
#pragma unroll 1
        for (int i = team.rank(); i < a.n; i += Team::SIZE)
            sum += beta_power(fmax((double)a.z[i] - top - tau, 0.0), beta, whole);
        team.sum2(sum, unused);
        scale = 1.0 / sum;
    }
#pragma unroll 1
    for (int i = team.rank(); i < a.n; i += Team::SIZE)
        a.weight[i] = (float)(beta_power(fmax((double)a.z[i] - top - tau, 0.0), beta, whole) * scale);
    return top + tau;
}

struct solution {
    double top, tau;
    int n;
};

/* The block's versions are out of line: most rows are the work of a warp. */
__device__ __noinline__ double find_by_block(row_list &a, double alpha, int power, float threshold, block_team &block) {
    return find_support(a, alpha, power, threshold, block);
}
__device__ __noinline__ double weigh_by_block(const row_list &a, double top, double alpha, block_team &block) {
    return weigh_support(a, top, alpha, block);
}
__device__ __noinline__ double weigh_by_warp(const row_list &a, double top, double alpha, warp_team &warp) {
    return weigh_support(a, top, alpha, warp);
}

/* Solves a list in place: on return it is the support with its weights.  tau is absolute; NaN for bad scores.  `held`: the list
 * in shared memory, which short lists are in.  Which team takes step 3, and so the order of its sums, depends on the size of
 * the support alone. */
__device__ __forceinline__ double solve(row_list &a, row_list held, double alpha, int power, float threshold, solution *shared,
                                        block_team &block) {
    warp_team warp;
    if (a.n <= SMALL_LIST) {
        if (threadIdx.x < 32) {
            held.n = a.n;
            const double top = find_support(held, alpha, power, threshold, warp);
            const double tau = held.n > 0 && held.n <= SMALL ? weigh_support(held, top, alpha, warp) : top;
            if (threadIdx.x == 0) *shared = {top, tau, held.n};
        }
        __syncthreads();
        a.n = shared->n;
        if (a.n <= SMALL) return shared->tau;
    } else {
        const double top = find_by_block(a, alpha, power, threshold, block);
        if (a.n == 0) return top;
        if (threadIdx.x == 0) *shared = {top, top, a.n};
        __syncthreads();
        if (a.n <= SMALL) {
            if (threadIdx.x < 32) {
                const double tau = weigh_by_warp(a, top, alpha, warp);
                if (threadIdx.x == 0) shared->tau = tau;
            }
            __syncthreads();
            return shared->tau;
        }
    }
    const double tau = weigh_by_block(a, shared->top, alpha, block);
    __syncthreads();
    return tau;
}

/* ---- kernels ---- */

union finish_scratch {
    int prefix[MAX_SEGMENTS + 1];
    float sums[FINISH_THREADS * 8];
};

/* One row: merges its candidate lists, solves, and, for a support of up to EKV_CUDA_SUPER, sums the values and writes the
 * output. */
template <typename T, bool VEC> __global__ void __launch_bounds__(FINISH_THREADS) finish_rows(const ekv_cuda_step s) {
    __shared__ finish_scratch s_scratch;
    __shared__ finish_reduce s_reduce;
    __shared__ solution s_solution;
    __shared__ float s_z[HELD], s_weight[HELD];
    __shared__ int s_token[HELD];
    begin_kernel();
    const long long slot = blockIdx.x;
    const item_info it = describe_item(s, s.first_item + slot / s.rows);
    const row_info row = describe_row(s, it, (int)(slot % s.rows));
    if (!row.active || row.softmax) {
        if (threadIdx.x == 0) s.result[slot].support = 0;
        return;
    }
    const int segments = s.splits * EKV_CUDA_WARPS;
    int turn = 0, before = 0;
    for (int base = 0; base < segments; base += FINISH_THREADS) { /* prefix sums of the segments' counts */
        const int i = base + threadIdx.x;
        const int count = i < segments ? s.segment_count[slot * segments + i] : 0;
        int total;
        const int at = before + s_reduce.prefix(count, total, turn);
        if (i < segments) s_scratch.prefix[i] = at;
        before += total;
    }
    if (threadIdx.x == 0) s_scratch.prefix[segments] = before;
    double best = -CUDART_INF;
    for (int i = threadIdx.x; i < s.splits; i += FINISH_THREADS) best = fmax(best, (double)s.floor[slot * s.splits + i]);
    const float threshold = (float)s_reduce.max1(best, turn);
    row_list a;
    a.n = gather_candidates(s, slot, s_scratch.prefix, segments, threshold, s_z, s_token, &s_reduce, turn);
    const bool held = a.n <= HELD;
    a.z = held ? s_z : s.list_z + slot * s.list_stride;
    a.token = held ? s_token : s.list_token + slot * s.list_stride;
    a.weight = held ? s_weight : s.weight + slot * s.list_stride;
    block_team team = {&s_reduce, turn};
    double tau = solve(a, {s_z, s_token, s_weight, 0}, row.alpha, row.power, threshold, &s_solution, team);
    if (it.invalid) tau = CUDART_NAN;
    if (threadIdx.x == 0) {
        s.result[slot] = {tau, a.n, CUDART_NAN, CUDART_NAN};
        s.ticket[slot] = 0;
    }
    if (held && (a.n > EKV_CUDA_SUPER || s.report)) /* for the kernels that follow */
        for (int i = threadIdx.x; i < a.n; i += FINISH_THREADS) {
            s.list_z[slot * s.list_stride + i] = a.z[i];
            s.list_token[slot * s.list_stride + i] = a.token[i];
            s.weight[slot * s.list_stride + i] = a.weight[i];
        }
    if (a.n > EKV_CUDA_SUPER) return;
    double out[2];
    sum_values<T, VEC>(s, it, a.token, a.weight, a.n, s_scratch.sums, out);
    for (int i = 0, d = threadIdx.x; d < s.v_dim; i++, d += FINISH_THREADS)
        write_out(s, row, d, tau != tau ? CUDART_NAN_F : (float)out[i]);
}

/* Rows whose support is larger: each block sums some units of EKV_CUDA_SUPER ranks; the last to be done adds the units in
 * order. */
template <typename T, bool VEC> __global__ void __launch_bounds__(FINISH_THREADS) sum_large(const ekv_cuda_step s) {
    __shared__ float s_sums[FINISH_THREADS * 8];
    __shared__ bool s_last;
    begin_kernel();
    const long long slot = blockIdx.x / (unsigned)s.value_splits;
    const int split = (int)(blockIdx.x % (unsigned)s.value_splits), n = (int)s.result[slot].support;
    if (n <= EKV_CUDA_SUPER) return; /* 0 for rows that do not exist and for softmax */
    const item_info it = describe_item(s, s.first_item + slot / s.rows);
    const row_info row = describe_row(s, it, (int)(slot % s.rows));
    const int units = (n + EKV_CUDA_SUPER - 1) / EKV_CUDA_SUPER;
    const int *token = s.list_token + slot * s.list_stride;
    const float *weight = s.weight + slot * s.list_stride;
    double out[2];
    for (int u = split; u < units; u += s.value_splits) {
        const int first = u * EKV_CUDA_SUPER;
        sum_values<T, VEC>(s, it, token + first, weight + first, min(EKV_CUDA_SUPER, n - first), s_sums, out);
        for (int i = 0, d = threadIdx.x; d < s.v_dim; i++, d += FINISH_THREADS)
            s.value_part[(slot * s.supers + u) * s.v_dim + d] = out[i];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s_last = atomicAdd(&s.ticket[slot], 1u) == (uint32_t)s.value_splits - 1;
    __syncthreads();
    if (!s_last) return;
    __threadfence();
    for (int d = threadIdx.x; d < s.v_dim; d += FINISH_THREADS) {
        double sum = 0.0;
#pragma unroll 8
        for (int u = 0; u < units; u++) sum += __ldcg(&s.value_part[(slot * s.supers + u) * s.v_dim + d]);
        write_out(s, row, d, (float)sum);
    }
}

/* Softmax: the splits of a row in one. */
__global__ void __launch_bounds__(FINISH_THREADS) combine_softmax(const ekv_cuda_step s) {
    __shared__ float s_factor[EKV_CUDA_MAX_SPLITS];
    __shared__ double s_part[FINISH_THREADS];
    __shared__ finish_reduce s_reduce;
    begin_kernel();
    const long long slot = blockIdx.x;
    const item_info it = describe_item(s, s.first_item + slot / s.rows);
    const row_info row = describe_row(s, it, (int)(slot % s.rows));
    if (!row.active || !row.softmax) return;
    int turn = 0;
    double top = -CUDART_INF, total = 0.0, unused = 0.0;
    for (int i = threadIdx.x; i < s.splits; i += FINISH_THREADS) top = fmax(top, (double)s.soft_max[slot * s.splits + i]);
    top = s_reduce.max1(top, turn);
    for (int i = threadIdx.x; i < s.splits; i += FINISH_THREADS) {
        const double m = (double)s.soft_max[slot * s.splits + i], sum = s.soft_sum[slot * s.splits + i];
        const double factor = m > -CUDART_INF ? exp(m - top) : sum == sum ? 0.0 : 1.0; /* a split of NaNs has no maximum */
        s_factor[i] = (float)factor;
        total += factor * sum;
    }
    s_reduce.sum2(total, unused, turn);
    double tau = top > -CUDART_INF || total != total ? top + log(total) : -CUDART_INF;
    if (it.invalid) tau = CUDART_NAN;
    if (threadIdx.x == 0) s.result[slot] = {tau, 0, CUDART_NAN, CUDART_NAN};
    const double inverse = total > 0.0 ? 1.0 / total : 0.0;
    for (int d0 = 0; d0 < s.v_dim; d0 += FINISH_THREADS) { /* FINISH_THREADS / width groups of splits for each element */
        const int width = min(FINISH_THREADS, ((s.v_dim - d0 + 31) / 32) * 32), groups = FINISH_THREADS / width;
        const int group = threadIdx.x / width, d = d0 + threadIdx.x % width;
        double sum = 0.0;
        if (group < groups && d < s.v_dim)
#pragma unroll 8
            for (int i = group; i < s.splits; i += groups) {
                const float f = s_factor[i];
                if (f != 0.0f) sum += (double)f * (double)s.soft_values[(slot * s.splits + i) * s.v_dim + d];
            }
        s_part[threadIdx.x] = sum;
        __syncthreads();
        if (group == 0 && d < s.v_dim) {
            for (int k = 1; k < groups; k++) sum += s_part[k * width + threadIdx.x];
            write_out(s, row, d, tau != tau ? CUDART_NAN_F : (float)(sum * inverse));
        }
        __syncthreads();
    }
}

/* ---- what was not read ---- */

/* Whether a row reads a page, from the compacted list.  Linear in nothing: the list is in page order within its chunk. */
__device__ __forceinline__ bool reads(const ekv_cuda_step &s, long long local_item, int r, int page) {
    if (!s.read_entry) return true;
    const long long chunk = local_item * s.chunks + page / s.chunk_pages;
    const int32_t *read_page = s.read_entry + chunk * s.read_stride;
    int low = 0, high = s.read_count[chunk];
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (read_page[middle] < page)
            low = middle + 1;
        else
            high = middle;
    }
    return low < s.read_count[chunk] && read_page[low] == page && (s.read_mask[chunk * s.chunk_pages + low] >> r & 1u);
}

/* The largest norm of a value among the first n tokens; infinity if a page is unknown. */
__device__ double largest_value_norm(const ekv_cuda_step &s, const item_info &it, int n, block_reduce<MASS_THREADS> *reduce,
                                     int &turn) {
    double norm = 0.0;
    for (int page = threadIdx.x; page << s.page_shift < n; page += MASS_THREADS) {
        const int block = block_of(s, it, page);
        const bool known = block >= 0 && s.counts[block] >= page_tokens(s, n, page);
        norm = fmax(norm, known ? (double)s.norms[(it.head * s.index_blocks + block) * 2 + 1] : CUDART_INF);
    }
    return reduce->max1(norm, turn);
}

/* The bound E on the mass of the unread pages, and whether they are proven to hold nothing (src/dispatch/mass.c); not tuned. */
__global__ void __launch_bounds__(MASS_THREADS) bound_mass(const ekv_cuda_step s) {
    __shared__ block_reduce<MASS_THREADS> s_reduce;
    begin_kernel();
    const long long slot = blockIdx.x, local_item = slot / s.rows;
    const int r = (int)(slot % s.rows);
    const item_info it = describe_item(s, s.first_item + local_item);
    const row_info row = describe_row(s, it, r);
    if (!row.active || row.n == 0) return;
    int turn = 0;
    const int pages = (row.n + s.page_size - 1) >> s.page_shift;
    float *bound = s.page_a + slot * s.max_pages;
    const double tau = s.result[slot].tau, unit_margin = 0x1p-22 * (fabs(tau) > 1.0 ? fabs(tau) + 1.0 : 2.0);
    double top = -CUDART_INF, open = 0.0, unread = 0.0;
    for (int page = threadIdx.x; page < pages; page += MASS_THREADS) {
        if (reads(s, local_item, r, page)) {
            bound[page] = -CUDART_INF_F; /* from here on: no mass */
            continue;
        }
        if (bound[page] != bound[page]) bound[page] = CUDART_INF_F; /* unknown */
        top = fmax(top, (double)bound[page]);
        open += !((double)bound[page] <= tau - unit_margin);
        unread += 1.0;
    }
    top = s_reduce.max1(top, turn);
    s_reduce.sum2(open, unread, turn);
    if (unread == 0.0 || (!row.softmax && tau == tau && open == 0.0)) {
        if (threadIdx.x == 0) s.result[slot].mass = s.result[slot].error = 0.0;
        return;
    }
    if (!s.report_mass) return;
    double tokens = 0.0, unused = 0.0;
    for (int c = threadIdx.x; c < s.chunks; c += MASS_THREADS) tokens += (double)s.row_tokens[slot * s.chunks + c];
    s_reduce.sum2(tokens, unused, turn);
    double mass;
    if (tau != tau) {
        mass = CUDART_NAN;
    } else if (top == CUDART_INF || tokens == 0.0) {
        mass = 1.0;
    } else if (row.softmax) {
        const double shift = fmax(top, tau);
        double sum = 0.0;
        for (int page = threadIdx.x; page < pages; page += MASS_THREADS)
            sum += (double)page_tokens(s, row.n, page) * exp((double)bound[page] - shift);
        s_reduce.sum2(sum, unused, turn);
        mass = sum / (sum + exp(tau - shift));
    } else {
        const double beta = 1.0 / (row.alpha - 1.0);
        const float *z = s.list_z + slot * s.list_stride;
        const int n = (int)s.result[slot].support;
        double low = tau, high = top;
        for (int i = threadIdx.x; i < n; i += MASS_THREADS) high = fmax(high, (double)z[i]);
        high = s_reduce.max1(high, turn);
        mass = 0.0;
        for (int step = 0; step < 201; step++) { /* bisection; the last step takes the unread mass at the lower end */
            double middle = low + 0.5 * (high - low), unread_mass = 0.0, read_mass = 0.0;
            const bool last = step == 200 || !(middle > low && middle < high);
            if (last) middle = low;
            for (int page = threadIdx.x; page < pages; page += MASS_THREADS)
                if ((double)bound[page] > middle)
                    unread_mass += (double)page_tokens(s, row.n, page) * pow((double)bound[page] - middle, beta);
            for (int i = threadIdx.x; i < n; i += MASS_THREADS)
                if ((double)z[i] > middle) read_mass += pow((double)z[i] - middle, beta);
            s_reduce.sum2(unread_mass, read_mass, turn);
            mass = unread_mass;
            if (last) break;
            if (unread_mass + read_mass >= 1.0)
                low = middle;
            else
                high = middle;
        }
    }
    mass = fmin(mass * (1.0 + 1e-9), 1.0) + (mass != mass ? CUDART_NAN : 0.0);
    const double norm = s.norms ? largest_value_norm(s, it, row.n, &s_reduce, turn) : 0.0;
    if (threadIdx.x == 0) {
        s.result[slot].mass = mass;
        if (s.norms) s.result[slot].error = 2.0 * norm * mass;
    }
}

/* ---- report ---- */

/* Whether a sorted list of a row's support holds a token. */
__device__ bool holds(const int *token, int n, int t) {
    int low = 0, high = n;
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (token[middle] < t)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n && token[low] == t;
}

__global__ void __launch_bounds__(MASS_THREADS) write_report(const ekv_cuda_step s) {
    __shared__ block_reduce<MASS_THREADS> s_reduce;
    begin_kernel();
    const long long local_item = blockIdx.x, element = s.dtype == EKV_F32 ? 4 : 2;
    const item_info it = describe_item(s, s.first_item + local_item);
    int turn = 0;
    unsigned long long union_support = 0, union_tokens = it.n, union_pages = it.pages;
    bool any_softmax = false;
    for (int r = 0; r < it.rows; r++) { /* tokens of row r that no earlier row has */
        const row_info row = describe_row(s, it, r);
        any_softmax |= row.softmax;
        if (row.softmax) continue;
        const long long slot = local_item * s.rows + r;
        const int n = (int)s.result[slot].support;
        for (int i = threadIdx.x; i < n; i += MASS_THREADS) {
            const int t = s.list_token[slot * s.list_stride + i];
            bool seen = false;
            for (int k = 0; k < r && !seen; k++)
                if (!describe_row(s, it, k).softmax)
                    seen = holds(s.list_token + (slot - r + k) * s.list_stride, (int)s.result[slot - r + k].support, t);
            union_support += !seen;
        }
    }
    union_support = s_reduce.sum_u64(union_support, turn);
    if (s.read_entry) {
        union_tokens = union_pages = 0;
        for (int c = threadIdx.x; c < s.chunks; c += MASS_THREADS) {
            union_pages += s.read_pages[local_item * s.chunks + c];
            union_tokens += s.read_tokens[local_item * s.chunks + c];
        }
        union_pages = s_reduce.sum_u64(union_pages, turn);
        union_tokens = s_reduce.sum_u64(union_tokens, turn);
    }
    unsigned long long looked = 0;
    double norm = 0.0; /* certified with max_mass: the largest value norm */
    for (int c = threadIdx.x; s.levels && c < s.chunks; c += MASS_THREADS) looked += s.looked[local_item * s.chunks + c];
    looked = s_reduce.sum_u64(looked, turn);
    if (s.levels && s.max_mass > 0.0 && s.norms) norm = largest_value_norm(s, it, it.n, &s_reduce, turn);
    long long probed = 0, sampled = 0;
    for (int r = 0; s.levels && r < it.rows; r++) {
        probed += s.cut[local_item * s.rows + r].probed;
        sampled += s.cut[local_item * s.rows + r].sampled;
    }
    for (int r = 0; r < it.rows; r++) {
        const row_info row = describe_row(s, it, r);
        const long long slot = local_item * s.rows + r;
        unsigned long long pages = (row.n + s.page_size - 1) >> s.page_shift, tokens = row.n;
        if (s.read_entry) {
            pages = tokens = 0;
            for (int c = threadIdx.x; c < s.chunks; c += MASS_THREADS) {
                pages += s.row_pages[slot * s.chunks + c];
                tokens += s.row_tokens[slot * s.chunks + c];
            }
            pages = s_reduce.sum_u64(pages, turn);
            tokens = s_reduce.sum_u64(tokens, turn);
        }
        if (threadIdx.x != 0) continue;
        const ekv_cuda_result result = s.result[slot];
        const bool whole = tokens == (unsigned long long)row.n;
        ekv_report out = {};
        out.tau = result.tau;
        out.mass_bound = whole ? 0.0 : result.mass;
        out.error_bound = whole ? 0.0 : result.error;
        out.support =
            row.softmax ? (result.tau > -CUDART_INF || result.tau != result.tau ? (int64_t)tokens : 0) : result.support;
        out.tokens = (int64_t)tokens;
        out.pages = (int64_t)pages;
        out.certified = whole || result.mass == 0.0;
        if (s.levels) {
            const double skipped = s.cut[slot].skipped;
            out.mass_bound = skipped;
            out.error_bound = skipped == 0.0 ? 0.0 : s.norms ? 2.0 * norm * skipped : CUDART_NAN;
            out.certified = skipped == 0.0;
        }
        if (r == 0) {
            const long long unread_pages = it.pages - (long long)union_pages;
            const long long boxes = !s.certify ? 0 : s.policy == EKV_POLICY_TOPK ? it.pages : unread_pages;
            out.group_pages = (int64_t)union_pages;
            out.total_pages = it.pages;
            out.bytes_statistics = boxes * s.box_bytes + (s.policy == EKV_POLICY_GAUSSIAN ? it.pages * s.moments_bytes : 0) +
                                   (s.report_mass && s.norms && boxes > 0 ? it.pages * 8 : 0);
            if (s.levels)
                out.bytes_statistics = (s.levels & EKV_CUDA_NORMS ? it.pages * 8 : 0) +
                                       (s.levels & EKV_CUDA_BOXES ? ((long long)looked + sampled) * s.box_bytes : 0);
            if (s.levels & EKV_CUDA_SKETCH && it.n > 0) {
                const long long stretches = (it.pages + s.stretch - 1) / s.stretch;
                const long long tokens_looked_at = looked > 0 ? (long long)looked * GROUP : sampled;
                out.bytes_sketch = basis_bytes(s.bases[it.head]) + tokens_looked_at * 2 * s.units +
                                   (looked > 0 ? stretches : min(stretches, (long long)SAMPLED_PAGES)) * s.k_dim * 4;
            }
            out.bytes_keys = ((int64_t)union_tokens + probed) * s.k_dim * element;
            out.bytes_values = (int64_t)(any_softmax ? union_tokens : union_support) * s.v_dim * element;
            out.bytes_dense = (int64_t)it.n * (s.k_dim + s.v_dim) * element;
        }
        s.report[(long long)row.token * s.q_heads + row.head] = out;
    }
}

template <typename T> bool values_aligned(const ekv_cuda_step &s) {
    const int per = 16 / (int)sizeof(T);
    return ((uintptr_t)s.v & 15) == 0 && s.v_block_stride % per == 0 && s.v_token_stride % per == 0 &&
           s.v_head_stride % per == 0 && s.v_dim % 8 == 0;
}

template <typename T> int launch_values(const ekv_cuda_step &s, bool large, cudaStream_t stream) {
    const long long rows = s.round_items * s.rows;
    const bool vec = values_aligned<T>(s);
    if (large)
        return (int)start(vec ? sum_large<T, true> : sum_large<T, false>, s, rows * s.value_splits, FINISH_THREADS, stream);
    return (int)start(vec ? finish_rows<T, true> : finish_rows<T, false>, s, rows, FINISH_THREADS, stream);
}

int launch_by_type(const ekv_cuda_step &s, bool large, void *stream) {
    if (s.dtype == EKV_F32) return launch_values<float>(s, large, (cudaStream_t)stream);
    if (s.dtype == EKV_F16) return launch_values<__half>(s, large, (cudaStream_t)stream);
    return launch_values<__nv_bfloat16>(s, large, (cudaStream_t)stream);
}

} // namespace

extern "C" int ekv_cuda_launch_finish(const ekv_cuda_step *s, void *stream) { return launch_by_type(*s, false, stream); }

extern "C" int ekv_cuda_launch_values(const ekv_cuda_step *s, void *stream) { return launch_by_type(*s, true, stream); }

extern "C" int ekv_cuda_launch_combine(const ekv_cuda_step *s, void *stream) {
    return (int)start(combine_softmax, *s, s->round_items * s->rows, FINISH_THREADS, stream);
}

extern "C" int ekv_cuda_launch_mass(const ekv_cuda_step *s, void *stream) {
    return (int)start(bound_mass, *s, s->round_items * s->rows, MASS_THREADS, stream);
}

extern "C" int ekv_cuda_launch_report(const ekv_cuda_step *s, void *stream) {
    return (int)start(write_report, *s, s->round_items, MASS_THREADS, stream);
}
