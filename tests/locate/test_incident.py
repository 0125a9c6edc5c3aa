"""Verdicts on failures in many forms; what must never be convicted."""

from __future__ import annotations

import msgspec
import pytest

from evertrain.detect.catalogue import build
from evertrain.locate.incident import explain
from evertrain.model.findings import Verdict
from evertrain.model.signals import Signals
from evertrain.observe import rules
from support.incidents import FORMS, NCCL_FOLLOWERS, WATCHDOG, Form, dmesg, facts, logs, torchrun

CATALOGUE = build(rules.contents())
XID_79 = "[  812.1] NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def judged(signals: dict[str, object]) -> Verdict:
    return explain(msgspec.convert(signals, Signals), CATALOGUE)


@pytest.mark.parametrize("form", FORMS, ids=[form[0] for form in FORMS])
def test_form(form: Form) -> None:
    _, signals, category, action, host = form
    verdict = judged(signals)
    assert (verdict.category, verdict.action) == (category, action)
    if host is not None:
        assert str(verdict.culprit.id).partition("/")[0] == host


def test_followers_never_hide_the_cause() -> None:
    many = [line.replace("rank0", f"rank{rank}") for rank in range(255) for line in NCCL_FOLLOWERS]
    cause = "gpu-a-12: [rank7]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    verdict = judged(logs(*many[:300], cause, *many[300:], exitcode=-6))
    assert (verdict.category, verdict.culprit.id) == ("gpu_memory_ecc", "gpu-a-12")
    assert any("follows from something else" in reason for _, reason in verdict.considered)


def test_hardware_outranks_the_program_that_met_it() -> None:
    verdict = judged(dmesg(XID_79, logs=["RuntimeError: CUDA error: unspecified launch failure", "KeyError: 'x'"]))
    assert (verdict.category, verdict.action) == ("gpu_hardware", "evict")


def test_the_first_of_two_equal_errors_is_the_cause() -> None:
    verdict = judged(logs("[rank3]: KeyError: 'first'", "[rank4]: AttributeError: 'second'"))
    assert "first" in verdict.evidence[0]


def test_a_rank_to_be_evicted_becomes_its_host_where_the_launcher_knows_it() -> None:
    verdict = judged(logs("[rank43]: RuntimeError: CUDA error: uncorrectable ECC error encountered", *torchrun(-6)))
    assert verdict.culprit.id == "gpu-a-12"


@pytest.mark.parametrize("hosts", [3, 12])
def test_many_hosts_at_once_are_no_host(hosts: int) -> None:
    lines = [f"gpu-a-{n}: {XID_79}" for n in range(hosts)]
    verdict = judged(dmesg(*lines, host=None))
    assert verdict.action == "human"


def test_two_ends_of_a_link_are_no_host() -> None:
    lines = [f"gpu-a-{n}:3:4 [0] NCCL WARN NET/IB : Got async event : port error" for n in (1, 2)]
    assert judged(logs(*lines)).action == "human"


def test_an_earlier_failure_of_another_host_convicts_nobody() -> None:
    signals = {**dmesg(XID_79), **facts(previous_attempt={"host": "gpu-a-99", "error": "uncorrectable ECC error"})}
    assert str(judged(signals).culprit.id).startswith("gpu-a-12")


def test_a_programs_own_error_is_not_excused_by_where_it_happens() -> None:
    signals = {**logs("KeyError: 'x'", exitcode=1), **facts(note="always on the same node")}
    assert judged(signals).action == "user_code"


def test_an_error_that_moves_between_hosts_convicts_none() -> None:
    signals = {
        "logs": ["RuntimeError: CUDA error: hardware stack error"],
        "metrics": {"history": "moves between hosts"},
        "collected_from": {"logs": "gpu-a-12"},
    }
    assert judged(signals).action != "evict"


def test_time_outs_alone_name_nobody() -> None:
    lines = [WATCHDOG.format(rank=rank, seq=12, op="ALLREDUCE", n=9) for rank in range(7)]
    verdict = judged(logs(*lines, exitcode=-6))
    assert (verdict.category, verdict.action, verdict.culprit.type) == ("unknown", "human", "unknown")


def test_a_line_that_only_counts_no_errors_is_no_error() -> None:
    assert judged(logs("volatile uncorrectable ECC errors: 0", exitcode=0)).action == "none"


def test_nothing_collected_is_not_a_cause() -> None:
    assert judged({}).action == "none"
    assert judged({"exitcode": 1}).action == "human"


@pytest.mark.parametrize(
    "line",
    [
        "step 5, attempt 1, ETTR 40.1%, 5 steps at risk if a node is lost",
        "===== first node SIGTERM while link is down 23:15:08",
        "#6147: classes attribute of the citation_reference node is lost",
        "warning: a node is not responding to our questions; the host is down for today",
        "evertrain: beta-2 answers again; the link is down no more",
    ],
)
def test_plain_words_convict_nobody(line: str) -> None:
    assert judged(logs("step 4 loss 2.1", line)).action != "evict"
