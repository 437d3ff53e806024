/*
 * From scores to weights: candidate lists, lower bounds of tau, the exact solution, and softmax.
 *
 * The solution is canonical: it has the same bits for every list that contains the support, so that policies which read different
 * tokens but the same support give identical outputs.  Three steps, in double, with d_i = z_i - z_max:
 *   1. any solver finds an approximation of tau over the list, far closer than 2^-30;
 *   2. token i is in the support S if d_i > tau + 2^-30, out if d_i < tau - 2^-30, and otherwise in exactly when
 *      sum over d_j > d_i of (d_j - d_i)^beta < 1, which depends on no approximation;
 *   3. tau and the weights are computed afresh from S alone, from a fixed start, sums taken by rank in S.
 */
#ifndef EKV_ENTMAX_H
#define EKV_ENTMAX_H

#define TAU_SLACK 0x1p-30
#define MAX_INTEGER_POWER 64 /* above it (alpha < 1.016) a list is filtered by z_max - 1 alone */

static void keep(ekv_keep_args *a) {
    const vf threshold = vf_set1(a->threshold);
    int count = a->count;
    for (int i = 0; i < a->n; i += VEC_LANES) {
        const int n = a->n - i < VEC_LANES ? a->n - i : VEC_LANES;
        const uint32_t lanes = n == VEC_LANES ? 0xffffffffu : (1u << n) - 1u;
        const uint32_t mask = ~vf_le(vf_load_n(a->z + i, n), threshold) & lanes;
        if (mask) count += vec_pack(a->list_z + count, a->list_token + count, a->z + i, a->token + i, mask);
    }
    a->count = count;
}

/* x^power for a whole number >= 1. */
EKV_INLINE vf vf_integer_power(vf x, int power) {
    vf result = vf_set1(1.0f);
    for (; power > 1; power >>= 1) {
        if (power & 1) result = vf_mul(result, x);
        x = vf_mul(x, x);
    }
    return vf_mul(result, x);
}

/* The sums of t^power and t^(power-1) over t = max(z - z_max - tau, 0); for power 1 the second is the number of t > 0. */
static void power_sums(const ekv_tau_lower_args *a, float *s0, float *s1) {
    const vf z_max = vf_set1(a->z_max), tau = vf_set1(a->tau), zero = vf_set1(0.0f);
    vf sum0 = zero, sum1 = zero;
    int positive = 0;
    for (int i = 0; i < a->n; i += VEC_LANES) {
        const int n = a->n - i < VEC_LANES ? a->n - i : VEC_LANES;
        float lane[VEC_LANES];
        vf z;
        if (n == VEC_LANES) {
            z = vf_load(a->z + i);
        } else {
            vf_store(lane, vf_set1(-INFINITY));
            memcpy(lane, a->z + i, (size_t)n * sizeof(float));
            z = vf_load(lane);
        }
        const vf t = vf_max(vf_sub(vf_sub(z, z_max), tau), zero);
        if (a->power == 1) {
            sum0 = vf_add(sum0, t);
            for (uint32_t mask = ~vf_le(t, zero); mask; mask &= mask - 1) positive++;
        } else {
            const vf u = a->power == 2 ? t : vf_integer_power(t, a->power - 1);
            sum0 = vf_add(sum0, vf_mul(u, t));
            sum1 = vf_add(sum1, u);
        }
    }
    *s0 = vf_sum(sum0);
    *s1 = a->power == 1 ? (float)positive : vf_sum(sum1);
}

/* Newton on the norm (sum t^m)^(1/m) = 1 instead of on the sum: it is convex too, and nearly straight, so few steps do. */
static void tau_lower(ekv_tau_lower_args *a) {
    if (a->power > MAX_INTEGER_POWER) return;
    for (int step = 0; step < a->steps; step++) {
        float s0, s1;
        power_sums(a, &s0, &s1);
        if (!(s0 > 1.0f)) return;
        const float target = a->power == 1 ? 1.0f : a->power == 2 ? sqrtf(s0) : powf(s0, 1.0f - 1.0f / (float)a->power);
        const float delta = (s0 - target) / s1;
        if (!(delta > 0.0f)) return;
        a->tau = a->tau + delta < 0.0f ? a->tau + delta : 0.0f;
        if (delta < 1e-4f) return;
    }
}

/* The largest of n numbers and `least`; NaN if there is one. */
EKV_INLINE float largest_of(const float *z, int n, float least) {
    const vf infinity = vf_set1(INFINITY);
    vf largest = vf_set1(least);
    uint32_t numbers = vf_le(largest, infinity);
    int i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        const vf x = vf_load(z + i);
        numbers &= vf_le(x, infinity);
        largest = vf_max(x, largest);
    }
    float top = n >= VEC_LANES ? vf_max_lane(largest) : least;
    bool bad = numbers != 0xffffffffu;
    for (; i < n; i++) {
        bad |= z[i] != z[i];
        top = z[i] > top ? z[i] : top;
    }
    return bad ? NAN : top;
}

