"""Cancelled at any moment, whatever is being done: nothing is left behind, and the pool goes on.

A seeded walk over the asynchronous names. The seed is in the test's name: the same one takes the same steps
(not to the microsecond: what they meet differs from run to run, and that is the point).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import AsyncPool, AsyncSandbox, Grader, Task
from rlsandbox.backends.local import cgroups

STEPS = 120
LONG = 60.0
TASKS = [
    Task(id="plain"),
    Task(id="primed", workdir="/work", files={"a": "x" * 5000}, setup="echo b >b; sleep 0.02"),
    Task(
        id="graded",
        workdir="/work",
        files={"a": "1"},
        grader=Grader(command="cat a hidden", files={"hidden": "h"}),
    ),
    Task(id="fresh", workdir="/work", files={"a": "1"}, grader=Grader(command="cat a", fresh=True)),
]


async def use(pool: AsyncPool, rng: random.Random, scratch: Path) -> None:
    """One thing that people do."""
    task = rng.choice(TASKS)
    what = rng.choice(
        ["run", "popen", "session", "files", "tree", "snapshot", "fork", "sleep", "pause", "grade", "ahead",
         "wait", "rollouts", "changes", "discard", "expect"]
    )  # fmt: skip
    if what == "wait":
        await pool.wait_ready(1, timeout=5)
        return
    if what == "expect":
        pool.expect([task], replace=True)
        return
    if what == "ahead":
        claim = pool.claim_ahead(task)
        try:
            await asyncio.sleep(rng.random() / 50)
            async with await claim.result(timeout=LONG) as sandbox:
                await sandbox.run("true")
        finally:
            await claim.cancel()
        return
    if what == "rollouts":

        async def policy(sandbox: AsyncSandbox, task: Task) -> str:
            return (await sandbox.run("echo x >>a; cat a")).stdout

        await pool.run_rollouts([task], policy, group_size=2, progress=False)
        return
    async with pool.claim(task, timeout=LONG) as sandbox:
        await _in(sandbox, what, rng, scratch)


async def _in(sandbox: AsyncSandbox, what: str, rng: random.Random, scratch: Path) -> None:
    if what == "run":
        await sandbox.run("sleep 0.03 & setsid sleep 100 & head -c 3000000 /dev/zero", timeout=5)
    elif what == "popen":
        async with sandbox.popen("cat; sleep 100") as process:
            await process.write(b"x" * 300_000)
            async for _ in process:
                break
    elif what == "session":
        async with sandbox.session() as shell:
            await shell.run("cd /tmp; sleep 0.02; echo $$")
            await shell.run("pwd")
    elif what == "files":
        await sandbox.write_file("/tmp/f", b"y" * 500_000)
        assert len(await sandbox.read_file("/tmp/f")) == 500_000
        await sandbox.list_dir("/tmp")
    elif what == "tree":
        await sandbox.upload(scratch / "up", "/tmp/up")
        await sandbox.download("/tmp/up", scratch / f"down{rng.random()}")
    elif what in ("snapshot", "fork"):
        snapshot = await sandbox.snapshot(kill=True)
        try:
            async with snapshot.fork(rng.choice([1, 2]), timeout=5) as copies:
                await copies[0].run("echo >/tmp/mine")
        finally:
            await snapshot.delete()
    elif what == "sleep":
        await sandbox.hibernate()
        await sandbox.restore(timeout=LONG)
        await sandbox.run("true")
    elif what == "pause":
        await sandbox.pause()
        await asyncio.sleep(0.005)
        await sandbox.resume()
    elif what == "grade":
        await sandbox.run("echo >/usr/local/evil")
        await sandbox.grade(sandbox.task.grader or Grader(command="true"))
    elif what == "changes":
        await sandbox.run("mkdir /tmp/d; for i in 1 2 3; do echo >/tmp/d/$i; done")
        await sandbox.changes()
    elif what == "discard":
        await sandbox.release(discard=True)


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


AHEAD = ("rls-standby", "rls-spare", "rls-ahead")


def below(pid: int) -> list[int]:
    """Every process under *pid* but the keepers' own that are made ahead: for the next command, the next sandbox."""
    found = []
    children: list[str] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):  # it has ended meanwhile; the others have not
            if Path(f"/proc/{child}/comm").read_text().strip() not in AHEAD:
                found += [int(child), *below(int(child))]
    return found


def mounted(scratch: Path) -> list[str]:
    """Of what is mounted here only that: others mount and unmount too."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(scratch) in line or "rlsandbox" in line]


async def eventually(true: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.02)
    assert true(), what


async def _walk(pool: AsyncPool, rng: random.Random, scratch: Path) -> int:
    """Things done at once, each cancelled at some moment, some more than once; how many were cut off."""
    cut = 0

    async def one(delay: float, again: float | None, seed: int) -> None:
        nonlocal cut
        task = asyncio.ensure_future(use(pool, random.Random(seed), scratch))
        await asyncio.wait({task}, timeout=delay)
        task.cancel()
        if again is not None and not task.done():
            await asyncio.sleep(again)
            task.cancel()
        try:
            await asyncio.wait_for(asyncio.shield(_ended(task)), LONG)
        finally:
            task.cancel()
        if task.cancelled():
            cut += 1
        elif (error := task.exception()) is not None and not isinstance(error, rls.errors.SandboxError):
            raise error

    for _ in range(STEPS // 4):
        moments = [
            (rng.choice([0.0, 0.01, 0.05, 0.2, 0.6]) * rng.random(), rng.choice([None, 0.0, 0.001]))
            for _ in range(4)
        ]
        await asyncio.gather(*(one(delay, again, rng.randrange(1 << 30)) for delay, again in moments))
    return cut


async def _ended(task: Awaitable[Any]) -> None:
    await asyncio.wait({asyncio.ensure_future(task)})


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_cancelled_leaves_nothing(tmp_path: Path, seed: int) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "f").write_bytes(b"z" * 200_000)
    mounts, groups = mounted(tmp_path), cgroups.dead()
    pool = AsyncPool(size=3, config=False, ledger=tmp_path / "ledger")
    try:
        await pool.wait_ready(timeout=LONG)
        hub = pool.backend._hub.process.pid  # type: ignore[attr-defined]
        before_fds, before = descriptors(), len(below(hub))
        assert await _walk(pool, random.Random(seed), tmp_path) > STEPS // 4, "they were cut off"
        core = pool.driver.core

        def quiet() -> bool:
            stats = pool.stats()
            return (stats.claimed, stats.waiting, stats.ready) == (0, 0, 3) and len(core.members) == 3

        await eventually(quiet, f"{pool.stats()}")
        assert pool.stats().quarantined == 0
        assert pool.snapshots() == []
        assert [layer for layer in core.layers._layers.values() if layer.pinned] == []
        # one more: a keeper may wait for the next sandbox by now
        await eventually(lambda: len(below(hub)) <= before + 1, "processes are left")
        for task in TASKS:
            async with pool.claim(task, timeout=LONG) as sandbox:
                assert (await sandbox.run("ls /tmp /usr/local/evil")).stdout.strip() in ("", "/tmp:")
        await eventually(quiet, f"{pool.stats()}")
        kept = {fd.partition(" ")[2].partition(":")[0] for fd in descriptors() - before_fds}
        assert len(descriptors()) <= len(before_fds) + 4, kept
    finally:
        await pool.close()
    await eventually(lambda: not Path(f"/proc/{hub}").exists(), "the hub lives on")
    assert mounted(tmp_path) == mounts
    assert cgroups.dead() == groups or not any(pid == hub for pid, _ in cgroups.dead())
    running = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert running == []
