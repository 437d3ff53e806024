# Finds Check, a unit test framework for C: target Check::check, variables Check_FOUND, Check_VERSION.
# SPDX-License-Identifier: Apache-2.0

find_package(PkgConfig QUIET)
if(PKG_CONFIG_FOUND)
    pkg_check_modules(PC_Check QUIET check)
endif()
find_path(Check_INCLUDE_DIR check.h HINTS ${PC_Check_INCLUDE_DIRS})
find_library(Check_LIBRARY NAMES check_pic check HINTS ${PC_Check_LIBRARY_DIRS})
mark_as_advanced(Check_INCLUDE_DIR Check_LIBRARY)
set(Check_VERSION "${PC_Check_VERSION}")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    Check
    REQUIRED_VARS Check_LIBRARY Check_INCLUDE_DIR
    VERSION_VAR Check_VERSION)

if(Check_FOUND AND NOT TARGET Check::check)
    # Usually a static library: what it needs itself (subunit, rt, m) is known to pkg-config alone.
    set(ekv_check_needs "")
    foreach(name IN LISTS PC_Check_STATIC_LIBRARIES)
        if(NOT name MATCHES "^check(_pic)?$")
            find_library(Check_${name}_LIBRARY ${name} HINTS ${PC_Check_STATIC_LIBRARY_DIRS})
            mark_as_advanced(Check_${name}_LIBRARY)
            if(Check_${name}_LIBRARY)
                list(APPEND ekv_check_needs "${Check_${name}_LIBRARY}")
            else()
                list(APPEND ekv_check_needs ${name})
            endif()
        endif()
    endforeach()
    add_library(Check::check UNKNOWN IMPORTED)
    set_target_properties(
        Check::check
        PROPERTIES IMPORTED_LOCATION "${Check_LIBRARY}"
                   INTERFACE_INCLUDE_DIRECTORIES "${Check_INCLUDE_DIR}"
                   INTERFACE_LINK_LIBRARIES "${ekv_check_needs}")
endif()
