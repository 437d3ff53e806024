/*
 * The machine as the benchmark sees it (see machine.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if EKV_WITH_HWLOC
#  include <hwloc.h>
#endif
#if defined(__x86_64__)
#  include <immintrin.h>
#elif defined(__aarch64__)
#  include <arm_neon.h>
#endif

/* The rest of the first line of a file that begins with `key`, behind a colon and blanks; false if there is none. */
static bool line_of(const char *path, const char *key, char *text, size_t size) {
    char line[512];
    FILE *file = fopen(path, "r");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, key, strlen(key)) != 0 || !colon) continue;
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(text, size, "%.*s", (int)strcspn(colon, "\n"), colon);
        found = true;
    }
    if (file) fclose(file);
    return found;
}

void machine_processor(char *text, size_t size) {
    if (line_of("/proc/cpuinfo", "model name", text, size)) return;
    snprintf(text, size, "unknown processor");
#if EKV_WITH_HWLOC
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) return;
    if (!hwloc_topology_load(topology)) {
        const hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
        const char *model = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;
        if (model) snprintf(text, size, "%s", model);
    }
    hwloc_topology_destroy(topology);
#endif
}

size_t machine_last_level_cache(void) {
    size_t bytes = 0;
#if EKV_WITH_HWLOC
    static const hwloc_obj_type_t types[] = {HWLOC_OBJ_L4CACHE, HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L2CACHE};
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) return 0;
    for (int level = 0, loaded = !hwloc_topology_load(topology); loaded && level < 3 && !bytes; level++)
        for (int i = 0, n = hwloc_get_nbobjs_by_type(topology, types[level]); i < n; i++)
            bytes += (size_t)hwloc_get_obj_by_type(topology, types[level], (unsigned)i)->attr->cache.size;
    hwloc_topology_destroy(topology);
#elif defined(_SC_LEVEL3_CACHE_SIZE)
    const long level3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (level3 > 0) bytes = (size_t)level3;
#endif
    return bytes;
}

/* What the container still grants, on systems that have cgroups. */
static double container_memory(void) {
    double limit = 0, used = 0;
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "r");
    const bool limited = file && fscanf(file, "%lf", &limit) == 1; /* no number: "max" */
    if (file) fclose(file);
    file = limited ? fopen("/sys/fs/cgroup/memory.current", "r") : NULL;
    const bool known = file && fscanf(file, "%lf", &used) == 1;
    if (file) fclose(file);
    return known && limit > used ? limit - used : 0;
}

double machine_free_memory(void) {
    char text[64];
    double bytes = 0;
    if (line_of("/proc/meminfo", "MemAvailable", text, sizeof text)) bytes = 1024 * atof(text);
#if defined(_SC_PHYS_PAGES)
    else bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
#endif
    const double container = container_memory();
    return container > 0 && container < bytes ? container : bytes;
}

double machine_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- streaming ---- */

enum { LANES = 32 }; /* sums at once: enough for the loads, not the additions, to be what limits the loop */

/* The widest loads that the processor has, where the compiler can choose at run time. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#  if __has_attribute(target_clones)
__attribute__((target_clones("avx512f", "avx2", "default")))
#  endif
#endif
static uint64_t sum_words(const uint64_t *words, size_t count) {
    uint64_t sum[LANES] = {0}, total = 0;
    for (size_t i = 0; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sum[lane] += words[i + (size_t)lane];
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return total;
}

/* Thread number `part` of `threads` has the words from its first to the next one's first. */
static size_t first_word(const machine_stream *stream, int part) {
    return stream->count / LANES * (size_t)part / (size_t)stream->threads * LANES;
}

static void fill_part(const machine_stream *stream, int part) {
    for (size_t i = first_word(stream, part); i < first_word(stream, part + 1); i++) stream->words[i] = i;
}

static uint64_t read_part(const machine_stream *stream, int part) {
    const size_t first = first_word(stream, part);
    return sum_words(stream->words + first, first_word(stream, part + 1) - first);
}

bool machine_stream_open(machine_stream *stream, size_t bytes, int threads) {
    const size_t alignment = (size_t)1 << 21; /* so that the system can back it by large pages, as it does a large cache */
    *stream = (machine_stream){NULL, bytes / sizeof(uint64_t), threads};
    stream->words = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!stream->words) return false;
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static, 1) num_threads(threads)
#endif
    for (int part = 0; part < threads; part++) fill_part(stream, part);
    return true;
}

void machine_stream_close(machine_stream *stream) {
    free(stream->words);
    stream->words = NULL;
}

static volatile uint64_t sink; /* keeps the compiler from leaving the reads out */

void machine_stream_read(const machine_stream *stream) {
    uint64_t total = 0;
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static, 1) num_threads(stream->threads) reduction(+ : total)
#endif
    for (int part = 0; part < stream->threads; part++) total += read_part(stream, part);
    sink = total;
}

double machine_stream_bandwidth(const machine_stream *stream, int passes) {
    double least = 0;
    for (int i = 0; i < passes; i++) {
        const double begin = machine_seconds();
        machine_stream_read(stream);
        const double seconds = machine_seconds() - begin;
        if (i == 0 || seconds < least) least = seconds;
    }
    return (double)stream->count * sizeof(uint64_t) / least;
}

