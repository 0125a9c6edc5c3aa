"""What becomes of a sensor that is slow, fails, or has nothing to look at? And for how long is a sign told?"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import sensing
from evertrain.agent.sensing import KEEP_S, MOST_SIGNS, Sensing
from evertrain.model.sensing import KernelMessage, Seen, Sign
from evertrain.model.spec import AgentSpec

SPEC = AgentSpec(
    job="job", run_id="job-1", node="gpu02", node_dir="", disk_dir="", log_root="", controller_url="", token_file="",
    fired_dir="",
)  # fmt: skip


class Scripted:
    """Answers as told; the last answer again and again."""

    def __init__(
        self, *answers: Seen | Exception, name: str = "gpu", period_s: float = 0.01, limit_s: float = 5.0
    ) -> None:
        self.name, self.period_s, self.limit_s = name, period_s, limit_s
        self.answers = list(answers)
        self.looks = 0
        self.together = self.most_together = 0
        self.gate = threading.Event()
        self.gate.set()

    def look(self, now: float) -> Seen:
        self.together += 1
        self.most_together = max(self.together, self.most_together)
        self.gate.wait(30)
        self.looks += 1
        self.together -= 1
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Clock:
    """Goes as fast as the real one, and further whenever a test says so."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def sign(key: str = "gpu:0:lost", *, time: float = 1.0, evidence: str = "GPU 0 is gone") -> Sign:
    return Sign(key=key, kind="gpu_lost", evidence=evidence, time=time)


@asynccontextmanager
async def running(*sensors: Any, clock: Callable[[], float] = time.monotonic) -> Any:
    woken: list[int] = []
    watch = Sensing(SPEC, sensors, lambda: woken.append(1), clock=clock, jitter=lambda: 0.0)
    task = asyncio.create_task(watch.run())
    try:
        yield watch, woken
    finally:
        for sensor in sensors:
            if isinstance(sensor, Scripted):
                sensor.gate.set()
        task.cancel()
        await asyncio.wait([task])


async def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def test_what_a_sensor_read_is_told_with_what_its_looks_cost() -> None:
    async with running(Scripted(Seen(last="8 GPUs, 54 °C"))) as (watch, woken):
        assert watch.sensors[0].state == "starting"
        await until(lambda: watch.sensors[0].looks >= 3, "three looks")
        (state,) = watch.sensors
        assert (state.name, state.state, state.last, state.because) == ("gpu", "ok", "8 GPUs, 54 °C", "")
        assert 0 <= state.cpu_s < 1.0 and not woken


async def test_cpu_seconds_are_those_of_the_looks() -> None:
    class Busy(Scripted):
        def look(self, now: float) -> Seen:
            until = time.thread_time() + 0.03
            while time.thread_time() < until:
                pass
            return super().look(now)

    async with running(Busy(Seen(), period_s=0.001)) as (watch, _):
        await until(lambda: watch.sensors[0].looks >= 2, "two looks")
        (state,) = watch.sensors
        assert 0.03 * state.looks <= state.cpu_s < 0.06 * state.looks


async def test_a_new_sign_wakes_the_agent_once() -> None:
    sensor = Scripted(Seen(), Seen(signs=(sign(),)), Seen(signs=(sign(time=9.0, evidence="again"),)))
    async with running(sensor) as (watch, woken):
        await until(lambda: sensor.looks >= 6, "six looks")
        await until(lambda: woken, "the agent is woken")
        assert watch.signs == (sign(),), "what was said first"
        assert woken == [1]


async def test_a_sign_is_told_for_a_while_after_it_was_seen_last() -> None:
    clock = Clock()
    holds = Seen(signs=(sign(),))
    sensor = Scripted(holds)
    async with running(sensor, clock=clock) as (watch, _):
        await until(lambda: watch.signs, "the sign")
        clock.ahead += 2 * KEEP_S
        looks = sensor.looks
        await until(lambda: sensor.looks > looks + 1, "further looks")
        assert watch.signs == (sign(),), "it still holds"
        sensor.answers = [Seen()]
        looks = sensor.looks
        await until(lambda: sensor.looks > looks + 1, "further looks")
        clock.ahead += KEEP_S - 60.0
        assert watch.signs == (sign(),)
        clock.ahead += 61.0
        assert watch.signs == ()


async def test_signs_are_told_oldest_first_and_are_bounded_in_number() -> None:
    many = tuple(sign(f"kernel:boot:{number}", time=float(number)) for number in range(MOST_SIGNS + 50))
    async with running(Scripted(Seen(signs=many[::-1]))) as (watch, _):
        await until(lambda: watch.signs, "signs")
        assert watch.signs == many[50:]


