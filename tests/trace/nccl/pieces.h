/* Pieces of NCCL that scenes are made of, and what they have counted: the truth. */
#ifndef EVERTRAIN_PIECES_H
#define EVERTRAIN_PIECES_H
#include "play.h"

#define BYTES 1000
enum { GPU = 8, SENT = 9, ASKED = 10, FLUSH = 11, GIVEN = 12, PEER = 20, PROGRESS = 19, KERNEL_STOP = 22 };

extern struct player *nccl;
extern int full_memory; /* see posix_fallocate in driver.c */

struct truth {
    int used, channel, peer, sends;
    unsigned long long comm, times, total, ready, transmitted, done, received, consumed, bytes;
};
struct told {
    struct truth flows[4096];
    int flow_count;
};

void print_flows(struct told *told);
void print_op(unsigned long long comm, const char *op, unsigned long long seq, unsigned long long bytes);
void rest_ms(int milliseconds);
void *join(unsigned long long hash, int ranks, int rank);
void send_step(void *ctx, void *flow, int step, int looks);
void receive_step(void *ctx, void *flow, int step, int tries);
void count_flow(struct told *told, unsigned long long comm, const struct flow *flow);
/* All flows of an operation as the proxy serves them: a step of each in turn. */
void serve(void *ctx, void *op, struct flow *flows, int count, int looks, struct told *told, unsigned long long comm);
/* A collective from its call to its end. */
void run_coll(void *ctx, unsigned long long comm, const struct coll *coll, const char *op, struct flow *flows,
              int count, int looks, struct told *told);
int ring_flows(struct flow *flows, int channels, int ranks, int rank, int steps);
int tree_flows(struct flow *flows, int channels, int rank, int steps);
#endif
