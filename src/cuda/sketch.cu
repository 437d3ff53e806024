/*
 * Sketches: how they are made from keys in device memory, and the bounds of tokens that a decode step reads from them (sketch.cuh).
 *
 *   centers   per sequence, head and stretch that gets tokens: the mean of the stretch before, unless the stretch has its center
 *   encode    per page and head: the sketches of its new tokens, as src/cpu/sketch.h makes them
 *   bounds    per item and chunk of pages: f16 bounds of the tokens in pages that norms do not rule out, and the pages' best
 *
 * A center whose first element is a NaN is not known yet.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/sketch.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

/* ---- centers ---- */

struct new_tokens {
    long long first, end; /* of a sequence */
};

__device__ __forceinline__ new_tokens new_tokens_of(const ekv_cuda_build &b, int sequence) {
    if (!b.lengths) return {b.first, b.first + b.max_count};
    const long long length = b.lengths[sequence];
    const long long count = b.counts_in ? b.counts_in[sequence + 1] - b.counts_in[sequence] : b.max_count;
    return {max(0ll, length - min(count, (long long)b.max_count)), length};
}

/* The first stretch that the new tokens touch, and the number of stretches. */
__device__ __forceinline__ int stretches_touched(const ekv_cuda_build &b, const new_tokens &t, long long &first) {
    const long long tokens = b.stretch * b.page_size;
    first = t.first / tokens;
    return t.end > t.first ? (int)((t.end - 1) / tokens - first + 1) : 0;
}

template <typename T> __global__ void __launch_bounds__(THREADS) find_centers(const ekv_cuda_build b) {
    __shared__ double s_sum[WARPS][32];
    __shared__ int s_taken;
    const int head = (int)(blockIdx.x % (unsigned)b.kv_heads);
    const long long rest = blockIdx.x / (unsigned)b.kv_heads;
    const int sequence = (int)(rest / b.touched), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    long long stretch;
    const int touched = stretches_touched(b, new_tokens_of(b, sequence), stretch);
    if (rest % b.touched >= touched) return;
    stretch += rest % b.touched;
    if (stretch == 0 || stretch >= b.stretches) return; /* the first comes with the basis */
    float *center = b.centers + (head * b.stretches + stretch) * b.center_stride;
    if (threadIdx.x == 0) s_taken = center[0] == center[0];
    __syncthreads();
    for (int other = threadIdx.x; other < sequence; other += THREADS) { /* of several sequences the first counts */
        long long first;
        const int n = stretches_touched(b, new_tokens_of(b, other), first);
        if (stretch >= first && stretch < first + n) s_taken = 1;
    }
    __syncthreads();
    if (s_taken) return;
    const int tokens = (int)(b.stretch * b.page_size);
    const long long begin = (stretch - 1) * tokens;
    for (int d0 = 0; d0 < b.center_stride; d0 += 32) {
        double sum = 0.0;
        for (int i = warp; i < tokens && d0 + lane < b.k_dim; i += WARPS) {
            const long long page = (begin + i) / b.page_size;
            const long long block = b.table ? (long long)b.table[sequence * b.table_stride + page] : sequence * b.table_stride + page;
            if (block < 0 || block >= b.blocks) continue;
            const T *keys = (const T *)b.k + block * b.k_block_stride + head * b.k_head_stride;
            sum += (double)to_float(keys[(begin + i) % b.page_size * b.k_token_stride + d0 + lane]);
        }
        __syncthreads();
        s_sum[warp][lane] = sum;
        __syncthreads();
        if (warp == 0) {
            sum = 0.0;
            for (int w = 0; w < WARPS; w++) sum += s_sum[w][lane];
            const float mean = (float)(sum / tokens);
            center[d0 + lane] = fabsf(mean) < CUDART_INF_F ? mean : 0.0f; /* any center is sound */
        }
    }
}

/* ---- encoding ---- */

struct encode_scratch {
    float y[AXES], residual[AXES];
};

/* A norm from its squares' sum: rounded up to float; infinity also for a NaN. */
__device__ __forceinline__ float norm_of(double squares) {
    const double norm = sqrt(squares) * (1.0 + 0x1p-22) + 0x1p-140;
    return norm <= 3.4028234663852886e38 ? (float)norm : CUDART_INF_F;
}

