/* A librccl.so over host memory: ranks on one machine, up to 16. Every call becomes point-to-point transfers through a
 * shared segment, run in stream order; a reduction is such transfers and then arithmetic in rank order.
 *
 * The segment is a memfd of the process that made the unique id; the others open it through /proc. It has no name that
 * could be left behind. Like a GPU's kernel, an operation waits for its peers until the communicator is aborted, its
 * own or a peer's, in which case it ends as if all were well, with rubbish. The end of a peer's process shows in
 * ncclCommGetAsyncError only.
 *
 * On a communicator with `blocking` = 0, initialisation, the end of a group and finalisation go on behind the caller
 * and give ncclInProgress, each for at least HIPHOST_BEHIND_US (0) microseconds; until then it takes no other call. */
#define _GNU_SOURCE
#include "rccl.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern hipError_t hipGetDevice(int *);
extern hipError_t hipSetDevice(int);

enum {
    OK, HIP_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS, RESULTS
};
enum { FIRST_MADE_OP = 1 << 20 }; /* NCCL's numbers of such operations look random */
enum { CONFIG_MAGIC = 0xcafebeef, UNSET = -2147483647 - 1 };

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} config_t; /* its beginning */

static char last_error[256]; /* of the process, as NCCL's */

static int refuse(int code, const char *why) {
    snprintf(last_error, sizeof last_error, "%s", why);
    return code;
}

/* ---- what goes on behind the caller ---- */

typedef struct job {
    int (*work)(struct job *);
    comm_t *comm;
    stream_t *stream;
    batch_t *batch;
} job_t;

static void *do_behind(void *arg) {
    job_t *job = arg;
    hipSetDevice(job->comm->device);
    usleep(job->comm->behind);
    job->comm->state = job->work(job);
    release(job->comm);
    free(job);
    return NULL;
}

static int perform(job_t job) {
    if (job.comm->blocking) return job.work(&job);
    job_t *kept = malloc(sizeof *kept);
    *kept = job;
    job.comm->state = IN_PROGRESS;
    job.comm->references++;
    hiphost_thread(do_behind, kept);
    return IN_PROGRESS;
}

/* With HIPHOST_LAZY the first batch that begins with a kind of call waits as for a kernel that is loaded. */
static void load(kind_t kind) {
    static int lazy = -1, loaded;
    if (lazy < 0) lazy = setting("HIPHOST_LAZY", 0);
    if (lazy && !(loaded >> kind & 1)) hiphost_load();
    loaded |= 1 << kind;
}

/* On the communicator's device, whichever is the thread's: that decides which default stream is meant. */
static int enqueue(job_t *job) {
    size_t bytes = sizeof *job->batch + job->batch->count * sizeof *job->batch->calls;
    int before = 0;
    hipGetDevice(&before);
    hipSetDevice(job->comm->device);
    load(job->batch->calls->kind);
    hipError_t error = job->comm->aborted ? hipSuccess : hiphost_enqueue(job->stream, run, issue, job->batch, bytes);
    hipSetDevice(before);
    free(job->batch);
    return error ? HIP_ERROR : OK;
}

/* ---- groups ---- */

typedef struct open {
    struct open *next;
    job_t job;
} open_t;

static __thread int depth;
static __thread open_t *opened; /* in order of issue */

API int ncclGroupStart(void) {
    depth++;
    return OK;
}

API int ncclGroupEnd(void) {
    if (!depth) return refuse(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--depth) return OK;
    int result = OK;
    for (open_t *o = opened, *next; o; o = next) {
        next = o->next;
        int one = perform(o->job);
        if (result == OK || (one != OK && one != IN_PROGRESS)) result = one;
        free(o);
    }
    opened = NULL;
    return result;
}

static int ready(const comm_t *c) {
    if (!c) return refuse(INVALID_ARGUMENT, "no communicator");
    if (c->state == IN_PROGRESS) return refuse(INVALID_ARGUMENT, "the previous call is still in progress");
    return c->state;
}

