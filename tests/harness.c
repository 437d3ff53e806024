/*
 * The tests' shared parts, see harness.h.  It must not use anything of the library but the public interface and the reference.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE
#endif

#include "harness.h"

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---- Running tests ---------------------------------------------------------------------------------------------------- */

static uint64_t run_seed = 1;
static int64_t run_case = -1, run_scale = 1;
static const char *run_program = "?";

static char current_note[1024];
static char current_replay[512];
static bool current_ends_at_guard = true;

static int64_t environment_number(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    if (text == NULL || *text == '\0') {
        return otherwise;
    }
    char *end = NULL;
    const long long value = strtoll(text, &end, 0);
    if (*end != '\0') {
        fprintf(stderr, "%s=%s is not a number\n", name, text);
        exit(2);
    }
    return value;
}

static void read_environment(void) {
    const char *seed = getenv("EKV_TEST_SEED");
    if (seed != NULL && strcmp(seed, "random") == 0) {
        run_seed = (uint64_t)time(NULL) * 1000003u ^ (uint64_t)getpid();
    } else {
        run_seed = (uint64_t)environment_number("EKV_TEST_SEED", 1);
    }
    run_case = environment_number("EKV_TEST_CASE", -1);
    run_scale = environment_number("EKV_TEST_SCALE", 1);
    if (run_scale < 1) {
        run_scale = 1;
    }
}

static void put(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
        return; /* nowhere left to say it */
    }
}

/* Names the case in which a guard page was touched or an instruction was not understood, then dies of it. */
static void on_crash(int signal_number) {
    put(signal_number == SIGILL ? "\nillegal instruction in: " : "\nmemory fault in: ");
    put(current_note);
    put("\nreplay: ");
    put(current_replay);
    put("\n");
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

#if defined(__SANITIZE_ADDRESS__)
#  define HAVE_ASAN 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define HAVE_ASAN 1
#  endif
#endif

static void catch_crashes(void) {
#ifndef HAVE_ASAN
    const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = on_crash;
        sigaction(signals[i], &action, NULL);
    }
#else
    (void)on_crash;
#endif
}