static void softmax(ekv_softmax_args *a) {
    vf sum = vf_set1(0.0f);
    a->z_max = largest_of(a->z, a->n, a->z_max);
    a->sum = 0.0;
    if (a->z_max == -INFINITY) {
        for (int i = 0; i < a->n; i++) a->weight[i] = 0.0f;
        return;
    }
    const vf z_max = vf_set1(a->z_max);
    for (int i = 0; i < a->n; i += VEC_LANES) {
        const int n = a->n - i < VEC_LANES ? a->n - i : VEC_LANES;
        vf w = vf_exp(vf_sub(vf_load_n(a->z + i, n), z_max));
        vf_store_n(a->weight + i, w, n);
        if (n < VEC_LANES) w = vf_load_n(a->weight + i, n);
        sum = vf_add(sum, w);
    }
    a->sum = (double)vf_sum(sum);
}

/* ---- the exact solution ---- */

/* d = z - z_max of up to eight list entries; missing ones are -infinity and so add nothing. */
EKV_INLINE vd list_d(const ekv_solve_args *a, int64_t i, vd z_max) {
    const int64_t n = a->n - i;
    return vd_sub(vd_load_f32_n(a->z + i, n < VEC_DOUBLES ? (int)n : VEC_DOUBLES, -INFINITY), z_max);
}

EKV_INLINE double scalar_pow(double x, double y) {
    double lane[VEC_DOUBLES];
    for (int i = 0; i < VEC_DOUBLES; i++) lane[i] = x;
    const vd r = vd_pow(vd_load(lane), vd_set1(y));
    memcpy(lane, &r, sizeof(double));
    return lane[0];
}

/* t^beta, t >= 0; beta = 1, 2, 3 by multiplication. */
EKV_INLINE vd vd_beta_power(vd t, double beta, int whole) {
    if (whole == 1) return t;
    if (whole == 2) return vd_mul(t, t);
    if (whole == 3) return vd_mul(vd_mul(t, t), t);
    return vd_pow(t, vd_set1(beta));
}

/* sum over the list of max(d - tau, 0)^beta, and its slope's size / beta: the sum of the powers beta - 1 over t > 0. */
static void list_sums(const ekv_solve_args *a, double z_max, double tau, double beta, int whole, double *s0, double *s1) {
    const vd m = vd_set1(z_max), zero = vd_set1(0.0), one = vd_set1(1.0), tiny = vd_set1(1e-300);
    vd sum0 = zero, sum1 = zero;
    for (int64_t i = 0; i < a->n; i += VEC_DOUBLES) {
        const vd t = vd_max(vd_sub(list_d(a, i, m), vd_set1(tau)), zero);
        const vd p = vd_beta_power(t, beta, whole);
        sum0 = vd_add(sum0, p);
        if (whole == 1)
            sum1 = vd_add(sum1, vd_min(vd_mul(t, vd_set1(1e300)), one)); /* counts t > 0 */
        else
            sum1 = vd_add(sum1, vd_div(p, vd_max(t, tiny)));
    }
    *s0 = vd_sum(sum0);
    *s1 = vd_sum(sum1);
}

/* Largest z of the list, -infinity if it is empty; NaN if it holds a NaN or +infinity. */
static double list_max(const ekv_solve_args *a) {
    const vf top = vf_set1(3.4028234663852886e38f);
    vf largest = vf_set1(-INFINITY);
    uint32_t bad = 0;
    int64_t i = 0;
    for (; i + VEC_LANES <= a->n; i += VEC_LANES) {
        const vf z = vf_load(a->z + i);
        bad |= ~vf_le(z, top);
        largest = vf_max(z, largest);
    }
    float m = vf_max_lane(largest);
    for (; i < a->n; i++) {
        bad |= !(a->z[i] <= 3.4028234663852886e38f);
        m = a->z[i] > m ? a->z[i] : m;
    }
    return bad ? (double)NAN : (double)m;
}