static int add_call(comm_t *c, stream_t *stream, call_t call) {
    int multiple = call.kind == ALL_GATHER || call.kind == REDUCE_SCATTER ? c->size : 1;
    size_t bytes = call.count * item_bytes(call.dtype);
    int sends = call.kind != RECV && (call.kind != BROADCAST || c->rank == call.peer);
    int receives = call.kind != SEND && (call.kind != REDUCE || c->rank == call.peer);
    const void *from = call.from, *to = call.to;
    call.from = sends ? hiphost_address(from, call.kind == REDUCE_SCATTER ? multiple * bytes : bytes) : NULL;
    call.to = receives ? hiphost_address(to, call.kind == ALL_GATHER ? multiple * bytes : bytes) : NULL;
    if (bytes && ((sends && !call.from) || (receives && !call.to)))
        return refuse(INVALID_ARGUMENT, "not memory that the device can reach");
    open_t **at = &opened;
    while (*at && ((*at)->job.comm != c || (*at)->job.stream != stream)) at = &(*at)->next;
    int count = *at ? (*at)->job.batch->count : 0;
    if (!*at) {
        *at = calloc(1, sizeof **at);
        (*at)->job = (job_t){enqueue, c, stream, NULL};
    }
    batch_t *b = (*at)->job.batch = realloc((*at)->job.batch, sizeof *b + (count + 1) * sizeof *b->calls);
    b->comm = c, b->turn = 0, b->count = count + 1, b->calls[count] = call;
    return OK;
}

static int call(comm_t *c, stream_t *stream, call_t call) {
    int error = ready(c);
    if (error) return error;
    if (!item_bytes(call.dtype)) return refuse(INVALID_ARGUMENT, "no such data type");
    if (call.peer < 0 || call.peer >= c->size) return refuse(INVALID_ARGUMENT, "no such rank");
    if (call.op > AVG) {
        int i = call.op - FIRST_MADE_OP;
        if (i < 0 || i >= MAX_FACTORS || !c->factors[i].used || c->factors[i].dtype != call.dtype)
            return refuse(INVALID_ARGUMENT, "no such operation for this data type");
        call.op = PREMUL_SUM, call.factor = c->factors[i].value;
    }
    if (call.op < 0) return refuse(INVALID_ARGUMENT, "no such operation");
    ncclGroupStart();
    error = add_call(c, stream, call);
    int end = ncclGroupEnd();
    return error ? error : end;
}

API int ncclSend(const void *from, size_t count, int dtype, int peer, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){SEND, from, NULL, count, dtype, 0, peer, 0});
}

API int ncclRecv(void *to, size_t count, int dtype, int peer, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){RECV, NULL, to, count, dtype, 0, peer, 0});
}

API int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){ALL_REDUCE, from, to, count, dtype, op, 0, 0});
}

API int ncclReduce(const void *from, void *to, size_t count, int dtype, int op, int root, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){REDUCE, from, to, count, dtype, op, root, 0});
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){REDUCE_SCATTER, from, to, count, dtype, op, 0, 0});
}

API int ncclAllGather(const void *from, void *to, size_t count, int dtype, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){ALL_GATHER, from, to, count, dtype, 0, 0, 0});
}

API int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, comm_t *c, stream_t *stream) {
    return call(c, stream, (call_t){BROADCAST, from, to, count, dtype, 0, root, 0});
}

API int ncclRedOpCreatePreMulSum(int *op, const void *scalar, int dtype, int residence, comm_t *c) {
    enum { HOST_IMMEDIATE = 1 };
    int error = ready(c), i = 0;
    if (error) return error;
    if (residence != HOST_IMMEDIATE || !item_bytes(dtype))
        return refuse(INVALID_ARGUMENT, "the scalar must be on the host");
    while (i < MAX_FACTORS && c->factors[i].used) i++;
    if (i == MAX_FACTORS) return refuse(INTERNAL_ERROR, "too many operations");
    c->factors[i].used = 1, c->factors[i].dtype = dtype;
    memcpy(&c->factors[i].value, scalar, item_bytes(dtype));
    *op = FIRST_MADE_OP + i;
    return OK;
}

API int ncclRedOpDestroy(int op, comm_t *c) {
    int i = op - FIRST_MADE_OP;
    if (!c || i < 0 || i >= MAX_FACTORS || !c->factors[i].used) return refuse(INVALID_ARGUMENT, "no such operation");
    c->factors[i].used = 0; /* calls have a copy of the factor */
    return OK;
}

/* ---- communicators ---- */

API int ncclGetVersion(int *version) {
    *version = setting("HIPHOST_RCCL_VERSION", 22809);
    return OK;
}

API int ncclGetUniqueId(unique_id_t *id) {
    struct stat found;
    memset(id, 0, sizeof *id);
    int file = memfd_create("hip-on-host-rccl", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(segment_t)) || fstat(file, &found))
        return refuse(SYSTEM_ERROR, "memfd_create");
    id->process = getpid(), id->file = file, id->inode = found.st_ino;
    return OK;
}

