/*
 * entmaxkv info: the library's version and build, and what it sees of this machine.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "command.h"
#include "cuda/cuda.h"

#include "dispatch/internal.h"
#include "entmaxkv/kernels.h"

#include <cjson/cJSON.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if EKV_WITH_HWLOC
#  include <hwloc.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#  include <sys/auxv.h>
#endif

static const char help[] = "Usage: entmaxkv info [--json]\n"
                           "Shows the version, the build's options, the processor's instruction sets, the\n"
                           "backends (which there are, which was chosen and why, what the others lack), the\n"
                           "default number of threads, caches, NUMA nodes and GPUs.\n"
                           "\n"
                           "Exit status: 0 success; 1 when the environment variable ENTMAXKV_BACKEND names a\n"
                           "backend that is unknown or cannot run here; 2 wrong command line.\n";

/* ---- what there is ---- */

static cJSON *build_options(void) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddBoolToObject(json, "openmp", EKV_WITH_OPENMP);
    cJSON_AddBoolToObject(json, "sleef", EKV_WITH_SLEEF);
    cJSON_AddBoolToObject(json, "hwloc", EKV_WITH_HWLOC);
#if EKV_HAVE_CUDA
    cJSON_AddTrueToObject(json, "cuda");
#else
    cJSON_AddFalseToObject(json, "cuda");
#endif
#if defined(__clang__)
    cJSON_AddStringToObject(json, "compiler", "clang " __clang_version__);
#elif defined(__GNUC__)
    cJSON_AddStringToObject(json, "compiler", "gcc " __VERSION__);
#endif
    return json;
}

static void add_feature(cJSON *features, const char *name, bool present) {
    if (present) cJSON_AddItemToArray(features, cJSON_CreateString(name));
}

/* The instruction sets that backends are made of, as the processor has them (whether the operating system saves their registers
 * is the backends' to say). */
static cJSON *cpu_features(void) {
    cJSON *features = cJSON_CreateArray();
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
#  define X86_FEATURE(name) add_feature(features, name, __builtin_cpu_supports(name))
    X86_FEATURE("sse4.2");
    X86_FEATURE("avx");
    X86_FEATURE("avx2");
    X86_FEATURE("fma");
    X86_FEATURE("avx512f");
    X86_FEATURE("avx512bw");
    X86_FEATURE("avx512dq");
    X86_FEATURE("avx512vl");
#  if !defined(__clang__)
    X86_FEATURE("avx512vnni");
    X86_FEATURE("avx512bf16");
#  endif
#  undef X86_FEATURE
#elif defined(__aarch64__)
    add_feature(features, "neon", true);
#  if defined(__linux__)
    const unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
    add_feature(features, "fphp", caps >> 9 & 1); /* bits of the kernel's interface, asm/hwcap.h */
    add_feature(features, "asimdhp", caps >> 10 & 1);
    add_feature(features, "asimddp", caps >> 20 & 1);
    add_feature(features, "sve", caps >> 22 & 1);
    add_feature(features, "sve2", caps2 >> 1 & 1);
    add_feature(features, "bf16", caps2 >> 14 & 1);
#  endif
#endif
    return features;
}

static const char *architecture(void) {
#if defined(__x86_64__)
    return "x86_64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "other";
#endif
}

static cJSON *backends(void) {
    cJSON *list = cJSON_CreateArray();
    ekv_backend_info info = {.size = sizeof info};
    for (int32_t i = 0; ekv_backend(i, &info) == EKV_OK; i++) {
        cJSON *entry = cJSON_CreateObject();
        cJSON_AddStringToObject(entry, "name", info.name);
        cJSON_AddBoolToObject(entry, "available", info.available);
        cJSON_AddBoolToObject(entry, "worthwhile", info.worthwhile);
        cJSON_AddStringToObject(entry, "note", info.note);
        cJSON_AddItemToArray(list, entry);
    }
    return list;
}

