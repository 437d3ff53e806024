/*
 * Times decode steps of the backend cuda: one sequence, f16, policies and contexts in one table, with the bytes that the report
 * counts, their share of the copy bandwidth measured in the same run, and the error of two heads against double precision.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Usage: entmaxkv-gpu-time [heads=16] [group=1] [dim=128] [page=16] [layout=heads|tokens] [data=random|clusters] [max=1048576]
 * [only=policy] [least=4096] [table=shuffled|linear]
 *
 * Cold cache: every repetition reads another part of a pool that is larger than the second-level cache, or all of it.  `graph`
 * is the time per step of a CUDA graph that holds the repetitions, `calls` that of plain calls on a stream.
 */
#include "entmaxkv/entmaxkv.h"

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

/* Standard normal elements; with clusters, one row group (page) in 512 is shifted along the query of its head. */
__global__ void fill(__half *x, int64_t n, uint64_t seed, const float *query, int dim, int64_t rows_per_group, int64_t heads,
                     int by_heads) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float v = normal_at(seed + i);
        if (query) {
            const int64_t row = i / dim, group = by_heads ? row / rows_per_group : row / (rows_per_group * heads);
            const int64_t head = by_heads ? group % heads : row % heads, page = by_heads ? group / heads : group;
            if (mix(page * 77 + 13) % 512 == 0) v += 0.9f * query[head * dim + i % dim];
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
__global__ void exact_scores(const __half *k, const int *table, layout l, int head, const float *q, double scale, int64_t n,
                             double *s) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const __half *row = k + table[i / l.page] * l.block + i % l.page * l.token + head * l.head;
    double sum = 0.0;
    for (int d = 0; d < l.dim; d++) sum += (double)__half2float(row[d]) * (double)q[d];
    s[i] = sum * scale;
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
    bool by_heads = true, clusters = false;
    int64_t most = 1 << 20;
    const char *only = nullptr;
    int64_t least = 4096;
    bool shuffled = true;
};

struct bench {
    options o;
    ekv_context *context;
    ekv_kv kv;
    ekv_index *index;
    __half *k, *v;
    float *q, *out;
    int *table, *lengths;
    ekv_report *report;
    std::vector<int> host_table;
    double bandwidth; /* bytes per second of a device copy */
    cudaStream_t stream;
    layout l;
};

static double seconds(const bench &b, const std::vector<float> &ms) {
    (void)b;
    std::vector<float> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2] * 1e-3;
}

static ekv_decode_params step_of(const bench &b, const char *policy, int64_t n, int64_t part) {
    ekv_decode_params p = ekv_decode_params_default();
    p.kv = &b.kv;
    p.index = b.index;
    p.block_table_stride = n / b.o.page;
    p.block_table = b.table + part * (n / b.o.page);
    p.lengths = b.lengths;
    p.max_length = n;
    p.q_heads = b.o.heads * b.o.group;
    p.q = b.q;
    p.out = b.out;
    p.stream = b.stream;
    p.alpha = 1.5;
    if (!strcmp(policy, "softmax")) p.alpha = 1.0;
    if (!strcmp(policy, "topk")) p.policy = EKV_POLICY_TOPK;
    if (!strcmp(policy, "gaussian")) p.policy = EKV_POLICY_GAUSSIAN;
    if (!strcmp(policy, "certified")) p.policy = EKV_POLICY_CERTIFIED;
    return p;
}

