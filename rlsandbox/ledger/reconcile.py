"""Closing what dead processes left open.

A rollout that was asked for and has no end is *lost* once nobody lives who could end it: its reward is
missing, it is no failure of its own, and it may be run again (``resume=True``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LedgerError
from ..results import Failure, Record
from . import lock, places, reading
from .elsewhere import reason
from .records import Book, RolloutLog, fold, to_dict
from .store import Store


@dataclass
class Reconciled:
    """What :func:`reconcile` found in one file."""

    path: Path
    requested: int = 0
    lost: list[Record] = field(default_factory=list)
    """Closed just now (or would be, in a dry run)."""
    skipped: str = ""
    """Why the file was left alone, when it was."""


def reconcile(files: list[Path], *, dry_run: bool = False) -> list[Reconciled]:
    """Close as lost every rollout without an end in those of *files* that no living process writes.

    Dumps (``.jsonl``) among *files* are read first: what ended there is not lost.
    """
    dumps = [path for path in files if path.suffix == ".jsonl"]
    reading.read(dumps)
    return [_one(path, dumps, dry_run) for path in files if path.suffix != ".jsonl"]


def _one(path: Path, dumps: list[Path], dry_run: bool) -> Reconciled:
    out = Reconciled(path)
    mine = fold(reading.stream(path))
    out.requested = len(mine.rollouts)
    host = mine.processes[-1].host if mine.processes else ""
    living = lock.alive(path, host=host)
    if living is None:
        where = host or "another machine"
        out.skipped = (
            "its lock may not be read: run this as the user whose ledger it is"
            if lock.is_hidden(path)
            else f"it was written on {where} and the filesystem has no locks: run this there"
        )
        return out
    if dry_run and not living:
        out.lost = [_lost(entry, mine, entry.requested_at) for entry in _still_open(path, mine, dumps)]
        return out
    try:
        held = lock.take(path) if not living else None
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be written: {reason(error)}") from error
    if held is None:
        out.skipped = "its process is alive"
        return out
    try:
        # Read again under the lock: the process may have ended in good order a moment ago.
        mine = fold(reading.stream(path))
        mine.rollouts = {entry.id: entry for entry in _still_open(path, mine, dumps)}
        if mine.rollouts:
            store = Store(path)
            out.lost = close_lost(store, mine)
            written = store.flush_blocking(30)
            store.close()
            if not written:
                raise LedgerError(f"the ledger {path} cannot be written: {store.trouble or 'it hangs'}")
    finally:
        held.release()
    return out


def _still_open(path: Path, mine: Book, dumps: list[Path]) -> list[RolloutLog]:
    """Rollouts of this file that no other file of the run, and no dump, has an end of."""
    whole = reading.read([*places.siblings(places.first_of(path)), *dumps])
    return [entry for entry in whole.open() if entry.id in mine.rollouts]


def close_lost(store: Store, book: Book) -> list[Record]:
    """Append the end *lost* for every open rollout of *book*, whose writer is known to be dead."""
    ends = []
    for entry in book.open():
        record = _lost(entry, book, store.now())
        store.append("end", entry.id, {**to_dict(record), "t": entry.resumed}, record.ended_at)
        ends.append(record)
    return ends


def _lost(entry: RolloutLog, book: Book, now: float) -> Record:
    writer = book.processes[-1] if book.processes else None
    who = f"process {writer.pid} on {writer.host}" if writer else "its process"
    place = next((a for a in reversed(entry.attempts) if a.sandbox is not None), None)
    return Record(
        task_id=entry.task_id,
        index=entry.index,
        attempts=len(entry.attempts),
        status="lost",
        failure=Failure(
            "lost", entry.phase, f"{who} ended without a word about it", retryable=True, infrastructure=True
        ),
        group=entry.group,
        run=entry.run,
        id=entry.id,
        started_at=entry.attempts[0].asked_at if entry.attempts else entry.requested_at,
        ended_at=now,
        node=place.node if place else None,
        image=(place.image if place else None) or entry.image,
        ran=bool(entry.attempts),  # a hand-over just before the kill may not be on record
    )
