"""One pool, several processes: one ceiling, and what a process leaves behind is seen to."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.errors import ClaimTimeoutError, PoolClosedError, PrimeError, UnsupportedError
from rlsandbox.ledger import reading
from rlsandbox.ledger.report import Report

TASK = rls.Task(id="t", workdir="/work", files={"a.txt": "hello\n"})
LONG = 60
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[rls.Pool]:
    with rls.Pool(size=2, config=False, ledger=tmp_path / "ledger", run="shared") as pool:
        yield pool


def eventually(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def rank(ref: rls.PoolRef, number: int, answers: Any) -> None:
    with rls.Pool.connect(ref) as pool:
        for _ in range(3):
            with pool.claim(TASK, timeout=LONG) as sandbox:
                answers.put((number, os.getpid(), sandbox.run(f"cat a.txt; echo {number} > a.txt").stdout))
        answers.put((number, pool.metrics.ttfc.summary().n, pool.stats().claims))


def test_ranks_share_one_ceiling(pool: rls.Pool) -> None:
    ref = pickle.loads(pickle.dumps(pool.ref))
    answers = spawn.Queue()
    ranks = [spawn.Process(target=rank, args=(ref, n, answers)) for n in range(3)]
    for process in ranks:
        process.start()
    got = [answers.get(timeout=120) for _ in range(12)]
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    outputs = [text for *_, text in got if isinstance(text, str)]
    assert outputs == ["hello\n"] * 9
    stats = pool.stats()
    assert stats.granted == 9
    assert stats.created == 2
    assert stats.quarantined == 0
    assert pool.metrics.ttfc.summary().n == 9, "the owner knows what everybody waited for"
    eventually(lambda: pool.stats().ready == 2)


def hold(ref: rls.PoolRef, answers: Any) -> None:
    pool = rls.Pool.connect(ref)
    sandbox = pool.claim(TASK, timeout=LONG)
    sandbox.run("echo dirt > /work/dirt")
    process = sandbox.popen("sleep 1000")
    answers.put((sandbox.id, process.pid))
    time.sleep(1000)


def test_what_a_killed_process_held_is_disposed_of(pool: rls.Pool) -> None:
    answers = spawn.Queue()
    process = spawn.Process(target=hold, args=(pool.ref, answers))
    process.start()
    held, _ = answers.get(timeout=60)
    assert pool.stats().claimed == 1
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    eventually(lambda: pool.stats().claimed == 0 and pool.stats().ready == 2)
    assert pool.stats().created == 3
    for _ in range(3):
        with pool.claim(TASK, timeout=LONG) as sandbox:
            assert sandbox.id != held
            assert sandbox.run("ls").stdout == "a.txt\n"


def test_claims_here_and_there_wait_for_each_other(pool: rls.Pool) -> None:
    there = rls.Pool.connect(pool.ref)
    first, second = pool.claim(TASK, timeout=LONG), there.claim(TASK, timeout=LONG)
    with pytest.raises(ClaimTimeoutError, match="ceiling of 2"):
        there.claim(TASK, timeout=0.2)
    ahead = there.claim_ahead(TASK)
    first.release()
    third = ahead.result(timeout=LONG)
    assert third.run("cat a.txt").stdout == "hello\n"
    assert second.run("true").ok
    counted = there.metrics.ttfc.summary().n
    unneeded = there.claim_ahead(TASK)
    second.release()
    eventually(unneeded.done)
    assert unneeded.cancel() is True
    assert there.metrics.ttfc.summary().n == counted, "nobody needed it"
    second = there.claim(TASK, timeout=LONG)
    third.release()
    second.release()
    there.close()
    there.close()
    with pytest.raises(PoolClosedError):
        there.claim(TASK)
    eventually(lambda: pool.stats().ready == 2)
    assert pool.stats().died_claimed == 0


def test_everything_a_sandbox_can_do_works_from_elsewhere(pool: rls.Pool) -> None:
    with rls.Pool.connect(pool.ref) as there:
        there.expect([TASK], group_size=2)
        assert there.wait_ready(timeout=LONG) == 2
        with there.claim(TASK, timeout=LONG) as sandbox:
            sandbox.write_file("b.txt", "b")
            snapshot = sandbox.snapshot(name="from-there")
            assert sandbox.read_text("b.txt") == "b"
        with snapshot.fork(2, timeout=LONG) as kids:
            assert [k.read_text("b.txt") for k in kids] == ["b", "b"]
        assert [s.id for s in pool.snapshots()] == [s.id for s in there.snapshots()] == ["from-there"]
        snapshot.delete()
        assert pool.snapshots() == []
        sleeper = there.claim(TASK, timeout=LONG)
        sleeper.run("echo z > z")
        sleeper.hibernate()
        assert pool.stats().claimed == 0
        sleeper.restore(timeout=LONG)
        assert sleeper.run("cat z").stdout == "z\n"
        sleeper.release()
        with pytest.raises(PrimeError, match="exited with 3"):
            there.claim(rls.Task(id="bad", setup="exit 3"), timeout=LONG)
        graded = rls.Task(id="g", grader=rls.Grader(command="test -e done"))
        report = there.run_rollouts([graded], lambda sb, task: sb.run("touch done").exit_code, group_size=3)
        assert report.mean_reward == 1.0
    eventually(lambda: pool.stats().ready == 2)
    assert [r.status for r in pool.report().records] == ["completed"] * 3, "the run's records are together"


def test_a_release_in_the_middle_of_a_command(pool: rls.Pool) -> None:
    with rls.Pool.connect(pool.ref) as there:
        sandbox = there.claim(TASK, timeout=LONG)
        sandbox.popen("yes; sleep 1000")
        sandbox.release()
        eventually(lambda: pool.stats().claimed == 0)
    eventually(lambda: pool.stats().ready == 2)


async def test_cancelled_claims_leak_nothing(pool: rls.Pool) -> None:
    there = rls.AsyncPool.connect(pool.ref)
    async with there:
        for pause in (0, 0, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02):
            claim = asyncio.ensure_future(there._claim(TASK, timeout=LONG))
            await asyncio.sleep(pause)
            claim.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await claim).release()
        async with there.claim(TASK, timeout=LONG) as sandbox:
            assert (await sandbox.run("ls")).stdout == "a.txt\n"
    for _ in range(3000):
        if pool.stats().ready == 2:
            break
        await asyncio.sleep(0.01)
    assert pool.stats().ready == 2
    assert pool.stats().claimed == 0


def test_when_the_owner_closes(tmp_path: Path) -> None:
    pool = rls.Pool(size=1, config=False, ledger=tmp_path)
    ref = pool.ref
    there = rls.Pool.connect(ref)
    sandbox = there.claim(TASK, timeout=LONG)
    pool.close()
    eventually(lambda: sandbox.state == "dead")
    with pytest.raises(PoolClosedError, match=r"which owns run .* has closed it") as raised:
        there.claim(TASK, timeout=LONG)
    assert raised.value.kind == "pool_closed"
    there.close()
    with pytest.raises(PoolClosedError, match="has closed it or is gone"):
        rls.Pool.connect(ref)


def driving(ref: rls.PoolRef, answers: Any, go_on: Any) -> None:
    """A rollout that has its sandbox, one that waits for one, one that is retried, one that comes too late."""

    async def drive() -> None:
        async with rls.AsyncPool.connect(ref) as pool:
            episodes = [
                rls.AsyncEpisode(pool, rls.Task(id=name), retries=9) for name in ("idle", "works", "waits")
            ]
            await episodes[0].begin()
            sandbox = await episodes[1].begin()
            command = asyncio.create_task(sandbox.run("sleep 1000"))
            waiting = asyncio.create_task(episodes[2].begin())
            answers.put("at work")
            errors = await asyncio.gather(command, waiting, return_exceptions=True)
            await asyncio.to_thread(go_on.wait, LONG)
            late = rls.AsyncEpisode(pool, rls.Task(id="late"))
            with contextlib.suppress(PoolClosedError):
                await late.begin()
            await episodes[1].broke(errors[0], "command")
            assert not episodes[1].may_retry
            answers.put([type(error).__name__ for error in errors])
            answers.put([e.record.status if e.record else None for e in (*episodes, late)])

    asyncio.run(drive())


def test_what_others_have_under_way_when_the_owner_closes_is_cancelled(tmp_path: Path) -> None:
    pool = rls.Pool(size=2, config=False, ledger=tmp_path, run="closed")
    answers, closed = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=driving, args=(pool.ref, answers, closed))
    process.start()
    assert answers.get(timeout=LONG) == "at work"
    eventually(lambda: pool.stats().waiting == 1)
    pool.close()
    closed.set()
    assert answers.get(timeout=LONG) == ["SandboxDiedError", "PoolClosedError"]
    assert answers.get(timeout=LONG) == ["cancelled"] * 4
    process.join(30)
    assert process.exitcode == 0
    records = Report.of(reading.read(sorted(tmp_path.glob("*.db")))).records
    assert [record.status for record in records] == ["cancelled"] * 4
    assert not any(record.reward for record in records)


def test_a_process_that_does_not_hear_holds_nobody_up(tmp_path: Path) -> None:
    """One that only said hello, and one that is stopped."""
    with rls.Pool(size=1, config=False, ledger=tmp_path) as pool:
        silent = rls.AsyncPool.connect(pool.ref)
        answers = spawn.Queue()
        process = spawn.Process(target=hold, args=(pool.ref, answers))
        process.start()
        answers.get(timeout=LONG)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        pool.close()
        process.kill()
        process.join(30)
        del silent


def test_who_has_no_token_is_turned_away(pool: rls.Pool) -> None:
    ref = pool.ref
    assert os.stat(os.path.dirname(ref.path)).st_mode & 0o777 == 0o700
    assert ref.token not in repr(ref)
    wrong = rls.PoolRef(ref.path, "0" * 32, ref.host, ref.run, ref.pid)
    with pytest.raises(PoolClosedError):
        rls.Pool.connect(wrong)
    elsewhere = rls.PoolRef(ref.path, ref.token, "another-machine", ref.run, ref.pid)
    with pytest.raises(UnsupportedError, match="another-machine"):
        rls.Pool.connect(elsewhere)
    with rls.Pool.connect(ref) as there, there.claim(TASK, timeout=LONG) as sandbox:
        assert sandbox.run("true").ok


def forking(ref: rls.PoolRef | None, meet: Any, answers: Any, own: rls.Pool | None = None) -> None:
    """Holds one sandbox, and wants two more with its state, until it gets them."""
    pool = own or rls.Pool.connect(ref)  # type: ignore[arg-type]
    refused = 0
    while True:
        with pool.claim(TASK, timeout=LONG) as sandbox:
            snapshot = sandbox.snapshot(kill=True)
            if not refused:
                meet.wait(LONG)
            try:
                with snapshot.fork(2) as copies:
                    answers.put((refused, [copy.read_text("a.txt") for copy in copies]))
                    break
            except ClaimTimeoutError as error:
                if (error.kind, error.retryable) != ("deadlock", True):
                    raise
                refused += 1
    if own is None:
        pool.close()


def test_forks_of_several_processes_do_not_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    """Three of three are held, each by somebody who wants two more: in two other processes and in the owner's."""
    with rls.Pool(size=3, config=False, ledger=tmp_path, run="forks") as pool:
        meet, answers = spawn.Barrier(3), spawn.Queue()
        others = [spawn.Process(target=forking, args=(pool.ref, meet, answers)) for _ in range(2)]
        for process in others:
            process.start()
        forking(None, meet, answers, pool)
        got = [answers.get(timeout=120) for _ in range(3)]
        for process in others:
            process.join(30)
            assert process.exitcode == 0
        assert [texts for _, texts in got] == [["hello\n"] * 2] * 3
        assert max(refused for refused, _ in got) > 0, "somebody had to give way"
        eventually(lambda: pool.stats().ready == 3)
        assert pool.stats().claimed == 0


