"""GPUs as NVML tells of them: the real binding, loading a library in NVIDIA's place, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from evertrain.model.sensing import GpuReading, Seen
from evertrain.observe.sensors.gpu import GpuSensor
from support.nvml import MACHINE, FakeNvml, build

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the library in NVIDIA's place")

LOOKER = """
import msgspec, sys
from evertrain.detect.gpu import GpuRules
from evertrain.observe.sensors.gpu import GpuSensor
sensor = GpuSensor(GpuRules(boot_id="boot"))
sensor.limit_s = float(sys.argv[1])
for line in sys.stdin:
    answer = [sensor.look(float(line)), sensor.readings]
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\\n")
    sys.stdout.flush()
"""


class Looker:
    """An agent's process, with the sensor and its rules."""

    def __init__(self, environment: dict[str, str], limit_s: float = GpuSensor.limit_s) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOKER, str(limit_s)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._now = 100.0

    def ask(self, what: str) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def look(self) -> tuple[Seen, list[GpuReading]]:
        self._now += GpuSensor.period_s
        return msgspec.json.decode(self.ask(f"{self._now}"), type=tuple[Seen, list[GpuReading]])

    def kinds(self) -> list[str]:
        return [sign.kind for sign in self.look()[0].signs]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


Start = Callable[..., Looker]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old-nvml"), is_old=True)


@pytest.fixture
def nvml(library: Path, tmp_path: Path) -> FakeNvml:
    return FakeNvml(library, tmp_path)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Looker] = []

    def start(nvml: FakeNvml, **options: float) -> Looker:
        started.append(Looker(nvml.environment, **options))
        return started[-1]

    yield start
    for looker in started:
        looker.close()


def test_a_reading(nvml: FakeNvml, start: Start) -> None:
    nvml.set(
        1, temperature=55, utilisation=98, pid=4711, throttle=0x4 | 0x40, ecc=3, remapped=1, pending=1, links_down=2
    )
    seen, readings = start(nvml).look()
    assert readings[1] == GpuReading(
        index=1, uuid="GPU-0001", bus="0000:11:00.0", temperature_c=55, slowdown_c=87,
        throttle_reasons=("hw_thermal", "sw_power_cap"), pcie_width=16, pcie_width_max=16, pcie_generation=5,
        pcie_generation_max=5, utilisation=98, sm_clock_mhz=1980, ecc_uncorrected=3, remapped_uncorrectable=1,
        remap_pending=True, remap_failed=False, nvlinks_down=(1,), processes=(4711,),
    )  # fmt: skip
    assert readings[0].processes == () and readings[0].nvlinks_down == ()
    assert seen.last == "2 GPUs, up to 55 C, 49 % used, by process 4711"
    assert [sign.kind for sign in seen.signs] == ["row_remap_pending"]
    assert (seen.blind, seen.absent) == ("", "")


def test_an_old_driver_that_lacks_functions_is_not_blind(old_library: Path, tmp_path: Path, start: Start) -> None:
    nvml = FakeNvml(old_library, tmp_path)
    nvml.set(0, throttle=0x8, pid=1)
    looker = start(nvml)
    seen, [first, _] = looker.look()
    assert seen.blind == ""
    assert (first.temperature_c, first.throttle_reasons) == (40, ("hw_slowdown",))
    assert (first.remap_failed, first.remap_pending, first.recovery_action, first.processes) == (None, None, "", ())
    assert first.nvlinks_down == ()
    nvml.set(0, lost=1)
    assert looker.kinds() == ["gpu_lost"]


def test_what_a_gpu_cannot_say_is_none(nvml: FakeNvml, start: Start) -> None:
    nvml.set(0, temperature=-1, utilisation=-1, ecc=-1, slowdown=-1, width_max=-1, links=0)
    seen, [first, _] = start(nvml).look()
    assert seen.blind == ""
    assert (first.temperature_c, first.utilisation, first.ecc_uncorrected, first.slowdown_c) == (None,) * 4
    assert (first.pcie_width_max, first.nvlinks_down) == (None, None)


