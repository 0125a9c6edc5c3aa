/* What happens in NCCL's callbacks, for all versions of the interface: counters, no lock, no clock in a step. */
#ifndef EVERTRAIN_EVENTS_H
#define EVERTRAIN_EVENTS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "pool.h"

struct ev_coll {
    uint64_t seq;
    const char *func, *datatype, *algo;
    size_t count;
    uint8_t channels;
};
struct ev_p2p {
    const char *func, *datatype;
    size_t count;
    int peer;
};

void *ev_begin_coll(void *context, void *parent, const struct ev_coll *coll);
void *ev_begin_p2p(void *context, void *parent, const struct ev_p2p *p2p);
void *ev_begin_flow(void *context, void *parent, const struct nccl_proxy_op *op);
void *ev_begin_kernel(void *parent, uint8_t channel);
void ev_record_state(uint64_t handle, ncclProfilerEventState_t state);
void ev_end(uint64_t handle);

static inline void *ev_api(bool graph_captured) {
    return (void *)(uintptr_t)ev_handle(EV_API, 0, graph_captured, 1);
}

/* One thread writes such a counter, others may read it. */
static inline void ev_count(_Atomic uint32_t *counter) {
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* NCCL begins a receiving step anew each time it asks for a request in vain: the same step is the same handle. */
static inline void *ev_begin_step(void *parent, int step) {
    uint64_t of = (uint64_t)(uintptr_t)parent;
    if (ev_kind(of) != EV_SEND && ev_kind(of) != EV_RECV)
        return NULL;
    struct ev_object *object = ev_pool_find(of);
    if (!object)
        return NULL;
    struct ev_flow *flow = &object->as_flow;
    uint32_t part = (uint32_t)step % EV_STEPS;
    _Atomic uint64_t *slot = &flow->steps[part];
    uint64_t number = (uint64_t)(uint32_t)step + 1;
    if (atomic_load_explicit(slot, memory_order_relaxed) >> 8 != number) {
        atomic_store_explicit(slot, number << 8 | EV_STEP_BEGUN, memory_order_relaxed);
        ev_count(&flow->begun);
        atomic_store_explicit(&flow->moves, true, memory_order_relaxed);
    }
    /* from kind EV_SEND to EV_SEND_STEP */
    return (void *)(uintptr_t)(of + 2 + (part << 4));
}

static inline void ev_record_send(uint64_t handle, ncclProfilerEventState_t state, size_t bytes) {
    struct ev_object *object = ev_pool_find(handle);
    if (!object)
        return;
    struct ev_flow *flow = &object->as_flow;
    _Atomic uint64_t *slot = &flow->steps[ev_part(handle) % EV_STEPS];
    uint64_t word = atomic_load_explicit(slot, memory_order_relaxed);
    uint32_t before = (uint32_t)word & 255;
    if (before == (uint32_t)state)
        return; /* SendPeerWait comes with every look at the peer */
    if (before == EV_STEP_CLOSED || before == ncclProfilerProxyStepSendWait)
        return;
    if (state == ncclProfilerProxyStepSendPeerWait_v4) {
        ev_count(&flow->ready);
    } else if (state == ncclProfilerProxyStepSendWait) {
        if (before != ncclProfilerProxyStepSendPeerWait_v4)
            ev_count(&flow->ready);
        ev_count(&flow->transmitted);
        atomic_store_explicit(&flow->bytes, atomic_load_explicit(&flow->bytes, memory_order_relaxed) + bytes,
                              memory_order_relaxed);
    } else if (state != ncclProfilerProxyStepSendGPUWait || before != EV_STEP_BEGUN) {
        return;
    }
    atomic_store_explicit(slot, (word & ~255ull) | (uint32_t)state, memory_order_relaxed);
}

static inline void ev_record_receive(uint64_t handle, ncclProfilerEventState_t state, size_t bytes) {
    struct ev_object *object = ev_pool_find(handle);
    if (!object)
        return;
    struct ev_flow *flow = &object->as_flow;
    _Atomic uint64_t *slot = &flow->steps[ev_part(handle) % EV_STEPS];
    uint64_t word = atomic_load_explicit(slot, memory_order_relaxed);
    uint32_t before = (uint32_t)word & 255;
    /* the numbers of these three rise */
    if (before == (uint32_t)state || before == EV_STEP_CLOSED || state < ncclProfilerProxyStepRecvWait ||
        state > ncclProfilerProxyStepRecvGPUWait || (before != EV_STEP_BEGUN && before > (uint32_t)state))
        return;
    if (before == EV_STEP_BEGUN)
        ev_count(&flow->ready);
    if (state >= ncclProfilerProxyStepRecvFlushWait && before != ncclProfilerProxyStepRecvFlushWait) {
        ev_count(&flow->received);
        atomic_store_explicit(&flow->bytes, atomic_load_explicit(&flow->bytes, memory_order_relaxed) + bytes,
                              memory_order_relaxed);
    }
    if (state == ncclProfilerProxyStepRecvGPUWait)
        ev_count(&flow->transmitted);
    atomic_store_explicit(slot, (word & ~255ull) | (uint32_t)state, memory_order_relaxed);
}

static inline void ev_end_step(uint64_t handle) {
    struct ev_object *object = ev_pool_find(handle);
    if (!object)
        return;
    _Atomic uint64_t *slot = &object->as_flow.steps[ev_part(handle) % EV_STEPS];
    uint64_t word = atomic_load_explicit(slot, memory_order_relaxed);
    if ((word & 255) == EV_STEP_CLOSED)
        return;
    atomic_store_explicit(slot, word & ~255ull, memory_order_relaxed);
    ev_count(&object->as_flow.ended);
}
#endif
