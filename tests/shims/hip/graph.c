/* Stream capture and graphs. A graph keeps the operations in the order of their capture, each with its branch: the
 * streams that joined the capture by waiting for one of its events. A launch gives every branch a stream, so that
 * branches run at the same time, as they may on a GPU. */
#define _GNU_SOURCE
#include "hiphost.h"
#include <pthread.h>

enum { START = -1, MAX_BRANCHES = 64 };
enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* hipStreamCaptureMode */

typedef struct {
    op_t *op;   /* or NULL: wait for the node `after` */
    int branch, after;
} node_t;

struct graph {
    struct graph *next; /* being captured */
    pthread_t thread;
    uint64_t capture;
    int mode, spoilt, references, branches, count, room;
    stream_t *captured[MAX_BRANCHES];
    int last[MAX_BRANCHES]; /* each branch's newest node */
    node_t *nodes;
};

typedef struct {
    graph_t *graph;
    stream_t *streams[MAX_BRANCHES];
} exec_t;

static uint64_t captures;
static graph_t *active;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int thread_mode = GLOBAL;

int capture_forbids(const stream_t *s) {
    int forbids = 0;
    pthread_mutex_lock(&lock);
    if (s && s->graph) forbids = s->graph->spoilt = 1;
    for (graph_t *g = active; g; g = g->next) {
        int own = pthread_equal(g->thread, pthread_self());
        if (thread_mode == RELAXED || g->mode == RELAXED) continue;
        if (own || (g->mode == GLOBAL && thread_mode == GLOBAL)) forbids = g->spoilt = 1;
    }
    pthread_mutex_unlock(&lock);
    return forbids;
}

API hipError_t hipThreadExchangeStreamCaptureMode(int *mode) {
    if (*mode < GLOBAL || *mode > RELAXED) return fail(hipErrorInvalidValue);
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return hipSuccess;
}

static void add(graph_t *g, node_t node) {
    if (g->count == g->room) g->nodes = realloc(g->nodes, (g->room = 2 * g->room + 8) * sizeof *g->nodes);
    g->last[node.branch] = g->count;
    g->nodes[g->count++] = node;
}

static void join(graph_t *g, stream_t *s) {
    s->graph = g;
    s->branch = g->branches++;
    g->captured[s->branch] = s;
    g->last[s->branch] = START;
}

void capture_op(stream_t *s, op_t *op) { add(s->graph, (node_t){op, s->branch, START}); }

void capture_record(stream_t *s, event_t *event) {
    event->capture = s->graph->capture;
    event->branch = s->branch;
    event->node = s->graph->last[s->branch];
    event->stream = s;
}

hipError_t capture_wait(stream_t *s, const event_t *event) {
    if (!event->capture) return event->stream ? hipErrorStreamCaptureIsolation : hipSuccess;
    graph_t *g = event->stream->graph;
    if (!g || g->capture != event->capture) return hipErrorCapturedEvent; /* that capture has ended */
    if (s->graph && s->graph != g) return hipErrorStreamCaptureMerge;
    if (!s->graph && g->branches == MAX_BRANCHES) return hipErrorStreamCaptureUnsupported;
    if (!s->graph) join(g, s);
    if (s->branch != event->branch) add(g, (node_t){NULL, s->branch, event->node});
    return hipSuccess;
}

static void release(graph_t *g) {
    if (--g->references) return;
    for (int i = 0; i < g->count; i++) free(g->nodes[i].op);
    free(g->nodes);
    free(g);
}

API hipError_t hipStreamBeginCapture(stream_t *handle, int mode) {
    stream_t *s = find_stream(handle);
    if (!s || mode < GLOBAL || mode > RELAXED) return fail(hipErrorInvalidValue);
    if ((uintptr_t)handle <= 2) return fail(hipErrorStreamCaptureUnsupported);
    if (s->graph) return fail(hipErrorIllegalState);
    graph_t *g = calloc(1, sizeof *g);
    g->capture = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
    g->references = 1, g->mode = mode, g->thread = pthread_self();
    join(g, s);
    pthread_mutex_lock(&lock);
    g->next = active;
    active = g;
    pthread_mutex_unlock(&lock);
    return hipSuccess;
}

