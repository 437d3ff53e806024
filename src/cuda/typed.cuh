/*
 * The kernels that read keys, values of softmax rows, or page statistics; compiled once per storage type by typed_*.cu.
 *
 * A key is read by LPK lanes of a warp, eight elements (a chunk) to a lane and CH chunks to a lane, so that a warp reads 32 /
 * LPK keys with one instruction; U keys per lane group are in flight before the first is used.  Lane group g takes U
 * consecutive tokens of a page (U <= 8 divides the page size): one look-up of the block table then serves U keys.  After
 * `butterfly` lane j of a group holds the score of token j / (LPK / U), so that lane order is token order.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_CUDA_TYPED_CUH
#define EKV_CUDA_TYPED_CUH

#include "cuda/certified.cuh"
#include "cuda/common.cuh"

namespace {

constexpr int WARPS = EKV_CUDA_WARPS, THREADS = 32 * WARPS;

template <typename T, int LPK, int CH, int R> struct scan_shape {
    static constexpr int U = sizeof(T) == 4 || R >= 8 || CH > 1 ? 4 : 8;
    static constexpr int KPW = 32 / LPK;     /* keys per warp instruction */
    static constexpr int TILE = KPW * U;     /* tokens of a warp at once */
    static constexpr int DIM = LPK * CH * 8; /* padded dimension */
    static constexpr int BLOCKS = CH > 1 ? 2 : R == 1 ? (sizeof(T) == 4 ? 3 : 4) : R == 2 ? 3 : 2; /* per multiprocessor */
    static constexpr int CAPACITY = R <= 2 ? 256 : R == 4 ? 128 : 64; /* candidates that a warp holds per row */
};

/* ---- queries ---- */

/* Queries of the item, scaled to z units, padded with zeros; and the rows.  Ends in a barrier. */
template <int DIM, int R>
__device__ __forceinline__ void load_rows(const ekv_cuda_step &s, const item_info &it, row_info *rows, float (*q)[DIM]) {
    if (threadIdx.x < R) rows[threadIdx.x] = describe_row(s, it, threadIdx.x);
    __syncthreads();
    for (int i = threadIdx.x; i < R * DIM; i += blockDim.x) {
        const int r = i / DIM, d = i % DIM;
        const row_info &row = rows[r];
        float x = 0.0f;
        if (row.active && d < s.k_dim)
            x = load_any(s.q, row.token * s.q_token_stride + row.head * s.q_head_stride + d, s.q_dtype) * row.factor;
        q[r][d] = x;
    }
    __syncthreads();
}

template <int LPK, int CH, int R>
__device__ __forceinline__ void take_query(const float (*q)[LPK * CH * 8], int j, float (&mine)[R][CH][8]) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < CH; c++)
#pragma unroll
            for (int e = 0; e < 8; e++) mine[r][c][e] = q[r][(c * LPK + j) * 8 + e];
}

/* ---- scores ---- */

/* Dot products of up to U keys (`valid` of them exist; rows `stride` elements apart, p at the lane's first element) with R
 * queries. */
template <typename T, int LPK, int CH, int R, int U, bool VEC>
__device__ __forceinline__ void score_tile(const T *p, long long stride, int valid, int dim, int lane,
                                           const float (&q)[R][CH][8], float (&z)[R]) {
    const int j = lane % LPK;
    float a[R][U];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int u = 0; u < U; u++) a[r][u] = 0.0f;
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int left = dim - (c * LPK + j) * 8;
        chunk8<T, VEC> raw[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (u < valid && left > 0)
                raw[u].load(p + u * stride + c * LPK * 8, left);
            else
                raw[u].clear();
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            float x[8];
            raw[u].get(x);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int e = 0; e < 8; e++) a[r][u] = fmaf(q[r][c][e], x[e], a[r][u]);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) z[r] = butterfly<LPK, U>(a[r], lane);
}

/* The same for up to U keys anywhere: key u is row(u) elements behind p; below 0: none.  All lanes call row. */
template <typename T, int LPK, int CH, int R, int U, bool VEC, typename Row>
__device__ __forceinline__ void score_keys(const T *p, Row row, int dim, int lane, const float (&q)[R][CH][8], float (&z)[R]) {
    const int j = lane % LPK;
    float a[R][U];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int u = 0; u < U; u++) a[r][u] = 0.0f;
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int left = dim - (c * LPK + j) * 8;
        chunk8<T, VEC> raw[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const long long at = row(u);
            if (at >= 0 && left > 0)
                raw[u].load(p + at + c * LPK * 8, left);
            else
                raw[u].clear();
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            float x[8];
            raw[u].get(x);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int e = 0; e < 8; e++) a[r][u] = fmaf(q[r][c][e], x[e], a[r][u]);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) z[r] = butterfly<LPK, U>(a[r], lane);
}

/* Where a token's key lies, in elements; -1 in a block outside of the pool. */
__device__ __forceinline__ long long key_row(const ekv_cuda_step &s, const item_info &it, int token) {
    const int block = block_of(s, it, token >> s.page_shift);
    return block < 0 ? -1 : block * s.k_block_stride + (token & (s.page_size - 1)) * s.k_token_stride;
}

