/* Kernels: images made by libhiprtc.so of this folder, and their launches. A block is a thread of its own, and blocks
 * run at the same time, up to RESIDENT of a launch, as they wait for each other; what is left over follows in order. */
#define _GNU_SOURCE
#include "hiphost.h"
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RESIDENT = 32 * MULTIPROCESSORS };

/* As in entry.h. */
typedef struct {
    size_t bytes; /* of the packed arguments */
    void (*pack)(void *to, void *const *params);
    void (*run)(const void *packed, const unsigned *block, const unsigned *grid);
} kernel_t;

typedef struct {
    void *library;
    int device;
} module_t;

typedef struct {
    const kernel_t *kernel;
    int device, shared;
} function_t;

static size_t image_bytes(const Elf64_Ehdr *elf) { /* the linker puts the section headers last */
    return memcmp(elf->e_ident, ELFMAG, SELFMAG) ? 0 : elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize;
}

API hipError_t hipModuleLoadData(module_t **out, const void *image) {
    size_t bytes = image ? image_bytes(image) : 0;
    if (!device_count()) return fail(hipErrorNoDevice);
    /* The file stays open: the loader would take its number in another name for this library. */
    int file = memfd_create("hip-on-host-image", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (!bytes || write(file, image, bytes) != (ssize_t)bytes) {
        close(file);
        return fail(hipErrorInvalidImage);
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "hip on host: %s\n", dlerror());
        close(file);
        return fail(hipErrorInvalidImage);
    }
    *out = malloc(sizeof **out);
    **out = (module_t){library, current_device};
    return hipSuccess;
}

API hipError_t hipModuleGetFunction(function_t **out, module_t *module, const char *name) {
    const kernel_t *kernel = module ? dlsym(module->library, name) : NULL;
    if (!kernel) return fail(hipErrorNotFound);
    *out = malloc(sizeof **out);
    **out = (function_t){kernel, module->device, MAX_SHARED_BYTES};
    return hipSuccess;
}

API hipError_t hipFuncSetAttribute(function_t *function, int attribute, int value) {
    enum { MAX_DYNAMIC_SHARED = 8 };
    if (!function || attribute != MAX_DYNAMIC_SHARED || value < 0 || value > MAX_SHARED_BYTES)
        return fail(hipErrorInvalidValue);
    function->shared = value;
    return hipSuccess;
}

/* Threads that wait for blocks to run; there are as many as were ever busy at once. */
struct launch {
    const kernel_t *kernel;
    const void *packed;
    unsigned grid[3];
    _Atomic unsigned next; /* block */
    sem_t done;
};

typedef struct worker {
    struct worker *next;
    struct launch *launch;
    sem_t go;
} worker_t;

static worker_t *idle;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void wait_for(sem_t *semaphore) {
    while (sem_wait(semaphore)) {} /* a signal may interrupt it */
}

static void *run_blocks(void *arg) {
    worker_t *me = arg;
    for (;;) {
        wait_for(&me->go);
        struct launch *l = me->launch;
        const unsigned *grid = l->grid, blocks = grid[0] * grid[1] * grid[2];
        for (unsigned b; (b = atomic_fetch_add(&l->next, 1)) < blocks;) {
            unsigned block[3] = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
            in_kernel = 1;
            l->kernel->run(l->packed, block, grid);
            in_kernel = 0;
        }
        pthread_mutex_lock(&lock);
        me->next = idle;
        idle = me;
        pthread_mutex_unlock(&lock);
        sem_post(&l->done);
    }
    return NULL;
}

static void start_worker(struct launch *l) {
    pthread_mutex_lock(&lock);
    worker_t *w = idle;
    if (w) idle = w->next;
    pthread_mutex_unlock(&lock);
    if (!w) {
        w = calloc(1, sizeof *w);
        sem_init(&w->go, 0, 0);
        hiphost_thread(run_blocks, w);
    }
    w->launch = l;
    sem_post(&w->go);
}

struct call {
    const kernel_t *kernel;
    unsigned grid[3];
    _Alignas(16) char packed[];
};

static void do_launch(void *arg) {
    struct call *c = arg;
    struct launch l = {c->kernel, c->packed, {c->grid[0], c->grid[1], c->grid[2]}, 0, {{0}}};
    unsigned blocks = l.grid[0] * l.grid[1] * l.grid[2], workers = blocks < RESIDENT ? blocks : RESIDENT;
    sem_init(&l.done, 0, 0);
    begin_kernel();
    for (unsigned i = 0; i < workers; i++) start_worker(&l);
    for (unsigned i = 0; i < workers; i++) wait_for(&l.done);
    end_kernel();
}

/* The number of threads in a block is checked and then forgotten: a kernel compiled here has one. */
API hipError_t hipModuleLaunchKernel(function_t *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                     unsigned x, unsigned y, unsigned z, unsigned shared, stream_t *handle,
                                     void **params, void **extra) {
    size_t threads = (size_t)x * y * z;
    stream_t *s = find_stream(handle);
    if (!function || extra || !grid_x || !grid_y || !grid_z || !threads || threads > MAX_BLOCK_THREADS ||
        shared > (unsigned)function->shared)
        return fail(hipErrorInvalidValue);
    if (!s || s->device != function->device) return fail(hipErrorInvalidHandle);
    size_t bytes = sizeof(struct call) + function->kernel->bytes;
    struct call *c = aligned_alloc(16, (bytes + 15) / 16 * 16);
    *c = (struct call){function->kernel, {grid_x, grid_y, grid_z}};
    function->kernel->pack(c->packed, params);
    int illegal = hold_host_address(c->packed, function->kernel->bytes);
    hipError_t error = illegal ? fail(hipErrorIllegalAddress) : hiphost_enqueue(handle, do_launch, NULL, c, bytes);
    free(c);
    return error;
}
