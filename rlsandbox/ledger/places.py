"""Where ledgers lie, and what kind of filesystem that is.

A run's first process writes ``<run>.db``, further ones ``<run>+1.db`` and so on, beside it. ``+`` cannot
stand in a run's name, so no run's file is ever taken for another's.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path

from ..errors import ConfigError

SUFFIXES = (".db", ".sqlite", ".sqlite3")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SIBLING = re.compile(r"(.+)\+(\d+)")

SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "afs", "beegfs"),
        *("gpfs", "panfs", "wekafs", "glusterfs", "orangefs", "gfs2", "ocfs2", "fuse", "fuseblk"),
    }
)
"""Filesystems on which SQLite's WAL (shared memory between processes) is not to be relied on."""


def new_run_name() -> str:
    """A name for a run that was given none: sortable by time, unique."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def check_run_name(run: str) -> str:
    if not isinstance(run, str) or not _NAME.fullmatch(run):
        raise ConfigError(
            f"run must be a name of letters, digits, '.', '_' and '-' (at most 128), not {run!r}",
            hint="it becomes the ledger's file name and part of every rollout's id",
        )
    return run


def ledger_file(run: str, ledger: str | os.PathLike[str] | None = None) -> Path:
    """The first process's file of *run*: *ledger* is a file (``.db``) or a directory, default our home."""
    check_run_name(run)
    if ledger is None:
        from .._paths import home

        return home() / f"{run}.db"
    try:
        path = Path(ledger).expanduser().absolute()
        named = path.suffix in SUFFIXES and not path.is_dir()
        os.fsencode(path)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"ledger: {str(ledger)!r:.100} is no place for a file: {said}") from None
    return path if named else path / f"{run}.db"


def sibling(first: Path, number: int) -> Path:
    """The file of the process *number* (0 is the first) beside *first*."""
    return first if number == 0 else first.with_name(f"{first.stem}+{number}{first.suffix}")


def first_of(path: Path) -> Path:
    """The first process's file that *path* lies beside (itself, mostly)."""
    match = _SIBLING.fullmatch(path.stem)
    return path.with_name(match.group(1) + path.suffix) if match else path


def siblings(first: Path) -> list[Path]:
    """All files of the run whose first file is *first*, in order."""
    found: list[tuple[int, Path]] = [(0, first)] if first.exists() else []
    if first.parent.is_dir():
        for path in first.parent.iterdir():
            match = _SIBLING.fullmatch(path.stem)
            if match and match.group(1) == first.stem and path.suffix == first.suffix:
                found.append((int(match.group(2)), path))
    return [path for _, path in sorted(found)]


def filesystem(path: Path, mountinfo: str | None = None) -> str:
    """The type of the filesystem that *path* lies on, as the kernel names it; ``""`` when unknown."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    where = os.path.realpath(path)
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m.group(1), 8)), fields[4])
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one: hence >=.
        if inside and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind


def is_shared(kind: str) -> bool:
    """Whether a filesystem of this type may be shared by machines, or fakes what WAL needs."""
    return kind in SHARED or kind.startswith("fuse.")
