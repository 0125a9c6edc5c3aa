"""Shared stores for tests: a folder or a bucket, and uploads as agents and controller make them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evertrain.checkpoint.slots import SlotInfo
from evertrain.worker import store_files
from evertrain.worker.store_files import Folder, Manifest


def upload(
    root: str, copies: Sequence[SlotInfo], *, nodes: int = 1, name: str = "u1", life: float = 1.0, work: Path
) -> Folder:
    """Bring one save to the store with a writer process for each node; the ranks are dealt out to the nodes."""
    (save,) = {(copy.attempt, copy.step, copy.world_size) for copy in copies}
    attempt, step, world_size = save
    folder = store_files.step_folder(Folder(root), attempt, step)
    ordered = sorted(copies, key=lambda copy: copy.rank)
    each = -(-len(ordered) // nodes)
    orders = [
        {"paths": [copy.path for copy in ordered[begin : begin + each]], "writers": nodes, "finish": False}
        for begin in range(0, len(ordered), each)
    ]
    _run([{**order, "folder": folder.url, "upload": name, "world_size": world_size} for order in orders], work)
    last = {"paths": [], "writers": nodes, "finish": True}
    _run([{**last, "folder": folder.url, "upload": name, "world_size": world_size}], work)
    manifest = Manifest("job", attempt, step, world_size, store_files.now(), life, {})
    assert store_files.commit(Folder(root), manifest, keep=3, alone=True)[1] == []
    return folder


def _run(orders: Sequence[dict[str, object]], work: Path) -> None:
    running = []
    for number, order in enumerate(orders):
        spec = work / f"upload-{number}.json"
        spec.write_text(json.dumps({**order, "parent": os.getpid(), "wait_s": 20.0}))
        program = "from evertrain.worker.store_writer import program; program()"
        command = [sys.executable, "-c", program, str(spec)]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """An S3 server with an empty bucket `bucket`; the environment in which clients find it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            import fsspec

            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
            yield environment
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
    finally:
        server.stop()
