/* Plays NCCL for the plugin: `driver LIBRARY VERSION SCENE`. Prints, as lines, what the plugin must have counted:
 *
 *     flow COMM CHANNEL PEER SIDE TIMES TOTAL READY TRANSMITTED DONE RECEIVED CONSUMED BYTES
 *     op COMM OP SEQ BYTES
 *     comm COMM RANK RANKS NODES NAME
 *
 * for all that have ended, sums over flows of the same place. The test compares them with the file. */
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "play.h"

#define BYTES 1000
enum { GPU = 8, SENT = 9, ASKED = 10, FLUSH = 11, GIVEN = 12, PEER = 20, PROGRESS = 19, KERNEL_STOP = 22 };

static struct player *nccl;
static int full_memory; /* see posix_fallocate below */
static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;

/* --- the truth */

struct truth {
    int used, channel, peer, sends;
    unsigned long long comm, times, total, ready, transmitted, done, received, consumed, bytes;
};
struct told {
    struct truth flows[4096];
    int flow_count;
};

static struct truth *truth_of(struct told *told, unsigned long long comm, const struct flow *flow) {
    for (int at = 0; at < told->flow_count; at++) {
        struct truth *one = &told->flows[at];
        if (one->comm == comm && one->channel == flow->channel && one->peer == flow->peer && one->sends == flow->sends)
            return one;
    }
    struct truth *one = &told->flows[told->flow_count++];
    one->comm = comm;
    one->channel = flow->channel;
    one->peer = flow->peer;
    one->sends = flow->sends;
    return one;
}

static void print_flows(struct told *told) {
    pthread_mutex_lock(&out);
    for (int at = 0; at < told->flow_count; at++) {
        struct truth *one = &told->flows[at];
        printf("flow %llu %d %d %s %llu %llu %llu %llu %llu %llu %llu %llu\n", one->comm, one->channel, one->peer,
               one->sends ? "send" : "receive", one->times, one->total, one->ready, one->transmitted, one->done,
               one->received, one->consumed, one->bytes);
    }
    pthread_mutex_unlock(&out);
}

static void print_op(unsigned long long comm, const char *op, unsigned long long seq, unsigned long long bytes) {
    pthread_mutex_lock(&out);
    printf("op %llu %s %llu %llu\n", comm, op, seq, bytes);
    pthread_mutex_unlock(&out);
}

/* --- pieces of NCCL */

