"""What is copied beside training is what the state was at `save`, or it does not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evertrain.checkpoint import slots
from evertrain.worker import copier, gpu_copy, hooks
from evertrain.worker import slots as layout
from evertrain.worker.snapshot import take

from .gang import Gang

HELD = """
import threading
from evertrain.worker import copier
gate = threading.Event()
real = copier.Copy._copy_these
def held(self, some):
    assert gate.wait(20)
    real(self, some)
copier.Copy._copy_these = held

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

def backward():
    optimizer.zero_grad()
    model(torch.ones(4, 64)).pow(2).sum().backward()

def step():
    backward()
    optimizer.step()

def beside(what):
    # runs `what` with a held copy that is let go as soon as somebody waits for it
    moved = copier_of()._moved
    real_wait = moved.wait_for
    waited = []
    def wait_for(predicate, timeout=None):
        if threading.current_thread() is threading.main_thread():
            waited.append(not predicate())
            gate.set()
        return real_wait(predicate, timeout)
    moved.wait_for = wait_for
    what()
    moved.wait_for = real_wait
    return any(waited)

def copier_of():
    from evertrain.worker import session
    return session.current.copier

step()
c = evertrain.Checkpointer({"model": model, "optimizer": optimizer})
"""


def steps(gang: Gang) -> set[int]:
    return {copy.step for copy in slots.list(gang.slots_dir)}


def test_save_returns_before_the_copy_and_what_would_change_it_waits(gang: Gang) -> None:
    script = HELD + (
        "saved = []\n"
        "def enter():\n"
        "    with evertrain.phase('evaluate'): pass\n"
        "for number, wait in enumerate([step, lambda: c.save(25), c.wait, enter, c.load], 1):\n"
        "    gate.clear()\n"
        "    c.save(10 * number)\n"
        "    backward()\n"
        "    saved.append(beside(wait))\n"
        "    copier_of().finish()\n"
        "gate.set()\n"
        "step(); c.save(60)\n"
        "say(saved)\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.said == [True] * 5, result.err
    assert 60 in steps(gang), "the end of the script waits as well"


SEES = """
def expected():
    return bits(*model.state_dict().values(), *[v for s in optimizer.state.values() for v in s.values()])
