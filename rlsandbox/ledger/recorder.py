"""What runs hold: a :class:`Ledger` to record rollouts in.

A rollout is recorded as asked for before any work (:meth:`Ledger.request`, then a flush); its
:class:`Entry` ends exactly once, whoever forgets it: :meth:`Ledger.close` ends what is open as cancelled, and
``reconcile`` does it as lost for a process that was killed.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import math
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LedgerError, SandboxStateError
from ..results import Failure, Record, Status
from . import lock, places, reading, redact
from .elsewhere import HINT
from .failures import jsonable
from .records import AttemptLog, Book, RolloutLog, fold, record_from, to_dict
from .store import Store

if TYPE_CHECKING:
    from ..task import Task
    from .report import Report

log = logging.getLogger("rlsandbox.ledger")

PHASES = ("queued", "provisioned", "reset", "connected", "started", "idle")


class Ledger:
    """The ledger of this process in a run. Made by :meth:`open`."""

    def __init__(self, run: str, store: Store, held: lock.RunLock, number: int, book: Book) -> None:
        self.run = run
        self.number = number
        """0 for the run's first process."""
        self.earlier = book
        """What the run's files said when this one was opened."""
        self._store = store
        self._lock = held
        self._open: dict[str, Entry] = {}
        self._ending = threading.RLock()
        self._batches = itertools.count(1 + sum(p.source == str(store.path) for p in book.processes))
        self._next: dict[str, int] = {}
        _ledgers.add(self)
        for entry in book.rollouts.values():
            self._next[entry.task_id] = max(self._next.get(entry.task_id, 0), entry.index + 1)

    def __repr__(self) -> str:
        return f"Ledger({self.path}, {len(self._open)} open rollouts)"

    @classmethod
    def open(
        cls,
        run: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> Ledger:
        """Open the run's ledger for this process; what a dead process left open in it is closed as lost.

        Args:
            run: the run's name; None makes one up.
            path: a ``.db`` file, or a directory for ``<run>.db``; None is ``$RLSANDBOX_HOME``. The file of a
                living process is left alone: further ones of the run write beside it.
            facts: about the run (backend, isolation ...), for reports.

        Raises:
            ConfigError: the name is not usable.
            LedgerError: it cannot be written there. No work has been started.
        """
        from .reconcile import close_lost

        run = places.check_run_name(run) if run is not None else places.new_run_name()
        first = places.ledger_file(run, path)
        held, number, file = _claim_file(first)
        store = None
        try:
            store = Store(file)
            if not held.supported:
                log.warning("%s: no file locks there; processes of other machines are not seen", file)
            if store.word:
                log.warning("ledger %s: %s", file, store.word)
            others = [p for p in places.siblings(first) if p != file]
            book = reading.read([file, *others])
            mine = fold(reading.stream(file))
            ended = close_lost(store, mine)
            if ended:
                book = reading.read([file, *others]) if store.flush_blocking(10) else book
            about = {"run": run, "pid": os.getpid(), "host": os.uname().nodename}
            store.append("run", None, {**redact.data(dict(facts or {})), **about})
            if not store.flush_blocking(10):
                raise LedgerError(f"the ledger {file} cannot be written: {store.trouble or 'it hangs'}")
            store.opening = False
            return cls(run, store, held, number, book)
        except BaseException:
            if store is not None:
                store.abandon()
            held.release()
            raise

    @property
    def path(self) -> Path:
        return self._store.path

    @property
    def trouble(self) -> str | None:
        """Why records are held in memory just now; None when all is well."""
        return self._store.trouble

    def now(self) -> float:
        """The ledger's clock: seconds since the epoch, advancing monotonically."""
        return self._store.now()

    def new_batch(self) -> str:
        """A name for the rollouts that are asked for together."""
        return f"{self._writer}#{next(self._batches)}"

    def new_group(self, task: Task) -> str:
        """A name for siblings of *task* that are asked for next."""
        return f"{task.id}@{self._next.get(task.id, 0)}{f'+{self.number}' if self.number else ''}"

    def request(
        self,
        task: Task,
        *,
        group: str | None = None,
        index: int | None = None,
        batch: str | None = None,
        again: RolloutLog | None = None,
    ) -> Entry:
        """Record that a rollout of *task* is asked for. Flush before its work begins.

        Args:
            group: name of its siblings; default one of its own.
            index: its number among the task's rollouts of this run; default the next one.
            batch: from :meth:`new_batch`.
            again: an earlier, unfinished rollout that is continued under its own id.
        """
        if again is not None:
            id_, index, group = again.id, again.index, again.group
        else:
            index = self._next.get(task.id, 0) if index is None else index
            group = self.new_group(task) if group is None else group
            id_ = f"{self._writer}/{task.id}/{index}"
        if id_ in self._open:
            raise SandboxStateError(f"rollout {id_} is asked for already and has not ended", task=task.id)
        self._next[task.id] = max(self._next.get(task.id, 0), index + 1)
        image = task.image or (task.spec.image if task.spec else None)
        entry = Entry(
            self,
            RolloutLog(
                id=id_,
                run=self.run,
                task_id=task.id,
                index=index,
                group=group,
                batch=batch or "",
                requested_at=self.now(),
                expects_reward=task.grader is not None,
                image=image,
                metadata=dict(task.metadata),
                resumed=0 if again is None else again.resumed + 1,
            ),
        )
        asked = {
            "run": self.run, "task": task.id, "index": index, "group": group, "batch": batch or "",
            "reward": task.grader is not None, "image": image, "meta": dict(task.metadata),
        }  # fmt: skip
        entry._append("request", asked, at=entry.log.requested_at)
        self._open[id_] = entry
        return entry

    def note(self, kind: str, cause: str, **data: Any) -> None:
        """Record a fact of no rollout: residue, a failed revoke, a provision that failed. Never raises."""
        try:
            self._store.append("note", None, redact.data({"kind": kind, "cause": cause, **data}))
        except Exception:
            log.warning("could not note %s: %s", kind, redact.text(cause), exc_info=True)

    async def flush(self) -> bool:
        """True when all that was recorded so far is on disk; False when it is held in memory for now."""
        return await self._store.flush()

    def flush_blocking(self, timeout: float | None = None) -> bool:
        return self._store.flush_blocking(timeout)

    def book(self) -> Book:
        """What all processes of the run have recorded so far."""
        self.flush_blocking(10)
        waiting = [reading.event_of(row, str(self.path)) for row in self._store.pending()]
        first = places.first_of(self.path) if self.number else self.path
        files = [path for path in places.siblings(first) if path.exists()]
        return reading.read(files, waiting)

    def records(self) -> list[Record]:
        """The ends so far, in the order in which the rollouts were asked for."""
        return [entry.record for entry in self.book().rollouts.values() if entry.record is not None]

    def report(self) -> Report:
        from .report import Report

        return Report.of(self.book())

    def close(self, timeout: float = 5.0) -> None:
        """End what is open as cancelled and close the file; takes about *timeout* at most. Twice is fine."""
        if self._store.foreign:
            return
        with self._ending:
            if not self._store.closed:
                self.cancel_open()
                self._store.append("close", None, {"pid": os.getpid()})
            self._store.close(timeout)
            self._lock.release()

    def cancel_open(self) -> None:
        """End what is open as cancelled: the pool is closed, nobody drives it any more."""
        for entry in list(self._open.values()):
            entry.cancel("the pool was closed before the rollout ended")

    async def aclose(self, timeout: float = 5.0) -> None:
        """:meth:`close` without blocking the event loop."""
        await asyncio.to_thread(self.close, timeout)

    @property
    def _writer(self) -> str:
        return f"{self.run}+{self.number}" if self.number else self.run


class Entry:
    """A rollout that was asked for and has not ended."""

    def __init__(self, ledger: Ledger, log_: RolloutLog) -> None:
        self._ledger = ledger
        self.log = log_

    def __repr__(self) -> str:
        return f"Entry({self.id}, {self.log.record.status if self.log.record else 'open'})"

    @property
    def id(self) -> str:
        return self.log.id

    @property
    def record(self) -> Record | None:
        """Its end, once it has one."""
        return self.log.record

    def attempt(self) -> Attempt:
        """A new attempt begins: a sandbox is asked for."""
        attempt = Attempt(self, AttemptLog(n=len(self.log.attempts) + 1, asked_at=self._ledger.now()))
        self.log.attempts.append(attempt.log)
        self._append("attempt", {"n": attempt.log.n}, at=attempt.log.asked_at)
        return attempt

    def end(
        self,
        status: Status,
        *,
        reward: float | None = None,
        passed: bool | None = None,
        value: Any = None,
        failure: Failure | None = None,
        truncated: str | None = None,
    ) -> Record:
        """Its one end. Secrets are replaced; *value* comes back as JSON keeps it.

        Raises:
            TypeError: *value* is neither JSON-able nor text; the rollout has not ended.
            ValueError: *reward* is no finite number; the rollout has not ended.
            SandboxStateError: it has ended already.
        """
        if self.log.record is not None:
            raise SandboxStateError(f"rollout {self.id} has ended already: {self.log.record.status}")
        if reward is not None:
            reward = float(reward)
            if not math.isfinite(reward):
                raise ValueError(f"a reward must be a finite number or None, not {reward}")
        kept = jsonable(value)
        now = self._ledger.now()
        attempts = self.log.attempts
        last = attempts[-1] if attempts else None
        with_place = next((a for a in reversed(attempts) if a.sandbox is not None), None)
        record = Record(
            task_id=self.log.task_id,
            index=self.log.index,
            attempts=len(attempts),
            status=status,
            reward=reward,
            passed=passed,
            value=kept,
            failure=failure,
            ttfc_s=last.ttfc_s if last else None,
            group=self.log.group,
            run=self.log.run,
            id=self.id,
            started_at=attempts[0].asked_at if attempts else self.log.requested_at,
            ended_at=now,
            node=with_place.node if with_place else None,
            image=(with_place.image if with_place else None) or self.log.image,
            truncated=truncated,
            ran=self.log.ran,
        )
        data = redact.data(to_dict(record))
        self._append("end", data, at=now)
        self.log.record = record_from(data)
        self._ledger._open.pop(self.id, None)
        return self.log.record

    def cancel(self, cause: str) -> Record | None:
        """End it as cancelled unless it has ended."""
        if self.log.record is not None:
            return None
        kind = "cancelled" if self.log.ran else "never_ran"
        failure = Failure(kind, self.log.phase, redact.text(cause), retryable=True, infrastructure=True)
        return self.end("cancelled", failure=failure)

    def _append(self, kind: str, data: dict[str, Any], at: float | None = None) -> None:
        self._ledger._store.append(kind, self.id, {**redact.data(data), "t": self.log.resumed}, at)


class Attempt:
    """One try of a rollout in one sandbox."""

    def __init__(self, entry: Entry, log_: AttemptLog) -> None:
        self._entry = entry
        self.log = log_

    @property
    def n(self) -> int:
        return self.log.n

    def sandbox(self, sandbox: Any, *, from_checkpoint: str | None = None) -> None:
        """The sandbox was handed over; it stands on *from_checkpoint*, of an earlier attempt."""
        spec = getattr(sandbox, "spec", None)
        mine = self.log
        mine.handed_at = self._entry._ledger.now()
        mine.sandbox = str(sandbox.id)
        mine.node = getattr(sandbox, "node", None)
        mine.image = getattr(spec, "image", None)
        mine.isolation = getattr(spec, "isolation", None)
        mode = getattr(sandbox, "reset_mode", None)
        mine.reset_mode = None if mode is None else str(mode)
        mine.from_checkpoint = from_checkpoint
        names = ("sandbox", "node", "image", "reset_mode", "isolation", "from_checkpoint")
        known = {name: getattr(mine, name) for name in names if getattr(mine, name) is not None}
        self._entry._append("sandbox", {"n": self.n, **known}, at=mine.handed_at)

    def checkpoint(self, snapshot: str, size: int | None = None) -> None:
        self.log.checkpoint = snapshot
        self._entry._append("checkpoint", {"n": self.n, "snapshot": snapshot, "bytes": size})

    def end(self, sandbox: Any = None, failure: Failure | None = None) -> None:
        """It is over, well or not; *sandbox* tells its times. Once."""
        mine = self.log
        if mine.ended_at is not None or self._entry._ledger._store.closed:
            return
        mine.ended_at = self._entry._ledger.now()
        mine.failure = failure
        data: dict[str, Any] = {"n": self.n}
        if sandbox is not None:
            times = getattr(sandbox, "times", None) or {}
            mine.times = {str(name): float(value) for name, value in dict(times).items() if value is not None}
            mine.ttfc_s = getattr(sandbox, "ttfc_s", None)
            data |= {"times": mine.times, "ttfc_s": mine.ttfc_s}
        if failure is not None:
            data["failure"] = to_dict(failure)
        self._entry._append("attempt_end", data, at=mine.ended_at)


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter ends and nobody has closed the pool: what is open was not lost, it was left."""
    for ledger in list(_ledgers):
        ledger.close(timeout=2.0)


def _claim_file(first: Path) -> tuple[lock.RunLock, int, Path]:
    """The first of the run's files that no living process writes, its lock held."""
    for number in range(10_000):
        file = places.sibling(first, number)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            held = lock.take(file)
        except OSError as error:
            raise LedgerError(
                f"the ledger {file} cannot be opened for writing: {(error.strerror or str(error)).lower()}",
                hint=HINT,
            ) from error
        if held is not None:
            return held, number, file
    raise LedgerError(f"10,000 processes hold ledgers beside {first}")