template <int NI> __device__ __forceinline__ float norm_of_key(const float (&x)[NI]) {
    double squares = 0.0;
#pragma unroll
    for (int i = 0; i < NI; i++) squares += (double)x[i] * (double)x[i];
    return norm_of(warp_sum(squares));
}

__device__ __forceinline__ float norm_of_residual(const encode_scratch *w, int begin, int end) {
    double squares = 0.0;
    for (int a = begin + (int)(threadIdx.x & 31); a < end; a += 32) squares += (double)w->residual[a] * (double)w->residual[a];
    return norm_of(warp_sum(squares));
}

/* y = P x: a product passes at most NI additions in its lane and 5 after it. */
template <int NI>
__device__ void rotate(const float *p, int axes, int stride, const float (&x)[NI], encode_scratch *w) {
    const int lane = threadIdx.x & 31;
    for (int a0 = 0; a0 < axes; a0 += 8) {
        float part[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            part[k] = 0.0f;
#pragma unroll
            for (int i = 0; i < NI; i++)
                if (a0 + k < axes && i * 32 < stride) part[k] = fmaf(p[(a0 + k) * stride + i * 32 + lane], x[i], part[k]);
        }
        const float y = butterfly<32, 8>(part, lane);
        if (lane % 4 == 0) w->y[a0 + lane / 4] = w->residual[a0 + lane / 4] = y;
    }
    __syncwarp();
}

/* The number of the nearest centroid to the residual along the code's axes; takes it off. */
__device__ int nearest(const ekv_basis &basis, int code, encode_scratch *w) {
    const int lane = threadIdx.x & 31, v = lane & 15;
    float distance = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int axis = basis.axis[code][j];
        const float away = (axis >= 0 ? w->residual[axis] : 0.0f) - basis.centroid[code][v][j];
        distance = fmaf(away, away, distance);
    }
    unsigned long long best = (unsigned long long)__float_as_uint(distance) << 32 | (unsigned)v;
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) {
        const unsigned long long other = __shfl_xor_sync(ALL_LANES, best, m);
        best = other < best ? other : best;
    }
    const int number = (int)(best & 15u);
    __syncwarp();
    if (lane == 0)
        for (int j = 0; j < 4 && basis.axis[code][j] >= 0; j++) w->residual[basis.axis[code][j]] -= basis.centroid[code][number][j];
    __syncwarp();
    return number;
}

__device__ __forceinline__ void raise(float *most, float x) {
    if ((threadIdx.x & 31) == 0 && x > *most) atomicMax((unsigned *)most, __float_as_uint(x)); /* not negative: bits order like numbers */
}

/* One key, by one warp: its numbers to the slot of a page.  Raises what bounds rest on: the basis' last levels and largest norm. */
template <typename T, int NI>
__device__ void encode_key(const ekv_cuda_build &b, ekv_basis &basis, const float *p, const float *center, const T *key, uint8_t *page,
                           int slot, encode_scratch *w) {
    const int lane = threadIdx.x & 31, codes = basis.codes;
    float x[NI], norm[NORMS];
#pragma unroll
    for (int i = 0; i < NI; i++) x[i] = i * 32 + lane < b.k_dim ? to_float(key[i * 32 + lane]) - center[i * 32 + lane] : 0.0f;
    const float length = norm_of_key(x);
    rotate(p, basis.axes, b.center_stride, x, w);
    uint32_t unit = 0; /* of number `lane` */
    for (int c = 0; c < codes; c++) {
        const uint32_t number = (uint32_t)nearest(basis, c, w);
        if (lane == c / 4) unit |= number << c % 4 * 4;
    }
    const float *q = p + b.axes * b.center_stride;
    for (int a = 0; a < basis.axes; a++) { /* x - Q^T y: what no axis sees */
        const float y = w->y[a];
#pragma unroll
        for (int i = 0; i < NI; i++)
            if (i * 32 < b.center_stride) x[i] = fmaf(-y, q[a * b.center_stride + i * 32 + lane], x[i]);
    }
    for (int n = 0; n < NORMS - 1; n++) norm[n] = norm_of_residual(w, n ? basis.block_end[n - 1] : 0, basis.block_end[n]);
    norm[NORMS - 1] = norm_of_key(x);
    for (int n = 0; n < NORMS; n++) {
        if (!(length < CUDART_INF_F)) norm[n] = CUDART_INF_F;
        const uint32_t fits = __ballot_sync(ALL_LANES, lane < 15 && norm[n] <= basis.level[n][lane & 15]);
        const uint32_t number = fits ? (uint32_t)(__ffs((int)fits) - 1) : 15u;
        if (lane == (codes + n) / 4) unit |= number << (codes + n) % 4 * 4;
        raise(&basis.level[n][15], norm[n]);
    }
    raise(&basis.largest, length);
    if (lane < b.units)
        ((uint16_t *)(page + (long long)(slot / GROUP) * b.units * UNIT_BYTES))[lane * GROUP + slot % GROUP] = (uint16_t)unit;
    __syncwarp();
}

