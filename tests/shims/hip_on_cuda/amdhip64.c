/* libamdhip64.so over CUDA: the calls that hip-python makes for xvcomm, forwarded to CUDA's runtime and driver.
 * Errors, flags and attributes are translated where HIP's numbers differ. hip.h is made by declarations.py. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef cudaStream_t hipStream_t;
typedef cudaEvent_t hipEvent_t;
typedef cudaGraph_t hipGraph_t;
typedef cudaGraphExec_t hipGraphExec_t;
typedef cudaGraphNode_t hipGraphNode_t;
typedef CUmodule hipModule_t;
typedef CUfunction hipFunction_t;
typedef int hipDevice_t;
#define hipGetDeviceProperties hipGetDevicePropertiesR0600
#include "hip.h"
#define API __attribute__((visibility("default")))

/* Most numbers are equal; what HIP has no name for becomes the nearest that it has. */
static hipError_t hip_error(int code) {
    static const int known[] = {hipError_t_VALUES};
    switch (code) {
    case cudaErrorStubLibrary: case cudaErrorSystemDriverMismatch: case cudaErrorCompatNotSupportedOnDevice:
        return hipErrorInsufficientDriver;
    case cudaErrorDevicesUnavailable: case cudaErrorSystemNotReady:
        return hipErrorNoDevice;
    case cudaErrorMisalignedAddress: case cudaErrorInvalidAddressSpace: case cudaErrorInvalidPc:
        return hipErrorIllegalAddress;
    case cudaErrorHardwareStackError: case cudaErrorIllegalInstruction:
        return hipErrorLaunchFailure;
    case cudaErrorNotPermitted:
        return hipErrorNotSupported;
    }
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i] == code) return code;
    return hipErrorUnknown;
}
#define FORWARD(hip, cuda, parameters, arguments) \
    API hipError_t hip parameters { return hip_error(cuda arguments); }

/* The driver's calls need a context, which the runtime's make when they are the first on a thread. */
static int make_current(void) {
    static __thread int done;
    int device, error = 0;
    if (!done && !(error = cudaGetDevice(&device)) && !(error = cudaSetDevice(device))) done = 1;
    return error;
}

/* A function of the driver, found at the first call: the library loads where there is no driver. */
#define DRIVER(function, arguments) ({ \
    static __typeof__(&function) found; \
    enum cudaDriverEntryPointQueryResult unused; \
    int error = found ? 0 : cudaGetDriverEntryPointByVersion(#function, (void **)&found, CUDA_VERSION, 0, &unused); \
    if (!error) error = make_current(); \
    hip_error(error ? error : found ? (int)found arguments : cudaErrorNotSupported); })

/* errors */
FORWARD(hipGetLastError, cudaGetLastError, (void), ())
FORWARD(hipPeekAtLastError, cudaPeekAtLastError, (void), ())
API const char *hipGetErrorString(hipError_t code) { return cudaGetErrorString((cudaError_t)code); }
API const char *hipGetErrorName(hipError_t code) {
    static __thread char name[96];
    const char *theirs = cudaGetErrorName((cudaError_t)code);
    snprintf(name, sizeof name, "hip%s", strncmp(theirs, "cuda", 4) ? theirs : theirs + 4);
    return name;
}

/* devices */
API hipError_t hipInit(unsigned int flags) { return flags ? hipErrorInvalidValue : hip_error(make_current()); }
FORWARD(hipGetDeviceCount, cudaGetDeviceCount, (int *count), (count))
FORWARD(hipSetDevice, cudaSetDevice, (int device), (device))
FORWARD(hipGetDevice, cudaGetDevice, (int *device), (device))
FORWARD(hipDeviceSynchronize, cudaDeviceSynchronize, (void), ())
FORWARD(hipDeviceGetPCIBusId, cudaDeviceGetPCIBusId, (char *text, int length, int device), (text, length, device))
FORWARD(hipDeviceGetStreamPriorityRange, cudaDeviceGetStreamPriorityRange, (int *least, int *most), (least, most))
FORWARD(hipMemGetInfo, cudaMemGetInfo, (size_t *free, size_t *total), (free, total))
API hipError_t hipRuntimeGetVersion(int *version) { *version = 70153630; return hipSuccess; } /* HIP 7.15 */
API hipError_t hipDriverGetVersion(int *version) { return hipRuntimeGetVersion(version); }

API hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int device) {
#define ALIKE(name) {hipDeviceAttribute##name, cudaDevAttr##name}
    static const int cuda[][2] = {
        ALIKE(AsyncEngineCount), ALIKE(CanMapHostMemory), ALIKE(ClockRate), ALIKE(ComputeCapabilityMajor),
        ALIKE(ComputeCapabilityMinor), ALIKE(ConcurrentKernels), ALIKE(CooperativeLaunch), ALIKE(HostRegisterSupported),
        ALIKE(Integrated), ALIKE(L2CacheSize), ALIKE(ManagedMemory), ALIKE(MaxBlockDimX), ALIKE(MaxGridDimX),
        ALIKE(MaxRegistersPerBlock), ALIKE(MaxSharedMemoryPerBlock), ALIKE(MaxSharedMemoryPerMultiprocessor),
        ALIKE(MaxThreadsPerBlock), ALIKE(MaxThreadsPerMultiProcessor), ALIKE(MemoryClockRate), ALIKE(PageableMemoryAccess),
        ALIKE(PciBusId), ALIKE(PciDeviceId), ALIKE(PciDomainId), ALIKE(UnifiedAddressing), ALIKE(WarpSize),
        {hipDeviceAttributeMultiprocessorCount, cudaDevAttrMultiProcessorCount},
        {hipDeviceAttributeMaxBlocksPerMultiProcessor, cudaDevAttrMaxBlocksPerMultiprocessor},
        {hipDeviceAttributeSharedMemPerBlockOptin, cudaDevAttrMaxSharedMemoryPerBlockOptin},
        {hipDeviceAttributeDmaBufSupported, (int)CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED},
    };
    for (size_t i = 0; i < sizeof cuda / sizeof *cuda; i++)
        if (cuda[i][0] == attribute) return hip_error(cudaDeviceGetAttribute(value, cuda[i][1], device));
    return hipErrorInvalidValue;
}

_Static_assert(sizeof(hipDeviceProp_t) == 1472, "hip-python was compiled for another layout");
API hipError_t hipGetDeviceProperties(hipDeviceProp_t *to, int device) {
    struct cudaDeviceProp from;
    cudaError_t error = cudaGetDeviceProperties(&from, device);
    if (error) return hip_error(error);
    memset(to, 0, sizeof *to);
    memcpy(to->name, from.name, sizeof to->name);
    memcpy(to->uuid.bytes, from.uuid.bytes, sizeof to->uuid);
    snprintf(to->gcnArchName, sizeof to->gcnArchName, "sm_%d%d", from.major, from.minor);
#define SAME(field) to->field = from.field
    SAME(totalGlobalMem); SAME(sharedMemPerBlock); SAME(regsPerBlock); SAME(warpSize); SAME(maxThreadsPerBlock);
    SAME(major); SAME(minor); SAME(multiProcessorCount); SAME(integrated); SAME(canMapHostMemory);
    SAME(concurrentKernels); SAME(pciBusID); SAME(pciDeviceID); SAME(pciDomainID); SAME(asyncEngineCount);
    SAME(unifiedAddressing); SAME(l2CacheSize); SAME(maxThreadsPerMultiProcessor); SAME(sharedMemPerMultiprocessor);
    SAME(hostRegisterSupported); SAME(gpuDirectRDMASupported);
    memcpy(to->maxThreadsDim, from.maxThreadsDim, sizeof to->maxThreadsDim);
    memcpy(to->maxGridSize, from.maxGridSize, sizeof to->maxGridSize);
    to->maxSharedMemoryPerMultiProcessor = from.sharedMemPerMultiprocessor;
    return hipSuccess;
}

