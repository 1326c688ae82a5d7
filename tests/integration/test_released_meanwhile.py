"""A sandbox that is released by one while another one moves it (hibernate, restore, a fresh grader) is nobody's after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlsandbox import AsyncPool, Grader, Task
from rlsandbox.errors import SandboxStateError

TASK = Task(id="t", grader=Grader(command="true", fresh=True))


@contextlib.asynccontextmanager
async def small(tmp_path: Path) -> AsyncIterator[AsyncPool]:
    async with AsyncPool(size=1, when_empty="wait", config=False, ledger=tmp_path) as pool:
        await pool.wait_ready(timeout=60)
        yield pool
        await pool.wait_ready(timeout=60)
        assert pool.stats().claimed == 0
        assert pool.snapshots() == []


@pytest.mark.parametrize("turns", range(4))
async def test_while_its_files_are_saved(tmp_path: Path, turns: int) -> None:
    async with small(tmp_path) as pool:
        sandbox = await pool.claim(TASK)
        saving = asyncio.ensure_future(sandbox.hibernate())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not saving.done()
        await sandbox.release()
        with pytest.raises(SandboxStateError):
            await asyncio.wait_for(saving, 60)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("move", ["restore", "renew"])
async def test_while_it_waits_for_another_place(tmp_path: Path, move: str, granted: bool) -> None:
    async with small(tmp_path) as pool:
        sandbox = await pool.claim(TASK)
        if move == "restore":
            await sandbox.hibernate()
            other = await pool.claim(TASK)
            moving = asyncio.ensure_future(sandbox.restore())
        else:
            waiting = asyncio.ensure_future(pool._claim(TASK))
            await asyncio.sleep(0)
            moving = asyncio.ensure_future(sandbox.renew())
            other = await waiting
        await asyncio.sleep(0.1)
        assert pool.stats().waiting == 1, "it stands behind the other one"
        if granted:
            await other.release()
            async with asyncio.timeout(60):
                while pool.stats().waiting != 0:
                    await asyncio.sleep(0)
            assert not moving.done(), "granted, and not yet told"
            await sandbox.release()
        else:
            await sandbox.release()
            await other.release()
        with pytest.raises(SandboxStateError):
            await asyncio.wait_for(moving, 60)
