"""The other end of a keeper's stream, driven by hand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from rlsandbox.keeper.client import KeeperClient
from rlsandbox.keeper.frames import Decoder, Fields, Frame, encode, encode_fields, encode_message
from rlsandbox.keeper.wire import VERSION, Tag, Type


class Peer:
    """Speaks as the keeper; ``get`` gives what the client sent, a frame at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    async def get(self, type_: int | None = None) -> Frame:
        """The next frame (of a type; others before it are thrown away)."""
        loop = asyncio.get_running_loop()
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if type_ is None or frame.type == type_:
                    return frame
            data = await asyncio.wait_for(loop.sock_recv(self.sock, 1 << 16), 10)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)

    async def quiet(self) -> bool:
        """Whether nothing was sent that has not been taken."""
        await asyncio.sleep(0.02)
        with contextlib.suppress(BlockingIOError):
            self._frames += self._decoder.feed(self.sock.recv(1 << 16))
        return not self._frames

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send(self, type_: int, channel: int, payload: bytes = b"", **how: Any) -> None:
        await self.raw(encode(type_, channel, payload, **how))

    async def say(self, type_: int, channel: int, **fields: Any) -> None:
        await self.raw(encode_message(type_, channel, encode_fields(fields)))

    async def welcome(self, **fields: Any) -> Fields:
        """Answer the handshake; what the client said in it."""
        hello = Fields.decode((await self.get(Type.HELLO)).payload)
        said = {"version": VERSION, "mode": "overlay", "member": "m", "fact": ["ids=range"], **fields}
        await self.say(Type.WELCOME, 0, **said)
        return hello

    async def request(self) -> tuple[int, Fields]:
        frame = await self.get(Type.REQ)
        return frame.channel, Fields.decode(frame.payload)

    async def command(self) -> int:
        """A SPAWN that starts: its channel."""
        channel, fields = await self.request()
        assert fields.int(Tag.OP) == 1
        await self.say(Type.STARTED, channel, pid=7)
        return channel

    def close(self) -> None:
        self.sock.close()

    __del__ = close


async def pair(**how: Any) -> tuple[KeeperClient, Peer]:
    """A client that has shaken hands with a peer."""
    mine, theirs = socket.socketpair()
    peer = Peer(theirs)
    reader, writer = await asyncio.open_connection(sock=mine)
    client, _ = await asyncio.gather(KeeperClient.open(reader, writer, **how), peer.welcome())
    return client, peer
