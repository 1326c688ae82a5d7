"""A pool's numbers: :class:`Metrics`.

Promises: safe from any thread; counters only grow; a window (:meth:`Metrics.window`) sees every event
exactly once, whoever else reads. Refuses: to invent a number for what did not happen.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import PoolClosedError
from .idle import IdleMeter, IdleWindow
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
    idle: IdleWindow | None = None

    @staticmethod
    def merge(parts: Iterable[Snapshot]) -> Snapshot:
        """One window out of those of several processes: counters add up, percentiles stay exact."""
        samples: dict[str, list[Samples]] = {}
        counters: dict[str, int] = {}
        idle: list[IdleWindow] = []
        for part in parts:
            if part.idle is not None:
                idle.append(part.idle)
            for name, found in part.samples.items():
                samples.setdefault(name, []).append(found)
            for name, n in part.counters.items():
                counters[name] = counters.get(name, 0) + n
        merged = {name: Samples.merge(found) for name, found in samples.items()}
        return Snapshot(merged, counters, IdleWindow.merge(idle) if idle else None)

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """Flat names for a trainer's log: ``ttfc/p50``, ``claims``, ``failures/oom``; no sample, no name."""
        flat: dict[str, float] = {}
        for name, samples in self.samples.items():
            flat.update(samples.summary().to_dict(f"{prefix}{name}/"))
        flat.update({prefix + name: float(n) for name, n in self.counters.items()})
        if self.idle is not None:
            flat.update(self.idle.to_dict(prefix))
        return flat


class Metrics:
    """Series ``ttfc``, ``reset``, ``verify``, ``prime``, ``batch``, and counters.

    Counters have the names of what they count: ``claims``, ``never_started``, ``provisions``, ``resets``,
    ``recycled``, ``quarantined``, ``disposed``, ``failures/<kind>`` and whatever else is given to
    :meth:`count`. ``idle`` is the accelerator's idle meter; a trainer's integration feeds it, and without
    one there is no idle ratio.

    Args:
        run: the pool's run, a label of whatever is exported.
        gauges: called by exporters for what is so now (``ready``, ``claimed`` ...); from any thread.
        totals: called for counters that are kept elsewhere; from any thread. They only grow, too.
    """

    reset: Series
    verify: Series
    prime: Series
    batch: Series

    def __init__(
        self,
        *,
        run: str = "",
        gauges: Callable[[], Mapping[str, float]] | None = None,
        totals: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self.run = run
        self.gauges = gauges
        self.totals = totals
        self.idle = IdleMeter()
        self._series = {name: Series(name, help=text) for name, text in _SERIES.items()}
        self._parts = [
            Series(f"ttfc_{part}", help=f"The part {part} of claims.") for part in (*PARTS, "idle")
        ]
        self._series.update((series.name, series) for series in self._parts)
        for name in _SERIES:
            if name != "ttfc":
                setattr(self, name, self._series[name])
        self._late: deque[TtfcSample] = deque()
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        _living.add(self)

    def count(self, name: str, n: int = 1) -> None:
        """*n* more of the events called *name*."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + n

    def failure(self, kind: str) -> None:
        """A failure of *kind*: counter ``failures/<kind>``."""
        self.count(f"failures/{kind}")

    def record_ttfc(self, sample: TtfcSample) -> None:
        """What one claim waited for; a claim that never started is censored, and counted as such."""
        self._series["ttfc"].add(sample.ttfc_s, censored=sample.never_started)
        queued, provisioned, reset, connected, started, idle = self._parts
        queued.add(sample.queued_s)
        provisioned.add(sample.provisioned_s)
        reset.add(sample.reset_s)
        connected.add(sample.connected_s)
        idle.add(sample.idle_s)
        if sample.never_started:
            self.count("never_started")
        else:
            started.add(sample.started_s)

    def record_ttfc_late(self, sample: TtfcSample) -> None:
        """The same at the next :meth:`settle`, or when somebody looks: the caller has more urgent work."""
        self._late.append(sample)

    def settle(self) -> None:
        """Record what was put off."""
        while self._late:
            try:
                sample = self._late.popleft()
            except IndexError:
                return  # another thread was faster
            self.record_ttfc(sample)

    @property
    def ttfc(self) -> Series:
        """Time to first command, of every claim."""
        self.settle()
        return self._series["ttfc"]

    def counters(self) -> dict[str, int]:
        """How often each event happened since the pool was made."""
        found = dict(self.totals()) if self.totals is not None else {}
        with self._lock:
            for name, n in self._counters.items():
                found[name] = found.get(name, 0) + n
        return found

    def now(self) -> dict[str, float]:
        """What is so at this moment, by name; nothing once the pool is closed."""
        try:
            return dict(self.gauges()) if self.gauges is not None else {}
        except PoolClosedError:
            return {}

    def series(self) -> dict[str, Series]:
        """Every series by name, the parts of TTFC (``ttfc_queued`` ...) too."""
        self.settle()
        return dict(self._series)

    def snapshot(self) -> Snapshot:
        """Everything since the pool was made."""
        self.settle()
        samples = {name: s.samples() for name, s in self._series.items()}
        return Snapshot(samples, self.counters(), self.idle.total() if self.idle.used else None)

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
        self._idle = metrics.idle.window()

    def pop(self) -> Snapshot:
        """What happened since the last :meth:`pop` (or since the window was made).

        A counter that is known has a number in every window, 0 too: it was watched.
        """
        self._metrics.settle()
        samples = {name: window.pop() for name, window in self._windows.items()}
        counters = self._metrics.counters()
        new = {name: n - self._counted.get(name, 0) for name, n in counters.items()}
        self._counted = counters
        idle = self._idle.pop()
        return Snapshot(samples, new, idle if self._metrics.idle.used else None)


_living: weakref.WeakSet[Metrics] = weakref.WeakSet()


def living() -> list[Metrics]:
    """The metrics of every pool of this process that is not gone, by run."""
    return sorted(_living, key=lambda metrics: metrics.run)
