#define _GNU_SOURCE
#include "fabric.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct shared {
    uint32_t devices, pairs, regions; /* how many there have been */
    uint32_t locked;                  /* whether a process takes an index of a region, or gives one back */
    uint32_t free, freed[REGIONS];    /* indices of regions that were given back, the last one first */
    struct shared_pair pair[PAIRS];
    struct region region[REGIONS];
};

struct fabric {
    struct shared *shared;
    int32_t process;
    pthread_mutex_t lock; /* of `mapped` */
    struct { /* regions of other processes that this one has mapped */
        uint32_t times;
        char *start;
        uint64_t bytes;
    } mapped[REGIONS];
};

struct fabric *fabric_open(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0)
        return NULL;
    struct fabric *fabric = NULL;
    void *shared = MAP_FAILED;
    if (ftruncate(fd, sizeof(struct shared)) == 0)
        shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared != MAP_FAILED && (fabric = calloc(1, sizeof *fabric)))
        *fabric = (struct fabric){.shared = shared, .process = getpid(), .lock = PTHREAD_MUTEX_INITIALIZER};
    return fabric;
}

void fabric_close(struct fabric *fabric)
{
    for (int i = 0; i < REGIONS; i++)
        if (fabric->mapped[i].start)
            munmap(fabric->mapped[i].start, fabric->mapped[i].bytes);
    munmap(fabric->shared, sizeof(struct shared));
    free(fabric);
}

uint32_t fabric_add_device(struct fabric *fabric)
{
    return 1 + __atomic_fetch_add(&fabric->shared->devices, 1, __ATOMIC_ACQ_REL);
}

uint32_t fabric_add_pair(struct fabric *fabric, void *queue, uint32_t device)
{
    uint32_t number = 1 + __atomic_fetch_add(&fabric->shared->pairs, 1, __ATOMIC_ACQ_REL);
    if (number >= PAIRS)
        return 0;
    struct shared_pair *shared = &fabric->shared->pair[number];
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &kind);
    shared->process = fabric->process;
    shared->queue = queue;
    shared->device = device;
    return number;
}

struct shared_pair *fabric_pair(struct fabric *fabric, uint32_t number)
{
    return &fabric->shared->pair[number % PAIRS];
}

int32_t fabric_process(const struct fabric *fabric)
{
    return fabric->process;
}

void fabric_lock(struct shared_pair *shared)
{
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&shared->lock);
}

void fabric_unlock(struct shared_pair *shared)
{
    pthread_mutex_unlock(&shared->lock);
}

