/*
 * The scanning kernels for bf16 keys and values.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/typed.cuh"

extern "C" int ekv_cuda_launch_scan_bf16(const ekv_cuda_step *s, int kind, void *stream) {
    return launch_typed<__nv_bfloat16>(*s, kind, (cudaStream_t)stream);
}
