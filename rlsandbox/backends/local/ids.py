"""Whose files a sandbox's files are on this machine's disk.

``real``: we are root, files carry the ids that the image names, and the keeper shows them through an
idmapped mount. ``range``: an ordinary user with newuidmap and a range in /etc/subuid; inside, 0 is the user
and 1.. the range. ``one``: everything belongs to the one user that we are, who is root inside, alone.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from dataclasses import dataclass

SIZE = 65536
_TOOLS = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"  # as in keeper/src/ids.c


@dataclass(frozen=True)
class IdMap:
    """How ids inside map to ids of the machine.

    Args:
        kind: ``real``, ``range`` or ``one``.
        uids: (first id inside, first id outside, how many) triples; empty for ``real``.
        gids: the same for groups.
    """

    kind: str
    uids: tuple[tuple[int, int, int], ...] = ()
    gids: tuple[tuple[int, int, int], ...] = ()

    @property
    def key(self) -> str:
        """Part of the names of cache entries: unpacked files differ by it."""
        return self.kind if self.kind != "range" else f"range-{self.uids[1][1]}-{self.gids[1][1]}"

    @property
    def namespace(self) -> bool:
        """Whether files are made and removed from within a user namespace of this map."""
        return self.kind == "range"


def detect() -> IdMap:
    """The best map that this process could have; the keeper's hub decides which one it is."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _may_administer():
        return IdMap("real")
    name = _name(uid)
    ranges = [_subordinate(path, name, uid) for path in ("/etc/subuid", "/etc/subgid")]
    if all(ranges) and tool("newuidmap") and tool("newgidmap"):
        (ustart, ucount), (gstart, gcount) = (found for found in ranges if found is not None)
        return IdMap("range", ((0, uid, 1), (1, ustart, ucount)), ((0, gid, 1), (1, gstart, gcount)))
    return IdMap("one", ((0, uid, 1),), ((0, gid, 1),))


def tool(name: str) -> str | None:
    """Where the mapping program *name* is: not by PATH, so that the keeper's hub and we find the same."""
    return shutil.which(name, path=_TOOLS)


def chosen(told: str) -> IdMap:
    """The map that the hub has *told* of (``idmapped``, ``range`` or ``one``)."""
    ids = detect()
    if told == "one":
        uid, gid = os.geteuid(), os.getegid()
        return IdMap("one", ((0, uid, 1),), ((0, gid, 1),))
    return ids


def _may_administer() -> bool:
    """Whether this root has CAP_SYS_ADMIN: a container's often has not, and is then like any user."""
    with open("/proc/self/status") as file:
        text = file.read()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    return effective is None or bool(int(effective.group(1), 16) >> 21 & 1)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _subordinate(path: str, name: str, uid: int) -> tuple[int, int] | None:
    """The first large enough range of *name* (or *uid*) in *path*: the one that the keeper's hub takes."""
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.strip().split(":")
        if len(fields) != 3 or not fields[1].isdigit() or not fields[2].isdigit():
            continue
        if fields[0] in (name, str(uid)) and int(fields[2]) >= SIZE - 1:
            return int(fields[1]), SIZE - 1
    return None
