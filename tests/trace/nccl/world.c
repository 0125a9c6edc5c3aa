/* A small world: ranks in a ring, each a process with GPU, proxy and network of its own, that compute and then sum up, again
 * and again; one of them gets a fault. `driver LIBRARY VERSION world`, and in the environment
 *
 *     WORLD_RANKS 4, WORLD_CHANNELS 2, WORLD_SECONDS 2, WORLD_TRANSPORT ib or socket, WORLD_PREFIX of the files,
 *     WORLD_PACE 1, by which faults are larger than they must be where cores are shared,
 *     WORLD_FAULT none, nic_down, nic_slow, pcie, gpu_power, gpu_busy, traffic, proxy_delay, late, WORLD_CULPRIT 1
 *
 * Nothing of it is real but the order of things and the time: what a component can do next depends on what those before
 * it have done, as in NCCL's send and receive loops, each chunk takes each component some microseconds, and the calls of
 * the plugin come where NCCL makes them. */
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pieces.h"
#include "scenes.h"

#define MOST_CHANNELS 8
#define DEPTH 8
#define BUFFER 4 /* chunks that a socket takes over before they have arrived */
#define CHUNKS 12 /* of an operation, on each channel */

/* From one rank to the next on one channel, counted over all operations. */
struct link {
    _Atomic uint64_t asked;   /* receives that are posted */
    _Atomic uint64_t given;   /* chunks handed to the network */
    _Atomic uint64_t arrived; /* at the receiver's */
    _Atomic uint64_t taken;   /* seen by the receiver's proxy */
    uint64_t ready_at;        /* of the network's: when the next one is through */
};

struct settings {
    int ranks, channels, culprit;
    double seconds, pace;
    bool sockets;
    const char *fault, *prefix;
};

/* What a rank's components need for a chunk, in microseconds; and what else may be wrong. */
struct pace {
    double gpu, net_out, flush, compute;
    bool cut, naps;
};

struct rank {
    int number;
    struct settings *set;
    struct pace pace;
    struct link *out[MOST_CHANNELS], *in[MOST_CHANNELS];
};

/* One channel of the operation that a rank is in. */
struct channel {
    int64_t base; /* the links' counts at its beginning */
    int posted, peered, transmitted, done;
    int asked, received, flushed, consumed;
    int produced;       /* chunks that the GPU has put into the send buffer */
    double gpu_free, flush_free;
    bool works, is_over;
    void *send, *receive, *send_steps[DEPTH], *receive_steps[DEPTH];
};

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static bool is(const struct settings *set, const char *fault) { return !strcmp(set->fault, fault); }

static struct pace pace_of(const struct settings *set, int rank, bool faulty) {
    struct pace pace = {.gpu = 300, .net_out = 600, .flush = 60, .compute = 8000};
    double much = 30 * set->pace;
    int next_node = (set->culprit + set->ranks / 2) % set->ranks;
    /* what is wrong with a network interface concerns what comes in as well */
    bool beside = (rank + 1) % set->ranks == set->culprit;
    if (!faulty)
        return pace;
    if (is(set, "nic_down") && (rank == set->culprit || beside))
        pace.cut = true;
    if (is(set, "nic_slow") && (rank == set->culprit || beside))
        pace.net_out *= much;
    if (is(set, "traffic") && (rank == set->culprit || rank == next_node))
        pace.net_out *= much;
    if (rank != set->culprit)
        return pace;
    if (is(set, "pcie"))
        pace.flush *= 10 * much;
    if (is(set, "gpu_power"))
        pace.gpu *= 2 * much;
    if (is(set, "gpu_busy"))
        pace.gpu *= 1.5 * much;
    if (is(set, "late"))
        pace.compute = 400000 * set->pace;
    if (is(set, "proxy_delay"))
        pace.naps = true;
    return pace;
}

