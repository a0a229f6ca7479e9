/* A provider of verbs whose network is memory: queue pairs that WRITE, READ and SEND, in order each, in any order among each other.
 *
 * No time passes by itself. A poll of a completion queue is a tick, in which some of what is due happens; arming the queue lets
 * ticks pass until it has a completion. A device and all that belongs to it is used by one thread at a time, other devices by others.
 *
 * Whatever arrives at a pair does so under its lock, and only in the state READY: once it has left that state nothing more does.
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

enum { DEVICE_PAIRS = 64, LATE = 64, INLINE_BYTES = 256, RETRY_TICKS = 50, LATE_TICKS = 100 };

enum fault { FAULT_STATUS, FAULT_DROP, FAULT_REFUSE, FAULTS };

struct request {
    uint64_t id, due;
    struct ibv_sge part;
    uint64_t there;
    uint32_t there_key, opcode;
    uint32_t signaled, is_inline, status, dropped;
    char bytes[INLINE_BYTES];
};

struct cq {
    struct ibv_cq verbs;
    struct ibv_comp_channel channel;
    struct ibv_wc *ring;
    uint64_t pushed, polled, acked, events; /* events: those that were read */
    int armed; /* other threads clear it when they send */
    int reports; /* asynchronous events of it that are not acknowledged */
};

struct receive {
    uint64_t id;
    struct ibv_sge part;
};

struct pair {
    struct ibv_qp verbs;
    struct shared_pair *shared;
    struct request *ring;
    uint64_t depth, posted, done, ended; /* done: carried out or failed; ended: and its completion delivered */
    uint64_t failed;                     /* number of the request that has failed first; 0: none */
    struct receive *receives;
    uint64_t receive_depth, offered, received; /* received: or failed */
    uint64_t fault_at[FAULTS];           /* number of the request, from 1; 0: none */
    uint32_t fault_status;
    int late; /* what is under way when it leaves READY arrives nevertheless, afterwards */
    int reports; /* events of it that are not acknowledged */
};

struct device {
    struct ibv_context verbs;
    struct fabric *fabric;
    struct pair *pairs[DEVICE_PAIRS];
    uint32_t number, count, late_count;
    uint64_t tick, random, delay;
    int reports; /* end of a pipe, whose other one is verbs.async_fd */
    struct {
        struct request request;
        struct shared_pair *shared;
        uint64_t due;
        int lost;
    } late[LATE];
};

static uint64_t draw(struct device *device, uint64_t below)
{
    device->random ^= device->random << 13;
    device->random ^= device->random >> 7;
    device->random ^= device->random << 17;
    return below ? device->random % below : 0;
}

static struct shared_pair *peer_of(struct device *device, const struct shared_pair *shared)
{
    return fabric_pair(device->fabric, __atomic_load_n(&shared->peer, __ATOMIC_ACQUIRE));
}

static int connected(struct device *device, const struct shared_pair *shared)
{
    const struct shared_pair *peer = peer_of(device, shared);
    return !__atomic_load_n(&shared->cut, __ATOMIC_ACQUIRE) && !__atomic_load_n(&peer->cut, __ATOMIC_ACQUIRE) &&
           __atomic_load_n(&peer->state, __ATOMIC_ACQUIRE) == READY && peer_of(device, peer) == shared;
}

/* Make the channel ready if its queue is armed. */
static void wake(struct cq *cq)
{
    uint64_t one = 1;
    if (__atomic_exchange_n(&cq->armed, 0, __ATOMIC_SEQ_CST) && write(cq->channel.fd, &one, sizeof one) != sizeof one)
        abort();
}

/* The same for the queue of a pair that is locked, if this process has it. */
static void wake_locked(struct device *device, struct shared_pair *shared)
{
    if (shared->queue && shared->process == fabric_process(device->fabric))
        wake(shared->queue);
}

/* Let the peer look after its SEND that waits for a receive of this pair, or for its end. */
static void wake_starved(struct device *device, struct shared_pair *shared)
{
    if (!__atomic_exchange_n(&shared->starved, 0, __ATOMIC_SEQ_CST))
        return;
    struct shared_pair *peer = peer_of(device, shared);
    fabric_lock(peer);
    wake_locked(device, peer);
    fabric_unlock(peer);
}

