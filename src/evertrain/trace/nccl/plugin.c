/* NCCL's profiler plugin of evertrain: where communicators come and go, and what is exported.
 *
 * NCCL calls `init` once for each communicator, then the other functions from its launching, proxy and profiler threads.
 * What happens there is in events.h; what is written to the file, and when, in sampler.c. The environment says where the
 * file goes: EVERTRAIN_TRACE_RING (its path up to `-nccl-PID.ring`), EVERTRAIN_TRACE_BYTES, and for the header
 * EVERTRAIN_TRACE_NODE, _JOB, _TERM, _ATTEMPT, RANK and LOCAL_RANK. Without a file no event is asked for.
 *
 * Linked with -z nodelete: NCCL unloads its plugin with the last communicator, and the thread stays. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "comms.h"
#include "events.h"
#include "pool.h"
#include "ring.h"
#include "sampler.h"

#define EV_EXPORT __attribute__((visibility("default")))
#define EV_FLOWS (ncclProfileColl | ncclProfileP2p | ncclProfileProxyOp | ncclProfileProxyStep)
#define KERNELS_TOO_DEAR 23100 /* from this version on they cost 4 to 13 % of small operations */

struct ev_wanted {
    uint16_t api;
    uint32_t mask;
    uint64_t hash;
    const char *name;
    int nodes, ranks, rank;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Of the library that has called us; 0: it cannot be told. */
static uint32_t nccl_version(void) {
    void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
    ncclResult_t (*ask)(int *) = NULL;
    *(void **)&ask = dlsym(library ? library : RTLD_DEFAULT, "ncclGetVersion");
    int version = 0;
    if (ask && ask(&version) != ncclSuccess)
        version = 0;
    if (library)
        dlclose(library);
    return version > 0 ? (uint32_t)version : 0;
}

static uint32_t mask_for(const struct ev_wanted *wanted, uint32_t version) {
    const char *kernels = getenv("EVERTRAIN_NCCL_KERNELS");
    if (kernels && *kernels == '1')
        return wanted->mask | ncclProfileKernelCh;
    if ((kernels && *kernels == '0') || version >= KERNELS_TOO_DEAR)
        return wanted->mask & ~(uint32_t)ncclProfileKernelCh;
    return wanted->mask;
}

/* A forked child of the rank, as a data loader's worker, has none of this until it joins a communicator itself. */
static void in_child(void) {
    atomic_store_explicit(&ev_pool.limit, 0, memory_order_relaxed);
    atomic_store_explicit(&ev_pool.used, 0, memory_order_relaxed);
    atomic_store_explicit(&ev_pool.free_head, 0, memory_order_relaxed);
    atomic_store_explicit(&ev_pool.lost, 0, memory_order_relaxed);
    for (uint32_t at = 0; at < EV_POOL; at++)
        atomic_store_explicit(&ev_pool.taken[at], 0, memory_order_relaxed);
    for (struct ev_comm *comm = ev_comms; comm < ev_comms + EV_COMMS; comm++)
        atomic_store_explicit(&comm->open, false, memory_order_relaxed);
    ev_ring_forget();
    ev_sampler_forget();
}

/* Everything that is needed once; under the lock. Says why where there is no trace. */
static bool prepare(char *why, size_t why_bytes) {
    static bool watches_forks;
    if (ev_ring_is_open())
        return true;
    if (!ev_pool_open() || !ev_ring_open(why, why_bytes))
        return false;
    if (!watches_forks)
        watches_forks = pthread_atfork(NULL, NULL, in_child) == 0;
    if (ev_sampler_start())
        return true;
    snprintf(why, why_bytes, "no thread could be started");
    return false;
}

static void ev_join(void **ctx, int *mask, const struct ev_wanted *wanted, ncclDebugLogger_t log) {
    char why[4300] = "no memory";
    *ctx = NULL;
    ev_lock();
    bool ready = prepare(why, sizeof why);
    struct ev_comm *comm = ready ? ev_comm_take() : NULL;
    if (comm) {
        comm->api = wanted->api;
        comm->hash = wanted->hash;
        comm->nodes = wanted->nodes;
        comm->ranks = wanted->ranks;
        comm->of_rank = wanted->rank;
        comm->t = now_ns();
        comm->version = nccl_version();
        comm->mask = mask_for(wanted, comm->version);
        memset(comm->name, 0, sizeof comm->name);
        if (wanted->name)
            memcpy(comm->name, wanted->name, strnlen(wanted->name, sizeof comm->name));
        if (wanted->ranks > 0)
            comm->pairs = calloc(2 * (size_t)wanted->ranks, sizeof *comm->pairs);
        *ctx = ev_comm_context(comm);
        *mask = (int)comm->mask;
        atomic_store_explicit(&comm->open, true, memory_order_release);
        ev_sampler_wake();
    } else if (!ready) {
        *mask = 0;
    }
    ev_unlock();
    if (!log)
        return;
    if (comm)
        log(NCCL_LOG_INFO, NCCL_INIT, "evertrain", 0, "evertrain traces communicator %#llx, events %#x",
            (unsigned long long)wanted->hash, (unsigned)*mask);
    else
        log(NCCL_LOG_INFO, NCCL_INIT, "evertrain", 0, "evertrain is blind: %s",
            ready ? "too many communicators" : why);
}

static void ev_leave(void *ctx) {
    struct ev_comm *comm = ev_comm_find(ctx);
    if (!comm)
        return;
    ev_lock();
    ev_sampler_close(comm);
    ev_comm_drop(comm);
    ev_unlock();
}

#define EV_SYMBOL_(v) ncclProfiler_##v
#define EV_SYMBOL(v) EV_SYMBOL_(v)
#define EV_BITS_4 EV_NCCL_V4_BITS
#define EV_BITS_5 EV_NCCL_V5_BITS
#define EV_BITS_6 EV_NCCL_V6_BITS

/* NCCL 2.27 uses this one, and fails in all-to-all when kernels are asked for: "Proxy append out of bounds". */
#define EV_V v4
#define EV_NUMBER 4
#define EV_MASK EV_FLOWS
#include "versions.h"

#define EV_V v5
#define EV_NUMBER 5
#define EV_MASK (EV_FLOWS | ncclProfileKernelCh)
#include "versions.h"

#define EV_V v6
#define EV_NUMBER 6
#define EV_MASK (EV_FLOWS | ncclProfileKernelCh)
#include "versions.h"
