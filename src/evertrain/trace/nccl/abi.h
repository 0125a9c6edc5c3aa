/* What does NCCL hand to a profiler plugin? Versions 4 to 6 of the interface, in declarations of our own.
 *
 * Names of types follow NCCL's, with `nccl_` for what has no name there. `abi_asserts.h` holds the sizes, offsets and
 * numbers that were checked against NCCL's releases 2.27.3 to 2.30.7; whoever includes this file is held to them.
 * No version above 6 is declared or exported before it has been checked in the same way. */
#ifndef EVERTRAIN_NCCL_ABI_H
#define EVERTRAIN_NCCL_ABI_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EV_NCCL_NEWEST 6

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

typedef enum {
    NCCL_LOG_NONE = 0,
    NCCL_LOG_VERSION = 1,
    NCCL_LOG_WARN = 2,
    NCCL_LOG_INFO = 3,
    NCCL_LOG_ABORT = 4,
    NCCL_LOG_TRACE = 5
} ncclDebugLogLevel;
#define NCCL_INIT 0x1ul

typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel level, unsigned long flags, const char *file, int line,
                                  const char *fmt, ...);

enum {
    ncclProfileGroup = 1 << 0,
    ncclProfileColl = 1 << 1,
    ncclProfileP2p = 1 << 2,
    ncclProfileProxyOp = 1 << 3,
    ncclProfileProxyStep = 1 << 4,
    ncclProfileProxyCtrl = 1 << 5,
    ncclProfileKernelCh = 1 << 6,
    ncclProfileNetPlugin = 1 << 7,
    ncclProfileGroupApi = 1 << 8,
    ncclProfileCollApi = 1 << 9,
    ncclProfileP2pApi = 1 << 10,
    ncclProfileKernelLaunch = 1 << 11,
    ncclProfileCeColl = 1 << 12,
    ncclProfileCeSync = 1 << 13,
    ncclProfileCeBatch = 1 << 14
};
#define EV_NCCL_V4_BITS 0xff
#define EV_NCCL_V5_BITS 0xfff
#define EV_NCCL_V6_BITS 0x7fff

typedef enum {
    ncclProfilerProxyOpSendPosted = 0,
    ncclProfilerProxyOpSendRemFifoWait = 1,
    ncclProfilerProxyOpSendTransmitted = 2,
    ncclProfilerProxyOpSendDone = 3,
    ncclProfilerProxyOpRecvPosted = 4,
    ncclProfilerProxyOpRecvReceived = 5,
    ncclProfilerProxyOpRecvTransmitted = 6,
    ncclProfilerProxyOpRecvDone = 7,
    ncclProfilerProxyStepSendGPUWait = 8,
    ncclProfilerProxyStepSendWait = 9,
    ncclProfilerProxyStepRecvWait = 10,
    ncclProfilerProxyStepRecvFlushWait = 11,
    ncclProfilerProxyStepRecvGPUWait = 12,
    ncclProfilerProxyCtrlIdle = 13,
    ncclProfilerProxyCtrlActive = 14,
    ncclProfilerProxyCtrlSleep = 15,
    ncclProfilerProxyCtrlWakeup = 16,
    ncclProfilerProxyCtrlAppend = 17,
    ncclProfilerProxyCtrlAppendEnd = 18,
    ncclProfilerProxyOpInProgress_v4 = 19,
    ncclProfilerProxyStepSendPeerWait_v4 = 20,
    ncclProfilerNetPluginUpdate = 21,
    ncclProfilerKernelChStop = 22,
    ncclProfilerGroupStartApiStop = 23,
    ncclProfilerGroupEndApiStart = 24,
    ncclProfilerCeCollStart = 25,
    ncclProfilerCeCollComplete = 26,
    ncclProfilerCeSyncStart = 27,
    ncclProfilerCeSyncComplete = 28,
    ncclProfilerCeBatchStart = 29,
    ncclProfilerCeBatchComplete = 30
} ncclProfilerEventState_t;
typedef ncclProfilerEventState_t ncclProfilerEventState_v4_t;
typedef ncclProfilerEventState_t ncclProfilerEventState_v5_t;
typedef ncclProfilerEventState_t ncclProfilerEventState_v6_t;

/* --- members of descriptors that are the same in all versions */

struct nccl_proxy_op {
    pid_t pid;
    uint8_t channelId;
    int peer;
    int nSteps;
    int chunkSize;
    int isSend;
};
struct nccl_proxy_step {
    int step;
};
struct nccl_kernel_ch {
    uint8_t channelId;
    uint64_t pTimer;
};
struct nccl_net_plugin {
    int64_t id;
    void *data;
};
struct nccl_group_api {
    bool graphCaptured;
    int groupDepth;
};
struct nccl_coll_api {
    const char *func;
    size_t count;
    const char *datatype;
    int root;
    void *stream;
    bool graphCaptured;
};
struct nccl_p2p_api {
    const char *func;
    size_t count;
    const char *datatype;
    void *stream;
    bool graphCaptured;
};
struct nccl_kernel_launch {
    void *stream;
};
#define EV_NCCL_COLL \
    uint64_t seqNumber; \
    const char *func; \
    const void *sendBuff; \
    void *recvBuff; \
    size_t count; \
    int root; \
    const char *datatype; \
    uint8_t nChannels; \
    uint8_t nWarps; \
    const char *algo; \
    const char *proto;
