"""The client against a keeper driven by hand: handshake, flow, cancellation, loss, lies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rlsandbox.errors import SandboxDiedError, UnsupportedError
from rlsandbox.keeper import connection, liveness
from rlsandbox.keeper.channel import Exit
from rlsandbox.keeper.client import KeeperClient, KeeperFailure
from rlsandbox.keeper.frames import MAX_PAYLOAD, encode, encode_fields
from rlsandbox.keeper.wire import WINDOW, Op, Tag, Type
from tests.unit.keeper.peer import Peer, pair


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


# -- handshake --------------------------------------------------------------------------------------


async def test_handshake() -> None:
    client, peer = await pair(token="secret")
    assert client.welcome.mode == "overlay"
    assert client.welcome.facts == {"ids": "range"}
    assert client.quiescent
    await client.aclose()
    await client.aclose()
    with pytest.raises(EOFError):
        await peer.get()


async def _opening() -> tuple[asyncio.Task[KeeperClient], Peer]:
    mine, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=mine)
    return asyncio.create_task(KeeperClient.open(reader, writer, timeout=0.2)), Peer(theirs)


async def test_handshake_never_answered() -> None:
    task, peer = await _opening()
    with pytest.raises(SandboxDiedError, match="did not answer the handshake"):
        await task
    with pytest.raises(EOFError):
        await peer.get(99)


async def test_handshake_cut_off() -> None:
    task, peer = await _opening()
    await peer.get(Type.HELLO)
    peer.close()
    with pytest.raises(SandboxDiedError, match="gone"):
        await task


async def test_handshake_of_another_version() -> None:
    task, peer = await _opening()
    await peer.welcome(version=99)
    with pytest.raises(UnsupportedError, match="version 99"):
        await task


async def test_handshake_refused() -> None:
    task, peer = await _opening()
    await peer.say(Type.FAIL, 0, errno=1, text="wrong token")
    with pytest.raises(SandboxDiedError, match="wrong token"):
        await task


async def test_handshake_cancelled_closes() -> None:
    task, peer = await _opening()
    await peer.get(Type.HELLO)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(EOFError):
        await peer.get()


async def test_bytes_that_the_reader_took_already() -> None:
    """What arrived before we took the stream over is not lost, nor is a reader that stopped the transport."""
    mine, theirs = socket.socketpair()
    peer = Peer(theirs)
    reader, writer = await asyncio.open_connection(sock=mine, limit=64)
    await peer.say(Type.WELCOME, 0, version=1, mode="overlay", member="early", text="x" * 1000)
    await soon(lambda: len(reader._buffer) > 500)  # type: ignore[attr-defined]
    client = await KeeperClient.open(reader, writer)
    assert client.member == "early"
    await peer.send(Type.PING, 0, b"1")
    assert (await peer.get(Type.PONG)).payload == b"1"
    await client.aclose()


async def test_writer_collected_keeps_the_stream() -> None:
    client, peer = await pair()
    gc.collect()
    await peer.send(Type.PING, 0, b"1")
    await peer.get(Type.PONG)
    await client.aclose()


# -- requests ---------------------------------------------------------------------------------------


async def test_call() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.call(Op.DROP_LAYER, layer="a"))
    channel, fields = await peer.request()
    assert (fields.int(Tag.OP), fields.text(Tag.LAYER)) == (Op.DROP_LAYER, "a")
    await peer.say(Type.REPLY, channel, bytes=5)
    assert (await task).int(Tag.BYTES) == 5
    assert client.quiescent
    await client.aclose()


async def test_failure() -> None:
    client, peer = await pair()
    client.label("sb-1", "task-1")
    task = asyncio.create_task(client.read("/x"))
    channel, _ = await peer.request()
    await peer.say(Type.FAIL, channel, errno=errno.ENOENT, what="open /x")
    with pytest.raises(KeeperFailure, match="open /x: No such file") as caught:
        await task
    assert (caught.value.errno, caught.value.sandbox, caught.value.task) == (2, "sb-1", "task-1")
    await client.aclose()


async def test_answers_in_any_order() -> None:
    client, peer = await pair()
    tasks = [asyncio.create_task(client.read(f"/{i}")) for i in range(5)]
    channels = [(await peer.request())[0] for _ in tasks]
    for i in (3, 0, 4, 2, 1):
        await peer.send(Type.DATA, channels[i], b"%d" % i, stream=1)
        await peer.say(Type.REPLY, channels[i])
    assert await asyncio.gather(*tasks) == [b"0", b"1", b"2", b"3", b"4"]
    await client.aclose()


async def test_call_with_content() -> None:
    client, peer = await pair()

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(3):
            yield b"%d" % i

    for content, expected in ((b"abc", b"abc"), (b"", b""), (pieces(), b"012")):
        task = asyncio.create_task(client.write("/x", content, mode=0o600))
        channel, fields = await peer.request()
        assert fields.int(Tag.FILE_MODE) == 0o600
        got = b""
        while (frame := await peer.get()).type == Type.DATA:
            got += frame.payload
        assert (frame.type, frame.channel, got) == (Type.EOF, channel, expected)
        await peer.say(Type.REPLY, channel, size=len(got))
        assert await task == len(expected)
    await client.aclose()


async def test_content_that_fails_half_way() -> None:
    client, peer = await pair()
    closed = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 50000
        finally:
            closed.append(True)

    task = asyncio.create_task(client.write("/x", endless()))
    channel, _ = await peer.request()
    await peer.say(Type.FAIL, channel, errno=errno.ENOSPC, what="write /x")
    with pytest.raises(KeeperFailure, match="No space"):
        await task
    assert client.quiescent or not client.lost.done()
    await client.aclose()


async def test_content_whose_source_breaks() -> None:
    client, peer = await pair()

    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise LookupError("source")

    task = asyncio.create_task(client.write("/x", broken()))
    channel, _ = await peer.request()
    assert (await peer.get(Type.CANCEL)).channel == channel
    await peer.say(Type.FAIL, channel, errno=errno.ECANCELED)
    with pytest.raises(LookupError):
        await task
    await client.aclose()


async def test_call_timeout() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.call(Op.SEAL, timeout=0.05, layer="x"))
    channel, _ = await peer.request()
    await peer.get(Type.CANCEL)
    await peer.say(Type.FAIL, channel, errno=errno.ECANCELED)
    with pytest.raises(TimeoutError):
        await task
    await client.aclose()


async def test_ping() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.ping(5))
    frame = await peer.get(Type.PING)
    await peer.send(Type.PONG, 0, b"unasked")
    await peer.send(Type.PONG, 0, frame.payload)
    assert 0 <= await task < 5
    with pytest.raises(TimeoutError):
        await client.ping(0.02)
    assert client.quiescent
    await client.aclose()


async def test_events() -> None:
    client, peer = await pair()
    seen: list[tuple[str, str]] = []
    client.on_event = lambda kind, text: seen.append((kind, text))
    await peer.say(Type.EVENT, 0, kind="oom", text="pid 3")
    await soon(lambda: bool(seen))
    assert seen == [("oom", "pid 3")]
    await client.aclose()


# -- flow -------------------------------------------------------------------------------------------


async def test_what_nobody_takes_is_bounded() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    for _ in range(WINDOW // 16384):
        await peer.send(Type.DATA, channel, b"x" * 16384, stream=1)
    assert await peer.quiet()  # no credit for what nobody took
    taken = 0
    while taken < WINDOW // 2:
        item = await command.recv()
        assert item is not None
        taken += len(item[1])
    credit = await peer.get(Type.CREDIT)
    assert (credit.channel, credit.stream) == (channel, 1)
    assert struct.unpack("<I", credit.payload)[0] <= taken
    await client.aclose()


async def test_more_than_the_window_is_a_broken_protocol() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    for _ in range(WINDOW // 16384 + 1):
        await peer.send(Type.DATA, channel, b"x" * 16384, stream=1)
    with pytest.raises(SandboxDiedError, match="window"):
        await command.wait()


async def test_credit_is_all_that_is_sent() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"], stdin=1))
    channel = await peer.command()
    command = await task
    command.feed(0, b"y" * (WINDOW + 50_000), eof=True)
    got = 0
    while got < WINDOW:
        frame = await peer.get(Type.DATA)
        assert len(frame.payload) <= MAX_PAYLOAD
        got += len(frame.payload)
    assert got == WINDOW
    assert await peer.quiet()
    await peer.send(Type.CREDIT, channel, struct.pack("<I", 30_000))
    await peer.send(Type.CREDIT, channel, struct.pack("<I", 30_000))
    got = 0
    while (frame := await peer.get()).type == Type.DATA:
        got += len(frame.payload)
    assert (frame.type, got) == (Type.EOF, 50_000)
    await peer.say(Type.EXIT, channel, status=0)
    assert (await command.wait_exit()).exit_code == 0
    await client.aclose()


async def test_send_waits_and_ends_with_the_command() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"], stdin=1))
    channel = await peer.command()
    command = await task
    writing = asyncio.create_task(command.send(0, b"z" * (2 * WINDOW)))
    await asyncio.sleep(0.05)
    assert not writing.done()
    await peer.say(Type.EXIT, channel, status=0)
    with pytest.raises(BrokenPipeError):
        await writing
    await client.aclose()


async def test_frames_for_a_channel_that_ended_are_nothing() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    await peer.say(Type.EXIT, channel, status=0x100)
    assert (await command.wait_exit()).exit_code == 1
    await peer.send(Type.DATA, channel, b"late", stream=1)
    await peer.send(Type.CREDIT, channel, struct.pack("<I", 1))
    await peer.say(Type.EXIT, channel, status=0)
    command.cancel()
    command.signal(9)
    command.feed(0, b"x")
    await peer.send(Type.PING, 0, b"1")
    assert (await peer.get()).type == Type.PONG  # and nothing else was sent
    await client.aclose()


@pytest.mark.parametrize("size", [0, 1, WINDOW, 3 * WINDOW + 1])
async def test_data_waits_for_the_reader_in_order(size: int) -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    data = bytes(i % 251 for i in range(size))

    async def serve() -> None:
        left, at = WINDOW, 0
        while at < size:
            if left == 0:
                left += struct.unpack("<I", (await peer.get(Type.CREDIT)).payload)[0]
            piece = data[at : at + min(left, MAX_PAYLOAD)]
            await peer.send(Type.DATA, channel, piece, stream=1)
            at += len(piece)
            left -= len(piece)
        await peer.say(Type.EXIT, channel, status=0)

    serving = asyncio.create_task(serve())
    got = b""
    while (item := await command.recv()) is not None:
        got += item[1]
    await serving
    assert got == data
    await client.aclose()


# -- cancellation -----------------------------------------------------------------------------------


async def test_cancel_waits_for_the_end() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    ending = asyncio.create_task(command.cancelled(5))
    assert (await peer.get(Type.CANCEL)).channel == channel
    await peer.send(Type.DATA, channel, b"last words", stream=1)
    await asyncio.sleep(0.02)
    assert not ending.done()
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    await ending
    end = command.result()
    assert isinstance(end, Exit)
    assert end.signal == 9
    await client.aclose()


async def test_cancelled_twice_still_waits() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel, _ = await peer.request()
    task.cancel()
    await peer.get(Type.CANCEL)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    await peer.say(Type.EXIT, channel, status=9, flags=4)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client.lost.done()
    await client.aclose()


async def test_a_keeper_that_does_not_cancel_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CANCEL_GRACE_S", 0.1)
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    await peer.request()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "has not answered within 0.1 s" in str(client.lost.result())
    with pytest.raises(SandboxDiedError):
        await client.ping()


async def test_a_keeper_that_answers_and_does_not_cancel_is_given_up_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "CANCEL_GRACE_S", 0.5)
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    await peer.request()
    task.cancel()
    frame = await peer.get(Type.PING)
    await peer.send(Type.PONG, 0, frame.payload)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "did not end a cancelled request within 0.5 s" in str(client.lost.result())


async def test_a_keeper_is_asked_only_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "EVERY_S", 0.05)
    client, peer = await pair()
    await asyncio.sleep(0.2)
    assert not client._pings
    task = asyncio.create_task(client.spawn(["x"]))
    await peer.request()
    for _ in range(3):  # it is slow, and it lives
        frame = await peer.get()
        assert frame.type == Type.PING
        await peer.send(Type.PONG, 0, frame.payload)
    assert (await peer.get()).type == Type.PING  # and then it is silent
    with pytest.raises(SandboxDiedError, match=r"has not answered for 0\.05 s"):
        await task


async def test_one_waiter_cancelled_leaves_the_other() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    first, second = (asyncio.create_task(command.wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    await peer.say(Type.EXIT, channel, status=0)
    assert isinstance(await second, Exit)
    assert first.cancelled()
    await client.aclose()


@pytest.mark.parametrize("ticks", range(12))
async def test_cancelled_at_every_await(ticks: int) -> None:
    """Whatever the instant: the channel is gone when the call is, and the stream goes on."""
    client, peer = await pair()

    async def keeper() -> None:
        with contextlib.suppress(EOFError):
            while True:
                frame = await peer.get()
                if frame.type == Type.REQ:
                    await peer.say(Type.STARTED, frame.channel, pid=1)
                elif frame.type == Type.CANCEL:
                    await peer.say(Type.EXIT, frame.channel, status=9, flags=4)

    serving = asyncio.create_task(keeper())

    async def work() -> None:
        command = await client.spawn(["x"], stdin=1)
        try:
            await command.send(0, b"x" * 1000)
            await command.recv()
        except BaseException:
            await command.cancelled(5)
            raise

    task = asyncio.create_task(work())
    for _ in range(ticks):
        await asyncio.sleep(0)
    if ticks > 8:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client._channels
    assert not client.lost.done()
    await client.aclose()
    await serving


# -- loss -------------------------------------------------------------------------------------------


async def test_loss_reaches_everyone_at_once() -> None:
    client, peer = await pair()
    client.label("sb-9", "t")
    task = asyncio.create_task(client.spawn(["x"], stdin=1))
    await peer.command()
    command = await task
    waiting: list[Awaitable[object]] = [
        client.call(Op.KILL_ALL),
        client.read("/x"),
        client.spawn(["y"]),
        client.ping(60),
        command.wait(),
        command.recv(),
        client.finish(client.request(encode_fields({"op": Op.LIST}))),
    ]
    tasks = [asyncio.ensure_future(w) for w in waiting]
    writing = asyncio.create_task(command.send(0, b"x" * (4 * WINDOW)))
    await asyncio.sleep(0.02)
    peer.close()
    for ended in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1):
        assert isinstance(ended, SandboxDiedError), ended
        assert ended.sandbox == "sb-9"
    with pytest.raises(BrokenPipeError):
        await writing
    assert isinstance(client.lost.result(), SandboxDiedError)
    for later in (client.ping(), client.call(Op.KILL_ALL), client.spawn(["z"])):
        with pytest.raises(SandboxDiedError):
            await later
    await client.aclose()


@pytest.mark.parametrize(
    "lie",
    [
        b"\0\0\0\0",
        struct.pack("<IBBHII", 12, 0x55, 0, 0, 0, 0),
        encode(Type.REPLY, 0, b""),
        encode(Type.REPLY, 1, b"\x01"),
        encode(Type.STARTED, 1, b"\xff\xff\xff\xff\xff\xff"),
        encode(Type.REQ, 1, b""),
        encode(Type.CREDIT, 1, b"\x01"),
        encode(Type.EXIT, 1, encode_fields({"path": "x"}) + b"\x0c\x00\x01\x00\x00\x00\x01"),
        encode(Type.FAIL, 1, b"\x08\x00\x03\x00\x00\x00abc"),
    ],
)
async def test_lies_end_the_stream(lie: bytes) -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"], stdin=1))
    channel = await peer.command()
    command = await task
    assert channel == 1
    command.feed(0, b"x")
    await peer.raw(lie)
    with pytest.raises(SandboxDiedError, match="broke the protocol"):
        await asyncio.wait_for(command.wait(), 5)
    await client.aclose()


async def test_frames_before_a_lie_count() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    await peer.raw(encode(Type.EXIT, channel, encode_fields({"status": 0x200})) + b"\0\0\0\0")
    assert (await command.wait_exit()).exit_code == 2
    await asyncio.wait_for(asyncio.shield(client.lost), 5)


# -- handing the stream on --------------------------------------------------------------------------


async def test_detach() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    assert not client.quiescent
    with pytest.raises(RuntimeError, match="in use"):
        client.detach()
    await peer.say(Type.EXIT, channel, status=0)
    await command.wait()
    welcome = client.welcome
    sock = client.detach()
    with pytest.raises(SandboxDiedError, match="handed on"):
        await client.ping()
    reader, writer = await asyncio.open_connection(sock=sock)
    other = await KeeperClient.open(reader, writer, welcome=welcome)
    assert other.welcome is welcome
    await peer.send(Type.PING, 0, b"1")
    assert (await peer.get()).type == Type.PONG  # nothing of the old client came between
    await other.aclose()


async def test_channel_numbers_are_never_used_twice_at_once() -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.spawn(["x"]))
    first = await peer.command()
    await task
    client._last_id = 0xFFFFFFFE
    seen = {first}
    for _ in range(3):
        waiting = asyncio.create_task(client.call(Op.KILL_ALL))
        channel, _ = await peer.request()
        assert channel not in seen | {0}
        await peer.say(Type.REPLY, channel)
        await waiting
    await client.aclose()


async def test_a_reader_without_a_transport_of_ours() -> None:
    """Streams of somebody's own (a websocket, say) work through their reader and writer."""
    mine, theirs = socket.socketpair()
    peer = Peer(theirs)
    inner_reader, inner_writer = await asyncio.open_connection(sock=mine)

    class Foreign(asyncio.Transport):
        def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
            raise NotImplementedError

        def write(self, data: bytes | bytearray | memoryview) -> None:
            inner_writer.write(data)

        def is_closing(self) -> bool:
            return inner_writer.is_closing()

        def close(self) -> None:
            inner_writer.close()

        def abort(self) -> None:
            inner_writer.transport.abort()

        def get_write_buffer_size(self) -> int:
            return 0

    loop = asyncio.get_running_loop()
    writer = asyncio.StreamWriter(Foreign(), asyncio.StreamReaderProtocol(asyncio.StreamReader()), None, loop)
    client, _ = await asyncio.gather(KeeperClient.open(inner_reader, writer), peer.welcome())
    task = asyncio.create_task(client.spawn(["x"]))
    channel = await peer.command()
    command = await task
    await peer.say(Type.EXIT, channel, status=0x400)
    assert (await command.wait_exit()).exit_code == 4
    peer.close()
    assert "gone" in str(await asyncio.wait_for(asyncio.shield(client.lost), 5))
    await client.aclose()
