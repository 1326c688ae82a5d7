"""Forks: n sandboxes with one snapshot's state, all or none, and never a wait that nothing can end.

A fork holds what it has got while it waits for the rest, and its caller usually holds the sandbox that the
snapshot was taken of. When every claimed sandbox is held in one of these two ways, nobody is left who could
give one back: the youngest fork is refused then, what it held goes on to the others. A fork with a timeout
is not waited out like this: its deadline ends the wait, for itself and for those that stand behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .._loops import see_through
from ..errors import ClaimTimeoutError, ConfigError, SandboxError
from .model import State

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .lending import Lease
    from .pool import AsyncPool

log = logging.getLogger("rlsandbox.pool")


@dataclass(eq=False)
class _Fork:
    """One that waits."""

    wanted: int
    parent: Lease | None
    """Of the sandbox that the snapshot was taken of."""
    bounded: bool
    got: list[AsyncSandbox] = field(default_factory=list)

    @property
    def parents(self) -> set[Lease]:
        parent = self.parent
        return {parent} if parent is not None and not parent.over and parent.asleep is None else set()

    def holds(self) -> set[Lease]:
        """What cannot come back before this fork ends."""
        return self.parents | {sandbox._lease for sandbox in self.got}  # type: ignore[attr-defined]


class Forks:
    """Those of one pool that wait."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._waiting: list[_Fork] = []

    async def make(
        self, snapshot: AsyncSnapshot, n: int, timeout: float | None, counted: bool = True
    ) -> list[AsyncSandbox]:
        """*n* sandboxes on *snapshot*; not *counted* where another process counts what it waited.

        Raises:
            ConfigError: it can never be met.
            ClaimTimeoutError: its deadline has passed; or, without one, forks hold all there is and wait for
                each other (kind ``deadlock``).
        """
        check(n, self._pool.max_size)
        parent: Lease | None = getattr(snapshot, "parent", None)
        fork = _Fork(n, parent, timeout is not None)
        look = self._pool.driver.pump  # what one fork has got decides about the others
        collecting = asyncio.ensure_future(
            _all_or_none(self._pool, snapshot, n, timeout, counted, fork.got, look)
        )
        self._waiting.append(fork)
        stuck = asyncio.ensure_future(self._pool.driver.until(lambda: self._stuck(fork), None))
        refused, cancelled = False, None
        try:
            await asyncio.wait({collecting, stuck}, return_when=asyncio.FIRST_COMPLETED)
            refused = not collecting.done()
        except asyncio.CancelledError as error:
            cancelled = error
        finally:
            self._waiting.remove(fork)
            stuck.cancel()
            if not collecting.done():
                collecting.cancel()
        cancelled = await see_through(collecting, stuck) or cancelled
        if cancelled is not None:
            # Perhaps in the very turn in which they were all there: then nobody will ever see them.
            if not collecting.cancelled() and collecting.exception() is None:
                await _back(collecting.result())
            raise cancelled
        if refused and (collecting.cancelled() or collecting.exception() is not None):
            raise self._refusal(fork, snapshot)
        return collecting.result()

    def _stuck(self, fork: _Fork) -> bool:
        """Whether *fork* is to give way, because every sandbox there may be is held by forks that wait."""
        core = self._pool.driver.core
        if fork.bounded or core.n[State.CLAIMED] < min(core.ceiling, core.config.ceiling):
            return False
        if any(other.bounded for other in self._waiting) or self._waiting[-1] is not fork:
            return False
        held: set[Lease] = set()
        for other in self._waiting:
            held |= other.holds()
        return len(held) >= core.n[State.CLAIMED] and len(fork.got) < fork.wanted

    def _refusal(self, fork: _Fork, snapshot: AsyncSnapshot) -> SandboxError:
        most = self._pool.max_size
        task = getattr(snapshot.task, "id", None)
        if fork.wanted + len(fork.parents) > most:
            return ConfigError(
                f"fork({fork.wanted}) can never be met: the pool's ceiling is {most}, and the sandbox that "
                "the snapshot was taken of is one of them while it is held",
                hint="release it first, raise max_size, or give a timeout if somebody else releases it",
                task=task,
            )
        return ClaimTimeoutError(
            f"fork({fork.wanted}) cannot be met: all {most} sandboxes are held by forks that wait "
            "and by their snapshots' sandboxes: they would wait for each other",
            kind="deadlock",
            hint="raise max_size, or let fewer rollouts fork at once",
            task=task,
        )


def check(n: object, most: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"fork(n): n must be a whole number of at least 1, not {n!r}")
    if n > most:
        raise ConfigError(f"fork({n}) can never be met: the pool's ceiling is {most}", hint="raise max_size")


async def _all_or_none(
    pool: AsyncPool,
    snapshot: AsyncSnapshot,
    n: int,
    timeout: float | None,
    counted: bool,
    had: list[AsyncSandbox],
    tell: Callable[[], object],
) -> list[AsyncSandbox]:
    """*n* sandboxes with a snapshot's state; when one cannot be had, none is kept.

    Args:
        had: holds what has been had so far.
        tell: called whenever that grew.
    """

    async def one() -> AsyncSandbox:
        sandbox = await pool._claim(snapshot, timeout=timeout, counted=counted)
        had.append(sandbox)
        tell()
        return sandbox

    claims = [asyncio.ensure_future(one()) for _ in range(n)]
    whole, cancelled = False, None
    try:
        await asyncio.wait(claims, return_when=asyncio.FIRST_EXCEPTION)
        whole = all(c.done() and not c.cancelled() and c.exception() is None for c in claims)
    except asyncio.CancelledError as error:
        cancelled = error
    if not whole:
        for claim in claims:
            claim.cancel()
        cancelled = await see_through(*claims) or cancelled
        cancelled = await _back(had) or cancelled
    if cancelled is not None:
        raise cancelled
    for claim in claims:
        if not claim.cancelled() and (failed := claim.exception()) is not None:
            raise failed
    return [claim.result() for claim in claims]


async def _back(sandboxes: list[AsyncSandbox]) -> asyncio.CancelledError | None:
    """Give them all back, whoever cancels us meanwhile."""
    releases = [asyncio.ensure_future(sandbox.release()) for sandbox in sandboxes]
    cancelled = await see_through(*releases)
    for release in releases:
        if not release.cancelled() and (failed := release.exception()) is not None:
            log.warning("a fork that nobody wanted could not be given back: %s", failed)
    return cancelled
