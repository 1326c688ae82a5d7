"""One sub-environment: its order of tasks and the episode that is under way.

Coroutines run on the pool's event loop, so N lanes step at once; all else runs on the caller's thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import LimitReachedError, SandboxDiedError, SandboxError, SandboxStateError
from ..pool.episode import CALLERS_MISTAKES, Episode
from ..results import CommandResult
from ..task import Task
from .rules import Rules, Turn, not_run, nothing_ran

STALL_GRACE_S = 15.0
"""How long past its own deadline a command may stay unanswered before its sandbox counts as dead."""


class TaskOrder:
    """Every task once in a shuffled order, then shuffled anew; the same seed gives the same order."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._left: list[int] = []

    def restart(self) -> None:
        self._left = []

    def next(self, rng: np.random.Generator) -> int:
        if not self._left:
            self._left = [int(i) for i in rng.permutation(self._n)]
        return self._left.pop(0)


class Lane:
    """Plays episodes, one at a time."""

    def __init__(self, rules: Rules, *, transcript: bool = False) -> None:
        self.rules = rules
        self.order = TaskOrder(len(rules.tasks))
        self.episode: Episode | None = None
        self.ended = True
        """A reset is needed before the next step."""
        self._keep = transcript
        self._shown: list[str] = []
        self._turn: Turn | None = None
        self._steps = 0
        self._return = 0.0
        self._since = 0.0

    @property
    def sandbox(self) -> Any:
        """The AsyncSandbox of the episode, None without one."""
        return self.episode.sandbox if self.episode is not None else None

    def next_task(self, rng: np.random.Generator, options: dict[str, Any] | None) -> Task:
        return self.rules.chosen(options) or self.rules.tasks[self.order.next(rng)]

    # ------------------------------------------------------------------ on the event loop

    async def reset(self, pool: Any, task: Task) -> Turn:
        """A fresh sandbox for *task*; without one the turn says why, and the next step ends it."""
        await self.abandon("the environment was reset before the episode had ended")
        self._shown = [f"# {task.id}\n{task.prompt}\n"] if self._keep else []
        self._steps, self._return = 0, 0.0
        self.ended = False
        episode = self.episode = Episode(pool, task)
        self._turn = turn = Turn(task, nothing_ran())
        try:
            await episode.begin(timeout=self.rules.reset_timeout)
        except CALLERS_MISTAKES:
            self.episode, self.ended = None, True
            raise
        except SandboxError:
            turn = self._turn = replace(turn, failure=episode.failure)
            self._show(f"! {episode.failure.cause if episode.failure else 'no sandbox'}\n")
        self._since = time.monotonic()
        return turn

    async def step(self, action: str) -> Turn:
        """Run a command, or submit. Never raises for what broke in the sandbox: the turn says so."""
        episode, last = self.episode, self._turn
        if episode is None or last is None or self.ended:
            raise SandboxStateError("the episode has ended, or none has begun", hint="call reset() first")
        if last.failure is not None:  # the reset found no sandbox
            return last
        turn = replace(last, result=nothing_ran(), outcome=None)
        phase = "command"
        try:
            if action == self.rules.submit:
                turn = replace(turn, submitted=True)
                self._show(f"> {action}\n")
            else:
                result, limit = await self._command(episode, action)
                self._steps += 1
                turn = replace(turn, result=result, limit=limit or self._limit())
                self._show(f"$ {action}\n{result.text or result.stdout + result.stderr}")
                if result.exit_code:
                    self._show(f"[exit {result.exit_code}{', timed out' if result.timed_out else ''}]\n")
            if turn.done and episode.task.grader is not None:
                phase = "grade"
                turn = replace(turn, outcome=await episode.grade())
        except CALLERS_MISTAKES:
            raise
        except Exception as error:
            turn = replace(turn, failure=await episode.broke(error, phase), limit=None)
            self._show(f"! {turn.failure.cause if turn.failure else ''}\n")
        self._turn = turn
        return turn

    async def finish(self, turn: Turn) -> None:
        """Write the record of an episode that *turn* has ended, and give the sandbox back."""
        episode = self.episode
        self.episode, self.ended = None, True
        if episode is None or episode.record is not None:
            return
        if turn.failure is not None:
            await episode.fail(turn.failure)
            return
        value: dict[str, float] = {"steps": self._steps}
        if np.isfinite(self._return):
            value["return"] = self._return
        await episode.complete(value=value, truncated=turn.limit)

    async def abandon(self, cause: str) -> None:
        """Cancel the episode when one is under way."""
        episode, self.episode, self.ended = self.episode, None, True
        if episode is not None:
            await episode.cancel(cause)

    async def broke(self, turn: Turn, error: BaseException, phase: str) -> Turn:
        """*turn*, with the failure that *error* is: for what a reward function meets in the sandbox."""
        if self.episode is None:
            return turn
        turn = self._turn = replace(turn, failure=await self.episode.broke(error, phase), limit=None)
        return turn

    async def _command(self, episode: Episode, action: str) -> tuple[CommandResult, str | None]:
        limits = episode.task.limits
        left = None if limits.wall is None else limits.wall - (time.monotonic() - self._since)
        if left is not None and left <= 0:
            return nothing_ran(), "wall"
        if not self.rules.action_space.contains(action):
            return not_run(_why_not(action, self.rules.action_space.max_length)), None
        deadline = min((t for t in (limits.command, left) if t is not None), default=None)
        try:
            async with asyncio.timeout(None if deadline is None else deadline + STALL_GRACE_S):
                result: CommandResult = await episode.sandbox.run(action, timeout=deadline)
        except LimitReachedError as error:
            return nothing_ran(), error.limit
        except SandboxStateError:
            raise
        except SandboxError as error:
            if error.infrastructure:
                raise
            return not_run(error.message), None
        except TimeoutError:
            raise SandboxDiedError(
                f"no answer {STALL_GRACE_S:g} s past the command's deadline of {deadline:g} s",
                kind="sandbox_stalled",
                sandbox=episode.sandbox.id,
                task=episode.task.id,
            ) from None
        over = left is not None and result.timed_out and time.monotonic() - self._since >= (limits.wall or 0)
        return result, "wall" if over else None

    # ------------------------------------------------------------------ on the caller's thread

    def rewarded(self, reward: float) -> float:
        """Count *reward* into the episode's return."""
        self._return += reward
        return reward

    def transcript(self) -> str:
        return "".join(self._shown)

    def _limit(self) -> str | None:
        own = self.rules.max_steps
        theirs = self._turn.task.limits.steps if self._turn is not None else None
        most = min((n for n in (own, theirs) if n is not None), default=None)
        return "steps" if most is not None and self._steps >= most else None

    def _show(self, text: str) -> None:
        if self._keep and text:
            self._shown.append(text if text.endswith("\n") else text + "\n")


def _why_not(action: str, longest: int) -> str:
    if len(action) > longest:
        return f"the command has {len(action):,} characters, more than {longest:,}"
    if "\0" in action:
        return "the command contains a NUL character"
    return "the command contains a lone surrogate, which no text file can hold"
