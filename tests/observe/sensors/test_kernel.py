"""Reading the kernel's log: what is new, across restarts of the agent, from a device, a fifo and a file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from evertrain.detect.catalogue import build
from evertrain.detect.kernel import KernelRules
from evertrain.model.sensing import KernelMessage, Sign
from evertrain.observe import rules
from evertrain.observe.sensors import kernel
from evertrain.observe.sensors.kernel import KernelSensor
from support.waiting import eventually

RECORD = "4,{number},{usec},-;NVRM: line {number}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:19:00.0\n"


class Heard:
    """Rules that note what they are given and make a sign of every message that is news."""

    def __init__(self) -> None:
        self.all: list[KernelMessage] = []

    def __call__(self, messages: Sequence[KernelMessage]) -> list[Sign]:
        self.all += messages
        return [Sign(key=one.key, kind="line", evidence=one.text, time=one.time) for one in messages if not one.is_told]

    @property
    def news(self) -> list[str]:
        return [one.text for one in self.all if not one.is_told]


@pytest.fixture
def heard() -> Heard:
    return Heard()


def sensor(path: Path, heard: Heard, memory: Path | None = None, boot_id: str = "boot") -> KernelSensor:
    return KernelSensor(heard, environ={kernel.VARIABLE: str(path)}, memory=memory, boot_id=boot_id)


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_from_now_on(tmp_path: Path, heard: Heard) -> None:
    log = tmp_path / "kmsg"
    append(log, "before")
    looks = sensor(log, heard)
    assert looks.look(1.0).signs == ()
    append(
        log,
        "[    1.5] plain",
        "6,17,2500000,-;as the kernel has it \\x5b",
        " SUBSYSTEM=pci",
        "12,18,3000000,-;a program",
    )
    seen = looks.look(2.0)
    assert [sign.evidence for sign in seen.signs] == [
        "[    1.5] plain",
        "[    2.500000] as the kernel has it [",
        "[    3.000000] a program",
    ]
    assert [one.is_own for one in heard.all] == [True, True, True, False]
    assert (seen.blind, seen.absent, seen.last) == ("", "", "3 messages")
    assert looks.look(3.0).signs == ()


def test_half_a_line_waits_for_its_end(tmp_path: Path, heard: Heard) -> None:
    log = tmp_path / "kmsg"
    log.touch()
    looks = sensor(log, heard)
    looks.look(1.0)
    with log.open("a") as file:
        file.write("NVRM: fallen ")
        file.flush()
        assert looks.look(2.0).signs == ()
        file.write("off the bus\n")
    seen = looks.look(3.0)
    assert [sign.evidence for sign in seen.signs] == ["NVRM: fallen off the bus"]
    assert seen.last == "1 message"


def test_a_fifo_whose_writers_come_and_go(tmp_path: Path, heard: Heard) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    looks = sensor(fifo, heard)
    assert looks.look(1.0).blind == ""
    for number in range(3):
        fifo.write_text(f"line {number}\n")
        assert [sign.evidence for sign in looks.look(2.0 + number).signs] == [f"line {number}"]
        assert looks.look(2.5 + number).signs == ()


def test_a_restarted_agent_misses_nothing_and_tells_nothing_under_another_key(tmp_path: Path) -> None:
    log, memory = tmp_path / "kmsg", tmp_path / "kmsg.json"
    log.touch()
    first, second = Heard(), Heard()
    looks = sensor(log, first, memory)
    looks.look(1.0)
    append(log, "told", "also told")
    told = looks.look(2.0).signs
    looks.look(3.0)  # only now it is certain that the agent has taken them
    append(log, "read, then the agent died")
    died_with = looks.look(4.0).signs
    looks.close()
    append(log, "while it was away")
    again = sensor(log, second, memory).look(5.0).signs
    assert [sign.evidence for sign in again] == ["read, then the agent died", "while it was away"]
    assert again[0].key == died_with[0].key
    assert len({sign.key for sign in (*told, *again)}) == 4
    assert [one.text for one in second.all if one.is_told] == ["told", "also told"]


def test_keys_of_a_fifo_go_on_after_a_restart(tmp_path: Path, heard: Heard) -> None:
    fifo, memory = tmp_path / "kmsg", tmp_path / "kmsg.json"
    os.mkfifo(fifo)
    keys = []
    for _ in range(2):
        looks = sensor(fifo, heard, memory)
        looks.look(1.0)
        fifo.write_text("line\n")
        keys += [sign.key for sign in looks.look(2.0).signs]
        looks.look(3.0)
        looks.close()
    assert keys == ["kernel:boot:1", "kernel:boot:2"]


def test_after_a_reboot_it_begins_anew(tmp_path: Path, heard: Heard) -> None:
    log, memory = tmp_path / "kmsg", tmp_path / "kmsg.json"
    memory.write_text('{"boot_id": "an earlier one", "sequence": 1}')
    append(log, "boot message", "another", "a third")
    assert sensor(log, heard, memory).look(1.0).signs == ()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"boot_id": "boot", "sequence": "x"}', "\x00"])
def test_a_broken_memory_is_none(tmp_path: Path, heard: Heard, content: str) -> None:
    log, memory = tmp_path / "kmsg", tmp_path / "kmsg.json"
    memory.write_text(content)
    append(log, "before")
    looks = sensor(log, heard, memory)
    assert looks.look(1.0).signs == ()
    append(log, "after")
    assert [sign.evidence for sign in looks.look(2.0).signs] == ["after"]


def test_what_cannot_be_read_is_blind_and_says_what_to_do(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    looks = sensor(log, heard)
    assert "--device=/dev/kmsg" in looks.look(1.0).blind
    append(log, "written before anybody could read it")
    assert [sign.evidence for sign in looks.look(2.0).signs] == ["written before anybody could read it"]

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    assert "CAP_SYSLOG" in sensor(log, heard).look(3.0).blind


def test_a_file_that_is_written_anew_is_read_from_its_beginning(tmp_path: Path, heard: Heard) -> None:
    log = tmp_path / "kmsg"
    append(log, "a long line that was there", "and another")
    looks = sensor(log, heard)
    looks.look(1.0)
    log.write_text("short\n")
    assert [sign.evidence for sign in looks.look(2.0).signs] == ["short"]


class FakeDevice:
    """Records one a read, as /dev/kmsg gives them; None: messages were overwritten."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: list[str | None] = []
        self._ring: list[str] = []
        read = os.read
        self.fd = -1

        def answer(fd: int, size: int) -> bytes:
            if fd != self.fd:
                return read(fd, size)
            if not self.records:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            if (record := self.records.pop(0)) is None:
                raise BrokenPipeError(32, "Broken pipe")
            return record.encode()

        monkeypatch.setattr(os, "read", answer)

    def say(self, *numbers: int, age_s: float = 0.0) -> None:
        usec = int((time.monotonic() - age_s) * 1e6)
        self.records += [RECORD.format(number=number, usec=usec) for number in numbers]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """What is opened as a character device is answered by it."""
    fake = FakeDevice(monkeypatch)
    monkeypatch.setattr(kernel.KernelSensor, "_open", lambda _: kernel._Device(fake.fd))
    monkeypatch.setattr(os, "close", lambda _: None)
    return fake


