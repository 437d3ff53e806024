#!/bin/sh
# Builds everything and runs all tests.  Ends with ctest's summary.
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/test.sh [options for cmake]         for instance -DENTMAXKV_WERROR=ON
#
# The build is in build/default.
set -eu
# Waiting OpenMP threads sleep instead of spinning: on a machine with other work, spinning costs more than it saves.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

cd "$(dirname "$0")/.."
scripts/deps.sh build test
jobs=$(getconf _NPROCESSORS_ONLN)
cmake --preset default "$@"
cmake --build --preset default -j "$jobs"
exec ctest --preset default -j "$jobs"
