/*
 * On which NUMA nodes the memory of a managed cache lies: keys, values and page statistics, on request spread over the nodes of the
 * threads that will read them.
 *
 * Tasks of a step are handed out as threads become free, so that no thread has pages of its own: what helps is that all nodes' memory
 * is read at the same time.  Only the policy of the cache's own memory is ever set, on whole pages inside it, and it is set back before
 * the allocator gets that memory again: a heap would otherwise hand interleaved pages to others.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "dispatch/step.h"

#if EKV_WITH_HWLOC
#include <errno.h>
#include <hwloc.h>
#endif

/* Memory, and how much of it the tokens of one span have in one head. */
typedef struct area {
    char *memory;
    size_t bytes, span;
} area;

/* The i-th area of a cache; false past the last. */
static bool area_of(const ekv_cache *cache, int32_t i, area *a) {
    const ekv_cache_params *s = &cache->shape;
    const size_t rows = (size_t)s->layers * (size_t)s->kv_heads * (size_t)s->blocks * (size_t)s->page_size;
    if (i < 2) {
        *a = i ? (area){cache->v, cache->v_bytes, cache->v_bytes / rows * EKV_SPAN}
               : (area){cache->k, cache->k_bytes, cache->k_bytes / rows * EKV_SPAN};
        return true;
    }
    if (!cache->indexes || i - 2 >= s->layers) return false;
    const ekv_index *index = cache->indexes[i - 2];
    const size_t pages = (size_t)s->kv_heads * (size_t)s->blocks;
    const size_t of_span = ((size_t)EKV_SPAN + (size_t)s->page_size - 1) / (size_t)s->page_size;
    *a = (area){index->memory, index->memory_bytes, index->memory_bytes / pages * of_span};
    return true;
}

/* Cuts an area down to the memory pages that it has for itself. */
static void whole_pages(area *a) {
    const size_t page = ekv_memory_page(), skip = (page - (uintptr_t)a->memory % page) % page;
    a->bytes = a->bytes > skip ? (a->bytes - skip) / page * page : 0;
    a->memory += skip;
}

/* ---- first touch ---- */

/* Writes to every memory page of the i-th span what stands there. */
static void touch_span(void *arg, int64_t i) {
    const area *a = arg;
    const size_t page = ekv_memory_page(), end = (size_t)(i + 1) * a->span;
    for (size_t at = (size_t)i * a->span; at < end && at < a->bytes; at += page) {
        volatile char *byte = a->memory + at;
        *byte = *byte;
    }
}

static void touch(ekv_context *context, const ekv_cache *cache) {
    const size_t page = ekv_memory_page();
    area a;
    for (int32_t i = 0; area_of(cache, i, &a); i++) {
        whole_pages(&a);
        a.span = (a.span / page + 1) * page;
        ekv_parallel(context, (int64_t)((a.bytes + a.span - 1) / a.span), touch_span, &a);
    }
}

/* ---- nodes ---- */

#if EKV_WITH_HWLOC
static hwloc_obj_t next_allowed(hwloc_topology_t topology, hwloc_obj_t node) {
    do node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node);
    while (node && !hwloc_bitmap_isset(hwloc_topology_get_allowed_nodeset(topology), node->os_index));
    return node;
}

/* Slow memory without CPUs counts as near to those of a package or of the whole machine, fast memory to those of the node before it. */
static bool goes_before(hwloc_obj_t a, hwloc_obj_t b) {
    if (hwloc_bitmap_iszero(a->cpuset) || !hwloc_bitmap_isincluded(a->cpuset, b->cpuset)) return false;
    return !hwloc_bitmap_isequal(a->cpuset, b->cpuset) || a->logical_index < b->logical_index;
}

int ekv_nodes_of(void *machine, void *process, void *nodes) {
    const hwloc_topology_t topology = machine;
    hwloc_cpuset_t usable = hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology));
    hwloc_bitmap_zero(nodes);
    if (usable && process) hwloc_bitmap_and(usable, usable, process);
    for (hwloc_obj_t node = NULL; usable && (node = next_allowed(topology, node));) {
        bool first = hwloc_bitmap_intersects(node->cpuset, usable);
        for (hwloc_obj_t other = NULL; first && (other = next_allowed(topology, other));) first = !goes_before(other, node);
        if (first) hwloc_bitmap_set(nodes, node->os_index);
    }
    hwloc_bitmap_free(usable);
    return hwloc_bitmap_weight(nodes);
}

