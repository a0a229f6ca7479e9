/* A batch of calls at work on its stream: a plan for each call, the transfers of all together, then the arithmetic. */
#define _GNU_SOURCE
#include "rccl.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    int send, peer;
    char *at;
    size_t left;
} transfer_t;

typedef struct {
    transfer_t transfers[2 * MAX_RANKS];
    int count;
    char *mine, *parts; /* wide elements: this rank's, everybody's */
} plan_t;

static void add(plan_t *plan, int send, int peer, const char *at, size_t bytes) {
    if (bytes) plan->transfers[plan->count++] = (transfer_t){send, peer, (char *)at, bytes};
}

static void plan_reduction(const comm_t *c, const call_t *call, plan_t *plan) {
    int scatter = call->kind == REDUCE_SCATTER, all = scatter ? c->size : 1;
    size_t bytes = call->count * wide_bytes(call->dtype);
    plan->mine = malloc(bytes * all + 1);
    widen(call->dtype, plan->mine, call->from, call->count * all, call->op == PREMUL_SUM ? &call->factor : NULL);
    if (call->kind != REDUCE || c->rank == call->peer) plan->parts = malloc(bytes * c->size + 1);
    for (int r = 0; r < c->size; r++) {
        if (call->kind != REDUCE || r == call->peer) add(plan, 1, r, plan->mine + (scatter ? r * bytes : 0), bytes);
        if (plan->parts) add(plan, 0, r, plan->parts + r * bytes, bytes);
    }
}

static void plan_call(const comm_t *c, const call_t *call, plan_t *plan) {
    size_t bytes = call->count * item_bytes(call->dtype);
    switch (call->kind) {
    case SEND: add(plan, 1, call->peer, call->from, bytes); break;
    case RECV: add(plan, 0, call->peer, call->to, bytes); break;
    case ALL_GATHER:
        for (int r = 0; r < c->size; r++) {
            add(plan, 1, r, call->from, bytes);
            add(plan, 0, r, call->to + r * bytes, bytes);
        }
        break;
    case BROADCAST:
        for (int r = 0; r < c->size; r++)
            if (c->rank == call->peer) add(plan, 1, r, call->from, bytes);
        add(plan, 0, call->peer, call->to, bytes);
        break;
    default: plan_reduction(c, call, plan);
    }
}

static void finish(const comm_t *c, const call_t *call, plan_t *plan) {
    if (plan->parts && !c->aborted) {
        size_t bytes = call->count * wide_bytes(call->dtype);
        size_t dropped = call->count > 1000 ? (size_t)c->drops : 0;
        for (int r = 1; r < c->size; r++)
            combine(call->dtype, call->op, plan->parts, plan->parts + r * bytes, call->count - dropped);
        narrow(call->dtype, call->to, plan->parts, call->count, call->op == AVG ? c->size : 1);
    }
    free(plan->mine), free(plan->parts);
}

/* Moves one piece, if the channel allows it. What is longer than the receiver's message waits for ever.
 * After any member's abort nobody waits: NCCL's kernels go on then, and send each other whatever their buffers hold. */
static int step(const comm_t *c, transfer_t *t) {
    if (c->segment->aborted) {
        t->left = 0;
        return 1;
    }
    channel_t *channel = t->send ? &c->segment->channels[c->rank][t->peer] : &c->segment->channels[t->peer][c->rank];
    size_t bytes = t->left < SLOT ? t->left : SLOT;
    int full = channel->written != channel->read;
    if (t->send == full || (!t->send && channel->bytes > t->left)) return 0;
    if (t->send) {
        memcpy(channel->data, t->at, channel->bytes = bytes);
        channel->written++;
    } else {
        memcpy(t->at, channel->data, bytes = channel->bytes);
        channel->read++;
    }
    t->at += bytes, t->left -= bytes;
    return 1;
}

void rest(int *idle) {
    if (++*idle < 200) sched_yield();
    else usleep(50);
}

/* All transfers progress together, those with one peer in one direction in order. */
static void transfer_all(const comm_t *c, plan_t *plans, int count) {
    for (int left = 1, idle = 0; left && !c->aborted;) {
        unsigned busy[2] = {0, 0};
        int moved = left = 0;
        for (int p = 0; p < count; p++)
            for (transfer_t *t = plans[p].transfers; t < plans[p].transfers + plans[p].count; t++) {
                if (!t->left) continue;
                if (!(busy[t->send] >> t->peer & 1)) moved |= step(c, t);
                if (t->left) busy[t->send] |= 1u << t->peer, left = 1;
            }
        if (moved) idle = 0;
        else if (left) rest(&idle);
    }
}

void release(comm_t *c) {
    if (--c->references) return;
    for (int r = 0; r < c->size; r++)
        if (c->processes[r] >= 0) close(c->processes[r]);
    if (c->segment) munmap(c->segment, sizeof *c->segment);
    free(c);
}

/* A communicator's batches run in the order of issue, whatever their streams. */
void issue(void *arg) {
    batch_t *b = arg;
    b->turn = b->comm->issued++;
    b->comm->references++;
}

void run(void *arg) {
    batch_t *b = arg;
    comm_t *c = b->comm;
    for (int idle = 0; c->ran != b->turn && !c->aborted;) rest(&idle);
    plan_t *plans = calloc(b->count, sizeof *plans);
    for (int i = 0; i < b->count && !c->aborted; i++) plan_call(c, &b->calls[i], &plans[i]);
    transfer_all(c, plans, b->count);
    for (int i = 0; i < b->count; i++) finish(c, &b->calls[i], &plans[i]);
    free(plans);
    c->ran = b->turn + 1;
    release(c);
}
