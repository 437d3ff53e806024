/*
 * ekv_conform(): which cases there are, and running them.
 *
 * The kernels come from the list in entmaxkv/kernels.h and the policies from ekv_policy_name(), so that a new one without a
 * family of cases shows as a failure.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/conform.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- subjects ---- */

/* What is tested, by name: the kernels of the list, the transform, the policies. */
static bool subject(int i, char *name, size_t size) {
    static const char *const fixed[] = {
#define EKV_SUBJECT(kernel, description) #kernel,
        EKV_TYPED_KERNELS(EKV_SUBJECT) EKV_PLAIN_KERNELS(EKV_SUBJECT)
#undef EKV_SUBJECT
            "entmax"};
    const int n = (int)(sizeof fixed / sizeof fixed[0]);
    if (i < n) {
        snprintf(name, size, "%s", fixed[i]);
        return true;
    }
    const char *policy = ekv_policy_name((ekv_policy)(i - n));
    snprintf(name, size, "policy-%s", policy);
    return strcmp(policy, "?") != 0;
}

/* The backend cuda has policy cases of its own: what it serves differs in page sizes, and its kernels in dimensions. */
static const ekv_family *find_family(const char *name, bool on_device) {
    const ekv_family *const lists[] = {ekv_row_families, ekv_page_families, ekv_sketch_families, ekv_list_families,
                                       on_device ? ekv_device_families : ekv_policy_families};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        for (const ekv_family *f = lists[i]; f->name; f++)
            if (strcmp(f->name, name) == 0) return f;
    return NULL;
}

/* Whether the table has every kernel.  The moments kernels are typed by what moments are stored as, never bf16. */
static bool is_complete(const ekv_kernels *table) {
    bool complete = true;
    for (int dtype = 0; table && dtype < 3; dtype++) {
#define EKV_HAS_TYPED(name, description) complete = complete && (table->name[dtype] || strcmp(#name, "gaussian") == 0);
        EKV_TYPED_KERNELS(EKV_HAS_TYPED)
#undef EKV_HAS_TYPED
    }
#define EKV_HAS_PLAIN(name, description) complete = complete && table->name;
    if (table) {
        EKV_PLAIN_KERNELS(EKV_HAS_PLAIN)
        complete = complete && table->gaussian[EKV_F32] && table->gaussian[EKV_F16];
    }
#undef EKV_HAS_PLAIN
    return complete;
}

/* ---- the grid ---- */

static int64_t grid_size(const ekv_family *f) {
    int64_t size = 1;
    for (int a = 0; a < EKV_AXES && f->axis[a].name; a++) size *= f->axis[a].n;
    return size;
}

static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

/* The step of the sample's walk through the grid: near the golden section of its size and without a common divisor, so that any
 * run of cases is spread evenly over every axis. */
static int64_t sample_step(int64_t size) {
    int64_t step = (int64_t)((double)size * 0.6180339887498949);
    while (common_divisor(step, size) != 1) step++;
    return step;
}

static void set_case(ekv_check *c, const ekv_family *f, int64_t number, uint64_t seed) {
    size_t used = 0;
    int64_t rest = number;
    c->family = f;
    c->number = number;
    c->placement = 0;
    c->failed = c->unsupported = false;
    c->index = -1;
    c->what[0] = 0;
    c->text[0] = 0;
    c->random = seed * 0x9e3779b97f4a7c15u + (uint64_t)number * 0xbf58476d1ce4e5b9u;
    for (const char *p = f->name; *p; p++) c->random = (c->random ^ (unsigned char)*p) * 1099511628211u;
    for (int a = 0; a < EKV_AXES && f->axis[a].name; a++) {
        const ekv_axis *axis = &f->axis[a];
        const int digit = (int)(rest % axis->n);
        rest /= axis->n;
        c->value[a] = axis->names ? digit : axis->values[digit];
        if (strcmp(axis->name, "memory") == 0) c->placement = digit;
        const size_t room = sizeof c->text - used;
        const int written = axis->names
                                ? snprintf(c->text + used, room, "%s%s %s", a ? ", " : "", axis->name, axis->names[digit])
                                : snprintf(c->text + used, room, "%s%s %d", a ? ", " : "", axis->name, axis->values[digit]);
        used += written > 0 && (size_t)written < room ? (size_t)written : room - 1;
    }
}

