/* A librocprofiler-sdk-roctx.so that writes the ranges of this process to the file HIPHOST_RANGES: a line for each, with its
 * text, indented by its depth, when it begins. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

static __thread int depth;

API int roctxRangePushA(const char *text) {
    const char *path = getenv("HIPHOST_RANGES");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%*s%s\n", 2 * depth, "", text);
        fclose(file);
    }
    return depth++;
}

API int roctxRangePop(void) { return depth ? --depth : -1; }
