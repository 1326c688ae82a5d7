"""Closing a pool: by a policy, by several at once, by whoever is cancelled meanwhile, by a signal during a call."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.errors import PoolClosedError, SandboxStateError
from tests.support.together import all_at_once

ROOT = Path(__file__).parents[2]
TASKS = [rls.Task(id=f"t{i}") for i in range(4)]
LONG = 300


def make(tmp_path: Path) -> rls.Pool:
    return rls.Pool(size=2, config=False, ledger=tmp_path)


def test_a_policy_cannot_close_its_pool(tmp_path: Path) -> None:
    """It is told so at once, as its own failure; the others' results stay, and so does the pool."""
    with make(tmp_path) as pool:

        def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
            if task.id == "t1":
                pool.close()
            return sandbox.run("echo ok").stdout

        report = pool.run_rollouts(TASKS, policy)
        ends = {record.task_id: record for record in report.records}
        assert {name: record.status for name, record in ends.items()} == {
            "t0": "completed", "t1": "failed", "t2": "completed", "t3": "completed",
        }  # fmt: skip
        failure = ends["t1"].failure
        assert failure is not None
        assert (failure.kind, failure.phase, failure.retryable, failure.infrastructure) == (
            "closed_by_policy", "policy", False, False,
        )  # fmt: skip
        with pool.claim(TASKS[0], timeout=60) as sandbox:
            assert sandbox.run("echo there").stdout == "there\n"


async def test_an_async_policy_cannot_close_its_pool_but_others(tmp_path: Path) -> None:
    async with rls.AsyncPool(size=2, config=False, ledger=tmp_path / "a") as pool:

        async def policy(sandbox: Any, task: rls.Task) -> str:
            if task.id == "t1":
                with pytest.raises(SandboxStateError, match="a policy cannot close the pool that runs it"):
                    await pool.close()
                own = rls.AsyncPool(size=1, config=False, ledger=tmp_path / "b")
                async with own, own.claim(task) as other:
                    return (await other.run("echo other")).stdout
            return (await sandbox.run("echo ok")).stdout

        report = await pool.run_rollouts(TASKS, policy)
        assert Counter(record.value for record in report.records) == {"ok\n": 3, "other\n": 1}


def test_a_pool_that_is_closed_while_its_rollouts_run(tmp_path: Path) -> None:
    """By another thread, in mid-command: the batch ends with a record of each, and says what ended it."""
    pool = make(tmp_path)
    begun = threading.Semaphore(0)

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> None:
        begun.release()
        sandbox.run("sleep 300")

    def close() -> None:
        for _ in range(2):
            begun.acquire()
        pool.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(PoolClosedError, match="closed while its rollouts ran"):
        pool.run_rollouts(TASKS, policy)
    closer.join()
    records = pool.report().records
    assert Counter(record.status for record in records) == {"cancelled": 4}


def test_many_close_at_once(tmp_path: Path) -> None:
    pool = make(tmp_path)
    sandbox = pool.claim(TASKS[0], timeout=60)
    assert all_at_once(8, lambda _: pool.close()) == []
    assert not list(tmp_path.glob("*.jsonl")), "what could not be written"
    assert pool.closed
    with pytest.raises(PoolClosedError):
        sandbox.run("true")


async def test_a_closing_is_seen_through_by_whoever_is_cancelled(tmp_path: Path) -> None:
    """At every turn of the loop: when the cancelled close() has ended, nothing is left."""
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34):
        pool = rls.AsyncPool(size=2, config=False, ledger=tmp_path / str(turns))
        await pool.wait_ready(timeout=60)
        members = pool.driver.core.members
        closing = asyncio.ensure_future(pool.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        also = asyncio.ensure_future(pool.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled() or turns > 0  # how many turns it takes is a matter of the machine
        assert members == {}
        await also
        assert pool.closed


SCRIPT = """
import contextlib, os, sys, rlsandbox as rls
def children():
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += open(f"/proc/self/task/{thread}/children").read().split()
    return found
with rls.Pool(size=2, config=False, ledger=sys.argv[1]) as pool:
    pool.wait_ready(timeout=60)
    print(*children(), flush=True)
    if sys.argv[2] == "command":
        pool.claim(rls.Task(id="t")).run("echo; sleep 300", on_output=lambda *_: os.write(1, b"in\\n"))
    else:
        def policy(sandbox, task):
            os.write(1, b"in\\n")  # in one piece: there are two of them
            sandbox.run("sleep 300")
        pool.run_rollouts([rls.Task(id=f"t{i}") for i in range(4)], policy)
"""


def runs(pid: str) -> bool:
    """Whether it does; where process 1 reaps nobody, what has ended stays, without a command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("work", ["command", "rollouts"])
def test_a_script_that_a_signal_ends_during_a_call(tmp_path: Path, work: str, number: int) -> None:
    """It dies of the signal, without a word of pools that were closed under it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), work],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert script.stdout is not None
    hub = script.stdout.readline().split()
    assert hub
    assert script.stdout.readline() == "in\n"
    script.send_signal(number)
    _, err = script.communicate(timeout=LONG)
    assert (script.returncode, err) == (-number, "")
    deadline = time.monotonic() + LONG
    while any(runs(pid) for pid in hub):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (ledger,) = tmp_path.glob("*.db")
    book = rls.ledger.reading.read([ledger])
    assert not book.open()