/* The score of one token for one row from its dot product; -infinity where the row does not read it, NaN for a bad block. */
__device__ __forceinline__ float finish_score(float dot, const row_info &row, int r, int token, bool exists, uint32_t mask,
                                              int block) {
    if (!exists || token >= row.n || !(mask >> r & 1u)) return -CUDART_INF_F;
    if (block < 0) return CUDART_NAN_F;
    if (row.slope != 0.0f) dot = __fadd_rn(dot, __fmul_rn(row.slope, (float)(token - row.q_token)));
    return dot;
}

/* ---- candidate lists of a warp ---- */

struct warp_list {
    float z_max, floor; /* largest finite z; a lower bound of tau: tau of any part of the tokens is one */
    int count, spilled; /* entries in shared memory; entries in the segment */
};

/* Copies the entries that are above the threshold (or NaN), in order; to may be the list itself.  Returns their number. */
__device__ __forceinline__ int copy_above(const float *z, const int *token, int count, float threshold, float *to_z,
                                          int *to_token) {
    const int lane = threadIdx.x & 31;
    int kept = 0;
    for (int i = 0; i < count; i += 32) {
        const bool there = i + lane < count;
        const float x = there ? z[i + lane] : 0.0f;
        const int t = there ? token[i + lane] : 0;
        const bool keep = there && !(x <= threshold);
        const uint32_t lanes = __ballot_sync(ALL_LANES, keep);
        if (keep) {
            const int at = kept + __popc(lanes & ((1u << lane) - 1u));
            to_z[at] = x;
            to_token[at] = t;
        }
        kept += __popc(lanes);
        __syncwarp();
    }
    return kept;
}

/* Adds the lanes that `keep`; makes room when less than a tile is left.  Returns the threshold for what follows. */
template <int CAPACITY, int TILE>
__device__ __noinline__ float append(warp_list *w, float *list_z, int *list_token, float *segment_z, int *segment_token,
                                     bool keep, float z, int token, int power) {
    const int lane = threadIdx.x & 31;
    const uint32_t lanes = __ballot_sync(ALL_LANES, keep);
    int count = w->count, spilled = w->spilled;
    float floor = w->floor, z_max = w->z_max;
    if (keep) {
        const int at = count + __popc(lanes & ((1u << lane) - 1u));
        list_z[at] = z;
        list_token[at] = token;
    }
    count += __popc(lanes);
    z_max = fmaxf(z_max, warp_max(keep && z < CUDART_INF_F ? z : -CUDART_INF_F));
    floor = fmaxf(floor, __double2float_rd((double)z_max - 1.0));
    __syncwarp();
    if (count > CAPACITY - TILE) {
        floor = raise_floor(list_z, count, z_max, floor, power);
        count = copy_above(list_z, list_token, count, threshold_of(floor), list_z, list_token);
        if (count > CAPACITY / 2) {
            for (int i = lane; i < count; i += 32)
                segment_z[spilled + i] = list_z[i], segment_token[spilled + i] = list_token[i];
            spilled += count;
            count = 0;
        }
    }
    __syncwarp();
    if (lane == 0) *w = {z_max, floor, count, spilled};
    __syncwarp();
    return threshold_of(floor);
}

/* ---- scan, entmax ---- */