template <typename T, int NI> __global__ void __launch_bounds__(THREADS) encode_pages(const ekv_cuda_build b) {
    __shared__ encode_scratch s_scratch[WARPS];
    const long long i = (blockIdx.x * (long long)THREADS + threadIdx.x) >> 5, rest = i / b.kv_heads;
    const int head = (int)(i % b.kv_heads), sequence = (int)(rest / b.pages);
    if (sequence >= b.batch) return;
    const new_tokens t = new_tokens_of(b, sequence);
    const long long page = t.first / b.page_size + rest % b.pages, first = page * b.page_size, stretch = page / b.stretch;
    const int end = (int)min((long long)b.page_size, (b.lengths ? t.end : b.length) - first); /* as counts will say */
    if (end <= 0 || stretch >= b.stretches || first >= t.end) return;
    const long long block = b.table ? (long long)b.table[sequence * b.table_stride + page] : sequence * b.table_stride + page;
    if (block < 0 || block >= b.index_blocks || block >= b.blocks) return;
    const int known = b.stretch_of[block] == (int)stretch ? b.sketched[block] : 0;
    ekv_basis &basis = b.bases[head];
    const float *p = b.expanded + (long long)head * 2 * b.axes * b.center_stride;
    const float *center = b.centers + (head * b.stretches + stretch) * b.center_stride;
    const T *keys = (const T *)b.k + block * b.k_block_stride + head * b.k_head_stride;
    uint8_t *sketch = b.sketches + (head * b.index_blocks + block) * b.sketch_bytes;
    for (int slot = (int)min((long long)known, max(0ll, t.first - first)); slot < end; slot++)
        encode_key<T, NI>(b, basis, p, center, keys + slot * b.k_token_stride, sketch, slot, &s_scratch[threadIdx.x >> 5]);
}

/* ---- bounds ---- */

constexpr int PAGES = THREADS; /* that a block takes at once */

/* The words of a lane: of its two tokens in group g of the listed pages, whose blocks are in shared memory; 0 where there is no sketch. */
template <int UNITS>
__device__ __forceinline__ void fetch_words(const ekv_cuda_step &s, const item_info &it, const int *blocks, int g, int groups, int shift,
                                            uint32_t (&word)[UNITS]) {
    const int block = g < groups ? blocks[g >> shift] : -1;
    const uint32_t *codes = (const uint32_t *)sketch_group(s, it, max(block, 0), g & ((1 << shift) - 1)) + (threadIdx.x & 7);
#pragma unroll
    for (int u = 0; u < UNITS; u++) word[u] = block >= 0 && u < s.units ? codes[u * (UNIT_BYTES / 4)] : 0u;
}

