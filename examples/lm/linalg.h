/*
 * The dense part of the model: matrix products through BLAS and the elementwise functions between them, spread over OpenMP
 * threads where the compiler has them.
 *
 * Matrices are row-major.  Results do not depend on the number of threads.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_LINALG_H
#define LM_LINALG_H

#include <stdbool.h>
#include <stdint.h>

/* Call once before the first product: settles who runs threads, BLAS or this file. */
void lm_linalg_setup(int32_t threads);

/* target[t][r] = sum over c of x[t][c] * weights[r][c], added to the target if `accumulate`; x and target have the given
 * distance between rows, the weights are packed.  One row goes through sgemv, several through sgemm. */
void lm_matmul(const float *weights, int32_t rows, int32_t columns, const float *x, int64_t x_stride, int32_t count,
               float *target, int64_t target_stride, bool accumulate, int32_t threads);

/* target[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight, rows packed. */
void lm_rms_norm(const float *x, const float *weight, double epsilon, int32_t count, int32_t width, float *target,
                 int32_t threads);

/* Causal depthwise convolution: target[t][c] = sum over j of window[t + j][c] * taps[j][c]; window holds taps - 1 rows more
 * than target, the past first. */
void lm_convolve(const float *window, const float *taps, int32_t tap_count, int32_t count, int32_t width, float *target,
                 int32_t threads);

/* rows[t] holds a gate and then an up projection, `width` each; the gate becomes silu(gate) * up. */
void lm_silu_gate(float *rows, int32_t count, int32_t width, int32_t threads);

#endif
