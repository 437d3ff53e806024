# Finds a BLAS with the C interface, OpenBLAS first: target CBLAS::cblas, variable CBLAS_FOUND.
# SPDX-License-Identifier: Apache-2.0

find_package(PkgConfig QUIET)
if(PKG_CONFIG_FOUND)
    pkg_search_module(PC_CBLAS QUIET openblas cblas blas)
endif()
find_path(CBLAS_INCLUDE_DIR cblas.h HINTS ${PC_CBLAS_INCLUDE_DIRS})
find_library(CBLAS_LIBRARY NAMES openblas cblas blas HINTS ${PC_CBLAS_LIBRARY_DIRS})
mark_as_advanced(CBLAS_INCLUDE_DIR CBLAS_LIBRARY)

# Not every libblas has the C interface.
if(CBLAS_INCLUDE_DIR AND CBLAS_LIBRARY)
    include(CheckSymbolExists)
    set(CMAKE_REQUIRED_INCLUDES "${CBLAS_INCLUDE_DIR}")
    set(CMAKE_REQUIRED_LIBRARIES "${CBLAS_LIBRARY}")
    check_symbol_exists(cblas_sgemm cblas.h CBLAS_WORKS)
    unset(CMAKE_REQUIRED_INCLUDES)
    unset(CMAKE_REQUIRED_LIBRARIES)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CBLAS REQUIRED_VARS CBLAS_LIBRARY CBLAS_INCLUDE_DIR CBLAS_WORKS)

if(CBLAS_FOUND AND NOT TARGET CBLAS::cblas)
    add_library(CBLAS::cblas UNKNOWN IMPORTED)
    set_target_properties(
        CBLAS::cblas
        PROPERTIES IMPORTED_LOCATION "${CBLAS_LIBRARY}"
                   INTERFACE_INCLUDE_DIRECTORIES "${CBLAS_INCLUDE_DIR}")
endif()
