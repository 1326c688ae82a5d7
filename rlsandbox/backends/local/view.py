"""Looks at a stack of overlay layers as overlayfs would show it, without mounting it.

Links are followed inside the stack only. Used where a layer or a mount point has to fit what lies below.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

OPAQUE = "user.overlay.opaque"
MAX_LINKS = 40


@dataclass(frozen=True)
class Found:
    """What is at a path: its status and, for a link, where it points."""

    status: os.stat_result
    target: str | None = None

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


def is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


class View:
    """The merged view of *lowers*, topmost first."""

    def __init__(self, lowers: Sequence[str]) -> None:
        self._lowers = list(lowers)

    def find(self, parts: Sequence[str]) -> Found | None:
        """What is at the path *parts*, whose own links are not followed; None when nothing is."""
        layers = self._lowers
        for depth, name in enumerate(parts):
            where = "/".join([*parts[:depth], name])
            below: list[str] = []
            for lower in layers:
                path = f"{lower}/{where}"
                try:
                    status = os.lstat(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if is_whiteout(status):
                    break
                if not stat.S_ISDIR(status.st_mode):
                    if below:
                        break  # a directory above hides it
                    if depth < len(parts) - 1:
                        return None
                    return Found(status, os.readlink(path) if stat.S_ISLNK(status.st_mode) else None)
                below.append(lower)
                if is_opaque(path):
                    break
            if not below:
                return None
            layers = below
        return Found(os.lstat(f"{layers[0]}/{'/'.join(parts)}")) if layers else None


def split(path: str) -> list[str]:
    """The names of *path*, without empty ones and ``.``; ``..`` stays."""
    return [name for name in path.split("/") if name not in ("", ".")]