static double relative_error(const bench &b, const ekv_decode_params &p, int64_t n) {
    double worst = 0.0, *s, *out;
    const int dim = b.o.dim, heads[2] = {0, b.o.heads * b.o.group - 1};
    CUDA(cudaMalloc(&s, n * sizeof *s));
    CUDA(cudaMalloc(&out, dim * sizeof *out));
    std::vector<double> scores(n), expected(dim);
    std::vector<float> got(dim);
    for (int h : heads) {
        exact_scores<<<(unsigned)((n + 255) / 256), 256>>>(b.k, p.block_table, b.l, h / b.o.group, b.q + h * dim,
                                                           1.0 / sqrt((double)dim), n, s);
        CUDA(cudaMemcpy(scores.data(), s, n * sizeof *s, cudaMemcpyDeviceToHost));
        exact_weights(p.alpha, scores);
        CUDA(cudaMemcpy(s, scores.data(), n * sizeof *s, cudaMemcpyHostToDevice));
        exact_values<<<dim, 256>>>(b.v, p.block_table, b.l, h / b.o.group, s, n, out);
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
    const int parts = (int)std::min<int64_t>(16, b.o.most / n), repeats = n >= (1 << 19) ? 5 : 9, inner = parts > 1 ? parts : 2;
    const int length = (int)n;
    CUDA(cudaMemcpy(b.lengths, &length, 4, cudaMemcpyHostToDevice));
    std::vector<ekv_decode_params> steps;
    for (int i = 0; i < inner; i++) steps.push_back(step_of(b, policy, n, i % parts));
    /* What is read, and how wrong it is. */
    ekv_decode_params p = steps[0];
    p.report = b.report;
    EKV(b.context, ekv_reserve(b.context, &p));
    EKV(b.context, ekv_decode(b.context, &p));
    CUDA(cudaStreamSynchronize(b.stream));
    std::vector<ekv_report> report(p.q_heads);
    CUDA(cudaMemcpy(report.data(), b.report, report.size() * sizeof(ekv_report), cudaMemcpyDeviceToHost));
    double bytes = 0.0, dense = 0.0, support = 0.0;
    for (const ekv_report &r : report) {
        bytes += (double)(r.bytes_keys + r.bytes_values + r.bytes_statistics);
        dense += (double)r.bytes_dense;
        support += (double)r.support / p.q_heads;
    }
    const double error = relative_error(b, p, n);
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
        times[kind] = seconds(b, ms);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    printf("%-9s %8lld %9.4f %9.4f %10.3f %7.2f%% %9.4f %7.1f%% %9.0f %10.2e\n", policy, (long long)n, times[0] * 1e3,
           times[1] * 1e3, bytes / 1e6, 100.0 * bytes / dense, bytes / b.bandwidth * 1e3,
           100.0 * bytes / b.bandwidth / times[0], support, error);
    fflush(stdout);
}

static void measure_bandwidth(bench &b) {
    const int64_t bytes = 2ll << 30;
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<float> ms;
    for (int i = 0; i < 12; i++) {
        CUDA(cudaEventRecord(begin, b.stream));
        copy<<<132 * 16, 512, 0, b.stream>>>((const uint4 *)b.k, (uint4 *)b.v,
                                             std::min<int64_t>(bytes, b.kv.blocks * b.l.block * 2) / 16);
        CUDA(cudaEventRecord(end, b.stream));
        CUDA(cudaEventSynchronize(end));
        float t;
        CUDA(cudaEventElapsedTime(&t, begin, end));
        if (i > 1) ms.push_back(t);
    }
    b.bandwidth = 2.0 * (double)std::min<int64_t>(bytes, b.kv.blocks * b.l.block * 2) / seconds(b, ms);
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
        if (!strncmp(argv[i], "data=", 5)) o.clusters = !strcmp(value, "clusters");
        if (!strncmp(argv[i], "max=", 4)) o.most = atoll(value);
        if (!strncmp(argv[i], "only=", 5)) o.only = value;
        if (!strncmp(argv[i], "least=", 6)) o.least = atoll(value);
        if (!strncmp(argv[i], "table=", 6)) o.shuffled = strcmp(value, "linear") != 0;
    }
    return o;
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
    const int64_t page = b.o.page, heads = b.o.heads, dim = b.o.dim, blocks = b.o.most / page,
                  elements = blocks * page * heads * dim;
    b.kv = ekv_kv_default();
    b.kv.kv_heads = (int32_t)heads;
    b.kv.k_dim = b.kv.v_dim = (int32_t)dim;
    b.kv.page_size = (int32_t)page;
    b.kv.blocks = blocks;
    b.l = {page * heads * dim, b.o.by_heads ? dim : heads * dim, b.o.by_heads ? page * dim : dim, (int)page, (int)dim};
    b.kv.k_block_stride = b.kv.v_block_stride = b.l.block;
    b.kv.k_token_stride = b.kv.v_token_stride = b.l.token;
    b.kv.k_head_stride = b.kv.v_head_stride = b.l.head;
    CUDA(cudaMalloc(&b.k, elements * 2));
    CUDA(cudaMalloc(&b.v, elements * 2));
    CUDA(cudaMalloc(&b.q, heads * b.o.group * dim * 4));
    CUDA(cudaMalloc(&b.out, heads * b.o.group * dim * 4));
    CUDA(cudaMalloc(&b.table, blocks * 4));
    CUDA(cudaMalloc(&b.lengths, 4));
    CUDA(cudaMalloc(&b.report, heads * b.o.group * sizeof(ekv_report)));
    b.kv.k = b.k, b.kv.v = b.v;
    measure_bandwidth(b);
    fill_float<<<32, 256>>>(b.q, heads * b.o.group * dim, 99);
    fill<<<132 * 8, 256>>>(b.k, elements, 1ull << 40, b.o.clusters ? b.q : nullptr, (int)dim, page, heads, b.o.by_heads);
    fill<<<132 * 8, 256>>>(b.v, elements, 2ull << 40, nullptr, (int)dim, page, heads, b.o.by_heads);
    b.host_table.resize(blocks);
    uint64_t r = 12345;
    for (int64_t i = 0; i < blocks; i++) b.host_table[i] = (int)i;
    for (int64_t i = 0; b.o.shuffled && i < blocks; i++) {
        r = r * 6364136223846793005ull + 1442695040888963407ull;
        const int64_t j = (int64_t)((r >> 33) % (uint64_t)(i + 1));
        b.host_table[i] = b.host_table[j];
        b.host_table[j] = (int)i;
    }
    CUDA(cudaMemcpy(b.table, b.host_table.data(), blocks * 4, cudaMemcpyHostToDevice));
    ekv_index_params shape = ekv_index_params_default();
    shape.kv_heads = (int32_t)heads;
    shape.k_dim = shape.v_dim = (int32_t)dim;
    shape.page_size = (int32_t)page;
    shape.blocks = blocks;
    EKV(b.context, ekv_index_create(b.context, &shape, NULL, 0, &b.index));
    CUDA(cudaDeviceSynchronize());
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(begin, 0));
    EKV(b.context, ekv_index_update(b.context, b.index, &b.kv, b.table, 0, b.o.most, b.o.most));
    CUDA(cudaEventRecord(end, 0));
    CUDA(cudaDeviceSynchronize());
    float build;
    CUDA(cudaEventElapsedTime(&build, begin, end));
    printf("kv_heads %d, group %d, dim %d, page %d, layout %s, data %s; copy bandwidth %.3f TB/s; statistics of %lld tokens "
           "built in %.2f ms\n",
           b.o.heads, b.o.group, b.o.dim, b.o.page, b.o.by_heads ? "heads" : "tokens", b.o.clusters ? "clusters" : "random",
           b.bandwidth * 1e-12, (long long)b.o.most, build);
    printf("policy      tokens  graph ms  calls ms         MB   dense  floor ms   share   support  rel error\n");
    const char *const policies[] = {"softmax", "full", "gaussian", "topk", "certified"};
    for (const char *policy : policies)
        for (int64_t n = b.o.least; n <= b.o.most; n *= n == 4096 ? 8 : n == 524288 ? 2 : 4)
            if (!b.o.only || !strcmp(b.o.only, policy)) row(b, policy, n);
    ekv_index_destroy(b.index);
    ekv_context_destroy(b.context);
    return 0;
}
