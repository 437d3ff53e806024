/*
 * The example's language model: its logits against the float64 reference with every KV type, one token at a time against
 * chunks, what `record` writes, and files that are cut short, wrong or malicious: a clear error that names the file and the tensor,
 * never a crash.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#  define _GNU_SOURCE
#endif

#include "harness.h"

#include "cpu/reference.h"
#include "decode.h"
#include "file.h"
#include "model.h"
#include "safetensors.h"
#include "setup.h"
#include "tasks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *model_directory(void) {
#ifdef EKV_MODEL_DIR
    return EKV_MODEL_DIR;
#else
    const char *source = getenv("EKV_SOURCE_DIR");
    static char path[1000];
    snprintf(path, sizeof path, "%s/models/nape-entmax-14m", source ? source : ".");
    return path;
#endif
}

/* ---- Logits ----------------------------------------------------------------------------------------------------------- */

enum { REFERENCE_TOKENS = 1024 };

typedef struct reference {
    uint8_t ids[REFERENCE_TOKENS];
    float logits[REFERENCE_TOKENS][LM_VOCABULARY];
} reference;

static reference *read_reference(void) {
    static const int64_t rows[] = {REFERENCE_TOKENS, LM_VOCABULARY};
    char path[1200];
    lm_error error = {""};
    snprintf(path, sizeof path, "%s/reference-logits.safetensors", model_directory());
    lm_safetensors *file = lm_safetensors_open(path, &error);
    EXPECT(file != NULL, "%s", error.text);
    reference *r = malloc(sizeof *r);
    const unsigned char *ids = lm_safetensors_data(file, "ids", "U8", 1, rows, &error);
    const unsigned char *logits = lm_safetensors_data(file, "logits", "F32", 2, rows, &error);
    EXPECT(ids != NULL && logits != NULL, "%s", error.text);
    memcpy(r->ids, ids, sizeof r->ids);
    memcpy(r->logits, logits, sizeof r->logits);
    lm_safetensors_close(file);
    return r;
}

static lm_state *open_state(const lm_model *model, ekv_dtype kv_type, const char *backend) {
    lm_error error = {""};
    lm_state_params params = {kv_type, backend, 2, REFERENCE_TOKENS};
    lm_state *state = lm_state_create(&model->config, &params, &error);
    EXPECT(state != NULL, "%s", error.text);
    return state;
}

static lm_model *open_model(void) {
    lm_error error = {""};
    lm_model *model = lm_model_load(model_directory(), &error);
    EXPECT(model != NULL, "%s", error.text);
    return model;
}

/* The largest difference of n rows; NaN anywhere is infinitely far. */
static double farthest(const float *logits, const reference *r, int64_t first, int64_t n) {
    double most = 0;
    for (int64_t t = 0; t < n; t++) {
        for (int i = 0; i < LM_VOCABULARY; i++) {
            const double difference = fabs((double)logits[t * LM_VOCABULARY + i] - r->logits[first + t][i]);
            if (!(difference <= most)) {
                most = isnan(difference) ? INFINITY : difference;
            }
        }
    }
    return most;
}

static void check_logits(ekv_dtype kv_type, double allowed) {
    reference *r = read_reference();
    lm_model *model = open_model();
    lm_state *state = open_state(model, kv_type, NULL);
    lm_error error = {""};
    const int64_t tokens = case_end(REFERENCE_TOKENS); /* fewer under EKV_TEST_SCALE */
    float *logits = malloc((size_t)(tokens * LM_VOCABULARY) * sizeof *logits);
    case_note("KV %s, %lld tokens", ekv_dtype_name(kv_type), (long long)tokens);
    EXPECT(lm_model_forward(model, state, r->ids, tokens, logits, &error), "%s", error.text);
    const double difference = farthest(logits, r, 0, tokens);
    printf("KV %s on %s: logits within %.3g of the reference\n", ekv_dtype_name(kv_type), ekv_context_backend(state->context),
           difference);
    EXPECT(difference <= allowed, "logits are off by %.6g, allowed %g", difference, allowed);
    free(logits);
    lm_state_free(state);
    lm_model_free(model);
    free(r);
}

START_TEST(logits_with_f32_cache) {
    check_logits(EKV_F32, 2e-4);
}
END_TEST

START_TEST(logits_with_f16_cache) {
    check_logits(EKV_F16, 1e-2);
}
END_TEST

/* bf16 has three bits less than f16. */
START_TEST(logits_with_bf16_cache) {
    check_logits(EKV_BF16, 8e-2);
}
END_TEST