"""


def test_the_copy_is_the_state_at_save(gang: Gang) -> None:
    script = HELD + SEES + (
        "c.save(1)\n"
        "was = expected()\n"
        "for _ in range(3): model.eval(); backward()\n"  # buffers stay
        "beside(step)\n"
        "c.wait()\n"
        "say([was, expected() != was])\n"
    )  # fmt: skip
    (first,) = gang.run(script, world=1)
    assert first.said[1] is True, first.err
    again = HELD + SEES + "gate.set(); c.load(); say(expected())"
    (second,) = gang.run(again, world=1, attempt=2, resume=1)
    assert second.said == first.said[0], second.err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model[0].weight.detach().mul_(2)", "model.0.weight"),
        ("model[0].weight.data.mul_(2)", "model.0.weight"),
        ("optimizer.state[model[0].weight]['exp_avg'].data.add_(1)", "optimizer.state.model.0.weight.exp_avg"),
    ],
)
def test_a_state_that_others_change_is_not_kept_and_is_named_once(gang: Gang, change: str, named: str) -> None:
    script = HELD + (
        "gate.set(); c.save(1); c.wait(); gate.clear()\n"
        "c.save(2)\n"
        f"{change}\n"
        "gate.set(); c.wait()\n"
        "from evertrain.worker import session\n"
        "failed = session.current.page.saves_failed\n"
        "for number in (3, 4):\n"
        "    c.save(number)\n"
        f"    {change}\n"
        "    step()\n"
        "say(failed)\n"
    )
    (result,) = gang.run(script, world=1)
    assert steps(gang) == {1, 3, 4}, result.err
    lines = result.err.splitlines()
    assert len(lines) == 1 and f"step 2 is not kept, because {named} was changed after save()" in lines[0]
    assert result.said == 1
    assert result.page is not None and result.page.saves_failed == 0, "the next one did not fail"


def test_training_goes_on_where_nobody_can_be_told_of_a_problem(gang: Gang) -> None:
    script = HELD + (
        "c.save(1)\n"
        "model[0].weight.data.mul_(2)\n"
        "sys.stderr.close()\n"
        "gate.set(); step(); c.save(2); step(); say('on')\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.said == "on"
    assert steps(gang) == {2}


@pytest.mark.parametrize(("stage", "kept"), [("", 4), ("copying", 4), ("copied", 4), ("committed", 5)])
def test_killed_at_every_stage(gang: Gang, stage: str, kept: int) -> None:
    script = HELD + "gate.set()\nfor number in range(1, 9): step(); c.save(number)\n"
    fault = f"kill:stage={stage}@save=5" if stage else "kill@save=5"
    (result,) = gang.run(script, world=1, faults=[fault])
    assert result.status == -9
    assert max(steps(gang)) == kept


def test_optimizers_that_cannot_be_seen_are_copied_at_once(gang: Gang) -> None:
    script = HELD + (
        "gate.set()\n"
        "class Own:\n"
        "    def __init__(self): self.param_groups = [{'params': list(model.parameters())}]\n"
        "    def step(self):\n"
        "        for p in model.parameters(): p.data.add_(1)\n"
        "    def state_dict(self): return {}\n"
        "    def load_state_dict(self, state): pass\n"
        "own = Own()\n"
        "d = evertrain.Checkpointer({'model': model, 'own': own, 'optimizer': optimizer})\n"
        "for number in range(1, 4): own.step(); d.save(number); say(copier_of()._copy is None)\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.said is True
    assert result.err.count("\n") == 1 and "the steps of 'own' cannot be seen" in result.err
    assert steps(gang) == {1, 2, 3}


def test_checksums_come_when_nobody_is_in_a_hurry(gang: Gang) -> None:
    script = HELD + (
        "gate.set()\n"
        "from evertrain.worker import slot_file, sums\n"
        "real_sums = sums.of_data\n"
        "def busy(data, parts, hurry):\n"
        "    while not last and not hurry(): time.sleep(0.001)\n"
        "    return real_sums(data, parts, hurry)\n"
        "sums.of_data = busy\n"
        "last = False\n"
        "for number in (1, 2, 3): c.save(number); copier_of().wait()\n"
        "last = True\n"
        "c.wait()\n"
    )
    gang.run(script, world=1)
    sealed = {}
    for copy in slots.list(gang.slots_dir):
        header = layout.read(copy.path)
        assert header is not None
        sealed[copy.step] = header.sums_crc is not None
    assert sealed == {1: False, 2: False, 3: True}


def test_only_what_an_optimizer_of_the_state_changes_is_copied_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_installed", True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    average = torch.optim.swa_utils.AveragedModel(model)
    state = {"model": model, "average": average, "optimizer": optimizer, "seen": torch.zeros(3)}
    taken = take(
        {name: value if isinstance(value, torch.Tensor) else value.state_dict() for name, value in state.items()}
    )
    late = set(copier.hidden(taken, state.values()))
    parameters, buffers = 4, 3
    averaged = parameters + buffers + 1
    assert taken.counts == [parameters + buffers, averaged, 3 * parameters, 1]
    first = sum(taken.counts[:2])
    assert late == {*range(parameters), *range(first, first + 3 * parameters)}
    without = {name: value for name, value in state.items() if name != "optimizer"}
    assert copier.hidden(take({"model": model.state_dict()}), without.values()) == []


class FakeCuda:
    """Streams and events that write down what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def current_stream(self, device: Any) -> Any:
        return FakeStream(self, "current")

    def Stream(self, device: Any) -> Any:
        return FakeStream(self, "own")

    def Event(self) -> Any:
        names = iter(("ready", "done"))
        self.events = getattr(self, "events", names)
        return FakeEvent(self, next(self.events))

    def stream(self, stream: Any) -> Any:
        return stream

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.said.append("registered")
        return 0


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: Any) -> None:
        self.cuda.said.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.cuda.said.append(f"synchronized {self.name}")

    def __enter__(self) -> None:
        self.cuda.said.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        pass


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record(self, stream: Any) -> None:
        self.cuda.said.append(f"{self.name} on {stream.name}")

    def synchronize(self) -> None:
        self.cuda.said.append(f"synchronized {self.name}")


def test_a_gpu_copies_on_its_own_stream_in_the_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copy, "_streams", {})
    cuda = FakeCuda()
    copy = gpu_copy.GpuCopy(torch.device("cuda", 0), [1], cuda)
    sources, targets = [torch.ones(3), torch.ones(3)], [torch.zeros(3), torch.zeros(3)]
    copy.start(targets, sources)
    copy.order()
    copy.finish()
    assert [target.tolist() for target in targets] == [[0, 0, 0], [1, 1, 1]]
    assert cuda.said == [
        "ready on current", "own waits for ready", "on own", "done on own", "current waits for done",
        "synchronized done",
    ]  # fmt: skip


class OnGpu:
    """As much of a tensor on a GPU as is looked at before it is copied."""

    device = torch.device("cuda", 0)


class Registering:
    """A slot whose pages can be locked."""

    def register(self, page_lock: Any) -> None:
        page_lock(4096, 1 << 20)


def test_a_save_waits_until_the_gpu_has_caught_up_and_locks_its_slot() -> None:
    cuda, slot = FakeCuda(), Registering()
    sources: Any = [torch.ones(3), OnGpu(), OnGpu()]
    copies = gpu_copy.prepare(sources, slot, cuda)  # type: ignore[arg-type]
    assert len(copies) == 1 and copies[0]._which == [1, 2]
    assert cuda.said == ["synchronized current", "registered", "ready on current"]


def test_without_gpus_nothing_is_asked_of_them() -> None:
    cuda = FakeCuda()
    slot: Any = None
    assert gpu_copy.prepare([torch.ones(3)], slot, cuda) == []
    assert cuda.said == []
