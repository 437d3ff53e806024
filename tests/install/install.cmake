# Tests install-*: for each way to build the library, install it, move the prefix, and build and run a C and a C++ program
# against it, by find_package and by pkg-config.  tests/install/run.sh does one of them.
# SPDX-License-Identifier: Apache-2.0
#
# Options that this build has OFF (their packages may be missing) stay OFF.

if(NOT UNIX OR CMAKE_CROSSCOMPILING)
    message(STATUS "The install tests run on native Unix alone")
    return()
endif()

# ekv_add_install_test(name static|shared [feature ...])
function(ekv_add_install_test name kind)
    set(arguments ${kind})
    foreach(feature OPENMP SLEEF HWLOC)
        set(value OFF)
        if(ENTMAXKV_${feature} AND "${feature}" IN_LIST ARGN)
            set(value ON)
        endif()
        list(APPEND arguments ${feature}=${value})
    endforeach()
    # With options OFF in this build two ways may be the same: test each once.
    if("${arguments}" IN_LIST ekv_install_done)
        return()
    endif()
    set(ekv_install_done "${ekv_install_done};${arguments}" PARENT_SCOPE)
    add_test(NAME install-${name} COMMAND sh "${PROJECT_SOURCE_DIR}/tests/install/run.sh" "${PROJECT_BINARY_DIR}/tests/install/${name}"
                                          ${arguments})
    set_tests_properties(
        install-${name}
        PROPERTIES LABELS install
                   TIMEOUT 600
                   ENVIRONMENT "CMAKE=${CMAKE_COMMAND};CMAKE_GENERATOR=${CMAKE_GENERATOR};CC=${CMAKE_C_COMPILER};CXX=${CMAKE_CXX_COMPILER}")
endfunction()

set(ekv_install_done "")
ekv_add_install_test(static static OPENMP SLEEF HWLOC)
ekv_add_install_test(shared shared OPENMP SLEEF HWLOC)
ekv_add_install_test(minimal-static static)
ekv_add_install_test(minimal-shared shared)
ekv_add_install_test(no-openmp static SLEEF HWLOC)
ekv_add_install_test(no-sleef static OPENMP HWLOC)
ekv_add_install_test(no-hwloc static OPENMP SLEEF)
