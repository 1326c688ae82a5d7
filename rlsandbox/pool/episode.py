"""One rollout that somebody outside the pool drives: an environment, a trainer, a script.

``run_rollouts`` calls a policy; here the caller takes the steps, and the :class:`Episode` keeps the books. It
promises: the rollout is in the ledger before any work; each sandbox is an attempt of it; it ends in exactly
one record, whatever is raised or cancelled; what infrastructure broke is never scored; the sandbox goes back.

The usual course::

    episode = Episode(pool, task)
    sandbox = await episode.begin()           # claims; claims again where that may help
    try:
        await sandbox.run("make")
    except SandboxError as error:
        await episode.broke(error, "command") # ends the attempt; begin() again while episode.may_retry
        record = await episode.fail()
    else:
        await episode.grade()
        record = await episode.complete()
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from .._loops import see_through
from ..errors import ConfigError, PoolClosedError, SandboxStateError, UnsupportedError
from ..hooks import Rollout
from ..ledger.failures import cause_of, jsonable
from ..results import Failure, Outcome, Record
from ..task import Task
from .ahead import Need
from .attempts import judge

if TYPE_CHECKING:
    import pluggy

    from ..ledger.recorder import Attempt, Ledger
    from ..metrics import BatchClock, Metrics

log = logging.getLogger("rlsandbox.pool")

CALLERS_MISTAKES = (ConfigError, UnsupportedError, PoolClosedError)
"""Errors of whoever set things up: they are recorded as any other, and always raised."""


class Host(Protocol):
    """What an episode needs of the AsyncPool."""

    ledger: Ledger
    metrics: Metrics
    manager: pluggy.PluginManager

    async def _recorded(self, record: Record) -> None:
        """The record is on disk, and plugins were told."""

    def claim(
        self,
        task: Any,
        *,
        timeout: float | None = None,
        rollout: Rollout | None = None,
        ahead: Need | None = None,
    ) -> Any:
        """An awaitable of an AsyncSandbox for one attempt of *rollout*, its credentials issued."""


class Episode:
    """A rollout from being asked for to its record. All methods belong to the pool's event loop.

    Args:
        pool: the AsyncPool.
        task: what it works on.
        group: name of its siblings; default one of its own.
        batch: of the ledger (``pool.ledger.new_batch()``).
        retries: further attempts that :meth:`begin` may make when infrastructure broke one.
        clock: of the batch it belongs to.
    """

    def __init__(
        self,
        pool: Host,
        task: Task,
        *,
        group: str | None = None,
        batch: str | None = None,
        retries: int = 2,
        clock: BatchClock | None = None,
    ) -> None:
        self.task = task
        self.sandbox: Any = None
        """The AsyncSandbox of the attempt that is under way."""
        self.outcome: Outcome | None = None
        self.failure: Failure | None = None
        """Of the last attempt that ended."""
        self._pool = pool
        self._retries = retries
        self._clock = clock
        if clock is not None:
            clock.requested()
        self._entry = pool.ledger.request(task, group=group, batch=batch)
        self._attempt: Attempt | None = None
        self._need: Need | None = None
        self._beginning: asyncio.Task[Any] | None = None

    @property
    def record(self) -> Record | None:
        """Its end, once it has one."""
        return self._entry.record

    @property
    def attempts(self) -> int:
        return len(self._entry.log.attempts)

    @property
    def may_retry(self) -> bool:
        """Whether the last attempt broke in a way that a fresh sandbox may mend, and one more is allowed."""
        failure = self.failure
        return (
            self.record is None
            and self._attempt is None
            and failure is not None
            and failure.infrastructure
            and failure.retryable
            and self.attempts <= self._retries
        )

    def begin_ahead(self, *, timeout: float | None = None) -> None:
        """Start what :meth:`begin` does; the next call of it waits for this one's sandbox.

        Time to first command runs from then. Whoever drops the episode must :meth:`cancel` it.
        """
        if self._beginning is not None:
            raise SandboxStateError("this rollout is beginning already", task=self.task.id)
        self._need = Need()
        self._beginning = asyncio.get_running_loop().create_task(self._begin(timeout))
        self._beginning.add_done_callback(_seen)

    async def begin(self, *, timeout: float | None = None) -> Any:
        """A sandbox for the next attempt. A claim that infrastructure broke is asked for again.

        Args:
            timeout: seconds for all of it; one that was given to :meth:`begin_ahead` holds instead.

        Raises:
            SandboxError: there is none; the rollout has its record.
        """
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return await self._begin(timeout)
        assert self._need is not None
        self._need.needed = asyncio.get_running_loop().time()
        try:
            await asyncio.wait({beginning})
        except asyncio.CancelledError:
            beginning.cancel()
            await asyncio.wait({beginning})
            raise
        self._need = None
        return beginning.result()

    async def _begin(self, timeout: float | None) -> Any:
        if self._attempt is not None or self.record is not None:
            raise SandboxStateError("this rollout has a sandbox already, or has ended", task=self.task.id)
        deadline = None if timeout is None else time.monotonic() + timeout
        await self._pool.ledger.flush()
        while True:
            self._attempt = self._entry.attempt()
            rollout = self._rollout(self._attempt.n)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                ahead = {} if self._need is None else {"ahead": self._need}
                sandbox = await self._pool.claim(self.task, timeout=left, rollout=rollout, **ahead)
            except asyncio.CancelledError:
                self._end_attempt(None)
                await self.cancel("its claim was cancelled")
                raise
            except Exception as error:
                if isinstance(error, PoolClosedError) and error.kind == PoolClosedError.default_kind:
                    self.failure = await self._judge(error, "claim")
                    await self.cancel(error.message)  # in good order: nothing broke, nobody wants it any more
                    raise
                self._end_attempt(await self._judge(error, "claim"))
                late = deadline is not None and time.monotonic() >= deadline
                if self.may_retry and not late and not isinstance(error, CALLERS_MISTAKES):
                    continue
                await self.fail()
                raise
            self.sandbox = sandbox
            self._attempt.sandbox(sandbox)
            return sandbox

    async def grade(self) -> Outcome:
        """Grade the work; the outcome goes into the record."""
        if self.sandbox is None:
            raise SandboxStateError("there is no sandbox to grade", task=self.task.id)
        outcome: Outcome = await self.sandbox.grade()
        self.outcome = outcome
        return outcome

    async def broke(self, error: BaseException, phase: str) -> Failure:
        """The attempt ends with *error*; its sandbox is given back, or up where it cannot be trusted."""
        failure = await self._judge(error, phase)
        self._end_attempt(failure)
        await self._release(discard=failure.infrastructure)
        return failure

    async def complete(
        self, *, value: Any = None, truncated: str | None = None, reward: float | None = None
    ) -> Record:
        """The rollout ran to its end; *truncated* names the limit that ended it.

        *reward* is what somebody else than the task's grader found; a grade has precedence.

        Raises:
            TypeError: *value* is neither JSON-able nor text; the rollout has not ended.
        """
        outcome = self.outcome
        value = jsonable(value)
        self._end_attempt(None)
        record = self._entry.end(
            "completed",
            reward=outcome.reward if outcome is not None else reward,
            passed=outcome.passed if outcome is not None else None,
            value=value,
            truncated=truncated,
        )
        await self._ended(record)
        return record

    async def fail(self, failure: Failure | None = None) -> Record:
        """The rollout failed: by *failure*, else by that of its last attempt."""
        failure = failure or self.failure
        if failure is None:
            raise SandboxStateError("no attempt of this rollout has failed", task=self.task.id)
        self._end_attempt(failure)
        record = self._entry.end("failed", failure=failure)
        await self._ended(record)
        return record

    async def cancel(self, cause: str) -> Record | None:
        """Whoever drove it stopped. Nothing happens when it has ended."""
        beginning = self._beginning
        if beginning is not None and beginning is not asyncio.current_task():
            self._beginning = None
            beginning.cancel()
            await asyncio.wait({beginning})
        self._end_attempt(None)
        record = self._entry.cancel(cause)
        if record is not None:
            await self._ended(record)
        else:  # it has ended, perhaps by the pool's closing, which leaves the handle to us
            await self._release(discard=False)
        return record

    def _rollout(self, attempt: int) -> Rollout:
        entry = self._entry.log
        return Rollout(entry.run, self.task, entry.index, entry.group, attempt, id=entry.id)

    async def _judge(self, error: BaseException, phase: str) -> Failure:
        return await judge(self._pool.manager, error, phase, self._rollout(max(1, self.attempts)))

    def _end_attempt(self, failure: Failure | None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.end(self.sandbox, failure)
        if failure is not None:
            self.failure = failure
            self._pool.metrics.failure(failure.kind)

    async def _ended(self, record: Record) -> None:
        if self._clock is not None:
            self._clock.recorded()
        try:
            await self._release(discard=False)
        finally:
            await self._pool._recorded(record)

    async def _release(self, *, discard: bool) -> None:
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is None:
            return
        release = asyncio.ensure_future(sandbox.release(discard=discard))
        cancelled = await see_through(release)
        failed = None if release.cancelled() else release.exception()
        if failed is not None:
            log.warning("sandbox %s could not be given back: %s", sandbox.id, failed)
            self._pool.ledger.note("cleanup_failed", cause_of(failed), rollout=self._entry.id, what="release")
        if cancelled is not None:
            raise cancelled


def _seen(beginning: asyncio.Task[Any]) -> None:
    if not beginning.cancelled():
        beginning.exception()  # begin() raises it, if anybody asks