/* TOKENS: certified with a sketch; items where it pays have lists of tokens instead of pages. */
template <typename T, int LPK, int CH, int R, bool VEC, bool TOKENS>
__global__ void __launch_bounds__(THREADS, (scan_shape<T, LPK, CH, R>::BLOCKS)) scan_entmax(const ekv_cuda_step s) {
    typedef scan_shape<T, LPK, CH, R> shape;
    constexpr int U = shape::U, TILE = shape::TILE, CAPACITY = shape::CAPACITY;
    __shared__ float s_q[R][shape::DIM];
    __shared__ row_info s_row[R];
    __shared__ float s_list_z[WARPS][R][CAPACITY];
    __shared__ int s_list_token[WARPS][R][CAPACITY];
    __shared__ warp_list s_list[WARPS][R];
    __shared__ uint32_t s_floor[R]; /* order of the best threshold of the block's warps */
    __shared__ int s_prefix[EKV_CUDA_MAX_CHUNKS + 1];

    begin_kernel();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int split = (int)(blockIdx.x % (unsigned)s.splits);
    const long long local_item = blockIdx.x / (unsigned)s.splits;
    const item_info it = describe_item(s, s.first_item + local_item);
    if (threadIdx.x < R) {
        const float proven = s.levels ? (float)s.cut[local_item * R + threadIdx.x].cut : -CUDART_INF_F;
        s_floor[threadIdx.x] = order_of(proven); /* every warp starts from what the probes found */
    }
    if (lane < R) s_list[warp][lane] = {-CUDART_INF_F, -CUDART_INF_F, 0, 0};
    load_rows<shape::DIM, R>(s, it, s_row, s_q);
    const int total = load_chunk_prefix(s, it, local_item, s_prefix);

    const int j = lane % LPK, g = lane / LPK;
    float q[R][CH][8], threshold[R];
    take_query<LPK, CH, R>(s_q, j, q);
#pragma unroll
    for (int r = 0; r < R; r++) threshold[r] = s_row[r].active && !s_row[r].softmax ? -CUDART_INF_F : CUDART_INF_F;

    const int segments = s.splits * WARPS, mine = split * WARPS + warp;
    const int begin = (int)((long long)total * mine / segments), end = (int)((long long)total * (mine + 1) / segments);
    const T *keys = (const T *)s.k + it.head * s.k_head_stride + j * 8;
    const long long slot = local_item * R;
    const bool by_token = TOKENS && sketch_pays(s, local_item);
    for (int e0 = begin; e0 < end && by_token; e0 += 32) { /* tokens e0, e0 + 1, ... of the list are the lanes' */
        const int listed = min(32, end - e0);
        int mine_token = INT32_MAX;
        long long mine_row = -1;
        if (lane < listed) {
            const int e = e0 + lane, c = chunk_of_entry(s, s_prefix, e);
            mine_token = s.read_entry[(local_item * s.chunks + c) * s.read_stride + (e - s_prefix[c])];
            mine_row = key_row(s, it, mine_token);
        }
        const uint32_t shared_floor = lane < R ? atomicMax(&s_floor[lane], 0u) : 0u;
#pragma unroll
        for (int r = 0; r < R; r++) threshold[r] = fmaxf(threshold[r], from_order(__shfl_sync(ALL_LANES, shared_floor, r)));
        for (int t0 = 0; t0 < listed; t0 += TILE) {
            float z[R];
            score_keys<T, LPK, CH, R, U, VEC>(
                keys, [&](int u) { return __shfl_sync(ALL_LANES, mine_row, t0 + g * U + u); }, s.k_dim, lane, q, z);
            const int at = t0 + g * U + j / (LPK / U), token = __shfl_sync(ALL_LANES, mine_token, at);
            const bool inside = __shfl_sync(ALL_LANES, mine_row, at) >= 0, owner = j % (LPK / U) == 0;
#pragma unroll
            for (int r = 0; r < R; r++) {
                z[r] = finish_score(z[r], s_row[r], r, token, at < listed, ALL_LANES, inside ? 0 : -1);
                const bool keep = owner && !(z[r] <= threshold[r]);
                if (__any_sync(ALL_LANES, keep)) {
                    const long long segment = (slot + r) * s.list_stride + mine * s.segment;
                    threshold[r] =
                        fmaxf(threshold[r], append<CAPACITY, TILE>(&s_list[warp][r], s_list_z[warp][r], s_list_token[warp][r],
                                                                   s.list_z + segment, s.list_token + segment, keep, z[r],
                                                                   token, s_row[r].power));
                    if (lane == 0) atomicMax(&s_floor[r], order_of(threshold[r]));
                }
            }
        }
    }
    for (int e0 = begin; e0 < end && !by_token; e0 += 32) {
        const int pages = min(32, end - e0);
        page_entry mine_entry = {0, -1, 0};
        if (lane < pages) mine_entry = fetch_entry(s, it, local_item, s_prefix, e0 + lane);
        const uint32_t shared_floor = lane < R ? atomicMax(&s_floor[lane], 0u) : 0u; /* an atomic read */
#pragma unroll
        for (int r = 0; r < R; r++) threshold[r] = fmaxf(threshold[r], from_order(__shfl_sync(ALL_LANES, shared_floor, r)));
        for (int t0 = 0; t0 < pages << s.page_shift; t0 += TILE) {
            const int at = t0 + g * U, i = at >> s.page_shift, in_page = at & (s.page_size - 1);
            const int page = __shfl_sync(ALL_LANES, mine_entry.page, i), block = __shfl_sync(ALL_LANES, mine_entry.block, i);
            const uint32_t mask = __shfl_sync(ALL_LANES, mine_entry.mask, i);
            const int first = (page << s.page_shift) + in_page;
            const int exist = i < pages ? min(U, it.n - first) : 0;
            float z[R];
            score_tile<T, LPK, CH, R, U, VEC>(keys + block * s.k_block_stride + in_page * s.k_token_stride, s.k_token_stride,
                                              block < 0 ? 0 : exist, s.k_dim, lane, q, z);
            const int u = j / (LPK / U), token = first + u;
            const bool owner = j % (LPK / U) == 0;
#pragma unroll
            for (int r = 0; r < R; r++) {
                z[r] = finish_score(z[r], s_row[r], r, token, u < exist, mask, block);
                const bool keep = owner && !(z[r] <= threshold[r]);
                if (__any_sync(ALL_LANES, keep)) {
                    const long long segment = (slot + r) * s.list_stride + mine * s.segment;
                    threshold[r] =
                        fmaxf(threshold[r], append<CAPACITY, TILE>(&s_list[warp][r], s_list_z[warp][r], s_list_token[warp][r],
                                                                   s.list_z + segment, s.list_token + segment, keep, z[r],
                                                                   token, s_row[r].power));
                    if (lane == 0) atomicMax(&s_floor[r], order_of(threshold[r]));
                }
            }
        }
    }

    /* A last, tighter bound from each warp; then everybody drops what the best of them rules out. */
    for (int r = 0; r < R; r++) {
        if (!s_row[r].active || s_row[r].softmax) continue;
        const warp_list w = s_list[warp][r];
        const float floor = raise_floor(s_list_z[warp][r], w.count, w.z_max, w.floor, s_row[r].power);
        if (lane == 0) atomicMax(&s_floor[r], order_of(threshold_of(floor)));
    }
    __syncthreads();
    for (int r = 0; r < R; r++) {
        if (!s_row[r].active || s_row[r].softmax) continue;
        const long long segment = (slot + r) * s.list_stride + mine * s.segment;
        const float best = from_order(s_floor[r]);
        const warp_list w = s_list[warp][r];
        const int kept = copy_above(s_list_z[warp][r], s_list_token[warp][r], w.count, best, s.list_z + segment + w.spilled,
                                    s.list_token + segment + w.spilled);
        if (lane == 0) s.segment_count[(slot + r) * segments + mine] = w.spilled + kept;
        if (threadIdx.x == 0) s.floor[(slot + r) * s.splits + split] = best;
    }
}

