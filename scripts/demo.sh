#!/bin/sh
# The demonstration: a small language model finds a passkey in a long text, and predicts text, with its attention computed by
# EntmaxKV: once reading the whole cache (policy full) and once for each policy that reads a part of it.
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/demo.sh [options for both runs of entmaxkv-lm]      for instance --threads 4
#
# Installs what is missing and builds first (in build/demo).
set -eu
# Waiting OpenMP threads sleep instead of spinning: on a machine with other work, spinning costs more than it saves.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

cd "$(dirname "$0")/.."
model=models/nape-entmax-14m

scripts/deps.sh build
build=build/demo
log=$build/build.log
mkdir -p "$build"
echo "Building (log: $log) ..."
if ! {
    cmake -S . -B "$build" -G Ninja -DENTMAXKV_TESTS=OFF -DENTMAXKV_BENCH=OFF && cmake --build "$build" --target entmaxkv-lm
} >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi

# The machine, where Linux or macOS tells.
cpu=$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
[ -n "$cpu" ] || cpu=$(sysctl -n machdep.cpu.brand_string 2>/dev/null || uname -m)
echo "Machine: $cpu, $(getconf _NPROCESSORS_ONLN) logical processors"

start=$(date +%s)
lm() {
    "$build/entmaxkv-lm" "$@" --model "$model" --text "$model/persuasion-part1.txt"
}

echo
echo "1. Five digits are hidden in 8,192 bytes of a novel, at four depths; the model is asked for them.  accuracy 1 is all found;"
echo "   the shares are of the bytes and pages of the cache that a step reads."
lm passkey --context 8192 --trials 4 --policy topk,gaussian,certified "$@"

echo
echo "2. The model predicts 2,048 bytes one by one after 2,048 others: bits_per_byte should stay at what full gives.  max_E bounds"
echo "   the probability mass that was not read, max_output_error what that changes in the output."
lm perplexity --context 4096 --windows 1 --policy topk,gaussian,certified "$@"

echo
echo "Total time after the build: $(($(date +%s) - start)) s"
