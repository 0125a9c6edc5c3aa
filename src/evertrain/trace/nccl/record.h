/* Written by evertrain.trace.layout; a test compares the two. */
#ifndef EVERTRAIN_RECORD_H
#define EVERTRAIN_RECORD_H
#include <stddef.h>
#include <stdint.h>

#define EV_MAGIC "EVTRACE"
#define EV_LAYOUT 1
#define EV_RECORD_BYTES 128
#define EV_HEADER_BYTES 4096
#define EV_HEAD_AT 256
#define EV_LOST_AT 264
#define EV_POINT_TO_POINT 1
#define EV_COALESCED 2
#define EV_POSTED_ONLY 4
#define EV_GRAPH 8
#define EV_FOREIGN 16
#define EV_RING 32
#define EV_SIDE_WHOLE 0
#define EV_SIDE_SEND 1
#define EV_SIDE_RECEIVE 2
#define EV_HEAD_NONE 0
#define EV_HEAD_SEND_GPU 8
#define EV_HEAD_SEND_WAIT 9
#define EV_HEAD_RECV_WAIT 10
#define EV_HEAD_RECV_FLUSH 11
#define EV_HEAD_RECV_GPU 12
#define EV_HEAD_SEND_PEER 20
#define EV_HEAD_BEGUN 31
#define EV_WRITER_HOOK 1
#define EV_WRITER_AGENT 2
#define EV_WRITER_NCCL 3
#define EV_KIND_NONE 0
#define EV_KIND_DONE 1
#define EV_KIND_STATE 2
#define EV_KIND_BLOCKED 3
#define EV_KIND_FLOW 4
#define EV_KIND_HOST 5
#define EV_KIND_COMMUNICATOR 6
#define EV_SEEN_NOT 0
#define EV_SEEN_WAIT 1
#define EV_SEEN_POLL 2
#define EV_SEEN_CALLBACK 3
#define EV_SEEN_KERNEL 4
#define EV_SEEN_PROXY 5
#define EV_OP_NONE 0
#define EV_OP_ALL_REDUCE 1
#define EV_OP_ALL_REDUCE_COALESCED 2
#define EV_OP_BROADCAST 3
#define EV_OP_REDUCE 4
#define EV_OP_ALL_GATHER 5
#define EV_OP_ALL_GATHER_INTO_TENSOR 6
#define EV_OP_ALL_GATHER_INTO_TENSOR_COALESCED 7
#define EV_OP_ALL_GATHER_COALESCED 8
#define EV_OP_REDUCE_SCATTER 9
#define EV_OP_REDUCE_SCATTER_TENSOR 10
#define EV_OP_REDUCE_SCATTER_TENSOR_COALESCED 11
#define EV_OP_GATHER 12
#define EV_OP_SCATTER 13
#define EV_OP_ALL_TO_ALL 14
#define EV_OP_ALL_TO_ALL_SINGLE 15
#define EV_OP_BARRIER 16
#define EV_OP_MONITORED_BARRIER 17
#define EV_OP_SEND 18
#define EV_OP_RECV 19
#define EV_OP_RECV_ANY_SOURCE 20
#define EV_OP_OTHER 21
#define EV_UNSEEN 0xffffffffu
#define EV_NOBODY (-1)
#define EV_ANYBODY (-2)

struct ev_header {
    char magic[8];
    uint32_t layout;
    uint32_t record_bytes;
    uint64_t capacity;
    uint32_t table;
    uint32_t writer;
    int32_t rank;
    uint32_t pid;
    int64_t term;
    int64_t attempt;
    uint64_t monotonic_ns;
    uint64_t wall_ns;
    char node[64];
    char job[64];
    uint32_t crc;
    uint32_t pad;
};

struct ev_operation {
    uint64_t number;
    uint8_t kind;
    uint8_t seen;
    uint8_t op;
    uint8_t flags;
    uint16_t channel;
    int16_t device;
    int32_t rank;
    int32_t peer;
    uint64_t comm;
    uint64_t seq;
    uint64_t order;
    uint64_t bytes;
    uint64_t t_posted;
    uint64_t t_wait;
    uint64_t t_done;
    uint64_t t;
    uint32_t stuck_ms;
    uint32_t total;
    uint32_t ready;
    uint32_t transmitted;
    uint32_t done;
    uint32_t received;
    uint32_t consumed;
    uint8_t head;
    uint8_t recv_head;
    uint16_t flow;
    uint32_t crc;
    uint32_t check;
};

struct ev_host {
    uint64_t number;
    uint8_t kind;
    uint8_t seen;
    uint8_t op;
    uint8_t flags;
    uint16_t channel;
    int16_t device;
    int32_t rank;
    int32_t peer;
    uint64_t comm;
    uint64_t seq;
    uint64_t t;
    uint32_t dt_us;
    uint16_t threads;
    uint8_t state;
    uint8_t frozen;
    uint64_t cpu_us;
    uint64_t delay_us;
    uint64_t throttled_us;
    uint32_t throttled;
    uint8_t carrier;
    uint8_t pad8;
    uint16_t pad16;
    uint64_t faults;
    uint64_t read_bytes;
    uint64_t wrote_bytes;
    uint64_t wire_bytes;
    uint32_t crc;
    uint32_t check;
};

struct ev_communicator {
    uint64_t number;
    uint8_t kind;
    uint8_t seen;
    uint8_t op;
    uint8_t flags;
    uint16_t channel;
    int16_t device;
    int32_t rank;
    int32_t peer;
    uint64_t comm;
    uint64_t seq;
    uint64_t t;
    uint64_t t_end;
    int32_t of_rank;
    int32_t ranks;
    int32_t nodes;
    uint16_t api;
    uint16_t pad;
    uint32_t mask;
    uint32_t version;
    char name[40];
    uint32_t crc;
    uint32_t check;
};

_Static_assert(sizeof(struct ev_host) == EV_RECORD_BYTES, "a record has 128 bytes");
_Static_assert(sizeof(struct ev_communicator) == EV_RECORD_BYTES, "a record has 128 bytes");
_Static_assert(sizeof(struct ev_operation) == EV_RECORD_BYTES, "a record has 128 bytes");
_Static_assert(sizeof(struct ev_header) == 208, "of the header");
_Static_assert(offsetof(struct ev_operation, crc) == 120, "the CRC covers the rest");
#endif
