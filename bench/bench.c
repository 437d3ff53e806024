/*
 * entmaxkv bench: the command line, and the sweep over workloads, group sizes and threads.
 *
 * machine.h reads memory and multiplies, gate.h checks conformance, workload.h makes the keys, measure.h times, output.h prints.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "command.h"

#include "gate.h"
#include "output.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char help[] = "Usage: entmaxkv bench [OPTION]...\n"
                           "       entmaxkv bench --prefill N,... [OPTION]...\n"
                           "Times decode steps of each policy against full attention with softmax, in the\n"
                           "same run, on the same data, with the same threads, after measuring how fast these\n"
                           "threads read memory, and multiply and add.  First every kernel and policy must pass\n"
                           "conformance in this process: what computes wrong results is not timed.\n"
                           "\n"
                           "With --prefill a step has many query tokens: the last --queries of N, each of which\n"
                           "sees the tokens up to itself.  Policies are softmax and full.\n"
                           "\n"
                           "Options with [N,...] take a list; every combination is run.\n"
                           "  --keys K,...       random, planted, recorded  [random,planted; prefill random]\n"
                           "  --recorded FILE    what entmaxkv-lm record wrote; alone it means --keys recorded\n"
                           "  --policy P,...     softmax, full, topk, gaussian, certified  [all]; softmax, which\n"
                           "                     is full at alpha 1, always runs\n"
                           "  --context N,...    tokens of each sequence  [4096,32768,131072]\n"
                           "  --prefill N,...    tokens of each sequence, of which many have queries\n"
                           "  --queries N        how many, at the end, if there are as many  [2048]\n"
                           "  --group N,...      query heads per KV head  [1,4]\n"
                           "  --batch N,...      sequences  [1]\n"
                           "  --alpha A,...      above 1  [1.5, or the recording's]\n"
                           "  --dtype T,...      f32, f16, bf16  [f16]\n"
                           "  --page-size N,...  [16]\n"
                           "  --threads N,...    0: the physical cores that this process may use  [0]\n"
                           "  --kv-heads N       [8]\n"
                           "  --dim N            of keys and values; or --key-dim N, --value-dim N  [128]\n"
                           "  --budget N         tokens that topk reads per query head  [1024]\n"
                           "  --backend NAME     entmaxkv info lists them  [the best that runs here]\n"
                           "  --repeat N         timed steps of each policy  [9]\n"
                           "  --warm             leave the caches as they are; otherwise all of them are filled\n"
                           "                     with other data before each timed step\n"
                           "  --seed S           of random and planted keys and of the conformance cases  [1]\n"
                           "  --json             one flat JSON object a line\n"
                           "  --csv              comma-separated values\n"
                           "  --plot FILE.svg    also draw speed-up against context (needs gnuplot)\n"
                           "  --list             print what would run, and the memory it takes, and stop\n"
                           "  --help             this text\n"
                           "\n"
                           "random: independent normal keys, scores of deviation 1.  planted: the same, and 2 %\n"
                           "of the tokens, in runs of 16, look like what the queries look for; in half of the KV\n"
                           "heads page boxes see them, in the others they do not.  recorded: a model's own\n"
                           "heads, dimensions, slopes and scale; N is its last N tokens; means over layers.\n"
                           "\n"
                           "Columns: ms, the median, and the middle half; what the policy read, per step; what\n"
                           "share of the read bandwidth that is; speed-up over softmax; error, relative L2\n"
                           "distance from full attention in double precision over a sample of heads, which for\n"
                           "topk and gaussian includes what they did not read; pages read and tokens in the\n"
                           "support, per query head.  Prefill instead: GFLOP/s, 2 for each multiplication and\n"
                           "addition of scores, and of values with a weight above 0; what share that is of the\n"
                           "fused multiply-adds that the same threads do in registers; time over that of\n"
                           "softmax.  docs/performance.md says more.\n"
                           "\n"
                           "Sizes that do not fit in memory are skipped, and said to be.  With --json and --csv\n"
                           "all but the results goes to stderr.  Exit status: 0 success, 1 failure, 2 wrong\n"
                           "command line.\n";

enum { LIST = 16, POLICIES = 5, MEASURED = 1 + (POLICIES - 1) * LIST };

typedef struct list {
    int64_t value[LIST];
    int count;
} list;

/* How many threads, with what they read memory with, and how fast they are. */
typedef struct crew {
    ekv_context *context;
    machine_stream stream;
    double bandwidth;
    machine_peak peak;
} crew;

