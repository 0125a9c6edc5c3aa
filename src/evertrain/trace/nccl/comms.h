/* Which communicators are open? Their context, as NCCL keeps it, is a number like a handle. */
#ifndef EVERTRAIN_COMMS_H
#define EVERTRAIN_COMMS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EV_COMMS 4096u

struct ev_comm {
    _Atomic uint32_t use;
    _Atomic bool open;
    uint16_t api;
    int32_t of_rank, ranks, nodes;
    uint32_t mask, version;
    uint64_t hash, t, t_end;
    char name[40];
    _Atomic uint64_t order;         /* operations begun */
    _Atomic uint32_t *pairs;        /* point-to-point begun, by peer: sent to it, received from it */
    uint64_t newest_ended;          /* sampler's: highest order of a collective that was seen to end */
    uint32_t place;                 /* sampler's: in the table */
    bool is_told;                   /* sampler's */
};
extern struct ev_comm ev_comms[EV_COMMS];

/* These two under the lock of sampler.h; null: there are too many. */
struct ev_comm *ev_comm_take(void);
void ev_comm_drop(struct ev_comm *comm);

static inline void *ev_comm_context(struct ev_comm *comm) {
    uint64_t use = atomic_load_explicit(&comm->use, memory_order_relaxed);
    return (void *)(uintptr_t)(use << 16 | (uint64_t)(comm - ev_comms + 1));
}
static inline struct ev_comm *ev_comm_find(void *context) {
    uint64_t number = (uint64_t)(uintptr_t)context, at = (number & 0xffff) - 1;
    if (at >= EV_COMMS || !atomic_load_explicit(&ev_comms[at].open, memory_order_acquire))
        return NULL;
    return atomic_load_explicit(&ev_comms[at].use, memory_order_relaxed) == number >> 16 ? &ev_comms[at] : NULL;
}
#endif
