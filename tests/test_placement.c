/*
 * Placement of the managed cache on NUMA nodes: the nodes chosen on synthetic machines (hwloc), that contents, results and reports are
 * the same with every placement, that first touch runs on the context's threads and takes all memory where there are several nodes and
 * nothing elsewhere, that interleaving sets the policy of the cache's memory alone and takes it back, and that older callers' structs
 * keep working.
 *
 * A machine with one node is made to look like one with two by hwloc's own variables: HWLOC_SYNTHETIC, and HWLOC_THISSYSTEM=1 for
 * calls that then go to the real system.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#if defined(__linux__)
#  define _GNU_SOURCE
#endif
#include "harness.h"

#include "dispatch/internal.h"

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#  include <sys/mman.h>
#endif
#if EKV_WITH_HWLOC
#  include <hwloc.h>
#endif

enum { TOKENS = 9000, LAYERS = 2, HEADS = 2, GROUP = 2, DIM = 32, PAGE = 16, BLOCKS = 600 };

static const ekv_placement placements[] = {EKV_PLACEMENT_DEFAULT, EKV_PLACEMENT_FIRST_TOUCH, EKV_PLACEMENT_INTERLEAVE};

static void machine_is(const char *synthetic, bool this_system) {
    if (synthetic) {
        setenv("HWLOC_SYNTHETIC", synthetic, 1);
    } else {
        unsetenv("HWLOC_SYNTHETIC");
    }
    setenv("HWLOC_THISSYSTEM", "1", 1);
    if (!this_system) {
        unsetenv("HWLOC_THISSYSTEM");
    }
}

static ekv_cache_params shape_of(ekv_placement placement) {
    ekv_cache_params params = ekv_cache_params_default();
    params.layers = LAYERS;
    params.kv_heads = HEADS;
    params.k_dim = params.v_dim = DIM;
    params.page_size = PAGE;
    params.blocks = BLOCKS;
    params.statistics |= EKV_STATISTICS_SKETCH;
    params.placement = placement;
    return params;
}

/* ---- Which nodes ------------------------------------------------------------------------------------------------------ */

#if EKV_WITH_HWLOC
static void check_nodes(hwloc_topology_t topology, const char *what, const char *mask, const char *expected) {
    hwloc_bitmap_t process = hwloc_bitmap_alloc(), nodes = hwloc_bitmap_alloc(), right = hwloc_bitmap_alloc();
    hwloc_bitmap_list_sscanf(process, mask ? mask : "");
    hwloc_bitmap_list_sscanf(right, expected);
    hwloc_bitmap_set(nodes, 63); /* what was there goes */
    const int count = ekv_nodes_of(topology, mask ? process : NULL, nodes);
    char *got = NULL;
    hwloc_bitmap_list_asprintf(&got, nodes);
    EXPECT(hwloc_bitmap_isequal(nodes, right) && count == hwloc_bitmap_weight(right), "%s, bound to %s: %d nodes, %s, expected %s",
           what, mask ? mask : "all", count, got, expected);
    free(got);
    hwloc_bitmap_free(process);
    hwloc_bitmap_free(nodes);
    hwloc_bitmap_free(right);
}