#if EKV_WITH_HWLOC
static cJSON *caches(hwloc_topology_t topology) {
    cJSON *list = cJSON_CreateArray();
    static const hwloc_obj_type_t types[] = {HWLOC_OBJ_L1CACHE, HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L4CACHE};
    for (int level = 0; level < 4; level++) {
        const int count = hwloc_get_nbobjs_by_type(topology, types[level]);
        if (count <= 0) continue;
        const hwloc_obj_t cache = hwloc_get_obj_by_type(topology, types[level], 0);
        cJSON *entry = cJSON_CreateObject();
        cJSON_AddNumberToObject(entry, "level", level + 1);
        cJSON_AddNumberToObject(entry, "count", count);
        cJSON_AddNumberToObject(entry, "bytes", (double)cache->attr->cache.size);
        cJSON_AddItemToArray(list, entry);
    }
    return list;
}

static cJSON *nodes(hwloc_topology_t topology) {
    cJSON *list = cJSON_CreateArray();
    for (hwloc_obj_t node = NULL; (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node));) {
        cJSON *entry = cJSON_CreateObject();
        char *cpus = NULL;
        cJSON_AddNumberToObject(entry, "node", node->os_index);
        cJSON_AddNumberToObject(entry, "bytes", (double)node->attr->numanode.local_memory);
        if (hwloc_bitmap_list_asprintf(&cpus, node->cpuset) >= 0) cJSON_AddStringToObject(entry, "cpus", cpus);
        free(cpus);
        cJSON_AddItemToArray(list, entry);
    }
    return list;
}

static void add_topology(cJSON *json) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) return;
    if (!hwloc_topology_load(topology)) {
        const hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
        const char *model = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;
        if (model) cJSON_AddStringToObject(json, "cpu_model", model);
        cJSON_AddNumberToObject(json, "cores", hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE));
        cJSON_AddNumberToObject(json, "hardware_threads", hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU));
        cJSON_AddItemToObject(json, "caches", caches(topology));
        cJSON_AddItemToObject(json, "numa_nodes", nodes(topology));
    }
    hwloc_topology_destroy(topology);
}
#else
static void add_topology(cJSON *json) { (void)json; }
#endif

/* All of it.  *message is why no context could be created, or empty. */
static void add_gpus(cJSON *json) {
    cJSON *gpus = cJSON_AddArrayToObject(json, "gpus");
    ekv_cuda_gpu gpu;
    for (int i = 0; ekv_cuda_describe(i, &gpu); i++) {
        char capability[32];
        cJSON *entry = cJSON_CreateObject();
        snprintf(capability, sizeof capability, "%d.%d", gpu.major, gpu.minor);
        cJSON_AddNumberToObject(entry, "device", i);
        cJSON_AddStringToObject(entry, "name", gpu.name);
        cJSON_AddStringToObject(entry, "compute_capability", capability);
        cJSON_AddNumberToObject(entry, "multiprocessors", gpu.multiprocessors);
        cJSON_AddNumberToObject(entry, "bytes", (double)gpu.bytes);
        cJSON_AddItemToArray(gpus, entry);
    }
}

static cJSON *collect(char *message, size_t size) {
    char version[32];
    ekv_context *context = NULL;
    cJSON *json = cJSON_CreateObject();
    const int v = ekv_version();
    snprintf(version, sizeof version, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    cJSON_AddStringToObject(json, "version", version);
    cJSON_AddNumberToObject(json, "kernels_version", EKV_KERNELS_VERSION);
    cJSON_AddItemToObject(json, "build", build_options());
    cJSON_AddStringToObject(json, "architecture", architecture());
    cJSON_AddItemToObject(json, "cpu_features", cpu_features());
    cJSON_AddItemToObject(json, "backends", backends());
    message[0] = 0;
    if (ekv_context_create(NULL, &context, message, size) == EKV_OK) {
        cJSON_AddStringToObject(json, "backend", ekv_context_backend(context));
        cJSON_AddStringToObject(json, "backend_reason", ekv_context_backend_reason(context));
        cJSON_AddNumberToObject(json, "threads", ekv_context_threads(context));
        char nodes[256];
        if (ekv_placement_nodes(context, nodes, sizeof nodes) > 0) cJSON_AddStringToObject(json, "placement_nodes", nodes);
        ekv_context_destroy(context);
    } else {
        cJSON_AddStringToObject(json, "error", message);
    }
    add_topology(json);
    add_gpus(json);
    return json;
}

/* ---- text ---- */

static const char *text_of(const cJSON *json, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, name));
    return text ? text : "";
}

