/*
 * Sketches of keys in device memory: what a row's look-up table holds, and the bound of one token.
 *
 * The numbers of a key are those of src/cpu/sketch.h, 4 bits each, four of them (a unit) in 16 bits, laid out so that a warp reads the
 * same unit of neighbouring tokens together.  With x = k - center, c the sum of centroids, a bound of q . k is
 *      q . center + sum over the codes of (Q q) . centroid + sum over the norms of |(Q q)_b| level + rounding
 * (build_table in src/dispatch/certified.c derives it; find_errors in basis.c what rounding while encoding adds).  Here the entries
 * are floats, rounded up, and their sum's own rounding is part of what it starts from.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_CUDA_SKETCH_CUH
#define EKV_CUDA_SKETCH_CUH

#include "cuda/common.cuh"

namespace {

constexpr int GROUP = EKV_SKETCH_GROUP, AXES = EKV_SKETCH_AXES, NORMS = EKV_SKETCH_NORMS;
constexpr int UNIT_BYTES = GROUP * 2; /* of a unit of a group */
constexpr int SAMPLED_PAGES = 32;     /* that decisions are made from */

/* ---- bits of halves that are not negative: they order like numbers ---- */

__device__ __forceinline__ float half_of_bits(uint32_t bits) {
    const uint16_t low = (uint16_t)bits;
    __half h;
    memcpy(&h, &low, 2);
    return __half2float(h);
}

/* How far a bound lies above the cut, rounded up; 0 if it does not, infinity for a NaN. */
__device__ __forceinline__ uint32_t bits_above(float bound, float cut) {
    const float above = __fsub_ru(bound, cut);
    if (above <= 0.0f) return 0u;
    const __half h = __float2half_ru(above);
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return above == above ? bits : 0x7c00u;
}

/* ---- the table of a row ---- */

struct table_scratch {
    double rotated[AXES], block_norm[NORMS];
};

__device__ __forceinline__ int axes_of_code(const ekv_basis &basis, int code) {
    int n = 0;
    while (n < 4 && basis.axis[code][n] >= 0) n++;
    return n;
}

/* Bytes that a step reads of a basis. */
__device__ __forceinline__ long long basis_bytes(const ekv_basis &basis) {
    if (basis.codes == 0) return 0;
    return (long long)offsetof(ekv_basis, start) + basis.codes * 10ll + basis.start[basis.codes - 1] +
           16ll * axes_of_code(basis, basis.codes - 1) + 2ll * basis.axes * basis.dim;
}

/* The value of entry v of a number, in double. */
__device__ __forceinline__ double entry_of(const ekv_basis &basis, const table_scratch &w, int number, int v) {
    if (number >= basis.codes + NORMS) return 0.0;
    if (number >= basis.codes) {
        const double x = w.block_norm[number - basis.codes] * (double)basis.level[number - basis.codes][v];
        return x < 1e300 ? x : CUDART_INF; /* also 0 * infinity */
    }
    double x = 0.0;
    for (int j = 0; j < 4 && basis.axis[number][j] >= 0; j++)
        x += w.rotated[basis.axis[number][j]] * (double)(basis.unit[number] * (float)basis.number[basis.start[number] + 16 * j + v]);
    return x;
}

/* The table of a query (scaled, in shared memory) is made in three steps, between which the block meets.
 * First, by `warps` warps from `first` on: its coordinates along the axes. */
__device__ __forceinline__ void rotate_query(const ekv_cuda_step &s, const item_info &it, const float *q, table_scratch *w, int first,
                                             int warps) {
    const __half *rows = (const __half *)s.basis_rows + (long long)it.head * min(s.k_dim, AXES) * s.k_dim;
    const int lane = threadIdx.x & 31, axes = s.bases[it.head].axes;
    for (int a = ((int)threadIdx.x >> 5) - first; a < AXES; a += warps) {
        double sum = 0.0;
        for (int d = lane; d < s.k_dim && a < axes; d += 32) sum += (double)to_float(rows[a * s.k_dim + d]) * (double)q[d];
        sum = warp_sum(sum);
        if (lane == 0) w->rotated[a] = sum;
    }
}

/* Then, by one warp: norms. */
__device__ __forceinline__ void measure_query(const ekv_cuda_step &s, const item_info &it, const float *q, ekv_cuda_table *table,
                                              table_scratch *w) {
    const ekv_basis &basis = s.bases[it.head];
    const int lane = threadIdx.x & 31;
    double squares = 0.0, seen = 0.0;
    for (int d = lane; d < s.k_dim; d += 32) squares += (double)q[d] * (double)q[d];
    const double norm = sqrt(warp_sum(squares)) * (1.0 + 1e-12);
    for (int b = 0, a0 = 0; b < NORMS - 1; a0 = basis.block_end[b++]) {
        double part = 0.0;
        for (int a = a0 + lane; a < basis.block_end[b]; a += 32) part += w->rotated[a] * w->rotated[a];
        part = warp_sum(part);
        seen += part;
        if (lane == 0) w->block_norm[b] = sqrt(part) * (1.0 + 1e-6) + 1e-30;
    }
    const double rest = norm * norm - seen + ((double)basis.skew + 1e-12) * norm * norm;
    if (lane != 0) return;
    w->block_norm[NORMS - 1] = sqrt(rest > 0.0 ? rest : 0.0) * (1.0 + 1e-6) + 1e-30;
    table->norm = norm;
    table->moved = (double)basis.largest;
    table->error = (double)basis.error_share * (double)basis.largest + (double)basis.error;
}