START_TEST(nodes_of_synthetic_machines) {
    static const struct {
        const char *machine, *mask, *nodes;
    } cases[] = {
        {"package:1 core:4 pu:2", NULL, "0"},
        {"package:2 [numa] core:4 pu:2", NULL, "0-1"},
        {"package:2 [numa] core:4 pu:2", "0-7", "0"},
        {"package:2 [numa] core:4 pu:2", "8-15", "1"},
        {"package:2 [numa] core:4 pu:2", "7-8", "0-1"},
        {"package:2 [numa] core:4 pu:2", "100", ""}, /* CPUs that the machine does not have */
        {"package:2 die:4 [numa] core:2 pu:1", NULL, "0-7"},
        {"package:2 die:4 [numa] core:2 pu:1", "2-5,14", "1-2,7"},
        /* A second kind of memory: at the same CPUs, at a package, at the whole machine (hwloc numbers the nodes, innermost first). */
        {"package:2 [numa] [numa] core:4 pu:1", NULL, "0,2"},
        {"package:2 [numa] die:2 [numa] core:2 pu:1", NULL, "0-1,3-4"},
        {"package:2 [numa] die:2 [numa] core:2 pu:1", "4-7", "3-4"},
        {"[numa] package:2 [numa] core:4 pu:1", NULL, "0-1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hwloc_topology_t topology;
        EXPECT(hwloc_topology_init(&topology) == 0, "hwloc_topology_init");
        EXPECT(hwloc_topology_set_synthetic(topology, cases[i].machine) == 0 && hwloc_topology_load(topology) == 0, "machine %s",
               cases[i].machine);
        check_nodes(topology, cases[i].machine, cases[i].mask, cases[i].nodes);
        hwloc_topology_destroy(topology);
    }
}
END_TEST

START_TEST(disallowed_nodes_and_cpus_do_not_count) {
    hwloc_topology_t topology;
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc(), nodes = hwloc_bitmap_alloc();
    const char *machine = "package:3 [numa] [numa] core:4 pu:1";
    EXPECT(hwloc_topology_init(&topology) == 0, "hwloc_topology_init");
    EXPECT(hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) == 0, "flags");
    EXPECT(hwloc_topology_set_synthetic(topology, machine) == 0 && hwloc_topology_load(topology) == 0, "machine");
    hwloc_bitmap_list_sscanf(cpus, "0-7");
    hwloc_bitmap_list_sscanf(nodes, "1-5");
    EXPECT(hwloc_topology_allow(topology, cpus, nodes, HWLOC_ALLOW_FLAG_CUSTOM) == 0, "allow");
    check_nodes(topology, machine, NULL, "1-2"); /* 0 is not allowed: 1, at the same CPUs, is first */
    check_nodes(topology, machine, "4-11", "2");
    hwloc_bitmap_free(cpus);
    hwloc_bitmap_free(nodes);
    hwloc_topology_destroy(topology);
}
END_TEST
#endif

/* ---- The same results ------------------------------------------------------------------------------------------------- */

typedef struct answer {
    uint16_t k[LAYERS][TOKENS][HEADS][DIM], v[LAYERS][TOKENS][HEADS][DIM];
    float out[2][LAYERS][HEADS * GROUP][DIM];
    ekv_report reports[2][LAYERS][HEADS * GROUP];
} answer;

/* Fills a cache in pieces, cuts it and fills it again; what it then holds and two policies' outputs. */
static void ask(ekv_context *context, ekv_cache *cache, rng r, answer *a) {
    static const int64_t pieces[] = {5000, 1, 37, 3962, -700, 700}; /* below 0: cut */
    float *rows = malloc(sizeof(float) * 5000 * HEADS * DIM * 2), q[HEADS * GROUP * DIM];
    int32_t sequence;
    EXPECT_OK(context, ekv_sequence_create(context, cache, &sequence));
    for (int i = 0, n = 0; i < 6; n += (int)pieces[i++]) {
        if (pieces[i] < 0) {
            EXPECT_OK(context, ekv_cache_truncate(context, cache, sequence, n + pieces[i]));
            continue;
        }
        ekv_append_params append = ekv_append_params_default();
        append.count = pieces[i];
        append.k = rows;
        append.v = rows + pieces[i] * HEADS * DIM;
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            for (int64_t e = 0; e < 2 * pieces[i] * HEADS * DIM; e++) {
                rows[e] = (float)rng_normal(&r);
            }
            EXPECT_OK(context, ekv_cache_append(context, cache, sequence, layer, &append));
        }
    }
    for (int i = 0; i < HEADS * GROUP * DIM; i++) {
        q[i] = 3.0f * (float)rng_normal(&r);
    }
    const int32_t *table = ekv_cache_block_table(cache, sequence);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        ekv_kv kv;
        EXPECT_OK(context, ekv_cache_layer(cache, layer, &kv, NULL));
        for (int t = 0; t < TOKENS; t++) {
            for (int h = 0; h < HEADS; h++) {
                memcpy(a->k[layer][t][h], ekv_key(&kv, table[t / PAGE], t % PAGE, h), DIM * 2);
                memcpy(a->v[layer][t][h], ekv_value(&kv, table[t / PAGE], t % PAGE, h), DIM * 2);
            }
        }
        for (int p = 0; p < 2; p++) {
            ekv_decode_params step = ekv_decode_params_default();
            step.cache = cache;
            step.layer = layer;
            step.sequences = &sequence;
            step.q_heads = HEADS * GROUP;
            step.q = q;
            step.out = a->out[p][layer];
            step.report = a->reports[p][layer];
            step.policy = p ? EKV_POLICY_CERTIFIED : EKV_POLICY_FULL;
            memset(step.report, 0, sizeof a->reports[p][layer]); /* padding, too, is compared */
            EXPECT_OK(context, ekv_decode(context, &step));
        }
    }
    free(rows);
}

