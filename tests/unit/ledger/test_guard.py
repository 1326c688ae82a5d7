"""A ledger that is in use, and what others do to its file meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsandbox.ledger import Ledger, reading
from rlsandbox.ledger.elsewhere import LedgerWarning
from rlsandbox.ledger.store import Store
from rlsandbox.task import Task

LOOK = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); print(*db.execute(sys.argv[2])); db.close()"


def look(path: Path, statement: str = "SELECT count(*) FROM events") -> str:
    """What another program sees; opened for writing and closed again, as the sqlite3 shell does."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(path), statement], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_who_only_looks_takes_nothing_away(tmp_path: Path) -> None:
    ledger = Ledger.open("run", tmp_path)
    entry = ledger.request(Task(id="a"))
    assert ledger.flush_blocking(10)
    assert len(ledger.book().rollouts) == 1
    assert reading.is_ours(ledger.path)
    assert reading.read([ledger.path]).rollouts
    wal = ledger.path.with_name("run.db-wal")
    before = wal.stat().st_ino
    assert look(ledger.path) == "(2,)"
    assert wal.stat().st_ino == before, "our locks were gone: the other took itself for the last one"
    entry.end("completed", value="done")
    assert ledger.flush_blocking(10)
    assert look(ledger.path) == "(3,)", "a commit that a reader cannot see dies with us"
    ledger.close()


def test_a_wal_that_is_removed_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "a.db")
    store.append("note", "first", {})
    assert store.flush_blocking(10)
    (tmp_path / "a.db-wal").unlink()
    store.append("note", "second", {})
    assert store.flush_blocking(10)
    assert look(store.path, "SELECT rollout FROM events ORDER BY n") == "('first',) ('second',)"
    assert "was removed while in use" in caplog.text
    store.close()


def damage(path: Path, other: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def cut(path: Path, other: Path) -> None:
    os.truncate(path, 5000)


def replace_by_another(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)  # as cp does: the same inode
    shutil.copyfile(f"{other}-wal", f"{path}-wal")


def spoil_the_wal(path: Path, other: Path) -> None:
    wal = path.with_name(path.name + "-wal")
    wal.write_bytes(b"x" * wal.stat().st_size)


@pytest.mark.parametrize(
    ("how", "events"),  # so few are all in the WAL, so many have been brought into the file
    [
        (damage, 1500),
        (cut, 1500),
        (replace_by_another, 1500),
        (replace_by_another, 300),
        (spoil_the_wal, 300),
    ],
)
def test_a_file_that_is_written_over_is_noticed_by_who_writes_it(
    tmp_path: Path, how: Callable[[Path, Path], None], events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))
    other = Store(tmp_path / "other.db")
    other.append("note", "of another run", {})
    assert other.flush_blocking(10)
    store = Store(tmp_path / "a.db")
    for i in range(events):
        store.append("note", f"r/{i}", {"text": "x" * 3000})
    assert store.flush_blocking(10)
    child = os.fork()
    if child == 0:  # another process: ours must not open() the file
        try:
            how(store.path, other.path)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.opening = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.append("note", "after", {})
        assert not store.flush_blocking(10)
        assert "something else wrote over it while it was in use" in (store.trouble or "")
        assert f"of the {events} events that were in it some or all are gone" in (store.trouble or "")
        store.close(timeout=5.0)
    said = [str(w.message) for w in caught if w.category is LedgerWarning]
    assert "records are kept in memory" in said[0]
    assert "1 events of 1 rollouts could not be written" in said[1]
    assert "something else wrote over it" in said[1]
    (dump,) = tmp_path.glob("a-*.jsonl")
    assert [event.rollout for event in reading.events_of(dump)] == ["after"]
    other.close()


@pytest.mark.parametrize(
    "what", ["PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA wal_checkpoint(PASSIVE)", "SELECT 1"]
)
def test_a_change_that_takes_nothing_away_is_none(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "a.db")
    store.opening = False
    for i in range(20):
        store.append("note", f"r/{i}", {"text": "x" * 3000})
    assert store.flush_blocking(10)
    look(store.path, what)
    os.utime(store.path)
    store.append("note", "after", {})
    assert store.flush_blocking(10)
    store.close()
    assert len(reading.events_of(store.path)) == 21
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
