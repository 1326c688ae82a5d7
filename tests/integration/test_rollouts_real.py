"""Rollouts in real sandboxes: groups, grades, limits, keepers that are killed, checkpoints, Ctrl-C of a script."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.errors import UnsupportedError
from rlsandbox.ledger import reading
from tests.support.keepers import keeper_of, until_gone

ROOT = Path(__file__).parents[2]
FIXED = rls.Grader(command="grep -q fixed work.txt", files={"hidden.txt": "for the grader only"})


def tasks(n: int, **fields: Any) -> list[rls.Task]:
    return [
        rls.Task(id=f"t{i}", workdir="/w", files={"work.txt": "broken\n"}, grader=FIXED, **fields)
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rls.Pool]:
    try:
        pool = rls.Pool(size=4, config=False, run="real", ledger=tmp_path_factory.mktemp("ledger"))
    except UnsupportedError as error:
        pytest.skip(str(error))
    yield pool
    pool.close()


def fix(sandbox: rls.Sandbox, task: rls.Task) -> str:
    assert sandbox.run("ls").stdout == "work.txt\n", "no hidden file, nothing of another rollout"
    sandbox.write_file("work.txt", "fixed\n")
    return sandbox.run("cat work.txt").stdout


def test_groups_are_graded_and_on_record(pool: rls.Pool) -> None:
    report = pool.run_rollouts(tasks(4), fix, group_size=3, progress=False)
    assert report.coverage == 1.0
    assert report.mean_reward == 1.0
    assert report.requested == 12
    for log in report.logs:
        (attempt,) = log.attempts
        assert attempt.sandbox
        assert attempt.node
        assert attempt.reset_mode in ("overlay", "userns")
        assert set(attempt.times) == {"queued", "provisioned", "reset", "connected", "started", "idle"}
        assert attempt.ttfc_s is not None
        parts = sum(v for name, v in attempt.times.items() if name != "idle")
        assert attempt.ttfc_s == pytest.approx(parts)
        assert log.record is not None
        assert log.record.value == "fixed\n"
    kept = {r.id: r for r in pool.report().records}
    assert all(kept[r.id] == r for r in report.records)


def test_a_policy_that_does_nothing_gets_nought_and_one_that_raises_gets_none(pool: rls.Pool) -> None:
    def policy(sandbox: rls.Sandbox, task: rls.Task) -> None:
        if task.id == "t1":
            sandbox.run("exit 3", check=True)
        if task.id == "t2":
            sandbox.read_file("/does/not/exist")

    seen = {r.task_id: r for r in pool.rollouts(tasks(3), policy)}
    assert (seen["t0"].outcome, seen["t0"].reward) == ("rewarded", 0.0)
    assert (seen["t1"].outcome, seen["t1"].reward) == ("failed_by_task", None)
    assert seen["t1"].failure is not None
    assert seen["t1"].failure.kind == "command"
    assert seen["t2"].failure is not None
    assert "FileNotFoundError" in seen["t2"].failure.error
    assert not seen["t2"].failure.infrastructure


def test_a_killed_keeper_costs_an_attempt_and_the_checkpoint_keeps_the_work(pool: rls.Pool) -> None:
    states: list[Any] = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> Any:
        rollout = sandbox.rollout
        assert rollout is not None
        messages = rollout.state or ["prompt"]
        states.append(list(messages))
        if rollout.attempt == 1:
            sandbox.write_file("work.txt", "fixed\n")
            messages.append("fixed it")
            snapshot = rollout.checkpoint(messages)
            assert snapshot.bytes > 0
            sandbox.write_file("work.txt", "spoilt again\n")
            sandbox.popen("sleep 87654.125")
            os.kill(keeper_of("sleep 87654.125"), signal.SIGKILL)
        return [messages, sandbox.run("cat work.txt").stdout]

    (record,) = pool.rollouts(tasks(1), policy)
    assert (record.status, record.attempts, record.reward) == ("completed", 2, 1.0)
    assert record.value == [["prompt", "fixed it"], "fixed\n"]
    assert states == [["prompt"], ["prompt", "fixed it"]]
    assert pool.snapshots() == [], "checkpoints go with their rollout"
    log = pool.report().logs[-1]
    assert log.attempts[0].failure is not None
    assert log.attempts[0].failure.kind == "sandbox_died"
    assert log.attempts[0].checkpoint
    assert log.attempts[0].sandbox != log.attempts[1].sandbox


def test_a_keeper_killed_unseen_while_grading_is_never_a_nought(pool: rls.Pool) -> None:
    slow = rls.Grader(command="sleep 76543.25")
    killed = 0

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        nonlocal killed

        def kill() -> None:
            nonlocal killed
            os.kill(keeper_of("sleep 76543.25"), signal.SIGKILL)
            killed += 1

        threading.Thread(target=kill, daemon=True).start()
        return "done"

    (record,) = pool.rollouts([rls.Task(id="graded", grader=slow)], policy, retries=1)
    assert killed == 2
    assert (record.outcome, record.reward, record.attempts) == ("failed_by_infrastructure", None, 2)
    assert record.failure is not None
    assert record.failure.kind == "sandbox_died"


def test_limits_truncate_and_what_was_done_is_graded(pool: rls.Pool) -> None:
    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        sandbox.run("echo fixed > work.txt")
        if task.id == "t0":
            sandbox.run("sleep 1000")
        else:
            for _ in range(10):
                sandbox.run("true")
        return "never"

    todo = [tasks(1, limits=rls.Limits(wall=0.5))[0], tasks(2, limits=rls.Limits(steps=3))[1]]
    seen = {r.task_id: r for r in pool.rollouts(todo, policy)}
    assert {id_: (r.status, r.truncated, r.reward) for id_, r in seen.items()} == {
        "t0": ("completed", "wall", 1.0),
        "t1": ("completed", "steps", 1.0),
    }


def test_a_command_in_flight_ends_when_the_batch_is_left(pool: rls.Pool) -> None:
    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        if task.id != "t0":
            sandbox.run("sleep 65432.5")
        return "done"

    for record in pool.rollouts(tasks(6), policy):
        assert record.task_id == "t0"
        break
    until_gone("sleep 65432.5")
    last = pool.report().batches[-1].batch
    outcomes = Counter(log.record.outcome for log in pool.report().logs if log.batch == last and log.record)
    assert outcomes.pop("rewarded") == 1
    assert sum(outcomes.values()) == 5
    assert set(outcomes) <= {"cancelled", "never_ran"}
    assert pool.claim(tasks(1)[0], timeout=30).run("echo usable").stdout == "usable\n"


async def test_async_rollouts(tmp_path: Path) -> None:
    async def policy(sandbox: rls.AsyncSandbox, task: rls.Task) -> Any:
        rollout = sandbox.rollout
        if rollout.attempt == 1 and task.id == "t1":
            await sandbox.write_file("work.txt", "fixed\n")
            await rollout.checkpoint({"n": 1})
            raise rls.errors.SandboxDiedError("as if")
        if task.id == "t2":
            raise SystemExit(3)
        return [rollout.state, (await sandbox.run("cat work.txt")).stdout]

    async with rls.AsyncPool(size=2, config=False, run="a", ledger=tmp_path) as pool:
        seen = {r.task_id: r async for r in pool.rollouts(tasks(3), policy)}
        assert seen["t0"].value == [None, "broken\n"]
        assert (seen["t1"].value, seen["t1"].reward) == ([{"n": 1}, "fixed\n"], 1.0)
        assert seen["t2"].failure is not None
        assert seen["t2"].failure.kind == "system_exit"
        assert pool.report().coverage == 2 / 3
    async with rls.AsyncPool(size=2, config=False, run="a", ledger=tmp_path) as pool:
        assert [r.task_id async for r in pool.rollouts(tasks(3), policy, resume=True)] == ["t2"]
        assert pool.report().requested == 3
    leftover: set[asyncio.Task[Any]] = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
    assert not leftover


SCRIPT = """
import sys
import rlsandbox as rls

tasks = [rls.Task(id=f"t{i}") for i in range(6)]

def policy(sandbox, task):
    if task.id == "t0":
        return "done"
    print("ready\\n", end="", flush=True)  # in one piece: two threads do it
    return sandbox.run("sleep 1000").exit_code

pool = rls.Pool(size=2, config=False, run="script", ledger=sys.argv[1])
pool.run_rollouts(tasks, policy, progress=False)
print("came through", flush=True)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_interrupted_without_having_closed_anything(
    tmp_path: Path, sign: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sign)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -sign, err
    assert "came through" not in out
    book = reading.read([tmp_path / "script.db"])
    assert not book.open()
    outcomes = {log.task_id: log.record.outcome for log in book.rollouts.values() if log.record}
    assert outcomes.pop("t0") == "unrewarded"
    assert set(outcomes.values()) <= {"cancelled", "never_ran"}
    assert len(outcomes) == 5
