"""Time to first command (TTFC), defined once.

TTFC is the time that somebody waited for a sandbox, on the client's monotonic clock: from the moment the
sandbox was needed (its claim was asked for, or awaited when it was asked for ahead) until it was handed
over, plus from the first ``run`` call until the keeper reported that process as started. The time between
(the model thinks) is the part ``idle``: shown, not counted. One sample a claim; a restored sandbox adds
none; a claim that never started is censored at the time waited. Never from two machines' clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ..errors import SandboxStateError

Part = Literal["queued", "provisioned", "reset", "connected"]
PARTS: Final = ("queued", "provisioned", "reset", "connected", "started")


@dataclass(frozen=True, kw_only=True)
class TtfcSample:
    """What one claim waited for, in seconds.

    Args:
        queued_s: for a free sandbox.
        provisioned_s: for a sandbox to be made.
        reset_s: for a used sandbox to be put back, verified or primed.
        connected_s: for the keeper to answer and the sandbox to be handed over.
        started_s: from the first ``run`` call until its process had started.
        idle_s: the handed-over sandbox lay unused; not part of the sum.
        never_started: no command ever started; the sum is a lower bound.
    """

    queued_s: float = 0.0
    provisioned_s: float = 0.0
    reset_s: float = 0.0
    connected_s: float = 0.0
    started_s: float = 0.0
    idle_s: float = 0.0
    never_started: bool = False

    @property
    def ttfc_s(self) -> float:
        return self.queued_s + self.provisioned_s + self.reset_s + self.connected_s + self.started_s

    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order in which they pass."""
        return {part: getattr(self, f"{part}_s") for part in PARTS}


class TtfcClock:
    """Turns the moments of one claim into its :class:`TtfcSample`.

    Begin with ``needed=False`` for a claim asked for ahead: what passes before it is needed counts nothing.
    The parts always add up to the time waited,
    because each moment ends one part and begins the next.
    """

    def __init__(self, *, needed: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._needed = needed
        self._part: str | None = "queued"
        self._since = clock()
        self._spent = dict.fromkeys((*PARTS, "idle"), 0.0)
        self._done = False

    def _turn(self, part: str | None) -> None:
        now = self._clock()
        counted = self._needed or self._part in ("idle", "started")
        if self._part is not None and counted:
            self._spent[self._part] += max(0.0, now - self._since)
        self._part, self._since = part, now

    def needed(self) -> None:
        """Somebody waits for the sandbox from now on. Again is harmless."""
        if not self._needed:
            self._turn(self._part)
            self._needed = True

    def now(self, part: Part) -> None:
        """From now on the claim waits for *part*."""
        if self._part not in ("idle", "started", None):
            self._turn(part)

    def handed_over(self) -> None:
        """The claimant has the sandbox."""
        self._turn("idle")
        self._needed = True

    def run_called(self) -> None:
        """The first ``run``; later calls change nothing."""
        if self._part == "idle":
            self._turn("started")

    def run_failed(self) -> None:
        """The command could not be started, and the sandbox is there for another: its time stays counted."""
        if self._part == "started":
            self._turn("idle")

    def started(self) -> TtfcSample | None:
        """The keeper reported the process as started: the sample, the first time only."""
        if self._done:
            return None
        if self._part != "started":
            raise SandboxStateError("a command started in a sandbox in which none was run")
        return self._end(never_started=False)

    def abandoned(self) -> TtfcSample | None:
        """The claim ended without a started command: a censored sample.

        None when the sample was given before, and when nobody ever waited (a claim asked for ahead and
        cancelled).
        """
        if self._done or not self._needed:
            self._done = True
            return None
        return self._end(never_started=True)

    def _end(self, *, never_started: bool) -> TtfcSample:
        self._turn(None)
        self._done = True
        spent = {f"{part}_s": value for part, value in self._spent.items()}
        return TtfcSample(**spent, never_started=never_started)
