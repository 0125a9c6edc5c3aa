"""How many bytes does an operation carry for this rank? The larger of what goes in and what comes out.

all_gather: its output     reduce_scatter: its input     broadcast, all_reduce, send, recv: its tensors     barrier: 0
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_FIRST = frozenset({
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv", "recv_any_source", "_allgather_base",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
})  # fmt: skip
"""By their first argument: what they change is as large as what they read, or larger."""
_SECOND = frozenset({"_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced"})
_NOTHING = frozenset({"barrier", "monitored_barrier"})


def measure(name: str, kinds: Sequence[str]) -> Callable[[Sequence[Any]], int]:
    """For the operator of this name, from its arguments. `kinds` are their types in its schema."""
    if name in _NOTHING:
        return _nothing
    if name in _FIRST:
        return _first if kinds[0] == "Tensor" else _first_list
    if name in _SECOND:
        return _second
    places = [at for at, kind in enumerate(kinds) if "Tensor" in kind]
    return lambda arguments: max((size(arguments[at]) for at in places if at < len(arguments)), default=0)


def size(tensors: Any) -> int:
    """Of a tensor, or of all in lists of them."""
    if type(tensors) is list:
        total = 0
        for one in tensors:
            total += size(one)
        return total
    try:
        return int(tensors.nbytes)
    except (AttributeError, RuntimeError, TypeError):  # None; sparse; not yet known
        return 0


def _nothing(arguments: Sequence[Any]) -> int:
    return 0


def _first(arguments: Sequence[Any]) -> int:
    return size(arguments[0])


def _second(arguments: Sequence[Any]) -> int:
    return size(arguments[1])


def _first_list(arguments: Sequence[Any]) -> int:
    tensors = arguments[0]
    if len(tensors) == 1:
        try:
            return tensors[0].nbytes  # type: ignore[no-any-return]
        except (AttributeError, RuntimeError):  # a list of lists; sparse
            pass
    return size(tensors)
