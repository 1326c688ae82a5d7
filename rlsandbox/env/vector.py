"""``Sandbox-v0`` for N sandboxes that step at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from ..errors import ConfigError, SandboxStateError
from .bridge import Bridge
from .env import SandboxEnv, leave, rewarded
from .lane import Lane
from .rules import Observe, RewardFn, Rules, Turn, options_of

if TYPE_CHECKING:
    from ..task import Task


Job = Callable[[], Coroutine[Any, Any, Any]]


class SandboxVectorEnv(VectorEnv[Any, Any, Any]):
    """N episodes, each in a sandbox of its own; a step takes as long as its slowest command, not the sum.

    A sandbox that dies or stalls ends its own episode (``infos["failure"]``, reward NaN, truncated) and
    leaves the others' step as it is. Arguments are those of :class:`SandboxEnv`, and:

    Args:
        num_envs: how many.
        autoreset_mode: Gymnasium's: with NEXT_STEP (default) the step after an episode's end resets it, with
            SAME_STEP the same step (``infos["final_obs"]``, ``infos["final_info"]``), with DISABLED
            ``reset(options={"reset_mask": ...})`` does.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        tasks: str | Iterable[Task] | None = None,
        pool: Any = None,
        observe: Observe | None = None,
        observation_space: gym.Space[Any] | None = None,
        reward_fn: RewardFn | None = None,
        submit: str = "submit",
        max_episode_steps: int | None = None,
        reset_timeout: float | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **pool_kwargs: Any,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ConfigError(f"num_envs must be a whole number of at least 1, not {num_envs!r}")
        try:
            mode = AutoresetMode(autoreset_mode)
        except ValueError:
            known = ", ".join(m.value for m in AutoresetMode)
            raise ConfigError(f"autoreset_mode must be one of {known}, not {autoreset_mode!r}") from None
        self._rules = rules = Rules(
            tasks=tasks,
            observe=observe,
            observation_space=observation_space,
            reward_fn=reward_fn,
            submit=submit,
            max_steps=max_episode_steps,
            render_mode=render_mode,
            reset_timeout=reset_timeout,
        )
        self.num_envs = int(num_envs)
        self._bridge = Bridge(pool, pool_kwargs, size=self.num_envs)
        self._mode = mode
        self.metadata = {**SandboxEnv.metadata, "autoreset_mode": mode}
        self.render_mode = render_mode
        self.single_action_space = rules.action_space
        self.single_observation_space = rules.observation_space
        self.action_space = batch_space(rules.action_space, self.num_envs)
        self.observation_space = batch_space(rules.observation_space, self.num_envs)
        self._lanes = [Lane(rules, transcript=render_mode == "ansi") for _ in range(self.num_envs)]
        self._rngs = [seeding.np_random()[0] for _ in range(self.num_envs)]
        self._seen: list[Any] = [None] * self.num_envs

    @property
    def tasks(self) -> list[Task]:
        return list(self._rules.tasks)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, all at once.

        Args:
            seed: an int gives environment i the seed ``seed + i``; a sequence has one for each (equal ones
                give their environments the same tasks).
            options: ``{"task": ...}`` for all, or a sequence with one for each (None: the next in order);
                ``{"reset_mask": bool array}`` resets only those.
        """
        options = options_of(options, "task", "reset_mask")
        which = self._masked(options)
        seeds = self._seeds(seed)
        chosen = self._options(options)
        pool = self._bridge.asynchronous  # the closed hear of it before anything changes
        if isinstance(seed, int):
            super().reset(seed=seed)
        for i in which:
            if seeds[i] is not None:
                self._rngs[i] = seeding.np_random(seeds[i])[0]
                self._lanes[i].order.restart()
        tasks = {i: self._lanes[i].next_task(self._rngs[i], chosen[i]) for i in which}
        turns = self._bridge.call(
            _all, {i: partial(self._lanes[i].reset, pool, task) for i, task in tasks.items()}
        )
        infos: dict[str, Any] = {}
        for i, turn in turns.items():
            self._seen[i] = self._rules.observation(turn)
            infos = self._add_info(infos, turn.info(), i)
        return self._batch(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """A command (or the submission) for each; with NEXT_STEP, ended ones are reset instead."""
        self._bridge.check()  # before what its episodes are in: nobody can reset them any more
        commands = self._commands(actions)
        rules, lanes = self._rules, self._lanes
        resets = [i for i, lane in enumerate(lanes) if lane.ended]
        if resets and (self._mode is not AutoresetMode.NEXT_STEP or any(s is None for s in self._seen)):
            names = ", ".join(map(str, resets))
            raise SandboxStateError(
                f"the episodes of {names} have ended, or none has begun", hint="reset them first"
            )
        jobs: dict[int, Job] = {}
        pool = self._bridge.asynchronous
        for i, lane in enumerate(lanes):
            if lane.ended:
                jobs[i] = partial(lane.reset, pool, lane.next_task(self._rngs[i], None))
            else:
                jobs[i] = partial(lane.step, commands[i])
        turns = self._bridge.call(_all, jobs)

        rewards = np.zeros(self.num_envs, dtype=np.float64)
        for i in sorted(set(turns) - set(resets)):
            if rules.reward_fn is not None:
                turns[i], rewards[i] = rewarded(self._bridge, lanes[i], turns[i])
            else:
                rewards[i] = lanes[i].rewarded(rules.reward(turns[i], None))
        stepped = {i: turn for i, turn in turns.items() if i not in resets}
        terminations = np.array([i in stepped and stepped[i].terminated for i in range(self.num_envs)])
        truncations = np.array([i in stepped and stepped[i].truncated for i in range(self.num_envs)])
        done = [i for i in stepped if stepped[i].done]
        again: dict[int, Turn] = {}
        if done:
            tasks = {}
            if self._mode is AutoresetMode.SAME_STEP:
                tasks = {i: lanes[i].next_task(self._rngs[i], None) for i in done}
            again = self._bridge.call(_all, {i: partial(self._end, i, turns[i], tasks.get(i)) for i in done})

        infos: dict[str, Any] = {}
        for i, turn in turns.items():
            seen, info = rules.observation(turn), turn.info()
            fresh = again.get(i)
            if fresh is not None:
                infos = self._add_info(infos, {"final_obs": seen, "final_info": info}, i)
                seen, info = rules.observation(fresh), fresh.info()
            self._seen[i] = seen
            infos = self._add_info(infos, info, i)
        return self._batch(), rewards, terminations, truncations, infos

    async def _end(self, i: int, turn: Turn, task: Task | None) -> Turn | None:
        """End episode i; with *task*, begin the next one."""
        await self._lanes[i].finish(turn)
        return await self._lanes[i].reset(self._bridge.asynchronous, task) if task is not None else None

    def render(self) -> tuple[str, ...] | None:
        """The transcripts of the episodes, when ``render_mode="ansi"``."""
        return tuple(lane.transcript() for lane in self._lanes) if self.render_mode == "ansi" else None

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "_lanes"):  # else its constructor raised
            leave(self._bridge, self._lanes)

    # ------------------------------------------------------------------ arguments

    def _batch(self) -> Any:
        space = self.single_observation_space
        empty: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, self._seen, empty)

    def _commands(self, actions: Any) -> list[str]:
        if isinstance(actions, str) or not hasattr(actions, "__len__"):
            raise ConfigError(f"step needs a sequence of {self.num_envs} texts, not {type(actions).__name__}")
        if len(actions) != self.num_envs:
            raise ConfigError(
                f"step needs {self.num_envs} actions, one for each environment, not {len(actions)}"
            )
        return [self._rules.check_action(action) for action in actions]

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self.num_envs)]
        if isinstance(seed, str) or not hasattr(seed, "__len__"):
            raise ConfigError(f"reset's seed must be a number or a sequence of them, not {seed!r}")
        if len(seed) != self.num_envs:
            raise ConfigError(f"reset needs {self.num_envs} seeds, one for each environment, not {len(seed)}")
        return list(seed)

    def _options(self, options: dict[str, Any] | None) -> list[dict[str, Any] | None]:
        task = (options or {}).get("task")
        if isinstance(task, (list, tuple, np.ndarray)):
            if len(task) != self.num_envs:
                raise ConfigError(f"options: {self.num_envs} tasks are needed, one for each, not {len(task)}")
            return [{"task": one} for one in task]
        return [{"task": task}] * self.num_envs

    def _masked(self, options: dict[str, Any] | None) -> list[int]:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return list(range(self.num_envs))
        right = isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self.num_envs,)
        if not right or not mask.any():
            raise ConfigError(
                f"options: reset_mask must be a bool array of shape ({self.num_envs},), not all False"
            )
        which = [int(i) for i in np.flatnonzero(mask)]
        if any(self._seen[i] is None for i in range(self.num_envs) if i not in which):
            raise SandboxStateError("reset_mask leaves out environments that were never reset")
        return which


async def _all(jobs: dict[int, Job]) -> dict[int, Any]:
    """Every job's result. All of them come to their end before one's exception is raised."""
    results = await asyncio.gather(*(job() for job in jobs.values()), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return dict(zip(jobs, results, strict=True))
