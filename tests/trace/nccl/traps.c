/* What NCCL does besides: each scene is a trap that a plugin could fall into. */
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pieces.h"
#include "scenes.h"

/* Stop before start, a stop twice, a start twice; and one that never stops although later ones did. */
void scene_kernels(void) {
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
void scene_foreign(void) {
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
void scene_collnet(void) {
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
void scene_late(void) {
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
void scene_abort(void) {
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
void scene_death(void) {
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
void scene_fork(void) {
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
void scene_odd(void) {
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

void scene_p2p(void) {
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
void scene_comms(void) {
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
void scene_crowd(void) {
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

void scene_full(void) {
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
