"""Reading ledgers: of living runs and dead ones, and the dumps of those that could not be written."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import LedgerError
from . import places
from .elsewhere import Row
from .records import FORMAT, Book, Event, fold
from .store import APPLICATION, written_here

_SQLITE = b"SQLite format 3\0"
_HEAD = 100
"""Bytes of a SQLite file's header."""


def read(paths: Iterable[Path], waiting: Iterable[Event] = ()) -> Book:
    """What these files say together, and events that *wait* to be written.

    An event that is there twice (a dump repeats one) counts once.
    """
    files, more = list(paths), list(waiting)
    if len(files) == 1 and not more:
        return fold(stream(files[0]))
    runs = Counter(map(places.first_of, files))
    parts = (stream(file, one_of_many=runs[places.first_of(file)] > 1) for file in files)
    return fold(_once([*parts, more]))


def _once(sources: Iterable[Iterable[Event]]) -> Iterator[Event]:
    seen: set[tuple[str, int]] = set()
    for source in sources:
        for event in source:
            if (event.source, event.n) not in seen:
                seen.add((event.source, event.n))
                yield event


def run_files(where: Path) -> list[Path]:
    """The files of a run: *where* is one of its ledger files, or a dump."""
    if where.suffix == ".jsonl":
        return [where]
    return places.siblings(places.first_of(where)) or [where]


def ledgers_in(directory: Path) -> list[Path]:
    """The first files of the runs in *directory*, oldest first; others' databases are among them."""
    try:
        beside = [p for p in directory.iterdir() if p.suffix in places.SUFFIXES and p.is_file()]
        found = {places.first_of(p) for p in beside}
        return sorted((p for p in found if p.exists()), key=lambda p: (p.stat().st_mtime, p.name))
    except OSError as error:
        said = f"the ledgers in {directory} cannot be read: {(error.strerror or str(error)).lower()}"
        raise LedgerError(said, infrastructure=False) from None


def is_ours(path: Path) -> bool:
    """Whether *path* is a ledger, whole or not: by its header, which may still stand in its WAL."""
    try:
        if not path.is_file():
            return False
        if written_here(path):
            return True
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if head[:16] != _SQLITE or len(head) < _HEAD:
            return False
        if int.from_bytes(head[68:72], "big") == APPLICATION:
            return True
        return _wal(path).exists() and _application(path) == APPLICATION
    except (OSError, sqlite3.Error):
        return False


def events_of(path: Path) -> list[Event]:
    """All events of one file, in order.

    Raises:
        LedgerError: there is no such file, or it is no ledger.
    """
    return list(stream(path))


class _Empty(ValueError):
    """An SQLite file with nothing in it."""


def stream(path: Path, *, one_of_many: bool = False) -> Iterator[Event]:
    """:func:`events_of`, each made when it is asked for; the rows are all read at once, at the first.

    *one_of_many*: of a run that has other files. An empty one is just being made by another process.
    """
    if not os.path.isfile(path):
        raise LedgerError(f"there is no ledger {path}", infrastructure=False)
    if path.suffix == ".jsonl":
        yield from _of_dump(path)
        return
    try:
        source = str(path)
        rows = _rows(path)
        rows.reverse()
        while rows:
            yield event_of(rows.pop(), source)
    except _Empty as error:
        if not one_of_many:
            raise LedgerError(f"the ledger {path} cannot be read: {error}") from error
    except (sqlite3.Error, ValueError, OSError) as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error}") from error


def event_of(row: Row, source: str) -> Event:
    n, at, kind, rollout, data = row
    return Event(n, at, kind, rollout, json.loads(data), source)


def _rows(path: Path) -> list[Row]:
    try:
        rows = _at_rest(path)
        return _query(path, "mode=ro") if rows is None else rows
    except sqlite3.OperationalError as error:
        elsewhere = error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_IOERR"))
        if not elsewhere or written_here(path):
            raise
    # A WAL needs a place for its index; a directory that we may not write has none: read a copy.
    with tempfile.TemporaryDirectory(prefix="rlsandbox-ledger-") as scratch:
        copy = Path(scratch) / "copy.db"
        shutil.copyfile(path, copy)
        wal = _wal(path)
        if wal.exists():
            shutil.copyfile(wal, copy.with_name("copy.db-wal"))
        return _query(copy, "mode=rw")


def _at_rest(path: Path) -> list[Row] | None:
    """The rows of a file that nobody writes; None when somebody may.

    Reading one in WAL mode would otherwise leave an index and an empty WAL beside it. Who writes has a WAL.
    """
    if written_here(path):
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[18:20] != b"\x02\x02" or _wal(path).exists():
        return None
    before = _state(path)
    try:
        rows = _query(path, "mode=ro&immutable=1")
    except sqlite3.Error:
        if _state(path) == before:
            raise
        return None
    return rows if _state(path) == before else None


def _state(path: Path) -> tuple[object, ...]:
    """Another one when somebody has begun to write."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, _wal(path).exists()


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _connect(path: Path, how: str) -> closing[sqlite3.Connection]:
    # (by its bytes: in the C locale a name that is not ASCII is no text that could be encoded)
    uri = f"file:{quote(os.fsencode(path))}?{how}"
    return closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None))


def _application(path: Path) -> int:
    with _connect(path, "mode=ro") as db:
        return int(db.execute("PRAGMA application_id").fetchone()[0])


def _query(path: Path, how: str) -> list[Row]:
    with _connect(path, how) as db:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            (anything,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            raise (ValueError if application or anything else _Empty)("it is no rlsandbox ledger")
        if version > FORMAT:
            raise ValueError(f"it has format {version}, this version of rlsandbox knows {FORMAT}")
        return db.execute("SELECT n, at, kind, rollout, data FROM events ORDER BY n").fetchall()


def _of_dump(path: Path) -> Iterator[Event]:
    source = str(path)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            item: dict[str, Any] = json.loads(line)
            if "dump_of" in item:
                source = item["dump_of"]
                continue
            yield Event(item["n"], item["at"], item["kind"], item["rollout"], item["data"], source)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise LedgerError(f"{path}, line {number}: this is no event of a ledger ({why})") from error
