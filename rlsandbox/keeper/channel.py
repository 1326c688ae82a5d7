"""One request in flight on a keeper's stream: its data in both directions, its credit, its end.

What a channel holds is bounded: the keeper may send a window (256 KiB) of each stream before somebody
takes it, and credit is given back only for what was taken. A keeper that sends more broke the protocol.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .frames import MAX_PAYLOAD, Fields, ProtocolError, decode_credit, encode, encode_credit
from .liveness import ANSWER_S
from .wire import WINDOW, ExitFlag, Flag, Tag, Type

if TYPE_CHECKING:
    from .connection import Connection

STDIN, STDOUT, STDERR, CONTROL_IN, CONTROL_OUT = range(5)
CREDIT_STEP = WINDOW // 4
_TAIL = int(Flag.TAIL)
_ENDED_BY_LIMIT = int(ExitFlag.TIMED_OUT | ExitFlag.OOM)
_DATA, _STARTED, _CREDIT, _EOF = int(Type.DATA), int(Type.STARTED), int(Type.CREDIT), int(Type.EOF)
_END_EXIT, _END_REPLY, _END_FAIL = int(Type.EXIT), int(Type.REPLY), int(Type.FAIL)
_PID = struct.Struct("<HII")
_EXIT = struct.Struct("<HII HII HIQ HIQ HIQ".replace(" ", ""))
_EXIT_TAGS = (
    *(int(Tag.STATUS), 4),
    *(int(Tag.FLAGS), 4),
    *(int(Tag.DURATION_NS), 8),
    *(int(Tag.STDOUT_SIZE), 8),
    *(int(Tag.STDERR_SIZE), 8),
)

Sink = Callable[[int, bytes, bool], None]


@dataclass(frozen=True)
class Exit:
    """How a command ended. *status* is the raw wait status."""

    status: int
    flags: int
    duration_ns: int
    stdout_size: int
    stderr_size: int

    @classmethod
    def decode(cls, payload: bytes) -> Exit:
        if len(payload) == _EXIT.size:
            # As keepers write it, in one go; every command of every rollout comes through here.
            a = _EXIT.unpack(payload)
            if (a[0], a[1], a[3], a[4], a[6], a[7], a[9], a[10], a[12], a[13]) == _EXIT_TAGS:
                return cls(a[2], a[5], a[8], a[11], a[14])
        f = Fields.decode(payload)
        return cls(
            status=f.int(Tag.STATUS),
            flags=f.int(Tag.FLAGS),
            duration_ns=f.int(Tag.DURATION_NS),
            stdout_size=f.int(Tag.STDOUT_SIZE),
            stderr_size=f.int(Tag.STDERR_SIZE),
        )

    @property
    def signal(self) -> int | None:
        number = self.status & 0x7F
        return number if number not in (0, 0x7F) else None

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 128 + signal when killed; 137 on timeout and out of memory."""
        if self.flags & _ENDED_BY_LIMIT:
            return 137
        number = self.signal
        return 128 + number if number is not None else (self.status >> 8) & 0xFF


class _Out:
    """What is to be sent on one stream, within the other side's window."""

    __slots__ = ("eof", "eof_sent", "queue", "queued", "window")

    def __init__(self) -> None:
        self.window = WINDOW
        self.queue: deque[memoryview] = deque()
        self.queued = 0
        self.eof = False
        self.eof_sent = False


