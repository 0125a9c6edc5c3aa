"""Our declarations of NCCL's profiler interface are those that were checked, in C and in C++."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from evertrain.trace import plugin
from support import nccl

pytestmark = pytest.mark.skipif(bool(nccl.MISSING), reason=nccl.MISSING)


def test_the_assertions_are_those_of_the_table() -> None:
    spec = importlib.util.spec_from_file_location("assertions", nccl.DRIVER / "assertions.py")
    assert spec is not None and spec.loader is not None
    assertions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(assertions)
    assert assertions.HEADER.read_text() == assertions.header()
    said = assertions.header()
    assert said.count("EV_PLACED(") > 150 and "v7" not in said


@pytest.mark.parametrize(
    ("compiler", "name", "flags"),
    [("gcc", "unit.c", ["-std=c11"]), ("g++", "unit.cc", ["-std=c++17", "-Wno-invalid-offsetof"])],
)
def test_they_hold(tmp_path: Path, compiler: str, name: str, flags: list[str]) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is missing")
    unit = tmp_path / name
    unit.write_text('#include "abi.h"\n')
    command = [compiler, *flags, "-Wall", "-Wextra", "-Werror", f"-I{plugin.SOURCES}", "-c", "-o", tmp_path / "o", unit]
    subprocess.run(command, check=True)


def test_a_wrong_offset_does_not_compile(tmp_path: Path) -> None:
    for file in plugin.SOURCES.glob("abi*.h"):
        shutil.copy(file, tmp_path)
    header = tmp_path / "abi.h"
    header.write_text(header.read_text().replace("uint8_t nChannels; \\", "int nChannels; \\", 1))
    (tmp_path / "unit.c").write_text('#include "abi.h"\n')
    done = subprocess.run(["gcc", "-c", "-o", "o", "unit.c"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "coll.nChannels" in done.stderr


def test_a_library_of_nccl_that_is_at_hand_looks_for_our_symbols() -> None:
    """Inspected, never loaded."""
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = [Path(one) for one in (found.submodule_search_locations or [])] if found is not None else []
    libraries = [one for folder in folders for one in folder.rglob("libnccl.so*")]
    if not libraries:
        pytest.skip("no torch for CUDA is installed")
    content = libraries[0].read_bytes()
    assert any(symbol.encode() in content for symbol in plugin.SYMBOLS)
