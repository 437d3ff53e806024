// The public header as strict C++17, without a warning, and a call through it.
// SPDX-License-Identifier: Apache-2.0
#include "entmaxkv/entmaxkv.h"

#include <cstdio>
#include <cstring>
#include <type_traits>

static_assert(std::is_standard_layout<ekv_decode_params>::value && std::is_trivially_copyable<ekv_decode_params>::value,
              "parameter structs are plain C structs");
static_assert(std::is_same<decltype(&ekv_version), int (*)()>::value, "C functions are declared as such");

int main() {
    ekv_context_params params = ekv_context_params_default();
    params.backend = "scalar";
    params.threads = 1;
    ekv_context *context = nullptr;
    char message[256] = "";
    if (ekv_version() != EKV_VERSION || ekv_context_create(&params, &context, message, sizeof message) != EKV_OK) {
        std::printf("test_header_cxx: version %d, header %d, %s\n", ekv_version(), EKV_VERSION, message);
        return 1;
    }
    const float scores[2] = {0.75f, 0.25f};
    float weights[2] = {0, 0};
    const ekv_status status = ekv_entmax(context, 2.0, scores, 2, weights, nullptr, nullptr);
    ekv_context_destroy(context);
    if (status != EKV_OK || !(weights[0] == 0.75f) || !(weights[1] == 0.25f)) {
        std::printf("test_header_cxx: sparsemax of .75 and .25 is %g and %g\n", static_cast<double>(weights[0]),
                    static_cast<double>(weights[1]));
        return 1;
    }
    return 0;
}
