"""Reading ledgers: of living runs and dead ones, and the dumps of those that could not be written."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import LedgerError
from . import places
from .elsewhere import Row
from .records import FORMAT, Book, Event, fold
from .store import APPLICATION


def read(paths: Iterable[Path]) -> Book:
    """What these files say together. An event that stands in two of them (a dump repeats one) counts once."""
    seen: set[tuple[str, int]] = set()
    events: list[Event] = []
    for path in paths:
        for event in events_of(path):
            key = (event.source, event.n)
            if key not in seen:
                seen.add(key)
                events.append(event)
    return fold(events)


def run_files(where: Path) -> list[Path]:
    """The files of a run: *where* is one of its ledger files, or a dump."""
    if where.suffix == ".jsonl":
        return [where]
    return places.siblings(places.first_of(where)) or [where]


def ledgers_in(directory: Path) -> list[Path]:
    """The first files of the runs in *directory*, oldest first."""
    found = {places.first_of(p) for p in directory.iterdir() if p.suffix in places.SUFFIXES and p.is_file()}
    return sorted((p for p in found if p.exists()), key=lambda p: (p.stat().st_mtime, p.name))


def events_of(path: Path) -> list[Event]:
    """All events of one file, in order.

    Raises:
        LedgerError: there is no such file, or it is no ledger.
    """
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}", infrastructure=False)
    if path.suffix == ".jsonl":
        return list(_of_dump(path))
    try:
        return [event_of(row, str(path)) for row in _rows(path)]
    except (sqlite3.Error, ValueError) as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error}") from error


def event_of(row: Row, source: str) -> Event:
    n, at, kind, rollout, data = row
    return Event(n, at, kind, rollout, json.loads(data), source)


def _rows(path: Path) -> list[Row]:
    try:
        return _query(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_IOERR")):
            raise
    # A WAL needs a place for its index; a directory that we may not write has none: read a copy.
    with tempfile.TemporaryDirectory(prefix="rlsandbox-ledger-") as scratch:
        copy = Path(scratch) / "copy.db"
        shutil.copyfile(path, copy)
        wal = path.with_name(path.name + "-wal")
        if wal.exists():
            shutil.copyfile(wal, copy.with_name("copy.db-wal"))
        return _query(copy, "mode=rw")


def _query(path: Path, how: str) -> list[Row]:
    # (by its bytes: in the C locale a name that is not ASCII is no text that could be encoded)
    uri = f"file:{quote(os.fsencode(path))}?{how}"
    with closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as db:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise ValueError("it is no rlsandbox ledger")
        if version > FORMAT:
            raise ValueError(f"it has format {version}, this version of rlsandbox knows {FORMAT}")
        return db.execute("SELECT n, at, kind, rollout, data FROM events ORDER BY n").fetchall()


def _of_dump(path: Path) -> Iterator[Event]:
    source = str(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            item: dict[str, Any] = json.loads(line)
            if "dump_of" in item:
                source = item["dump_of"]
                continue
            yield Event(item["n"], item["at"], item["kind"], item["rollout"], item["data"], source)
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{path}, line {number}: this is no event of a ledger ({error})") from error