/* ---- scan, softmax ---- */

constexpr int SOFT_TILE = 256; /* tokens of a block at once */

/* One tile: scores of all rows, weights relative to the running maximum, then the weighted sum of the values with V_LANES lanes
 * to a value row.  Three barriers per tile; other blocks of the multiprocessor fill them. */
template <typename T, int LPK, int CH, int R, bool VEC>
__global__ void __launch_bounds__(THREADS, (R == 1 && sizeof(T) == 2 && CH == 1 ? 3 : 2)) scan_softmax(const ekv_cuda_step s) {
    typedef scan_shape<T, LPK, CH, R> shape;
    constexpr int U = shape::U, TILE = shape::TILE, V_UNROLL = sizeof(T) == 4 ? 2 : 4;
    __shared__ float s_q[R][shape::DIM];
    __shared__ row_info s_row[R];
    __shared__ int s_prefix[EKV_CUDA_MAX_CHUNKS + 1];
    __shared__ page_entry s_entry[THREADS];
    __shared__ float s_w[R][SOFT_TILE];
    __shared__ long long s_value[SOFT_TILE]; /* offset of the token's value row; -1: not read by any row */
    __shared__ float s_scale[R];
    __shared__ float s_sum[THREADS * 8];

    begin_kernel();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int split = (int)(blockIdx.x % (unsigned)s.splits);
    const long long local_item = blockIdx.x / (unsigned)s.splits;
    const item_info it = describe_item(s, s.first_item + local_item);
    load_rows<shape::DIM, R>(s, it, s_row, s_q);
    const int total = load_chunk_prefix(s, it, local_item, s_prefix);
    const int j = lane % LPK, g = lane / LPK;
    float q[R][CH][8];
    take_query<LPK, CH, R>(s_q, j, q);

    int v_lanes = 1;
    while (v_lanes * 8 < s.v_dim) v_lanes <<= 1;
    const int v_groups = THREADS / v_lanes, v_group = threadIdx.x / v_lanes, v_first = threadIdx.x % v_lanes * 8;
    const int v_left = s.v_dim - v_first;
    float sum[R][8];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < 8; e++) sum[r][e] = 0.0f;
    float run_max = -CUDART_INF_F; /* of row `warp`, in that warp's lanes */
    double run_sum = 0.0;

    const int begin = (int)((long long)total * split / s.splits), end = (int)((long long)total * (split + 1) / s.splits);
    const T *keys = (const T *)s.k + it.head * s.k_head_stride + j * 8, *values = (const T *)s.v + it.head * s.v_head_stride;
    for (int e0 = begin; e0 < end; e0 += THREADS) {
        const int pages = min(THREADS, end - e0), tokens = pages << s.page_shift;
        if ((int)threadIdx.x < pages) s_entry[threadIdx.x] = fetch_entry(s, it, local_item, s_prefix, e0 + threadIdx.x);
        __syncthreads();
        for (int base = 0; base < tokens; base += SOFT_TILE) {
            for (int t0 = warp * 32; t0 < warp * 32 + 32; t0 += TILE) {
                const int at = base + t0 + g * U, i = at >> s.page_shift, in_page = at & (s.page_size - 1);
                const page_entry entry = i < pages ? s_entry[i] : page_entry{0, -1, 0};
                const int first = (entry.page << s.page_shift) + in_page, exist = i < pages ? min(U, it.n - first) : 0;
                float z[R];
                score_tile<T, LPK, CH, R, U, VEC>(keys + entry.block * s.k_block_stride + in_page * s.k_token_stride,
                                                  s.k_token_stride, entry.block < 0 ? 0 : exist, s.k_dim, lane, q, z);
                const int u = j / (LPK / U), token = first + u, slot_in_tile = t0 + g * U + u;
                if (j % (LPK / U) == 0) {
                    bool used = false;
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        z[r] = s_row[r].softmax ? finish_score(z[r], s_row[r], r, token, u < exist, entry.mask, entry.block)
                                                : -CUDART_INF_F;
                        s_w[r][slot_in_tile] = z[r];
                        used |= !(z[r] <= -CUDART_INF_F);
                    }
                    s_value[slot_in_tile] =
                        used && entry.block >= 0 ? entry.block * s.v_block_stride + (in_page + u) * s.v_token_stride : -1;
                }
            }
            __syncthreads();
            if (warp < R) {
                float x[SOFT_TILE / 32], top = run_max, part = 0.0f;
#pragma unroll
                for (int i = 0; i < SOFT_TILE / 32; i++) {
                    x[i] = s_w[warp][i * 32 + lane];
                    top = fmaxf(top, x[i]); /* a NaN passes here and comes back through its weight */
                }
                top = warp_max(top);
#pragma unroll
                for (int i = 0; i < SOFT_TILE / 32; i++) {
                    const float w = x[i] <= -CUDART_INF_F ? 0.0f : expf(x[i] - (top > -CUDART_INF_F ? top : 0.0f));
                    s_w[warp][i * 32 + lane] = w;
                    part += w;
                }
                const float factor = top > run_max && run_max > -CUDART_INF_F ? expf(run_max - top) : 1.0f;
                run_sum = run_sum * (double)factor + (double)warp_sum(part);
                run_max = top;
                if (lane == 0) s_scale[warp] = factor;
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < R; r++)
                if (s_scale[r] != 1.0f)
#pragma unroll
                    for (int e = 0; e < 8; e++) sum[r][e] *= s_scale[r];
            for (int i0 = v_group; i0 < SOFT_TILE; i0 += v_groups * V_UNROLL) {
                chunk8<T, VEC> raw[V_UNROLL];
#pragma unroll
                for (int k = 0; k < V_UNROLL; k++) {
                    const int i = i0 + k * v_groups;
                    const long long at = i < SOFT_TILE ? s_value[i] : -1;
                    if (at >= 0 && v_left > 0)
                        raw[k].load(values + at + v_first, v_left);
                    else
                        raw[k].clear();
                }
#pragma unroll
                for (int k = 0; k < V_UNROLL; k++) {
                    const int i = i0 + k * v_groups;
                    float x[8];
                    raw[k].get(x);
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        const float w = i < SOFT_TILE ? s_w[r][i] : 0.0f;
                        if (w != 0.0f) /* weights of zero are skipped: the value may be NaN */
#pragma unroll
                            for (int e = 0; e < 8; e++) sum[r][e] = fmaf(w, x[e], sum[r][e]);
                    }
                }
            }
            __syncthreads();
        }
    }

    const long long slot = local_item * R;
    if (warp < R && lane == 0 && s_row[warp].active && s_row[warp].softmax) {
        s.soft_max[(slot + warp) * s.splits + split] = run_max;
        s.soft_sum[(slot + warp) * s.splits + split] = run_sum;
    }
