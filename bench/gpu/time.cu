/*
 * Times decode steps of the backend cuda: one sequence, f16, policies and contexts in one table, with the bytes that the report
 * counts, their share of the copy bandwidth measured in the same run, and the error of two heads against double precision.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Usage: entmaxkv-gpu-time [heads=16] [group=1] [dim=128] [page=16] [layout=heads|tokens] [data=random|clusters|planted] [max=1048576]
 * [only=policy] [least=4096] [table=shuffled|linear] [sketch=on|off]
 *        entmaxkv-gpu-time recorded=FILE.safetensors [only=policy] [sketch=on|off]
 *
 * random: standard normal keys, of which no bound rules out much.  clusters: every 512th page is shifted along its head's query.
 * planted: keys whose spread falls from axis to axis, as those of trained models do, and one token in 512 shifted along the query.
 * recorded: what entmaxkv-lm record wrote, at its length; a step is a layer, and times are means over the layers.
 *
 * Policy certified has a sketch whose basis is found from the first 2,048 tokens.
 *
 * Cold cache: every repetition reads another part of a pool that is larger than the second-level cache, or all of it.  `graph`
 * is the time per step of a CUDA graph that holds the repetitions, `calls` that of plain calls on a stream.
 */
#include "entmaxkv/entmaxkv.h"
#if EKV_HAVE_RECORDINGS
extern "C" {
#  include "recording.h"
}
#endif

#include <algorithm>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#define CUDA(call)                                                                                                             \
  do {                                                                                                                         \
    const cudaError_t e_ = (call);                                                                                             \
    if (e_ != cudaSuccess) {                                                                                                   \
      printf("%s: %s\n", #call, cudaGetErrorString(e_));                                                                       \
      exit(1);                                                                                                                 \
    }                                                                                                                          \
  } while (0)
#define EKV(context, call)                                                                                                     \
  do {                                                                                                                         \
    if ((call) != EKV_OK) {                                                                                                    \
      printf("%s: %s\n", #call, ekv_last_error(context));                                                                      \
      exit(1);                                                                                                                 \
    }                                                                                                                          \
  } while (0)

__device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
__device__ __forceinline__ float normal_at(uint64_t i) {
    const uint64_t r = mix((i + 1) * 0x9e3779b97f4a7c15ull);
    return sqrtf(-2.0f * logf(1.0f - (float)(r >> 40) * 0x1p-24f)) * cospif(2.0f * (float)(r & 0xffffff) * 0x1p-24f);
}

/* Standard normal elements, or keys with structure; those have the `group` queries of their head, of which they follow the first. */
enum { RANDOM, CLUSTERS, PLANTED };
__global__ void fill(__half *x, int64_t n, uint64_t seed, const float *query, int kind, int dim, int group_heads, int64_t rows_per_group,
                     int64_t heads, int by_heads) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float v = normal_at(seed + i);
        if (kind != RANDOM) {
            const int64_t row = i / dim, group = by_heads ? row / rows_per_group : row / (rows_per_group * heads);
            const int64_t head = by_heads ? group % heads : row % heads, page = by_heads ? group / heads : group;
            const float q = query[head * group_heads * dim + i % dim];
            if (kind == CLUSTERS && mix(page * 77 + 13) % 512 == 0) v += 0.9f * q;
            if (kind == PLANTED) {
                v *= 1.5f * exp2f(-8.0f * (float)(i % dim) / (float)dim);
                if (mix(row * 77 + 13) % 512 == 0) v += 0.5f * q;
            }
        }
        x[i] = __float2half_rn(v);
    }
}
__global__ void fill_float(float *x, int64_t n, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = normal_at(seed + i);
}
__global__ void copy(const uint4 *from, uint4 *to, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = from[i];
}

struct layout {
    int64_t block, token, head;
    int page, dim;
};