/* memory; HIP's further flags are about coherence, which CUDA's host memory always has */
#define KIND(kind) ((kind) > cudaMemcpyDefault ? cudaMemcpyDeviceToDevice : (enum cudaMemcpyKind)(kind))
#define HOST_FLAGS (cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory)
API hipError_t hipMalloc(void **at, size_t bytes) {
    *at = NULL;
    return bytes ? hip_error(cudaMalloc(at, bytes)) : hipSuccess;
}
API hipError_t hipExtMallocWithFlags(void **at, size_t bytes, unsigned int flags) { (void)flags; return hipMalloc(at, bytes); }
FORWARD(hipFree, cudaFree, (void *at), (at))
FORWARD(hipHostMalloc, cudaHostAlloc, (void **at, size_t bytes, unsigned int flags), (at, bytes, flags & HOST_FLAGS))
FORWARD(hipHostFree, cudaFreeHost, (void *at), (at))
FORWARD(hipHostRegister, cudaHostRegister, (void *at, size_t bytes, unsigned int flags), (at, bytes, flags & HOST_FLAGS))
FORWARD(hipHostUnregister, cudaHostUnregister, (void *at), (at))
FORWARD(hipHostGetDevicePointer, cudaHostGetDevicePointer, (void **at, void *host, unsigned int flags), (at, host, flags))
FORWARD(hipMemcpy, cudaMemcpy, (void *dst, const void *src, size_t bytes, hipMemcpyKind kind), (dst, src, bytes, KIND(kind)))
FORWARD(hipMemcpyAsync, cudaMemcpyAsync, (void *dst, const void *src, size_t bytes, hipMemcpyKind kind, hipStream_t stream),
        (dst, src, bytes, KIND(kind), stream))
FORWARD(hipMemset, cudaMemset, (void *at, int value, size_t bytes), (at, value, bytes))
FORWARD(hipMemsetAsync, cudaMemsetAsync, (void *at, int value, size_t bytes, hipStream_t stream), (at, value, bytes, stream))
API hipError_t hipPointerGetAttributes(hipPointerAttribute_t *to, const void *at) {
    struct cudaPointerAttributes from;
    cudaError_t error = cudaPointerGetAttributes(&from, at);
    if (!error) *to = (hipPointerAttribute_t){(hipMemoryType)from.type, from.device, from.devicePointer, from.hostPointer,
                                              from.type == cudaMemoryTypeManaged, 0};
    return hip_error(error);
}
FORWARD(hipDeviceCanAccessPeer, cudaDeviceCanAccessPeer, (int *can, int device, int other), (can, device, other))
FORWARD(hipIpcGetMemHandle, cudaIpcGetMemHandle, (hipIpcMemHandle_st *handle, void *at), ((cudaIpcMemHandle_t *)handle, at))
API hipError_t hipIpcOpenMemHandle(void **at, hipIpcMemHandle_st handle, unsigned int flags) {
    cudaIpcMemHandle_t same;
    memcpy(&same, &handle, sizeof same);
    return hip_error(cudaIpcOpenMemHandle(at, same, flags));
}
FORWARD(hipIpcCloseMemHandle, cudaIpcCloseMemHandle, (void *at), (at))
API hipError_t hipMemGetAddressRange(void **base, size_t *bytes, void *at) {
    return DRIVER(cuMemGetAddressRange, ((CUdeviceptr *)base, bytes, (CUdeviceptr)at));
}
API hipError_t hipMemGetHandleForAddressRange(void *handle, void *at, size_t bytes, hipMemRangeHandleType type, unsigned long long flags) {
    return DRIVER(cuMemGetHandleForAddressRange, (handle, (CUdeviceptr)at, bytes, (CUmemRangeHandleType)type, flags));
}

/* streams and events */
FORWARD(hipStreamCreate, cudaStreamCreate, (hipStream_t *stream), (stream))
FORWARD(hipStreamCreateWithFlags, cudaStreamCreateWithFlags, (hipStream_t *stream, unsigned int flags), (stream, flags))
FORWARD(hipStreamCreateWithPriority, cudaStreamCreateWithPriority, (hipStream_t *stream, unsigned int flags, int priority),
        (stream, flags, priority))
