/* What the processes of a fabric share: queue pairs by number, and registered memory by key. */
#pragma once

#include <pthread.h>
#include <stdint.h>

enum { PAIRS = 4096, REGIONS = 4096, PATH_BYTES = 128, RECEIVES = 256, MESSAGE_BYTES = 2044 };

struct message {
    uint32_t bytes;
    char data[MESSAGE_BYTES];
};

struct shared_pair {
    pthread_mutex_t lock; /* held while the state changes, and by the peer while something of it arrives */
    uint32_t state;
    uint32_t peer;
    uint32_t device; /* its number in the fabric */
    uint32_t cut; /* nothing gets through between it and its peer, and neither is told */
    uint32_t starved; /* the peer has a SEND for which nothing was posted */
    int32_t process;
    void *queue; /* of its process; null when it is closed */
    uint64_t offered; /* receives that were posted; this and the next two count from the first one */
    uint64_t sent;    /* messages that the peer has put into the inbox, each for a receive */
    uint64_t taken;   /* messages that were received */
    struct message inbox[RECEIVES];
};

struct region {
    uint32_t key; /* 0: not registered */
    uint32_t times; /* how often it was registered: a key is used again */
    int32_t process;
    uint64_t base, bytes;
    uint64_t iova; /* by which requests find the first byte */
    uint64_t offset;
    uint32_t gpu;         /* its number, from 1 on, or 0: host memory */
    uint32_t needs_write; /* see `fabric_put` */
    char path[PATH_BYTES]; /* of the file in shared memory that holds it; empty: only its own process reaches it */
};

struct fabric;

struct fabric *fabric_open(const char *path);
void fabric_close(struct fabric *fabric);

/* Number of a new device. */
uint32_t fabric_add_device(struct fabric *fabric);

/* Number of a new pair in RESET of a device, whose completions go to a queue of this process, or 0 if there is no room. */
uint32_t fabric_add_pair(struct fabric *fabric, void *queue, uint32_t device);
struct shared_pair *fabric_pair(struct fabric *fabric, uint32_t number);
int32_t fabric_process(const struct fabric *fabric);

/* Lock a pair, also one whose process has ended meanwhile. */
void fabric_lock(struct shared_pair *shared);
void fabric_unlock(struct shared_pair *shared);

/* The key under which memory can be sent and written, or 0 if there is no room: the one that was given back last, if there is one.
 * Requests find its first byte by `iova`. */
uint32_t fabric_register(struct fabric *fabric, uint64_t base, uint64_t bytes, uint64_t iova, const char *path, uint64_t offset,
                         uint32_t gpu, uint32_t needs_write);
/* Returns once no request of this process uses the memory any more. */
void fabric_deregister(struct fabric *fabric, uint32_t key);

/* Around what looks regions up and copies. */
void fabric_begin(void);
void fabric_end(void);

/* Where this process reaches an address of a region, or null if the key does not permit these bytes. */
char *fabric_reach(struct fabric *fabric, uint32_t key, uint64_t address, uint64_t bytes);

/* Copy by CUDA from now on, in a context, so that regions may be in a GPU's memory; 0, or -1 without CUDA. */
int fabric_use_cuda(void *context);

/* Copy bytes between regions and host memory. */
void fabric_copy(void *to, const void *from, uint64_t bytes);

/* Let the device of a pair put bytes where `fabric_reach` has found a region. A GPU sees them only after `fabric_settle` over the
 * same device, and one that needs a WRITE only if the device has put something there in between over a pair that is joined with
 * itself. */
void fabric_put(struct fabric *fabric, const struct shared_pair *over, uint32_t key, char *to, const char *from, uint64_t bytes);

/* Let the GPU of a region see what the device of a pair has put into its memory. */
void fabric_settle(struct fabric *fabric, const struct shared_pair *over, uint32_t key);