/* Every backend, few tokens: the same bound. */
START_TEST(logits_of_every_backend) {
    backend_set backends;
    backends_open(&backends, 1);
    reference *r = read_reference();
    lm_model *model = open_model();
    float *logits = malloc(96 * LM_VOCABULARY * sizeof *logits);
    for (int b = 0; b < backends.count; b++) {
        case_note("%s", backends.names[b]);
        lm_error error = {""};
        lm_state *state = open_state(model, EKV_F32, backends.names[b]);
        EXPECT(lm_model_forward(model, state, r->ids, 96, logits, &error), "%s", error.text);
        const double difference = farthest(logits, r, 0, 96);
        EXPECT(difference <= 2e-4, "logits are off by %.6g", difference);
        lm_state_free(state);
    }
    free(logits);
    lm_model_free(model);
    free(r);
    backends_close(&backends);
}
END_TEST

/* One at a time, in odd chunks, after a snapshot, after a reset: always the reference's logits. */
START_TEST(steps_chunks_and_snapshots) {
    static const int64_t chunks[] = {1, 1, 5, 1, 17, 30, 1, 9};
    reference *r = read_reference();
    lm_model *model = open_model();
    lm_state *state = open_state(model, EKV_F32, NULL);
    lm_error error = {""};
    float *logits = malloc(64 * LM_VOCABULARY * sizeof *logits);
    lm_snapshot snapshot = {0, NULL};
    for (int round = 0; round < 2; round++) {
        int64_t done = 0;
        for (int i = 0; i < 8; i++) {
            case_note("round %d, token %lld", round, (long long)done);
            if (i == 5) {
                EXPECT(lm_snapshot_take(state, &snapshot, &error), "%s", error.text);
            }
            EXPECT(lm_model_forward(model, state, r->ids + done, chunks[i], logits, &error), "%s", error.text);
            EXPECT(farthest(logits, r, done, chunks[i]) <= 2e-4, "logits are off by %.6g",
                   farthest(logits, r, done, chunks[i]));
            done += chunks[i];
        }
        case_note("round %d, back to token %lld", round, (long long)snapshot.length);
        EXPECT(snapshot.length == 25 && lm_snapshot_restore(state, &snapshot, &error), "length %lld: %s",
               (long long)snapshot.length, error.text);
        EXPECT(lm_model_forward(model, state, r->ids + 25, 40, logits, &error), "%s", error.text);
        EXPECT(farthest(logits, r, 25, 40) <= 2e-4, "logits are off by %.6g", farthest(logits, r, 25, 40));
        lm_snapshot_free(&snapshot);
        EXPECT(lm_state_reset(state, &error), "%s", error.text);
    }
    free(logits);
    lm_state_free(state);
    lm_model_free(model);
    free(r);
}
END_TEST

/* ---- Files ------------------------------------------------------------------------------------------------------------ */

static char directory[64];

static void make_directory(void) {
    snprintf(directory, sizeof directory, "/tmp/entmaxkv-lm-XXXXXX");
    EXPECT(mkdtemp(directory) != NULL, "no temporary directory");
}

static const char *file_path(const char *name) {
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static void write_file(const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(file_path(name), "wb");
    EXPECT(file != NULL && fwrite(bytes, 1, size, file) == size && fclose(file) == 0, "cannot write %s", name);
}

static void remove_directory(void) {
    unlink(file_path("test.safetensors"));
    unlink(file_path("model.safetensors"));
    unlink(file_path("config.json"));
    rmdir(directory);
}

/* A file of a header (its length as given, or its own if -1) and `data` bytes. */
static void write_safetensors(const char *header, int64_t length, size_t data) {
    const size_t size = strlen(header);
    unsigned char *bytes = calloc(8 + size + data, 1);
    const uint64_t announced = length < 0 ? size : (uint64_t)length;
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(announced >> (8 * i));
    }
    memcpy(bytes + 8, header, size);
    for (size_t i = 0; i < data; i++) {
        bytes[8 + size + i] = (unsigned char)(i + 1);
    }
    write_file("test.safetensors", bytes, 8 + size + data);
    free(bytes);
}

typedef struct bad_file {
    const char *header;
    int64_t length; /* as announced; -1: right */
    size_t data;
    const char *names; /* the message must hold this */
} bad_file;

