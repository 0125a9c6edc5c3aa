"""Which of several machines is this, where is the job served, and who serves it?"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from evertrain.cli import machines, sizes
from evertrain.cli.flags import run_parser
from evertrain.cli.machines import ELASTIC_PORT, STATIC_PORT, Machines
from evertrain.model.errors import TroubleError, UsageError
from evertrain.model.spec import Seats

HERE = "127.0.0.1"
ELSEWHERE = "192.0.2.1"
"""An address for documentation: no machine has it."""


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def found(*words: str, **environ: str) -> Machines | None:
    args = run_parser().read([*words, "train.py"])
    return machines.from_flags(args, environ, sizes.seats(args))


def several(*words: str, **environ: str) -> Machines:
    made = found(*words, **environ)
    assert made is not None, "several machines"
    return made


def refused(*words: str, **environ: str) -> str:
    with pytest.raises(UsageError) as error:
        found(*words, **environ)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what the flags say


def test_torchruns_way() -> None:
    made = several("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu01:1234")
    assert (made.seats, made.host, made.port, made.node_rank) == (Seats(2, 2), "gpu01", 1234, None)
    assert made.url == "http://gpu01:1234"
    assert made.name == machines.node_name(socket.gethostname())


def test_torchruns_older_way() -> None:
    made = several("--nnodes", "2", "--node-rank", "1", "--master-addr", "gpu01", "--master-port", "1234")
    assert (made.seats, made.host, made.port, made.node_rank) == (Seats(2, 2), "gpu01", 1234, 1)


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu01"), ELASTIC_PORT),
        (("--rdzv-endpoint", "gpu01"), STATIC_PORT),
        (("--master-addr", "gpu01"), STATIC_PORT),
    ],
)
def test_a_port_that_is_not_given_is_torchruns(words: tuple[str, ...], port: int) -> None:
    assert several("--nnodes", "2", *words).port == port


def test_a_range_with_an_endpoint_is_company_and_without_one_it_is_this_machine() -> None:
    assert several("--nnodes", "1:4", "--rdzv-endpoint", "gpu01").seats == Seats(1, 4)
    assert several("--nnodes", "2:4", "--standby", "1", "--rdzv-endpoint", "gpu01").seats == Seats(2, 4, standby=1)
    assert found("--nnodes", "1:4") is None


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--nnodes", "1", "--rdzv-endpoint", "gpu01"),
        ("--local-nodes", "2", "--nnodes", "2"),
        ("--standalone", "--nnodes", "2"),
    ],
)
def test_one_machine_is_all(words: tuple[str, ...]) -> None:
    assert found(*words) is None


@pytest.mark.parametrize("nnodes", ["2", "2:4"])
@pytest.mark.parametrize("endpoint", [(), ("--rdzv-endpoint", ":29400")])
def test_without_an_endpoint_nobody_finds_the_others(nnodes: str, endpoint: tuple[str, ...]) -> None:
    said = refused("--nnodes", nnodes, *endpoint)
    assert said == f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT on every node, the address of the first one"


@pytest.mark.parametrize("rank", ["-1", "3"])
def test_a_node_rank_beyond_the_seats_is_refused(rank: str) -> None:
    said = refused("--nnodes", "2", "--standby", "1", "--node-rank", rank, "--rdzv-endpoint", "gpu01")
    assert said == f"--node-rank {rank}: nodes are numbered 0 to 2"


def test_a_node_rank_is_known_only_where_it_was_given() -> None:
    assert several("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "gpu01").node_rank == 0
    assert several("--nnodes", "2", "--rdzv-endpoint", "gpu01").node_rank is None


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu01:1234", "gpu01", 1234),
        ("gpu01", "gpu01", 0),
        ("gpu01:", "gpu01", 0),
        ("10.0.0.1:1234", "10.0.0.1", 1234),
        (":1234", None, 1234),
        ("[::1]:1234", "::1", 1234),
        ("[fe80::1]", "fe80::1", 0),
    ],
)
def test_endpoints(text: str, host: str | None, port: int) -> None:
    assert machines.endpoint(text) == (host, port)


@pytest.mark.parametrize("text", ["gpu01:http", "gpu01:65536", "gpu01:-1"])
def test_a_port_is_a_number(text: str) -> None:
    with pytest.raises(UsageError, match=r"--rdzv-endpoint: '.*' is not a port"):
        machines.endpoint(text)


def test_an_ipv6_address_is_bracketed_in_the_url() -> None:
    assert several("--nnodes", "2", "--rdzv-endpoint", "[fd00::7]:1234").url == "http://[fd00::7]:1234"


# --- what Slurm says


def slurm(nodes: int, tasks: int, node: int = 0, names: str = "gpu[003-006]") -> dict[str, str]:
    """The environment of a task of `srun`."""
    return {
        "SLURM_JOB_ID": "7012345",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": names,
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": f"gpu{3 + node:03}",
    }


def test_under_srun_nothing_needs_to_be_given() -> None:
    made = several(**slurm(2, 2, node=1))
    assert made == Machines(Seats(2, 2), host="gpu003", port=22345, node_rank=1, name="gpu004")


def test_what_is_given_outranks_slurm() -> None:
    made = several("--nnodes", "2:3", "--node-rank", "2", "--rdzv-endpoint", "login:9000", **slurm(3, 3, node=1))
    assert (made.seats, made.host, made.port, made.node_rank) == (Seats(2, 3), "login", 9000, 2)


def test_spares_are_among_the_nodes_that_slurm_gave() -> None:
    assert several("--standby", "1", **slurm(3, 3)).seats == Seats(2, 2, standby=1)
    assert refused("--standby", "3", **slurm(3, 3)).startswith("--standby 3 leaves nothing to train")


def test_a_task_for_each_rank_is_refused_with_the_right_command() -> None:
    assert refused(**slurm(2, 4)) == (
        "srun has started 4 tasks on 2 nodes; evertrain starts the ranks itself: "
        "srun --ntasks-per-node=1 evertrain run --nproc-per-node …"
    )


@pytest.mark.parametrize("words", [("--nnodes", "1"), ("--nnodes", "1:1"), ("--standalone",), ("--local-nodes", "2")])
def test_each_task_may_be_a_job_of_its_own(words: tuple[str, ...]) -> None:
    assert found(*words, **slurm(2, 4)) is None


def test_a_step_on_one_node_is_one_machine() -> None:
    assert found(**slurm(1, 1)) is None


@pytest.mark.parametrize("missing", ["SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"])
def test_outside_a_step_slurm_says_nothing(missing: str) -> None:
    environ = slurm(2, 2)
    del environ[missing]
    assert found(**environ) is None


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu[003-006,9],login", "gpu003"),
        ("gpu[9,003-006]", "gpu9"),
        ("a-[1-2]-b3", "a-1-b3"),
        ("rack[2-3]n[07,09]", "rack2n07"),
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("login.example,gpu[1-2]", "login.example"),
    ],
)
def test_the_first_of_a_host_list(names: str, first: str) -> None:
    assert machines.first_host(names) == first


# --- who serves


@pytest.fixture
def port() -> int:
    """One that is free now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def at(port: int, host: str = HERE, node_rank: int | None = None) -> Machines:
    return Machines(Seats(2, 2), host, port, node_rank, "me")


