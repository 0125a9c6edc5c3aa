"""What in a tree is not code? The usual secrets, data and leftovers, what .gitignore names, and what the config names.

The strongest word is the config's `code.exclude`, then the .gitignore nearest to the file, and so on up to the top of
the repository, then .git/info/exclude, and last what is excluded by default. As in git, a negated pattern brings back
what a weaker one excludes (`!vocabulary.bin`), but not what lies in an excluded folder; one that ends in wildcards only
(`!*/`) says nothing about the defaults, as it was written without them in mind. Unlike in git, a file that is tracked
although .gitignore names it counts as ignored: git's index is not read. Nor is a user's global ignore file, which
differs between machines.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

NEVER = (".git", ".hg", ".svn", ".evertrain", "__pycache__", "*.pyc")
"""Files and folders that no pattern brings back."""

FOLDERS = (
    # caches
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".hypothesis", ".tox", ".nox", ".cache",
    "node_modules",
    # virtual environments; so is any folder with a pyvenv.cfg
    ".venv", "venv", ".env",
    # what experiments leave behind
    "wandb", "mlruns", "lightning_logs",
    # secrets
    ".aws", ".azure", ".docker", ".gnupg", ".kaggle", ".kube", ".ssh",
)  # fmt: skip
"""Folders that are excluded by default, as patterns of their name."""

SECRETS = (
    ".env", ".env.*", ".envrc", "*.pem", "*.key", "id_rsa*", "id_ecdsa*", "id_ed25519*", "*.p12", "*.pfx", "*.ppk",
    "*.jks", "*.kdbx", "*.keystore", ".netrc", ".npmrc", ".pypirc", ".pgpass", ".htpasswd", ".git-credentials",
    ".dockercfg", "credentials", "credentials.json", "application_default_credentials.json", "service-account*.json",
    "service_account*.json", "client_secret*.json", "kaggle.json", "secrets.json", "secrets.toml", "secrets.yaml",
    "secrets.yml",
)  # fmt: skip
"""Files that are excluded by default, as patterns of their name, unless it is one of `NO_SECRETS`."""

NO_SECRETS = (
    ".env.example", ".env.sample", ".env.template", ".env.dist", "*.py", "*.pyi", "*.pyx", "*.c", "*.cc", "*.cpp",
    "*.cu", "*.h", "*.hpp", "*.rs", "*.go", "*.sh", "*.md", "*.rst",
)  # fmt: skip
"""Sources and examples are code, whatever they are about."""

DATA = (
    # weights and arrays
    "*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.bin", "*.onnx", "*.gguf", "*.npy", "*.npz", "*.pkl", "*.pickle",
    "*.h5", "*.hdf5", "*.parquet", "*.arrow", "*.feather", "*.tfrecord", "*.tfrecords", "*.mdb", "*.db", "*.sqlite",
    "*.sqlite3",
    # archives
    "*.zip", "*.tar", "*.tar.*", "*.tgz", "*.gz", "*.bz2", "*.xz", "*.zst", "*.7z",
    # pictures, sound, films
    "*.jpg", "*.jpeg", "*.png", "*.gif", "*.bmp", "*.tif", "*.tiff", "*.webp", "*.wav", "*.mp3", "*.flac", "*.ogg",
    "*.mp4", "*.avi", "*.mkv", "*.mov", "*.webm",
    # what runs write
    "*.log", "*.jsonl", "*.csv", "*.tsv", "*.out", "*.err", "events.out.tfevents.*", "core.[0-9]*", "*.swp", "*~",
    ".DS_Store",
)  # fmt: skip
"""Files that are excluded by default, as patterns of their name, in any case of letters. Compiled extensions (`*.so`)
are code."""

_LONGEST_IGNORE_FILE = 1 << 20


def _any_of(patterns: Iterable[str], flags: int = 0) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns), flags)


_never, _folders, _secrets, _no_secrets, _data = (
    _any_of(NEVER),
    _any_of(FOLDERS),
    _any_of(SECRETS),
    _any_of(NO_SECRETS),
    _any_of(DATA, re.IGNORECASE),
)


class _Pattern(NamedTuple):
    """One line. The library knows what its wildcards mean; what it applies to is decided as in git: to the file or
    folder itself, of which the ones above have been asked about before."""

    search: Callable[[str], re.Match[str] | None]
    source: str
    """Of the same expression, without the names of its groups."""
    excludes: bool
    folders_only: bool
    names_only: bool
    """It has no slash: the folder does not matter."""
    is_meant: bool
    """It ends in more than wildcards."""

    @classmethod
    def of(cls, line: str) -> _Pattern | None:
        # git drops spaces at the end, unless the last one is escaped
        line = line if line.endswith("\\ ") else line.rstrip(" ")
        bare = line.removesuffix("/")
        if not bare.strip("/") or line.startswith("#"):
            return None
        try:
            (pattern,) = GitIgnoreSpec.from_lines([bare]).patterns
        except (ValueError, re.error):
            # git passes over what is no pattern, too
            return None
        regex, excludes = getattr(pattern, "regex", None), pattern.include
        if regex is None or excludes is None:
            return None
        return cls(
            search=regex.search,
            source=regex.pattern.replace("(?P<ps_d>", "(?:"),
            excludes=excludes,
            folders_only=bare != line,
            names_only="/" not in bare,
            is_meant=bool(bare.rpartition("/")[2].strip("!*?")),
        )

    def names(self, path: str, is_folder: bool) -> bool:
        """`path` is the name alone where that is all that matters."""
        if self.folders_only and not is_folder:
            return False
        match = self.search(path)
        # this group takes the slash after a folder that the path lies in: then it is that folder which is named
        return match is not None and not match.groupdict().get("ps_d")


class _Patterns:
    """Of one file; the last one that names a path counts."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._patterns = [pattern for line in lines if (pattern := _Pattern.of(line))][::-1]
        self._with_folders = [pattern for pattern in self._patterns if not pattern.names_only]
        # most files are named by none of many patterns: that takes one search
        sources = [f"(?:{pattern.source})" for pattern in self._patterns if pattern.names_only]
        self._any_name = re.compile("|".join(sources) or r"(?!)")

    def says(self, path: str, is_folder: bool) -> tuple[bool | None, bool]:
        """Whether the path is excluded, None where no pattern names it; and whether the one that does means it."""
        name = path.rpartition("/")[2]
        for pattern in self._patterns if self._any_name.search(name) else self._with_folders:
            if pattern.names(name if pattern.names_only else path, is_folder):
                return pattern.excludes, pattern.is_meant
        return None, False