static void rest_ms(int milliseconds) {
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static void *join(unsigned long long hash, int ranks, int rank) {
    int mask = -1;
    void *ctx = nccl->init(hash, &mask, "group", 2, ranks, rank);
    pthread_mutex_lock(&out);
    printf("mask %d\ncomm %llu %d %d 2 group\n", mask, hash, rank, ranks);
    pthread_mutex_unlock(&out);
    return ctx;
}

static void send_step(void *ctx, void *flow, int step, int looks) {
    void *handle = nccl->step(ctx, flow, step);
    nccl->state(handle, GPU, 0);
    for (int look = 0; look < looks; look++)
        nccl->state(handle, PEER, 0);
    nccl->state(handle, SENT, BYTES);
    nccl->stop(handle);
}

static void receive_step(void *ctx, void *flow, int step, int tries) {
    void *handle = NULL;
    for (int try = 0; try < tries; try++) /* until irecv gives a request; the slot is written over each time */
        handle = nccl->step(ctx, flow, step);
    nccl->state(handle, ASKED, 0);
    nccl->state(handle, FLUSH, BYTES);
    nccl->state(handle, GIVEN, 0);
    nccl->stop(handle);
}

static void count_flow(struct told *told, unsigned long long comm, const struct flow *flow) {
    struct truth *truth = truth_of(told, comm, flow);
    unsigned long long steps = (unsigned long long)flow->steps;
    truth->times++;
    truth->total += steps;
    truth->ready += steps;
    truth->transmitted += steps;
    truth->bytes += steps * BYTES;
    if (flow->sends) {
        truth->done += steps;
    } else {
        truth->received += steps;
        truth->consumed += steps;
    }
}

/* All flows of an operation as the proxy serves them: a step of each in turn. */
static void serve(void *ctx, void *op, struct flow *flows, int count, int looks, struct told *told,
                  unsigned long long comm) {
    void *handles[512];
    for (int at = 0; at < count; at++) {
        flows[at].pid = (int)getpid();
        handles[at] = nccl->flow(ctx, op, &flows[at]);
        nccl->bare_state(handles[at], PROGRESS);
    }
    int most = 0;
    for (int at = 0; at < count; at++)
        most = flows[at].steps > most ? flows[at].steps : most;
    for (int step = 0; step < most; step++)
        for (int at = 0; at < count; at++)
            if (step < flows[at].steps) {
                if (flows[at].sends)
                    send_step(ctx, handles[at], step, looks);
                else
                    receive_step(ctx, handles[at], step, looks);
            }
    for (int at = 0; at < count; at++) {
        nccl->stop(handles[at]);
        count_flow(told, comm, &flows[at]);
    }
}

/* A collective from its call to its end. */
static void run_coll(void *ctx, unsigned long long comm, const struct coll *coll, const char *op, struct flow *flows,
                     int count, int looks, struct told *told) {
    void *handle = nccl->coll(ctx, nccl->api(ctx, 0), coll);
    nccl->stop(handle); /* enqueued */
    void *kernels[64];
    for (int channel = 0; channel < coll->channels; channel++)
        kernels[channel] = nccl->kernel(ctx, handle, channel);
    serve(ctx, handle, flows, count, looks, told, comm);
    for (int channel = 0; channel < coll->channels; channel++) {
        nccl->state(kernels[channel], KERNEL_STOP, 0);
        nccl->stop(kernels[channel]);
    }
    print_op(comm, op, coll->seq, coll->count * (strstr(coll->datatype, "16") ? 2 : 4));
}

static int ring_flows(struct flow *flows, int channels, int ranks, int rank, int steps) {
    int count = 0;
    for (int channel = 0; channel < channels; channel++) {
        flows[count++] = (struct flow){0, channel, (rank + 1) % ranks, steps, 1};
        flows[count++] = (struct flow){0, channel, (rank + ranks - 1) % ranks, steps, 0};
    }
    return count;
}

static int tree_flows(struct flow *flows, int channels, int rank, int steps) {
    int count = 0, ends[] = {(rank - 1) / 2, 2 * rank + 1, 2 * rank + 2};
    for (int channel = 0; channel < channels; channel++)
        for (int end = 0; end < 3; end++)
            for (int sends = 0; sends < 2; sends++)
                flows[count++] = (struct flow){0, channel, ends[end], steps, sends};
    return count;
}

/* --- scenes */

static void play_ring(int channels, int ops, int steps, int looks) {
    struct told told = {.flow_count = 0};
    void *ctx = join(11, 4, 1);
    for (int number = 0; number < ops; number++) {
        struct flow flows[512];
        struct coll coll = {"AllReduce", "ncclFloat32", "RING", (uint64_t)number, 100, (uint8_t)channels};
        run_coll(ctx, 11, &coll, "all_reduce", flows, ring_flows(flows, channels, 4, 1, steps), looks, &told);
    }
    nccl->finalize(ctx);
    print_flows(&told);
}

static void scene_ring(void) { play_ring(4, 20, 13, 1); }
static void scene_channels(void) { play_ring(64, 3, 9, 1); }
static void scene_repeats(void) { play_ring(2, 3, 10, 500); }

static void scene_tree(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(12, 8, 1);
    for (int number = 0; number < 10; number++) {
        struct flow flows[512];
        struct coll coll = {"AllReduce", "ncclBfloat16", "TREE", (uint64_t)number, 200, 2};
        run_coll(ctx, 12, &coll, "all_reduce", flows, tree_flows(flows, 2, 1, 7), 2, &told);
    }
    nccl->finalize(ctx);
    print_flows(&told);
}

static void *one_of_many(void *argument) {
    unsigned long long comm = (unsigned long long)(uintptr_t)argument;
    struct told *told = calloc(1, sizeof *told);
    void *ctx = join(comm, 4, (int)(comm % 4));
    for (int number = 0; number < 60; number++) {
        struct flow flows[512];
        struct coll coll = {"ReduceScatter", "ncclFloat32", "RING", (uint64_t)number, 50, 3};
        run_coll(ctx, comm, &coll, "reduce_scatter", flows, ring_flows(flows, 3, 4, (int)(comm % 4), 8), 2, told);
        if (number % 10 == 0)
            rest_ms(30); /* over several ticks */
    }
    nccl->finalize(ctx);
    print_flows(told);
    free(told);
    return NULL;
}

static void scene_threads(void) {
    pthread_t threads[6];
    for (uintptr_t at = 0; at < 6; at++)
        pthread_create(&threads[at], NULL, one_of_many, (void *)(100 + at));
    for (int at = 0; at < 6; at++)
        pthread_join(threads[at], NULL);
}

/* The launching thread hands operations to a proxy and a profiler thread, as NCCL 2.31 has them. */
struct pipe_line {
    void *ctx, *ops[40];
    _Atomic int given;
    struct told told;
};

static void *proxy_of(void *argument) {
    struct pipe_line *line = argument;
    for (int number = 0; number < 40; number++) {
        while (__atomic_load_n((int *)&line->given, __ATOMIC_ACQUIRE) <= number)
            rest_ms(0);
        struct flow flows[512];
        serve(line->ctx, line->ops[number], flows, ring_flows(flows, 4, 4, 2, 6), 2, &line->told, 31);
    }
    return NULL;
}

static void *profiler_of(void *argument) {
    struct pipe_line *line = argument;
    for (int number = 0; number < 40; number++) {
        while (__atomic_load_n((int *)&line->given, __ATOMIC_ACQUIRE) <= number)
            rest_ms(0);
        for (int channel = 0; channel < 4; channel++) {
            void *kernel = nccl->kernel(line->ctx, line->ops[number], channel);
            nccl->state(kernel, KERNEL_STOP, 0);
            nccl->stop(kernel);
        }
    }
    return NULL;
}

static void scene_pipeline(void) {
    struct pipe_line *line = calloc(1, sizeof *line);
    line->ctx = join(31, 4, 2);
    pthread_t proxy, profiler;
    pthread_create(&proxy, NULL, proxy_of, line);
    pthread_create(&profiler, NULL, profiler_of, line);
    for (int number = 0; number < 40; number++) {
        struct coll coll = {"AllGather", "ncclInt8", "RING", (uint64_t)number, 400, 4};
        line->ops[number] = nccl->coll(line->ctx, nccl->api(line->ctx, 0), &coll);
        nccl->stop(line->ops[number]);
        __atomic_store_n((int *)&line->given, number + 1, __ATOMIC_RELEASE);
        print_op(31, "all_gather", (uint64_t)number, 400);
        rest_ms(5);
    }
    pthread_join(proxy, NULL);
    pthread_join(profiler, NULL);
    if (nccl->version == 4)
        rest_ms(400); /* ends are told by the flows only, and believed when nothing has followed for a while */
    nccl->finalize(line->ctx);
    print_flows(&line->told);
    free(line);
}

/* Stop before start, a stop twice, a start twice; and one that never stops although later ones did. */
static void scene_kernels(void) {
    void *ctx = join(13, 2, 0);
    for (int number = 0; number < 6; number++) {
        struct coll coll = {"AllReduce", "ncclFloat32", "RING", (uint64_t)number, 100, 2};
        void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
        nccl->stop(op);
        void *first = nccl->kernel(ctx, op, 0);
        nccl->state(NULL, KERNEL_STOP, 0); /* NCCL has no handle yet */
        nccl->stop(NULL);
        nccl->state(first, KERNEL_STOP, 0);
        nccl->stop(first);
        nccl->stop(first);
        void *again = nccl->kernel(ctx, op, 0);
        void *second = nccl->kernel(ctx, op, 1);
        if (number != 2) /* of number 2 the end of one kernel is lost */
            nccl->stop(second);
        nccl->stop(again);
        print_op(13, "all_reduce", (uint64_t)number, 400);
    }
    rest_ms(1500);
    nccl->finalize(ctx);
}

/* PXN: the operation runs here for another process; its context and parent are addresses of that one. */
static void scene_foreign(void) {
    void *ctx = join(14, 4, 0);
    struct flow foreign = {(int)getpid() + 1, 0, 3, 8, 1};
    void *handle = nccl->flow((void *)0xdead0000beef, (void *)0xfeed0000babe, &foreign);
    for (int step = 0; step < 8; step++)
        send_step((void *)0xdead0000beef, handle, step, 1);
    nccl->stop(handle);
    struct told told = {.flow_count = 0};
    count_flow(&told, 0, &foreign);
    rest_ms(250);
    nccl->finalize(ctx);
    print_flows(&told);
}

/* Flows of a transport that tells nothing and never stops; with kernels, and then without. */
static void scene_collnet(void) {
    void *ctx = join(15, 4, 0);
    struct coll coll = {"AllReduce", "ncclFloat32", "COLLNET_DIRECT", 1, 100, 1};
    void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
    nccl->stop(op);
    struct flow silent = {(int)getpid(), 0, 1, 8, 0};
    nccl->flow(ctx, op, &silent);
    void *kernel = nccl->kernel(ctx, op, 0);
    nccl->stop(kernel);
    print_op(15, "all_reduce", 1, 400);
    rest_ms(1500);
    nccl->finalize(ctx);
}

/* NCCL keeps the parent's handle: flows come after its stop, after pauses with none open, and when it is long over. */
static void scene_late(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(16, 4, 1);
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 2};
    void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
    void *kernels[] = {nccl->kernel(ctx, op, 0), nccl->kernel(ctx, op, 1)};
    nccl->stop(op);
    struct flow flows[512];
    for (int batch = 0; batch < 3; batch++) {
        serve(ctx, op, flows, ring_flows(flows, 2, 4, 1, 5), 1, &told, 16);
        rest_ms(batch ? 120 : 10);
    }
    nccl->stop(kernels[0]);
    nccl->stop(kernels[1]);
    print_op(16, "all_reduce", 1, 400);
    rest_ms(1600); /* given back */
    serve(ctx, op, flows, ring_flows(flows, 2, 4, 1, 5), 1, &told, 16);
    rest_ms(250);
    nccl->finalize(ctx);
    print_flows(&told);
}

