/* A provider of verbs whose network is memory: queue pairs that WRITE, in order each, in any order among each other.
 *
 * No time passes by itself. A poll of a completion queue is a tick, in which some of what is due happens; arming the queue lets
 * ticks pass until it has a completion. A device and all that belongs to it is used by one thread at a time.
 */
#define _GNU_SOURCE
#include "abi.h"
#include "fabric.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { DEVICE_PAIRS = 64, LATE = 64, INLINE_BYTES = 64, RETRY_TICKS = 50, LATE_TICKS = 100 };

enum fault { FAULT_STATUS, FAULT_DROP, FAULT_REFUSE, FAULTS };

struct request {
    uint64_t id, due;
    struct ibv_sge part;
    uint64_t there;
    uint32_t there_key;
    uint32_t signaled, is_inline, status, dropped;
    char bytes[INLINE_BYTES];
};

struct cq {
    struct ibv_cq verbs;
    struct ibv_comp_channel channel;
    struct ibv_wc *ring;
    uint64_t pushed, polled, acked, events;
    int armed;
};

struct pair {
    struct ibv_qp verbs;
    struct shared_pair *shared;
    struct request *ring;
    uint64_t depth, posted, done, ended; /* done: carried out or failed; ended: and its completion delivered */
    uint64_t fault_at[FAULTS];           /* number of the request, from 1; 0: none */
    uint32_t fault_status;
    int late; /* what is under way when it leaves READY arrives nevertheless, afterwards */
    int reports; /* events of it that are not acknowledged */
};

struct device {
    struct ibv_context verbs;
    struct fabric *fabric;
    struct pair *pairs[DEVICE_PAIRS];
    uint32_t count, late_count;
    uint64_t tick, random, delay;
    int reports; /* end of a pipe, whose other one is verbs.async_fd */
    struct {
        struct request request;
        struct shared_pair *shared;
        uint64_t due;
    } late[LATE];
};

static uint64_t draw(struct device *device, uint64_t below)
{
    device->random ^= device->random << 13;
    device->random ^= device->random >> 7;
    device->random ^= device->random << 17;
    return below ? device->random % below : 0;
}

static int connected(struct device *device, const struct shared_pair *shared)
{
    const struct shared_pair *peer = fabric_pair(device->fabric, shared->peer);
    return !__atomic_load_n(&shared->cut, __ATOMIC_ACQUIRE) && !__atomic_load_n(&peer->cut, __ATOMIC_ACQUIRE) &&
           __atomic_load_n(&peer->state, __ATOMIC_ACQUIRE) == READY;
}

/* Write the bytes; an ibv_wc_status. A counter is written at once, and after what was written before it. */
static uint32_t carry(struct device *device, const struct request *request)
{
    uint32_t bytes = request->part.length;
    const char *from = request->bytes;
    if (bytes == 0)
        return SUCCESS;
    if (!request->is_inline && !(from = fabric_reach(device->fabric, request->part.lkey, request->part.addr, bytes)))
        return LOC_PROT_ERR;
    char *to = fabric_reach(device->fabric, request->there_key, request->there, bytes);
    if (!to)
        return REM_ACCESS_ERR;
    if (bytes == 8 && (uintptr_t)to % 8 == 0) {
        uint64_t word;
        memcpy(&word, from, 8);
        __atomic_store_n((uint64_t *)to, word, __ATOMIC_RELEASE);
    } else {
        memcpy(to, from, bytes);
    }
    return SUCCESS;
}

static void complete(struct pair *pair, const struct request *request)
{
    struct cq *cq = (struct cq *)pair->verbs.send_cq;
    if (request->dropped || (request->status == SUCCESS && !request->signaled))
        return;
    if (cq->pushed - cq->polled == (uint64_t)cq->verbs.cqe)
        abort(); /* a completion queue that overflows is an error of its user */
    struct ibv_wc *wc = &cq->ring[cq->pushed++ % cq->verbs.cqe];
    memset(wc, 0, sizeof *wc);
    wc->wr_id = request->id;
    wc->status = request->status;
    wc->qp_num = pair->verbs.qp_num;
    if (request->status == SUCCESS)
        wc->opcode = 1;
    if (cq->armed) {
        uint64_t one = 1;
        cq->armed = 0;
        cq->events++;
        if (write(cq->channel.fd, &one, sizeof one) != sizeof one)
            abort();
    }
}

static void set_state(struct pair *pair, uint32_t state)
{
    pair->verbs.state = state;
    __atomic_store_n(&pair->shared->state, state, __ATOMIC_RELEASE);
}

