/* Device memory, pinned memory, copies.
 *
 * Device memory is mapped twice: at the address that the caller gets, closed, so that host code that touches it
 * crashes as it would on a GPU; and at an address that only this library knows. Copies and collectives use the second.
 * Kernels follow pointers inside their arguments, so a fault of a kernel opens the first, until no kernel runs: host code
 * that touches the same memory meanwhile goes unnoticed, but the same code runs at quiet moments too. An allocation ends
 * where a mapping ends, so that a kernel that runs past it crashes.
 *
 * Pinned memory is seen by the device at another address than by the host, also closed. Private pages cannot be mapped
 * twice: only for them are the two addresses the same.
 *
 * Other processes map device memory by its handle: a process, and one of its file descriptors.
 *
 * Settings: HIPHOST_PEERS (1), with 0 no device reaches another one's memory; HIPHOST_STRICT (1), with 0 everything is
 * open always. */
#define _GNU_SOURCE
#include "hiphost.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, ALIGNMENT = 256, POISON = 0xa5 };

typedef struct block {
    struct block *next;
    char *device, *host; /* where the device sees it; where the host may touch it */
    size_t bytes;
    char *mapping; /* what is opened and closed */
    size_t mapped;
    int owner, pinned, open;
    int file; /* of device memory: what is mapped, or -1 if it is another process's */
} block_t;

static block_t *blocks;
static int running; /* kernels */
__thread int in_kernel;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int holds(const char *start, size_t bytes, const void *address) {
    return (char *)address >= start && (char *)address < start + bytes;
}

static block_t *find(const void *address) {
    for (block_t *b = blocks; b; b = b->next)
        if (holds(b->device, b->bytes, address) || (b->pinned && holds(b->host, b->bytes, address))) return b;
    return NULL;
}

static int always_open(void) {
    static int is = -1;
    if (is < 0) is = !setting("HIPHOST_STRICT", 1);
    return is;
}

