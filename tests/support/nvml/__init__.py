"""GPUs that are not there: a library in NVIDIA's place, built with gcc, that plays what a file says.

nvml = FakeNvml(folder)
nvml.set(0, temperature=97)
subprocess.run(command, env={**os.environ, **nvml.environment})
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
MACHINE = -1
"""`gpus`, `init` and `count_error` are of the machine, all other values of one GPU."""


def build(folder: Path, *, is_old: bool = False) -> Path:
    """The folder to name in LD_LIBRARY_PATH. `is_old`: without what came with later drivers."""
    library = folder / "libnvidia-ml.so.1"
    flags = ["-DOLD_DRIVER"] if is_old else []
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags, "-o", library, SOURCE]
    subprocess.run(command, check=True, timeout=60)
    return folder


class FakeNvml:
    """What the GPUs of one node are like; `library` is a folder that `build` has filled."""

    def __init__(self, library: Path, folder: Path, *, gpus: int = 2) -> None:
        self._state = folder / "nvml.state"
        self._state.write_text(f"{MACHINE} gpus {gpus}\n")
        self.environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": str(self._state)}

    def set(self, gpu: int, **values: int) -> None:
        """From now on. -1 is what this GPU cannot say; `xid` and `pid` add up, `pid=0` sends them all away."""
        with self._state.open("a") as file:
            file.write("".join(f"{gpu} {key} {value}\n" for key, value in values.items()))
