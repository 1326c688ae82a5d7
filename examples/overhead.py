"""What measurements of overhead share: steps by pairs, in an order that is drawn, and their figures."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

LIMIT = 0.03

Step = tuple[bool, float, float]
"""Whether it was wrapped, its time on the wall, its CPU time."""


class Order:
    """Whether the next step is wrapped.

    By pairs, in an order that is drawn: neither what drifts nor what comes round has to do with it.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        self.wrapped = True

    def next(self, number: int) -> bool:
        self.wrapped = not self.wrapped if number % 2 else self._random.random() < 0.5
        return self.wrapped


def interval(values: Any, draws: int = 10_000) -> tuple[float, float]:
    """95 % confidence interval of the median, by bootstrap."""
    drawn = np.random.default_rng(0)
    medians = np.median(drawn.choice(values, (draws, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def tell(found: list[Step], judged: tuple[str, ...] = ("wall", "CPU")) -> int:
    """Print the figures; 0 when those that are *judged* are certainly below the limit."""
    print(f"{len(found)} steps, {'':4}{'bare':>12}{'added':>12}{'share':>9}   95 % interval of the share")
    worst = 0.0
    for name, column in (("wall", 1), ("CPU", 2)):
        on = np.array([row[column] for row in found if row[0]]) * 1e3
        off = np.array([row[column] for row in found if not row[0]]) * 1e3
        bare, added = float(np.median(off)), on - off
        low, high = (part / bare for part in interval(added))
        middle = float(np.median(added))
        print(f"{name:>14} {bare:12.2f} ms{middle:+9.2f} ms{middle / bare:+8.2%}   {low:+.2%} .. {high:+.2%}")
        worst = max(worst, high) if name in judged else worst
    less = "less" if worst < LIMIT else "not certainly less"
    print(f"the wrapping costs {less} than {LIMIT:.0%} of a step")
    return 0 if worst < LIMIT else 1
