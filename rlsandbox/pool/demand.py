"""What the pool was asked for, burst by burst, and what that says about its size and refill."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

GAP_S = 2.0
"""Claims further apart than this belong to two bursts."""
_KEPT = 256


@dataclass(slots=True)
class Burst:
    """Claims that came together."""

    began: float
    last: float
    claims: int = 0
    demand: int = 0
    """The most sandboxes that were held or waited for at once during it."""


@dataclass(frozen=True)
class Advice:
    """What would have served the bursts that were seen.

    Args:
        size: members kept ready, so that no claim of a burst waits for a creation.
        write_rate: writes a second that make them ready again before the next burst; None: not seen yet.
        text: the same in words, with what it rests on.
    """

    size: int
    write_rate: float | None
    text: str

    def __str__(self) -> str:
        return self.text


class Bursts:
    """Groups claims into bursts as they come."""

    def __init__(self) -> None:
        self._seen: deque[Burst] = deque(maxlen=_KEPT)

    def asked(self, now: float, demand: int) -> None:
        """One more claim, when *demand* sandboxes are held or waited for (this one included)."""
        seen = self._seen
        if not seen or now - seen[-1].last > GAP_S:
            seen.append(Burst(now, now))
        burst = seen[-1]
        burst.last = now
        burst.claims += 1
        if demand > burst.demand:
            burst.demand = demand

    def __len__(self) -> int:
        return len(self._seen)

    def advice(self, *, size: int, ceiling: int, writes_each: float) -> Advice:
        """Advice for a pool of *size* and *ceiling* in which a burst's claim costs *writes_each* writes."""
        if not self._seen:
            return Advice(size, None, "no claim was made yet")
        peaks = sorted(burst.demand for burst in self._seen)
        wanted = peaks[min(len(peaks) - 1, int(0.95 * len(peaks)))]
        gaps = [b.began - a.last for a, b in zip(self._seen, list(self._seen)[1:], strict=False)]
        rate = None
        bursts = f"{len(peaks)} burst{'s' if len(peaks) > 1 else ''} of claims, up to {peaks[-1]} at once"
        text = f"{bursts}: size={wanted} keeps what 95 % of them need ready"
        if gaps and writes_each > 0:
            gap = max(sorted(gaps)[len(gaps) // 20], 1.0)
            rate = round(wanted * writes_each / gap, 3)
            text += f"; {rate:g} writes a second refill it in the {gap:.0f} s between bursts"
        if wanted > ceiling:
            text += f" (above the ceiling of {ceiling}: raise max_size, or let claims wait)"
        elif wanted < size:
            text += f" ({size - wanted} of the present {size} were never needed)"
        return Advice(wanted, rate, text)
