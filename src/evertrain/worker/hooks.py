"""How does a script that knows nothing of Evertrain still tell what it does?

By hooks in torch itself: the optimizers' global step hooks count steps, a kernel at the dispatcher sees collectives,
and `init_process_group` marks the phase. They cost nothing while no session has begun, so the zygote installs them
once, before it forks the ranks.
"""

from __future__ import annotations

import sys

from evertrain.worker import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_installed = False


def install() -> None:
    """Install all hooks. Torch is imported already; doing it again changes nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    from torch._compile import _disable_dynamo
    from torch.optim import optimizer

    # a compiled `optimizer.step` calls the hooks instead of tracing into them
    optimizer.register_optimizer_step_pre_hook(_disable_dynamo(_before_optimizer_step))
    optimizer.register_optimizer_step_post_hook(_disable_dynamo(_after_optimizer_step))

    import torch.distributed as dist

    if dist.is_available():
        from evertrain.worker import collectives

        collectives.install()
        _settle_pending.append(collectives.settle_pending)
        _see_init_process_group()
        _see_groups()
    if session.current is not None:
        session.current.torch_is_there()


def installed() -> bool:
    """Do optimizers tell of their steps?"""
    return _installed


_settle_pending: list[Callable[[], None]] = []
"""Filled where torch was built with torch.distributed."""


def _before_optimizer_step(optimizer: Any, *_: Any) -> None:
    current = session.joined("trains")
    if current is None:
        return
    for settle in _settle_pending:
        settle()
    current.before_optimizer_step(optimizer)


def _after_optimizer_step(optimizer: Any, *_: Any) -> None:
    current = session.current
    if current is not None:
        finishes = current.optimizer_stepped(id(optimizer))
        if current.replay is not None:
            current.replay.stepped(optimizer, finishes=finishes)


def _see_init_process_group() -> None:
    import functools

    from torch.distributed import distributed_c10d

    from evertrain.worker import communicators, contact, groups

    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **named: Any) -> Any:
        current = session.joined("calls init_process_group()")
        if current is None:
            return original(*arguments, **named)
        current.check_environment()
        current.check_code()
        contact.open_up(current)
        current.at("init")
        current.fire("init")
        before = groups.descriptors()
        result = original(*arguments, **named)
        communicators.forget()
        groups.note(current.page_path, current.attempt, anew=True, before=before)
        current.at("train")
        return result

    _replace("init_process_group", original, init_process_group)


def _see_groups() -> None:
    """Write down which process groups there are; a device mesh makes its own by the same functions."""
    import functools

    from torch.distributed import distributed_c10d

    from evertrain.worker import groups

    def seen(original: Any) -> Any:
        @functools.wraps(original)
        def make(*arguments: Any, **named: Any) -> Any:
            current = session.current
            if current is None:
                return original(*arguments, **named)
            before = groups.descriptors()
            made = original(*arguments, **named)
            groups.note(current.page_path, current.attempt, before=before)
            return made

        return make

    for name in ("new_group", "split_group"):
        original = getattr(distributed_c10d, name, None)  # older versions split no groups
        if original is not None:
            _replace(name, original, seen(original))


def _replace(name: str, original: Any, ours: Any) -> None:
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    for module in (dist, distributed_c10d, device_mesh):
        if getattr(module, name, None) is original:
            setattr(module, name, ours)


def install_on_import() -> None:
    """Install the hooks as soon as the user's script has imported torch; for ranks that start without it."""
    if "torch" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder:
    """Waits for `import torch`, then steps out of the way for good."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _TorchLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _TorchLoader:
    """The real loader of torch, with the hooks installed after it."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        install()
