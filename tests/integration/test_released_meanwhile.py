"""A sandbox that is released by one while another one moves it (hibernate, restore, a fresh grader) is nobody's after it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import AsyncPool, AsyncSandbox, Grader, Pool, Task
from rlsandbox._sandbox import files
from rlsandbox.errors import SandboxError, SandboxStateError, SessionDiedError

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


async def give_back(sandbox: AsyncSandbox, how: str) -> None:
    if how == "release":
        await sandbox.release()
    elif how == "hibernate":
        await sandbox.hibernate()
    else:  # graded in a place of its own: the one it had is given back first
        await sandbox.grade()


@pytest.mark.parametrize("how", ["release", "hibernate", "fresh grader"])
async def test_what_is_still_uploaded_never_reaches_who_has_it_next(tmp_path: Path, how: str) -> None:
    """As of a policy whose rollout timed out: its thread cannot be stopped."""
    files = tmp_path / "files"
    files.mkdir()
    for number in range(400):
        (files / str(number)).write_bytes(b"x" * 3000)
    begun = asyncio.Event()
    async with small(tmp_path / "ledger") as pool:
        sandbox = await pool.claim(TASK)
        loading = asyncio.ensure_future(
            sandbox.upload(files, "/tmp/files", progress=lambda done, total: begun.set())
        )
        await begun.wait()
        claiming = asyncio.ensure_future(pool.claim(Task(id="next")))
        giving = asyncio.ensure_future(give_back(sandbox, how))
        other = await asyncio.wait_for(claiming, 60)
        found = [info.name for info in await other.changes()]
        with pytest.raises(SandboxError):
            await asyncio.wait_for(loading, 60)
        found += [info.name for info in await other.changes()]
        assert found == []
        await other.release()
        await asyncio.wait_for(giving, 60)
        await sandbox.release()


@pytest.mark.parametrize("way", ["upload", "download"])
async def test_what_is_still_uploaded_never_reaches_where_it_is_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The handle has another place then; what was begun in the one before has ended with that."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files/x").touch()
    begun, moved = threading.Event(), threading.Event()

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **how: Any) -> Any:
            begun.set()
            assert moved.wait(60)
            return function(*args, **how)

        return called

    async with small(tmp_path / "ledger") as pool:
        sandbox = await pool.claim(TASK)
        if way == "upload":
            monkeypatch.setattr(files, "walk", slow(files.walk))
            loading = asyncio.ensure_future(sandbox.upload(tmp_path / "files", "/tmp/files"))
        else:
            await sandbox.upload(tmp_path / "files", "/tmp/files")
            monkeypatch.setattr(files, "Tree", slow(files.Tree))
            loading = asyncio.ensure_future(sandbox.download("/tmp/files", tmp_path / "back"))
        assert await asyncio.to_thread(begun.wait, 60)
        await sandbox.renew()
        moved.set()
        with pytest.raises(SandboxStateError):
            await asyncio.wait_for(loading, 60)
        assert list(await sandbox.changes()) == []
        await sandbox.release()


async def test_what_waits_for_an_answer_is_told(tmp_path: Path) -> None:
    """Never a file's own error, nor the keeper's words: what is wrong is that the sandbox was given back."""
    async with small(tmp_path) as pool:
        for ask in (
            lambda sandbox: sandbox.write_file("/tmp/x", b"x" * 4_000_000),
            lambda sandbox: sandbox.read_file("/usr/bin/python3"),
            lambda sandbox: sandbox.list_dir("/usr/bin"),
            lambda sandbox: sandbox.download("/usr/lib/python3", tmp_path / "down"),
            lambda sandbox: sandbox.changes(),
            lambda sandbox: sandbox.run("true"),
            lambda sandbox: sandbox.session(),
        ):
            sandbox = await pool.claim(TASK)
            asked = asyncio.ensure_future(_awaited(ask(sandbox)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await sandbox.release()
            with contextlib.suppress(SandboxStateError):  # or it was answered before
                await asyncio.wait_for(asked, 60)


async def _awaited(what: Awaitable[object]) -> object:
    return await what


async def test_a_session_that_ends_while_its_input_is_written(tmp_path: Path) -> None:
    async with small(tmp_path) as pool:
        sandbox = await pool.claim(TASK)
        session = await sandbox.session()
        running = asyncio.ensure_future(session.run("cat", stdin=b"x" * 16_000_000))
        await asyncio.sleep(0)  # it is being written now
        await session._channel.cancelled(5)
        with pytest.raises(SessionDiedError):
            await asyncio.wait_for(running, 60)
        await sandbox.release()


def test_while_a_command_shows_its_output(tmp_path: Path) -> None:
    """Its end means nothing then: no exit status is made up of it."""
    with Pool(size=1, config=False, ledger=tmp_path) as pool:
        sandbox = pool.claim(Task(id="t"))
        with pytest.raises(SandboxStateError, match="released"):
            sandbox.run("echo up; sleep 60", on_output=lambda stream, data: sandbox.release())