/* Whether a pair has posted a receive that no message has taken. */
static int hungry(const struct shared_pair *shared)
{
    return __atomic_load_n(&shared->offered, __ATOMIC_SEQ_CST) != __atomic_load_n(&shared->sent, __ATOMIC_SEQ_CST);
}

static int has_message(const struct shared_pair *shared)
{
    return __atomic_load_n(&shared->sent, __ATOMIC_SEQ_CST) != shared->taken;
}

/* Let the device of a pair write the bytes; an ibv_wc_status. */
static uint32_t put(struct device *device, const struct shared_pair *peer, const struct request *request, const char *from)
{
    uint32_t bytes = request->part.length;
    char *to = fabric_reach(device->fabric, request->there_key, request->there, bytes);
    if (!to)
        return REM_ACCESS_ERR;
    fabric_put(device->fabric, peer, request->there_key, to, from, bytes);
    return SUCCESS;
}

/* Let it read them, once all is there that it has written; an ibv_wc_status. */
static uint32_t get(struct device *device, const struct shared_pair *peer, const struct request *request, char *to)
{
    const char *from = fabric_reach(device->fabric, request->there_key, request->there, request->part.length);
    if (!from)
        return REM_ACCESS_ERR;
    fabric_settle(device->fabric, peer, request->there_key);
    fabric_copy(to, from, request->part.length);
    return SUCCESS;
}

/* Put a message into the inbox of a pair that has room for it. */
static void deliver(struct device *device, struct shared_pair *peer, const struct request *request, const char *from)
{
    struct message *message = &peer->inbox[peer->sent % RECEIVES];
    message->bytes = request->part.length;
    memcpy(message->data, from, message->bytes);
    __atomic_store_n(&peer->sent, peer->sent + 1, __ATOMIC_SEQ_CST);
    wake_locked(device, peer);
}

/* Let a request arrive, if its end is connected; an ibv_wc_status, or one of the two below. */
enum { UNCONNECTED = 1000, STARVED };

static uint32_t carry(struct device *device, struct shared_pair *shared, const struct request *request)
{
    char *from = (char *)request->bytes;
    uint32_t bytes = request->part.length, status = SUCCESS;
    if (bytes && !request->is_inline && !(from = fabric_reach(device->fabric, request->part.lkey, request->part.addr, bytes)))
        return LOC_PROT_ERR;
    struct shared_pair *peer = peer_of(device, shared);
    fabric_lock(peer);
    if (!connected(device, shared)) {
        status = UNCONNECTED;
    } else if (request->opcode != SEND) {
        if (bytes)
            status = request->opcode == WRITE ? put(device, peer, request, from) : get(device, peer, request, from);
        if (status == REM_ACCESS_ERR) {
            __atomic_store_n(&peer->state, ERROR, __ATOMIC_RELEASE);
            wake_locked(device, peer);
        }
    } else {
        __atomic_store_n(&peer->starved, 1, __ATOMIC_SEQ_CST); /* before it looks, so that no receive is overlooked */
        if (hungry(peer)) {
            __atomic_store_n(&peer->starved, 0, __ATOMIC_SEQ_CST);
            deliver(device, peer, request, from);
        } else {
            status = STARVED;
        }
    }
    fabric_unlock(peer);
    return status;
}

/* Add a completion to the queue. */
static struct ibv_wc *push(struct pair *pair, uint64_t id, uint32_t status)
{
    struct cq *cq = (struct cq *)pair->verbs.send_cq;
    if (cq->pushed - cq->polled == (uint64_t)cq->verbs.cqe)
        abort(); /* a completion queue that overflows is an error of its user */
    struct ibv_wc *wc = &cq->ring[cq->pushed++ % cq->verbs.cqe];
    *wc = (struct ibv_wc){.wr_id = id, .status = status, .qp_num = pair->verbs.qp_num};
    wake(cq);
    return wc;
}

