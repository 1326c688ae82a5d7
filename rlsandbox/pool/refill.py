"""How fast the pool may write: token bucket, back-off, breaker.

Promises: never more writes (of any kind together) in a second than the rate says; a throttled control
plane is asked less, then gradually more again; retries are spread by full jitter; a spec that keeps
failing is asked rarely and says why. None of the three reads a clock or sleeps: time comes in, a wait
comes out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from random import Random

_RECOVER_PER_S = 0.1  # of the full rate: ten seconds without a throttle restore all of it
_FLOOR = 0.05
_FORGET_S = 60.0
_LONGEST_PAUSE_S = 300.0  # whatever it says: some say "inf"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something failed, in a form that can be shown, counted and raised again."""

    kind: str
    message: str
    retryable: bool = True
    infrastructure: bool = True
    error: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        name = type(error).__name__
        # "'small'" alone, of a KeyError, says nothing
        bare = isinstance(error, LookupError | TypeError | AttributeError | AssertionError)
        return cls(
            kind=getattr(error, "kind", name),
            message=getattr(error, "message", "") or (f"{name}: {error}" if bare else str(error) or name),
            retryable=bool(getattr(error, "retryable", True)),
            infrastructure=bool(getattr(error, "infrastructure", True)),
            error=error,
        )


class TokenBucket:
    """One bucket for creations, deletions, patches and scalings together.

    Its capacity is a twentieth of a second's worth and is taken off the refill, so that no window of
    one second, wherever it starts, sees more than *rate* writes. ``rate=None`` is unlimited until the
    place says otherwise (429): then half of what was being written is the rate, and it grows back.
    """

    def __init__(self, rate: float | None) -> None:
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"rate must be above 0, not {rate!r}")
        self.rate = rate
        self._capacity = 1.0 if rate is None else max(1.0, rate / 20)
        self._tokens = self._capacity
        self._at: float | None = None
        self._factor = 1.0
        self._learned: float | None = None
        self._throttled_at: float | None = None
        self.paused_until = -math.inf
        self.throttled = 0
        self.taken = 0
        self._recent: deque[float] = deque()

    def _fill_rate(self) -> float | None:
        full = self.rate if self.rate is not None else self._learned
        if full is None:
            return None
        if self._capacity > 1.0:
            full -= self._capacity
        return full * self._factor

    def _advance(self, now: float) -> None:
        last, self._at = self._at, now if self._at is None else max(self._at, now)
        if last is None or now <= last:
            return
        since = now - last
        rate = self._fill_rate()
        if rate is not None:
            # Time before a pause's end gives no tokens, else they would all come at once after it.
            usable = min(since, max(0.0, now - self.paused_until))
            self._tokens = min(self._capacity, self._tokens + usable * rate)
        if self._throttled_at is not None and now > self.paused_until:
            self._factor = min(1.0, self._factor + _RECOVER_PER_S * min(since, now - self.paused_until))
            quiet = now - max(self._throttled_at, self.paused_until)
            if self._learned is not None and quiet > _FORGET_S:
                self._learned = None

    def wait(self, now: float) -> float:
        """Seconds until one write is allowed; 0 when it is now."""
        self._advance(now)
        if now < self.paused_until:
            return self.paused_until - now
        rate = self._fill_rate()
        if rate is None or self._tokens >= 1.0 - 1e-9:
            return 0.0
        return (1.0 - self._tokens) / rate

    def take(self, now: float) -> bool:
        """Take one write if it is allowed now."""
        if self.wait(now) > 0.0:
            return False
        if self._fill_rate() is not None:
            self._tokens -= 1.0
        else:
            self._recent.append(now)
            while self._recent and self._recent[0] <= now - 1.0:
                self._recent.popleft()
        self.taken += 1
        return True

    def throttle(self, now: float, retry_after: float | None = None) -> None:
        """The place said 429. Answers to one burst count once; *retry_after* pauses every write."""
        self._advance(now)
        self.throttled += 1
        again = self._throttled_at is None or now - self._throttled_at >= 1.0
        if again:
            if self.rate is None and self._learned is None:
                self._learned = max(1.0, len(self._recent) / 2)
                self._capacity, self._tokens = 1.0, 0.0
            else:
                self._factor = max(_FLOOR, self._factor / 2)
            self._throttled_at = now
        if retry_after is not None:
            pause = min(max(0.0, retry_after), _LONGEST_PAUSE_S)
            self.paused_until = max(self.paused_until, now + pause)

    @property
    def current_rate(self) -> float | None:
        """Writes a second at present; None: unlimited."""
        full = self.rate if self.rate is not None else self._learned
        return None if full is None else full * self._factor


class Backoff:
    """Full jitter: a wait is uniform between 0 and a limit that doubles with every failure up to *cap*."""

    def __init__(self, rng: Random, *, base: float = 0.2, cap: float = 30.0) -> None:
        self._rng, self.base, self.cap = rng, base, cap
        self.failures = 0

    def next(self) -> float:
        limit = min(self.cap, self.base * 2.0 ** min(self.failures, 40))
        self.failures += 1
        return self._rng.uniform(0.0, limit)

    def reset(self) -> None:
        self.failures = 0


class Breaker:
    """Paces attempts at one thing that fails, and opens when it keeps failing.

    After every failure the next attempt waits (full jitter). After *threshold* failures in a row, or one
    that cannot be retried, it is open: one attempt at a time until one succeeds, and :attr:`cause` says
    why. ``hopeless`` is true when waiting cannot help: the cause is permanent, or it has been failing for
    *patience_s* without one success.
    """

    def __init__(
        self,
        rng: Random,
        *,
        threshold: int = 5,
        patience_s: float = 120.0,
        base: float = 0.2,
        cap: float = 30.0,
    ) -> None:
        self._backoff = Backoff(rng, base=base, cap=cap)
        self.threshold, self.patience_s = threshold, patience_s
        self.cause: Cause | None = None
        self.retry_at = -math.inf
        self.since: float | None = None
        self.failed_at: float | None = None
        self.trips = 0
        self._permanent = False

    @property
    def failures(self) -> int:
        return self._backoff.failures

    @property
    def open(self) -> bool:
        return self._permanent or self.failures >= self.threshold

    def failed(self, now: float, cause: Cause) -> None:
        was_open = self.open
        if self.since is None:
            self.since = now
        self.failed_at = now
        self.cause = cause
        self._permanent = not cause.retryable
        self.retry_at = now + self._backoff.next()
        if self._permanent:  # asking again at once cannot help: wait at least as long as a tripped one does
            self.retry_at = max(self.retry_at, now + 1.0)
        if self.open and not was_open:
            self.trips += 1

    def succeeded(self) -> None:
        self._backoff.reset()
        self.cause, self.since, self._permanent, self.retry_at = None, None, False, -math.inf

    def allows(self, now: float, in_flight: int) -> bool:
        """Whether one more attempt may start now while *in_flight* others run."""
        if now < self.retry_at:
            return False
        return not self.open or in_flight == 0

    @property
    def permanent(self) -> bool:
        """The last failure cannot be mended by trying again."""
        return self._permanent

    def hopeless(self, now: float) -> bool:
        if not self.open:
            return False
        return self._permanent or (self.since is not None and now - self.since >= self.patience_s)
