"""What a failed rank left behind, from its three sources."""

from __future__ import annotations

import json
from pathlib import Path

from evertrain.agent import failures

PRINTED = """\
step 3
Traceback (most recent call last):
  File "/jobs/train.py", line 12, in <module>
    main()
  File "/jobs/train.py", line 7, in main
    raise ValueError("boom: twice")
ValueError: boom: twice
"""


def test_our_own_record_comes_first(tmp_path: Path) -> None:
    ours = {"type": "KeyError", "message": "'x'", "traceback": "…", "file": "/t.py", "line": 4, "step": 17, "time": 5.5}
    (tmp_path / "exception.json").write_text(json.dumps(ours))
    (tmp_path / "error.json").write_text(json.dumps({"message": "something else"}))
    found = failures.error_of(tmp_path / "exception.json", tmp_path, PRINTED)
    assert found is not None
    assert found.signature() == "KeyError at /t.py:4"
    assert found.time == 5.5


def test_torchs_error_file_is_understood(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(
        json.dumps(
            {"message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": PRINTED, "timestamp": "1"}}}
        )
    )
    found = failures.error_of(tmp_path / "exception.json", tmp_path, "")
    assert found is not None
    assert (found.type, found.message, found.file, found.line) == ("ValueError", "boom", "/jobs/train.py", 7)


def test_a_traceback_in_stderr_is_the_last_resort(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_bytes(b"\xff\xfe not text\n" + PRINTED.encode())
    found = failures.error_of(tmp_path / "exception.json", tmp_path, failures.stderr_tail(tmp_path))
    assert found is not None
    assert (found.type, found.message, found.line) == ("ValueError", "boom: twice", 7)


def test_nothing_left_is_nothing_known(tmp_path: Path) -> None:
    assert failures.error_of(tmp_path / "exception.json", tmp_path, failures.stderr_tail(tmp_path)) is None
    (tmp_path / "exception.json").write_text("{ half")
    assert failures.error_of(tmp_path / "exception.json", tmp_path, "") is None


def test_only_the_tail_of_a_long_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_bytes(b"x" * 1_000_000)
    assert len(failures.stderr_tail(tmp_path)) == 16 << 10