static const bad_file bad_files[] = {
    {"{}", 1000, 0, "test.safetensors"},
    {"{}", INT64_MAX, 0, "test.safetensors"},
    {"{}", 0, 0, "test.safetensors"},
    {"not JSON", -1, 0, "test.safetensors"},
    {"[]", -1, 0, "test.safetensors"},
    {"{\"a\":", -1, 0, "test.safetensors"},
    {"{\"a\":5}", -1, 0, "a"},
    {"{\"a\":{}}", -1, 0, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"data_offsets\":[0,4]}}", -1, 4, "a"},
    {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F99\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4, "F99"},
    {"{\"a\":{\"dtype\":16,\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[-2],\"data_offsets\":[0,4]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[1.5],\"data_offsets\":[0,3]}}", -1, 3, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[\"2\"],\"data_offsets\":[0,4]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[0,4]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", -1, 0, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[9007199254740992,1024],\"data_offsets\":[0,0]}}", -1, 0, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[4,0]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 3, "test.safetensors"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 5, "test.safetensors"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[-4,0]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,1e300]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0]}}", -1, 4, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[2,6]}}", -1, 6, "a"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":["
     "2,6]}}",
     -1, 6, "b"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":["
     "6,10]}}",
     -1, 10, "b"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":["
     "4,8]}}",
     -1, 8, "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", -1, 1, "a"},
};

START_TEST(bad_safetensors_are_refused) {
    make_directory();
    for (size_t i = 0; i < sizeof bad_files / sizeof *bad_files; i++) {
        lm_error error = {""};
        case_note("%s, announced %lld, %zu bytes of data", bad_files[i].header, (long long)bad_files[i].length,
                  bad_files[i].data);
        write_safetensors(bad_files[i].header, bad_files[i].length, bad_files[i].data);
        lm_safetensors *file = lm_safetensors_open(file_path("test.safetensors"), &error);
        EXPECT(file == NULL, "it was opened");
        EXPECT(strstr(error.text, "test.safetensors") != NULL && strstr(error.text, bad_files[i].names) != NULL,
               "the message \"%s\" does not name %s", error.text, bad_files[i].names);
    }
    for (size_t size = 0; size < 9; size++) {
        lm_error error = {""};
        case_note("%zu bytes", size);
        write_file("test.safetensors", "\1\0\0\0\0\0\0\0", size < 8 ? size : 8);
        EXPECT(lm_safetensors_open(file_path("test.safetensors"), &error) == NULL && strlen(error.text) > 0, "it was opened");
    }
    lm_error error = {""};
    EXPECT(lm_safetensors_open(file_path("nowhere"), &error) == NULL && strstr(error.text, "nowhere") != NULL, "%s",
           error.text);
    remove_directory();
}
END_TEST

static void expect_no_tensor(const lm_safetensors *file, const char *name, const char *dtype, int rank, const int64_t *shape,
                             const char *says) {
    lm_error error = {""};
    EXPECT(lm_safetensors_data(file, name, dtype, rank, shape, &error) == NULL, "%s was found", name);
    EXPECT(strstr(error.text, name) != NULL && strstr(error.text, says) != NULL, "\"%s\" does not say %s", error.text, says);
}

START_TEST(tensors_are_what_was_asked_for) {
    static const int64_t shape[] = {2, 3}, other[] = {3, 2}, flat[] = {6}, large[] = {2, 3, 1};
    make_directory();
    lm_error error = {""};
    case_note("a valid file");
    write_safetensors("{\"__metadata__\":{\"x\":\"y\"},\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[12,16]},"
                      "\"w\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                      "\"e\":{\"dtype\":\"F16\",\"shape\":[0,4],\"data_offsets\":[16,16]}}   ",
                      -1, 16);
    lm_safetensors *file = lm_safetensors_open(file_path("test.safetensors"), &error);
    EXPECT(file != NULL, "%s", error.text);
    const unsigned char *w = lm_safetensors_data(file, "w", "F16", 2, shape, &error);
    const unsigned char *b = lm_safetensors_data(file, "b", "F32", 0, NULL, &error);
    EXPECT(w != NULL && b != NULL, "%s", error.text);
    for (int i = 0; i < 16; i++) {
        EXPECT((i < 12 ? w[i] : b[i - 12]) == i + 1, "byte %d is %d", i, i < 12 ? w[i] : b[i - 12]);
    }
    expect_no_tensor(file, "v", "F16", 2, shape, "F16");
    expect_no_tensor(file, "w", "F32", 2, shape, "F32");
    expect_no_tensor(file, "w", "F16", 2, other, "3");
    expect_no_tensor(file, "w", "F16", 1, flat, "6");
    expect_no_tensor(file, "w", "F16", 3, large, "3");
    lm_safetensors_close(file);
    lm_safetensors_close(NULL);
    remove_directory();
}
END_TEST