class Channel:
    """One request. Ends with REPLY, FAIL or EXIT, or with the loss of the keeper.

    Args:
        sink: called with (stream, bytes, tail) for all data as it arrives; without one the data waits,
            within its window, for :meth:`recv`.
        on_started: called with the pid when the program runs.
    """

    __slots__ = (
        "_cancelled",
        "_end",
        "_ended",
        "_in_left",
        "_in_taken",
        "_out",
        "_queue",
        "_sink",
        "_waiters",
        "client",
        "id",
        "on_started",
        "pid",
    )

    def __init__(
        self,
        client: Connection,
        id_: int,
        sink: Sink | None = None,
        on_started: Callable[[int], None] | None = None,
    ) -> None:
        self.client = client
        self.id = id_
        self.pid: int | None = None
        self.on_started = on_started
        self._sink = sink
        self._end: Exit | Fields | Callable[[], BaseException] | None = None
        self._queue: deque[tuple[int, bytes, bool]] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._in_left: dict[int, int] = {}
        self._in_taken: dict[int, int] = {}
        self._out: dict[int, _Out] = {}
        self._cancelled = False
        self._ended: list[Callable[[], object]] = []

    # -- what arrives -------------------------------------------------------------------------------

    def frame(self, type_: int, flags: int, stream: int, payload: bytes) -> None:
        """One frame of this channel, from the client's reader."""
        if type_ == _DATA:
            left = self._in_left.get(stream, WINDOW) - len(payload)
            if left < 0:
                raise ProtocolError(f"more data on stream {stream} than its window allows")
            self._in_left[stream] = left
            if self._sink is not None:
                self._sink(stream, payload, bool(flags & _TAIL))
                self.taken(stream, len(payload))
            else:
                self._queue.append((stream, payload, bool(flags & _TAIL)))
                self._wake()
        elif type_ == _STARTED:
            self.pid = _started_pid(payload)
            self._wake()
            if self.on_started is not None:
                self.on_started(self.pid)
        elif type_ == _CREDIT:
            out = self._out.get(stream)
            if out is not None:
                out.window += decode_credit(payload)
                self.pump()
        elif type_ == _END_EXIT:
            self.end(Exit.decode(payload))
        elif type_ == _END_REPLY:
            self.end(Fields.decode(payload))
        elif type_ == _END_FAIL:
            self.end(self.client.failure(Fields.decode(payload)))
        elif type_ != _EOF:
            raise ProtocolError(f"a frame of type {type_:#x} on channel {self.id}")

    def end(self, how: Exit | Fields | Callable[[], BaseException]) -> None:
        """The channel is over: *how* is what it ended with, or makes the error to raise."""
        if self._end is None:
            self._end = how
            self.client.forget(self)
            self._out.clear()
            self._wake()
            for callback in self._ended:
                callback()
            self._ended.clear()

    @property
    def lost(self) -> bool:
        """Whether it ended with an error: a FAIL, or the loss of the keeper."""
        return self._end is not None and not isinstance(self._end, (Exit, Fields))

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call *callback* at the end of the channel; now, when that has been."""
        if self._end is None:
            self._ended.append(callback)
        else:
            callback()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _activity(self) -> None:
        # A future of its own for each waiter: cancelling one must not wake or break another.
        waiter = self.client.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def result(self) -> Exit | Fields:
        """What the channel ended with; raises what it failed with."""
        end = self._end
        if end is None:
            raise RuntimeError("the channel has not ended")
        if isinstance(end, (Exit, Fields)):
            return end
        raise end()

    async def started(self) -> int:
        """The pid, once the program runs."""
        while self.pid is None:
            if self._end is not None:
                if isinstance(self._end, (Exit, Fields)):
                    return 0  # cancelled before it started: there is no pid and there will be none
                self.result()
            await self._activity()
        return self.pid

    async def wait(self) -> Exit | Fields:
        while self._end is None:
            await self._activity()
        return self.result()

    async def recv(self) -> tuple[int, bytes, bool] | None:
        """The next piece (stream, bytes, tail); None when the channel ended well."""
        while not self._queue:
            if self._end is not None:
                self.result()
                return None
            await self._activity()
        item = self._queue.popleft()
        self.taken(item[0], len(item[1]))
        return item

    def recv_nowait(self) -> tuple[int, bytes, bool] | None:
        if not self._queue:
            return None
        item = self._queue.popleft()
        self.taken(item[0], len(item[1]))
        return item

    def use_sink(self, sink: Sink) -> None:
        """From now on *sink* gets what arrives, first what waits already."""
        while (item := self.recv_nowait()) is not None:
            sink(*item)
        self._sink = sink

    def taken(self, stream: int, amount: int) -> None:
        if self._end is not None:
            return
        total = self._in_taken.get(stream, 0) + amount
        if total >= CREDIT_STEP:
            self._in_left[stream] = self._in_left.get(stream, WINDOW) + total
            self.client.send(encode_credit(self.id, stream, total))
            total = 0
        self._in_taken[stream] = total

    # -- what is sent -------------------------------------------------------------------------------

    def feed(self, stream: int, data: bytes | bytearray | memoryview, *, eof: bool = False) -> None:
        """Queue *data* for *stream*; it goes out as the window allows. The caller must not change it."""
        if self._end is not None or self._cancelled:
            return
        out = self._out.get(stream)
        if out is None:
            out = self._out[stream] = _Out()
        if out.eof:
            raise ValueError(f"stream {stream} has been closed")
        if len(data):
            out.queue.append(memoryview(data).cast("B"))
            out.queued += len(data)
        out.eof = eof
        self.pump()

    def pump(self) -> None:
        """Send what windows and the transport allow."""
        for stream, out in self._out.items():
            frames: list[bytes] = []
            while out.queue and out.window > 0 and not self.client.write_paused:
                view = out.queue[0]
                piece = view[: min(MAX_PAYLOAD, out.window)]
                frames.append(encode(Type.DATA, self.id, bytes(piece), stream=stream))
                out.window -= len(piece)
                out.queued -= len(piece)
                if len(piece) == len(view):
                    out.queue.popleft()
                else:
                    out.queue[0] = view[len(piece) :]
                if len(frames) == 8:
                    self.client.send(b"".join(frames))
                    frames = []
            if out.eof and not out.queue and not out.eof_sent:
                out.eof_sent = True
                frames.append(encode(Type.EOF, self.id, stream=stream))
            if frames:
                self.client.send(b"".join(frames))
            if not out.queue:
                self._wake()

    async def send(self, stream: int, data: bytes | bytearray | memoryview, *, eof: bool = False) -> None:
        """Like :meth:`feed`, and wait until all of it has been sent.

        Raises:
            BrokenPipeError: the channel ended before all was sent.
        """
        self.feed(stream, data, eof=eof)
        while True:
            if self._end is not None or self._cancelled:
                raise BrokenPipeError("the command has ended")
            out = self._out.get(stream)
            if out is None or not out.queue:
                return
            await self._activity()

    def signal(self, number: int, *, tree: bool = False) -> None:
        if self._end is None:
            self.client.send(encode(Type.SIGNAL, self.id, bytes((number, 1) if tree else (number,))))

    def cancel(self) -> None:
        """Ask for the end of the whole tree, or of the operation; the end arrives as usual."""
        if self._end is None and not self._cancelled:
            self._cancelled = True
            self._out.clear()
            self._wake()
            self.client.send(encode(Type.CANCEL, self.id))

    async def cancelled(self, grace: float) -> None:
        """Cancel and wait for the end, however often the waiting task is cancelled meanwhile.

        What arrives is thrown away. A keeper that does not end the channel within *grace* seconds, or that
        does not even answer a ping meanwhile, is given up as lost: nothing is known of what runs there.
        """
        self.cancel()
        self.use_sink(_throw_away)
        loop = self.client.loop
        asked, answer = loop.time(), self.client.knock()
        again: asyncio.CancelledError | None = None
        while self._end is None:
            if self.client.away:  # its transport waits for the other side, and says when it gives up
                asked = loop.time()
            answers = answer.done()
            limit = grace if answers else min(grace, ANSWER_S)
            left = asked + limit - loop.time()
            if left <= 0:
                why = "did not end a cancelled request" if answers else "has not answered"
                self.client.give_up(f"the keeper {why} within {limit:g} s")
                break
            handle = loop.call_later(left, self._wake)
            try:
                await self._activity()
            except asyncio.CancelledError as error:
                again = error  # changes nothing: the tree must be gone first
            finally:
                handle.cancel()
        if again is not None:
            raise again


class CommandChannel(Channel):
    """A command: STARTED has been seen when :meth:`~.connection.Connection.spawn` gives it."""

    __slots__ = ()

    async def wait_exit(self) -> Exit:
        end = await self.wait()
        if not isinstance(end, Exit):
            raise ProtocolError("a command ended with REPLY")
        return end


def _started_pid(payload: bytes) -> int:
    if len(payload) == _PID.size:
        tag, size, pid = _PID.unpack(payload)
        if tag == Tag.PID and size == 4:
            return int(pid)
    return Fields.decode(payload).int(Tag.PID)


def _throw_away(stream: int, data: bytes, tail: bool) -> None:
    return None
