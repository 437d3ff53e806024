/*
 * Files of bases: how the sketches of a model's keys are made, found once by `calibrate` and loaded before the first token.
 *
 * A file is a safetensors file whose metadata give "format": "entmaxkv-basis".  Tensor layer.N, U8 of rank 1, is what
 * ekv_index_save_basis wrote for layer N; the library checks it when it is loaded.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_BASIS_H
#define LM_BASIS_H

#include "state.h"

/* Writes the bases of all layers of the state's cache. */
bool lm_basis_write(const lm_state *state, const char *path, lm_error *error);

/* Loads them into the cache of a state that has no tokens yet. */
bool lm_basis_load(lm_state *state, const char *path, lm_error *error);

#endif