def test_a_lost_gpu_is_told_at_once_and_the_others_are_read(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    assert looker.kinds() == []
    nvml.set(1, lost=1)
    seen, [first, second] = looker.look()
    assert [(sign.kind, sign.device) for sign in seen.signs] == [("gpu_lost", "0000:11:00.0")]
    assert second.is_lost and second.uuid == "GPU-0001"
    assert first.temperature_c == 40
    assert seen.blind == ""


def test_codes_of_the_driver_from_when_the_sensor_began(nvml: FakeNvml, start: Start) -> None:
    nvml.set(0, xid=79)
    looker = start(nvml)
    assert looker.kinds() == []
    nvml.set(0, xid=13)
    nvml.set(1, xid=48)
    nvml.set(1, xid=45)
    seen, readings = looker.look()
    assert [reading.xids for reading in readings] == [(13,), (48, 45)]
    assert [(sign.kind, sign.device) for sign in seen.signs] == [("xid_48", "0000:11:00.0")]
    assert looker.kinds() == []


def test_a_gpu_that_tells_no_codes_is_read_all_the_same(nvml: FakeNvml, start: Start) -> None:
    nvml.set(0, no_events=1)
    looker = start(nvml)
    looker.look()
    nvml.set(0, xid=79)
    nvml.set(1, xid=79)
    assert [sign.device for sign in looker.look()[0].signs] == ["0000:11:00.0"]


def test_heat_and_a_narrow_link_are_told_within_ten_seconds(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    looker.look()
    nvml.set(0, temperature=93)
    nvml.set(1, width=8, generation=4, utilisation=90)
    told = [looker.kinds() for _ in range(3)]
    assert told == [[], [], ["gpu_hot", "pcie_degraded"]]
    assert 3 * GpuSensor.period_s < 10


def test_what_the_driver_asks_for(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    nvml.set(0, recovery=1)
    nvml.set(1, recovery=4, failed=1)
    assert looker.kinds() == ["gpu_unavailable", "gpu_recovery", "row_remap_failed"]
    nvml.set(0, recovery=0, error=16)
    nvml.set(1, recovery=0, failed=0)
    assert looker.kinds() == ["gpu_unavailable"]


def test_links_are_looked_at_now_and_then(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    looker.look()
    nvml.set(1, links_down=0b100)
    told = [looker.kinds() for _ in range(4)]
    assert told[-1] == ["nvlink_down"]


def test_a_gpu_that_nvml_cannot_read_is_blind_not_healthy_and_comes_back(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    looker.look()
    nvml.set(1, error=999)
    seen, readings = looker.look()
    assert seen.blind.startswith("GPU 1 (0000:11:00.0): ") and [reading.index for reading in readings] == [0]
    assert seen.signs == ()
    nvml.set(0, error=1)
    assert "GPU 0" in looker.look()[0].blind
    nvml.set(0, error=0)
    nvml.set(1, error=0)
    seen, readings = looker.look()
    assert (seen.blind, len(readings)) == ("", 2)


def test_a_slow_nvml_is_blind_and_what_it_says_counts(nvml: FakeNvml, start: Start) -> None:
    assert GpuSensor.limit_s == 3.0
    looker = start(nvml, limit_s=1.0)
    nvml.set(0, delay_ms=1100)
    nvml.set(1, failed=1)
    seen, _ = looker.look()
    assert "to answer" in seen.blind
    assert [sign.kind for sign in seen.signs] == ["row_remap_failed"]
    nvml.set(0, delay_ms=0)
    assert looker.look()[0].blind == ""


def test_no_gpu_and_a_driver_that_does_not_start(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    nvml.set(MACHINE, gpus=0)
    assert "no GPU" in looker.look()[0].absent
    nvml.set(MACHINE, init=18)
    assert "NVML does not start" in looker.look()[0].blind
    nvml.set(MACHINE, init=0, gpus=8)
    assert len(looker.look()[1]) == 8


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_without_the_library_or_the_binding_there_is_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def rules(*_: object) -> list[object]:
        raise AssertionError("nothing was read")

    assert "no NVIDIA driver" in GpuSensor(rules).look(1.0).absent  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "evertrain[gpu]" in GpuSensor(rules).look(1.0).absent  # type: ignore[arg-type]


def test_who_computes_on_the_devices(nvml: FakeNvml, start: Start) -> None:
    looker = start(nvml)
    nvml.set(0, pid=11)
    nvml.set(0, pid=12)
    nvml.set(1, pid=11)
    seen, readings = looker.look()
    assert [one.processes for one in readings] == [(11, 12), (11,)]
    assert seen.last.endswith("by processes 11, 12")
    nvml.set(0, pid=0)
    assert [one.processes for one in looker.look()[1]] == [(), (11,)]
    for pid in range(20, 40):
        nvml.set(0, pid=pid)
    assert looker.look()[0].last.endswith("by processes 11, 20, 21, 22, 23, 24, 25, 26, …")
