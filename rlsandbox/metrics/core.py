"""A pool's numbers: :class:`Metrics`.

Promises: safe from any thread; counters only grow; a window (:meth:`Metrics.window`) sees every event
exactly once, whoever else reads. Refuses: to invent a number for what did not happen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from .series import Samples, Series
from .ttfc import PARTS, TtfcSample

_SERIES = {
    "ttfc": "Time to first command: from needing a sandbox until its first command runs, less idle.",
    "reset": "Putting a used sandbox back to its baseline.",
    "verify": "Checking from outside that a sandbox is back at its baseline.",
    "prime": "Running a task's setup and files into a primed layer.",
    "batch": "First claim request of a batch until its last rollout's record.",
}


@dataclass(frozen=True)
class Snapshot:
    """The numbers of one window: samples by series, events by counter. Picklable."""

    samples: dict[str, Samples] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def merge(parts: Iterable[Snapshot]) -> Snapshot:
        """One window out of those of several processes: counters add up, percentiles stay exact."""
        samples: dict[str, list[Samples]] = {}
        counters: dict[str, int] = {}
        for part in parts:
            for name, found in part.samples.items():
                samples.setdefault(name, []).append(found)
            for name, n in part.counters.items():
                counters[name] = counters.get(name, 0) + n
        return Snapshot({name: Samples.merge(found) for name, found in samples.items()}, counters)

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """Flat names for a trainer's log: ``ttfc/p50``, ``claims``, ``failures/oom``; no sample, no name."""
        flat: dict[str, float] = {}
        for name, samples in self.samples.items():
            flat.update(samples.summary().to_dict(f"{prefix}{name}/"))
        flat.update({prefix + name: float(n) for name, n in self.counters.items()})
        return flat


class Metrics:
    """Series ``ttfc``, ``reset``, ``verify``, ``prime``, ``batch``, and counters.

    Counters have the names of what they count: ``claims``, ``never_started``, ``provisions``, ``resets``,
    ``recycled``, ``quarantined``, ``disposed``, ``failures/<kind>`` and whatever else is given to
    :meth:`count`.
    """

    ttfc: Series
    reset: Series
    verify: Series
    prime: Series
    batch: Series

    def __init__(self) -> None:
        self._series = {name: Series(name, help=text) for name, text in _SERIES.items()}
        for part in (*PARTS, "idle"):
            self._series[f"ttfc_{part}"] = Series(f"ttfc_{part}", help=f"The part {part} of claims.")
        for name in _SERIES:
            setattr(self, name, self._series[name])
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}

    def count(self, name: str, n: int = 1) -> None:
        """*n* more of the events called *name*."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + n

    def failure(self, kind: str) -> None:
        """A failure of *kind*: counter ``failures/<kind>``."""
        self.count(f"failures/{kind}")

    def record_ttfc(self, sample: TtfcSample) -> None:
        """What one claim waited for; a claim that never started is censored, and counted as such."""
        self.ttfc.add(sample.ttfc_s, censored=sample.never_started)
        for part, seconds in (*sample.parts().items(), ("idle", sample.idle_s)):
            if not (sample.never_started and part == "started"):
                self._series[f"ttfc_{part}"].add(seconds)
        if sample.never_started:
            self.count("never_started")

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def series(self) -> dict[str, Series]:
        """Every series by name, the parts of TTFC (``ttfc_queued`` ...) too."""
        return dict(self._series)

    def snapshot(self) -> Snapshot:
        """Everything since the pool was made."""
        return Snapshot({name: s.samples() for name, s in self._series.items()}, self.counters())

    def window(self) -> MetricsWindow:
        """A reader of its own for what happens from now on (a trainer's step, an exporter's interval)."""
        return MetricsWindow(self)

    def to_dict(self) -> dict[str, float]:
        """Everything since the pool was made, flat: ``ttfc/mean``, ``reset/p99``, ``claims`` ..."""
        return self.snapshot().to_dict()


class MetricsWindow:
    """Takes what is new, each event once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._windows = {name: series.window() for name, series in metrics.series().items()}
        self._counted = metrics.counters()

    def pop(self) -> Snapshot:
        """What happened since the last :meth:`pop` (or since the window was made)."""
        samples = {name: window.pop() for name, window in self._windows.items()}
        counters = self._metrics.counters()
        new = {name: n - self._counted.get(name, 0) for name, n in counters.items()}
        self._counted = counters
        return Snapshot(samples, {name: n for name, n in new.items() if n})