/* Machines: this one; two nodes that are not there; this one's two CPUs as two nodes. */
START_TEST(results_do_not_depend_on_placement) {
    answer *right = calloc(1, sizeof *right), *got = calloc(1, sizeof *got);
    static const struct {
        const char *synthetic;
        bool this_system;
    } machines[] = {{NULL, true}, {"numa:1 core:2 pu:1", false}, {"numa:2 core:2 pu:1", false}, {"numa:2 core:1 pu:1", true}};
    bool compared = false;
    for (int m = 0; m < 4; m++) {
        for (int p = 0; p < 3; p++) {
            for (int32_t threads = 1; threads <= 3; threads += 2) {
                rng r = case_begin("results_do_not_depend_on_placement", 0);
                case_note("machine %d, placement %d, %d threads", m, p, (int)threads);
                machine_is(machines[m].synthetic, machines[m].this_system);
                ekv_context *context = context_open(NULL, threads);
                const ekv_cache_params shape = shape_of(placements[p]);
                ekv_cache *cache = NULL;
                const ekv_status status = ekv_cache_create(context, &shape, &cache);
                if (placements[p] == EKV_PLACEMENT_INTERLEAVE && (!EKV_WITH_HWLOC || (m == 3 && status != EKV_OK))) {
                    EXPECT(status == EKV_ERROR_UNSUPPORTED && !cache, "status %d", (int)status);
                    EXPECT(strstr(ekv_last_error(context), "placement is INTERLEAVE"), "message: %s", ekv_last_error(context));
                } else {
                    EXPECT(status == EKV_OK, "status %d: %s", (int)status, ekv_last_error(context));
                    ask(context, cache, r, compared ? got : right);
                    EXPECT(!compared || memcmp(right, got, sizeof *right) == 0, "contents, outputs or reports differ");
                    compared = true;
                }
                ekv_cache_destroy(cache);
                ekv_context_destroy(context);
            }
        }
    }
    EXPECT(right->reports[0][1][0].support > 0 && right->reports[1][1][0].certified, "the steps were not run");
    free(right);
    free(got);
}
END_TEST

/* ---- First touch ------------------------------------------------------------------------------------------------------ */

#if defined(__linux__)
/* An allocator that shows what became of its memory: mapped afresh, never unmapped before the test's end. */
typedef struct maps {
    struct { unsigned char *memory; size_t bytes; bool released; } of[32];
    int count;
} maps;

static void *maps_allocate(void *user, size_t bytes, size_t alignment) {
    maps *m = user;
    if (m->count == 32 || alignment > 4096) return NULL;
    unsigned char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    m->of[m->count].memory = memory;
    m->of[m->count].bytes = bytes;
    m->of[m->count++].released = false;
    return memory;
}

static void maps_release(void *user, void *memory, size_t bytes) {
    maps *m = user;
    for (int i = 0; i < m->count; i++) {
        if (m->of[i].memory == memory && m->of[i].bytes == bytes) {
            m->of[i].released = true;
        }
    }
}

static void maps_free(maps *m) {
    for (int i = 0; i < m->count; i++) {
        EXPECT(m->of[i].released, "%zu bytes were not released", m->of[i].bytes);
        munmap(m->of[i].memory, m->of[i].bytes);
    }
    m->count = 0;
}

/* Whole pages of memory that are there, and *all of them. */
static size_t resident(const void *memory, size_t bytes, size_t *all) {
    static unsigned char flags[1 << 16];
    const size_t page = ekv_memory_page();
    size_t count = 0;
    *all = bytes / page;
    EXPECT(*all > 0 && *all <= sizeof flags && mincore((void *)(uintptr_t)memory, *all * page, flags) == 0, "mincore");
    for (size_t i = 0; i < *all; i++) count += flags[i] & 1;
    return count;
}

typedef struct pool {
    int64_t loops, tasks;
} pool;

static void run_backwards(void *user, int64_t n, ekv_task task, void *arg) {
    pool *p = user;
    p->loops++;
    p->tasks += n;
    for (int64_t i = n - 1; i >= 0; i--) task(arg, i);
}

static ekv_context *context_with(maps *m, pool *p) {
    ekv_context_params params = ekv_context_params_default();
    ekv_context *context = NULL;
    params.threads = 2;
    params.parallel_for = run_backwards;
    params.parallel_user = p;
    params.allocator = (ekv_allocator){m, maps_allocate, maps_release};
    EXPECT(ekv_context_create(&params, &context, NULL, 0) == EKV_OK, "no context");
    return context;
}

static size_t data_bytes(void) { return (size_t)LAYERS * HEADS * BLOCKS * PAGE * DIM * 2; }

