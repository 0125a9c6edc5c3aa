#include "pool.h"

#include <stddef.h>
#include <sys/mman.h>

struct ev_pool ev_pool;

bool ev_pool_open(void) {
    if (!ev_pool.objects) {
        /* pages that no operation has needed yet cost nothing */
        void *found = mmap(NULL, EV_POOL * sizeof(struct ev_object), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED)
            return false;
        ev_pool.objects = found;
    }
    atomic_store_explicit(&ev_pool.limit, EV_POOL, memory_order_release);
    return true;
}

/* The head of the list of free places carries a count, so that a place that went and came back meanwhile is noticed. */
struct ev_object *ev_pool_take(uint32_t *at) {
    if (!atomic_load_explicit(&ev_pool.limit, memory_order_acquire))
        return NULL;
    uint64_t head = atomic_load_explicit(&ev_pool.free_head, memory_order_acquire);
    while ((uint32_t)head) {
        uint32_t first = (uint32_t)head - 1;
        uint32_t next = atomic_load_explicit(&ev_pool.free_next[first], memory_order_relaxed);
        if (atomic_compare_exchange_weak_explicit(&ev_pool.free_head, &head, ((head >> 32) + 1) << 32 | next,
                                                  memory_order_acquire, memory_order_acquire)) {
            *at = first;
            return &ev_pool.objects[first];
        }
    }
    uint32_t used = atomic_load_explicit(&ev_pool.used, memory_order_relaxed);
    while (used < EV_POOL)
        if (atomic_compare_exchange_weak_explicit(&ev_pool.used, &used, used + 1, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *at = used;
            struct ev_object *object = &ev_pool.objects[used];
            /* no handle is 0 in its upper half */
            atomic_store_explicit(&object->use, 1, memory_order_relaxed);
            return object;
        }
    atomic_fetch_add_explicit(&ev_pool.lost, 1, memory_order_relaxed);
    return NULL;
}

void ev_pool_retire(uint32_t at) {
    atomic_store_explicit(&ev_pool.taken[at], 0, memory_order_relaxed);
    struct ev_object *object = &ev_pool.objects[at];
    uint32_t use = atomic_load_explicit(&object->use, memory_order_relaxed) + 1;
    atomic_store_explicit(&object->use, use ? use : 1, memory_order_relaxed);
}

void ev_pool_give_back(uint32_t at) {
    uint64_t head = atomic_load_explicit(&ev_pool.free_head, memory_order_relaxed);
    do
        atomic_store_explicit(&ev_pool.free_next[at], (uint32_t)head, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&ev_pool.free_head, &head, ((head >> 32) + 1) << 32 | (at + 1),
                                                  memory_order_release, memory_order_relaxed));
}
