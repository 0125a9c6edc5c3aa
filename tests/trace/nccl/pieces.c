#include "pieces.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

struct player *nccl;
static pthread_mutex_t out = PTHREAD_MUTEX_INITIALIZER;

/* --- the truth */

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

void print_flows(struct told *told) {
    pthread_mutex_lock(&out);
    for (int at = 0; at < told->flow_count; at++) {
        struct truth *one = &told->flows[at];
        printf("flow %llu %d %d %s %llu %llu %llu %llu %llu %llu %llu %llu\n", one->comm, one->channel, one->peer,
               one->sends ? "send" : "receive", one->times, one->total, one->ready, one->transmitted, one->done,
               one->received, one->consumed, one->bytes);
    }
    pthread_mutex_unlock(&out);
}

void print_op(unsigned long long comm, const char *op, unsigned long long seq, unsigned long long bytes) {
    pthread_mutex_lock(&out);
    printf("op %llu %s %llu %llu\n", comm, op, seq, bytes);
    pthread_mutex_unlock(&out);
}

/* --- pieces of NCCL */

void rest_ms(int milliseconds) {
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

void *join(unsigned long long hash, int ranks, int rank) {
    int mask = -1;
    void *ctx = nccl->init(hash, &mask, "group", 2, ranks, rank);
    pthread_mutex_lock(&out);
    printf("mask %d\ncomm %llu %d %d 2 group\n", mask, hash, rank, ranks);
    pthread_mutex_unlock(&out);
    return ctx;
}

void send_step(void *ctx, void *flow, int step, int looks) {
    void *handle = nccl->step(ctx, flow, step);
    nccl->state(handle, GPU, 0);
    for (int look = 0; look < looks; look++)
        nccl->state(handle, PEER, 0);
    nccl->state(handle, SENT, BYTES);
    nccl->stop(handle);
}

void receive_step(void *ctx, void *flow, int step, int tries) {
    void *handle = NULL;
    for (int try = 0; try < tries; try++) /* until irecv gives a request; the slot is written over each time */
        handle = nccl->step(ctx, flow, step);
    nccl->state(handle, ASKED, 0);
    nccl->state(handle, FLUSH, BYTES);
    nccl->state(handle, GIVEN, 0);
    nccl->stop(handle);
}

void count_flow(struct told *told, unsigned long long comm, const struct flow *flow) {
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
void serve(void *ctx, void *op, struct flow *flows, int count, int looks, struct told *told,
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
void run_coll(void *ctx, unsigned long long comm, const struct coll *coll, const char *op, struct flow *flows,
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

int ring_flows(struct flow *flows, int channels, int ranks, int rank, int steps) {
    int count = 0;
    for (int channel = 0; channel < channels; channel++) {
        flows[count++] = (struct flow){0, channel, (rank + 1) % ranks, steps, 1};
        flows[count++] = (struct flow){0, channel, (rank + ranks - 1) % ranks, steps, 0};
    }
    return count;
}

int tree_flows(struct flow *flows, int channels, int rank, int steps) {
    int count = 0, ends[] = {(rank - 1) / 2, 2 * rank + 1, 2 * rank + 2};
    for (int channel = 0; channel < channels; channel++)
        for (int end = 0; end < 3; end++)
            for (int sends = 0; sends < 2; sends++)
                flows[count++] = (struct flow){0, channel, ends[end], steps, sends};
    return count;
}
