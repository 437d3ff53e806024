/*
 * Bases of sketches: saved, loaded, found anew, and what is said about their fit.  Whatever the basis, policy certified returns
 * the bits of full; a block of bytes that is no basis is refused with a reason, and nothing changes.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

enum { HEADS = 2, GROUP = 2, DIM = 64, PAGE = 16, Q_HEADS = HEADS * GROUP };

/* Keys and values of one sequence, and a cache of two layers or an index over the caller's memory. */
typedef struct bed {
    ekv_dtype dtype;
    int64_t n, blocks;
    guard keys, values, q, out, full;
    ekv_kv kv;
    ekv_index *index;
} bed;

/* Low-rank keys plus some noise; from token `change` on of another subspace, and three times as large. */
static void fill(bed *b, int64_t change, rng *r) {
    double axes[2][HEADS][6][DIM];
    for (int i = 0; i < 2 * HEADS * 6 * DIM; i++) (&axes[0][0][0][0])[i] = rng_normal(r);
    for (int64_t t = 0; t < b->n; t++)
        for (int h = 0; h < HEADS; h++) {
            double along[6];
            for (int a = 0; a < 6; a++) along[a] = rng_normal(r) / (1.0 + a);
            for (int d = 0; d < DIM; d++) {
                double x = 0.1 * rng_normal(r);
                for (int a = 0; a < 6; a++) x += (t < change ? 1.0 : 3.0) * along[a] * axes[t >= change][h][a][d];
                dtype_store(b->dtype, b->keys.data, (t * HEADS + h) * DIM + d, (float)x);
                dtype_store(b->dtype, b->values.data, (t * HEADS + h) * DIM + d, (float)rng_normal(r));
            }
        }
    for (int i = 0; i < Q_HEADS * DIM; i++) ((float *)b->q.data)[i] = (float)(1.5 * rng_normal(r));
}

static void bed_make(bed *b, ekv_context *context, ekv_dtype dtype, int64_t n, int64_t change, rng *r) {
    const size_t out = Q_HEADS * DIM * sizeof(float);
    *b = (bed){.dtype = dtype, .n = n, .blocks = (n + PAGE - 1) / PAGE};
    b->keys = guard_alloc((size_t)b->blocks * PAGE * HEADS * DIM * dtype_size(dtype));
    b->values = guard_alloc(b->keys.size);
    memset(b->keys.data, 0xff, b->keys.size); /* NaN in unused slots */
    memset(b->values.data, 0xff, b->values.size);
    b->q = guard_alloc(out);
    b->out = guard_alloc(out);
    b->full = guard_alloc(out);
    fill(b, change, r);
    b->kv = ekv_kv_default();
    b->kv.dtype = dtype;
    b->kv.kv_heads = HEADS;
    b->kv.k_dim = b->kv.v_dim = DIM;
    b->kv.page_size = PAGE;
    b->kv.blocks = b->blocks;
    b->kv.k = b->keys.data;
    b->kv.v = b->values.data;
    b->kv.k_block_stride = b->kv.v_block_stride = PAGE * HEADS * DIM;
    b->kv.k_token_stride = b->kv.v_token_stride = HEADS * DIM;
    b->kv.k_head_stride = b->kv.v_head_stride = DIM;
    ekv_index_params params = ekv_index_params_default();
    params.dtype = dtype;
    params.kv_heads = HEADS;
    params.k_dim = params.v_dim = DIM;
    params.page_size = PAGE;
    params.blocks = b->blocks;
    params.statistics = EKV_STATISTICS_NORMS | EKV_STATISTICS_SKETCH;
    EXPECT_OK(context, ekv_index_create(context, &params, NULL, 0, &b->index));
}

static void bed_free(bed *b) {
    ekv_index_destroy(b->index);
    guard_free(&b->keys);
    guard_free(&b->values);
    guard_free(&b->q);
    guard_free(&b->out);
    guard_free(&b->full);
}

static void update(bed *b, ekv_context *context, int64_t first, int64_t end) {
    EXPECT_OK(context, ekv_index_update(context, b->index, &b->kv, NULL, first, end - first, end));
}

typedef struct cost {
    int64_t sketch, all;
} cost;

