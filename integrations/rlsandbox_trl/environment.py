"""SandboxEnvironment: what the trainer holds for one rollout; its public methods are the model's tools.

Promises: what infrastructure breaks never raises into the trainer; the rollout then has no reward (None),
its tools say so plainly, and the ledger has the record. The work is graded where the model cannot reach.
Everything that is neither a tool nor the trainer's (``reset``, ``get_reward``) has a name that begins with an
underscore, because every public method becomes a tool.
"""

from __future__ import annotations

import functools
import inspect
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

if TYPE_CHECKING:
    from .training import SandboxTraining

CALLERS_MISTAKES = (ConfigError, UnsupportedError, PoolClosedError)
"""Errors of whoever set things up: they end the training, as they should."""
UNAVAILABLE = "The sandbox is not available. This attempt will not be scored."
SUBMITTED = "The work has been submitted; nothing more can be done."


def _tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as a tool: failures of the sandbox end the rollout, not the training."""

    @functools.wraps(method)
    def tool(self: SandboxEnvironment, *args: Any, **kwargs: Any) -> Any:
        return self._perform(method, args, kwargs)

    return tool


class SandboxEnvironment:
    """One rollout's sandbox as TRL wants it. Subclass it and add methods: each public one becomes a tool.

    A tool needs type hints and a docstring in Google's style. ``self._sandbox`` is the
    :class:`rlsandbox.Sandbox`, ``self._task`` the task.
    """

    _training: SandboxTraining
    _task: rls.Task
    _episode: rls.Episode | None = None
    _graded: Future[float | None] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            public = inspect.isfunction(member) and not name.startswith("_")
            if public and name not in ("reset", "get_reward"):
                setattr(cls, name, _tool(member))

    # ------------------------------------------------------------------ what the trainer calls

    def reset(self, **row: Any) -> str | None:
        """A fresh sandbox for the row's task. Never raises for what infrastructure breaks."""
        self._abandon("the trainer went on without asking for the reward")
        self._task = self._training._task_of(row)
        self._lock = threading.Lock()
        self._missing = self._submitted = False
        self._truncated: str | None = None
        self._depth = self._steps = 0
        self._graded = None
        self._episode = self._training._episode(self._task)
        try:
            with self._blocked():
                self._episode.begin(timeout=self._training._claim_timeout)
        except CALLERS_MISTAKES:
            raise
        except SandboxError:
            self._lost()
        self._since = time.monotonic()
        return None

    def get_reward(self) -> float | None:
        """The reward of the work; None when infrastructure broke the rollout."""
        self._training._finish()
        with self._blocked():
            return self._finish().result()

    # ------------------------------------------------------------------ tools

    @_tool
    def shell(self, command: str) -> str:
        """Run a shell command in the sandbox.

        Args:
            command: The command, as for sh -c.

        Returns:
            str: What it printed, and its exit status unless that is 0.
        """
        self._steps += 1
        result = self._sandbox.run(command, timeout=self._seconds())
        text = result.text or result.stdout + result.stderr
        if result.timed_out:
            text += "\n[timed out]"
        elif result.exit_code:
            text += f"\n[exit {result.exit_code}]"
        return self._shortened(text)

    @_tool
    def read_file(self, path: str) -> str:
        """Read a text file in the sandbox.

        Args:
            path: The file; relative to the working directory.

        Returns:
            str: What is in it.
        """
        return self._shortened(self._sandbox.read_file(path).decode(errors="replace"))

    @_tool
    def write_file(self, path: str, content: str) -> str:
        """Write a text file in the sandbox, replacing what is there.

        Args:
            path: The file; relative to the working directory.
            content: What is to be in it.

        Returns:
            str: A confirmation.
        """
        self._sandbox.write_file(path, content)
        return f"wrote {len(content.encode())} bytes to {path}"

    @_tool
    def submit(self) -> str:
        """Hand in the work. Nothing can be changed afterwards.

        Returns:
            str: A confirmation.
        """
        self._submitted = True
        if type(self).get_reward is SandboxEnvironment.get_reward:
            self._finish()  # graded while the model goes on
        return "Submitted."

    # ------------------------------------------------------------------ private

    @property
    def _sandbox(self) -> rls.Sandbox:
        sandbox = None if self._episode is None else self._episode.sandbox
        if sandbox is None:
            raise SandboxStateError(
                "this rollout has no sandbox", hint="it broke, has ended, or was never reset"
            )
        return sandbox

    def _blocked(self) -> Any:
        return self._training.pool.metrics.idle.blocked()

    def _seconds(self) -> float:
        """What a command may take at most."""
        limits = self._task.limits
        left = math.inf if limits.wall is None else limits.wall - (time.monotonic() - self._since)
        return max(0.1, min(self._training._command_timeout, limits.command or math.inf, left))

    def _shortened(self, text: str) -> str:
        most = self._training._output
        if len(text) <= most:
            return text
        return (
            f"{text[: most // 2]}\n[... {len(text) - most:,} characters left out ...]\n{text[-(most // 2) :]}"
        )

    def _limit(self) -> str | None:
        limits = self._task.limits
        if limits.steps is not None and self._steps >= limits.steps:
            return "steps"
        over = limits.wall is not None and time.monotonic() - self._since >= limits.wall
        return "wall" if over else None

    def _perform(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:  # a tool that uses another one: failures are the outer one's
            return method(self, *args, **kwargs)
        if self._missing or self._episode is None:
            return UNAVAILABLE
        if self._submitted:
            return SUBMITTED
        limit = None if method.__name__ == "submit" else self._limit()
        if limit is not None:
            self._truncated = limit
            return f"The limit ({limit}) of this attempt is reached; nothing more can be done."
        self._depth = 1
        try:
            with self._blocked():
                return method(self, *args, **kwargs)
        except LimitReachedError as error:
            self._truncated = error.limit
            return f"The limit ({error.limit}) of this attempt is reached; nothing more can be done."
        except CALLERS_MISTAKES:
            raise
        except SandboxError as error:
            if not error.infrastructure:
                return f"error: {error.message}"
            self._broke(error, "command")
            return UNAVAILABLE
        finally:
            self._depth = 0

    def _broke(self, error: BaseException, phase: str) -> None:
        assert self._episode is not None
        self._episode.broke(error, phase)
        if self._episode.record is None:
            self._episode.fail()
        self._lost()

    def _lost(self) -> None:
        """The rollout has no reward, and is on record as failed."""
        self._missing = True
        self._count(completed=False, reward=None)

    def _count(self, *, completed: bool, reward: float | None) -> None:
        expected = self._task.grader is not None
        self._training._counter().ended(completed=completed, expected=expected, reward=reward)

    def _finish(self) -> Future[float | None]:
        """Grade and record, once, beside whatever else goes on."""
        with self._lock:
            if self._graded is None:
                self._graded = self._training._threads.submit(self._score)
            return self._graded

    def _score(self) -> float | None:
        episode = self._episode
        if episode is None or self._missing:
            return None
        try:
            outcome = episode.grade() if self._task.grader is not None else None
            reward = None if outcome is None else outcome.reward
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"the grader's reward is {reward}, not a finite number")
        except CALLERS_MISTAKES:
            raise
        except Exception as error:
            self._broke(error, "grade")
            return None
        episode.complete(value={"steps": self._steps}, truncated=self._truncated)
        self._count(completed=True, reward=reward)
        return reward

    def _abandon(self, cause: str) -> None:
        """Nobody asked for the reward; give the sandbox back."""
        episode, self._episode = self._episode, None
        if episode is None or episode.record is not None:
            return
        try:
            episode.cancel(cause)
        except PoolClosedError:  # it has cancelled all rollouts
            return
        self._count(completed=False, reward=None)