/* The communicator is aborted: nothing more comes, then everything that was open is asked for once more. */
static void scene_abort(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(17, 4, 1), *other = join(18, 4, 1);
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 1};
    void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
    nccl->stop(op);
    void *kernel = nccl->kernel(ctx, op, 0);
    struct flow send = {(int)getpid(), 0, 2, 8, 1}, receive = {(int)getpid(), 0, 0, 8, 0};
    void *sender = nccl->flow(ctx, op, &send), *receiver = nccl->flow(ctx, op, &receive);
    send_step(ctx, sender, 0, 1);
    void *stuck = nccl->step(ctx, sender, 1);
    nccl->state(stuck, GPU, 0);
    nccl->state(stuck, PEER, 0);
    void *waiting = nccl->step(ctx, receiver, 0);
    nccl->state(waiting, ASKED, 0);
    rest_ms(450);
    nccl->finalize(ctx);
    nccl->finalize(ctx);
    nccl->state(stuck, SENT, BYTES);
    nccl->stop(stuck);
    nccl->stop(waiting);
    nccl->stop(sender);
    nccl->stop(receiver);
    nccl->stop(kernel);
    nccl->step(ctx, sender, 2);
    nccl->flow(ctx, op, &send);
    nccl->coll(ctx, NULL, &coll);
    rest_ms(250);
    struct flow flows[512];
    run_coll(other, 18, &coll, "all_reduce", flows, ring_flows(flows, 1, 4, 1, 4), 1, &told);
    nccl->finalize(other);
    print_flows(&told);
}

