/*
 * What the conformance cases share: a case while it runs, its guarded memory, its random numbers, its comparisons.
 *
 * A family is the cases of one kernel, policy or call: axes, whose values make a grid, and a function that runs the case at one
 * point of it.  conform.c walks the families; conform_memory.c has what a case needs; the others hold the cases.
 *
 * Nothing in these files may call a kernel, or code that one is made of, to find out what is right.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_CONFORM_H
#define EKV_CONFORM_H

#include "cpu/reference.h"
#include "dispatch/internal.h"

#define EKV_AXES  10
#define EKV_ROOMS 400
#define EKV_U     0x1p-24 /* half a unit in the last place of a float, relative */

/* One parameter of a family.  names: what its values are called (then value i is i), or NULL: the values are numbers. */
typedef struct ekv_axis {
    const char *name;
    int n;
    const char *const *names;
    const int *values;
} ekv_axis;

#define EKV_NUMBERS(label, array)                                                                                              \
  { label, (int)(sizeof(array) / sizeof((array)[0])), NULL, array }
#define EKV_NAMES(label, array)                                                                                                \
  { label, (int)(sizeof(array) / sizeof((array)[0])), array, NULL }

/* Guarded memory: [base, base + span) is accessible and surrounded by pages that are not. */
typedef struct ekv_room {
    const char *name;
    unsigned char *base, *data;
    unsigned char *device; /* backend cuda: where [base, base + span) has its copy; NULL until needed */
    size_t span, bytes;
    bool used, input, sealed;
    uint64_t hash; /* of an input's bytes, when they were complete and it was sealed */
} ekv_room;

typedef struct ekv_check {
    /* who is tested */
    const ekv_kernels *table; /* NULL for the backend `reference` */
    ekv_context *context;     /* runs on that table */
    bool on_device;           /* the backend takes device memory */
    bool complete;            /* the table has every kernel */
    /* the case */
    const struct ekv_family *family;
    int64_t number;
    int value[EKV_AXES];
    char text[256];
    uint64_t random;
    int placement; /* index into ekv_placements */
    ekv_room room[EKV_ROOMS];
    int rooms; /* that exist; those of this case are `used` */
    void *scratch[40];
    int scratches;
    unsigned char *staging; /* of copies to and from the device */
    size_t staging_bytes;
    /* the outcome */
    bool failed, unsupported;
    char what[160];
    int64_t index;
    double got, expected, error, tolerance, worst;
} ekv_check;

typedef struct ekv_family {
    const char *name;
    int sample; /* cases of a run that is not thorough */
    void (*run)(ekv_check *c);
    ekv_axis axis[EKV_AXES]; /* up to the first without values; an axis "memory" sets the placement */
} ekv_family;

/* conform_rows.c, conform_pages.c, conform_sketch.c, conform_lists.c, conform_policies.c */
extern const ekv_family ekv_row_families[], ekv_page_families[], ekv_sketch_families[], ekv_list_families[],
    ekv_policy_families[], ekv_device_families[];

/* ---- conform_memory.c ---- */

extern const char *const ekv_placements[3];
extern const char *const ekv_dtypes[3];

/* Room for `count` elements of `size` bytes, placed as the case says.  Outputs are poisoned; inputs hold NaN until written. */
void *ekv_room_in(ekv_check *c, const char *name, int64_t count, size_t size);
void *ekv_room_out(ekv_check *c, const char *name, int64_t count, size_t size);
/* An output that is written before the call: it may change. */
void *ekv_room_inout(ekv_check *c, const char *name, int64_t count, size_t size);
/* Rows of `dim` elements: each between guard pages of its own. */
const void **ekv_rows(ekv_check *c, const char *name, int n, int dim, ekv_dtype dtype);
/* Memory for the check itself, released after the case even if a fault ends it.  NULL fails the case. */
void *ekv_scratch(ekv_check *c, size_t bytes);
/* Inputs are complete: from here on they must not change. */
void ekv_seal(ekv_check *c);
/* Fails the case if an input changed or something was written past a buffer, and gives the memory back. */
void ekv_rooms_check(ekv_check *c);
void ekv_rooms_free(ekv_check *c); /* unmaps all */
/* Backend cuda: every room has a copy in device memory, between guard regions of its own.  The address there of something in a room,
 * and copying all rooms of the case, their slack and guards included, there and back; false fails the case.  After the way back
 * the rooms hold what the device left, so that the checks above apply. */
void *ekv_device_of(ekv_check *c, const void *memory);
bool ekv_rooms_to_device(ekv_check *c);
bool ekv_rooms_from_device(ekv_check *c);
/* Whether the bytes still hold the poison of outputs. */
bool ekv_poisoned(const void *bytes, size_t n);

uint64_t ekv_random(ekv_check *c);
double ekv_uniform(ekv_check *c, double low, double high);
double ekv_normal(ekv_check *c);
int ekv_below(ekv_check *c, int n); /* 0 .. n - 1 */

/* x rounded to nearest even into a stored type, by plain arithmetic on doubles. */
void ekv_put(ekv_dtype dtype, void *row, int64_t i, double x);
/* Half the distance of neighbouring stored values at x: the largest error of rounding there. */
double ekv_half_ulp(ekv_dtype dtype, double x);

/* Comparisons.  Each returns false, and records the first that does, unless both are NaN, or equal, or within the tolerance. */
bool ekv_expect(ekv_check *c, const char *what, int64_t index, double got, double expected, double tolerance);
/* low <= got <= high, where `expected` is what is reported. */
bool ekv_expect_in(ekv_check *c, const char *what, int64_t index, double got, double low, double high);
bool ekv_expect_true(ekv_check *c, const char *what, int64_t index, bool condition);

#endif