typedef enum format { TABLE, JSON, CSV } format;

typedef struct bench {
    list keys, policies, contexts, groups, batches, dtypes, page_sizes, threads;
    double alpha[LIST];
    int alphas;
    int64_t kv_heads, k_dim, v_dim, queries, budget, repeats, seed;
    const char *backend, *recorded, *plot;
    format format;
    bool warm, only_list, prefill; /* contexts are then those of --prefill */
    recording recording;
    crew crews[LIST];
    int crew_count;
    ekv_context *filler; /* fills the caches */
    measurement *results;
    int result_count, skipped, planned;
    lm_error error;
} bench;

/* softmax is full at alpha = 1. */
static const char *const policy_names[POLICIES] = {"softmax", "full", "topk", "gaussian", "certified"};
static const ekv_policy policies[POLICIES] = {EKV_POLICY_FULL, EKV_POLICY_FULL, EKV_POLICY_TOPK, EKV_POLICY_GAUSSIAN,
                                              EKV_POLICY_CERTIFIED};
static const char *const dtype_names[] = {[EKV_F32] = "f32", [EKV_F16] = "f16", [EKV_BF16] = "bf16"};

/* ---- the command line ---- */

/* The next part of a comma-separated list; false when it is too long for a value. */
static bool next_part(const char **text, char part[64]) {
    const size_t length = strcspn(*text, ",");
    const bool fits = length < 64;
    snprintf(part, 64, "%.*s", (int)(fits ? length : 63), *text);
    *text += length;
    if (**text == ',') (*text)++;
    else *text = NULL;
    return fits;
}

static bool add_value(list *l, const char *option, int64_t value, const char *text) {
    for (int i = 0; i < l->count; i++) {
        if (l->value[i] != value) continue;
        fprintf(stderr, "entmaxkv: --%s: %s stands twice\n", option, text);
        return false;
    }
    if (l->count == LIST) {
        fprintf(stderr, "entmaxkv: --%s: at most %d values\n", option, LIST);
        return false;
    }
    l->value[l->count++] = value;
    return true;
}

static bool parse_numbers(const char *option, const char *text, int64_t least, int64_t most, list *l) {
    char part[64];
    l->count = 0;
    while (text) {
        int64_t value;
        next_part(&text, part); /* what is too long is no number either */
        if (!command_number(option, part, least, most, &value) || !add_value(l, option, value, part)) return false;
    }
    return true;
}

