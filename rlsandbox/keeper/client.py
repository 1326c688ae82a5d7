"""What one can ask of a keeper, over a :class:`~.connection.Connection`.

Promises: nothing is ever sent twice; the loss of the stream turns every waiting call into
:class:`SandboxDiedError` at once; a cancelled request is over (its processes gone) before the cancellation
goes on; what is held in memory is bounded by what callers take. It refuses a keeper that breaks the protocol:
the stream ends, the sandbox is lost.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Any

from ..errors import SandboxError
from ..results import FileInfo
from .channel import Channel, CommandChannel, Exit, Sink
from .connection import CANCEL_GRACE_S, Connection, KeeperFailure, Welcome, _ignore, facts_of
from .frames import Entry, Fields, decode_entries, encode_fields
from .wire import Op, Tag

_KINDS: dict[str, Any] = {"f": "file", "d": "dir", "l": "symlink", "o": "other", "x": "deleted"}
AS_KEEPER = 256
"""A flag for files: done by the keeper, through no link, where commands are one user's; elsewhere nothing."""
_NO_SUCH_FILE = frozenset({2, 20, 40, 21, 22})  # ENOENT ENOTDIR ELOOP EISDIR EINVAL: no regular file there


Look = Callable[[], Awaitable[list[tuple[str, str]]]]
"""Waits for the answer of an INSPECT that is under way."""


class Changes(list[FileInfo]):
    """The changed paths an answer held.

    Attributes:
        total: how many there are in truth.
        truncated: there are more still, in directories too deep (over 1,000) to be looked into.
        bytes: what they take on the disk.
    """

    total: int
    bytes: int = 0
    truncated: bool = False


class KeeperClient(Connection):
    """A sandbox's keeper. Make one with ``await KeeperClient.open(reader, writer)``."""

    async def reset(self, layer: str = "", flags: int = 0) -> dict[str, int]:
        """End the episode, throw its upper layer away, start the next on *layer*. Nanoseconds by step."""
        reply = await self.call(Op.RESET, layer=layer, flags=flags)
        return {k: int(v) for k, v in facts_of(reply).items() if v.isdigit()}

    async def reset_and_look(self, layer: str = "") -> Look:
        """:meth:`reset`, with an :meth:`inspect` asked for in the same breath: no way to and fro lies between
        the two. Gives what waits for the second answer."""
        reset = self.request(encode_fields({"op": Op.RESET, "layer": layer, "flags": 0}), sink=_ignore)
        data = bytearray()
        look = self.request(encode_fields({"op": Op.INSPECT}), sink=lambda _, piece, __: data.extend(piece))
        await self.finish(reset)

        async def looked() -> list[tuple[str, str]]:
            await self.finish(look)
            return _facts(data)

        return looked

    async def inspect(self) -> list[tuple[str, str]]:
        """Facts about the episode from outside it, as (kind, text)."""
        data, _ = await self.collect(Op.INSPECT)
        return _facts(data)

    async def changes(
        self, path: str = "/", *, limit: int | None = None, since: str | None = None
    ) -> Changes:
        """What differs under *path* from the layers below; deletions have kind ``deleted``.

        *since*: from that layer (``""``: the base) and what is below it, though others were sealed on top.
        """
        data, reply = await self.collect(Op.CHANGES, path=path, limit=limit, layer=since)
        told: dict[str, FileInfo] = {}
        for entry in decode_entries([bytes(data)]):  # what several layers have is told once for each
            info = file_info(entry)
            told.setdefault(info.name, info)
        found = Changes(told.values())
        found.total = reply.int(Tag.COUNT, len(found)) if since is None else len(found)
        found.truncated = bool(reply.int(Tag.FLAGS))
        found.bytes = reply.int(Tag.BYTES)
        return found

    async def seal(self, layer: str, *, kill: bool = False) -> int:
        """Seal the upper layer under a name; its bytes. FAIL EBUSY when processes run and not *kill*."""
        reply = await self.call(Op.SEAL, layer=layer, flags=1 if kill else 0)
        return reply.int(Tag.BYTES)

    async def drop_layer(self, layer: str) -> None:
        await self.call(Op.DROP_LAYER, layer=layer)

    async def pause(self) -> None:
        await self.call(Op.PAUSE)

    async def resume(self) -> None:
        await self.call(Op.RESUME)

    async def outside_read(
        self, path: str, *, baseline: bool = False, limit: int | None = None, since: str | None = None
    ) -> bytes | None:
        """Content seen from outside the episode (or of the layers below it); None when there is none.

        In mode ``replace`` there is no outside: the keeper reads it; of a baseline nothing is known (None).
        """
        how: dict[str, Any] = {"flags": 1 if baseline else 0, "layer": since if baseline else None}
        op = Op.OUTSIDE_READ
        if self.welcome.mode == "replace":
            if baseline:
                return None
            op, how = Op.READ, {"flags": AS_KEEPER}
        try:
            data, _ = await self.collect(op, path=path, length=limit, **how)
        except KeeperFailure as error:
            if error.errno in _NO_SUCH_FILE:
                return None
            raise
        return bytes(data)

    async def outside_remove(self, path: str, *, since: str | None = None) -> None:
        await self.call(Op.OUTSIDE_REMOVE, path=path, layer=since)

    async def kill_all(self) -> None:
        """End every process of the episode but its first."""
        await self.call(Op.KILL_ALL)

    async def export(self, layer: str | None = None) -> AsyncGenerator[bytes, None]:
        """The upper layer as a tar stream; or a sealed one, with all layers below it in one."""
        what: dict[str, Any] = {} if layer is None else {"layer": layer, "flags": 1}
        channel = self.request(encode_fields({"op": Op.EXPORT, **what}))
        try:
            while (item := await channel.recv()) is not None:
                yield item[1]
        finally:
            if not channel.ended:
                await channel.cancelled(CANCEL_GRACE_S)

    async def bring_layer(
        self, layer: str, source: KeeperClient, arriving: Callable[[], object] = lambda: None
    ) -> int:
        """Bring a sealed layer here from another keeper, by way of us; its bytes. Ends the episode.

        *arriving* is called as more of it is on its way.

        Raises:
            SandboxError: *source* could not give it (kind ``layer_copy``): another one may.
        """
        await self.reset("")
        tar = _from(source, layer)
        try:
            return await self.import_layer(layer, told(tar, arriving))
        finally:
            await tar.aclose()

    async def import_layer(self, layer: str, tar: bytes | AsyncIterable[bytes]) -> int:
        """Make a sealed layer of a tar stream; its bytes."""
        return (await self.call(Op.IMPORT, layer=layer, content=tar)).int(Tag.BYTES)

    async def read(
        self, path: str, *, offset: int | None = None, length: int | None = None, user: str | None = None
    ) -> bytes:
        """A regular file's bytes, as the episode sees it."""
        data, _ = await self.collect(Op.READ, path=path, offset=offset, length=length, user=user)
        return bytes(data)

    async def write(
        self,
        path: str,
        content: bytes | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        user: str | None = None,
        flags: int = 0,
        offset: int | None = None,
        size: int | None = None,
    ) -> int:
        """Write a file; *flags* and the rest as in docs/protocol.md. How many bytes went in."""
        reply = await self.call(
            Op.WRITE,
            content=content,
            path=path,
            file_mode=mode,
            user=user,
            flags=flags or None,
            offset=offset,
            size=size,
        )
        return reply.int(Tag.SIZE)

    async def read_link(self, path: str, *, user: str | None = None, flags: int = 0) -> bytes:
        """A link's target."""
        data, _ = await self.collect(Op.READ, path=path, user=user, flags=1 | flags)
        return bytes(data)

    async def remove(self, path: str, *, tree: bool = False, user: str | None = None, flags: int = 0) -> None:
        """Remove a file, link or empty directory, or with *tree* all of it; links are never followed."""
        await self.call(Op.REMOVE, path=path, user=user, flags=(1 if tree else 0) | flags or None)

    async def list(self, path: str, *, user: str | None = None, flags: int = 0) -> list[FileInfo]:
        data, _ = await self.collect(Op.LIST, path=path, user=user, flags=flags or None)
        return [file_info(e) for e in decode_entries([bytes(data)])]

    async def stat(self, path: str, *, user: str | None = None, flags: int = 0) -> FileInfo:
        data, _ = await self.collect(Op.STAT, path=path, user=user, flags=flags or None)
        return next(file_info(e) for e in decode_entries([bytes(data)]))


