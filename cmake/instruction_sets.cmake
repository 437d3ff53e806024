# The instruction sets that src/cpu/kernels.c is compiled for: one object library each, named entmaxkv_<name>.
# SPDX-License-Identifier: Apache-2.0
#
# To add one: write src/cpu/vec_<name>.h, add a row here, add a row to the dispatcher's table.
# Row: name | processors, a regular expression for CMAKE_SYSTEM_PROCESSOR | flags.
# A row counts only once its header exists.
set(ekv_isa_table
    "scalar|.*|"
    "avx2|x86_64|-mavx2 -mfma -mf16c"
    "avx512|x86_64|-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"
    "neon|aarch64|")

include(CheckCCompilerFlag)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" ekv_processor)
if(ekv_processor STREQUAL "amd64")
    set(ekv_processor x86_64)
elseif(ekv_processor STREQUAL "arm64")
    set(ekv_processor aarch64)
endif()
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
    set(ekv_processor "${ekv_processor}-32bit") # no vector instruction set is written for those
endif()

set(ekv_isas "")
foreach(row IN LISTS ekv_isa_table)
    string(REGEX MATCH "^([^|]*)[|]([^|]*)[|]([^|]*)$" row "${row}")
    set(isa "${CMAKE_MATCH_1}")
    set(processors "${CMAKE_MATCH_2}")
    set(flags "${CMAKE_MATCH_3}")
    string(TOUPPER ${isa} upper)
    if(NOT ekv_processor MATCHES "^(${processors})$" OR NOT EXISTS "${PROJECT_SOURCE_DIR}/src/cpu/vec_${isa}.h")
        continue()
    endif()
    if(flags)
        check_c_compiler_flag("${flags}" EKV_COMPILER_HAS_${upper})
        if(NOT EKV_COMPILER_HAS_${upper})
            message(FATAL_ERROR "${CMAKE_C_COMPILER} does not take ${flags}, the flags of instruction set ${isa}: use a newer compiler")
        endif()
    endif()
    separate_arguments(flags UNIX_COMMAND "${flags}")

    add_library(entmaxkv_${isa} OBJECT src/cpu/kernels.c)
    ekv_library_sources(entmaxkv_${isa})
    target_compile_definitions(entmaxkv_${isa} PRIVATE EKV_ISA=${isa} EKV_ISA_${upper}=1)
    target_compile_options(
        entmaxkv_${isa} PRIVATE ${flags} -fno-math-errno -fno-trapping-math $<$<NOT:$<CONFIG:Debug>>:-O3>)
    list(APPEND ekv_isas ${isa})
endforeach()
