"""AsyncSandbox over a keeper driven by hand: what is sent, what is waited for, what goes wrong."""

from __future__ import annotations

import asyncio
import errno
import gc
import re
import struct
import warnings
from typing import Any

import pytest

from rlsandbox import errors
from rlsandbox._sandbox import base
from rlsandbox.keeper.frames import Fields
from rlsandbox.keeper.wire import Op, Tag, Type
from rlsandbox.sandbox import AsyncSandbox, AsyncSnapshot, Budget
from rlsandbox.spec import Limits, Spec
from rlsandbox.task import Task
from tests.unit.keeper.peer import Peer, pair


class Pool:
    """A host that remembers."""

    def __init__(self) -> None:
        self.released: list[tuple[str, bool]] = []
        self.started: list[float] = []
        self.snapshots = 0
        self.fail: BaseException | None = None

    async def release(self, sandbox: AsyncSandbox, *, discard: bool) -> None:
        self.released.append((sandbox.id, discard))

    async def snapshot(self, sandbox: AsyncSandbox, *, kill: bool, name: str | None) -> AsyncSnapshot:
        self.snapshots += 1
        return AsyncSnapshot(self, id=name or "s", bytes=1)

    async def fork(self, snapshot: AsyncSnapshot, n: int, timeout: float | None) -> list[AsyncSandbox]:
        if self.fail is not None:
            raise self.fail
        return []

    async def renew(self, sandbox: AsyncSandbox) -> None:
        raise NotImplementedError

    async def hibernate(self, sandbox: AsyncSandbox) -> None: ...

    async def restore(self, sandbox: AsyncSandbox, timeout: float | None) -> None: ...

    def command_started(self, sandbox: AsyncSandbox, waited_s: float) -> None:
        self.started.append(waited_s)

    async def delete_snapshot(self, snapshot: AsyncSnapshot) -> None: ...


async def made(**how: Any) -> tuple[AsyncSandbox, Peer, Pool]:
    client, peer = await pair()
    pool = Pool()
    how.setdefault("task", Task(id="t"))
    how.setdefault("spec", Spec())
    return AsyncSandbox(client, id="sb-1", host=pool, **how), peer, pool


async def closed(sandbox: AsyncSandbox) -> None:
    await sandbox.release()
    await sandbox.client.aclose()


async def asked(peer: Peer) -> tuple[int, Fields]:
    return await peer.request()


async def test_what_is_asked_for() -> None:
    sandbox, peer, _ = await made(
        task=Task(id="t", workdir="/w", limits=Limits(command=7, output="1KiB")),
        spec=Spec(user="joe", env={"A": "spec", "B": "spec"}),
        base_env={"PATH": "/p", "A": "base"},
    )
    run = asyncio.create_task(sandbox.run("echo", env={"B": "call"}, stdin="in"))
    channel, fields = await asked(peer)
    assert fields.texts(Tag.ARG) == ["/bin/sh", "-c", "echo"]
    assert fields.text(Tag.CWD) == "/w"
    assert fields.text(Tag.USER) == "joe"
    assert sorted(fields.texts(Tag.ENV)) == ["A=spec", "B=call", "LC_CTYPE=C.UTF-8", "PATH=/p"]
    assert (fields.int(Tag.OUTPUT_LIMIT), fields.int(Tag.TIMEOUT_MS), fields.int(Tag.STDIN)) == (
        2048,  # twice: what fits comes as it is printed
        7000,
        1,
    )
    assert (await peer.get()).payload == b"in"
    assert (await peer.get()).type == Type.EOF
    await peer.say(Type.STARTED, channel, pid=1)
    await peer.say(Type.EXIT, channel, status=0x500, duration_ns=10**9)
    result = await run
    assert (result.exit_code, result.duration_s) == (5, 1.0)
    for how, tag, value in (
        ({"timeout": 1.5}, Tag.TIMEOUT_MS, 1500),
        ({"output_limit": "2KiB"}, Tag.OUTPUT_LIMIT, 4096),
        ({"output_limit": 0}, Tag.OUTPUT_LIMIT, 2),
        ({"output_limit": "1GiB"}, Tag.OUTPUT_LIMIT, None),  # more than the keeper holds: all is sent
    ):
        run = asyncio.create_task(sandbox.run("x", **how))  # type: ignore[arg-type]
        channel, fields = await asked(peer)
        assert (fields.int(tag) if tag in fields else None) == value
        assert Tag.STDIN not in fields
        await peer.say(Type.EXIT, channel, status=0)
        await run
    await closed(sandbox)