#pragma unroll
    for (int r = 0; r < R; r++) { /* the groups' sums, added in order */
        if (!s_row[r].active || !s_row[r].softmax) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) s_sum[(v_group * v_lanes) * 8 + v_first + e] = sum[r][e];
        __syncthreads();
        for (int d = threadIdx.x; d < s.v_dim; d += THREADS) {
            float x = 0.0f;
            for (int k = 0; k < v_groups; k++) x += s_sum[k * v_lanes * 8 + d];
            s.soft_values[((slot + r) * s.splits + split) * s.v_dim + d] = x;
        }
        __syncthreads();
    }
}

/* ---- page statistics ---- */

/* Slack of the box bound, as derived in src/cpu/page.h, for this file's order of additions: a product passes at most CH * 8
 * additions in its lane and log2(LPK) <= 5 after it, which takes the place of ceil(dim / 32) + 5 there. */
__device__ __forceinline__ float bound_slack(int steps, float size, float bias) {
    return (2.0f * (float)steps + 16.0f) * 0x1p-24f * size + 0x1p-20f * fabsf(bias) + 0x1p-120f;
}

/* BOUNDS: an upper bound of the scores in each page, NaN where there is none (an unknown page, a key that is not finite); else their
 * mean and deviation, NaN for an unknown page.  z units, to page_a and page_b.  A block takes chunk_pages pages of an item. */
