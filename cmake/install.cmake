# What `cmake --install` copies: library, headers, the CMake package (find_package(entmaxkv)) and entmaxkv.pc.  All of it may be
# moved to another prefix afterwards.
# SPDX-License-Identifier: Apache-2.0

include(CMakePackageConfigHelpers)

set(ekv_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/entmaxkv")

install(
    TARGETS entmaxkv
    EXPORT entmaxkv-targets
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/entmaxkv" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
install(EXPORT entmaxkv-targets NAMESPACE entmaxkv:: DESTINATION "${ekv_package_dir}")

# The package config asks for dependencies for a static library alone; a shared one has them inside.
set(ekv_static TRUE)
if(BUILD_SHARED_LIBS)
    set(ekv_static FALSE)
endif()
configure_package_config_file(cmake/entmaxkv-config.cmake.in "${PROJECT_BINARY_DIR}/entmaxkv-config.cmake"
                              INSTALL_DESTINATION "${ekv_package_dir}")
if(PROJECT_VERSION_MAJOR EQUAL 0)
    set(ekv_compatibility SameMinorVersion)
else()
    set(ekv_compatibility SameMajorVersion)
endif()
write_basic_package_version_file("${PROJECT_BINARY_DIR}/entmaxkv-config-version.cmake" COMPATIBILITY ${ekv_compatibility})
install(FILES "${PROJECT_BINARY_DIR}/entmaxkv-config.cmake" "${PROJECT_BINARY_DIR}/entmaxkv-config-version.cmake"
              cmake/FindSLEEF.cmake cmake/FindHWLOC.cmake DESTINATION "${ekv_package_dir}")

# pkg-config: the prefix is found from the file's own place, unless libraries go to an absolute directory.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    set(ekv_pc_prefix "${CMAKE_INSTALL_PREFIX}")
    set(ekv_pc_libdir "${CMAKE_INSTALL_LIBDIR}")
else()
    file(RELATIVE_PATH ekv_pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
    string(REGEX REPLACE "/$" "" ekv_pc_prefix "\${pcfiledir}/${ekv_pc_prefix}")
    set(ekv_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
endif()
if(IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    set(ekv_pc_includedir "${CMAKE_INSTALL_INCLUDEDIR}")
else()
    set(ekv_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
set(ekv_pc_cflags "")
if(BUILD_SHARED_LIBS)
    set(ekv_pc_cflags " -DENTMAXKV_SHARED")
endif()
list(JOIN ekv_pc_private " " ekv_pc_libs_private)
configure_file(cmake/entmaxkv.pc.in "${PROJECT_BINARY_DIR}/entmaxkv.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/entmaxkv.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