/* Drops the entries with d <= limit. */
static void list_drop(ekv_solve_args *a, double z_max, double limit) {
    const double threshold = z_max + limit;
    float down = (float)threshold;
    if ((double)down > threshold) down = nextafterf(down, -INFINITY);
    if (limit < 0.0 && !((double)down < z_max)) down = nextafterf((float)z_max, -INFINITY); /* |z_max| is huge: keep the largest */
    ekv_keep_args k = {a->z, a->token, 0, down, a->z, a->token, 0};
    int64_t kept = 0;
    for (int64_t i = 0; i < a->n; i += 1 << 30) { /* keep counts in int */
        k.z = a->z + i;
        k.token = a->token + i;
        k.n = a->n - i < 1 << 30 ? (int)(a->n - i) : 1 << 30;
        k.list_z = a->z + kept;
        k.list_token = a->token + kept;
        k.count = 0;
        keep(&k);
        kept += k.count;
    }
    a->n = kept;
}

/* A cheap lower bound in float, to shorten the list before the work in double. */
static double list_prefilter(ekv_solve_args *a, double z_max, double beta) {
    list_drop(a, z_max, -1.0 - EKV_MARGIN);
    if (a->n > 1 << 30) return -1.0;
    const double power = ceil(beta);
    ekv_tau_lower_args lower = {a->z, (int)a->n, (float)z_max, power > MAX_INTEGER_POWER ? MAX_INTEGER_POWER + 1 : (int)power, 12, -1.0f};
    tau_lower(&lower);
    const double tau = (double)lower.tau - EKV_MARGIN;
    list_drop(a, z_max, tau);
    return tau > -1.0 ? tau : -1.0;
}

/* beta >= 1: Newton from the left on the norm, which never passes the root.  Returns tau with an error of about 1e-15; stops at
 * steps below `enough`. */
static double newton_from_left(ekv_solve_args *a, double z_max, double beta, int whole, double tau, double enough) {
    for (int step = 0; step < 100; step++) {
        double s0, s1;
        list_sums(a, z_max, tau, beta, whole, &s0, &s1);
        const double target = whole == 1 ? 1.0 : whole == 2 ? sqrt(s0) : scalar_pow(s0, 1.0 - 1.0 / beta);
        const double delta = (s0 - target) / s1;
        if (!(tau + delta > tau)) break;
        tau += delta;
        if (delta < enough) break;
    }
    return tau;
}

/* beta < 1: the sum is not convex; Newton steps inside a bracket that is halved when they leave it. */
static double safeguarded(ekv_solve_args *a, double z_max, double beta, double low, double high) {
    double tau = low;
    for (int step = 0; step < 200; step++) {
        double s0, s1;
        list_sums(a, z_max, tau, beta, 0, &s0, &s1);
        if (s0 >= 1.0)
            low = tau;
        else
            high = tau;
        double next = tau + (s0 - 1.0) / (beta * s1);
        if (!(next > low && next < high)) next = low + 0.5 * (high - low);
        if (next == tau || !(next > low && next < high)) break;
        tau = next;
    }
    return tau;
}

/* Step 2 for one entry near tau. */
static int belongs(const ekv_solve_args *a, int64_t i, double beta, int whole) {
    const vd z = vd_set1((double)a->z[i]), zero = vd_set1(0.0);
    vd sum = zero;
    for (int64_t j = 0; j < a->n; j += VEC_DOUBLES)
        sum = vd_add(sum, vd_beta_power(vd_max(list_d(a, j, z), zero), beta, whole));
    return vd_sum(sum) < 1.0;
}

/* Step 2.  Entries well below tau have been dropped by the caller's last list_drop or are dropped here. */
static void choose_support(ekv_solve_args *a, double z_max, double tau, double beta, int whole) {
    list_drop(a, z_max, tau - 4.0 * TAU_SLACK); /* leaves all that `belongs` needs: whatever lies above a doubtful entry */
    int64_t doubtful = 0;
    for (int64_t i = 0; i < a->n; i++) doubtful += (double)a->z[i] - z_max <= tau + TAU_SLACK;
    if (!doubtful) return;
    double lowest = (double)INFINITY; /* the lowest z that belongs: whether an entry does depends on its z alone */
    for (int64_t i = 0; i < a->n; i++) {
        const double d = (double)a->z[i] - z_max;
        if (d < tau - TAU_SLACK || (double)a->z[i] >= lowest) continue;
        if (d > tau + TAU_SLACK || belongs(a, i, beta, whole)) lowest = (double)a->z[i];
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < a->n; i++) {
        if ((double)a->z[i] < lowest) continue;
        a->z[kept] = a->z[i];
        a->token[kept++] = a->token[i];
    }
    a->n = kept;
}