template <typename T, int LPK, int CH, int R, bool VEC, bool BOUNDS>
__global__ void __launch_bounds__(THREADS, (R >= 4 || CH > 1 ? 2 : 3)) page_scores(const ekv_cuda_step s) {
    constexpr int U = R >= 8 || sizeof(T) == 4 ? 2 : 4, DIM = LPK * CH * 8, TILE = 32 / LPK * U;
    __shared__ float s_q[R][DIM];
    __shared__ row_info s_row[R];
    begin_kernel();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = lane % LPK, g = lane / LPK;
    const long long local_item = blockIdx.x / (unsigned)s.chunks;
    const int chunk = (int)(blockIdx.x % (unsigned)s.chunks);
    const item_info it = describe_item(s, s.first_item + local_item);
    const int end = min(it.pages, (chunk + 1) * s.chunk_pages);
    if (chunk * s.chunk_pages >= end) return;
    const bool narrowed = BOUNDS && s.levels & EKV_CUDA_NORMS; /* bounds by norms are there: few boxes are needed */
    if (narrowed && !boxes_pay(s, local_item)) return;
    int looked = 0;
    load_rows<DIM, R>(s, it, s_row, s_q);
    float q[R][CH][8];
    take_query<LPK, CH, R>(s_q, j, q);
    const long long bytes = BOUNDS ? s.box_bytes : s.moments_bytes;
    const char *base = (BOUNDS ? s.boxes : s.moments) + it.head * s.index_blocks * bytes;

    for (int p0 = chunk * s.chunk_pages + warp * 32; p0 < end; p0 += THREADS) {
        const int pages = min(32, end - p0);
        int my_block = lane < pages ? block_of(s, it, p0 + lane) : -1;
        int my_count = my_block >= 0 ? s.counts[my_block] : 0;
        if (narrowed) {
            bool needed = false;
            for (int r = 0; r < it.rows; r++) {
                const long long at = local_item * R + r;
                needed |= lane < pages && (p0 + lane) << s.page_shift < s_row[r].n &&
                          !((double)s.page_a[at * s.max_pages + p0 + lane] <= s.cut[at].cut);
            }
            if (!needed) my_block = my_count = -1;
        }
        if (BOUNDS && s.levels) looked += __popc(__ballot_sync(ALL_LANES, my_block >= 0));
        for (int t0 = 0; t0 < pages; t0 += TILE) {
            float a[R][U], b[R][U];
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int u = 0; u < U; u++) a[r][u] = b[r][u] = 0.0f;
            int block[U];
#pragma unroll
            for (int u = 0; u < U; u++) block[u] = __shfl_sync(ALL_LANES, my_block, (t0 + g * U + u) & 31);
#pragma unroll
            for (int c = 0; c < CH; c++) {
                const int left = s.k_dim - (c * LPK + j) * 8;
                chunk8<T, VEC> low[U], high[U];
#pragma unroll
                for (int u = 0; u < U; u++) {
                    const T *p = (const T *)(base + block[u] * bytes) + (c * LPK + j) * 8;
                    if (t0 + g * U + u < pages && block[u] >= 0 && left > 0) {
                        low[u].load(p, left);
                        high[u].load(p + s.k_dim, left);
                    } else {
                        low[u].clear();
                        high[u].clear();
                    }
                }
#pragma unroll
                for (int u = 0; u < U; u++) {
                    float x[8], y[8];
                    low[u].get(x);
                    high[u].get(y);
#pragma unroll
                    for (int r = 0; r < R; r++)
#pragma unroll
                        for (int e = 0; e < 8; e++) {
                            if (BOUNDS) {
                                const float m = q[r][c][e] * x[e], n = q[r][c][e] * y[e];
                                a[r][u] += m > n || m != m ? m : n;
                                b[r][u] += fmaxf(fabsf(m), fabsf(n));
                            } else {
                                a[r][u] = fmaf(q[r][c][e], x[e], a[r][u]);
                                const float d = q[r][c][e] * y[e];
                                b[r][u] = fmaf(d, d, b[r][u]);
                            }
                        }
                }
            }
            const int u = j / (LPK / U), in_chunk = t0 + g * U + u, page = p0 + in_chunk;
            const int count = __shfl_sync(ALL_LANES, my_count, in_chunk & 31);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float x = butterfly<LPK, U>(a[r], lane), y = butterfly<LPK, U>(b[r], lane);
                const row_info &row = s_row[r];
                if (j % (LPK / U) != 0 || in_chunk >= pages || !row.active || page << s.page_shift >= row.n) continue;
                if (BOUNDS && count < 0) continue; /* its bound by norms stays */
                const int first = page << s.page_shift, tokens = page_tokens(s, row.n, page), last = first + tokens - 1;
                const long long at = (local_item * R + r) * s.max_pages + page;
                const bool known = count >= tokens;
                if (BOUNDS) {
                    const float bias = row.slope == 0.0f
                                           ? 0.0f
                                           : __fmul_rn(row.slope, (float)((row.slope > 0.0f ? last : first) - row.q_token));
                    float bound = __fadd_rn(x, bias) + bound_slack(CH * 8 + 5, y, bias);
                    if (narrowed && s.page_a[at] < bound) bound = s.page_a[at];
                    s.page_a[at] = known && bound < CUDART_INF_F ? bound : CUDART_NAN_F;
                } else {
                    const float bias =
                        row.slope == 0.0f
                            ? 0.0f
                            : row.slope * (0.5f * (float)(first - row.q_token) + 0.5f * (float)(last - row.q_token));
                    s.page_a[at] = known ? x + bias : CUDART_NAN_F;
                    s.page_b[at] = known ? sqrtf(y) : CUDART_NAN_F;
                }
            }
        }
        if (!s.group_of_pages) continue;
        __syncwarp(); /* the lanes' own writes are read back, a page to a lane */
        for (int r = 0; r < it.rows; r++) summarize<BOUNDS>(s, s_row[r], local_item * R + r, p0);
    }
    if (BOUNDS && s.levels && lane == 0 && looked) atomicAdd(&s.looked[local_item * s.chunks + chunk], looked);
}

/* ---- certified ---- */

