"""Accelerator idle ratio, defined once.

The idle time of a window is the union of the intervals in which the trainer was blocked on sandboxes
(claims, commands, resets, verification) while no generation or training was in progress; the ratio is idle
time over wall time. Windows of several steps or ranks are accumulated (:meth:`IdleWindow.merge`), never
averaged. What a device measured itself stands beside it: :mod:`rlsandbox.metrics.device`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import ConfigError

Interval = tuple[float, float]


@dataclass(frozen=True)
class IdleWindow:
    """What one window came to, in seconds.

    Args:
        wall_s: length of the window (of several merged windows, their sum).
        blocked_s: somebody waited for a sandbox.
        busy_s: generation or training was in progress.
        idle_s: blocked and not busy.
    """

    wall_s: float
    blocked_s: float
    busy_s: float
    idle_s: float

    @property
    def ratio(self) -> float | None:
        """Idle over wall time; None for a window without length."""
        return self.idle_s / self.wall_s if self.wall_s > 0 else None

    @staticmethod
    def merge(parts: Iterable[IdleWindow]) -> IdleWindow:
        """The windows of several steps or ranks as one."""
        found = list(parts)
        return IdleWindow(
            sum(p.wall_s for p in found),
            sum(p.blocked_s for p in found),
            sum(p.busy_s for p in found),
            sum(p.idle_s for p in found),
        )

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        flat = {f"{prefix}blocked_s": self.blocked_s, f"{prefix}accelerator_busy_s": self.busy_s}
        if self.ratio is not None:
            flat[f"{prefix}idle_ratio"] = self.ratio
        return flat


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end < start:
            raise ConfigError(f"an interval ends before it begins: {start} .. {end}")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def idle_window(
    blocked: Iterable[Interval], busy: Iterable[Interval], *, start: float, end: float
) -> IdleWindow:
    """The window *start* .. *end* from intervals that were recorded elsewhere on the same clock."""

    def clipped(intervals: Iterable[Interval]) -> list[Interval]:
        return union((max(a, start), min(b, end)) for a, b in intervals if a < end and b > start)

    def length(intervals: list[Interval]) -> float:
        return sum(b - a for a, b in intervals)

    waiting, working = clipped(blocked), clipped(busy)
    either = length(union([*waiting, *working]))
    return IdleWindow(max(0.0, end - start), length(waiting), length(working), either - length(working))


class IdleMeter:
    """Accumulates as it happens, in constant memory. Safe to use from any thread and task.

    ``with meter.blocked():`` around waiting for sandboxes, ``with meter.busy():`` around generation and
    training; both may nest and overlap in any way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._start = self._last = clock()
        self._blocked = self._busy = 0
        self._blocked_s = self._busy_s = self._idle_s = 0.0
        self.used = False  # until somebody says what goes on, a ratio would be made up

    def _account(self, blocked: int = 0, busy: int = 0) -> IdleWindow:
        with self._lock:
            now = max(self._clock(), self._last)
            passed, self._last = now - self._last, now
            if self._blocked:
                self._blocked_s += passed
            if self._busy:
                self._busy_s += passed
            if self._blocked and not self._busy:
                self._idle_s += passed
            self._blocked += blocked
            self._busy += busy
            self.used |= bool(blocked or busy)
            return IdleWindow(now - self._start, self._blocked_s, self._busy_s, self._idle_s)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The trainer waits for sandboxes."""
        self._account(blocked=1)
        try:
            yield
        finally:
            self._account(blocked=-1)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The accelerator generates or trains."""
        self._account(busy=1)
        try:
            yield
        finally:
            self._account(busy=-1)

    def total(self) -> IdleWindow:
        """Since the meter was made."""
        return self._account()

    def window(self) -> IdleReader:
        """A reader of its own for the time from now on."""
        return IdleReader(self)


class IdleReader:
    """Takes the time that passed since it was last asked; an interval across the border counts in both."""

    def __init__(self, meter: IdleMeter) -> None:
        self._meter = meter
        self._mark = meter.total()

    def pop(self) -> IdleWindow:
        """The time since the last :meth:`pop` (or since the reader was made)."""
        total, mark = self._meter.total(), self._mark
        self._mark = total
        return IdleWindow(
            total.wall_s - mark.wall_s,
            total.blocked_s - mark.blocked_s,
            total.busy_s - mark.busy_s,
            total.idle_s - mark.idle_s,
        )