int harness_main(const char *program, const test_entry *tests, size_t count) {
    read_environment();
    run_program = program;
    const char *slash = strrchr(program, '/');
    Suite *suite = suite_create(slash ? slash + 1 : program);
    for (size_t i = 0; i < count; i++) {
        TCase *one = tcase_create(tests[i].name);
        tcase_set_timeout(one, 0);
        tcase_add_test(one, tests[i].test);
        suite_add_tcase(suite, one);
    }
    printf("replay all: EKV_TEST_SEED=%llu EKV_TEST_SCALE=%lld %s\n", (unsigned long long)run_seed, (long long)run_scale,
           program);
    fflush(stdout);
    snprintf(current_replay, sizeof current_replay, "EKV_TEST_SEED=%llu %s", (unsigned long long)run_seed, program);
    catch_crashes();
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    const int ran = srunner_ntests_run(runner);
    srunner_free(runner);
    return failed == 0 && ran > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

void case_fail(const char *file, int line, const char *condition, const char *format, ...) {
    char detail[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    fflush(stdout);
    ck_abort_msg("%s:%d: not (%s)\n    %s\n    case: %s\n    replay: %s", file, line, condition, detail, current_note,
                 current_replay);
}

void expect_status(const char *file, int line, const char *call, const ekv_context *context, ekv_status expected,
                   ekv_status status) {
    if (status != expected) {
        case_fail(file, line, call, "returned %d (%s), expected %d; last error: %s", (int)status, ekv_strerror(status),
                  (int)expected, context ? ekv_last_error(context) : "(no context)");
    }
}

/* ---- Random cases ----------------------------------------------------------------------------------------------------- */

static uint64_t splitmix(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t rotate(uint64_t x, int k) {
    return (x << k) | (x >> (64 - k));
}

uint64_t rng_u64(rng *r) {
    const uint64_t result = rotate(r->s[1] * 5, 7) * 9;
    const uint64_t t = r->s[1] << 17;
    r->s[2] ^= r->s[0];
    r->s[3] ^= r->s[1];
    r->s[1] ^= r->s[2];
    r->s[0] ^= r->s[3];
    r->s[2] ^= t;
    r->s[3] = rotate(r->s[3], 45);
    return result;
}

double rng_uniform(rng *r) {
    return (double)(rng_u64(r) >> 11) * 0x1p-53;
}
double rng_range(rng *r, double low, double high) {
    return low + (high - low) * rng_uniform(r);
}
int64_t rng_between(rng *r, int64_t low, int64_t high) {
    return low + (int64_t)(rng_u64(r) % (uint64_t)(high - low + 1));
}
bool rng_chance(rng *r, double probability) {
    return rng_uniform(r) < probability;
}

double rng_normal(rng *r) {
    const double radius = sqrt(-2.0 * log(1.0 - rng_uniform(r)));
    return radius * cos(6.283185307179586 * rng_uniform(r));
}

float rng_rough_normal(rng *r) {
    const uint64_t x = rng_u64(r);
    const int64_t sum = (int64_t)(x & 0xFFFF) + (int64_t)(x >> 16 & 0xFFFF) + (int64_t)(x >> 32 & 0xFFFF) + (int64_t)(x >> 48);
    return (float)(sum - 131070) * (1.7320508f / 65536.0f);
}

rng case_begin(const char *name, int64_t index) {
    uint64_t state = run_seed;
    for (const char *c = name; *c; c++) {
        state = state * 1099511628211u + (unsigned char)*c;
    }
    state += (uint64_t)index * 0xD1B54A32D192ED03u;
    rng r;
    for (int i = 0; i < 4; i++) {
        r.s[i] = splitmix(&state);
    }
    current_ends_at_guard = index % 2 == 0;
    snprintf(current_note, sizeof current_note, "%s #%lld", name, (long long)index);
    snprintf(current_replay, sizeof current_replay, "EKV_TEST_SEED=%llu EKV_TEST_CASE=%lld CK_RUN_CASE=%s %s",
             (unsigned long long)run_seed, (long long)index, name, run_program);
    return r;
}

void case_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(current_note, sizeof current_note, format, arguments);
    va_end(arguments);
}

int64_t case_first(void) {
    return run_case >= 0 ? run_case : 0;
}

int64_t case_end(int64_t count) {
    return run_case >= 0 ? run_case + 1 : case_share(count);
}

int64_t case_end_of_list(int64_t count) {
    return run_case >= 0 ? run_case + 1 : count;
}

int64_t case_share(int64_t count) {
    return count / run_scale > 0 ? count / run_scale : 1;
}

/* ---- Memory between guard pages --------------------------------------------------------------------------------------- */

enum { SLACK = 0x5C };

static size_t system_page(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

guard guard_alloc_aligned(size_t size, size_t alignment) {
    const size_t page = system_page();
    guard g;
    g.size = size;
    g.span = (size + page - 1) / page * page;
    unsigned char *all = mmap(NULL, g.span + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) {
        case_fail(__FILE__, __LINE__, "mmap", "no memory for %zu guarded bytes", size);
    }
    g.base = all + page;
    if (g.span > 0 && mprotect(g.base, g.span, PROT_READ | PROT_WRITE) != 0) {
        case_fail(__FILE__, __LINE__, "mprotect", "cannot open %zu bytes between guard pages", g.span);
    }
    size_t offset = current_ends_at_guard ? g.span - size : 0;
    offset -= offset % alignment;
    memset(g.base, SLACK, g.span);
    g.data = g.base + offset;
    return g;
}

guard guard_alloc(size_t size) {
    return guard_alloc_aligned(size, 1);
}

void guard_read_only(const guard *g, bool read_only) {
    if (g->span > 0 && mprotect(g->base, g->span, read_only ? PROT_READ : PROT_READ | PROT_WRITE) != 0) {
        case_fail(__FILE__, __LINE__, "mprotect", "cannot change the protection of %zu bytes", g->span);
    }
}

void guard_free(guard *g) {
    if (g->base == NULL) {
        return;
    }
    const unsigned char *data = g->data;
    for (const unsigned char *b = g->base; b < g->base + g->span; b++) {
        if ((b < data || b >= data + g->size) && *b != SLACK) {
            case_fail(__FILE__, __LINE__, "memory around a buffer is intact", "byte %lld of a buffer of %zu was written",
                      (long long)(b - data), g->size);
        }
    }
    munmap(g->base - system_page(), g->span + 2 * system_page());
    memset(g, 0, sizeof *g);
}

bool is_poison(const void *bytes, size_t size) {
    const unsigned char *b = bytes;
    for (size_t i = 0; i < size; i++) {
        if (b[i] != POISON) {
            return false;
        }
    }
    return true;
}

/* ---- Element types ---------------------------------------------------------------------------------------------------- */

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Drops `shift` low bits of a magnitude, to nearest, ties to even. */
static uint32_t round_shift(uint32_t magnitude, int shift) {
    const uint32_t half = 1u << (shift - 1), mask = (half << 1) - 1, rest = magnitude & mask;
    const uint32_t kept = magnitude >> shift;
    return kept + (rest > half || (rest == half && (kept & 1)));
}

uint16_t f16_from_float(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) {
        return (uint16_t)(sign | 0x7E00);
    }
    if (magnitude >= 0x477FF000) { /* 65520 and above */
        return (uint16_t)(sign | 0x7C00);
    }
    if (magnitude >= 0x38800000) { /* normal: rebias 127 to 15 */
        return (uint16_t)(sign | round_shift(magnitude - (112u << 23), 13));
    }
    const int exponent = (int)(magnitude >> 23);
    if (exponent < 102) { /* below half the smallest subnormal */
        return (uint16_t)sign;
    }
    return (uint16_t)(sign | round_shift((magnitude & 0x7FFFFF) | 0x800000, 126 - exponent));
}

float f16_to_float(uint16_t h) {
    const float sign = h & 0x8000 ? -1.0f : 1.0f;
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) {
        return mantissa ? NAN : sign * INFINITY;
    }
    return sign * (exponent ? ldexpf((float)(mantissa + 1024), exponent - 25) : ldexpf((float)mantissa, -24));
}

uint16_t bf16_from_float(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFF) > 0x7F800000) {
        return (uint16_t)(u >> 16 | 0x40);
    }
    return (uint16_t)((u >> 16 & 0x8000) | round_shift(u & 0x7FFFFFFF, 16));
}