static void deactivate(graph_t *g) {
    pthread_mutex_lock(&lock);
    graph_t **at = &active;
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    pthread_mutex_unlock(&lock);
}

static int joined(const graph_t *g, int branch) {
    for (int i = g->last[branch] + 1; i < g->count; i++)
        if (!g->nodes[i].op && g->nodes[i].after == g->last[branch]) return 1;
    return 0;
}

API hipError_t hipStreamEndCapture(stream_t *handle, graph_t **out) {
    stream_t *s = find_stream(handle);
    *out = NULL;
    if (!s || !s->graph) return fail(hipErrorIllegalState);
    if (s->branch) return fail(hipErrorStreamCaptureUnmatched);
    graph_t *g = s->graph;
    int all = 1;
    for (int i = 0; i < g->branches; i++) {
        all &= !i || joined(g, i);
        g->captured[i]->graph = NULL;
    }
    deactivate(g);
    hipError_t error = g->spoilt ? hipErrorStreamCaptureInvalidated : all ? hipSuccess : hipErrorStreamCaptureUnjoined;
    if (error) release(g);
    else *out = g;
    return fail(error);
}

API hipError_t hipStreamGetCaptureInfo(stream_t *handle, int *status, unsigned long long *id) {
    enum { NONE, ACTIVE, INVALIDATED };
    stream_t *s = look_up_stream(handle);
    if (!s) return fail(hipErrorInvalidHandle);
    for (stream_t *o = all_streams(); (uintptr_t)handle <= 2 && o; o = o->next)
        if (o->graph && !(o->flags & 1)) return fail(hipErrorStreamCaptureImplicit);
    *status = !s->graph ? NONE : s->graph->spoilt ? INVALIDATED : ACTIVE;
    if (id) *id = s->graph ? s->graph->capture : 0;
    return hipSuccess;
}

API hipError_t hipStreamIsCapturing(stream_t *handle, int *status) {
    return hipStreamGetCaptureInfo(handle, status, NULL);
}

API hipError_t hipGraphDestroy(graph_t *g) {
    if (!g) return fail(hipErrorInvalidValue);
    release(g);
    return hipSuccess;
}

API hipError_t hipGraphInstantiate(exec_t **out, graph_t *g, void **error_node, char *log, size_t log_bytes) {
    if (!g) return fail(hipErrorInvalidValue);
    if (error_node) *error_node = NULL;
    if (log && log_bytes) *log = 0;
    exec_t *exec = *out = calloc(1, sizeof *exec);
    exec->graph = g;
    g->references++;
    for (int i = 1; i < g->branches; i++) exec->streams[i] = new_stream(g->captured[i]->device, 1, 0);
    return hipSuccess;
}

API hipError_t hipGraphExecDestroy(exec_t *exec) {
    if (!exec) return fail(hipErrorInvalidValue);
    for (int i = 1; i < exec->graph->branches; i++) end_stream(exec->streams[i]);
    release(exec->graph);
    free(exec);
    return hipSuccess;
}

API hipError_t hipGraphLaunch(exec_t *exec, stream_t *handle) {
    stream_t *s = find_stream(handle);
    if (!exec || !s) return fail(hipErrorInvalidValue);
    if (s->graph) return fail(hipErrorStreamCaptureUnsupported); /* a graph inside a graph */
    graph_t *g = exec->graph;
    exec->streams[0] = s;
    uint64_t *tickets = calloc(g->count + 1, sizeof *tickets), before = submitted(s);
    for (int i = 0; i < g->count; i++) {
        node_t *node = &g->nodes[i];
        stream_t *target = exec->streams[node->branch];
        if (node->op) {
            tickets[i] = push(target, new_op(node->op->run, node->op->issue, node->op->arg, node->op->bytes));
            continue;
        }
        int other = node->after == START ? 0 : g->nodes[node->after].branch;
        push_wait(target, exec->streams[other], node->after == START ? before : tickets[node->after]);
        tickets[i] = submitted(target);
    }
    free(tickets);
    return hipSuccess;
}
