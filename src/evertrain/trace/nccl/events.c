#include "events.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comms.h"
#include "record.h"

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint8_t op_of(const char *func) {
    static const struct {
        const char *name;
        uint8_t op;
    } known[] = {
        {"AllReduce", EV_OP_ALL_REDUCE}, {"AllGather", EV_OP_ALL_GATHER}, {"ReduceScatter", EV_OP_REDUCE_SCATTER},
        {"Broadcast", EV_OP_BROADCAST},  {"Reduce", EV_OP_REDUCE},        {"AlltoAll", EV_OP_ALL_TO_ALL},
        {"AllToAll", EV_OP_ALL_TO_ALL},  {"Gather", EV_OP_GATHER},        {"Scatter", EV_OP_SCATTER},
        {"Send", EV_OP_SEND},            {"Recv", EV_OP_RECV},
    };
    for (size_t at = 0; func && at < sizeof known / sizeof *known; at++)
        if (!strcmp(func, known[at].name))
            return known[at].op;
    return EV_OP_OTHER;
}

/* "ncclBfloat16", "ncclFloat8e4m3": the first number in the name counts bits. */
static size_t size_of(const char *datatype) {
    while (datatype && *datatype && !isdigit((unsigned char)*datatype))
        datatype++;
    long bits = datatype && *datatype ? strtol(datatype, NULL, 10) : 0;
    return bits >= 8 && bits <= 128 ? (size_t)bits / 8 : 1;
}

static bool is_captured(void *parent) {
    uint64_t handle = (uint64_t)(uintptr_t)parent;
    return ev_kind(handle) == EV_API && ev_part(handle);
}

static struct ev_object *begin(struct ev_comm *comm, uint32_t *at) {
    struct ev_object *object = ev_pool_take(at);
    if (object) {
        object->comm = comm ? (uint16_t)(comm - ev_comms + 1) : 0;
        object->flags = 0;
        object->seq = object->order = 0;
        object->t_posted = now_ns();
    }
    return object;
}

static void *begin_op(struct ev_comm *comm, struct ev_object *object, uint32_t at, void *parent) {
    struct ev_op *op = &object->as_op;
    if (is_captured(parent))
        object->flags |= EV_GRAPH;
    object->order = atomic_fetch_add_explicit(&comm->order, 1, memory_order_relaxed) + 1;
    atomic_store_explicit(&op->enqueued, false, memory_order_relaxed);
    atomic_store_explicit(&op->kernels_begun, 0, memory_order_relaxed);
    atomic_store_explicit(&op->kernels_ended, 0, memory_order_relaxed);
    atomic_store_explicit(&op->t_kernel, 0, memory_order_relaxed);
    atomic_store_explicit(&op->t_kernel_end, 0, memory_order_relaxed);
    atomic_store_explicit(&op->t_last, object->t_posted, memory_order_relaxed);
    atomic_store_explicit(&op->flows_begun, 0, memory_order_relaxed);
    atomic_store_explicit(&op->flows_ended, 0, memory_order_relaxed);
    ev_pool_publish(at, EV_OP);
    return (void *)(uintptr_t)ev_handle(EV_OP, at, 0, atomic_load_explicit(&object->use, memory_order_relaxed));
}

void *ev_begin_coll(void *context, void *parent, const struct ev_coll *coll) {
    struct ev_comm *comm = ev_comm_find(context);
    uint32_t at;
    struct ev_object *object = comm ? begin(comm, &at) : NULL;
    if (!object)
        return NULL;
    object->op = op_of(coll->func);
    object->seq = coll->seq;
    /* a chain or a tree passes on what it gets; in a ring of these three every rank begins with data of its own */
    bool own_first = object->op == EV_OP_ALL_REDUCE || object->op == EV_OP_ALL_GATHER ||
                     object->op == EV_OP_REDUCE_SCATTER;
    if (own_first && coll->algo && !strcasecmp(coll->algo, "RING"))
        object->flags |= EV_RING;
    object->as_op.peer = EV_NOBODY;
    object->as_op.channels = coll->channels;
    object->as_op.channels_hold = coll->channels > 0 && coll->channels <= 64;
    object->as_op.bytes = coll->count * size_of(coll->datatype);
    return begin_op(comm, object, at, parent);
}

void *ev_begin_p2p(void *context, void *parent, const struct ev_p2p *p2p) {
    struct ev_comm *comm = ev_comm_find(context);
    uint32_t at;
    struct ev_object *object = comm ? begin(comm, &at) : NULL;
    if (!object)
        return NULL;
    object->op = op_of(p2p->func);
    object->flags |= EV_POINT_TO_POINT;
    if (comm->pairs && p2p->peer >= 0 && p2p->peer < comm->ranks)
        object->seq = atomic_fetch_add_explicit(&comm->pairs[2 * p2p->peer + (object->op == EV_OP_RECV)], 1,
                                                memory_order_relaxed) + 1;
    object->as_op.peer = p2p->peer;
    /* up to 2.30 the number that NCCL gives is too large, through its shim for version 4 it is not set at all */
    object->as_op.channels = 0;
    object->as_op.channels_hold = false;
    object->as_op.bytes = p2p->count * size_of(p2p->datatype);
    return begin_op(comm, object, at, parent);
}

