"""Gymnasium's own checkers, and its own vectorizer as the judge of ours."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

import rlsandbox
from rlsandbox.env import SandboxEnv, SandboxVectorEnv
from tests.support.pool_double import DoublePool, task, tasks

assert rlsandbox  # registers Sandbox-v0


@pytest.fixture(autouse=True)
def every_warning_is_an_error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", HypothesisWarning)  # of where it may keep its examples
        yield


def test_the_env_checker_finds_nothing(pool: DoublePool) -> None:
    env = gym.make("Sandbox-v0", tasks=tasks(3), pool=pool)
    check_env(env.unwrapped)
    env.close()


def test_the_env_checker_finds_nothing_with_observe(pool: DoublePool) -> None:
    env = gym.make("Sandbox-v0", tasks=tasks(3), pool=pool, observe=lambda r, t: t.prompt + r.stdout)
    check_env(env.unwrapped)
    env.close()


def test_a_made_environment_is_checked_as_it_runs(pool: DoublePool) -> None:
    env = gym.make("Sandbox-v0", tasks=tasks(2), pool=pool, render_mode="ansi", max_episode_steps=4)
    assert env.unwrapped._bridge.pool is pool  # type: ignore[attr-defined]  # copied to itself
    env.reset(seed=1)
    for action in ("printf '\\377\\000'", "touch done", "submit"):
        env.step(action)
    assert env.render()
    env.close()


def test_reward_nan_is_all_that_the_passive_checker_minds(pool: DoublePool) -> None:
    env = gym.make("Sandbox-v0", tasks=tasks(2), pool=pool)
    env.reset(seed=1)
    with pytest.warns(UserWarning, match="The reward is a NaN value"):
        *_, truncated, _ = env.step("die")
    assert truncated
    env.close()


def test_make_vec_finds_the_vector_entry_point(pool: DoublePool) -> None:
    envs = gym.make_vec("Sandbox-v0", num_envs=3, tasks=tasks(3), pool=pool, max_episode_steps=1)
    assert isinstance(envs.unwrapped, SandboxVectorEnv)
    envs.reset(seed=0)
    *_, truncs, infos = envs.step(["true"] * 3)
    assert truncs.all()
    assert infos["limit"].tolist() == ["steps"] * 3
    envs.close()
    again = gym.make_vec(envs.spec)  # type: ignore[arg-type]
    assert again.num_envs == 3
    again.close()


def test_the_environments_can_be_told_by_a_spec(pool: DoublePool) -> None:
    env = gym.make("Sandbox-v0", tasks=tasks(3), pool=pool)
    assert env.spec is not None
    again = gym.make(env.spec)
    assert again.unwrapped.tasks == env.unwrapped.tasks  # type: ignore[attr-defined]
    again.close()
    env.close()


ACTIONS = st.sampled_from(
    ["true", "touch done", "echo é; exit 7", "ls", "submit", "printf '\\377'", "a\0", "die"]
)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.lists(ACTIONS, min_size=3, max_size=3), max_size=5), seed=st.integers(0, 99))
def test_it_does_what_gymnasiums_own_vector_environment_does(
    pool: DoublePool, mode: AutoresetMode, steps: list[list[str]], seed: int
) -> None:
    kinds = [task("a", steps=2), task("b"), task("c", prompt="ü" * 9), task("d")]
    ours = SandboxVectorEnv(3, tasks=kinds, pool=pool, autoreset_mode=mode)
    theirs = SyncVectorEnv(
        [lambda: SandboxEnv(tasks=kinds, pool=pool) for _ in range(3)], autoreset_mode=mode
    )
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert same(ours.reset(seed=seed), theirs.reset(seed=seed))
    for actions in steps:
        mine, other = ours.step(actions), theirs.step(actions)
        assert same(mine, other)
        done = np.logical_or(mine[2], mine[3])
        if mode is AutoresetMode.DISABLED and done.any():
            options = [{"reset_mask": done.copy()} for _ in range(2)]
            assert same(ours.reset(options=options[0]), theirs.reset(options=options[1]))
    ours.close()
    theirs.close()


def same(mine: Any, other: Any) -> bool:
    """Equal, where NaN equals NaN, and failures may name another sandbox."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        if isinstance(value, np.ndarray):
            return [plain(v) for v in value]
        if isinstance(value, (float, np.floating)):
            return "NaN" if np.isnan(value) else float(value)
        kind = getattr(value, "kind", None)
        return kind if kind is not None else value

    return data_equivalence(plain(mine), plain(other))