/* The network carries one chunk after the other. */
static void carry(struct rank *rank, int channel, double now) {
    struct link *link = rank->out[channel];
    uint64_t given = atomic_load(&link->given), arrived = atomic_load(&link->arrived);
    if (rank->pace.cut)
        return;
    if (arrived == given) {
        link->ready_at = 0;
    } else if (!link->ready_at) {
        link->ready_at = (uint64_t)(now + rank->pace.net_out);
    } else if (now >= (double)link->ready_at) {
        /* a receiver that does not ask holds a socket's data up in its kernel, at most so much */
        if (!rank->set->sockets || arrived < atomic_load(&link->taken) + BUFFER) {
            atomic_store(&link->arrived, arrived + 1);
            link->ready_at = 0;
        }
    }
}

/* The kernel: takes a chunk that has come, adds its own, and gives the sum on; the first one is its own alone. */
static void compute(struct rank *rank, struct channel *one, double now) {
    if (one->works && now >= one->gpu_free) {
        if (one->produced > 0)
            nccl->stop(one->receive_steps[one->consumed++ % DEPTH]);
        one->produced += one->produced < CHUNKS;
        one->works = false;
    }
    bool room = one->produced == CHUNKS || one->produced < one->done + DEPTH;
    if (!one->works && room && (one->produced == 0 || one->consumed < one->flushed)) {
        one->works = true;
        one->gpu_free = now + rank->pace.gpu;
    }
}

/* What a link counts of this operation; less than 0: the other end is in the one before. */
static int64_t since(_Atomic uint64_t *counter, const struct channel *one) {
    return (int64_t)atomic_load(counter) - one->base;
}

static void progress_send(struct rank *rank, struct channel *one, int number, void *ctx) {
    struct link *link = rank->out[number];
    if (one->posted < CHUNKS && one->posted < one->done + DEPTH) {
        void *step = nccl->step(ctx, one->send, one->posted);
        nccl->state(step, GPU, 0);
        one->send_steps[one->posted++ % DEPTH] = step;
    }
    if (one->transmitted < one->posted && one->produced > one->transmitted) {
        void *step = one->send_steps[one->transmitted % DEPTH];
        nccl->state(step, PEER, 0);
        if (rank->set->sockets || since(&link->asked, one) > one->transmitted) {
            nccl->state(step, SENT, 1 << 20);
            one->transmitted++;
            atomic_fetch_add(&link->given, 1);
        }
    }
    /* InfiniBand confirms what has arrived, a socket what the kernel has taken over */
    int64_t confirmed = since(&link->arrived, one) + (rank->set->sockets ? BUFFER : 0);
    if (one->done < one->transmitted && confirmed > one->done)
        nccl->stop(one->send_steps[one->done++ % DEPTH]);
}

static void progress_receive(struct rank *rank, struct channel *one, int number, void *ctx, double now) {
    struct link *link = rank->in[number];
    if (one->asked < CHUNKS && one->asked < one->consumed + DEPTH) {
        void *step = nccl->step(ctx, one->receive, one->asked);
        step = nccl->step(ctx, one->receive, one->asked);
        nccl->state(step, ASKED, 0);
        one->receive_steps[one->asked++ % DEPTH] = step;
        atomic_fetch_add(&link->asked, 1);
    }
    if (one->received < one->asked && since(&link->arrived, one) > one->received) {
        nccl->state(one->receive_steps[one->received % DEPTH], FLUSH, 1 << 20);
        if (one->received == one->flushed)
            one->flush_free = now + rank->pace.flush;
        one->received++;
        atomic_fetch_add(&link->taken, 1);
    }
    if (one->flushed < one->received && now >= one->flush_free) {
        nccl->state(one->receive_steps[one->flushed % DEPTH], GIVEN, 0);
        one->flushed++;
        one->flush_free = now + rank->pace.flush;
    }
}

static void breathe(double busy_us) {
    /* a proxy spins; several of them on few cores must not take all of these */
    for (double until = now_us() + busy_us; now_us() < until;)
        ;
    struct timespec pause = {0, 20000};
    nanosleep(&pause, NULL);
}

