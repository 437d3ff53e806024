/*
 * entmaxkv reference: attention of a safetensors file in double precision, for authors of other implementations.  The formats
 * are described in docs/reference-format.md.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "command.h"

#include "cpu/reference.h"
#include "safetensors.h"
#include "tensors.h"

#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] = "Usage: entmaxkv reference --in CASE.safetensors --out OUT.safetensors [--weights]\n"
                           "Computes alpha-entmax attention by slow, plain double-precision code.\n"
                           "\n"
                           "CASE holds the tensors q [tokens, query heads, key dim], k [length, KV heads, key\n"
                           "dim] and v [length, KV heads, value dim], F32, F16 or BF16; optionally slopes, alpha\n"
                           "and scale [query heads], and pages (a list) or page_mask [tokens, query heads, pages];\n"
                           "and as texts of its metadata alpha, scale, page_size, policy and its parameters.\n"
                           "OUT gets out, tau, tau_full, delta, mass_bound, support and pages; with --weights\n"
                           "also z and weights [tokens, query heads, length].\n"
                           "docs/reference-format.md describes both.\n"
                           "\n"
                           "Exit status: 0 success, 1 failure, 2 wrong command line.\n";

/* The case as it was read, and the results. */
typedef struct job {
    const lm_safetensors *file;
    const char *path;
    lm_tensor q, k, v, mask;
    bool has_mask, weights;
    ekv_dtype dtype; /* of k and v */
    int64_t tokens, q_heads, kv_heads, k_dim, v_dim, length, pages;
    double *alpha, *scale, *slopes; /* [q_heads] */
    uint8_t *read;                  /* [tokens][q_heads][pages] */
    ekv_reference_problem shared;   /* what is the same in all rows */
    const char *policy_name;
    double *out, *tau, *tau_full, *delta, *mass_bound, *z, *p;
    int64_t *support;
    const void **keys, **values;
    double *query;
    lm_error error;
} job;

/* ---- reading ---- */

static bool dtype_of(const lm_tensor *t, ekv_dtype *dtype) {
    static const char *const names[] = {"F32", "F16", "BF16"};
    for (int i = 0; i < 3; i++)
        if (strcmp(t->dtype, names[i]) == 0) {
            *dtype = (ekv_dtype)i;
            return true;
        }
    return false;
}

static bool read_tensor(job *j, const char *name, int rank, lm_tensor *t) {
    ekv_dtype dtype;
    if (!lm_safetensors_find(j->file, name, t)) return lm_fail(&j->error, "%s: there is no tensor %s", j->path, name);
    if (t->rank != rank)
        return lm_fail(&j->error, "%s: tensor %s: expected %d dimensions, found %d", j->path, name, rank, t->rank);
    if (!dtype_of(t, &dtype))
        return lm_fail(&j->error, "%s: tensor %s: expected F32, F16 or BF16, found %s", j->path, name, t->dtype);
    return true;
}

/* A number of the metadata, or its default. */
static bool read_number(job *j, const char *name, double least, double most, bool whole, double *value) {
    const char *text = lm_safetensors_metadata(j->file, name);
    char *end;
    if (!text) return true;
    const double x = strtod(text, &end);
    if (end == text || *end || !(x >= least && x <= most) || (whole && x != floor(x)))
        return lm_fail(&j->error, "%s: metadata %s is \"%s\": expected a %snumber from %g to %g", j->path, name, text,
                       whole ? "whole " : "", least, most);
    *value = x;
    return true;
}

/* One number per query head: a tensor of that name, or one number of the metadata for all. */
static bool read_heads(job *j, const char *name, double least, double most, double value, double **heads) {
    lm_tensor t;
    *heads = calloc((size_t)j->q_heads, sizeof **heads);
    if (!*heads) return lm_fail(&j->error, "out of memory");
    if (!read_number(j, name, least, most, false, &value)) return false;
    for (int64_t h = 0; h < j->q_heads; h++) (*heads)[h] = value;
    if (!lm_safetensors_find(j->file, name, &t)) return true;
    const bool f64 = strcmp(t.dtype, "F64") == 0, f32 = strcmp(t.dtype, "F32") == 0;
    if (t.rank != 1 || t.shape[0] != j->q_heads || !(f32 || f64))
        return lm_fail(&j->error, "%s: tensor %s: expected F32 or F64 [%" PRId64 "]", j->path, name, j->q_heads);
    for (int64_t h = 0; h < j->q_heads; h++) {
        double x;
        memcpy(&x, t.data + 8 * h * f64, f64 ? sizeof x : 0);
        if (f32) x = ekv_reference_load(EKV_F32, t.data, h);
        if (!(x >= least && x <= most))
            return lm_fail(&j->error, "%s: tensor %s: element %" PRId64 " is %g, not in %g..%g", j->path, name, h, x, least,
                           most);
        (*heads)[h] = x;
    }
    return true;
}