/* Damaged headers: refused, or every tensor still lies inside the file. */
START_TEST(damaged_headers_do_no_harm) {
    static const char header[] =
        "{\"a\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[0,12]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],"
        "\"data_offsets\":[12,16]}}";
    static const char pool[] = "{}[]\",:0123456789eE+-.\\utrfn\x80\xff \n";
    static const int64_t shape[] = {2, 3}, bytes4[] = {4};
    make_directory();
    int64_t opened = 0;
    FOR_CASES(index, 3000) {
        rng r = case_begin("damaged_headers_do_no_harm", index);
        unsigned char bytes[8 + sizeof header - 1 + 16] = {0};
        memcpy(bytes + 8, header, sizeof header - 1);
        bytes[0] = sizeof header - 1;
        for (int64_t changes = rng_between(&r, 1, 4); changes > 0; changes--) {
            const int64_t at = rng_chance(&r, 0.1) ? rng_between(&r, 0, 7) : rng_between(&r, 8, 8 + (int64_t)sizeof header - 2);
            bytes[at] = rng_chance(&r, 0.3) ? (unsigned char)rng_u64(&r)
                                            : (unsigned char)pool[rng_between(&r, 0, (int64_t)sizeof pool - 2)];
        }
        const size_t size = rng_chance(&r, 0.2) ? (size_t)rng_between(&r, 0, (int64_t)sizeof bytes - 1) : sizeof bytes;
        write_file("test.safetensors", bytes, size);
        lm_error error = {""};
        lm_safetensors *file = lm_safetensors_open(file_path("test.safetensors"), &error);
        if (file == NULL) {
            EXPECT(strlen(error.text) > 0 && strlen(error.text) < sizeof error.text, "no message");
            continue;
        }
        opened++;
        const unsigned char *a = lm_safetensors_data(file, "a", "F16", 2, shape, &error);
        const unsigned char *b = lm_safetensors_data(file, "b", "U8", 1, bytes4, &error);
        unsigned sum = 0; /* read it all: a sanitizer or a fault would tell */
        for (int i = 0; i < 12 && a != NULL; i++) {
            sum += a[i];
        }
        for (int i = 0; i < 4 && b != NULL; i++) {
            sum += b[i];
        }
        EXPECT(sum == 0, "the data is zero, its sum %u", sum);
        lm_safetensors_close(file);
    }
    printf("%lld damaged files could still be read\n", (long long)opened);
    remove_directory();
}
END_TEST

/* JSON nested a hundred thousand deep must not overflow the stack. */
START_TEST(deep_headers_are_refused) {
    make_directory();
    case_note("deep JSON");
    char *deep = malloc(100001);
    memset(deep, '[', 100000);
    deep[100000] = '\0';
    write_safetensors(deep, -1, 0);
    lm_error error = {""};
    EXPECT(lm_safetensors_open(file_path("test.safetensors"), &error) == NULL && strlen(error.text) > 0, "it was opened");
    free(deep);
    remove_directory();
}
END_TEST

/* ---- Whole models ----------------------------------------------------------------------------------------------------- */

static unsigned char *read_model(size_t *size) {
    char path[1200];
    snprintf(path, sizeof path, "%s/model.safetensors", model_directory());
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL, "cannot open %s", path);
    EXPECT(fseek(file, 0, SEEK_END) == 0, "cannot seek");
    *size = (size_t)ftell(file);
    rewind(file);
    unsigned char *bytes = malloc(*size);
    EXPECT(fread(bytes, 1, *size, file) == *size, "cannot read %s", path);
    fclose(file);
    return bytes;
}

static const char good_config[] = "{\"model_type\":\"nape-entmax\",\"vocab_size\":256,\"hidden_size\":512,\"num_layers\":6,"
                                  "\"num_heads\":8,\"num_kv_heads\":4,"
                                  "\"head_dim\":64,\"intermediate_size\":1024,\"conv_kernel\":4,\"alpha\":1.5,\"rms_norm_eps\":"
                                  "1e-05,\"tie_embeddings\":true}";

static void expect_no_model(const char *what, const char *says) {
    lm_error error = {""};
    case_note("%s", what);
    lm_model *model = lm_model_load(directory, &error);
    EXPECT(model == NULL, "it was loaded");
    EXPECT(strstr(error.text, says) != NULL, "the message \"%s\" does not say %s", error.text, says);
}

