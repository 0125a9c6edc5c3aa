"""Files of experiment trackers are read while they grow: whole records once, halves later, damage with a word."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path

import pytest

from evertrain.observe import record_files
from evertrain.observe.record_files import EventFile, JsonLines, Number, RecordFile, WandbFile
from support.trackers import event, frame, history, parts

# as tensorboardX has written them: the version, train/loss and train/grad_norm at step 0, the same at step 1
TENSORBOARD = bytes.fromhex(
    "1800000000000000a37f4b22094d0956a953c3da411a0d627261696e2e4576656e743a328092d3f2"
    "1e00000000000000d9dc1232090a1856a953c3da412a130a110a0a747261696e2f6c6f73731500000040667a23d4"
    "2300000000000000b09f774309a81e56a953c3da412a180a160a0f747261696e2f677261645f6e6f726d150000003fea53dc72"
    "200000000000000029eda95009474b58a953c3da4110012a130a110a0a747261696e2f6c6f7373150000803f93906c72"
    "2500000000000000eabc36f3094c4c58a953c3da4110012a180a160a0f747261696e2f677261645f6e6f726d150000c03f97c350a0"
)
# the history of a record of wandb: infinity, a time, a step, train/loss as one name, train/grad_norm as two
HISTORY = bytes.fromhex(
    "0a101203696e66820108496e66696e697479"
    "0a24120a5f74696d657374616d70820115312e373936303334323135323832393632652b3039"
    "0a0b12055f73746570820101300a10120a747261696e2f6c6f737382010132"
    "0a191205747261696e1209677261645f6e6f726d820104302e32351200"
)
WANDB = bytes([0x08, 0x0A, 0x12, len(HISTORY)]) + HISTORY


def said(numbers: list[Number]) -> list[tuple[str, int, float]]:
    return [(one.tag, one.step, one.value) for one in numbers]


def test_tensorboard_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "events").write_bytes(TENSORBOARD)
    file = EventFile(tmp_path / "events")
    found = file.read()
    assert said(found) == [
        ("train/loss", 0, 2.0), ("train/grad_norm", 0, 0.5), ("train/loss", 1, 1.0), ("train/grad_norm", 1, 1.5),
    ]  # fmt: skip
    assert found[0].time == pytest.approx(1796034213.345, abs=1e-3)
    assert file.read() == [] and file.trouble == ""


def test_wandb_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "run.wandb").write_bytes(parts([WANDB]))
    found = WandbFile(tmp_path / "run.wandb").read()
    assert said(found) == [("inf", 0, math.inf), ("train/loss", 0, 2.0), ("train/grad_norm", 0, 0.25)]
    assert found[0].time == pytest.approx(1796034215.283, abs=1e-3)


@cache
def content(kind: type[RecordFile]) -> bytes:
    if kind is EventFile:
        return b"".join(frame(event(step, {"loss": step / 2})) for step in range(40))
    if kind is WandbFile:
        return parts([history(step, {"loss": step / 2, "text": "x" * 1500}) for step in range(40)])
    return b"".join(json.dumps({"_step": step, "loss": step / 2}).encode() + b"\n" for step in range(40))


KINDS = [EventFile, WandbFile, JsonLines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_grows_by_any_number_of_bytes(kind: type[RecordFile], tmp_path: Path) -> None:
    whole = content(kind)
    rng = random.Random(3)
    path = tmp_path / "file"
    for _ in range(10):
        path.unlink(missing_ok=True)
        file, found, at = kind(path), [], 0
        assert file.read() == []
        with open(path, "ab", buffering=0) as growing:
            while at < len(whole):
                more = rng.choice([1, 3, 50, 700, 40_000])
                growing.write(whole[at : at + more])
                at += more
                found += file.read()
        assert said(found) == [("loss", step, step / 2) for step in range(40)] and file.trouble == ""


@pytest.mark.parametrize("kind", KINDS)
def test_one_look_reads_so_much_and_no_more(
    kind: type[RecordFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(content(kind))
    monkeypatch.setattr(record_files, "CHUNK_BYTES", 600)
    file = kind(tmp_path / "file")
    looks = [file.read() for _ in range(len(content(kind)) // 600 + 1)]
    assert len(looks[0]) < 30 and [one.step for look in looks for one in look] == list(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_written_anew(kind: type[RecordFile], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content(kind))
    file = kind(tmp_path / "file")
    assert len(file.read()) == 40
    (tmp_path / "file").write_bytes(content(kind)[: len(content(kind)) // 2])
    assert 10 < len(file.read()) < 30 and file.trouble == ""


@pytest.mark.parametrize("kind", [EventFile, WandbFile])
def test_damage_is_said_and_what_came_before_it_kept(kind: type[RecordFile], tmp_path: Path) -> None:
    whole = bytearray(content(kind))
    whole[len(whole) // 2 : len(whole) // 2 + 80] = b"\xff" * 80
    (tmp_path / "file").write_bytes(whole)
    file = kind(tmp_path / "file")
    assert 10 < len(file.read()) < 40
    assert "damaged" in file.trouble and str(tmp_path) in file.trouble and file.read() == []


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_never_raises(kind: type[RecordFile], tmp_path: Path) -> None:
    rng = random.Random(11)
    for _ in range(300):
        data = bytearray(content(kind)[:4000]) if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randrange(400)))
        for _ in range(rng.randrange(6)):
            data[rng.randrange(len(data) or 1) : 0] = rng.randbytes(rng.randrange(1, 9))
        (tmp_path / "file").write_bytes(data)
        file = kind(tmp_path / "file")
        for _ in range(3):
            file.read()


def test_garbage_inside_a_whole_record_never_raises(tmp_path: Path) -> None:
    rng = random.Random(12)
    bodies = []
    for _ in range(500):
        body = bytearray(event(7, {"loss": 1.0}) if rng.random() < 0.5 else WANDB)
        body[rng.randrange(len(body))] = rng.randrange(256)
        bodies.append(bytes(body[: rng.randrange(len(body)) + 1]))
    (tmp_path / "events").write_bytes(b"".join(map(frame, bodies)))
    (tmp_path / "wandb").write_bytes(parts(bodies))
    events, run = EventFile(tmp_path / "events"), WandbFile(tmp_path / "wandb")
    for file in (events, run):
        for number in file.read():
            assert isinstance(number.value, float) and isinstance(number.step, int)
        assert file.trouble == ""


def test_zeros_that_wait_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(content(WandbFile) + bytes(5000))
    file = WandbFile(tmp_path / "run")
    assert len(file.read()) == 40 and file.read() == [] and file.trouble == ""


def test_what_is_no_file_of_wandb(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"something else")
    file = WandbFile(tmp_path / "run")
    assert file.read() == [] and "no file of wandb" in file.trouble


def test_scalars_as_tensors_and_what_is_no_scalar(tmp_path: Path) -> None:
    written = [
        event(1, {"simple": 1.5}), event(2, {"float": 2.5}, form="float"), event(3, {"raw": 3.5}, form="raw"),
        event(4, {"double": 4.5}, form="double"), event(5, {"text": 1.0}, form="text"),
    ]  # fmt: skip
    picture = event(6, {"loss": 1.0}) + b"\x2a" + bytes([0x80, 0x80, 0x08]) + bytes(1 << 17)
    (tmp_path / "events").write_bytes(b"".join(map(frame, [*written, picture, event(7, {"loss": math.nan})])))
    found = said(EventFile(tmp_path / "events").read())
    assert found[:4] == [("simple", 1, 1.5), ("float", 2, 2.5), ("raw", 3, 3.5), ("double", 4, 4.5)]
    assert len(found) == 5 and found[4][:2] == ("loss", 7) and math.isnan(found[4][2])


def test_lines_of_json(tmp_path: Path) -> None:
    lines = [
        '{"_step": 1, "_timestamp": 50.5, "loss": NaN, "name": "run", "done": true, "deep": {"a": 1}}',
        "no json", '["a list"]', '{"loss": 3.0}', '{"step": 2, "loss": 1e400, "grad_norm": "Infinity"}',
        '{"_step": "three", "loss": 1.0}', '{"_step": 4, "los',
    ]  # fmt: skip
    (tmp_path / "wandb-history.jsonl").write_text("\n".join(lines))
    found = JsonLines(tmp_path / "wandb-history.jsonl").read()
    assert [(one.tag, one.step, one.time, str(one.value)) for one in found] == [
        ("loss", 1, 50.5, "nan"), ("loss", 2, 0.0, "inf"), ("grad_norm", 2, 0.0, "inf"),
    ]  # fmt: skip