async def told(tar: AsyncIterable[bytes], arriving: Callable[[], object]) -> AsyncGenerator[bytes, None]:
    """*tar*, with *arriving* called for each piece. Who made *tar* closes it."""
    async for piece in tar:
        arriving()
        yield piece


class HeldClient(KeeperClient):
    """One holder's way to a keeper that others hold after it: the same connection, until it is parted with.

    What a holder still does then (a policy's thread that nobody can stop, a transfer of many files) must not
    reach the episode of the next one.
    """

    __slots__ = ("_parted",)

    def __init__(self, client: KeeperClient) -> None:
        self.__dict__ = client.__dict__  # one connection, one state
        self._parted: Callable[[], SandboxError] | None = None

    def part(self, why: Callable[[], SandboxError]) -> None:
        """Every request from now on raises *why*, and so does one under way that fails."""
        if self._parted is None:
            self._parted = why

    def request(self, payload: bytes, *, sink: Sink | None = None) -> Channel:
        if self._parted is not None:
            raise self._parted()
        return super().request(payload, sink=sink)

    def command(self, argv: Sequence[str | bytes], **how: Any) -> CommandChannel:
        if self._parted is not None:
            raise self._parted()
        return super().command(argv, **how)

    async def finish(self, channel: Channel, timeout: float | None = None) -> Fields:
        try:
            return await super().finish(channel, timeout)
        except KeeperFailure:
            if self._parted is not None:  # its episode was ended under it
                raise self._parted() from None
            raise


async def _from(source: KeeperClient, layer: str) -> AsyncGenerator[bytes, None]:
    """A layer of another sandbox, whose failures are not this one's."""
    tar = source.export(layer)
    try:
        async for piece in tar:
            yield piece
    except SandboxError as error:
        raise SandboxError(
            f"layer {layer} could not be read from sandbox {source.member}: {error.message}",
            kind="layer_copy", phase="reset", retryable=True, sandbox=source.member,
        ) from error  # fmt: skip
    finally:
        await tar.aclose()


def _facts(data: bytearray) -> list[tuple[str, str]]:
    lines = data.decode("ascii", "backslashreplace").splitlines()
    return [(kind, text) for kind, _, text in (line.partition("\t") for line in lines) if kind]


def file_info(entry: Entry) -> FileInfo:
    return FileInfo(
        name=entry.name.decode("utf-8", "surrogateescape"),
        size=entry.size,
        mode=entry.mode & 0o7777,
        kind=_KINDS[entry.kind],
        mtime_ns=entry.mtime_ns,
        uid=entry.uid,
        gid=entry.gid,
    )


__all__ = [
    "Changes",
    "CommandChannel",
    "Exit",
    "HeldClient",
    "KeeperClient",
    "KeeperFailure",
    "Welcome",
    "file_info",
]
