"""What does `evertrain` do with what was typed? It finds the command, runs it, and turns errors into one line.

Every command is a module with `main(argv) -> exit code`; it is imported only when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from evertrain.cli.parsing import did_you_mean
from evertrain.model.errors import EvertrainError, UsageError

COMMANDS = {
    "run": "run a training script on several ranks and keep it running",
    "status": "how is the job doing?",
    "incidents": "what went wrong, what was done, and what did it cost?",
    "stacks": "where does every process stand, and on whom do the others wait? now, or in an incident",
    "trace": "what do ranks communicate, and who lags behind? live, as a file, or in SQL",
    "explain": "what happened here? a verdict from any pile of logs and dumps, without a job",
    "check": "is this machine fit to train on? host, GPUs, network; with a monitoring plug-in's exit codes",
    "diagnose": "does this machine compute, remember and move data as it should? tests that use it",
    "report": "where did the time go? productive and lost seconds, by incident, phase and cause",
    "restart": "end a job's ranks and let them go on: from a step, with other arguments, or to compare losses",
    "update": "have a running job go on with other code, with its next restart or at once",
    "rollback": "... or with a version that it has run before",
    "versions": "which versions of its code has a job run, how did each do, and who changed what?",
    "checkpoint": "which checkpoints are there, are they intact, what is in them? list, verify, show, export",
    "node": "which nodes are there, and which are out? list, allow one back, drain one",
    "standby": "how many spare nodes are enough? from a failure rate, given or learnt from the jobs here",
    "stop": "stop a job; the same `run` command resumes it later",
    "clean": "remove what dead runs left in shared memory",
}

HELP = """usage: evertrain COMMAND [flags]

Keeps distributed PyTorch training running. In place of `torchrun FLAGS train.py`: `evertrain run FLAGS train.py`.

commands:
{commands}

`evertrain COMMAND --help` tells more; `evertrain --version` names the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 the command line was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except EvertrainError as error:
        print(f"evertrain: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output has gone (`| head`); Python would complain once more when it flushes at exit
        sys.stdout = None
        return 141
    except OSError as error:
        # a full disk, no more processes: the world's trouble and not a bug, so no traceback
        print(f"evertrain: {error}", file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    command, rest = words[0], words[1:]
    if command in ("-V", "--version"):
        from evertrain.model import version

        print(f"evertrain {version.own()}")
        return 0
    if command.startswith("-"):
        known = ("--help", "--version")
        raise UsageError(f"unknown flag {command}{did_you_mean(command, known)} (flags come after the command)")
    if command not in COMMANDS:
        raise UsageError(f"unknown command {command}{did_you_mean(command, COMMANDS)} (see `evertrain --help`)")
    exit_code: int = import_module(f"evertrain.cli.{command}").main(rest)
    return exit_code


def _help() -> str:
    return HELP.format(commands="\n".join(f"  {name:<11}{what}" for name, what in COMMANDS.items()))