/* Which pairs of values of two axes have been in a case. */
typedef struct pairs {
    int axes, n[EKV_AXES];
    int64_t first[EKV_AXES][EKV_AXES]; /* of the pairs of two axes, the lower one first */
    int64_t count;
    unsigned char *seen; /* [count] */
} pairs;

static unsigned char *pair_of(pairs *p, int a, int value_a, int b, int value_b) {
    return a < b ? &p->seen[p->first[a][b] + (int64_t)value_a * p->n[b] + value_b]
                 : &p->seen[p->first[b][a] + (int64_t)value_b * p->n[a] + value_a];
}

static bool pairs_begin(pairs *p, const ekv_family *f) {
    *p = (pairs){0};
    while (p->axes < EKV_AXES && f->axis[p->axes].name) p->n[p->axes] = f->axis[p->axes].n, p->axes++;
    for (int a = 0; a < p->axes; a++)
        for (int b = a + 1; b < p->axes; p->count += (int64_t)p->n[a] * p->n[b], b++) p->first[a][b] = p->count;
    p->seen = calloc((size_t)p->count + 1, 1);
    return p->seen != NULL;
}

/* How many pairs with the axes that have a value already would be new if axis a had this one. */
static int new_pairs(pairs *p, const int *value, int a, int value_a) {
    int count = 0;
    for (int b = 0; b < p->axes; b++) count += b != a && value[b] >= 0 && !*pair_of(p, a, value_a, b, value[b]);
    return count;
}

/* Completes a case of which some axes have values, axis by axis with what makes most new pairs; all its pairs are seen then. */
static void fill_case(pairs *p, int64_t turn, int *value) {
    for (int a = 0; a < p->axes; a++) {
        if (value[a] >= 0) continue;
        int best = 0, most = -1;
        for (int i = 0; i < p->n[a]; i++) {
            const int v = (int)((i + turn) % p->n[a]), count = new_pairs(p, value, a, v);
            if (count > most) best = v, most = count;
        }
        value[a] = best;
    }
    for (int a = 0; a < p->axes; a++)
        for (int b = a + 1; b < p->axes; b++) *pair_of(p, a, value[a], b, value[b]) = 1;
}

/* ---- a case ---- */

static void run_family(void *arg) {
    ekv_check *c = arg;
    c->family->run(c);
}

/* Which buffer an address is nearest to. */
static void describe_fault(ekv_check *c, const char *fault, const void *address) {
    const uintptr_t at = (uintptr_t)address, page = ekv_memory_page();
    c->failed = true;
    c->index = -1;
    c->got = c->expected = c->error = c->tolerance = 0.0;
    snprintf(c->what, sizeof c->what, "%s", fault);
    for (int i = 0; i < c->rooms; i++) {
        const ekv_room *room = &c->room[i];
        const uintptr_t base = (uintptr_t)room->base, data = (uintptr_t)room->data, end = data + room->bytes;
        if (!room->used || at < base - page || at >= base + room->span + page) continue;
        if (at >= end)
            snprintf(c->what, sizeof c->what, "%s: access %zu bytes past the end of the buffer \"%s\"", fault,
                     (size_t)(at - end), room->name);
        else
            snprintf(c->what, sizeof c->what, "%s: access %zu bytes before the buffer \"%s\"", fault, (size_t)(data - at),
                     room->name);
    }
}

static void run_case(void *arg, int64_t i) {
    ekv_check *c = arg;
    const void *address;
    (void)i;
    const char *fault = ekv_catch_fault(run_family, c, &address);
    if (fault) {
        describe_fault(c, fault, address);
        for (int slot = 0; slot < c->context->threads; slot++)
            ekv_release_slot(c->context, slot); /* what the case still held */
    }
    ekv_rooms_check(c);
}

/* ---- a run ---- */

typedef struct run {
    const ekv_conform_options *options;
    ekv_conform_summary *summary;
    ekv_check *check;
    const char *backend; /* what results call it */
    bool own_table;
} run;