/* Central moments of d over the support: mean, and the sums of squares and cubes. */
static void support_moments(const ekv_solve_args *a, double z_max, double *mean, double *squares, double *cubes) {
    const vd m = vd_set1(z_max), zero = vd_set1(0.0);
    vd sum = zero;
    int64_t i = 0;
    for (; i + VEC_DOUBLES <= a->n; i += VEC_DOUBLES) sum = vd_add(sum, list_d(a, i, m));
    double total = vd_sum(sum);
    for (int64_t j = i; j < a->n; j++) total += (double)a->z[j] - z_max;
    *mean = total / (double)a->n;
    vd s2 = zero, s3 = zero;
    const vd center = vd_set1(*mean);
    for (i = 0; i + VEC_DOUBLES <= a->n; i += VEC_DOUBLES) {
        const vd c = vd_sub(list_d(a, i, m), center), c2 = vd_mul(c, c);
        s2 = vd_add(s2, c2);
        s3 = vd_add(s3, vd_mul(c2, c));
    }
    *squares = vd_sum(s2);
    *cubes = vd_sum(s3);
    for (; i < a->n; i++) {
        const double c = (double)a->z[i] - z_max - *mean;
        *squares += c * c;
        *cubes += c * c * c;
    }
}

/* Step 3.  With x = mean - tau and c = d - mean:
 *   beta 1:  n x = 1                          beta 2:  n x^2 + sum c^2 = 1
 *   beta 3:  n x^3 + 3 x sum c^2 + sum c^3 = 1, increasing in x for x >= 0; Newton from the right end of [0, 1 - mean]. */
static double tau_of_support(ekv_solve_args *a, double z_max, double beta, int whole) {
    if (beta < 1.0) {
        double lowest = 0.0;
        for (int64_t i = 0; i < a->n; i++) lowest = (double)a->z[i] - z_max < lowest ? (double)a->z[i] - z_max : lowest;
        return safeguarded(a, z_max, beta, -1.0, lowest);
    }
    if (whole == 0) return newton_from_left(a, z_max, beta, 0, -1.0, 0.0);
    double mean, squares, cubes;
    support_moments(a, z_max, &mean, &squares, &cubes);
    const double n = (double)a->n;
    if (whole == 1) return mean - 1.0 / n;
    if (whole == 2) {
        const double rest = 1.0 - squares;
        return mean - sqrt(rest > 0.0 ? rest / n : 0.0);
    }
    double x = 1.0 + mean; /* tau = -1 */
    for (int step = 0; step < 100; step++) {
        const double f = (n * x * x + 3.0 * squares) * x + cubes - 1.0;
        const double slope = 3.0 * (n * x * x + squares);
        const double next = x - f / slope;
        if (!(next < x)) break;
        x = next;
    }
    return mean - x;
}

static void support_weights(ekv_solve_args *a, double z_max, double tau, double beta, int whole) {
    const vd m = vd_set1(z_max), t0 = vd_set1(tau), zero = vd_set1(0.0);
    vd sum = zero, scale = vd_set1(1.0);
    if (beta < 1.0) { /* the slope is unbounded at tau, so the last rounding of tau shows: normalise */
        for (int64_t i = 0; i < a->n; i += VEC_DOUBLES)
            sum = vd_add(sum, vd_beta_power(vd_max(vd_sub(list_d(a, i, m), t0), zero), beta, whole));
        scale = vd_set1(1.0 / vd_sum(sum));
    }
    for (int64_t i = 0; i < a->n; i += VEC_DOUBLES) {
        float lane[VEC_DOUBLES];
        const int64_t n = a->n - i < VEC_DOUBLES ? a->n - i : VEC_DOUBLES;
        vd_store_f32(lane, vd_mul(vd_beta_power(vd_max(vd_sub(list_d(a, i, m), t0), zero), beta, whole), scale));
        memcpy(a->weight + i, lane, (size_t)n * sizeof(float));
    }
}

/* 1, 2 or 3 if beta is that number (alpha = 2, 3/2, 4/3), else 0. */
EKV_INLINE int whole_beta(double beta) {
    for (int b = 1; b <= 3; b++)
        if (fabs(beta - (double)b) < 1e-12) return b;
    return 0;
}

static void solve(ekv_solve_args *a) {
    const double beta = 1.0 / (a->alpha - 1.0), z_max = list_max(a);
    const int whole = whole_beta(beta);
    a->support = 0;
    a->tau = z_max;
    if (!(z_max > (double)-INFINITY)) return;
    double tau = list_prefilter(a, z_max, beta);
    if (beta < 1.0)
        tau = safeguarded(a, z_max, beta, tau, -scalar_pow((double)a->n, 1.0 - a->alpha));
    else
        tau = newton_from_left(a, z_max, beta, whole, tau, 1e-13);
    choose_support(a, z_max, tau, beta, whole);
    tau = tau_of_support(a, z_max, beta, whole);
    support_weights(a, z_max, tau, beta, whole);
    a->support = a->n;
    a->tau = z_max + tau;
}

#endif
