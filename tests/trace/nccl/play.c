#include "play.h"

#include <dlfcn.h>
#include <stdarg.h>

static void check(ncclResult_t result) {
    if (result != ncclSuccess) {
        fprintf(stderr, "the plugin returned %d\n", (int)result);
        exit(2);
    }
}

static void said(ncclDebugLogLevel level, unsigned long flags, const char *file, int line, const char *fmt, ...) {
    va_list rest;
    va_start(rest, fmt);
    fprintf(stderr, "NCCL %d %#lx %s:%d ", (int)level, flags, file, line);
    vfprintf(stderr, fmt, rest);
    fprintf(stderr, "\n");
    va_end(rest);
}

#define V v4
#define NUMBER 4
#include "play_version.h"
#define V v5
#define NUMBER 5
#include "play_version.h"
#define V v6
#define NUMBER 6
#include "play_version.h"

struct player *player_load(const char *file, int version) {
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    struct player *player = version == 4 ? &v4_player : version == 5 ? &v5_player : version == 6 ? &v6_player : NULL;
    v4_plugin = version == 4 ? dlsym(library, "ncclProfiler_v4") : NULL;
    v5_plugin = version == 5 ? dlsym(library, "ncclProfiler_v5") : NULL;
    v6_plugin = version == 6 ? dlsym(library, "ncclProfiler_v6") : NULL;
    if (!v4_plugin && !v5_plugin && !v6_plugin) {
        fprintf(stderr, "%s exports no version %d\n", file, version);
        exit(3);
    }
    return player;
}
