"""Which collective is this rank in? A kernel in front of every `c10d` operator tells the page.

torch.distributed sends each collective through PyTorch's dispatcher, whoever asked for it: the script, DDP's reducer
in C++, FSDP2, functional collectives. A Python kernel at the key `BackendSelect` sees them all, on any device.

    launched ──▶ page: entered ──▶ Work.wait() returns, or a later event finds it completed ──▶ page: done

C++ code waits without Python, so `entered` may be stale until the next collective or optimizer step. Some of gloo's
operators (reduce-scatter) never say that they are completed; on the CPU the return of `wait()` says it for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from evertrain.worker import groups, page, session

_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})
_ARROWS = {"dst": "->", "src": "<-"}
"""By the argument that says who the peer is: `send 0->1`, positions in the group, as the flight recorder has it."""
_NO_COMMUNICATION = frozenset({"check_for_nan"})

_pending: dict[int, tuple[bytes, int, bytes, Any, Any]] = {}
"""Launched and not seen to end, oldest first: id of the Work to (group, sequence number, op, Work, tensors)."""
_KEPT_ON_CPU = 8
"""So many that have not said they are completed stay known; each keeps its tensors alive."""
_counters: dict[str, list[Any]] = {}
"""Group name to [its name as bytes, collectives, sends and receives, names of those by operator and peer]."""
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


def _kernel(name: str) -> Callable[..., Any] | None:
    """The kernel of one operator, or None if it takes no process group."""
    operator = getattr(torch.ops.c10d, name).default
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    group_at = next((at for at, kind in enumerate(kinds) if kind.endswith("ProcessGroup")), None)
    if group_at is None:
        return None
    returns = [str(value.type).endswith("Work") for value in operator._schema.returns]
    work_at = returns.index(True) if any(returns) else None
    alone = len(returns) == 1

    peer_at = next((at for at, one in enumerate(operator._schema.arguments) if one.name in _ARROWS), None)
    arrow = "" if peer_at is None else _ARROWS[operator._schema.arguments[peer_at].name]

    redispatch = operator.redispatch
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    unbox_group, unbox_work = ProcessGroup.unbox, Work.unbox
    count_at = 2 if name in _POINT_TO_POINT else 1
    alike = page.text(name.rstrip("_"), 32)
    entered, counters, pending = page.ENTERED, _counters, _pending

    def kernel(keys: Any, *arguments: Any) -> Any:
        current = session.current
        if current is None:
            return redispatch(keys & after, *arguments)
        group_name = unbox_group(arguments[group_at]).group_name
        counter = counters.get(group_name)
        if counter is None:
            counter = counters[group_name] = [page.text(group_name, 48), 0, 0, {}]
            groups.note(current.page_path)
        op = alike
        if peer_at is not None:
            peer = arguments[peer_at]
            op = counter[3].get((alike, peer))
            if op is None:
                own = unbox_group(arguments[group_at]).rank()
                op = counter[3][alike, peer] = page.text(f"{name.rstrip('_')} {own}{arrow}{peer}", 32)
        counter[count_at] = sequence = counter[count_at] + 1
        if pending:
            _forget_completed(keep=_KEPT_ON_CPU)
        current.page.write_collective(counter[0], sequence, op, entered)
        result = redispatch(keys & after, *arguments)
        boxed = None if work_at is None else result if alone else result[work_at]
        if boxed is not None:  # inside a coalescing block there may be none
            work = unbox_work(boxed)
            pending[id(work)] = (counter[0], sequence, op, work, arguments[0])
        return result

    return kernel


def _see_waits() -> None:
    original = Work.wait
    entered, done = page.ENTERED, page.DONE

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **named: Any) -> Any:
        known = _pending.get(id(self))
        current = session.current
        if known is None or current is None:
            return original(self, *arguments, **named)
        written = current.page
        group, sequence, op, _, tensors = known
        if written.collective_seq != sequence or written.group is not group or written.op is not op:
            written.write_collective(group, sequence, op, entered)
        result = original(self, *arguments, **named)
        # on a GPU wait() only orders streams: the collective itself may still be under way
        if self.is_completed() or _is_on_cpu(tensors):
            _pending.pop(id(self), None)
            written.write_collective(group, sequence, op, done)
        return result

    Work.wait = wait  # type: ignore[method-assign]


def _is_on_cpu(tensors: Any) -> bool:
    while type(tensors) is list and tensors:
        tensors = tensors[0]
    return bool(getattr(tensors, "is_cpu", True))


def _forget_completed(keep: int) -> None:
    """Let go of what has ended, oldest first, and of all but `keep` on the CPU."""
    while _pending:
        key = next(iter(_pending))
        *_, work, tensors = _pending[key]
        if not (work.is_completed() or (len(_pending) > keep and _is_on_cpu(tensors))):
            return
        del _pending[key]


def settle_pending() -> None:
    """An optimizer step begins: what DDP launched and C++ waited for is over, and the page should say so."""
    _forget_completed(keep=0)
    current = session.current
    if current is not None and not _pending and current.page.collective_state == page.ENTERED:
        written = current.page
        written.write_collective(written.group, written.collective_seq, written.op, page.DONE)