/* Replaces the first `from` in the header by `to`, of the same length. */
static void patch(unsigned char *bytes, const char *from, const char *to) {
    unsigned char *at = memmem(bytes, 20000, from, strlen(from));
    EXPECT(at != NULL && strlen(from) == strlen(to), "no %s in the header", from);
    memcpy(at, to, strlen(to));
}

START_TEST(bad_models_are_refused) {
    make_directory();
    size_t size;
    unsigned char *bytes = read_model(&size);
    expect_no_model("an empty directory", "config.json");
    write_file("config.json", good_config, strlen(good_config));
    expect_no_model("no weights", "model.safetensors");
    write_file("model.safetensors", bytes, size / 2);
    expect_no_model("half of the weights", "model.safetensors");
    write_file("model.safetensors", bytes, size - 1);
    expect_no_model("one byte short", "model.safetensors");
    patch(bytes, "layers.0.o_proj", "layers.0.x_proj");
    write_file("model.safetensors", bytes, size);
    expect_no_model("a tensor under another name", "layers.0.o_proj");
    patch(bytes, "layers.0.x_proj", "layers.0.o_proj");
    patch(bytes, "\"shape\": [256, 512]", "\"shape\": [512, 256]");
    write_file("model.safetensors", bytes, size);
    expect_no_model("a transposed embedding", "embed.weight");
    patch(bytes, "\"shape\": [512, 256]", "\"shape\": [256, 512]");
    patch(bytes, "\"F16\"", "\"I16\"");
    write_file("model.safetensors", bytes, size);
    expect_no_model("another dtype", "I16");
    patch(bytes, "\"I16\"", "\"F16\"");
    write_file("model.safetensors", bytes, size);
    lm_error error = {""};
    case_note("the model as it is");
    lm_model *model = lm_model_load(directory, &error);
    EXPECT(model != NULL, "%s", error.text);
    lm_model_free(model);
    free(bytes);
    remove_directory();
}
END_TEST

START_TEST(bad_configurations_are_refused) {
    static const char *const changes[][3] = {
        {"\"num_heads\":8", "\"num_heads\":7", "7"},
        {"\"num_heads\":8", "\"num_heads\":0", "num_heads"},
        {"\"alpha\":1.5", "\"alpha\":0.5", "alpha"},
        {"\"alpha\":1.5", "\"alpha\":\"x\"", "alpha"},
        {"\"head_dim\":64", "\"head_dim\":-4", "head_dim"},
        {"\"num_layers\":6", "\"num_layers\":1e9", "num_layers"},
        {"\"conv_kernel\":4", "\"conv_kernel\":0", "conv"},
        {"\"hidden_size\":512", "\"hidden_size\":1.5", "hidden_size"},
        {"\"num_kv_heads\":4,", "", "num_kv_heads"},
        {"\"vocab_size\":256", "\"vocab_size\":257", "vocab"},
        {"\"rms_norm_eps\":1e-05", "\"rms_norm_eps\":-1", "rms_norm_eps"},
    };
    make_directory();
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        char text[600];
        const char *at = strstr(good_config, changes[i][0]);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good_config), good_config, changes[i][1],
                 at + strlen(changes[i][0]));
        write_file("config.json", text, strlen(text));
        expect_no_model(text, changes[i][2]);
    }
    write_file("config.json", good_config, strlen(good_config) / 2);
    expect_no_model("half a configuration", "config.json");
    write_file("config.json", "", 0);
    expect_no_model("an empty configuration", "config.json");
    remove_directory();
}
END_TEST

/* ---- Recording -------------------------------------------------------------------------------------------------------- */

enum { RECORDED = 300, KEPT = 5, TEXT_OFFSET = 7 };

/* The text that is recorded: the reference's, cut into two files. */
static void write_texts(const reference *r) {
    write_file("one.txt", r->ids, 101);
    write_file("two.txt", r->ids + 101, RECORDED + TEXT_OFFSET - 101);
}

static lm_options record_options(const char *one, const char *two, const char *out, ekv_dtype kv_type) {
    lm_options options = {.task = LM_RECORD, .texts = {one, two}, .text_count = 2, .kv_type = kv_type, .threads = 2};
    options.length = RECORDED;
    options.queries = KEPT;
    options.offset = TEXT_OFFSET;
    options.out = out;
    return options;
}