/* One row: a lower bound of tau from the pages with the best bounds, to s.cut; see certified.cuh. */
template <typename T, int LPK, int CH, bool VEC> __global__ void __launch_bounds__(PROBE_THREADS) probe(const ekv_cuda_step s) {
    typedef scan_shape<T, LPK, CH, 1> shape;
    constexpr int U = shape::U, TILE = shape::TILE;
    __shared__ float s_q[1][shape::DIM];
    __shared__ row_info s_row[1];
    __shared__ probe_scratch s_scratch;
    __shared__ ekv_cuda_table s_table;
    __shared__ table_scratch s_rotated;
    __shared__ probe_reduce s_reduce;
    begin_kernel();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = lane % LPK, g = lane / LPK;
    const long long slot = blockIdx.x, local_item = slot / s.rows;
    const int r = (int)(slot % s.rows);
    item_info it = describe_item(s, s.first_item + local_item);
    const bool first = s.pass == EKV_CUDA_NORMS || !(s.levels & EKV_CUDA_NORMS), last = s.levels < 2 * s.pass;
    const bool of_tokens = s.pass == EKV_CUDA_SKETCH && sketch_pays(s, local_item);
    const bool fresh = first || of_tokens || (s.pass == EKV_CUDA_BOXES && boxes_pay(s, local_item)); /* there are new bounds */
    it.first_row += r; /* an item of this row alone */
    it.rows = min(max(it.rows - r, 0), 1);
    load_rows<shape::DIM, 1>(s, it, s_row, s_q);
    const row_info row = s_row[0];
    const int pages = (row.n + s.page_size - 1) >> s.page_shift;
    if (pages == 0) {
        if (threadIdx.x == 0 && first) s.cut[slot] = {-CUDART_INF, 0u, 0, 0.0, 0.0, -CUDART_INF, 0.0f, 0, 0};
        return;
    }
    const float *bound = s.page_a + slot * s.max_pages;
    const uint16_t *above = of_tokens ? s.above + slot * s.max_pages * s.page_size : nullptr;
    const double origin = first ? 0.0 : s.cut[slot].origin;
    float cut = first ? -CUDART_INF_F : (float)s.cut[slot].cut, share = 0.0f;
    int turn = 0, probed = 0, sampled = 0;
    if (fresh) {
        const bool sample = s.pass == EKV_CUDA_NORMS && s.levels > EKV_CUDA_NORMS;
        const int chosen = choose_pages(bound, s.group_of_pages + slot * s.groups, pages,
                                        of_tokens ? PROBE_PAGES : max(1, PROBE_TOKENS >> s.page_shift), &s_scratch, &s_reduce, turn);
        const int best = of_tokens ? take_tokens(s, row, above, origin, chosen, &s_scratch, &s_reduce, turn)
                                   : take_pages(s, chosen, &s_scratch);
        const int all = best + (sample ? SAMPLE_TOKENS : 0);
        if (sample && threadIdx.x < SAMPLE_TOKENS)
            s_scratch.token[best + threadIdx.x] =
                (sampled_page((int)threadIdx.x / RUN, pages) << s.page_shift) + (int)threadIdx.x % RUN;
        __syncthreads();
        for (int i = threadIdx.x; i < all; i += PROBE_THREADS)
            s_scratch.row[i] = s_scratch.token[i] < row.n ? key_row(s, it, s_scratch.token[i]) : -1;
        __syncthreads();
        const T *keys = (const T *)s.k + it.head * s.k_head_stride + j * 8;
        float q[1][CH][8];
        take_query<LPK, CH, 1>(s_q, j, q);
        for (int t0 = warp * TILE; t0 < all; t0 += PROBE_WARPS * TILE) {
            const int at = t0 + g * U, own = at + j / (LPK / U);
            float z[1];
            score_keys<T, LPK, CH, 1, U, VEC>(
                keys, [&](int u) { return at + u < all ? s_scratch.row[at + u] : -1ll; }, s.k_dim, lane, q, z);
            if (j % (LPK / U) != 0 || own >= all) continue;
            s_scratch.z[own] = finish_score(z[0], row, 0, s_scratch.token[own], true, 1u, s_scratch.row[own] < 0 ? -1 : 0);
        }
        __syncthreads();
        probed = all;
        const bool make_table = sample && s.levels & EKV_CUDA_SKETCH;
        if (warp == 0) {
            const float floor = floor_of_probe(&s_scratch, best, cut, row.power);
            if (lane == 0) s_scratch.cut = floor;
        } else if (warp == 1 && sample) {
            const float tau = tau_of_sample(s_scratch.z + best, row.n, row.alpha);
            if (lane == 0) s_scratch.tau = tau;
        } else if (make_table) { /* meanwhile, what needs no score */
            rotate_query(s, it, s_q[0], &s_rotated, 2, PROBE_WARPS - 2);
            for (int i = warp - 2; i < SAMPLED_PAGES; i += PROBE_WARPS - 2) {
                const center_part center = part_of_center(s, it, row, sampled_page(i, pages) / s.stretch);
                if (lane == 0) s_scratch.center[i] = center;
            }
        }
        __syncthreads();
        cut = s_scratch.cut;
        const float tau = sample ? fmaxf(s_scratch.tau, cut) : cut;
        if (sample && !make_table) share = share_of_boxes<T>(s, it, row, s_q[0], bound, pages, cut, tau, sampled, &s_reduce, turn);
        if (make_table) {
            if (warp == 0) measure_query(s, it, s_q[0], &s_table, &s_rotated);
            __syncthreads();
            fill_table(s, it, &s_table, &s_rotated, &s_reduce, turn);
            for (int i = threadIdx.x; i < (int)(sizeof s_table / 4); i += PROBE_THREADS)
                ((uint32_t *)(s.lookup + slot))[i] = ((const uint32_t *)&s_table)[i];
            share = share_of_sketch(s, it, row, s_table, bound, pages, cut, tau, &s_scratch, sampled, &s_reduce, turn);
        }
    }
    double relax = 0.0, skipped = 0.0;
    if (last && s.max_mass > 0.0) relax_cut(s, row, bound, above, origin, pages, (double)cut, relax, skipped, &s_scratch);
    if (threadIdx.x != 0) return;
    ekv_cuda_cut *out = s.cut + slot;
    if (first) out->share = share, out->probed = 0, out->sampled = sampled, out->origin = (double)cut; /* read by other blocks later */
    out->cut = (double)cut;
    out->relax = relax;
    out->skipped = skipped;
    out->probed += probed;
}