def test_a_fork_from_elsewhere_is_all_or_none(pool: rls.Pool) -> None:
    with rls.Pool.connect(pool.ref) as there:
        with there.claim(TASK, timeout=LONG) as sandbox:
            snapshot = sandbox.snapshot(kill=True)
            with pytest.raises(rls.errors.ConfigError, match=r"fork\(2\) can never be met.*release it"):
                snapshot.fork(2)
            with pytest.raises(ClaimTimeoutError, match="the ceiling of 2 is reached"):
                snapshot.fork(2, timeout=0.3)
        assert pool.stats().claimed == 0
        assert pool.metrics.ttfc.summary().n == there.metrics.ttfc.summary().n - 4, "two of each of two forks"
        snapshot.delete()
        with pytest.raises(rls.errors.ConfigError, match="was deleted"):
            snapshot.fork(1)
        with pytest.raises(rls.errors.ConfigError, match="was deleted"):
            there.claim(snapshot)
    eventually(lambda: pool.stats().ready == 2)


async def test_what_is_given_back_is_given_back_also_when_that_is_cancelled(pool: rls.Pool) -> None:
    async with rls.AsyncPool.connect(pool.ref) as there:
        for pause in (0, 0, 0.001, 0.002, 0.004):
            sandbox = await there.claim(TASK, timeout=LONG)
            snapshot = await sandbox.snapshot(kill=True)
            for work in (sandbox.release(), snapshot._host.fork(snapshot, 2, LONG)):
                doing = asyncio.ensure_future(work)
                await asyncio.sleep(pause)
                doing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    for forked in await doing or ():
                        await forked.release()
            await snapshot.delete()
        for _ in range(3000):
            if pool.stats().claimed == 0:
                break
            await asyncio.sleep(0.01)
        assert pool.stats().claimed == 0
