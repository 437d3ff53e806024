/*
 * What a conformance case needs: guarded memory, random numbers, rounding, comparisons (see conform.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"
#include "dispatch/conform.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OUTPUT_POISON 0xA5
#define INPUT_POISON  0xFF /* a NaN in every type */

const char *const ekv_placements[3] = {"at the end", "at the start", "one element off"};
const char *const ekv_dtypes[3] = {"f32", "f16", "bf16"};

/* ---- memory ---- */

static uint64_t hash_of(const ekv_room *room) {
    uint64_t h = 1469598103934665603u; /* FNV-1a */
    for (size_t i = 0; i < room->bytes; i++) h = (h ^ room->data[i]) * 1099511628211u;
    return h;
}

static void release_room(ekv_check *c, ekv_room *room) {
    if (room->device) ekv_cuda_release(ekv_cuda_device(c->context), room->device - ekv_memory_page());
    ekv_guarded_release(room->base, room->span);
    room->device = NULL;
}

/* A room of that span that is not in use, or a new one; rooms of other spans are given up when there are too many. */
static ekv_room *find_room(ekv_check *c, size_t span) {
    ekv_room *other = NULL;
    for (int i = 0; i < c->rooms; i++) {
        if (c->room[i].used) continue;
        if (c->room[i].span == span) return &c->room[i];
        other = &c->room[i];
    }
    if (c->rooms < EKV_ROOMS) other = &c->room[c->rooms];
    unsigned char *base = other ? ekv_guarded_allocate(span) : NULL;
    if (!base) return NULL;
    if (c->rooms < EKV_ROOMS)
        c->rooms++;
    else
        release_room(c, other);
    other->base = base;
    other->span = span;
    return other;
}

static void *take(ekv_check *c, const char *name, int64_t count, size_t size, bool input) {
    static const size_t offsets[3] = {0, 0, 1};
    const size_t bytes = (size_t)count * size, offset = offsets[c->placement] * size, page = ekv_memory_page();
    ekv_room *room = find_room(c, (bytes + offset + page) / page * page); /* at least one byte of slack */
    if (!room) {
        ekv_expect_true(c, "memory for the case", -1, false);
        return NULL;
    }
    room->name = name;
    room->bytes = bytes;
    room->used = true;
    room->input = input;
    room->sealed = false;
    room->data = c->placement == 0 ? room->base + room->span - bytes : room->base + offset;
    memset(room->base, INPUT_POISON, room->span);
    if (!input) memset(room->data, OUTPUT_POISON, bytes);
    return room->data;
}

void *ekv_room_in(ekv_check *c, const char *name, int64_t count, size_t size) { return take(c, name, count, size, true); }
void *ekv_room_out(ekv_check *c, const char *name, int64_t count, size_t size) { return take(c, name, count, size, false); }
void *ekv_room_inout(ekv_check *c, const char *name, int64_t count, size_t size) { return take(c, name, count, size, false); }

const void **ekv_rows(ekv_check *c, const char *name, int n, int dim, ekv_dtype dtype) {
    const void **rows = ekv_room_in(c, "row pointers", n, sizeof *rows);
    for (int i = 0; rows && i < n; i++) rows[i] = ekv_room_in(c, name, dim, ekv_element_bytes(dtype));
    return rows;
}

void ekv_seal(ekv_check *c) {
    for (int i = 0; i < c->rooms; i++) {
        if (!c->room[i].used || !c->room[i].input) continue;
        c->room[i].hash = hash_of(&c->room[i]);
        c->room[i].sealed = true;
    }
}

/* A wrong access is the reason, whatever else was found wrong because of it. */
static void blame(ekv_check *c, const char *what, int64_t index, double got) {
    c->failed = false;
    ekv_expect(c, what, index, got, INPUT_POISON, 0.0);
}

/* Bytes from `from` to `to` that are no longer NaN poison: something wrote there. */
static void check_slack(ekv_check *c, const ekv_room *room, const unsigned char *from, const unsigned char *to,
                        const char *where) {
    char what[96];
    for (const unsigned char *p = from; p < to; p++) {
        if (*p == INPUT_POISON) continue;
        snprintf(what, sizeof what, "bytes written %s the buffer \"%s\"", where, room->name);
        blame(c, what, p - room->data, *p);
        return;
    }
}

