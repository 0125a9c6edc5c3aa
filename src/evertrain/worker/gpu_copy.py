"""How does state leave a GPU without holding it up? On a stream of its own, ordered by events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evertrain.worker.slot_file import SlotFile

_streams: dict[torch.device, Any] = {}


class GpuCopy:
    """What one GPU has to copy for a save. Made when the state is as it should be saved.

    Tensors are kept alive by whoever calls until `finish` is back, so the allocator gives their memory to nobody.
    """

    def __init__(self, device: torch.device, which: Sequence[int], cuda: Any = torch.cuda) -> None:
        self._device = device
        self._which = which
        self._cuda = cuda
        self._ready, self._done = cuda.Event(), cuda.Event()
        self._ready.record(cuda.current_stream(device))

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Have the copies begin as soon as what was computed before is there. Any thread may call it."""
        if self._device not in _streams:
            _streams[self._device] = self._cuda.Stream(self._device)
        stream = _streams[self._device]
        stream.wait_event(self._ready)
        with self._cuda.stream(stream):
            torch._foreach_copy_(
                [targets[at] for at in self._which], [sources[at] for at in self._which], non_blocking=True
            )
            self._done.record(stream)

    def order(self) -> None:
        """What the calling thread has the GPU do from now on comes after the copy; the thread itself goes on."""
        self._cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> None:
        """Wait until all bytes are there."""
        self._done.synchronize()


def prepare(sources: Sequence[Tensor], slot: SlotFile, cuda: Any = torch.cuda) -> list[GpuCopy]:
    """A copy for each GPU that tensors lie on.

    Waits until the GPUs have done what they were told: a rank that ran ahead of its GPU could overwrite the last
    save that another rank has whole.
    """
    devices: dict[torch.device, list[int]] = {}
    for at, source in enumerate(sources):
        if source.device.type == "cuda":
            devices.setdefault(source.device, []).append(at)
    for device in devices:
        cuda.current_stream(device).synchronize()
    if devices:
        # where memory cannot be registered, copies go through the driver's own buffers: slower, and not wrong
        slot.register(lambda address, size: int(cuda.cudart().cudaHostRegister(address, size, 0)))
    return [GpuCopy(device, which, cuda) for device, which in devices.items()]
