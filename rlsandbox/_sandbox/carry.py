"""The work alone, carried into a fresh sandbox: read out first, so that none is held while one is awaited."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING

from ..errors import file_error
from ..keeper.client import AS_KEEPER, KeeperFailure
from ..results import FileInfo
from . import files
from .trust import Trust, within

if TYPE_CHECKING:
    from .core import AsyncSandbox

_IN_MEMORY = 16 << 20
_OPEN = 0o700
"""What its owner needs to put something into a directory."""


@dataclass
class _Piece:
    """One path of the work. *data*: what a link says, or (offset in the file, place in the spool, length)."""

    info: FileInfo
    link: bytes = b""
    data: list[tuple[int, int, int]] = field(default_factory=list)


async def carried_over(sandbox: AsyncSandbox, trust: Trust) -> tuple[str, ...]:
    """Give *sandbox* a fresh place with the work in it and nothing else; the paths that were left behind.

    Raises:
        SandboxFileError: the work cannot be read, or does not fit.
    """
    places = trust.places
    found: Iterable[FileInfo]
    seen = True
    try:
        found = changes = await sandbox.changed()
        if changes.truncated:  # half of the work is not the work
            raise file_error(errno.ELOOP, "/", sandbox=sandbox.id)
    except KeeperFailure as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        seen, found = False, await _everything(sandbox, places)
    changed = sorted(found, key=lambda info: info.name)
    inside = [info for info in changed if within(info.name, places)]
    foreign = [info.name for info in await trust.foreign(inside)]
    work = [info for info in inside if not within(info.name, foreign)]
    outside = [info.name for info in changed if not within(info.name, places) and info.kind != "dir"]
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as spool:
        pieces = [await _read(sandbox, info, spool) for info in work]
        await sandbox.renew()
        if not seen:
            gone = await _gone(sandbox, trust, {info.name for info in changed})
            pieces = [*(_Piece(info) for info in gone), *pieces]
        for piece in pieces:
            await _write(sandbox, piece, spool)
        for piece in reversed(pieces):
            if piece.info.kind == "dir" and piece.info.mode & _OPEN != _OPEN:
                await _make_dir(sandbox, piece.info, piece.info.mode)
    return tuple(name for name in (*foreign, *outside) if "/__pycache__" not in name)


async def _everything(sandbox: AsyncSandbox, places: Iterable[str]) -> list[FileInfo]:
    """What lies in *places*, with whole paths: for where nobody sees what has changed."""
    found: list[FileInfo] = []
    todo: list[str] = []
    try:
        for place in places:
            kind = await kind_of(sandbox, place)
            if kind == "dir":
                todo.append(place)
            elif kind is not None:
                found.append(replace(await sandbox.client.stat(place, flags=AS_KEEPER), name=place))
        while todo:
            top = todo.pop().rstrip("/")
            for info in await sandbox.client.list(top or "/", flags=AS_KEEPER):
                one = replace(info, name=f"{top}/{info.name}")
                found.append(one)
                if one.kind == "dir":
                    todo.append(one.name)
    except KeeperFailure as error:
        raise file_error(error.errno, "/", sandbox=sandbox.id) from None
    return found


async def _gone(sandbox: AsyncSandbox, trust: Trust, kept: set[str]) -> list[FileInfo]:
    """What a fresh sandbox has where the work lies and the work has not: the topmost of it."""
    there = sorted(await _everything(sandbox, trust.places), key=lambda info: info.name)
    missing = [replace(info, kind="deleted") for info in there if info.name not in kept]
    foreign = [info.name for info in await trust.foreign(missing)]
    gone: list[FileInfo] = []
    for info in missing:
        if not within(info.name, foreign) and not (gone and within(info.name, [gone[-1].name])):
            gone.append(info)
    return gone


async def _read(sandbox: AsyncSandbox, info: FileInfo, spool: IO[bytes]) -> _Piece:
    piece = _Piece(info)
    try:
        if info.kind == "symlink":
            piece.link = await sandbox.client.read_link(info.name, flags=AS_KEEPER)
        elif info.kind == "file":
            # With its holes: what an agent made a terabyte long costs what is in it.
            at, size = 0, info.size
            while at < size:
                start, data, size = await files.read_data(
                    sandbox.client, info.name, at, size, flags=AS_KEEPER
                )
                if data:
                    piece.data.append((start, spool.tell(), len(data)))
                    await asyncio.to_thread(spool.write, data)
                at = start + len(data)
    except KeeperFailure as error:
        raise file_error(error.errno, info.name, sandbox=sandbox.id) from None
    return piece


async def _write(sandbox: AsyncSandbox, piece: _Piece, spool: IO[bytes]) -> None:
    client, user = sandbox.client, sandbox.spec.user
    info, path = piece.info, piece.info.name
    try:
        there = await kind_of(sandbox, path)
        if info.kind == "dir":
            if there not in (None, "dir"):
                await client.remove(path, tree=True, flags=AS_KEEPER)
            await _make_dir(sandbox, info, info.mode | _OPEN)  # what lies in it is still to come
            return
        if there is not None:
            await client.remove(path, tree=True, flags=AS_KEEPER)
        if info.kind == "symlink":
            await client.write(path, piece.link, user=user, flags=files.MAKE_LINK | files.MAKE_PARENTS)
        elif info.kind == "file":
            flags = files.MAKE_PARENTS | files.EXCLUSIVE
            await client.write(path, b"", mode=info.mode | 0o200, user=user, flags=flags)
            for offset, place, length in piece.data:
                spool.seek(place)
                data = await asyncio.to_thread(spool.read, length)
                await client.write(path, data, offset=offset, flags=AS_KEEPER)
            await client.write(path, b"", mode=info.mode, offset=info.size, size=info.size, flags=AS_KEEPER)
    except KeeperFailure as error:
        raise file_error(error.errno, path, sandbox=sandbox.id) from None


async def _make_dir(sandbox: AsyncSandbox, info: FileInfo, mode: int) -> None:
    flags = files.MAKE_DIR | files.MAKE_PARENTS
    try:
        await sandbox.client.write(info.name, b"", mode=mode, user=sandbox.spec.user, flags=flags)
    except KeeperFailure as error:
        raise file_error(error.errno, info.name, sandbox=sandbox.id) from None


async def kind_of(sandbox: AsyncSandbox, path: str) -> str | None:
    """What is at *path*; None when nothing is."""
    try:
        return (await sandbox.client.stat(path, flags=AS_KEEPER)).kind
    except KeeperFailure as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
