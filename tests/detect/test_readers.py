"""Launchers, tracebacks, time-outs, network cards and facts: what each of them says by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evertrain.detect import launcher, nic, numbers, timeouts, tracebacks
from evertrain.detect.catalogue import Catalogue, Rule
from evertrain.model.findings import Finding
from evertrain.model.signals import Line
from support.incidents import WATCHDOG, torchrun

NO_RULES = Catalogue(())


def lines(texts: Sequence[str], *, clocks: Sequence[float] | None = None, stream: str = "") -> list[Line]:
    return [
        Line(text=text, raw=text, order=number + 1, stream=stream, clock=clocks[number] if clocks else None)
        for number, text in enumerate(texts)
    ]


def ends(*texts: str) -> launcher.Ends:
    found = launcher.Ends()
    for line in lines(texts):
        found.read(line)
    return found


def test_torchrun_names_the_first_failure() -> None:
    end = launcher.first(ends(*torchrun(-11)).ends)
    assert end is not None
    assert (end.code, end.host, end.rank, end.is_root) == (-11, "gpu-a-12", 43, True)


@pytest.mark.parametrize(
    ("text", "code", "host"),
    [
        ("srun: error: node-3: task 5: Segmentation fault (core dumped)", -11, "node-3"),
        ("srun: error: node-3: tasks 8-15: Exited with exit code 137", -9, "node-3"),
        ("mpirun noticed that process rank 3 with PID 0 on node node-7 exited on signal 9 (Killed).", -9, "node-7"),
        ("[launch.py:325] Process 12 exits with return code = -7", -7, None),
        ("      Exit Code:    139", -11, None),
        ("process 3 terminated with signal SIGSEGV", -11, None),
    ],
)
def test_other_launchers(text: str, code: int, host: str | None) -> None:
    (end,) = ends(text).ends
    assert (end.code, end.host) == (code, host)


def test_an_exit_code_of_a_shell_is_the_same() -> None:
    assert launcher.judge([], 137)[0].category == launcher.judge([], -9)[0].category == "oom_host"
    assert launcher.judge([], 0) == ()
    assert launcher.judge([], 1)[0].is_symptom


def traceback(*texts: str) -> Finding | None:
    reader = tracebacks.Tracebacks()
    for line in lines(texts):
        reader.read(line)
    found = tracebacks.judge(reader.found)
    return found[0] if found else None


def test_the_users_own_frame_is_named() -> None:
    found = traceback(
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 7, in main',
        '  File "/opt/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in _call_impl',
        "TypeError: forward() missing 1 required positional argument",
    )
    assert found is not None
    assert (found.culprit.id, found.action) == ("/home/u/train.py:7 in main", "user_code")


def test_a_lost_connection_follows_and_a_launcher_says_nothing() -> None:
    found = traceback("torch.distributed.DistBackendError: NCCL error in: x, remote process exited")
    assert found is not None and found.is_symptom
    assert traceback("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:") is None


def test_a_web_services_reset_is_the_programs_own() -> None:
    found = traceback(
        "Traceback (most recent call last):",
        '  File "/home/u/fetch.py", line 7, in get',
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    )
    assert found is not None and not found.is_symptom


def watchdogs(*told: tuple[int, int, str, int]) -> tuple[Finding, ...]:
    texts = [WATCHDOG.format(rank=rank, seq=seq, op=op, n=n) for rank, seq, op, n in told]
    return timeouts.judge([Line(text=text, raw=text, order=n, rank=told[n][0]) for n, text in enumerate(texts)])


def test_ranks_that_went_different_ways() -> None:
    assert watchdogs((0, 7, "ALLREDUCE", 4), (1, 7, "ALLREDUCE", 8))[0].action == "user_code"
    assert watchdogs((0, 7, "ALLREDUCE", 4), (1, 7, "BROADCAST", 4))[0].action == "user_code"
    assert watchdogs((0, 7, "ALLREDUCE", 4), (1, 9, "BROADCAST", 4))[0].action == "user_code"


def test_ranks_that_wait_in_the_same() -> None:
    assert watchdogs((0, 7, "ALLREDUCE", 4), (1, 7, "ALLREDUCE", 4)) == ()
    # one is behind in the same kind of operation: somebody holds it up, and nothing says who
    assert watchdogs((0, 7, "ALLREDUCE", 4), (1, 9, "ALLREDUCE", 4)) == ()


def test_warnings_of_a_network_card_count_when_they_are_close() -> None:
    texts = [f"NETDEV WATCHDOG: ens1 (mlx5_core): transmit queue {n} timed out" for n in range(3)]
    assert nic.judge(lines(texts, clocks=(0, 10, 20)), host="node-1")[0].action == "human"
    assert nic.judge(lines(texts, clocks=(0, 5000, 10000)), host="node-1")[0].is_benign


def test_flaps_count_per_port() -> None:
    one = [f"ib{n}: lost carrier" for n in range(8)]
    assert all(found.is_benign for found in nic.judge(lines(one), host="node-1"))
    assert nic.judge(lines(["ib1: lost carrier"] * 6), host="node-1")[0].action == "evict"


def facts(**metrics: object) -> list[Finding]:
    return list(numbers.judge(metrics, NO_RULES, host=None))


def test_one_slow_host_among_equal_ones() -> None:
    (found,) = facts(step_time_s={"node-1": 1.0, "node-2": 1.01, "node-3": 1.3, "node-4": 0.99})
    assert (found.action, found.culprit.id) == ("evict", "node-3")
    assert facts(step_time_s={"node-1": 1.0, "node-2": 1.2, "node-3": 1.3, "node-4": 0.8}) == []


def test_a_host_that_failed_before() -> None:
    burnt = Rule(rule="burnt", pattern="card is burnt", category="gpu_hardware", action="evict", confidence=0.9)
    known = Catalogue([burnt])
    found = list(numbers.judge({"attempts": [{"host": "node-1", "error": "card is burnt"}]}, known, host=None))
    assert [(one.rule, one.culprit.id) for one in found] == [("failed-before", "node-1")]


def test_losses() -> None:
    assert facts(loss=[2.0, 2.0, 5.0, 2.1])[0].action == "none"
    assert facts(loss=[2.0, 2.0, 5.0, 6.1])[0].category == "numerics"
    assert facts(loss=[2.0, float("nan")])[0].category == "numerics"
    assert facts(loss=[2.0, 1.9, 1.8, 1.7]) == []
