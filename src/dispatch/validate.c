/*
 * The one place where a call's arguments are checked: after ekv_validate nothing is checked again.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/cuda.h"
#include "dispatch/step.h"

#include <math.h>

#define VALID(condition, ...) \
    if (!(condition)) return ekv_fail(context, EKV_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
#define ll(x) ((long long)(x))

ekv_status ekv_check_kv(ekv_context *context, const ekv_kv *kv) {
    VALID(ekv_dtype_valid(kv->dtype), "kv->dtype is %d, not an ekv_dtype", (int)kv->dtype);
    VALID(kv->kv_heads >= 1 && kv->kv_heads <= 65536, "kv->kv_heads is %d, not in 1..65536", (int)kv->kv_heads);
    VALID(kv->k_dim >= 1 && kv->k_dim <= EKV_MAX_DIM, "kv->k_dim is %d, not in 1..%d", (int)kv->k_dim, EKV_MAX_DIM);
    VALID(kv->v_dim >= 1 && kv->v_dim <= EKV_MAX_DIM, "kv->v_dim is %d, not in 1..%d", (int)kv->v_dim, EKV_MAX_DIM);
    VALID(kv->page_size >= 1 && kv->page_size <= EKV_MAX_PAGE_SIZE, "kv->page_size is %d, not in 1..%d", (int)kv->page_size,
          EKV_MAX_PAGE_SIZE);
    VALID(kv->blocks >= 0 && kv->blocks <= INT32_MAX, "kv->blocks is %lld, not in 0..2^31-1", ll(kv->blocks));
    VALID(kv->k || kv->blocks == 0, "kv->k is NULL");
    VALID(kv->v || kv->blocks == 0, "kv->v is NULL");
    return EKV_OK;
}

static ekv_status check_maths(ekv_context *context, const ekv_decode_params *p) {
    VALID(p->alpha >= 1.0 && p->alpha < (double)INFINITY, "alpha is %g, not a finite number >= 1", p->alpha);
    VALID(isfinite(p->scale), "scale is %g, not finite", (double)p->scale);
    for (int32_t h = 0; h < p->q_heads; h++) {
        VALID(!p->head_alpha || (p->head_alpha[h] >= 1.0 && p->head_alpha[h] < (double)INFINITY),
              "head_alpha[%d] is %g, not a finite number >= 1", (int)h, p->head_alpha[h]);
        VALID(!p->head_scale || isfinite(p->head_scale[h]), "head_scale[%d] is %g, not finite", (int)h, (double)p->head_scale[h]);
        VALID(!p->slopes || isfinite(p->slopes[h]), "slopes[%d] is %g, not finite", (int)h, (double)p->slopes[h]);
    }
    return EKV_OK;
}

static ekv_status check_policy(ekv_context *context, const ekv_step *step) {
    const ekv_decode_params *p = &step->p;
    const uint32_t have = step->index ? step->index->shape.statistics : 0;
    VALID(p->policy >= EKV_POLICY_FULL && p->policy <= EKV_POLICY_CERTIFIED, "policy is %d, not an ekv_policy", (int)p->policy);
    VALID(p->first_pages >= 0, "first_pages is %d, below 0", (int)p->first_pages);
    VALID(p->recent_tokens >= 0, "recent_tokens is %d, below 0", (int)p->recent_tokens);
    VALID(!step->bounds || have & EKV_STATISTICS_BOX, "index has no BOX statistics, which %s needs",
          p->policy == EKV_POLICY_TOPK ? "policy topk" : "report_mass");
    VALID(!step->moments || have & EKV_STATISTICS_GAUSSIAN, "index has no GAUSSIAN statistics, which policy gaussian needs");
    VALID(p->policy != EKV_POLICY_PAGES || p->page_mask, "page_mask is NULL, which policy pages needs");
    VALID(p->policy != EKV_POLICY_CERTIFIED || (p->max_mass >= 0.0 && p->max_mass < 1.0), "max_mass is %g, not in [0, 1)", p->max_mass);
    for (int32_t h = 0; h < p->q_heads && (p->policy == EKV_POLICY_GAUSSIAN || p->policy == EKV_POLICY_CERTIFIED); h++)
        if (ekv_alpha_of(p, h) < EKV_SOFTMAX_BELOW)
            return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "alpha is %g for head %d: policy %s needs alpha > 1, since softmax gives "
                            "every token some mass and has no threshold", ekv_alpha_of(p, h), (int)h, ekv_policy_name(p->policy));
    if (p->policy != EKV_POLICY_GAUSSIAN) return EKV_OK;
    VALID(p->gaussian_model >= EKV_GAUSSIAN_AUTO && p->gaussian_model <= EKV_GAUSSIAN_MIXTURE,
          "gaussian_model is %d, not an ekv_gaussian_model", (int)p->gaussian_model);
    VALID(p->quantile > 0.0 && p->quantile < 1.0, "quantile is %g, not between 0 and 1", p->quantile);
    VALID(p->margin_sigma >= 0.0 && p->margin_sigma < (double)INFINITY, "margin_sigma is %g, not a finite number >= 0", p->margin_sigma);
    VALID(p->margin_fraction >= 0.0 && p->margin_fraction < (double)INFINITY, "margin_fraction is %g, not a finite number >= 0",
          p->margin_fraction);
    return EKV_OK;
}

/* The managed cache as the caller's memory; lengths and tables are then looked up per sequence. */
static ekv_status resolve_cache(ekv_context *context, ekv_step *step) {
    const ekv_decode_params *p = &step->p;
    VALID(!p->cache != !p->kv, p->kv ? "cache and kv are both given" : "cache and kv are both NULL");
    if (p->kv) {
        VALID(ekv_copy_params(&step->kv, sizeof step->kv, p->kv, sizeof(size_t)), "kv->size is %zu, not that of an ekv_kv", p->kv->size);
        step->index = p->index;
        const ekv_status status = ekv_check_kv(context, &step->kv);
        if (status != EKV_OK) return status;
        VALID(p->lengths || p->batch == 0, "lengths is NULL");
        VALID(p->block_table_stride >= 0, "block_table_stride is %lld, below 0", ll(p->block_table_stride));
        return step->index ? ekv_check_index(context, step->index, &step->kv) : EKV_OK;
    }
    if (step->context->cuda) return ekv_fail(context, EKV_ERROR_UNSUPPORTED, "cache is in host memory: the cuda backend takes kv");
    VALID(p->layer >= 0 && p->layer < p->cache->shape.layers, "layer is %d, not in 0..%d", (int)p->layer, (int)p->cache->shape.layers - 1);
    VALID(p->sequences || p->batch == 0, "sequences is NULL");
    ekv_cache_layer(p->cache, p->layer, &step->kv, &step->index);
    for (int32_t b = 0; b < p->batch; b++)
        VALID(ekv_sequence_length(p->cache, p->sequences[b], p->layer) >= 0, "sequences[%d] is %d, which does not exist", (int)b,
              (int)p->sequences[b]);
    return EKV_OK;
}

