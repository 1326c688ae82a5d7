"""One rollout's sandbox: claimed when the rollout begins, used by its tools, graded, given back.

Promises: what infrastructure breaks never raises out of here; the rollout then is *lost*, its tools say so,
it has no reward, and the ledger has the record. The work is graded where the model cannot reach.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import (
    ConfigError,
    LimitReachedError,
    PoolClosedError,
    SandboxError,
    SandboxStateError,
    UnsupportedError,
)

from .numbers import Ended, Interval
from .settings import Settings

log = logging.getLogger("rlsandbox.verl")

CALLERS_MISTAKES = (ConfigError, UnsupportedError)
"""Errors of whoever set things up: no rollout can mend them."""
UNAVAILABLE = "The sandbox is not available. This attempt will not be scored."
SUBMITTED = "The work has been submitted; nothing more can be done."


class Session:
    """A rollout of *task*, attempt after attempt.

    Args:
        pool: the job's.
        group, batch: of the ledger.
        uid: of the rollout, unique in the job.
    """

    def __init__(
        self, pool: rls.AsyncPool, task: rls.Task, settings: Settings, *, group: str, batch: str, uid: str
    ) -> None:
        self.task, self.settings = task, settings
        self.lost = self.submitted = False
        self.truncated: str | None = None
        self.mistake: SandboxError | None = None
        """Of whoever set things up; a tool cannot raise it through verl."""
        self.error: BaseException | None = None
        """What broke the last attempt that was lost."""
        self.reward: float | None = None
        self.failure: rls.Failure | None = None
        self.ttfc_s: float | None = None
        self._names = (uid, group, batch)
        self._episode = rls.AsyncEpisode(pool, task, group=group, batch=batch, retries=settings.retries)
        self._began = time.monotonic()
        self._blocked: list[Interval] = []
        self._busy: list[Interval] = []
        self._steps = 0
        self._order = asyncio.Lock()
        self._reset()

    def _reset(self) -> None:
        self.lost = self.submitted = False
        self.truncated = None
        self._steps = 0
        self._asked = False
        self._since: float | None = None

    @property
    def over(self) -> bool:
        """Whether the model has nothing more to do."""
        return self.lost or self.submitted

    @property
    def record(self) -> rls.Record | None:
        return self._episode.record

    # ------------------------------------------------------------------ an attempt

    def begin(self) -> None:
        """Ask for the sandbox; the model's first words are generated while it comes."""
        self._reset()
        self._episode.begin_ahead(timeout=self.settings.claim_timeout)
        self._asked = True

    async def sandbox(self) -> rls.AsyncSandbox:
        """The attempt's; waits for it."""
        if self._asked:  # awaited even when it is there: waiting for it ends here
            self._asked = False
            await self._episode.begin()
            self._since = time.monotonic()
        sandbox: rls.AsyncSandbox | None = self._episode.sandbox
        if sandbox is None:
            raise SandboxStateError("this rollout has no sandbox", task=self.task.id)
        return sandbox

    async def perform(self, tool: Callable[..., Awaitable[str]], *args: Any, ends: bool = False) -> str:
        """What a tool answers: ``await tool(sandbox, *args)``. The calls of a rollout run in their order."""
        async with self._order:
            if self.lost:
                return UNAVAILABLE
            if self.submitted:
                return SUBMITTED
            if ends:
                self.submitted = True
                return "Submitted."
            try:
                async with self.blocked():
                    sandbox = await self.sandbox()
                    limit = self._limit()
                    if limit is not None:
                        self.truncated = limit
                        return _reached(limit)
                    self._steps += 1
                    try:
                        return await tool(sandbox, *args)
                    except ConfigError as error:  # an argument is wrong, and the model gave it
                        return f"error: {error.message}"
            except LimitReachedError as error:
                self.truncated = error.limit
                return _reached(error.limit)
            except CALLERS_MISTAKES as error:
                self.mistake = error
                raise
            except SandboxError as error:
                if not error.infrastructure and self._episode.sandbox is not None:
                    return f"error: {error.message}"
                await self._broke(error, "command")
                return UNAVAILABLE

    def seconds(self) -> float:
        """What a command may take at most."""
        limits = self.task.limits
        left = math.inf if limits.wall is None else limits.wall - (time.monotonic() - (self._since or 0.0))
        return max(0.1, min(self.settings.command_timeout, limits.command or math.inf, left))

    def _limit(self) -> str | None:
        limits = self.task.limits
        if limits.steps is not None and self._steps >= limits.steps:
            return "steps"
        over = limits.wall is not None and time.monotonic() - (self._since or 0.0) >= limits.wall
        return "wall" if over else None

    # ------------------------------------------------------------------ its end

    async def finish(self) -> None:
        """Grade the work and record it; :attr:`lost` says whether infrastructure broke that."""
        if self.lost:
            return
        try:
            async with self.blocked():
                await self.sandbox()
                outcome = await self._episode.grade() if self.task.grader is not None else None
                reward = None if outcome is None else outcome.reward
                if reward is not None and not math.isfinite(reward):
                    raise ValueError(f"the grader's reward is {reward}, not a finite number")
                self._keep_ttfc()
                await self._episode.complete(value={"steps": self._steps}, truncated=self.truncated)
        except CALLERS_MISTAKES:
            raise
        except Exception as error:
            await self._broke(error, "grade")
        else:
            self.reward = reward

    def may_retry(self) -> bool:
        """Whether a further attempt is to be made of what is lost."""
        deadline = self.settings.deadline
        late = deadline is not None and time.monotonic() - self._began >= deadline
        return self.lost and self._episode.may_retry and not late

    async def give_up(self) -> None:
        """No further attempt: the rollout is recorded as failed, unless it has its end already."""
        if self._episode.record is None and self._episode.failure is not None:
            await self._episode.fail()
        else:  # its pool was closed
            await self.cancel("nobody goes on with it")

    async def raised(self, error: Exception) -> None:
        """What runs the model raised: the rollout is lost, whoever is to blame."""
        if not self.lost:
            try:
                await self.sandbox()  # a claim that is under way would be nobody's
            except SandboxError as broken:
                log.debug("nor was there a sandbox: %s", broken)
            await self._broke(error, "policy")
        await self.give_up()

    async def cancel(self, cause: str) -> None:
        """Nobody wants it any more."""
        try:
            await self._episode.cancel(cause)
        except PoolClosedError as error:
            log.debug("the pool has cancelled rollout %s: %s", self._names[0], error)

    async def _broke(self, error: Exception, phase: str) -> None:
        self.lost, self.error = True, error
        self._keep_ttfc()
        if self._episode.record is None:  # a claim that broke for good has one
            await self._end_attempt(error, phase)
        self.failure = self._episode.failure
        log.info(
            "rollout %s of task %s: attempt %d broke: %s", self._names[0], self.task.id, self.attempts, error
        )

    async def _end_attempt(self, error: Exception, phase: str) -> None:
        try:
            await self._episode.broke(error, phase)
        except PoolClosedError as gone:
            log.debug("the sandbox went with the pool's owner: %s", gone)

    def _keep_ttfc(self) -> None:
        sandbox = self._episode.sandbox
        if sandbox is not None:
            self.ttfc_s = getattr(sandbox, "ttfc_s", None)

    # ------------------------------------------------------------------ what is told of it

    @property
    def attempts(self) -> int:
        return self._episode.attempts

    @asynccontextmanager
    async def blocked(self) -> AsyncIterator[None]:
        """The rollout waits for its sandbox."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._blocked.append((start, time.monotonic()))

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """The model generates."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._busy.append((start, time.monotonic()))

    def told(self) -> Ended:
        """For the pool's owner."""
        uid, group, batch = self._names
        done = self.record is not None and self.record.status == "completed"
        failed = self.mistake or self.failure
        kind = None if done else failed.kind if failed is not None else "cancelled"
        return Ended(
            uid, group, batch, self._began, time.monotonic(), done, self.task.grader is not None,
            self.reward if done else None, kind, self.attempts, tuple(self._blocked), tuple(self._busy),
        )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """For the rollout's row: plain values only."""
        record = self.record
        return {
            "task_id": self.task.id,
            "status": "lost" if record is None else record.status,
            "reward": self.reward,
            "failure": None if self.failure is None or self.reward is not None else self.failure.kind,
            "attempts": self.attempts,
            "steps": self._steps,
            "truncated": self.truncated,
            "ttfc_s": self.ttfc_s,
        }


def _reached(limit: str) -> str:
    return f"The limit ({limit}) of this attempt is reached; nothing more can be done."
