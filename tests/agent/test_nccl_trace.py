"""NCCL is given our plugin where that makes sense; where it cannot be, that is said, and fails nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent.nccl_trace import NcclTrace
from evertrain.agent.rings import Rings
from evertrain.model.config import TraceConfig
from evertrain.model.spec import AgentSpec
from evertrain.trace import plugin
from support import nccl

pytestmark = pytest.mark.skipif(bool(nccl.MISSING), reason=nccl.MISSING)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> nccl.Built:
    return nccl.shared(tmp_path_factory)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiling takes seconds."""
    return tmp_path_factory.mktemp("home")


def traced(
    folder: Path, home: Path, path: str = "/usr/bin:/bin", *, devices: str | None = None, **trace: Any
) -> NcclTrace:
    """On a node with one GPU; `path`: where compilers are looked for."""
    (folder / "nvidia0").touch()
    spec = AgentSpec(
        job="job", run_id="job-1", node="gpu02", node_dir=str(folder), disk_dir=str(folder / "run" / "disk"),
        log_root="", controller_url="", token_file="", fired_dir="", trace=TraceConfig(**{"writer_mib": 1, **trace}),
    )  # fmt: skip
    environ = {"HOME": str(home), "PATH": path}
    found = NcclTrace(
        spec, Rings(spec), environ=environ, devices=devices or str(folder / "nvidia[0-9]*"),
        config_files=(str(folder / "nccl.conf"),),
    )  # fmt: skip
    found.start()
    found.wait(60)
    return found


def test_a_rank_is_told_where_the_plugin_is_and_where_its_trace_goes(
    built: nccl.Built, home: Path, tmp_path: Path
) -> None:
    found = traced(tmp_path, home)
    assert found.blind == ()
    told = found.environment(2, 3, 5, {})
    library = Path(told["NCCL_PROFILER_PLUGIN"])
    assert library.name == plugin.NAME and library.is_relative_to(home / ".cache")
    assert told["EVERTRAIN_TRACE_RING"] == str(tmp_path / "trace" / "a2-r3")
    assert told["EVERTRAIN_TRACE_BYTES"] == str(1 << 20)
    assert found.said(2) == ""

    (tmp_path / "trace").mkdir()
    alive = subprocess.run(
        [built.driver, library, "6", "death"], env={**told, "RANK": "3", "LOCAL_RANK": "0"}, capture_output=True
    )
    assert alive.returncode == 0
    found = traced(tmp_path, home)
    assert found.said(2) == "1 rank, NCCL 2.29.7, interface v6, events 0x5e"
    assert traced(tmp_path, home).said(3) == "", "of another attempt"


def test_without_a_compiler_we_are_blind_and_say_so(tmp_path: Path) -> None:
    found = traced(tmp_path, tmp_path / "home", path=str(tmp_path))
    assert found.environment(1, 0, 1, {}) == {}
    (line,) = found.blind
    assert "no C compiler" in line and "\n" not in line


def test_a_plugin_of_the_users_is_left_alone(home: Path, tmp_path: Path) -> None:
    found = traced(tmp_path, home)
    assert found.environment(1, 0, 1, {"NCCL_PROFILER_PLUGIN": "inspector"}) == {}
    assert "NCCL_PROFILER_PLUGIN=inspector is the user's own" in found.blind[0]
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_PROFILER_PLUGIN = none\n")
    assert found.environment(1, 0, 1, {}) == {}
    assert "NCCL_PROFILER_PLUGIN=none in " in found.blind[0]
    (tmp_path / "nccl.conf").unlink()
    assert found.environment(1, 0, 1, {}) and not found.blind


@pytest.mark.parametrize("off", [{"nccl": False}, {"enabled": False}, {"devices": "/nowhere/nvidia*"}])
def test_where_it_is_off_or_there_is_no_gpu_nothing_is_built(tmp_path: Path, off: dict[str, Any]) -> None:
    found = traced(tmp_path, tmp_path / "home", **off)
    assert found.environment(1, 0, 1, {}) == {} and not found.blind
    assert not (tmp_path / "home").exists()


def test_a_cache_that_others_could_write_to_is_not_trusted(tmp_path: Path) -> None:
    elsewhere = tmp_path / "home"
    traced(tmp_path, elsewhere, path="")  # without a compiler the folder is made, and stays empty
    (folder,) = elsewhere.rglob("nccl-*")
    folder.chmod(0o777)
    (folder / plugin.NAME).write_bytes(b"something else")
    library = Path(traced(tmp_path, elsewhere).environment(1, 0, 1, {})["NCCL_PROFILER_PLUGIN"])
    assert library.is_relative_to(tmp_path / "run" / "nccl")
