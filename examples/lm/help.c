/*
 * The texts of --help and --version (see help.h).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "help.h"

#include <stdio.h>

static const char program_help[] = "Usage: entmaxkv-lm COMMAND [OPTION]...\n"
                                   "Runs a small byte-level language model whose attention is EntmaxKV, and measures\n"
                                   "what each policy reads and what it loses.\n"
                                   "\n"
                                   "Commands:\n"
                                   "  perplexity   bits per byte of a text, decoded byte by byte\n"
                                   "  passkey      finds five digits that are hidden in a long text\n"
                                   "  generate     continues a prompt\n"
                                   "  record       writes the queries, keys and values of a text to a file\n"
                                   "  calibrate    finds how keys are sketched for policy certified, for --basis\n"
                                   "\n"
                                   "entmaxkv-lm COMMAND --help says more about a command; entmaxkv-lm --version\n"
                                   "prints the version and the library's backends.\n";

static const char basic_help[] = "\n"
                                 "Options of all commands:\n"
                                 "  --model DIR      config.json and model.safetensors  [models/nape-entmax-14m]\n"
                                 "  --text FILE      the text; several are read one after the other\n"
                                 "                   [persuasion-part1.txt in the model's folder]\n"
                                 "  --kv-type TYPE   how the cache keeps keys and values: f16, f32, bf16  [f16]\n"
                                 "  --backend NAME   reference, scalar, avx2, ...  [the best that runs here]\n"
                                 "  --threads N      0: the physical cores that this process may use  [0]\n"
                                 "  --help           this text\n";

static const char decoding_help[] = "\n"
                                    "Options of perplexity, passkey and generate:\n"
                                    "  --policy NAME    what attention reads while decoding: full, topk, gaussian or\n"
                                    "                   certified  [gaussian]\n"
                                    "  --budget TOKENS  topk: tokens to read per query head  [1024]\n"
                                    "  --basis FILE     certified: what calibrate wrote for this model; sketches then\n"
                                    "                   serve from the first token on\n"
                                    "  --seed S         for the random choices  [1]\n"
                                    "  --json           one flat JSON object a line instead of a table\n";

static const char exit_help[] = "\nExit status: 0 success, 1 failure, 2 wrong command line.\n";

static const char results_help[] = "\n"
                                   "--policy also takes a list, as in topk,gaussian.  full always runs first, as the\n"
                                   "yardstick; the others follow in the order given, each from the same prefilled\n"
                                   "cache.\n"
                                   "\n"
                                   "Results, over the tokens that were decoded with the policy:\n"
                                   "  bits_per_byte           perplexity: the lower the better\n"
                                   "  accuracy                passkey: share of exact answers\n"
                                   "  kv_bytes_share          bytes of keys, values and page statistics that were\n"
                                   "                          read, as a share of what dense attention reads\n"
                                   "  pages_share             share of the pages of which a key was read\n"
                                   "  mean_E, max_E           bound on the probability mass that was not read, per\n"
                                   "                          query head\n"
                                   "  max_output_error        largest measured L2 distance of a head's output from\n"
                                   "                          its output under full, for the same query\n"
                                   "  ms_per_token            a token's step through the whole model\n"
                                   "  attention_ms_per_token  the part of it that is spent in ekv_decode\n";

static const char perplexity_help[] = "Usage: entmaxkv-lm perplexity --context N --windows W [OPTION]...\n"
                                      "Bits per byte over W consecutive windows of N bytes.  The first half of each\n"
                                      "window is prefilled with full attention; each byte of the second half is decoded\n"
                                      "alone with the policy and counted.\n"
                                      "\n"
                                      "  --context N      bytes in a window\n"
                                      "  --windows W      windows\n"
                                      "  --offset BYTES   where in the text the first window begins  [0]\n";

static const char passkey_help[] = "Usage: entmaxkv-lm passkey --context N --trials T [OPTION]...\n"
                                   "Hides \" The pass key is 71432. Remember it. 71432 is the pass key. \", with\n"
                                   "random digits, in a random part of the text and asks for it at the end.  The\n"
                                   "text is prefilled with full attention; the question and the five digits are\n"
                                   "decoded with the policy.  Trial t = 0, 1, ... hides the key at depth\n"
                                   "(t + 1/2) / T.  accuracy is the share of exact answers.\n"
                                   "\n"
                                   "  --context N      bytes in all: text, key, question and answer\n"
                                   "  --trials T       trials\n";

static const char generate_help[] = "Usage: entmaxkv-lm generate --prompt TEXT --bytes N [OPTION]...\n"
                                    "Prints the prompt and its likeliest continuation, byte by byte.  The prompt is\n"
                                    "prefilled with full attention, the rest is decoded with the policy.  With --json\n"
                                    "bytes that are not UTF-8 appear as U+FFFD.\n"
                                    "\n"
                                    "  --prompt TEXT    the beginning\n"
                                    "  --bytes N        bytes to add\n";

static const char record_help[] = "Usage: entmaxkv-lm record --length N --out FILE.safetensors [OPTION]...\n"
                                  "Runs the model over N bytes of the text with full attention and writes, for each\n"
                                  "layer, the keys and values of all N and the queries of the last ones, for\n"
                                  "entmaxkv bench --keys recorded.  docs/reference-format.md describes the file.  A\n"
                                  "text that is too short is an error: repeated text would attend to its copy.\n"
                                  "\n"
                                  "  --length N       bytes to run over; time grows with N squared\n"
                                  "  --out FILE       the file to be written\n"
                                  "  --queries Q      positions at the end whose queries are kept  [64]\n"
                                  "  --offset BYTES   where in the text to begin  [0]\n";

static const char calibrate_help[] = "Usage: entmaxkv-lm calibrate --length N --out FILE.safetensors [OPTION]...\n"
                                     "Runs the model over N bytes of the text with full attention, finds for each layer\n"
                                     "and KV head the basis of the sketches that policy certified reads, and writes them\n"
                                     "for --basis.  A basis decides how much is read, never what the result is.\n"
                                     "\n"
                                     "  --length N       bytes to run over, at least 2048; time grows with N squared\n"
                                     "  --out FILE       the file to be written\n"
                                     "  --offset BYTES   where in the text to begin  [0]\n";

void lm_help_program(void) {
    fputs(program_help, stdout);
    fputs(basic_help, stdout);
    fputs(decoding_help, stdout);
    fputs(exit_help, stdout);
}

void lm_help_task(lm_task task) {
    static const char *const texts[] = {[LM_PERPLEXITY] = perplexity_help,
                                        [LM_PASSKEY] = passkey_help,
                                        [LM_GENERATE] = generate_help,
                                        [LM_RECORD] = record_help,
                                        [LM_CALIBRATE] = calibrate_help};
    fputs(texts[task], stdout);
    fputs(basic_help, stdout);
    if (task != LM_RECORD && task != LM_CALIBRATE) {
        fputs(decoding_help, stdout);
    }
    fputs(exit_help, stdout);
    if (task == LM_PERPLEXITY || task == LM_PASSKEY) {
        fputs(results_help, stdout);
    }
}

void lm_help_version(void) {
    int version = ekv_version();
    printf("entmaxkv-lm, EntmaxKV %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    ekv_backend_info info = {.size = sizeof info};
    for (int32_t i = 0; ekv_backend(i, &info) == EKV_OK; i++) {
        const char *state = !info.compiled ? "not in this build" : info.available ? "available" : "cannot run here";
        printf("  backend %-10s %s%s%s\n", info.name, state, info.note[0] != '\0' ? ": " : "", info.note);
    }
}