/* In mid-operation the process is gone; with EVERTRAIN_TEST_WAIT it stays until somebody ends it. */
static void scene_death(void) {
    void *ctx = join(19, 4, 1);
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 1};
    void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
    nccl->stop(op);
    nccl->kernel(ctx, op, 0);
    struct flow send = {(int)getpid(), 0, 2, 8, 1};
    void *sender = nccl->flow(ctx, op, &send);
    send_step(ctx, sender, 0, 1);
    void *stuck = nccl->step(ctx, sender, 1);
    nccl->state(stuck, GPU, 0);
    nccl->state(stuck, PEER, 0);
    rest_ms(350);
    fflush(stdout);
    while (getenv("EVERTRAIN_TEST_WAIT"))
        rest_ms(1000);
    _exit(0);
}

/* A data loader's worker: the child knows the parent's handles, and may even join a communicator of its own. */
static void scene_fork(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(20, 4, 1);
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 1};
    void *op = nccl->coll(ctx, nccl->api(ctx, 0), &coll);
    struct flow send = {(int)getpid(), 0, 2, 4, 1};
    void *sender = nccl->flow(ctx, op, &send);
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        send_step(ctx, sender, 0, 1);
        nccl->stop(sender);
        nccl->finalize(ctx);
        if (getenv("EVERTRAIN_TEST_CHILD")) {
            int mask;
            void *own = nccl->init(21, &mask, NULL, 1, 1, 0);
            rest_ms(250);
            nccl->finalize(own);
        }
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status)
        exit(2);
    for (int step = 0; step < 4; step++)
        send_step(ctx, sender, step, 1);
    nccl->stop(sender);
    count_flow(&told, 20, &send);
    void *kernel = nccl->kernel(ctx, op, 0);
    nccl->stop(op);
    nccl->stop(kernel);
    if (nccl->version == 4)
        rest_ms(400);
    nccl->finalize(ctx);
    print_op(20, "all_reduce", 1, 400);
    print_flows(&told);
}