static void complete(struct pair *pair, const struct request *request)
{
    if (request->dropped || (request->status == SUCCESS && !request->signaled))
        return;
    struct ibv_wc *wc = push(pair, request->id, request->status);
    if (request->status == SUCCESS)
        wc->opcode = request->opcode == SEND ? SENT : request->opcode == READ ? HAS_READ : WRITTEN;
}

static void set_state(struct pair *pair, uint32_t state)
{
    pair->verbs.state = state;
    fabric_lock(pair->shared);
    __atomic_store_n(&pair->shared->state, state, __ATOMIC_RELEASE);
    fabric_unlock(pair->shared);
    wake_starved((struct device *)pair->verbs.context, pair->shared);
}

/* Learn that the peer has put this end into the error state, because it has asked for what this end does not permit. */
static void learn_state(struct pair *pair)
{
    if (pair->verbs.state == READY && __atomic_load_n(&pair->shared->state, __ATOMIC_ACQUIRE) == ERROR)
        pair->verbs.state = ERROR;
}

/* Carry out the first request that is due; false if there is none. */
static int carry_next(struct device *device, struct pair *pair)
{
    struct request *request = &pair->ring[pair->done % pair->depth];
    if (pair->done == pair->posted)
        return 0;
    if (request->due > device->tick && pair->verbs.state == READY)
        return 0;
    if (pair->verbs.state != READY) {
        request->status = WR_FLUSH_ERR;
    } else if (pair->fault_at[FAULT_STATUS] == pair->done + 1) {
        if (draw(device, 2)) /* the bytes may have arrived all the same */
            carry(device, pair->shared, request);
        request->status = pair->fault_status;
    } else {
        uint32_t status = carry(device, pair->shared, request);
        if (status == STARVED)
            return 0;
        if (status == UNCONNECTED) {
            if (request->status == SUCCESS) { /* repeat it for some time first */
                request->status = RETRY_EXC_ERR;
                request->due = device->tick + RETRY_TICKS;
                return 1;
            }
        } else {
            request->status = status;
        }
    }
    if (request->status != SUCCESS && pair->verbs.state == READY) {
        pair->failed = pair->done + 1;
        set_state(pair, ERROR);
    }
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

/* Copy the first message into the first buffer. */
static void receive_message(struct device *device, struct pair *pair)
{
    struct shared_pair *shared = pair->shared;
    const struct message *message = &shared->inbox[shared->taken % RECEIVES];
    const struct receive *receive = &pair->receives[pair->received++ % pair->receive_depth];
    if (message->bytes > receive->part.length)
        abort(); /* a buffer that is too short is an error of its user */
    char *to = fabric_reach(device->fabric, receive->part.lkey, receive->part.addr, message->bytes);
    if (to)
        memcpy(to, message->data, message->bytes);
    struct ibv_wc *wc = push(pair, receive->id, to ? SUCCESS : LOC_PROT_ERR);
    wc->opcode = RECEIVED;
    wc->byte_len = message->bytes;
    __atomic_store_n(&shared->taken, shared->taken + 1, __ATOMIC_RELEASE);
    if (!to && pair->verbs.state == READY)
        set_state(pair, ERROR);
}

/* End the first receive for which a message has come, or in the error state, behind its cause, the first one; false if there is
 * none. */
static int receive_next(struct device *device, struct pair *pair)
{
    learn_state(pair);
    if (has_message(pair->shared)) {
        receive_message(device, pair);
        return 1;
    }
    if (pair->verbs.state != ERROR || pair->received == pair->offered || pair->ended < pair->failed)
        return 0;
    push(pair, pair->receives[pair->received++ % pair->receive_depth].id, WR_FLUSH_ERR);
    return 1;
}

/* Lose what is under way of a pair, from one on: a SEND that is not received takes what is behind it with it. */
static void lose_late(struct device *device, const struct shared_pair *shared, uint32_t from)
{
    for (uint32_t i = from; i < device->late_count; i++)
        device->late[i].lost |= device->late[i].shared == shared;
}

static void deliver_late(struct device *device)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < device->late_count; i++) {
        if (device->late[i].due > device->tick)
            device->late[kept++] = device->late[i];
        else if (!device->late[i].lost && carry(device, device->late[i].shared, &device->late[i].request) == STARVED)
            lose_late(device, device->late[i].shared, i);
    }
    device->late_count = kept;
}

