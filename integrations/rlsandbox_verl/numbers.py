"""What the rollouts of a job came to, and what of it a step's log gets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rlsandbox.metrics import IdleWindow, Snapshot, idle_window

Interval = tuple[float, float]
COUNTERS = ("claims", "resets", "recycled", "quarantined", "never_started")


@dataclass(frozen=True)
class Ended:
    """A rollout's end, as the process that ran it tells the pool's owner. Times: this machine's monotonic
    clock."""

    id: str
    group: str
    batch: str
    began: float
    ended: float
    completed: bool
    graded: bool
    """A reward was to be expected of it."""
    reward: float | None = None
    failure: str | None = None
    attempts: int = 1
    blocked: tuple[Interval, ...] = ()
    busy: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class Window:
    """The numbers since somebody last looked. They add up, over machines too."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    requested: int = 0
    completed: int = 0
    expected: int = 0
    rewards: tuple[float, ...] = ()
    retried: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rollouts, and completed ones."""
    batches: dict[str, float] = field(default_factory=dict)
    """Seconds from the first claim request to the last record."""

    @staticmethod
    def merge(parts: Iterable[Window]) -> Window:
        whole = Window()
        for part in parts:
            failures, groups, batches = dict(whole.failures), dict(whole.groups), dict(whole.batches)
            for kind, n in part.failures.items():
                failures[kind] = failures.get(kind, 0) + n
            for name, (n, done) in part.groups.items():
                before = groups.get(name, (0, 0))
                groups[name] = before[0] + n, before[1] + done
            for name, seconds in part.batches.items():  # no clock is shared between machines
                batches[name] = max(batches.get(name, 0.0), seconds)
            whole = Window(
                Snapshot.merge([whole.snapshot, part.snapshot]),
                whole.requested + part.requested,
                whole.completed + part.completed,
                whole.expected + part.expected,
                whole.rewards + part.rewards,
                whole.retried + part.retried,
                failures, groups, batches,
            )  # fmt: skip
        return whole

    def to_dict(self, prefix: str = "sandbox/") -> dict[str, float]:
        """The log's names and numbers; what did not happen has none."""
        flat: dict[str, float] = {}
        for name in ("ttfc", "reset", "verify"):
            if name in self.snapshot.samples:
                flat.update(self.snapshot.samples[name].summary().to_dict(f"{name}/"))
        counters = self.snapshot.counters
        flat.update({name: float(counters[name]) for name in COUNTERS if name in counters})
        if self.batches:
            flat["batch_completion_s"] = sum(self.batches.values()) / len(self.batches)
        idle = self.snapshot.idle
        if idle is not None and (self.requested or idle.blocked_s):
            flat["blocked_s"] = idle.blocked_s
            if idle.ratio is not None:
                flat["idle_ratio"] = idle.ratio
        if self.requested:
            flat["rollouts"], flat["missing"] = float(self.requested), float(self.requested - self.completed)
            flat["retried"] = float(self.retried)
            flat["coverage"] = self.completed / self.requested
            flat["groups_partial"] = float(sum(0 < done < n for n, done in self.groups.values()))
            flat["groups_lost"] = float(sum(done == 0 for _, done in self.groups.values()))
        flat.update({f"failures/{kind}": float(n) for kind, n in self.failures.items()})
        if self.expected:
            missing, total = self.expected - len(self.rewards), sum(self.rewards)
            low, high = min((0.0, *self.rewards)), max((1.0, *self.rewards))
            flat["reward_bound_low"] = (total + low * missing) / self.expected
            flat["reward_bound_high"] = (total + high * missing) / self.expected
        return {prefix + name: value for name, value in flat.items()}


class Numbers:
    """Kept by the pool's owner. A mode (``train``, ``val``) has what happened since it began; batches
    overlap in asynchronous training, and what then cannot be told apart counts for the mode that began
    last."""

    def __init__(self, metrics: Any) -> None:
        self._window = metrics.window()
        self._mode = "train"
        self._since = time.monotonic()
        self._found: dict[str, list[Window]] = {}
        self._ended: list[Ended] = []
        self._seen: deque[str] = deque(maxlen=65536)
        self.missing_in_row = 0
        self.last_failure = ""

    def begin(self, mode: str) -> None:
        """From now on what happens belongs to *mode*."""
        if mode != self._mode:
            self._take()
            self._mode = mode

    def add(self, end: Ended) -> None:
        if end.id in self._seen:  # told again because the answer was lost
            return
        self._seen.append(end.id)
        self._ended.append(end)
        if end.completed:
            self.missing_in_row = 0
        else:
            self.missing_in_row += 1
            self.last_failure = end.failure or ""

    def refused(self, why: str) -> None:
        """A rollout was never begun."""
        self.missing_in_row += 1
        self.last_failure = why

    def pop(self) -> dict[str, Window]:
        """Windows by mode, each event once."""
        self._take()
        found, self._found = self._found, {}
        return {mode: Window.merge(windows) for mode, windows in found.items()}

    def _take(self) -> None:
        now = time.monotonic()
        ended, self._ended = self._ended, []
        idle = idle_window(
            (i for end in ended for i in end.blocked), (i for end in ended for i in end.busy),
            start=self._since, end=now,
        )  # fmt: skip
        self._since = now
        window = _window(self._window.pop(), idle, ended)
        self._found.setdefault(self._mode, []).append(window)


def _window(snapshot: Snapshot, idle: IdleWindow, ended: list[Ended]) -> Window:
    groups: dict[str, tuple[int, int]] = {}
    failures: dict[str, int] = {}
    spans: dict[str, tuple[float, float]] = {}
    for end in ended:
        n, done = groups.get(end.group, (0, 0))
        groups[end.group] = n + 1, done + end.completed
        if end.failure is not None:
            failures[end.failure] = failures.get(end.failure, 0) + 1
        first, last = spans.get(end.batch, (end.began, end.ended))
        spans[end.batch] = min(first, end.began), max(last, end.ended)
    return Window(
        replace(snapshot, idle=idle),
        len(ended),
        sum(end.completed for end in ended),
        sum(end.graded for end in ended),
        tuple(end.reward for end in ended if end.reward is not None),
        sum(end.attempts > 1 for end in ended),
        failures,
        groups,
        {name: last - first for name, (first, last) in spans.items()},
    )
