/*
 * The machine as the benchmark sees it: its processor and memory, a clock, and how fast it can read memory and multiply and add.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef EKV_MACHINE_H
#define EKV_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The processor's name, as the system calls it. */
void machine_processor(char *text, size_t size);
/* Bytes of last-level cache of all processors together; 0 if the system does not say. */
size_t machine_last_level_cache(void);
/* Bytes of memory that can be allocated now without swapping; 0 if the system does not say. */
double machine_free_memory(void);
/* A clock that never goes back. */
double machine_seconds(void);

/* A buffer larger than the caches, each thread's part of it written first by that thread, so that it lies in memory near to it. */
typedef struct machine_stream {
    uint64_t *words;
    size_t count;
    int threads;
} machine_stream;

/* False when memory is out. */
bool machine_stream_open(machine_stream *stream, size_t bytes, int threads);
void machine_stream_close(machine_stream *stream);
/* Reads all of it once with its threads, which also leaves the caches filled with it. */
void machine_stream_read(const machine_stream *stream);
/* Bytes per second of the fastest of `passes` readings. */
double machine_stream_bandwidth(const machine_stream *stream, int passes);

/* Floating-point operations per second, a multiplication and an addition being two. */
typedef struct machine_peak {
    double fused;    /* one instruction for both: what the processor can do; without such an instruction, as separate */
    double separate; /* two instructions, as the kernels use them, so that all instruction sets return the same bits */
} machine_peak;

/* Of `threads` threads with the instruction set of a backend that can run here; the fastest of `passes` loops in registers. */
machine_peak machine_multiply_add_peak(const char *backend, int threads, int passes);

#endif
