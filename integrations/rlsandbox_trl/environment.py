"""SandboxEnvironment: what the trainer holds for one rollout; its public methods are the model's tools.

Promises: what infrastructure breaks never raises into the trainer; the rollout then has no reward (None),
its tools say so plainly, and the ledger has the record. The work is graded where the model cannot reach.
Everything that is neither a tool nor the trainer's (``reset``, ``get_reward``) has a name that begins with an
underscore, because every public method becomes a tool.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rlsandbox as rls

from .rollout import ACTING, Rollout, no_sandbox

if TYPE_CHECKING:
    from .training import SandboxTraining

log = logging.getLogger("rlsandbox.trl")


def _tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as a tool: failures of the sandbox end the rollout, not the training."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def later(self: SandboxEnvironment, *args: Any, **kwargs: Any) -> Any:
            rollout = self._rollout
            if rollout is None or ACTING.get() is rollout:
                return await method(self, *args, **kwargs)
            return await rollout.call_async(method, args, kwargs)

        return later

    @functools.wraps(method)
    def tool(self: SandboxEnvironment, *args: Any, **kwargs: Any) -> Any:
        rollout = self._rollout
        if rollout is None or ACTING.get() is rollout:  # a tool that uses another one: the outer one guards
            return method(self, *args, **kwargs)
        return rollout.call(method, args, kwargs)

    return tool


def _reward(method: Callable[..., Any]) -> Callable[..., Any]:
    """A subclass's ``get_reward``: never asked when the rollout is missing, and recorded."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def later(self: SandboxEnvironment) -> Any:
            rollout = self._rollout
            return None if rollout is None else await rollout.own_reward_async(method)

        return later

    @functools.wraps(method)
    def reward(self: SandboxEnvironment) -> Any:
        rollout = self._rollout
        return None if rollout is None else rollout.own_reward(method)

    return reward


class SandboxEnvironment:
    """One rollout's sandbox as TRL wants it. Subclass it and add methods: each public one becomes a tool.

    A tool needs type hints and a docstring in Google's style. ``self._sandbox`` is the
    :class:`rlsandbox.Sandbox`, ``self._task`` the task. Where the sandbox breaks and a fresh one is the same
    world to the model, ``self._sandbox`` goes on in that one; a tool does not notice.
    """

    _training: SandboxTraining
    _rollout: Rollout | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_") and name != "reset":
                setattr(cls, name, _reward(member) if name == "get_reward" else _tool(member))

    # ------------------------------------------------------------------ what the trainer calls

    def reset(self, **row: Any) -> str | None:
        """A fresh sandbox for the row's task. Never raises for what infrastructure breaks."""
        self._abandon("the trainer went on without asking for the reward")
        self._rollout = Rollout(self._training, self._training._task_of(row), self)
        self._rollout.begin()
        return None

    def get_reward(self) -> float | None:
        """The reward of the work; None when infrastructure broke the rollout."""
        if self._rollout is None:
            return None
        self._training._finish()  # where a whole batch has come to its end; a rollout worker asks one by one
        return self._rollout.reward()

    # ------------------------------------------------------------------ tools

    @_tool
    def shell(self, command: str) -> str:
        """Run a shell command in the sandbox.

        Args:
            command: The command, as for sh -c.

        Returns:
            str: What it printed, and its exit status unless that is 0.
        """
        acting = self._acting
        acting.steps += 1
        result = self._sandbox.run(command, timeout=acting.seconds())
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
        acting = self._acting
        acting.submitted = True
        if self._graded_by_task():
            acting.finish()  # graded while the model goes on
        return "Submitted."

    # ------------------------------------------------------------------ private

    @property
    def _acting(self) -> Rollout:
        """The rollout of the present call; one that is stuck in an earlier step keeps its own."""
        acting = ACTING.get()
        rollout = acting if acting is not None and acting.owner is self else self._rollout
        if rollout is None:
            raise no_sandbox()
        return rollout

    @property
    def _task(self) -> rls.Task:
        return self._acting.task

    @property
    def _sandbox(self) -> rls.Sandbox:
        sandbox = self._acting.sandbox
        if sandbox is None:
            raise no_sandbox()
        return sandbox

    @property
    def _missing(self) -> bool:
        """Infrastructure broke the present rollout."""
        return self._rollout is not None and self._rollout.missing

    def _graded_by_task(self) -> bool:
        return type(self).get_reward is SandboxEnvironment.get_reward

    def _graded_by_itself(self) -> bool:
        return callable(self.get_reward) and not self._graded_by_task()

    def _shortened(self, text: str) -> str:
        most = self._training._output
        if len(text) <= most:
            return text
        return (
            f"{text[: most // 2]}\n[... {len(text) - most:,} characters left out ...]\n{text[-(most // 2) :]}"
        )

    def _leave(self, whole: bool) -> None:
        """The batch is over: whatever still has its sandbox gives it back.

        Nobody asked an environment without a ``get_reward`` for one, and other functions have scored it.
        """
        if whole and self._rollout is not None and not callable(self.get_reward):
            rollout, self._rollout = self._rollout, None
            rollout.unscored()
        elif not whole:
            try:
                self._abandon("the batch was left by an exception")
            except Exception as error:  # the one that is under way says more
                log.warning("a rollout could not be ended: %s", error)

    def _abandon(self, cause: str) -> None:
        """Nobody asked for the reward; give the sandbox back."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.abandon(cause)
