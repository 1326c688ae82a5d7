"""Removal of directory trees that somebody else has filled: of any depth, with any modes."""

from __future__ import annotations

import os


def remove_tree(path: str) -> None:
    """Remove the directory *path*, whatever its directories' modes and however deep they lie.

    Nobody else can write there. What lies deep is moved to the top of the tree first: names stay short,
    nothing recurses, and an interrupted removal leaves nothing outside.
    """
    mark = f".gone-{os.urandom(8).hex()}"
    todo = [path]
    moved = 0
    own = os.geteuid() != 0
    if own:
        os.chmod(path, 0o700)
    while todo:
        here = todo.pop()
        for entry in list(os.scandir(here)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            if own:
                os.chmod(entry.path, 0o700)  # moving a directory changes its ".."
            moved += 1
            todo.append(os.path.join(path, f"{mark}-{moved}"))
            os.rename(entry.path, todo[-1])
        if here != path:
            os.rmdir(here)
    os.rmdir(path)
