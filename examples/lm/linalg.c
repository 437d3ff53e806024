/*
 * The dense part of the model (see linalg.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "linalg.h"

#include <cblas.h>
#include <math.h>

/* Products are cut into panels of weight rows.  The panels' size is fixed, not derived from the threads: BLAS treats the last
 * rows of a call apart, and results shall be the same for any number of threads. */
enum { PANEL = 128 };

/* With OpenMP the panels run on the threads that EntmaxKV's own OpenMP loops use, and BLAS stays on one: two pools that take
 * turns every few microseconds, each waiting in a busy loop, would slow each other down.  A BLAS whose threads cannot be
 * controlled keeps them and gets the panels one after the other. */
#if defined(_OPENMP) && defined(LM_HAVE_OPENBLAS_SET_NUM_THREADS)
#  define LM_PANELS_PARALLEL 1
#else
#  define LM_PANELS_PARALLEL 0
#endif

/* clang-format takes #text for a directive. */
/* clang-format off */
#if defined(_OPENMP)
#  define LM_PRAGMA(text) _Pragma(#text)
#  define LM_PARALLEL_FOR(threads, worthwhile) LM_PRAGMA(omp parallel for num_threads(threads) if (worthwhile) schedule(static))
#else
#  define LM_PARALLEL_FOR(threads, worthwhile)
#endif
/* clang-format on */

/* Below this many tokens the elementwise functions take less time than waking threads. */
enum { PARALLEL_TOKENS = 16 };

void lm_linalg_setup(int32_t threads) {
#if LM_PANELS_PARALLEL
    (void)threads;
    openblas_set_num_threads(1);
#elif defined(LM_HAVE_OPENBLAS_SET_NUM_THREADS)
    openblas_set_num_threads(threads);
#else
    (void)threads;
#endif
}

static void multiply_panel(const float *weights, int32_t rows, int32_t columns, const float *x, int64_t x_stride, int32_t count,
                           float *target, int64_t target_stride, float beta) {
    if (count == 1) {
        cblas_sgemv(CblasRowMajor, CblasNoTrans, rows, columns, 1.0f, weights, columns, x, 1, beta, target, 1);
    } else {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, count, rows, columns, 1.0f, x, (int)x_stride, weights, columns,
                    beta, target, (int)target_stride);
    }
}

void lm_matmul(const float *weights, int32_t rows, int32_t columns, const float *x, int64_t x_stride, int32_t count,
               float *target, int64_t target_stride, bool accumulate, int32_t threads) {
    (void)threads;
    float beta = accumulate ? 1.0f : 0.0f;
    int32_t panels = (rows + PANEL - 1) / PANEL;
    LM_PARALLEL_FOR(threads, LM_PANELS_PARALLEL)
    for (int32_t p = 0; p < panels; p++) {
        int32_t first = p * PANEL;
        int32_t panel_rows = rows - first < PANEL ? rows - first : PANEL;
        multiply_panel(weights + (int64_t)first * columns, panel_rows, columns, x, x_stride, count, target + first,
                       target_stride, beta);
    }
}

void lm_rms_norm(const float *x, const float *weight, double epsilon, int32_t count, int32_t width, float *target,
                 int32_t threads) {
    (void)threads;
    LM_PARALLEL_FOR(threads, count >= PARALLEL_TOKENS)
    for (int32_t t = 0; t < count; t++) {
        const float *row = x + (int64_t)t * width;
        float *out = target + (int64_t)t * width;
        float factor = (float)(1.0 / sqrt((double)cblas_sdot(width, row, 1, row, 1) / width + epsilon));
        for (int32_t c = 0; c < width; c++) {
            out[c] = row[c] * factor * weight[c];
        }
    }
}

void lm_convolve(const float *window, const float *taps, int32_t tap_count, int32_t count, int32_t width, float *target,
                 int32_t threads) {
    (void)threads;
    LM_PARALLEL_FOR(threads, count >= PARALLEL_TOKENS)
    for (int32_t t = 0; t < count; t++) {
        float *out = target + (int64_t)t * width;
        for (int32_t c = 0; c < width; c++) {
            out[c] = 0.0f;
        }
        for (int32_t j = 0; j < tap_count; j++) {
            const float *row = window + (int64_t)(t + j) * width;
            const float *tap = taps + (int64_t)j * width;
            for (int32_t c = 0; c < width; c++) {
                out[c] += row[c] * tap[c];
            }
        }
    }
}

void lm_silu_gate(float *rows, int32_t count, int32_t width, int32_t threads) {
    (void)threads;
    LM_PARALLEL_FOR(threads, count >= PARALLEL_TOKENS)
    for (int32_t t = 0; t < count; t++) {
        float *gate = rows + (int64_t)t * 2 * width;
        const float *up = gate + width;
        for (int32_t c = 0; c < width; c++) {
            gate[c] = gate[c] / (1.0f + expf(-gate[c])) * up[c];
        }
    }
}