/* ---- multiplying and adding ---- */

/* Loops over chains, each in a register: as many as two units have additions under way, or four units of 64-bit Arm, and few enough
 * that compilers keep them there.  The chains begin with different numbers, which the compiler does not know, since it would compute
 * equal ones once.  Fused, 1/4 is added until nothing changes any more; apart, x becomes x/2 + 1/2 and tends to 1, since a product
 * of constants would be computed once: no number is ever so large or small that it is slow. */
#if defined(__clang__)
#  define UNROLL _Pragma("unroll")
#else
#  define UNROLL _Pragma("GCC unroll 32")
#endif
#define CHAINS_LOOP(name, attributes, vector, chains, step)                                                                    \
  attributes static float name(int64_t rounds, float start) {                                                                  \
    const vector half = (vector){0} + 0.5f;                                                                                    \
    vector x[chains], total = {0};                                                                                             \
    UNROLL for (int i = 0; i < (chains); i++) x[i] = (vector){0} + start * (float)i;                                           \
    for (int64_t round = 0; round < rounds; round++) {                                                                         \
      UNROLL for (int i = 0; i < (chains); i++) x[i] = step;                                                                   \
    }                                                                                                                          \
    UNROLL for (int i = 0; i < (chains); i++) total += x[i];                                                                   \
    return total[0];                                                                                                           \
  }
#define SEPARATE (x[i] * half + half) /* this file is compiled with -ffp-contract=off */

typedef struct peak_loop {
    const char *backend; /* NULL: all others */
    float (*fused)(int64_t rounds, float start);
    float (*separate)(int64_t rounds, float start);
    int chains, lanes;
} peak_loop;

enum { WIDE_CHAINS = 16, NARROW_CHAINS = 14 }; /* of 32 and of 16 registers */

#if defined(__x86_64__)
CHAINS_LOOP(fused_avx512, __attribute__((target("avx512f"))), __m512, WIDE_CHAINS, _mm512_fmadd_ps(half, half, x[i]))
CHAINS_LOOP(separate_avx512, __attribute__((target("avx512f"))), __m512, WIDE_CHAINS, SEPARATE)
CHAINS_LOOP(fused_avx2, __attribute__((target("avx2,fma"))), __m256, NARROW_CHAINS, _mm256_fmadd_ps(half, half, x[i]))
CHAINS_LOOP(separate_avx2, __attribute__((target("avx2,fma"))), __m256, NARROW_CHAINS, SEPARATE)
CHAINS_LOOP(separate_sse2, , __m128, NARROW_CHAINS, SEPARATE) /* what code that names no instruction set is compiled for */
static const peak_loop peak_loops[] = {{"avx512", fused_avx512, separate_avx512, WIDE_CHAINS, 16},
                                       {"avx2", fused_avx2, separate_avx2, NARROW_CHAINS, 8},
                                       {NULL, separate_sse2, separate_sse2, NARROW_CHAINS, 4}};
#elif defined(__aarch64__)
CHAINS_LOOP(fused_neon, , float32x4_t, WIDE_CHAINS, vfmaq_f32(x[i], half, half))
CHAINS_LOOP(separate_neon, , float32x4_t, WIDE_CHAINS, SEPARATE)
static const peak_loop peak_loops[] = {{NULL, fused_neon, separate_neon, WIDE_CHAINS, 4}};
#else
typedef float vector4 __attribute__((vector_size(16)));
CHAINS_LOOP(separate_plain, , vector4, NARROW_CHAINS, SEPARATE)
static const peak_loop peak_loops[] = {{NULL, separate_plain, separate_plain, NARROW_CHAINS, 4}};
#endif

static volatile float start_of_chains = 1, last_of_chains;

/* Seconds that all threads take for `rounds` rounds each. */
static double time_rounds(float (*loop)(int64_t rounds, float start), int threads, int64_t rounds) {
    const float start = start_of_chains;
    const double begin = machine_seconds();
    float total = 0;
#if defined(_OPENMP)
#  pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : total)
#endif
    for (int thread = 0; thread < threads; thread++) total += loop(rounds, start);
    last_of_chains = total;
    return machine_seconds() - begin;
}

/* Rounds of all threads per second. */
static double round_rate(float (*loop)(int64_t rounds, float start), int threads, int passes) {
    const double enough = 0.01; /* seconds: long beside the start of threads, short so that other programs leave some pass alone */
    int64_t rounds = 1000;
    double least = time_rounds(loop, threads, rounds);
    while (least < enough) least = time_rounds(loop, threads, rounds *= 2);
    for (int i = 1; i < passes; i++) {
        const double seconds = time_rounds(loop, threads, rounds);
        if (seconds < least) least = seconds;
    }
    return (double)rounds * threads / least;
}

machine_peak machine_multiply_add_peak(const char *backend, int threads, int passes) {
    const peak_loop *p = peak_loops;
    while (p->backend && strcmp(p->backend, backend) != 0) p++;
    const double operations = 2.0 * p->chains * p->lanes;
    machine_peak peak;
    peak.separate = operations * round_rate(p->separate, threads, passes);
    peak.fused = p->fused == p->separate ? peak.separate : operations * round_rate(p->fused, threads, passes);
    return peak;
}
