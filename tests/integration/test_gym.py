"""Sandbox-v0 on real local sandboxes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import rlsandbox as rls
from rlsandbox._paths import cache
from rlsandbox.env import SandboxEnv, SandboxVectorEnv
from rlsandbox.errors import PoolClosedError
from tests.support.keepers import keeper_above

TASKS = [
    rls.Task(
        id=f"count-{i}",
        prompt=f"write {i} into answer.txt",
        workdir="/work",
        files={"README": f"write {i} into answer.txt\n"},
        grader=rls.Grader(command=f'test "$(cat answer.txt)" = {i}'),
        limits=rls.Limits(command=60),
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSANDBOX_CACHE", str(cache()))  # the keeper is built once
    monkeypatch.setenv("RLSANDBOX_HOME", str(tmp_path / "home"))


@pytest.fixture
def pool() -> Iterator[rls.Pool]:
    with rls.Pool("local", size=4, config=False) as made:
        yield made


def test_gym_make_without_an_argument() -> None:
    env = gym.make("Sandbox-v0")
    obs, info = env.reset(seed=0)
    assert obs in env.observation_space
    assert obs["prompt"]
    obs, reward, terminated, truncated, info = env.step("echo hello; ls")
    assert obs["stdout"].startswith("hello\n")
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, _, info = env.step("submit")
    assert terminated
    assert reward == 0.0
    assert info["outcome"].passed is False
    env.close()
    env.close()


def test_the_checker_finds_nothing_on_real_sandboxes(pool: rls.Pool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make("Sandbox-v0", tasks=TASKS, pool=pool)
        check_env(env.unwrapped)
        env.close()


def test_work_is_graded_and_recorded(pool: rls.Pool) -> None:
    env = SandboxEnv(tasks=TASKS, pool=pool)
    env.reset(options={"task": "count-3"})
    assert env.step("cat README")[0]["stdout"] == "write 3 into answer.txt\n"
    env.step("echo 3 > answer.txt")
    _, reward, terminated, *_ = env.step("submit")
    assert (reward, terminated) == (1.0, True)
    env.reset(options={"task": "count-3"})
    assert env.step("ls")[0]["stdout"] == "README\n", "the next episode starts clean"
    _, reward, *_ = env.step("submit")
    assert reward == 0.0
    env.close()
    records = pool.report().records
    assert [(r.task_id, r.status, r.reward, r.attempts) for r in records] == [
        ("count-3", "completed", 1.0, 1), ("count-3", "completed", 0.0, 1),
    ]  # fmt: skip
    assert all(r.ttfc_s is not None and r.ttfc_s >= 0 for r in records)
    assert pool.metrics.ttfc.summary().n == 2


@pytest.mark.parametrize("size", [1, 3000, 70_000, 3_000_000])
def test_any_bytes_lie_in_the_space(pool: rls.Pool, size: int) -> None:
    env = SandboxEnv(tasks=TASKS, pool=pool)
    env.reset(seed=0)
    obs, *_, info = env.step(f"head -c {size} /dev/urandom | tee /dev/stderr")
    assert obs in env.observation_space
    assert info["result"].stdout_size == info["result"].stderr_size == size
    env.close()


def test_32_sandboxes_step_at_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    spec = rls.Spec(expose=(str(gate),))
    with rls.Pool("local", size=32, spec=spec, config=False) as pool:
        envs = SandboxVectorEnv(32, tasks=TASKS, pool=pool)
        envs.reset(seed=0)
        started = pool.metrics.ttfc

        def open_the_gate() -> None:
            while started.count < 32 and not given_up.wait(0.01):
                pass
            (gate / "go").touch()

        given_up = threading.Event()
        opener = threading.Thread(target=open_the_gate)
        opener.start()
        # Each command ends only after all 32 have started.
        obs, *_ = envs.step([f"until test -e {gate}/go; do sleep 0.05; done; echo {i}" for i in range(32)])
        given_up.set()
        opener.join()
        assert started.count == 32
        assert obs["stdout"] == tuple(f"{i}\n" for i in range(32))
        envs.close()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_stalls_leaves_the_others_alone(pool: rls.Pool, sign: signal.Signals) -> None:
    tasks = [
        rls.Task(id=f"t{i}", grader=rls.Grader(command="true"), limits=rls.Limits(command=1))
        for i in range(4)
    ]
    envs = SandboxVectorEnv(4, tasks=tasks, pool=pool, autoreset_mode=AutoresetMode.NEXT_STEP)
    envs.reset(seed=0)
    sleeper = "sleep 98765 >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done"
    envs.step(["true", sleeper, "true", "true"])
    keeper = keeper_above("sleep 98765")
    os.kill(keeper, sign)
    try:
        obs, rewards, terms, truncs, infos = envs.step(["echo a", "echo b", "echo c", "echo d"])
    finally:
        with contextlib.suppress(ProcessLookupError):  # given up: killed
            os.kill(keeper, signal.SIGCONT)
    assert obs["stdout"] == ("a\n", "", "c\n", "d\n")
    assert np.isnan(rewards).tolist() == truncs.tolist() == [False, True, False, False]
    assert not terms.any()
    assert infos["failure"][1].infrastructure
    obs, rewards, *_ = envs.step(["echo a", "x", "echo c", "echo d"])
    assert rewards.tolist() == [0.0] * 4
    assert envs.step(["echo again"] * 4)[0]["stdout"] == ("again\n",) * 4
    envs.close()
    by_outcome = [record.outcome for record in pool.report().records]
    assert by_outcome.count("failed_by_infrastructure") == 1
    assert all(record.reward is None for record in pool.report().records)


def test_an_interrupted_step_leaves_an_environment_that_can_be_closed(pool: rls.Pool) -> None:
    env = SandboxEnv(tasks=[rls.Task(id="t", grader=rls.Grader(command="true"))], pool=pool)
    env.reset(seed=0)
    started = pool.metrics.ttfc

    def interrupt() -> None:
        while started.count < 1:
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        env.step("sleep 600")
    thread.join()
    assert env.step("pgrep -x sleep || echo none")[0]["stdout"] == "none\n"
    env.close()
    assert [record.status for record in pool.report().records] == ["cancelled"]


@pytest.mark.parametrize("many", [False, True], ids=["one", "vector"])
def test_a_step_during_which_another_thread_closes_says_so(pool: rls.Pool, many: bool) -> None:
    make: Any = SandboxVectorEnv if many else SandboxEnv
    env = make(tasks=TASKS, pool=pool)
    env.reset(seed=0)

    def close() -> None:
        while pool.metrics.ttfc.count < 1:
            time.sleep(0.001)
        env.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(PoolClosedError, match="environment is closed"):
        env.step(["sleep 600"] if many else "sleep 600")
    thread.join()
    assert [record.status for record in pool.report().records] == ["cancelled"]


def test_processes_of_gymnasiums_own_each_have_a_pool() -> None:
    envs = gym.make_vec(
        "Sandbox-v0",
        num_envs=2,
        vectorization_mode="async",
        vector_kwargs={"shared_memory": False},  # Gymnasium reads texts from it once and never again
        tasks=TASKS,
        config=False,
    )
    envs.reset(seed=0)
    obs, *_ = envs.step(("echo é", "exit 3"))
    assert obs["stdout"] == ("é\n", "")
    assert obs["exit_code"].tolist() == [0, 3]
    envs.close()


def test_an_environments_own_pool_ends_with_it(pool: rls.Pool) -> None:
    env = SandboxEnv(tasks=TASKS, config=False)
    env.reset(seed=0)
    own = env._bridge.pool
    env.close()
    with pytest.raises(rls.errors.PoolClosedError):
        own.claim(TASKS[0])
    given = SandboxEnv(tasks=TASKS, pool=pool)
    given.reset(seed=0)
    given.close()
    with pool.claim(TASKS[0]) as sandbox:
        assert sandbox.run("true").ok


def test_a_pool_that_was_closed_first(pool: rls.Pool) -> None:
    env = SandboxEnv(tasks=TASKS, pool=pool)
    env.reset(seed=0)
    pool.close()
    with pytest.raises(rls.errors.PoolClosedError):
        env.step("true")
    env.close()


def test_a_pool_too_small_is_told_at_once(pool: rls.Pool) -> None:
    with pytest.raises(rls.errors.ConfigError, match="9 environments"):
        SandboxVectorEnv(9, tasks=TASKS, pool=pool)


def test_limits_of_a_task(pool: rls.Pool) -> None:
    limits = rls.Limits(steps=3, wall=600, command=0.5)
    task = rls.Task(id="t", grader=rls.Grader(command="test -e /tmp/done"), limits=limits)
    env = SandboxEnv(tasks=[task], pool=pool)
    env.reset(seed=0)
    *_, truncated, info = env.step("sleep 60")
    assert (info["result"].timed_out, truncated) == (True, False)
    env.step("touch /tmp/done")
    _, reward, terminated, truncated, info = env.step("true")
    assert (reward, terminated, truncated, info["limit"]) == (1.0, False, True, "steps")
    env.close()
    assert pool.report().records[0].truncated == "steps"


def test_prometheus_shows_a_pool_at_work(pool: rls.Pool) -> None:
    env = SandboxEnv(tasks=TASKS, pool=pool)
    env.reset(seed=0)
    env.step("true")
    with rls.metrics.serve_prometheus(pool, port=0) as exporter:
        text = urllib.request.urlopen(exporter.address, timeout=30).read().decode()
    env.close()
    assert f'rlsandbox_ttfc_seconds_count{{run="{pool.run}"}} 1.0' in text
    assert "rlsandbox_pool_" in text


def test_a_reset_that_finds_no_sandbox(pool: rls.Pool) -> None:
    held = [pool.claim(TASKS[0]) for _ in range(4)]
    env = SandboxEnv(tasks=TASKS, pool=pool, reset_timeout=0.2)
    _, info = env.reset(seed=0)
    assert info["failure"].kind == "claim_timeout"
    _, reward, _, truncated, _ = env.step("true")
    assert math.isnan(reward)
    assert truncated
    for sandbox in held:
        sandbox.release()
    assert env.reset()[1]["failure"] is None
    env.close()
    assert [record.outcome for record in pool.report().records] == ["never_ran", "cancelled"]
