"""What a root has to have on top of its layers: mount points, and for an image what any root needs.

Everything is computed against the merged view of the layers, with links followed inside it only, so that no
mount point of ours can be led elsewhere by the image. Runs in the worker process.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import replace

from ...errors import ProvisionError
from .base import Item, names
from .view import MAX_LINKS, Found, View, split

VERSION = 1
# Where the keeper mounts: directories of the root itself, since a link would lead a mount astray.
_MOUNTS = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "tmp": 0o1777}
_NEEDED = {"run": 0o755, "root": 0o700, "var": 0o755, "var/tmp": 0o1777, "etc": 0o755, "home": 0o755}
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"


def plan(
    lowers: Sequence[str], points: Sequence[tuple[str, str]], network: str, *, whole: bool, workdir: str = ""
) -> tuple[list[Item], dict[str, str]]:
    """The items of the top layer, and for each of *points* the path at which it has to be mounted.

    *workdir*: of the image, made where its layers have none, as container runtimes do.
    """
    fit = _Fit(View(lowers))
    if whole:
        for path, mode in _MOUNTS.items():
            fit.directory(path, mode, instead=True)
        for path, mode in _NEEDED.items():
            fit.directory(path, mode)
        for item in names(network):
            fit.file(item.path, item.content, instead=True)
        fit.file("etc/passwd", _PASSWD)
        fit.file("etc/group", _GROUP)
    if workdir:
        fit.workdir(workdir)
    targets = {path: fit.point(path, kind) for path, kind in points}
    return sorted(fit.items.values(), key=lambda item: item.path), targets


class _Fit:
    def __init__(self, view: View) -> None:
        self._view = view
        self.items: dict[str, Item] = {}

    def directory(self, path: str, mode: int, *, instead: bool = False) -> None:
        where = self._resolve(path, follow=not instead)
        found = self._find(where)
        if found is None or not found.is_dir:
            self._parents(where)
            self.items[where] = Item(where, "d", mode)

    def file(self, path: str, text: str, *, instead: bool = False) -> None:
        where = self._resolve(path, follow=not instead)
        if instead or self._find(where) is None:
            self._parents(where)
            self.items[where] = Item(where, "f", content=text)

    def workdir(self, path: str) -> None:
        """What cannot be made is left: commands say what is wrong with it."""
        try:
            where = self._resolve(path, follow=True)
            parts = where.split("/")
            above = [self._find("/".join(parts[:depth])) for depth in range(1, len(parts) + 1)]
        except (ProvisionError, OSError):  # links in a circle, names that no filesystem has
            return
        if len(where.encode()) < 2048 and all(found is None or found.is_dir for found in above):
            self.directory(where, 0o755)

    def point(self, path: str, kind: str) -> str:
        where = self._resolve(path, follow=True)
        found = self._find(where)
        wanted = "d" if kind == "d" else "f"
        if found is not None and found.is_dir != (wanted == "d"):
            raise ProvisionError(f"{path} cannot be shown: the image has something of another kind there")
        self._parents(where, open_up=True, only_if_shut=found is not None)
        if found is None:
            self.items[where] = Item(where, wanted, 0o755 if wanted == "d" else 0o644)
        return "/" + where

    def _find(self, where: str) -> Found | None:
        return self._view.find(where.split("/"))

    def _resolve(self, path: str, *, follow: bool) -> str:
        """*path* without links (of its last name only when *follow*) and without a leading slash."""
        here: list[str] = []
        todo = split(path)
        hops = 0
        while todo:
            name = todo.pop(0)
            if name == "..":
                here = here[:-1]
                continue
            if "/".join([*here, name]) in self.items:
                here.append(name)
                continue
            found = self._view.find([*here, name])
            if found is None or found.target is None or (not todo and not follow):
                here.append(name)
                continue
            hops += 1
            if hops > MAX_LINKS:
                raise ProvisionError(f"{path}: too many links in the image")
            here = [] if found.target.startswith("/") else here
            todo = split(found.target) + todo
        return "/".join(here)

    def _parents(self, where: str, *, open_up: bool = False, only_if_shut: bool = False) -> None:
        """Carry the directories above *where* into this layer as they are below.

        *open_up*: anybody may pass through them; *only_if_shut*: only when one of them has to be opened.
        """
        parts = where.split("/")
        chain: list[Item] = []
        shut = False
        for depth in range(1, len(parts)):
            path = "/".join(parts[:depth])
            item = self.items.get(path)
            if item is None:
                found = self._find(path)
                status = found.status if found is not None and found.is_dir else None
                item = Item(path, "d", 0o755)
                if status is not None:
                    item = Item(path, "d", stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
            if open_up and item.mode & 0o111 != 0o111:
                item = replace(item, mode=item.mode | 0o111)
                shut = True
            chain.append(item)
        if shut or not only_if_shut:
            self.items.update({item.path: item for item in chain})
