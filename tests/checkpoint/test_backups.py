"""What a node keeps for others, and what somebody else may have left among it."""

from __future__ import annotations

from pathlib import Path

from evertrain.checkpoint.backups import Shelf


def test_what_nobody_here_has_made_does_no_harm(tmp_path: Path) -> None:
    save = tmp_path / "backups" / "a1-s5"
    for name in ("part-0f", "head-r0", "part-1f.partial"):
        (save / name).mkdir(parents=True)
    (save / "part-2f.partial").write_bytes(b"half")
    (save / "head-r1").write_bytes(b"?")
    (tmp_path / "backups" / "a1-s6").write_text("no folder")
    shelf = Shelf(str(tmp_path / "slots"), str(tmp_path / "disk"), str(tmp_path / "backups"))
    shelf.clean()
    assert not (save / "part-2f.partial").exists()
    assert [dict(kept.heads) for kept in shelf.kept()] in ([], [{}])
