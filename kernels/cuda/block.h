/*
 * block.h - the rows of a batch that run together: where they come from, where results go
 */
#pragma once

#include "kernels/cuda/plan.h"

#define BLOCK_STAGING ((uint64_t)8 << 20) /* bytes each way: see block.c */
#define BLOCK_TABLES                                                  \
    (SEGMENTS_MAX * (sizeof(struct piece) + sizeof(struct segment)) + \
     TAILS_MAX * (SEGMENTS_MAX + 1) * sizeof(int32_t) +               \
     MODEL_STAGES_MAX * SEGMENTS_MAX * sizeof(uint64_t) + 4 * 256)
#define BLOCK_PIECE_MAX ((uint64_t)64 << 10) /* bytes of x: up to here a kernel gathers them */

enum phase { PHASE_IDLE, PHASE_COMPUTE, PHASE_GUARD, PHASE_FULL, PHASE_DONE };

/* How a part of a result that kernels wrote elsewhere comes to its place. */
enum way { WAY_DIRECT, WAY_ENGINE, WAY_CPU };

/* A run of equal pieces, `width` bytes each, `pitch` apart at the destination. */
struct copy {
    enum way way;
    const char *from;
    char *to;
    uint64_t width, height, pitch;
};

/* Rows of one job in this block. */
struct part {
    struct job *job;
    int64_t job_row, row, rows;
    char *y; /* where kernels find the part's result, when it is one piece */
    struct copy copy;
};

/* Packed tables in the making: offsets within table memory. */
struct tables {
    uint64_t used;
    struct piece *pieces;
    int n_pieces;
    uint64_t piece_max;
    struct segment *segments;
    int32_t *tiles[TAILS_MAX];
    uint64_t *counters;
    struct recorded *recorded; /* of a block in a range */
};

struct slot {
    int device;
    unsigned index;
    cudaStream_t stream;
    uint32_t *flag; /* pinned */
    uint32_t sequence;
    char *host, *at_device; /* tables: pinned, and their copy */
    char *in, *out;         /* staging, pinned */
    uint64_t in_used, out_used;

    struct plan *plan;
    struct batch *batch;
    enum phase phase;
    bool warming; /* the guard stops every row */
    int64_t asked_ns;
    unsigned job;    /* where the next block begins */
    int64_t job_row; /* of those that the job has in this batch */
    struct block block;
    const struct range *range; /* the block's, if one has it: its tables begin with `recorded` */
    int n_parts;
    struct part parts[2 * SEGMENTS_MAX]; /* one a segment, and one a full row of a compact result */
    struct part *order[SEGMENTS_MAX];    /* the part that each segment belongs to */
    struct tables tables;
};

/* The next rows of the batch as parts and segments. False when none are left. */
bool block_next(struct slot *slot);
/* To the device: rows that the copy engine takes; the tables; the rows that a kernel takes. */
int block_upload_rows(struct slot *slot, struct report *report);
int block_upload_tables(struct slot *slot, struct report *report);
int block_gather(struct slot *slot, struct report *report);
/* Whether the tables go with the guard's launch, and need no upload before it. */
bool block_travels(const struct slot *slot);
/* Some of what kernels write must be brought to its place by the copy engine. */
bool block_downloads(const struct slot *slot);
/* Enqueues on the slot's stream how the tables, and with `gathers` the rows, of any block in that
 * range come to the device for the slot `of`, and makes slot->block one that stands for them. */
int block_record(struct slot *slot, const struct slot *of, const struct range *range, bool gathers,
                 struct report *report);
/* Brings what kernels wrote elsewhere to its place: by the copy engine, enqueued; by the CPU, once
 * the block has ended. */
int block_download(struct slot *slot, struct report *report);
void block_copy_out(const struct slot *slot);

/* For guard.c, which makes the segments of a second run: tables begin, segments are filled in with
 * their parts in slot->order, tables end. */
void block_begin_tables(struct slot *slot, int segments_max);
void block_end_tables(struct slot *slot, int n);
/* `to` is where it belongs, `arena` where it may lie meanwhile; returns where kernels write it. */
char *block_place(struct slot *slot, struct part *part, char *to, uint64_t size, char *arena);

static inline struct arena *block_arena(const struct slot *slot)
{
    return &slot->plan->arenas[slot->index];
}