class Answering:
    """A server on a port that answers whatever is asked with one body."""

    def __init__(self, listener: socket.socket, body: str) -> None:
        class Api(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer((HERE, 0), Api, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_the_first_to_come_serves_and_the_next_on_this_machine_joins(port: int) -> None:
    listener = machines.listen(at(port))
    assert listener is not None
    with closing(Answering(listener, json.dumps({"job": "job", "state": "starting"}))):
        assert machines.listen(at(port)) is None


def test_the_first_node_is_reached_by_every_address_of_its_machine(port: int) -> None:
    listener = machines.listen(at(port))
    assert listener is not None
    with listener:
        for host in ("127.0.0.1", "127.0.0.2", *(["::1"] if has_ipv6() else [])):
            assert machines.own_address(at(port, host)) in (host, HERE)


@pytest.mark.parametrize("body", ["<html>hello</html>", '{"status": "ok"}', "[1]", "7", "null"])
def test_a_port_that_serves_something_else_is_taken(port: int, body: str) -> None:
    with closing(Answering(socket.create_server((HERE, port)), body)):
        with pytest.raises(TroubleError) as refused:
            machines.listen(at(port))
    assert f"port {port} is taken" in str(refused.value)
    assert "--rdzv-endpoint names another, on every node" in str(refused.value)


@pytest.fixture
def silent(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port whose owner says nothing."""
    monkeypatch.setattr(machines, "SERVES_S", 0.1)
    with socket.create_server((HERE, port)):
        yield port


def test_a_port_that_answers_nothing_is_taken(silent: int) -> None:
    with pytest.raises(TroubleError, match=f"port {silent} is taken"):
        machines.listen(at(silent))


def test_where_ranks_are_given_node_0_serves_and_nobody_else(port: int) -> None:
    listener = machines.listen(at(port, ELSEWHERE, node_rank=0))
    assert listener is not None, "behind an address that its machine does not know itself"
    listener.close()
    assert machines.listen(at(port, HERE, node_rank=1)) is None


def test_node_0_does_not_join_another_job(port: int) -> None:
    with closing(Answering(socket.create_server((HERE, port)), '{"job": "other"}')):
        with pytest.raises(TroubleError, match=f"port {port} is taken"):
            machines.listen(at(port, node_rank=0))


def test_an_address_of_another_machine_is_joined(port: int) -> None:
    assert machines.listen(at(port, ELSEWHERE)) is None


def test_a_name_that_nobody_knows_yet_is_another_machines_unless_it_is_our_own(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu01")
    assert machines.listen(at(port, "gpu02")) is None
    listener = machines.listen(at(port, "gpu01"))
    assert listener is not None
    listener.close()


def test_there_is_no_own_address_while_the_first_node_cannot_be_reached(port: int) -> None:
    with pytest.raises(OSError):
        machines.own_address(at(port))


# --- the GPUs of nodes that share a machine


@pytest.mark.parametrize(
    ("nodes", "devices", "chosen", "shares"),
    [
        (2, 8, None, ["0,1,2,3", "4,5,6,7"]),
        (2, 3, None, ["0", "1"]),
        (2, 4, "GPU-a, GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        (2, 2, "3,1", ["3", "1"]),
        (2, 2, "3,1,-1,0", ["3", "1"]),
    ],
)
def test_nodes_of_one_machine_share_its_gpus_out(
    nodes: int, devices: int, chosen: str | None, shares: list[str]
) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    split = machines.split_devices(nodes, devices, environ)
    assert split == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (2, 0), (3, 2)])
def test_a_single_node_has_them_all_and_where_there_are_too_few_nodes_must_share(nodes: int, devices: int) -> None:
    assert machines.split_devices(nodes, devices, {"CUDA_VISIBLE_DEVICES": "0,1"}) == [{}] * nodes
