"""What each process is told of the code, and which of the two secrets lies where."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cli.plans import plan
from evertrain.cli import launch, member, places
from evertrain.cli.machines import Machines
from evertrain.cli.sizes import played
from evertrain.model.errors import UsageError
from evertrain.model.spec import AgentSpec, ControllerSpec, KeeperSpec, Seats


@pytest.mark.parametrize(("root", "told"), [(Path("/home/ann/train"), "/home/ann/train"), (None, "")])
def test_who_is_told_of_the_code(tmp_path: Path, root: Path | None, told: str) -> None:
    made = plan(tmp_path, code_root=root)
    here = places.of(made, "job-1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        role = launch.controller(made, here, listener, {}, None, 0.0)
    controller = msgspec.json.decode(role.content, type=ControllerSpec)
    keeper = msgspec.json.decode(launch.keeper(made, here, "node-0", {}, None).content, type=KeeperSpec)
    agent = msgspec.json.decode(launch.agent(made, here, "node-0", "u", {}, None, "a").content, type=AgentSpec)
    assert controller.code_root == keeper.code_root == agent.code_root == told
    assert controller.code_dir == agent.code_dir == str(tmp_path / "job" / "code")
    assert controller.code_token_file == str(here.own_code_token) != controller.token_file


def test_the_code_token_of_the_environment() -> None:
    assert launch.code_token({}) is None
    assert launch.code_token({"EVERTRAIN_TOKEN": "other", "EVERTRAIN_CODE_TOKEN": " "}) is None
    assert launch.code_token({"EVERTRAIN_CODE_TOKEN": " secret\n"}) == "secret"
    with pytest.raises(UsageError, match="EVERTRAIN_CODE_TOKEN: a token is one line"):
        launch.code_token({"EVERTRAIN_CODE_TOKEN": "a\nb"})


def test_a_node_that_joins_has_no_code_token_nor_keeps_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EVERTRAIN_CODE_TOKEN", "secret")
    first = Machines(name="b", host="a", port=1, seats=Seats(2, 2), node_rank=1)
    made = plan(tmp_path / "runs", machines=first, nodes=replace(played(1), names=("b",)), code_root=Path("/code"))
    here = places.of(made, f"{tmp_path.name}-1", member="b")
    places.make_run_dir(here)
    here.code_token.write_text("of a run that this machine has served")
    try:
        member._prepare(made, here, member.Seat("job", here.run_id, "b", 1, "ordinary", "127.0.0.1"))
        assert here.own_token.read_text() == "ordinary"
        assert not here.code_token.exists() and not here.own_code_token.exists()
        assert not any("secret" in file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    finally:
        shutil.rmtree(here.run_folder)
