/* What rccl.c (calls, groups, communicators) and transfer.c (a batch of calls at work) share. */
#pragma once
#include "combine.h"
#include "hiphost.h"
#include <stdatomic.h>

enum { MAX_RANKS = 16, MAX_FACTORS = 256, SLOT = 65536 };

typedef struct {
    _Atomic uint64_t written, read;
    size_t bytes;
    char data[SLOT];
} channel_t;

typedef struct {
    _Atomic int size, arrived, aborted;
    struct {
        _Atomic int process, left;
    } members[MAX_RANKS];
    channel_t channels[MAX_RANKS][MAX_RANKS]; /* from, to; pages nobody touches take no memory */
} segment_t;

typedef union {
    char internal[128];
    struct {
        int process, file;
        uint64_t inode;
    };
} unique_id_t;

typedef struct comm {
    segment_t *segment;
    unique_id_t id;
    int size, rank, device, blocking, behind; /* microseconds */
    int drops; /* elements at the end of longer reductions that are wrong on purpose */
    _Atomic int state, aborted, references;
    uint64_t issued;
    _Atomic uint64_t ran;
    int processes[MAX_RANKS]; /* pidfds; they turn readable when the process ends */
    struct {
        int used, dtype;
        uint64_t value;
    } factors[MAX_FACTORS];
} comm_t;

typedef enum { SEND, RECV, ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST } kind_t;

typedef struct {
    kind_t kind;
    const char *from;
    char *to;
    size_t count;
    int dtype, op, peer; /* or root */
    uint64_t factor;
} call_t;

typedef struct {
    comm_t *comm;
    uint64_t turn;
    int count;
    call_t calls[];
} batch_t;

void issue(void *batch); /* as a batch enters its stream */
void run(void *batch);
void release(comm_t *comm); /* the last to release it frees it */
void rest(int *idle);       /* a turn of a loop that waits */
