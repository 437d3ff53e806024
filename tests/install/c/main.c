/*
 * The smallest program that calls the installed library.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <entmaxkv/entmaxkv.h>

#include <stdio.h>

int main(void) {
    if (ekv_version() != EKV_VERSION) {
        fprintf(stderr, "header %d, library %d\n", EKV_VERSION, ekv_version());
        return 1;
    }
    ekv_context *context = NULL;
    char message[256] = "";
    if (ekv_context_create(NULL, &context, message, sizeof message) != EKV_OK) {
        fprintf(stderr, "ekv_context_create: %s\n", message);
        return 1;
    }
    const float scores[3] = {1.0f, 0.5f, -4.0f};
    float weights[3] = {0.0f, 0.0f, 0.0f};
    double tau = 0.0;
    int64_t support = 0;
    ekv_status status = ekv_entmax(context, 1.5, scores, 3, weights, &tau, &support);
    printf("C, backend %s: weights %g %g %g\n", ekv_context_backend(context), weights[0], weights[1], weights[2]);
    ekv_context_destroy(context);
    double sum = (double)weights[0] + (double)weights[1] + (double)weights[2];
    return status == EKV_OK && sum > 0.9999 && sum < 1.0001 ? 0 : 1;
}
