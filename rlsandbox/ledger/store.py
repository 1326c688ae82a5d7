"""One SQLite file that one process appends events to, from a thread of its own.

Promises:

- :meth:`Store.append` never blocks, never raises for the disk's sake, and keeps the order;
- :meth:`Store.flush` returns once everything appended before is committed (True), or is known to be held in
  memory because the file cannot be written (False): a warning says so once, and the writer goes on trying;
- an event is in the file at most once, however often its writing is repeated;
- what still cannot be written at :meth:`Store.close` goes to another place, and a message says which; when
  there is no such place, the message says what is lost;
- a file that something else wrote over is not written to any more, and what is lost is said;
- a killed process loses nothing that was committed: WAL on local disks, a rollback journal on shared ones.

Refused: a file that is no ledger, one of a later format, one that cannot be written when it is opened.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from .._loops import outside
from ..errors import LedgerError
from . import places
from .elsewhere import HINT, Row, put_elsewhere, reason, say
from .guard import Guard
from .records import FORMAT

APPLICATION = 0x726C7362  # "rlsb"
LEAST_FREE = 1 << 20
"""Bytes that must be free when a ledger is opened: work should not start on a disk that is all but full."""
_ROWS = 100
_CHUNK = 5000
_LONGEST_WAIT = 5.0

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS events (
    n INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, rollout TEXT, data TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS no_update BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END;
CREATE TRIGGER IF NOT EXISTS no_delete BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'a ledger is append-only'); END;
CREATE VIEW IF NOT EXISTS ends AS SELECT rollout, at,
    json_extract(data, '$.status') AS status, json_extract(data, '$.reward') AS reward,
    json_extract(data, '$.attempts') AS attempts, json_extract(data, '$.failure.kind') AS failure,
    json_extract(data, '$.failure.cause') AS cause
    FROM events WHERE kind = 'end';
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
COMMIT;
"""

Tell = Callable[[bool], None]

log = logging.getLogger("rlsandbox.ledger")