int64_t ekv_length_of(const ekv_step *step, int32_t b) {
    const ekv_decode_params *p = &step->p;
    return p->cache ? ekv_sequence_length(p->cache, p->sequences[b], p->layer) : p->lengths[b];
}

const int32_t *ekv_table_of(const ekv_step *step, int32_t b) {
    const ekv_decode_params *p = &step->p;
    if (p->cache) return ekv_cache_block_table(p->cache, p->sequences[b]);
    return p->block_table ? p->block_table + b * p->block_table_stride : NULL;
}

static ekv_status check_sequence(ekv_context *context, const ekv_step *step, int32_t b) {
    const ekv_decode_params *p = &step->p;
    const int64_t length = ekv_length_of(step, b), queries = ekv_q_begin(p, b + 1) - ekv_q_begin(p, b);
    VALID(queries >= 0, "q_start[%d] is %lld, below q_start[%d]", (int)b + 1, ll(ekv_q_begin(p, b + 1)), (int)b);
    VALID(length >= 0, "lengths[%d] is %lld, below 0", (int)b, ll(length));
    VALID(length == 0 || queries <= length, "q_start brings %lld query tokens for sequence %d, whose length of %lld includes them",
          ll(queries), (int)b, ll(length));
    if (p->cache) return EKV_OK;
    const int64_t pages = ekv_ceil_div(length, step->kv.page_size);
    VALID(pages <= p->block_table_stride || (p->batch == 1 && !p->block_table),
          "lengths[%d] is %lld, more than block_table_stride %lld pages", (int)b, ll(length), ll(p->block_table_stride));
    if (!p->block_table) {
        VALID(b * p->block_table_stride + pages <= step->kv.blocks, "lengths[%d] is %lld, past the pool of %lld blocks", (int)b,
              ll(length), ll(step->kv.blocks));
        return EKV_OK;
    }
    const int32_t *table = p->block_table + b * p->block_table_stride;
    for (int64_t page = 0; page < pages; page++)
        VALID(table[page] >= 0 && table[page] < step->kv.blocks, "block_table[%d][%lld] is %d, not in 0..%lld", (int)b, ll(page),
              (int)table[page], ll(step->kv.blocks) - 1);
    return EKV_OK;
}

