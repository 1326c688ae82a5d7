"""Messages with descriptors over a unix socket: how a pool's owner and its other processes talk.

A frame is ``u32 length | u32 descriptors | pickle``; descriptors travel with its first byte. Both ends are
processes of one user on one machine; the owner reads no pickle of anybody who has not shown its token, and
its socket lies where only that user can reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("!II")
_LONGEST = 1 << 30
_MOST_FDS = 16
_CHUNK = 1 << 18


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


def ask_blocking(sock: socket.socket, message: Any) -> Any:
    """One message and its answer (without descriptors) over a blocking socket, before there is a channel.

    Raises:
        OSError: the other end is gone.
    """
    payload = pickle.dumps(message)
    sock.sendall(_HEADER.pack(len(payload), 0) + payload)
    length, _ = _HEADER.unpack(_exactly(sock, _HEADER.size))
    return pickle.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            raise ChannelClosedError("the other process is gone")
        data += more
    return data


@dataclass
class _Leaving:
    """A message on its way out."""

    data: memoryview
    fds: list[int]
    """Ours to close; they go with the first byte."""
    gone: asyncio.Future[None]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Channel:
    """One end. All methods belong to one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[_Leaving] = deque()
        self._closed = False

    async def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message and duplicates of *fds*.

        Cancelled, it stops waiting, and the message leaves all the same: half of one would be taken for the
        beginning of the next, and what it carries would be nobody's.

        Raises:
            ChannelClosedError: nobody reads any more.
        """
        if self._closed:
            raise ChannelClosedError("the channel is closed")
        payload = pickle.dumps(message)
        data = memoryview(_HEADER.pack(len(payload), len(fds)) + payload)
        leaving = _Leaving(data, [os.dup(fd) for fd in fds], self._loop.create_future())
        self._out.append(leaving)
        if len(self._out) == 1:
            self._flush()
        await leaving.gone

    def _flush(self) -> None:
        """Send what the socket takes now, and come again when it takes more."""
        while self._out:
            leaving = self._out[0]
            try:
                if leaving.fds:
                    sent = socket.send_fds(self._sock, [leaving.data], leaving.fds)
                else:
                    sent = self._sock.send(leaving.data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                self._loop.remove_writer(self._sock)
                self._give_up(f"the other process is gone: {error}")
                return
            leaving.close()
            leaving.data = leaving.data[sent:]
            if not leaving.data:
                self._out.popleft()
                _settle(leaving.gone)
        self._loop.remove_writer(self._sock)

    def _give_up(self, why: str) -> None:
        """What has not left will not."""
        while self._out:
            leaving = self._out.popleft()
            leaving.close()
            if not leaving.gone.done():
                leaving.gone.set_exception(ChannelClosedError(why))
                leaving.gone.exception()  # nobody may be waiting for it

    async def show(self, token: bytes) -> None:
        """Send a token, before the first message."""
        await self._loop.sock_sendall(self._sock, token)

    async def shown(self, length: int) -> bytes:
        """The token that the other end shows."""
        token = b""
        while len(token) < length and (more := await self._loop.sock_recv(self._sock, length - len(token))):
            token += more
        return token

    async def recv(self) -> tuple[Any, list[int]] | None:
        """The next message and its descriptors, which are the caller's to close; None at the end."""
        while True:
            if len(self._buffer) >= _HEADER.size:
                length, count = _HEADER.unpack_from(self._buffer)
                if length > _LONGEST or count > _MOST_FDS:
                    raise ChannelClosedError("the other process breaks the protocol")
                if len(self._buffer) >= _HEADER.size + length:
                    payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
                    del self._buffer[: _HEADER.size + length]
                    return pickle.loads(payload), [self._fds.popleft() for _ in range(count)]
            try:
                data, fds, flags, _ = socket.recv_fds(self._sock, _CHUNK, _MOST_FDS)
            except (BlockingIOError, InterruptedError):
                await self._readable()
                continue
            except OSError:
                return None
            for fd in fds:
                os.set_inheritable(fd, False)
            self._fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                raise ChannelClosedError("descriptors were lost on the way")
            if not data:
                return None
            self._buffer += data

    async def _readable(self) -> None:
        if self._closed:
            raise ChannelClosedError("the channel is closed")
        future: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._sock, _settle, future)
        try:
            await future
        finally:
            if not self._closed:
                self._loop.remove_reader(self._sock)

    def close(self) -> None:
        """Twice is fine. Descriptors that nobody took are closed."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        # shutdown wakes whoever polls the socket at the other end, also while a copy of it is open somewhere.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._give_up("the channel is closed")


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
