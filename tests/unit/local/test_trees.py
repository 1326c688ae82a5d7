"""Removal goes as far as it goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsandbox.backends.local.state import forget
from rlsandbox.backends.local.trees import remove_tree


@pytest.mark.parametrize("what", ["unlink", "rename", "scandir"])
def test_what_cannot_be_removed_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tree = tmp_path / "tree"
    for name in "abc":
        (tree / name / "deep").mkdir(parents=True)
        (tree / name / "deep/file").write_text("x")
        (tree / f"file-{name}").write_text("x")
    kept = tree / "file-b" if what == "unlink" else tree / "b"
    inode = kept.stat().st_ino
    real = getattr(os, what)

    def refused(path: str, *more: str) -> object:
        if os.lstat(path).st_ino == inode:
            raise PermissionError(1, "Operation not permitted", path)
        return real(path, *more)

    monkeypatch.setattr(os, what, refused)
    with pytest.raises(PermissionError, match="not permitted"):
        remove_tree(str(tree))
    left = list(tree.iterdir())
    assert [path.lstat().st_ino for path in left] == [inode]
    forget(tree)
    monkeypatch.undo()
    remove_tree(str(tree))
    assert not tree.exists()
