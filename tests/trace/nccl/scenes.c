/* What NCCL does when all goes well. */
#include "scenes.h"

#include <pthread.h>
#include <unistd.h>

#include "pieces.h"

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

void scene_ring(void) { play_ring(4, 20, 13, 1); }
void scene_channels(void) { play_ring(64, 3, 9, 1); }
void scene_repeats(void) { play_ring(2, 3, 10, 500); }

void scene_tree(void) {
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

void scene_threads(void) {
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

void scene_pipeline(void) {
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
