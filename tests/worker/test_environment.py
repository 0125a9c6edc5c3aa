"""Which scripts must import torch by themselves, because they set what it reads then."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from evertrain.worker import environment
from evertrain.worker.preload import Unfit

EARLY = {
    "os.environ['OMP_NUM_THREADS'] = '4'": "OMP_NUM_THREADS",
    "os.environ['MKL_NUM_THREADS'] = str(n)": "MKL_NUM_THREADS",
    "environ['OMP_NUM_THREADS'] = '4'": "OMP_NUM_THREADS",
    "os.environ.setdefault('KMP_AFFINITY', 'none')": "KMP_AFFINITY",
    "os.environ.update(OMP_NUM_THREADS='4')": "OMP_NUM_THREADS",
    "os.environ.update({'A': '1', 'OMP_NUM_THREADS': '4'})": "OMP_NUM_THREADS",
    "os.environ |= {'OMP_NUM_THREADS': '4'}": "OMP_NUM_THREADS",
    "os.putenv('OMP_NUM_THREADS', '4')": "OMP_NUM_THREADS",
    "if True:\n    os.environ['OMP_NUM_THREADS'] = '4'": "OMP_NUM_THREADS",
    "try:\n    pass\nfinally:\n    os.environ['OMP_NUM_THREADS'] = '4'": "OMP_NUM_THREADS",
    "import json\nimport mine\nos.environ['OMP_NUM_THREADS'] = '4'": "OMP_NUM_THREADS",
    "os.environ['TORCH_LOGS'] = 'all'": "TORCH_LOGS",
}

HARMLESS = [
    "import torch\nos.environ['OMP_NUM_THREADS'] = '4'",
    "from torch import nn\nos.environ['OMP_NUM_THREADS'] = '4'",
    "import numpy as np\nos.environ['OMP_NUM_THREADS'] = '4'",
    "def later():\n    os.environ['OMP_NUM_THREADS'] = '4'\nimport torch",
    "os.environ['OMP_NUM_THREADS'] = '1'",  # which it is already
    "os.environ.setdefault('OMP_NUM_THREADS', '4')",  # has no effect
    "os.environ['MY_SETTING'] = '4'",
    "os.environ['NCCL_DEBUG'] = 'INFO'",  # read when a communicator is made
    "os.environ['CUDA_VISIBLE_DEVICES'] = '0'",  # read when CUDA is initialised
    "settings['OMP_NUM_THREADS'] = '4'",
    "os.environ[name] = '4'",
    "x = os.environ['OMP_NUM_THREADS']",
    "",
]


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("MKL_NUM_THREADS", "KMP_AFFINITY", "TORCH_LOGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", EARLY)
def test_what_comes_before_torch_counts(text: str) -> None:
    names = [name for name, _ in environment.changes(ast.parse(text + "\nimport torch"))]
    assert names == [EARLY[text]]


@pytest.mark.parametrize("text", HARMLESS)
def test_the_rest_does_not(text: str) -> None:
    assert list(environment.changes(ast.parse(text))) == []


@pytest.mark.parametrize("text", ["del os.environ['OMP_NUM_THREADS']", "os.environ.pop('OMP_NUM_THREADS', None)"])
def test_taking_a_setting_away_counts(text: str) -> None:
    assert [name for name, _ in environment.changes(ast.parse(text))] == ["OMP_NUM_THREADS"]


def test_the_reason_names_line_file_and_variable(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n")
    command = {"kind": "script", "target": str(script), "args": []}
    with pytest.raises(Unfit, match=r"line 3 of train\.py sets OMP_NUM_THREADS before it imports torch") as unfit:
        environment.check(command)
    assert unfit.value.instead == "spawn"
    script.write_text("import torch")
    environment.check(command)


@pytest.mark.parametrize("content", [b"for in", b"\0", b"\xff", b"(" * 5000])
def test_what_python_cannot_read_is_left_to_the_rank(tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    environment.check({"kind": "script", "target": str(script), "args": []})
    environment.check({"kind": "script", "target": str(tmp_path / "nowhere.py"), "args": []})


def test_modules_and_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("__main__", "tool"):
        (package / f"{name}.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '4'\n")
    for target in ("package", "package.tool"):
        with pytest.raises(Unfit, match="sets OMP_NUM_THREADS"):
            environment.check({"kind": "module", "target": target, "args": []})
    environment.check({"kind": "module", "target": "no.such.module", "args": []})
    environment.check({"kind": "program", "target": "sh", "args": []})