/* Let a tick pass. With a delay, a pair may do nothing in it; without, all is done at once. */
static void pass(struct device *device)
{
    device->tick++;
    if (!device->count && !device->late_count)
        return;
    fabric_begin();
    if (device->late_count)
        deliver_late(device);
    uint32_t first = draw(device, device->count);
    for (uint32_t i = 0; i < device->count; i++) {
        struct pair *pair = device->pairs[(first + i) % device->count];
        uint64_t turns = device->delay ? draw(device, 4) : 2 * (pair->depth + pair->receive_depth);
        while (turns-- && (receive_next(device, pair) | carry_next(device, pair) | end_next(device, pair)))
            ;
    }
    fabric_end();
}

/* Whether the next request can only wait for the peer to post a receive. */
static int waits(struct device *device, const struct pair *pair)
{
    const struct request *request = &pair->ring[pair->done % pair->depth];
    return request->opcode == SEND && request->due <= device->tick && pair->fault_at[FAULT_STATUS] != pair->done + 1 &&
           pair->verbs.state == READY && __atomic_load_n(&pair->shared->state, __ATOMIC_ACQUIRE) == READY &&
           connected(device, pair->shared) && !hungry(peer_of(device, pair->shared));
}

/* Whether something happens when time passes. */
static int busy(struct device *device)
{
    int found = device->late_count > 0;
    for (uint32_t i = 0; i < device->count; i++) {
        const struct pair *pair = device->pairs[i];
        found |= pair->ended != pair->done || (pair->done != pair->posted && !waits(device, pair));
        found |= has_message(pair->shared);
        found |= pair->offered != pair->received && __atomic_load_n(&pair->shared->state, __ATOMIC_ACQUIRE) == ERROR;
    }
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
    __atomic_store_n(&cq->armed, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&cq->armed, __ATOMIC_SEQ_CST) && busy(device))
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
        uint32_t most = wr->send_flags & INLINE ? INLINE_BYTES : wr->opcode == SEND ? MESSAGE_BYTES : UINT32_MAX;
        if ((wr->opcode != WRITE && wr->opcode != SEND && wr->opcode != READ) || wr->num_sge != 1 || wr->sg_list->length > most)
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
        request->opcode = wr->opcode;
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

static int post_recv(struct ibv_qp *verbs, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct pair *pair = (struct pair *)verbs;
    int error = 0;
    for (*bad = NULL; wr; wr = wr->next) {
        if (verbs->state == RESET || wr->num_sge != 1)
            error = EINVAL;
        else if (pair->offered - pair->received == pair->receive_depth)
            error = ENOMEM;
        if (error) {
            *bad = wr;
            break;
        }
        pair->receives[pair->offered++ % pair->receive_depth] = (struct receive){wr->wr_id, *wr->sg_list};
    }
    __atomic_store_n(&pair->shared->offered, pair->offered, __ATOMIC_SEQ_CST);
    wake_starved((struct device *)verbs->context, pair->shared);
    return error;
}

/* --- what libibverbs does for other providers ------------------------------------------------------------------------------ */

int fake_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **context)
{
    uint64_t one;
    if (read(channel->fd, &one, sizeof one) != sizeof one)
        return -1;
    struct cq *cq = (struct cq *)((char *)channel - offsetof(struct cq, channel));
    cq->events++;
    *queue = &cq->verbs;
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
    if (event->event_type == CQ_ERR)
        ((struct cq *)event->element.cq)->reports--;
}

static void report(struct device *device, struct ibv_async_event event)
{
    if (write(device->reports, &event, sizeof event) != sizeof event)
        abort();
}

/* Let the device report an event of a port; 0: of itself. */
void fake_report(struct device *device, uint32_t type, int port)
{
    report(device, (struct ibv_async_event){.element.port_num = port, .event_type = type});
}

