"""SandboxEnv over the smallest pool: what a step comes to, and what is on record of it."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsandbox.env import SandboxEnv, UnicodeText
from rlsandbox.env import lane as lane_module
from rlsandbox.errors import (
    ClaimTimeoutError,
    ConfigError,
    PoolClosedError,
    ProvisionError,
    SandboxStateError,
)
from rlsandbox.results import CommandResult, Outcome
from rlsandbox.task import Grader, Task
from tests.support.pool_double import DoublePool, statuses, task, tasks


@pytest.fixture
def env(pool: DoublePool) -> Any:
    made = SandboxEnv(tasks=tasks(3), pool=pool)
    yield made
    made.close()


def test_commands_then_a_submission(env: SandboxEnv, pool: DoublePool) -> None:
    obs, info = env.reset(seed=0)
    assert obs["prompt"].startswith("make the file done")
    assert (obs["stdout"], obs["stderr"], obs["exit_code"]) == ("", "", -1)
    assert info == {
        "task_id": info["task_id"],
        "result": None,
        "outcome": None,
        "failure": None,
        "limit": None,
    }
    obs, reward, terminated, truncated, info = env.step("echo out; echo err >&2; touch done; exit 3")
    assert (obs["stdout"], obs["stderr"], obs["exit_code"]) == ("out\n", "err\n", 3)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["result"].stdout_bytes == b"out\n"
    obs, reward, terminated, truncated, info = env.step("submit")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["outcome"].passed is True
    assert obs in env.observation_space
    assert not pool.held
    (record,) = pool.records()
    assert (record.status, record.reward, record.passed, record.attempts) == ("completed", 1.0, True, 1)
    assert record.value == {"steps": 1, "return": 1.0}
    assert record.task_id == info["task_id"]


def test_work_that_fails_its_grader_is_worth_nothing(env: SandboxEnv, pool: DoublePool) -> None:
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("submit")
    assert (reward, terminated, truncated, info["outcome"].passed) == (0.0, True, False, False)
    assert pool.records()[0].reward == 0.0


@pytest.mark.parametrize("action", ["submit ", "Submit", " submit", "submit\n"])
def test_only_exactly_the_word_submits(env: SandboxEnv, action: str) -> None:
    env.reset(seed=0)
    _, _, terminated, _, info = env.step(action)
    assert not terminated
    assert info["result"].exit_code == 127


def test_seeds_reproduce_the_order_of_tasks_and_cover_them_all(pool: DoublePool) -> None:
    def order(seed: int) -> list[str]:
        env = SandboxEnv(tasks=tasks(8), pool=pool)
        names = [env.reset(seed=seed)[1]["task_id"], *(env.reset()[1]["task_id"] for _ in range(15))]
        env.close()
        return names

    first = order(5)
    assert order(5) == first
    assert order(6) != first
    assert sorted(first[:8]) == sorted(first[8:]) == sorted(f"t{i}" for i in range(8))


def test_options_choose_the_task_and_leave_the_order_alone(env: SandboxEnv) -> None:
    other = task("other")
    env.reset(seed=3)
    expected = env.reset()[1]["task_id"]
    env.reset(seed=3)
    assert env.reset(options={"task": 2})[1]["task_id"] == "t2"
    assert env.reset(options={"task": "t1"})[1]["task_id"] == "t1"
    assert env.reset(options={"task": other})[1]["task_id"] == "other"
    assert env.reset(options={})[1]["task_id"] == expected


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("t11", "did you mean 't1'"), (3, "there are 3"), (-1, "there are 3"), (1.5, "not float"),
     (True, "not bool"),
     (Task(id="x", prompt="p" * 70_000, grader=Grader(command="true")), "70000 characters"),
     (Task(id="x"), "no grader")],
)  # fmt: skip
def test_options_that_name_no_task(env: SandboxEnv, wanted: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env.reset(options={"task": wanted})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tsk": "t1"}, "unknown name 'tsk': did you mean 'task'"), ({"reset_mask": 1}, "unknown name"),
     ("t1", "must map names to values, not str"), ([("task", "t1")], "not list")],
)  # fmt: skip
def test_options_with_a_typo_choose_no_other_task(env: SandboxEnv, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env.reset(options=options)


@pytest.mark.parametrize("name", ["observe", "reward_fn"])
def test_what_must_be_a_function_is_told_when_the_environment_is_made(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a function, not int"):
        SandboxEnv(**{name: 3})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_inside_the_space(env: SandboxEnv, raw: bytes) -> None:
    env.reset(seed=0)
    octal = "".join(f"\\{byte:03o}" for byte in raw)
    obs, *_, info = env.step(f"printf '{octal}'; printf '{octal}' >&2; exit {len(raw)}")
    assert obs in env.observation_space
    assert info["result"].stdout_bytes == info["result"].stderr_bytes == raw
    assert obs["exit_code"] == len(raw)


def test_more_output_than_the_space_holds_keeps_head_and_tail(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=[task("t", output=2000)], pool=pool)
    env.reset(seed=0)
    obs, *_ = env.step("seq 1 20000")
    assert obs in env.observation_space
    assert obs["stdout"].startswith("1\n2\n")
    assert obs["stdout"].endswith("20000\n")
    env.close()


@pytest.mark.parametrize(
    ("action", "why"), [("a\0b", "NUL"), ("a\ud800b", "surrogate"), ("x" * (1 << 21), "more than")]
)
def test_an_action_that_is_no_command_is_answered_like_one(env: SandboxEnv, action: str, why: str) -> None:
    env.reset(seed=0)
    obs, reward, terminated, truncated, info = env.step(action)
    assert obs["exit_code"] == 126
    assert why in obs["stderr"]
    assert obs in env.observation_space
    assert (reward, terminated, truncated, info["failure"]) == (0.0, False, False, None)
    assert env.step("true")[0]["exit_code"] == 0


@pytest.mark.parametrize("action", [3, None, b"ls", ["ls"]])
def test_an_action_that_is_no_text_is_the_callers_mistake(env: SandboxEnv, action: Any) -> None:
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="an action is a text"):
        env.step(action)
    assert env.step("true")[0]["exit_code"] == 0


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize("where", ["task", "argument"])
def test_the_step_limit_truncates_and_grades(pool: DoublePool, where: str) -> None:
    own = (
        {"tasks": [task("t", steps=2)]} if where == "task" else {"tasks": [task("t")], "max_episode_steps": 2}
    )
    env = SandboxEnv(pool=pool, **own)  # type: ignore[arg-type]
    env.reset(seed=0)
    assert env.step("touch done")[2:4] == (False, False)
    obs, reward, terminated, truncated, info = env.step("echo last")
    assert obs["stdout"] == "last\n"
    assert (reward, terminated, truncated, info["limit"]) == (1.0, False, True, "steps")
    assert info["failure"] is None
    record = pool.records()[0]
    assert (record.status, record.reward, record.truncated) == ("completed", 1.0, "steps")
    env.close()


def test_a_submission_after_the_last_command_but_one_is_no_truncation(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=[task("t", steps=2)], pool=pool)
    env.reset(seed=0)
    env.step("true")
    assert env.step("submit")[2:4] == (True, False)
    env.close()


def test_the_wall_limit_cuts_the_command_off(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=[task("t", wall=0.3)], pool=pool)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("exec sleep 60")
    assert (reward, terminated, truncated, info["limit"]) == (0.0, False, True, "wall")
    assert info["result"].timed_out
    assert pool.records()[0].truncated == "wall"
    env.close()


def test_the_command_limit_does_not_end_the_episode(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=[task("t", command=0.2)], pool=pool)
    env.reset(seed=0)
    obs, _, terminated, truncated, info = env.step("exec sleep 60")
    assert (obs["exit_code"], info["result"].timed_out, terminated, truncated) == (137, True, False, False)
    env.close()


# ------------------------------------------------------------------ failures


def test_a_sandbox_that_dies_ends_the_episode_without_a_reward(env: SandboxEnv, pool: DoublePool) -> None:
    env.reset(seed=0)
    obs, reward, terminated, truncated, info = env.step("die")
    assert math.isnan(reward)
    assert (terminated, truncated) == (False, True)
    failure = info["failure"]
    assert (failure.kind, failure.phase, failure.infrastructure) == ("sandbox_died", "command", True)
    assert obs in env.observation_space
    (record,) = pool.records()
    assert (record.status, record.reward, record.outcome) == ("failed", None, "failed_by_infrastructure")
    assert pool.all[0].discarded is True
    assert pool.metrics.counters()["failures/sandbox_died"] == 1
    env.reset()
    assert env.step("true")[0]["exit_code"] == 0


def test_a_sandbox_that_stalls_past_its_deadline_is_dead(
    pool: DoublePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "STALL_GRACE_S", 0.1)
    env = SandboxEnv(tasks=[task("t", command=0.1)], pool=pool)
    env.reset(seed=0)
    _, reward, _, truncated, info = env.step("stall")
    assert math.isnan(reward)
    assert truncated
    assert info["failure"].kind == "sandbox_stalled"
    assert info["failure"].infrastructure
    env.close()


def test_a_claim_that_infrastructure_broke_is_asked_for_again(env: SandboxEnv, pool: DoublePool) -> None:
    pool.broken = [ProvisionError("no room"), ProvisionError("no room")]
    _, info = env.reset(seed=0)
    assert info["failure"] is None
    env.step("touch done")
    assert env.step("submit")[1] == 1.0
    (record,) = pool.records()
    assert (record.status, record.attempts, record.reward) == ("completed", 3, 1.0)
    assert [r.attempt for r in pool.rollouts if r is not None] == [1, 2, 3]


def test_a_reset_without_a_sandbox_fails_the_rollout_not_the_training(
    env: SandboxEnv, pool: DoublePool
) -> None:
    pool.broken = [ClaimTimeoutError("nothing in 5 s")] * 3
    obs, info = env.reset(seed=0)
    assert obs in env.observation_space
    assert info["failure"].kind == "claim_timeout"
    _, reward, terminated, truncated, info = env.step("ls")
    assert math.isnan(reward)
    assert (terminated, truncated, info["failure"].kind) == (False, True, "claim_timeout")
    (record,) = pool.records()
    assert (record.outcome, record.attempts) == ("never_ran", 3)
    _, info = env.reset()
    assert info["failure"] is None


def test_a_mistake_of_the_caller_is_raised_and_recorded(env: SandboxEnv, pool: DoublePool) -> None:
    pool.broken = [ConfigError("no such backend")]
    with pytest.raises(ConfigError, match="no such backend"):
        env.reset(seed=0)
    with pytest.raises(SandboxStateError, match="reset"):
        env.step("ls")
    assert len(pool.records()) == 1


def test_a_grade_that_could_not_be_measured_is_not_zero(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=[task("t", grader="unmeasured")], pool=pool)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("submit")
    assert math.isnan(reward)
    assert terminated
    assert info["outcome"].reward is None
    assert pool.records()[0].outcome == "unrewarded"
    env.close()


# ------------------------------------------------------------------ observe, reward_fn


def test_observe_gives_text(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=tasks(1), pool=pool, observe=lambda r, t: f"{t.id}:{r.exit_code}:{r.stdout[-5:]}")
    assert env.observation_space == UnicodeText(1024 * 1024 + 1024)
    assert env.reset(seed=0)[0] == "t0:-1:"
    assert env.step("echo 1234567")[0] == "t0:0:4567\n"
    env.close()


def test_observe_gives_something_else_in_its_own_space(pool: DoublePool) -> None:
    def length(r: CommandResult, t: Task) -> int:
        return len(r.stdout)

    with pytest.raises(ConfigError, match="observe gives int"):
        SandboxEnv(tasks=tasks(1), pool=pool, observe=length)
    with pytest.raises(ConfigError, match="observation_space"):
        SandboxEnv(tasks=tasks(1), pool=pool, observation_space=gym.spaces.Discrete(3))
    env = SandboxEnv(tasks=tasks(1), pool=pool, observe=length, observation_space=gym.spaces.Discrete(100))
    env.reset(seed=0)
    assert env.step("echo abc")[0] == 4
    env.close()


def test_a_reward_function_sees_result_sandbox_and_outcome(pool: DoublePool) -> None:
    seen: list[tuple[int, int | None, Outcome | None]] = []

    def reward_fn(r: CommandResult, sandbox: Any, outcome: Outcome | None) -> float:
        files = sandbox.run("ls | wc -l").stdout if outcome is None else None
        seen.append((r.exit_code, int(files) if files else None, outcome))
        return -0.01 if outcome is None else 10 * (outcome.reward or 0.0)

    env = SandboxEnv(tasks=tasks(1), pool=pool, reward_fn=reward_fn)
    env.reset(seed=0)
    assert env.step("touch a done")[1] == -0.01
    assert env.step("submit")[1] == 10.0
    assert [entry[:2] for entry in seen] == [(0, 2), (-1, None)]
    record = pool.records()[0]
    assert record.reward == 1.0  # the grade; what the trainer made of it stands beside it
    assert record.value == {"steps": 1, "return": 9.99}
    env.close()


def test_a_reward_function_makes_do_without_a_grader(pool: DoublePool) -> None:
    outcomes: list[Outcome | None] = []

    def reward_fn(r: CommandResult, sandbox: Any, outcome: Outcome | None) -> float:
        outcomes.append(outcome)
        return 0.5

    env = SandboxEnv(tasks=[task("t", grader=None)], pool=pool, reward_fn=reward_fn)
    env.reset(seed=0)
    env.step("true")
    assert env.step("submit")[1:3] == (0.5, True)
    assert outcomes == [None, Outcome(None, None, None)]
    assert pool.records()[0].outcome == "unrewarded"
    env.close()
    with pytest.raises(ConfigError, match="task t has no grader"):
        SandboxEnv(tasks=[task("t", grader=None)], pool=pool)


def test_a_sandbox_that_dies_in_the_reward_function(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=tasks(1), pool=pool, reward_fn=lambda r, sandbox, o: sandbox.run("die").exit_code)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("true")
    assert math.isnan(reward)
    assert (terminated, truncated, info["failure"].kind) == (False, True, "sandbox_died")
    assert statuses(pool.records()) == ["failed_by_infrastructure"]
    env.close()


def test_a_reward_function_that_is_wrong_is_its_authors_to_see(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=tasks(1), pool=pool, reward_fn=lambda r, sandbox, o: {}["x"])
    env.reset(seed=0)
    with pytest.raises(KeyError):
        env.step("true")
    env.close()
    assert statuses(pool.records()) == ["cancelled"]


# ------------------------------------------------------------------ life


def test_the_caller_is_blocked_while_it_steps(env: SandboxEnv, pool: DoublePool) -> None:
    env.reset(seed=0)
    window = pool.metrics.window()
    env.step("sleep 0.05")
    inside = window.pop().idle
    assert inside is not None
    assert inside.idle_s == inside.blocked_s >= 0.05
    outside = window.pop().idle
    assert outside is not None
    assert outside.blocked_s == 0


def test_an_episode_left_behind_is_on_record_as_cancelled(env: SandboxEnv, pool: DoublePool) -> None:
    env.reset(seed=0)
    env.step("true")
    env.reset()
    env.close()
    first, second = pool.records()
    assert (first.status, second.status) == ("cancelled", "cancelled")
    assert "reset" in first.failure.cause
    assert "closed" in second.failure.cause


def test_closing_twice_and_using_it_afterwards(env: SandboxEnv, pool: DoublePool) -> None:
    env.reset(seed=0)
    env.close()
    env.close()
    assert not pool.closed, "a pool that was given stays open"
    for use in (env.reset, lambda: env.step("ls")):
        with pytest.raises(PoolClosedError, match="environment is closed"):
            use()


def test_steps_out_of_order(env: SandboxEnv) -> None:
    with pytest.raises(SandboxStateError, match=r"call reset\(\) first"):
        env.step("ls")
    env.reset(seed=0)
    env.step("submit")
    with pytest.raises(SandboxStateError, match=r"call reset\(\) first"):
        env.step("ls")


def test_the_transcript(pool: DoublePool) -> None:
    env = SandboxEnv(tasks=[task("t", prompt="do it")], pool=pool, render_mode="ansi")
    env.reset(seed=0)
    env.step("echo hi; exit 3")
    env.step("printf 'no newline'")
    env.step("submit")
    assert (
        env.render()
        == "# t\ndo it\n$ echo hi; exit 3\nhi\n[exit 3]\n$ printf 'no newline'\nno newline\n> submit\n"
    )
    env.reset()
    assert env.render() == "# t\ndo it\n"
    env.close()
    silent = SandboxEnv(tasks=tasks(1), pool=pool)
    assert silent.render() is None


def test_wrappers(pool: DoublePool) -> None:
    env = RecordEpisodeStatistics(TimeLimit(SandboxEnv(tasks=tasks(2), pool=pool), 3))
    env.reset(seed=0)
    env.step("true")
    env.step("touch done")
    *_, terminated, truncated, info = env.step("submit")
    assert terminated
    assert info["episode"]["r"] == 1.0
    assert info["episode"]["l"] == 3
    env.reset()
    for _ in range(3):
        *_, truncated, info = env.step("true")
    assert truncated
    env.close()
    assert statuses(pool.records()) == ["rewarded", "cancelled"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"tasks": []}, "at least one task"), ({"tasks": [3]}, "not int"), ({"tasks": tasks(1) * 2}, "'t0'"),
     ({"submit": ""}, "submit"), ({"max_episode_steps": 0}, "at least 1"), ({"render_mode": "human"}, "ansi"),
     ({"size": 4}, "size= belongs to a pool"), ({"pool": None, "sise": 4}, "sise=: did you mean 'size'")],
)  # fmt: skip
def test_arguments_that_make_no_sense(pool: DoublePool, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxEnv(**{"tasks": tasks(1), "pool": pool, **arguments})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"reset_timeout": -1}, "reset_timeout must be a number of seconds above 0"),
        ({"reset_timeout": "x"}, "reset_timeout must be a number of seconds above 0"),
        ({"tasks": 5}, "tasks must be a name or a list of Tasks, not int"),
    ],
)
def test_arguments_are_checked_when_it_is_made(pool: DoublePool, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SandboxEnv(**{"tasks": tasks(1), "pool": pool, **how})


def test_rewards_may_be_numpy_s_and_must_be_numbers(pool: DoublePool) -> None:
    for reward, number in ((np.float32(0.5), 0.5), (np.array([2.0]), 2.0), (True, 1.0)):
        env = SandboxEnv(tasks=tasks(1), pool=pool, reward_fn=lambda *_, reward=reward: reward)
        env.reset()
        assert env.step("x")[1] == number
        env.close()
    for wrong in (None, "1", 10**400, [1]):
        env = SandboxEnv(tasks=tasks(1), pool=pool, reward_fn=lambda *_, wrong=wrong: wrong)
        env.reset()
        with pytest.raises(ConfigError, match="reward_fn must give a number"):
            env.step("x")
        env.close()