/* A layer's keys or values against the cache of another state that ran over the same text: the same bits. */
static void check_rows(const lm_state *state, int32_t layer, bool values, const unsigned char *recorded) {
    ekv_kv kv;
    ekv_cache_layer(state->cache, layer, &kv, NULL);
    const int32_t *table = ekv_cache_block_table(state->cache, state->sequence);
    for (int64_t t = 0; t < RECORDED; t++) {
        for (int32_t h = 0; h < kv.kv_heads; h++) {
            const int64_t page = table[t / kv.page_size], slot = t % kv.page_size, row = t * kv.kv_heads + h;
            const int64_t k = page * kv.k_block_stride + slot * kv.k_token_stride + h * kv.k_head_stride;
            const int64_t v = page * kv.v_block_stride + slot * kv.v_token_stride + h * kv.v_head_stride;
            const char *cached = values ? (const char *)kv.v + 2 * v : (const char *)kv.k + 2 * k;
            const size_t bytes = 2 * (size_t)kv.k_dim;
            EXPECT(memcmp(recorded + (size_t)row * bytes, cached, bytes) == 0, "layer %d, token %lld, head %d: other %s", layer,
                   (long long)t, h, values ? "values" : "keys");
        }
    }
}

/* Attention of a recorded layer for its last position in double precision, against what the model's attention gave there. */
static void check_attended(const lm_state *state, const unsigned char *k, const unsigned char *v, const unsigned char *q,
                           const unsigned char *slopes, const float *attended) {
    const int32_t dim = state->config.head_dim, group = state->config.heads / state->config.kv_heads;
    static const void *keys[RECORDED], *values[RECORDED];
    for (int32_t h = 0; h < state->config.heads; h++) {
        double query[64], out[64];
        float slope;
        EXPECT(dim == 64, "heads of %d", dim);
        for (int32_t t = 0; t < RECORDED; t++) {
            const size_t row = 2 * (size_t)((t * state->config.kv_heads + h / group) * dim);
            keys[t] = k + row;
            values[t] = v + row;
        }
        for (int32_t d = 0; d < dim; d++) {
            query[d] = ekv_reference_load(EKV_F32, q, ((KEPT - 1) * state->config.heads + h) * dim + d);
        }
        memcpy(&slope, slopes + 4 * h, sizeof slope);
        const ekv_reference_problem problem = {.n = RECORDED, .page_size = 16, .k_dim = dim, .v_dim = dim, .dtype = EKV_F16,
                                               .keys = keys, .values = values, .q = query, .alpha = 1.5, .scale = 0.125,
                                               .slope = (double)slope, .policy = EKV_POLICY_FULL};
        ekv_reference_result result = {.out = out};
        EXPECT(ekv_reference_row(&problem, &result) == 0, "out of memory");
        for (int32_t d = 0; d < dim; d++) {
            const double difference = fabs(out[d] - (double)attended[h * dim + d]);
            EXPECT(difference <= 1e-5, "head %d, element %d is %.9g, the model had %.9g", h, d, out[d],
                   (double)attended[h * dim + d]);
        }
    }
}

