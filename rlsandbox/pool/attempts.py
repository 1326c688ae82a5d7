"""One rollout, attempt by attempt: claim, policy, grade, end, release.

Limits: a rollout's ``timeout`` ends it as failed; ``Limits.wall`` and ``Limits.steps`` end the attempt as
truncated, and the work is graded as it stands.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._loops import see_through
from ..errors import (
    ClaimTimeoutError,
    ConfigError,
    LimitReachedError,
    PoolClosedError,
    SandboxDiedError,
    SandboxError,
    SandboxStateError,
)
from ..hooks import Rollout
from ..ledger import Attempt, Entry, failure_of
from ..ledger.failures import cause_of, jsonable, printed
from ..results import Failure, Outcome
from ..task import Task
from .policy import AsyncRollout, Call, Ended, SyncSide, in_thread, real_interrupt

if TYPE_CHECKING:
    import pluggy

    from .rollouts import Host, Plan

log = logging.getLogger("rlsandbox.pool.rollouts")

CLASSIFY_HOOK_S = 5.0
BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


class Stopped(BaseException):
    """The user pressed Ctrl-C while a policy ran on the main thread's own event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@dataclass
class Result:
    """How an attempt ended: a failure, or what goes into the record."""

    failure: Failure | None = None
    value: Any = None
    outcome: Outcome | None = None
    truncated: str | None = None


async def judge(
    manager: pluggy.PluginManager, error: BaseException, phase: str, about: Rollout | None
) -> Failure:
    """What *error* means for the rollout. Plugins of others answer on a thread, with a deadline."""
    others = [
        impl
        for impl in manager.hook.rlsandbox_classify_failure.get_hookimpls()
        if not getattr(impl.plugin, "__name__", "").startswith("rlsandbox_plugins.")
    ]
    if not others:
        return failure_of(error, phase, about, manager)
    try:
        return await in_thread(lambda: failure_of(error, phase, about, manager), CLASSIFY_HOOK_S)
    except TimeoutError:
        log.warning("a plugin's rlsandbox_classify_failure hangs; judged without it: %s", printed(error))
        return failure_of(error, phase, about, manager, builtin=True)