FORWARD(hipStreamDestroy, cudaStreamDestroy, (hipStream_t stream), (stream))
FORWARD(hipStreamSynchronize, cudaStreamSynchronize, (hipStream_t stream), (stream))
FORWARD(hipStreamQuery, cudaStreamQuery, (hipStream_t stream), (stream))
FORWARD(hipStreamGetDevice, cudaStreamGetDevice, (hipStream_t stream, hipDevice_t *device), (stream, device))
FORWARD(hipStreamWaitEvent, cudaStreamWaitEvent, (hipStream_t stream, hipEvent_t event, unsigned int flags), (stream, event, flags))
#define EVENT_FLAGS (cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess)
FORWARD(hipEventCreate, cudaEventCreate, (hipEvent_t *event), (event))
FORWARD(hipEventCreateWithFlags, cudaEventCreateWithFlags, (hipEvent_t *event, unsigned int flags), (event, flags & EVENT_FLAGS))
FORWARD(hipEventDestroy, cudaEventDestroy, (hipEvent_t event), (event))
FORWARD(hipEventRecord, cudaEventRecord, (hipEvent_t event, hipStream_t stream), (event, stream))
FORWARD(hipEventQuery, cudaEventQuery, (hipEvent_t event), (event))
FORWARD(hipEventSynchronize, cudaEventSynchronize, (hipEvent_t event), (event))
FORWARD(hipEventElapsedTime, cudaEventElapsedTime, (float *ms, hipEvent_t from, hipEvent_t to), (ms, from, to))

/* capture and graphs */
FORWARD(hipStreamBeginCapture, cudaStreamBeginCapture, (hipStream_t stream, hipStreamCaptureMode mode),
        (stream, (enum cudaStreamCaptureMode)mode))
FORWARD(hipStreamEndCapture, cudaStreamEndCapture, (hipStream_t stream, hipGraph_t *graph), (stream, graph))
FORWARD(hipStreamIsCapturing, cudaStreamIsCapturing, (hipStream_t stream, hipStreamCaptureStatus *status),
        (stream, (enum cudaStreamCaptureStatus *)status))
#if CUDART_VERSION >= 13000
FORWARD(hipStreamGetCaptureInfo, cudaStreamGetCaptureInfo, (hipStream_t stream, hipStreamCaptureStatus *status, unsigned long long *id),
        (stream, (enum cudaStreamCaptureStatus *)status, id, NULL, NULL, NULL, NULL))
#else
FORWARD(hipStreamGetCaptureInfo, cudaStreamGetCaptureInfo, (hipStream_t stream, hipStreamCaptureStatus *status, unsigned long long *id),
        (stream, (enum cudaStreamCaptureStatus *)status, id, NULL, NULL, NULL))
#endif
FORWARD(hipThreadExchangeStreamCaptureMode, cudaThreadExchangeStreamCaptureMode, (hipStreamCaptureMode *mode),
        ((enum cudaStreamCaptureMode *)mode))
API hipError_t hipGraphInstantiate(hipGraphExec_t *made, hipGraph_t graph, hipGraphNode_t *node, char *log, size_t bytes) {
    (void)node, (void)log, (void)bytes;
    return hip_error(cudaGraphInstantiate(made, graph, 0));
}
FORWARD(hipGraphLaunch, cudaGraphLaunch, (hipGraphExec_t graph, hipStream_t stream), (graph, stream))
FORWARD(hipGraphExecDestroy, cudaGraphExecDestroy, (hipGraphExec_t graph), (graph))
FORWARD(hipGraphDestroy, cudaGraphDestroy, (hipGraph_t graph), (graph))

/* modules */
API hipError_t hipModuleLoadData(hipModule_t *module, const void *image) { return DRIVER(cuModuleLoadData, (module, image)); }
API hipError_t hipModuleUnload(hipModule_t module) { return DRIVER(cuModuleUnload, (module)); }
API hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    return DRIVER(cuModuleGetFunction, (function, module, name));
}
API hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t function) {
    return DRIVER(cuFuncGetAttribute, (value, (CUfunction_attribute)attribute, function));
}
API hipError_t hipFuncSetAttribute(const void *function, hipFuncAttribute attribute, int value) {
    return DRIVER(cuFuncSetAttribute, ((CUfunction)function, (CUfunction_attribute)attribute, value));
}
API hipError_t hipModuleLaunchKernel(
    hipFunction_t function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
    unsigned int shared, hipStream_t stream, void **parameters, void **extra) {
    if (shared > 48 << 10) { /* CUDA wants to be asked for this much, HIP does not */
        hipError_t error = hipFuncSetAttribute(function, hipFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (error) return error;
    }
    return DRIVER(cuLaunchKernel, (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra));
}
