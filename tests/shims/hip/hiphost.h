/* HIP on host: what the files of the test-only libamdhip64.so, libhiprtc.so and librccl.so share. */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

#define ERRORS(X)                                                                                            \
    X(hipSuccess, 0, "no error")                                                                             \
    X(hipErrorInvalidValue, 1, "invalid argument")                                                           \
    X(hipErrorOutOfMemory, 2, "out of memory")                                                               \
    X(hipErrorInvalidDevicePointer, 17, "invalid device pointer")                                            \
    X(hipErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                               \
    X(hipErrorNoDevice, 100, "no ROCm-capable device is detected")                                           \
    X(hipErrorInvalidDevice, 101, "invalid device ordinal")                                                  \
    X(hipErrorInvalidImage, 200, "device kernel image is invalid")                                           \
    X(hipErrorInvalidHandle, 400, "invalid resource handle")                                                 \
    X(hipErrorIllegalState, 401, "the operation cannot be performed in the present state")                   \
    X(hipErrorNotFound, 500, "named symbol not found")                                                       \
    X(hipErrorNotReady, 600, "device not ready")                                                             \
    X(hipErrorIllegalAddress, 700, "an illegal memory access was encountered")                               \
    X(hipErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped") \
    X(hipErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region")     \
    X(hipErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")             \
    X(hipErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")          \
    X(hipErrorStreamCaptureMerge, 902, "operation would result in a merge of separate capture sequences")    \
    X(hipErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began")           \
    X(hipErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                              \
    X(hipErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream")        \
    X(hipErrorStreamCaptureImplicit, 906, "operation would make the legacy stream depend on a capturing stream") \
    X(hipErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream")

#define NAME_IT(name, number, text) name = number,
typedef enum { ERRORS(NAME_IT) } hipError_t;
#undef NAME_IT

enum { MAX_DEVICES = 16, MULTIPROCESSORS = 4, MAX_SHARED_BYTES = 65536, MAX_BLOCK_THREADS = 1024, WARP = 64 };

/* Read where things are made, not where they are used: other threads may change the environment. */
static inline int setting(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

/* device.c */
extern __thread int current_device;
int device_count(void);
hipError_t fail(hipError_t error); /* keeps it for hipGetLastError and gives it back */

/* memory.c: what the device sees at an address, by the address at which this library may touch it. */
extern __thread int in_kernel; /* whether this thread runs a kernel's code, which may touch device memory */
void begin_kernel(void);
void end_kernel(void);
typedef enum { PAGEABLE, PINNED, ON_DEVICE, OUT_OF_RANGE } place_t;
place_t place(const void *address, size_t bytes, void **ours);
/* The host's addresses of pinned memory are not for kernels, though those of this library could follow them. */
int hold_host_address(const char *arguments, size_t bytes);
/* For librccl.so: NULL unless the device can reach all bytes. */
API void *hiphost_address(const void *address, size_t bytes);

/* stream.c. An operation's argument is plain bytes, copied with it, so that a graph can run it many times. */
typedef struct op {
    struct op *next;
    uint64_t number; /* in its hardware queue */
    void (*run)(void *arg);
    void (*issue)(void *arg); /* as it enters a stream, in program order; may be NULL */
    size_t bytes;
    _Alignas(16) char arg[];
} op_t;
typedef struct stream stream_t;
typedef struct graph graph_t;
typedef struct queue queue_t;
struct stream {
    struct stream *next;
    struct op *head, *tail;
    pthread_cond_t arrived; /* an operation, or the end */
    uint64_t submitted, done;
    int device, flags, priority, delay, ended;
    queue_t *queue; /* of the hardware, NULL if it has one for each stream */
    graph_t *graph; /* being captured from this stream */
    int branch;
};
stream_t *find_stream(stream_t *handle);    /* NULL if there is no such stream; waits while a kernel is loaded */
stream_t *look_up_stream(stream_t *handle); /* the same without waiting: for queries, which CUDA answers at once */
stream_t *new_stream(int device, unsigned flags, int priority);
void end_stream(stream_t *stream);
void synchronize_device(int device);
stream_t *all_streams(void);
op_t *new_op(void (*run)(void *), void (*issue)(void *), const void *arg, size_t bytes);
uint64_t push(stream_t *stream, op_t *op);
uint64_t submitted(stream_t *stream);
void push_wait(stream_t *stream, stream_t *other, uint64_t ticket);
/* For librccl.so too. */
API void hiphost_load(void); /* wait for all that the device runs, and hold up whoever comes to a stream meanwhile */
API void hiphost_thread(void *(*run)(void *), void *arg); /* detached; signals are for the caller's own threads */
API hipError_t hiphost_enqueue(stream_t *handle, void (*run)(void *), void (*issue)(void *), const void *arg,
                               size_t bytes);

/* graph.c */
typedef struct event {
    uint32_t magic;
    int device;
    stream_t *stream;
    uint64_t ticket;
    uint64_t capture; /* number of the capture in which it was recorded last, or 0 */
    int branch, node;
} event_t;
void capture_op(stream_t *stream, op_t *op);
void capture_record(stream_t *stream, event_t *event);
hipError_t capture_wait(stream_t *stream, const event_t *event);
/* Whether a capture forbids a call that may wait for the device, or for one stream; that spoils the capture. */
int capture_forbids(const stream_t *stream);