START_TEST(recorded_tensors_are_the_models) {
    reference *r = read_reference();
    lm_model *model = open_model();
    lm_state *state = open_state(model, EKV_F16, NULL);
    lm_error error = {""};
    char one[1200], out[1200];
    make_directory();
    write_texts(r);
    snprintf(one, sizeof one, "%s", file_path("one.txt"));
    snprintf(out, sizeof out, "%s", file_path("test.safetensors"));
    const lm_options options = record_options(one, file_path("two.txt"), out, EKV_F16);
    EXPECT(lm_record(model, &options, &error), "%s", error.text);
    EXPECT(lm_model_forward(model, state, r->ids + TEXT_OFFSET, RECORDED, NULL, &error), "%s", error.text);

    lm_safetensors *file = lm_safetensors_open(out, &error);
    EXPECT(file != NULL, "%s", error.text);
    const int64_t rows[3] = {RECORDED, 4, 64}, queries[3] = {KEPT, 8, 64}, heads[1] = {8};
    const unsigned char *slopes = lm_safetensors_data(file, "slopes", "F32", 1, heads, &error);
    EXPECT(slopes != NULL, "%s", error.text);
    EXPECT(memcmp(slopes, model->weights.slopes, 8 * sizeof(float)) == 0, "other slopes");
    for (int32_t layer = 0; layer < 6; layer++) {
        char k_name[32], v_name[32], q_name[32];
        snprintf(k_name, sizeof k_name, "layers.%d.k", layer);
        snprintf(v_name, sizeof v_name, "layers.%d.v", layer);
        snprintf(q_name, sizeof q_name, "layers.%d.q", layer);
        const unsigned char *k = lm_safetensors_data(file, k_name, "F16", 3, rows, &error);
        const unsigned char *v = lm_safetensors_data(file, v_name, "F16", 3, rows, &error);
        const unsigned char *q = lm_safetensors_data(file, q_name, "F32", 3, queries, &error);
        EXPECT(k != NULL && v != NULL && q != NULL, "%s", error.text);
        check_rows(state, layer, false, k);
        check_rows(state, layer, true, v);
        if (layer == 5) { /* what the state still has of the last chunk is the last layer's */
            const int64_t last = (RECORDED - 1) % LM_CHUNK;
            check_attended(state, k, v, q, slopes, state->attended + last * lm_q_width(&model->config));
        }
    }
    EXPECT(strcmp(lm_safetensors_metadata(file, "alpha"), "1.5") == 0, "alpha %s", lm_safetensors_metadata(file, "alpha"));
    EXPECT(strcmp(lm_safetensors_metadata(file, "scale"), "0.125") == 0, "scale %s", lm_safetensors_metadata(file, "scale"));
    EXPECT(strcmp(lm_safetensors_metadata(file, "layers"), "6") == 0, "layers %s", lm_safetensors_metadata(file, "layers"));
    lm_safetensors_close(file);
    lm_state_free(state);
    lm_model_free(model);
    free(r);
    unlink(file_path("one.txt"));
    unlink(file_path("two.txt"));
    remove_directory();
}
END_TEST

/* A text is continued by the next file, never by itself. */
START_TEST(short_texts_are_refused) {
    reference *r = read_reference();
    lm_model *model = open_model();
    lm_error error = {""};
    char one[1200], two[1200];
    make_directory();
    write_texts(r);
    snprintf(one, sizeof one, "%s", file_path("one.txt"));
    snprintf(two, sizeof two, "%s", file_path("two.txt"));
    lm_options options = record_options(one, two, file_path("test.safetensors"), EKV_F32);
    options.length++;
    EXPECT(!lm_record(model, &options, &error) && strstr(error.text, "the text has 307 bytes, too few for --length 301 from --offset 7"),
           "%s", error.text);
    options.offset = INT64_MAX;
    EXPECT(!lm_record(model, &options, &error) && strstr(error.text, "too few"), "%s", error.text);
    options.offset = 0;
    options.texts[1] = "/nonexistent/file";
    EXPECT(!lm_record(model, &options, &error) && strstr(error.text, "/nonexistent/file"), "%s", error.text);
    options.texts[1] = two;
    options.out = "/nonexistent/file";
    EXPECT(!lm_record(model, &options, &error) && strstr(error.text, "cannot write /nonexistent/file"), "%s", error.text);
    lm_model_free(model);
    free(r);
    unlink(one);
    unlink(two);
    remove_directory();
}
END_TEST

/* ---- Bases ------------------------------------------------------------------------------------------------------------ */

/* The logits of the last of n bytes, decoded with a policy, and the sketch bytes that the last layer's step read. */
static int64_t decode_last(const lm_model *model, const lm_options *options, const lm_file *text, int64_t n, ekv_policy policy,
                           float *logits) {
    lm_error error = {""};
    lm_state *state = lm_setup_state(model, options, n, &error);
    EXPECT(state != NULL && lm_prefill(model, state, text->bytes, n - 1, logits, NULL, NULL, &error), "%s", error.text);
    lm_meter meter = {0};
    lm_state_use(state, policy, 0, &meter);
    EXPECT(lm_decode_step(model, state, text->bytes[n - 1], logits, &error), "%s", error.text);
    int64_t bytes = 0;
    for (int32_t h = 0; h < model->config.heads; h++) {
        bytes += state->reports[h].bytes_sketch;
    }
    lm_state_free(state);
    return bytes;
}