static int lost_peer(comm_t *c) {
    for (int r = 0; r < c->size; r++) {
        int process = c->segment->members[r].process;
        if (!process || r == c->rank || c->segment->members[r].left) continue;
        if (c->processes[r] < 0) c->processes[r] = (int)syscall(SYS_pidfd_open, process, 0);
        struct pollfd ended = {c->processes[r], POLLIN, 0};
        if (c->processes[r] < 0 || poll(&ended, 1, 0) > 0) return 1;
    }
    return 0;
}

static int is_segment(const unique_id_t *id, int file) {
    struct stat found;
    return file >= 0 && !fstat(file, &found) && found.st_ino == id->inode;
}

static segment_t *map_segment(const unique_id_t *id) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", id->process, id->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    void *mapped = MAP_FAILED;
    if (is_segment(id, file)) mapped = mmap(NULL, sizeof(segment_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static int join(job_t *job) {
    comm_t *c = job->comm;
    c->segment = map_segment(&c->id);
    if (!c->segment) return refuse(REMOTE_ERROR, "the process that made the unique id has ended");
    int none = 0;
    if (!atomic_compare_exchange_strong(&c->segment->size, &none, c->size) && none != c->size)
        return refuse(INVALID_ARGUMENT, "ranks disagree on their number");
    if (atomic_exchange(&c->segment->members[c->rank].process, getpid()))
        return refuse(INVALID_ARGUMENT, "two members have the same rank");
    c->segment->arrived++;
    int result = OK;
    for (int idle = 0; result == OK && c->segment->arrived < c->size && !c->aborted; rest(&idle))
        if (lost_peer(c)) result = refuse(REMOTE_ERROR, "a rank ended before all had come");
    if (c->id.process == getpid() && is_segment(&c->id, c->id.file)) close(c->id.file); /* all who will come have it */
    return result;
}

API int ncclCommInitRankConfig(comm_t **out, int size, unique_id_t id, int rank, const config_t *config) {
    int device;
    if (config && config->magic != CONFIG_MAGIC) return refuse(INVALID_ARGUMENT, "the config is not initialised");
    if (!id.process || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size)
        return refuse(INVALID_ARGUMENT, "no such rank");
    if (hipGetDevice(&device)) return refuse(HIP_ERROR, "no device");
    comm_t *c = *out = calloc(1, sizeof *c);
    c->id = id, c->size = size, c->rank = rank, c->device = device, c->references = 1;
    c->blocking = !config || config->blocking == UNSET || config->blocking;
    c->behind = setting("HIPHOST_BEHIND_US", 0);
    c->drops = setting("HIPHOST_DROP", 0);
    for (int r = 0; r < MAX_RANKS; r++) c->processes[r] = -1;
    int result = perform((job_t){join, c, NULL, NULL});
    if (result == OK || result == IN_PROGRESS) return result;
    release(c);
    *out = NULL;
    return result;
}

API int ncclCommInitRank(comm_t **out, int size, unique_id_t id, int rank) {
    return ncclCommInitRankConfig(out, size, id, rank, NULL);
}

API int ncclCommGetAsyncError(comm_t *c, int *error) {
    if (!c) return refuse(INVALID_ARGUMENT, "no communicator");
    int none = OK;
    if (c->state == OK && lost_peer(c) && atomic_compare_exchange_strong(&c->state, &none, REMOTE_ERROR))
        refuse(REMOTE_ERROR, "a rank's process has ended");
    *error = c->state;
    return OK;
}

static int drain(job_t *job) {
    comm_t *c = job->comm;
    for (int idle = 0; c->ran != c->issued && !c->aborted;) rest(&idle);
    c->segment->members[c->rank].left = 1;
    return OK;
}

API int ncclCommFinalize(comm_t *c) {
    int error = ready(c);
    return error ? error : perform((job_t){drain, c, NULL, NULL});
}

API int ncclCommDestroy(comm_t *c) {
    if (!c) return refuse(INVALID_ARGUMENT, "no communicator");
    for (int idle = 0; c->state == IN_PROGRESS;) rest(&idle);
    if (c->state == OK) drain(&(job_t){drain, c, NULL, NULL});
    release(c);
    return OK;
}

/* What is running sees the flag and leaves; the last to leave frees the communicator. */
API int ncclCommAbort(comm_t *c) {
    if (!c) return refuse(INVALID_ARGUMENT, "no communicator");
    c->aborted = 1;
    if (c->segment) c->segment->aborted = 1;
    release(c);
    return OK;
}

API const char *ncclGetErrorString(int result) {
    static const char *const texts[] = {
        "no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
        "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return result >= 0 && result < RESULTS ? texts[result] : "unknown result code";
}

API const char *ncclGetLastError(const comm_t *c) {
    (void)c;
    return last_error;
}
