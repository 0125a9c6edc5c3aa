/* NCCL's side of the profiler interface, the same for each version: what the driver's scenes call.
 *
 * Descriptors are poisoned before the selected member is filled, as they are uninitialised memory in NCCL; header
 * fields that NCCL leaves zero stay zero. Any error that the plugin returns ends the driver. */
#ifndef EVERTRAIN_PLAY_H
#define EVERTRAIN_PLAY_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

struct coll {
    const char *func, *datatype, *algo;
    uint64_t seq, count;
    uint8_t channels;
};
struct flow {
    int pid, channel, peer, steps, sends;
};

struct player {
    int version;
    void *(*init)(uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank);
    void *(*coll)(void *ctx, void *parent, const struct coll *coll);
    void *(*p2p)(void *ctx, void *parent, const char *func, const char *datatype, uint64_t count, int peer);
    void *(*flow)(void *ctx, void *parent, const struct flow *flow);
    void *(*step)(void *ctx, void *parent, int step);
    void *(*kernel)(void *ctx, void *parent, int channel);
    void *(*api)(void *ctx, int captured);
    void *(*other)(void *ctx, uint64_t type);
    void (*state)(void *handle, int state, size_t bytes);
    void (*bare_state)(void *handle, int state);
    void (*stop)(void *handle);
    void (*finalize)(void *ctx);
};

/* Exits with 3 where the library exports none of the versions that were checked. */
struct player *player_load(const char *library, int version);
#endif
