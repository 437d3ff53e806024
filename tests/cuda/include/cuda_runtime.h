/*
 * What kernels use of CUDA C++, for a C++ compiler: every thread of a block is a coroutine of ../emulator.cpp, shared variables are
 * static, and a collective of a warp or a block suspends its callers until all are there.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EMULATED_CUDA_RUNTIME_H
#define EMULATED_CUDA_RUNTIME_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <math.h>
#include <string.h>
#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"

#define __global__ static
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

/* ---- the machine: emulator.cpp ---- */

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern "C" {
cudaError_t emulator_launch(unsigned blocks, unsigned threads, void (*thread)(void *arg), void *arg);
void emulator_sync_block(void);
/* All lanes bring 8 bytes and the name of what they call; returns the 32 values. */
const uint64_t *emulator_exchange(const char *what, uint64_t value);
}

/* ---- launching ---- */

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...args) {
    const std::tuple<P...> arguments(args...); /* copied, as a launch does */
    std::function<void()> thread = [&] { std::apply(kernel, arguments); };
    return emulator_launch(config->gridDim.x, config->blockDim.x, [](void *f) { (*(std::function<void()> *)f)(); }, &thread);
}

/* ---- collectives ---- */

template <typename T> uint64_t emulated_bits(T x) {
    uint64_t bits = 0;
    static_assert(sizeof x <= sizeof bits, "a shuffle moves up to 8 bytes");
    memcpy(&bits, &x, sizeof x);
    return bits;
}
template <typename T> T emulated_value(uint64_t bits) {
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline int emulated_lane() { return (int)(threadIdx.x & 31); }

static inline void __syncthreads() { emulator_sync_block(); }
static inline void __syncwarp() { emulator_exchange("__syncwarp", 0); }
static inline void __threadfence() {}
template <typename T> T __shfl_sync(unsigned, T x, int lane) {
    return emulated_value<T>(emulator_exchange("__shfl_sync", emulated_bits(x))[lane & 31]);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
    const int lane = emulated_lane();
    return emulated_value<T>(emulator_exchange("__shfl_xor_sync", emulated_bits(x))[(lane ^ mask) & 31]);
}
template <typename T> T __shfl_up_sync(unsigned, T x, int distance) {
    const int lane = emulated_lane();
    return emulated_value<T>(emulator_exchange("__shfl_up_sync", emulated_bits(x))[lane >= distance ? lane - distance : lane]);
}
static inline unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t *all = emulator_exchange("__ballot_sync", vote);
    unsigned lanes = 0;
    for (int i = 0; i < 32; i++) lanes |= (unsigned)(all[i] & 1) << i;
    return lanes;
}
static inline int __any_sync(unsigned, bool vote) {
    const uint64_t *all = emulator_exchange("__any_sync", vote);
    for (int i = 0; i < 32; i++)
        if (all[i] & 1) return 1;
    return 0;
}
template <typename T> unsigned __match_any_sync(unsigned, T x) {
    const uint64_t mine = emulated_bits(x), *all = emulator_exchange("__match_any_sync", mine);
    unsigned lanes = 0;
    for (int i = 0; i < 32; i++) lanes |= (unsigned)(all[i] == mine) << i;
    return lanes;
}

/* One thread runs at a time. */
template <typename T> T atomicAdd(T *p, T x) {
    const T before = *p;
    *p = before + x;
    return before;
}
template <typename T> T atomicMax(T *p, T x) {
    const T before = *p;
    *p = before > x ? before : x;
    return before;
}
template <typename T> T __ldcg(const T *p) { return *p; }

/* ---- arithmetic ---- */

template <typename A, typename B> typename std::common_type<A, B>::type min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> typename std::common_type<A, B>::type max(A a, B b) { return a > b ? a : b; }

static inline uint32_t __float_as_uint(float x) { return (uint32_t)emulated_bits(x); }
static inline float __uint_as_float(uint32_t x) { return emulated_value<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7u) & 255u) << 8 * i;
    return result;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __double2float_rd(double x) {
    const float f = (float)x;
    return (double)f > x ? nextafterf(f, -INFINITY) : f;
}
static inline float __double2float_ru(double x) {
    const float f = (float)x;
    return (double)f < x ? nextafterf(f, INFINITY) : f;
}
static inline float __fadd_rd(float a, float b) {
    const float s = a + b, other = s - a; /* what is lost is exact in f32 */
    const float lost = (a - (s - other)) + (b - other);
    return lost < 0.0f ? nextafterf(s, -INFINITY) : s;
}
static inline float __fsub_rd(float a, float b) { return __fadd_rd(a, -b); }
static inline float __fadd_ru(float a, float b) { return -__fadd_rd(-a, -b); }
static inline float __fmul_ru(float a, float b) { return __double2float_ru((double)a * (double)b); }
static inline float __fsub_ru(float a, float b) { return __fadd_ru(a, -b); }

#endif
