"""Removal of directory trees that somebody else has filled: of any depth, with any modes."""

from __future__ import annotations

import os


def remove_tree(path: str) -> None:
    """Remove the directory *path*, whatever its directories' modes and however deep they lie.

    Nobody else can write there. What lies deep is moved to the top of the tree first: names stay short,
    nothing recurses, and an interrupted removal leaves nothing outside.

    Raises:
        OSError: the first of those that kept something from being removed; everything else is gone.
    """
    mark = f".gone-{os.urandom(8).hex()}"
    todo = [path]
    moved = 0
    own = os.geteuid() != 0
    if own:
        os.chmod(path, 0o700)
    failed: OSError | None = None
    while todo:
        here = todo.pop()
        try:
            entries = list(os.scandir(here))
        except OSError as error:
            failed = failed or error
            continue
        for entry in entries:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                if own:
                    os.chmod(entry.path, 0o700)  # moving a directory changes its ".."
                moved += 1
                aside = os.path.join(path, f"{mark}-{moved}")
                os.rename(entry.path, aside)
            except OSError as error:
                failed = failed or error
            else:
                todo.append(aside)
        if here != path:
            try:
                os.rmdir(here)
            except OSError as error:
                failed = failed or error
    if failed is not None:
        raise failed
    os.rmdir(path)