class Store:
    """The file and its writer thread. Methods may be called from any thread of the process that made it."""

    connection: ClassVar[type[sqlite3.Connection]] = sqlite3.Connection
    """What talks to SQLite; tests put one in that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.word = ""
        """What there is to say about the place (no WAL there, and why)."""
        self._pid = os.getpid()
        self._cv = threading.Condition()
        self._queue: deque[Row] = deque()
        self._waiters: list[tuple[int, Tell]] = []
        self._committed = self._last = 0
        self._ending = threading.RLock()
        self._closing_at: float | None = None
        self._closed = False
        self._trouble: str | None = None
        self._retry_at = 0.0
        self._retry_s = 0.1
        self._warned = False
        self.opening = True
        """Until somebody says that work begins, trouble is for the opener to report."""
        self._identity: tuple[int, int] | None = None
        self._guard = Guard(path)
        self._gaps = 0
        """Numbers up to the last that are no event."""
        # Times advance with the monotonic clock: a step of the wall clock changes no duration.
        self._wall, self._mono = time.time(), time.monotonic()
        self._db: sqlite3.Connection | None = self._open()
        self._thread = threading.Thread(target=self._work, name="rlsandbox-ledger", daemon=True)
        self._thread.start()
        _stores.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._trouble or "ok"
        return f"Store({self.path}, {len(self._queue)} to write, {state})"

    # ------------------------------------------------------------------ for callers

    @property
    def trouble(self) -> str | None:
        """Why the file cannot be written just now; None when it can."""
        return self._trouble

    def now(self) -> float:
        return self._wall + (time.monotonic() - self._mono)

    def append(self, kind: str, rollout: str | None, data: dict[str, Any], at: float | None = None) -> int:
        """Queue an event; *data* is JSON-able."""
        text = json.dumps(data, separators=(",", ":"), default=_plain)
        if rollout is not None:
            rollout = rollout.encode("utf-8", "backslashreplace").decode()
        if self.foreign:
            raise LedgerError(
                f"the ledger {self.path} belongs to process {self._pid}, not to its child {os.getpid()}",
                hint="connect to the pool from the child: Pool.connect(ref)",
            )
        with self._cv:
            if self._closed:
                raise LedgerError(f"the ledger {self.path} is closed")
            self._last += 1
            self._queue.append((self._last, self.now() if at is None else at, kind, rollout, text))
            self._cv.notify()
            return self._last

    async def flush(self) -> bool:
        """True when all that was appended so far is committed; False when it is held in memory for now."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def tell(ok: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(_settle, future, ok)

        done = self._wait_for_last(tell)
        if done is not None:
            return done
        with outside():
            return await future

    def flush_blocking(self, timeout: float | None = None) -> bool:
        """:meth:`flush` for callers without an event loop; False also when *timeout* is over."""
        came = threading.Event()
        answer: list[bool] = []

        def tell(ok: bool) -> None:
            answer.append(ok)
            came.set()

        done = self._wait_for_last(tell)
        if done is not None:
            return done
        return came.wait(timeout) and answer[0]

    def pending(self) -> list[Row]:
        """Events that are not committed yet, in order."""
        with self._cv:
            return list(self._queue)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child of the process that it belongs to."""
        return os.getpid() != self._pid

    def abandon(self) -> None:
        """Close at once and forget what is not committed: work has not started, nothing is owed."""
        with self._cv:
            self._queue.clear()
        self.close(timeout=0.0)

    def close(self, timeout: float = 5.0) -> None:
        """Write what is left, trying for *timeout* seconds; then put it elsewhere. Twice is fine."""
        if not self.foreign:
            with self._ending:  # what two threads both found unwritten would be put elsewhere twice
                self._close(timeout)

    def _close(self, timeout: float) -> None:
        with self._cv:
            if self._closed:
                return
            self._closing_at = time.monotonic() + timeout
            self._cv.notify()
        # A writer that hangs in a dead network disk is left behind; what it holds counts as unwritten.
        self._thread.join(timeout + 10.0)
        hangs = self._thread.is_alive()
        with self._cv:
            self._closed = True
            left = list(self._queue)
        if hangs:
            self._trouble = self._trouble or "writing hangs"
        elif self._identity is None and self._db is not None:
            # The file was taken away and could not be put back: all of it is in our hands only.
            with contextlib.suppress(sqlite3.Error):
                left = [*self._db.execute("SELECT n, at, kind, rollout, data FROM events ORDER BY n"), *left]
        if not hangs:
            self._let_go()
        _stores.discard(self)
        if left:
            put_elsewhere(self.path, left, self._trouble or "it was removed")

    # ------------------------------------------------------------------ the writer's side

    def _wait_for_last(self, tell: Tell) -> bool | None:
        with self._cv:
            if self._committed >= self._last:
                return True
            if self._trouble is not None or self._closed:
                return False
            self._waiters.append((self._last, tell))
            return None

    def _work(self) -> None:
        while True:
            with self._cv:
                while not self._due():
                    self._cv.wait(self._patience())
                if not self._queue:
                    return  # closing, and nothing is left
                over = self._closing_at is not None and (
                    time.monotonic() >= self._closing_at or bool(self._guard.spoilt)
                )
                if self._trouble and over:
                    return  # closing, and time is up, or would not help
                batch = list(itertools.islice(self._queue, _CHUNK))
            trouble = self._write(batch)
            with self._cv:
                if trouble is None:
                    for _ in batch:
                        self._queue.popleft()
                    self._committed = batch[-1][0]
                    self._retry_s = 0.1
                else:
                    self._retry_at = time.monotonic() + self._retry_s
                    self._retry_s = min(self._retry_s * 2, _LONGEST_WAIT)
                was, self._trouble = self._trouble, trouble
                told = [w for w in self._waiters if trouble is not None or w[0] <= self._committed]
                self._waiters = [w for w in self._waiters if trouble is None and w[0] > self._committed]
                held = len(self._queue)
            if trouble is not None and was is None:
                self._warn(trouble)
            elif trouble is None and was is not None and not held:
                log.warning("the ledger %s can be written again; nothing was lost", self.path)
            for _, tell in told:
                tell(trouble is None)

    def _due(self) -> bool:
        if self._closing_at is not None:
            over = time.monotonic() >= self._closing_at
            return not self._queue or self._trouble is None or over or time.monotonic() >= self._retry_at
        return bool(self._queue) and (self._trouble is None or time.monotonic() >= self._retry_at)

    def _patience(self) -> float | None:
        if self._trouble is None or not self._queue:
            return None
        wake = self._retry_at
        if self._closing_at is not None:
            # Closing: try often, there is little time.
            wake = self._retry_at = min(wake, time.monotonic() + 0.1, self._closing_at)
        return max(0.0, wake - time.monotonic())

    def _write(self, rows: list[Row]) -> str | None:
        """Commit *rows* as one transaction; else why not, with nothing of it committed."""
        try:
            self._ensure_place()
            self._guard.look(self._committed - self._gaps, rows[-1][0] - self._gaps)
            db = self._db
            if db is None:
                db = self._db = self._connect()
            db.execute("BEGIN IMMEDIATE")
            # Few, wide statements: sqlite3 gives the interpreter's lock up at each, and a busy main thread
            # makes it wait up to 5 ms to get it back.
            for start in range(0, len(rows), _ROWS):
                part = rows[start : start + _ROWS]
                marks = ",".join(["(?,?,?,?,?)"] * len(part))
                db.execute(f"INSERT OR IGNORE INTO events VALUES {marks}", [v for row in part for v in row])
            db.execute("COMMIT")
            if not self.word:
                self._guard.wrote()
            return None
        except (sqlite3.Error, OSError, LedgerError) as error:
            trouble = reason(error)
            full = getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_BUSY", "SQLITE_LOCKED")
            try:
                if self._db is not None and self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            except sqlite3.Error:
                full = False
            if not full and self._identity is not None:
                self._let_go()
            return trouble

    def _ensure_place(self) -> None:
        """See that the file at the path is still the one that is open; put it back if somebody removed it."""
        if self._db is None:
            return
        try:
            here = os.stat(self.path)
            if (here.st_dev, here.st_ino) == self._identity:
                if self._guard.wal_is_gone():
                    log.warning(
                        "the WAL of the ledger %s was removed while in use; going on with a new one",
                        self.path,
                    )
                    self._let_go()  # this writes what was in it
                return
        except FileNotFoundError:
            pass
        self._identity = None
        self._guard.forget()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            raise LedgerError(f"another file took the place of the ledger {self.path}")
        for end in ("-wal", "-shm"):  # they belong to the removed file and would spoil the new one
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        log.warning("the ledger %s was removed while in use; writing it again", self.path)
        copy = sqlite3.connect(self.path, factory=self.connection, isolation_level=None)
        try:
            self._db.backup(copy)
        except BaseException:
            copy.close()
            self.path.unlink(missing_ok=True)
            raise
        copy.close()
        old, self._db = self._db, self._connect()
        with contextlib.suppress(sqlite3.Error):
            old.close()

    # ------------------------------------------------------------------ opening

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise LedgerError("it is a directory")
            free = os.statvfs(self.path.parent)
            if free.f_flag & os.ST_RDONLY:
                raise LedgerError("the filesystem is read-only")
            if not all(os.access(p, os.W_OK) for p in (self.path.parent, self.path) if p.exists()):
                raise LedgerError("no permission to write there")
            if free.f_bavail * free.f_frsize < LEAST_FREE:
                left = free.f_bavail * free.f_frsize >> 10
                raise LedgerError(
                    f"the disk is full ({left} KiB free, {LEAST_FREE >> 10} KiB needed to start)"
                )
            kind = places.filesystem(self.path.parent)
            if places.is_shared(kind):
                self.word = f"it lies on {kind}: a rollback journal is used instead of WAL"
            db = self._connect()
            self._last, count = db.execute("SELECT coalesce(max(n), 0), count(*) FROM events").fetchone()
            self._committed, self._gaps = self._last, self._last - count
            return db
        except (sqlite3.Error, OSError, LedgerError) as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be opened for writing: {reason(error)}", hint=HINT
            ) from error

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path, factory=self.connection, isolation_level=None, check_same_thread=False, timeout=5.0
        )
        try:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and application != APPLICATION:
                raise LedgerError("it is another program's SQLite file")
            if version > FORMAT:
                raise LedgerError(f"it has format {version}, this version of rlsandbox knows {FORMAT}")
            wanted = "DELETE" if self.word else "WAL"
            (mode,) = db.execute(f"PRAGMA journal_mode={wanted}").fetchone()
            if mode.upper() != wanted:
                self.word = f"SQLite offers no WAL there: journal mode {mode}"
            # WAL commits survive a killed process without an fsync each; on shared disks every one is synced.
            db.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
            db.executescript(_SCHEMA if version == 0 else "BEGIN IMMEDIATE; ROLLBACK;")
            here = os.stat(self.path)
            self._identity = (here.st_dev, here.st_ino)
            return db
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.close()
            raise

    def _let_go(self) -> None:
        db, self._db = self._db, None
        self._guard.forget()  # closing writes too
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _warn(self, trouble: str) -> None:
        if self.opening:
            return
        text = (
            f"the ledger {self.path} cannot be written ({trouble}); records are kept in memory until it can"
        )
        if self._warned:
            log.warning("%s", text)
            return
        self._warned = True
        say(text)


def _settle(future: asyncio.Future[bool], ok: bool) -> None:
    if not future.done():
        future.set_result(ok)


def _plain(value: Any) -> Any:
    """Bookkeeping stops nothing: what JSON does not know is told as arrays and scalars are, or as text."""
    listed = getattr(value, "tolist", None)
    return listed() if callable(listed) else str(value)


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def written_here(path: Path) -> bool:
    """Whether this process writes *path*, which it must then not open() itself.

    Closing such a descriptor ends every lock that SQLite holds on the file, and the next program that looks
    into it takes itself for the last one and removes the WAL.
    """
    with contextlib.suppress(OSError):
        return any(not one.closed and one.path.samefile(path) for one in list(_stores))
    return False


@atexit.register
def _close_all() -> None:
    for store in list(_stores):
        store.close(timeout=2.0)
