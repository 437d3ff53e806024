/*
 * Scalar exp, log, pow and erfc for the decisions that are made outside the kernels: SLEEF's consistent variants, whose bits depend
 * neither on the instruction set nor on the C library; libm in a build without SLEEF.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#include <math.h>

float ekv_round_down(double x) {
    const float f = (float)x;
    return (double)f > x ? nextafterf(f, -INFINITY) : f;
}

float ekv_threshold(float z_max, double offset) {
    const float t = ekv_round_down((double)z_max + offset);
    return t < z_max ? t : nextafterf(z_max, -INFINITY); /* |z_max| is huge: keep the largest */
}

#if EKV_WITH_SLEEF
#include <sleef.h>
double ekv_exp(double x) { return Sleef_cinz_expd1_u10purec(x); }
double ekv_log(double x) { return Sleef_cinz_logd1_u10purec(x); }
double ekv_pow(double x, double y) { return Sleef_cinz_powd1_u10purec(x, y); }
double ekv_erfc(double x) { return Sleef_cinz_erfcd1_u15purec(x); }
#else
double ekv_exp(double x) { return exp(x); }
double ekv_log(double x) { return log(x); }
double ekv_pow(double x, double y) { return pow(x, y); }
double ekv_erfc(double x) { return erfc(x); }
#endif