def test_overwritten_messages_are_counted_and_the_rest_is_read(
    device: FakeDevice, heard: Heard, tmp_path: Path
) -> None:
    looks = sensor(tmp_path, heard)
    device.say(1)
    looks.look(time.time())
    device.records.append(None)
    device.say(90, 91)
    seen = looks.look(time.time())
    assert [sign.key for sign in seen.signs] == ["kernel:boot:90", "kernel:boot:91"]
    assert "overwritten" in seen.last and not seen.blind


def test_a_restart_reads_the_last_minutes_by_number_and_nothing_older(
    device: FakeDevice, heard: Heard, tmp_path: Path
) -> None:
    memory = tmp_path / "kmsg.json"
    memory.write_text('{"boot_id": "boot", "sequence": 5}')
    now = time.time()
    device.say(1, 2, age_s=5000.0)
    device.say(5, age_s=100.0)
    device.say(6, age_s=90.0)
    sensor(tmp_path, heard, memory).look(now)
    assert [(one.key, one.is_told) for one in heard.all] == [("kernel:boot:5", True), ("kernel:boot:6", False)]
    assert heard.all[1].time == pytest.approx(now - 90.0, abs=5.0)


def test_a_full_log_is_read_in_portions_and_none_of_it_is_news(
    device: FakeDevice, heard: Heard, tmp_path: Path
) -> None:
    looks = sensor(tmp_path, heard)
    device.say(*range(1, 3001))
    while device.records:
        assert looks.look(time.time()).signs == ()
    looks.look(time.time())
    device.say(3001)
    assert len(looks.look(time.time()).signs) == 1


def test_this_machines_own_log(heard: Heard) -> None:
    """From where it may be read; what was written before is no news."""
    looks = KernelSensor(heard)
    seen = looks.look(time.time())
    assert seen.blind or seen.last.endswith("messages")
    assert heard.news == []
    looks.close()


def test_a_lost_gpu_is_told_within_two_seconds(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.touch()
    looks = KernelSensor(KernelRules(build(rules.contents())), environ={kernel.VARIABLE: str(log)}, boot_id="boot")
    stop, found = threading.Event(), list[Sign]()

    def watch() -> None:
        while not stop.is_set():
            found.extend(looks.look(time.time()).signs)
            stop.wait(looks.period_s)

    looks.look(time.time())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        append(log, "[  812.000000] NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.")
        [sign] = eventually(lambda: found, "a sign", within_s=2.0)
    finally:
        stop.set()
        thread.join()
    assert (sign.kind, sign.device, sign.key) == ("xid_79", "0000:19:00", "kernel:boot:1")


def test_a_memory_that_cannot_be_written_stops_nothing(tmp_path: Path, heard: Heard) -> None:
    log = tmp_path / "kmsg"
    log.touch()
    looks = sensor(log, heard, tmp_path / "gone" / "kmsg.json")
    for number in range(3):
        append(log, f"line {number}")
        looks.look(1.0 + number)
    assert heard.news == ["line 1", "line 2"]