float bf16_to_float(uint16_t h) {
    return float_of((uint32_t)h << 16);
}

size_t dtype_size(ekv_dtype dtype) {
    return dtype == EKV_F32 ? 4 : 2;
}

void dtype_store(ekv_dtype dtype, void *row, int64_t i, float x) {
    if (dtype == EKV_F32) {
        ((float *)row)[i] = x;
    } else {
        ((uint16_t *)row)[i] = dtype == EKV_F16 ? f16_from_float(x) : bf16_from_float(x);
    }
}

double dtype_load(ekv_dtype dtype, const void *row, int64_t i) {
    if (dtype == EKV_F32) {
        return ((const float *)row)[i];
    }
    const uint16_t h = ((const uint16_t *)row)[i];
    return dtype == EKV_F16 ? f16_to_float(h) : bf16_to_float(h);
}

void dtype_store_nan(ekv_dtype dtype, void *row, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        dtype_store(dtype, row, i, NAN);
    }
}

double dtype_half_ulp(ekv_dtype dtype) {
    return dtype == EKV_F32 ? 0x1p-24 : dtype == EKV_F16 ? 0x1p-11 : 0x1p-8;
}

double relative_l2(const double *x, const double *reference, int64_t n, double floor_norm) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (x[i] - reference[i]) * (x[i] - reference[i]);
        norm += reference[i] * reference[i];
    }
    norm = sqrt(norm) > floor_norm ? sqrt(norm) : floor_norm;
    return difference == 0 ? 0 : sqrt(difference) / norm;
}

/* ---- Backends --------------------------------------------------------------------------------------------------------- */