@pytest.mark.parametrize(
    ("user", "sent"), [("joe:", "joe"), ("7:", "7"), (":5", "root:5"), (":", "root"), ("joe:dev", "joe:dev")]
)
async def test_half_of_a_user_and_group_is_what_container_runtimes_take_it_for(user: str, sent: str) -> None:
    sandbox, peer, _ = await made(facts={"user": user})
    run = asyncio.create_task(sandbox.run("x"))
    channel, fields = await asked(peer)
    assert fields.text(Tag.USER) == sent
    await peer.say(Type.EXIT, channel, status=0)
    await run
    await closed(sandbox)


async def test_no_deadline_is_invented() -> None:
    sandbox, peer, _ = await made()
    run = asyncio.create_task(sandbox.run("x"))
    channel, fields = await asked(peer)
    assert Tag.TIMEOUT_MS not in fields
    await peer.say(Type.EXIT, channel, status=0)
    await run
    await closed(sandbox)


async def test_first_command_is_told_once() -> None:
    sandbox, peer, pool = await made()
    for _ in range(2):
        run = asyncio.create_task(sandbox.run("x"))
        channel = await peer.command()
        await peer.say(Type.EXIT, channel, status=0)
        await run
    assert len(pool.started) == 1
    await closed(sandbox)


async def test_a_first_command_that_does_not_start_is_not_told() -> None:
    sandbox, peer, pool = await made()
    run = asyncio.create_task(sandbox.run(["x"]))
    channel, _ = await asked(peer)
    await peer.say(Type.FAIL, channel, errno=errno.ENOENT, what="start x")
    with pytest.raises(errors.CommandStartError):
        await run
    assert pool.started == []
    await closed(sandbox)


async def test_a_timeout_the_keeper_sleeps_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BACKUP_S", 0.05)
    sandbox, peer, _ = await made()
    run = asyncio.create_task(sandbox.run("x", timeout=0.05))
    channel = await peer.command()
    assert (await peer.get(Type.CANCEL)).channel == channel
    with pytest.raises(errors.SandboxDiedError, match="has not answered within 4 s"):
        await run
    assert sandbox.state == "dead"
    await sandbox.release()


async def test_a_timeout_the_keeper_misses_but_not_the_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BACKUP_S", 0.05)
    sandbox, peer, _ = await made()
    run = asyncio.create_task(sandbox.run("x", timeout=0.05))
    channel = await peer.command()
    await peer.get(Type.CANCEL)
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    result = await run
    assert (result.exit_code, result.timed_out) == (137, True)
    await asyncio.sleep(0.1)
    assert sandbox.state == "ready"
    await closed(sandbox)


async def test_deadlines_stand_still_while_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BACKUP_S", 0.1)
    sandbox, peer, _ = await made()

    async def answer(op: Op) -> None:
        channel, fields = await peer.request()
        assert fields.int(Tag.OP) == op
        await peer.say(Type.REPLY, channel)

    run = asyncio.create_task(sandbox.run("x", timeout=0.1))
    channel = await peer.command()
    await asyncio.gather(sandbox.pause(), answer(Op.PAUSE))
    await asyncio.sleep(0.4)
    assert await peer.quiet()
    await asyncio.gather(sandbox.resume(), answer(Op.RESUME))
    assert await peer.quiet()
    assert (await peer.get()).type == Type.CANCEL
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    assert (await run).timed_out
    await closed(sandbox)


async def test_cancelled_run_sees_the_end_first() -> None:
    sandbox, peer, _ = await made()
    run = asyncio.create_task(sandbox.run("x"))
    channel = await peer.command()
    run.cancel()
    await peer.get(Type.CANCEL)
    await asyncio.sleep(0.02)
    assert not run.done()
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sandbox.processes == 0
    await closed(sandbox)


async def test_release_tells_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, peer, pool = await made()
    run = asyncio.create_task(sandbox.run("x"))
    channel = await peer.command()
    await sandbox.release(discard=True)
    await sandbox.release()
    assert pool.released == [("sb-1", True)]
    await peer.get(Type.CANCEL)
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    with pytest.raises(errors.SandboxStateError, match="released while"):
        await run
    for call in (sandbox.run("x"), sandbox.read_file("/x"), sandbox.pause(), sandbox.snapshot()):
        with pytest.raises(errors.SandboxStateError, match="released"):
            await call
    await sandbox.client.aclose()