/* Events and states that nobody has asked for, numbers that are no handles, arguments that are not there. */
static void scene_odd(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(22, 4, 1);
    for (int bit = 0; bit < (nccl->version == 4 ? 8 : nccl->version == 5 ? 12 : 15); bit++)
        if (bit != 1 && bit != 2 && bit != 3 && bit != 4 && bit != 6 && bit != 9 && bit != 10) {
            void *handle = nccl->other(ctx, 1ull << bit);
            for (int state = 0; state < 31; state++)
                nccl->state(handle, state, 0);
            nccl->stop(handle);
        }
    void *api = nccl->api(ctx, 1);
    nccl->bare_state(api, 23);
    nccl->bare_state(api, 24);
    nccl->state(api, 23, 7);
    nccl->stop(api);
    uint64_t seed = 88172645463325252ull;
    for (int number = 0; number < 100000; number++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        void *wild = (void *)(uintptr_t)(number % 2 ? seed : seed & 0xffffffffull);
        nccl->state(wild, (int)(seed >> 40) % 31, 1);
        nccl->step(ctx, wild, 1);
        nccl->kernel(ctx, wild, (int)(seed & 255));
        nccl->stop(wild);
    }
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 5, 100, 1};
    if (nccl->coll((void *)0x123456, NULL, &coll) || nccl->coll(NULL, NULL, &coll))
        exit(2);
    struct flow flows[512];
    run_coll(ctx, 22, &coll, "all_reduce", flows, ring_flows(flows, 1, 4, 1, 20), 3, &told);
    void *op = nccl->coll(ctx, nccl->api(ctx, 1), &(struct coll){"Unheard", "ncclFloat8e4m3", "?", 6, 100, 1});
    nccl->stop(op);
    nccl->stop(nccl->kernel(ctx, op, 0));
    print_op(22, "other", 6, 100);
    nccl->finalize(ctx);
    print_flows(&told);
}

static void scene_p2p(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(23, 4, 1);
    for (int number = 1; number <= 3; number++) {
        void *send = nccl->p2p(ctx, NULL, "Send", "ncclFloat16", 50, 2);
        void *receive = nccl->p2p(ctx, NULL, "Recv", "ncclFloat64", 50, 0);
        nccl->stop(send);
        nccl->stop(receive);
        void *kernels[] = {nccl->kernel(ctx, send, 5), nccl->kernel(ctx, receive, 6)};
        struct flow out_flow = {0, 5, 2, 4, 1}, in_flow = {0, 6, 0, 4, 0};
        serve(ctx, send, &out_flow, 1, 2, &told, 23);
        serve(ctx, receive, &in_flow, 1, 2, &told, 23);
        nccl->stop(kernels[0]);
        nccl->stop(kernels[1]);
        print_op(23, "send", (uint64_t)number, 100);
        print_op(23, "recv", (uint64_t)number, 400);
    }
    rest_ms(400);
    nccl->finalize(ctx);
    print_flows(&told);
}