static bool read_shapes(job *j) {
    ekv_dtype v_dtype = EKV_F32;
    if (!read_tensor(j, "q", 3, &j->q) || !read_tensor(j, "k", 3, &j->k) || !read_tensor(j, "v", 3, &j->v)) return false;
    j->tokens = j->q.shape[0];
    j->q_heads = j->q.shape[1];
    j->k_dim = j->q.shape[2];
    j->length = j->k.shape[0];
    j->kv_heads = j->k.shape[1];
    j->v_dim = j->v.shape[2];
    dtype_of(&j->k, &j->dtype);
    dtype_of(&j->v, &v_dtype);
    if (j->dtype != v_dtype)
        return lm_fail(&j->error, "%s: k is %s and v %s: both must be the same", j->path, j->k.dtype, j->v.dtype);
    if (j->k.shape[2] != j->k_dim)
        return lm_fail(&j->error, "%s: q has key dimension %" PRId64 ", k %" PRId64, j->path, j->k_dim, j->k.shape[2]);
    if (j->v.shape[0] != j->length || j->v.shape[1] != j->kv_heads)
        return lm_fail(&j->error, "%s: k is [%" PRId64 ", %" PRId64 ", ...], v [%" PRId64 ", %" PRId64 ", ...]", j->path,
                       j->length, j->kv_heads, j->v.shape[0], j->v.shape[1]);
    if (j->k_dim < 1 || j->v_dim < 1 || j->kv_heads < 1 || j->q_heads < 1 || j->q_heads % j->kv_heads)
        return lm_fail(&j->error, "%s: %" PRId64 " query heads are not a multiple of %" PRId64 " KV heads, or a dimension is 0",
                       j->path, j->q_heads, j->kv_heads);
    if (j->tokens > j->length || j->length > INT32_MAX || j->k_dim > INT32_MAX || j->v_dim > INT32_MAX)
        return lm_fail(&j->error, "%s: %" PRId64 " query tokens, but a length of %" PRId64, j->path, j->tokens, j->length);
    return true;
}

static bool read_policy(job *j) {
    ekv_reference_problem *r = &j->shared;
    const char *text = lm_safetensors_metadata(j->file, "policy"), *model = lm_safetensors_metadata(j->file, "gaussian_model");
    static const char *const policies[] = {"full", "topk", "gaussian", "pages"}, *const models[] = {"auto", "single",
                                                                                                    "mixture"};
    double page_size = 16, budget = 1024, first = 0, recent = 0;
    int policy = 0, found = 0;
    if (!read_number(j, "page_size", 1, 1 << 20, true, &page_size) || !read_number(j, "budget", 0, 1e15, true, &budget) ||
        !read_number(j, "first_pages", 0, INT32_MAX, true, &first) ||
        !read_number(j, "recent_tokens", 0, INT32_MAX, true, &recent))
        return false;
    r->page_size = (int32_t)page_size;
    r->budget = (int64_t)budget;
    r->first_pages = (int32_t)first;
    r->recent_tokens = (int32_t)recent;
    r->quantile = 0.995;
    r->margin_fraction = 0.1;
    if (!read_number(j, "quantile", 1e-300, 1 - 1e-16, false, &r->quantile) ||
        !read_number(j, "margin_sigma", 0, 1e300, false, &r->margin_sigma) ||
        !read_number(j, "margin_fraction", 0, 1e300, false, &r->margin_fraction))
        return false;
    j->pages = (j->length + r->page_size - 1) / r->page_size;
    j->policy_name = text ? text : j->has_mask ? "pages" : "full";
    while (policy < 4 && strcmp(policies[policy], j->policy_name) != 0) policy++;
    if (policy == 4)
        return lm_fail(&j->error, "%s: metadata policy is \"%s\": expected full, topk, gaussian or pages", j->path,
                       j->policy_name);
    while (model && found < 3 && strcmp(models[found], model) != 0) found++;
    if (found == 3)
        return lm_fail(&j->error, "%s: metadata gaussian_model is \"%s\": expected auto, single or mixture", j->path, model);
    r->policy = (ekv_policy)policy;
    r->gaussian_model = (ekv_gaussian_model)found;
    if (r->policy == EKV_POLICY_PAGES && !j->has_mask)
        return lm_fail(&j->error, "%s: policy pages needs a tensor pages or page_mask", j->path);
    return true;
}

