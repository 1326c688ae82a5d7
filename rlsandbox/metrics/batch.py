"""Batch completion, defined once: first claim request of a batch until its last rollout's record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .series import Series


class BatchClock:
    """One batch. Call :meth:`requested` before each claim request and :meth:`recorded` after each record.

    Claims asked for ahead of the batch count from :meth:`requested` too: hand the clock to whoever asks.
    """

    def __init__(self, series: Series | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._series = series
        self._clock = clock
        self._lock = threading.Lock()
        self._first: float | None = None
        self._last: float | None = None
        self._open = 0
        self._closed = False

    def requested(self) -> None:
        with self._lock:
            self._open += 1
            if self._first is None:
                self._first = self._clock()

    def recorded(self) -> None:
        with self._lock:
            self._open -= 1
            self._last = self._clock()

    @property
    def completion_s(self) -> float | None:
        """Seconds from the first request to the last record so far; None while there is no record."""
        with self._lock:
            if self._first is None or self._last is None:
                return None
            return self._last - self._first

    def close(self) -> float | None:
        """The batch is over: its completion enters the series, censored when rollouts have no record yet."""
        with self._lock:
            first, last, unfinished, closed = self._first, self._last, self._open, self._closed
            self._closed = True
        if first is None:
            return None
        if unfinished > 0 or last is None:
            last = self._clock()
        if self._series is not None and not closed:
            self._series.add(last - first, censored=unfinished > 0)
        return last - first