/* ROWS rows of an item, `set` of them before; a block takes sketch_pages of its pages.  A lane has two neighbouring tokens. */
template <int ROWS, int UNITS>
__global__ void __launch_bounds__(THREADS, (UNITS > 11 || ROWS == 4 ? 3 : 4)) sketch_bounds(const ekv_cuda_step s) {
    __shared__ __align__(16) float s_entry[UNITS * 4 * 16 * ROWS];
    __shared__ float s_start[ROWS][EKV_CUDA_STRETCHES + 1];
    __shared__ row_info s_row[ROWS];
    __shared__ float s_cut[ROWS];
    __shared__ int s_page[PAGES], s_block[PAGES];
    __shared__ uint8_t s_stretch[PAGES], s_rows[PAGES]; /* of a page: its stretch, counted in the block; the rows that need it */
    __shared__ uint32_t s_best[ROWS][PAGES];
    __shared__ block_reduce<THREADS> s_reduce;
    begin_kernel();
    const unsigned sets = (unsigned)(s.rows + ROWS - 1) / ROWS;
    const int set = (int)(blockIdx.x % sets) * ROWS, first = (int)(blockIdx.x / sets % (unsigned)s.sketch_chunks) * s.sketch_pages;
    const long long local_item = blockIdx.x / sets / (unsigned)s.sketch_chunks, slot = local_item * s.rows + set;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const item_info it = describe_item(s, s.first_item + local_item);
    const int rows = min(ROWS, it.rows - set), end = min(it.pages, first + s.sketch_pages);
    if (rows <= 0 || first >= end || !sketch_pays(s, local_item)) return;
    for (int i = threadIdx.x; i < UNITS * 4 * 16 * ROWS; i += THREADS) {
        const int number = i / ROWS, r = i % ROWS;
        s_entry[i] = r < rows && number < s.units * 4 * 16 ? s.lookup[slot + r].entry[number] : 0.0f;
    }
    if (threadIdx.x < ROWS) {
        s_row[threadIdx.x] = describe_row(s, it, set + (int)threadIdx.x);
        s_cut[threadIdx.x] = (int)threadIdx.x < rows ? (float)s.cut[slot + threadIdx.x].origin : 0.0f;
    }
    __syncthreads();
    const int shift = s.page_shift - 4, stretch = (int)(first / s.stretch), stretches = (int)((end - 1) / s.stretch) - stretch + 1;
    for (int i = warp; i < rows * stretches; i += WARPS) {
        const float start = start_of_stretch(s, s.lookup[slot + i % rows], part_of_center(s, it, s_row[i % rows], stretch + i / rows));
        if (lane == 0) s_start[i % rows][i / rows] = start;
    }
    int turn = 0, looked = 0;
    for (int base = first; base < end; base += PAGES) {
        /* The pages of which some row may need a token. */
        const int page = base + (int)threadIdx.x;
        uint32_t needed = 0;
        for (int r = 0; r < rows && (int)threadIdx.x < PAGES && page < end; r++) {
            const bool seen = page << s.page_shift < s_row[r].n;
            needed |= (uint32_t)(seen && !(s.page_a[(slot + r) * s.max_pages + page] <= s_cut[r])) << r;
        }
        int pages;
        const int at = s_reduce.prefix(needed != 0, pages, turn);
        if (needed) {
            const int block = block_of(s, it, page);
            s_page[at] = page;
            s_stretch[at] = (uint8_t)(page / (int)s.stretch - stretch);
            s_rows[at] = (uint8_t)needed;
            s_block[at] = page_sketched(s, block, page, page_tokens(s, it.n, page)) ? block : -1;
            for (int r = 0; r < rows; r++) s_best[r][at] = order_of(-CUDART_INF_F);
        }
        __syncthreads();
        constexpr bool AHEAD = UNITS <= 11 && ROWS <= 2; /* registers are left for the words of the next groups */
        const int groups = pages << shift;
        uint32_t word[UNITS], next[AHEAD ? UNITS : 1];
        if (AHEAD) fetch_words<UNITS>(s, it, s_block, warp * 4 + lane / 8, groups, shift, word);
        for (int g0 = warp * 4; g0 < groups; g0 += WARPS * 4) {
            const int g = g0 + lane / 8, i = min(g, groups - 1) >> shift, block = s_block[i], in_page = g & ((1 << shift) - 1);
            const int token = (s_page[i] << s.page_shift) + in_page * GROUP + lane % 8 * 2;
            const bool known = g < groups && block >= 0;
            if constexpr (AHEAD)
                fetch_words<UNITS>(s, it, s_block, g + WARPS * 4, groups, shift, next);
            else
                fetch_words<UNITS>(s, it, s_block, g, groups, shift, word);
            float sum[ROWS][2];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float start = known && r < rows ? s_start[r][s_stretch[i]] : CUDART_INF_F;
                sum[r][0] = sum[r][1] = start;
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (UNITS > 11 && u >= s.units) break; /* the words behind the last are 0, and so are their entries */
                /* Bytes that are the offsets of entries: of numbers 0 and 2 of both tokens, then of 1 and 3. */
                constexpr int UP = ROWS == 1 ? 2 : ROWS == 2 ? 3 : 4;
                constexpr uint32_t MASK = 0x0f0f0f0fu << UP;
                const uint32_t offsets[2] = {word[u] << UP & MASK, word[u] >> (4 - UP) & MASK};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const char *entry = (const char *)(s_entry + (u * 4 + k) * 16 * ROWS);
                    const float *a = (const float *)(entry + __byte_perm(offsets[k % 2], 0, 0x4440 + k / 2));
                    const float *b = (const float *)(entry + __byte_perm(offsets[k % 2], 0, 0x4442 + k / 2));
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        sum[r][0] += a[r];
                        sum[r][1] += b[r];
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                const row_info &row = s_row[r];
                const float x = add_bias(sum[r][0], row, token), y = add_bias(sum[r][1], row, token + 1);
                const bool in = g < groups && s_rows[i] >> r & 1;
                const uint32_t low = in && token < row.n ? bits_above(x, s_cut[r]) : 0u;
                const uint32_t high = in && token + 1 < row.n ? bits_above(y, s_cut[r]) : 0u;
                if (g < groups && token - lane % 8 * 2 < row.n)
                    *(uint32_t *)(s.above + (slot + r) * s.max_pages * s.page_size + token) = low | high << 16;
                float best = fmaxf(low ? x : -CUDART_INF_F, high ? y : -CUDART_INF_F);
                if (low == 0x7c00u || high == 0x7c00u) best = CUDART_INF_F; /* a NaN is none */
#pragma unroll
                for (int m = 4; m > 0; m >>= 1) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, m));
                if (g < groups && lane % 8 == 0) atomicMax(&s_best[r][i], order_of(best));
            }
            if constexpr (AHEAD)
