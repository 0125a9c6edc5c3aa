"""A step exists in the store when its manifest does, and only what is whole is ever listed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.checkpoint import slots, store
from evertrain.worker import store_files
from evertrain.worker.store_files import FILES, File, Folder, Manifest, StoreError
from support import stores
from support.slots import slot

DAY = 86400.0


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store on a disk, and one behind a real S3 server."""
    if request.param == "file":
        yield str(tmp_path / "store")
        return
    with stores.s3():
        yield "s3://bucket/stores/one"


def put(url: str, attempt: int, step: int, content: bytes = b"data", **manifest: object) -> tuple[str, ...]:
    """What nodes leave of a step, committed; the problems of that."""
    folder = store_files.step_folder(Folder(store.root(url, "job")), attempt, step)
    folder.write("__0_u_0.distcp", content)
    folder.at("plans-u").write_json("done-0.json", {})
    files = {"__0_u_0.distcp": File(len(content), store_files.digest(content))}
    folder.write_json(FILES, {"files": files, "made_by": {"torch": "2"}, "code": "c"})
    said = {"job": "job", "attempt": attempt, "step": step, "world_size": 2, "time": float(step), "life": 1.0}
    return store.commit(url, Manifest(**{**said, **manifest}, files={}), keep=2, one_a_day=False)[1]  # type: ignore[arg-type]


def steps(url: str) -> list[tuple[int, int]]:
    return [(one.attempt, one.step) for _, one in store.list(url, "job")]


def test_commit_list_verify_keep(url: str) -> None:
    assert store.list(url, "job") == ()
    for step in (10, 20, 30):
        assert put(url, 1, step) == ()
    assert steps(url) == [(1, 20), (1, 30)]
    # a later attempt that went back counts for more than higher steps of the one before
    assert put(url, 2, 25) == ()
    assert steps(url) == [(1, 30), (2, 25)]
    folder, manifest = store.list(url, "job")[-1]
    assert folder == f"{store.root(url, 'job')}/attempt-2/step-25"
    assert (manifest.world_size, manifest.code, manifest.made_by, manifest.bytes) == (2, "c", {"torch": "2"}, 4)
    assert Folder(folder).names() == ["__0_u_0.distcp", "manifest.json"], "the plans are gone"
    assert store.verify(folder) == ()
    # a new life counts for more than any attempt of an earlier one
    assert put(url, 1, 5, life=2.0) == ()
    assert steps(url) == [(2, 25), (1, 5)]
    assert [one.step for _, one in store.list(url, "job", since=2.0)] == [5]


def test_damage_is_found_and_said(url: str) -> None:
    put(url, 1, 10)
    ((place, _),) = store.list(url, "job")
    folder = Folder(place)
    folder.write("__0_u_0.distcp", b"dbta")
    assert store.verify(place) == (f"{place}/__0_u_0.distcp does not match its checksum",)
    folder.write("__0_u_0.distcp", b"da")
    assert store.verify(place) == (f"{place}/__0_u_0.distcp has 2 bytes, not 4",)
    folder.remove("__0_u_0.distcp")
    assert store.verify(place) == (f"{place}/__0_u_0.distcp is missing",)
    folder.write("manifest.json", b'{"layout": 1, "job"')
    assert steps(url) == [], "half a manifest is none"
    folder.write("manifest.json", b'{"layout": 1, "job": "x", "files": {}}')
    assert steps(url) == []
    folder.remove("manifest.json")
    assert store.verify(place) == (f"{place}: there is no manifest.json",)


def test_what_a_killed_upload_left_goes_with_the_next_commit(url: str) -> None:
    put(url, 7, 10)  # an earlier life on other machines
    root = Folder(store.root(url, "job"))
    half = store_files.step_folder(root, 9, 99)
    half.write("__0_x_0.distcp", b"da")
    same = store_files.step_folder(root, 1, 20)
    same.write("__0_old_0.distcp", b"an earlier try")
    assert steps(url) == [(7, 10)]
    put(url, 1, 20, life=2.0)
    assert steps(url) == [(7, 10), (1, 20)]
    assert half.names() == [] and "attempt-9" not in root.names()
    assert same.names() == ["__0_u_0.distcp", "manifest.json"]


def test_a_file_that_is_not_whole_prevents_the_commit(url: str) -> None:
    folder = store_files.step_folder(Folder(store.root(url, "job")), 1, 10)
    manifest = Manifest("job", 1, 10, 2, 1.0, 1.0, {})
    with pytest.raises(StoreError, match=r"the upload is not complete, there is no files\.json"):
        store.commit(url, manifest, keep=3, one_a_day=False)
    folder.write("__0_u_0.distcp", b"dat")
    folder.write_json(FILES, {"files": {"__0_u_0.distcp": [4, ""], "b": [1, ""]}, "made_by": {}, "code": ""})
    with pytest.raises(StoreError, match=r"__0_u_0\.distcp has 3 bytes, not 4"):
        store.commit(url, manifest, keep=3, one_a_day=False)
    assert store.list(url, "job") == ()


def test_one_a_day_is_kept(tmp_path: Path) -> None:
    made = [
        Manifest("job", 1, number, 1, day * DAY + hour * 3600, 1.0, {})
        for number, (day, hour) in enumerate([(0, 1), (0, 9), (1, 2), (1, 3), (1, 23), (2, 0), (2, 1), (2, 2)])
    ]
    assert [one.step for one in store_files.to_keep(made, 2, one_a_day=True)] == [0, 2, 5, 6, 7]
    assert [one.step for one in store_files.to_keep(made, 2, one_a_day=False)] == [6, 7]


def test_stores_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"store {tmp_path}/file/job/attempt-1/step-1: cannot write"):
        put(str(tmp_path / "file"), 1, 1)
    with pytest.raises(StoreError, match="Protocol not known: nowhere"):
        store.list("nowhere://x", "job")
    with stores.s3(), pytest.raises(StoreError, match="store s3://other/job"):
        put("s3://other", 1, 1)
    with stores.s3():
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        with pytest.raises(StoreError, match="store s3://bucket/x/job: cannot list it: Could not connect"):
            store.list("s3://bucket/x", "job")


def test_a_read_only_store_says_so() -> None:
    assert store.list("/sys/evertrain-test", "job") == (), "reading does no harm"
    with pytest.raises(StoreError, match="store /sys/evertrain-test/job/attempt-1/step-1: cannot write"):
        put("/sys/evertrain-test", 1, 1)


def test_the_wish_of_the_script_stands_in_its_checkpoints(tmp_path: Path) -> None:
    path = slot(tmp_path, 0, 1)
    assert store.settings_in(path) is None
    said = json.dumps({"parts": [], "store": {"url": "s3://b/x", "every_s": 60.0, "every_steps": None}})
    path = slot(tmp_path, 0, 2, directory=said)
    found = store.settings_in(path)
    assert found is not None and (found.url, found.every_s, found.every_steps) == ("s3://b/x", 60.0, None)
    assert store.settings_in(tmp_path / "none") is None
    assert len(slots.list(tmp_path)) == 2