/* Decodes at that length with full and certified, expects the same bits, and says what certified read. */
static cost compare(bed *b, ekv_context *context, const ekv_kv *kv, const ekv_index *index, int64_t length) {
    const int32_t lengths[1] = {(int32_t)length};
    ekv_report report[Q_HEADS];
    ekv_decode_params step = ekv_decode_params_default();
    step.kv = kv;
    step.index = index;
    step.lengths = lengths;
    step.block_table_stride = kv->blocks;
    step.q_heads = Q_HEADS;
    step.q = b->q.data;
    step.out = b->full.data;
    EXPECT_OK(context, ekv_decode(context, &step));
    step.out = b->out.data;
    step.policy = EKV_POLICY_CERTIFIED;
    step.report = report;
    EXPECT_OK(context, ekv_decode(context, &step));
    EXPECT(memcmp(b->out.data, b->full.data, b->out.size) == 0, "certified differs from full at %lld tokens",
           (long long)length);
    cost c = {0, 0};
    for (int h = 0; h < Q_HEADS; h++) {
        EXPECT(report[h].certified == 1, "head %d is not certified", h);
        c.sketch += report[h].bytes_sketch;
        c.all += report[h].bytes_statistics + report[h].bytes_sketch + report[h].bytes_keys + report[h].bytes_values;
    }
    return c;
}

static ekv_sketch_fit fit_of(ekv_context *context, const ekv_index *index, int32_t head) {
    ekv_sketch_fit fit = {.size = sizeof fit};
    EXPECT_OK(context, ekv_index_sketch_fit(context, index, head, &fit));
    return fit;
}

static guard save(ekv_context *context, const ekv_index *index) {
    guard data = guard_alloc(ekv_index_basis_bytes(index));
    EXPECT_OK(context, ekv_index_save_basis(context, index, data.data, data.size));
    return data;
}

/* Saved, loaded into an index of each dtype, saved again: the same bytes; and sketches from the first token on, whatever the
 * pace. */
START_TEST(loaded_bases_serve_from_the_first_token) {
    backend_set backends;
    backends_open(&backends, 2);
    for (int i = 0; i < backends.count; i++) {
        rng r = case_begin("loaded_bases_serve_from_the_first_token", i);
        ekv_context *context = backends.contexts[i];
        bed from;
        case_note("%s", backends.names[i]);
        bed_make(&from, context, EKV_F16, 3000, 3000, &r);
        EXPECT(fit_of(context, from.index, 0).basis == EKV_BASIS_NONE, "a basis before the first token");
        update(&from, context, 0, 2047);
        EXPECT(fit_of(context, from.index, 1).basis == EKV_BASIS_NONE, "a basis from 2,047 tokens");
        update(&from, context, 2047, 3000);
        const ekv_sketch_fit found = fit_of(context, from.index, -1);
        EXPECT(found.basis == EKV_BASIS_FOUND && found.found > 0.0 && found.found < 0.3 && found.tokens == 1024,
               "basis %d, share %g, tokens %lld", (int)found.basis, found.found, (long long)found.tokens);
        EXPECT(fabs(found.recent - found.found) < 0.3 * found.found, "share %g found, %g now", found.found, found.recent);
        guard data = save(context, from.index);
        guard_read_only(&data, true);
        for (int dtype = 0; dtype < 3; dtype++) {
            bed to;
            case_note("%s, loaded into %s", backends.names[i], ekv_dtype_name((ekv_dtype)dtype));
            bed_make(&to, context, (ekv_dtype)dtype, 1500, 1500, &r);
            update(&to, context, 0, 1500);
            const cost without = compare(&to, context, &to.kv, to.index, 1500);
            EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_index_load_basis(context, to.index, data.data, data.size));
            EXPECT(strstr(ekv_last_error(context), "before the first"), "\"%s\"", ekv_last_error(context));
            EXPECT_OK(context, ekv_index_invalidate(context, to.index, NULL, 0, 1500));
            memcpy(to.keys.data, from.keys.data, dtype == EKV_F16 ? 1500 * HEADS * DIM * 2 : 0); /* f16: the very keys */
            EXPECT_OK(context, ekv_index_load_basis(context, to.index, data.data, data.size));
            guard again = save(context, to.index);
            EXPECT(memcmp(again.data, data.data, data.size) == 0, "it is saved differently");
            guard_free(&again);
            for (int64_t t = 0; t < 1500; t += 1 + t % 29)
                update(&to, context, t, t + 1 + t % 29 < 1500 ? t + 1 + t % 29 : 1500);
            const ekv_sketch_fit fit = fit_of(context, to.index, 0);
            EXPECT(fit.basis == EKV_BASIS_LOADED && fit.tokens == 1024, "basis %d, %lld tokens", (int)fit.basis,
                   (long long)fit.tokens);
            const cost with = compare(&to, context, &to.kv, to.index, 1500);
            if (!backend_is_reference(&backends, i) && dtype == EKV_F16)
                EXPECT(without.sketch == 0 && with.sketch > 0 && with.all < without.all,
                       "sketch %lld and %lld bytes, all %lld and %lld", (long long)without.sketch, (long long)with.sketch,
                       (long long)without.all, (long long)with.all);
            bed_free(&to);
        }
        guard_free(&data);
        bed_free(&from);
    }
    backends_close(&backends);
}
END_TEST

