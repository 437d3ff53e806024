#!/bin/sh
# Builds everything and runs all tests.  Ends with ctest's summary.
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/test.sh [options for cmake]         for instance -DENTMAXKV_WERROR=ON
#
# The build is in build/default.
set -eu

cd "$(dirname "$0")/.."
scripts/deps.sh build test
jobs=$(getconf _NPROCESSORS_ONLN)
cmake --preset default "$@"
cmake --build --preset default -j "$jobs"
exec ctest --preset default -j "$jobs"
