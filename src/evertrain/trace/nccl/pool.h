/* Where do operations and flows live while they are open, and what is a handle?
 *
 * A fixed number of equal objects, taken from any thread without a lock and given back by the sampler alone. A handle
 * that NCCL keeps for us is a number, never a pointer: kind, place in the pool, and which use of that place is meant. One
 * that is stale, foreign or null is found out before anything is touched, whatever NCCL does with it. */
#ifndef EVERTRAIN_POOL_H
#define EVERTRAIN_POOL_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EV_POOL 32768u
#define EV_STEPS 16u /* NCCL keeps at most 8 open in a flow */

enum ev_handle_kind {
    EV_OP = 1,    /* collective, or one end of a point-to-point */
    EV_SEND = 2,  /* ProxyOp */
    EV_RECV = 3,
    EV_SEND_STEP = 4,
    EV_RECV_STEP = 5,
    EV_KERNEL = 6,
    EV_API = 7 /* no object: says only whether a graph is being captured */
};

/* kind in 4 bits, part (channel or step) in 6, place in 22, use of the place in 32 */
static inline uint64_t ev_handle(enum ev_handle_kind kind, uint32_t at, uint32_t part, uint32_t use) {
    return (uint64_t)use << 32 | (uint64_t)at << 10 | (uint64_t)part << 4 | (uint64_t)kind;
}
static inline enum ev_handle_kind ev_kind(uint64_t handle) { return (enum ev_handle_kind)(handle & 15); }
static inline uint32_t ev_part(uint64_t handle) { return (uint32_t)handle >> 4 & 63; }
static inline uint32_t ev_at(uint64_t handle) { return (uint32_t)handle >> 10; }

/* States of a step beside NCCL's own; in the low byte of a slot, its number above. */
#define EV_STEP_CLOSED 0u
#define EV_STEP_BEGUN 31u

struct ev_op {
    int32_t peer; /* of point-to-point, else EV_NOBODY */
    uint8_t channels;
    bool channels_hold; /* whether `channels` can be believed */
    uint64_t bytes;
    _Atomic bool enqueued;
    _Atomic uint64_t kernels_begun, kernels_ended; /* a bit a channel */
    _Atomic uint64_t t_kernel, t_kernel_end, t_last;
    _Atomic uint32_t flows_begun, flows_ended;
};

struct ev_flow {
    int32_t peer;
    int32_t pid; /* of whom it is served for, if it is not us; else 0 */
    uint32_t total;
    uint32_t thread;
    uint8_t channel;
    bool sends;
    uint64_t parent;
    _Atomic uint64_t t_end; /* 0: open */
    _Atomic bool moves; /* something was told of it: a transport that tells */
    /* written by the one proxy thread that serves it */
    _Atomic uint32_t begun, ready, transmitted, received, ended;
    _Atomic uint64_t bytes;
    _Atomic uint64_t steps[EV_STEPS];
};

struct ev_object {
    _Atomic uint32_t use;
    uint16_t comm; /* place of the communicator + 1; 0: not known */
    uint8_t op, flags;
    uint64_t seq, order, t_posted;
    union {
        struct ev_op as_op;
        struct ev_flow as_flow;
    };
} __attribute__((aligned(256)));
_Static_assert(sizeof(struct ev_object) == 256, "an object has 256 bytes");

struct ev_pool {
    struct ev_object *objects;
    _Atomic uint32_t limit; /* 0: closed, also in a forked child */
    _Atomic uint32_t used;  /* places that were ever taken */
    _Atomic uint64_t lost;  /* events there was no place for */
    _Atomic uint64_t free_head;
    _Atomic uint32_t free_next[EV_POOL];
    _Atomic uint8_t taken[EV_POOL]; /* kind of what is open there; 0: free */
};
extern struct ev_pool ev_pool;

bool ev_pool_open(void);
struct ev_object *ev_pool_take(uint32_t *at);
/* From the sampler only: the handles to it are stale from now on; its place may be given back later. */
void ev_pool_retire(uint32_t at);
void ev_pool_give_back(uint32_t at);

static inline void ev_pool_publish(uint32_t at, enum ev_handle_kind kind) {
    atomic_store_explicit(&ev_pool.taken[at], (uint8_t)kind, memory_order_release);
}

/* The object that a handle means, or null. */
static inline struct ev_object *ev_pool_find(uint64_t handle) {
    uint32_t at = ev_at(handle);
    if (at >= atomic_load_explicit(&ev_pool.limit, memory_order_relaxed))
        return NULL;
    struct ev_object *object = &ev_pool.objects[at];
    return atomic_load_explicit(&object->use, memory_order_relaxed) == handle >> 32 ? object : NULL;
}
#endif
