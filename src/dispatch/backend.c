/*
 * Which backends there are, which can run on this machine, and which is best.
 *
 * Compiled with baseline flags: nothing here may need the instructions that it looks for.  "Available" means that the processor
 * has them and the operating system saves their registers; "worthwhile" that the backend is a good default: measured, see
 * docs/conformance.md.  Whoever measures otherwise on a processor of theirs names the backend, by ENTMAXKV_BACKEND or the
 * context's option; results are the same bits.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cpu/kernel_tables.h"
#include "cuda/cuda.h"
#include "dispatch/internal.h"

#include <string.h>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define EKV_X86 1
#include <cpuid.h>
#endif

#if EKV_X86
typedef struct features { bool avx2, avx512; } features;

/* The state components that the operating system has enabled (XCR0). */
static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static features detect(void) {
    features f = {false, false};
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
    const uint64_t state = enabled_state();
    const bool ymm = (state & 0x06) == 0x06, zmm = (state & 0xe6) == 0xe6;
    const bool avx2 = b >> 5 & 1, f512 = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    f.avx2 = ymm && fma && f16c && avx2;
    f.avx512 = f.avx2 && zmm && f512 && dq && bw && vl;
    return f;
}
#endif

#define MAX_BACKENDS 8

/* Best first; the reference last.  Called anew by each user: cheap, and no state to initialise or race on. */
static int fill(ekv_backend_entry *entries) {
    int n = 0;
#if EKV_X86
    const features f = detect();
    (void)f;
#endif
#if EKV_HAVE_AVX512
    entries[n++] = (ekv_backend_entry){"avx512", &ekv_kernels_avx512, true, f.avx512, true,
                                       f.avx512 ? "" : "needs AVX-512 F, BW, DQ, VL, enabled by the operating system"};
#endif
#if EKV_HAVE_AVX2
    entries[n++] = (ekv_backend_entry){"avx2", &ekv_kernels_avx2, true, f.avx2, true,
                                       f.avx2 ? "" : "needs AVX2, FMA and F16C, enabled by the operating system"};
#endif
#if EKV_HAVE_NEON
    entries[n++] = (ekv_backend_entry){"neon", &ekv_kernels_neon, true, true, true, ""};
#endif
#if EKV_HAVE_SCALAR
    entries[n++] = (ekv_backend_entry){"scalar", &ekv_kernels_scalar, true, true, true, ""};
#endif
#if EKV_HAVE_CUDA
    const char *missing = ekv_cuda_missing();
    entries[n++] = (ekv_backend_entry){"cuda", NULL, true, !missing, false,
                                       missing ? missing : "takes device pointers, so it is used only where it is asked for by name"};
#endif
    entries[n++] = (ekv_backend_entry){"reference", NULL, true, true, false, "double precision, for checking results, not for speed"};
    return n;
}

int ekv_find_backend(const char *name, ekv_backend_entry *entry) {
    ekv_backend_entry entries[MAX_BACKENDS];
    const int n = fill(entries);
    for (int i = 0; i < n; i++) {
        const bool match = name ? strcmp(entries[i].name, name) == 0 : entries[i].available && entries[i].worthwhile;
        if (!match) continue;
        *entry = entries[i];
        return 1;
    }
    return 0;
}

void ekv_list_available(char *text, size_t size) {
    ekv_backend_entry entries[MAX_BACKENDS];
    const int n = fill(entries);
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        if (!entries[i].available) continue;
        const size_t length = strlen(entries[i].name), comma = used ? 2 : 0;
        if (used + comma + length + 1 > size) return;
        memcpy(text + used, ", ", comma);
        memcpy(text + used + comma, entries[i].name, length + 1);
        used += comma + length;
    }
}

ekv_status ekv_backend(int32_t i, ekv_backend_info *info) {
    ekv_backend_entry entries[MAX_BACKENDS];
    const int n = fill(entries);
    if (!info || info->size < sizeof *info || i < 0 || i >= n) return EKV_ERROR_INVALID_ARGUMENT;
    info->name = entries[i].name;
    info->compiled = entries[i].compiled;
    info->available = entries[i].available;
    info->worthwhile = entries[i].worthwhile;
    info->note = entries[i].note;
    return EKV_OK;
}