static void report(run *r, const char *kernel, ekv_conform_status status) {
    ekv_check *c = r->check;
    char replay[256], backend[64] = "";
    r->summary->passed += status == EKV_CONFORM_PASS;
    r->summary->failed += status == EKV_CONFORM_FAIL;
    r->summary->unsupported += status == EKV_CONFORM_UNSUPPORTED;
    if (c->worst > r->summary->worst) r->summary->worst = c->worst;
    if (!r->options->result) return;
    if (!r->own_table) snprintf(backend, sizeof backend, "--backend %s ", r->backend);
    snprintf(replay, sizeof replay, "conform %s--kernel %s --case %lld --seed %llu", backend, kernel, (long long)c->number,
             (unsigned long long)r->options->seed);
    const bool failed = status == EKV_CONFORM_FAIL;
    const ekv_conform_result result = {sizeof result,
                                       r->backend,
                                       kernel,
                                       c->number,
                                       c->text,
                                       status,
                                       failed ? c->what : "",
                                       failed ? c->index : -1,
                                       failed ? c->got : 0.0,
                                       failed ? c->expected : 0.0,
                                       failed ? c->error : 0.0,
                                       failed ? c->tolerance : 0.0,
                                       replay};
    r->options->result(r->options->user, &result);
}

static void run_one(run *r, const ekv_family *f, int64_t number) {
    ekv_check *c = r->check;
    set_case(c, f, number, r->options->seed);
    if (r->options->text && !strstr(c->text, r->options->text)) return;
    if (!r->options->list) ekv_parallel(c->context, 1, run_case, c);
    report(r, f->name, c->failed ? EKV_CONFORM_FAIL : c->unsupported ? EKV_CONFORM_UNSUPPORTED : EKV_CONFORM_PASS);
}

/* Cases that together hold every pair. */
static void run_pairs(run *r, const ekv_family *f) {
    pairs p;
    if (!pairs_begin(&p, f)) return;
    int64_t turn = 0;
    for (int a = 0; a < p.axes; a++)
        for (int b = a + 1; b < p.axes; b++)
            for (int pair = 0; pair < p.n[a] * p.n[b]; pair++) {
                int value[EKV_AXES];
                int64_t number = 0;
                if (*pair_of(&p, a, pair / p.n[b], b, pair % p.n[b])) continue;
                for (int i = 0; i < p.axes; i++) value[i] = i == a ? pair / p.n[b] : i == b ? pair % p.n[b] : -1;
                fill_case(&p, turn++, value);
                for (int i = p.axes; i-- > 0;) number = number * p.n[i] + value[i];
                run_one(r, f, number);
            }
    free(p.seen);
}

static void run_subject(run *r, const char *name) {
    const ekv_family *f = find_family(name, r->check->on_device);
    if (!f) {
        ekv_check *c = r->check;
        static const ekv_family none = {0};
        c->family = &none;
        c->number = -1;
        c->text[0] = 0;
        c->failed = false;
        ekv_expect_true(c, "this part of the library has conformance cases", -1, false);
        report(r, name, EKV_CONFORM_FAIL);
        return;
    }
    /* The backends `reference` and `cuda` have no kernels of the list: only whole calls run on them. */
    if (!r->check->table && strncmp(name, "policy-", 7) != 0 && strcmp(name, "entmax") != 0) return;
    const int64_t size = grid_size(f), step = sample_step(size);
    if (r->options->number >= 0) {
        if (r->options->number < size) run_one(r, f, r->options->number);
        return;
    }
    /* On the reference a whole step is compared with single rows of itself: a few cases show that, slowly. */
    const bool slow = !r->check->table && !r->check->on_device && strcmp(name, "entmax") != 0;
    const int64_t sample = slow ? f->sample / 16 : f->sample;
    if (r->options->thorough == 2) {
        run_pairs(r, f);
        return;
    }
    const int64_t count = r->options->thorough ? size : ekv_min64(size, sample);
    for (int64_t i = 0, number = 0; i < count; i++, number = (number + step) % size) run_one(r, f, count == size ? i : number);
}

/* One backend or table. */
static ekv_status run_table(run *r, const char *name, const ekv_kernels *table) {
    ekv_context_params params = ekv_context_params_default();
    params.backend = r->own_table ? "reference" : name;
    params.threads = 1;
    ekv_check *c = r->check;
    const ekv_status status = ekv_context_create(&params, &c->context, NULL, 0);
    if (status != EKV_OK) return status;
    c->on_device = c->context->cuda != NULL;
    c->table = table;
    if (!c->on_device) c->context->kernels = table;
    c->context->backend = r->backend = name;
    c->complete = is_complete(table);
    char kernel[64];
    for (int i = 0; subject(i, kernel, sizeof kernel); i++)
        if (!r->options->kernel || strcmp(r->options->kernel, kernel) == 0) run_subject(r, kernel);
    ekv_rooms_free(c);
    ekv_context_destroy(c->context);
    return EKV_OK;
}