void ekv_rooms_check(ekv_check *c) {
    while (c->scratches > 0) free(c->scratch[--c->scratches]);
    for (int i = 0; i < c->rooms; i++) {
        ekv_room *room = &c->room[i];
        if (!room->used) continue;
        room->used = false;
        check_slack(c, room, room->base, room->data, "before");
        check_slack(c, room, room->data + room->bytes, room->base + room->span, "past the end of");
        if (room->sealed && room->hash != hash_of(room)) {
            char what[96];
            snprintf(what, sizeof what, "the input \"%s\" is unchanged", room->name);
            blame(c, what, -1, 0.0);
        }
    }
}

void *ekv_scratch(ekv_check *c, size_t bytes) {
    void *memory = c->scratches < (int)(sizeof c->scratch / sizeof c->scratch[0]) ? malloc(bytes) : NULL;
    if (memory) c->scratch[c->scratches++] = memory;
    ekv_expect_true(c, "memory for the case", -1, memory != NULL);
    return memory;
}

void ekv_rooms_free(ekv_check *c) {
    for (int i = 0; i < c->rooms; i++) release_room(c, &c->room[i]);
    c->rooms = 0;
    free(c->staging);
    c->staging = NULL;
    c->staging_bytes = 0;
}

/* ---- device memory ---- */

static bool copied(ekv_check *c, ekv_status status) {
    char what[160];
    snprintf(what, sizeof what, "copying to and from the device: %s", ekv_last_error(c->context));
    return ekv_expect(c, what, -1, status, EKV_OK, 0.0);
}

void *ekv_device_of(ekv_check *c, const void *memory) {
    const unsigned char *at = memory;
    for (int i = 0; i < c->rooms; i++) {
        const ekv_room *room = &c->room[i];
        if (room->used && at >= room->base && at < room->base + room->span) return room->device + (at - room->base);
    }
    return NULL;
}

/* The staging memory for a room between its guards: one page on each side. */
static unsigned char *stage(ekv_check *c, const ekv_room *room, size_t *bytes) {
    *bytes = room->span + 2 * ekv_memory_page();
    if (*bytes <= c->staging_bytes) return c->staging;
    free(c->staging);
    c->staging = malloc(*bytes);
    c->staging_bytes = c->staging ? *bytes : 0;
    ekv_expect_true(c, "memory for the case", -1, c->staging != NULL);
    return c->staging;
}

bool ekv_rooms_to_device(ekv_check *c) {
    const size_t guard = ekv_memory_page();
    for (int i = 0; i < c->rooms; i++) {
        ekv_room *room = &c->room[i];
        void *memory = NULL;
        size_t bytes;
        if (!room->used) continue;
        if (!room->device) {
            if (!copied(c, ekv_cuda_allocate(c->context, room->span + 2 * guard, &memory))) return false;
            room->device = (unsigned char *)memory + guard;
        }
        unsigned char *staged = stage(c, room, &bytes);
        if (!staged) return false;
        memset(staged, INPUT_POISON, bytes);
        memcpy(staged + guard, room->base, room->span);
        if (!copied(c, ekv_cuda_copy(c->context, room->device - guard, staged, bytes))) return false;
    }
    return true;
}

bool ekv_rooms_from_device(ekv_check *c) {
    const size_t guard = ekv_memory_page();
    for (int i = 0; i < c->rooms; i++) {
        ekv_room *room = &c->room[i];
        size_t bytes;
        char what[96];
        if (!room->used) continue;
        unsigned char *staged = stage(c, room, &bytes);
        if (!staged || !copied(c, ekv_cuda_copy(c->context, staged, room->device - guard, bytes))) return false;
        memcpy(room->base, staged + guard, room->span);
        for (size_t b = 0; b < bytes; b++) {
            if (staged[b] == INPUT_POISON || (b >= guard && b < guard + room->span)) continue;
            snprintf(what, sizeof what, "bytes written on the device %s the buffer \"%s\"", b < guard ? "before" : "past the end of",
                     room->name);
            blame(c, what, (int64_t)b - (int64_t)guard - (room->data - room->base), staged[b]);
            return false;
        }
    }
    return true;
}

