"""One rollout behind a SandboxEnvironment: from the trainer's reset to its reward, whatever breaks.

Promises: nothing that infrastructure breaks raises; nobody waits beyond the step's deadline; a rollout that
broke goes on in a fresh sandbox only where that is the same world to the model (:mod:`.replay`), and is
missing otherwise. An environment lives for ever, a rollout for one step: a call that is stuck keeps its own
rollout and never touches the environment's next one.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import rlsandbox as rls
from rlsandbox.errors import (
    ConfigError,
    LimitReachedError,
    PoolClosedError,
    SandboxError,
    SandboxStateError,
    UnsupportedError,
)

from ._threads import LateError, before, by, spawn, within
from .replay import Journal, ReplayedSandbox

if TYPE_CHECKING:
    from .environment import SandboxEnvironment
    from .training import SandboxTraining

log = logging.getLogger("rlsandbox.trl")

CALLERS_MISTAKES = (ConfigError, UnsupportedError, PoolClosedError)
"""Errors of whoever set things up: they end the training, as they should."""
UNAVAILABLE = "The sandbox is not available. This attempt will not be scored."
SUBMITTED = "The work has been submitted; nothing more can be done."
OVER = "The limit ({}) of this attempt is reached; nothing more can be done."
OWN_LATE = "its get_reward did not end in its part of the step's {:g} s"
ENDING_S = 2.0
"""Giving up a sandbox is not waited for longer: it ends by itself."""
GRADING_SHARE = 0.2
"""Of a step's time that is kept for grading: a call that is stuck costs its own rollout, not all others."""

ACTING: contextvars.ContextVar[Rollout | None] = contextvars.ContextVar("rlsandbox_rollout", default=None)
"""The rollout on whose behalf the present call acts; none nested in it is guarded again."""