static double number_of(const cJSON *json, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);
    return cJSON_IsNumber(item) ? item->valuedouble : 0.0;
}

static void print_bytes(double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    int unit = 0;
    for (; bytes >= 1024.0 && unit < 3; unit++) bytes /= 1024.0;
    printf("%.4g %s", bytes, units[unit]);
}

static void print_backends(const cJSON *json) {
    const cJSON *entry, *list = cJSON_GetObjectItemCaseSensitive(json, "backends");
    puts("backends:");
    cJSON_ArrayForEach(entry, list) {
        const bool available = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(entry, "available"));
        const bool chosen = strcmp(text_of(entry, "name"), text_of(json, "backend")) == 0;
        printf("  %-10s %s", text_of(entry, "name"), !available ? "not available" : chosen ? "available, chosen" : "available");
        if (chosen) printf(": %s", text_of(json, "backend_reason"));
        if (text_of(entry, "note")[0]) printf(" (%s)", text_of(entry, "note"));
        putchar('\n');
    }
}

static void print_text(const cJSON *json) {
    const cJSON *item, *build = cJSON_GetObjectItemCaseSensitive(json, "build");
    printf("EntmaxKV %s\n", text_of(json, "version"));
    printf("build: %s;", text_of(build, "compiler"));
    cJSON_ArrayForEach(item, build) if (cJSON_IsBool(item)) printf(" %s %s", item->string, cJSON_IsTrue(item) ? "yes" : "no");
    printf("\nprocessor: %s%s%s;", architecture(), text_of(json, "cpu_model")[0] ? ", " : "", text_of(json, "cpu_model"));
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "cpu_features")) printf(" %s", item->valuestring);
    putchar('\n');
    print_backends(json);
    if (!text_of(json, "error")[0]) printf("threads by default: %.0f\n", number_of(json, "threads"));
    if (number_of(json, "cores") > 0)
        printf("cores: %.0f, hardware threads: %.0f\n", number_of(json, "cores"), number_of(json, "hardware_threads"));
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "caches")) {
        printf("L%.0f cache: %.0f x ", number_of(item, "level"), number_of(item, "count"));
        print_bytes(number_of(item, "bytes"));
        putchar('\n');
    }
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "numa_nodes")) {
        printf("NUMA node %.0f: cpus %s, ", number_of(item, "node"), text_of(item, "cpus"));
        print_bytes(number_of(item, "bytes"));
        putchar('\n');
    }
    const char *nodes = text_of(json, "placement_nodes");
    if (strpbrk(nodes, ",-"))
        printf("placement: first touch and interleaving spread a managed cache over NUMA nodes %s\n", nodes);
    else if (nodes[0])
        printf("placement: of no effect on a managed cache, all of whose threads are on NUMA node %s\n", nodes);
    const cJSON *gpus = cJSON_GetObjectItemCaseSensitive(json, "gpus");
    const bool cuda = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(build, "cuda"));
    if (cJSON_GetArraySize(gpus) == 0) puts(cuda ? "GPUs: none" : "GPUs: not looked for, since this build has no CUDA");
    cJSON_ArrayForEach(item, gpus) {
        printf("GPU %.0f: %s, compute capability %s, %.0f multiprocessors, ", number_of(item, "device"), text_of(item, "name"),
               text_of(item, "compute_capability"), number_of(item, "multiprocessors"));
        print_bytes(number_of(item, "bytes"));
        putchar('\n');
    }
}

int command_info(int argc, char **argv) {
    static const struct option options[] = {
        {"json", no_argument, NULL, 'j'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
    char message[512];
    bool as_json = false;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (option == 'h') {
            fputs(help, stdout);
            return EXIT_PASSED;
        }
        if (option != 'j') return EXIT_USAGE;
        as_json = true;
    }
    if (optind < argc) {
        fprintf(stderr, "entmaxkv: info takes no argument '%s'\n", argv[optind]);
        return EXIT_USAGE;
    }
    cJSON *json = collect(message, sizeof message);
    if (as_json)
        command_print_json(json, true);
    else
        print_text(json);
    if (!as_json) cJSON_Delete(json);
    if (message[0]) fprintf(stderr, "entmaxkv: %s\n", message);
    return message[0] ? EXIT_FAILED : EXIT_PASSED;
}
