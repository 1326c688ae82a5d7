"""Rollouts of a synchronous pool: policies on threads, and what Ctrl-C does to every kind of caller."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsandbox._portal import Portal
from rlsandbox.errors import ConfigError, LimitReachedError, PoolClosedError, SandboxStateError
from rlsandbox.ledger import reading
from rlsandbox.pool import attempts
from rlsandbox.pool import policy as policy_module
from rlsandbox.pool.rollouts import stop_batches, sync_rollouts, sync_run_rollouts
from rlsandbox.results import Record
from rlsandbox.spec import Limits
from rlsandbox.task import Grader, Task
from tests.support.fake_pool import Blocking, FakePool, FakeSync

GRADER = Grader(command="true")
ROOT = Path(__file__).parents[2]


def tasks(n: int, **fields: Any) -> list[Task]:
    return [Task(id=f"t{i}", grader=GRADER, **fields) for i in range(n)]


class Sync:
    """A synchronous pool over a FakePool."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.portal = Portal()

        async def make() -> FakePool:
            return FakePool(path, **options)

        self.pool: FakePool = self.portal.call(make)
        self.side = FakeSync(self.portal)

    def collect(self, todo: list[Task], policy: Any, **options: Any) -> dict[str, Record]:
        return {r.id: r for r in sync_rollouts(self.pool, self.side, todo, policy, **options)}

    def close(self) -> None:
        self.portal.call(self.pool.close)
        self.portal.close()


@pytest.fixture
def sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sync]:
    monkeypatch.setattr(policy_module, "GRACE_S", 0.3)
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)
    sync = Sync(tmp_path)
    yield sync
    sync.close()


