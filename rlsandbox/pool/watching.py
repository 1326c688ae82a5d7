"""Looking on: who waits for what, which claims wait for long, what exists that nobody knows."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .model import PoolClaim

if TYPE_CHECKING:
    from ..backends.base import Backend, Member
    from .core import Core
    from .operations import Deadlines, Held

log = logging.getLogger("rlsandbox.pool")

LONG_WAIT_S = 10.0
_LAGGING = 5
"""In how many listings a member that was removed may still be shown before it counts as there."""


class Watching:
    """The half of :class:`~.driver.Driver` that decides nothing and carries nothing out."""

    core: Core
    backend: Backend
    held: dict[str, Held]
    labels: dict[str, str] | Mapping[str, str]
    deadlines: Deadlines
    _loop: asyncio.AbstractEventLoop
    _late: dict[str, asyncio.Task[Any]]
    _removed: OrderedDict[str, None]
    _waiters: dict[int, asyncio.Future[None]]
    _watchers: list[tuple[Callable[[], bool], asyncio.Future[None]]]
    _long_wait: asyncio.TimerHandle | None

    @abstractmethod
    def tell(self, event: Callable[..., None], *args: Any, **kw: Any) -> None:
        """Give the core an event."""

    async def until(self, true: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until something is so; False when it was not within *timeout* seconds."""
        if true():
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (true, future)
        self._watchers.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            return False
        finally:
            if entry in self._watchers:
                self._watchers.remove(entry)
        return True

    def _look(self) -> None:
        for true, future in list(self._watchers):
            if not future.done() and true():
                future.set_result(None)

    def _tell_long_waits(self) -> None:
        """Say which claims wait for long, and for what: one line a spec."""
        self._long_wait = None
        now = self._loop.time()
        first: dict[str, PoolClaim] = {}
        count: dict[str, int] = {}
        for id in self._waiters:
            claim = self.core.claims.get(id)
            if claim is not None and now - claim.asked >= LONG_WAIT_S:
                first.setdefault(claim.spec, claim)
                count[claim.spec] = count.get(claim.spec, 0) + 1
        for spec, claim in first.items():
            said, n = self.core.why(claim), count[spec]
            claims = f"{n} claims wait, the first" if n > 1 else "a claim waits"
            log.warning("%s for %.0f s: %s", claims, now - claim.asked, said)
        if self._waiters and not self.core.closing:
            self._long_wait = self._loop.call_later(3 * LONG_WAIT_S, self._tell_long_waits)

    async def look_for_strays(self) -> None:
        """Compare what the place lists with what is known; what nobody knows is removed.

        A listing may lag: only what two listings in a row show and nobody knows counts, and what was removed
        already only when it is still listed long after.
        """
        before: set[str] = set()
        again: dict[str, int] = {}
        while True:
            await asyncio.sleep(self.deadlines.list_every)
            try:
                async with asyncio.timeout(self.deadlines.dispose):
                    listed: Sequence[Member] = await self.backend.list(self.labels)
            except Exception as error:
                log.warning("the place could not be listed: %s", error)
                continue
            known = {held.member.id for held in self.held.values()} | set(self.core.members) | set(self._late)
            unknown = {member.id for member in listed} - known
            again = {name: again.get(name, 0) + 1 for name in unknown if name in self._removed}
            unknown -= {name for name, times in again.items() if times <= _LAGGING}
            for name in sorted(unknown & before):
                self.tell(self.core.found, name)
            before = unknown