async def test_context_manager_releases() -> None:
    sandbox, _, pool = await made()
    with pytest.raises(LookupError):
        async with sandbox:
            raise LookupError
    assert pool.released == [("sb-1", False)]
    await sandbox.client.aclose()


async def test_forgotten_comes_back_with_a_warning() -> None:
    sandbox, _peer, pool = await made()
    client = sandbox.client
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del sandbox
        gc.collect()
        await asyncio.sleep(0.02)
    assert pool.released == [("sb-1", False)]
    assert [w for w in caught if w.category is ResourceWarning and "never released" in str(w.message)]
    await client.aclose()


async def test_states() -> None:
    sandbox, peer, _ = await made()

    async def answer(op: Op) -> None:
        channel, fields = await peer.request()
        assert fields.int(Tag.OP) == op
        await peer.say(Type.REPLY, channel)

    await asyncio.gather(sandbox.pause(), answer(Op.PAUSE))
    await sandbox.pause()
    assert sandbox.state == "paused"
    with pytest.raises(errors.SandboxStateError, match=r"paused.*resume\(\)"):
        await sandbox.run("x")
    await asyncio.gather(sandbox.resume(), answer(Op.RESUME))
    await sandbox.resume()
    await sandbox.hibernate()
    with pytest.raises(errors.SandboxStateError, match=r"hibernated.*restore\(\)"):
        await sandbox.run("x")
    with pytest.raises(errors.SandboxStateError):
        await sandbox.hibernate()
    await sandbox.restore()
    await sandbox.restore()
    assert sandbox.state == "ready"
    peer.close()
    await asyncio.wait_for(asyncio.shield(sandbox.client.lost), 5)
    assert sandbox.state == "dead"
    with pytest.raises(errors.SandboxDiedError) as caught:
        await sandbox.run("x")
    assert (caught.value.sandbox, caught.value.task) == ("sb-1", "t")
    await sandbox.release()
    assert sandbox.state == "released"


async def test_limits_and_their_means() -> None:
    client, _peer = await pair()
    sandbox = AsyncSandbox(
        client,
        id="s",
        task=Task(id="t"),
        spec=Spec(memory="1GiB", pids=7),
        host=Pool(),
        facts={"limit.memory": "cgroup", "limit.pids": "rlimit", "base": "host"},
    )
    assert sandbox.limits.means == {"memory": "cgroup", "pids": "rlimit"}
    assert (sandbox.limits.memory, sandbox.limits.pids, sandbox.limits.disk) == (1 << 30, 7, None)
    await closed(sandbox)


async def test_one_uid_refuses_users() -> None:
    client, _peer = await pair()
    sandbox = AsyncSandbox(client, id="s", task=Task(id="t"), spec=Spec(), host=Pool(), facts={"ids": "one"})
    for call in (sandbox.run("x", user="joe"), sandbox.write_file("/x", "", user="1000")):
        with pytest.raises(errors.UnsupportedError, match="one uid"):
            await call
    await closed(sandbox)


async def test_budget() -> None:
    sandbox, peer, _ = await made()
    now = [0.0]
    sandbox.budget = Budget(Limits(steps=2, wall=10), clock=lambda: now[0])
    for left, timeout in ((10_000, 60.0), (3_000, 60.0)):
        run = asyncio.create_task(sandbox.run("x", timeout=timeout))
        channel, fields = await asked(peer)
        assert fields.int(Tag.TIMEOUT_MS) == left
        await peer.say(Type.EXIT, channel, status=0)
        await run
        now[0] = 7.0
    with pytest.raises(errors.LimitReachedError):
        await sandbox.run("x")
    await closed(sandbox)


async def test_fork_gives_all_or_none() -> None:
    sandbox, _, pool = await made()
    snapshot = await sandbox.snapshot(name="n")
    assert snapshot.id == "n"
    async with snapshot.fork(2) as kids:
        assert kids == []
    pool.fail = errors.ClaimTimeoutError("no room")
    with pytest.raises(errors.ClaimTimeoutError):
        await snapshot.fork(2)
    await closed(sandbox)