ekv_context *context_open(const char *backend, int32_t threads) {
    ekv_context_params params = ekv_context_params_default();
    params.backend = backend;
    params.threads = threads;
    ekv_context *context = NULL;
    char message[256] = "";
    const ekv_status status = ekv_context_create(&params, &context, message, sizeof message);
    EXPECT(status == EKV_OK && context != NULL, "backend %s: %s: %s", backend ? backend : "(default)", ekv_strerror(status),
           message);
    EXPECT(backend == NULL || strcmp(ekv_context_backend(context), backend) == 0, "asked for %s, got %s", backend,
           ekv_context_backend(context));
    return context;
}

void backends_open(backend_set *set, int32_t threads) {
    const char *wanted = getenv("EKV_TEST_BACKENDS");
    bool reference = wanted != NULL, scalar = wanted != NULL;
    memset(set, 0, sizeof *set);
    printf("backends:");
    for (int32_t i = 0;; i++) {
        ekv_backend_info info;
        memset(&info, 0, sizeof info);
        info.size = sizeof info;
        if (ekv_backend(i, &info) != EKV_OK) {
            break;
        }
        if (wanted != NULL && strstr(wanted, info.name) == NULL) {
            printf(" [%s not run: EKV_TEST_BACKENDS]", info.name);
            continue;
        }
        if (strcmp(info.name, "cuda") == 0) { /* takes device pointers: bench/gpu/check.c tests it */
            continue;
        }
        if (!info.compiled || !info.available) {
            printf(" [%s not run: %s]", info.name, info.compiled ? "not available here" : "not compiled");
            continue;
        }
        EXPECT(set->count < MAX_BACKENDS, "more than %d backends", MAX_BACKENDS);
        printf(" %s", info.name);
        snprintf(set->names[set->count], sizeof set->names[0], "%s", info.name);
        set->contexts[set->count++] = context_open(info.name, threads);
        reference = reference || strcmp(info.name, "reference") == 0;
        scalar = scalar || strcmp(info.name, "scalar") == 0;
    }
    printf("\n");
    fflush(stdout);
    EXPECT(reference && scalar, "backends reference and scalar must always run");
}

void backends_close(backend_set *set) {
    for (int i = 0; i < set->count; i++) {
        ekv_context_destroy(set->contexts[i]);
    }
}

bool backend_is_reference(const backend_set *set, int i) {
    return strcmp(set->names[i], "reference") == 0;
}

/* ---- Allocator -------------------------------------------------------------------------------------------------------- */

enum { HEADER = 64 }; /* keeps the size in front of what it hands out */

static void *counting_allocate(void *user, size_t bytes, size_t alignment) {
    counting_allocator *state = user;
    const int64_t number = __atomic_fetch_add(&state->allocations, 1, __ATOMIC_SEQ_CST);
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        state->mismatch = true;
    }
    if (number == state->fail_at) {
        return NULL;
    }
    const size_t front = alignment > HEADER ? alignment : HEADER;
    void *all = NULL;
    if (posix_memalign(&all, front, front + bytes) != 0) {
        return NULL;
    }
    unsigned char *memory = (unsigned char *)all + front;
    memset(memory, 0xFF, bytes); /* NaN in every type: nothing may rely on zeroed memory */
    ((size_t *)(void *)memory)[-1] = bytes;
    ((size_t *)(void *)memory)[-2] = front;
    ((size_t *)(void *)memory)[-3] = 0x656B76; /* alive */
    __atomic_fetch_add(&state->live, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&state->live_bytes, (int64_t)bytes, __ATOMIC_SEQ_CST);
    return memory;
}

static void counting_release(void *user, void *memory, size_t bytes) {
    counting_allocator *state = user;
    if (memory == NULL) {
        return;
    }
    size_t *front = (size_t *)memory;
    if (front[-3] != 0x656B76 || front[-1] != bytes) {
        state->mismatch = true;
        return;
    }
    front[-3] = 0;
    __atomic_fetch_sub(&state->live, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_sub(&state->live_bytes, (int64_t)bytes, __ATOMIC_SEQ_CST);
    free((unsigned char *)memory - front[-2]);
}

ekv_allocator counting_allocator_make(counting_allocator *state) {
    memset(state, 0, sizeof *state);
    state->fail_at = -1;
    ekv_allocator allocator = {state, counting_allocate, counting_release};
    return allocator;
}