def test_policies_run_side_by_side_on_threads_of_their_own(sync: Sync) -> None:
    together = threading.Barrier(4)
    names: set[str] = set()

    def policy(sandbox: Blocking, task: Task) -> str:
        together.wait(20)
        names.add(threading.current_thread().name)
        assert sandbox.rollout.id == f"run/{task.id}/0"
        assert sandbox.rollout.attempt == 1
        return sandbox.run(f"echo {task.id}").stdout

    seen = sync.collect(tasks(8), policy)
    assert len(seen) == len(names) == 8
    assert all(r.value == f"echo {r.task_id}" and r.reward == 1.0 for r in seen.values())
    report = sync_run_rollouts(sync.pool, sync.side, tasks(1), lambda sandbox, task: "x", progress=False)
    assert report.coverage == 1.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "policy_error"),
        (SystemExit(1), "system_exit"),
        (KeyboardInterrupt(), "keyboard_interrupt"),
        (asyncio.CancelledError(), "cancelled_error"),
        (StopIteration(3), "policy_error"),
        (GeneratorExit(), "policy_error"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_whatever_one_raises_the_others_keep_their_results(
    sync: Sync, error: BaseException, kind: str
) -> None:
    def policy(sandbox: Blocking, task: Task) -> str:
        if task.id == "t2":
            raise error
        return sandbox.run("fine").stdout

    seen = sync.collect(tasks(6), policy)
    bad = seen.pop("run/t2/0")
    assert all(r.status == "completed" for r in seen.values())
    assert len(seen) == 5
    assert bad.failure is not None
    assert (bad.outcome, bad.failure.kind) == ("failed_by_task", kind)
    assert "in policy" in bad.failure.traceback


def test_retries_and_checkpoints(sync: Sync) -> None:
    def policy(sandbox: Blocking, task: Task) -> Any:
        if sandbox.rollout.attempt == 1:
            sandbox.run("put work half")
            snapshot = sandbox.rollout.checkpoint(["messages"])
            assert snapshot.bytes == 4
            sandbox.run("die")
        return [sandbox.rollout.state, sandbox.run("get work").stdout]

    (record,) = sync.collect(tasks(1), policy).values()
    assert (record.status, record.attempts, record.value) == ("completed", 2, [["messages"], "half"])


def test_an_async_policy_is_refused(sync: Sync) -> None:
    async def policy(sandbox: Any, task: Task) -> None: ...

    class Callable_:
        async def __call__(self, sandbox: Any, task: Task) -> None: ...

    for one in (policy, Callable_()):
        with pytest.raises(ConfigError, match="the policy is async, the pool is not"):
            sync.collect(tasks(1), one)
    (record,) = sync.collect(tasks(1), lambda sandbox, task: policy(sandbox, task)).values()
    assert record.failure is not None
    assert "use AsyncPool or a plain function" in record.failure.cause


def test_wall_limit_shuts_a_running_policy_out_and_grades(sync: Sync) -> None:
    said: list[str] = []

    def policy(sandbox: Blocking, task: Task) -> str:
        try:
            sandbox.run("sleep 60")
        except SandboxStateError as error:
            said.append(str(error))
            raise
        return "never"

    (record,) = sync.collect(tasks(1, limits=Limits(wall=0.1)), policy).values()
    assert (record.status, record.truncated, record.reward) == ("completed", "wall", 1.0)
    assert said
    assert "graded" in said[0]
    (record,) = sync.collect([Task(id="n", limits=Limits(wall=0.1))], policy).values()
    assert (record.status, record.truncated, record.reward) == ("completed", "wall", None)
    assert "released" in said[1]


def test_steps_limit(sync: Sync) -> None:
    def policy(sandbox: Blocking, task: Task) -> str:
        for _ in range(3):
            sandbox.run("x")
        with pytest.raises(LimitReachedError):
            sandbox.run("x")
        return "three"

    (record,) = sync.collect(tasks(1, limits=Limits(steps=3)), policy).values()
    assert (record.truncated, record.value, record.reward) == ("steps", "three", 1.0)


def test_a_thread_that_will_not_end_is_left_behind(sync: Sync, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()

    def policy(sandbox: Blocking, task: Task) -> str:
        free.wait(30)
        return "too late"

    (record,) = sync.collect(tasks(1), policy, timeout=0.1).values()
    assert record.failure is not None
    assert record.failure.kind == "rollout_timeout"
    assert "does not end; it is left behind" in caplog.text
    assert sync.pool.released == {"discard": 1}
    free.set()


def test_leaving_the_loop(sync: Sync) -> None:
    def policy(sandbox: Blocking, task: Task) -> str:
        if task.id != "t0":
            sandbox.run("sleep 60")
        return "done"

    begin = time.monotonic()
    for record in sync_rollouts(sync.pool, sync.side, tasks(8), policy):
        assert record.task_id == "t0"
        break
    assert time.monotonic() - begin < 20
    assert Counter(r.status for r in sync.pool.ledger.records()) == {"completed": 1, "cancelled": 7}
    assert not sync.pool.live


def test_a_loop_that_is_left_by_an_exception(sync: Sync) -> None:
    def train() -> None:
        for _ in sync_rollouts(sync.pool, sync.side, tasks(8), lambda sandbox, task: "done", concurrency=1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert len(sync.pool.ledger.records()) == 8


def test_closing_from_another_thread_while_somebody_iterates(sync: Sync) -> None:
    begun = threading.Semaphore(0)

    def policy(sandbox: Blocking, task: Task) -> str:
        begun.release()
        sandbox.run("sleep 60")
        return "never"

    seen: list[Record] = []
    said: list[str] = []

    def take() -> None:
        try:
            for record in sync_rollouts(sync.pool, sync.side, tasks(6), policy):
                seen.append(record)
        except PoolClosedError as error:
            said.append(error.message)

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(4):
        assert begun.acquire(timeout=20)
    sync.portal.call(stop_batches, sync.pool)
    thread.join(20)
    assert not thread.is_alive()
    assert Counter(r.outcome for r in seen) == {"cancelled": 4, "never_ran": 2}
    assert said == ["the pool was closed while its rollouts ran"]


# ---------------------------------------------------------------------- Ctrl-C

VICTIM = """
import asyncio, sys
from pathlib import Path
from rlsandbox._portal import Portal
from rlsandbox.pool.rollouts import rollouts, run_rollouts, sync_rollouts, sync_run_rollouts
from rlsandbox.task import Grader, Task
from tests.support.fake_pool import FakePool, FakeSync

how, where = sys.argv[1], Path(sys.argv[2])
tasks = [Task(id=f"t{i}", grader=Grader(command="true")) for i in range(12)]
begun = 0

def said():
    global begun
    begun += 1
    if begun == 4:
        print("ready", flush=True)

async def policy(sandbox, task):
    if task.id not in ("t0", "t1"):
        said()
        await sandbox.run("sleep 60")
    return "done"

def policy_sync(sandbox, task):
    if task.id not in ("t0", "t1"):
        said()
        sandbox.run("sleep 60")
    return "done"

async def main():
    async with FakePool(where) as pool:
        if how == "async iterate":
            async for record in rollouts(pool, tasks, policy):
                pass
        else:
            await run_rollouts(pool, tasks, policy, progress=False)

try:
    if how.startswith("async"):
        asyncio.run(main())
    elif how == "own loop":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
    else:
        portal = Portal()
        async def make():
            return FakePool(where)
        pool = portal.call(make)
        try:
            if how == "sync iterate":
                for record in sync_rollouts(pool, FakeSync(portal), tasks, policy_sync):
                    pass
            else:
                sync_run_rollouts(pool, FakeSync(portal), tasks, policy_sync, progress=False)
        finally:
            portal.call(pool.close)
            portal.close()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
print("came through", flush=True)
"""


@pytest.mark.parametrize("how", ["async iterate", "async run", "sync iterate", "sync run", "own loop"])
def test_ctrl_c_stops_the_batch_and_loses_nothing(tmp_path: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, how, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, "interrupted\n")
    book = reading.read([tmp_path / "run.db"])
    assert not book.open()
    records = {r.task_id: r for log in book.rollouts.values() if (r := log.record)}
    assert len(records) == 12
    assert {id_ for id_, r in records.items() if r.status == "completed"} == {"t0", "t1"}
    others = Counter(r.outcome for id_, r in records.items() if id_ not in ("t0", "t1"))
    assert others == {"cancelled": 4, "never_ran": 6}
    assert book.processes[0].closed_at is not None


def test_the_time_of_a_rollout_is_not_that_of_the_batch(sync: Sync) -> None:
    """``timeout`` once ended the whole batch, with a TimeoutError and without a report."""

    def policy(sandbox: Blocking, task: Task) -> str:
        time.sleep(0.3)
        return "done"

    report = sync_run_rollouts(
        sync.pool, sync.side, tasks(4), policy, concurrency=1, timeout=1.0, progress=False
    )
    assert report.coverage == 1.0


def test_without_a_stderr(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that closed its descriptors has no ``sys.stderr``."""
    monkeypatch.setattr(sys, "stderr", None)
    report = sync_run_rollouts(sync.pool, sync.side, tasks(1), lambda sandbox, task: "done")
    assert report.coverage == 1.0
