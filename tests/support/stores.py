"""Shared stores for tests: a folder or a bucket, and uploads as agents and controller make them."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from evertrain.checkpoint.slots import SlotInfo
from evertrain.worker import store_files, store_writer
from evertrain.worker.store_files import Folder, Manifest


def upload(root: str, copies: Sequence[SlotInfo], *, nodes: int = 1, life: float = 1.0) -> Folder:
    """Bring one save to the store as so many nodes and the controller do; the ranks are dealt out to the nodes."""
    ((attempt, step, world_size),) = {(copy.attempt, copy.step, copy.world_size) for copy in copies}
    folder = store_files.step_folder(Folder(root), attempt, step)
    ordered = sorted(copies, key=lambda copy: copy.rank)
    each = -(-len(ordered) // nodes)
    with ThreadPoolExecutor(nodes) as pool:
        writing = [
            pool.submit(_write, folder, ordered[begin : begin + each], nodes) for begin in range(0, len(ordered), each)
        ]
        for one in writing:
            one.result()
    store_writer.finish(folder, "u", world_size)
    manifest = Manifest("job", attempt, step, world_size, store_files.now(), life, {})
    assert store_files.commit(Folder(root), manifest, keep=3, alone=True)[1] == []
    return folder


def _write(folder: Folder, copies: Sequence[SlotInfo], writers: int) -> None:
    states = [store_writer.read_slot(copy.path) for copy in copies]
    store_writer.write(folder, "u", states, writers=writers, wait_s=20.0)


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

            # servers of one process share what they hold
            urllib.request.urlopen(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"").close()
            fsspec.filesystem("s3", endpoint_url=environment["AWS_ENDPOINT_URL"]).mkdir("bucket")
            yield environment
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
    finally:
        server.stop()