#define EV_NCCL_P2P \
    const char *func; \
    void *buff; \
    const char *datatype; \
    size_t count; \
    int peer; \
    uint8_t nChannels;
struct nccl_coll_v4 {
    EV_NCCL_COLL
};
struct nccl_p2p_v4 {
    EV_NCCL_P2P
};
struct nccl_coll_v5 {
    EV_NCCL_COLL
    void *parentGroup;
};
struct nccl_p2p_v5 {
    EV_NCCL_P2P
    void *parentGroup;
};
struct nccl_ce_coll {
    uint64_t seqNumber;
    const char *func;
    const void *sendBuff;
    void *recvBuff;
    size_t count;
    int root;
    const char *datatype;
    const char *syncStrategy;
    bool intraBatchSync;
    uint32_t batchSize;
    uint32_t numBatches;
    uint32_t ceSeqNum;
    void *stream;
};
struct nccl_ce_sync {
    bool isComplete;
    int nRanks;
};
struct nccl_ce_batch {
    int numOps;
    size_t totalBytes;
    bool useIntraSync;
};

/* --- descriptors */

typedef struct {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_coll_v4 coll;
        struct nccl_p2p_v4 p2p;
        struct nccl_proxy_op proxyOp;
        struct nccl_proxy_step proxyStep;
        struct nccl_kernel_ch kernelCh;
        struct nccl_net_plugin netPlugin;
    };
} ncclProfilerEventDescr_v4_t;

typedef struct {
    uint64_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_group_api groupApi;
        struct nccl_coll_api collApi;
        struct nccl_p2p_api p2pApi;
        struct nccl_kernel_launch kernelLaunch;
        struct nccl_coll_v5 coll;
        struct nccl_p2p_v5 p2p;
        struct nccl_proxy_op proxyOp;
        struct nccl_proxy_step proxyStep;
        struct nccl_kernel_ch kernelCh;
        struct nccl_net_plugin netPlugin;
    };
} ncclProfilerEventDescr_v5_t;

typedef struct {
    uint64_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_group_api groupApi;
        struct nccl_coll_api collApi;
        struct nccl_p2p_api p2pApi;
        struct nccl_kernel_launch kernelLaunch;
        struct nccl_coll_v5 coll;
        struct nccl_p2p_v5 p2p;
        struct nccl_proxy_op proxyOp;
        struct nccl_proxy_step proxyStep;
        struct nccl_kernel_ch kernelCh;
        struct nccl_net_plugin netPlugin;
        struct nccl_ce_coll ceColl;
        struct nccl_ce_sync ceCollSync;
        struct nccl_ce_batch ceCollBatch;
    };
} ncclProfilerEventDescr_v6_t;

typedef union {
    struct {
        size_t transSize;
    } proxyStep;
    struct {
        int appendedProxyOps;
    } proxyCtrl;
    struct {
        void *data;
    } netPlugin;
    struct {
        uint64_t pTimer;
    } kernelCh;
} ncclProfilerEventStateArgs_v4_t;
/* the same members in version 5; a type of its own, so that the versions cannot be mixed up unseen */
typedef union {
    struct {
        size_t transSize;
    } proxyStep;
    struct {
        int appendedProxyOps;
    } proxyCtrl;
    struct {
        void *data;
    } netPlugin;
    struct {
        uint64_t pTimer;
    } kernelCh;
} ncclProfilerEventStateArgs_v5_t;
typedef ncclProfilerEventStateArgs_v5_t ncclProfilerEventStateArgs_v6_t;

/* --- what a plugin exports */

typedef ncclResult_t (*nccl_init_v4)(void **ctx, int *mask, const char *comm_name, uint64_t comm_hash, int n_nodes,
                                     int n_ranks, int rank, ncclDebugLogger_t log);
typedef ncclResult_t (*nccl_init_v5)(void **ctx, uint64_t comm_id, int *mask, const char *comm_name, int n_nodes,
                                     int n_ranks, int rank, ncclDebugLogger_t log);
typedef nccl_init_v5 nccl_init_v6;

#define EV_NCCL_PLUGIN(V) \
    typedef struct { \
        const char *name; \
        nccl_init_##V init; \
        ncclResult_t (*startEvent)(void *ctx, void **handle, ncclProfilerEventDescr_##V##_t *descr); \
        ncclResult_t (*stopEvent)(void *handle); \
        ncclResult_t (*recordEventState)(void *handle, ncclProfilerEventState_##V##_t state, \
                                         ncclProfilerEventStateArgs_##V##_t *args); \
        ncclResult_t (*finalize)(void *ctx); \
    } ncclProfiler_##V##_t;
EV_NCCL_PLUGIN(v4)
EV_NCCL_PLUGIN(v5)
EV_NCCL_PLUGIN(v6)

#include "abi_asserts.h"
#endif
