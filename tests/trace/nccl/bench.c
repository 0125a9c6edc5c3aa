/* What does a callback cost, and is everything counted at a given rate? In the environment: BENCH_RATE callbacks a second
 * for BENCH_SECONDS. Prints `callback_ns` of each of many batches, and afterwards what must have been counted. */
#include <dirent.h>
#include <time.h>
#include <unistd.h>

#include "pieces.h"
#include "scenes.h"

#define STEPS 64
#define CALLS_A_STEP 5
#define BATCHES 2000

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Sends and receives in turn, as fast as can be: in the time is what the driver does to fill in the descriptor. */
static void measure(void *ctx) {
    struct coll coll = {"AllReduce", "ncclFloat32", "RING", 0, 100, 1};
    for (int batch = 0; batch < BATCHES; batch++) {
        void *op = nccl->coll(ctx, NULL, &coll);
        struct flow send = {(int)getpid(), 0, 2, STEPS, 1}, receive = {(int)getpid(), 0, 0, STEPS, 0};
        void *sender = nccl->flow(ctx, op, &send), *receiver = nccl->flow(ctx, op, &receive);
        double began = now_s();
        for (int step = 0; step < STEPS; step++) {
            send_step(ctx, sender, step, 1);
            receive_step(ctx, receiver, step, 1);
        }
        printf("callback_ns %.3f\n", (now_s() - began) * 1e9 / (STEPS * 2 * CALLS_A_STEP));
        nccl->stop(sender);
        nccl->stop(receiver);
        nccl->stop(op);
        nccl->stop(nccl->kernel(ctx, op, 0));
        if (batch % 100 == 0)
            rest_ms(1);
    }
}

/* Of the plugin's own thread, which has a name. */
static double sampler_cpu_s(void) {
    static int thread;
    char path[64], text[64];
    DIR *tasks = thread ? NULL : opendir("/proc/self/task");
    for (struct dirent *entry; !thread && tasks && (entry = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/self/task/%.20s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        if (file && fgets(text, sizeof text, file) && !strcmp(text, "evertrain-nccl\n"))
            thread = atoi(entry->d_name);
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", thread);
    FILE *file = fopen(path, "r");
    unsigned long long cpu_ns = 0;
    if (file && fscanf(file, "%llu", &cpu_ns) != 1)
        cpu_ns = 0;
    if (file)
        fclose(file);
    return (double)cpu_ns / 1e9;
}

void scene_bench(void) {
    double rate = atof(getenv("BENCH_RATE") ? getenv("BENCH_RATE") : "500000");
    double seconds = atof(getenv("BENCH_SECONDS") ? getenv("BENCH_SECONDS") : "1");
    void *own = join(40, 4, 1);
    measure(own);
    nccl->finalize(own);

    static struct told told;
    void *ctx = join(41, 4, 1);
    double began = now_s(), cpu_began = sampler_cpu_s(), calls = 0;
    uint64_t seq = 0;
    while (now_s() - began < seconds) {
        struct flow flows[512];
        struct coll coll = {"AllReduce", "ncclFloat32", "RING", seq++, 100, 4};
        run_coll(ctx, 41, &coll, "all_reduce", flows, ring_flows(flows, 4, 4, 1, STEPS), 1, &told);
        calls += 8 * (STEPS * CALLS_A_STEP + 3) + 4 * 3 + 4;
        double ahead = calls / rate - (now_s() - began);
        if (ahead > 0.002)
            rest_ms((int)(ahead * 1000));
    }
    double took = now_s() - began;
    printf("rate %.0f\nsampler_core_fraction %.6f\n", calls / took, (sampler_cpu_s() - cpu_began) / took);
    rest_ms(300);
    nccl->finalize(ctx);
    print_flows(&told);
}
