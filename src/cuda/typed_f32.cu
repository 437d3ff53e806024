/*
 * The scanning kernels for f32 keys and values.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/typed.cuh"

extern "C" int ekv_cuda_launch_scan_f32(const ekv_cuda_step *s, int kind, void *stream) {
    return launch_typed<float>(*s, kind, (cudaStream_t)stream);
}
