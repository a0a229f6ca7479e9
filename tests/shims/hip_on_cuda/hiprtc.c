/* libhiprtc.so over NVRTC. The kernels are compiled for the device that is there, whatever GPU the options name. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct _nvrtcProgram *hiprtcProgram;
#include "hiprtc.h"
#define API __attribute__((visibility("default")))

/* NVRTC's, declared here because not every package of it brings its header. */
typedef hiprtcProgram nvrtcProgram;
int nvrtcVersion(int *major, int *minor);
int nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names);
int nvrtcDestroyProgram(nvrtcProgram *program);
int nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options);
int nvrtcAddNameExpression(nvrtcProgram program, const char *expression);
int nvrtcGetLoweredName(nvrtcProgram program, const char *expression, const char **name);
int nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes);
int nvrtcGetCUBIN(nvrtcProgram program, char *code);
int nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes);
int nvrtcGetProgramLog(nvrtcProgram program, char *log);
const char *nvrtcGetErrorString(int result);

static hiprtcResult hip_result(int code) { return code > HIPRTC_ERROR_INTERNAL_ERROR ? HIPRTC_ERROR_INTERNAL_ERROR : code; }
#define FORWARD(hip, nvrtc, parameters, arguments) \
    API hiprtcResult hip parameters { return hip_result(nvrtc arguments); }

FORWARD(hiprtcVersion, nvrtcVersion, (int *major, int *minor), (major, minor))
FORWARD(hiprtcDestroyProgram, nvrtcDestroyProgram, (hiprtcProgram *program), (program))
FORWARD(hiprtcAddNameExpression, nvrtcAddNameExpression, (hiprtcProgram program, const char *expression), (program, expression))
FORWARD(hiprtcGetLoweredName, nvrtcGetLoweredName, (hiprtcProgram program, const char *expression, const char **name),
        (program, expression, name))
FORWARD(hiprtcGetCodeSize, nvrtcGetCUBINSize, (hiprtcProgram program, size_t *bytes), (program, bytes))
FORWARD(hiprtcGetCode, nvrtcGetCUBIN, (hiprtcProgram program, char *code), (program, code))
FORWARD(hiprtcGetProgramLogSize, nvrtcGetProgramLogSize, (hiprtcProgram program, size_t *bytes), (program, bytes))
FORWARD(hiprtcGetProgramLog, nvrtcGetProgramLog, (hiprtcProgram program, char *log), (program, log))
API const char *hiprtcGetErrorString(hiprtcResult result) { return nvrtcGetErrorString(result); }

/* HIP's headers are part of hipRTC; an empty one will do where the source includes it. */
API hiprtcResult hiprtcCreateProgram(hiprtcProgram *program, const char *source, const char *name, int count,
                                     const char *const *texts, const char *const *names) {
    const char *all_texts[count + 1], *all_names[count + 1];
    for (int i = 0; i < count; i++) all_texts[i] = texts[i], all_names[i] = names[i];
    all_texts[count] = "", all_names[count] = "hip/hip_runtime.h";
    return hip_result(nvrtcCreateProgram(program, source, name, count + 1, all_texts, all_names));
}

static int begins(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

/* clang's name for the target becomes NVRTC's; clang's other options mean nothing there. */
API hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int count, const char *const *options) {
    static const char target[] = "--offload-arch=", *const clang[] = {"-O", "-f", "-m", "-W", "-g"};
    char architecture[64] = "";
    const char *kept[count + 1];
    int n = 0;
    for (int i = 0; i < count; i++) {
        const char *option = options[i];
        int drop = 0;
        for (size_t k = 0; k < sizeof clang / sizeof *clang; k++) drop |= begins(option, clang[k]);
        if (begins(option, target)) {
            const char *name = option + strlen(target);
            if (begins(name, "sm_")) snprintf(architecture, sizeof architecture, "--gpu-architecture=%s", name);
        } else if (!strcmp(option, "-ffp-contract=off")) {
            kept[n++] = "--fmad=false";
        } else if (!drop) {
            kept[n++] = option;
        }
    }
    if (!*architecture) {
        int device, major, minor;
        if (cudaGetDevice(&device) || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ||
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device))
            return HIPRTC_ERROR_INTERNAL_ERROR;
        snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d%d", major, minor);
    }
    kept[n++] = architecture;
    return hip_result(nvrtcCompileProgram(program, n, kept));
}