/* Keys of another subspace from the middle on: the fit says so, results stay, and a new basis is good again. */
START_TEST(drift_is_noticed) {
    backend_set backends;
    backends_open(&backends, 2);
    for (int i = 0; i < backends.count; i++) {
        if (backend_is_reference(&backends, i)) continue; /* it reads everything */
        rng r = case_begin("drift_is_noticed", 0);        /* the same keys for all */
        ekv_context *context = backends.contexts[i];
        bed b;
        case_note("%s", backends.names[i]);
        bed_make(&b, context, EKV_F16, 10000, 2500, &r);
        for (int64_t t = 0; t < 10000; t += 500) update(&b, context, t, t + 500);
        const cost before = compare(&b, context, &b.kv, b.index, 10000);
        const ekv_sketch_fit old = fit_of(context, b.index, -1);
        EXPECT(old.recent > 2.0 * old.found, "share %g found, %g now", old.found, old.recent);
        EXPECT_OK(context, ekv_index_find_basis(context, b.index, &b.kv, NULL, 10000));
        const ekv_sketch_fit new = fit_of(context, b.index, -1);
        EXPECT(new.basis == EKV_BASIS_FOUND &&new.recent < 1.3 * new.found &&new.recent < 0.5 * old.recent,
               "share %g found, %g now, %g before", new.found, new.recent, old.recent);
        const cost after = compare(&b, context, &b.kv, b.index, 10000);
        printf("%s: unexplained %.3f when found, %.3f after the change, %.3f anew; %lld bytes read, then %lld\n",
               backends.names[i], old.found, old.recent, new.recent, (long long)before.all, (long long)after.all);
        EXPECT(after.all < before.all, "%lld bytes before, %lld after", (long long)before.all, (long long)after.all);
        bed_free(&b);
    }
    backends_close(&backends);
}
END_TEST

static ekv_cache *cache_of(ekv_context *context, const bed *b, uint32_t statistics) {
    ekv_cache_params shape = ekv_cache_params_default();
    shape.dtype = b->dtype;
    shape.layers = 2;
    shape.kv_heads = HEADS;
    shape.k_dim = shape.v_dim = DIM;
    shape.page_size = PAGE;
    shape.blocks = 2 * b->blocks;
    shape.max_sequences = 2;
    shape.statistics = statistics;
    ekv_cache *cache = NULL;
    EXPECT_OK(context, ekv_cache_create(context, &shape, &cache));
    return cache;
}

