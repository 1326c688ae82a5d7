"""When a ledger cannot be written: the reason in words, and another place for what it should hold."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from .records import FORMAT

Row = tuple[int, float, str, str | None, str]
"""n, at, kind, rollout, data: an event as it is written."""

HINT = "give another place: Pool(ledger=...), or $RLSANDBOX_HOME"

log = logging.getLogger("rlsandbox.ledger")


class LedgerWarning(RuntimeWarning):
    """The ledger cannot be written: records are held in memory, or went elsewhere."""


_REASONS = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_READONLY": "it is read-only",
    "SQLITE_CANTOPEN": "the file cannot be opened",
    "SQLITE_NOTADB": "it is no SQLite database",
    "SQLITE_CORRUPT": "it is damaged",
    "SQLITE_BUSY": "another process has locked it",
    "SQLITE_IOERR": "reading or writing the disk failed",
    "SQLITE_PERM": "no permission",
}


def reason(error: BaseException) -> str:
    """Why SQLite or the system refused, in a few words."""
    name = getattr(error, "sqlite_errorname", "")
    for known, text in _REASONS.items():
        if name.startswith(known):
            return text
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return getattr(error, "message", "") or str(error)


def say(text: str, *, error: bool = False) -> None:
    """Log *text* and warn with it: without logging configured a log line alone would be seen by nobody."""
    with contextlib.suppress(Warning):  # where warnings are errors, this one still stops nothing
        warnings.warn(text, LedgerWarning, stacklevel=3)
    log.log(logging.ERROR if error else logging.WARNING, "%s", text)


def put_elsewhere(ledger: Path, rows: list[Row], trouble: str) -> Path | None:
    """Save events that *ledger* could not take; says where, or exactly what is lost."""
    rollouts = sorted({row[3] for row in rows if row[3]})
    what = f"{len(rows)} events of {len(rollouts)} rollouts"
    name = f"{ledger.stem}-{os.getpid()}-{time.time_ns()}.jsonl"
    tried = []
    for directory in _other_places(ledger):
        target = directory / name
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_dump(target, rows, ledger)
        except OSError as error:
            tried.append(f"{directory}: {error.strerror}")
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
            continue
        say(
            f"{what} could not be written to the ledger {ledger} ({trouble}); they are in {target}."
            f" To read both: rlsandbox ledger report {ledger} {target}",
            error=True,
        )
        return target
    say(
        f"LOST: {what} could be written neither to the ledger {ledger} ({trouble})"
        f" nor elsewhere ({'; '.join(tried)}). The rollouts: {', '.join(rollouts)}",
        error=True,
    )
    return None


def _other_places(path: Path) -> Iterable[Path]:
    from .._paths import home

    places: list[Path] = []
    finders: tuple[Callable[[], Path], ...] = (
        lambda: path.parent, home, lambda: Path(tempfile.gettempdir()), Path.cwd
    )  # fmt: skip
    for find in finders:
        with contextlib.suppress(OSError, RuntimeError):
            place = find()
            if place not in places:
                places.append(place)
    return places


def write_dump(target: Path, rows: Iterable[Row], ledger: Path) -> None:
    """Events of *ledger* as JSON lines, synced; :func:`rlsandbox.ledger.reading.events_of` reads them."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        file.write(json.dumps({"dump_of": str(ledger), "format": FORMAT}) + "\n")
        for n, at, kind, rollout, data in rows:
            event = {"n": n, "at": at, "kind": kind, "rollout": rollout, "data": json.loads(data)}
            file.write(json.dumps(event) + "\n")
        file.flush()
        os.fsync(fd)
