"""What a ledger says: events as they are written, and what they add up to.

Events are only ever appended. Of one rollout (``id`` = run/task/index):

``request``      before any work: task, index, group, batch, is a reward expected; ``t`` counts resumes
``attempt``      a sandbox is asked for
``sandbox``      it was handed over: which one, where, from what (an earlier attempt's checkpoint?)
``checkpoint``   a snapshot the next attempt would start from
``attempt_end``  its times, and its failure if it had one
``end``          exactly one a request: completed, failed, lost or cancelled

Beside those: ``run`` (a process opened the file), ``note`` (a fact of no rollout: residue, a failed
revoke ...), ``close`` (the process ended in good order).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ..results import Failure, Record

_OF_FAILURE = frozenset(f.name for f in fields(Failure))
_OF_RECORD = frozenset(f.name for f in fields(Record))

FORMAT = 1
"""Of the events. A reader refuses a higher one."""


class Event(NamedTuple):
    """A line of a ledger. ``at``: seconds since the epoch, advancing with the writer's monotonic clock."""

    n: int
    at: float
    kind: str
    rollout: str | None
    data: dict[str, Any]
    source: str = ""


@dataclass(slots=True)
class AttemptLog:
    """One try of a rollout in one sandbox. What did not happen is None."""

    n: int
    asked_at: float
    handed_at: float | None = None
    ended_at: float | None = None
    sandbox: str | None = None
    node: str | None = None
    image: str | None = None
    reset_mode: str | None = None
    isolation: str | None = None
    times: dict[str, float] = field(default_factory=dict)
    ttfc_s: float | None = None
    failure: Failure | None = None
    checkpoint: str | None = None
    """The last one that it made."""
    from_checkpoint: str | None = None
    """The one of an earlier attempt that it started from."""


@dataclass(slots=True)
class RolloutLog:
    """A rollout that was asked for: its attempts and, once it has one, its end."""

    id: str
    run: str
    task_id: str
    index: int
    group: str
    batch: str
    requested_at: float
    expects_reward: bool = False
    image: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    resumed: int = 0
    attempts: list[AttemptLog] = field(default_factory=list)
    record: Record | None = None

    @property
    def ran(self) -> bool:
        return any(attempt.handed_at is not None for attempt in self.attempts)

    @property
    def phase(self) -> str:
        """Where it is, as far as the ledger knows."""
        if not self.attempts:
            return "claim"
        return "claim" if self.attempts[-1].handed_at is None else "policy"

    @property
    def node(self) -> str | None:
        """Of the last attempt that had one."""
        return next((a.node for a in reversed(self.attempts) if a.node is not None), None)

    @property
    def reward_missing(self) -> bool:
        """Whether a reward was expected of it and there is none."""
        record = self.record
        if record is None or record.status != "completed":
            return True
        return self.expects_reward and record.reward is None


@dataclass
class Process:
    """A process that wrote a ledger file."""

    run: str
    source: str
    started_at: float
    pid: int = 0
    host: str = ""
    closed_at: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Note:
    """A fact of no rollout."""

    at: float
    kind: str
    cause: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Book:
    """What the events of one or several files add up to."""

    rollouts: dict[str, RolloutLog] = field(default_factory=dict)
    """By id, in the order in which they were first asked for."""
    processes: list[Process] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def open(self) -> list[RolloutLog]:
        """Rollouts without an end."""
        return [log for log in self.rollouts.values() if log.record is None]


def fold(events: Iterable[Event]) -> Book:
    """Add events up. Those of one file must come in order; files may come in any order."""
    book = Book()
    seen: dict[tuple[str, int], RolloutLog] = {}
    first: dict[str, float] = {}
    sources: set[str] = set()
    early: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        if event.rollout is None:
            _fold_other(book, event)
            continue
        key = (event.rollout, int(event.data.get("t", 0)))
        if event.kind == "request":
            if key in seen:
                continue
            log = _requested(event)
            seen[key] = log
            sources.add(event.source)
            first[log.id] = min(log.requested_at, first.get(log.id, log.requested_at))
            current = book.rollouts.get(log.id)
            if current is None or current.resumed < log.resumed:
                book.rollouts[log.id] = log
            for later in early.pop(key, ()):
                _fold_rollout(log, later)
        elif key in seen:
            _fold_rollout(seen[key], event)
        else:
            # Its request stands in another file (a dump beside a ledger that could not be written).
            early.setdefault(key, []).append(event)
    if len(sources) > 1:  # one file's order is its own, whatever the clock did meanwhile
        book.rollouts = dict(sorted(book.rollouts.items(), key=lambda item: first[item[0]]))
    return book