bool ekv_poisoned(const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((const unsigned char *)bytes)[i] != OUTPUT_POISON) return false;
    return true;
}

/* ---- random numbers: splitmix64 ---- */

uint64_t ekv_random(ekv_check *c) {
    uint64_t x = c->random += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double ekv_uniform(ekv_check *c, double low, double high) {
    return low + (high - low) * ((double)(ekv_random(c) >> 11) * 0x1p-53);
}

/* Nearly normal: the sum of twelve uniforms. */
double ekv_normal(ekv_check *c) {
    double sum = -6.0;
    for (int i = 0; i < 3; i++)
        for (uint64_t bits = ekv_random(c), j = 0; j < 4; j++, bits >>= 16) sum += (double)(bits & 0xffff) * 0x1p-16;
    return sum;
}

int ekv_below(ekv_check *c, int n) { return (int)(ekv_random(c) % (uint64_t)n); }

/* ---- stored types ---- */

/* Significant bits after the first, and the exponent of the smallest normal number. */
static int fraction_bits(ekv_dtype dtype) { return dtype == EKV_F32 ? 23 : dtype == EKV_F16 ? 10 : 7; }
static int least_exponent(ekv_dtype dtype) { return dtype == EKV_F16 ? -14 : -126; }

/* The exponent of the unit in the last place at x. */
static int ulp_exponent(ekv_dtype dtype, double x) {
    int e;
    frexp(x, &e);
    e = x == 0.0 || e - 1 < least_exponent(dtype) ? least_exponent(dtype) : e - 1;
    return e - fraction_bits(dtype);
}

double ekv_half_ulp(ekv_dtype dtype, double x) { return isfinite(x) ? ldexp(0.5, ulp_exponent(dtype, x)) : 0.0; }

/* A 16-bit pattern: a count of units, where the units double at each power of two, is the pattern itself but for the exponent.
 */
static uint16_t narrow(ekv_dtype dtype, double x) {
    const int fraction = fraction_bits(dtype), bias = -least_exponent(dtype) + 1;
    const uint16_t sign = signbit(x) ? 0x8000u : 0, infinity = (uint16_t)((2 * bias + 1) << fraction);
    if (isnan(x)) return sign | infinity | (uint16_t)(1u << (fraction - 1));
    const int unit = ulp_exponent(dtype, x);
    const double count = rint(ldexp(fabs(x), -unit)); /* to nearest even; 2^(fraction + 1) carries into the exponent below */
    if (!(ldexp(count, unit) < ldexp(1.0, bias + 1))) return sign | infinity;
    const int exponent = unit + fraction - least_exponent(dtype); /* 0 for subnormals and for the first binade alike */
    return sign | (uint16_t)((exponent << fraction) + (int)count);
}

void ekv_put(ekv_dtype dtype, void *row, int64_t i, double x) {
    if (dtype == EKV_F32) {
        const float f = (float)x;
        memcpy((char *)row + 4 * i, &f, sizeof f);
        return;
    }
    const uint16_t bits = narrow(dtype, x);
    memcpy((char *)row + 2 * i, &bits, sizeof bits);
}

/* ---- comparisons ---- */

static bool record(ekv_check *c, const char *what, int64_t index, double got, double expected, double tolerance) {
    if (c->failed) return false;
    c->failed = true;
    snprintf(c->what, sizeof c->what, "%s", what);
    c->index = index;
    c->got = got;
    c->expected = expected;
    c->error = fabs(got - expected);
    c->tolerance = tolerance;
    return false;
}

bool ekv_expect(ekv_check *c, const char *what, int64_t index, double got, double expected, double tolerance) {
    if ((isnan(got) && isnan(expected)) || got == expected) return true;
    const double error = fabs(got - expected);
    if (!(error <= tolerance) || isinf(error)) return record(c, what, index, got, expected, tolerance);
    if (error / tolerance > c->worst) c->worst = error / tolerance;
    return true;
}

bool ekv_expect_in(ekv_check *c, const char *what, int64_t index, double got, double low, double high) {
    if (got >= low && got <= high) return true;
    return record(c, what, index, got, got > high ? high : low, 0.0);
}

bool ekv_expect_true(ekv_check *c, const char *what, int64_t index, bool condition) {
    return condition || record(c, what, index, 0.0, 1.0, 0.0);
}
