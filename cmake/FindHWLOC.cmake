# Finds hwloc, the topology of the machine: target HWLOC::hwloc, variables HWLOC_FOUND, HWLOC_VERSION.
# SPDX-License-Identifier: Apache-2.0

find_package(PkgConfig QUIET)
if(PKG_CONFIG_FOUND)
    pkg_check_modules(PC_HWLOC QUIET hwloc)
endif()
find_path(HWLOC_INCLUDE_DIR hwloc.h HINTS ${PC_HWLOC_INCLUDE_DIRS})
find_library(HWLOC_LIBRARY NAMES hwloc HINTS ${PC_HWLOC_LIBRARY_DIRS})
mark_as_advanced(HWLOC_INCLUDE_DIR HWLOC_LIBRARY)
set(HWLOC_VERSION "${PC_HWLOC_VERSION}")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    HWLOC
    REQUIRED_VARS HWLOC_LIBRARY HWLOC_INCLUDE_DIR
    VERSION_VAR HWLOC_VERSION)

if(HWLOC_FOUND AND NOT TARGET HWLOC::hwloc)
    add_library(HWLOC::hwloc UNKNOWN IMPORTED)
    set_target_properties(
        HWLOC::hwloc
        PROPERTIES IMPORTED_LOCATION "${HWLOC_LIBRARY}"
                   INTERFACE_INCLUDE_DIRECTORIES "${HWLOC_INCLUDE_DIR}")
endif()