/* Scores of one head in double; weighted sums of its values. */
__global__ void exact_scores(const __half *k, const int *table, layout l, int head, const float *q, double scale, double slope,
                             int64_t n, double *s) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const __half *row = k + table[i / l.page] * l.block + i % l.page * l.token + head * l.head;
    double sum = 0.0;
    for (int d = 0; d < l.dim; d++) sum += (double)__half2float(row[d]) * (double)q[d];
    s[i] = sum * scale + slope * (double)(i - (n - 1));
}
__global__ void exact_values(const __half *v, const int *table, layout l, int head, const double *p, int64_t n, double *out) {
    __shared__ double part[256];
    const int d = blockIdx.x;
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += 256)
        if (p[i] != 0.0)
            sum += p[i] * (double)__half2float(v[table[i / l.page] * l.block + i % l.page * l.token + head * l.head + d]);
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int m = 128; m > 0; m >>= 1) {
        if ((int)threadIdx.x < m) part[threadIdx.x] += part[threadIdx.x + m];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[d] = part[0];
}

/* Weights in double on the host, by bisection. */
static void exact_weights(double alpha, std::vector<double> &s) {
    const double top = *std::max_element(s.begin(), s.end());
    if (alpha == 1.0) {
        double sum = 0.0;
        for (double &x : s) sum += x = exp(x - top);
        for (double &x : s) x /= sum;
        return;
    }
    const double a = alpha - 1.0, beta = 1.0 / a;
    std::vector<double> z;
    for (double &x : s) {
        x = a * (x - top);
        if (x > -1.0) z.push_back(x);
    }
    double low = -1.0, high = 0.0;
    for (int i = 0; i < 80; i++) {
        const double tau = 0.5 * (low + high);
        double sum = 0.0;
        for (double x : z)
            if (x > tau) sum += beta == 2.0 ? (x - tau) * (x - tau) : pow(x - tau, beta);
        (sum >= 1.0 ? low : high) = tau;
    }
    for (double &x : s) x = x > low ? pow(x - low, beta) : 0.0;
}

struct options {
    int heads = 16, group = 1, dim = 128, page = 16;
    bool by_heads = true, shuffled = true, sketch = true;
    int kind = RANDOM;
    int64_t most = 1 << 20, least = 4096;
    const char *only = nullptr, *recorded = nullptr;
};

/* Keys and values, their statistics, and the query that is put to them. */
struct source {
    ekv_kv kv;
    ekv_index *index;
    layout k, v;
    const float *q;
};

struct bench {
    options o;
    ekv_context *context;
    std::vector<source> sources; /* of one, or of each recorded layer */
    float *out;
    int *table, *lengths;
    ekv_report *report;
    double bandwidth; /* bytes per second of a device copy */
    cudaStream_t stream;
    int q_heads;
    double alpha;
    float scale;
    std::vector<float> slopes; /* empty: none */
};

static double seconds(const std::vector<float> &ms) {
    std::vector<float> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2] * 1e-3;
}

static ekv_decode_params step_of(const bench &b, const source &from, const char *policy, int64_t n, int64_t part) {
    ekv_decode_params p = ekv_decode_params_default();
    const int64_t pages = (n + b.o.page - 1) / b.o.page;
    p.kv = &from.kv;
    p.index = from.index;
    p.block_table_stride = pages;
    p.block_table = b.table + part * pages;
    p.lengths = b.lengths;
    p.max_length = n;
    p.q_heads = b.q_heads;
    p.q = from.q;
    p.out = b.out;
    p.stream = b.stream;
    p.alpha = b.alpha;
    p.scale = b.scale;
    p.slopes = b.slopes.empty() ? nullptr : b.slopes.data();
    if (!strcmp(policy, "softmax")) p.alpha = 1.0;
    if (!strcmp(policy, "topk")) p.policy = EKV_POLICY_TOPK;
    if (!strcmp(policy, "gaussian")) p.policy = EKV_POLICY_GAUSSIAN;
    if (!strcmp(policy, "certified")) p.policy = EKV_POLICY_CERTIFIED;
    return p;
}

