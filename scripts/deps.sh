#!/bin/sh
# Installs what EntmaxKV needs to be built and tested, through apt where that is possible; elsewhere it says what is missing and
# ends with status 1.  When nothing is missing it does nothing.
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/deps.sh [GROUP ...]
#
# Groups: build  compiler, CMake, and the packages of the library and the examples
#         test   the unit test framework, and gnuplot for plots of the benchmark
#         clang  clang and its OpenMP
#         cross  the compiler and the emulator for 64-bit Arm
#         lint   shellcheck
# Default: build test.
set -eu

# Group, Debian package, and what shows that it is there: a program, a pkg-config module, or a file.
table() {
    cat <<'TABLE'
build  build-essential           program  cc make c++
build  cmake                     program  cmake
build  pkg-config                program  pkg-config
build  ninja-build               program  ninja
build  libsleef-dev              module   sleef
build  libhwloc-dev              module   hwloc
build  libcjson-dev              module   libcjson
build  libopenblas-dev           module   openblas
test   check                     module   check
test   gnuplot-nox               program  gnuplot
clang  clang                     program  clang clang++
clang  libomp-dev                clang-openmp
cross  gcc-aarch64-linux-gnu     program  aarch64-linux-gnu-gcc
cross  g++-aarch64-linux-gnu     program  aarch64-linux-gnu-g++
cross  libc6-dev-arm64-cross     file     /usr/aarch64-linux-gnu/include/stdio.h
cross  qemu-user                 program  qemu-aarch64
lint   shellcheck                program  shellcheck
TABLE
}

# Whether a row's package is there.
present() {
    kind=$1
    shift
    case $kind in
        program)
            for name in "$@"; do
                command -v "$name" >/dev/null 2>&1 || return 1
            done
            ;;
        module) command -v pkg-config >/dev/null 2>&1 && pkg-config --exists "$1" ;;
        file) [ -e "$1" ] ;;
        clang-openmp)
            command -v clang >/dev/null 2>&1 &&
                printf '#include <omp.h>\n' | clang -fopenmp -x c -fsyntax-only - >/dev/null 2>&1
            ;;
    esac
}

# Whether apt's database has the package, should its proof above not fit this system.
installed() {
    command -v dpkg-query >/dev/null 2>&1 && [ "$(dpkg-query -W -f '${Status}' "$1" 2>/dev/null)" = "install ok installed" ]
}

# The packages of the given groups that are not there.
missing() {
    table | while read -r group package check; do
        case " $* " in
            *" $group "*)
                # shellcheck disable=SC2086 # a list of words
                present $check || installed "$package" || echo "$package"
                ;;
        esac
    done
}

[ $# -gt 0 ] || set -- build test
for group in "$@"; do
    case $group in
        build | test | clang | cross | lint) ;;
        *)
            echo "deps.sh: unknown group '$group'; groups are build test clang cross lint" >&2
            exit 2
            ;;
    esac
done

packages=$(missing "$@" | tr '\n' ' ')
packages=${packages% }
[ -n "$packages" ] || exit 0

advise() {
    echo "deps.sh: $1" >&2
    echo "Install these packages (names as on Debian and Ubuntu), then try again:" >&2
    echo "    apt-get install $packages" >&2
    exit 1
}

command -v apt-get >/dev/null 2>&1 || advise "packages are missing, and this system has no apt-get."
if [ "$(id -u)" -eq 0 ]; then
    as_root="env"
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    as_root="sudo -n env"
else
    advise "packages are missing, and installing them needs root or sudo without a password."
fi

echo "deps.sh: installing $packages" >&2
# A repository that cannot be reached need not be the one that is needed: what counts is whether the installation works.
$as_root apt-get -qq update >&2 || echo "deps.sh: apt-get update failed; going on with the lists that are there" >&2
# shellcheck disable=SC2086 # a list of packages
$as_root DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 install -y --no-install-recommends $packages >&2 ||
    advise "apt-get could not install them (its message is above)."

packages=$(missing "$@" | tr '\n' ' ')
packages=${packages% }
[ -z "$packages" ] || advise "apt-get ended without an error, but these are still not found."
