"""Time to first command (TTFC), defined once.

TTFC is the time that somebody waited for a sandbox, on the client's monotonic clock: from the moment the
sandbox was needed (its claim was asked for, or awaited when it was asked for ahead) until it was handed
over, plus from the first ``run`` call until the keeper reported that process as started. The time between
(the model thinks) is the part ``idle``: shown, not counted. One sample a claim; a restored sandbox adds
none; a claim that never started is censored at the time waited. Never from two machines' clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
