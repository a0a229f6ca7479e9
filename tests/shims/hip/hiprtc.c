/* A libhiprtc.so that compiles kernels as C++ for this machine: prelude.h before the source, entry.h and the kernels
 * that were named after it. The lowered name of name expression i is `hiphost_kernel_<i>`.
 * HEADERS and COMPILER are defined by build.py. */
#define _GNU_SOURCE
#include "hiphost.h"
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define RESULTS(X)                                                                  \
    X(HIPRTC_SUCCESS, 0)                                                            \
    X(HIPRTC_ERROR_INVALID_INPUT, 3)                                                \
    X(HIPRTC_ERROR_INVALID_PROGRAM, 4)                                              \
    X(HIPRTC_ERROR_INVALID_OPTION, 5)                                               \
    X(HIPRTC_ERROR_COMPILATION, 6)                                                  \
    X(HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION, 8)                        \
    X(HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION, 9)                          \
    X(HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID, 10)                                   \
    X(HIPRTC_ERROR_INTERNAL_ERROR, 11)
#define NUMBER(name, number) name = number,
typedef enum { RESULTS(NUMBER) } hiprtcResult;

enum { MAX_NAMES = 1024, MAX_OPTIONS = 64, NAME_BYTES = 32 };

typedef struct {
    char *source, *name, *log, *image;
    size_t log_bytes, image_bytes; /* the log's with its final 0 */
    int count, compiled;
    char *expressions[MAX_NAMES], lowered[MAX_NAMES][NAME_BYTES];
} program_t;

extern char **environ;

API const char *hiprtcGetErrorString(int result) {
#define TEXT(name, number) case number: return #name;
    switch (result) { RESULTS(TEXT) default: return "HIPRTC_ERROR_UNKNOWN"; }
}

API hiprtcResult hiprtcVersion(int *major, int *minor) {
    *major = 9, *minor = 0;
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcCreateProgram(program_t **out, const char *source, const char *name, int headers,
                                     const char **texts, const char **names) {
    (void)texts, (void)names;
    if (!source || headers) return HIPRTC_ERROR_INVALID_INPUT;
    program_t *p = *out = calloc(1, sizeof *p);
    p->source = strdup(source), p->name = strdup(name && *name ? name : "program");
    p->log = strdup(""), p->log_bytes = 1;
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcDestroyProgram(program_t **program) {
    if (!program || !*program) return HIPRTC_ERROR_INVALID_PROGRAM;
    program_t *p = *program;
    for (int i = 0; i < p->count; i++) free(p->expressions[i]);
    free(p->source), free(p->name), free(p->log), free(p->image), free(p);
    *program = NULL;
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcAddNameExpression(program_t *p, const char *expression) {
    if (!p) return HIPRTC_ERROR_INVALID_PROGRAM;
    if (p->compiled) return HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
    if (!expression || p->count == MAX_NAMES) return HIPRTC_ERROR_INVALID_INPUT;
    snprintf(p->lowered[p->count], NAME_BYTES, "hiphost_kernel_%d", p->count);
    p->expressions[p->count++] = strdup(expression);
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcGetLoweredName(program_t *p, const char *expression, const char **lowered) {
    if (!p) return HIPRTC_ERROR_INVALID_PROGRAM;
    if (!p->compiled) return HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION;
    for (int i = 0; i < p->count; i++)
        if (!strcmp(p->expressions[i], expression)) {
            *lowered = p->lowered[i];
            return HIPRTC_SUCCESS;
        }
    return HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
}

static char *slurp(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    *bytes = ftell(file);
    rewind(file);
    char *text = calloc(1, *bytes + 1);
    size_t got = fread(text, 1, *bytes, file);
    fclose(file);
    if (got == *bytes) return text;
    free(text);
    return NULL;
}

static int write_source(const program_t *p, const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return 0;
    fprintf(file, "#line 1 \"%s\"\n%s\n", p->name, p->source);
    fprintf(file, "#include \"%s/entry.h\"\n#line 1 \"name expressions\"\n", HEADERS);
    for (int i = 0; i < p->count; i++) fprintf(file, "HIPHOST_KERNEL(%s, %s)\n", p->lowered[i], p->expressions[i]);
    return !fclose(file);
}

/* Runs a command with all its output in a file; whether it succeeded. */
static int succeeds(char *const *command, const char *output) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, output, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t child;
    int status = -1;
    if (!posix_spawn(&child, command[0], &actions, NULL, command, environ))
        while (waitpid(child, &status, 0) < 0 && status == -1) {}
    posix_spawn_file_actions_destroy(&actions);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static int begins(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

/* The compiler's command line; those of hipRTC's options that matter to it are handed on. */
static int command_line(const char **command, int count, const char **options, const char *source, const char *image) {
    const char *fixed[] = {COMPILER, "-std=c++17", "-O2", "-shared", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden",
                           "-w", "-pthread", "-include", HEADERS "/prelude.h", source, "-o", image};
    int n = 0;
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) command[n++] = fixed[i];
    for (int i = 0; i < count; i++) {
        if (begins(options[i], "--offload-arch=") || begins(options[i], "--gpu-architecture=")) continue;
        if (!begins(options[i], "--std=") && (options[i][0] != '-' || !strchr("DIUOWfms", options[i][1]))) return 0;
        command[n++] = options[i];
    }
    command[n] = NULL;
    return 1;
}

API hiprtcResult hiprtcCompileProgram(program_t *p, int count, const char **options) {
    if (!p) return HIPRTC_ERROR_INVALID_PROGRAM;
    char folder[256], source[300], image[300], log[300];
    const char *command[32 + MAX_OPTIONS], *temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/hiprtc-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder)) return HIPRTC_ERROR_INTERNAL_ERROR;
    snprintf(source, sizeof source, "%s/source.cpp", folder);
    snprintf(image, sizeof image, "%s/image.so", folder);
    snprintf(log, sizeof log, "%s/log", folder);
    hiprtcResult result = HIPRTC_ERROR_INTERNAL_ERROR;
    if (count > MAX_OPTIONS || !command_line(command, count, options, source, image)) {
        result = HIPRTC_ERROR_INVALID_OPTION;
    } else if (write_source(p, source)) {
        p->compiled = succeeds((char *const *)command, log);
        size_t bytes = 0;
        char *text = slurp(log, &bytes);
        if (text) free(p->log), p->log = text, p->log_bytes = bytes + 1;
        if (p->compiled) free(p->image), p->image = slurp(image, &p->image_bytes);
        result = p->compiled && p->image ? HIPRTC_SUCCESS : HIPRTC_ERROR_COMPILATION;
    }
    unlink(source), unlink(image), unlink(log), rmdir(folder);
    return result;
}

API hiprtcResult hiprtcGetProgramLogSize(program_t *p, size_t *bytes) {
    if (!p) return HIPRTC_ERROR_INVALID_PROGRAM;
    *bytes = p->log_bytes;
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcGetProgramLog(program_t *p, char *log) {
    if (!p) return HIPRTC_ERROR_INVALID_PROGRAM;
    memcpy(log, p->log, p->log_bytes);
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcGetCodeSize(program_t *p, size_t *bytes) {
    if (!p || !p->image) return HIPRTC_ERROR_INVALID_PROGRAM;
    *bytes = p->image_bytes;
    return HIPRTC_SUCCESS;
}

API hiprtcResult hiprtcGetCode(program_t *p, char *code) {
    if (!p || !p->image) return HIPRTC_ERROR_INVALID_PROGRAM;
    memcpy(code, p->image, p->image_bytes);
    return HIPRTC_SUCCESS;
}
