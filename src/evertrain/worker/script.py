"""How is the user's script run as Python itself would run it?

As a new, real `__main__` that stays in `sys.modules` for good: threads, atexit functions and pickle see it after the
last line. A module (`-m`), a folder or an archive goes through `runpy`, as it does in Python.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Collection, Mapping, Sequence
from string import Template
from types import CodeType, ModuleType
from typing import Any, NoReturn

from evertrain.worker import version

Command = Mapping[str, Any]
"""`kind` (script, module, program), `target` and `args`, as the user typed them."""


def arguments(command: Command, local_rank: str) -> list[str]:
    """The script's arguments; torchrun fills in `${local_rank}`."""
    return [Template(word).safe_substitute(local_rank=local_rank) for word in command["args"]]


def first_path(command: Command) -> str | None:
    """What Python puts first on `sys.path`; None where it puts nothing (`-P`, PYTHONSAFEPATH)."""
    target = command["target"]
    if command["kind"] == "program":
        return None
    if command["kind"] == "script" and _is_folder_or_archive(target):
        return _absolute(target)
    if sys.flags.safe_path:
        return None
    return version.first_path(os.getcwd() if command["kind"] == "module" else os.path.dirname(os.path.realpath(target)))


def enter(command: Command) -> None:
    """Put the script's folder first on `sys.path`."""
    if (first := first_path(command)) is not None:
        sys.path.insert(0, first)
    if not any(finder.find_spec("evertrain", None) for finder in sys.meta_path if hasattr(finder, "find_spec")):
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def source_file(command: Command) -> str | None:
    """The file that will be run, found without importing anything of the user's; None where that cannot be said."""
    target: str = command["target"]
    if command["kind"] == "module":
        return _source_of_module(target)
    is_text = command["kind"] == "script" and not target.endswith(".pyc") and not _is_folder_or_archive(target)
    return target if is_text else None


def clashes(command: Command, startup: Collection[str]) -> list[str]:
    """Modules beside the script that it could not import, because another one of that name is loaded already.

    What the interpreter loads at startup no script can replace, with or without us.
    """
    folder = first_path(command)
    if folder is None:
        return []
    # looked up one by one: to walk over all modules costs a forked process a copy of every page that they are on
    loaded = [name for name in _modules_in(folder) if name in sys.modules and name not in startup]
    ours = ("evertrain", "__main__")
    return sorted(name for name in loaded if name not in ours and not _is_beside(name, sys.modules[name], folder))


def forget_clashes(command: Command, startup: Collection[str]) -> None:
    """Unload what our own modules have loaded and the script has one of its own of."""
    for clash in clashes(command, startup):
        for name in [name for name in sys.modules if name == clash or name.startswith(clash + ".")]:
            del sys.modules[name]


def run(command: Command, args: Sequence[str]) -> None:
    """Run it in this process. Comes back when the last line is done."""
    target = command["target"]
    sys.argv[:] = [target if command["kind"] == "script" else "-m", *args]
    main = sys.modules["__main__"] = _new_main()
    if command["kind"] == "module":
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif _is_folder_or_archive(target):
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        path = _absolute(target)
        code = _compiled(path, shown_as=target, main=main)
        main.__dict__.update(__file__=path, __cached__=None)
        exec(code, main.__dict__)


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    names = vars(main)
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    names["__builtins__"] = builtins
    return main


def _compiled(path: str, *, shown_as: str, main: ModuleType) -> CodeType:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        if version.current is not None:
            # an exception is what says that the version is at fault
            raise version.WrongCode(f"this version of the code has no {path}: {error.strerror}") from error
        _refuse(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    if path.endswith(".pyc"):
        main.__loader__ = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = main.__loader__.get_code("__main__")
        assert code is not None
        return code
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return compile(source, path, "exec", dont_inherit=True)


def _refuse(problem: str) -> NoReturn:
    """End as Python does when there is nothing to run."""
    print(f"{sys.executable}: {problem}", file=sys.stderr)
    raise SystemExit(2)


def _absolute(target: str) -> str:
    """As Python does it: in front of the name as it was typed, links and dots stay."""
    return target if target.startswith("/") else os.path.join(os.getcwd(), target.removeprefix("./"))


def _is_folder_or_archive(target: str) -> bool:
    import pkgutil

    importer = pkgutil.get_importer(target) if os.path.exists(target) else None
    return importer is not None and (os.path.isdir(target) or type(importer).__name__ == "zipimporter")


def _source_of_module(name: str) -> str | None:
    folders: Sequence[str] | None = [version.first_path(os.getcwd()), *sys.path]
    for part in [*name.split("."), "__main__"]:
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None:
            return spec.origin
    return None


def _modules_in(folder: str) -> set[str]:
    try:
        entries = os.listdir(folder)
    except OSError:  # an archive
        return set()
    suffixes = importlib.machinery.all_suffixes()
    names = {entry.removesuffix(suffix) for entry in entries for suffix in suffixes if entry.endswith(suffix)}
    # a folder without __init__ never wins over a module that is found elsewhere
    packages = {entry for entry in entries if os.path.exists(os.path.join(folder, entry, "__init__.py"))}
    return names | packages


def _is_beside(name: str, module: ModuleType, folder: str) -> bool:
    found_in = os.path.realpath(os.path.dirname(getattr(module, "__file__", None) or ""))
    folder = os.path.realpath(folder)
    return found_in in (folder, os.path.realpath(os.path.join(folder, name)))
