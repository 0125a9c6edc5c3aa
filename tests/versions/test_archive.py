"""Equal trees have equal archives; one that is not as evertrain writes it is refused before anything is unpacked."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import random
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evertrain.model.config import CodeConfig
from evertrain.versions import archive, folder, stream, tree
from evertrain.versions.errors import ArchiveError, TreeError
from evertrain.versions.tree import File, Link
from support.effort import examples
from support.trees import SCRIPT, packed, plant

CONFIG = CodeConfig()
SMALL = CodeConfig(most_files=8, most_bytes=1 << 20)


def refusal(path: Path, digest: str | None = None, config: CodeConfig = CONFIG) -> str:
    """What `check` says, in one line, where nothing but the archive is there afterwards either."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(ArchiveError) as refused:
        archive.check(path, plain_digest(path) if digest is None else digest, config)
    assert sorted(path.parent.iterdir()) == before
    text = str(refused.value)
    assert text and text.isprintable() and len(text) < 400
    return text


def plain_digest(path: Path) -> str:
    try:
        return hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()
    except (OSError, EOFError, gzip.zlib.error):  # type: ignore[attr-defined]
        return "0" * 64


def test_what_was_packed_is_what_is_found(tmp_path: Path) -> None:
    root = plant(
        tmp_path / "root", SCRIPT | {"deep/er/x.json": "{}", "\u00e4/" + "n" * 200 + ".py": "1", "blob": bytes(3000)}
    )
    (root / "train.py").chmod(0o750)
    (root / "deep/link").symlink_to("../model")
    (root / "deep" / ("l" * 150)).symlink_to(Path("..", "\u00e4", "n" * 200 + ".py"))
    target = tmp_path / "out" / "code.tar.gz"
    code = packed(root, target)
    found = archive.check(target, code.digest, CONFIG)
    assert found.code == code and code.archive_bytes == target.stat().st_size and code.files == 6
    assert code.bytes == sum(file.bytes for file in found.files) == 9 + 15 + 2 + 1 + 3000
    assert [file.path for file in found.files if file.executable] == ["train.py"]
    assert {link.path: link.target for link in found.links}["deep/link"] == "../model"
    assert found.folders == ("deep", "deep/er", "model", "\u00e4")
    assert {file.path: file.sha256 for file in found.files}["train.py"] == hashlib.sha256(b"print(1)\n").hexdigest()
    # and others read it in the same way
    with tarfile.open(target) as opened:
        members = opened.getmembers()
        assert [member.name for member in members] == sorted(member.name for member in members)
        assert {member.mode for member in members} == {0o755, 0o644} and {member.uid for member in members} == {0}
        assert {member.mtime for member in members} == {946684800}
    assert list(target.parent.iterdir()) == [target]


def test_the_same_tree_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    files = SCRIPT | {"z/a.py": "1", "z-a.py": "2", "Z.py": "3"}
    first = plant(tmp_path / "first", files)
    (first / "link.py").symlink_to("model/net.py")
    mask = os.umask(0o077)
    try:
        second = plant(tmp_path / "elsewhere/second", dict(reversed(files.items())) | {"data.npy": "x", "empty/": ""})
    finally:
        os.umask(mask)
    (second / "link.py").symlink_to(second / "model/net.py")
    for path in (second, *second.rglob("*.py")):
        os.utime(path, (1, 1), follow_symlinks=False)
    codes = [packed(root, tmp_path / f"{root.name}.gz") for root in (first, second)]
    assert codes[0] == codes[1]
    assert (tmp_path / "first.gz").read_bytes() == (tmp_path / "second.gz").read_bytes()
    (second / "train.py").chmod(0o700)
    assert packed(second, tmp_path / "third.gz").digest != codes[0].digest


def test_an_empty_tree(tmp_path: Path) -> None:
    code = packed(plant(tmp_path / "root", {}), tmp_path / "a")
    assert (code.files, code.bytes) == (0, 0)
    assert archive.check(tmp_path / "a", code.digest, CONFIG).files == ()


