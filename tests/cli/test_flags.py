"""All of torchrun's flags, by its own parser; two differences, and no third."""

from __future__ import annotations

import argparse
import os

import pytest

from evertrain.cli.flags import WITHOUT_EFFECT, comma_separated, run_parser, was_given
from evertrain.model.errors import UsageError

DELIBERATE = {"max_restarts", "rdzv_id"}
OWN = {
    "fresh",
    "mesh",
    "local_nodes",
    "standby",
    "standby_barrier",
    "start",
    "preload",
    "python",
    "config",
    "run_dir",
} | {
    "observe_only",
    "inject",
    "detach",
    "grace",
    "print_config",
    "no_nccl_trace",
    "token_file",
    "code",
}


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}


@pytest.fixture(scope="module")
def torchrun() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def test_every_flag_of_torchrun_is_ours_in_each_of_its_spellings(torchrun: argparse.ArgumentParser) -> None:
    ours = options(run_parser())
    for name, theirs in options(torchrun).items():
        assert set(theirs.option_strings) <= set(ours[name].option_strings), name
        assert theirs.nargs == ours[name].nargs, name
        assert (theirs.choices is None) == (ours[name].choices is None), name
        assert set(theirs.choices or ()) == set(ours[name].choices or ()), name


def test_defaults_are_torchruns_but_for_two(torchrun: argparse.ArgumentParser) -> None:
    ours = options(run_parser())
    different = {name for name, theirs in options(torchrun).items() if theirs.default != ours[name].default}
    assert different == DELIBERATE
    assert ours["max_restarts"].default is None
    assert ours["rdzv_id"].default is None


def test_all_other_flags_are_known_to_be_our_own(torchrun: argparse.ArgumentParser) -> None:
    assert set(options(run_parser())) - set(options(torchrun)) == OWN


VALUES = {
    "nnodes": "2:3",
    "nproc_per_node": "gpu",
    "node_rank": "1",
    "master_port": "1234",
    "max_restarts": "5",
    "monitor_interval": "2.5",
    "shutdown_timeout": "7",
    "start_method": "fork",
    "numa_binding": "node",
    "standalone": "1",
    "module": "1",
    "no_python": "1",
    "run_path": "1",
    "virtual_local_rank": "1",
}


def test_each_flag_falls_back_on_the_environment_exactly_where_torchruns_does(
    torchrun: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    for name in options(torchrun):
        monkeypatch.setenv(f"PET_{name.upper()}", VALUES.get(name, "a,b"))
    theirs = vars(get_args_parser().parse_args(["train.py"]))
    ours = vars(run_parser().read(["train.py"]))
    assert {name: ours[name] for name in theirs} == theirs


def test_the_command_line_outranks_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    monkeypatch.setenv("PET_STANDALONE", "0")
    args = run_parser().read(["--nproc_per_node=2", "--standalone", "train.py"])
    assert (args.nproc_per_node, args.standalone) == ("2", True)


def test_a_switch_in_the_environment_that_is_no_number_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(UsageError, match="PET_STANDALONE='yes'"):
        run_parser()


def test_was_given_sees_command_line_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not was_given(run_parser().read(["train.py"]), "nnodes")
    assert was_given(run_parser().read(["--nnodes", "1:1", "train.py"]), "nnodes")
    monkeypatch.setenv("PET_NNODES", "1:1")
    assert was_given(run_parser().read(["train.py"]), "nnodes")


def test_everything_after_the_script_belongs_to_the_script() -> None:
    args = run_parser().read(["--nproc-per-node", "2", "train.py", "--nproc-per-node", "9", "-m", "--", "x"])
    assert args.nproc_per_node == "2"
    assert args.training_script_args == ["--nproc-per-node", "9", "-m", "--", "x"]


def test_job_is_another_name_of_rdzv_id() -> None:
    assert run_parser().read(["--job", "seven", "train.py"]).rdzv_id == "seven"


def test_inject_may_be_repeated() -> None:
    args = run_parser().read(["--inject", "kill:@step=1", "--inject", "hang:@step=2", "train.py"])
    assert args.inject == ["kill:@step=1", "hang:@step=2"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nproc-per-nod", "4", "train.py"], "unknown flag --nproc-per-nod; did you mean --nproc-per-node?"),
        (["--nprocpernode=4", "train.py"], "did you mean --nproc-per-node?"),
        (["--obser-only", "train.py"], "did you mean --observe-only?"),
        (["--max-restart", "4"], "did you mean --max-restarts?"),
        (["-q", "train.py"], "unknown flag -q"),
        ([], "script.py is missing"),
        (["--nnodes"], "expected one argument"),
        (["--start", "quickly", "train.py"], "invalid choice: 'quickly'"),
        (["--max-restarts", "many", "train.py"], "invalid int value: 'many'"),
    ],
)
def test_a_typo_is_one_line_that_names_the_nearest_flag(words: list[str], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        run_parser().read(words)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_flags_without_effect_are_flags(torchrun: argparse.ArgumentParser) -> None:
    assert set(WITHOUT_EFFECT) <= set(options(torchrun))


def test_a_double_comma_stands_for_one() -> None:
    assert comma_separated("apple,,pie,orange") == ["apple,pie", "orange"]