void *ev_begin_flow(void *context, void *parent, const struct nccl_proxy_op *given) {
    /* served for another process (PXN): context and parent are its, not ours */
    bool foreign = given->pid != getpid();
    struct ev_comm *comm = foreign ? NULL : ev_comm_find(context);
    if (!comm && !foreign)
        return NULL;
    uint32_t at;
    struct ev_object *object = begin(comm, &at);
    if (!object)
        return NULL;
    static __thread uint32_t thread;
    if (!thread)
        thread = (uint32_t)syscall(SYS_gettid);
    struct ev_flow *flow = &object->as_flow;
    object->op = EV_OP_OTHER;
    flow->parent = 0;
    uint64_t of = (uint64_t)(uintptr_t)parent;
    struct ev_object *op = !foreign && ev_kind(of) == EV_OP ? ev_pool_find(of) : NULL;
    if (op) {
        flow->parent = of;
        object->op = op->op;
        object->flags = op->flags;
        object->seq = op->seq;
        object->order = op->order;
        atomic_fetch_add_explicit(&op->as_op.flows_begun, 1, memory_order_relaxed);
        atomic_store_explicit(&op->as_op.t_last, object->t_posted, memory_order_relaxed);
    }
    if (foreign) {
        object->flags |= EV_FOREIGN;
        object->order = (uint64_t)given->pid;
    }
    flow->peer = given->peer;
    flow->pid = foreign ? given->pid : 0;
    flow->total = given->nSteps > 0 ? (uint32_t)given->nSteps : 0;
    flow->thread = thread;
    flow->channel = given->channelId;
    flow->sends = given->isSend != 0;
    atomic_store_explicit(&flow->t_end, 0, memory_order_relaxed);
    atomic_store_explicit(&flow->moves, false, memory_order_relaxed);
    atomic_store_explicit(&flow->begun, 0, memory_order_relaxed);
    atomic_store_explicit(&flow->ready, 0, memory_order_relaxed);
    atomic_store_explicit(&flow->transmitted, 0, memory_order_relaxed);
    atomic_store_explicit(&flow->received, 0, memory_order_relaxed);
    atomic_store_explicit(&flow->ended, 0, memory_order_relaxed);
    atomic_store_explicit(&flow->bytes, 0, memory_order_relaxed);
    for (uint32_t part = 0; part < EV_STEPS; part++)
        atomic_store_explicit(&flow->steps[part], 0, memory_order_relaxed);
    enum ev_handle_kind kind = flow->sends ? EV_SEND : EV_RECV;
    ev_pool_publish(at, kind);
    return (void *)(uintptr_t)ev_handle(kind, at, 0, atomic_load_explicit(&object->use, memory_order_relaxed));
}

static void note_kernel(struct ev_op *op, uint32_t channel, bool ends) {
    uint64_t now = now_ns(), bit = 1ull << channel, unset = 0;
    /* an end without a beginning began, too: the two may come in either order */
    atomic_fetch_or_explicit(&op->kernels_begun, bit, memory_order_relaxed);
    atomic_compare_exchange_strong_explicit(&op->t_kernel, &unset, now, memory_order_relaxed, memory_order_relaxed);
    if (ends) {
        atomic_store_explicit(&op->t_kernel_end, now, memory_order_relaxed);
        atomic_fetch_or_explicit(&op->kernels_ended, bit, memory_order_relaxed);
    }
    atomic_store_explicit(&op->t_last, now, memory_order_relaxed);
}

void *ev_begin_kernel(void *parent, uint8_t channel) {
    uint64_t of = (uint64_t)(uintptr_t)parent;
    struct ev_object *object = ev_kind(of) == EV_OP && channel < 64 ? ev_pool_find(of) : NULL;
    if (!object)
        return NULL;
    note_kernel(&object->as_op, channel, false);
    return (void *)(uintptr_t)ev_handle(EV_KERNEL, ev_at(of), channel, (uint32_t)(of >> 32));
}

void ev_record_state(uint64_t handle, ncclProfilerEventState_t state) {
    struct ev_object *object = ev_pool_find(handle);
    if (!object)
        return;
    if (ev_kind(handle) == EV_KERNEL && state == ncclProfilerKernelChStop)
        note_kernel(&object->as_op, ev_part(handle), true);
    else if ((ev_kind(handle) == EV_SEND || ev_kind(handle) == EV_RECV) && state == ncclProfilerProxyOpInProgress_v4)
        atomic_store_explicit(&object->as_flow.moves, true, memory_order_relaxed);
}

void ev_end(uint64_t handle) {
    struct ev_object *object = ev_kind(handle) == EV_API ? NULL : ev_pool_find(handle);
    if (!object)
        return;
    switch (ev_kind(handle)) {
    case EV_OP: /* enqueued, no more than that */
        atomic_store_explicit(&object->as_op.enqueued, true, memory_order_relaxed);
        break;
    case EV_SEND:
    case EV_RECV: {
        struct ev_flow *flow = &object->as_flow;
        if (atomic_load_explicit(&flow->t_end, memory_order_relaxed))
            break;
        uint64_t now = now_ns();
        struct ev_object *op = flow->parent ? ev_pool_find(flow->parent) : NULL;
        if (op) {
            atomic_fetch_add_explicit(&op->as_op.flows_ended, 1, memory_order_relaxed);
            atomic_store_explicit(&op->as_op.t_last, now, memory_order_relaxed);
        }
        /* the sampler may give it back from here on */
        atomic_store_explicit(&flow->t_end, now, memory_order_release);
        break;
    }
    case EV_KERNEL:
        note_kernel(&object->as_op, ev_part(handle), true);
        break;
    default:
        break;
    }
}
