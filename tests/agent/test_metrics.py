"""What ranks report becomes signs of their node: each event once, none for what is healthy, none of another attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.agent.metrics import Metrics
from evertrain.model.config import MetricConfig
from evertrain.model.sensing import GpuReading, PortReading
from evertrain.observe import pages
from evertrain.worker import page

NAN = float("nan")


class Node:
    """Pages of ranks that report a step a second, and an agent that looks at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = Metrics(self.path, MetricConfig())
        self.writers: dict[tuple[int, int], page.PageWriter] = {}
        self.attempt = 1
        self.now = 0.0

    def path(self, attempt: int, rank: int) -> Path:
        return self.folder / f"a{attempt}-r{rank}"

    def begin(self, attempt: int, *ranks: int) -> None:
        self.attempt = attempt
        for rank in ranks:
            path = str(self.path(attempt, rank))
            page.create(path, job="job", term=1, attempt=attempt, rank=rank)
            self.writers[attempt, rank] = writer = page.PageWriter(path)
            writer.phase = b"train"
            writer.write()

    def step(
        self,
        rank: int,
        step: int,
        *,
        loss: float = 1.0,
        grad_norm: float = 1.0,
        time: float | None = None,
        more: int = 0,
    ) -> None:
        writer = self.writers[self.attempt, rank]
        self.now = float(step) if time is None else time
        flags = page.HAS_LOSS | page.HAS_GRAD_NORM | more
        writer.remember_step(writer.steps + 1, step, step, self.now, 0.0, loss, grad_norm, 0.0, flags, 0)

    def look(self) -> dict[str, str]:
        views = [view for path in sorted(self.folder.iterdir()) if (view := pages.read(path)[0]) is not None]
        self.metrics.look(views, self.attempt, self.now)
        return {sign.key: sign.evidence for sign in self.metrics.signs()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.metrics.close()


def test_a_loss_that_is_not_finite_is_told_at_once_and_once(node: Node) -> None:
    node.begin(1, 4, 5)
    for step in range(1, 11):
        node.step(4, step)
        node.step(5, step)
    assert node.look() == {}
    node.step(5, 11, loss=NAN)
    assert node.look() == {"metrics:loss_not_finite:a1:11": "rank 5: loss is nan at step 11"}
    (sign,) = node.metrics.signs()
    assert (sign.kind, sign.time) == ("loss_not_finite", 11.0)
    node.step(5, 12, loss=NAN)
    node.step(4, 11, loss=NAN)
    assert node.look() == {"metrics:loss_not_finite:a1:11": "ranks 4, 5: loss is nan at step 11"}
    assert node.metrics.signs()[0].time == 11.0


def test_no_step_is_missed_between_two_looks(node: Node) -> None:
    node.begin(1, 0)
    node.look()
    for step in range(1, 121):
        node.step(0, step, loss=NAN if step == 60 else 1.0)
    assert list(node.look()) == ["metrics:loss_not_finite:a1:60"]


def test_jumps_are_judged_by_the_lowest_rank(node: Node) -> None:
    node.begin(1, 2, 3)
    for step in range(1, 61):
        node.step(2, step)
        node.step(3, step, loss=99.0 if step > 50 else 1.0)
    assert node.look() == {}
    for step in range(61, 63):
        node.step(2, step, loss=50.0)
    assert node.look() == {}, "a warning is no sign"
    node.step(2, 63, loss=50.0)
    assert list(node.look()) == ["metrics:loss_jump:a1:61"]


def test_a_lower_rank_that_is_seen_later(node: Node) -> None:
    node.begin(1, 3)
    for step in range(1, 31):
        node.step(3, step)
    node.look()
    node.begin(1, 2)
    for step in range(1, 41):
        node.step(2, step, loss=1.0 if step < 38 else 50.0)
    assert list(node.look()) == ["metrics:loss_jump:a1:38"]


def test_slow_ranks_and_those_that_are_no_more(node: Node) -> None:
    node.begin(1, 0)
    now = 0.0
    for step in range(1, 301):
        now += 2.0 if 100 <= step < 200 else 1.0
        node.step(0, step, time=now)
        keys = list(node.look())
        if step in (99, 230):
            assert keys == []
        if step == 150:
            (key,) = keys
            assert 100 <= int(key.removeprefix("metrics:slow:a1:")) <= 106, "the window has to fill first"


def test_an_attempt_begins_with_nothing_known(node: Node) -> None:
    node.begin(1, 0)
    for step in range(1, 61):
        node.step(0, step, loss=0.01 if step < 60 else NAN)
    assert len(node.look()) == 1
    node.metrics.look([], None, 99.0)
    assert len(node.metrics.signs()) == 1, "until the next attempt it is there to be read"
    node.begin(2, 0)
    assert node.look() == {}
    for step in range(50, 120):
        node.step(0, step, loss=9.0, time=100.0 + 3 * step)
    assert node.look() == {}
    node.step(0, 120, loss=NAN)
    assert list(node.look()) == ["metrics:loss_not_finite:a2:120"]


def test_micro_batches_and_steps_that_are_skipped(node: Node) -> None:
    node.begin(1, 0)
    writer = node.writers[1, 0]
    for step in range(1, 61):
        for part in range(4):  # four reports for each step of the optimizer
            flags = page.HAS_LOSS | (page.IS_OPEN if part == 3 else 0)
            high = step == 60
            writer.remember_step(
                writer.steps + 1, step, step, step + part / 4, 0.0, 70.0 if high else 1.0, 0.0, 0.0, flags, 0
            )
        assert node.look() == {}


def test_signs_are_bounded(node: Node) -> None:
    node.begin(1, 0)
    for step in range(1, 121):
        node.step(0, step, loss=NAN if step % 2 else 1.0)
    keys = list(node.look())
    assert len(keys) == 32 and keys[-1] == "metrics:loss_not_finite:a1:119"


def test_a_page_that_is_gone_or_damaged_says_nothing(node: Node) -> None:
    node.begin(1, 0, 1)
    views = [view for rank in (0, 1) if (view := pages.read(node.path(1, rank))[0]) is not None]
    node.path(1, 0).unlink()
    node.path(1, 1).write_bytes(b"damaged")
    node.metrics.look(views, 1, 1.0)
    assert node.metrics.signs() == ()


def port(total: float) -> PortReading:
    return PortReading(name="eth0", is_up=True, received_bytes=int(total / 2), sent_bytes=int(total / 2))


def test_ports_and_gpus_beside_it(node: Node) -> None:
    node.begin(1, 0)
    cool = GpuReading(index=0, uuid="GPU-a", temperature_c=60)
    hot = GpuReading(index=1, uuid="GPU-b", temperature_c=91, slowdown_c=90)
    node.metrics.look_at_machine([port(0)], [hot], 0.0)
    now = 0.0
    for step in range(1, 131):
        now += 1.0 if step < 100 else 2.0
        node.step(0, step, time=now)
        node.look()
        node.metrics.look_at_machine([port(1e9 * now)], [cool, hot], now)
    kinds = {sign.kind: sign.device for sign in node.metrics.signs()}
    assert kinds == {"slow": "", "hot_and_slow": "GPU 1 (GPU-b)"}
    for later in range(1, 30):
        node.metrics.look_at_machine([port(1e9 * now)], [], now + later)
    assert [sign.kind for sign in node.metrics.signs()][-1] == "no_traffic"


def test_tensor_cores(node: Node) -> None:
    node.begin(1, 0)
    node.step(0, 1)
    node.look()
    for second in range(100):
        node.metrics.look_at_tensor_cores("GPU 0", 0.5, 1.0, float(second))
    for second in range(100, 200):
        node.metrics.look_at_tensor_cores("GPU 0", 0.01, 1.0, float(second))
    assert [(sign.kind, sign.device) for sign in node.metrics.signs()] == [("tensor_idle", "GPU 0")]
