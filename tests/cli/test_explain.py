"""`evertrain explain`: what it reads, what it prints, and what it survives."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evertrain.cli import explain, main
from support.effort import examples

ECC = "gpu-a-12: [rank7]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
XID = "[1.1] NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.\n"


def verdicts(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[dict[str, Any]]:
    assert explain.main([*map(str, words), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_log_becomes_a_verdict_with_lines_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text("step 1\n" * 9 + ECC + "[rank3]: ncclRemoteError: A call failed possibly\n")
    assert explain.main([str(tmp_path / "job.log")]) == 0
    out = capsys.readouterr().out
    assert "gpu memory ecc" in out
    assert "host gpu-a-12" in out
    assert "evict" in out
    assert "job.log:10: gpu-a-12" in out
    assert "nccl-remote: follows from something else" in out


def test_json_holds_what_the_contract_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text(ECC)
    (row,) = verdicts(capsys, tmp_path / "job.log")
    assert (row["index"], row["category"], row["action"]) == (0, "gpu_memory_ecc", "evict")
    assert row["culprit"] == {"type": "host", "id": "gpu-a-12"}
    assert 0.9 <= row["confidence"] <= 1
    assert row["evidence"] == ["job.log:1: " + ECC.strip()]


def test_a_folder_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node-3").mkdir()
    (tmp_path / "node-3" / "dmesg").write_text(XID)
    (tmp_path / "rank7.log").write_text("RuntimeError: NCCL error in: x, unhandled system error\n")
    (tmp_path / "stack.txt").write_text('Process 7: python train.py\nThread 7 (active): "MainThread"\n    f (a.py:1)\n')
    (tmp_path / "facts.json").write_text('{"nvidia_smi": "hangs"}')
    (row,) = verdicts(capsys, tmp_path)
    assert row["culprit"]["id"].startswith("node-3/0000:19:00")


@pytest.mark.parametrize("name", ["dmesg-node-3.txt", "node-3.dmesg.log", "kern_node-3"])
def test_kernel_files_are_named_after_their_host(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(XID)
    assert verdicts(capsys, tmp_path / name)[0]["culprit"]["id"].startswith("node-3/")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs(pack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log.x").write_bytes(pack(ECC.encode()))
    assert verdicts(capsys, tmp_path / "job.log.x")[0]["action"] == "evict"


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ECC.encode())))
    assert verdicts(capsys, "-")[0]["culprit"]["id"] == "gpu-a-12"


def test_one_line_is_no_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text(ECC)
    assert explain.main([str(tmp_path)]) == 0
    assert "Read: 1 log; 1 line, 1 of them looked at closely." in capsys.readouterr().out


def test_host_and_exit_code_may_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernel.txt").write_text(XID)
    row = verdicts(capsys, tmp_path / "kernel.txt", "--host", "node-9", "--exitcode", "-6")[0]
    assert row["culprit"]["id"] == "node-9/0000:19:00"


def test_cases_read_only_their_signals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = {"id": "x", "signals": {"logs": [ECC], "exitcode": None, "dmesg": [], "stacks": {}, "metrics": {}}}
    (tmp_path / "cases.jsonl").write_text(json.dumps(case) + "\n\n" + json.dumps({"signals": {}}) + "\n")
    rows = verdicts(capsys, "--cases", tmp_path / "cases.jsonl")
    assert [(row["index"], row["action"]) for row in rows] == [(0, "evict"), (2, "none")]


def test_rules_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(
        "- rule: license\n  pattern: no license token\n  category: user_config\n  action: human\n  confidence: 0.9\n"
    )
    (tmp_path / "job.log").write_text("ERROR no license token left\n")
    assert verdicts(capsys, tmp_path / "job.log")[0]["action"] == "none"
    row = verdicts(capsys, tmp_path / "job.log", "--catalogue", tmp_path / "mine.yaml")[0]
    assert (row["category"], row["action"]) == ("user_config", "human")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- rule: x\n  pattern: '('\n  category: data\n  action: none\n  confidence: 1\n", "rule x"),
        ("- rule: x\n  pattern: abc\n  category: nonsense\n  action: none\n  confidence: 1\n", "rule x"),
        ("- rule: x\n  pattern: a.c\n  category: data\n  action: none\n  confidence: 1\n", "name its words"),
        ("- [", "mine.yaml"),
        ("- just text", "mine.yaml"),
    ],
)
def test_a_rule_that_cannot_be_used_is_named(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    assert main.main(["explain", str(tmp_path), "--catalogue", str(tmp_path / "mine.yaml")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_cannot_be_read_is_one_line_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text(ECC)
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 400)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(200_000))[:-90_000])
    os.mkfifo(tmp_path / "pipe")
    assert explain.main([str(tmp_path), str(tmp_path / "gone"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["action"] == "evict"
    for name in ("noise.bin", "pipe", "gone"):
        assert sum(name in line for line in err.splitlines()) == 1


def test_nothing_readable_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["explain", str(tmp_path / "gone")]) == 1
    assert "nothing could be read" in capsys.readouterr().err
    assert main.main(["explain"]) == 2


def test_a_bomb_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evertrain.observe import documents

    monkeypatch.setattr(documents, "FREE_GROWTH_BYTES", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"a" * (64 << 20)))
    assert explain.main([str(tmp_path), "--json"]) == 0
    assert "expands more than" in capsys.readouterr().err


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("echo taken over > /tmp/evertrain-hostile",))


def test_a_hostile_pickle_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps(_Hostile()))
    (tmp_path / "job.log").write_text(ECC)
    assert explain.main([str(tmp_path), "--json"]) == 0
    assert "trace_rank_0" in capsys.readouterr().err
    assert not Path("/tmp/evertrain-hostile").exists()


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=3000), head=st.sampled_from([b"", b"\x80\x04", b"{", b"[", b"Process 1: x\n", b"\x1f\x8b"])
)
def test_any_bytes_are_survived(data: bytes, head: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "any").write_bytes(head + data)
    (tmp_path / "job.log").write_text(ECC)
    assert explain.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.log").write_text("\x1b[2J" + ECC)
    explain.main([str(tmp_path / "job.log")])
    assert "\x1b[2J" not in capsys.readouterr().out
