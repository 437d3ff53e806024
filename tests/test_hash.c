/*
 * Identical bits: outputs, scores, page bounds and moments, selections and reports of a fixed list of cases, as hashes in
 * tests/hashes.txt, which every CPU backend must reproduce on 1, 2, 3, 5, 8 and 16 threads.  EKV_TEST_SCALE divides the numbers of
 * threads that each case is run on, never the cases.
 *
 * The file holds what a build with SLEEF computes.  Without SLEEF exp, pow and erfc come from the C library, and the cases that
 * need them are left out (the output says how many).
 *
 * After a change that is meant to change bits:     build/default/tests/test_hash --update
 * writes the file anew, from the scalar backend.  Commit it with the change, and say in the message why bits moved.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "harness.h"

#include "dispatch/internal.h"
#include "entmaxkv/kernels.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HASH_FILE EKV_SOURCE_DIR "/tests/hashes.txt"

/* ---- The cases -------------------------------------------------------------------------------------------------------- */

/* Everything about a case follows from its number. */
typedef struct config {
    int number;
    char name[160];
    ekv_policy policy;
    ekv_dtype dtype, q_dtype, out_dtype;
    double alpha;
    int32_t k_dim, v_dim, kv_heads, group, page_size, length, queries;
    bool slopes, mass, clustered;
    bool sleef; /* its bits depend on exp, pow or erfc */
} config;

enum { CASES_PER_POLICY = 36 };

static const double alphas[] = {1.5, 1, 2, 4.0 / 3.0, 1.25, 3, 1.1};
static const char *const alpha_names[] = {"1.5", "1", "2", "4/3", "1.25", "3", "1.1"};
static const int32_t dims[] = {64, 128, 1, 33, 80, 256}, groups[] = {1, 4, 2, 8, 3}, page_sizes[] = {16, 64, 5, 128};
static const int32_t lengths[] = {1, 100, 515, 4096, 4500, 9001};

#define CYCLE(array, at) ((array)[(size_t)(at) % (sizeof(array) / sizeof((array)[0]))])

/* Each parameter cycles at a pace of its own, so that every value of each meets many of the others. */
static config config_of(int number) {
    const int i = number % CASES_PER_POLICY;
    config c = {.number = number, .policy = (ekv_policy)(number / CASES_PER_POLICY)};
    const bool gaussian = c.policy == EKV_POLICY_GAUSSIAN, certified = c.policy == EKV_POLICY_CERTIFIED;
    const size_t alpha = (size_t)i % 7;
    const bool no_softmax = (gaussian || certified) && alpha == 1;
    c.alpha = no_softmax ? 1.75 : alphas[alpha];
    c.dtype = (ekv_dtype)((i + i / 7) % 3);
    c.q_dtype = (ekv_dtype)(i / 2 % 3);
    c.out_dtype = (ekv_dtype)(i % 4 == 3 ? i / 4 % 3 : 0);
    c.k_dim = CYCLE(dims, i / 3 + i);
    c.v_dim = i % 5 == 4 ? c.k_dim / 2 + 1 : c.k_dim;
    c.group = CYCLE(groups, i + i / 5);
    c.kv_heads = 1 + i / 3 % 2;
    c.page_size = CYCLE(page_sizes, i + i / 4);
    c.length = CYCLE(lengths, i * 5 + i / 6);
    c.queries = i % 6 == 5 && c.length > 3 ? 3 : 1;
    c.slopes = i % 3 == 1;
    c.clustered = i % 2;
    c.mass = i % 4 == 1;
    c.sleef = gaussian || c.mass || !(c.alpha == 1.5 || c.alpha == 2 || c.alpha == 4.0 / 3.0);
    snprintf(c.name, sizeof c.name, "%s %s alpha %s q %s out %s dims %d/%d heads %dx%d page %d length %d queries %d%s%s%s",
             ekv_policy_name(c.policy), ekv_dtype_name(c.dtype), no_softmax ? "1.75" : alpha_names[alpha],
             ekv_dtype_name(c.q_dtype), ekv_dtype_name(c.out_dtype), c.k_dim, c.v_dim, c.kv_heads, c.group, c.page_size,
             c.length, c.queries, c.slopes ? " slopes" : "", c.clustered ? " clustered" : "", c.mass ? " E" : "");
    return c;
}