class Chain:
    """The attempts of one rollout."""

    def __init__(
        self,
        pool: Host,
        plan: Plan,
        entry: Entry,
        task: Task,
        sync: SyncSide | None,
        publish: Callable[[Entry], Coroutine[Any, Any, None]],
        clock: Any = None,
    ) -> None:
        self.pool = pool
        self.plan = plan
        self.entry = entry
        self.task = task
        self.sync = sync
        self._publish = publish
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._deadline = math.inf if plan.timeout is None else self._loop.time() + plan.timeout
        self._kept: tuple[Any, Any] | None = None  # snapshot, state
        self._from: str | None = None
        """The snapshot that the attempt stands on."""
        self._broken_before = False

    async def run(self) -> None:
        """Attempts until one counts; the rollout has its record then.

        Raises:
            CancelledError: the batch is stopped. The rollout may have no record yet.
            Stopped: the user wants the batch to be stopped.
        """
        if self._clock is not None:
            self._clock.requested()
        try:
            while True:
                attempt = self.entry.attempt()
                if await self._attempt(attempt):
                    return
                await self._pause(attempt.n)
                self.pool.expect([self.task])
        except (asyncio.CancelledError, Stopped):
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and real_interrupt():
                raise Stopped(error) from None
            # Ours: neither the policy's nor the sandbox's errors come this far.
            log.exception("rollout %s broke in rlsandbox itself", self.entry.id)
            if self.entry.record is None:
                self.entry.end("failed", failure=await self._judge(error, "internal"))
            await self._publish(self.entry)
        finally:
            if self._kept is not None:
                await self._quietly(self._kept[0].delete(), "delete its checkpoint")

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, attempt: Attempt) -> bool:
        """One attempt; True when the rollout has ended with it."""
        sandbox = None
        stray = False
        try:
            try:
                sandbox, state = await self._claim(attempt)
            except Exception as error:
                result = Result(await self._judge(error, "claim"))
            else:
                attempt.sandbox(sandbox, from_checkpoint=self._from)
                ended, result = await self._work(sandbox, attempt, state)
                stray = not await ended.settled()
                if stray:
                    log.warning("the policy of rollout %s does not end; it is left behind", self.entry.id)
            failure = result.failure
            attempt.end(sandbox, failure)
            if failure is not None:
                self.pool.metrics.failure(failure.kind)
                self._broken_before = self._broken_before or failure.infrastructure
                if failure.retryable and attempt.n <= self.plan.retries and self._left() != 0:
                    return False
            self._end(result)
            await self._publish(self.entry)
            return True
        finally:
            attempt.end(sandbox)
            if sandbox is not None:
                await self._release(sandbox, discard=stray)

    def _end(self, result: Result) -> None:
        outcome = None if result.failure else result.outcome
        self.entry.end(
            "completed" if result.failure is None else "failed",
            reward=None if outcome is None else outcome.reward,
            passed=None if outcome is None else outcome.passed,
            value=result.value,
            failure=result.failure,
            truncated=result.truncated,
        )

    async def _claim(self, attempt: Attempt) -> tuple[Any, Any]:
        """A sandbox, and the state that goes with its files."""
        about = self._about(attempt)
        self._from = None
        left = self._left()
        timeout = None if left is None else max(left, 0.001)
        if self._kept is not None:
            snapshot, state = self._kept
            try:
                sandbox = await self.pool.claim(snapshot, timeout=timeout, rollout=about)
                self._from = str(snapshot.id)
                return sandbox, copy.deepcopy(state)
            except (PoolClosedError, ClaimTimeoutError):
                raise
            except SandboxError as error:
                # Files and state belong together: without the one the other would be a lie.
                self._kept = None
                log.warning("rollout %s: its checkpoint is gone, it starts afresh: %s", self.entry.id, error)
                self.pool.ledger.note("checkpoint_lost", cause_of(error), rollout=self.entry.id)
        return await self.pool.claim(self.task, timeout=timeout, rollout=about), None

    async def _work(self, sandbox: Any, attempt: Attempt, state: Any) -> tuple[Ended, Result]:
        """Policy and grade."""
        wall = self.task.limits.wall
        wall_at = math.inf if wall is None else self._loop.time() + wall
        cut = "wall" if wall_at <= self._deadline else "timeout"
        wait_s = self._until(min(wall_at, self._deadline))
        budget = _budget(sandbox, self.task)
        over = _Over()
        held = self._hold(sandbox, attempt, state, over)
        call = Call(
            self.plan.policy,
            self.task,
            self.entry.id,
            pool=self.pool,
            take_away=lambda: self._release(sandbox, discard=True),
            shut_out=lambda: cut == "wall" and self._to_grade(sandbox),
        )
        try:
            if self.sync is None:
                ended = await call.on_loop(held, wait_s, cut)
            else:
                ended = await call.on_thread(held, wait_s, cut)
        finally:
            over.over = True
        if isinstance(ended.error, KeyboardInterrupt) and self.sync is None and real_interrupt():
            raise Stopped(ended.error)
        result = Result(truncated=ended.cut or budget.used_up if budget is not None else None)
        limit = _limit_reached(ended.error)
        if ended.cut == "timeout":
            result = Result(self._timed_out("policy"))
        elif limit is not None:
            result.truncated = limit.limit
        elif ended.error is not None and ended.cut is None:
            result.failure = await self._judge(ended.error, "policy")
        elif ended.error is None:
            try:
                result.value = jsonable(ended.value)
            except TypeError as error:
                cause = f"{error} (a policy gives a JSON-able value or text)"
                result.failure = Failure(
                    "value_not_json", "policy", cause, False, False, "TypeError", str(error)
                )
        if result.failure is None:
            await self._grade(sandbox, result)
        return ended, result

    def _to_grade(self, sandbox: Any) -> bool:
        return self.task.grader is not None and getattr(sandbox, "outcome", None) is None

    async def _grade(self, sandbox: Any, result: Result) -> None:
        """Fill in the outcome, or the failure to get one."""
        outcome: Outcome | None = getattr(sandbox, "outcome", None)
        try:
            if self._to_grade(sandbox):
                async with asyncio.timeout(self._left()):
                    outcome = await sandbox.grade()
            elif outcome is None and getattr(sandbox, "state", "") == "dead":
                raise SandboxDiedError(
                    "the sandbox died while the policy held it, and the policy went on",
                    sandbox=str(sandbox.id),
                )
            if outcome is not None and outcome.reward is not None and not math.isfinite(outcome.reward):
                raise ValueError(f"the grader's reward is {outcome.reward}, not a finite number")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            late = isinstance(error, TimeoutError) and self._left() == 0
            result.failure = self._timed_out("grade") if late else await self._judge(error, "grade")
            return
        result.outcome = outcome

    def _timed_out(self, phase: str) -> Failure:
        # Time that broken attempts took away is not the policy's.
        cause = f"the rollout's {self.plan.timeout:g} s were over in its phase {phase}"
        return Failure("rollout_timeout", phase, cause, False, infrastructure=self._broken_before)

    # ------------------------------------------------------------------ what the policy holds

    def _about(self, attempt: Attempt, state: Any = None, checkpoint: Any = None) -> Rollout:
        log_ = self.entry.log
        return Rollout(
            self.pool.run, self.task, log_.index, log_.group, attempt.n, self.entry.id, state, checkpoint
        )

    def _hold(self, sandbox: Any, attempt: Attempt, state: Any, over: _Over) -> Any:
        """What the policy is given, its ``rollout`` in place."""

        async def checkpoint(new_state: Any) -> Any:
            if over.over:
                raise SandboxStateError(
                    "the attempt is over: checkpoint() comes too late", sandbox=sandbox.id
                )
            try:
                kept = copy.deepcopy(new_state)
            except Exception as error:
                raise ConfigError(f"the state of a checkpoint must be copyable: {error}") from error
            snapshot = await sandbox.snapshot()
            before, self._kept = self._kept, (snapshot, kept)
            attempt.checkpoint(str(snapshot.id), getattr(snapshot, "bytes", None))
            if before is not None:
                await self._quietly(before[0].delete(), "delete its last checkpoint")
            return snapshot

        sync = self.sync
        if sync is None:
            about = self._about(attempt, state)
            sandbox.rollout = AsyncRollout(
                about.run, about.task, about.index, about.group, about.attempt, about.id, state, checkpoint
            )
            return sandbox

        def checkpoint_sync(new_state: Any) -> Any:
            return sync.snapshot(sync.portal.call(checkpoint, new_state))

        held = sync.sandbox(sandbox)
        held.rollout = self._about(attempt, state, checkpoint_sync)
        return held

    # ------------------------------------------------------------------ small things

    async def _judge(self, error: BaseException, phase: str) -> Failure:
        about = self._about(Attempt(self.entry, self.entry.log.attempts[-1]))
        return await judge(self.pool.manager, error, phase, about)

    async def _release(self, sandbox: Any, *, discard: bool) -> None:
        await self._quietly(sandbox.release(discard=discard), "release its sandbox")

    async def _quietly(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        """See *work* through, whoever cancels us meanwhile; its failure is noted and changes no record."""
        task = asyncio.ensure_future(work)
        cancelled = await see_through(task)
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            log.warning("rollout %s: could not %s: %s", self.entry.id, what, cause_of(failed))
            self.pool.ledger.note("cleanup_failed", cause_of(failed), rollout=self.entry.id, what=what)
        if cancelled is not None:
            raise cancelled

    async def _pause(self, attempt: int) -> None:
        longest = min(LONGEST_BACKOFF_S, BACKOFF_S * 2**attempt)
        left = self._left()
        await asyncio.sleep(random.uniform(0, longest if left is None else min(longest, left)))

    def _left(self) -> float | None:
        return self._until(self._deadline)

    def _until(self, when: float) -> float | None:
        return None if when == math.inf else max(0.0, when - self._loop.time())


class _Over:
    """Whether an attempt's policy has ended; a checkpoint after that would belong to nobody."""

    over = False


def _budget(sandbox: Any, task: Task) -> Any:
    """Limits are counted from the hand-over."""
    limits = task.limits
    if limits.steps is None and limits.wall is None:
        return None
    from ..sandbox import Budget

    sandbox.budget = Budget(limits)
    return sandbox.budget


def _limit_reached(error: BaseException | None) -> LimitReachedError | None:
    """The limit behind *error*: what a policy raises because of it, ``from None`` too, is the same end."""
    for _ in range(100):
        if error is None or isinstance(error, LimitReachedError):
            return error
        error = error.__cause__ or error.__context__
    return None