/* Fills in strides and what follows from the parameters, and checks everything that does not need the data. */
ekv_status ekv_validate(ekv_context *context, const ekv_decode_params *params, ekv_step *step) {
    *step = (ekv_step){.context = context, .kernels = context->kernels, .kv = ekv_kv_default(), .p = ekv_decode_params_default()};
    ekv_decode_params *p = &step->p;
    VALID(params, "params is NULL");
    VALID(ekv_copy_params(p, sizeof *p, params, sizeof(size_t)), "params->size is %zu, not that of an ekv_decode_params", params->size);
    VALID(p->batch >= 0, "batch is %d, below 0", (int)p->batch);
    ekv_status status = resolve_cache(context, step);
    if (status != EKV_OK) return status;
    VALID(p->q_heads >= 1 && p->q_heads % step->kv.kv_heads == 0, "q_heads is %d, not a positive multiple of kv_heads %d",
          (int)p->q_heads, (int)step->kv.kv_heads);
    VALID(ekv_dtype_valid(p->q_dtype), "q_dtype is %d, not an ekv_dtype", (int)p->q_dtype);
    VALID(ekv_dtype_valid(p->out_dtype), "out_dtype is %d, not an ekv_dtype", (int)p->out_dtype);
    VALID(context->cuda || !p->q_start || p->q_start[0] == 0, "q_start[0] is %d, not 0", (int)p->q_start[0]);
    step->group = p->q_heads / step->kv.kv_heads;
    step->certified = p->policy == EKV_POLICY_CERTIFIED && context->kernels;
    step->sparse = p->policy != EKV_POLICY_FULL && p->policy != EKV_POLICY_CERTIFIED;
    step->bounds = p->policy == EKV_POLICY_TOPK || (p->report_mass && p->report && step->sparse);
    step->moments = p->policy == EKV_POLICY_GAUSSIAN;
    status = check_maths(context, p);
    if (status == EKV_OK) status = check_policy(context, step);
    if (status == EKV_OK && context->cuda) status = ekv_cuda_check(context, step);
    for (int32_t b = 0; !context->cuda && b < p->batch && status == EKV_OK; b++) status = check_sequence(context, step, b);
    if (status != EKV_OK) return status;
    for (int32_t h = 0; h < p->q_heads; h++) step->lists |= ekv_alpha_of(p, h) >= EKV_SOFTMAX_BELOW;
    if (!context->cuda) step->tokens = ekv_q_begin(p, p->batch);
    if (!p->q_head_stride) p->q_head_stride = step->kv.k_dim;
    if (!p->q_token_stride) p->q_token_stride = (int64_t)p->q_heads * step->kv.k_dim;
    if (!p->out_head_stride) p->out_head_stride = step->kv.v_dim;
    if (!p->out_token_stride) p->out_token_stride = (int64_t)p->q_heads * step->kv.v_dim;
    if (p->policy == EKV_POLICY_PAGES && !context->cuda)
        for (int32_t b = 0; b < p->batch; b++)
            VALID(ekv_ceil_div(ekv_length_of(step, b), step->kv.page_size) <= p->page_mask_stride,
                  "page_mask_stride is %lld, less than the pages of sequence %d", ll(p->page_mask_stride), (int)b);
    return EKV_OK;
}
