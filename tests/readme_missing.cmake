# Run in place of the README's example when README.md has none (see readme.cmake).
# SPDX-License-Identifier: Apache-2.0
message(FATAL_ERROR "README.md has no ```c block: the embedding example is missing")
