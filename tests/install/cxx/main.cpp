/*
 * The smallest C++ program that calls the installed library.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <entmaxkv/entmaxkv.h>

#include <iostream>
#include <memory>
#include <vector>

int main() {
    ekv_context *raw = nullptr;
    char message[256] = "";
    if (ekv_version() != EKV_VERSION || ekv_context_create(nullptr, &raw, message, sizeof message) != EKV_OK) {
        std::cerr << "ekv_context_create: " << message << '\n';
        return 1;
    }
    std::unique_ptr<ekv_context, void (*)(ekv_context *)> context(raw, ekv_context_destroy);
    std::vector<float> scores = {1.0f, 0.5f, -4.0f};
    std::vector<float> weights(scores.size());
    ekv_status status = ekv_entmax(context.get(), 2.0, scores.data(), static_cast<int64_t>(scores.size()), weights.data(), nullptr,
                                   nullptr);
    double sum = 0.0;
    for (float weight : weights) {
        sum += weight;
    }
    std::cout << "C++, backend " << ekv_context_backend(context.get()) << ": sum of weights " << sum << '\n';
    return status == EKV_OK && sum > 0.9999 && sum < 1.0001 ? 0 : 1;
}