async def test_session_answers_only_to_its_nonce() -> None:
    sandbox, peer, _ = await made()
    opening = asyncio.create_task(_open(sandbox))
    channel, fields = await asked(peer)
    assert (fields.int(Tag.CONTROL), fields.int(Tag.STDIN)) == (1, 1)
    assert Tag.TIMEOUT_MS not in fields
    await peer.say(Type.STARTED, channel, pid=2)
    session = await opening
    assert (await peer.get()).payload == b"exec 8<&-\n"
    run = asyncio.create_task(session.run("it's"))
    line = (await peer.get()).payload
    assert line.startswith(b"\\command eval 'it'\"'\"'s' 0</dev/null 9>&-\n\\command printf ")
    (nonce,) = re.findall(rb"\b[0-9a-f]{32}\b", line)
    assert len(nonce) == 32
    for forged in (
        b"\n0 0\n",
        b"\n" + nonce[::-1] + b" 0\n",
        b"x" * 30_000,
        nonce + b" 0\n",
        b"\n" + nonce[:-1],
    ):
        await peer.send(Type.DATA, channel, forged, stream=4)
        await asyncio.sleep(0.005)
        assert not run.done()
    await peer.send(Type.DATA, channel, b"out", stream=1)
    answer = b"\n" + nonce + b" 3\n"
    for byte in answer:
        await peer.send(Type.DATA, channel, bytes([byte]), stream=4)
    result = await run
    assert (result.exit_code, result.stdout) == (3, "out")
    run = asyncio.create_task(session.run("x"))
    second = (await peer.get(Type.DATA)).payload.split()[-3]
    assert second != nonce
    await peer.send(Type.DATA, channel, answer, stream=4)  # an old answer is none
    await asyncio.sleep(0.01)
    assert not run.done()
    await peer.say(Type.EXIT, channel, status=0x100)
    assert (await run).exit_code == 1
    with pytest.raises(errors.SessionDiedError):
        await session.run("x")
    await closed(sandbox)


async def _open(sandbox: AsyncSandbox) -> Any:
    return await sandbox.session()


async def test_session_that_never_starts_is_cancelled_whole() -> None:
    sandbox, peer, _ = await made()
    opening = asyncio.create_task(_open(sandbox))
    channel, _ = await asked(peer)
    opening.cancel()
    assert (await peer.get(Type.CANCEL)).channel == channel
    await peer.say(Type.FAIL, channel, errno=errno.ECANCELED)
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert sandbox.processes == 0
    await closed(sandbox)


async def test_popen_cancelled_before_it_runs() -> None:
    sandbox, peer, _ = await made()

    async def start() -> Any:
        return await sandbox.popen("x")

    starting = asyncio.create_task(start())
    channel, _ = await asked(peer)
    starting.cancel()
    await peer.get(Type.CANCEL)
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert sandbox.processes == 0
    await closed(sandbox)


async def test_file_errors() -> None:
    sandbox, peer, _ = await made()
    for code, kind in (
        (errno.ENOENT, FileNotFoundError),
        (errno.EACCES, PermissionError),
        (errno.ENOSPC, OSError),
    ):
        reading = asyncio.create_task(sandbox.read_file("x"))
        channel, fields = await asked(peer)
        assert fields.text(Tag.PATH) == "/x"
        await peer.say(Type.FAIL, channel, errno=code, what="open")
        with pytest.raises(kind) as caught:
            await reading
        assert isinstance(caught.value, errors.SandboxFileError)
        assert (caught.value.errno, caught.value.path, caught.value.sandbox) == (code, "/x", "sb-1")
    with pytest.raises(OSError, match="too long"):
        await sandbox.read_file("x" * 5000)
    await closed(sandbox)


async def test_listing_that_lies_about_names() -> None:
    """A name from a broken sandbox never leads out of the place a download was told."""
    sandbox, peer, _ = await made()
    entry = struct.Struct("<cIIIQQI")

    async def serve() -> None:
        for _ in range(2):
            channel, fields = await peer.request()
            assert fields.int(Tag.OP) == Op.LIST
            name = b"../../evil"
            row = entry.pack(b"f", 0o644, 0, 0, 1, 0, len(name)) + name
            await peer.send(Type.DATA, channel, row, stream=1)
            await peer.say(Type.REPLY, channel)

    import tempfile

    with tempfile.TemporaryDirectory() as place:
        serving = asyncio.create_task(serve())
        with pytest.raises(errors.SandboxFileError):
            await sandbox.download("/d", place + "/in")
        await serving
    await closed(sandbox)


async def test_rename_of_the_label() -> None:
    client, _peer = await pair()
    for name in ("one", "two"):
        sandbox = AsyncSandbox(client, id=name, task=Task(id=f"task-{name}"), spec=Spec(), host=Pool())
        await sandbox.release()
    client.give_up("gone")
    error = client.lost.result()
    assert (error.sandbox, error.task) == ("two", "task-two")
