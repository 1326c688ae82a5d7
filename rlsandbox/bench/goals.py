"""Goals of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A goal and what was reached: the median of the rounds."""

    label: str
    reached: float
    most: float
    unit: str
    rounds: tuple[float, ...]

    @property
    def ok(self) -> bool:
        return self.reached <= self.most
