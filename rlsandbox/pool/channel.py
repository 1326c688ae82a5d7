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


class Channel:
    """One end. All methods belong to one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._sending = asyncio.Lock()
        self._closed = False

    async def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message and duplicates of *fds*.

        Raises:
            ChannelClosedError: nobody reads any more.
        """
        payload = pickle.dumps(message)
        data = memoryview(_HEADER.pack(len(payload), len(fds)) + payload)
        async with self._sending:
            while data:
                try:
                    if self._closed:
                        raise ChannelClosedError("the channel is closed")
                    sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
                except (BlockingIOError, InterruptedError):
                    await self._ready(self._loop.add_writer, self._loop.remove_writer)
                    continue
                except OSError as error:
                    raise ChannelClosedError(f"the other process is gone: {error}") from error
                data, fds = data[sent:], ()

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
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
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

    async def _ready(self, add: Any, remove: Any) -> None:
        if self._closed:
            raise ChannelClosedError("the channel is closed")
        future: asyncio.Future[None] = self._loop.create_future()
        add(self._sock, _settle, future)
        try:
            await future
        finally:
            if not self._closed:
                remove(self._sock)

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


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