/* The managed cache: one layer's basis is loaded; another one is found anew and serves both sequences. */
START_TEST(caches_take_bases) {
    rng r = case_begin("caches_take_bases", 0);
    ekv_context *context = context_open(NULL, 2);
    bed b;
    bed_make(&b, context, EKV_F16, 2400, 2400, &r);
    update(&b, context, 0, 2400);
    guard data = save(context, b.index);
    ekv_cache *cache = cache_of(context, &b, EKV_STATISTICS_NORMS | EKV_STATISTICS_SKETCH);
    ekv_append_params rows = ekv_append_params_default();
    rows.dtype = EKV_F16;
    rows.k = b.keys.data;
    rows.v = b.values.data;
    EXPECT_OK(context, ekv_cache_load_basis(context, cache, 1, data.data, data.size));
    int32_t sequence[2];
    for (int s = 0; s < 2; s++) {
        EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence[s]));
        rows.count = s ? 1200 : 2400;
        for (int32_t layer = 0; layer < 2; layer++)
            EXPECT_OK(context, ekv_cache_append(context, cache, sequence[s], layer, &rows));
    }
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_load_basis(context, cache, 1, data.data, data.size));
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_find_basis(context, cache, sequence[1], 0)); /* too short */
    EXPECT(strstr(ekv_last_error(context), "1200"), "\"%s\"", ekv_last_error(context));
    for (int round = 0; round < 2; round++) {
        for (int32_t layer = 0; layer < 2; layer++) {
            const ekv_index *index;
            EXPECT_OK(context, ekv_cache_layer(cache, layer, NULL, &index));
            const ekv_sketch_fit fit = fit_of(context, index, 0);
            EXPECT(fit.basis == (layer == 1 && round == 0 ? EKV_BASIS_LOADED : EKV_BASIS_FOUND), "layer %d, round %d: basis %d",
                   (int)layer, round, (int)fit.basis);
            for (int s = 0; s < 2; s++) {
                ekv_report report[Q_HEADS];
                ekv_decode_params step = ekv_decode_params_default();
                step.cache = cache;
                step.layer = layer;
                step.sequences = &sequence[s];
                step.q_heads = Q_HEADS;
                step.q = b.q.data;
                step.out = b.full.data;
                EXPECT_OK(context, ekv_decode(context, &step));
                step.out = b.out.data;
                step.policy = EKV_POLICY_CERTIFIED;
                step.report = report;
                EXPECT_OK(context, ekv_decode(context, &step));
                EXPECT(memcmp(b.out.data, b.full.data, b.out.size) == 0, "layer %d, sequence %d: certified differs from full",
                       (int)layer, s);
                EXPECT(report[0].bytes_sketch > 0, "layer %d, sequence %d, round %d: no sketch was read", (int)layer, s, round);
            }
            if (round == 0) EXPECT_OK(context, ekv_cache_find_basis(context, cache, sequence[0], layer));
        }
    }
    ekv_cache_destroy(cache);
    guard_free(&data);
    bed_free(&b);
    ekv_context_destroy(context);
}
END_TEST

/* What is wrong with the arguments, by name and value. */
START_TEST(bad_arguments_are_refused) {
    rng r = case_begin("bad_arguments_are_refused", 0);
    ekv_context *context = context_open(NULL, 1);
    bed b, other;
    bed_make(&b, context, EKV_F32, 2048, 2048, &r);
    bed_make(&other, context, EKV_F32, 100, 100, &r);
    ekv_sketch_fit fit = {.size = sizeof fit};
    char small[8] = {0};
    int32_t table[128];
    for (int i = 0; i < 128; i++) table[i] = i < 127 ? i : 128;
#define REFUSED(status, says, call)                                                                                            \
  do {                                                                                                                         \
    EXPECT_STATUS(context, status, call);                                                                                      \
    EXPECT(strstr(ekv_last_error(context), says), "\"%s\" does not say %s", ekv_last_error(context), says);                    \
  } while (0)
    const size_t bytes = ekv_index_basis_bytes(b.index);
    guard data = guard_alloc(bytes);
    memset(data.data, POISON, bytes);
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "no basis yet", ekv_index_save_basis(context, b.index, data.data, bytes));
    EXPECT(is_poison(data.data, bytes), "data was written");
    update(&b, context, 0, 2048);
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "bytes is 5", ekv_index_save_basis(context, b.index, data.data, 5));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "data is NULL", ekv_index_save_basis(context, b.index, NULL, bytes));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "index is NULL", ekv_index_save_basis(context, NULL, data.data, bytes));
    EXPECT(is_poison(data.data, bytes), "data was written");
    EXPECT_OK(context, ekv_index_save_basis(context, b.index, data.data, bytes));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "bytes is 8", ekv_index_load_basis(context, other.index, small, sizeof small));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "data is NULL", ekv_index_load_basis(context, other.index, NULL, bytes));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "index is NULL", ekv_index_load_basis(context, NULL, data.data, bytes));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "bytes is", ekv_index_load_basis(context, other.index, data.data, bytes - 1));
    unsigned char *at = data.data, first = at[0];
    at[0] ^= 1;
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "not a basis", ekv_index_load_basis(context, other.index, data.data, bytes));
    at[0] = at[3];
    at[3] = first;
    first = at[1];
    at[1] = at[2];
    at[2] = first;
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "byte order", ekv_index_load_basis(context, other.index, data.data, bytes));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "length is 2047", ekv_index_find_basis(context, b.index, &b.kv, NULL, 2047));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "block_table[127] is 128", ekv_index_find_basis(context, b.index, &b.kv, table, 2048));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "length is 2049", ekv_index_find_basis(context, b.index, &b.kv, NULL, 2049));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "kv_head is 2", ekv_index_sketch_fit(context, b.index, 2, &fit));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "kv_head is -2", ekv_index_sketch_fit(context, b.index, -2, &fit));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "fit is NULL", ekv_index_sketch_fit(context, b.index, 0, NULL));
    fit.size = 1;
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "fit->size is 1", ekv_index_sketch_fit(context, b.index, 0, &fit));
    ekv_cache *cache = cache_of(context, &b, EKV_STATISTICS_NORMS);
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "layer is 2", ekv_cache_load_basis(context, cache, 2, data.data, bytes));
    REFUSED(EKV_ERROR_UNSUPPORTED, "SKETCH", ekv_cache_load_basis(context, cache, 0, data.data, bytes));
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "sequence is 0", ekv_cache_find_basis(context, cache, 0, 0));
    EXPECT(ekv_index_basis_bytes(NULL) == 0, "bytes of nothing");
    /* a key that is not finite: the old basis stays */
    guard before = save(context, b.index);
    dtype_store(EKV_F32, b.keys.data, DIM + 3, INFINITY);
    REFUSED(EKV_ERROR_INVALID_ARGUMENT, "KV head 1", ekv_index_find_basis(context, b.index, &b.kv, NULL, 2048));
    guard after = save(context, b.index);
    EXPECT(memcmp(before.data, after.data, bytes) == 0, "the basis has changed");
