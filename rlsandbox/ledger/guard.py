"""Notices that something else has written over a ledger in use: ``cp old.db run.db``, a restore, a bug.

SQLite does not: in WAL mode it goes on with the pages that it knows, and the next reader finds a damaged
file, or one with other events.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from ..errors import LedgerError

_State = tuple[int, int, int]


class Guard:
    """Of a file in WAL mode that nobody else writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spoilt = ""
        """What is wrong, for good."""
        self._seen: tuple[_State | None, _State | None] | None = None
        """File and WAL as they were after our last commit; None: nothing is known yet."""

    def wrote(self) -> None:
        """We have just written."""
        self._seen = self._now()

    def wal_is_gone(self) -> bool:
        return self._seen is not None and self._seen[1] is not None and self._now()[1] is None

    def forget(self) -> None:
        """It is being written anew."""
        self._seen = None

    def look(self, least: int, most: int) -> None:
        """Raise when the file no longer holds what was committed to it: from *least* to *most* events.

        That others changed it does not mean that; a checkpoint from outside is such a change.
        """
        if not self.spoilt and self._seen is not None:
            now = self._now()
            if any(a != b for a, b in zip(now, self._seen, strict=True) if a is not None and b is not None):
                found = self._wrong(least, most)
                if found is None:
                    self._seen = now
                else:
                    self.spoilt = (
                        f"something else wrote over it while it was in use: {found};"
                        f" of the {least} events that were in it some or all are gone"
                    )
        if self.spoilt:
            raise LedgerError(self.spoilt)

    def _now(self) -> tuple[_State | None, _State | None]:
        return _state(self.path), _state(self.path.with_name(self.path.name + "-wal"))

    def _wrong(self, least: int, most: int) -> str | None:
        # Not through open(): closing such a descriptor would end the locks that SQLite holds in this process.
        try:
            with closing(sqlite3.connect(self.path, timeout=5.0, isolation_level=None)) as db:
                words = [str(word) for (word,) in db.execute("PRAGMA quick_check(1)")]
                if words != ["ok"]:
                    return " ".join(words[0].split())
                (count,) = db.execute("SELECT count(*) FROM events").fetchone()
        except sqlite3.DatabaseError as error:
            name = error.sqlite_errorname
            unknown = name.startswith(("SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_IOERR"))
            if unknown and name != "SQLITE_IOERR_SHORT_READ":
                return None  # nothing can be told now; what is written next has its own words for these
            return str(error)
        return None if least <= count <= most else f"it has {count} events now"


def _state(path: Path) -> _State | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