class _Layer(NamedTuple):
    """One ignore file. It means paths from its own folder, which lies above the root of the tree or below it."""

    patterns: _Patterns
    above: str = ""
    """From its folder to the root."""
    below: int = 0
    """So many characters of a path lead from the root to its folder."""

    def says(self, path: str, is_folder: bool) -> tuple[bool | None, bool]:
        return self.patterns.says(self.above + path[self.below :], is_folder)


class Rules:
    """What is excluded in one folder of a tree."""

    def __init__(self, exclude: _Patterns, layers: tuple[_Layer, ...], folder: str) -> None:
        self._exclude = exclude
        self._layers = layers
        """Weakest first."""
        self._folder = folder

    @classmethod
    def of(cls, root: Path, exclude: Iterable[str] = ()) -> Rules:
        """Of the root of a tree; it may be a folder of a repository or have nothing to do with one."""
        layers: list[_Layer] = []
        top = next((folder for folder in (root, *root.parents) if _exists(folder / ".git")), None)
        if top is not None:
            above = [folder for folder in reversed(root.parents) if folder.is_relative_to(top)]
            excluded = _git_folder(top / ".git") / "info" / "exclude"
            files = [(top, excluded)] + [(folder, folder / ".gitignore") for folder in above]
            layers = [_Layer(patterns, _between(folder, root)) for folder, file in files if (patterns := _read(file))]
            # a folder that is ignored as a whole, and yet named as the code
            if any(
                layer.patterns.says(layer.above[:at], True)[0]
                for layer in layers
                for at, character in enumerate(layer.above)
                if character == "/"
            ):
                layers = []
        return cls(_Patterns(exclude), tuple(layers), "").inside("", root)

    def inside(self, folder: str, place: Path | str) -> Rules:
        """The rules in a folder further down; `folder` is its path in the tree, `place` where its .gitignore lies."""
        own = _read(Path(place, ".gitignore"))
        layers = self._layers if own is None else (*self._layers, _Layer(own, below=len(folder) + 1 if folder else 0))
        return Rules(self._exclude, layers, folder)

    def excludes(self, name: str, is_folder: bool) -> str:
        """Why the file or folder of this name is not code; empty: it is."""
        if _never.match(name):
            return "never captured"
        path = f"{self._folder}/{name}" if self._folder else name
        default = _by_default(name, is_folder)
        said, meant = self._exclude.says(path, is_folder)
        if said is not None and (said or meant or not default):
            return "excluded by the config" if said else ""
        for layer in reversed(self._layers):
            said, meant = layer.says(path, is_folder)
            if said is not None:
                return "ignored by git" if said else "" if meant else default
        return default


def why_no_code(folder: str | Path) -> str:
    """Why a folder is none of the code, whatever its name; empty: nothing speaks against it."""
    if os.path.lexists(os.path.join(folder, "pyvenv.cfg")):
        return "a virtual environment"
    # logs, checkpoints, and tokens
    if all(os.path.lexists(os.path.join(folder, name)) for name in ("job.json", "token")):
        return "the folder of a job"
    return ""


def _by_default(name: str, is_folder: bool) -> str:
    if is_folder:
        return "excluded by default" if _folders.match(name) else ""
    if _secrets.match(name) and not _no_secrets.match(name):
        return "may be a secret"
    return "data" if _data.match(name) else ""


def _read(file: Path) -> _Patterns | None:
    try:
        with open(file, "rb", opener=_plainly) as opened:
            text = opened.read(_LONGEST_IGNORE_FILE)
    except OSError:
        return None
    lines = text.decode("utf-8", "surrogateescape").removeprefix("\ufeff").split("\n")
    return _Patterns(line.removesuffix("\r") for line in lines)


def _plainly(path: str, flags: int) -> int:
    # a named pipe of this name must not keep us waiting
    return os.open(path, flags | os.O_NONBLOCK)


def _git_folder(git: Path) -> Path:
    """Where the repository's own files are: in a worktree or submodule, .git is a file that says so."""
    if os.path.isdir(git):
        return git
    try:
        named = git.read_text().removeprefix("gitdir:").strip()
        folder = Path(os.path.normpath(git.parent / named))
        common = folder / "commondir"
        return Path(os.path.normpath(folder / common.read_text().strip())) if common.is_file() else folder
    except (OSError, ValueError):
        return git


def _between(above: Path, below: Path) -> str:
    relative = below.relative_to(above).as_posix()
    return "" if relative == "." else f"{relative}/"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
