"""What sensors read reaches the rules once, whichever of them has looked again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evertrain.agent.machine import Machine
from evertrain.model.sensing import GpuReading, PortReading
from evertrain.observe.sensors.dcgm import DcgmSensor
from evertrain.observe.sensors.gpu import GpuSensor
from evertrain.observe.sensors.network import NetworkSensor


class Told:
    """Stands for the metrics of the node."""

    def __init__(self) -> None:
        self.ports: list[Sequence[PortReading]] = []
        self.gpus: list[Sequence[GpuReading]] = []
        self.tensor: list[tuple[str, float, float]] = []

    def look_at_machine(self, ports: Iterable[PortReading], gpus: Iterable[GpuReading], now: float) -> None:
        self.ports += [tuple(ports)]
        self.gpus += [tuple(gpus)]

    def look_at_tensor_cores(self, device: str, activity: float, utilisation: float, now: float) -> None:
        self.tensor.append((device, activity, utilisation))


def test_each_reading_is_handed_on_once() -> None:
    gpu, network, dcgm = (
        GpuSensor(lambda *_: ()),
        NetworkSensor(lambda *_: (), lambda *_: (), address="10.0.0.1"),
        DcgmSensor(),
    )
    told = Told()
    machine = Machine([gpu, network, dcgm], told)  # type: ignore[arg-type]
    machine.look(0.0)
    assert told.gpus == told.ports == told.tensor == [], "nobody has looked yet"
    gpu.readings = hot = (GpuReading(index=0, uuid="GPU-a", temperature_c=91, utilisation=100),)
    network.readings = ports = (PortReading(name="eth0", is_up=True),)
    dcgm.tensor = {"GPU-a": 0.5}
    for now in range(10):
        machine.look(float(now))
    assert (told.ports, told.gpus, told.tensor) == ([ports], [hot], [("GPU 0 (GPU-a)", 0.5, 1.0)])
    network.readings = more = (PortReading(name="eth0", is_up=True, sent_bytes=1),)
    machine.look(11.0)
    assert (told.ports, told.gpus, len(told.tensor)) == ([ports, more], [hot, ()], 1)
    dcgm.tensor = {"GPU-a": 0.4}
    machine.look(12.0)
    assert told.tensor[1:] == [("GPU 0 (GPU-a)", 0.4, 1.0)] and len(told.ports) == 2