class Rollout:
    """The state of one rollout of an environment."""

    def __init__(self, training: SandboxTraining, task: rls.Task, owner: SandboxEnvironment) -> None:
        self.training, self.task, self.owner = training, task, owner
        self.pool = training.pool
        self.deadline, self.step_timeout = training._step_deadline(), training._step_timeout
        self.episode = training._episode(task)
        self.journal = Journal()
        self.sandbox: ReplayedSandbox | None = None
        self.missing = self.submitted = False
        self.done = False
        self.truncated: str | None = None
        self.steps = 0
        self.since = time.monotonic()
        self._ended: SandboxError | None = None  # from outside, while a call of ours is still stuck
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._graded: Future[float | None] | None = None
        training._grading_since = None

    # ------------------------------------------------------------------ time

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _reserve(self) -> float:
        grader = self.task.grader
        if self.step_timeout is None:
            return 0.0
        share = self.step_timeout * GRADING_SHARE
        if self.owner._graded_by_itself():
            return share
        return 0.0 if grader is None else min(share, grader.timeout)

    def _acting_until(self) -> float:
        """Commands end by themselves a little before: see :meth:`seconds`."""
        return self.deadline - self._reserve() / 2

    def _grading_until(self) -> float:
        """Where the model took long there is time to grade what it did."""
        began = self.training._grading_since
        return max(self.deadline, (time.monotonic() if began is None else began) + self._reserve())

    def _own_until(self) -> float:
        """For a subclass's rewards: asked for one after the other, each has its part of what is left."""
        if self.deadline == math.inf:
            return math.inf
        now, reserve = time.monotonic(), self._reserve()
        if self.training._grading_since is None:
            self.training._grading_since = now
        left = max(self.deadline, self.training._grading_since + reserve) - now
        return now + min(left, max(reserve, left / self.training._unscored()))

    def seconds(self) -> float:
        """What a command may take at most."""
        limits = self.task.limits
        wall = math.inf if limits.wall is None else limits.wall - (time.monotonic() - self.since)
        most = (self.training._command_timeout, limits.command or math.inf, wall)
        return max(0.1, min(*most, self._left() - self._reserve()))

    def _limit(self) -> str | None:
        limits = self.task.limits
        if limits.steps is not None and self.steps >= limits.steps:
            return "steps"
        if limits.wall is not None and time.monotonic() - self.since >= limits.wall:
            return "wall"
        return "step_timeout" if self._left() <= self._reserve() else None

    def blocked(self) -> Any:
        """The trainer waits for a sandbox."""
        return self.pool.metrics.idle.blocked()

    @property
    def over(self) -> bool:
        """It has a reward, or never will."""
        return self.missing or self.done

    # ------------------------------------------------------------------ its course

    def begin(self) -> None:
        """Its first sandbox; without one it is missing."""
        try:
            with self.blocked():
                timeout = min(self.training._claim_timeout, max(0.0, self._left()))
                held = self.episode.begin(timeout=timeout)
        except CALLERS_MISTAKES:
            raise
        except SandboxError:
            self.lost()
        else:
            self.sandbox = ReplayedSandbox(held, self.journal, self._again)
        self.since = time.monotonic()

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A tool: its answer, or a plain word about why there is none."""
        refused = self._refused(method)
        if refused is not None:
            return refused

        def acted() -> Any:
            token = ACTING.set(self)
            try:
                return method(self.owner, *args, **kwargs)
            finally:
                ACTING.reset(token)

        try:
            with self.blocked():
                return within(self._acting_until(), acted)
        except Exception as error:
            return self._answer_to(error)

    async def call_async(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """:meth:`call` for a tool that is a coroutine function."""
        refused = self._refused(method)
        if refused is not None:
            return refused
        token = ACTING.set(self)
        try:
            with self.blocked():
                return await by(self._acting_until(), method(self.owner, *args, **kwargs))
        except Exception as error:
            return self._answer_to(error)
        finally:
            ACTING.reset(token)

    def _refused(self, method: Callable[..., Any]) -> str | None:
        if self.missing:
            return UNAVAILABLE
        if self.submitted:
            return SUBMITTED
        limit = None if method.__name__ == "submit" else self._limit()
        if limit is None:
            return None
        self.truncated = limit
        return OVER.format(limit)

    def _answer_to(self, error: Exception) -> str:
        """What the model is told of *error*; what is not ours is raised."""
        if isinstance(error, LateError):
            self._late("command")
            return UNAVAILABLE
        if isinstance(error, LimitReachedError):
            self.truncated = error.limit
            return OVER.format(error.limit)
        if not isinstance(error, SandboxError) or isinstance(error, CALLERS_MISTAKES):
            raise error
        if self.missing:
            return UNAVAILABLE
        if not error.infrastructure:
            return f"error: {error.message}"
        self._broke(error, error.phase)
        return UNAVAILABLE

    # ------------------------------------------------------------------ what breaks

    def _again(self, error: SandboxError) -> rls.Sandbox | None:
        """A fresh sandbox in which everything was done again, or None: the rollout is lost."""
        while True:
            with self._renewing:
                if self._ended is not None or self.missing or self.episode.record is not None:
                    return None
                if self.journal.why or not error.retryable or self._left() <= 0:
                    why = self.journal.why or "nothing can mend it, or the step's time is over"
                    log.info("task %s: not begun again, %s: %s", self.task.id, why, error)
                    return None
                self.episode.broke(error, error.phase)
                if not self.episode.may_retry:
                    return None
                timeout = min(self.training._claim_timeout, max(0.0, self._left()))
                try:
                    fresh = self.episode.begin(timeout=timeout)
                except CALLERS_MISTAKES:
                    raise
                except SandboxError:
                    self.lost()
                    return None
            try:
                self.journal.replay(fresh, self._check)
            except SandboxError as again:
                error = again
                if not error.infrastructure or not error.retryable:
                    self._broke(error, error.phase)
                    return None
            else:
                return fresh

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _late(self, phase: str, said: str = "the step's {:g} s were over") -> None:
        """The step's time is over and a call of ours is stuck: give it all up, and wait for nothing."""
        error = SandboxError(
            said.format(self.step_timeout), kind="step_timeout", phase=phase,
            retryable=False, task=self.task.id, hint="step_timeout= of SandboxTraining",
        )  # fmt: skip
        with self._lock:
            if self.over:
                return
            self.missing, self._ended = True, error
        self._count(completed=False, reward=None)
        # Else it goes on, or the pool's closing has ended all.
        with contextlib.suppress(LateError, PoolClosedError):
            before(time.monotonic() + ENDING_S, spawn(lambda: self._give_up(error, phase)))

    def _give_up(self, error: SandboxError, phase: str) -> None:
        with self._renewing:
            if self.episode.record is None:
                self.episode.fail(self.episode.broke(error, phase))

    def _broke(self, error: BaseException, phase: str) -> None:
        with self._renewing:
            if self.episode.record is None:
                if self.episode.sandbox is not None:
                    self.episode.broke(error, phase)
                self.episode.fail()
        self.lost()

    def lost(self) -> None:
        """The rollout has no reward, and is on record as failed."""
        with self._lock:
            if self.over:
                return
            self.missing = True
        self._count(completed=False, reward=None)

    def _count(self, *, completed: bool, reward: float | None, scored: bool = True) -> None:
        expected = scored and self.task.grader is not None
        self.training._counter().ended(completed=completed, expected=expected, reward=reward)

    # ------------------------------------------------------------------ its end

    def reward(self) -> float | None:
        """The reward; None when infrastructure broke the rollout."""
        graded = self.finish()
        with self.blocked():
            try:
                return before(self._grading_until(), graded)
            except LateError:
                self._late("grade")
                return graded.result() if self.done else None  # it came at the last moment

    def finish(self) -> Future[float | None]:
        """Grade and record, once, beside whatever else goes on."""
        with self._lock:
            if self._graded is None:
                self._graded = spawn(self._score)
            return self._graded

    def _score(self) -> float | None:
        with self.training._grading:  # not all at once
            while not self.missing:
                try:
                    outcome = self.episode.grade() if self.task.grader is not None else None
                    reward = None if outcome is None else outcome.reward
                    if reward is not None and not math.isfinite(reward):
                        raise ValueError(f"the grader's reward is {reward}, not a finite number")
                except CALLERS_MISTAKES:
                    raise
                except Exception as error:
                    if isinstance(error, SandboxError) and self._again(error) is not None:
                        continue
                    if self._ended is None:
                        self._broke(error, "grade")
                else:
                    return self.complete(reward)
        return None

    def complete(self, reward: float | None, *, scored: bool = True) -> float | None:
        """It ran to its end, with *reward*; None when the step went on without it."""
        with self._lock:
            if self.over:
                return reward if self.done else None
            self.done = True
        self.episode.complete(value={"steps": self.steps}, truncated=self.truncated, reward=reward)
        self._count(completed=True, reward=reward, scored=scored)
        return reward

    def own_reward(self, method: Callable[[Any], float | None]) -> float | None:
        """A subclass's reward, on the same terms as a tool: what breaks the rollout makes it missing."""
        if self.missing:
            return None

        def asked() -> float | None:
            token = ACTING.set(self)
            try:
                return method(self.owner)
            finally:
                ACTING.reset(token)

        try:
            with self.blocked():
                found = within(self._own_until(), asked)
            return self._settled(found)
        except LateError:
            self._late("grade", OWN_LATE)
        except SandboxError as error:
            self._no_reward(error)
        return None

    async def own_reward_async(self, method: Callable[[Any], Any]) -> float | None:
        """:meth:`own_reward` for a coroutine function."""
        if self.missing:
            return None
        token = ACTING.set(self)
        try:
            with self.blocked():
                found = await by(self._own_until(), method(self.owner))
            return self._settled(found)
        except LateError:
            self._late("grade", OWN_LATE)
        except SandboxError as error:
            self._no_reward(error)
        finally:
            ACTING.reset(token)
        return None

    def _settled(self, reward: float | None) -> float | None:
        if self.missing:
            return None
        found = None if reward is None else float(reward)  # a tensor, say
        if found is not None and not math.isfinite(found):
            raise ValueError(
                f"the reward of task {self.task.id!r} must be a finite number or None, not {found}"
            )
        if not self.done:  # its own reward, not the grader's
            self.complete(found)
        return found

    def unscored(self) -> None:
        """It ran to its end, and nobody asks us for a reward."""
        if not self.missing and not self.done:
            self.complete(None, scored=False)

    def _no_reward(self, error: SandboxError) -> None:
        if isinstance(error, CALLERS_MISTAKES) or not (error.infrastructure or self.missing):
            raise error
        self._broke(error, error.phase)

    def abandon(self, cause: str) -> None:
        """Nobody asked for the reward; give the sandbox back."""
        with self._lock:
            if self.over:
                return
            self.done = True
        try:
            self.episode.cancel(cause)
        except PoolClosedError:  # it has cancelled all rollouts
            return
        self._count(completed=False, reward=None)


class NoSandboxError(SandboxStateError, AttributeError):
    """There is none at present. An AttributeError too: whoever looks through an environment's attributes, as
    some versions of the trainer do, finds it absent."""


def no_sandbox() -> NoSandboxError:
    return NoSandboxError("this rollout has no sandbox", hint="it broke, has ended, or was never reset")