START_TEST(first_touch_takes_all_memory_on_several_nodes) {
    maps m = {.count = 0};
    size_t all;
    const size_t probe = 64 * ekv_memory_page();
    unsigned char *fresh = maps_allocate(&m, probe, 64);
    const bool seen = resident(fresh, probe, &all) == 0; /* some kernels call every mapped page resident */
    maps_release(&m, fresh, probe);
    maps_free(&m);
    for (int nodes = 0; nodes <= 2; nodes++) { /* 0: unchanged default placement on two nodes */
        case_begin("first_touch_takes_all_memory_on_several_nodes", (uint64_t)nodes);
        case_note("%d nodes", nodes);
        machine_is(nodes == 1 ? "numa:1 core:4 pu:1" : "numa:2 core:2 pu:1", false);
        pool p = {0, 0};
        ekv_context *context = context_with(&m, &p);
        const ekv_cache_params shape = shape_of(nodes ? EKV_PLACEMENT_FIRST_TOUCH : EKV_PLACEMENT_DEFAULT);
        ekv_cache *cache = NULL;
        p = (pool){0, 0};
        EXPECT_OK(context, ekv_cache_create(context, &shape, &cache));
        const bool touches = nodes == 2 || (nodes == 1 && !EKV_WITH_HWLOC); /* without hwloc the nodes are unknown */
        /* Spans of 4,096 tokens, each up to a page of memory longer: 4 heads of 9,600 tokens are 10 of keys and 10 of values. */
        EXPECT(touches ? p.tasks >= 18 : p.tasks <= 2, "%lld tasks", (long long)p.tasks);
        int large = 0;
        for (int i = 0; i < m.count && seen; i++) {
            if (m.of[i].bytes < data_bytes() / 8) continue;
            const size_t count = resident(m.of[i].memory, m.of[i].bytes, &all);
            large++;
            /* The creation itself writes counts and bases. */
            EXPECT(touches ? count == all : count <= all / 4, "%zu of %zu pages of allocation %d are there", count, all, i);
        }
        EXPECT(!seen || large == 2 + LAYERS, "%d large allocations: keys, values, %d indexes", large, LAYERS);
        ekv_cache_destroy(cache);
        ekv_context_destroy(context);
        maps_free(&m);
    }
}
END_TEST
#endif

/* ---- Interleaving ----------------------------------------------------------------------------------------------------- */

#if defined(__linux__) && EKV_WITH_HWLOC
/* The policy of every whole page of a piece of memory. */
static hwloc_membind_policy_t policy_of(hwloc_topology_t topology, const void *memory, size_t bytes, hwloc_nodeset_t nodes) {
    hwloc_membind_policy_t policy = HWLOC_MEMBIND_MIXED;
    const size_t page = ekv_memory_page();
    EXPECT(hwloc_get_area_membind(topology, memory, bytes / page * page, nodes, &policy, HWLOC_MEMBIND_BYNODESET) == 0,
           "hwloc_get_area_membind");
    return policy;
}