static void nothing(void *arg, int64_t i) {
    (void)arg;
    (void)i;
}

/* The machine's topology, with the nodes near the CPUs that this process's threads may use; NULL if it cannot be read. */
static hwloc_topology_t load(ekv_context *context, hwloc_nodeset_t nodes, int *count) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) return NULL;
    hwloc_cpuset_t process = hwloc_bitmap_alloc();
    if (!process || hwloc_topology_load(topology)) {
        hwloc_bitmap_free(process);
        hwloc_topology_destroy(topology);
        return NULL;
    }
    /* The team must be there: with OMP_PROC_BIND the calling thread alone is bound to one place. */
    ekv_parallel(context, context->threads, nothing, NULL);
    const bool known = !hwloc_get_cpubind(topology, process, HWLOC_CPUBIND_PROCESS);
    *count = ekv_nodes_of(topology, known ? process : NULL, nodes);
    hwloc_bitmap_free(process);
    return topology;
}

int ekv_placement_nodes(ekv_context *context, char *text, size_t size) {
    int count = 0;
    hwloc_nodeset_t nodes = hwloc_bitmap_alloc();
    hwloc_topology_t topology = nodes ? load(context, nodes, &count) : NULL;
    if (topology) {
        hwloc_bitmap_list_snprintf(text, size, nodes);
        hwloc_topology_destroy(topology);
    }
    hwloc_bitmap_free(nodes);
    return count;
}

/* Sets the policy of every area; 0, or what went wrong. */
static int bind(const ekv_cache *cache, hwloc_const_nodeset_t nodes, hwloc_membind_policy_t policy) {
    area a;
    for (int32_t i = 0; area_of(cache, i, &a); i++) {
        whole_pages(&a);
        errno = 0;
        if (a.bytes && hwloc_set_area_membind(cache->topology, a.memory, a.bytes, nodes, policy, HWLOC_MEMBIND_BYNODESET))
            return errno ? errno : EINVAL;
    }
    return 0;
}

ekv_status ekv_cache_place(ekv_context *context, ekv_cache *cache) {
    if (cache->shape.placement == EKV_PLACEMENT_DEFAULT) return EKV_OK;
    const bool interleave = cache->shape.placement == EKV_PLACEMENT_INTERLEAVE;
    int count = 0, error = 0;
    hwloc_nodeset_t nodes = hwloc_bitmap_alloc();
    hwloc_topology_t topology = nodes ? load(context, nodes, &count) : NULL;
    if (topology && count > 1 && interleave) {
        cache->topology = topology; /* until the cache is destroyed */
        error = bind(cache, nodes, HWLOC_MEMBIND_INTERLEAVE);
    } else if ((!topology || count > 1) && !interleave) {
        touch(context, cache);
    }
    hwloc_bitmap_free(nodes);
    if (topology && topology != cache->topology) hwloc_topology_destroy(topology);
    if (!topology && interleave)
        return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "params->placement is INTERLEAVE, but the machine's topology cannot be read");
    if (error)
        return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "params->placement is INTERLEAVE, which the system refuses (error %d)", error);
    return EKV_OK;
}

void ekv_cache_unplace(ekv_cache *cache) {
    if (!cache->topology) return;
    bind(cache, hwloc_topology_get_topology_nodeset(cache->topology), HWLOC_MEMBIND_DEFAULT);
    hwloc_topology_destroy(cache->topology);
    cache->topology = NULL;
}
#else
ekv_status ekv_cache_place(ekv_context *context, ekv_cache *cache) {
    if (cache->shape.placement == EKV_PLACEMENT_INTERLEAVE)
        return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "params->placement is INTERLEAVE, which this build without hwloc cannot do");
    if (cache->shape.placement == EKV_PLACEMENT_FIRST_TOUCH) touch(context, cache);
    return EKV_OK;
}

void ekv_cache_unplace(ekv_cache *cache) { (void)cache; }

int ekv_placement_nodes(ekv_context *context, char *text, size_t size) {
    (void)context;
    (void)text;
    (void)size;
    return 0;
}
#endif
