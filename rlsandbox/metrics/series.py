"""Samples of one quantity and their exact percentiles.

Promises: percentiles are nearest rank over every sample of the window, never estimated; an empty window
gives no number (None), never 0; what is only a lower bound prints ``>=``. Refuses: averaging percentiles;
windows of several processes are merged as samples (:meth:`Samples.merge`).
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigError

STATISTICS: Final = ("mean", "p50", "p95", "p99", "max")
KEPT: Final = 1_000_000
"""Samples a series keeps (9 MB); older ones leave the window, never the lifetime count and sum."""


@dataclass(frozen=True)
class Summary:
    """A window's numbers. ``n`` counts censored samples too; None where there was no sample.

    Args:
        censored: samples known only to be at least so long (a claim that never started).
        lower_bounds: names of the statistics that such a sample can only raise; they print ``>=``.
        unit: of the values.
    """

    n: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    censored: int = 0
    lower_bounds: frozenset[str] = frozenset()
    unit: str = "s"

    def text(self, statistic: str) -> str:
        """One statistic for people: ``"1.24 s"``, ``">=12.5 s"``, or ``"-"`` when there was no sample."""
        if statistic not in STATISTICS:
            raise ConfigError(f"no statistic is called {statistic!r}; there are {', '.join(STATISTICS)}")
        value: float | None = getattr(self, statistic)
        if value is None:
            return "-"
        return (">=" if statistic in self.lower_bounds else "") + quantity(value, self.unit)

    def to_dict(self, prefix: str = "") -> dict[str, float]:
        """Names with *prefix* and numbers for a trainer's log; what has no number is left out."""
        found = {name: getattr(self, name) for name in STATISTICS}
        return {prefix + name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        if not self.n:
            return "no samples"
        never = f", {self.censored} never started" if self.censored else ""
        return f"n {self.n}, " + ", ".join(f"{s} {self.text(s)}" for s in STATISTICS) + never


@dataclass(frozen=True)
class Samples:
    """Samples in the order they came; ``bounds[i]`` says that value i is only a lower bound. Picklable."""

    values: array[float]
    bounds: bytes
    unit: str = "s"

    def __len__(self) -> int:
        return len(self.values)

    @staticmethod
    def of(values: Iterable[float] = (), *, censored: Iterable[float] = (), unit: str = "s") -> Samples:
        exact, least = array("d", values), array("d", censored)
        return Samples(exact + least, bytes(len(exact)) + b"\x01" * len(least), unit)

    @staticmethod
    def merge(parts: Iterable[Samples]) -> Samples:
        """One window out of several (of ranks, of processes); its percentiles are as exact as theirs."""
        values, bounds, unit = array("d"), bytearray(), "s"
        for part in parts:
            values += part.values
            bounds += part.bounds
            unit = part.unit
        return Samples(values, bytes(bounds), unit)

    def summary(self) -> Summary:
        n = len(self.values)
        if not n:
            return Summary(0, unit=self.unit)
        ranked, first_bound = sorted(self.values), n
        if 1 in self.bounds:
            # A censored sample sorts after an exact one of the same value: it can only be larger.
            least = min(value for value, bound in zip(self.values, self.bounds, strict=True) if bound)
            first_bound = sum(
                not bound and value <= least for value, bound in zip(self.values, self.bounds, strict=True)
            )
        found: dict[str, float] = {
            "mean": min(max(math.fsum(self.values) / n, ranked[0]), ranked[-1]),
            "max": ranked[-1],
        }
        lower = {"mean", "max"} if first_bound < n else set()
        for name, percent in (("p50", 50), ("p95", 95), ("p99", 99)):
            index = nearest_rank(n, percent) - 1
            found[name] = ranked[index]
            if index >= first_bound:
                lower.add(name)
        return Summary(n, **found, censored=sum(self.bounds), lower_bounds=frozenset(lower), unit=self.unit)

    def percentile(self, percent: float) -> float | None:
        """The nearest-rank percentile (a sample, or a censored sample's lower bound); None without any."""
        if not self.values:
            return None
        return sorted(self.values)[nearest_rank(len(self.values), percent) - 1]


def nearest_rank(n: int, percent: float) -> int:
    """The rank, from 1, of a percentile among *n* samples: ceil(percent / 100 * n), at least 1."""
    if not 0 <= percent <= 100:
        raise ConfigError(f"a percentile lies between 0 and 100, not {percent}")
    # Division last: 0.95 * 20 is 19.000000000000004 in floats, whose ceiling would be 20.
    return max(1, math.ceil(percent * n / 100))


class Series:
    """A growing series of samples. Safe to use from any thread."""

    def __init__(self, name: str, *, unit: str = "s", help: str = "", kept: int = KEPT) -> None:
        self.name = name
        self.unit = unit
        self.help = help
        self._kept = kept
        self._lock = threading.Lock()
        self._values = array("d")
        self._bounds = bytearray()
        self._first = 0  # how many samples have left the window
        self._sum = 0.0

    def add(self, value: float, *, censored: bool = False) -> None:
        """One sample; *censored*: the true value is known only to be at least *value*."""
        if not math.isfinite(value):
            raise ConfigError(f"{self.name}: a sample must be a finite number, not {value}")
        with self._lock:
            self._values.append(value)
            self._bounds.append(censored)
            self._sum += value
            if len(self._values) > self._kept + self._kept // 8:  # cut rarely: a cut copies the rest
                cut = len(self._values) - self._kept
                del self._values[:cut], self._bounds[:cut]
                self._first += cut

    @property
    def count(self) -> int:
        """Samples ever added, also those that the window no longer keeps."""
        with self._lock:
            return self._first + len(self._values)

    @property
    def sum(self) -> float:
        """Sum of all samples ever added."""
        with self._lock:
            return self._sum

    def samples(self, since: int = 0) -> Samples:
        """The samples from the *since*-th on, as :attr:`count` numbers them."""
        with self._lock:
            start = max(0, since - self._first)
            return Samples(self._values[start:], bytes(self._bounds[start:]), self.unit)

    def _since(self, mark: int) -> tuple[Samples, int]:
        with self._lock:
            start = max(0, mark - self._first)
            end = self._first + len(self._values)
            return Samples(self._values[start:], bytes(self._bounds[start:]), self.unit), end

    def values(self) -> list[float]:
        """Every sample in the order it came; of a censored one, its lower bound."""
        with self._lock:
            return self._values.tolist()

    def summary(self) -> Summary:
        return self.samples().summary()

    def window(self) -> SeriesWindow:
        """A reader of its own that sees the samples added from now on. Readers do not disturb each other."""
        return SeriesWindow(self)

    def plot(self, ax: Any = None) -> Any:
        """The cumulative distribution with its percentiles, on a matplotlib axes (made when not given)."""
        from .plots import plot_series

        return plot_series(self, ax)

    def __repr__(self) -> str:
        return f"<Series {self.name}: {self.summary()}>"


class SeriesWindow:
    """Takes a series' new samples, each once."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._mark = series.count

    def peek(self) -> Samples:
        """The samples since the last :meth:`pop`."""
        return self._series.samples(self._mark)

    def pop(self) -> Samples:
        """The samples since the last :meth:`pop`; the next window begins behind them."""
        samples, self._mark = self._series._since(self._mark)
        return samples


def quantity(value: float, unit: str = "s") -> str:
    """A number for people, three digits: ``"870 us"``, ``"1.24 s"``, ``"7.5 min"``."""
    if unit != "s":
        return f"{value:.3g} {unit}".rstrip()
    size = abs(value)
    if size >= 119.5:
        return f"{value / 60:.1f} min"
    for limit, factor, name in ((0.9995, 1, "s"), (0.0009995, 1e3, "ms")):
        if size >= limit or size == 0:
            number = f"{value * factor:.3g}"
            return f"{float(number):g} {name}"
    return f"{value * 1e6:.3g} us"