/* HWLOC_THISSYSTEM: the system is asked for nodes 0 and 1, of which it knows one at least. */
START_TEST(interleaving_is_of_the_cache_alone) {
    case_begin("interleaving_is_of_the_cache_alone", 0);
    hwloc_topology_t topology;
    hwloc_nodeset_t nodes = hwloc_bitmap_alloc(), nodes_before = hwloc_bitmap_alloc();
    hwloc_membind_policy_t before, after;
    hwloc_cpuset_t cpus = hwloc_bitmap_alloc();
    machine_is(NULL, true);
    EXPECT(hwloc_topology_init(&topology) == 0 && hwloc_topology_load(topology) == 0, "topology");
    maps m = {.count = 0};
    pool p = {0, 0};
    const size_t half = 8 * ekv_memory_page();
    unsigned char *other = maps_allocate(&m, 2 * half, 64);
    const bool may = hwloc_set_area_membind(topology, other, half, hwloc_topology_get_topology_nodeset(topology),
                                            HWLOC_MEMBIND_INTERLEAVE, HWLOC_MEMBIND_BYNODESET) == 0 &&
                     hwloc_get_membind(topology, nodes_before, &before, HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_THREAD) == 0;
    EXPECT(hwloc_get_cpubind(topology, cpus, HWLOC_CPUBIND_PROCESS) == 0, "hwloc_get_cpubind");
    const bool two = hwloc_bitmap_isset(cpus, 0) && hwloc_bitmap_isset(cpus, 1);
    ekv_context *context = context_with(&m, &p);
    const ekv_cache_params shape = shape_of(EKV_PLACEMENT_INTERLEAVE);
    const int first = m.count;
    ekv_cache *cache = NULL;
    machine_is("numa:2 core:1 pu:1", true);
    const ekv_status status = ekv_cache_create(context, &shape, &cache);
    case_note("the system %s memory policies, CPUs 0 and 1 %s", may ? "has" : "refuses", two ? "are usable" : "are not both usable");
    EXPECT(status == (may || !two ? EKV_OK : EKV_ERROR_UNSUPPORTED), "status %d: %s", (int)status, ekv_last_error(context));
    for (int released = 0; released < 2 && may; released++) {
        int large = 0;
        for (int i = first; i < m.count; i++) {
            if (m.of[i].bytes < data_bytes() / 8) continue;
            large++;
            const hwloc_membind_policy_t policy = policy_of(topology, m.of[i].memory, m.of[i].bytes, nodes);
            EXPECT((policy == HWLOC_MEMBIND_INTERLEAVE) == (two && !released), "allocation %d has policy %d, %s", i, (int)policy,
                   released ? "after the end" : "in the cache");
            EXPECT(m.of[i].released == (released == 1), "allocation %d was%s released", i, released ? " not" : "");
        }
        EXPECT(large == 2 + LAYERS, "%d large allocations", large);
        EXPECT(policy_of(topology, other, half, nodes) == HWLOC_MEMBIND_INTERLEAVE, "the caller's memory changed");
        EXPECT(policy_of(topology, other + half, half, nodes) != HWLOC_MEMBIND_INTERLEAVE, "the caller's memory changed");
        EXPECT(hwloc_get_membind(topology, nodes, &after, HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_THREAD) == 0, "hwloc_get_membind");
        EXPECT(before == after && hwloc_bitmap_isequal(nodes, nodes_before), "the thread's policy is %d, was %d", (int)after, (int)before);
        if (!released) {
            ekv_cache_destroy(cache);
            cache = NULL;
        }
    }
    hwloc_cpuset_t now = hwloc_bitmap_alloc();
    EXPECT(hwloc_get_cpubind(topology, now, HWLOC_CPUBIND_PROCESS) == 0 && hwloc_bitmap_isequal(now, cpus), "the CPU binding changed");
    ekv_cache_destroy(cache);
    ekv_context_destroy(context);
    maps_release(&m, other, 2 * half);
    maps_free(&m);
    hwloc_bitmap_free(now);
    hwloc_bitmap_free(cpus);
    hwloc_bitmap_free(nodes);
    hwloc_bitmap_free(nodes_before);
    hwloc_topology_destroy(topology);
}
END_TEST
#endif

/* ---- Older callers ---------------------------------------------------------------------------------------------------- */

/* The struct before `placement` was of 64 bytes, the last four of them padding with any content. */
START_TEST(older_structs_have_no_placement) {
    case_begin("older_structs_have_no_placement", 0);
    ekv_context *context = context_open("scalar", 1);
    ekv_cache_params params = shape_of((ekv_placement)77);
    ekv_cache *cache = NULL;
    const size_t old = offsetof(ekv_cache_params, placement);
    EXPECT(old == 64, "the fields before placement take %zu bytes", old);
    params.size = old;
    memset(&params.reserved, 0xa5, sizeof params.reserved);
    EXPECT_OK(context, ekv_cache_create(context, &params, &cache));
    ekv_cache_destroy(cache);
    params.size = sizeof params;
    EXPECT_STATUS(context, EKV_ERROR_INVALID_ARGUMENT, ekv_cache_create(context, &params, &cache));
    EXPECT(strstr(ekv_last_error(context), "placement is 77"), "message: %s", ekv_last_error(context));
    ekv_context_destroy(context);
}
END_TEST

int main(int argc, char **argv) {
    (void)argc;
    const test_entry tests[] = {
#if EKV_WITH_HWLOC
        TEST_ENTRY(nodes_of_synthetic_machines),
        TEST_ENTRY(disallowed_nodes_and_cpus_do_not_count),
#endif
        TEST_ENTRY(results_do_not_depend_on_placement),
#if defined(__linux__)
        TEST_ENTRY(first_touch_takes_all_memory_on_several_nodes),
#endif
#if defined(__linux__) && EKV_WITH_HWLOC
        TEST_ENTRY(interleaving_is_of_the_cache_alone),
#endif
        TEST_ENTRY(older_structs_have_no_placement),
    };
    return HARNESS_MAIN(argv[0], tests);
}
