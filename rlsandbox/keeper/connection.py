"""A keeper's stream: handshake, frames in and out, requests, the loss of it.

What one can ask of a keeper is in :mod:`.client`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..errors import SandboxDiedError, SandboxError, UnsupportedError
from . import liveness
from .channel import Channel, CommandChannel, Exit, Sink
from .frames import Decoder, Fields, Frame, ProtocolError, encode, encode_fields, encode_message, field
from .wire import VERSION, Op, Tag, Type

logger = logging.getLogger("rlsandbox")

CANCEL_GRACE_S = 8.0
_SPAWN = encode_fields({"op": Op.SPAWN})
_ARG = int(Tag.ARG)


class KeeperFailure(SandboxError):
    """The keeper tried and failed (FAIL): ``errno``, and ``what`` it tried."""

    default_kind = "keeper"
    default_phase = "command"
    errno: int
    what: str

    def __init__(self, message: str = "", *args: Any, errno: int = 0, what: str = "", **kw: Any) -> None:
        super().__init__(message, *args, **kw)
        self.__dict__.setdefault("errno", errno)
        self.__dict__.setdefault("what", what)


@dataclass(frozen=True)
class Welcome:
    """What a keeper says of itself."""

    version: int
    hash: str
    mode: str
    member: str
    facts: dict[str, str]


class Connection(asyncio.Protocol):
    """A keeper's stream. Make one with :meth:`open`; all methods belong to its event loop."""

    welcome: Welcome
    lost: asyncio.Future[SandboxDiedError]

    def __init__(self, loop: asyncio.AbstractEventLoop, *, member: str = "") -> None:
        self.loop = loop
        self.member = member
        self.sandbox: str | None = member or None
        self.task: str | None = None
        self.lost = loop.create_future()
        self.write_paused = False
        self.on_event: Callable[[str, str], object] | None = None
        self._transport: Any = None
        self._pump: asyncio.Task[None] | None = None
        self._decoder = Decoder()
        self._channels: dict[int, Channel] = {}
        self._last_id = 0
        self._hello: asyncio.Future[Fields] = loop.create_future()
        self._pings: dict[bytes, asyncio.Future[None]] = {}
        self._make_lost: Callable[[], SandboxDiedError]
        self._closed: asyncio.Future[None] = loop.create_future()

    # -- opening and closing ------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        token: str = "",
        member: str = "",
        timeout: float = 10.0,
        welcome: Welcome | None = None,
        early: Callable[[Self], object] | None = None,
    ) -> Self:
        """Take the stream over and shake hands.

        Args:
            timeout: seconds for the handshake.
            welcome: of an earlier client whose stream this is (see :meth:`detach`): no handshake then.
            early: may send requests that shall not wait for the keeper's answer to the handshake; they fail
                with it.

        Raises:
            SandboxDiedError: the stream ended, or no keeper answered in time.
            UnsupportedError: the keeper speaks another version.
        """
        self = cls(asyncio.get_running_loop(), member=member)
        self._take_over(reader, writer)
        if welcome is not None:
            self.welcome = welcome
            liveness.watch(self, self.loop)
            return self
        try:
            self.send(encode_message(Type.HELLO, 0, encode_fields({"version": VERSION, "token": token})))
            if early is not None:
                early(self)
            async with asyncio.timeout(timeout):
                fields = await self._hello
        except TimeoutError:
            await self.aclose()
            raise SandboxDiedError(
                f"the keeper did not answer the handshake within {timeout:g} s",
                kind="handshake",
                phase="provision",
                sandbox=member or None,
            ) from None
        except BaseException:
            await self.aclose()
            raise
        self.welcome = Welcome(
            version=fields.int(Tag.VERSION),
            hash=fields.text(Tag.HASH),
            mode=fields.text(Tag.MODE),
            member=fields.text(Tag.MEMBER) or member,
            facts=facts_of(fields),
        )
        self.member = self.welcome.member
        if self.welcome.version != VERSION:
            await self.aclose()
            raise UnsupportedError(
                f"the keeper speaks protocol version {self.welcome.version}, this client {VERSION}",
                phase="provision",
                sandbox=self.member or None,
                hint="rebuild the keeper: rlsandbox keeper build",
            )
        liveness.watch(self, self.loop)
        return self

    def _take_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport: Any = writer.transport
        self._transport = transport
        self._kept = (reader, writer)  # a StreamWriter closes its transport when it is collected
        try:
            transport.set_protocol(self)
        except (NotImplementedError, AttributeError):
            # A transport of somebody's own: read it through its reader.
            self._pump = self.loop.create_task(self._read(reader))
            return
        # What the reader took off the transport before us.
        buffered: bytearray = getattr(reader, "_buffer", bytearray())
        early, at_eof = bytes(buffered), bool(getattr(reader, "_eof", False))
        buffered.clear()
        if early:
            self.data_received(early)
        if at_eof or transport.is_closing():
            self.eof_received()
            return
        if getattr(reader, "_paused", False):
            transport.resume_reading()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(1 << 18):
                self.data_received(data)
            self._end("its stream ended")
        except OSError as error:
            self._end(f"its stream broke: {error}")

    async def aclose(self) -> None:
        """Close the stream. What still waits gets SandboxDiedError."""
        self._end("the pool was closed, or has given the sandbox up", closing=True)
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        elif self._transport is not None and not self._closed.done():
            await asyncio.wait([self._closed], timeout=5)

    @property
    def quiescent(self) -> bool:
        """Whether the stream stands at a frame boundary with nothing in flight."""
        return (
            not self._channels
            and not self.lost.done()
            and self._decoder.at_boundary
            and self._transport.get_write_buffer_size() == 0
        )

    def detach(self) -> socket.socket:
        """Give the stream away as a socket, for a client in another process; this one is over.

        Raises:
            RuntimeError: something is in flight, or the stream is no socket.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is None:
            raise RuntimeError("this keeper's stream is no socket and cannot be handed on")
        self._transport.pause_reading()
        if not self.quiescent:
            self._transport.resume_reading()
            raise RuntimeError("the keeper's stream is in use and cannot be handed on")
        mine = socket.socket(fileno=os.dup(sock.fileno()))
        self._end("its stream was handed on", closing=True)
        return mine

    # -- asyncio.Protocol ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        frames = self._decoder.feed(data) if self._decoder.broken is None else []
        channels = self._channels
        try:
            for frame in frames:
                channel = channels.get(frame[3])
                if channel is not None:
                    channel.frame(frame[0], frame[1], frame[2], frame[4])
                elif frame[3] == 0:
                    self._connection(frame)
                # else: it crossed with the end of its channel
        except ProtocolError as error:
            self._decoder.broken = self._decoder.broken or error
        if self._decoder.broken is not None:
            self._end(f"it broke the protocol: {self._decoder.broken}")

    def eof_received(self) -> bool:
        self._end("its stream ended")
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        if isinstance(exc, SandboxError):  # a transport that knows what happened to the place
            self._end(exc.message, kind=exc.kind, hint=exc.hint)
        else:
            self._end(f"its stream broke: {exc}" if exc else "its stream ended")
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        for channel in list(self._channels.values()):
            channel.pump()

    def _connection(self, frame: Frame) -> None:
        if frame.type == Type.PING:
            self.send(encode(Type.PONG, 0, frame.payload[:64]))
        elif frame.type == Type.PONG:
            waiter = self._pings.pop(frame.payload, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif frame.type == Type.WELCOME:
            if not self._hello.done():
                self._hello.set_result(Fields.decode(frame.payload))
        elif frame.type == Type.EVENT:
            fields = Fields.decode(frame.payload)
            kind, text = fields.text(Tag.KIND), fields.text(Tag.TEXT)
            logger.debug("keeper of %s: %s: %s", self.member, kind, text)
            if self.on_event is not None:
                self.on_event(kind, text)
            if kind == "episode_died":
                # Something outside ended it (the machine's out-of-memory killer, an operator). What ran in
                # it must not look as if it had failed by itself: that would be a reward for nothing.
                self.give_up(text)
        elif frame.type == Type.FAIL:
            fields = Fields.decode(frame.payload)
            raise ProtocolError(f"the keeper refused: {fields.text(Tag.TEXT) or fields.text(Tag.WHAT)}")
        else:
            raise ProtocolError(f"a frame of type {frame.type:#x} on channel 0")

    def _end(self, why: str, *, closing: bool = False, kind: str = "sandbox_died", hint: str = "") -> None:
        if self.lost.done():
            return
        kind = "closed" if closing else kind
        # What this side ended would end again: the pool is closed, or the sandbox given up.
        self._make_lost = lambda: SandboxDiedError(
            f"the sandbox's keeper is gone: {why}",
            kind=kind, hint=hint, sandbox=self.sandbox, task=self.task, retryable=not closing,
        )  # fmt: skip
        self.lost.set_result(self._make_lost())
        if not self._hello.done():
            self._hello.set_exception(self._make_lost())
            self._hello.exception()  # seen, also when nobody waits any more
        for waiter in self._pings.values():
            if not waiter.done():
                waiter.set_result(None)
        self._pings.clear()
        for channel in list(self._channels.values()):
            channel.end(self._make_lost)
        if self._transport is not None:
            # abort, not close: nothing that is still buffered may reach a keeper we have given up.
            self._transport.abort()

    def label(self, sandbox: str, task: str | None) -> None:
        """Whom errors name from now on."""
        self.sandbox, self.task = sandbox, task

    def give_up(self, why: str) -> None:
        """Treat the keeper as lost."""
        self._end(why)

    # -- requests -----------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if not self.lost.done():
            self._transport.write(data)

    def forget(self, channel: Channel) -> None:
        self._channels.pop(channel.id, None)

    def failure(self, fields: Fields) -> Callable[[], KeeperFailure]:
        """What makes the error of a FAIL; a new one for each that waits."""
        code, what = fields.int(Tag.ERRNO), fields.text(Tag.WHAT)
        text = fields.text(Tag.TEXT) or (os.strerror(code) if code else "failed")
        message = f"{what}: {text}" if what else text
        return lambda: KeeperFailure(message, errno=code, what=what, sandbox=self.sandbox, task=self.task)

    def _id(self) -> int:
        while True:
            self._last_id = self._last_id % 0xFFFFFFFF + 1
            if self._last_id not in self._channels:
                return self._last_id

    def request(self, payload: bytes, *, sink: Sink | None = None) -> Channel:
        """Open a channel with a REQ of these encoded fields."""
        if self.lost.done():
            raise self._make_lost()
        channel = Channel(self, self._id(), sink)
        self._channels[channel.id] = channel
        self.send(encode_message(Type.REQ, channel.id, payload))
        return channel

    def command(
        self,
        argv: Sequence[str | bytes],
        *,
        env: bytes | Iterable[str] = (),
        encoded: bytes = b"",
        sink: Sink | None = None,
        on_started: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> CommandChannel:
        """Send a SPAWN and give its channel at once. *env*: ``K=V`` strings, or fields encoded before.

        Fields: cwd user script stdin control output_limit timeout_ms umask; *encoded*: more of them, encoded.
        """
        if self.lost.done():
            raise self._make_lost()
        if not isinstance(env, bytes):
            env = encode_fields({"env": env})
        if not fields and all(isinstance(part, bytes) for part in argv):
            payload = b"".join([_SPAWN, *[field(_ARG, part) for part in argv], encoded, env])  # type: ignore[arg-type]
        else:
            payload = encode_fields({"op": Op.SPAWN, "arg": argv, **fields}) + encoded + env
        channel = CommandChannel(self, self._id(), sink, on_started)
        self._channels[channel.id] = channel
        self.send(encode_message(Type.REQ, channel.id, payload))
        return channel

    async def spawn(self, argv: Sequence[str | bytes], **fields: Any) -> CommandChannel:
        """Like :meth:`command`, and wait until the program runs.

        Raises:
            KeeperFailure: it could not be started.
        """
        channel = self.command(argv, **fields)
        try:
            await channel.started()
        except asyncio.CancelledError:
            await channel.cancelled(CANCEL_GRACE_S)
            raise
        return channel

    async def finish(self, channel: Channel, timeout: float | None = None) -> Fields:
        """Wait for the REPLY; when cancelled, or after *timeout* seconds, end the request first."""
        try:
            if timeout is None:
                end = await channel.wait()
            else:
                async with asyncio.timeout(timeout):
                    end = await channel.wait()
        except (asyncio.CancelledError, TimeoutError):
            await channel.cancelled(CANCEL_GRACE_S)
            raise
        if isinstance(end, Exit):
            raise ProtocolError("a request ended with EXIT")
        return end

    async def call(
        self,
        op: Op,
        *,
        content: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,
        sink: Sink | None = None,
        **fields: Any,
    ) -> Fields:
        """One request and its REPLY. *content* goes to stream 0, followed by EOF.

        Raises:
            KeeperFailure: the keeper answered FAIL.
            TimeoutError: no answer in *timeout* seconds; the request was cancelled.
        """
        payload = encode_fields({"op": op, **fields})
        channel = self.request(payload, sink=sink if sink is not None else _ignore)
        if content is None:
            return await self.finish(channel, timeout)
        if isinstance(content, (bytes, bytearray, memoryview)):
            channel.feed(0, content, eof=True)
            return await self.finish(channel, timeout)
        try:
            async for chunk in content:
                await channel.send(0, chunk)
            channel.feed(0, b"", eof=True)
        except BrokenPipeError:
            pass  # it failed half-way; finish() says how
        except BaseException:
            await channel.cancelled(CANCEL_GRACE_S)
            raise
        return await self.finish(channel, timeout)

    async def collect(self, op: Op, **fields: Any) -> tuple[bytearray, Fields]:
        """One request, all of its data in memory, and its REPLY."""
        data = bytearray()

        def sink(stream: int, piece: bytes, tail: bool) -> None:
            data.extend(piece)

        reply = await self.call(op, sink=sink, **fields)
        return data, reply

    async def ping(self, timeout: float = 5.0) -> float:
        """Seconds to and fro. Raises TimeoutError, or SandboxDiedError when the keeper is lost."""
        start = self.loop.time()
        answered = await liveness.answers(self, timeout)
        if self.lost.done():
            raise self._make_lost()
        if not answered:
            raise TimeoutError(f"the keeper did not answer within {timeout:g} s")
        return self.loop.time() - start

    # -- liveness.Watched ---------------------------------------------------------------------------

    @property
    def waited_for(self) -> bool:
        return bool(self._channels)

    @property
    def gone(self) -> bool:
        return self.lost.done()

    @property
    def away(self) -> bool:
        return bool(getattr(self._transport, "away", False))

    def knock(self) -> asyncio.Future[None]:
        key = os.urandom(8)
        waiter = self._pings[key] = self.loop.create_future()
        self.send(encode(Type.PING, 0, key))
        return waiter


def _ignore(stream: int, data: bytes, tail: bool) -> None:
    return None


def facts_of(fields: Fields) -> dict[str, str]:
    pairs = (text.partition("=") for text in fields.texts(Tag.FACT))
    return {name: value for name, _, value in pairs}
