/* Streams and events. A stream is a thread with a queue; operation number n of a stream is through when `done` >= n.
 * Settings: HIPHOST_DELAY_US (0), a sleep before every operation, which shows what lacks synchronisation;
 * GPU_MAX_HW_QUEUES (no limit), hardware queues of a device, which streams share. */
#define _GNU_SOURCE
#include "hiphost.h"
#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { EVENT = 0x6576656e, NON_BLOCKING = 1, MAX_QUEUES = 64 };

/* One lock for all streams, and one condition for what they have done: an operation may wait for any of them. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static stream_t *streams; /* never freed: events name them; those that have ended take no more operations */
static stream_t *default_streams[MAX_DEVICES];

/* Operations of a queue begin in order, and one begins when what its stream holds before it is through. A wait holds up
 * the queue. */
struct queue {
    uint64_t submitted, begun;
};
static queue_t queues[MAX_DEVICES][MAX_QUEUES];

static void await(void *arg);

static void begin(queue_t *queue) {
    queue->begun++;
    pthread_cond_broadcast(&changed);
}

static void *work_off(void *arg) {
    stream_t *s = arg;
    current_device = s->device;
    pthread_mutex_lock(&lock);
    while (s->head || !s->ended) {
        op_t *op = s->head;
        if (!op) {
            pthread_cond_wait(&s->arrived, &lock);
            continue;
        }
        s->head = op->next;
        if (!s->head) s->tail = NULL;
        int waits = op->run == await;
        while (s->queue && s->queue->begun + 1 < op->number) pthread_cond_wait(&changed, &lock);
        if (s->queue && !waits) begin(s->queue);
        pthread_mutex_unlock(&lock);
        if (s->delay) usleep(s->delay);
        op->run(op->arg);
        free(op);
        pthread_mutex_lock(&lock);
        if (s->queue && waits) begin(s->queue);
        s->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

stream_t *new_stream(int device, unsigned flags, int priority) {
    stream_t *s = calloc(1, sizeof *s);
    pthread_cond_init(&s->arrived, NULL);
    s->device = device, s->flags = flags, s->priority = priority, s->delay = setting("HIPHOST_DELAY_US", 0);
    static int made[MAX_DEVICES];
    int limit = setting("GPU_MAX_HW_QUEUES", 0);
    pthread_mutex_lock(&lock);
    if (limit > 0) s->queue = &queues[device][made[device]++ % (limit < MAX_QUEUES ? limit : MAX_QUEUES)];
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    hiphost_thread(work_off, s);
    return s;
}

void end_stream(stream_t *s) {
    pthread_mutex_lock(&lock);
    s->ended = 1;
    pthread_cond_signal(&s->arrived);
    pthread_mutex_unlock(&lock);
}

/* Held while a kernel is loaded: no call puts work on a stream meanwhile. */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

stream_t *find_stream(stream_t *handle) {
    pthread_mutex_lock(&loading);
    pthread_mutex_unlock(&loading);
    return look_up_stream(handle);
}

stream_t *look_up_stream(stream_t *handle) {
    if ((uintptr_t)handle <= 2) { /* null, legacy default, default of the thread: here all one */
        static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
        stream_t **at = &default_streams[current_device];
        pthread_mutex_lock(&once);
        if (!*at && device_count()) *at = new_stream(current_device, 0, 0);
        pthread_mutex_unlock(&once);
        return *at;
    }
    pthread_mutex_lock(&lock);
    stream_t *s = streams;
    while (s && (s != handle || s->ended)) s = s->next;
    pthread_mutex_unlock(&lock);
    return s;
}

op_t *new_op(void (*run)(void *), void (*issue)(void *), const void *arg, size_t bytes) {
    op_t *op = malloc(sizeof *op + bytes);
    *op = (op_t){.run = run, .issue = issue, .bytes = bytes};
    memcpy(op->arg, arg, bytes);
    return op;
}

static uint64_t append(stream_t *s, op_t *op) {
    if (s->tail) s->tail->next = op;
    else s->head = op;
    s->tail = op;
    if (s->queue) op->number = ++s->queue->submitted;
    pthread_cond_signal(&s->arrived);
    return ++s->submitted;
}

struct wait {
    stream_t *stream;
    uint64_t ticket;
};

static void await(void *arg) {
    struct wait *w = arg;
    pthread_mutex_lock(&lock);
    while (w->stream->done < w->ticket) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void append_wait(stream_t *s, stream_t *other, uint64_t ticket) {
    struct wait wait = {other, ticket};
    if (s != other) append(s, new_op(await, NULL, &wait, sizeof wait));
}

void push_wait(stream_t *s, stream_t *other, uint64_t ticket) {
    pthread_mutex_lock(&lock);
    append_wait(s, other, ticket);
    pthread_mutex_unlock(&lock);
}

/* The default stream and streams that are not non-blocking wait for each other. */
uint64_t push(stream_t *s, op_t *op) {
    pthread_mutex_lock(&lock);
    stream_t *first = default_streams[s->device];
    if (s == first) {
        for (stream_t *o = streams; o; o = o->next)
            if (o->device == s->device && !(o->flags & NON_BLOCKING) && o->done < o->submitted)
                append_wait(s, o, o->submitted);
    } else if (first && !(s->flags & NON_BLOCKING) && first->done < first->submitted) {
        append_wait(s, first, first->submitted);
    }
    if (op->issue) op->issue(op->arg);
    uint64_t ticket = append(s, op);
    pthread_mutex_unlock(&lock);
    return ticket;
}

uint64_t submitted(stream_t *s) {
    pthread_mutex_lock(&lock);
    uint64_t ticket = s->submitted;
    pthread_mutex_unlock(&lock);
    return ticket;
}

static int through(stream_t *s, uint64_t ticket) {
    pthread_mutex_lock(&lock);
    int is = s->done >= ticket;
    pthread_mutex_unlock(&lock);
    return is;
}

API hipError_t hiphost_enqueue(stream_t *handle, void (*run)(void *), void (*issue)(void *), const void *arg,
                               size_t bytes) {
    stream_t *s = find_stream(handle);
    if (!s) return fail(hipErrorInvalidHandle);
    op_t *op = new_op(run, issue, arg, bytes);
    if (s->graph) capture_op(s, op);
    else push(s, op);
    return hipSuccess;
}

API hipError_t hipStreamCreateWithPriority(stream_t **out, unsigned flags, int priority) {
    if (flags & ~1u) return fail(hipErrorInvalidValue);
    if (!device_count()) return fail(hipErrorNoDevice);
    *out = new_stream(current_device, flags, priority < -1 ? -1 : priority > 1 ? 1 : priority);
    return hipSuccess;
}

API hipError_t hipStreamCreateWithFlags(stream_t **out, unsigned flags) {
    return hipStreamCreateWithPriority(out, flags, 0);
}

API hipError_t hipStreamCreate(stream_t **out) { return hipStreamCreateWithPriority(out, 0, 0); }

API hipError_t hipStreamDestroy(stream_t *handle) {
    stream_t *s = find_stream(handle);
    if ((uintptr_t)handle <= 2 || !s) return fail(hipErrorInvalidHandle);
    if (s->graph) return fail(hipErrorStreamCaptureUnsupported);
    end_stream(s);
    return hipSuccess;
}

API hipError_t hipStreamSynchronize(stream_t *handle) {
    stream_t *s = find_stream(handle);
    if (!s) return fail(hipErrorInvalidHandle);
    if (capture_forbids(s)) return fail(hipErrorStreamCaptureUnsupported);
    await(&(struct wait){s, submitted(s)});
    return hipSuccess;
}

API hipError_t hipStreamQuery(stream_t *handle) {
    stream_t *s = look_up_stream(handle);
    if (!s) return fail(hipErrorInvalidHandle);
    if (capture_forbids(s)) return fail(hipErrorStreamCaptureUnsupported);
    return through(s, submitted(s)) ? hipSuccess : hipErrorNotReady;
}

API hipError_t hipStreamGetPriority(stream_t *handle, int *priority) {
    stream_t *s = find_stream(handle);
    if (s) *priority = s->priority;
    return s ? hipSuccess : fail(hipErrorInvalidHandle);
}

stream_t *all_streams(void) {
    pthread_mutex_lock(&lock);
    stream_t *newest = streams; /* those created from now on come before it */
    pthread_mutex_unlock(&lock);
    return newest;
}

void synchronize_device(int device) {
    for (stream_t *s = all_streams(); s; s = s->next)
        if (s->device == device) await(&(struct wait){s, submitted(s)});
}

API void hiphost_load(void) {
    pthread_mutex_lock(&loading);
    synchronize_device(current_device);
    pthread_mutex_unlock(&loading);
}

API hipError_t hipDeviceSynchronize(void) {
    if (!device_count()) return fail(hipErrorNoDevice);
    if (capture_forbids(NULL)) return fail(hipErrorStreamCaptureUnsupported);
    synchronize_device(current_device);
    return hipSuccess;
}

API hipError_t hipEventCreateWithFlags(event_t **out, unsigned flags) {
    if (flags & ~0xe0000007u) return fail(hipErrorInvalidValue);
    if (!device_count()) return fail(hipErrorNoDevice);
    *out = calloc(1, sizeof **out);
    **out = (event_t){.magic = EVENT, .device = current_device};
    return hipSuccess;
}

API hipError_t hipEventCreate(event_t **out) { return hipEventCreateWithFlags(out, 0); }

static int is_event(const event_t *event) { return event && event->magic == EVENT; }

API hipError_t hipEventDestroy(event_t *event) {
    if (!is_event(event)) return fail(hipErrorInvalidHandle);
    event->magic = 0;
    free(event);
    return hipSuccess;
}

API hipError_t hipEventRecord(event_t *event, stream_t *handle) {
    stream_t *s = find_stream(handle);
    if (!is_event(event) || !s || s->device != event->device) return fail(hipErrorInvalidHandle);
    event->capture = 0;
    if (s->graph) capture_record(s, event);
    else event->stream = s, event->ticket = submitted(s);
    return hipSuccess;
}

API hipError_t hipStreamWaitEvent(stream_t *handle, event_t *event, unsigned flags) {
    stream_t *s = find_stream(handle);
    if (!is_event(event) || !s || flags) return fail(hipErrorInvalidHandle);
    if (s->graph || event->capture) return fail(capture_wait(s, event));
    if (event->stream && !through(event->stream, event->ticket)) push_wait(s, event->stream, event->ticket);
    return hipSuccess;
}

/* HIP does not care whether the event was recorded before the capture of its stream began. */
static int captured_now(const event_t *event) {
    return event->stream && event->stream->graph && capture_forbids(event->stream);
}

API hipError_t hipEventQuery(event_t *event) {
    if (!is_event(event)) return fail(hipErrorInvalidHandle);
    if (event->capture || captured_now(event)) return fail(hipErrorCapturedEvent);
    return !event->stream || through(event->stream, event->ticket) ? hipSuccess : hipErrorNotReady;
}

API hipError_t hipEventSynchronize(event_t *event) {
    if (!is_event(event)) return fail(hipErrorInvalidHandle);
    if (event->capture || captured_now(event)) return fail(hipErrorCapturedEvent);
    if (event->stream) await(&(struct wait){event->stream, event->ticket});
    return hipSuccess;
}
