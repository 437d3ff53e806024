/*
 * The command line.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef LM_OPTIONS_H
#define LM_OPTIONS_H

#include "error.h"

#include <entmaxkv/entmaxkv.h>
#include <stdint.h>

typedef enum lm_task { LM_PERPLEXITY, LM_PASSKEY, LM_GENERATE, LM_RECORD, LM_CALIBRATE } lm_task;

enum { LM_MAX_POLICIES = 4, LM_MAX_TEXTS = 64 };

typedef struct lm_options {
    lm_task task;
    /* Common. */
    const char *model;
    const char *texts[LM_MAX_TEXTS];      /* the files that make up the text, one after the other */
    int text_count;                       /* 0: persuasion-part1.txt in the model's directory */
    ekv_policy policies[LM_MAX_POLICIES]; /* in the order in which they run; perplexity and passkey always begin with full */
    int policy_count;
    int64_t budget;
    ekv_dtype kv_type;
    const char *backend; /* NULL: the library's choice */
    int64_t threads;     /* 0: the library's choice */
    int64_t seed;
    bool json;
    /* By task. */
    int64_t context;    /* perplexity, passkey */
    int64_t windows;    /* perplexity */
    int64_t offset;     /* perplexity, record, calibrate */
    int64_t trials;     /* passkey */
    const char *prompt; /* generate */
    int64_t bytes;      /* generate */
    const char *basis;  /* perplexity, passkey, generate: a file of calibrate, or NULL */
    int64_t length;     /* record, calibrate: tokens */
    int64_t queries;    /* record: positions at the end whose queries are kept */
    const char *out;    /* record, calibrate */
} lm_options;

typedef enum lm_parsed {
    LM_PARSED_RUN,  /* go on */
    LM_PARSED_DONE, /* help or the version was asked for and is printed */
    LM_PARSED_USAGE /* the error says what is wrong with the command line */
} lm_parsed;

lm_parsed lm_options_parse(int argc, char **argv, lm_options *options, lm_error *error);

#endif