static void run_rank(struct rank *rank, double begin) {
    struct settings *set = rank->set;
    char text[512];
    snprintf(text, sizeof text, "%s-r%d", set->prefix, rank->number);
    setenv("EVERTRAIN_TRACE_RING", text, 1);
    snprintf(text, sizeof text, "%d", rank->number);
    setenv("RANK", text, 1);
    int mask = 0, polls = 0;
    void *ctx = nccl->init(77, &mask, "dp", set->ranks, set->ranks, rank->number);
    double end = begin + set->seconds * 1e6, onset = begin + 0.3 * set->seconds * 1e6;
    for (uint64_t seq = 0; now_us() < end; seq++) {
        rank->pace = pace_of(set, rank->number, now_us() > onset);
        struct coll coll = {"AllReduce", "ncclFloat32", "RING", seq, 1 << 20, (uint8_t)set->channels};
        void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
        nccl->stop(op);
        struct channel channels[MOST_CHANNELS];
        memset(channels, 0, sizeof channels);
        for (int at = 0; at < set->channels; at++) {
            struct flow send = {(int)getpid(), at, (rank->number + 1) % set->ranks, CHUNKS, 1};
            struct flow receive = {(int)getpid(), at, (rank->number + set->ranks - 1) % set->ranks, CHUNKS, 0};
            channels[at].send = nccl->flow(ctx, op, &send);
            channels[at].receive = nccl->flow(ctx, op, &receive);
            channels[at].base = (int64_t)seq * CHUNKS;
        }
        /* the stream computes before its kernel begins */
        double kernel_at = now_us() + rank->pace.compute;
        void *kernels[MOST_CHANNELS] = {NULL};
        int open = set->channels;
        while (open && now_us() < end + 2e5) {
            double now = now_us();
            rank->pace = pace_of(set, rank->number, now > onset);
            if (rank->pace.naps && ++polls % 50 == 0) {
                struct timespec nap = {0, 500000000};
                nanosleep(&nap, NULL);
            }
            open = 0;
            for (int at = 0; at < set->channels; at++) {
                struct channel *one = &channels[at];
                carry(rank, at, now);
                if (now >= kernel_at && !kernels[at])
                    kernels[at] = nccl->kernel(ctx, op, at);
                if (kernels[at])
                    compute(rank, one, now);
                if (!one->is_over) {
                    progress_receive(rank, one, at, ctx, now);
                    progress_send(rank, one, at, ctx);
                    one->is_over = one->done == CHUNKS && one->consumed == CHUNKS;
                    if (one->is_over) {
                        nccl->stop(one->send);
                        nccl->stop(one->receive);
                        nccl->state(kernels[at], KERNEL_STOP, 0);
                        nccl->stop(kernels[at]);
                    }
                }
                open += !one->is_over;
            }
            breathe(15);
        }
    }
    /* dies as a job that is killed does: what the file says is what there is */
    _exit(0);
}

static const char *text_of(const char *name, const char *otherwise) { return getenv(name) ? getenv(name) : otherwise; }

void scene_world(void) {
    struct settings set = {
        .ranks = atoi(text_of("WORLD_RANKS", "4")), .channels = atoi(text_of("WORLD_CHANNELS", "2")),
        .culprit = atoi(text_of("WORLD_CULPRIT", "1")),
        .seconds = atof(text_of("WORLD_SECONDS", "2")),
        .pace = atof(text_of("WORLD_PACE", "1")), .sockets = !strcmp(text_of("WORLD_TRANSPORT", "ib"), "socket"),
        .fault = text_of("WORLD_FAULT", "none"), .prefix = text_of("WORLD_PREFIX", "/tmp/world"),
    };
    if (set.channels > MOST_CHANNELS || set.ranks < 2)
        exit(2);
    size_t count = (size_t)set.ranks * (size_t)set.channels;
    struct link *links = mmap(NULL, count * sizeof *links, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double begin = now_us() + 50000;
    fflush(stdout);
    for (int number = 0; number < set.ranks; number++)
        if (!fork()) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            struct rank rank = {.number = number, .set = &set};
            for (int at = 0; at < set.channels; at++) {
                rank.out[at] = &links[number * set.channels + at];
                rank.in[at] = &links[(number + set.ranks - 1) % set.ranks * set.channels + at];
            }
            run_rank(&rank, begin);
        }
    int failed = 0;
    for (int number = 0; number < set.ranks; number++) {
        int status = 0;
        wait(&status);
        failed |= status;
    }
    if (failed)
        exit(2);
}
