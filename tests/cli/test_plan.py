"""What cannot be right is refused in one line; what is right becomes a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evertrain.cli import places, serve
from evertrain.cli import plan as planning
from evertrain.cli.flags import run_parser
from evertrain.cli.plan import Plan
from evertrain.model.config import Config
from evertrain.model.errors import UsageError


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def plan(*words: str, **environ: str) -> Plan:
    return planning.from_flags(run_parser().read([*words, "train.py"]), environ)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node 0: at least 1 rank a node"),
        (["--nproc-per-node", "-2"], "at least 1 rank"),
        (["--nproc-per-node", "four"], "a number, or one of auto, cpu, gpu, xpu"),
        (["--nnodes", "0"], "--nnodes 0"),
        (["--nnodes", "3:2"], "MIN not above MAX"),
        (["--nnodes", "a:b"], "a number, or a range MIN:MAX"),
        (["--nnodes", "2"], "needs --rdzv-endpoint HOST:PORT on every node"),
        (["--nnodes", "2:4"], "needs --rdzv-endpoint HOST:PORT on every node"),
        (["--standby", "1"], "--standby 1 needs --local-nodes 2"),
        (["--standby-barrier", "init"], "there is no spare node; --standby S asks for some"),
        (["--local-nodes", "2", "--standby", "2"], "leaves nothing to train"),
        (["--local-nodes", "2", "--nnodes", "2", "--standby", "1"], "needs --local-nodes 3, not 2"),
        (["--local-nodes", "3", "--nnodes", "2"], "needs --local-nodes 2, not 3"),
        (["--local-nodes", "0"], "at least 1 node"),
        (["--node-rank", "1"], "nodes are numbered from 0"),
        (["--mesh", "pp=2"], "2 = 2 ranks, but there are 1"),
        (["--mesh", "pp:2"], "is not NAME=SIZE"),
        (["--mesh", "dp=1,dp=1"], "dp is named twice"),
        (["--inject", "explode:rank=0"], "unknown fault 'explode'"),
        (["--inject", "kill:rank=7@step=3"], "ranks are numbered 0 to 0"),
        (["--inject", "wipe:node=1@step=3"], "nodes are numbered 0 to 0"),
        (["--inject", "wipe:node=gpu7@step=3"], "nodes are node-0"),
        (["--max-restarts", "-1"], "0 or more"),
        (["--redirects", "4"], "--redirects '4'"),
        (["--tee", "0:1;1:2"], "--tee"),
        (["--local-ranks-filter", "a"], "local ranks, as 0,1,2"),
        (["--python", "/no/python"], "no such interpreter"),
        (["--config", "none.yaml"], "none.yaml: No such file"),
        (["--job", "a/b"], "--job 'a/b'"),
        (["--job", ""], "--job ''"),
        (["--grace", "-1"], "--grace -1"),
        (["--grace", "nan"], "--grace nan"),
        (["--master-port", "99999"], "is not a port"),
        (["--rdzv-endpoint", "host:port"], "is not a port"),
        (["--signals-to-handle", "SIGFOO"], "no signal 'SIGFOO'"),
        (["--signals-to-handle", "SIGKILL"], "cannot be handled"),
        (["--no-python", "-m"], "exclude each other"),
        (["--run-path"], "an absolute path is needed"),
        (["--numa-binding", "node"], "not supported by this version"),
    ],
)
def test_one_clear_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(*words)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"no such script: other\.py"):
        planning.from_flags(run_parser().read(["other.py"]), {})


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no such program: no-such-thing"):
        planning.from_flags(run_parser().read(["--no-python", "no-such-thing"]), {})


def test_defaults() -> None:
    made = plan()
    assert (made.world_size, made.nodes.names, made.start) == (1, ("node-0",), "zygote")
    assert made.python == sys.executable
    assert made.root == Path.cwd() / ".evertrain"
    assert made.config == Config()
    assert made.notes == ()
    assert made.job.startswith("train-")


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (("--local-nodes", "4", "--nnodes", "3:4"), 3),
        (("--local-nodes", "5", "--nnodes", "2:4", "--standby", "1"), 2),
        (("--local-nodes", "3", "--nnodes", "3:4"), None),
        (("--local-nodes", "4", "--nnodes", "4"), None),
        (("--local-nodes", "4"), None),
        (("--nnodes", "1:4"), None),
        (("--nnodes", "2:4", "--rdzv-endpoint", "gpu01:1"), 2),
        (("--nnodes", "1:4", "--rdzv-endpoint", "gpu01:1"), 1),
        (("--nnodes", "4", "--rdzv-endpoint", "gpu01:1"), None),
    ],
)
def test_a_range_of_nodes_says_how_few_may_go_on(words: tuple[str, ...], least: int | None) -> None:
    made = plan(*words)
    assert made.nodes.least == least
    said = [line for line in serve._greeting(made, places.of(made, "job-1")) if "may go on" in line]
    fewer = "1 node" if least == 1 else f"{least} nodes"
    assert said == (
        []
        if least is None
        else [f"where nodes are lost, {fewer} may go on from the shared store, then not bit for bit the same"]
    )


def test_local_nodes_count_active_and_standby() -> None:
    assert plan("--local-nodes", "3", "--standby", "1", "--nproc-per-node", "2").world_size == 4
    made = plan("--nnodes", "2", "--local-nodes", "3", "--standby", "1")
    assert (made.nodes.active, made.nodes.standby) == (2, 1)
    assert made.nodes.names == ("node-0", "node-1", "node-2")
    assert plan("--nnodes", "1:4", "--local-nodes", "3").nodes.active == 3


def test_a_range_from_one_node_is_this_machine() -> None:
    assert plan("--nnodes", "1:4").nodes.active == 1


def test_the_default_job_is_script_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = plan().job
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").touch()
    assert planning.from_flags(run_parser().read([str(tmp_path / "train.py")]), {}).job == here
    monkeypatch.chdir(other)
    assert plan().job != here


def test_the_active_environments_interpreter_is_the_ranks(tmp_path: Path) -> None:
    for name in ("venv", "conda"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    venv, conda = tmp_path / "venv", tmp_path / "conda"
    assert plan(VIRTUAL_ENV=str(venv), CONDA_PREFIX=str(conda)).python == str(venv / "bin" / "python")
    assert plan(CONDA_PREFIX=str(conda)).python == str(conda / "bin" / "python")
    assert plan(VIRTUAL_ENV="/gone").python == sys.executable
    assert plan("--python", str(conda / "bin" / "python"), VIRTUAL_ENV=str(venv)).python.startswith(str(conda))
    assert plan(PYTHON_EXEC=str(conda / "bin" / "python")).python.startswith(str(conda))


def test_flags_without_effect_are_said() -> None:
    made = plan("--start-method", "fork", "--monitor-interval", "3", "--rdzv-backend", "etcd-v2")
    assert [note.partition(" ")[0] for note in made.notes] == ["--start-method", "--monitor-interval", "--rdzv-backend"]


def test_standalone_and_addresses() -> None:
    assert plan("--standalone", "--master-port", "1").master_port is None
    fixed = plan("--master-addr", "10.0.0.1", "--master-port", "1234")
    assert (fixed.master_addr, fixed.master_port, fixed.listen_port) == ("10.0.0.1", 1234, 0)
    static = plan("--rdzv-endpoint", "[::1]:1234")
    assert (static.master_addr, static.master_port) == ("::1", 1234)
    served = plan("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1234")
    assert (served.master_port, served.listen_port) == (None, 1234)


def test_grace_outranks_torchruns_name_and_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("grace_s: 2 min\n")
    assert plan("--config", "c.yaml").config.grace_s == 120
    assert plan("--config", "c.yaml", "--shutdown-timeout", "9").config.grace_s == 9
    assert plan("--shutdown-timeout", "9", "--grace", "3").config.grace_s == 3


def test_a_program_is_always_spawned() -> None:
    made = planning.from_flags(run_parser().read(["--no-python", "sh", "-c", "true"]), {})
    assert (made.command.kind, made.start, made.command.args) == ("program", "spawn", ("-c", "true"))


def test_run_dir_flag_environment_default(tmp_path: Path) -> None:
    assert plan(EVERTRAIN_RUN_DIR="runs").root == tmp_path / "runs"
    assert plan("--run-dir", "/x", EVERTRAIN_RUN_DIR="runs").root == Path("/x")
    assert plan("--log-dir", "/dev/null").log_dir is None
