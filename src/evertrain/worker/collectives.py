"""Which collective is this rank in? A kernel in front of every `c10d` operator tells the page and the trace.

torch.distributed sends each collective through PyTorch's dispatcher, whoever asked for it: the script, DDP's reducer
in C++, FSDP2, functional collectives. A Python kernel at the key `BackendSelect` sees them all, on any device.

    launched ──▶ page: entered ──▶ Work.wait() returns, or a later look finds it completed ──▶ page: done

C++ code waits without Python, so on the page `entered` may be stale until the next collective or optimizer step; for
the trace a thread looks every 20 ms (`worker.poller`). Some of gloo's operators (reduce-scatter, send, receive) never
say that they are completed: their end is the return of `wait()`. Where nobody calls it, they count as posted, and
they are not kept alive for it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from evertrain.worker import communicators, graphs, page, payload, session
from evertrain.worker.poller import Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from evertrain.worker.operations import Operation

_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})
_ARROWS = {"dst": "->", "src": "<-"}
"""By the argument that says who the peer is: `send 0->1`, positions in the group, as the flight recorder has it."""
_NO_COMMUNICATION = frozenset({"check_for_nan"})
_QUIET_ON_CPU = _POINT_TO_POINT | {"reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"}
"""gloo's Work of these says that it is completed to nobody, and does its work in `wait()`."""
MOST_HELD = 255
"""So many that have not said they are completed stay known; each keeps its tensors alive."""

_pending: dict[int, Operation] = {}
"""Launched and not seen to end, oldest first, by the id of the Work."""
_quiet: dict[int, tuple[Operation, weakref.ref[Any]]] = {}
"""The same for those that end in `wait()` only; whoever may still call it keeps the Work."""
_latest: dict[int, Any] = {}
"""The Work of such a one on its way from here to the script, by thread."""
_followers: dict[int, tuple[Operation, ...]] = {}
"""Operations of a coalescing block beside its first, by the id of the one Work that they have."""
_wait = Work.wait
"""As PyTorch has it."""
_library: torch.library.Library | None = None


