#!/bin/sh
# Cross-compiles for 64-bit Arm and runs the tests under qemu's user emulation.
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/test-aarch64.sh [options for cmake]     for instance -DENTMAXKV_OPENMP=ON
#
# Debian and Ubuntu have cross-compilers, but no cross-compiled libraries for them: the few that the tests link are fetched with
# apt's own means for the arm64 architecture and unpacked in build/aarch64-root; the system's list of architectures and
# packages stays as it is.  This needs a mirror that carries arm64: Debian's do; Ubuntu keeps that architecture apart.
set -eu

cd "$(dirname "$0")/.."
scripts/deps.sh build cross

root=$PWD/build/aarch64-root
if [ ! -e "$root/complete" ]; then
    apt=$PWD/build/aarch64-apt
    rm -rf "$root" "$apt"
    mkdir -p "$root" "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
    : >"$apt/status"
    arm64_apt() {
        apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Acquire::Languages=none \
            -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" "$@"
    }
    arm64_apt update || echo "test-aarch64.sh: some package lists could not be fetched; going on with the others" >&2
    (cd "$apt/packages" && arm64_apt download check libsubunit-dev libsleef-dev libsleef3 libcjson-dev libcjson1) || {
        echo "test-aarch64.sh: apt found no arm64 packages: add a mirror that carries that architecture" >&2
        exit 1
    }
    for package in "$apt/packages"/*.deb; do
        dpkg-deb -x "$package" "$root"
    done
    rm -rf "$apt"
    : >"$root/complete"
fi

jobs=$(getconf _NPROCESSORS_ONLN)
cmake --preset aarch64 "$@"
cmake --build --preset aarch64 -j "$jobs"
# EKV_TEST_ONLY: a regular expression of test names, for a run shorter than all
exec ctest --preset aarch64 -j "$jobs" ${EKV_TEST_ONLY:+-R "$EKV_TEST_ONLY"}
