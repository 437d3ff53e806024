/* The public header comes first and alone: it must compile as strict C11 without a warning and say the library's version. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "entmaxkv/entmaxkv.h"

#include <stdio.h>
#include <string.h>

/* Twice, for its include guard. */
#include "entmaxkv/entmaxkv.h"

static int failures;

static void expect(int condition, const char *what) {
    if (!condition) {
        printf("test_header: not so: %s\n", what);
        failures++;
    }
}

int main(void) {
    expect(ekv_version() == EKV_VERSION, "the library has the header's version");
    expect(EKV_VERSION == EKV_VERSION_MAJOR * 10000 + EKV_VERSION_MINOR * 100 + EKV_VERSION_PATCH, "one number from three");
    expect(ekv_context_params_default().size == sizeof(ekv_context_params), "ekv_context_params knows its size");
    expect(ekv_kv_default().size == sizeof(ekv_kv), "ekv_kv knows its size");
    expect(ekv_index_params_default().size == sizeof(ekv_index_params), "ekv_index_params knows its size");
    expect(ekv_cache_params_default().size == sizeof(ekv_cache_params), "ekv_cache_params knows its size");
    expect(ekv_append_params_default().size == sizeof(ekv_append_params), "ekv_append_params knows its size");
    const ekv_decode_params step = ekv_decode_params_default();
    expect(step.size == sizeof step, "ekv_decode_params knows its size");
    /* The defaults that the header documents, field by field: the initializer is positional. */
    expect(step.batch == 1 && step.alpha == 1.5 && step.scale == 0 && step.policy == EKV_POLICY_FULL,
           "batch, alpha, scale, policy");
    expect(step.budget == 1024 && step.first_pages == 0 && step.recent_tokens == 0, "budget and forced pages");
    expect(step.quantile == 0.995 && step.margin_sigma == 0 && step.margin_fraction == 0.1, "quantile and margins");
    expect(step.gaussian_model == EKV_GAUSSIAN_AUTO && step.q_dtype == EKV_F32 && step.out_dtype == EKV_F32, "model and types");
    expect(!step.cache && !step.kv && !step.index && !step.q && !step.out && !step.report && !step.page_mask, "no pointers");
    expect(ekv_kv_default().page_size == 16 && ekv_kv_default().dtype == EKV_F16, "pages of 16, f16");
    expect(ekv_cache_params_default().page_size == 16 && ekv_cache_params_default().layers == 1,
           "cache: pages of 16, one layer");
    expect(ekv_cache_params_default().max_sequences == 1 && ekv_cache_params_default().statistics == 7,
           "one sequence, all statistics");
    expect(ekv_cache_params_default().placement == EKV_PLACEMENT_DEFAULT && offsetof(ekv_cache_params, placement) >= 64,
           "no placement, in a field past the padding of the first version's struct");
    expect(ekv_index_params_default().statistics == 7 && ekv_index_params_default().page_size == 16, "index: all statistics");
    expect(ekv_append_params_default().dtype == EKV_F32, "rows to append are f32");
    expect(strlen(ekv_strerror(EKV_OK)) > 0, "EKV_OK has a text");
    printf("test_header: %d failures\n", failures);
    return failures != 0;
}