/* calibrate writes bases, --basis loads them: the same logits as full to the bit, and sketches where no basis is found yet. */
START_TEST(calibrated_bases_serve) {
    enum { TOKENS = 1500 };
    lm_model *model = open_model();
    lm_error error = {""};
    make_directory();
    lm_options options = {.task = LM_CALIBRATE,
                          .model = model_directory(),
                          .kv_type = EKV_F16,
                          .threads = 2,
                          .offset = 5000,
                          .length = LM_CALIBRATION_LEAST + 100,
                          .out = file_path("test.safetensors")};
    case_note("calibrate");
    EXPECT(lm_calibrate(model, &options, &error), "%s", error.text);
    lm_file text;
    EXPECT(lm_setup_text(&options, &text, &error), "%s", error.text);
    static float full[LM_VOCABULARY], found[LM_VOCABULARY], loaded[LM_VOCABULARY];
    case_note("%d tokens", TOKENS);
    decode_last(model, &options, &text, TOKENS, EKV_POLICY_FULL, full);
    const int64_t without = decode_last(model, &options, &text, TOKENS, EKV_POLICY_CERTIFIED, found);
    options.basis = options.out;
    const int64_t with = decode_last(model, &options, &text, TOKENS, EKV_POLICY_CERTIFIED, loaded);
    EXPECT(memcmp(full, found, sizeof full) == 0 && memcmp(full, loaded, sizeof full) == 0, "certified differs from full");
    EXPECT(without == 0 && with > 0, "%lld bytes of sketches without a file, %lld with it", (long long)without, (long long)with);
    lm_file_free(&text);
    lm_model_free(model);
    remove_directory();
}
END_TEST

static void expect_no_bases(const lm_model *model, const char *says) {
    const lm_options options = {.kv_type = EKV_F16, .threads = 1, .basis = file_path("test.safetensors")};
    lm_error error = {""};
    EXPECT(lm_setup_state(model, &options, 64, &error) == NULL, "it was loaded");
    EXPECT(strstr(error.text, "test.safetensors") != NULL && strstr(error.text, says) != NULL, "the message \"%s\" does not say %s",
           error.text, says);
}

START_TEST(bad_bases_are_refused) {
    lm_model *model = open_model();
    make_directory();
    case_note("no file");
    expect_no_bases(model, "No such file");
    case_note("another format");
    write_safetensors("{\"layer.0\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", -1, 4);
    expect_no_bases(model, "not a file of bases");
    case_note("another size");
    write_safetensors("{\"__metadata__\":{\"format\":\"entmaxkv-basis\"},\"layer.0\":{\"dtype\":\"U8\",\"shape\":[4],"
                      "\"data_offsets\":[0,4]}}",
                      -1, 4);
    expect_no_bases(model, "layer.0");
    case_note("the right size, but no basis");
    char header[300];
    const int bytes = 16 + 4 * (16 + 8 + 240 + 20 * (4 + 4 + 64) + 64 * 4 + 64 * 64 * 2);
    snprintf(header, sizeof header,
             "{\"__metadata__\":{\"format\":\"entmaxkv-basis\"},\"layer.0\":{\"dtype\":\"U8\",\"shape\":[%d],"
             "\"data_offsets\":[0,%d]}}",
             bytes, bytes);
    write_safetensors(header, -1, (size_t)bytes);
    expect_no_bases(model, "tensor layer.0: data begins with");
    lm_model_free(model);
    remove_directory();
}
END_TEST

START_TEST(f16_conversion_is_exact) {
    unsigned char source[65536][2];
    static float target[65536];
    for (int h = 0; h < 65536; h++) {
        source[h][0] = (unsigned char)h;
        source[h][1] = (unsigned char)(h >> 8);
    }
    lm_floats_from_f16(source[0], 65536, target);
    for (int h = 0; h < 65536; h++) {
        const float expected = f16_to_float((uint16_t)h);
        EXPECT(isnan(expected) ? isnan(target[h]) : target[h] == expected, "%04x is %.9g, expected %.9g", h, target[h],
               expected);
    }
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {TEST_ENTRY(logits_with_f32_cache),          TEST_ENTRY(logits_with_f16_cache),
                                TEST_ENTRY(logits_with_bf16_cache),         TEST_ENTRY(logits_of_every_backend),
                                TEST_ENTRY(steps_chunks_and_snapshots),     TEST_ENTRY(bad_safetensors_are_refused),
                                TEST_ENTRY(tensors_are_what_was_asked_for), TEST_ENTRY(damaged_headers_do_no_harm),
                                TEST_ENTRY(deep_headers_are_refused),       TEST_ENTRY(bad_models_are_refused),
                                TEST_ENTRY(bad_configurations_are_refused), TEST_ENTRY(recorded_tensors_are_the_models),
                                TEST_ENTRY(short_texts_are_refused),        TEST_ENTRY(f16_conversion_is_exact),
                                TEST_ENTRY(calibrated_bases_serve),         TEST_ENTRY(bad_bases_are_refused)};
    return HARNESS_MAIN(argv[0], tests);
}
