"""Plain data is read as it was written; a pickle that is anything else is refused in one line, and never run."""

import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.locate import pickles

DATA = Path(__file__).parent.parent / "data" / "flight"
RECORDED = sorted(DATA.glob("*/rank_?"))

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_torch_recorded_is_read(path: Path) -> None:
    data = path.read_bytes()
    assert pickles.loads(data) == pickle.loads(data)


def test_there_are_recorded_dumps() -> None:
    assert len(RECORDED) == 12


@given(plain, st.integers(2, 5))
def test_plain_data_is_read_in_every_protocol(content: Any, protocol: int) -> None:
    assert pickles.loads(pickle.dumps(content, protocol)) == content


class _Caller:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / f"made-{protocol}"
    with pytest.raises(ValueError, match="more than data"):
        pickles.loads(pickle.dumps({"entries": [_Caller(str(target))]}, protocol))
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(OrderedDict(a=1)),
        pickle.dumps(print),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02]q\x00h\x07.",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02\x8b\xff\xff\xff\x7f\x00.",
        b"\x80\x02}" + b"K\x01" + b"K\x01\x86" * 400_000 + b"K\x01s.",
        b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999,
        b"\x80\x02e.",
        b"\x80\x02}](K\x01u.",
        b"\x80\x02Pid\n.",
        b"",
        b"\x80",
        b"\x80\x02",
    ],
    ids=range(16),
)
def test_hostile_pickles_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ValueError) as told:
        pickles.loads(data)
    assert "\n" not in str(told.value) and len(str(told.value)) < 300


def test_a_list_within_itself_is_harmless() -> None:
    found = pickles.loads(b"\x80\x02]q\x00h\x00a.")
    assert found[0] is found


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        pickles.loads(b"\x80\x02" + data)
    except ValueError:
        pass


@given(st.data())
def test_a_dump_cut_or_changed_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    whole = RECORDED[0].read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError):
        pickles.loads(whole[:at])
    changed = bytearray(whole)
    changed[at] = data.draw(st.integers(0, 255))
    try:
        pickles.loads(bytes(changed))
    except ValueError:
        pass


def test_the_check_lets_only_plain_operations_through() -> None:
    """Every operation of every protocol, put where a value may stand: those that import or call are all refused."""
    dangerous = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "PERSID",
                 "BINPERSID", "EXT1", "EXT2", "EXT4"}  # fmt: skip
    assert dangerous <= {one.name for one in pickletools.opcodes}
    for one in pickletools.opcodes:
        if one.name in dangerous:
            with pytest.raises(ValueError, match="more than data"):
                pickles.loads(b"\x80\x02" + one.code.encode("latin-1") + b"\x01" * 8 + b".")
