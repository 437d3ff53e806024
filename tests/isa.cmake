# Test isa-disassembly: tests/isa.sh on the library's objects.
# SPDX-License-Identifier: Apache-2.0
#
# Meaningful where x86 code is compiled for its plain baseline: not with -march in the flags, and not under sanitizers or coverage,
# which add symbols.

string(TOUPPER "${CMAKE_BUILD_TYPE}" ekv_type)
set(ekv_flags "${CMAKE_C_FLAGS} ${CMAKE_C_FLAGS_${ekv_type}}")
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$" OR NOT CMAKE_OBJDUMP OR NOT CMAKE_NM)
    message(STATUS "The disassembly test runs on x86-64 with objdump alone")
    return()
endif()
if(ekv_flags MATCHES "-march|-mavx|-fsanitize|--coverage")
    message(STATUS "The disassembly test is left out with these compiler flags")
    return()
endif()

set(ekv_arguments baseline $<TARGET_OBJECTS:entmaxkv_common>)
foreach(isa IN LISTS ekv_isas)
    list(APPEND ekv_arguments ${isa} $<TARGET_OBJECTS:entmaxkv_${isa}>)
endforeach()
add_test(NAME isa-disassembly COMMAND sh "${PROJECT_SOURCE_DIR}/tests/isa.sh" "${CMAKE_OBJDUMP}" "${CMAKE_NM}" ${ekv_arguments}
         COMMAND_EXPAND_LISTS)
set_tests_properties(isa-disassembly PROPERTIES LABELS unit TIMEOUT 300)
