"""What several built-in plugins share: how a change reads, and how changes are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue
from rlsandbox.results import FileInfo

Wanted = Callable[[str], bool]


def how(change: FileInfo) -> str:
    """How a changed path differs, for a residue's detail."""
    if change.kind == "deleted":
        return "deleted"
    kind = {"dir": "directory", "other": "socket, pipe or device"}.get(change.kind, change.kind)
    size = f", {change.size} bytes" if change.kind == "file" else ""
    special = "".join(word for bit, word in ((0o4000, ", setuid"), (0o2000, ", setgid")) if change.mode & bit)
    return (
        f"{kind} was written{size}, mode {change.mode & 0o7777:04o}, owner {change.uid}:{change.gid}{special}"
    )


def undo(resetter: Resetter, wanted: Wanted, under: str = "/") -> None:
    """Put back every changed path that *wanted* says yes to, topmost first, until none is left.

    A path that cannot be put back ends the loop: verification names it.
    """
    before: set[str] | None = None
    while True:
        names = {change.name for change in resetter.changed(under) if wanted(change.name)}
        if not names or names == before:
            return
        before = names
        done = "\0"
        for name in sorted(names):
            if not name.startswith(done + "/"):
                resetter.remove(name)
                done = name


def named(
    inspector: Inspector, kind: str, word: Callable[[str], str | None], under: str = "/"
) -> Iterator[Residue]:
    """A residue of *kind* for every changed path that *word* has a word for."""
    for change in inspector.changed(under):
        said = word(change.name)
        if said is not None:
            yield Residue(kind, change.name, f"{said}: {how(change)}" if said else how(change))


def within(path: str, *directories: str) -> bool:
    """Whether *path* is one of *directories* or lies under one."""
    return any(path == d or path.startswith(d.rstrip("/") + "/") for d in directories)


def words(text: str) -> tuple[str, ...]:
    """A list that is easier to read without quotes."""
    return tuple(text.split())
