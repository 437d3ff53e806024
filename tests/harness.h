/*
 * What every test shares: replayable random cases, memory between guard pages, the tests' own f16 and bf16 conversions, the
 * list of backends that can run, and an allocator that counts.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Environment:
 *   EKV_TEST_SEED   seed of all random cases (default 1; "random": taken from the clock and printed)
 *   EKV_TEST_CASE   run only the random case of that number
 *   EKV_TEST_SCALE  divides the number of random cases (default 1)
 *   EKV_TEST_BACKENDS  run only backends whose names this text contains (default: all that can run)
 *   CK_RUN_CASE     run only the test of that name (Check's own)
 */
#ifndef EKV_TEST_HARNESS_H
#define EKV_TEST_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <check.h>

#include "entmaxkv/entmaxkv.h"

/* ---- Running tests ---------------------------------------------------------------------------------------------------- */

typedef struct test_entry {
    const char *name; /* its name for CK_RUN_CASE */
    const TTest *test;
} test_entry;

/* Runs the tests of one file, each in a process of its own; returns main's exit status. */
int harness_main(const char *program, const test_entry *tests, size_t count);
#define TEST_ENTRY(function)                                                                                                   \
  { #function, function }
#define HARNESS_MAIN(program, tests) harness_main(program, tests, sizeof(tests) / sizeof((tests)[0]))

/* Fails with the running case, the place and the line that replays it. */
#define EXPECT(condition, ...)                                                                                                 \
  do {                                                                                                                         \
    if (!(condition)) {                                                                                                        \
      case_fail(__FILE__, __LINE__, #condition, __VA_ARGS__);                                                                  \
    }                                                                                                                          \
  } while (0)
#define EXPECT_OK(context, call)             expect_status(__FILE__, __LINE__, #call, context, EKV_OK, call)
#define EXPECT_STATUS(context, status, call) expect_status(__FILE__, __LINE__, #call, context, status, call)

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
void case_fail(const char *file, int line, const char *condition, const char *format, ...);
void expect_status(const char *file, int line, const char *call, const ekv_context *context, ekv_status expected,
                   ekv_status status);

/* ---- Random cases ----------------------------------------------------------------------------------------------------- */

typedef struct rng {
    uint64_t s[4]; /* xoshiro256** */
} rng;

uint64_t rng_u64(rng *r);
double rng_uniform(rng *r);                             /* [0, 1) */
double rng_range(rng *r, double low, double high);      /* [low, high) */
int64_t rng_between(rng *r, int64_t low, int64_t high); /* low and high included */
double rng_normal(rng *r);                              /* Box-Muller */
float rng_rough_normal(rng *r);                         /* fast, four summed uniforms, |x| < 3.5 */
bool rng_chance(rng *r, double probability);
#define RNG_PICK(r, array) ((array)[rng_between((r), 0, (int64_t)(sizeof(array) / sizeof((array)[0])) - 1)])

/* Case `index` of test `name`: the generator that belongs to it, seeded from EKV_TEST_SEED, name and index. */
rng case_begin(const char *name, int64_t index);
/* What the case is about, for the failure message. */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void case_note(const char *format, ...);
/* The cases to run: all of count / EKV_TEST_SCALE, or the one of EKV_TEST_CASE. */
int64_t case_first(void);
int64_t case_end(int64_t count);
/* The same for a list whose every case has a point of its own: whatever the scale, all of it. */
int64_t case_end_of_list(int64_t count);
/* count / EKV_TEST_SCALE, at least 1: repetitions of a case. */
int64_t case_share(int64_t count);
#define FOR_CASES(index, count) for (int64_t index = case_first(); index < case_end(count); index++)

/* ---- Memory between guard pages --------------------------------------------------------------------------------------- */

/* `size` bytes that end (even cases) or begin (odd cases) exactly at an unmapped page; the rest of their pages holds a pattern
 * that guard_free() checks. */
typedef struct guard {
    void *data;
    size_t size;
    unsigned char *base; /* of the accessible pages */
    size_t span;
} guard;

guard guard_alloc(size_t size);
guard guard_alloc_aligned(size_t size, size_t alignment); /* ends at most alignment - 1 bytes before the unmapped page */
void guard_read_only(const guard *g, bool read_only);
void guard_free(guard *g);
/* The poison of output buffers, and whether bytes still hold it. */
#define POISON 0xA5
bool is_poison(const void *bytes, size_t size);

/* ---- Element types ---------------------------------------------------------------------------------------------------- */

uint16_t f16_from_float(float x); /* to nearest, ties to even; overflow to infinity */
float f16_to_float(uint16_t h);
uint16_t bf16_from_float(float x);
float bf16_to_float(uint16_t h);
size_t dtype_size(ekv_dtype dtype);
void dtype_store(ekv_dtype dtype, void *row, int64_t i, float x);
double dtype_load(ekv_dtype dtype, const void *row, int64_t i);
void dtype_store_nan(ekv_dtype dtype, void *row, int64_t count);
/* Half a unit in the last place of the type, as a fraction. */
double dtype_half_ulp(ekv_dtype dtype);

double relative_l2(const double *x, const double *reference, int64_t n, double floor_norm);

/* ---- Backends --------------------------------------------------------------------------------------------------------- */

enum { MAX_BACKENDS = 16 };

typedef struct backend_set {
    int count;
    char names[MAX_BACKENDS][32];
    ekv_context *contexts[MAX_BACKENDS];
} backend_set;

/* A context on every backend that is compiled and available; prints which, fails unless reference and scalar are among them. */
void backends_open(backend_set *set, int32_t threads);
void backends_close(backend_set *set);
bool backend_is_reference(const backend_set *set, int i);
ekv_context *context_open(const char *backend, int32_t threads);

/* ---- Allocator -------------------------------------------------------------------------------------------------------- */

/* An allocator that counts, checks sizes at release, and can fail. */
typedef struct counting_allocator {
    int64_t allocations, live, live_bytes;
    int64_t fail_at; /* the allocation of this number (0 = first) returns NULL; -1: none */
    bool mismatch;   /* a release with another size, or of memory that was not allocated */
} counting_allocator;
ekv_allocator counting_allocator_make(counting_allocator *state);

#endif