def _requested(event: Event) -> RolloutLog:
    data = event.data
    return RolloutLog(
        id=str(event.rollout),
        run=str(data.get("run", "")),
        task_id=str(data.get("task", "")),
        index=int(data.get("index", 0)),
        group=str(data.get("group", "")),
        batch=str(data.get("batch", "")),
        requested_at=event.at,
        expects_reward=bool(data.get("reward", False)),
        image=data.get("image"),
        metadata=dict(data.get("meta") or {}),
        resumed=int(data.get("t", 0)),
    )


def _fold_rollout(log: RolloutLog, event: Event) -> None:
    data = event.data
    if event.kind == "end":
        # The first end counts: a second one is never written by us, a merged dump may repeat it.
        if log.record is None:
            log.record = record_from(data)
        return
    if event.kind == "attempt":
        log.attempts.append(AttemptLog(n=int(data["n"]), asked_at=event.at))
        return
    attempt = next((a for a in reversed(log.attempts) if a.n == data.get("n")), None)
    if attempt is None:
        return
    if event.kind == "sandbox":
        attempt.handed_at = event.at
        for name in ("sandbox", "node", "image", "reset_mode", "isolation", "from_checkpoint"):
            setattr(attempt, name, data.get(name))
    elif event.kind == "checkpoint":
        attempt.checkpoint = data.get("snapshot")
    elif event.kind == "attempt_end":
        attempt.ended_at = event.at
        attempt.times = dict(data.get("times") or {})
        attempt.ttfc_s = data.get("ttfc_s")
        attempt.failure = failure_from(data.get("failure"))


def _fold_other(book: Book, event: Event) -> None:
    data = event.data
    if event.kind == "run":
        facts = {k: v for k, v in data.items() if k not in ("run", "pid", "host")}
        pid, host = int(data.get("pid", 0)), str(data.get("host", ""))
        process = Process(str(data.get("run", "")), event.source, event.at, pid, host, facts=facts)
        book.processes.append(process)
    elif event.kind == "close":
        for process in reversed(book.processes):
            if process.source == event.source:
                process.closed_at = event.at
                break
    elif event.kind == "note":
        rest = {k: v for k, v in data.items() if k not in ("kind", "cause")}
        book.notes.append(Note(event.at, str(data.get("kind", "")), str(data.get("cause", "")), rest))


def to_dict(value: Failure | Record) -> dict[str, Any]:
    """JSON-like data of a failure or a record; fields that say nothing are left out."""
    out: dict[str, Any] = {}
    for f in fields(value):
        item = getattr(value, f.name)
        if isinstance(item, Failure):
            item = to_dict(item)
        if item is None or (item == "" and f.default == ""):  # a policy's value may well be an empty text
            continue
        out[f.name] = item
    return out


def failure_from(data: dict[str, Any] | None) -> Failure | None:
    if data is None:
        return None
    given = {k: v for k, v in data.items() if k in _OF_FAILURE}
    blank: dict[str, Any] = {
        "kind": "unknown", "phase": "", "cause": "", "retryable": False, "infrastructure": True
    }  # fmt: skip
    return Failure(**{**blank, **given})


def record_from(data: dict[str, Any]) -> Record:
    """The record that :func:`to_dict` made *data* of; fields of a later version are passed over."""
    given = {k: v for k, v in data.items() if k in _OF_RECORD}
    given["failure"] = failure_from(data.get("failure"))
    blank: dict[str, Any] = {"task_id": "", "index": 0, "attempts": 0, "status": "lost"}
    return Record(**{**blank, **given})