def install() -> None:
    """Put the kernels in place; costs milliseconds, so the zygote does it before it forks."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "c10d" and "." not in name and name not in _NO_COMMUNICATION:
            kernel = _kernel(name)
            if kernel is not None:
                _library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    _see_waits()
    _see_coalescing()
    graphs.see_captures(_poller.pause)


def _kernel(qualified: str) -> Callable[..., Any] | None:
    """The kernel of one operator, or None if it takes no process group."""
    operator = getattr(torch.ops.c10d, qualified).default
    arguments_of = operator._schema.arguments
    kinds = [str(argument.type) for argument in arguments_of]
    group_at = next((at for at, kind in enumerate(kinds) if kind.endswith("ProcessGroup")), None)
    if group_at is None:
        return None
    returns = [str(value.type).endswith("Work") for value in operator._schema.returns]
    work_at = returns.index(True) if any(returns) else None
    alone = len(returns) == 1

    peer_at = next((at for at, one in enumerate(arguments_of) if one.name in _ARROWS), None)
    arrow = "" if peer_at is None else _ARROWS[arguments_of[peer_at].name]
    # an argument that is as the schema has it by default is left out
    async_at = next((at for at, one in enumerate(arguments_of) if one.name == "async_op"), len(arguments_of))

    # what `operator.redispatch` calls
    redispatch = operator._handle.redispatch_boxed
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    unbox_group, unbox_work = ProcessGroup.unbox, Work.unbox
    name = qualified.rstrip("_")
    is_point_to_point = qualified in _POINT_TO_POINT
    size = payload.measure(name, kinds)
    entered, done, pending, known, latest = page.ENTERED, page.DONE, _pending, communicators.known, _latest
    poller = _poller

    def kernel(keys: Any, *arguments: Any) -> Any:
        current = session.current
        if current is None:
            return redispatch(keys & after, *arguments)
        now = monotonic_ns()
        group = unbox_group(arguments[group_at])
        communicator = known.get(group.group_name)
        if communicator is None:
            communicator = communicators.meet(group, current)
        tensor = arguments[0]
        while type(tensor) is list:
            tensor = tensor[0] if tensor else arguments[1]
        key = name, None if peer_at is None else arguments[peer_at], tensor.is_cpu
        kind = communicator.kinds.get(key)
        if kind is None:
            kind = communicators.kind(
                communicator, key, tensor.get_device(), arrow=arrow, rank=current.rank,
                is_point_to_point=is_point_to_point, is_quiet_on_cpu=qualified in _QUIET_ON_CPU,
            )  # fmt: skip
        communicator.order = order = communicator.order + 1
        if is_point_to_point:
            kind.count = sequence = kind.count + 1
            communicator.point_to_point = shown = communicator.point_to_point + 1
        else:
            communicator.collectives = sequence = shown = communicator.collectives + 1
        if latest:
            latest.pop(get_ident(), None)
        trace = current.trace
        if trace is None and pending:
            _forget_completed()
        current.page.write_collective(communicator.name, shown, kind.op, entered, now / 1e9)
        # the caller of a synchronous one waits for it in a moment
        t_wait = now if len(arguments) > async_at and arguments[async_at] is False and not kind.is_quiet else 0
        if trace is None:
            measured = place = 0
        else:
            measured = size(arguments)
            place = trace.post(kind, sequence, order, measured, now, t_wait)
        try:
            if work_at is None:  # it blocks
                operation = (kind, shown, sequence, order, measured, now, 0, place, None)
                return _blocking(operation, functools.partial(redispatch, keys & after, *arguments))
            result = redispatch(keys & after, *arguments)
        except BaseException:
            if trace is not None:
                trace.withdraw(place)
            raise
        boxed = result if alone else result[work_at]
        if boxed is None or graphs.capturing:
            _without_work((kind, shown, sequence, order, measured, now, t_wait, place, None), tensor)
            return result
        work = unbox_work(boxed)
        identity = id(work)
        if kind.is_quiet:
            reference = weakref.ref(work, functools.partial(_let_go, identity))
            _quiet[identity] = (kind, shown, sequence, order, measured, now, 0, place, None), reference
            latest[get_ident()] = work
            return result
        pending[identity] = (kind, shown, sequence, order, measured, now, t_wait, place, work)
        # more than the one that will be waited for now: somebody has not waited
        if not poller.is_awake and trace is not None and (not t_wait or len(pending) > 1):
            poller.wake()
        return result

    def _blocking(operation: Operation, call: Callable[[], Any]) -> Any:
        current = session.current
        assert current is not None
        kind, shown, *_ = operation
        if (trace := current.trace) is None:
            result = call()
        else:
            key = id(operation)
            began = trace.wait(key, operation)
            try:
                result = call()
            finally:
                trace.go_on(key)
            trace.end(operation, kind.waited, began, monotonic_ns())
        current.page.write_collective(kind.communicator.name, shown, kind.op, done)
        return result

    return kernel


def _without_work(operation: Operation, tensor: Any) -> None:
    """Nobody gets a Work to wait for, or it may not be asked."""
    current = session.current
    trace = None if current is None else current.trace
    kind = operation[0]
    if graphs.capturing:
        if current is not None and trace is not None:
            trace.end(operation, kind.prefix("done", flags=graphs.FLAGS), 0, 0)
            graphs.explain(current)
    elif kind.communicator.together is not None:
        kind.communicator.together.append(operation)
    elif trace is not None:
        event = graphs.event(tensor)
        if event is None:
            trace.end(operation, kind.given_up, 0, 0)
        else:
            _pending[id(event)] = (*operation[:-1], event)
            if not _poller.is_awake:
                _poller.wake()


def _see_waits() -> None:
    original = _wait
    entered, done, pending, quiet = page.ENTERED, page.DONE, _pending, _quiet

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **named: Any) -> Any:
        current = session.current
        key = id(self)
        operation = pending.get(key)
        if operation is None and key in quiet:
            operation = quiet[key][0]
        if operation is None or current is None:
            return original(self, *arguments, **named)
        written = current.page
        kind, shown = operation[0], operation[1]
        group, op = kind.communicator.name, kind.op
        of_group, number, of_op, _ = written.collective
        if number != shown or of_group is not group or of_op is not op:
            written.write_collective(group, shown, op, entered)
        trace = current.trace
        began = 0 if trace is None else trace.wait(key, operation)
        try:
            result = original(self, *arguments, **named)
        except BaseException:
            if trace is not None:
                trace.go_on(key)
                _end(key, trace, kind.given_up, began, 0)
            raise
        if trace is not None:
            trace.go_on(key)
        # on a GPU wait() only orders streams: the collective itself may still be under way
        if kind.is_cpu or self.is_completed():
            now = monotonic_ns()
            if kind.is_any and key in quiet:
                operation = communicators.received(operation, self._source_rank(), current.rank)
                quiet[key] = operation, quiet[key][1]
                kind = operation[0]
            _end(key, trace, kind.waited, began, now)
            written.write_collective(group, shown, op, done, now / 1e9)
        elif trace is not None and not _poller.is_awake:
            _poller.wake()
        return result

    Work.wait = wait  # type: ignore[method-assign]


def _see_coalescing() -> None:
    """NCCL posts what is in a coalescing block at its end, and gives one Work for all."""
    start, end = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

    @functools.wraps(start)
    def started(self: Any, *arguments: Any, **named: Any) -> Any:
        result = start(self, *arguments, **named)
        current = session.current
        if current is not None:
            communicator = communicators.known.get(self.group_name) or communicators.meet(self, current)
            communicator.together = []
        return result

    @functools.wraps(end)
    def ended(self: Any, *arguments: Any, **named: Any) -> Any:
        work = end(self, *arguments, **named)
        current = session.current
        communicator = None if current is None else communicators.known.get(self.group_name)
        if communicator is not None and communicator.together is not None:
            operations, communicator.together = communicator.together, None
            if operations:
                _together(operations, work)
        return work

    ProcessGroup._start_coalescing = started  # type: ignore[method-assign]
    ProcessGroup._end_coalescing = ended  # type: ignore[method-assign]


def _together(operations: list[Operation], work: Any) -> None:
    current = session.current
    if current is None or current.trace is None:
        return
    if work is None:
        for one in operations:
            current.trace.end(one, one[0].given_up, 0, 0)
        return
    _followers[id(work)] = tuple(operations[1:])
    _pending[id(work)] = (*operations[0][:-1], work)
    if not _poller.is_awake:
        _poller.wake()


def _end(key: int, trace: Any, prefix: bytes, t_wait: int, t_done: int) -> bool:
    """It is over: to be told once, whoever sees it first."""
    operation = _pending.pop(key, None)
    if operation is None:
        if (found := _quiet.pop(key, None)) is None:
            return False
        operation = found[0]
        _latest.pop(get_ident(), None)
    if trace is not None:
        trace.end(operation, prefix, t_wait, t_done)
        if _followers:
            for one in _followers.pop(key, ()):
                trace.end(one, one[0].prefix("done", prefix[1]), t_wait, t_done)
    return True


def _let_go(key: int, _: Any) -> None:
    """Nobody in Python has this Work any more: dropped, or C++ will wait for it."""
    found = _quiet.pop(key, None)
    current = session.current
    if found is not None and current is not None and current.trace is not None:
        current.trace.end(found[0], found[0][0].given_up, 0, 0)


def _look() -> bool:
    """See what has ended; tells whether anything is in flight."""
    current = session.current
    if current is None or current.trace is None:
        return False
    trace = current.trace
    while len(_pending) > MOST_HELD:
        key, operation = next(iter(_pending.items()))
        _end(key, trace, operation[0].given_up, 0, 0)
    for key, operation in list(_pending.items()):
        kind, work = operation[0], operation[-1]
        # what Python waits for in this moment tells its end by itself
        if work.is_completed() and not (kind.is_cpu and trace.waits_for(key)):
            failed = kind.is_cpu and not work.is_success()
            _end(key, trace, kind.given_up if failed else kind.polled, 0, 0 if failed else monotonic_ns())
    return bool(_pending)


_poller = Poller(_look)
"""Of this process; begun where something is launched that nobody may wait for in Python."""


def _forget_completed() -> None:
    """Without a trace: let go of what has ended, oldest first, and of the oldest if there are too many."""
    while _pending:
        key = next(iter(_pending))
        if not (_pending[key][-1].is_completed() or len(_pending) > MOST_HELD):
            return
        _pending.pop(key, None)


def _meet_ends() -> None:
    """gloo lets go of who waits in C++ a moment before its Work says that it is completed: wait for that moment."""
    for kind, *_, work in list(_pending.values()):
        if kind.is_cpu and not work.is_completed():
            # of a Work without a future, and of one that failed, whoever waits for it tells
            with contextlib.suppress(RuntimeError):
                if work.get_future().done():
                    _wait(work)


def settle_pending() -> None:
    """An optimizer step begins: what DDP launched and C++ waited for is over, and the page should say so."""
    current = session.current
    if current is None:
        return
    if _pending and not graphs.capturing:
        _meet_ends()
        if current.trace is None:
            _forget_completed()
        else:
            _look()
    _latest.clear()
    group, shown, op, state = current.page.collective
    if not _pending and state == page.ENTERED:
        current.page.write_collective(group, shown, op, page.DONE)
