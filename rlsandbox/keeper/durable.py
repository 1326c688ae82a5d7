"""A keeper's stream over transports that may be cut: the session goes on where it was.

Both sides count the bytes of the inner stream, keep what the other has not confirmed, and send that again
over the next transport. So nothing is lost and nothing arrives twice, whatever the bytes mean: a command is
never run a second time, and a cut never looks like its end. The other side is ``keeper init``
(``src/link.c``); docs/protocol.md, "Links".
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ..errors import SandboxDiedError, SandboxError
from .frames import Fields, encode_fields
from .pairing import Pair
from .records import MAX_RECORD, Kind, Outbox, record, take
from .wire import VERSION, Tag

_U32 = struct.Struct("<I")
CONFIRM_AT = 64 << 10
HIGH, LOW = 1 << 20, 256 << 10
PING_S = 10.0
SILENT_S = 30.0
HELLO_S = 15.0
SETTLE_S = 15.0
"""After a cut so long may pass until what was under way has been said again."""
GRACE_S = 60.0
"""What a keeper waits for a client to come back, unless it was started with another number."""
REST_S = 10.0
"""So long nothing may have been under way before a transport is closed that is not needed."""
KEEP_S = 3600
"""What a keeper is told to wait then; half of it later it is told again."""
_KEEP = _U32.pack(KEEP_S)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 3.0


class Raw(Protocol):
    """One transport. ``recv`` gives ``b""`` at its end; ``why`` says then what is known of it."""

    why: str

    async def send(self, data: bytes) -> None: ...
    async def recv(self) -> bytes: ...
    async def close(self) -> None: ...


Dial = Callable[[], Awaitable[Raw]]
"""Opens a transport. Raises OSError or a retryable SandboxError when it may be tried again."""


class _CutError(Exception):
    """The transport ended; the session did not."""


class _RestError(Exception):
    """The transport was left by us, until it is needed again."""


class Durable(asyncio.Transport):
    """The inner stream as a transport. Make one with :meth:`open`; then :meth:`streams`.

    Args:
        dial: opens a transport, again after each cut.
        token: what proves to the keeper that it is us.
        grace: seconds after a cut for which it is worth trying; the keeper's own, or less.
        rest: asked when nothing is under way: whether the transport may be closed until something is.
    """

    def __init__(
        self, dial: Dial, *, token: str, grace: float = GRACE_S, rest: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self.facts: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.hash = ""
        self.cuts = 0
        """How often the transport was cut and found again."""
        self.rests = 0
        """How often it was closed because nobody needed it."""
        self.resting = False
        self._dial, self._token, self._grace, self._rest_allowed = dial, token, grace, rest
        self._used = 0.0
        """When the inner stream carried something last."""
        self._session = secrets.token_hex(16)
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = None
        self._got = self._told = 0
        self._out = Outbox()
        self._control: deque[tuple[int, bytes]] = deque()
        self._wake = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._paused = self._closing = False
        self._heard = 0.0
        self._attached_at = 0.0
        """Since when the present transport carries; 0: there is none."""
        self._task: asyncio.Task[None] | None = None
        self._handing: asyncio.Task[None] | None = None
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._early = bytearray()
        """Arrived before anybody was there to take it."""
        self._rest = bytearray()
        """Arrived together with ATTACHED."""

    @classmethod
    async def open(
        cls,
        dial: Dial,
        *,
        token: str,
        grace: float = GRACE_S,
        timeout: float | None = None,
        rest: Callable[[], bool] = lambda: False,
    ) -> Durable:
        """Attach to the keeper, trying again while that may help.

        Raises:
            SandboxDiedError: it refused, or could not be reached in *timeout* seconds (*grace* by default).
        """
        self = cls(dial, token=token, grace=grace, rest=rest)
        raw = await self._attach_within(grace if timeout is None else timeout)
        self._task = self._loop.create_task(self._run(raw), name="rlsandbox: a keeper's stream")
        return self

    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(limit=1 << 18, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        self.set_protocol(protocol)
        protocol.connection_made(self)
        return reader, asyncio.StreamWriter(self, protocol, reader, self._loop)

    # -- asyncio.Transport ---------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self._protocol.data_received(early)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol  # type: ignore[no-any-return]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """``socket``: one end of a pair by which the stream can be handed to another process.

        Whoever duplicates it and then aborts this transport has handed it on: from then on the session is
        carried to and from the pair, and ends with it.
        """
        if name != "socket":
            return default
        if self._pair is None:
            self._pair = socket.socketpair()
        return self._pair[0]

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._may_read.is_set()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._out.end - self._out.sent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        self._out.put(bytes(data))
        self._used = self._loop.time()
        self._wake.set()
        if not self._paused and self._out.size > HIGH:
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """End the session from this side. What the keeper runs lives on until its grace is over."""
        if self._pair is not None and not self._closing:
            (theirs, ours), self._pair = self._pair, None
            theirs.close()
            self._handing = self._loop.create_task(self._hand_on(ours), name="rlsandbox: hand a stream on")
        elif not self._closing:
            self._closing = True
            if self._task is not None:
                self._task.cancel()
            self._loop.call_soon(self._lost, None)

    async def _hand_on(self, ours: socket.socket) -> None:
        """Carry the session to and from *ours*; at once its end, when nobody holds the other end."""
        old, self._protocol = self._protocol, None
        if old is not None:
            old.connection_lost(None)
        ours.setblocking(False)
        await self._loop.create_connection(lambda: Pair(self), sock=ours)
        self.resume_reading()

    def fail(self, error: BaseException) -> None:
        """End the session for a reason that somebody else has found out (the place is gone)."""
        if not self._closing:
            self._closing = True
            if self._task is not None:
                self._task.cancel()
            self._lost(error)

    @property
    def away(self) -> bool:
        """Whether the transport is cut, was until a moment ago, or seems to be: nothing is heard of it."""
        now = self._loop.time()
        return not self._attached_at or now - self._attached_at < SETTLE_S or now - self._heard > PING_S + 2

    async def wait_closed(self) -> None:
        """Until nothing of it runs any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _lost(self, error: BaseException | None) -> None:
        self._out.clear()
        for end in self._pair or ():
            end.close()
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    # -- one session, many transports ----------------------------------------------------------------

    async def _run(self, raw: Raw) -> None:
        error: BaseException | None = None
        try:
            while True:
                try:
                    rest = await self._serve(raw)
                finally:
                    self._attached_at = 0.0
                    await asyncio.shield(raw.close())
                limit = self._grace
                if not rest:
                    self.cuts += 1
                elif not await self._until_needed():
                    limit = KEEP_S / 3  # nobody waits for it
                raw = await self._attach_within(limit)
        except asyncio.CancelledError:
            raise
        except (SandboxError, OSError) as caught:
            error = caught
        except Exception as caught:
            error = SandboxDiedError(f"its stream broke: {type(caught).__name__}: {caught}")
        if not self._closing:
            self._closing = True
            self._lost(error)

    async def _until_needed(self) -> bool:
        """False when nobody needed it for so long that the keeper must be told again to wait."""
        self.rests += 1
        self.resting = True
        try:
            async with asyncio.timeout(KEEP_S / 2):
                while not self._out:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return False
        finally:
            self.resting = False
        return True

    async def _attach_within(self, limit: float) -> Raw:
        deadline = self._loop.time() + limit
        delay, last = _FIRST_DELAY_S, ""
        while True:
            left = deadline - self._loop.time()
            try:
                async with asyncio.timeout(max(0.001, min(left, HELLO_S))):
                    return await self._attach()
            except SandboxError as error:
                if not error.retryable or isinstance(error, SandboxDiedError):
                    raise
                last = error.message
            except TimeoutError:
                last = "no answer in time"
            except (OSError, _CutError) as error:
                last = str(error)
            left = deadline - self._loop.time()
            if left <= 0:
                raise SandboxDiedError(
                    f"its keeper could not be reached for {limit:g} s: {last or 'no answer'}",
                    kind="unreachable",
                )
            # Full jitter: after an outage thousands of streams come back at once.
            await asyncio.sleep(min(left, random.uniform(0, delay)))
            delay = min(delay * 2, _LONGEST_DELAY_S)

    async def _attach(self) -> Raw:
        raw = await self._dial()
        try:
            hello = {"version": VERSION, "token": self._token, "kind": self._session, "offset": self._got}
            await raw.send(record(Kind.ATTACH, encode_fields(hello), 0))
            buffer = bytearray()
            while (whole := take(buffer)) is None:
                piece = await raw.recv()
                if not piece:
                    raise _CutError(raw.why or "the stream ended")
                buffer += piece
            kind, _, payload = whole
            fields = Fields.decode(payload)
            if kind in (Kind.REFUSED, Kind.ENDED):
                raise SandboxDiedError(
                    f"its keeper refused: {fields.text(Tag.TEXT)}", kind=fields.text(Tag.KIND) or "refused"
                )
            if kind != Kind.ATTACHED:
                raise SandboxDiedError(f"its keeper broke the protocol: record {kind}")
            self._attached(fields)
            self._rest = buffer
        except BaseException:
            await asyncio.shield(raw.close())
            raise
        return raw

    def _attached(self, fields: Fields) -> None:
        taken = fields.int(Tag.OFFSET)
        if not self._out.base <= taken <= self._out.end:
            raise SandboxDiedError(f"its keeper took {taken} bytes of {self._out.base} to {self._out.end}")
        self._out.rewind(taken)
        self._resume_writing()
        self._control.clear()
        self._told = self._got
        self._heard = self._attached_at = self._loop.time()
        self.hash = fields.text(Tag.HASH)
        pairs = (text.partition("=") for text in fields.texts(Tag.FACT))
        self.facts = {name: value for name, _, value in pairs} | {"mode": fields.text(Tag.MODE)}
        self.env = {name: value for name, _, value in (text.partition("=") for text in fields.texts(Tag.ENV))}
        self._wake.set()

    def _resume_writing(self) -> None:
        if self._paused and self._out.size < LOW:
            self._paused = False
            if self._protocol is not None:
                self._protocol.resume_writing()

    async def _serve(self, raw: Raw) -> bool:
        """Carry bytes until the transport is cut; True: until it is not needed any more."""
        tasks = {
            self._loop.create_task(self._read(raw), name="rlsandbox: read from a keeper"),
            self._loop.create_task(self._write(raw), name="rlsandbox: write to a keeper"),
            self._loop.create_task(self._watch(), name="rlsandbox: watch a keeper"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        rest = False
        for task in done:
            try:
                task.result()
            except _RestError:
                rest = True
            except (_CutError, OSError):
                pass
        return rest

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if self._loop.time() - self._heard > SILENT_S:
                raise _CutError("no answer to pings")
            self._control.append((Kind.LEAVE, _KEEP) if self._may_rest() else (Kind.PING, b"p"))
            self._wake.set()

    def _may_rest(self) -> bool:
        """Whether all that was said has arrived, and nobody waits for an answer."""
        return (
            not self._out
            and self._loop.time() - self._used >= REST_S
            and not getattr(self._protocol, "waited_for", True)
            and self._rest_allowed()
        )

    async def _write(self, raw: Raw) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._control or self._out.unsent or self._got - self._told >= CONFIRM_AT:
                out = []
                leave = False
                while self._control:
                    kind, payload = self._control.popleft()
                    if kind == Kind.LEAVE and self._out.unsent:
                        continue  # it is needed again
                    leave = leave or kind == Kind.LEAVE
                    out.append(record(kind, payload, self._got))
                out += (record(Kind.BYTES, payload, self._got) for payload in self._out.pop(MAX_RECORD))
                if not out:
                    out.append(record(Kind.CONFIRM, b"", self._got))
                self._told = self._got
                await raw.send(b"".join(out))
                if leave:
                    raise _RestError

    async def _read(self, raw: Raw) -> None:
        buffer, self._rest = self._rest, bytearray()
        while True:
            while (whole := take(buffer)) is not None:
                self._take_in(*whole)
            if not self._may_read.is_set():
                await self._may_read.wait()
            piece = await raw.recv()
            if not piece:
                raise _CutError(raw.why or "the stream ended")
            self._heard = self._loop.time()
            buffer += piece

    def _take_in(self, kind: int, confirmed: int, payload: bytes) -> None:
        if not confirmed <= self._out.sent:
            raise SandboxDiedError("its keeper broke the protocol: it confirmed what was not sent")
        self._out.confirm(confirmed)
        self._resume_writing()
        if kind == Kind.BYTES:
            self._got += len(payload)
            self._used = self._loop.time()
            if self._got - self._told >= CONFIRM_AT:
                self._wake.set()
            if self._protocol is None:
                self._early += payload
            else:
                self._protocol.data_received(payload)
        elif kind in (Kind.ENDED, Kind.REFUSED):
            fields = Fields.decode(payload)
            raise SandboxDiedError(fields.text(Tag.TEXT), kind=fields.text(Tag.KIND) or "ended")
        elif kind not in (Kind.CONFIRM, Kind.PONG):
            raise SandboxDiedError(f"its keeper broke the protocol: record {kind}")
