"""What does the machine say of its disks, mounts, memory and clock, and what if a mount never answers?"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.detect.host import Host
from evertrain.model.sensing import HostReading, Seen
from evertrain.observe.sensors import host
from evertrain.observe.sensors.host import Clock, HostSensor
from support import dead_disk
from support.waiting import eventually

MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    {} kB\n"


class Machine:
    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "sys/fs").mkdir(parents=True)
        (self.sys / "block/sda/device").mkdir(parents=True)
        (self.sys / "block/nvme0n1/device").mkdir(parents=True)
        self.mounts("/ ext4")
        self.memory(400)
        (self.proc / "sys/fs/file-nr").write_text("1500\t0\t100000\n")
        (self.proc / "loadavg").write_text(f"{3.0 * (os.cpu_count() or 1)} 1.0 1.0 2/300 4711\n")
        (self.sys / "block/sda/device/ioerr_cnt").write_text("0x1f\n")
        self.clock: Clock | None = Clock(True, 0.25)
        self.sensors: list[HostSensor] = []

    def mounts(self, *lines: str) -> None:
        text = "".join(f"device {line} rw 0 0\n" for line in lines)
        (self.proc / "self/mounts").write_text(text)

    def memory(self, available: int) -> None:
        (self.proc / "meminfo").write_text(MEMINFO.format(available))

    def sensor(self, *folders: str, shared_memory: str = "/dev/shm") -> HostSensor:
        def take(reading: HostReading, now: float) -> tuple[()]:
            self.reading = reading
            return ()

        made = HostSensor(
            take, folders=folders, shared_memory=shared_memory, proc=self.proc, sys=self.sys, clock=lambda: self.clock
        )
        self.sensors.append(made)
        return made


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for sensor in made.sensors:
        sensor.close()


def test_the_readings_of_a_machine(machine: Machine, tmp_path: Path) -> None:
    seen = machine.sensor(str(tmp_path)).look(0.0)
    assert not seen.blind and not seen.signs
    reading = machine.reading
    assert reading.disk_errors == {"sda": 31}
    assert reading.memory_free_fraction == 0.4 and reading.descriptors_fraction == 0.015
    assert (reading.clock_offset_s, reading.clock_is_synchronised) == (0.25, True)
    assert reading.load_per_core == pytest.approx(3.0)
    assert "40% of memory" in seen.last and "load 3.0 a core" in seen.last


def test_folders_on_one_mount_are_told_once_and_by_their_longest_mount(machine: Machine) -> None:
    machine.mounts("/ ext4", "/dev tmpfs", "/dev/shm tmpfs", "/dev/shmother ext4")
    machine.sensor("/usr/lib", "/usr/bin", "/dev/x", "").look(0.0)
    assert list(machine.reading.disk_free_fraction) == ["/usr/lib", "/dev/x"]
    assert machine.reading.shared_memory_free_fraction is not None


def test_a_machine_whose_files_cannot_be_read_is_blind(machine: Machine) -> None:
    (machine.proc / "meminfo").write_text("MemTotal: much\n")
    assert "cannot be read" in machine.sensor("/").look(0.0).blind
    (machine.proc / "meminfo").unlink()
    assert "meminfo" in machine.sensor("/").look(0.0).blind


def test_what_one_kernel_does_not_say_leaves_the_rest(machine: Machine) -> None:
    machine.clock = None
    (machine.proc / "sys/fs/file-nr").unlink()
    (machine.sys / "block/sda/device/ioerr_cnt").write_text("")
    machine.sensor("/").look(0.0)
    reading = machine.reading
    assert (reading.clock_offset_s, reading.descriptors_fraction, reading.disk_errors) == (None, None, {})
    assert reading.memory_free_fraction == 0.4


def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=4m", "evertrain-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True, timeout=10).returncode:
        pytest.skip("needs the right to mount")
    sensor = HostSensor(Host().judge, folders=[str(folder)])
    try:
        assert sensor.look(0.0).signs == sensor.look(10.0).signs == ()
        (folder / "data").write_bytes(bytes((4 << 20) - (16 << 10)))
        assert sensor.look(20.0).signs == ()
        (sign,) = sensor.look(30.0).signs
        assert (sign.kind, sign.device) == ("disk_full", str(folder))
        (folder / "data").unlink()
        assert sensor.look(40.0).signs == ()
    finally:
        sensor.close()
        subprocess.run(["umount", str(folder)], check=True, timeout=10)


def test_a_real_mount_that_never_answers_is_dead_and_holds_up_nobody(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dead"
    folder.mkdir()
    statfs = 17
    monkeypatch.setattr(dead_disk, "UNANSWERED", (*dead_disk.UNANSWERED, statfs))
    monkeypatch.setattr(host, "_ANSWER_S", 0.05)
    try:
        mounted = dead_disk.mounted(folder)
        disk = mounted.__enter__()
    except OSError as error:
        pytest.skip(f"no FUSE: {error}")
    try:
        machine.mounts("/ ext4", "/dev/shm tmpfs", f"{folder} fuse")
        sensor = machine.sensor(str(folder), "/usr")
        threads = threading.active_count()
        for number in range(5):
            began = time.monotonic()
            sensor.look(10.0 * number)
            assert time.monotonic() - began < 5.0
        assert list(machine.reading.mounts_dead) == [str(folder)]
        assert list(machine.reading.disk_free_fraction) == ["/usr"], "the others answer"
        assert machine.reading.mounts_dead[str(folder)] >= 4 * 0.05
        assert threading.active_count() <= threads + 3, "no second question beside the first"
        (probe,) = (probe for mount, probe in sensor._probes.items() if mount == str(folder))
        probe._since -= 11.0  # it has been so for long
        sensor.look(50.0)
        (sign,) = Host().judge(machine.reading, 50.0)
        assert sign.kind == "mount_dead" and str(folder) in sign.evidence
    finally:
        disk.free()

    def answers() -> bool:
        sensor.look(60.0)
        return not machine.reading.mounts_dead

    eventually(answers, "an error is an answer")


def test_mounts_of_other_machines_are_asked_whoever_uses_them_and_forgotten_when_they_are_gone(
    machine: Machine, tmp_path: Path
) -> None:
    machine.mounts("/ ext4", f"{tmp_path} nfs4", "/nowhere lustre", "/media/cd iso9660")
    sensor = machine.sensor("/usr")
    sensor.look(0.0)
    assert set(sensor._probes) == {"/", str(tmp_path), "/nowhere"} and machine.reading.mounts_dead == {}
    machine.mounts("/ ext4")
    sensor.look(10.0)
    assert set(sensor._probes) == {"/"}


def test_this_machine_can_be_read() -> None:
    sensor = HostSensor(Host().judge, folders=[os.getcwd()])
    try:
        seen = sensor.look(0.0)
        assert isinstance(seen, Seen) and seen.last and not seen.blind
        costs = []
        for number in range(10):
            began = time.thread_time()
            sensor.look(10.0 * number)
            costs.append(time.thread_time() - began)
        assert sorted(costs)[5] < 0.02
    finally:
        sensor.close()


def test_the_kernels_clock_is_read_and_left_alone() -> None:
    clock = host.kernel_clock()
    if clock is None:
        pytest.skip("not allowed here")
    assert abs(clock.offset_s) <= 1.0
