/*
 * The command-line tool: exit statuses, what its JSON holds, and `reference` on cases whose answers are known by hand.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "harness.h"
#include "tool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char output[1 << 20];

START_TEST(commands) {
    EXPECT_TOOL("", "", 2, "Usage: entmaxkv COMMAND");
    EXPECT_TOOL("", "--help", 0, "conform");
    EXPECT_TOOL("", "--version", 0, "entmaxkv 0.");
    EXPECT_TOOL("", "nonsense", 2, "unknown command 'nonsense'");
    EXPECT_TOOL("", "info --nonsense", 2, "nonsense");
    EXPECT_TOOL("", "info extra", 2, "extra");
}
END_TEST

START_TEST(info) {
    EXPECT_TOOL("", "info", 0, "reference  available");
    EXPECT_TOOL("", "info", 0, "threads by default:");
    EXPECT_TOOL("", "info --json", 0, "\"backends\":");
#if EKV_WITH_HWLOC
    EXPECT_TOOL("HWLOC_SYNTHETIC='numa:1 core:2 pu:1'", "info", 0, "placement: of no effect");
    EXPECT_TOOL("HWLOC_SYNTHETIC='numa:2 core:2 pu:1'", "info", 0, "over NUMA nodes 0-1");
    EXPECT_TOOL("HWLOC_SYNTHETIC='numa:3 core:2 pu:1'", "info --json", 0, "\"placement_nodes\":\t\"0-2\"");
#endif
    EXPECT_TOOL("ENTMAXKV_BACKEND=scalar", "info --json", 0, "asked for by ENTMAXKV_BACKEND");
    EXPECT_TOOL("ENTMAXKV_BACKEND=nonsense", "info", 1, "backend \"nonsense\" is not part of this build; available: ");
    EXPECT_TOOL("ENTMAXKV_BACKEND=nonsense", "info --json", 1, "\"error\":");
}
END_TEST

START_TEST(conform) {
    EXPECT_TOOL("", "conform --backend scalar --kernel softmax", 0, "300 passed, 0 failed");
    EXPECT_TOOL("", "conform --backend scalar --kernel softmax --case 17", 0, "1 passed, 0 failed");
    EXPECT_TOOL("", "conform --backend scalar --kernel softmax --case ties --verbose", 0, "content ties");
    EXPECT_TOOL("", "conform --backend scalar --kernel softmax --case ties --list", 0, "content ties");
    EXPECT_TOOL("", "conform --backend scalar --kernel softmax --json", 0, "\"pass\":300");
    EXPECT_TOOL("", "conform --backend scalar --kernel softmax --seed 99", 0, "seed 99");
    EXPECT_TOOL("", "conform --backend scalar --kernel mass --require scalar", 0, "passed");
    EXPECT_TOOL("", "conform --kernel mass --require sse9", 1, "the required backend \"sse9\" is not available");
    EXPECT_TOOL("", "conform --backend sse9", 1, "available: ");
    EXPECT_TOOL("", "conform --kernel nonsense", 2, "unknown kernel");
    EXPECT_TOOL("", "conform --kernel softmax --case nonsense", 1, "no case");
    EXPECT_TOOL("", "conform --seed x", 2, "--seed x");
}
END_TEST

/* ---- reference -------------------------------------------------------------------------------------------------------- */

static char folder[64];

static void write_case(const char *header, const float *data, size_t count) {
    char path[128];
    unsigned char length[8] = {0};
    snprintf(path, sizeof path, "%s/case.safetensors", folder);
    FILE *file = fopen(path, "wb");
    EXPECT(file != NULL, "%s", path);
    for (int i = 0; i < 4; i++)
        length[i] = (unsigned char)(strlen(header) >> (8 * i));
    fwrite(length, 1, sizeof length, file);
    fputs(header, file);
    fwrite(data, sizeof *data, count, file);
    EXPECT(fclose(file) == 0, "%s", path);
}

