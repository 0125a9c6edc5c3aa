"""Where do the launchers come from that Evertrain is compared with?

Each gets a virtual environment of its own in the cache folder, which finds torch in the environment that runs the
benchmark, so that nothing large is installed twice. What cannot be installed is left out with a word about why.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import BIN


class NotInstalled(Exception):
    """A peer that cannot be had on this machine."""


@dataclass(frozen=True)
class Peer:
    """What pip has to install, and the launcher that comes with it."""

    requirements: tuple[str, ...]
    launcher: str
    mend: Callable[[Path], None] = lambda site_packages: None


def _mend_dlrover(site_packages: Path) -> None:
    # 0.6.1 does not know that SubprocessHandler takes one more argument since torch 2.10; without it nothing starts
    file = site_packages / "dlrover/trainer/torch/elastic_run.py"
    text = file.read_text()
    file.write_text(
        text.replace('SubprocessHandler(cmd, args, {}, "", "", 0)', 'SubprocessHandler(cmd, args, {}, "", "", 0, None)')
    )


PEERS = {
    "ft_launcher": Peer(("nvidia-resiliency-ext==0.4.1",), "ft_launcher"),
    "dlrover": Peer(("dlrover[k8s,torch]==0.6.1", "protobuf"), "dlrover-run", _mend_dlrover),
}


def launcher(name: str, cache: Path) -> Path:
    """The path of a peer's launcher, installed where it was not yet."""
    if name == "torchrun":
        return BIN / "torchrun"
    peer = PEERS[name]
    home = cache / name
    path = home / "bin" / peer.launcher
    if not path.exists():
        print(f"installing {' '.join(peer.requirements)} in {home}", flush=True)
        _install(peer, home)
    return path


def _install(peer: Peer, home: Path) -> None:
    _call(sys.executable, "-m", "venv", home)
    site_packages = home / f"lib/python{sysconfig.get_python_version()}/site-packages"
    (site_packages / "shared-torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _call(home / "bin/python", "-m", "pip", "install", "--quiet", *peer.requirements)
    peer.mend(site_packages)


def _call(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        )