/* Last, by the whole block: the entries.  Ends in a barrier. */
template <int THREADS>
__device__ __forceinline__ void fill_table(const ekv_cuda_step &s, const item_info &it, ekv_cuda_table *table, const table_scratch *w,
                                           block_reduce<THREADS> *reduce, int &turn) {
    const ekv_basis &basis = s.bases[it.head];
    double size = 0.0, unused = 0.0;
    for (int i = threadIdx.x; i < s.units * 4 * 16; i += THREADS) { /* whole warps: 64 divides it */
        const double x = entry_of(basis, *w, i / 16, i % 16);
        double most = fabs(x) < CUDART_INF ? fabs(x) : 0.0;
#pragma unroll
        for (int m = 8; m > 0; m >>= 1) most = fmax(most, __shfl_xor_sync(ALL_LANES, most, m));
        if (i % 16 == 0) size += most;
        table->entry[i] = __double2float_ru(x);
    }
    reduce->sum2(size, unused, turn);
    if (threadIdx.x == 0) table->size = size;
    __syncthreads();
}

/* ---- the bound of a token ---- */

/* q . center and the square of the center's norm, by one warp; infinity where there is no such center. */
struct center_part {
    double dot, squares;
};
__device__ __forceinline__ center_part part_of_center(const ekv_cuda_step &s, const item_info &it, const row_info &row, long long stretch) {
    if (stretch >= s.stretches) return {CUDART_INF, CUDART_INF};
    double dot = 0.0, squares = 0.0;
    const float *center = s.centers + (it.head * s.stretches + stretch) * s.center_stride;
    for (int d = threadIdx.x & 31; d < s.k_dim; d += 32) {
        const float q = load_any(s.q, row.token * s.q_token_stride + row.head * s.q_head_stride + d, s.q_dtype) * row.factor;
        dot += (double)q * (double)center[d];
        squares += (double)center[d] * (double)center[d];
    }
    return {warp_sum(dot), warp_sum(squares)};
}

/* What the bounds of a stretch's tokens start from: everything but the table's entries and ALiBi.  Slack for the f32 score: its order of
 * additions, up to 37 on a product's way, gives at most 45 u |q| |k|, |k| <= |x| + |center|; for the sum of entries one u of every
 * partial sum. */
__device__ __forceinline__ float start_of_stretch(const ekv_cuda_step &s, const ekv_cuda_table &table, const center_part &center) {
    const double length = table.moved + sqrt(center.squares) * (1.0 + 1e-12);
    if (!(table.norm * length < 3e38)) return CUDART_INF_F; /* a score might overflow; also for NaN */
    const double start = center.dot + table.norm * (table.error + 128.0 * 0x1p-24 * length) + 1e-30;
    const double partial = fabs(start) + table.size;
    return __double2float_ru(start + (s.units * 4 + 8) * 0x1.02p-24 * partial + 0x1p-110);
}

/* Adds a token's ALiBi term to its sum, with slack for the score's rounding. */
__device__ __forceinline__ float add_bias(float sum, const row_info &row, int token) {
    if (row.slope == 0.0f) return sum;
    const float bias = __fmul_rn(row.slope, (float)(token - row.q_token));
    return __fadd_ru(sum, __fadd_ru(bias, __fadd_ru(fabsf(bias) * 0x1p-18f, fabsf(sum) * 0x1p-22f)));
}

/* Whether all tokens of a page that the item sees are sketched, about the center of the page's own place. */
__device__ __forceinline__ bool page_sketched(const ekv_cuda_step &s, int block, int page, int tokens) {
    return block >= 0 && s.sketched[block] >= tokens && s.stretch_of[block] == (int)(page / s.stretch);
}

__device__ __forceinline__ const uint8_t *sketch_group(const ekv_cuda_step &s, const item_info &it, int block, int group) {
    return s.sketches + (it.head * s.index_blocks + block) * s.sketch_bytes + (long long)group * s.units * UNIT_BYTES;
}

/* Whether what the sketch leaves makes up for reading it: what the rows' samples say together. */
__device__ __forceinline__ bool sketch_pays(const ekv_cuda_step &s, long long local_item) {
    constexpr float PAYS = 1.5f; /* bytes of keys that must be saved for each byte of a sketch */
    if (!(s.levels & EKV_CUDA_SKETCH)) return false;
    float share = 0.0f;
    for (int r = 0; r < s.rows; r++) share += s.cut[local_item * s.rows + r].share;
    return (float)s.k_dim * (s.dtype == EKV_F32 ? 4.0f : 2.0f) * (1.0f - share) > PAYS * 2.0f * (float)s.units;
}

/* The largest bits in `above` with which a row skips a token: its bound is not above the cut, or by less than `relax`. */
__device__ __forceinline__ uint32_t skipped_bits(const ekv_cuda_cut &cut) {
    const double raised = cut.cut - cut.origin;
    uint32_t low = 0, high = 0x7c01; /* infinity is never skipped */
    while (low + 1 < high) {
        const uint32_t middle = (low + high) / 2;
        const double above = (double)half_of_bits(middle) - raised;
        if (above <= 0.0 || above < cut.relax)
            low = middle;
        else
            high = middle;
    }
    return min(low, 0x7bffu);
}

} // namespace

#endif
