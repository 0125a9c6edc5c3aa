"""How is a command line read? argparse, with the nearest known name for a typo and torchrun's environment fallback.

`FromEnvironment` and `SwitchFromEnvironment` are torchrun's `env` and `check_env`: an option that is not on the
command line takes its value from `PET_<OPTION>` before it takes its default.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from evertrain.model.errors import UsageError

_NO_VALUE = re.compile(r"argument (\S+): expected one argument\b")
"""As argparse says it, for a value as well that begins with a minus and is no plain number."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` with one line instead of printing the whole usage; takes no abbreviations.

    An abbreviation would turn every typo that is a prefix into a silent guess.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            message = f"{message.rpartition(': ')[2].removesuffix(', ...')} is missing"
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The flags; raises `UsageError` for whatever is wrong with them."""
        try:
            parsed, unknown = self.parse_known_args(words)
        except UsageError as error:
            _refuse_negative(str(error), words)
            # a flag that nobody knows may be why a positional is missing
            self._refuse_unknown_flags(words)
            raise
        if unknown:
            self._refuse_unknown_flags(unknown)
            raise UsageError(f"unexpected argument {unknown[0]!r} (see `{self.prog} --help`)")
        return parsed

    def _refuse_unknown_flags(self, args: Sequence[str]) -> None:
        known = tuple(self._option_string_actions)
        for arg in args:
            if arg == "--" or not arg.startswith("-"):
                return
            name = arg.partition("=")[0]
            takes_attached_value = len(name) > 2 and name[1] != "-" and name[:2] in known
            if name not in known and not takes_attached_value:
                raise UsageError(f"unknown flag {name}{did_you_mean(name, known)}")

    def need_no_positionals(self) -> None:
        """What is asked for needs no script, whatever else is on the command line."""
        for action in self._get_positional_actions():
            action.required = False


class HelpFormatter(argparse.HelpFormatter):
    """One spelling a flag: the underscore forms work, and only lengthen the page."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(110, _terminal_width()))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        value = "" if action.nargs == 0 else " " + self._format_args(action, _placeholder(action))
        return ", ".join(names) + value


def _placeholder(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _terminal_width() -> int:
    try:
        return os.get_terminal_size().columns - 2
    except OSError:
        return 110


def _refuse_negative(said: str, words: Sequence[str]) -> None:
    """`--within -3h` is not a flag without its value."""
    if (match := _NO_VALUE.match(said)) is None:
        return
    for flag, value in pairwise(words):
        if flag in match[1].split("/") and re.match(r"-\.?\d", value):
            raise UsageError(f"{flag} {value}: it cannot be negative")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error line: `; did you mean X?`, or nothing if nothing comes near."""
    from difflib import get_close_matches

    # a flag is named in its dashed spelling
    if name.startswith("--"):
        name, known = name.replace("_", "-"), (one for one in known if "_" not in one)
    near = get_close_matches(name, [one for one in known if len(one) > 2], 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


class FromEnvironment(argparse.Action):
    """An option with a value; remembers in `namespace.given` that it was given at all."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, **options: Any) -> None:
        super().__init__(option_strings, dest, default=os.environ.get(f"PET_{dest.upper()}", default), **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = namespace.given | {self.dest}


class SwitchFromEnvironment(argparse.Action):
    """An option without a value: on if named, or if `PET_<OPTION>` is a number other than 0."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        variable = f"PET_{dest.upper()}"
        text = os.environ.get(variable, "0")
        try:
            default = bool(int(text))
        except ValueError:
            raise UsageError(f"{variable}={text!r} is not a number; 1 switches it on, 0 off") from None
        super().__init__(option_strings, dest, nargs=0, default=default, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)
        namespace.given = namespace.given | {self.dest}


class InsteadOfRunning(argparse.Action):
    """A switch that asks for something else than running a script, which may then be left out."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)
        parser.need_no_positionals()
