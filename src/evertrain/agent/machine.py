"""What do sensors of the machine say about training? Their readings, handed to the rules that judge both together.

Heat alone says nothing, and slowness alone does not say why: a GPU that is hot while training is slow is worth a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evertrain.agent.metrics import Metrics
from evertrain.agent.sensing import Sensor
from evertrain.model.sensing import GpuReading, PortReading
from evertrain.observe.sensors.dcgm import DcgmSensor
from evertrain.observe.sensors.gpu import GpuSensor
from evertrain.observe.sensors.network import NetworkSensor


class Machine:
    """Hands each reading on once."""

    def __init__(self, sensors: Sequence[Sensor], metrics: Metrics) -> None:
        self._metrics = metrics
        self.gpus = next((one for one in sensors if isinstance(one, GpuSensor)), None)
        self._ports = next((one for one in sensors if isinstance(one, NetworkSensor)), None)
        self._tensor_cores = next((one for one in sensors if isinstance(one, DcgmSensor)), None)
        self._gpus_seen: Sequence[GpuReading] = ()
        self._ports_seen: Sequence[PortReading] = ()
        self._activity_seen: Mapping[str, float] = {}

    def look(self, now: float) -> None:
        """After `Metrics.look`."""
        gpus = self.gpus.readings if self.gpus is not None else ()
        ports = self._ports.readings if self._ports is not None else ()
        activity = self._tensor_cores.tensor if self._tensor_cores is not None else {}
        # sensors replace what they have read, each time they look; what is told twice would count twice
        new_gpus = gpus if gpus is not self._gpus_seen else ()
        new_ports = ports if ports is not self._ports_seen else ()
        new_activity = activity if activity is not self._activity_seen else {}
        self._gpus_seen, self._ports_seen, self._activity_seen = gpus, ports, activity
        if new_gpus or new_ports:
            self._metrics.look_at_machine(new_ports, new_gpus, now)
        for gpu in gpus if new_activity else ():
            if gpu.utilisation is not None and (tensor := new_activity.get(gpu.uuid)) is not None:
                self._metrics.look_at_tensor_cores(f"GPU {gpu.index} ({gpu.uuid})", tensor, gpu.utilisation / 100, now)