/* ---- launching ---- */

template <typename T> bool aligned(const void *base, long long a, long long b, long long c, int dim) {
    const int per = 16 / (int)sizeof(T);
    return ((uintptr_t)base & 15) == 0 && a % per == 0 && b % per == 0 && c % per == 0 && dim % 8 == 0;
}

template <typename T, int LPK, int CH, int R, bool VEC>
cudaError_t launch(const ekv_cuda_step &s, int kind, cudaStream_t stream) {
    const long long scan_blocks = s.round_items * s.splits, page_blocks = s.round_items * s.chunks;
    if (kind == EKV_CUDA_SCAN_ENTMAX)
        return start(s.levels & EKV_CUDA_SKETCH ? scan_entmax<T, LPK, CH, R, VEC, true> : scan_entmax<T, LPK, CH, R, VEC, false>, s,
                     scan_blocks, THREADS, stream);
    if (kind == EKV_CUDA_SCAN_SOFTMAX)
        return start(scan_softmax<T, LPK, CH, (R > 4 ? 4 : R), VEC>, s, scan_blocks, THREADS, stream);
    if (kind == EKV_CUDA_PAGE_BOUNDS) return start(page_scores<T, LPK, CH, R, VEC, true>, s, page_blocks, THREADS, stream);
    return start(page_scores<T, LPK, CH, R, VEC, false>, s, page_blocks, THREADS, stream);
}

template <typename T, int LPK, int CH> cudaError_t launch_rows(const ekv_cuda_step &s, int kind, cudaStream_t stream) {
    switch (s.rows) {
    case 1:
        return launch<T, LPK, CH, 1, true>(s, kind, stream);
    case 2:
        return launch<T, LPK, CH, 2, true>(s, kind, stream);
    case 4:
        return launch<T, LPK, CH, 4, true>(s, kind, stream);
    default:
        return launch<T, LPK, CH, 8, true>(s, kind, stream);
    }
}

template <typename T, int LPK, int CH, bool VEC> cudaError_t launch_probe(const ekv_cuda_step &s, cudaStream_t stream) {
    return start(probe<T, LPK, CH, VEC>, s, s.round_items * s.rows, PROBE_THREADS, stream);
}

/* host.c chooses `rows` by ekv_cuda_rows, which knows the same table: one row where nothing fast fits. */
template <typename T> int launch_typed(const ekv_cuda_step &s, int kind, cudaStream_t stream) {
    bool vec = s.k_dim <= 768;
    if (kind == EKV_CUDA_SCAN_ENTMAX || kind == EKV_CUDA_SCAN_SOFTMAX || kind == EKV_CUDA_PROBE)
        vec = vec && aligned<T>(s.k, s.k_block_stride, s.k_token_stride, s.k_head_stride, s.k_dim);
    if (kind == EKV_CUDA_SCAN_SOFTMAX)
        vec = vec && aligned<T>(s.v, s.v_block_stride, s.v_token_stride, s.v_head_stride, s.v_dim);
    if (kind == EKV_CUDA_PAGE_BOUNDS || kind == EKV_CUDA_PAGE_MOMENTS) vec = vec && s.k_dim % 8 == 0;
    if (kind == EKV_CUDA_PROBE) /* the routine of the scan, a row to a block */
        return (int)(!vec             ? launch_probe<T, 32, 4, false>(s, stream)
                     : s.k_dim <= 64  ? launch_probe<T, 8, 1, true>(s, stream)
                     : s.k_dim <= 128 ? launch_probe<T, 16, 1, true>(s, stream)
                     : s.k_dim <= 256 ? launch_probe<T, 32, 1, true>(s, stream)
                                      : launch_probe<T, 32, 3, true>(s, stream));
    if (!vec) {
        switch (s.rows) {
        case 1:
            return (int)launch<T, 32, 4, 1, false>(s, kind, stream);
        case 2:
            return (int)launch<T, 32, 4, 2, false>(s, kind, stream);
        default:
            return (int)cudaErrorInvalidConfiguration;
        }
    }
    if (s.k_dim <= 64) return (int)launch_rows<T, 8, 1>(s, kind, stream);
    if (s.k_dim <= 128) return (int)launch_rows<T, 16, 1>(s, kind, stream);
    if (s.k_dim <= 256) return (int)launch_rows<T, 32, 1>(s, kind, stream);
    return (int)(s.rows == 1 ? launch<T, 32, 3, 1, true>(s, kind, stream) : launch<T, 32, 3, 2, true>(s, kind, stream));
}

} // namespace

#endif
