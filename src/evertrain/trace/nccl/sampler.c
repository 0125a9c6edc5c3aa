#include "sampler.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "abi.h"
#include "pool.h"
#include "ring.h"
#include "threads.h"

#define TICK_NS 100000000u
#define BUSY_TICK_NS 10000000u
#define REPEAT 10 /* ticks after which a state that has not changed is written to the ring again */
#define QUIET_NS 200000000u
#define LATE_NS 1000000000u /* something that should come, as the end of a kernel, is not waited for any longer */

/* What the sampler remembers of an object. */
struct memory {
    uint32_t use;
    uint32_t place; /* in the table of the file; 0: none */
    uint32_t mute;  /* of an operation: flows of which nothing was ever told, at this tick */
    uint32_t next;  /* in the list of places to give back, + 1 */
    uint64_t sum, t_change;
    uint8_t ticks;
    bool is_over, was_written;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake;
static bool is_running;
static struct memory memories[EV_POOL];
static uint32_t retired, retired_before;
static uint32_t oldest[EV_POOL]; /* flows that are open, for one tick */
static uint64_t ends;            /* objects that ended at this tick */

void ev_lock(void) { pthread_mutex_lock(&lock); }
void ev_unlock(void) { pthread_mutex_unlock(&lock); }

static uint64_t clock_ns(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
static uint64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static uint32_t get(const _Atomic uint32_t *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }
static uint64_t get64(const _Atomic uint64_t *value) { return atomic_load_explicit(value, memory_order_relaxed); }
static struct ev_comm *comm_of(const struct ev_object *object) {
    return object->comm ? &ev_comms[object->comm - 1] : NULL;
}
static uint64_t since(uint64_t now, uint64_t then) { return now > then ? now - then : 0; }

static struct memory *memory_of(uint32_t at) {
    uint32_t use = get(&ev_pool.objects[at].use);
    if (memories[at].use != use)
        memories[at] = (struct memory){.use = use};
    return &memories[at];
}

/* A tick passes before the place is used again: a callback may be on its way with the old handle. */
static void retire(uint32_t at) {
    struct memory *memory = memory_of(at);
    if (memory->place)
        ev_ring_free(memory->place);
    ev_pool_retire(at);
    *memory = (struct memory){.next = retired};
    retired = at + 1;
}

static void give_back(void) {
    for (uint32_t next; retired_before; retired_before = next) {
        next = memories[retired_before - 1].next;
        ev_pool_give_back(retired_before - 1);
    }
    retired_before = retired;
    retired = 0;
}

/* --- records */

static void describe(const struct ev_object *object, struct ev_operation *record, uint64_t now) {
    const struct ev_comm *comm = comm_of(object);
    record->op = object->op;
    record->flags = object->flags;
    record->device = ev_ring_device();
    record->rank = ev_ring_rank();
    record->comm = comm ? comm->hash : 0;
    record->seq = object->seq;
    record->order = object->order;
    record->t_posted = object->t_posted;
    record->t = now;
    record->total = record->ready = record->transmitted = record->done = record->received = record->consumed = EV_UNSEEN;
}

static void describe_op(const struct ev_object *object, struct ev_operation *record, uint64_t now) {
    const struct ev_op *op = &object->as_op;
    describe(object, record, now);
    record->channel = 0xffff;
    record->peer = op->peer;
    record->flow = EV_SIDE_WHOLE;
    record->bytes = op->bytes;
    record->t_wait = get64(&op->t_kernel);
    if (op->channels_hold)
        record->total = op->channels;
    if (comm_of(object)->mask & ncclProfileKernelCh) {
        record->ready = (uint32_t)__builtin_popcountll(get64(&op->kernels_begun));
        record->done = (uint32_t)__builtin_popcountll(get64(&op->kernels_ended));
    }
}

/* State of the oldest step that is open. */
static uint8_t head_of(const struct ev_flow *flow) {
    uint64_t oldest_step = ~0ull;
    for (uint32_t part = 0; part < EV_STEPS; part++) {
        uint64_t word = get64(&flow->steps[part]);
        if ((word & 255) != EV_STEP_CLOSED && word < oldest_step)
            oldest_step = word;
    }
    return oldest_step == ~0ull ? EV_HEAD_NONE : (uint8_t)oldest_step;
}

static void describe_flow(const struct ev_object *object, struct ev_operation *record, uint64_t now) {
    const struct ev_flow *flow = &object->as_flow;
    describe(object, record, now);
    record->channel = flow->channel;
    record->peer = flow->peer;
    record->flow = flow->sends ? EV_SIDE_SEND : EV_SIDE_RECEIVE;
    record->bytes = get64(&flow->bytes);
    record->total = flow->total;
    if (!atomic_load_explicit(&flow->moves, memory_order_relaxed))
        return;
    /* ended last, so that no reader finds more confirmed than sent */
    uint32_t ended = get(&flow->ended), received = get(&flow->received), transmitted = get(&flow->transmitted);
    record->ready = get(&flow->ready);
    record->transmitted = transmitted;
    if (flow->sends) {
        record->done = ended;
        record->head = head_of(flow);
    } else {
        record->received = received;
        record->consumed = ended;
        record->recv_head = head_of(flow);
    }
}

static uint64_t progress_of(const struct ev_operation *record) {
    return (uint64_t)record->ready * 3 + (uint64_t)record->transmitted * 5 + (uint64_t)record->done * 7 +
           (uint64_t)record->received * 11 + (uint64_t)record->consumed * 13 + record->bytes;
}

static void write_state(uint32_t at, union ev_record *record, uint64_t now, bool last) {
    struct memory *memory = memory_of(at);
    struct ev_operation *state = &record->operation;
    state->kind = EV_KIND_STATE;
    uint64_t sum = progress_of(state) * 64 + state->head + state->recv_head;
    bool changed = !memory->t_change || sum != memory->sum;
    if (!memory->t_change || sum / 64 != memory->sum / 64)
        memory->t_change = now;
    memory->sum = sum;
    uint64_t stuck_ms = (now - memory->t_change) / 1000000;
    state->stuck_ms = stuck_ms < UINT32_MAX ? (uint32_t)stuck_ms : UINT32_MAX;
    if (!memory->place)
        memory->place = ev_ring_place();
    if (memory->place)
        ev_ring_set(memory->place, record);
    /* what stands still stands in the table; the ring gets it once a second */
    if (changed || last || ++memory->ticks >= REPEAT) {
        memory->ticks = 0;
        ev_ring_append(record);
    }
}

static void write_done(uint32_t at, union ev_record *record, uint64_t t_done, uint8_t seen) {
    record->operation.kind = EV_KIND_DONE;
    record->operation.t_done = t_done;
    record->operation.seen = seen;
    ev_ring_append(record);
    struct memory *memory = memory_of(at);
    if (memory->place)
        ev_ring_free(memory->place);
    memory->place = 0;
    ends++;
}

static void write_comm(struct ev_comm *comm, uint64_t now) {
    union ev_record record = {.communicator = {
        .kind = EV_KIND_COMMUNICATOR, .device = ev_ring_device(), .rank = ev_ring_rank(), .peer = EV_NOBODY,
        .comm = comm->hash, .t = now, .t_end = comm->t_end, .of_rank = comm->of_rank, .ranks = comm->ranks,
        .nodes = comm->nodes, .api = comm->api, .mask = comm->mask, .version = comm->version,
    }};
    memcpy(record.communicator.name, comm->name, sizeof comm->name);
    ev_ring_append(&record);
    if (!comm->place)
        comm->place = ev_ring_place();
    if (comm->place && !comm->t_end)
        ev_ring_set(comm->place, &record);
    else if (comm->place)
        ev_ring_free(comm->place);
    comm->is_told = true;
}

/* --- a tick */

/* Flows of one communicator, channel, peer and direction follow each other: only the first of them can move. */
static int by_flow(const void *left, const void *right) {
    const struct ev_object *a = &ev_pool.objects[*(const uint32_t *)left];
    const struct ev_object *b = &ev_pool.objects[*(const uint32_t *)right];
#define EV_ORDER(what) \
    if (a->what != b->what) \
        return a->what < b->what ? -1 : 1
    EV_ORDER(comm);
    EV_ORDER(as_flow.pid);
    EV_ORDER(as_flow.channel);
    EV_ORDER(as_flow.peer);
    EV_ORDER(as_flow.sends);
    EV_ORDER(t_posted);
#undef EV_ORDER
    return 0;
}

static bool same_flow(uint32_t left, uint32_t right) {
    const struct ev_object *a = &ev_pool.objects[left], *b = &ev_pool.objects[right];
    return a->comm == b->comm && a->as_flow.pid == b->as_flow.pid && a->as_flow.channel == b->as_flow.channel &&
           a->as_flow.peer == b->as_flow.peer && a->as_flow.sends == b->as_flow.sends;
}

static void look_at_flow(uint32_t at, uint64_t now, uint32_t *open) {
    struct ev_object *object = &ev_pool.objects[at];
    struct ev_flow *flow = &object->as_flow;
    uint64_t t_end = atomic_load_explicit(&flow->t_end, memory_order_acquire);
    bool moves = atomic_load_explicit(&flow->moves, memory_order_relaxed);
    struct ev_object *parent = flow->parent ? ev_pool_find(flow->parent) : NULL;
    if (t_end) {
        if (moves) {
            union ev_record record = {0};
            describe_flow(object, &record.operation, now);
            write_done(at, &record, t_end, EV_SEEN_PROXY);
        }
        retire(at);
    } else if (!moves && flow->parent && !parent) {
        /* its operation is over; a transport that tells nothing of its flows (CollNet) never ends them either */
        retire(at);
    } else {
        if (!moves && parent)
            memory_of(ev_at(flow->parent))->mute++;
        oldest[(*open)++] = at;
    }
}

/* How it was seen that the operation is over; EV_SEEN_NOT: it is not. */
static uint8_t end_of(const struct ev_object *object, uint64_t now, uint32_t mute) {
    const struct ev_op *op = &object->as_op;
    const struct ev_comm *comm = comm_of(object);
    uint64_t begun = get64(&op->kernels_begun), ended = get64(&op->kernels_ended);
    uint32_t kernels = (uint32_t)__builtin_popcountll(ended);
    uint32_t flows_begun = get(&op->flows_begun), flows_ended = get(&op->flows_ended);
    uint64_t quiet = since(now, get64(&op->t_last));
    bool flows_over = flows_ended + mute >= flows_begun;
    if (op->channels_hold && kernels >= op->channels)
        return EV_SEEN_KERNEL;
    /* flows are handed to the proxy in batches, and none may be open between two of them: hence the wait */
    if (!atomic_load_explicit(&op->enqueued, memory_order_relaxed) || !flows_over || quiet < QUIET_NS)
        return EV_SEEN_NOT;
    if (!op->channels_hold && begun && begun == ended)
        return EV_SEEN_KERNEL;
    if (flows_ended && (begun == ended || quiet > LATE_NS))
        return EV_SEEN_PROXY;
    /* operations of a communicator run one after the other */
    if (begun && comm->newest_ended > object->order && quiet > LATE_NS && !(object->flags & EV_POINT_TO_POINT))
        return EV_SEEN_CALLBACK;
    return EV_SEEN_NOT;
}

static void look_at_op(uint32_t at, uint64_t now) {
    struct ev_object *object = &ev_pool.objects[at];
    struct ev_op *op = &object->as_op;
    struct ev_comm *comm = comm_of(object);
    struct memory *memory = memory_of(at);
    uint64_t quiet = since(now, get64(&op->t_last));
    uint32_t mute = memory->mute;
    memory->mute = 0;
    if (memory->is_over) {
        /* a child may come late; not for ever, and not where places are short */
        bool crowded = get(&ev_pool.used) > EV_POOL / 2;
        if (get(&op->flows_ended) + mute >= get(&op->flows_begun) && quiet > (crowded ? QUIET_NS : LATE_NS))
            retire(at);
        return;
    }
    union ev_record record = {0};
    describe_op(object, &record.operation, now);
    uint8_t seen = end_of(object, now, mute);
    bool nobody_tells = !(comm->mask & ncclProfileKernelCh) && !get(&op->flows_begun) && quiet > LATE_NS &&
                        atomic_load_explicit(&op->enqueued, memory_order_relaxed);
    if (seen != EV_SEEN_NOT || nobody_tells) {
        uint64_t t_kernel_end = get64(&op->t_kernel_end);
        if (nobody_tells)
            record.operation.flags |= EV_POSTED_ONLY;
        else if (!(object->flags & EV_POINT_TO_POINT) && object->order > comm->newest_ended)
            comm->newest_ended = object->order;
        write_done(at, &record, nobody_tells ? 0 : seen == EV_SEEN_KERNEL ? t_kernel_end : get64(&op->t_last), seen);
        memory->is_over = true;
        return;
    }
    write_state(at, &record, now, false);
}

static void tick(uint64_t now) {
    give_back();
    ends = 0;
    for (struct ev_comm *comm = ev_comms; comm < ev_comms + EV_COMMS; comm++)
        if (atomic_load_explicit(&comm->open, memory_order_acquire) && !comm->is_told)
            write_comm(comm, now);
    uint32_t used = get(&ev_pool.used), open = 0;
    /* flows first: whether an operation is over depends on them */
    for (uint32_t at = 0; at < used; at++) {
        uint8_t kind = atomic_load_explicit(&ev_pool.taken[at], memory_order_acquire);
        if (kind == EV_SEND || kind == EV_RECV)
            look_at_flow(at, now, &open);
    }
    qsort(oldest, open, sizeof *oldest, by_flow);
    for (uint32_t number = 0; number < open; number++) {
        uint32_t at = oldest[number];
        const struct ev_flow *flow = &ev_pool.objects[at].as_flow;
        if ((number && same_flow(oldest[number - 1], at)) || memory_of(at)->use == 0)
            continue;
        union ev_record record = {0};
        describe_flow(&ev_pool.objects[at], &record.operation, now);
        write_state(at, &record, now, false);
        ev_threads_note(flow->thread);
    }
    for (uint32_t at = 0; at < used; at++)
        if (atomic_load_explicit(&ev_pool.taken[at], memory_order_acquire) == EV_OP)
            look_at_op(at, now);
    ev_threads_tell(now);
    ev_ring_lost(get64(&ev_pool.lost));
}

void ev_sampler_close(struct ev_comm *comm) {
    uint64_t now = now_ns();
    tick(now);
    uint16_t number = (uint16_t)(comm - ev_comms + 1);
    bool others = false;
    for (struct ev_comm *one = ev_comms; one < ev_comms + EV_COMMS; one++)
        others |= one != comm && atomic_load_explicit(&one->open, memory_order_relaxed);
    for (uint32_t at = 0; at < get(&ev_pool.used); at++) {
        uint8_t kind = atomic_load_explicit(&ev_pool.taken[at], memory_order_acquire);
        struct ev_object *object = &ev_pool.objects[at];
        /* what is served for others goes with the last communicator: nobody says when theirs are over */
        if (!kind || (object->comm ? object->comm != number : others))
            continue;
        if (!memory_of(at)->is_over) {
            union ev_record record = {0};
            uint8_t seen = EV_SEEN_NOT;
            if (kind == EV_OP) {
                describe_op(object, &record.operation, now);
                /* nothing will follow any more */
                seen = end_of(object, now + 2 * LATE_NS, 0);
            } else {
                describe_flow(object, &record.operation, now);
            }
            if (seen != EV_SEEN_NOT)
                write_done(at, &record, get64(&object->as_op.t_last), seen);
            else
                write_state(at, &record, now, true);
        }
        retire(at);
    }
    comm->t_end = now;
    write_comm(comm, now);
}

/* --- the thread */

static bool anything_open(void) {
    for (struct ev_comm *comm = ev_comms; comm < ev_comms + EV_COMMS; comm++)
        if (atomic_load_explicit(&comm->open, memory_order_relaxed))
            return true;
    return false;
}

static void *run(void *nothing) {
    (void)nothing;
    pthread_setname_np(pthread_self(), "evertrain-nccl");
    ev_lock();
    for (;;) {
        if (!anything_open()) {
            pthread_cond_wait(&wake, &lock);
            continue;
        }
        uint64_t now = now_ns();
        tick(now);
        /* at the same moments on all ranks, as far as their clocks agree: what they write then is one picture; more
         * often when so much ends at once that places could run out */
        uint64_t tick_ns = ends > EV_POOL / 16 ? BUSY_TICK_NS : TICK_NS;
        uint64_t next = now_ns() + tick_ns - clock_ns(CLOCK_REALTIME) % tick_ns;
        struct timespec until = {.tv_sec = (time_t)(next / 1000000000u), .tv_nsec = (long)(next % 1000000000u)};
        while (now_ns() < next && pthread_cond_timedwait(&wake, &lock, &until) != ETIMEDOUT)
            ;
    }
    return NULL;
}

bool ev_sampler_start(void) {
    if (is_running)
        return true;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&wake, &clock);
    pthread_condattr_destroy(&clock);
    /* signals are for the threads of the script */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    is_running = pthread_create(&thread, NULL, run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_running)
        pthread_detach(thread);
    return is_running;
}

void ev_sampler_wake(void) { pthread_cond_broadcast(&wake); }

void ev_sampler_forget(void) {
    pthread_mutex_init(&lock, NULL);
    is_running = false;
    retired = retired_before = 0;
    memset(memories, 0, sizeof memories);
    ev_threads_forget();
}
