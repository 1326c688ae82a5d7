"""Files in and out of a sandbox, by the keeper's own operations: no tool of the image takes part.

Copying in resolves paths inside the episode; copying out never follows a link on this side, so that nothing a
sandbox names can be written outside the place the caller gave. Holes are kept and cost nothing on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from ..errors import ConfigError, SandboxFileError, file_error
from ..keeper.client import KeeperClient, KeeperFailure
from ..keeper.wire import Op, Tag
from ..results import FileInfo
from .command import content_bytes
from .local import CHUNK, Excluded, Local, Tree, extents_of, open_file, read_small, walk

if TYPE_CHECKING:
    from .core import AsyncSandbox

logger = logging.getLogger("rlsandbox")

MAKE_PARENTS, EXCLUSIVE, MAKE_DIR, MAKE_LINK = 2, 4, 8, 16
READ_LINK, READ_SPARSE = 1, 2
PIECE = 4 * CHUNK
MAX_READ = 2 << 30  # bytes
AT_ONCE = 16  # small files in flight: a round trip each would dominate otherwise
_T = TypeVar("_T")
Path_ = str | PathLike[str]
Progress = Callable[[int, int], object]


def error_of(code: int, path: str, sandbox: str) -> SandboxFileError:
    return file_error(code, path, sandbox=sandbox)


def _mapped(error: KeeperFailure, path: str, sandbox: AsyncSandbox) -> BaseException:
    if not error.errno:
        return error
    mapped = file_error(error.errno, path, sandbox=sandbox.id)
    mapped.task = sandbox.task.id
    return mapped


@contextlib.contextmanager
def _at(sandbox: AsyncSandbox, path: str) -> Iterator[None]:
    """Failures of the keeper inside become file errors about *path*."""
    try:
        yield
    except KeeperFailure as error:
        raise _mapped(error, path, sandbox) from None


def _who(sandbox: AsyncSandbox, user: str | None) -> str | None:
    raw = sandbox.user(user)
    return None if raw is None else raw.decode("utf-8", "surrogateescape")


async def read(sandbox: AsyncSandbox, path: Path_, user: str | None) -> bytes:
    full = sandbox.path(path)
    client, who = sandbox.client, _who(sandbox, user)
    with _at(sandbox, full):
        first, reply = await client.collect(Op.READ, path=full, user=who, length=PIECE)
        if len(first) < PIECE:
            return bytes(first)
        parts, at, size = [bytes(first)], PIECE, reply.int(Tag.SIZE)
        if size > MAX_READ:
            # A file of holes costs an episode nothing and would cost the caller all its memory.
            text = f"{full}: {size} bytes are more than read_file() takes into memory (download() does not)"
            raise file_error(errno.EFBIG, full, message=text, sandbox=sandbox.id)
        while at < size:  # holes are not fetched
            start, piece, _ = await read_data(client, full, at, size, who)
            start, piece = min(start, size), piece[: max(size - start, 0)]  # it may grow meanwhile, for ever
            parts += [bytes(start - at), piece]
            at = start + len(piece)
        return b"".join(parts)


async def read_data(
    client: KeeperClient, path: str, at: int, size: int, user: str | None = None, flags: int = 0
) -> tuple[int, bytes, int]:
    """The next piece of data at or after *at*: where it begins, it, the file's size.

    Without any up to the end it is empty and begins there.
    """
    piece, reply = await client.collect(
        Op.READ, path=path, user=user, offset=at, length=PIECE, flags=READ_SPARSE | flags
    )
    size = reply.int(Tag.SIZE, size)
    return (max(reply.int(Tag.OFFSET, at), at) if piece else max(size, at)), bytes(piece), size


async def write(
    sandbox: AsyncSandbox, path: Path_, data: bytes | str, mode: int | None, user: str | None
) -> None:
    full = sandbox.path(path)
    raw = content_bytes(data, "what is written to a file")
    if mode is not None and (not isinstance(mode, int) or not 0 <= mode <= 0o7777):
        raise ConfigError(f"mode must be permission bits such as 0o644, not {mode!r}")
    with _at(sandbox, full):
        await sandbox.client.write(full, raw, mode=mode, user=_who(sandbox, user), flags=MAKE_PARENTS)


async def list_dir(sandbox: AsyncSandbox, path: Path_, user: str | None) -> list[FileInfo]:
    full = sandbox.path(path)
    with _at(sandbox, full):
        found = await sandbox.client.list(full, user=_who(sandbox, user))
    return sorted(found, key=lambda info: info.name)


class _Meter:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)


async def _each(items: Sequence[_T], work: Callable[[_T], Awaitable[None]]) -> None:
    """Work on all items, a few at once; the first error ends the rest and is raised."""
    rows = iter(items)

    async def worker() -> None:
        for item in rows:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


# -- in ---------------------------------------------------------------------------------------------


async def upload(
    sandbox: AsyncSandbox,
    local: Path_,
    remote: Path_,
    exclude: Sequence[str],
    user: str | None,
    progress: Progress | None,
) -> None:
    client = sandbox.client  # of the place it has now: looking at what is to go in takes time
    top, excluded = os.fspath(local), Excluded(exclude)
    info = await asyncio.to_thread(os.stat, top)
    target = sandbox.path(remote)
    who = _who(sandbox, user)
    if not stat.S_ISDIR(info.st_mode):
        if os.fspath(remote).endswith("/") or await _is_dir(client, target, who):
            target = os.path.join(target, os.path.basename(top))
        item = Local(top, "", "file", stat.S_IMODE(info.st_mode), info.st_size)
        await _put(sandbox, client, item, target, who, _Meter(progress, info.st_size))
        return
    items = await asyncio.to_thread(walk, top, excluded)
    meter = _Meter(progress, sum(item.size for item in items))
    await _make_dir(sandbox, client, target, None, who)
    dirs = [(os.path.join(target, item.relative), item.mode) for item in items if item.kind == "dir"]
    for full, mode in dirs:
        await _make_dir(sandbox, client, full, mode | 0o700, who)

    async def put(item: Local) -> None:
        await _put(sandbox, client, item, os.path.join(target, item.relative), who, meter)

    await _each([item for item in items if item.kind != "dir"], put)
    for full, mode in reversed(dirs):
        if mode & 0o700 != 0o700:  # only now: its content had to go in first
            await _make_dir(sandbox, client, full, mode, who)


async def _is_dir(client: KeeperClient, path: str, user: str | None) -> bool:
    try:
        await client.list(path, user=user)
    except KeeperFailure:
        return False
    return True


async def _make_dir(
    sandbox: AsyncSandbox, client: KeeperClient, path: str, mode: int | None, user: str | None
) -> None:
    with _at(sandbox, path):
        await client.write(path, b"", mode=mode, user=user, flags=MAKE_DIR | MAKE_PARENTS)


async def _put(
    sandbox: AsyncSandbox, client: KeeperClient, item: Local, target: str, user: str | None, meter: _Meter
) -> None:
    with _at(sandbox, target):
        if item.kind == "symlink":
            await client.write(target, item.target, user=user, flags=MAKE_LINK | MAKE_PARENTS)
            return
        if item.size <= CHUNK:
            data = await asyncio.to_thread(read_small, item.path, item.size)
            await client.write(target, data, mode=item.mode, user=user, flags=MAKE_PARENTS)
            meter.add(item.size)
            return
        extents = await asyncio.to_thread(extents_of, item.path, item.size)
        if extents == [(0, item.size)]:
            content = _chunks(item.path, 0, item.size, meter)
            await client.write(target, content, mode=item.mode, user=user, flags=MAKE_PARENTS)
            return
        # The owner must be able to write until the last piece is in.
        await client.write(target, b"", mode=item.mode | 0o200, user=user, flags=MAKE_PARENTS)
        at = 0
        for start, stop in extents:
            meter.add(start - at)
            await client.write(target, _chunks(item.path, start, stop, meter), user=user, offset=start)
            at = stop
        await client.write(target, b"", mode=item.mode, user=user, offset=item.size, size=item.size)
        meter.add(item.size - at)


async def _chunks(path: str, start: int, stop: int, meter: _Meter) -> AsyncIterator[bytes]:
    fd = await asyncio.to_thread(open_file, path)
    try:
        at = start
        while at < stop:
            data = await asyncio.to_thread(os.pread, fd, min(CHUNK, stop - at), at)
            if not data:
                return  # it became shorter meanwhile
            yield data
            at += len(data)
            meter.add(len(data))
    finally:
        os.close(fd)


# -- out --------------------------------------------------------------------------------------------


async def download(
    sandbox: AsyncSandbox,
    remote: Path_,
    local: Path_,
    exclude: Sequence[str],
    user: str | None,
    progress: Progress | None,
) -> None:
    client = sandbox.client
    source = sandbox.path(remote)
    who = _who(sandbox, user)
    top, excluded = os.fspath(local), Excluded(exclude)
    if not await _is_dir(client, source, who):
        await _download_file(sandbox, client, source, top, who, progress)
        return
    found: list[tuple[str, FileInfo]] = []
    stack = [""]
    while stack:
        relative = stack.pop()
        full = os.path.join(source, relative) if relative else source
        with _at(sandbox, full):
            infos = await client.list(full, user=who)
        for info in sorted(infos, key=lambda info: info.name):
            if "/" in info.name or info.name in ("", ".", ".."):
                raise file_error(errno.EBADMSG, info.name, sandbox=sandbox.id)
            name = f"{relative}/{info.name}" if relative else info.name
            if not excluded(name):
                found.append((name, info))
                if info.kind == "dir":
                    stack.append(name)
    meter = _Meter(progress, sum(info.size for _, info in found if info.kind == "file"))
    await asyncio.to_thread(os.makedirs, top, exist_ok=True)
    tree = await asyncio.to_thread(Tree, top)
    try:
        dirs = [(name, info) for name, info in found if info.kind == "dir"]
        for name, _ in dirs:
            await asyncio.to_thread(tree.make_dir, name)

        async def get(row: tuple[str, FileInfo]) -> None:
            await _get(sandbox, client, os.path.join(source, row[0]), row[0], row[1], tree, who, meter)

        await _each([row for row in found if row[1].kind in ("file", "symlink")], get)
        for name, info in reversed(dirs):
            await asyncio.to_thread(tree.set_mode, name, info.mode & 0o777)
    finally:
        tree.close()
    for name, info in found:
        if info.kind == "other":
            logger.warning("download: %s is no file, directory or link and was left out", name)


async def _download_file(
    sandbox: AsyncSandbox,
    client: KeeperClient,
    source: str,
    top: str,
    user: str | None,
    progress: Progress | None,
) -> None:
    with _at(sandbox, source):
        info = await client.stat(source, user=user)
        if info.kind == "symlink":  # given as what it points to
            _, reply = await client.collect(Op.READ, path=source, user=user, length=1)
            size, mode = reply.int(Tag.SIZE), reply.int(Tag.FILE_MODE) & 0o7777
            info = FileInfo(name=info.name, size=size, mode=mode, kind="file")
    if await asyncio.to_thread(os.path.isdir, top):
        top = os.path.join(top, os.path.basename(source))
    parent, name = os.path.split(top)
    tree = await asyncio.to_thread(Tree, parent or ".")
    try:
        await _get(sandbox, client, source, name, info, tree, user, _Meter(progress, info.size))
    finally:
        tree.close()


async def _get(
    sandbox: AsyncSandbox,
    client: KeeperClient,
    source: str,
    name: str,
    info: FileInfo,
    tree: Tree,
    user: str | None,
    meter: _Meter,
) -> None:
    with _at(sandbox, source):
        if info.kind == "symlink":
            target, _ = await client.collect(Op.READ, path=source, user=user, flags=READ_LINK)
            await asyncio.to_thread(tree.make_link, name, bytes(target))
            return
        if info.size <= CHUNK:
            data, _ = await client.collect(Op.READ, path=source, user=user, length=info.size or CHUNK)
            await asyncio.to_thread(tree.write, name, bytes(data), info.mode & 0o777)
            meter.add(len(data))
            return
        fd = await asyncio.to_thread(tree.create, name)
        try:
            at, size = 0, info.size
            while at < size:
                start, piece, now = await read_data(client, source, at, size, user)
                size = min(size, now)  # it may grow faster than it is read: its size is what it was
                start, piece = min(start, size), piece[: max(size - start, 0)]
                if piece:
                    await asyncio.to_thread(os.pwrite, fd, piece, start)
                meter.add(start + len(piece) - at)
                at = start + len(piece)
            await asyncio.to_thread(os.ftruncate, fd, size)
            os.fchmod(fd, info.mode & 0o777)
        finally:
            os.close(fd)
