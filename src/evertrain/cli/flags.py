"""Which flags does `evertrain run` take? All of torchrun's, in both spellings, and some of our own.

Names, defaults and the `PET_<FLAG>` fallback are torchrun's (a test compares them with its parser), with two
deliberate differences: `--max-restarts` has no limit by default while the job makes progress, and `--rdzv-id` is the
job's identity.
Nothing heavy is imported here: `--help` must be quick.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from evertrain.cli.parsing import FromEnvironment, InsteadOfRunning, Parser, SwitchFromEnvironment

WITHOUT_EFFECT = {
    "start_method": "ranks are forked from a zygote; see --start",
    "event_log_handler": "see `evertrain incidents`",
    "logs_specs": "see --log-dir, --redirects and --tee",
    "monitor_interval": "the end of a rank is noticed at once",
    "rdzv_backend": "evertrain has its own",
}
"""Accepted because scripts pass them; each is said once, with the reason."""

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")


def run_parser() -> Parser:
    parser = Parser(
        prog="evertrain run",
        usage="evertrain run [flags] script.py [arguments of the script]",
        description="Run a training script on several ranks and keep it running. Takes torchrun's flags.",
    )
    parser.set_defaults(given=frozenset())
    _add_own_flags(parser)
    _add_size_flags(parser)
    _add_rendezvous_flags(parser)
    _add_restart_flags(parser)
    _add_program_flags(parser)
    _add_log_flags(parser)
    parser.add_argument("training_script", metavar="script.py", help="script, or module with -m, that every rank runs")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser


def was_given(args: argparse.Namespace, name: str) -> bool:
    """Whether the user set this flag, on the command line or in the environment."""
    return name in args.given or f"PET_{name.upper()}" in os.environ


def _add_own_flags(parser: Parser) -> None:
    own = parser.add_argument_group("evertrain's own")
    add = own.add_argument
    add("--fresh", action="store_true", help="start anew instead of resuming the newest complete checkpoint")
    add("--mesh", metavar="pp=2,dp=2", help="parallel dimensions and sizes, outermost first")
    add("--local-nodes", "--local_nodes", type=int, metavar="N", help="play N nodes on this machine, an agent each")
    add("--standby", type=int, default=0, metavar="S", help="spare nodes beyond those of --nnodes")
    add(
        "--standby-barrier", "--standby_barrier", choices=("start", "init"), default="start",
        help="where ranks of spare nodes wait: before the script, or in its evertrain.init()",
    )  # fmt: skip
    add("--start", choices=("zygote", "parked", "spawn"), default="zygote", help="how ranks are started")
    add("--preload", default="", metavar="MODULE,...", help="modules that the zygote imports before it forks")
    add("--python", metavar="FILE", help="interpreter of the ranks (default: the active environment's)")
    add("--config", metavar="FILE.yaml", help="settings that have no flag")
    add(
        "--print-config", "--print_config", action=InsteadOfRunning,
        help="print all settings with their values and what they mean (with --config: those of the file), and end",
    )  # fmt: skip
    add("--code", metavar="DIR", help="the job's code, for update and rollback (default: the script's working tree)")
    add("--run-dir", "--run_dir", metavar="DIR", help="where job folders lie (EVERTRAIN_RUN_DIR, default ./.evertrain)")
    add("--observe-only", "--observe_only", action="store_true", help="decide and report, perform nothing")
    add("--inject", action="append", default=[], metavar="FAULT", help="a drill, as kill:rank=2@step=20; repeatable")
    add(
        "--no-nccl-trace", "--no_nccl_trace", action="store_true",
        help="give NCCL no profiler plugin: the inside of its collectives is not traced",
    )  # fmt: skip
    add("--detach", action="store_true", help="leave the job running in the background")
    add("--grace", type=float, metavar="SECONDS", help="from a request to stop to the end (default 25)")


def _add_size_flags(parser: Parser) -> None:
    size = parser.add_argument_group("size")
    _option(size, "--nnodes", default="1:1", metavar="N|MIN:MAX", help="number of nodes, or a range")
    _option(size, "--nproc-per-node", default="1", metavar="N|auto|cpu|gpu|xpu", help="ranks of each node (default 1)")
    _option(size, "--node-rank", type=int, default=0, metavar="N", help="number of this node")


def _add_rendezvous_flags(parser: Parser) -> None:
    where = parser.add_argument_group("identity and addresses")
    _option(
        where, "--rdzv-id", also=("--job",), metavar="NAME", help="name of the job (default: from script and folder)"
    )
    _option(where, "--rdzv-backend", default="static", metavar="NAME", help="without effect")
    _option(
        where, "--rdzv-endpoint", default="", metavar="HOST:PORT", help="several machines: address of the first one"
    )
    _option(where, "--rdzv-conf", default="", metavar="KEY=VALUE,...", help="read, nothing in it is needed")
    _switch(where, "--standalone", help="one machine, free ports")
    _option(where, "--master-addr", default="127.0.0.1", metavar="HOST", help="MASTER_ADDR of the ranks")
    _option(where, "--master-port", type=int, metavar="PORT", help="MASTER_PORT of the ranks (default: a free one)")
    _option(where, "--local-addr", metavar="HOST", help="address of this node")
    where.add_argument(
        "--token-file", "--token_file", metavar="FILE",
        help="several machines: the secret they share (or EVERTRAIN_TOKEN; default: the first makes one)",
    )  # fmt: skip


def _add_restart_flags(parser: Parser) -> None:
    restarts = parser.add_argument_group("restarts and the end")
    _option(
        restarts, "--max-restarts", type=int, metavar="N", help="default: no limit while there is progress; 0: never"
    )
    _option(restarts, "--monitor-interval", type=float, default=0.1, metavar="SECONDS", help="without effect")
    _option(
        restarts,
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAME,...",
        help="signals that stop the job",
    )
    _option(restarts, "--shutdown-timeout", type=int, metavar="SECONDS", help="the same as --grace")


def _add_program_flags(parser: Parser) -> None:
    program = parser.add_argument_group("program")
    _switch(program, "-m", "--module", help="run a module, as `python -m`")
    _switch(program, "--no-python", help="run any program, not a Python script")
    _switch(program, "--run-path", help="run a script given by its absolute path")
    _option(
        program,
        "--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help="without effect",
    )
    _option(program, "--role", default="default", metavar="NAME", help="ROLE_NAME of the ranks")
    _switch(program, "--virtual-local-rank", help="LOCAL_RANK=0 everywhere, one visible GPU a rank")
    # torchrun gives this one no environment fallback
    program.add_argument(
        "--numa-binding", "--numa_binding", choices=NUMA_MODES, default=None,
        help="refused so far; `numactl` before the command binds all ranks",
    )  # fmt: skip


def _add_log_flags(parser: Parser) -> None:
    logs = parser.add_argument_group("output")
    _option(logs, "--log-dir", metavar="DIR", help="where the ranks' output is kept (default: in the job folder)")
    _option(
        logs,
        "--redirects",
        short="-r",
        default="0",
        metavar="STREAMS",
        help="to files only: 1 stdout, 2 stderr, 3 both",
    )
    _option(logs, "--tee", short="-t", default="0", metavar="STREAMS", help="to files and, prefixed, to the console")
    _option(logs, "--local-ranks-filter", default="", metavar="RANK,...", help="show these local ranks only")
    _option(
        logs,
        "--duplicate-stdout-filters",
        type=comma_separated,
        default=[],
        metavar="TEXT,...",
        help="teed lines with one of these go to filtered_stdout.log too",
    )
    _option(
        logs, "--duplicate-stderr-filters", type=comma_separated, default=[], metavar="TEXT,...", help="as for stdout"
    )
    _option(logs, "--event-log-handler", default="null", metavar="NAME", help="without effect")
    # torchrun gives this one no environment fallback
    logs.add_argument("--logs-specs", "--logs_specs", default=None, metavar="NAME", help="without effect")


def _option(group: Any, name: str, *, short: str | None = None, also: tuple[str, ...] = (), **details: Any) -> None:
    group.add_argument(*_spellings(name, short), *also, action=FromEnvironment, **details)


def _switch(group: Any, *names: str, **details: Any) -> None:
    short = names[0] if len(names) == 2 else None
    group.add_argument(*_spellings(names[-1], short), action=SwitchFromEnvironment, **details)


def _spellings(name: str, short: str | None) -> list[str]:
    underscored = "--" + name[2:].replace("-", "_")
    both = [name] if underscored == name else [name, underscored]
    return [short, *both] if short else both


def comma_separated(value: str) -> list[str]:
    """torchrun's list: a double comma stands for one comma."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]