#pragma unroll
                for (int u = 0; u < UNITS; u++) word[u] = next[u];
        }
        __syncthreads();
        if ((int)threadIdx.x < pages) {
            for (int r = 0; r < rows; r++) {
                float *bound = s.page_a + (slot + r) * s.max_pages + s_page[threadIdx.x];
                const float best = from_order(s_best[r][threadIdx.x]);
                if (s_page[threadIdx.x] << s.page_shift < s_row[r].n && best < CUDART_INF_F && !(*bound <= best)) *bound = best;
            }
            looked += s_block[threadIdx.x] >= 0 ? 1 << shift : 0;
        }
        __syncthreads();
        for (int r = 0; r < rows && warp * 32 < PAGES && base + warp * 32 < end; r++)
            summarize<true>(s, s_row[r], slot + r, base + warp * 32);
    }
    looked = warp_sum(looked);
    if (lane == 0 && looked) atomicAdd(&s.looked[local_item * s.chunks + first / s.chunk_pages], looked);
}

template <int ROWS> cudaError_t start_bounds(const ekv_cuda_step &s, void *stream) {
    const long long blocks = s.round_items * s.sketch_chunks * ((s.rows + ROWS - 1) / ROWS);
    return start(s.units <= 6    ? sketch_bounds<ROWS, 6> /* 64 dimensions */
                 : s.units <= 11 ? sketch_bounds<ROWS, 11> /* 128 */
                                 : sketch_bounds<ROWS, EKV_CUDA_UNITS>,
                 s, blocks, THREADS, stream);
}

template <typename T> int launch_encode(const ekv_cuda_build &b, void *stream) {
    const long long blocks = ((long long)b.batch * b.pages * b.kv_heads + WARPS - 1) / WARPS;
    return (int)start_plain(b.k_dim <= 64    ? encode_pages<T, 2>
                            : b.k_dim <= 128 ? encode_pages<T, 4>
                            : b.k_dim <= 256 ? encode_pages<T, 8>
                                             : encode_pages<T, EKV_MAX_DIM / 32>,
                            blocks, THREADS, stream, b);
}

} // namespace

extern "C" int ekv_cuda_launch_sketch(const ekv_cuda_step *s, void *stream) {
    return (int)(s->rows == 1 ? start_bounds<1>(*s, stream) : s->rows == 2 ? start_bounds<2>(*s, stream) : start_bounds<4>(*s, stream));
}

extern "C" int ekv_cuda_launch_centers(const ekv_cuda_build *b, void *stream) {
    return (int)start_plain(b->dtype == EKV_F32   ? find_centers<float>
                            : b->dtype == EKV_F16 ? find_centers<__half>
                                                  : find_centers<__nv_bfloat16>,
                            (long long)b->batch * b->touched * b->kv_heads, THREADS, stream, *b);
}

extern "C" int ekv_cuda_launch_encode(const ekv_cuda_build *b, void *stream) {
    return b->dtype == EKV_F32   ? launch_encode<float>(*b, stream)
           : b->dtype == EKV_F16 ? launch_encode<__half>(*b, stream)
                                 : launch_encode<__nv_bfloat16>(*b, stream);
}
