/* One version of the interface; included once for each, with EV_V (v4), EV_NUMBER (4) and EV_MASK. The events that only
 * some versions have are between #if. Nothing is ever reported to NCCL as an error. */
#define EV_JOIN_(a, b) a##_##b
#define EV_JOIN(a, b) EV_JOIN_(a, b)
#define EV_NAME(what) EV_JOIN(EV_V, what)
#define EV_TYPE_(what, v) ncclProfiler##what##_##v##_t
#define EV_TYPE__(what, v) EV_TYPE_(what, v)
#define EV_TYPE(what) EV_TYPE__(what, EV_V)

static ncclResult_t EV_NAME(start)(void *ctx, void **handle, EV_TYPE(EventDescr) *event) {
    switch (event->type) {
    case ncclProfileProxyStep:
        *handle = ev_begin_step(event->parentObj, event->proxyStep.step);
        break;
    case ncclProfileProxyOp:
        *handle = ev_begin_flow(ctx, event->parentObj, &event->proxyOp);
        break;
    case ncclProfileKernelCh:
        *handle = ev_begin_kernel(event->parentObj, event->kernelCh.channelId);
        break;
    case ncclProfileColl: {
        struct ev_coll coll = {
            .seq = event->coll.seqNumber, .func = event->coll.func, .datatype = event->coll.datatype,
            .algo = event->coll.algo, .count = event->coll.count, .channels = event->coll.nChannels,
        };
        *handle = ev_begin_coll(ctx, event->parentObj, &coll);
        break;
    }
    case ncclProfileP2p: {
        struct ev_p2p p2p = {
            .func = event->p2p.func, .datatype = event->p2p.datatype, .count = event->p2p.count,
            .peer = event->p2p.peer,
        };
        *handle = ev_begin_p2p(ctx, event->parentObj, &p2p);
        break;
    }
#if EV_NUMBER >= 5
    case ncclProfileCollApi:
        *handle = ev_api(event->collApi.graphCaptured);
        break;
    case ncclProfileP2pApi:
        *handle = ev_api(event->p2pApi.graphCaptured);
        break;
#endif
    default: /* ancestors come with what was asked for */
        *handle = NULL;
    }
    return ncclSuccess;
}

static ncclResult_t EV_NAME(stop)(void *handle) {
    uint64_t number = (uint64_t)(uintptr_t)handle;
    switch (ev_kind(number)) {
    case EV_SEND_STEP:
    case EV_RECV_STEP:
        ev_end_step(number);
        break;
    default:
        ev_end(number);
    }
    return ncclSuccess;
}

static ncclResult_t EV_NAME(record)(void *handle, EV_TYPE(EventState) state, EV_TYPE(EventStateArgs) *args) {
    uint64_t number = (uint64_t)(uintptr_t)handle;
    switch (ev_kind(number)) {
    case EV_SEND_STEP:
        /* the size is set in this state only */
        ev_record_send(number, state, state == ncclProfilerProxyStepSendWait && args ? args->proxyStep.transSize : 0);
        break;
    case EV_RECV_STEP:
        ev_record_receive(number, state,
                          state == ncclProfilerProxyStepRecvFlushWait && args ? args->proxyStep.transSize : 0);
        break;
    default:
        ev_record_state(number, state);
    }
    return ncclSuccess;
}

#if EV_NUMBER == 4
static ncclResult_t EV_NAME(init)(void **ctx, int *mask, const char *name, uint64_t hash, int nodes, int ranks,
                                  int rank, ncclDebugLogger_t log)
#else
static ncclResult_t EV_NAME(init)(void **ctx, uint64_t hash, int *mask, const char *name, int nodes, int ranks,
                                  int rank, ncclDebugLogger_t log)
#endif
{
    struct ev_wanted wanted = {
        .api = EV_NUMBER, .mask = EV_MASK, .hash = hash, .name = name, .nodes = nodes, .ranks = ranks, .rank = rank,
    };
    ev_join(ctx, mask, &wanted, log);
    return ncclSuccess;
}

static ncclResult_t EV_NAME(finalize)(void *ctx) {
    ev_leave(ctx);
    return ncclSuccess;
}

_Static_assert((EV_MASK & ~EV_JOIN(EV_BITS, EV_NUMBER)) == 0, "only events that this version has");
EV_EXPORT EV_TYPE() EV_SYMBOL(EV_V) = {
    .name = "evertrain",
    .init = EV_NAME(init),
    .startEvent = EV_NAME(start),
    .stopEvent = EV_NAME(stop),
    .recordEventState = EV_NAME(record),
    .finalize = EV_NAME(finalize),
};

#undef EV_JOIN_
#undef EV_JOIN
#undef EV_NAME
#undef EV_TYPE_
#undef EV_TYPE__
#undef EV_TYPE
#undef EV_V
#undef EV_NUMBER
#undef EV_MASK
