/*
 * CUDA's names of special values.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EMULATED_MATH_CONSTANTS_H
#define EMULATED_MATH_CONSTANTS_H

#define CUDART_INF   ((double)INFINITY)
#define CUDART_INF_F INFINITY
#define CUDART_NAN   ((double)NAN)
#define CUDART_NAN_F NAN

#endif
