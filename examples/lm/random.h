/*
 * Random numbers that are the same on every machine for a given seed: SplitMix64 (Steele, Lea, Flood 2014).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_RANDOM_H
#define LM_RANDOM_H

#include <stdint.h>

static inline uint64_t lm_random_next(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* In [0, limit), limit >= 1.  The remainder's bias is below limit / 2^64. */
static inline uint64_t lm_random_below(uint64_t *state, uint64_t limit) { return lm_random_next(state) % limit; }

#endif