/* Carry out the first request that is due; false if there is none. */
static int carry_next(struct device *device, struct pair *pair)
{
    struct request *request = &pair->ring[pair->done % pair->depth];
    if (pair->done == pair->posted)
        return 0;
    if (pair->verbs.state == READY && __atomic_load_n(&pair->shared->state, __ATOMIC_ACQUIRE) == ERROR)
        pair->verbs.state = ERROR; /* the peer has asked for what this end does not permit */
    if (request->due > device->tick && pair->verbs.state == READY)
        return 0;
    if (pair->verbs.state != READY) {
        request->status = WR_FLUSH_ERR;
    } else if (pair->fault_at[FAULT_STATUS] == pair->done + 1) {
        if (draw(device, 2)) /* the bytes may have arrived all the same */
            carry(device, request);
        request->status = pair->fault_status;
    } else if (!connected(device, pair->shared)) {
        if (request->status == SUCCESS) { /* repeat it for some time first */
            request->status = RETRY_EXC_ERR;
            request->due = device->tick + RETRY_TICKS;
            return 1;
        }
    } else {
        request->status = carry(device, request);
        if (request->status == REM_ACCESS_ERR)
            __atomic_store_n(&fabric_pair(device->fabric, pair->shared->peer)->state, ERROR, __ATOMIC_RELEASE);
    }
    if (request->status != SUCCESS && pair->verbs.state == READY)
        set_state(pair, ERROR);
    request->dropped = pair->fault_at[FAULT_DROP] == pair->done + 1;
    request->due = device->tick + draw(device, device->delay + 1);
    pair->done++;
    return 1;
}

static int end_next(struct device *device, struct pair *pair)
{
    struct request *request = &pair->ring[pair->ended % pair->depth];
    if (pair->ended == pair->done || request->due > device->tick)
        return 0;
    complete(pair, request);
    pair->ended++;
    return 1;
}

static void deliver_late(struct device *device)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < device->late_count; i++) {
        if (device->late[i].due > device->tick)
            device->late[kept++] = device->late[i];
        else if (connected(device, device->late[i].shared))
            carry(device, &device->late[i].request);
    }
    device->late_count = kept;
}

/* Let a tick pass. With a delay, a pair may do nothing in it; without, all is done at once. */
static void pass(struct device *device)
{
    device->tick++;
    if (device->late_count)
        deliver_late(device);
    if (!device->count)
        return;
    uint32_t first = draw(device, device->count);
    for (uint32_t i = 0; i < device->count; i++) {
        struct pair *pair = device->pairs[(first + i) % device->count];
        uint64_t turns = device->delay ? draw(device, 4) : 2 * pair->depth;
        while (turns-- && (carry_next(device, pair) | end_next(device, pair)))
            ;
    }
}

static int busy(const struct device *device)
{
    int found = device->late_count > 0;
    for (uint32_t i = 0; i < device->count; i++)
        found |= device->pairs[i]->ended != device->pairs[i]->posted;
    return found;
}

static int poll_cq(struct ibv_cq *queue, int most, struct ibv_wc *wc)
{
    struct cq *cq = (struct cq *)queue;
    pass((struct device *)queue->context);
    int count = 0;
    while (count < most && cq->polled != cq->pushed)
        wc[count++] = cq->ring[cq->polled++ % queue->cqe];
    return count;
}

static int req_notify_cq(struct ibv_cq *queue, int solicited)
{
    (void)solicited;
    struct cq *cq = (struct cq *)queue;
    struct device *device = (struct device *)queue->context;
    cq->armed = 1;
    while (cq->armed && busy(device))
        pass(device);
    return 0;
}

static int post_send(struct ibv_qp *verbs, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct pair *pair = (struct pair *)verbs;
    struct device *device = (struct device *)verbs->context;
    for (; wr; wr = wr->next) {
        *bad = wr;
        if (verbs->state != READY && verbs->state != ERROR)
            return EINVAL;
        if (wr->opcode != WRITE || wr->num_sge != 1 || ((wr->send_flags & INLINE) && wr->sg_list->length > INLINE_BYTES))
            return EINVAL;
        if (pair->posted - pair->ended == pair->depth || pair->fault_at[FAULT_REFUSE] == pair->posted + 1) {
            pair->fault_at[FAULT_REFUSE] = 0;
            return ENOMEM;
        }
        struct request *request = &pair->ring[pair->posted % pair->depth];
        request->id = wr->wr_id;
        request->part = *wr->sg_list;
        request->there = wr->rdma.remote_addr;
        request->there_key = wr->rdma.rkey;
        request->signaled = !!(wr->send_flags & SIGNALED);
        request->is_inline = !!(wr->send_flags & INLINE);
        request->status = SUCCESS;
        request->due = device->tick + draw(device, device->delay + 1);
        if (request->is_inline)
            memcpy(request->bytes, (void *)request->part.addr, request->part.length);
        pair->posted++;
    }
    *bad = NULL;
    return 0;
}

/* --- what libibverbs does for other providers ------------------------------------------------------------------------------ */

int fake_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **context)
{
    uint64_t one;
    if (read(channel->fd, &one, sizeof one) != sizeof one)
        return -1;
    *queue = (struct ibv_cq *)((char *)channel - offsetof(struct cq, channel));
    *context = (*queue)->cq_context;
    return 0;
}

void fake_ack_cq_events(struct ibv_cq *queue, unsigned int count)
{
    ((struct cq *)queue)->acked += count;
}

int fake_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    ssize_t count = read(context->async_fd, event, sizeof *event);
    if (count == 0)
        errno = EIO;
    return count == sizeof *event ? 0 : -1;
}

