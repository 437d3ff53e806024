/*
 * The clock that everything is timed with.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_CLOCK_H
#define LM_CLOCK_H

/* Seconds since some fixed moment; never goes back. */
double lm_seconds(void);

#endif
