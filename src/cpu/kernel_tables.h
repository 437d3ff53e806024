/*
 * The tables that src/cpu/kernels.c defines, one per instruction set of this build.  What they hold: entmaxkv/kernels.h.
 */
#ifndef EKV_KERNEL_TABLES_H
#define EKV_KERNEL_TABLES_H

#include "entmaxkv/kernels.h"

#if EKV_HAVE_SCALAR
extern const ekv_kernels ekv_kernels_scalar;
#endif
#if EKV_HAVE_AVX2
extern const ekv_kernels ekv_kernels_avx2;
#endif
#if EKV_HAVE_AVX512
extern const ekv_kernels ekv_kernels_avx512;
#endif
#if EKV_HAVE_NEON
extern const ekv_kernels ekv_kernels_neon;
#endif

#endif