void fake_ack_async_event(struct ibv_async_event *event)
{
    if (event->event_type >= QP_FATAL && event->event_type <= PATH_MIG_ERR)
        ((struct pair *)event->element.qp)->reports--;
}

/* Let the device report an event: of a pair, or of a port. */
void fake_report(struct device *device, uint32_t type, struct pair *pair, int port)
{
    struct ibv_async_event event = {.event_type = type};
    if (pair) {
        event.element.qp = &pair->verbs;
        pair->reports++;
    } else {
        event.element.port_num = port;
    }
    if (write(device->reports, &event, sizeof event) != sizeof event)
        abort();
}

/* Like the removal of the device: nothing is reported any more. */
void fake_remove(struct device *device)
{
    close(device->reports);
    device->reports = -1;
}

struct device *fake_open(struct fabric *fabric, uint64_t seed, uint64_t delay)
{
    struct device *device = calloc(1, sizeof *device);
    device->fabric = fabric;
    device->random = seed * 2 + 1;
    device->delay = delay;
    device->verbs.ops[POLL_CQ] = (void *)poll_cq;
    device->verbs.ops[REQ_NOTIFY_CQ] = (void *)req_notify_cq;
    device->verbs.ops[POST_SEND] = (void *)post_send;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        abort();
    device->verbs.async_fd = ends[0];
    device->reports = ends[1];
    device->verbs.num_comp_vectors = 1;
    device->verbs.abi_compat = (void *)UINTPTR_MAX;
    return device;
}

void fake_close(struct device *device)
{
    close(device->verbs.async_fd);
    if (device->reports >= 0)
        close(device->reports);
    free(device);
}

struct cq *fake_create_cq(struct device *device, int entries)
{
    struct cq *cq = calloc(1, sizeof *cq);
    cq->ring = calloc(entries, sizeof *cq->ring);
    cq->channel.context = cq->verbs.context = &device->verbs;
    cq->channel.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    cq->verbs.channel = &cq->channel;
    cq->verbs.cqe = entries;
    return cq;
}

/* How many events were not acknowledged; real libraries would wait for them for ever. */
int fake_destroy_cq(struct cq *cq)
{
    int owed = (int)(cq->events - cq->acked);
    close(cq->channel.fd);
    free(cq->ring);
    free(cq);
    return owed;
}

struct pair *fake_create_qp(struct device *device, struct cq *cq, uint64_t depth)
{
    uint32_t number = fabric_add_pair(device->fabric);
    if (!number || device->count == DEVICE_PAIRS)
        return NULL;
    struct pair *pair = calloc(1, sizeof *pair);
    pair->ring = calloc(depth, sizeof *pair->ring);
    pair->depth = depth;
    pair->shared = fabric_pair(device->fabric, number);
    pair->verbs.context = &device->verbs;
    pair->verbs.send_cq = pair->verbs.recv_cq = &cq->verbs;
    pair->verbs.qp_num = number;
    pair->verbs.qp_type = 2;
    device->pairs[device->count++] = pair;
    return pair;
}

void fake_connect(struct pair *pair, uint32_t peer)
{
    pair->shared->peer = peer;
    set_state(pair, READY);
}

/* To ERROR: what is posted ends with WR_FLUSH_ERR. To RESET: it is forgotten. */
void fake_leave(struct pair *pair, uint32_t state)
{
    struct device *device = (struct device *)pair->verbs.context;
    uint64_t due = device->tick + LATE_TICKS;
    for (uint64_t i = pair->done; pair->late && i < pair->posted && device->late_count < LATE; i++) {
        uint32_t at = device->late_count++;
        device->late[at].request = pair->ring[i % pair->depth];
        device->late[at].shared = pair->shared;
        device->late[at].due = due += draw(device, device->delay + 1);
    }
    set_state(pair, state);
    if (state == RESET)
        pair->done = pair->ended = pair->posted;
}

/* How many of its events were not acknowledged; real libraries would wait for them for ever. */
int fake_destroy_qp(struct pair *pair)
{
    int owed = pair->reports;
    struct device *device = (struct device *)pair->verbs.context;
    fake_leave(pair, RESET);
    for (uint32_t i = 0; i < device->count; i++)
        if (device->pairs[i] == pair)
            device->pairs[i] = device->pairs[--device->count];
    free(pair->ring);
    free(pair);
    return owed;
}

void fake_cut(struct pair *pair)
{
    __atomic_store_n(&pair->shared->cut, 1, __ATOMIC_RELEASE);
}

void fake_set_late(struct pair *pair)
{
    pair->late = 1;
}

/* Let the request of a number, counted from 1, fail with a status, lose its completion, or be refused when it is posted. */
void fake_set_fault(struct pair *pair, enum fault fault, uint64_t at, uint32_t status)
{
    pair->fault_at[fault] = at;
    if (fault == FAULT_STATUS)
        pair->fault_status = status;
}

void fake_pass(struct device *device, uint64_t ticks)
{
    while (ticks--)
        pass(device);
}
