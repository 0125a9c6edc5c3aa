/* One version; included with V (v4) and NUMBER (4). Symbol and struct come from the same V. */
#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define N(what) CAT(V, what)
#define T_(what, v) ncclProfiler##what##_##v##_t
#define T__(what, v) T_(what, v)
#define T(what) T__(what, V)

static T() *N(plugin);

static void *N(start)(void *ctx, T(EventDescr) *event) {
    void *handle = (void *)0x5a5a5a5a5a5a5a5aull;
    check(N(plugin)->startEvent(ctx, &handle, event));
    return handle;
}

static T(EventDescr) N(event)(uint64_t type, void *parent, int rank) {
    T(EventDescr) event;
    memset(&event, 0xa5, sizeof event);
    event.type = (__typeof__(event.type))type;
    event.parentObj = parent;
    event.rank = rank;
    return event;
}

static void *N(init)(uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank) {
    void *ctx = NULL;
#if NUMBER == 4
    check(N(plugin)->init(&ctx, mask, name, hash, nodes, ranks, rank, said));
#else
    check(N(plugin)->init(&ctx, hash, mask, name, nodes, ranks, rank, said));
#endif
    return ctx;
}

static void *N(coll)(void *ctx, void *parent, const struct coll *coll) {
    T(EventDescr) event = N(event)(ncclProfileColl, parent, 1);
    event.coll.seqNumber = coll->seq;
    /* texts hold during the call only */
    char *func = strdup(coll->func), *datatype = strdup(coll->datatype), *algo = strdup(coll->algo);
    event.coll.func = func;
    event.coll.datatype = datatype;
    event.coll.algo = algo;
    event.coll.proto = "SIMPLE";
    event.coll.count = coll->count;
    event.coll.root = 0;
    event.coll.sendBuff = event.coll.recvBuff = NULL;
    event.coll.nChannels = coll->channels;
    event.coll.nWarps = 16;
    void *handle = N(start)(ctx, &event);
    memset(func, '?', strlen(func));
    free(func);
    free(datatype);
    free(algo);
    return handle;
}

static void *N(p2p)(void *ctx, void *parent, const char *func, const char *datatype, uint64_t count, int peer) {
    T(EventDescr) event = N(event)(ncclProfileP2p, parent, 1);
    event.p2p.func = func;
    event.p2p.datatype = datatype;
    event.p2p.count = count;
    event.p2p.peer = peer;
    event.p2p.buff = NULL;
    /* nChannels stays poison: NCCL's shim for version 4 never writes it, and up to 2.30 it is too large anyway */
    return N(start)(ctx, &event);
}

static void *N(flow)(void *ctx, void *parent, const struct flow *flow) {
    T(EventDescr) event = N(event)(ncclProfileProxyOp, parent, 1);
    event.proxyOp.pid = flow->pid;
    event.proxyOp.channelId = (uint8_t)flow->channel;
    event.proxyOp.peer = flow->peer;
    event.proxyOp.nSteps = flow->steps;
    event.proxyOp.chunkSize = 1 << 20;
    event.proxyOp.isSend = flow->sends;
    return N(start)(ctx, &event);
}

static void *N(step)(void *ctx, void *parent, int step) {
    /* poisoning each of them would cost more than the plugin does */
    T(EventDescr) event;
    event.type = ncclProfileProxyStep;
    event.parentObj = parent;
    event.rank = 1;
    event.proxyStep.step = step;
    void *handle = NULL;
    N(plugin)->startEvent(ctx, &handle, &event);
    return handle;
}

static void *N(kernel)(void *ctx, void *parent, int channel) {
    T(EventDescr) event = N(event)(ncclProfileKernelCh, parent, 0);
    event.kernelCh.channelId = (uint8_t)channel;
    event.kernelCh.pTimer = 1234567890;
    return N(start)(ctx, &event);
}

static void *N(api)(void *ctx, int captured) {
#if NUMBER >= 5
    T(EventDescr) group = N(event)(ncclProfileGroupApi, NULL, 0);
    group.groupApi.graphCaptured = captured;
    group.groupApi.groupDepth = 1;
    void *parent = N(start)(ctx, &group);
    T(EventDescr) event = N(event)(ncclProfileCollApi, parent, 0);
    event.collApi.func = "AllReduce";
    event.collApi.count = 1;
    event.collApi.datatype = "ncclFloat32";
    event.collApi.root = 0;
    event.collApi.stream = NULL;
    event.collApi.graphCaptured = captured;
    return N(start)(ctx, &event);
#else
    (void)captured;
    T(EventDescr) event = N(event)(ncclProfileGroup, NULL, 0);
    return N(start)(ctx, &event);
#endif
}

static void *N(other)(void *ctx, uint64_t type) {
    T(EventDescr) event = N(event)(type, NULL, 0);
    return N(start)(ctx, &event);
}

static void N(state)(void *handle, int state, size_t bytes) {
    T(EventStateArgs) args;
    args.proxyStep.transSize = bytes;
    N(plugin)->recordEventState(handle, (T(EventState))state, &args);
}

static void N(bare_state)(void *handle, int state) {
    check(N(plugin)->recordEventState(handle, (T(EventState))state, NULL));
}

static void N(stop)(void *handle) { check(N(plugin)->stopEvent(handle)); }
static void N(finalize)(void *ctx) { check(N(plugin)->finalize(ctx)); }

static struct player N(player) = {
    NUMBER,   N(init),  N(coll),  N(p2p),        N(flow), N(step),     N(kernel),
    N(api),   N(other), N(state), N(bare_state), N(stop), N(finalize),
};

#undef CAT_
#undef CAT
#undef N
#undef T_
#undef T__
#undef T
#undef V
#undef NUMBER