async def test_a_look_that_takes_too_long_is_blind_until_it_is_back_and_no_other_begins_beside_it() -> None:
    clock = Clock()
    slow, other = Scripted(Seen(last="fine"), limit_s=60.0), Scripted(Seen(), name="host")
    async with running(slow, other, clock=clock) as (watch, _):
        await until(lambda: watch.sensors[0].state == "ok", "the first look")
        slow.gate.clear()
        await until(lambda: slow.together, "a look that hangs")
        clock.ahead += 59.0 - 5.0
        assert watch.sensors[0].state == "ok", "it may take so long"
        clock.ahead += 30.0
        hung, seeing = watch.sensors
        assert hung.state == "blind" and hung.because.endswith("it may take 60 s") and "no answer for" in hung.because
        assert clock() - hung.since == pytest.approx(24.0, abs=5.0)
        looks = other.looks
        await until(lambda: other.looks > looks + 2, "the other sensor goes on")
        assert seeing.state == "ok" and slow.most_together == 1
        slow.gate.set()
        await until(lambda: watch.sensors[0].state == "ok", "it is back")
        assert watch.sensors[0].since > hung.since


async def test_a_sensor_that_fails_is_blind_and_looks_again() -> None:
    async with running(Scripted(Seen(last="fine"), ValueError("bad line"), Seen(last="fine"))) as (watch, _):
        seen: list[str] = []
        await until(lambda: seen.append(watch.sensors[0].state) or watch.sensors[0].looks >= 3, "it looks again")
        assert watch.sensors[0].state == "ok"
    async with running(Scripted(ValueError("bad line"))) as (watch, _):
        await until(lambda: watch.sensors[0].state == "blind", "it is blind")
        said = "the sensor itself failed: ValueError: bad line; see the agent's log"
        assert watch.sensors[0].because == said


@pytest.mark.parametrize(("seen", "state"), [(Seen(blind="no rights"), "blind"), (Seen(absent="no GPU"), "absent")])
async def test_blind_and_absent_say_why_and_accuse_nobody(seen: Seen, state: str) -> None:
    async with running(Scripted(seen)) as (watch, woken):
        await until(lambda: watch.sensors[0].looks, "a look")
        assert (watch.sensors[0].state, watch.sensors[0].because) == (state, seen.blind or seen.absent)
        assert watch.signs == () and not woken


async def test_what_is_absent_is_asked_again_seldom() -> None:
    absent, present = Scripted(Seen(absent="no GPU")), Scripted(Seen(), name="host")
    async with running(absent, present):
        await until(lambda: present.looks >= 10, "ten looks of the other one")
        assert absent.looks == 1


async def test_periods_differ_a_little_and_are_kept_on_the_whole() -> None:
    numbers: Iterator[float] = iter((0.0, *[0.0, 1.0, 0.5] * 100))
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) > 4

    sensor = Scripted(Seen(), period_s=10.0)
    watched = sensing._Watched(sensor, lambda _: None, Stop(), time.monotonic, lambda: next(numbers))
    watched.work()
    assert waits == pytest.approx([0.0, 9.0, 11.0, 10.0, 9.0]) and sensor.looks == 4


def test_every_sensor_of_this_version_can_be_made_and_has_its_own_name() -> None:
    sensors = sensing.sensors_of(SPEC)
    assert len({sensor.name for sensor in sensors}) == len(sensors)
    assert not [sensor for sensor in sensors if isinstance(sensor, sensing.Unfit)]
    for sensor in sensors:
        assert sensor.limit_s > 0 and 0 < sensor.period_s <= 60.0


def test_a_sensor_that_cannot_be_loaded_is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(spec: AgentSpec) -> sensing.Sensor:
        raise ImportError("libnvidia-ml.so.1: wrong ELF class")

    def missing(spec: AgentSpec) -> sensing.Sensor:
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    monkeypatch.setattr(sensing, "MAKERS", {"gpu": wrong, "dcgm": missing, "host": lambda spec: Scripted(Seen())})
    *unfit, fit = sensing.sensors_of(SPEC)
    assert [sensor.name for sensor in unfit] == ["gpu", "dcgm"] and isinstance(fit, Scripted)
    assert "wrong ELF class" in unfit[0].look(0.0).blind and "pynvml" in unfit[1].look(0.0).blind


def test_without_a_job_no_address_says_that_there_is_no_network(tmp_path: Path) -> None:
    [network] = [sensor for sensor in sensing.sensors_here(str(tmp_path)) if sensor.name == "network"]
    assert "stays on this machine" not in network.look(0.0).absent


async def test_the_catalogue_is_there_before_the_first_message_and_not_at_the_start() -> None:
    rules = sensing._KernelRules()
    assert rules(()) == () and rules._rules is None
    rules.load_later(0.01)
    await until(lambda: rules._rules is not None, "it has been read")
    before = rules._rules
    line = "NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    (sign,) = rules([KernelMessage(key="kernel:boot:1", time=1.0, text=line)])
    assert sign.kind == "xid_79" and rules._rules is before, "read once"
