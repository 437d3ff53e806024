# Finds cJSON, a JSON parser: target cJSON::cjson, variables cJSON_FOUND, cJSON_VERSION.  Include <cjson/cJSON.h>.
# SPDX-License-Identifier: Apache-2.0

find_package(PkgConfig QUIET)
if(PKG_CONFIG_FOUND)
    pkg_check_modules(PC_cJSON QUIET libcjson)
endif()
find_path(cJSON_INCLUDE_DIR cjson/cJSON.h HINTS ${PC_cJSON_INCLUDEDIR})
find_library(cJSON_LIBRARY cjson HINTS ${PC_cJSON_LIBRARY_DIRS})
mark_as_advanced(cJSON_INCLUDE_DIR cJSON_LIBRARY)
set(cJSON_VERSION "${PC_cJSON_VERSION}")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
    cJSON
    REQUIRED_VARS cJSON_LIBRARY cJSON_INCLUDE_DIR
    VERSION_VAR cJSON_VERSION)

if(cJSON_FOUND AND NOT TARGET cJSON::cjson)
    add_library(cJSON::cjson UNKNOWN IMPORTED)
    set_target_properties(
        cJSON::cjson
        PROPERTIES IMPORTED_LOCATION "${cJSON_LIBRARY}"
                   INTERFACE_INCLUDE_DIRECTORIES "${cJSON_INCLUDE_DIR}")
endif()