static bool parse_names(const char *option, const char *text, const char *const *known, int known_count, list *l) {
    char part[64], all[160] = "";
    for (int i = 0; i < known_count; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", known[i]);
    l->count = 0;
    while (text) {
        const bool fits = next_part(&text, part);
        int found = 0;
        while (found < known_count && strcmp(known[found], part) != 0) found++;
        if (!fits || found == known_count) {
            fprintf(stderr, "entmaxkv: --%s %s: expected one or more of %s, with commas between\n", option, part, all);
            return false;
        }
        if (!add_value(l, option, found, part)) return false;
    }
    return true;
}

static bool parse_alphas(bench *b, const char *text) {
    char part[64];
    b->alphas = 0;
    while (text) {
        char *end;
        const bool fits = next_part(&text, part);
        const double alpha = strtod(part, &end);
        if (!fits || end == part || *end || !(alpha >= 1.001 && alpha <= 100)) {
            fprintf(stderr, "entmaxkv: --alpha %s: expected a number from 1.001 to 100 (alpha 1 is the policy softmax)\n", part);
            return false;
        }
        for (int i = 0; i < b->alphas; i++)
            if (b->alpha[i] == alpha) {
                fprintf(stderr, "entmaxkv: --alpha: %s stands twice\n", part);
                return false;
            }
        if (b->alphas == LIST) {
            fprintf(stderr, "entmaxkv: --alpha: at most %d values\n", LIST);
            return false;
        }
        b->alpha[b->alphas++] = alpha;
    }
    return true;
}

static bool has(const list *l, int64_t value) {
    for (int i = 0; i < l->count; i++)
        if (l->value[i] == value) return true;
    return false;
}

/* What getopt cannot know: options that exclude each other, and the values of what was not given. */
static bool check_options(bench *b, const list *prefills) {
    const char *wrong = NULL;
    b->prefill = prefills->count > 0;
    if (b->prefill) {
        if (b->contexts.count) wrong = "--prefill stands in place of --context: not both";
        if (b->plot) wrong = "--plot draws decode steps: not with --prefill";
        for (int i = 0; i < b->policies.count; i++)
            if (b->policies.value[i] > 1) wrong = "--prefill times the policies softmax and full alone";
        b->contexts = *prefills;
    } else if (b->queries) {
        wrong = "--queries needs --prefill";
    }
    if (wrong) {
        fprintf(stderr, "entmaxkv: %s\n", wrong);
        return false;
    }
    if (!b->contexts.count) b->contexts = (list){{4096, 32768, 131072}, 3};
    if (!b->policies.count) b->policies = (list){{0, 1, 2, 3, 4}, b->prefill ? 2 : POLICIES};
    if (!b->prefill) b->queries = 1;
    else if (!b->queries) b->queries = 2048;
    if (b->keys.count == 0) {
        if (b->recorded)
            add_value(&b->keys, "keys", KEYS_RECORDED, "recorded");
        else
            b->keys = (list){{KEYS_RANDOM, KEYS_PLANTED}, b->prefill ? 1 : 2};
    }
    if (has(&b->keys, KEYS_RECORDED) == (b->recorded != NULL)) return true;
    fputs(b->recorded ? "entmaxkv: --recorded is given, but --keys does not hold recorded\n"
                      : "entmaxkv: --keys recorded needs --recorded FILE\n",
          stderr);
    return false;
}

/* Exit status, or -1 to go on. */
static int parse(int argc, char **argv, bench *b) {
    enum { KEYS, RECORDED, POLICY, CONTEXT, PREFILL, QUERIES, GROUP, BATCH, ALPHA, DTYPE, PAGE_SIZE, THREADS, KV_HEADS, DIM,
           KEY_DIM, VALUE_DIM, BUDGET, BACKEND, REPEAT, WARM, SEED, AS_JSON, AS_CSV, PLOT, ONLY_LIST, HELP };
    static const struct option options[] = {
        {"keys", required_argument, NULL, KEYS},           {"recorded", required_argument, NULL, RECORDED},
        {"policy", required_argument, NULL, POLICY},       {"context", required_argument, NULL, CONTEXT},
        {"prefill", required_argument, NULL, PREFILL},     {"queries", required_argument, NULL, QUERIES},
        {"group", required_argument, NULL, GROUP},         {"batch", required_argument, NULL, BATCH},
        {"alpha", required_argument, NULL, ALPHA},         {"dtype", required_argument, NULL, DTYPE},
        {"page-size", required_argument, NULL, PAGE_SIZE}, {"threads", required_argument, NULL, THREADS},
        {"kv-heads", required_argument, NULL, KV_HEADS},   {"dim", required_argument, NULL, DIM},
        {"key-dim", required_argument, NULL, KEY_DIM},     {"value-dim", required_argument, NULL, VALUE_DIM},
        {"budget", required_argument, NULL, BUDGET},       {"backend", required_argument, NULL, BACKEND},
        {"repeat", required_argument, NULL, REPEAT},       {"warm", no_argument, NULL, WARM},
        {"seed", required_argument, NULL, SEED},           {"json", no_argument, NULL, AS_JSON},
        {"csv", no_argument, NULL, AS_CSV},                {"plot", required_argument, NULL, PLOT},
        {"list", no_argument, NULL, ONLY_LIST},            {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}};
    list prefills = {.count = 0};
    bool ok = true;
    for (int option; ok && (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case KEYS: ok = parse_names("keys", optarg, key_kind_names, KEY_KINDS, &b->keys); break;
        case RECORDED: b->recorded = optarg; break;
        case POLICY: ok = parse_names("policy", optarg, policy_names, POLICIES, &b->policies); break;
        case CONTEXT: ok = parse_numbers("context", optarg, 1, 1 << 30, &b->contexts); break;
        case PREFILL: ok = parse_numbers("prefill", optarg, 2, 1 << 30, &prefills); break;
        case QUERIES: ok = command_number("queries", optarg, 2, 1 << 30, &b->queries); break;
        case GROUP: ok = parse_numbers("group", optarg, 1, 256, &b->groups); break;
        case BATCH: ok = parse_numbers("batch", optarg, 1, 1024, &b->batches); break;
        case ALPHA: ok = parse_alphas(b, optarg); break;
        case DTYPE: ok = parse_names("dtype", optarg, dtype_names, 3, &b->dtypes); break;
        case PAGE_SIZE: ok = parse_numbers("page-size", optarg, 1, EKV_MAX_PAGE_SIZE, &b->page_sizes); break;
        case THREADS: ok = parse_numbers("threads", optarg, 0, 4096, &b->threads); break;
        case KV_HEADS: ok = command_number("kv-heads", optarg, 1, 1024, &b->kv_heads); break;
        case DIM:
            ok = command_number("dim", optarg, 1, EKV_MAX_DIM, &b->k_dim);
            b->v_dim = b->k_dim;
            break;
        case KEY_DIM: ok = command_number("key-dim", optarg, 1, EKV_MAX_DIM, &b->k_dim); break;
        case VALUE_DIM: ok = command_number("value-dim", optarg, 1, EKV_MAX_DIM, &b->v_dim); break;
        case BUDGET: ok = command_number("budget", optarg, 1, INT64_C(1) << 40, &b->budget); break;
        case BACKEND: b->backend = optarg; break;
        case REPEAT: ok = command_number("repeat", optarg, 1, 100000, &b->repeats); break;
        case WARM: b->warm = true; break;
        case SEED: ok = command_number("seed", optarg, 0, INT64_MAX, &b->seed); break;
        case AS_JSON: b->format = JSON; break;
        case AS_CSV: b->format = CSV; break;
        case PLOT: b->plot = optarg; break;
        case ONLY_LIST: b->only_list = true; break;
        case HELP: fputs(help, stdout); return EXIT_PASSED;
        default: return EXIT_USAGE;
        }
    }
    if (ok && optind < argc) {
        fprintf(stderr, "entmaxkv: bench takes no argument '%s'\n", argv[optind]);
        ok = false;
    }
    return ok && check_options(b, &prefills) ? -1 : EXIT_USAGE;
}

/* ---- what is run ---- */

/* Where all but the results goes. */
static FILE *notes(const bench *b) { return b->format == TABLE ? stdout : stderr; }

static double gib(double bytes) { return bytes / ((double)(1 << 30)); }

static workload_shape shape_of(const bench *b, key_kind keys, ekv_dtype dtype, int64_t page_size, int64_t batch,
                               int64_t context) {
    workload_shape s = {.keys = keys, .dtype = dtype, .layers = 1, .kv_heads = (int32_t)b->kv_heads, .k_dim = (int32_t)b->k_dim,
                        .v_dim = (int32_t)b->v_dim, .page_size = (int32_t)page_size, .batch = (int32_t)batch,
                        .context = context, .seed = (uint64_t)b->seed};
    if (keys == KEYS_RECORDED) {
        const recording *r = &b->recording;
        s.layers = r->layers;
        s.kv_heads = r->kv_heads;
        s.k_dim = r->k_dim;
        s.v_dim = r->v_dim;
        s.recording = r;
    }
    return s;
}

/* Query tokens of each sequence. */
static int64_t queries_of(const bench *b, const workload_shape *s) { return b->queries < s->context ? b->queries : s->context; }

static list groups_of(const bench *b, const workload_shape *s) {
    if (s->keys == KEYS_RECORDED) return (list){{b->recording.q_heads / b->recording.kv_heads}, 1};
    return b->groups;
}

/* softmax, then each alpha with the other policies. */
static int policies_of(const bench *b, const workload_shape *s, measured_policy measured[MEASURED]) {
    const bool own = b->alphas == 0;
    const double usual = s->keys == KEYS_RECORDED && b->recording.alpha >= 1.001 ? b->recording.alpha : 1.5;
    int count = 0;
    measured[count++] = (measured_policy){policy_names[0], policies[0], 1};
    for (int a = 0; a < (own ? 1 : b->alphas); a++)
        for (int i = 0; i < b->policies.count; i++) {
            const int64_t p = b->policies.value[i];
            if (p) measured[count++] = (measured_policy){policy_names[p], policies[p], own ? usual : b->alpha[a]};
        }
    return count;
}

/* Memory that it takes, but for the library's scratch memory and what the caches are filled from. */
static double bytes_of(const bench *b, const workload_shape *s) {
    measured_policy measured[MEASURED];
    const list groups = groups_of(b, s);
    int64_t most = 0;
    for (int g = 0; g < groups.count; g++)
        if (groups.value[g] > most) most = groups.value[g];
    return workload_bytes(s) + measure_bytes(s, (int32_t)most, queries_of(b, s), policies_of(b, s, measured));
}

/* Why a workload cannot be run; false if it can. */
static bool unfit(const bench *b, const workload_shape *s, char *why, size_t size) {
    const recording *r = &b->recording;
    const double bytes = bytes_of(b, s), room = 0.9 * machine_free_memory();
    why[0] = 0;
    if (s->keys == KEYS_RECORDED && s->context + s->batch - 1 > r->length)
        snprintf(why, size, "the recording has %" PRId64 " tokens", r->length);
    else if (s->keys == KEYS_RECORDED && queries_of(b, s) + s->batch - 1 > r->queries)
        snprintf(why, size, "the recording has queries of %" PRId64 " positions", r->queries);
    else if (s->context > INT32_MAX / s->batch - s->page_size)
        snprintf(why, size, "that is more than 2^31 tokens");
    else if (room > 0 && bytes > room)
        snprintf(why, size, "it takes %.1f GiB and %.1f GiB are free", gib(bytes), gib(room));
    return why[0] != 0;
}

static bool keep_results(bench *b, const measurement *results, int count) {
    measurement *all = realloc(b->results, (size_t)(b->result_count + count) * sizeof *all);
    if (!all) return lm_fail(&b->error, "out of memory");
    b->results = all;
    memcpy(all + b->result_count, results, (size_t)count * sizeof *all);
    b->result_count += count;
    if (b->format == JSON && !output_json(results, count)) return lm_fail(&b->error, "cannot write the results");
    if (b->format == CSV) output_csv(results, count);
    if (b->format == TABLE) output_table(results, count);
    fflush(stdout);
    return true;
}

static bool run_cells(bench *b, const workload *w) {
    measured_policy measured[MEASURED];
    measurement results[MEASURED];
    const int count = policies_of(b, &w->shape, measured);
    const list groups = groups_of(b, &w->shape);
    for (int t = 0; t < b->crew_count; t++) {
        for (int g = 0; g < groups.count; g++) {
            const cell c = {.workload = w, .context = b->crews[t].context, .stream = &b->crews[t].stream,
                            .bandwidth = b->crews[t].bandwidth, .peak = b->crews[t].peak, .policies = measured, .policy_count = count,
                            .group = (int32_t)groups.value[g], .queries = queries_of(b, &w->shape), .budget = b->budget,
                            .repeats = (int)b->repeats, .warm = b->warm};
            if (!measure_cell(&c, results, &b->error) || !keep_results(b, results, count)) return false;
        }
    }
    return true;
}

static bool run_workload(bench *b, const workload_shape *s) {
    char why[160];
    workload w;
    if (unfit(b, s, why, sizeof why)) {
        fprintf(notes(b), "%sskipped: %s keys, %s, pages of %d, batch %d, context %" PRId64 ": %s\n",
                b->format == TABLE && !b->only_list ? "\n" : "", key_kind_names[s->keys], dtype_names[s->dtype], s->page_size,
                s->batch, s->context, why);
        b->skipped++;
        return true;
    }
    b->planned++;
    if (b->only_list) {
        printf("%s keys, %s, pages of %d, batch %d, context %" PRId64 ": %.2f GiB\n", key_kind_names[s->keys],
               dtype_names[s->dtype], s->page_size, s->batch, s->context, gib(bytes_of(b, s)));
        return true;
    }
    const bool ok = workload_create(b->filler, s, &w, &b->error) && run_cells(b, &w);
    workload_free(&w);
    return ok;
}

static bool sweep(bench *b) {
    for (int k = 0; k < b->keys.count; k++)
        for (int d = 0; d < b->dtypes.count; d++)
            for (int p = 0; p < b->page_sizes.count; p++)
                for (int n = 0; n < b->batches.count; n++)
                    for (int c = 0; c < b->contexts.count; c++) {
                        const workload_shape s = shape_of(b, (key_kind)b->keys.value[k], (ekv_dtype)b->dtypes.value[d],
                                                          b->page_sizes.value[p], b->batches.value[n], b->contexts.value[c]);
                        if (!run_workload(b, &s)) return false;
                    }
    return b->planned > 0 || lm_fail(&b->error, "nothing was run: all sizes were skipped");
}

/* ---- before it ---- */

static ekv_context *open_context(bench *b, int64_t threads) {
    ekv_context_params params = ekv_context_params_default();
    ekv_context *context = NULL;
    char message[320];
    params.backend = b->backend;
    params.threads = (int32_t)threads;
    if (ekv_context_create(&params, &context, message, sizeof message) != EKV_OK) lm_fail(&b->error, "%s", message);
    return context;
}

static bool open_backend(bench *b) {
    b->filler = open_context(b, 0);
    if (!b->filler) return false;
    if (strcmp(ekv_context_backend(b->filler), "cuda") != 0) return true;
    return lm_fail(&b->error, "--backend cuda: this benchmark times the CPU's backends");
}

static bool check_conformance(bench *b) {
    ekv_conform_options subject = ekv_conform_options_default();
    ekv_policy timed[POLICIES] = {EKV_POLICY_FULL};
    int count = 1;
    gate_result result;
    subject.backend = ekv_context_backend(b->filler);
    subject.seed = (uint64_t)b->seed;
    for (int i = 0; i < b->policies.count; i++)
        if (b->policies.value[i] > 1) timed[count++] = policies[b->policies.value[i]];
    if (!gate_pass(&subject, timed, count, &result))
        return lm_fail(&b->error, "conformance fails, so nothing is timed: %.400s", result.text);
    fprintf(notes(b), "conformance: every kernel and the policies to be timed, %" PRId64 " cases passed\n", result.passed);
    fflush(notes(b));
    return true;
}

/* Several times the last-level cache, so that what is read comes from memory, but not what the machine has not got. */
static size_t stream_bytes(size_t cache) {
    const size_t least = (size_t)256 << 20, wanted = cache ? 4 * cache : 2 * least;
    const double room = machine_free_memory() / 4;
    size_t bytes = wanted > least ? wanted : least;
    if (room > 0 && (double)bytes > room) bytes = (size_t)room;
    return bytes;
}

static bool open_crew(bench *b, int64_t threads, size_t bytes) {
    crew *c = &b->crews[b->crew_count];
    c->context = open_context(b, threads);
    if (!c->context) return false;
    b->crew_count++;
    const int32_t count = ekv_context_threads(c->context);
    if (!machine_stream_open(&c->stream, bytes, count)) return lm_fail(&b->error, "out of memory");
    c->bandwidth = machine_stream_bandwidth(&c->stream, 7);
    fprintf(notes(b), "read bandwidth: %.2f GB/s with %d thread%s, best of 7 readings of %zu MiB\n", 1e-9 * c->bandwidth, count,
            count == 1 ? "" : "s", bytes >> 20);
    c->peak = machine_multiply_add_peak(ekv_context_backend(c->context), count, 25);
    fprintf(notes(b), "multiply-adds: %.1f GFLOP/s fused, %.1f as two instructions, with %d thread%s, best of 25 loops\n",
            1e-9 * c->peak.fused, 1e-9 * c->peak.separate, count, count == 1 ? "" : "s");
    return true;
}

static void print_head(const bench *b, int argc, char **argv, size_t cache) {
    const int version = ekv_version();
    char processor[160];
    machine_processor(processor, sizeof processor);
    fprintf(notes(b), "command: entmaxkv");
    for (int i = 0; i < argc; i++) fprintf(notes(b), " %s", argv[i]);
    fprintf(notes(b), "\nEntmaxKV %d.%d.%d, backend %s (%s)\n", version / 10000, version / 100 % 100, version % 100,
            ekv_context_backend(b->filler), ekv_context_backend_reason(b->filler));
    fprintf(notes(b), "processor: %s, ", processor);
    if (cache)
        fprintf(notes(b), "%zu MiB of last-level cache\n", cache >> 20);
    else
        fprintf(notes(b), "last-level cache unknown\n");
    fprintf(notes(b), b->warm ? "caches: warm, as the step before left them\n"
                              : "caches: cold, all of them are filled with other data before each timed step\n");
    if (b->recorded)
        fprintf(notes(b), "recording: %s, %d layers, %" PRId64 " tokens, alpha %g\n", b->recorded, b->recording.layers,
                b->recording.length, b->recording.alpha);
    fprintf(notes(b), "times: median and middle half of %" PRId64 " steps", b->repeats);
    if (!b->prefill) fprintf(notes(b), "; topk reads %" PRId64 " tokens", b->budget);
    fputc('\n', notes(b));
    fflush(notes(b));
}

static bool run(bench *b, int argc, char **argv) {
    if (b->recorded && !recording_open(b->recorded, &b->recording, &b->error)) return false;
    if (b->only_list) return sweep(b);
    const size_t cache = machine_last_level_cache(), bytes = stream_bytes(cache);
    if (!open_backend(b) || (b->plot && !plot_available(&b->error))) return false;
    print_head(b, argc, argv, cache);
    if (!check_conformance(b)) return false;
    for (int i = 0; i < b->threads.count; i++)
        if (!open_crew(b, b->threads.value[i], bytes)) return false;
    if (b->format == CSV) output_csv_head();
    return sweep(b) && (!b->plot || plot_draw(b->plot, b->results, b->result_count, &b->error));
}

static void release(bench *b) {
    for (int i = 0; i < b->crew_count; i++) {
        machine_stream_close(&b->crews[i].stream);
        ekv_context_destroy(b->crews[i].context);
    }
    ekv_context_destroy(b->filler);
    recording_close(&b->recording);
    free(b->results);
}

int command_bench(int argc, char **argv) {
    static bench b;
    b = (bench){.groups = {{1, 4}, 2}, .batches = {{1}, 1}, .dtypes = {{EKV_F16}, 1}, .page_sizes = {{16}, 1}, .threads = {{0}, 1},
                .kv_heads = 8, .k_dim = 128, .v_dim = 128, .budget = 1024, .repeats = 9, .seed = 1};
    const int status = parse(argc, argv, &b);
    if (status >= 0) return status;
    const bool ok = run(&b, argc, argv);
    if (!ok) fprintf(stderr, "entmaxkv: %s\n", b.error.text);
    release(&b);
    return ok ? EXIT_PASSED : EXIT_FAILED;
}
