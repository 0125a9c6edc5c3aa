"""Captures on their way: what agents may send, what is made of it, and that nothing of it can harm a job."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from evertrain.controller import capture_files, captures
from evertrain.controller import conductor as conducting
from evertrain.decide import captures as rules
from evertrain.locate import culprit
from evertrain.model.capture_records import CaptureAsked, CaptureReason, HangLocated
from evertrain.model.records import TermStarted
from evertrain.model.stacks import Located, NodeCapture, RecorderDumps
from support.conducted import Served, served, until
from support.stuck import SLEEP, Job

Json = dict[str, Any]


class Serving(Served):
    async def ordered(self) -> int:
        """A user asks; the number, once both agents have been told."""
        status, answer = await self.ask("POST", "/v1/captures")
        assert status == 202
        number = int(answer["capture"])
        await until(lambda: self.told(number), "the agents are told")
        return number

    def told(self, number: int) -> bool:
        orders = [order.capture for order in self.orders.values()]
        return len(orders) == 2 and all(order is not None and order.number == number for order in orders)

    async def send(self, number: int, node: str, capture: NodeCapture | bytes) -> tuple[int, Any]:
        body = capture if isinstance(capture, bytes) else msgspec.msgpack.encode(capture)
        return await self.ask("PUT", f"/v1/captures/{number}/{node}", body)

    async def over(self, number: int) -> Json:
        deadline = time.monotonic() + 20.0
        while True:
            status, answer = await self.ask("GET", f"/v1/captures/{number}")
            if status == 200:
                found: Json = answer
                return found
            assert status == 202 and time.monotonic() < deadline, (status, answer)
            await asyncio.sleep(0.01)

    @property
    def located(self) -> list[HangLocated]:
        return [one.located for one in self.conductor.state.captures if one.located is not None]


def seen(number: int = 1, node: str = "node-0", **different: Any) -> NodeCapture:
    """Rank 3 sleeps in the script, the others wait for it."""
    job = Job({"dp": 4})
    job.outside(3, SLEEP)
    return replace(next(one for one in job.captures(number) if one.node == node), **different)


@pytest.fixture
async def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serving]:
    async with served(tmp_path, monkeypatch) as parts:
        yield Serving(*parts)


async def test_a_look_of_the_user_comes_back_merged_and_judged(serving: Serving, tmp_path: Path) -> None:
    number = await serving.ordered()
    assert await serving.ask("GET", f"/v1/captures/{number}") == (
        202, {"capture": number, "over": False, "waits_for": ["node-0", "node-1"]},
    )  # fmt: skip
    for node in ("node-0", "node-1"):
        assert (await serving.send(number, node, seen(number, node)))[0] == 200
    found = await serving.over(number)
    assert found["job"] == "job" and found["step"] == 2
    assert sorted(found["merged"]["nodes"]) == ["0", "1", "2", "3"] and not found["merged"]["missing"]
    assert (found["located"]["ranks"], found["located"]["nodes"]) == ([3], ["node-1"])
    assert not serving.located, "the job is not suspected of anything"
    await until(lambda: capture_files.numbers(tmp_path) == [number], "it is kept")
    kept = capture_files.read(tmp_path, number)
    assert kept is not None and kept.located == msgspec.convert(found["located"], Located)
    listed = (await serving.ask("GET", "/v1/captures"))[1]
    assert [(one["capture"], one["kept"], one["reason"]) for one in listed] == [(number, True, "user")]


async def test_two_users_at_once_share_a_look(serving: Serving) -> None:
    number = await serving.ordered()
    assert (await serving.ask("POST", "/v1/captures"))[1] == {"capture": number}
    for node in ("node-0", "node-1"):
        await serving.send(number, node, seen(number, node))
    await serving.over(number)
    assert await serving.ordered() == number + 1, "what is over shows what was"


async def test_who_sends_nothing_is_named_and_nobody_waits_for_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rules.COLLECT_S, "user", 0.3)
    number = await serving.ordered()
    await serving.send(number, "node-0", seen(number))
    found = await serving.over(number)
    assert found["merged"]["missing"] == ["node-1"]
    assert (await serving.send(number, "node-1", seen(number, "node-1")))[0] == 410


async def test_of_a_node_that_has_left_nothing_is_waited_for(serving: Serving) -> None:
    number = await serving.ordered()
    await serving.send(number, "node-0", seen(number))
    began = time.monotonic()
    node = serving.conductor._nodes["node-1"]
    serving.conductor._nodes["node-1"] = msgspec.structs.replace(node, connected=False)
    found = await serving.over(number)
    assert found["merged"]["missing"] == ["node-1"] and time.monotonic() - began < rules.COLLECT_S["user"]


async def test_what_does_not_belong_there_is_refused(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    number = await serving.ordered()
    refused = [
        ((number + 5, "node-0", seen(number + 5)), 404, "no capture 6 has been asked for"),
        ((number, "node-9", seen(number)), 403, "node-9 has no ranks of attempt 1"),
        ((number, "node-0", seen(number, attempt=0)), 409, "of attempt 0 on node-0 was sent as capture 1 of attempt 1"),
        ((number, "node-0", seen(number, "node-1")), 409, "on node-1 was sent"),
        ((number, "node-0", b"\xc1 nonsense"), 400, "is no capture"),
    ]
    for (at, node, sent), status, line in refused:
        found = await serving.send(at, node, sent)
        assert found[0] == status and line in found[1]["error"], found
    monkeypatch.setattr(captures, "MOST_BYTES", 1000)
    assert (await serving.send(number, "node-0", b"x" * 1001))[0] == 413
    monkeypatch.setattr(captures, "MOST_BYTES_ALL", 10)
    assert (await serving.send(number, "node-0", seen(number, positions=())))[0] == 413
    async with serving.session.put(
        f"{serving.url}/v1/captures/{number}/node-0", data=b"", headers={"Authorization": "Bearer wrong"}
    ) as answer:
        assert answer.status == 401
    assert (await serving.ask("GET", "/v1/captures/999"))[0] == 404


async def test_recorders_dumps_come_behind_their_capture_and_are_given_out(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer = await serving.ask("POST", "/v1/captures", b'{"dumps": true}')
    assert status == 202
    number = int(answer["capture"])
    await until(lambda: serving.told(number), "the agents are told")
    orders = [order.capture for order in serving.orders.values()]
    assert all(order is not None and order.dumps for order in orders)
    for node in serving.world.nodes:
        assert (await serving.send(number, node, seen(number, node)))[0] == 200
    assert (await serving.over(number))["asked"]["dumps"] is True

    path = f"/v1/captures/{number}/recorders"
    assert await serving.ask("GET", path) == (200, [])
    body = msgspec.msgpack.encode(RecorderDumps(node="node-1", dumps={2: b"packed"}))
    assert (await serving.ask("PUT", f"/v1/captures/{number}/node-1/recorders", body))[0] == 200
    assert await serving.ask("GET", path) == (200, ["node-1"])
    async with serving.session.get(f"{serving.url}{path}/node-1") as given:
        assert await given.read() == body
    assert (await serving.ask("GET", f"{path}/node-0"))[0] == 404
    for at, node, sent, status in (
        (number, "node-0", body, 409),
        (number, "node-9", body, 403),
        (number, "node-1", b"nonsense", 400),
        (number + 7, "node-1", body, 404),
    ):
        assert (await serving.ask("PUT", f"/v1/captures/{at}/{node}/recorders", sent))[0] == status
    monkeypatch.setattr(captures, "MOST_DUMP_BYTES", 10)
    assert (await serving.ask("PUT", f"/v1/captures/{number}/node-1/recorders", body))[0] == 413
    assert (await serving.ask("POST", "/v1/captures", b'{"dump": true}'))[0] == 400


async def test_what_cannot_be_read_costs_its_node_and_nothing_else(serving: Serving) -> None:
    number = await serving.ordered()
    head: Json = {"number": number, "attempt": 1, "node": "node-0", "time": 1.0, "positions": "none"}
    assert (await serving.send(number, "node-0", msgspec.msgpack.encode(head)))[0] == 200
    await serving.send(number, "node-1", seen(number, "node-1"))
    found = await serving.over(number)
    assert found["merged"]["missing"] == ["node-0"]
    assert "node-0: what it sent cannot be read" in found["merged"]["blind"][0]


async def test_a_bug_in_the_verdict_costs_the_verdict(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Located:
        raise RuntimeError("a bug")

    monkeypatch.setattr(culprit, "locate", broken)
    number = await serving.ordered()
    for node in ("node-0", "node-1"):
        await serving.send(number, node, seen(number, node))
    found = await serving.over(number)
    assert found["located"]["kind"] == "unknown" and "could not be judged" in found["located"]["evidence"][0]
    assert len(found["merged"]["positions"]) == 2


async def test_a_full_disk_costs_the_file_only(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("no folder can be made here")
    number = await serving.ordered()
    for node in ("node-0", "node-1"):
        await serving.send(number, node, seen(number, node))
    assert (await serving.over(number))["located"]["ranks"] == [3]


async def test_a_hang_is_named_by_two_captures(serving: Serving) -> None:
    conductor = serving.conductor
    at = conductor.now()
    for number in (1, 2):
        conductor._inbox.append(CaptureAsked(time=at + number, capture=number, attempt=1, reason="hang"))
        conductor._wake.set()
        await until(lambda number=number: serving.told(number), "the agents are told")  # type: ignore[misc]
        for node in ("node-0", "node-1"):
            assert (await serving.send(number, node, seen(number, node)))[0] == 200
        await until(lambda number=number: len(serving.located) == number, "it is judged")  # type: ignore[misc]
    first, second = serving.located
    assert (second.located.kind, second.located.ranks) == ("outside", (3,))
    assert second.located.captures == (1, 2) and second.located.confidence > first.located.confidence
    assert second.standing == (0, 1, 2), "they wait where they waited before"


async def test_the_rounds_of_a_slow_job_are_judged_together(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []

    def vote(rounds: Any, *, mesh: Any) -> Located:
        given.append([one.number for one in rounds])
        return Located(kind="slow", ranks=(3,), nodes=("node-1",), captures=tuple(given[-1]))

    monkeypatch.setattr(captures.votes, "vote", vote)
    conductor = serving.conductor
    for number in range(1, rules.ROUNDS + 1):
        asked = CaptureAsked(
            time=conductor.now(),
            capture=number,
            attempt=1,
            reason="slow",
            series=1,
            round=number,
            looks=2,
            every_s=0.01,
        )
        conductor._inbox.append(asked)
        conductor._wake.set()
        await until(lambda number=number: serving.told(number), "the agents are told")  # type: ignore[misc]
        for node in ("node-0", "node-1"):
            await serving.send(number, node, seen(number, node))
        await serving.over(number)
    await until(lambda: serving.located, "there is a verdict")
    assert given == [[1, 2, 3, 4, 5]]
    assert [one.capture for one in serving.located] == [5]


async def test_a_controller_that_takes_over_says_what_was_lost_and_keeps_what_was_not(
    serving: Serving, tmp_path: Path
) -> None:
    number = await serving.ordered()
    for node in ("node-0", "node-1"):
        await serving.send(number, node, seen(number, node))
    await serving.over(number)
    await until(lambda: capture_files.numbers(tmp_path) == [number], "it is kept")
    lost = await serving.ordered()
    state = serving.conductor.state
    serving.conductor.captures = captures.Captures(serving.conductor._spec, serving.conductor._note, lambda: None)
    later = TermStarted(time=serving.conductor.now(), term=state.term + 1, clock=state.clock)
    serving.conductor._state = conducting.apply(state, later)
    assert (await serving.ask("GET", f"/v1/captures/{number}"))[0] == 200
    assert (await serving.ask("GET", f"/v1/captures/{lost}"))[0] == 410
    assert (await serving.send(lost, "node-0", seen(lost)))[0] == 404
    assert await serving.ordered() == lost + 1


async def test_without_ranks_there_is_nothing_to_look_at(serving: Serving) -> None:
    state = serving.conductor.state
    serving.conductor._state = replace(state, attempts=())
    assert (await serving.ask("POST", "/v1/captures"))[0] == 409


# -- files -----------------------------------------------------------------------------------------------------------


def kept(number: int, reason: CaptureReason = "hang") -> capture_files.Kept:
    merged = Job({"dp": 4}).merged(number)
    asked = CaptureAsked(time=float(number), capture=number, attempt=1, reason=reason)
    return capture_files.Kept(job="job", asked=asked, merged=merged, located=Located(kind="unknown"))


def test_the_newest_twenty_are_kept(tmp_path: Path) -> None:
    for number in range(1, capture_files.MOST + 4):
        capture_files.write(tmp_path, kept(number))
    assert capture_files.numbers(tmp_path) == list(range(4, capture_files.MOST + 4))
    assert capture_files.read(tmp_path, 4) == kept(4) and capture_files.read(tmp_path, 3) is None
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


def test_neither_a_slow_job_nor_the_user_pushes_out_what_a_hang_has_shown(tmp_path: Path) -> None:
    capture_files.write(tmp_path, kept(1))
    for number in range(2, 2 * capture_files.MOST + 6):
        capture_files.write(tmp_path, kept(number, "user" if number % 2 else "slow"))
    there = capture_files.numbers(tmp_path)
    assert there[0] == 1 and there[1:] == list(range(6, 2 * capture_files.MOST + 6))
    assert capture_files.read(tmp_path, 1) == kept(1) and capture_files.read(tmp_path, 2) is None
    assert capture_files.read(tmp_path, 6) == kept(6, "slow")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    capture_files.write(tmp_path, kept(1))
    path = tmp_path / "captures" / "1-hang.msgpack.gz"
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2], whole[:20] + b"\0" * 9 + whole[29:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read") as caught:
            capture_files.read(tmp_path, 1)
        assert "\n" not in str(caught.value)


def test_ten_thousand_ranks_are_small_in_a_file(tmp_path: Path) -> None:
    big = kept(1)
    members = [
        msgspec.structs.replace(member, rank=rank)
        for rank in range(10_000)
        for member in [big.merged.positions[0].members[0]]
    ]
    position = msgspec.structs.replace(big.merged.positions[0], members=tuple(members))
    capture_files.write(tmp_path, replace(big, merged=replace(big.merged, positions=(position,))))
    assert (tmp_path / "captures" / "1-hang.msgpack.gz").stat().st_size < 200_000
    assert json.loads(msgspec.json.encode(capture_files.read(tmp_path, 1)))["job"] == "job"
