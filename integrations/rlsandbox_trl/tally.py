"""How many rollouts were asked for and what they were worth, since somebody last looked."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tally:
    """Of the rollouts that ended in a window: how many, how many with a reward, and its sum. They add up."""

    requested: int = 0
    completed: int = 0
    expected: int = 0
    """A reward was to be expected of."""
    rewarded: int = 0
    reward: float = 0.0
    skipped: int = 0
    """Groups without a scored rollout."""
    low: float = 0.0
    high: float = 1.0

    @staticmethod
    def merge(parts: Iterable[Tally]) -> Tally:
        parts = list(parts)
        return Tally(
            sum(p.requested for p in parts),
            sum(p.completed for p in parts),
            sum(p.expected for p in parts),
            sum(p.rewarded for p in parts),
            sum(p.reward for p in parts),
            sum(p.skipped for p in parts),
            min((p.low for p in parts), default=0.0),
            max((p.high for p in parts), default=1.0),
        )

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """``coverage``, and the bounds of the mean reward, whatever the missing ones were worth."""
        flat: dict[str, float] = {}
        if self.requested:
            flat[f"{prefix}coverage"] = self.completed / self.requested
            flat[f"{prefix}groups_skipped"] = float(self.skipped)
        if self.expected:
            missing = self.expected - self.rewarded
            flat[f"{prefix}reward_bound_low"] = (self.reward + self.low * missing) / self.expected
            flat[f"{prefix}reward_bound_high"] = (self.reward + self.high * missing) / self.expected
        return flat


class Counter:
    """Counts for one pool; :meth:`pop` takes what is new. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Tally()

    def ended(self, *, completed: bool, expected: bool, reward: float | None) -> None:
        value = 0.0 if reward is None else reward
        one = Tally(1, int(completed), int(expected), int(reward is not None), value, 0, value, value)
        self._add(one)

    def skipped(self, groups: int) -> None:
        """Groups all of whose rollouts infrastructure broke."""
        self._add(Tally(skipped=groups))

    def _add(self, one: Tally) -> None:
        with self._lock:
            self._now = Tally.merge([self._now, one])

    def pop(self) -> Tally:
        with self._lock:
            found, self._now = self._now, Tally()
            return found


_counters: weakref.WeakKeyDictionary[Any, Counter] = weakref.WeakKeyDictionary()


def counter_of(pool: Any) -> Counter:
    """The pool's counter."""
    return _counters.setdefault(pool, Counter())
