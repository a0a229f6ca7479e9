/* Devices, their properties, errors, threads. Settings: HIPHOST_DEVICES (2). */
#define _GNU_SOURCE
#include "hiphost.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

__thread int current_device;
static __thread hipError_t last_error;

int device_count(void) {
    static int count = -1;
    if (count < 0) count = setting("HIPHOST_DEVICES", 2);
    return count < MAX_DEVICES ? count : MAX_DEVICES;
}

hipError_t fail(hipError_t error) {
    if (error) last_error = error;
    return error;
}

API void hiphost_thread(void *(*run)(void *), void *arg) {
    sigset_t blocked, before;
    sigfillset(&blocked);
    int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++) sigdelset(&blocked, crashes[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, arg)) {
        perror("hip on host: pthread_create");
        abort();
    }
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int bad_device(int device) { return device < 0 || device >= device_count(); }

API hipError_t hipGetDeviceCount(int *count) {
    *count = device_count();
    return *count ? hipSuccess : fail(hipErrorNoDevice);
}

API hipError_t hipSetDevice(int device) {
    if (bad_device(device)) return fail(device_count() ? hipErrorInvalidDevice : hipErrorNoDevice);
    current_device = device;
    return hipSuccess;
}

API hipError_t hipGetDevice(int *device) {
    *device = current_device;
    return device_count() ? hipSuccess : fail(hipErrorNoDevice);
}

API hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
    if (bad_device(device)) return fail(hipErrorInvalidDevice);
    switch (attribute) {
    case 3: case 8: case 78: case 85: case 90: *value = 1; break; /* map host memory, concurrent kernels, stream
                                                    priorities, unified addressing, register host memory */
    case 26: case 27: case 56: *value = MAX_BLOCK_THREADS; break;
    case 63: case 10015: *value = MULTIPROCESSORS; break;
    case 67: *value = device + 1; break; /* PCI bus; device and domain are 0 */
    case 74: case 75: case 76: *value = MAX_SHARED_BYTES; break;
    case 87: *value = WARP; break;
    default: *value = 0;
    }
    return hipSuccess;
}

/* The part of hipDeviceProp_tR0600 (1472 bytes) that the tests look at. */
API hipError_t hipGetDevicePropertiesR0600(char *p, int device) {
    if (bad_device(device)) return fail(hipErrorInvalidDevice);
    memset(p, 0, 1472);
    snprintf(p, 256, "HIP on host %d", device);
    p[256] = device + 1;                         /* uuid */
    *(size_t *)(p + 288) = (size_t)16 << 30;     /* totalGlobalMem */
    *(size_t *)(p + 296) = MAX_SHARED_BYTES;
    *(int *)(p + 308) = WARP;
    *(int *)(p + 320) = MAX_BLOCK_THREADS;
    *(int *)(p + 360) = 9; /* major */
    *(int *)(p + 364) = 4; /* minor */
    *(int *)(p + 388) = MULTIPROCESSORS;
    *(int *)(p + 584) = device + 1; /* pciBusID */
    *(int *)(p + 604) = 1;          /* unifiedAddressing */
    strcpy(p + 1160, "gfx942:sramecc+:xnack-");
    return hipSuccess;
}

API hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 1;
    if (greatest) *greatest = -1;
    return hipSuccess;
}

API hipError_t hipGetLastError(void) {
    hipError_t error = last_error;
    last_error = hipSuccess;
    return error;
}

#define AS_TEXT(name, number, text) case number: return text;

API const char *hipGetErrorString(int error) {
    switch (error) { ERRORS(AS_TEXT) default: return "unknown error"; }
}