static void protect(block_t *b, int open) {
    b->open = open;
    if (b->mapping) mprotect(b->mapping, b->mapped, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static struct sigaction before;

/* A kernel's access to a closed block is made again once the block is open; any other crashes as without this handler. */
static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    block_t *b = NULL;
    if (in_kernel) {
        pthread_mutex_lock(&lock);
        for (b = blocks; b && !(b->mapping && holds(b->mapping, b->mapped, info->si_addr)); b = b->next) {}
        if (b && !b->open) protect(b, 1);
        pthread_mutex_unlock(&lock);
    }
    if (!b) sigaction(number, &before, NULL);
}

/* Others, such as faulthandler, may have installed a handler since. */
static void handle_faults(void) {
    struct sigaction now;
    sigaction(SIGSEGV, NULL, &now);
    if (now.sa_sigaction == on_fault) return;
    before = now;
    now = (struct sigaction){.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &now, NULL);
}

void begin_kernel(void) {
    pthread_mutex_lock(&lock);
    if (!running++ && !always_open()) handle_faults();
    pthread_mutex_unlock(&lock);
}

void end_kernel(void) {
    pthread_mutex_lock(&lock);
    if (!--running && !always_open())
        for (block_t *b = blocks; b; b = b->next)
            if (b->open) protect(b, 0);
    pthread_mutex_unlock(&lock);
}

place_t place(const void *address, size_t bytes, void **ours) {
    pthread_mutex_lock(&lock);
    place_t found = PAGEABLE;
    *ours = (void *)address;
    block_t *b = find(address);
    if (b) {
        int seen_by_device = holds(b->device, b->bytes, address);
        size_t offset = (char *)address - (seen_by_device ? b->device : b->host);
        *ours = b->host + offset;
        found = bytes > b->bytes - offset ? OUT_OF_RANGE : b->pinned ? PINNED : ON_DEVICE;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

API void *hiphost_address(const void *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    block_t *b = find(address);
    void *ours = NULL;
    if (b && holds(b->device, b->bytes, address) && bytes <= b->bytes - ((char *)address - b->device))
        ours = b->host + ((char *)address - b->device);
    pthread_mutex_unlock(&lock);
    return ours;
}

int hold_host_address(const char *arguments, size_t bytes) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at + sizeof(void *) <= bytes && !found; at += sizeof(void *)) {
        void *address;
        memcpy(&address, arguments + at, sizeof address);
        if ((uintptr_t)address < PAGE) continue;
        block_t *b = find(address);
        found = b && !holds(b->device, b->bytes, address);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void add(const block_t *made) {
    block_t *b = malloc(sizeof *b);
    *b = *made;
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    if (always_open()) protect(b, 1);
    else if (b->mapping) protect(b, 0);
    pthread_mutex_unlock(&lock);
}

/* Takes the block that begins at an address off the list. */
static int take(const void *address, int pinned, block_t *taken) {
    pthread_mutex_lock(&lock);
    block_t **at = &blocks;
    while (*at && ((*at)->pinned != pinned || address != (pinned ? (*at)->host : (*at)->device))) at = &(*at)->next;
    block_t *b = *at;
    if (b) {
        *taken = *b;
        *at = b->next;
        free(b);
    }
    pthread_mutex_unlock(&lock);
    return b != NULL;
}

/* Maps a file of device memory twice. */
static hipError_t map_twice(int file, size_t bytes, int kept, void **out) {
    size_t aligned = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, pages = (aligned + PAGE - 1) / PAGE * PAGE;
    /* One page beyond the end of the file: touching it is a bus error. */
    char *closed = mmap(NULL, pages + PAGE, PROT_NONE, MAP_SHARED, file, 0);
    char *ours = mmap(NULL, pages, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (closed == MAP_FAILED || ours == MAP_FAILED) return fail(hipErrorOutOfMemory);
    size_t start = pages - aligned;
    add(&(block_t){.device = closed + start, .host = ours + start, .bytes = bytes, .mapping = closed,
                   .mapped = pages + PAGE, .owner = current_device, .file = kept});
    *out = closed + start;
    return hipSuccess;
}

static void unmap_twice(const block_t *b) {
    munmap(b->mapping, b->mapped);
    munmap(b->host - (b->device - b->mapping), b->mapped - PAGE);
}

API hipError_t hipMalloc(void **out, size_t bytes) {
    *out = NULL;
    if (!device_count()) return fail(hipErrorNoDevice);
    if (!bytes) return hipSuccess;
    if (bytes > (size_t)16 << 30) return fail(hipErrorOutOfMemory);
    if (capture_forbids(NULL)) return fail(hipErrorStreamCaptureUnsupported);
    int file = memfd_create("hip-on-host", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (bytes + PAGE - 1) / PAGE * PAGE)) return fail(hipErrorOutOfMemory);
    hipError_t error = map_twice(file, bytes, file, out);
    void *ours;
    if (error) close(file);
    else if (place(*out, bytes, &ours) == ON_DEVICE) memset(ours, POISON, bytes);
    return error;
}

API hipError_t hipExtMallocWithFlags(void **out, size_t bytes, unsigned flags) {
    enum { DEFAULT, FINE_GRAINED, SIGNAL, UNCACHED };
    return flags > UNCACHED ? fail(hipErrorInvalidValue) : hipMalloc(out, bytes);
}

API hipError_t hipFree(void *address) {
    if (!address) return hipSuccess;
    if (capture_forbids(NULL)) return fail(hipErrorStreamCaptureUnsupported);
    pthread_mutex_lock(&lock);
    block_t *found = find(address);
    int device = found && !found->pinned && found->file >= 0 ? found->owner : -1;
    pthread_mutex_unlock(&lock);
    block_t b;
    if (device >= 0) synchronize_device(device);
    if (device < 0 || !take(address, 0, &b)) return fail(hipErrorInvalidValue);
    unmap_twice(&b);
    close(b.file);
    return hipSuccess;
}

typedef union {
    char reserved[64];
    struct {
        int process, file;
        size_t bytes;
    } of;
} hipIpcMemHandle_t;

API hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *handle, void *address) {
    pthread_mutex_lock(&lock);
    block_t *b = find(address);
    int known = b && !b->pinned && b->file >= 0 && address == b->device;
    if (known) handle->of.process = getpid(), handle->of.file = b->file, handle->of.bytes = b->bytes;
    pthread_mutex_unlock(&lock);
    return known ? hipSuccess : fail(hipErrorInvalidValue);
}

API hipError_t hipMemGetHandleForAddressRange(void *handle, void *address, size_t bytes, int type, unsigned long long flags) {
    enum { DMA_BUF = 1 };
    if (type != DMA_BUF || flags || bytes % PAGE) return fail(hipErrorInvalidValue);
    pthread_mutex_lock(&lock);
    block_t *b = find(address);
    int whole = b && !b->pinned && b->file >= 0 && address == b->mapping && bytes <= b->mapped - PAGE;
    int file = whole ? fcntl(b->file, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&lock);
    if (file < 0) return fail(hipErrorInvalidValue);
    *(int *)handle = file;
    return hipSuccess;
}

API hipError_t hipIpcOpenMemHandle(void **out, hipIpcMemHandle_t handle, unsigned flags) {
    enum { LAZY_ENABLE_PEER_ACCESS = 1 };
    if (flags != LAZY_ENABLE_PEER_ACCESS || handle.of.process == getpid()) return fail(hipErrorInvalidValue);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.of.process, handle.of.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return fail(hipErrorInvalidHandle);
    hipError_t error = map_twice(file, handle.of.bytes, -1, out);
    close(file);
    return error;
}

API hipError_t hipIpcCloseMemHandle(void *address) {
    pthread_mutex_lock(&lock);
    block_t *found = find(address);
    int device = found && !found->pinned && found->file < 0 ? found->owner : -1;
    pthread_mutex_unlock(&lock);
    block_t b;
    if (device >= 0) synchronize_device(device); /* as measured with CUDA's */
    if (device < 0 || !take(address, 0, &b)) return fail(hipErrorInvalidHandle);
    unmap_twice(&b);
    return hipSuccess;
}

API hipError_t hipDeviceCanAccessPeer(int *can, int device, int other) {
    int devices = device_count();
    if (device < 0 || other < 0 || device >= devices || other >= devices) return fail(hipErrorInvalidDevice);
    *can = device != other && setting("HIPHOST_PEERS", 1);
    return hipSuccess;
}

API hipError_t hipHostRegister(void *address, size_t bytes, unsigned flags) {
    if (!address || !bytes || flags & ~0xfu) return fail(hipErrorInvalidValue);
    if (!device_count()) return fail(hipErrorNoDevice);
    if (capture_forbids(NULL)) return fail(hipErrorStreamCaptureUnsupported);
    pthread_mutex_lock(&lock);
    int again = find(address) || find((char *)address + bytes - 1);
    pthread_mutex_unlock(&lock);
    if (again) return fail(hipErrorHostMemoryAlreadyRegistered);
    size_t offset = (uintptr_t)address % PAGE, mapped = (offset + bytes + PAGE - 1) / PAGE * PAGE;
    /* An old size of 0 leaves the old mapping where it is and makes a second one. */
    char *second = mremap((char *)address - offset, 0, mapped, MREMAP_MAYMOVE);
    block_t b = {.device = address, .host = address, .bytes = bytes, .owner = current_device, .pinned = 1};
    if (second != MAP_FAILED) b.device = second + offset, b.mapping = second, b.mapped = mapped;
    add(&b);
    return hipSuccess;
}

API hipError_t hipHostUnregister(void *address) {
    block_t b;
    if (!take(address, 1, &b)) return fail(hipErrorHostMemoryNotRegistered);
    if (b.mapping) munmap(b.mapping, b.mapped);
    return hipSuccess;
}

API hipError_t hipHostGetDevicePointer(void **out, void *address, unsigned flags) {
    pthread_mutex_lock(&lock);
    block_t *b = find(address);
    int known = !flags && b && b->pinned && holds(b->host, b->bytes, address);
    if (known) *out = b->device + ((char *)address - b->host);
    pthread_mutex_unlock(&lock);
    return known ? hipSuccess : fail(hipErrorInvalidValue);
}

struct hipPointerAttribute_t {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};

API hipError_t hipPointerGetAttributes(struct hipPointerAttribute_t *out, const void *address) {
    enum { UNREGISTERED, HOST, DEVICE };
    *out = (struct hipPointerAttribute_t){.type = UNREGISTERED, .device = -2};
    pthread_mutex_lock(&lock);
    block_t *b = find(address);
    if (b) {
        size_t offset = (char *)address - (holds(b->device, b->bytes, address) ? b->device : b->host);
        *out = (struct hipPointerAttribute_t){b->pinned ? HOST : DEVICE, b->owner, b->device + offset,
                                              b->pinned ? b->host + offset : NULL, 0, 0};
    }
    pthread_mutex_unlock(&lock);
    return hipSuccess;
}

struct copy {
    char *to;
    const char *from; /* NULL: fill */
    size_t bytes;
    int value;
};

static void do_copy(void *arg) {
    struct copy *c = arg;
    if (c->from) memmove(c->to, c->from, c->bytes);
    else memset(c->to, c->value, c->bytes);
}

hipError_t hipStreamSynchronize(stream_t *handle);

API hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, stream_t *handle) {
    enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };
    if (!bytes) return hipSuccess;
    void *our_to, *our_from;
    place_t target = place(to, bytes, &our_to), origin = place(from, bytes, &our_from);
    if (!to || !from || target == OUT_OF_RANGE || origin == OUT_OF_RANGE) return fail(hipErrorInvalidValue);
    int actual = (target == ON_DEVICE ? HOST_TO_DEVICE : 0) + (origin == ON_DEVICE ? DEVICE_TO_HOST : 0);
    if (kind != DEFAULT && kind != actual) return fail(hipErrorInvalidMemcpyDirection);
    struct copy copy = {our_to, our_from, bytes, 0};
    hipError_t error = hiphost_enqueue(handle, do_copy, NULL, &copy, sizeof copy);
    stream_t *stream = find_stream(handle);
    if (error || stream->graph || (target != PAGEABLE && origin != PAGEABLE)) return error;
    return hipStreamSynchronize(handle); /* pageable memory blocks the caller, as on ROCm */
}

API hipError_t hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    hipError_t error = hipMemcpyAsync(to, from, bytes, kind, NULL);
    return error ? error : hipStreamSynchronize(NULL);
}

API hipError_t hipMemsetAsync(void *to, int value, size_t bytes, stream_t *handle) {
    if (!bytes) return hipSuccess;
    void *ours;
    place_t target = place(to, bytes, &ours);
    if (target != ON_DEVICE && target != PINNED) return fail(hipErrorInvalidValue);
    struct copy copy = {ours, NULL, bytes, value};
    return hiphost_enqueue(handle, do_copy, NULL, &copy, sizeof copy);
}

API hipError_t hipMemset(void *to, int value, size_t bytes) {
    hipError_t error = hipMemsetAsync(to, value, bytes, NULL);
    return error ? error : hipStreamSynchronize(NULL);
}
