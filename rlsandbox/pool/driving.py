"""Episode: one rollout that the caller drives, for callers that do not await. See :class:`AsyncEpisode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._mirror import mirrors
from .episode import Episode as AsyncEpisode

if TYPE_CHECKING:
    from ..metrics import BatchClock
    from ..results import Failure, Outcome, Record
    from ..sandbox import Sandbox
    from ..task import Task
    from .sync import Pool


@mirrors(AsyncEpisode)
class Episode:
    """A rollout of *task* from being asked for to its record. Arguments: see :class:`AsyncEpisode`."""

    def __init__(
        self,
        pool: Pool,
        task: Task,
        *,
        group: str | None = None,
        batch: str | None = None,
        retries: int = 2,
        clock: BatchClock | None = None,
    ) -> None:
        self.task = task
        self._pool, self._portal = pool, pool._portal

        async def make() -> AsyncEpisode:
            pool._pool._check()  # asked for while the pool closes: nobody would end it any more
            return AsyncEpisode(pool._pool, task, group=group, batch=batch, retries=retries, clock=clock)

        self._async = self._portal.call(make)

    @property
    def sandbox(self) -> Sandbox | None:
        """Of the attempt that is under way."""
        held = self._async.sandbox
        return None if held is None else self._pool._facade(held)

    @property
    def outcome(self) -> Outcome | None:
        return self._async.outcome

    @property
    def failure(self) -> Failure | None:
        """Of the last attempt that ended."""
        return self._async.failure

    @property
    def record(self) -> Record | None:
        """Its end, once it has one."""
        return self._async.record

    @property
    def attempts(self) -> int:
        return self._async.attempts

    @property
    def may_retry(self) -> bool:
        return self._async.may_retry

    def begin_ahead(self, *, timeout: float | None = None) -> None:
        """See :meth:`AsyncEpisode.begin_ahead`. Does not wait for the sandbox."""

        async def begin() -> None:
            self._async.begin_ahead(timeout=timeout)

        self._portal.call(begin)

    def begin(self, *, timeout: float | None = None) -> Sandbox:
        """See :meth:`AsyncEpisode.begin`."""

        async def begin() -> Any:
            return await self._async.begin(timeout=timeout)

        return self._pool._facade(self._portal.call(begin))

    def grade(self) -> Outcome:
        """See :meth:`AsyncEpisode.grade`."""
        return self._portal.call(self._async.grade)

    def broke(self, error: BaseException, phase: str) -> Failure:
        """See :meth:`AsyncEpisode.broke`."""
        return self._portal.call(self._async.broke, error, phase)

    def complete(
        self, *, value: Any = None, truncated: str | None = None, reward: float | None = None
    ) -> Record:
        """See :meth:`AsyncEpisode.complete`."""

        async def complete() -> Record:
            return await self._async.complete(value=value, truncated=truncated, reward=reward)

        return self._portal.call(complete)

    def fail(self, failure: Failure | None = None) -> Record:
        """See :meth:`AsyncEpisode.fail`."""
        return self._portal.call(self._async.fail, failure)

    def cancel(self, cause: str) -> Record | None:
        """See :meth:`AsyncEpisode.cancel`."""
        return self._portal.call(self._async.cancel, cause)


__all__ = ["AsyncEpisode", "Episode"]