#undef REFUSED
    ekv_cache_destroy(cache);
    guard_free(&before);
    guard_free(&after);
    guard_free(&data);
    bed_free(&b);
    bed_free(&other);
    ekv_context_destroy(context);
}
END_TEST

/* Damaged bases: refused with a reason and nothing changed, or good for the same bits. */
START_TEST(damaged_bases_do_no_harm) {
    static const float numbers[] = {NAN, INFINITY, -1.0f, 0.0f, 3e38f, 1e-40f, 1e20f};
    ekv_context *context = context_open(NULL, 2);
    rng keys = case_begin("damaged_bases_do_no_harm", -1);
    bed from, to;
    bed_make(&from, context, EKV_F16, 2048, 2048, &keys);
    bed_make(&to, context, EKV_F16, 1400, 1400, &keys);
    update(&from, context, 0, 2048);
    guard good = save(context, from.index), data = guard_alloc(good.size);
    int64_t loaded = 0;
    FOR_CASES(index, 400) {
        rng r = case_begin("damaged_bases_do_no_harm", index);
        memcpy(data.data, good.data, good.size);
        for (int64_t changes = rng_between(&r, 1, 6); changes > 0; changes--) {
            /* half of them among the first 2,300 bytes of a head, before the rows */
            const int64_t head = (int64_t)(good.size - 16) / HEADS,
                          at = rng_chance(&r, 0.5) ? rng_between(&r, 0, (int64_t)good.size - 5)
                                                   : 16 + head * rng_between(&r, 0, HEADS - 1) + rng_between(&r, 0, 2300);
            if (rng_chance(&r, 0.5))
                memcpy((char *)data.data + (at & ~(int64_t)3), &RNG_PICK(&r, numbers), 4);
            else
                ((unsigned char *)data.data)[at] = (unsigned char)rng_u64(&r);
        }
        EXPECT_OK(context, ekv_index_invalidate(context, to.index, NULL, 0, 1400));
        EXPECT_OK(context, ekv_index_load_basis(context, to.index, good.data, good.size));
        const ekv_status status = ekv_index_load_basis(context, to.index, data.data, data.size);
        if (status != EKV_OK) {
            EXPECT(status == EKV_ERROR_INVALID_ARGUMENT && strlen(ekv_last_error(context)) > 10, "status %d, \"%s\"",
                   (int)status, ekv_last_error(context));
            guard now = save(context, to.index);
            EXPECT(memcmp(now.data, good.data, good.size) == 0, "a refused basis has changed the index");
            guard_free(&now);
            continue;
        }
        loaded++;
        update(&to, context, 0, 1400);
        compare(&to, context, &to.kv, to.index, 1400);
    }
    printf("%lld damaged bases could still be loaded\n", (long long)loaded);
    guard_free(&good);
    guard_free(&data);
    bed_free(&from);
    bed_free(&to);
    ekv_context_destroy(context);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(loaded_bases_serve_from_the_first_token), TEST_ENTRY(drift_is_noticed),
                                TEST_ENTRY(caches_take_bases), TEST_ENTRY(bad_arguments_are_refused),
                                TEST_ENTRY(damaged_bases_do_no_harm)};
    return HARNESS_MAIN(argv[0], tests);
}
