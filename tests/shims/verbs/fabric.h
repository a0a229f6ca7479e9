/* What the processes of a fabric share: queue pairs by number, and registered memory by key. */
#pragma once

#include <stdint.h>

enum { PAIRS = 256, REGIONS = 256, PATH_BYTES = 128 };

struct shared_pair {
    uint32_t state;
    uint32_t peer;
    uint32_t cut; /* nothing gets through between it and its peer, and neither is told */
};

struct region {
    uint32_t key; /* 0: not registered */
    int32_t process;
    uint64_t base, bytes;
    uint64_t offset;
    char path[PATH_BYTES]; /* of the file in shared memory that holds it; empty: only its own process reaches it */
};

struct fabric;

struct fabric *fabric_open(const char *path);
void fabric_close(struct fabric *fabric);

/* Number of a new pair in RESET, or 0 if there is no room. */
uint32_t fabric_add_pair(struct fabric *fabric);
struct shared_pair *fabric_pair(struct fabric *fabric, uint32_t number);

/* The key under which memory can be sent and written, or 0 if there is no room. */
uint32_t fabric_register(struct fabric *fabric, uint64_t base, uint64_t bytes, const char *path, uint64_t offset);
void fabric_deregister(struct fabric *fabric, uint32_t key);

/* Where this process reaches an address of a region, or null if the key does not permit these bytes. */
char *fabric_reach(struct fabric *fabric, uint32_t key, uint64_t address, uint64_t bytes);
