"""Claims that are asked for before they are needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .._loops import see_through
from .._sandbox.host import Live
from ..errors import ClaimTimeoutError

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from ..task import Task
    from .claiming import Claiming


class Need:
    """Of a claim that is asked for ahead: when somebody began to wait for it."""

    needed: float | None = None
    """Its time to first command runs from then."""

    @staticmethod
    def there(ahead: Need | None) -> bool:
        """Whether anybody ever waited: a claim that was asked for ahead and given up is no sample."""
        return ahead is None or ahead.needed is not None


class AsyncClaim(Live):
    """A claim under way. Whoever drops it must :meth:`cancel` it."""

    def __init__(self, pool: Claiming, task: Task | AsyncSnapshot) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._taken = False
        # Apart from us: the pool remembers it as long as the sandbox is claimed, which we hold.
        self._need = Need()
        self._task = self._loop.create_task(pool._claim(task, ahead=self._need))
        self._task.add_done_callback(_seen)

    def done(self) -> bool:
        """Whether result() would answer at once."""
        return self._task.done()

    async def result(self, timeout: float | None = None) -> AsyncSandbox:
        """The sandbox; release it.

        Raises:
            ClaimTimeoutError: not within *timeout* seconds; the claim goes on.
        """
        if self._need.needed is None:
            self._need.needed = self._loop.time()
        await asyncio.wait({self._task}, timeout=timeout)
        if not self._task.done():
            raise ClaimTimeoutError(f"no sandbox within {timeout:g} s of result(); the claim goes on")
        self._taken = True
        return self._task.result()

    async def cancel(self) -> bool:
        """Nobody needs it any more; True unless its sandbox was taken by result()."""
        if self._taken:
            return False
        self._taken = True
        self._task.cancel()
        # Nobody else knows of its sandbox by now: whoever cancels us waits until that is given back.
        cancelled = await see_through(self._task)
        if not self._task.cancelled() and self._task.exception() is None:
            release = asyncio.ensure_future(self._task.result().release())
            cancelled = await see_through(release) or cancelled
            release.result()
        if cancelled is not None:
            raise cancelled
        return True


def _seen(task: asyncio.Task[AsyncSandbox]) -> None:
    if not task.cancelled():
        task.exception()  # result() raises it, if anybody asks
