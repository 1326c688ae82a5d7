"""SQLite connections that fail when told to."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlsandbox.ledger.store import Store

ERRORS = {
    "full": ("SQLITE_FULL", "database or disk is full"),
    "io": ("SQLITE_IOERR_WRITE", "disk I/O error"),
    "readonly": ("SQLITE_READONLY", "attempt to write a readonly database"),
    "busy": ("SQLITE_BUSY", "database is locked"),
    "corrupt": ("SQLITE_CORRUPT", "database disk image is malformed"),
}


def sqlite_error(kind: str) -> sqlite3.OperationalError:
    name, text = ERRORS[kind]
    error = sqlite3.OperationalError(text)
    error.sqlite_errorname = name
    return error


class Faults:
    """Decides call by call. ``calls`` are those made, in order: the operation and its SQL."""

    def __init__(self, decide: Callable[[int, str], str | None]) -> None:
        self.calls: list[str] = []
        self.raised = 0
        self._decide = decide
        self._lock = threading.Lock()

    def check(self, what: str) -> None:
        with self._lock:
            number = len(self.calls)
            self.calls.append(what)
        kind = self._decide(number, what)
        if kind is not None:
            self.raised += 1
            raise sqlite_error(kind)


@contextlib.contextmanager
def faulty(decide: Callable[[int, str], str | None]) -> Iterator[Faults]:
    """Every connection of a :class:`Store` made in here asks *decide* (number of the call, what) first."""
    faults = Faults(decide)

    class Connection(sqlite3.Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            faults.check("connect")
            super().__init__(*args, **kwargs)

        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]
            faults.check("execute " + sql.split("(")[0][:40])
            return super().execute(sql, *args)

        def executescript(self, sql: str) -> sqlite3.Cursor:
            faults.check("executescript")
            return super().executescript(sql)

        def backup(self, *args: Any, **kwargs: Any) -> None:
            faults.check("backup")
            super().backup(*args, **kwargs)

        def close(self) -> None:
            try:
                faults.check("close")
            finally:
                super().close()

    before = Store.connection
    Store.connection = Connection
    try:
        yield faults
    finally:
        Store.connection = before
