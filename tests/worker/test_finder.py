"""Imports of a process that runs from a version folder, however they came to point to the root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import versions

SRC = Path(__file__).parents[2] / "src"

LIKE_SETUPTOOLS = """
import sys
from importlib.util import spec_from_file_location
from pathlib import Path
MAPPING = {mapping}
class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        for pkg, pkg_path in reversed(list(MAPPING.items())):
            if fullname == pkg or fullname.startswith(f"{{pkg}}."):
                base = Path(pkg_path, *fullname.replace(pkg, "", 1).strip(".").split("."))
                for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                    if candidate.exists():
                        return spec_from_file_location(fullname, candidate)
        return None
def install():
    sys.meta_path.append(_EditableFinder)
"""

LIKE_MESON = """
import sys, importlib.machinery, os
class Meson(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "built":
            return None
        loader = importlib.machinery.SourceFileLoader(fullname, {file!r})
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin={file!r}, is_package=True)
        spec.submodule_search_locations = [os.path.dirname({file!r})]
        spec.has_location = True
        return spec
def install():
    sys.meta_path.insert(0, Meson())
"""


def fake_site(folder: Path, root: Path) -> Path:
    """What makes an interpreter whose PYTHONPATH has it find four editable installs of the root."""
    site = folder / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "plain.pth").write_text(f"{root}/src\n")
    mapping = {"mapped": f"{root}/python/mapped", "gone": f"{root}/python/gone"}
    (site / "__editable___mapped_finder.py").write_text(LIKE_SETUPTOOLS.format(mapping=mapping))
    (site / "mapped.pth").write_text("import __editable___mapped_finder; __editable___mapped_finder.install()\n")
    (site / "_built_loader.py").write_text(LIKE_MESON.format(file=f"{root}/built/__init__.py"))
    (site / "built.pth").write_text("import _built_loader; _built_loader.install()\n")
    # as flit does it
    (site / "linked").symlink_to(root / "linked")
    custom = folder / "custom"
    custom.mkdir()
    (custom / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    return custom


HELD = {
    "train.py": "", "side.py": "who = 'new'",
    "src/plain/__init__.py": "who = 'new'", "src/plain/part.py": "who = 'new'",
    "python/mapped/__init__.py": "from . import part\nwho = part.who", "python/mapped/part.py": "who = 'new'",
    "linked/__init__.py": "who = 'new'",
    "built/__init__.py": "who = 'new'", "built/inner.py": "who = 'new'", "space/deep/mod.py": "who = 'new'",
}  # fmt: skip


class Place:
    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "root", folder / "v2"
        for name, text in {**HELD, "python/gone/__init__.py": "", "vendor/kept/__init__.py": "who = 'kept'"}.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text.replace("new", "old"))
        self.code = versions.make(self.root, self.folder, HELD, without=["python/gone"])
        self.custom = fake_site(folder, self.root)

    def python(self, body: str, before: str = "", **environ: str) -> list[str]:
        """Run from the version: `before` is run first, as what a startup has done already."""
        text = (
            f"import os, sys; sys.path.append({str(SRC)!r})\n{before}\n"
            "from evertrain.worker import version\n"
            f"given = {{'command': {{'kind': 'script', 'target': 'train.py', 'args': []}}, 'code': {self.code!r}}}\n"
            f"if __name__ == '__main__':\n"
            "    version.enter(given); sys.path.insert(0, version.first_path(os.getcwd()))\n"
        )
        # as a file of the version, so that spawned children have a `__main__`
        (self.folder / "train.py").write_text(text + body)
        done = subprocess.run(
            [sys.executable, "-P", str(self.folder / "train.py")],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.custom), **environ},
            cwd=self.root, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def test_editable_installs_and_the_scripts_own_modules_are_the_versions(place: Place) -> None:
    found = place.python(
        "import side, plain.part, mapped.part, built.inner, linked, kept\n"
        "for m in (side, plain, plain.part, mapped, mapped.part, built, built.inner, linked, kept):\n"
        "    print(m.who, m.__file__)\n"
        "print(mapped.part.__spec__.origin, *mapped.__path__)\n",
        PYTHONPATH=f"{place.custom}:{place.root}/vendor",
    )
    files = ["side", "src/plain/__init__", "src/plain/part", "python/mapped/__init__", "python/mapped/part",
             "built/__init__", "built/inner", "linked/__init__"]  # fmt: skip
    expected = [word for file in files for word in ("new", f"{place.folder}/{file}.py")]
    assert found[:16] == expected
    assert found[16:18] == ["kept", f"{place.root}/vendor/kept/__init__.py"]
    assert found[18:] == [f"{place.folder}/python/mapped/part.py", f"{place.folder}/python/mapped"]


def test_without_a_version_it_is_the_root_that_they_find(place: Place) -> None:
    """What the test above takes for granted."""
    body = "import plain, mapped, built, linked; print(plain.who, mapped.who, built.who, linked.who)"
    done = subprocess.run(
        [sys.executable, "-c", body], env={"PATH": os.environ["PATH"], "PYTHONPATH": str(place.custom)},
        cwd=place.root, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["old"] * 4


def test_folders_that_a_script_adds_by_itself_and_namespaces(place: Place) -> None:
    found = place.python(
        f"sys.path[:0] = ['src', {str(place.root)!r}]\n"
        "import plain.part, space.deep.mod\nprint(plain.part.who, space.deep.mod.who, version.problem())\n"
    )
    assert found == ["new", "new", "None"]


def test_what_the_version_does_not_have_is_not_found(place: Place) -> None:
    found = place.python(
        "try: import gone\nexcept ModuleNotFoundError as error: print(error.name, 'gone' in sys.modules)"
    )
    assert found == ["gone", "False"]


def test_what_was_imported_before_is_told(place: Place) -> None:
    found = place.python("print(version.problem())", before="import plain")
    assert found[1] == "plain" and found[5:] == [
        f"{place.root}/src/plain/__init__.py,", "but", "its", "version", "is", f"{place.folder}/src/plain/__init__.py"
    ]  # fmt: skip


CHILDREN = """
def child(queue):
    import plain.part, mapped.part, side, built
    queue.put([plain.part.who, mapped.who, side.who, built.who, __file__, os.getcwd()])

if __name__ == '__main__':
    import multiprocessing
    for method in ('spawn', 'fork', 'forkserver'):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(*queue.get())
        process.join()
"""


@pytest.mark.parametrize("before", ["", "import multiprocessing.spawn"], ids=["imported later", "imported before"])
def test_processes_of_multiprocessing_import_the_same(place: Place, before: str) -> None:
    found = place.python(CHILDREN, before=before)
    expected = ["new"] * 4 + [str(place.folder / "train.py"), str(place.root)]
    assert [found[at : at + 6] for at in (0, 6, 12)] == [expected] * 3


def test_byte_code_of_another_version_is_never_run(tmp_path: Path) -> None:
    """All files of a version have one time: where two are of one length, the byte code of one would pass for both's."""
    place = Place(tmp_path)
    cache = place.root / "shared" / "__pycache__"
    cache.mkdir(parents=True)
    for number in (3, 4):
        folder = tmp_path / f"number-{number}"
        place.code = versions.make(place.root, folder, {"shared/mod.py": f"who = {number}", "train.py": ""})
        place.folder = folder
        assert (folder / "shared" / "__pycache__").is_symlink()
        assert place.python("import shared.mod; print(shared.mod.who)") == [str(number)]
    assert list(cache.iterdir()) == []
