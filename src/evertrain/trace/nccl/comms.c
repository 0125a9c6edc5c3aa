#include "comms.h"

#include <stdlib.h>
#include <string.h>

struct ev_comm ev_comms[EV_COMMS];

struct ev_comm *ev_comm_take(void) {
    for (struct ev_comm *comm = ev_comms; comm < ev_comms + EV_COMMS; comm++)
        if (!atomic_load_explicit(&comm->open, memory_order_relaxed)) {
            atomic_fetch_add_explicit(&comm->use, 1, memory_order_relaxed);
            atomic_store_explicit(&comm->order, 0, memory_order_relaxed);
            comm->newest_ended = comm->t_end = 0;
            comm->place = 0;
            comm->is_told = false;
            comm->pairs = NULL;
            return comm;
        }
    return NULL;
}

void ev_comm_drop(struct ev_comm *comm) {
    atomic_store_explicit(&comm->open, false, memory_order_release);
    free((void *)comm->pairs);
    comm->pairs = NULL;
}