/* Many communicators one after the other and at once; the last name is longer than a record has room for. */
static void scene_comms(void) {
    void *contexts[300];
    int mask;
    for (int round = 0; round < 3; round++) {
        for (int at = 0; at < 300; at++)
            contexts[at] = nccl->init((uint64_t)(1000 * round + at), &mask, at ? NULL : "a name that is longer than the "
                                      "forty bytes that a record has for it", 1, 2, at % 2);
        rest_ms(150);
        for (int at = 0; at < 300; at++)
            nccl->finalize(contexts[at]);
    }
    struct told told = {.flow_count = 0};
    void *ctx = join(24, 4, 1);
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 1};
    struct flow flows[512];
    run_coll(ctx, 24, &coll, "all_reduce", flows, ring_flows(flows, 1, 4, 1, 4), 1, &told);
    nccl->finalize(ctx);
    print_flows(&told);
}

/* More operations in flight than there is room for, then all is as before. */
static void scene_crowd(void) {
    struct told told = {.flow_count = 0};
    void *ctx = join(25, 4, 1);
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 1};
    int lost = 0;
    static void *ops[40000];
    for (int number = 0; number < 40000; number++) {
        coll.seq = (uint64_t)number;
        ops[number] = nccl->coll(ctx, NULL, &coll);
        lost += !ops[number];
    }
    printf("lost %d\n", lost);
    for (int number = 0; number < 40000; number++) {
        nccl->stop(ops[number]);
        nccl->stop(nccl->kernel(ctx, ops[number], 0));
    }
    rest_ms(1500);
    struct flow flows[512];
    coll.seq = 50000;
    run_coll(ctx, 25, &coll, "all_reduce", flows, ring_flows(flows, 1, 4, 1, 4), 1, &told);
    nccl->finalize(ctx);
    print_flows(&told);
}

static void scene_full(void) {
    full_memory = 1;
    int mask = -1;
    void *ctx = nccl->init(26, &mask, "group", 1, 4, 1);
    printf("mask %d\n", mask);
    struct told told = {.flow_count = 0};
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 1, 100, 1};
    struct flow flows[512];
    run_coll(ctx, 26, &coll, "all_reduce", flows, ring_flows(flows, 1, 4, 1, 4), 1, &told);
    nccl->finalize(ctx);
}

/* The plugin asks NCCL which version it is, and the kernel for room: both are played here. */
__attribute__((visibility("default"))) ncclResult_t ncclGetVersion(int *version) {
    const char *said = getenv("EVERTRAIN_TEST_VERSION");
    *version = said ? atoi(said) : 22907;
    return ncclSuccess;
}

__attribute__((visibility("default"))) int posix_fallocate(int file, off_t offset, off_t size) {
    if (full_memory)
        return 28; /* ENOSPC */
    return ftruncate(file, offset + size) ? 5 : 0;
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {
        {"ring", scene_ring},       {"tree", scene_tree},     {"channels", scene_channels}, {"threads", scene_threads},
        {"repeats", scene_repeats}, {"kernels", scene_kernels}, {"foreign", scene_foreign}, {"collnet", scene_collnet},
        {"late", scene_late},       {"abort", scene_abort},   {"death", scene_death},       {"fork", scene_fork},
        {"odd", scene_odd},         {"p2p", scene_p2p},       {"comms", scene_comms},       {"crowd", scene_crowd},
        {"full", scene_full},       {"pipeline", scene_pipeline},
    };
    if (count != 4)
        return 2;
    nccl = player_load(arguments[1], atoi(arguments[2]));
    for (size_t at = 0; at < sizeof scenes / sizeof *scenes; at++)
        if (!strcmp(scenes[at].name, arguments[3])) {
            scenes[at].play();
            return 0;
        }
    fprintf(stderr, "no scene %s\n", arguments[3]);
    return 2;
}