/* page_mask [tokens, q_heads, pages] as it is, or a list of pages that every row reads. */
static bool read_pages(job *j) {
    lm_tensor list;
    const size_t count = (size_t)(j->tokens * j->q_heads * j->pages);
    j->read = calloc(count + 1, 1);
    if (!j->read) return lm_fail(&j->error, "out of memory");
    if (!j->has_mask) return true;
    if (lm_safetensors_find(j->file, "page_mask", &j->mask)) {
        const bool bytes = strcmp(j->mask.dtype, "U8") == 0 || strcmp(j->mask.dtype, "BOOL") == 0;
        if (!bytes || j->mask.rank != 3 || j->mask.shape[0] != j->tokens || j->mask.shape[1] != j->q_heads ||
            j->mask.shape[2] != j->pages)
            return lm_fail(&j->error, "%s: tensor page_mask: expected U8 or BOOL [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                           j->path, j->tokens, j->q_heads, j->pages);
        memcpy(j->read, j->mask.data, count);
        return true;
    }
    lm_safetensors_find(j->file, "pages", &list);
    const int size = strcmp(list.dtype, "I64") == 0 ? 8 : strcmp(list.dtype, "I32") == 0 ? 4 : 0;
    if (!size || list.rank != 1) return lm_fail(&j->error, "%s: tensor pages: expected I32 or I64 [number of pages]", j->path);
    for (int64_t i = 0; i < list.shape[0]; i++) {
        int64_t page = 0;
        int32_t narrow;
        memcpy(&page, list.data + i * size, (size_t)size);
        memcpy(&narrow, list.data + i * size, sizeof narrow);
        if (size == 4) page = narrow;
        if (page < 0 || page >= j->pages)
            return lm_fail(&j->error, "%s: tensor pages: element %" PRId64 " is %" PRId64 ", not in 0..%" PRId64, j->path, i,
                           page, j->pages - 1);
        for (int64_t row = 0; row < j->tokens * j->q_heads; row++) j->read[row * j->pages + page] = 1;
    }
    return true;
}

static bool read_case(job *j) {
    lm_tensor t;
    if (!read_shapes(j)) return false;
    j->has_mask = lm_safetensors_find(j->file, "page_mask", &t) || lm_safetensors_find(j->file, "pages", &t);
    if (!read_policy(j) || !read_pages(j)) return false;
    if (!read_heads(j, "alpha", 1, 1e6, 1.5, &j->alpha) || !read_heads(j, "scale", -1e300, 1e300, 0, &j->scale) ||
        !read_heads(j, "slopes", -1e300, 1e300, 0, &j->slopes))
        return false;
    for (int64_t h = 0; h < j->q_heads; h++) {
        if (j->scale[h] == 0) j->scale[h] = 1 / sqrt((double)j->k_dim);
        if (j->shared.policy == EKV_POLICY_GAUSSIAN && j->alpha[h] < 1 + 1e-7)
            return lm_fail(&j->error, "%s: policy gaussian needs alpha > 1", j->path);
    }
    return true;
}

/* ---- solving ---- */

static void *take(job *j, int64_t count, size_t size) {
    void *memory = calloc((size_t)count + 1, size);
    if (!memory) lm_fail(&j->error, "out of memory");
    return memory;
}

static bool allocate(job *j) {
    const int64_t rows = j->tokens * j->q_heads, weights = j->weights ? rows * j->length : 0;
    j->out = take(j, rows * j->v_dim, sizeof(double));
    j->tau = take(j, rows, sizeof(double));
    j->tau_full = take(j, rows, sizeof(double));
    j->delta = take(j, rows, sizeof(double));
    j->mass_bound = take(j, rows, sizeof(double));
    j->support = take(j, rows, sizeof(int64_t));
    j->z = take(j, weights, sizeof(double));
    j->p = take(j, weights, sizeof(double));
    j->keys = take(j, j->length, sizeof *j->keys);
    j->values = take(j, j->length, sizeof *j->values);
    j->query = take(j, j->k_dim, sizeof(double));
    return j->out && j->tau && j->tau_full && j->delta && j->mass_bound && j->support && j->z && j->p && j->keys && j->values &&
           j->query;
}

static bool solve_row(job *j, int64_t token, int64_t head) {
    const int64_t row = token * j->q_heads + head, kv_head = head / (j->q_heads / j->kv_heads);
    const size_t size = j->dtype == EKV_F32 ? 4 : 2;
    ekv_dtype q_dtype = EKV_F32;
    ekv_reference_problem problem = j->shared;
    for (int64_t t = 0; t < j->length; t++) {
        j->keys[t] = j->k.data + (size_t)((t * j->kv_heads + kv_head) * j->k_dim) * size;
        j->values[t] = j->v.data + (size_t)((t * j->kv_heads + kv_head) * j->v_dim) * size;
    }
    dtype_of(&j->q, &q_dtype);
    for (int64_t d = 0; d < j->k_dim; d++) j->query[d] = ekv_reference_load(q_dtype, j->q.data, row * j->k_dim + d);
    problem.n = j->length - (j->tokens - 1 - token); /* the query tokens are the last of the sequence */
    problem.k_dim = (int32_t)j->k_dim;
    problem.v_dim = (int32_t)j->v_dim;
    problem.dtype = j->dtype;
    problem.keys = j->keys;
    problem.values = j->values;
    problem.q = j->query;
    problem.alpha = j->alpha[head];
    problem.scale = j->scale[head];
    problem.slope = j->slopes[head];
    uint8_t *pages = j->read + row * j->pages, *mask = malloc((size_t)j->pages + 1);
    if (!mask) return lm_fail(&j->error, "out of memory");
    memcpy(mask, pages, (size_t)j->pages);
    memset(pages, 0, (size_t)j->pages);
    problem.page_mask = mask;
    ekv_reference_result result = {.out = j->out + row * j->v_dim, .pages = pages};
    if (j->weights) {
        result.z = j->z + row * j->length;
        result.p = j->p + row * j->length;
    }
    const bool ok = ekv_reference_row(&problem, &result) == 0;
    free(mask);
    if (!ok) return lm_fail(&j->error, "out of memory");
    for (int64_t t = problem.n; j->weights && t < j->length; t++) j->z[row * j->length + t] = -(double)INFINITY;
    j->tau[row] = result.tau;
    j->tau_full[row] = result.tau_full;
    j->delta[row] = result.delta;
    j->mass_bound[row] = result.mass_bound;
    j->support[row] = result.support;
    return true;
}

static bool write_results(job *j, const char *path) {
    const int64_t rows[2] = {j->tokens, j->q_heads};
    const out_tensor tensors[] = {
        {"out", "F64", 3, {rows[0], rows[1], j->v_dim}, j->out},     {"tau", "F64", 2, {rows[0], rows[1]}, j->tau},
        {"tau_full", "F64", 2, {rows[0], rows[1]}, j->tau_full},     {"delta", "F64", 2, {rows[0], rows[1]}, j->delta},
        {"mass_bound", "F64", 2, {rows[0], rows[1]}, j->mass_bound}, {"support", "I64", 2, {rows[0], rows[1]}, j->support},
        {"z", "F64", 3, {rows[0], rows[1], j->length}, j->z},        {"weights", "F64", 3, {rows[0], rows[1], j->length}, j->p},
        {"pages", "U8", 3, {rows[0], rows[1], j->pages}, j->read},
    };
    out_tensor chosen[9];
    int count = 0;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (j->weights || (strcmp(tensors[i].name, "z") != 0 && strcmp(tensors[i].name, "weights") != 0))
            chosen[count++] = tensors[i];
    char page_size[16];
    snprintf(page_size, sizeof page_size, "%d", j->shared.page_size);
    const out_text texts[] = {{"policy", j->policy_name}, {"page_size", page_size}};
    return tensors_write(path, chosen, count, texts, 2, j->error.text, sizeof j->error.text);
}

static bool run(job *j, const char *out) {
    if (!read_case(j) || !allocate(j)) return false;
    for (int64_t t = 0; t < j->tokens; t++)
        for (int64_t h = 0; h < j->q_heads; h++)
            if (!solve_row(j, t, h)) return false;
    return write_results(j, out);
}

static void release(job *j) {
    void *const all[] = {j->alpha, j->scale,    j->slopes,       j->read,           j->out,
                         j->tau,   j->tau_full, j->delta,        j->mass_bound,     j->support,
                         j->z,     j->p,        (void *)j->keys, (void *)j->values, j->query};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

int command_reference(int argc, char **argv) {
    static const struct option options[] = {{"in", required_argument, NULL, 'i'},
                                            {"out", required_argument, NULL, 'o'},
                                            {"weights", no_argument, NULL, 'w'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *out = NULL;
    job j = {0};
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'i':
            j.path = optarg;
            break;
        case 'o':
            out = optarg;
            break;
        case 'w':
            j.weights = true;
            break;
        case 'h':
            fputs(help, stdout);
            return EXIT_PASSED;
        default:
            return EXIT_USAGE;
        }
    }
    if (!j.path || !out || optind < argc) {
        fputs("entmaxkv: reference needs --in CASE.safetensors and --out OUT.safetensors, and nothing else\n", stderr);
        return EXIT_USAGE;
    }
    lm_safetensors *file = lm_safetensors_open(j.path, &j.error);
    j.file = file;
    const bool ok = file && run(&j, out);
    if (!ok) fprintf(stderr, "entmaxkv: %s\n", j.error.text);
    release(&j);
    lm_safetensors_close(file);
    return ok ? EXIT_PASSED : EXIT_FAILED;
}