static double relative_error(const bench &b, const source &from, const ekv_decode_params &p, int64_t n) {
    double worst = 0.0, *s, *out;
    const int dim = from.v.dim, group = b.q_heads / from.kv.kv_heads, heads[2] = {0, b.q_heads - 1};
    const double scale = b.scale == 0.0f ? 1.0 / sqrt((double)from.k.dim) : (double)b.scale;
    CUDA(cudaMalloc(&s, n * sizeof *s));
    CUDA(cudaMalloc(&out, dim * sizeof *out));
    std::vector<double> scores(n), expected(dim);
    std::vector<float> got(dim);
    for (int h : heads) {
        exact_scores<<<(unsigned)((n + 255) / 256), 256>>>((const __half *)from.kv.k, p.block_table, from.k, h / group,
                                                           from.q + h * from.k.dim, scale, b.slopes.empty() ? 0.0 : b.slopes[h], n, s);
        CUDA(cudaMemcpy(scores.data(), s, n * sizeof *s, cudaMemcpyDeviceToHost));
        exact_weights(p.alpha, scores);
        CUDA(cudaMemcpy(s, scores.data(), n * sizeof *s, cudaMemcpyHostToDevice));
        exact_values<<<dim, 256>>>((const __half *)from.kv.v, p.block_table, from.v, h / group, s, n, out);
        CUDA(cudaMemcpy(expected.data(), out, dim * sizeof *out, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(got.data(), b.out + h * dim, dim * sizeof(float), cudaMemcpyDeviceToHost));
        double error = 0.0, size = 0.0;
        for (int d = 0; d < dim; d++) error += pow(got[d] - expected[d], 2), size += expected[d] * expected[d];
        worst = fmax(worst, sqrt(error / size));
    }
    CUDA(cudaFree(s));
    CUDA(cudaFree(out));
    return worst;
}

static void row(const bench &b, const char *policy, int64_t n) {
    const int layers = (int)b.sources.size(), parts = layers > 1 ? layers : (int)std::min<int64_t>(16, b.o.most / n);
    const int repeats = n >= (1 << 19) ? 5 : 9, inner = parts > 1 ? parts : 2, length = (int)n;
    CUDA(cudaMemcpy(b.lengths, &length, 4, cudaMemcpyHostToDevice));
    std::vector<ekv_decode_params> steps;
    for (int i = 0; i < inner; i++)
        steps.push_back(layers > 1 ? step_of(b, b.sources[i], policy, n, 0) : step_of(b, b.sources[0], policy, n, i % parts));
    /* What is read, and how wrong it is. */
    double bytes = 0.0, dense = 0.0, sketch = 0.0, support = 0.0, error = 0.0;
    for (int i = 0; i < layers; i++) {
        ekv_decode_params p = steps[i];
        p.report = b.report;
        EKV(b.context, ekv_reserve(b.context, &p));
        EKV(b.context, ekv_decode(b.context, &p));
        CUDA(cudaStreamSynchronize(b.stream));
        std::vector<ekv_report> report(p.q_heads);
        CUDA(cudaMemcpy(report.data(), b.report, report.size() * sizeof(ekv_report), cudaMemcpyDeviceToHost));
        for (const ekv_report &r : report) {
            bytes += (double)(r.bytes_keys + r.bytes_values + r.bytes_statistics + r.bytes_sketch) / layers;
            dense += (double)r.bytes_dense / layers;
            sketch += (double)r.bytes_sketch / layers;
            support += (double)r.support / p.q_heads / layers;
        }
        error = fmax(error, relative_error(b, b.sources[i], p, n));
    }
    /* Calls and graph. */
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaStreamBeginCapture(b.stream, cudaStreamCaptureModeThreadLocal));
    for (const ekv_decode_params &step : steps) EKV(b.context, ekv_decode(b.context, &step));
    CUDA(cudaStreamEndCapture(b.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    double times[2];
    for (int kind = 0; kind < 2; kind++) {
        std::vector<float> ms;
        for (int i = -2; i < repeats; i++) {
            CUDA(cudaEventRecord(begin, b.stream));
            if (kind == 0)
                CUDA(cudaGraphLaunch(exec, b.stream));
            else
                for (const ekv_decode_params &step : steps) EKV(b.context, ekv_decode(b.context, &step));
            CUDA(cudaEventRecord(end, b.stream));
            CUDA(cudaEventSynchronize(end));
            float t;
            CUDA(cudaEventElapsedTime(&t, begin, end));
            if (i >= 0) ms.push_back(t / (float)inner);
        }
        times[kind] = seconds(ms);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    printf("%-9s %8lld %9.4f %9.4f %10.3f %7.2f%% %7.2f%% %9.4f %7.1f%% %9.0f %10.2e\n", policy, (long long)n, times[0] * 1e3,
           times[1] * 1e3, bytes / 1e6, 100.0 * bytes / dense, 100.0 * sketch / dense, bytes / b.bandwidth * 1e3,
           100.0 * bytes / b.bandwidth / times[0], support, error);
    fflush(stdout);
}

static void measure_bandwidth(bench &b) {
    const int64_t bytes = 2ll << 30;
    uint4 *from, *to;
    CUDA(cudaMalloc(&from, bytes));
    CUDA(cudaMalloc(&to, bytes));
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<float> ms;
    for (int i = 0; i < 12; i++) {
        CUDA(cudaEventRecord(begin, b.stream));
        copy<<<132 * 16, 512, 0, b.stream>>>(from, to, bytes / 16);
        CUDA(cudaEventRecord(end, b.stream));
        CUDA(cudaEventSynchronize(end));
        float t;
        CUDA(cudaEventElapsedTime(&t, begin, end));
        if (i > 1) ms.push_back(t);
    }
    b.bandwidth = 2.0 * (double)bytes / seconds(ms);
    CUDA(cudaFree(from));
    CUDA(cudaFree(to));
}

static options parse(int argc, char **argv) {
    options o;
    for (int i = 1; i < argc; i++) {
        const char *value = strchr(argv[i], '=');
        if (!value) continue;
        value++;
        if (!strncmp(argv[i], "heads=", 6)) o.heads = atoi(value);
        if (!strncmp(argv[i], "group=", 6)) o.group = atoi(value);
        if (!strncmp(argv[i], "dim=", 4)) o.dim = atoi(value);
        if (!strncmp(argv[i], "page=", 5)) o.page = atoi(value);
        if (!strncmp(argv[i], "layout=", 7)) o.by_heads = !strcmp(value, "heads");
        if (!strncmp(argv[i], "data=", 5)) o.kind = !strcmp(value, "clusters") ? CLUSTERS : !strcmp(value, "planted") ? PLANTED : RANDOM;
        if (!strncmp(argv[i], "sketch=", 7)) o.sketch = strcmp(value, "off") != 0;
        if (!strncmp(argv[i], "recorded=", 9)) o.recorded = value;
        if (!strncmp(argv[i], "max=", 4)) o.most = atoll(value);
        if (!strncmp(argv[i], "only=", 5)) o.only = value;
        if (!strncmp(argv[i], "least=", 6)) o.least = atoll(value);
        if (!strncmp(argv[i], "table=", 6)) o.shuffled = strcmp(value, "linear") != 0;
    }
    return o;
}

/* Memory for one pool of `blocks` blocks, to s->kv. */
static void make_source(const bench &b, source *s, int64_t blocks, int kv_heads, int k_dim, int v_dim) {
    const int64_t page = b.o.page;
    s->kv = ekv_kv_default();
    s->kv.kv_heads = kv_heads;
    s->kv.k_dim = k_dim;
    s->kv.v_dim = v_dim;
    s->kv.page_size = b.o.page;
    s->kv.blocks = blocks;
    layout *const l[2] = {&s->k, &s->v};
    for (int i = 0; i < 2; i++) {
        const int64_t dim = i ? v_dim : k_dim;
        *l[i] = {page * kv_heads * dim, b.o.by_heads ? dim : kv_heads * dim, b.o.by_heads ? page * dim : dim, (int)page, (int)dim};
    }
    s->kv.k_block_stride = s->k.block, s->kv.k_token_stride = s->k.token, s->kv.k_head_stride = s->k.head;
    s->kv.v_block_stride = s->v.block, s->kv.v_token_stride = s->v.token, s->kv.v_head_stride = s->v.head;
    CUDA(cudaMalloc((void **)&s->kv.k, blocks * s->k.block * 2));
    CUDA(cudaMalloc((void **)&s->kv.v, blocks * s->v.block * 2));
}

/* Statistics of the first n tokens by the block table, and the basis of the sketch before them; returns the milliseconds of the last
 * part, in which all is computed. */
static float build_index(const bench &b, source *s, int64_t n) {
    cudaEvent_t begin, end;
    float ms;
    ekv_index_params shape = ekv_index_params_default();
    shape.kv_heads = s->kv.kv_heads;
    shape.k_dim = s->kv.k_dim;
    shape.v_dim = s->kv.v_dim;
    shape.page_size = s->kv.page_size;
    shape.blocks = s->kv.blocks;
    if (b.o.sketch && shape.page_size % 16 == 0) shape.statistics |= EKV_STATISTICS_SKETCH;
    EKV(b.context, ekv_index_create(b.context, &shape, NULL, 0, &s->index));
    CUDA(cudaDeviceSynchronize());
    if (shape.statistics & EKV_STATISTICS_SKETCH && n >= 2048)
        EKV(b.context, ekv_index_find_basis(b.context, s->index, &s->kv, b.table, 2048));
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(begin, 0));
    EKV(b.context, ekv_index_update(b.context, s->index, &s->kv, b.table, 0, n, n));
    CUDA(cudaEventRecord(end, 0));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms;
}

static void make_table(bench &b, int64_t blocks) {
    std::vector<int> table(blocks);
    uint64_t r = 12345;
    for (int64_t i = 0; i < blocks; i++) table[i] = (int)i;
    for (int64_t i = 0; b.o.shuffled && i < blocks; i++) {
        r = r * 6364136223846793005ull + 1442695040888963407ull;
        const int64_t j = (int64_t)((r >> 33) % (uint64_t)(i + 1));
        table[i] = table[j];
        table[j] = (int)i;
    }
    CUDA(cudaMalloc(&b.table, blocks * 4));
    CUDA(cudaMemcpy(b.table, table.data(), blocks * 4, cudaMemcpyHostToDevice));
}

static void make_outputs(bench &b, int v_dim) {
    CUDA(cudaMalloc(&b.out, (size_t)b.q_heads * v_dim * 4));
    CUDA(cudaMalloc(&b.lengths, 4));
    CUDA(cudaMalloc(&b.report, b.q_heads * sizeof(ekv_report)));
}

/* Made-up data; contexts from 4 K on. */
static void make_data(bench &b) {
    const int64_t heads = b.o.heads, dim = b.o.dim, blocks = b.o.most / b.o.page, elements = blocks * b.o.page * heads * dim;
    static const char *const names[] = {"random", "clusters", "planted"};
    source s;
    float *q;
    make_table(b, blocks);
    make_source(b, &s, blocks, b.o.heads, b.o.dim, b.o.dim);
    CUDA(cudaMalloc(&q, heads * b.o.group * dim * 4));
    fill_float<<<32, 256>>>(q, heads * b.o.group * dim, 99);
    fill<<<132 * 8, 256>>>((__half *)s.kv.k, elements, 1ull << 40, q, b.o.kind, b.o.dim, b.o.group, b.o.page, heads, b.o.by_heads);
    fill<<<132 * 8, 256>>>((__half *)s.kv.v, elements, 2ull << 40, q, RANDOM, b.o.dim, b.o.group, b.o.page, heads, b.o.by_heads);
    s.q = q;
    b.q_heads = b.o.heads * b.o.group;
    b.alpha = 1.5;
    b.scale = 0.0f;
    make_outputs(b, b.o.dim);
    const float build = build_index(b, &s, b.o.most);
    b.sources.push_back(s);
    printf("kv_heads %d, group %d, dim %d, page %d, layout %s, data %s; copy bandwidth %.3f TB/s; statistics of %lld tokens "
           "built in %.2f ms\n",
           b.o.heads, b.o.group, b.o.dim, b.o.page, b.o.by_heads ? "heads" : "tokens", names[b.o.kind], b.bandwidth * 1e-12,
           (long long)b.o.most, build);
}

/* Recorded layers, each in a pool of its own; the query is that of the last position. */
static bool load_recording(bench &b) {
#if EKV_HAVE_RECORDINGS
    lm_error error;
    recording r;
    if (!recording_open(b.o.recorded, &r, &error)) return printf("%s\n", error.text), false;
    if (r.dtype != EKV_F16) return printf("%s: keys and values are not f16\n", b.o.recorded), false;
    const int64_t blocks = (r.length + b.o.page - 1) / b.o.page, q_row = (int64_t)r.q_heads * r.k_dim;
    float build = 0.0f;
    make_table(b, blocks);
    std::vector<int> table(blocks);
    CUDA(cudaMemcpy(table.data(), b.table, blocks * 4, cudaMemcpyDeviceToHost));
    b.q_heads = r.q_heads;
    b.alpha = r.alpha;
    b.scale = r.scale;
    b.slopes.assign(r.slopes, r.slopes + r.q_heads);
    b.o.least = b.o.most = r.length;
    make_outputs(b, r.v_dim);
    for (int32_t i = 0; i < r.layers; i++) {
        source s;
        float *q;
        make_source(b, &s, blocks, r.kv_heads, r.k_dim, r.v_dim);
        for (int value = 0; value < 2; value++) {
            const layout &l = value ? s.v : s.k;
            const unsigned char *from = value ? r.layer[i].v : r.layer[i].k;
            std::vector<uint16_t> pool(blocks * l.block);
            for (int64_t t = 0; t < r.length; t++)
                for (int h = 0; h < r.kv_heads; h++)
                    memcpy(&pool[table[t / b.o.page] * l.block + t % b.o.page * l.token + h * l.head],
                           from + (t * r.kv_heads + h) * l.dim * 2, l.dim * 2);
            CUDA(cudaMemcpy((void *)(value ? s.kv.v : s.kv.k), pool.data(), pool.size() * 2, cudaMemcpyHostToDevice));
        }
        CUDA(cudaMalloc(&q, q_row * 4));
        CUDA(cudaMemcpy(q, r.layer[i].q + (r.queries - 1) * q_row * 4, q_row * 4, cudaMemcpyHostToDevice));
        s.q = q;
        build += build_index(b, &s, r.length);
        b.sources.push_back(s);
    }
    printf("%s: %d layers, kv_heads %d, q_heads %d, dims %d and %d, page %d; copy bandwidth %.3f TB/s; statistics built in %.2f ms\n",
           b.o.recorded, r.layers, r.kv_heads, r.q_heads, r.k_dim, r.v_dim, b.o.page, b.bandwidth * 1e-12, build);
    recording_close(&r);
    return true;
#else
    printf("recorded: this build has no reader of recordings\n");
    return false;
#endif
}

int main(int argc, char **argv) {
    bench b;
    b.o = parse(argc, argv);
    char message[256];
    ekv_context_params params = ekv_context_params_default();
    params.backend = "cuda";
    if (ekv_context_create(&params, &b.context, message, sizeof message) != EKV_OK) {
        printf("skipped: %s\n", message);
        return 77;
    }
    CUDA(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    measure_bandwidth(b);
    if (!b.o.recorded)
        make_data(b);
    else if (!load_recording(b))
        return 1;
    printf("policy      tokens  graph ms  calls ms         MB   dense  sketch  floor ms   share   support  rel error\n");
    const char *const policies[] = {"softmax", "full", "gaussian", "topk", "certified"};
    for (const char *policy : policies)
        for (int64_t n = b.o.least; n <= b.o.most; n *= n == 4096 ? 8 : n == 524288 ? 2 : 4)
            if (!b.o.only || !strcmp(b.o.only, policy)) row(b, policy, n);
    for (const source &s : b.sources) ekv_index_destroy(s.index);
    ekv_context_destroy(b.context);
    return 0;
}