/* The same of a queue pair. */
void fake_report_qp(struct pair *pair, uint32_t type)
{
    pair->reports++;
    report((struct device *)pair->verbs.context, (struct ibv_async_event){.element.qp = &pair->verbs, .event_type = type});
}

/* That a completion queue is of no use any more. */
void fake_report_cq(struct cq *cq)
{
    cq->reports++;
    report((struct device *)cq->verbs.context, (struct ibv_async_event){.element.cq = &cq->verbs, .event_type = CQ_ERR});
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
    device->number = fabric_add_device(fabric);
    device->random = seed * 2 + 1;
    device->delay = delay;
    device->verbs.ops[POLL_CQ] = (void *)poll_cq;
    device->verbs.ops[REQ_NOTIFY_CQ] = (void *)req_notify_cq;
    device->verbs.ops[POST_SEND] = (void *)post_send;
    device->verbs.ops[POST_RECV] = (void *)post_recv;
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
    int owed = (int)(cq->events - cq->acked) + cq->reports;
    close(cq->channel.fd);
    free(cq->ring);
    free(cq);
    return owed;
}

struct pair *fake_create_qp(struct device *device, struct cq *cq, uint64_t depth, uint64_t receives)
{
    if (device->count == DEVICE_PAIRS || receives == 0 || receives > RECEIVES)
        return NULL;
    uint32_t number = fabric_add_pair(device->fabric, cq, device->number);
    if (!number)
        return NULL;
    struct pair *pair = calloc(1, sizeof *pair);
    pair->ring = calloc(depth, sizeof *pair->ring);
    pair->depth = depth;
    pair->receives = calloc(receives, sizeof *pair->receives);
    pair->receive_depth = receives;
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
    lose_late((struct device *)pair->verbs.context, pair->shared, 0);
    __atomic_store_n(&pair->shared->peer, peer, __ATOMIC_RELEASE);
    set_state(pair, READY);
}

/* To ERROR: what is posted ends with WR_FLUSH_ERR. To RESET: it is forgotten. */
void fake_leave(struct pair *pair, uint32_t state)
{
    struct device *device = (struct device *)pair->verbs.context;
    uint64_t due = device->tick + LATE_TICKS;
    int is_late = pair->late && pair->verbs.state == READY;
    for (uint64_t i = pair->done; is_late && i < pair->posted && device->late_count < LATE; i++) {
        uint32_t at = device->late_count++;
        device->late[at].request = pair->ring[i % pair->depth];
        device->late[at].shared = pair->shared;
        device->late[at].lost = 0;
        device->late[at].due = due += draw(device, device->delay + 1);
    }
    set_state(pair, state);
    if (state == RESET) {
        struct shared_pair *shared = pair->shared;
        pair->done = pair->ended = pair->posted;
        pair->offered = pair->received = shared->taken = shared->sent;
        __atomic_store_n(&shared->offered, shared->sent, __ATOMIC_SEQ_CST);
        pair->failed = 0;
        return;
    }
    while (has_message(pair->shared)) /* they have come before */
        receive_message(device, pair);
    if (pair->ended != pair->posted || pair->received != pair->offered)
        wake((struct cq *)pair->verbs.send_cq);
}

/* How many of its events were not acknowledged; real libraries would wait for them for ever. */
int fake_destroy_qp(struct pair *pair)
{
    int owed = pair->reports;
    struct device *device = (struct device *)pair->verbs.context;
    fake_leave(pair, RESET);
    fabric_lock(pair->shared);
    pair->shared->queue = NULL;
    fabric_unlock(pair->shared);
    for (uint32_t i = 0; i < device->count; i++)
        if (device->pairs[i] == pair)
            device->pairs[i] = device->pairs[--device->count];
    free(pair->ring);
    free(pair->receives);
    free(pair);
    return owed;
}

void fake_cut(struct pair *pair)
{
    struct device *device = (struct device *)pair->verbs.context;
    __atomic_store_n(&pair->shared->cut, 1, __ATOMIC_RELEASE);
    wake_starved(device, pair->shared);
    wake_starved(device, peer_of(device, pair->shared));
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