_names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\\u2028\u2029"), min_size=1, max_size=60
).filter(lambda name: name not in (".", "..") and len(name.encode()) <= 255)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.lists(_names, min_size=1, max_size=3).map("/".join),
        st.tuples(st.binary(max_size=600), st.booleans()),
        max_size=6,
    )
)
def test_any_names_and_content_come_out_as_they_went_in(files: dict[str, tuple[bytes, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "root")
        root.mkdir()
        for name, (content, executable) in files.items():
            try:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue
            (root / name).chmod(0o755 if executable else 0o644)
        scanned = tree.scan(root, CONFIG)
        code = archive.pack(scanned, Path(place, "a.gz"))
        found = archive.check(Path(place, "a.gz"), code.digest, CONFIG)
        assert [(file.path, file.bytes, file.executable) for file in found.files] == [
            (file.path, file.bytes, file.executable) for file in scanned.files
        ]
        built = folder.build(Path(place, "a.gz"), code.digest, Path(place, "none"), Path(place, "code"), CONFIG, "n")
        for file in scanned.files:
            assert (built / file.path).read_bytes() == (root / file.path).read_bytes()


# -- hostile archives: each begins as a good one would -----------------------------------------------------------------


def member(name: str, content: bytes = b"", **differently: object) -> bytes:
    info = archive.info_of(File(path=name, bytes=len(content)))
    for key, value in differently.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + content + bytes(-len(content) % 512)


def a_link(name: str, target: str) -> bytes:
    return archive.info_of(Link(path=name, target=target)).tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def a_folder(name: str) -> bytes:
    return archive.info_of(name).tobuf(tarfile.PAX_FORMAT)


def extended(records: bytes, size: int | None = None) -> bytes:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, len(records) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    size = len(body) + len(str(len(body)))
    return str(size if len(str(size)) == len(str(len(body))) else size + 1).encode() + body


def raw(name: bytes, kind: bytes = b"0") -> bytes:
    """A header with a name that tarfile itself would not write."""
    block = bytearray(member("x"))
    block[0:100] = name.ljust(100, b"\0")
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


END = bytes(1024)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "an absolute name": (member("/etc/cron.d/x", b"1"), "absolute"),
    "a name that leads up": (member("../x", b"1"), "'..'"),
    "a name that leads up later": (a_folder("a") + member("a/../../x"), "'..'"),
    "a name with a dot": (member("./x"), "'.'"),
    "a name with an empty part": (a_folder("a") + member("a//x"), "empty name"),
    "a folder that leads up": (a_folder("..") + member("../x"), "'..'"),
    "no name": (raw(b""), "empty"),
    "a name with a backslash": (member("..\\x"), "backslash"),
    "a name with a newline": (member("a\nb"), "control character"),
    "a name with an escape": (member("\x1b[2J"), "control character"),
    "a name with a line separator": (member("a\u2028b"), "control character"),
    "a name with something behind its end": (raw(b"x\0../../y"), "header that evertrain does not write"),
    "a long name with NUL in it": (extended(record("path", "a\0b")) + member("x"), "control character"),
    "a name that is not UTF-8": (raw(b"\xff\xfe"), "not UTF-8"),
    "a name that is too long": (member("n" * 256), "longer than 255"),
    "a path that is too long": (member("/".join(["n" * 200] * 6)), "longer than 1024"),
    "a link that leads out": (a_link("x", "../y"), "leads out"),
    "a link to the root of all": (a_link("x", "/etc/passwd"), "simply"),
    "a link that goes up from inside": (a_folder("a") + a_link("a/x", "../../y"), "leads out"),
    "a link that winds": (a_folder("a") + a_link("x", "a/../../y"), "simply"),
    "a link through another link": (a_folder("a") + a_link("a/l", "..") + a_link("a/x", "l/b"), "through another"),
    "a link to a link": (a_link("x", "y") + a_link("y", "z"), "through another"),
    "a link to itself": (a_link("x", "x"), "through another"),
    "a link to nothing": (a_link("x", ""), "simply"),
    "a link with a newline": (a_link("x", "a\nb"), "control character"),
    "a link that is not UTF-8": (a_link("x", "\udcff"), "hdrcharset"),
    "a file through a link": (a_link("a", ".") + member("a/x"), "'a' is a link|a is a link"),
    "a file through a link that leads out": (a_link("a", "..") + member("a/x"), "a is a link"),
    "a hard link": (member("x", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "hard link"),
    "a character device": (member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "device"),
    "a block device": (member("x", type=tarfile.BLKTYPE, devmajor=8), "device"),
    "a named pipe": (member("x", type=tarfile.FIFOTYPE), "named pipe"),
    "a contiguous file": (member("x", type=tarfile.CONTTYPE), "unknown type"),
    "setuid": (member("x", mode=0o4755), "setuid"),
    "setgid": (member("x", mode=0o2755), "setuid"),
    "a sticky folder": (member("x", mode=0o1755, type=tarfile.DIRTYPE), "setuid"),
    "writable by all": (member("x", mode=0o777), "does not write"),
    "an owner": (member("x", uid=1000), "does not write"),
    "an owner's name": (member("x", uname="root"), "does not write"),
    "another time": (member("x", mtime=1), "does not write"),
    "the same name twice": (member("x", b"1") + member("x", b"2"), "twice"),
    "a folder twice": (a_folder("x") + a_folder("x"), "twice"),
    "a file and a folder of one name": (member("x", b"1") + a_folder("x"), "twice"),
    "a link and a file of one name": (a_link("x", ".") + member("x", b"1"), "twice"),
    "a file in a file": (member("x", b"1") + member("x/y"), "x is a file"),
    "a file in no folder": (member("x/y"), "x is no folder of it"),
    "not in order": (member("y") + member("x"), "out of order"),
    "more files than allowed": (b"".join(member(f"x{at}") for at in range(9)), "more than 8 files"),
    "more links than allowed": (b"".join(a_link(f"x{at}", "y") for at in range(9)), "more than 8 files"),
    "more folders than allowed": (b"".join(a_folder(f"x{at}") for at in range(9)), "more than 8 files"),
    "more bytes than allowed": (member("a", bytes(1 << 19)) + member("b", bytes(1 << 19)) + member("c", b"1"), "bytes"),
    "a file that claims to be large": (member("x", size=7 << 30), "more than 1,048,576 bytes"),
    "a sparse file": (member("x", type=tarfile.GNUTYPE_SPARSE), "sparse"),
    "a sparse file in an extended header": (extended(record("GNU.sparse.map", "0,1")) + member("x"), "GNU.sparse.map"),
    "a size in an extended header": (extended(record("size", "9" * 9)) + member("x"), "'size'"),
    "a huge extended header": (extended(b"", size=7 << 30), "too large"),
    "an extended header beyond the limit": (extended(record("path", "x" * 5000)) + member("x"), "too large"),
    "an extended header of nonsense": (extended(b"999 path=x\n") + member("x"), "extended header"),
    "an extended header of nothing": (extended(b"0 \n") + member("x"), "extended header"),
    "an extended name of a short one": (extended(record("path", "x")) + member("x"), "does not write"),
    "an extended name of something else": (extended(record("path", "n" * 150)) + member("x"), "does not write"),
    "two extended names": (extended(record("path", "x") * 2) + member("x"), "extended header"),
    "a global header": (member("x", type=tarfile.XGLTYPE), "unknown type"),
    "a long name as GNU writes it": (member("././@LongLink", b"x\0", type=tarfile.GNUTYPE_LONGNAME), "'.'"),
    "a file with content in a folder": (member("x", b"1", type=tarfile.DIRTYPE), "does not write"),
    "a bad checksum": (member("x")[:148] + b"000000\0 " + member("x")[156:], "damaged"),
    "no tar": (b"#!/bin/sh\n" * 100, "damaged"),
    "padding with something in it": (member("x", b"1")[:513] + b"!" + member("x", b"1")[514:], "damaged"),
    "no end": (member("x", b"1")[:600], "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_as_it_should_be_is_refused(tmp_path: Path, case: str) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(content + END))
    if case == "no end":
        path.write_bytes(gzip.compress(content))
    text = refusal(path, config=SMALL)
    assert any(part in text for part in said.split("|")), text
    # nor does anything come of it when somebody builds from it
    code_dir = tmp_path / "code"
    with pytest.raises(ArchiveError):
        folder.build(path, plain_digest(path), tmp_path / "root", code_dir, SMALL, "n")
    assert [left.name for left in code_dir.iterdir() if not left.name.endswith(".lock")] == []
    assert sorted(left.name for left in tmp_path.iterdir()) == ["code", "x.tar.gz"]


@pytest.fixture
def good(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "good.tar.gz"
    return path, packed(
        plant(tmp_path / "root", SCRIPT | {"big.txt": random.Random(1).randbytes(100_000).hex()}), path
    ).digest


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda content: content[:-20], "truncated"),
    "half of it": (lambda content: content[: len(content) // 2], "truncated"),
    "its sum": (lambda content: content[:-8] + b"\0\0\0\0" + content[-4:], "damaged"),
    "a flipped bit": (lambda content: content[:9999] + bytes([content[9999] ^ 1]) + content[10000:], "archive"),
    "garbage after it": (lambda content: content + b"garbage", "after its end"),
    "zeros after it": (lambda content: content + b"\0", "after its end"),
    "another member after it": (lambda content: content + gzip.compress(b""), "after its end"),
    "garbage after the tar": (lambda content: gzip.compress(gzip.decompress(content) + b"x"), "after its end"),
    "a second tar in it": (lambda content: gzip.compress(gzip.decompress(content) * 2), "after its end"),
    "not compressed": (gzip.decompress, "not compressed"),
    "compressed twice": (gzip.compress, "damaged"),
    "nothing": (lambda content: b"", "empty"),
    "zeros": (lambda content: bytes(1000), "not compressed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_damaged_is_refused(good: tuple[Path, str], case: str) -> None:
    path, digest = good
    spoil, said = BROKEN[case]
    path.write_bytes(spoil(path.read_bytes()))
    assert any(part in refusal(path, digest) for part in said.split("|"))


def test_another_archive_than_the_one_that_was_asked_for(good: tuple[Path, str]) -> None:
    assert "another digest" in refusal(good[0], "f" * 64)


@pytest.mark.parametrize("make", ["nothing", "folder", "pipe"])
def test_no_archive(tmp_path: Path, make: str) -> None:
    path = tmp_path / "x"
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    assert "cannot be read" in refusal(path, "f" * 64) or "not a file" in refusal(path, "f" * 64)


@pytest.mark.parametrize("shape", ["one file", "many files", "after the end", "long stream of members"])
def test_a_bomb_is_refused_with_little_memory(tmp_path: Path, shape: str) -> None:
    config = CodeConfig(most_bytes=1 << 40)
    size = 64 << 20
    one = archive.info_of(File(path="x", bytes=size)).tobuf(tarfile.PAX_FORMAT)
    path = tmp_path / "x"
    with gzip.open(path, "wb", compresslevel=9) as out:
        if shape == "one file":
            out.write(one + bytes(size) + END)
        elif shape == "many files":
            for at in range(64):
                out.write(member(f"x{at:03}", bytes(1 << 20)))
        else:
            out.write(END + bytes(size))
    if shape == "long stream of members":
        path.write_bytes(gzip.compress(one) + gzip.compress(bytes(1 << 20)) * 64)
    tracemalloc.start()
    try:
        text = refusal(path, "f" * 64, config)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "times as many bytes" in text or "after its end" in text


def test_what_would_be_refused_later_is_not_packed(tmp_path: Path) -> None:
    plant(tmp_path / "root", SCRIPT | {"zeros.txt": bytes(stream.DENSE_FROM + 1)})
    with pytest.raises(TreeError, match="next to nothing in them"):
        packed(tmp_path / "root", tmp_path / "out/x")
    assert list((tmp_path / "out").iterdir()) == []


# -- trees that change while they are packed ---------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["a link", "a folder", "a pipe"])
def test_a_file_that_is_replaced(tmp_path: Path, by: str) -> None:
    scanned = tree.scan(plant(tmp_path / "root", SCRIPT), CONFIG)
    path = tmp_path / "root/train.py"
    path.unlink()
    if by == "a link":
        path.symlink_to("/etc/passwd")
    elif by == "a folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(TreeError) as refused:
        archive.pack(scanned, tmp_path / "out/x")
    assert str(refused.value).isprintable() and list((tmp_path / "out").iterdir()) == []


def test_a_file_that_has_grown_is_taken_as_it_is(tmp_path: Path) -> None:
    root = plant(tmp_path / "root", SCRIPT)
    scanned = tree.scan(root, CONFIG)
    (root / "train.py").write_text("print(12345)\n")
    code = archive.pack(scanned, tmp_path / "x")
    assert code == packed(root, tmp_path / "y")
    assert archive.check(tmp_path / "x", code.digest, CONFIG).code == code
    (root / "train.py").write_text("#" * 1000)
    with pytest.raises(TreeError, match="grew beyond"):
        archive.pack(msgspec.structs.replace(scanned, most_bytes=500), tmp_path / "z")


@pytest.mark.parametrize("size", [100, 100 + (1 << 24)])
def test_a_log_that_grows_all_the_time_is_taken_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A job may write beside its script for as long as it runs."""
    plant(tmp_path / "root", {"history.txt": os.urandom(size), "train.py": "x = 1\n"})
    scanned = tree.scan(tmp_path / "root", CONFIG)
    ask, asked = os.fstat, io.StringIO()

    def fstat(descriptor: int) -> os.stat_result:
        asked.write("x")
        found = list(ask(descriptor))
        # each time it looks as if somebody had written a byte less
        found[6] = max(1, found[6] - len(asked.getvalue()))
        return os.stat_result(found)

    monkeypatch.setattr("evertrain.versions.archive.os.fstat", fstat)
    code = archive.pack(scanned, tmp_path / "out/x")
    assert archive.check(tmp_path / "out/x", code.digest, CONFIG).code == code
    assert code.files == 2


def test_a_large_file_that_shrinks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "root", {"train.py": os.urandom(1 << 10)})
    scanned = tree.scan(tmp_path / "root", CONFIG)
    monkeypatch.setattr("evertrain.versions.archive._AT_ONCE", 100)
    ask = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = list(ask(descriptor))
        found[6] += 1
        return os.stat_result(found)

    monkeypatch.setattr("evertrain.versions.archive.os.fstat", fstat)
    with pytest.raises(TreeError, match="changes while it is captured"):
        archive.pack(scanned, tmp_path / "out/x")


def test_a_file_that_vanishes_is_left_out(tmp_path: Path) -> None:
    root = plant(tmp_path / "root", {"train.py": "x = 1\n", "held.new": ""})
    scanned = tree.scan(root, CONFIG)
    (root / "held.new").unlink()
    assert archive.pack(scanned, tmp_path / "x") == packed(root, tmp_path / "y")


def test_a_full_disk_is_no_fault_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = tree.scan(plant(tmp_path / "root", SCRIPT), CONFIG)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("evertrain.versions.archive.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        archive.pack(scanned, tmp_path / "out/x")
    assert list((tmp_path / "out").iterdir()) == []
