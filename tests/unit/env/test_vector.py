"""SandboxVectorEnv over the smallest pool: all at once, each on its own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

from rlsandbox.env import SandboxVectorEnv
from rlsandbox.env import lane as lane_module
from rlsandbox.errors import ConfigError, PoolClosedError, ProvisionError, SandboxStateError
from rlsandbox.results import CommandResult, Outcome
from rlsandbox.task import Task
from tests.support.pool_double import DoublePool, statuses, task, tasks


def make(pool: DoublePool, n: int = 4, **kwargs: Any) -> SandboxVectorEnv:
    return SandboxVectorEnv(n, **{"tasks": tasks(6), "pool": pool, **kwargs})


def test_spaces_and_batches(pool: DoublePool) -> None:
    envs = make(pool)
    obs, infos = envs.reset(seed=0)
    assert obs in envs.observation_space
    assert len(obs["prompt"]) == 4
    assert obs["exit_code"].tolist() == [-1] * 4
    assert [str(name) for name in infos["task_id"]] == [p.split("(")[1][:-1] for p in obs["prompt"]]
    obs, rewards, terms, truncs, infos = envs.step(("echo a", "exit 3", "touch done", "echo é >&2"))
    assert obs in envs.observation_space
    assert obs["stdout"] == ("a\n", "", "", "")
    assert obs["stderr"][3] == "é\n"
    assert obs["exit_code"].tolist() == [0, 3, 0, 0]
    assert (rewards.tolist(), terms.any(), truncs.any()) == ([0.0] * 4, False, False)
    assert rewards.dtype == np.float64
    assert terms.dtype == truncs.dtype == np.bool_
    assert all(isinstance(result, CommandResult) for result in infos["result"])
    envs.close()


def test_commands_run_at_once(pool: DoublePool) -> None:
    pool.party = 16
    envs = make(pool, 16)
    envs.reset(seed=0)
    obs, *_ = envs.step(["together"] * 16)  # each waits for all the others
    assert obs["exit_code"].tolist() == [0] * 16
    assert pool.most_running == 16
    envs.close()


def test_one_that_dies_and_one_that_stalls_leave_the_others_alone(
    pool: DoublePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "STALL_GRACE_S", 0.2)
    envs = make(pool, tasks=[task(f"t{i}", command=0.3) for i in range(4)])
    envs.reset(seed=0)
    obs, rewards, terms, truncs, infos = envs.step(["echo fine", "die", "stall", "touch done"])
    assert obs in envs.observation_space
    assert obs["stdout"][0] == "fine\n"
    assert obs["exit_code"].tolist() == [0, -1, -1, 0]
    assert np.isnan(rewards).tolist() == [False, True, True, False]
    assert truncs.tolist() == [False, True, True, False]
    assert not terms.any()
    kinds = [failure.kind if failure else None for failure in infos["failure"]]
    assert kinds == [None, "sandbox_died", "sandbox_stalled", None]
    _, rewards, terms, truncs, infos = envs.step(["submit", "x", "x", "submit"])
    assert rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert terms.tolist() == [True, False, False, True]
    assert infos["failure"].tolist() == [None] * 4
    envs.close()
    assert sorted(statuses(pool.records())) == [
        *["cancelled"] * 2, *["failed_by_infrastructure"] * 2, *["rewarded"] * 2
    ]  # fmt: skip


def test_next_step_resets_on_the_step_after(pool: DoublePool) -> None:
    envs = make(pool, 2)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    _, first = envs.reset(seed=1)
    _, rewards, terms, _, infos = envs.step(["submit", "true"])
    assert terms.tolist() == [True, False]
    assert infos["outcome"][0].reward == 0.0
    assert len(pool.claimed) == 2
    obs, rewards, terms, truncs, infos = envs.step(["ignored", "echo on"])
    assert len(pool.claimed) == 3
    assert (rewards.tolist(), terms.any(), truncs.any()) == ([0.0, 0.0], False, False)
    assert obs["exit_code"].tolist() == [-1, 0]
    assert infos["task_id"][0] != first["task_id"][0]
    assert infos["task_id"][1] == first["task_id"][1]
    assert envs.step(["echo new", "true"])[0]["stdout"][0] == "new\n"
    envs.close()


def test_same_step_resets_at_once_and_hands_the_end_over(pool: DoublePool) -> None:
    envs = make(pool, 2, autoreset_mode=AutoresetMode.SAME_STEP)
    _, first = envs.reset(seed=1)
    envs.step(["touch done", "true"])
    obs, rewards, terms, _, infos = envs.step(["submit", "echo on"])
    assert rewards.tolist() == [1.0, 0.0]
    assert terms.tolist() == [True, False]
    assert infos["final_obs"][0]["exit_code"] == -1
    assert infos["final_obs"][1] is None
    assert infos["final_info"]["outcome"][0].reward == 1.0
    assert infos["final_info"]["task_id"][0] == first["task_id"][0]
    assert infos["outcome"].tolist() == [None, None]
    assert obs["exit_code"].tolist() == [-1, 0]
    assert infos["task_id"][0] != first["task_id"][0]
    assert envs.step(["echo new", "true"])[0]["stdout"][0] == "new\n"
    envs.close()


def test_disabled_leaves_resets_to_the_caller(pool: DoublePool) -> None:
    envs = make(pool, 3, autoreset_mode="Disabled")
    envs.reset(seed=1)
    obs, *_ = envs.step(["submit", "echo a", "submit"])
    with pytest.raises(SandboxStateError, match="episodes of 0, 2 have ended"):
        envs.step(["x", "x", "x"])
    options = {"reset_mask": np.array([True, False, True])}
    obs, infos = envs.reset(options=options)
    assert "reset_mask" in options, "the caller's dictionary is the caller's"
    assert obs["stdout"][1] == "a\n"
    assert obs["exit_code"].tolist() == [-1, 0, -1]
    assert infos["_task_id"].tolist() == [True, False, True]
    assert envs.step(["true"] * 3)[0]["exit_code"].tolist() == [0, 0, 0]
    envs.close()


@pytest.mark.parametrize(
    "mask", [np.array([True]), np.array([1, 0, 1]), [True, False, True], np.array([False] * 3)]
)
def test_a_mask_that_is_none(pool: DoublePool, mask: Any) -> None:
    envs = make(pool, 3)
    envs.reset(seed=1)
    with pytest.raises(ConfigError, match="reset_mask"):
        envs.reset(options={"reset_mask": mask})
    envs.close()
    fresh = make(pool, 3)
    with pytest.raises(SandboxStateError, match="never reset"):
        fresh.reset(options={"reset_mask": np.array([True, False, True])})


def test_seeds_are_those_of_single_environments(pool: DoublePool) -> None:
    envs = make(pool, 3)

    def names(seed: Any) -> list[str]:
        return [str(name) for name in envs.reset(seed=seed)[1]["task_id"]]

    first = names(7)
    assert names(7) == first
    assert names([7, 8, 9]) == first
    assert len(set(names([5, 5, 5]))) == 1
    assert names([5, None, None])[0] == names([5, 5, 5])[0]
    with pytest.raises(ConfigError, match="3 seeds"):
        envs.reset(seed=[1])
    envs.close()


def test_options_choose_tasks_for_all_or_for_each(pool: DoublePool) -> None:
    envs = make(pool, 3)
    assert [str(x) for x in envs.reset(options={"task": "t4"})[1]["task_id"]] == ["t4"] * 3
    assert [str(x) for x in envs.reset(options={"task": [0, "t1", task("own")]})[1]["task_id"]] == [
        "t0",
        "t1",
        "own",
    ]
    with pytest.raises(ConfigError, match="3 tasks"):
        envs.reset(options={"task": ["t0"]})
    envs.close()


def test_a_reset_that_finds_no_sandbox_spares_the_others(pool: DoublePool) -> None:
    envs = make(pool, 3)
    pool.broken = [ProvisionError("no", retryable=False)]
    obs, infos = envs.reset(seed=0)
    broken = [i for i in range(3) if infos["failure"][i] is not None]
    assert len(broken) == 1
    assert obs in envs.observation_space
    obs, rewards, _, truncs, infos = envs.step(["echo hi"] * 3)
    assert np.isnan(rewards).nonzero()[0].tolist() == truncs.nonzero()[0].tolist() == broken
    assert sorted(obs["stdout"]) == ["", "hi\n", "hi\n"]
    envs.close()


def test_a_mistake_is_raised_after_the_others_came_to_their_end(pool: DoublePool) -> None:
    envs = make(pool, 3)
    pool.broken = [ConfigError("wrong")]
    with pytest.raises(ConfigError, match="wrong"):
        envs.reset(seed=0)
    assert len(pool.held) == 2
    envs.close()
    assert not pool.held


def test_rewards_by_a_function(pool: DoublePool) -> None:
    def reward_fn(r: CommandResult, sandbox: Any, outcome: Outcome | None) -> float:
        if r.stdout == "break\n":
            sandbox.run("die")
        return 5.0 if outcome else -1.0

    def observe(r: CommandResult, t: Task) -> str:
        return r.stdout[-3:]

    envs = make(pool, 3, reward_fn=reward_fn, observe=observe)
    assert envs.reset(seed=0)[0] == ("", "", "")
    obs, rewards, terms, truncs, _ = envs.step(["echo long", "submit", "echo break"])
    assert obs == ("ng\n", "", "ak\n")
    assert rewards[:2].tolist() == [-1.0, 5.0]
    assert np.isnan(rewards[2])
    assert (terms.tolist(), truncs.tolist()) == ([False, True, False], [False, False, True])
    envs.close()


def test_arrays_of_observations_are_not_reused(pool: DoublePool) -> None:
    space = gym.spaces.Box(0, 1e6, (2,), dtype=np.float64)
    envs = make(
        pool, 2, observe=lambda r, t: np.array([r.exit_code + 1.0, len(r.stdout)]), observation_space=space
    )
    first, _ = envs.reset(seed=0)
    second, *_ = envs.step(["echo abc", "exit 4"])
    assert first.tolist() == [[0, 0], [0, 0]]
    assert second.tolist() == [[1, 4], [5, 0]]
    assert not np.shares_memory(first, second)
    envs.close()


def test_statistics_wrapper(pool: DoublePool) -> None:
    envs = RecordEpisodeStatistics(make(pool, 2))
    envs.reset(seed=0)
    envs.step(["touch done", "true"])
    *_, infos = envs.step(["submit", "true"])
    assert infos["episode"]["r"].tolist() == [1.0, 0.0]
    assert infos["episode"]["l"].tolist() == [2, 0]
    envs.close()
    listed = DictInfoToList(make(pool, 2))
    assert [info["task_id"] for info in listed.reset(seed=0)[1]]
    listed.close()


def test_transcripts(pool: DoublePool) -> None:
    envs = make(pool, 2, render_mode="ansi")
    envs.reset(seed=0, options={"task": "t0"})
    envs.step(["echo a", "false"])
    assert envs.render() == (
        "# t0\nmake the file done (t0)\n$ echo a\na\n", "# t0\nmake the file done (t0)\n$ false\n[exit 1]\n",
    )  # fmt: skip
    envs.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_closing(pool: DoublePool, mode: AutoresetMode) -> None:
    envs = make(pool, 2, autoreset_mode=mode)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert not pool.held
    assert not pool.closed
    for use in (envs.reset, lambda: envs.step(["x", "x"])):
        with pytest.raises(PoolClosedError, match="environment is closed"):
            use()
    assert statuses(pool.records()) == ["cancelled", "cancelled"]


@pytest.mark.parametrize("seed", [1.5, "xy", [1], [1, 2, 3], object()])
def test_seeds_that_are_none(pool: DoublePool, seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        make(pool, 2).reset(seed=seed)


@pytest.mark.parametrize("actions", ["ab", ["x"], ["x"] * 3, 5, [1, 2]])
def test_actions_that_are_none(pool: DoublePool, actions: Any) -> None:
    envs = make(pool, 2)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match=r"action|texts"):
        envs.step(actions)
    assert envs.step(np.array(["true", "true"]))[0]["exit_code"].tolist() == [0, 0]
    envs.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"n": 0}, "num_envs"), ({"n": 2.5}, "num_envs"), ({"autoreset_mode": "never"}, "NextStep")],
)
def test_arguments_that_make_no_sense(pool: DoublePool, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(pool, **arguments)


def test_step_before_reset(pool: DoublePool) -> None:
    envs = make(pool, 2)
    with pytest.raises(SandboxStateError, match="reset"):
        envs.step(["x", "x"])
