#!/bin/sh
# One install test: builds the library with the given options, installs it, moves the prefix elsewhere, checks the symbols, and
# builds and runs a C and a C++ program against it, by find_package and by pkg-config.
# SPDX-License-Identifier: Apache-2.0
#
#   tests/install/run.sh WORK static|shared [FEATURE=ON|OFF ...]      FEATURE: OPENMP, SLEEF, HWLOC
#
# Environment: CC, CXX, CMAKE, CMAKE_GENERATOR.  WORK is deleted first.  The library is built without optimisation: what is
# tested is the packaging.
set -eu

work=$1
kind=$2
shift 2
source=$(cd "$(dirname "$0")/../.." && pwd)
: "${CC:=cc}" "${CXX:=c++}" "${CMAKE:=cmake}"
export CC CXX
unset LDFLAGS CFLAGS CXXFLAGS

fail() {
    echo "install test: $*" >&2
    exit 1
}

step() {
    echo "== $*"
}

rm -rf "$work"
mkdir -p "$work"

step "build and install: $kind $*"
shared=OFF
[ "$kind" = static ] || shared=ON
set -- "$@" # FEATURE=VALUE ...
options=
for feature in "$@"; do
    options="$options -DENTMAXKV_$feature"
done
# shellcheck disable=SC2086 # a list of options without spaces
"$CMAKE" -S "$source" -B "$work/build" -DCMAKE_BUILD_TYPE=Debug -DBUILD_SHARED_LIBS=$shared -DCMAKE_INSTALL_PREFIX="$work/stage" \
    -DENTMAXKV_TESTS=OFF -DENTMAXKV_BENCH=OFF -DENTMAXKV_EXAMPLES=OFF $options
"$CMAKE" --build "$work/build" -j2
"$CMAKE" --install "$work/build"
mv "$work/stage" "$work/prefix"
rm -rf "$work/build"
prefix=$work/prefix

pc=$(find "$prefix" -name entmaxkv.pc)
[ -n "$pc" ] || fail "entmaxkv.pc was not installed"
libdir=$(dirname "$(dirname "$pc")")
if grep -q "$work" "$pc"; then
    fail "entmaxkv.pc names the prefix that it was installed to, so the prefix cannot be moved"
fi
if grep -rq "$source" "$prefix"/lib*/cmake "$prefix"/lib*/*/cmake 2>/dev/null; then
    fail "the CMake package names the source directory"
fi

step "symbols"
if [ "$kind" = shared ]; then
    library=$libdir/libentmaxkv.so
    symbols=$(nm -D --defined-only "$library" | awk '{ print $NF }')
    others=$(echo "$symbols" | grep -v '^ekv_' || true)
    [ -z "$others" ] || fail "the shared library exports other symbols than ekv_*: $others"
    # All that the headers declare and nothing else.
    declared=$(sed -n 's/^EKV_API.*[ *]\(ekv_[a-z0-9_]*\)(.*/\1/p' "$prefix"/include/entmaxkv/*.h | sort -u)
    exported=$(echo "$symbols" | sort -u)
    [ "$declared" = "$exported" ] || fail "the headers declare
$declared
and the library exports
$exported"
    needed=$(readelf -d "$library" | grep NEEDED)
    soname=$(readelf -d "$library" | grep SONAME)
    echo "$soname"
    for feature in "$@"; do
        case $feature in
            OPENMP=OFF) unwanted='lib[gi]*omp' ;;
            SLEEF=OFF) unwanted=libsleef ;;
            HWLOC=OFF) unwanted=libhwloc ;;
            *) continue ;;
        esac
        if echo "$needed" | grep -q "$unwanted"; then
            fail "$feature, but the library needs $needed"
        fi
    done
else
    library=$libdir/libentmaxkv.a
    # A static library cannot hide anything from a program's linker, so internal names carry the prefix too.
    others=$(nm -g --defined-only "$library" 2>/dev/null | awk 'NF == 3 { print $3 }' | grep -v '^ekv_' || true)
    [ -z "$others" ] || fail "the static library defines other global symbols than ekv_*: $others"
fi

for language in c cxx; do
    step "find_package, $language"
    "$CMAKE" -S "$source/tests/install/$language" -B "$work/find-$language" -DCMAKE_PREFIX_PATH="$prefix" -DEXPECT_KIND="$kind"
    "$CMAKE" --build "$work/find-$language"
    "$work/find-$language/consumer"
done

step "pkg-config"
PKG_CONFIG_PATH=$libdir/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
export PKG_CONFIG_PATH
static=
[ "$kind" = shared ] || static=--static
flags=$(pkg-config --cflags entmaxkv)
libs=$(pkg-config --libs $static entmaxkv)
echo "flags: $flags"
echo "libs: $libs"
# shellcheck disable=SC2086 # pkg-config's answers are lists
"$CC" -std=c11 "$source/tests/install/c/main.c" $flags $libs -o "$work/consumer-c"
# shellcheck disable=SC2086
"$CXX" -std=c++17 "$source/tests/install/cxx/main.cpp" $flags $libs -o "$work/consumer-cxx"
LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
"$work/consumer-c"
"$work/consumer-cxx"

echo "install test: ok"