static void enter(struct shared *shared)
{
    while (__atomic_exchange_n(&shared->locked, 1, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void leave(struct shared *shared)
{
    __atomic_store_n(&shared->locked, 0, __ATOMIC_RELEASE);
}

uint32_t fabric_register(struct fabric *fabric, uint64_t base, uint64_t bytes, uint64_t iova, const char *path, uint64_t offset,
                         uint32_t gpu, uint32_t needs_write)
{
    struct shared *shared = fabric->shared;
    enter(shared);
    uint32_t index = shared->free ? shared->freed[--shared->free] : ++shared->regions;
    leave(shared);
    if (index >= REGIONS || strlen(path) >= PATH_BYTES)
        return 0;
    struct region *region = &shared->region[index];
    *region = (struct region){.times = region->times + 1, .process = fabric->process, .base = base, .bytes = bytes,
                              .iova = iova, .offset = offset, .gpu = gpu, .needs_write = needs_write};
    strcpy(region->path, path);
    uint32_t key = index << 8 | 0x5a;
    __atomic_store_n(&region->key, key, __ATOMIC_RELEASE);
    return key;
}

static char *map_region(struct fabric *fabric, uint32_t index, const struct region *region)
{
    if (fabric->mapped[index].times == region->times)
        return fabric->mapped[index].start + region->offset;
    struct stat found;
    int fd = region->path[0] ? open(region->path, O_RDWR) : -1;
    if (fd < 0)
        return NULL;
    void *start = MAP_FAILED;
    if (fstat(fd, &found) == 0)
        start = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (start == MAP_FAILED)
        return NULL;
    if (fabric->mapped[index].start)
        munmap(fabric->mapped[index].start, fabric->mapped[index].bytes);
    fabric->mapped[index].times = region->times;
    fabric->mapped[index].start = start;
    fabric->mapped[index].bytes = found.st_size;
    return fabric->mapped[index].start + region->offset;
}

char *fabric_reach(struct fabric *fabric, uint32_t key, uint64_t address, uint64_t bytes)
{
    uint32_t index = (key >> 8) % REGIONS;
    const struct region *region = &fabric->shared->region[index];
    if (key == 0 || __atomic_load_n(&region->key, __ATOMIC_ACQUIRE) != key)
        return NULL;
    if (address < region->iova || bytes > region->bytes || address - region->iova > region->bytes - bytes)
        return NULL;
    char *start = (char *)region->base;
    if (region->process != fabric->process || (region->gpu && region->path[0])) {
        pthread_mutex_lock(&fabric->lock);
        start = map_region(fabric, index, region);
        pthread_mutex_unlock(&fabric->lock);
    }
    return start ? start + (address - region->iova) : NULL;
}

static struct {
    void *context;
    int (*enter)(void *);
    int (*copy)(uint64_t, uint64_t, size_t);
} cuda;

int fabric_use_cuda(void *context)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return -1;
    *(void **)&cuda.enter = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&cuda.copy = dlsym(driver, "cuMemcpy");
    cuda.context = context;
    return cuda.enter && cuda.copy ? 0 : -1;
}

void fabric_copy(void *to, const void *from, uint64_t bytes)
{
    if (!cuda.context)
        memcpy(to, from, bytes);
    else if (cuda.enter(cuda.context) || cuda.copy((uint64_t)to, (uint64_t)from, bytes))
        abort();
}

/* What was written to GPUs' memory and is not seen there yet, in order, by all fabrics of this process. */
struct kept {
    struct kept *next;
    uint32_t key, gpu, device;
    int pushed; /* a READ lets it be seen */
    char *to;
    uint64_t bytes;
    char data[];
};
static struct kept *kept;
static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;

static void drop(struct kept **at)
{
    struct kept *found = *at;
    *at = found->next;
    free(found);
}

/* Writers, which deregister, have precedence: readers, which poll the devices, would starve them. */
static pthread_rwlock_t using = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

void fabric_begin(void)
{
    pthread_rwlock_rdlock(&using);
}

void fabric_end(void)
{
    pthread_rwlock_unlock(&using);
}

void fabric_deregister(struct fabric *fabric, uint32_t key)
{
    struct shared *shared = fabric->shared;
    uint32_t index = (key >> 8) % REGIONS;
    pthread_rwlock_wrlock(&using);
    __atomic_store_n(&shared->region[index].key, 0, __ATOMIC_RELEASE);
    pthread_rwlock_unlock(&using);
    pthread_mutex_lock(&keeping);
    for (struct kept **at = &kept; *at;)
        if ((*at)->key == key)
            drop(at);
        else
            at = &(*at)->next;
    pthread_mutex_unlock(&keeping);
    enter(shared);
    shared->freed[shared->free++] = index;
    leave(shared);
}

/* Keep bytes back. What another device has written to the same place before arrives there now at the latest. */
static void keep(struct kept *made, int needs_write, int itself)
{
    made->pushed = !needs_write || itself;
    pthread_mutex_lock(&keeping);
    struct kept **at = &kept;
    while (*at) {
        struct kept *found = *at;
        if (found->gpu == made->gpu && found->device == made->device)
            found->pushed |= itself;
        else if (found->to < made->to + made->bytes && made->to < found->to + found->bytes) {
            fabric_copy(found->to, found->data, found->bytes);
            drop(at);
            continue;
        }
        at = &found->next;
    }
    *at = made;
    pthread_mutex_unlock(&keeping);
}

void fabric_put(struct fabric *fabric, const struct shared_pair *over, uint32_t key, char *to, const char *from, uint64_t bytes)
{
    uint64_t word;
    const struct region *region = &fabric->shared->region[(key >> 8) % REGIONS];
    if (region->gpu) {
        struct kept *made = malloc(sizeof *made + bytes);
        *made = (struct kept){.key = key, .gpu = region->gpu, .device = over->device, .to = to, .bytes = bytes};
        fabric_copy(made->data, from, bytes);
        keep(made, region->needs_write, fabric_pair(fabric, over->peer) == over);
    } else if (bytes == 8 && (uintptr_t)to % 8 == 0 && !cuda.context) { /* a counter is written at once, and after what was written before */
        memcpy(&word, from, 8);
        __atomic_store_n((uint64_t *)to, word, __ATOMIC_RELEASE);
    } else {
        fabric_copy(to, from, bytes);
    }
}

void fabric_settle(struct fabric *fabric, const struct shared_pair *over, uint32_t key)
{
    uint32_t gpu = fabric->shared->region[(key >> 8) % REGIONS].gpu;
    pthread_mutex_lock(&keeping);
    for (struct kept **at = &kept; *at;) {
        struct kept *found = *at;
        if (found->gpu != gpu || found->device != over->device || !found->pushed) {
            at = &found->next;
            continue;
        }
        fabric_copy(found->to, found->data, found->bytes);
        drop(at);
    }
    pthread_mutex_unlock(&keeping);
}