static ekv_status run_backends(run *r) {
    ekv_backend_info info = {.size = sizeof info};
    ekv_status status = EKV_OK;
    for (int32_t i = 0; status == EKV_OK && ekv_backend(i, &info) == EKV_OK; i++) {
        ekv_backend_entry entry;
        if (!info.available || (r->options->backend && strcmp(r->options->backend, info.name) != 0)) continue;
        if (ekv_find_backend(info.name, &entry)) status = run_table(r, info.name, entry.kernels);
    }
    return status;
}

/* ---- the call ---- */

static ekv_status wrong(ekv_status status, char *message, size_t size, const char *format, const char *value,
                        const char *known) {
    if (message && size) snprintf(message, size, format, value, known);
    return status;
}

static ekv_status check_options(const ekv_conform_options *o, char *message, size_t size) {
    char known[1024] = "", name[64], available[128];
    ekv_backend_entry entry;
    bool found = !o->kernel;
    if (o->backend && o->table)
        return wrong(EKV_ERROR_INVALID_ARGUMENT, message, size, "%s and %s are both given", "backend", "table");
    ekv_list_available(available, sizeof available);
    if (o->backend && (!ekv_find_backend(o->backend, &entry) || !entry.available))
        return wrong(EKV_ERROR_UNAVAILABLE, message, size, "backend \"%s\" cannot run here; available: %s", o->backend,
                     available);
    for (int i = 0; subject(i, name, sizeof name); i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", name);
        found = found || strcmp(o->kernel, name) == 0;
    }
    if (!found) return wrong(EKV_ERROR_INVALID_ARGUMENT, message, size, "unknown kernel \"%s\"; known: %s", o->kernel, known);
    const bool on_device = o->backend && strcmp(o->backend, "cuda") == 0;
    const ekv_family *family = o->kernel ? find_family(o->kernel, on_device) : NULL;
    if (o->number >= 0 && family && o->number >= grid_size(family)) {
        snprintf(known, sizeof known, "%lld", (long long)grid_size(family));
        return wrong(EKV_ERROR_INVALID_ARGUMENT, message, size, "no such case: kernel \"%s\" has %s, numbered from 0",
                     o->kernel, known);
    }
    return EKV_OK;
}

static atomic_flag running = ATOMIC_FLAG_INIT;

ekv_status ekv_conform(const ekv_conform_options *options, ekv_conform_summary *summary, char *message, size_t message_size) {
    ekv_conform_options o = ekv_conform_options_default();
    ekv_conform_summary sums = ekv_conform_summary_default();
    if (options && !ekv_copy_params(&o, sizeof o, options, sizeof(size_t)))
        return wrong(EKV_ERROR_INVALID_ARGUMENT, message, message_size, "%s is not that of an %s", "options->size",
                     "ekv_conform_options");
    ekv_status status = check_options(&o, message, message_size);
    if (status != EKV_OK) return status;
    ekv_check *check = calloc(1, sizeof *check);
    if (!check) return wrong(EKV_ERROR_OUT_OF_MEMORY, message, message_size, "out of memory for %s%s", "the cases", "");
    if (atomic_flag_test_and_set(&running)) {
        free(check);
        return wrong(EKV_ERROR_UNAVAILABLE, message, message_size, "another thread runs %s%s", "ekv_conform", "");
    }
    run r = {&o, &sums, check, NULL, o.table != NULL};
    ekv_faults_begin();
    status = o.table ? run_table(&r, o.table->name ? o.table->name : "table", o.table) : run_backends(&r);
    ekv_faults_end();
    atomic_flag_clear(&running);
    free(check);
    if (status != EKV_OK) return wrong(status, message, message_size, "%s%s", ekv_strerror(status), "");
    if (summary) ekv_copy_params(summary, summary->size < sizeof sums ? summary->size : sizeof sums, &sums, sizeof(size_t));
    return EKV_OK;
}
