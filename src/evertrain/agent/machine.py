"""What do sensors of the machine say about training? Their readings, handed to the rules that judge both together.

Heat alone says nothing, and slowness alone does not say why: a GPU that is hot while training is slow is worth a line.
"""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.agent.metrics import Metrics
from evertrain.agent.sensing import Sensor
from evertrain.observe.sensors.dcgm import DcgmSensor
from evertrain.observe.sensors.gpu import GpuSensor
from evertrain.observe.sensors.network import NetworkSensor


class Machine:
    """Hands each reading on once."""

    def __init__(self, sensors: Sequence[Sensor], metrics: Metrics) -> None:
        self._metrics = metrics
        self._gpus = next((one for one in sensors if isinstance(one, GpuSensor)), None)
        self._ports = next((one for one in sensors if isinstance(one, NetworkSensor)), None)
        self._tensor_cores = next((one for one in sensors if isinstance(one, DcgmSensor)), None)
        self._seen: tuple[object, ...] = ()

    def look(self, now: float) -> None:
        """After `Metrics.look`."""
        gpus = self._gpus.readings if self._gpus is not None else ()
        ports = self._ports.readings if self._ports is not None else ()
        activity = self._tensor_cores.tensor if self._tensor_cores is not None else {}
        # sensors replace what they have read, each time they look
        if all(one is other for one, other in zip((gpus, ports, activity), self._seen, strict=False)) and self._seen:
            return
        self._seen = (gpus, ports, activity)
        self._metrics.look_at_machine(ports, gpus, now)
        for gpu in gpus:
            if gpu.utilisation is not None and (tensor := activity.get(gpu.uuid)) is not None:
                self._metrics.look_at_tensor_cores(f"GPU {gpu.index} ({gpu.uuid})", tensor, gpu.utilisation / 100, now)
