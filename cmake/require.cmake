# Helpers for dependencies.
# SPDX-License-Identifier: Apache-2.0

# ekv_require(PACKAGE DEBIAN OPTION [arguments of find_package])
# find_package() that stops with the package's name, the Debian package that brings it and the option that does without it.
# OPTION may be "".
macro(ekv_require package debian option)
    find_package(${package} QUIET ${ARGN})
    if(NOT ${package}_FOUND)
        set(ekv_advice "install it (Debian and Ubuntu: ${debian}; scripts/deps.sh installs everything)")
        if(NOT "${option}" STREQUAL "")
            string(APPEND ekv_advice ", or configure with -D${option}=OFF")
        endif()
        message(FATAL_ERROR "${package} was not found: ${ekv_advice}")
    endif()
endmacro()

# The linker flags for a library file: -lname, with -L where a linker would not look by itself.
function(ekv_linker_flags result path)
    get_filename_component(directory "${path}" DIRECTORY)
    get_filename_component(name "${path}" NAME_WE)
    string(REGEX REPLACE "^lib" "" name "${name}")
    if(directory MATCHES "^(/usr)?/lib(64)?(/${CMAKE_C_LIBRARY_ARCHITECTURE})?$" OR directory MATCHES "/gcc/")
        set(${result} "-l${name}" PARENT_SCOPE)
    else()
        set(${result} "-L${directory}" "-l${name}" PARENT_SCOPE)
    endif()
endfunction()
