"""The client of ``keeper hub``: the one process that makes the sandboxes of a pool on one machine.

The hub is started with a clean environment and no descriptor but its own end of a socket pair, so that a
trainer is never forked and nothing of it leaks. The death of the hub ends every waiting call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ProvisionError, UnsupportedError
from . import liveness
from .connection import KeeperFailure, facts_of
from .frames import Decoder, Fields, Frame, ProtocolError, encode, encode_fields, encode_message
from .wire import VERSION, Op, Tag, Type

_FDS_AT_ONCE = 64
_CLOSING_ANSWER_S = 1.0
_Answer = tuple[Fields, int]
"""A REPLY and the descriptor that came with it, or -1."""


class HubClient:
    """Start one with ``await HubClient.start(binary)``; all methods belong to its event loop."""

    def __init__(self, process: subprocess.Popen[bytes] | None, sock: socket.socket, said: int = -1) -> None:
        self.loop = asyncio.get_running_loop()
        self.process = process
        self.facts: dict[str, str] = {}
        self.lost: asyncio.Future[ProvisionError] = self.loop.create_future()
        self.said = ""
        """The last line that it wrote to its stderr, once it has ended."""
        self._said = said
        self._sock = sock
        self._decoder = Decoder()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._creating: set[int] = set()
        self._pings: dict[bytes, asyncio.Future[None]] = {}
        self._sockets: deque[int] = deque()
        self._out = bytearray()
        self._writing = False
        self._last_id = 0
        self._hello: asyncio.Future[Fields] = self.loop.create_future()
        sock.setblocking(False)
        self.loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def start(
        cls, binary: str | Path, *, args: Sequence[str] = ("hub",), timeout: float = 10.0
    ) -> HubClient:
        """Start the hub and shake hands.

        Raises:
            ProvisionError: it could not be started, or died; the message ends with what it said.
            UnsupportedError: it speaks another version.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        said = os.memfd_create("rlsandbox-hub", os.MFD_CLOEXEC)
        try:
            with theirs:
                # The descriptor's number is told, not fixed: stdin would be lost to a reader of it.
                process = subprocess.Popen(  # noqa: ASYNC220 - about 1 ms, once a pool
                    [str(binary), *args, "--fd", str(theirs.fileno()), "--client", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    pass_fds=(theirs.fileno(),),
                    env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            mine.close()
            os.close(said)
            raise ProvisionError(
                f"the keeper could not be started: {binary}: {error.strerror}",
                retryable=False,
                hint="rlsandbox doctor",
            ) from error
        except BaseException:
            mine.close()
            os.close(said)
            raise
        self = cls(process, mine, said)
        try:
            self._send(encode_message(Type.HELLO, 0, encode_fields({"version": VERSION})))
            async with asyncio.timeout(timeout):
                fields = await self._hello
        except TimeoutError:
            await self.aclose()
            raise ProvisionError(f"the keeper's hub did not answer within {timeout:g} s") from None
        except ProvisionError as error:
            await self.aclose()  # now it has ended, and said why
            if not self.said:
                raise
            raise ProvisionError(
                f"the keeper could not start: {self.said}", kind="hub_failed", retryable=False
            ) from error
        except BaseException:
            await self.aclose()
            raise
        self.facts = facts_of(fields)
        if fields.int(Tag.VERSION) != VERSION:
            await self.aclose()
            raise UnsupportedError(
                f"the keeper's hub speaks protocol version {fields.int(Tag.VERSION)}, this client {VERSION}",
                hint="rebuild the keeper: rlsandbox keeper build",
            )
        liveness.watch(self, self.loop)
        return self

    # -- operations ---------------------------------------------------------------------------------

    async def create(self, member: str, **fields: Any) -> tuple[socket.socket, Fields]:
        """Make a sandbox: the socket of its keeper and what the hub says of it.

        A creation that is cancelled half-way is disposed of when it comes into being.

        Raises:
            KeeperFailure: the hub tried and failed.
            ProvisionError: the hub died.
        """
        waiter = self._request(Op.HUB_CREATE, creating=True, member=member, **fields)
        try:
            reply, fd = await asyncio.shield(waiter)
        except asyncio.CancelledError:
            waiter.add_done_callback(lambda done: self._unwanted(member, done))
            raise
        return socket.socket(fileno=fd), reply

    async def dispose(self, member: str) -> None:
        await self.call(Op.HUB_DISPOSE, member=member)

    async def members(self) -> list[str]:
        return (await self.call(Op.HUB_LIST)).texts(Tag.MEMBER)

    async def probe(self) -> dict[str, str]:
        """What works on this machine: name -> ``ok`` or why not."""
        facts = (await self.call(Op.HUB_PROBE)).texts(Tag.FACT)
        return {name: value for name, _, value in (fact.partition("\t") for fact in facts)}

    async def give_layer(self, layer: str, member: str) -> None:
        await self.call(Op.HUB_GIVE_LAYER, layer=layer, member=member)

    async def drop_layer(self, layer: str) -> None:
        await self.call(Op.HUB_DROP_LAYER, layer=layer)

    async def layers(self) -> dict[str, tuple[int, int]]:
        """Sealed layers: name -> (bytes, depth)."""
        split = (row.split("\t") for row in (await self.call(Op.HUB_LAYERS)).texts(Tag.LAYER))
        return {name: (int(size), int(depth)) for name, size, depth, *_ in split}

    async def sweep(self) -> int:
        """How many freed layers and uppers still wait to be freed."""
        return (await self.call(Op.HUB_SWEEP)).int(Tag.COUNT)

    async def call(self, op: Op, **fields: Any) -> Fields:
        return (await asyncio.shield(self._request(op, **fields)))[0]

    async def aclose(self, timeout: float = 10.0) -> None:
        """End the hub and with it every sandbox it made; wait until it is gone.

        One that does not answer (it was stopped, say) is killed at once, one that answers after *timeout*.
        """
        cancelled = False
        try:
            if not await liveness.answers(self, _CLOSING_ANSWER_S):
                timeout = 0
        except asyncio.CancelledError:
            cancelled = True
        self._end("it was closed")
        process = self.process
        if process is None:
            return
        deadline = self.loop.time() + timeout
        delay = 0.0005
        while process.poll() is None:
            if self.loop.time() > deadline:
                process.kill()
            try:
                await asyncio.sleep(delay)
            except asyncio.CancelledError:
                cancelled = True  # a hub that outlives us would hold sandboxes: see it end first
            delay = min(delay * 2, 0.05)
        if self._said >= 0:
            size = os.lseek(self._said, 0, os.SEEK_END)
            lines = os.pread(self._said, 4096, max(0, size - 4096)).decode(errors="replace").splitlines()
            self.said = lines[-1].removeprefix("keeper hub: ") if lines else ""
            os.close(self._said)
            self._said = -1
        if cancelled:
            raise asyncio.CancelledError

    # -- the stream ---------------------------------------------------------------------------------

    def _request(self, op: Op, *, creating: bool = False, **fields: Any) -> asyncio.Future[_Answer]:
        if self.lost.done():
            raise self._lost_error()
        self._last_id = self._last_id % 0xFFFFFFFF + 1
        waiter: asyncio.Future[_Answer] = self.loop.create_future()
        waiter.add_done_callback(_seen)
        self._waiting[self._last_id] = waiter
        if creating:
            self._creating.add(self._last_id)
        payload = encode_fields({"op": op, **fields})
        self._send(encode_message(Type.REQ, self._last_id, payload))
        return waiter

    def _unwanted(self, member: str, done: asyncio.Future[_Answer]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        os.close(done.result()[1])
        if not self.lost.done():
            self._request(Op.HUB_DISPOSE, member=member)

    def _send(self, data: bytes) -> None:
        self._out += data
        if not self._writing:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self.loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError as error:
            self._end(f"its stream broke: {error}")
            return
        if self._writing:
            self._writing = False
            self.loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, _FDS_AT_ONCE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"its stream broke: {error}")
            return
        # A descriptor comes with the first byte of its REPLY: by the time the REPLY is whole, it is here,
        # and descriptors stand in the order of their REPLYs.
        self._sockets.extend(fds)
        if not data:
            self._end("it is gone")
            return
        for frame in self._decoder.feed(data):
            try:
                self._frame(frame)
            except ProtocolError as error:
                self._end(f"it broke the protocol: {error}")
        if self._decoder.broken is not None:
            self._end(f"it broke the protocol: {self._decoder.broken}")

    def _frame(self, frame: Frame) -> None:
        if frame.type == Type.WELCOME:
            if not self._hello.done():
                self._hello.set_result(Fields.decode(frame.payload))
        elif frame.type == Type.PING:
            self._send(encode(Type.PONG, 0, frame.payload[:64]))
        elif frame.type == Type.PONG:
            answered = self._pings.pop(frame.payload, None)
            if answered is not None and not answered.done():
                answered.set_result(None)
        elif frame.type in (Type.REPLY, Type.FAIL):
            fields = Fields.decode(frame.payload)
            failure = _failure(fields) if frame.type == Type.FAIL else None
            if failure is not None and frame.channel == 0:
                self._end(f"it cannot {failure}")  # the hub as a whole
                return
            wants_socket = frame.channel in self._creating and failure is None
            if wants_socket and not self._sockets:
                raise ProtocolError("a sandbox was made but its stream did not come")
            self._creating.discard(frame.channel)
            fd = self._sockets.popleft() if wants_socket else -1
            waiter = self._waiting.pop(frame.channel, None)
            if waiter is None:
                raise ProtocolError("an answer to nothing that was asked")
            if failure is not None:
                waiter.set_exception(failure)
            else:
                waiter.set_result((fields, fd))

    # -- liveness.Watched ---------------------------------------------------------------------------

    @property
    def waited_for(self) -> bool:
        return bool(self._waiting)

    @property
    def gone(self) -> bool:
        return self.lost.done()

    @property
    def away(self) -> bool:
        return False

    def knock(self) -> asyncio.Future[None]:
        key = os.urandom(8)
        waiter = self._pings[key] = self.loop.create_future()
        self._send(encode(Type.PING, 0, key))
        return waiter

    def give_up(self, why: str) -> None:
        """It is lost; and killed, for what it made must not outlive the pool's knowledge of it."""
        self._end(why)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _lost_error(self) -> ProvisionError:
        return ProvisionError(str(self.lost.result()), kind="hub_died")

    def _end(self, why: str) -> None:
        if self.lost.done():
            return
        status = self.process.poll() if self.process is not None else None
        ended = f" (status {status})" if status is not None else ""
        self.lost.set_result(ProvisionError(f"the keeper's hub is gone: {why}{ended}", kind="hub_died"))
        self.loop.remove_reader(self._sock.fileno())
        if self._writing:
            self.loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for answered in self._pings.values():
            if not answered.done():
                answered.set_result(None)
        self._pings.clear()
        while self._sockets:
            with contextlib.suppress(OSError):
                os.close(self._sockets.popleft())
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(self._lost_error())
        self._waiting.clear()
        if not self._hello.done():
            self._hello.set_exception(self._lost_error())
            self._hello.exception()  # seen, also when nobody waits any more


def _failure(fields: Fields) -> KeeperFailure:
    code, what = fields.int(Tag.ERRNO), fields.text(Tag.WHAT)
    text = fields.text(Tag.TEXT) or os.strerror(code)
    return KeeperFailure(f"{what}: {text}", errno=code, what=what, phase="provision")


def _seen(future: asyncio.Future[_Answer]) -> None:
    if not future.cancelled():
        future.exception()