static int case_count(void) {
    int policies = 0;
    while (strcmp(ekv_policy_name((ekv_policy)policies), "?") != 0)
        policies++;
    return policies * CASES_PER_POLICY;
}

/* Numbers without the C library's functions, whose bits differ between libraries. */
static uint64_t next(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
static float uniform(uint64_t *state) {
    return (float)(next(state) >> 40) * 0x1p-24f;
}
static float rough_normal(uint64_t *state) {
    const uint64_t bits = next(state);
    int sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (int)(bits >> (16 * i) & 0xffff);
    return (float)(sum - 2 * 65535) * (1.7320508f / 65536.0f);
}

/* ---- Hashes ----------------------------------------------------------------------------------------------------------- */

enum { OUT, SCORES, BOUNDS, MOMENTS, SELECTED, REPORT, FIELDS };
static const char *const field_names[FIELDS] = {"out", "scores", "bounds", "moments", "selected", "report"};

typedef struct hashes {
    uint64_t field[FIELDS];
} hashes;

static void add(uint64_t *h, uint64_t word) {
    for (int i = 0; i < 8; i++, word >>= 8)
        *h = (*h ^ (word & 0xff)) * 1099511628211u;
}
static void add_double(uint64_t *h, double x) {
    uint64_t bits;
    if (isnan(x))
        x = NAN;
    memcpy(&bits, &x, sizeof bits);
    add(h, isnan(x) ? UINT64_C(0x7ff8000000000000) : bits); /* a NaN's sign and payload differ between processors */
}
static void add_floats(uint64_t *h, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        add_double(h, (double)x[i]);
}

static void add_report(uint64_t *h, const ekv_report *r) {
    add_double(h, r->tau);
    add_double(h, r->mass_bound);
    add_double(h, r->error_bound);
    const int64_t words[] = {r->support,     r->tokens,           r->pages,       r->group_pages,
                             r->total_pages, r->bytes_statistics, r->bytes_keys,  r->bytes_values,
                             r->bytes_dense, r->certified,        r->bytes_sketch};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        add(h, (uint64_t)words[i]);
}

/* ---- A case ----------------------------------------------------------------------------------------------------------- */

typedef struct memory {
    void *k, *v, *q, *out;
    int32_t *table;
    uint8_t *mask, *selected;
    ekv_report *report;
    float *bounds, *mean, *deviation;
    float slopes[64];
    int32_t q_start[2];
    int64_t pages, rows;
    ekv_kv kv;
    ekv_decode_params step;
} memory;

static void *get(int64_t count, size_t size) {
    void *p = calloc((size_t)count + 1, size);
    ck_assert_ptr_nonnull(p);
    return p;
}

static void fill_kv(const config *c, memory *m, uint64_t *state) {
    const int64_t stride = (int64_t)c->kv_heads * c->page_size;
    for (int64_t t = 0; t < c->length; t++)
        for (int32_t h = 0; h < c->kv_heads; h++) {
            const int64_t block = m->table[t / c->page_size], row = block * stride + h * c->page_size + t % c->page_size;
            uint64_t cluster = (uint64_t)(t / c->page_size) * 977 + (uint64_t)h;
            for (int32_t d = 0; d < c->k_dim; d++) {
                const float x = rough_normal(state), shared = rough_normal(&cluster);
                dtype_store(c->dtype, m->k, row * c->k_dim + d, c->clustered ? 0.4f * x + shared : x);
            }
            for (int32_t d = 0; d < c->v_dim; d++)
                dtype_store(c->dtype, m->v, row * c->v_dim + d, rough_normal(state));
        }
}

static void set_step(const config *c, memory *m) {
    ekv_decode_params *s = &m->step;
    *s = ekv_decode_params_default();
    s->kv = &m->kv;
    s->block_table = m->table;
    s->block_table_stride = m->pages;
    s->lengths = &c->length;
    s->q_heads = c->kv_heads * c->group;
    s->q_start = m->q_start;
    s->q = m->q;
    s->q_dtype = c->q_dtype;
    s->out = m->out;
    s->out_dtype = c->out_dtype;
    s->alpha = c->alpha;
    s->slopes = c->slopes ? m->slopes : NULL;
    s->policy = c->policy;
    s->budget = c->length / 4 + 1;
    s->first_pages = c->number % 2;
    s->recent_tokens = c->number % 3 * 20;
    s->page_mask = m->mask;
    s->page_mask_stride = m->pages;
    s->report = m->report;
    s->report_mass = c->mass;
}

static memory make_memory(const config *c) {
    memory m = {.pages = (c->length + c->page_size - 1) / c->page_size, .q_start = {0, c->queries}};
    uint64_t state = 0x1234567u + (uint64_t)c->number * 0x9e3779b9u;
    const int32_t q_heads = c->kv_heads * c->group;
    const int64_t slots = m.pages * c->page_size * c->kv_heads;
    m.rows = (int64_t)c->queries * q_heads;
    m.k = get(slots * c->k_dim, dtype_size(c->dtype));
    m.v = get(slots * c->v_dim, dtype_size(c->dtype));
    m.q = get(m.rows * c->k_dim, dtype_size(c->q_dtype));
    m.out = get(m.rows * c->v_dim, dtype_size(c->out_dtype));
    m.table = get(m.pages, sizeof *m.table);
    m.mask = get(m.rows * m.pages, 1);
    m.selected = get(m.rows * m.pages, 1);
    m.report = get(m.rows, sizeof *m.report);
    m.bounds = get(m.rows * m.pages, sizeof *m.bounds);
    m.mean = get(m.rows * m.pages, sizeof *m.mean);
    m.deviation = get(m.rows * m.pages, sizeof *m.deviation);
    for (int64_t p = 0; p < m.pages; p++)
        m.table[p] = (int32_t)(m.pages - 1 - p);
    m.kv = ekv_kv_default();
    m.kv.dtype = c->dtype;
    m.kv.kv_heads = c->kv_heads;
    m.kv.k_dim = c->k_dim;
    m.kv.v_dim = c->v_dim;
    m.kv.page_size = c->page_size;
    m.kv.blocks = m.pages;
    m.kv.k = m.k;
    m.kv.v = m.v;
    m.kv.k_token_stride = c->k_dim;
    m.kv.k_head_stride = (int64_t)c->k_dim * c->page_size;
    m.kv.k_block_stride = m.kv.k_head_stride * c->kv_heads;
    m.kv.v_token_stride = c->v_dim;
    m.kv.v_head_stride = (int64_t)c->v_dim * c->page_size;
    m.kv.v_block_stride = m.kv.v_head_stride * c->kv_heads;
    fill_kv(c, &m, &state);
    const float spread = c->k_dim == 1 ? 1.0f : 2.5f;
    for (int64_t i = 0; i < m.rows * c->k_dim; i++)
        dtype_store(c->q_dtype, m.q, i, spread * rough_normal(&state));
    for (int32_t h = 0; h < q_heads; h++)
        m.slopes[h] = h % 3 == 2 ? 0.0f : 0.5f * uniform(&state);
    for (int64_t i = 0; i < m.rows * m.pages; i++)
        m.mask[i] = uniform(&state) < 0.3f;
    return m;
}

static void free_memory(memory *m) {
    void *const all[] = {m->k, m->v, m->q, m->out, m->table, m->mask, m->selected, m->report, m->bounds, m->mean, m->deviation};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* Scores of up to 200 tokens and 8 rows by the kernel itself. */
static uint64_t hash_scores(const config *c, const memory *m, const ekv_kernels *kernels) {
    enum { ROWS = 8 };
    static float q[ROWS][EKV_MAX_DIM], z[ROWS * EKV_TILE];
    const float *rows[ROWS];
    float slope[ROWS];
    int32_t q_token[ROWS], token[EKV_TILE] = {0};
    const void *keys[EKV_TILE];
    uint64_t h = 14695981039346656037u;
    const int count = m->rows < ROWS ? (int)m->rows : ROWS;
    for (int r = 0; r < count; r++) {
        ekv_load_row_args load = {(const char *)m->q + (size_t)r * (size_t)c->k_dim * dtype_size(c->q_dtype), c->k_dim, 0.17f,
                                  q[r]};
        kernels->load_row[c->q_dtype](&load);
        rows[r] = q[r];
        slope[r] = c->slopes ? m->slopes[r % (c->kv_heads * c->group)] : 0.0f;
        q_token[r] = c->length - 1;
    }
    for (int32_t first = 0; first < c->length && first < 200; first += EKV_TILE) {
        const int n = c->length - first < EKV_TILE ? c->length - first : EKV_TILE;
        for (int i = 0; i < n; i++) {
            token[i] = first + i;
            keys[i] = ekv_key(&m->kv, m->table[token[i] / c->page_size], token[i] % c->page_size, 0);
        }
        ekv_score_args a = {rows, slope, q_token, count, keys, token, n, c->k_dim, z, NULL, 0};
        kernels->score[c->dtype](&a);
        for (int r = 0; r < count; r++)
            add_floats(&h, z + r * EKV_TILE, n);
    }
    return h;
}

static ekv_index *make_index(const config *c, memory *m, ekv_context *context) {
    ekv_index_params p = ekv_index_params_default();
    ekv_index *index = NULL;
    p.dtype = c->dtype;
    p.kv_heads = c->kv_heads;
    p.k_dim = c->k_dim;
    p.v_dim = c->v_dim;
    p.page_size = c->page_size;
    p.blocks = m->pages;
    if (c->policy == EKV_POLICY_CERTIFIED && c->page_size % 16 == 0)
        p.statistics |= EKV_STATISTICS_SKETCH;
    EXPECT_OK(context, ekv_index_create(context, &p, NULL, 0, &index));
    EXPECT_OK(context, ekv_index_update(context, index, &m->kv, m->table, 0, c->length, c->length));
    return index;
}

static hashes hash_case(const config *c, memory *m, ekv_context *context, const ekv_kernels *kernels) {
    hashes h;
    for (int i = 0; i < FIELDS; i++)
        h.field[i] = 14695981039346656037u;
    ekv_index *index = make_index(c, m, context);
    set_step(c, m);
    m->step.index = index;
    EXPECT_OK(context, ekv_page_bounds(context, &m->step, m->bounds, m->pages));
    EXPECT_OK(context, ekv_page_moments(context, &m->step, m->mean, m->deviation, m->pages));
    if (c->policy != EKV_POLICY_CERTIFIED) /* which selects no pages: its report says what it read */
        EXPECT_OK(context, ekv_select_pages(context, &m->step, m->selected, m->pages));
    EXPECT_OK(context, ekv_decode(context, &m->step));
    for (int64_t i = 0; i < m->rows * c->v_dim; i++)
        add_double(&h.field[OUT], dtype_load(c->out_dtype, m->out, i));
    h.field[SCORES] = hash_scores(c, m, kernels);
    add_floats(&h.field[BOUNDS], m->bounds, m->rows * m->pages);
    add_floats(&h.field[MOMENTS], m->mean, m->rows * m->pages);
    add_floats(&h.field[MOMENTS], m->deviation, m->rows * m->pages);
    for (int64_t i = 0; i < m->rows * m->pages; i++)
        add(&h.field[SELECTED], m->selected[i]);
    for (int64_t i = 0; i < m->rows; i++)
        add_report(&h.field[REPORT], &m->report[i]);
    ekv_index_destroy(index);
    return h;
}

static void print_line(FILE *file, const config *c, const hashes *h) {
    for (int i = 0; i < FIELDS; i++)
        fprintf(file, "%016" PRIx64 " ", h->field[i]);
    fprintf(file, "%s\n", c->name);
}

/* ---- The file --------------------------------------------------------------------------------------------------------- */

static bool read_line(FILE *file, char *line, int size) {
    while (fgets(line, size, file))
        if (line[0] != '#') {
            line[strcspn(line, "\n")] = 0;
            return true;
        }
    return false;
}

static hashes *read_hashes(void) {
    char line[512];
    const int count = case_count();
    hashes *all = get(count, sizeof *all);
    FILE *file = fopen(HASH_FILE, "r");
    EXPECT(file != NULL, "cannot open %s", HASH_FILE);
    for (int i = 0; i < count; i++) {
        const config c = config_of(i);
        char *at = line;
        EXPECT(read_line(file, line, sizeof line), "%s ends before case %d, \"%s\": write it anew with --update", HASH_FILE, i,
               c.name);
        for (int f = 0; f < FIELDS; f++)
            all[i].field[f] = strtoull(at, &at, 16);
        EXPECT(*at == ' ' && strcmp(at + 1, c.name) == 0,
               "case %d of %s is \"%s\", expected \"%s\": write it anew with --update", i, HASH_FILE, at, c.name);
    }
    fclose(file);
    return all;
}

START_TEST(update) {
    ekv_backend_entry entry;
    EXPECT(EKV_WITH_SLEEF, "--update needs a build with SLEEF");
    EXPECT(ekv_find_backend("scalar", &entry), "there is no scalar backend");
    ekv_context *context = context_open("scalar", 1);
    FILE *file = fopen(HASH_FILE, "w");
    EXPECT(file != NULL, "cannot write %s", HASH_FILE);
    fprintf(file, "# Hashes of a fixed list of cases, which every CPU backend reproduces: see tests/test_hash.c.\n"
                  "# SPDX-License-Identifier: Apache-2.0\n#");
    for (int f = 0; f < FIELDS; f++)
        fprintf(file, " %s,", field_names[f]);
    fprintf(file, " case\n");
    for (int i = 0; i < case_count(); i++) {
        const config c = config_of(i);
        memory m = make_memory(&c);
        const hashes h = hash_case(&c, &m, context, entry.kernels);
        print_line(file, &c, &h);
        free_memory(&m);
    }
    ekv_context_destroy(context);
    EXPECT(fclose(file) == 0, "cannot write %s", HASH_FILE);
}
END_TEST

/* ---- The test --------------------------------------------------------------------------------------------------------- */

static void check_case(const config *c, memory *m, const hashes *expected, const char *backend, int32_t threads) {
    ekv_backend_entry entry;
    ekv_context *context = context_open(backend, threads);
    EXPECT(ekv_find_backend(backend, &entry), "%s", backend);
    const hashes h = hash_case(c, m, context, entry.kernels);
    for (int f = 0; f < FIELDS; f++)
        EXPECT(h.field[f] == expected->field[f],
               "%s, %d threads: %s of case %d, \"%s\", hash %016" PRIx64 ", expected %016" PRIx64, backend, threads,
               field_names[f], c->number, c->name, h.field[f], expected->field[f]);
    ekv_context_destroy(context);
}

static const int32_t thread_counts[] = {1, 2, 3, 5, 8, 16};
enum { THREAD_COUNTS = sizeof thread_counts / sizeof thread_counts[0] };

static int check_backend(const hashes *expected, const char *backend) {
    int checked = 0;
    for (int i = (int)case_first(); i < case_end_of_list(case_count()); i++) {
        const config c = config_of(i);
        if (c.sleef && !EKV_WITH_SLEEF)
            continue;
        memory m = make_memory(&c);
        /* Under EKV_TEST_SCALE on some of them, others from case to case. */
        for (int t = 0; t < case_share(THREAD_COUNTS); t++)
            check_case(&c, &m, &expected[i], backend, thread_counts[(i + i / THREAD_COUNTS + t) % THREAD_COUNTS]);
        free_memory(&m);
        checked++;
    }
    return checked;
}

START_TEST(every_backend_reproduces_the_hashes) {
    hashes *expected = read_hashes();
    ekv_backend_info info = {.size = sizeof info};
    for (int32_t b = 0; ekv_backend(b, &info) == EKV_OK; b++) {
        if (!info.available || strcmp(info.name, "reference") == 0)
            continue;
        const int checked = check_backend(expected, info.name);
        printf("hash: %s reproduces %d of %d cases, each on %d of 1, 2, 3, 5, 8 and 16 threads%s\n", info.name, checked, case_count(),
               (int)case_share(THREAD_COUNTS), EKV_WITH_SLEEF ? "" : "; without SLEEF the cases that need exp, pow or erfc are left out");
        fflush(stdout);
    }
    free(expected);
}
END_TEST

int main(int argc, char **argv) {
    const test_entry tests[] = {TEST_ENTRY(every_backend_reproduces_the_hashes)};
    const test_entry updates[] = {TEST_ENTRY(update)};
    if (argc > 1 && strcmp(argv[1], "--update") == 0)
        return HARNESS_MAIN("test_hash --update", updates);
    return HARNESS_MAIN("test_hash", tests);
}
