"""``Sandbox-v0``: one sandbox as a Gymnasium environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym

from ..errors import PoolClosedError, SandboxError
from .bridge import Bridge
from .lane import Lane
from .rules import Observe, RewardFn, Rules, Turn

if TYPE_CHECKING:
    from ..task import Task


class SandboxEnv(gym.Env[Any, str]):
    """An agent works on a task in a sandbox, a shell command a step.

    The action is a command; exactly *submit* ends the episode and has the work graded, out of the agent's
    reach. Observations are ``Dict(prompt, stdout, stderr, exit_code)`` and lie in their space for any bytes a
    command prints. ``terminated``: submitted. ``truncated``: a limit of the task was hit (``info["limit"]``,
    the work is graded as it is), or infrastructure failed (``info["failure"]``, the reward is NaN, and the
    rollout is in the ledger as failed). ``info`` has ``task_id``, ``result``, ``outcome``, ``failure`` and
    ``limit``.

    Args:
        tasks: a source for ``load_tasks``, or tasks; None: the demo tasks.
        pool: sandboxes come from here, and it stays open; None: a pool of its own.
        observe: from a command's result (an empty one with exit code -1 where no command ran) and the task
            to an observation.
        observation_space: of what *observe* gives; needed unless that is text.
        reward_fn: from the result, the Sandbox and the Outcome (None unless graded or submitted) to the
            step's reward; default: the grade at the end, 0.0 before.
        submit: the action that submits.
        max_episode_steps: commands an episode may run; a task's own limit may be lower.
        reset_timeout: seconds that a reset may wait for a sandbox; then the rollout has failed.
        render_mode: ``"ansi"``: :meth:`render` gives the episode's transcript.
        **pool_kwargs: of the pool of its own.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]

    def __init__(
        self,
        *,
        tasks: str | Iterable[Task] | None = None,
        pool: Any = None,
        observe: Observe | None = None,
        observation_space: gym.Space[Any] | None = None,
        reward_fn: RewardFn | None = None,
        submit: str = "submit",
        max_episode_steps: int | None = None,
        reset_timeout: float | None = None,
        render_mode: str | None = None,
        **pool_kwargs: Any,
    ) -> None:
        self._rules = Rules(
            tasks=tasks,
            observe=observe,
            observation_space=observation_space,
            reward_fn=reward_fn,
            submit=submit,
            max_steps=max_episode_steps,
            render_mode=render_mode,
            reset_timeout=reset_timeout,
        )
        self._bridge = Bridge(pool, pool_kwargs, size=1)
        self._lane = Lane(self._rules, transcript=render_mode == "ansi")
        self.render_mode = render_mode
        self.action_space = self._rules.action_space
        self.observation_space = self._rules.observation_space

    @property
    def tasks(self) -> list[Task]:
        return list(self._rules.tasks)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in a fresh sandbox. Seeds reproduce the order of tasks.

        Args:
            seed: starts the order of tasks anew.
            options: ``{"task": Task, id or index}`` chooses the task.
        """
        super().reset(seed=seed)
        pool = self._bridge.asynchronous  # the closed hear of it before anything changes
        if seed is not None:
            self._lane.order.restart()
        task = self._lane.next_task(self.np_random, options)
        turn = self._bridge.call(self._lane.reset, pool, task)
        return self._rules.observation(turn), turn.info()

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        command = self._rules.check_action(action)
        turn = self._bridge.call(self._step, command)
        self._bridge.check()  # closed meanwhile by another thread: that is no failure of the sandbox's
        if self._rules.reward_fn is not None:
            turn, reward = rewarded(self._bridge, self._lane, turn)
            if turn.done:
                self._bridge.call(self._lane.finish, turn)
        else:
            reward = self._rules.reward(turn, None)
        return self._rules.observation(turn), reward, turn.terminated, turn.truncated, turn.info()

    async def _step(self, command: str) -> Turn:
        turn = await self._lane.step(command)
        if self._rules.reward_fn is None:
            self._lane.rewarded(self._rules.reward(turn, None))
            if turn.done:
                await self._lane.finish(turn)
        return turn

    def render(self) -> str | None:
        """The transcript of the episode, when ``render_mode="ansi"``."""
        return self._lane.transcript() if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Give the sandbox back, and close the pool when it is the environment's own. Twice is fine."""
        leave(self._bridge, [self._lane])


def rewarded(bridge: Bridge, lane: Lane, turn: Turn) -> tuple[Turn, float]:
    """The step's reward by the user's function, on the caller's thread.

    What infrastructure does to the sandbox meanwhile makes the turn a failed one; the function's own errors
    are its author's to see.
    """
    rules = lane.rules
    sandbox = lane.sandbox
    try:
        reward = rules.reward(turn, bridge.facade(sandbox) if sandbox is not None else None)
    except SandboxError as error:
        if not error.infrastructure or isinstance(error, PoolClosedError):
            raise
        turn = bridge.call(lane.broke, turn, error, "grade")
        reward = rules.reward(turn, None)
    return turn, lane.rewarded(reward)


def leave(bridge: Bridge, lanes: list[Lane]) -> None:
    """Cancel what is under way and close the bridge."""

    async def abandon() -> None:
        for lane in lanes:
            await lane.abandon("the environment was closed before the episode had ended")

    try:
        if bridge.started and any(lane.episode is not None for lane in lanes):
            # Where the pool went first, it has cancelled what was under way.
            with contextlib.suppress(PoolClosedError):
                bridge.call(abandon)
    finally:
        bridge.close()