/* The first double of a tensor of the result. */
static double result_of(const char *name) {
    static unsigned char bytes[1 << 16];
    char path[128], key[64];
    long long begin = -1;
    snprintf(path, sizeof path, "%s/out.safetensors", folder);
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL, "%s", path);
    const size_t size = fread(bytes, 1, sizeof bytes - 1, file);
    fclose(file);
    const size_t header = bytes[0] | (size_t)bytes[1] << 8;
    EXPECT(size > 8 + header && header % 8 == 0, "a file of %zu bytes with a header of %zu", size, header);
    snprintf(key, sizeof key, "\"%s\":{", name);
    const char *entry = strstr((char *)bytes + 8, key), *offsets = entry ? strstr(entry, "\"data_offsets\":[") : NULL;
    EXPECT(offsets && sscanf(offsets + strlen("\"data_offsets\":["), "%lld", &begin) == 1, "there is no tensor %s", name);
    double x;
    memcpy(&x, bytes + 8 + header + begin, sizeof x);
    if (strcmp(name, "support") == 0) {
        int64_t whole;
        memcpy(&whole, &x, sizeof whole);
        return (double)whole;
    }
    return x;
}

static void check_result(const char *name, double expected) {
    EXPECT(fabs(result_of(name) - expected) < 1e-14 || result_of(name) == expected, "%s is %.17g, expected %.17g", name,
           result_of(name), expected);
}

static void run_reference(const char *environment, int expected, const char *text) {
    char arguments[256];
    snprintf(arguments, sizeof arguments, "reference --in %s/case.safetensors --out %s/out.safetensors --weights", folder,
             folder);
    EXPECT_TOOL(environment, arguments, expected, text);
}

#define TENSORS                                                                                                                \
  "\"q\":{\"dtype\":\"F32\",\"shape\":[1,1,1],\"data_offsets\":[0,4]},"                                                        \
  "\"k\":{\"dtype\":\"F32\",\"shape\":[3,1,1],\"data_offsets\":[4,16]},"                                                       \
  "\"v\":{\"dtype\":\"F32\",\"shape\":[3,1,1],\"data_offsets\":[16,28]}"

/* Sparsemax of 0.5, 0.25, -3: tau = (0.75 - 1) / 2, weights 0.625, 0.375, 0. */
START_TEST(reference) {
    static const float data[] = {1.0f, 0.5f, 0.25f, -3.0f, 1.0f, 2.0f, 100.0f};
    snprintf(folder, sizeof folder, "/tmp/ekv-tool-XXXXXX");
    EXPECT(mkdtemp(folder) != NULL, "mkdtemp");
    write_case("{\"__metadata__\":{\"alpha\":\"2\",\"scale\":\"1\"}," TENSORS "}", data, 7);
    run_reference("", 0, "");
    check_result("out", 1.375);
    check_result("tau", -0.125);
    check_result("tau_full", -0.125);
    check_result("support", 2);
    check_result("delta", 0);
    check_result("weights", 0.625);
    check_result("z", 0.5);

    /* The first token alone: its weight is 1, and 0.375 of the mass was not read. */
    static const float listed[] = {1.0f, 0.5f, 0.25f, -3.0f, 1.0f, 2.0f, 100.0f, 0.0f /* page 0 */};
    write_case("{\"__metadata__\":{\"alpha\":\"2\",\"scale\":\"1\",\"page_size\":\"1\"}," TENSORS
               ",\"pages\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[28,32]}}",
               listed, 8);
    run_reference("", 0, "");
    check_result("out", 1);
    check_result("tau", -0.5);
    check_result("tau_full", -0.125);
    check_result("support", 1);
    check_result("delta", 0.375);

    write_case("{\"__metadata__\":{\"alpha\":\"0.5\"}," TENSORS "}", data, 7);
    run_reference("", 1, "metadata alpha is \"0.5\"");
    write_case("{\"__metadata__\":{\"policy\":\"best\"}," TENSORS "}", data, 7);
    run_reference("", 1, "metadata policy is \"best\"");
    write_case("{" TENSORS "}", data, 6);
    run_reference("", 1, "data");
    EXPECT_TOOL("", "reference", 2, "--in");
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    EXPECT(system(command) == 0, "%s", command);
}
END_TEST

int main(void) {
    const test_entry tests[] = {TEST_ENTRY(commands), TEST_ENTRY(info), TEST_ENTRY(conform), TEST_ENTRY(reference)};
    return HARNESS_MAIN("test_tool", tests);
}
