"""Messages between a pool's owner and its other processes."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from rlsandbox.pool.channel import Channel, ChannelClosedError

BIG = bytes(range(256)) * 4096


def ends() -> tuple[Channel, Channel]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return Channel(here), Channel(there)


async def test_a_message_that_nobody_waits_for_any_more_leaves_whole() -> None:
    """Half of one would be taken for the beginning of the next."""
    here, there = ends()
    read, write = os.pipe()
    sends = [
        asyncio.ensure_future(here.send(BIG, (write,))),
        asyncio.ensure_future(here.send("waits behind it")),
        asyncio.ensure_future(here.send("the last", (write,))),
    ]
    await asyncio.sleep(0)
    for send in sends[:2]:
        send.cancel()
    await asyncio.gather(*sends[:2], return_exceptions=True)
    os.close(write)
    got, fds = await there.recv() or (None, [])
    assert got == BIG
    assert (await there.recv() or (None,))[0] == "waits behind it"
    last, more = await there.recv() or (None, [])
    assert last == "the last"
    await sends[2]
    for fd in (*fds, *more):
        os.write(fd, b"x")
        os.close(fd)
    here.close()
    assert os.read(read, 10) == b"xx"
    assert os.read(read, 10) == b"", "no duplicate of the descriptor is left"
    os.close(read)
    assert await there.recv() is None
    there.close()


@pytest.mark.parametrize("which", ["here", "there"])
async def test_whoever_waits_learns_that_the_channel_is_closed(which: str) -> None:
    here, there = ends()
    read, write = os.pipe()
    sends = [asyncio.ensure_future(here.send(BIG, (write,))) for _ in range(2)]
    await asyncio.sleep(0)
    os.close(write)
    (here if which == "here" else there).close()
    for send in sends:
        with pytest.raises(ChannelClosedError):
            await send
    here.close()
    there.close()
    with pytest.raises(ChannelClosedError):
        await here.send("x")
    assert os.read(read, 1) == b"", "descriptors that did not leave are closed"
    os.close(read)
