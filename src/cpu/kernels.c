/*
 * The kernels of one instruction set.  This file is compiled once per instruction set, each time with that set's flags and
 * EKV_ISA=<name>, and defines one symbol: the table ekv_kernels_<name>.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cpu/vec.h"

#include "entmaxkv/kernels.h"

#include "cpu/convert.h"
#include "cpu/entmax.h"
#include "cpu/page.h"
#include "cpu/score.h"
#include "cpu/sketch.h"
#include "cpu/values.h"

#define TYPED_FUNCTIONS(name, description)                                                 \
    static void name##_f32(ekv_##name##_args *a) { name(EKV_F32, a); }                     \
    static void name##_f16(ekv_##name##_args *a) { name(EKV_F16, a); }                     \
    static void name##_bf16(ekv_##name##_args *a) { name(EKV_BF16, a); }
EKV_TYPED_KERNELS(TYPED_FUNCTIONS)

#define TABLE_NAME_(isa) ekv_kernels_##isa
#define TABLE_NAME(isa) TABLE_NAME_(isa)
#define STRING_(isa) #isa
#define STRING(isa) STRING_(isa)
#define TYPED_ENTRY(name, description) .name = {name##_f32, name##_f16, name##_bf16},
#define PLAIN_ENTRY(name, description) .name = name,

extern const ekv_kernels TABLE_NAME(EKV_ISA);
const ekv_kernels TABLE_NAME(EKV_ISA) = {
    .name = STRING(EKV_ISA),
    EKV_TYPED_KERNELS(TYPED_ENTRY)
    EKV_PLAIN_KERNELS(PLAIN_ENTRY)
};
