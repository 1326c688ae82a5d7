"""Rollouts on a pool without sandboxes: every way in which one can end, and none takes another with it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlsandbox.errors import (
    ClaimTimeoutError,
    ConfigError,
    LimitReachedError,
    PoolClosedError,
    ProvisionError,
    SandboxDiedError,
    SandboxStateError,
)
from rlsandbox.hooks import hookimpl
from rlsandbox.ledger import LedgerWarning, reading, redact
from rlsandbox.pool import attempts
from rlsandbox.pool import policy as policy_module
from rlsandbox.pool.rollouts import Batch, Plan, rollouts, run_rollouts, stop_batches
from rlsandbox.results import Failure, Outcome, Record
from rlsandbox.spec import Limits
from rlsandbox.task import Grader, Task
from tests.support.fake_pool import FakePool, FakeSandbox
from tests.support.faulty_sqlite import faulty
from tests.support.small_disk import fill, small_disk

GRADER = Grader(command="true")


def tasks(n: int, **fields: Any) -> list[Task]:
    return [Task(id=f"t{i}", grader=GRADER, **fields) for i in range(n)]


async def collect(pool: FakePool, todo: list[Task], policy: Any, **options: Any) -> dict[str, Record]:
    return {record.id: record async for record in rollouts(pool, todo, policy, **options)}


async def work(sandbox: Any, task: Task) -> str:
    return (await sandbox.run(f"echo {task.id}")).stdout


@pytest.fixture(autouse=True)
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "GRACE_S", 0.2)
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)


async def test_each_rollout_has_its_record_and_the_ledger_the_same(tmp_path: Path) -> None:
    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, tasks(5), work, group_size=4)
        assert sorted(seen) == sorted(f"run/t{i}/{j}" for i in range(5) for j in range(4))
        for record in seen.values():
            assert record.status == "completed"
            assert record.outcome == "rewarded"
            assert (record.reward, record.passed, record.attempts) == (1.0, True, 1)
            assert record.value == f"echo {record.task_id}"
            assert record.ttfc_s == 0.003
            assert (record.node, record.image, record.ran) == ("node-1", "img", True)
            assert record.group == f"{record.task_id}@0"
            assert record.started_at <= record.ended_at
        assert {r.id: r for r in pool.ledger.records()} == seen
        assert pool.most == 4, "as many at once as the pool has sandboxes"
        assert not pool.live
        assert pool.expected == {f"t{i}": 4 for i in range(5)}
        assert {r.group for r in pool.rollouts_seen} == {f"t{i}@0" for i in range(5)}
        assert len(pool.metrics.batch.values()) == 1


async def test_recorded_as_requested_before_the_first_claim(tmp_path: Path) -> None:
    on_disk: list[int] = []

    async with FakePool(tmp_path) as pool:

        async def look(task: Any) -> None:
            if not on_disk:
                on_disk.append(len(reading.read([pool.ledger.path]).open()))

        pool.before_claim = look
        await collect(pool, tasks(300), work)
    assert on_disk == [300]


async def test_concurrency(tmp_path: Path) -> None:
    async with FakePool(tmp_path, max_size=None) as pool:
        await collect(pool, tasks(20), work, concurrency=3)
        assert pool.most == 3
        await collect(pool, tasks(20), work)
        assert pool.most == 20


async def test_no_tasks(tmp_path: Path) -> None:
    async with FakePool(tmp_path) as pool:
        assert await collect(pool, [], work) == {}
        report = await run_rollouts(pool, [], work, progress=False)
        assert report.requested == 0
        assert report.coverage != report.coverage


def one_bad(raising: Any) -> Any:
    async def policy(sandbox: Any, task: Task) -> str:
        await sandbox.run("x")
        if task.id == "t3":
            raise raising
        await asyncio.sleep(0.001)
        return "fine"

    return policy


class Ugly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even my text is broken")


@pytest.mark.parametrize(
    ("error", "kind", "type_name"),
    [
        (ValueError("bad"), "policy_error", "ValueError"),
        (SystemExit(3), "system_exit", "SystemExit"),
        (KeyboardInterrupt(), "keyboard_interrupt", "KeyboardInterrupt"),
        (asyncio.CancelledError("own"), "cancelled_error", "asyncio.exceptions.CancelledError"),
        (GeneratorExit(), "policy_error", "GeneratorExit"),
        (StopAsyncIteration(), "policy_error", "StopAsyncIteration"),
        (BaseExceptionGroup("g", [SystemExit(1), ValueError("x")]), "policy_error", "BaseExceptionGroup"),
        (Ugly(), "policy_error", f"{Ugly.__module__}.Ugly"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_whatever_one_raises_the_others_keep_their_results(
    tmp_path: Path, error: BaseException, kind: str, type_name: str
) -> None:
    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, tasks(8), one_bad(error))
        assert len(seen) == 8
        bad = seen.pop("run/t3/0")
        assert all(r.status == "completed" and r.value == "fine" for r in seen.values())
        assert (bad.status, bad.outcome, bad.attempts, bad.reward) == ("failed", "failed_by_task", 1, None)
        failure = bad.failure
        assert failure is not None
        assert (failure.kind, failure.phase, failure.error) == (kind, "policy", type_name)
        assert not failure.infrastructure
        assert not failure.retryable
        if not isinstance(error, StopAsyncIteration):
            assert "one_bad" in failure.traceback or "in policy" in failure.traceback
        (kept,) = [r for r in pool.ledger.records() if r.task_id == "t3"]
        assert kept == bad, "type, message and traceback come back from the ledger"
        assert not pool.live


async def test_a_policy_that_cancels_itself_is_its_own_fault(tmp_path: Path) -> None:
    async def policy(sandbox: Any, task: Task) -> str:
        if task.id == "t1":
            task_ = asyncio.current_task()
            assert task_ is not None
            task_.cancel()
            await asyncio.sleep(10)
        return "fine"

    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, tasks(3), policy)
        assert Counter(r.status for r in seen.values()) == {"completed": 2, "failed": 1}
        assert seen["run/t1/0"].failure.kind == "cancelled_error"


async def test_infrastructure_is_retried_in_a_fresh_sandbox(tmp_path: Path) -> None:
    used: list[str] = []

    async def policy(sandbox: Any, task: Task) -> str:
        used.append(sandbox.id)
        if len(used) < 3:
            await sandbox.run("die")
        return "third time"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), policy)).values()
        assert (record.status, record.attempts, record.value) == ("completed", 3, "third time")
        assert len(set(used)) == 3
        report = pool.ledger.report()
        assert report.failures() == {}
        assert report.failures(attempts=True) == {"sandbox_died": 2}
        assert report.failures("node", attempts=True) == {"node-1": 2}
        assert pool.metrics.counters()["failures/sandbox_died"] == 2
        (log,) = report.logs
        assert [a.sandbox for a in log.attempts] == used
        assert [a.failure.kind if a.failure else None for a in log.attempts] == ["sandbox_died"] * 2 + [None]


async def test_infrastructure_that_stays_broken_is_never_scored(tmp_path: Path) -> None:
    async def policy(sandbox: Any, task: Task) -> str:
        await sandbox.run("die")
        return "never"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), policy, retries=1)).values()
        assert (record.status, record.outcome, record.reward) == ("failed", "failed_by_infrastructure", None)
        assert record.attempts == 2
        said = "its keeper was killed [sandbox sb2]"
        assert record.failure == Failure(
            "sandbox_died", "command", said, True, True, "rlsandbox.errors.SandboxDiedError", said,
            record.failure.traceback,
        )  # fmt: skip
        assert "await sandbox.run(" in record.failure.traceback


@pytest.mark.parametrize("how", ["wrapped", "while handling", "hidden", "group", "swallowed"])
async def test_a_policy_is_innocent_of_what_infrastructure_made_it_raise(tmp_path: Path, how: str) -> None:
    async def policy(sandbox: Any, task: Task) -> str:
        try:
            await sandbox.run("die")
        except SandboxDiedError as error:
            if how == "wrapped":
                raise RuntimeError("my tool failed") from error
            if how == "while handling":
                raise KeyError("cleanup") from None if how == "never" else KeyError("cleanup")
            if how == "group":
                raise ExceptionGroup("tools", [ValueError("x"), error]) from None
        return "went on as if nothing had happened"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), policy, retries=0)).values()
        assert record.outcome == "failed_by_infrastructure"
        assert record.failure.kind == "sandbox_died"
        assert record.reward is None


async def test_a_sandbox_that_died_unnoticed_makes_no_completed_rollout(tmp_path: Path) -> None:
    async def policy(sandbox: FakeSandbox, task: Task) -> str:
        sandbox.die()
        return "done"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, [Task(id="no-grader")], policy, retries=0)).values()
        assert record.outcome == "failed_by_infrastructure"
        assert record.failure.kind == "sandbox_died"


async def test_claims_that_fail(tmp_path: Path) -> None:
    errors = {
        "t0": ClaimTimeoutError("no sandbox in 5 s"),
        "t1": ProvisionError("image gone", kind="image_not_found", retryable=False),
        "t2": ConfigError("Spec.user: no such user"),
        "t3": RuntimeError("a bug"),
        "t4": OSError(28, "No space left on device"),
    }

    async with FakePool(tmp_path) as pool:

        async def fail(task: Any) -> None:
            if task.id in errors:
                raise errors[task.id]

        pool.before_claim = fail
        seen = {r.task_id: r for r in (await collect(pool, tasks(6), work)).values()}
        told = {
            id_: (r.failure.kind, r.attempts, r.failure.infrastructure)
            for id_, r in seen.items()
            if r.failure
        }
        assert told == {
            "t0": ("claim_timeout", 3, True),
            "t1": ("image_not_found", 1, True),
            "t2": ("config", 1, False),
            "t3": ("internal", 1, True),
            "t4": ("machine_exhausted", 3, True),
        }
        assert all(seen[i].outcome == "never_ran" and not seen[i].ran for i in errors)
        assert seen["t5"].status == "completed"


async def test_values(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    values: dict[str, Any] = {
        "none": None, "text": "é\ud800", "json": {"a": [1, 2.5, True, None, {"b": ()}], "3": 4},
        "object": object(), "nan": float("nan"), "bytes": b"x", "deep": {"a": [1, {2, 3}]}, "circle": circle,
        "lambda": lambda: 0,
    }  # fmt: skip

    async def policy(sandbox: Any, task: Task) -> Any:
        return values[task.id]

    async def result(sandbox: Any, task: Task) -> Any:
        return await sandbox.run("hello")

    async with FakePool(tmp_path) as pool:
        todo = [Task(id=name, grader=GRADER) for name in values]
        seen = {r.task_id: r for r in (await collect(pool, todo, policy)).values()}
        assert seen["none"].value is None
        assert seen["text"].value == "é\ud800"
        assert seen["json"].value == {"a": [1, 2.5, True, None, {"b": []}], "3": 4}
        for name in ("object", "nan", "bytes", "deep", "circle", "lambda"):
            failure = seen[name].failure
            assert failure is not None, name
            assert failure.kind == "value_not_json"
            assert failure.phase == "policy"
            assert not failure.infrastructure
            assert "JSON" in failure.cause or "nested too deeply" in failure.cause
        assert "value['a'][1]" in seen["deep"].failure.cause
        assert "is of type set" in seen["deep"].failure.cause
        assert {r.task_id: r.value for r in pool.ledger.records()} == {k: r.value for k, r in seen.items()}
        (record,) = (await collect(pool, [Task(id="result")], result)).values()
        assert record.status == "completed"
        assert record.value["exit_code"] == 0
        assert record.value["stdout"] == "hello"
        assert "stdout_bytes" not in record.value


async def test_grading(tmp_path: Path) -> None:
    graded: list[str] = []

    def grader(sandbox: FakeSandbox) -> Outcome:
        graded.append(sandbox.task.id)
        if sandbox.task.id == "bug":
            raise ZeroDivisionError("in the reward function")
        if sandbox.task.id == "died":
            raise SandboxDiedError("while grading")
        return {"half": Outcome(0.5, False), "zero": Outcome(0.0, False), "none": Outcome(None, None)}.get(
            sandbox.task.id, Outcome(float("nan"), None)
        )

    async def policy(sandbox: Any, task: Task) -> None:
        if task.id == "self":
            sandbox.outcome = Outcome(0.25, True)

    async with FakePool(tmp_path) as pool:
        pool.grader = grader
        names = ["half", "zero", "none", "nan", "bug", "died", "self"]
        todo = [*(Task(id=n, grader=GRADER) for n in names), Task(id="ungraded")]
        seen = {r.task_id: r for r in (await collect(pool, todo, policy, retries=1)).values()}
        assert {n: (r.status, r.outcome, r.reward) for n, r in seen.items()} == {
            "half": ("completed", "rewarded", 0.5),
            "zero": ("completed", "rewarded", 0.0),
            "none": ("completed", "unrewarded", None),
            "nan": ("failed", "failed_by_task", None),
            "bug": ("failed", "failed_by_task", None),
            "died": ("failed", "failed_by_infrastructure", None),
            "self": ("completed", "rewarded", 0.25),
            "ungraded": ("completed", "unrewarded", None),
        }
        assert graded.count("died") == 2, "retried"
        assert graded.count("self") == 0, "it graded itself"
        assert seen["bug"].failure.kind == "grade_error"
        assert seen["bug"].failure.phase == "grade"
        assert "nan, not a finite number" in seen["nan"].failure.cause


async def test_steps_limit_is_truncated_and_graded(tmp_path: Path) -> None:
    async def greedy(sandbox: Any, task: Task) -> str:
        for i in range(10):
            try:
                await sandbox.run(f"step {i}")
            except LimitReachedError:
                if task.id == "t1":
                    return f"noticed after {i}"
                if task.id == "t2":
                    raise RuntimeError("my loop ended") from None
                raise
        return "never"

    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, tasks(3, limits=Limits(steps=4)), greedy)
        for record in seen.values():
            assert (record.status, record.truncated, record.reward) == ("completed", "steps", 1.0)
        assert seen["run/t0/0"].value is None
        assert seen["run/t1/0"].value == "noticed after 4"
        assert seen["run/t2/0"].value is None


async def test_wall_limit_cuts_the_policy_off_and_grades(tmp_path: Path) -> None:
    cleaned: list[str] = []

    async def slow(sandbox: Any, task: Task) -> str:
        try:
            await sandbox.run("sleep 60")
        finally:
            await sandbox.run("put cleaned yes")
            cleaned.append(task.id)
        return "never"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1, limits=Limits(wall=0.05)), slow)).values()
        assert (record.status, record.truncated, record.reward) == ("completed", "wall", 1.0)
        assert record.failure is None
        assert cleaned == [], "the budget of time is used up: a command after it is refused"
        assert not pool.live


async def test_a_policy_that_will_not_end_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = asyncio.Event()

    async def stubborn(sandbox: Any, task: Task) -> str:
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()
        return "at last"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), stubborn, timeout=0.05)).values()
        assert (record.status, record.failure.kind) == ("failed", "rollout_timeout")
        assert "does not end; it is left behind" in caplog.text
        assert pool.released == {"discard": 1}, "its sandbox is not used again"
        caplog.clear()
        todo = tasks(1, limits=Limits(wall=0.05))
        (record,) = (await collect(pool, todo, stubborn)).values()
        assert (record.status, record.truncated, record.reward) == ("completed", "wall", 1.0)
        assert pool.released == {"discard": 2}
        free.set()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("broken_first", [False, True])
async def test_the_rollouts_timeout(tmp_path: Path, broken_first: bool) -> None:
    async def slow(sandbox: Any, task: Task) -> str:
        if broken_first and sandbox.rollout.attempt == 1:
            await sandbox.run("die")
        await sandbox.run("sleep 60")
        return "never"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), slow, timeout=0.2)).values()
        assert (record.status, record.failure.kind, record.failure.phase) == (
            "failed", "rollout_timeout", "policy"
        )  # fmt: skip
        assert record.failure.infrastructure is broken_first, (
            "time that broken attempts took is not the policy's"
        )
        assert not record.failure.retryable


async def test_the_rollouts_timeout_while_grading_and_while_claiming(tmp_path: Path) -> None:
    async def hang(sandbox: FakeSandbox) -> Outcome:
        await asyncio.sleep(60)
        raise AssertionError

    async with FakePool(tmp_path) as pool:
        pool.grader = hang
        (record,) = (await collect(pool, tasks(1), work, timeout=0.1)).values()
        assert (record.failure.kind, record.failure.phase) == ("rollout_timeout", "grade")

        async def never(task: Any) -> None:
            await asyncio.sleep(0.2)
            raise ClaimTimeoutError("no sandbox in time")

        pool.before_claim = never
        (record,) = (await collect(pool, tasks(1), work, timeout=0.1)).values()
        assert (record.failure.kind, record.attempts) == ("claim_timeout", 1)
        assert record.outcome == "never_ran"


# ---------------------------------------------------------------------- checkpoints


async def test_a_checkpoint_gives_the_next_attempt_files_and_state(tmp_path: Path) -> None:
    states: list[Any] = []

    async def policy(sandbox: Any, task: Task) -> Any:
        rollout = sandbox.rollout
        messages = rollout.state or ["prompt"]
        states.append(list(messages))
        files = (await sandbox.run("get work")).stdout
        if rollout.attempt == 1:
            await sandbox.run("put work half")
            messages.append("first")
            snapshot = await rollout.checkpoint(messages)
            assert snapshot.bytes == 4
            messages.append("said after the checkpoint: not part of it")
            await sandbox.run("put work spoilt")
            await sandbox.run("die")
        if rollout.attempt == 2:
            messages.append("second")
            await sandbox.run("die")
        assert files == "half"
        return messages

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), policy)).values()
        assert record.status == "completed"
        assert states == [["prompt"], ["prompt", "first"], ["prompt", "first"]], "each gets a copy of its own"
        assert record.value == ["prompt", "first"]
        assert [s.deleted for s in pool.snapshots] == [True]
        (log,) = pool.ledger.report().logs
        assert log.attempts[0].checkpoint == pool.snapshots[0].id


async def test_a_later_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    async def policy(sandbox: Any, task: Task) -> Any:
        if sandbox.rollout.attempt == 1:
            for i in range(3):
                await sandbox.run(f"put n {i}")
                await sandbox.rollout.checkpoint(i)
                assert [s.deleted for s in sandbox.pool.snapshots] == [True] * i + [False]
            await sandbox.run("die")
        return [sandbox.rollout.state, (await sandbox.run("get n")).stdout]

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), policy)).values()
        assert record.value == [2, "2"]
        assert all(s.deleted for s in pool.snapshots)


async def test_a_lost_checkpoint_means_a_fresh_start_without_its_state(tmp_path: Path) -> None:
    async def policy(sandbox: Any, task: Task) -> Any:
        if sandbox.rollout.attempt == 1:
            await sandbox.run("put n 1")
            await sandbox.rollout.checkpoint("state")
            await sandbox.run("die")
        return [sandbox.rollout.state, (await sandbox.run("get n")).stdout]

    async with FakePool(tmp_path) as pool:

        async def lose(source: Any) -> None:
            if not isinstance(source, Task):
                raise SandboxStateError("snapshot snap2 is gone")

        pool.before_claim = lose
        (record,) = (await collect(pool, tasks(1), policy)).values()
        assert record.status == "completed"
        assert record.value == [None, ""], "state without its files would be a lie"
        assert record.attempts == 2
        assert [n.kind for n in pool.ledger.book().notes] == ["checkpoint_lost"]


async def test_a_checkpoint_that_cannot_be_kept(tmp_path: Path) -> None:
    kept: list[Any] = []

    async def policy(sandbox: Any, task: Task) -> str:
        kept.append(sandbox.rollout)
        with pytest.raises(ConfigError, match="must be copyable"):
            await sandbox.rollout.checkpoint(threading.Lock())
        assert sandbox.pool.snapshots == []
        return "ok"

    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), policy)).values()
        assert record.value == "ok"
        with pytest.raises(SandboxStateError, match="too late"):
            await kept[0].checkpoint("x")


# ---------------------------------------------------------------------- stopping


async def test_leaving_the_loop_stops_the_batch_and_records_the_rest(tmp_path: Path) -> None:
    started: list[str] = []

    async def policy(sandbox: Any, task: Task) -> str:
        started.append(task.id)
        if task.id != "t0":
            await sandbox.run("sleep 60")
        return "done"

    async with FakePool(tmp_path, max_size=3) as pool:
        iterator = rollouts(pool, tasks(10), policy)
        async for record in iterator:
            assert record.task_id == "t0"
            break
        await iterator.aclose()
        seen = {r.task_id: r for r in pool.ledger.records()}
        assert len(seen) == 10
        assert seen["t0"].status == "completed"
        for id_, record in seen.items():
            if id_ != "t0":
                assert record.status == "cancelled"
                assert record.outcome == ("cancelled" if id_ in started else "never_ran")
                assert record.failure.kind == ("cancelled" if id_ in started else "never_ran")
                assert record.failure.infrastructure
        assert 3 <= len(started) <= 4
        assert not pool.live


async def test_cancelling_whoever_iterates(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def policy(sandbox: Any, task: Task) -> str:
        entered.set()
        await sandbox.run("sleep 60")
        return "never"

    async with FakePool(tmp_path) as pool:
        running = asyncio.ensure_future(run_rollouts(pool, tasks(6), policy, progress=False))
        await entered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert Counter(r.status for r in pool.ledger.records()) == {"cancelled": 6}
        assert not pool.live


async def test_closing_the_pool_ends_the_iteration_with_every_record(tmp_path: Path) -> None:
    begun = asyncio.Semaphore(0)

    async def policy(sandbox: Any, task: Task) -> str:
        begun.release()
        await sandbox.run("sleep 60")
        return "never"

    pool = FakePool(tmp_path)
    seen: list[Record] = []

    async def take() -> None:
        async for record in rollouts(pool, tasks(6), policy):
            seen.append(record)

    running = asyncio.ensure_future(take())
    for _ in range(4):
        await begun.acquire()
    await pool.close()
    with pytest.raises(PoolClosedError, match="while its rollouts ran"):
        await running
    assert Counter(r.status for r in seen) == {"cancelled": 6}
    assert not pool.live


async def test_cancelled_at_every_await(tmp_path: Path) -> None:
    """Stop the batch after n turns of the loop, for every n: each rollout has one end, no sandbox is left."""

    async def policy(sandbox: Any, task: Task) -> str:
        await sandbox.run("put a b")
        if task.id == "t0":
            await sandbox.rollout.checkpoint("s")
            if sandbox.rollout.attempt == 1:
                await sandbox.run("die")
        await asyncio.sleep(0)
        return "done"

    for turns in range(120):
        pool = FakePool(tmp_path / str(turns), max_size=2)
        running = asyncio.ensure_future(run_rollouts(pool, tasks(3), policy, progress=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        assert not pool.live, turns
        assert all(s.deleted for s in pool.snapshots), turns
        book = pool.ledger.book()
        assert not book.open(), turns
        assert len(book.rollouts) in (0, 3), turns
        await pool.close()
        events = reading.events_of(pool.ledger.path)
        ends = Counter(e.rollout for e in events if e.kind == "end")
        requests = Counter(e.rollout for e in events if e.kind == "request")
        assert ends == requests, turns
        assert set(ends.values()) <= {1}, turns


# ---------------------------------------------------------------------- resuming


async def test_resume_skips_what_is_completed_and_runs_the_rest_again(tmp_path: Path) -> None:
    async def flaky(sandbox: Any, task: Task) -> str:
        if task.id in ("t1", "t2"):
            raise ValueError("not yet")
        return "first time"

    async with FakePool(tmp_path) as pool:
        await collect(pool, tasks(5), flaky, group_size=2)

    async def fixed(sandbox: Any, task: Task) -> str:
        return "second time"

    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, tasks(6), fixed, group_size=2, resume=True)
        assert sorted(seen) == sorted(f"run/{t}/{i}" for t in ("t1", "t2", "t5") for i in (0, 1))
        assert {r.value for r in seen.values()} == {"second time"}
        assert pool.expected == {"t1": 2, "t2": 2, "t5": 2}
        report = await run_rollouts(pool, tasks(6), fixed, group_size=2, resume=True, progress=False)
        assert (report.requested, report.left_out) == (12, 12)
        assert report.coverage == 1.0
        assert Counter(r.value for r in report.records) == {"first time": 6, "second time": 6}
        whole = pool.ledger.report()
        assert whole.requested == 12
        assert len({log.id for log in whole.logs}) == 12


async def test_without_resume_numbers_go_on(tmp_path: Path) -> None:
    for expected in ([0, 1], [2, 3]):
        async with FakePool(tmp_path) as pool:
            seen = await collect(pool, tasks(1), work, group_size=2)
            assert sorted(r.index for r in seen.values()) == expected
            assert {r.group for r in seen.values()} == {f"t0@{expected[0]}"}


async def test_the_same_task_twice_in_a_batch(tmp_path: Path) -> None:
    (task,) = tasks(1)
    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, [task, task], work, group_size=2)
        assert sorted(r.index for r in seen.values()) == [0, 1, 2, 3]
        assert Counter(r.group for r in seen.values()) == {"t0@0": 2, "t0@2": 2}
        again = await collect(pool, [task, task], work, group_size=2, resume=True)
        assert again == {}


# ---------------------------------------------------------------------- plugins, secrets, bad input


class Plugin:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.rollouts: list[Any] = []

    @hookimpl
    def rlsandbox_classify_failure(self, error: BaseException, phase: str, rollout: Any) -> Failure | None:
        self.rollouts.append(rollout)
        if "quota" in str(error):
            return Failure(
                kind="acme_quota", phase=phase, cause=str(error), retryable=True, infrastructure=True
            )
        if "boom" in str(error):
            raise RuntimeError("the classifier is broken")
        return None

    @hookimpl
    def rlsandbox_record(self, record: Record) -> None:
        self.records.append(record)
        raise RuntimeError("the recorder is broken")


async def test_plugins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = Plugin()
    tries: Counter[str] = Counter()

    async def policy(sandbox: Any, task: Task) -> str:
        tries[task.id] += 1
        if task.id == "t0" and tries["t0"] == 1:
            raise ValueError("over quota")
        if task.id == "t1":
            raise ValueError("boom")
        return "ok"

    async with FakePool(tmp_path, plugins=[plugin]) as pool:
        seen = await collect(pool, tasks(2), policy)
        assert (seen["run/t0/0"].status, seen["run/t0/0"].attempts) == ("completed", 2)
        assert seen["run/t1/0"].failure.kind == "policy_error"
        assert {r.id for r in plugin.records} == set(seen)
        assert {(r.task.id, r.attempt, r.index) for r in plugin.rollouts} == {("t0", 1, 0), ("t1", 1, 0)}
        assert "rlsandbox_classify_failure raised" in caplog.text
        assert "rlsandbox_record failed" in caplog.text


async def test_plugins_that_hang_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsandbox.pool import rollouts as module

    monkeypatch.setattr(module, "RECORD_HOOK_S", 0.05)
    monkeypatch.setattr(attempts, "CLASSIFY_HOOK_S", 0.05)
    free = threading.Event()

    class Hangs:
        @hookimpl
        def rlsandbox_classify_failure(self, error: BaseException) -> None:
            free.wait(30)

        @hookimpl
        def rlsandbox_record(self) -> None:
            free.wait(30)

    async def policy(sandbox: Any, task: Task) -> str:
        raise ValueError("x")

    async with FakePool(tmp_path, plugins=[Hangs()]) as pool:
        seen = await collect(pool, tasks(2), policy)
        assert [r.failure.kind for r in seen.values()] == ["policy_error"] * 2
    free.set()


async def test_secrets_are_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = redact.register({"TOKEN": "s3cr3t-value"})
    try:

        async def policy(sandbox: Any, task: Task) -> Any:
            if task.id == "t0":
                return {"log": ["used s3cr3t-value"], "s3cr3t-value": 1}
            if task.id == "t1":
                return object.__new__(type("s3cr3t-value", (), {}))
            raise ValueError("token s3cr3t-value refused")

        async with FakePool(tmp_path) as pool:
            seen = await collect(pool, tasks(3), policy)
            pool.ledger.note("revoke_failed", "could not revoke s3cr3t-value", token="s3cr3t-value")
            assert "s3cr3t" not in repr(seen) + repr(
                [r.failure.traceback for r in seen.values() if r.failure]
            )
            assert seen["run/t0/0"].value == {"log": ["used [redacted TOKEN]"], "[redacted TOKEN]": 1}
            assert "token [redacted TOKEN] refused" in seen["run/t2/0"].failure.traceback
        content = await asyncio.to_thread((tmp_path / "run.db").read_bytes)
        assert b"s3cr3t" not in content
        assert "s3cr3t" not in caplog.text
    finally:
        redact.retire(token)


def test_bad_input(tmp_path: Path) -> None:
    (task,) = tasks(1)

    async def policy(sandbox: Any, task: Task) -> None: ...

    bad: list[tuple[Any, Any, dict[str, Any], str]] = [
        (task, policy, {}, "not one task"),
        ("demo", policy, {}, "load_tasks"),
        (["demo"], policy, {}, "Task objects, not str"),
        ([task, Task(id="t0", prompt="other")], policy, {}, "two different tasks have the id 't0'"),
        ([task], "policy", {}, "policy must be callable"),
        ([task], policy, {"group_size": 0}, "group_size must be"),
        ([task], policy, {"group_size": True}, "group_size must be"),
        ([task], policy, {"concurrency": 0}, "concurrency must be"),
        ([task], policy, {"retries": -1}, "retries must be"),
        ([task], policy, {"timeout": 0}, "timeout must be"),
    ]
    for todo, does, options, message in bad:
        with pytest.raises(ConfigError, match=message):
            rollouts(None, todo, does, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the policy is async, the pool is not"):
        Plan.of([task], policy, sync=True)


async def test_a_plain_function_will_do_on_an_async_pool(tmp_path: Path) -> None:
    async with FakePool(tmp_path) as pool:
        seen = await collect(pool, tasks(1), lambda sandbox, task: sandbox.run("hello"))
        assert seen["run/t0/0"].value["stdout"] == "hello"
        seen = await collect(pool, tasks(1), lambda sandbox, task: "text")
        assert seen["run/t0/1"].value == "text"


async def test_a_release_that_fails_changes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: FakeSandbox, *, discard: bool = False) -> None:
        raise ProvisionError("could not be reset")

    async with FakePool(tmp_path) as pool:
        monkeypatch.setattr(FakeSandbox, "release", broken)
        (record,) = (await collect(pool, tasks(1), work)).values()
        assert record.status == "completed"
        notes = pool.ledger.book().notes
        assert [(n.kind, n.data["what"]) for n in notes] == [("cleanup_failed", "release its sandbox")]


async def test_a_bug_of_ours_is_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(attempts.Chain, "_hold", broken)
    async with FakePool(tmp_path) as pool:
        (record,) = (await collect(pool, tasks(1), work)).values()
        assert (record.status, record.failure.kind, record.failure.infrastructure) == (
            "failed",
            "internal",
            True,
        )
        assert not pool.live


async def test_stopping_twice_and_before_the_start(tmp_path: Path) -> None:
    async with FakePool(tmp_path) as pool:
        batch = Batch(pool, Plan.of(tasks(2), work, sync=False))
        await batch.stop()
        await batch.start()
        await batch.stop()
        await batch.stop()
        await stop_batches(pool)
        assert Counter(r.status for r in pool.ledger.records()) == {"cancelled": 2}


async def test_progress_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakePool(tmp_path) as pool:
        await run_rollouts(pool, tasks(3), work, progress=True)
        assert "3/3" in capsys.readouterr().err
        await run_rollouts(pool, tasks(3), work, progress=False)
        await run_rollouts(pool, tasks(3), work)
        assert capsys.readouterr().err == ""
    assert sys.stderr is not None


async def test_a_slow_disk_is_overtaken_by_nothing(tmp_path: Path) -> None:
    """No work before the requests are on disk, no record handed out before it is."""
    may_commit = threading.Semaphore(0)
    work_seen: list[str] = []
    all_worked = asyncio.Event()
    begun: list[str] = []

    def slow(number: int, what: str) -> str | None:
        if what.startswith("execute COMMIT"):
            begun.append(what)
            assert may_commit.acquire(timeout=30)
        return None

    async def policy(sandbox: Any, task: Task) -> str:
        work_seen.append(task.id)
        if len(work_seen) == 3:
            all_worked.set()
        return "done"

    async def some_turns() -> None:
        for _ in range(200):
            await asyncio.sleep(0)

    with faulty(slow):
        may_commit.release()  # the opening
        pool = FakePool(tmp_path)
        records: list[Record] = []

        async def take() -> None:
            records.extend([record async for record in rollouts(pool, tasks(3), policy)])

        taking = asyncio.ensure_future(take())
        await some_turns()
        assert (pool.claims, work_seen, records) == (0, [], [])
        may_commit.release()
        await all_worked.wait()
        await some_turns()
        assert records == [], "not on disk yet"
        may_commit.release(100)
        await taking
        assert len(records) == 3
        await pool.close()


async def test_a_disk_that_is_full_stops_no_rollout_and_loses_no_record(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        pool = FakePool(disk)
        await collect(pool, tasks(2), work)
        filler = await asyncio.to_thread(fill, disk)

        async def talkative(sandbox: Any, task: Task) -> str:
            return "x" * 10_000

        with pytest.warns(LedgerWarning, match="the disk is full"):
            seen = await collect(pool, tasks(40), talkative)
        assert Counter(r.status for r in seen.values()) == {"completed": 40}
        assert pool.ledger.trouble == "the disk is full"
        assert pool.ledger.report().requested == 42
        await asyncio.to_thread(filler.unlink)
        await pool.close()
        book = await asyncio.to_thread(reading.read, [disk / "run.db"])
        assert len(book.rollouts) == 42
        assert not book.open()
        assert {r.id: r for log in book.rollouts.values() if (r := log.record) and r.id in seen} == seen
