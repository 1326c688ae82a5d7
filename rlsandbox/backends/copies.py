"""Copies of sealed layers outside of the sandboxes that sealed them: what outlives a pod and its node.

Where a backend cannot share layers, a snapshot would be gone with the place that made it. Its files are
streamed here as they are sealed, and from here into whichever sandbox goes on from them. The same content is
kept once: file bodies from 32 KiB on lie in ``blobs/`` under their SHA-256, all else in a skeleton a layer.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from .._paths import age_s, cache, private_directory
from ..errors import NO_ROOM, ConfigError, SandboxError, UnsupportedError

log = logging.getLogger("rlsandbox.backends")

LARGE = 32768
"""Bytes of a file from which its body is a blob of its own."""
_BLOCK, _BATCH, _PIECE = 512, 1 << 20, 1 << 18
_RAW, _BLOB = b"R", b"B"
_YOUNG_S = 60.0
T = TypeVar("T")


class LayerCopies:
    """Copies of one run's layers.

    Args:
        where: a directory, or the URL of an object store that ``fsspec`` knows (``s3://bucket/path``);
            default a directory in the cache of rlsandbox.
        run: copies of other runs in the same place are left alone; those of dead ones are removed.

    Raises:
        ConfigError, UnsupportedError: the place cannot be used.
    """

    def __init__(self, where: str | os.PathLike[str] | None, run: str) -> None:
        self._place = _place(where, run)
        self._layers: dict[str, list[str]] = {}
        """By layer: the blobs that it is made of, as often as they come."""
        self._used: Counter[str] = Counter()
        self._size: dict[str, int] = {}
        self._lock = asyncio.Lock()

    def __contains__(self, layer: object) -> bool:
        return layer in self._layers

    @property
    def bytes(self) -> int:
        """Of all that is kept, each content once."""
        return sum(self._size.values())

    async def save(self, layer: str, tar: AsyncIterable[builtins.bytes]) -> None:
        """Keep *tar* (a layer as a keeper exports it) as *layer*.

        Raises:
            SandboxError: it could not be written (kind ``layer_copy``), or *tar* failed.
        """
        splitter = _Splitter(self._place, self._keep_blob)
        try:
            splitter.begin()
            async with self._lock:  # equal contents of two layers are written one after the other, and once
                waiting = bytearray()
                async for piece in tar:
                    waiting += piece
                    if len(waiting) >= _BATCH:
                        await _in_thread(splitter.feed, builtins.bytes(waiting))
                        waiting.clear()
                await _in_thread(splitter.feed, builtins.bytes(waiting))
                size = await _in_thread(splitter.end, f"layers/{layer}")
                self._size[f"layers/{layer}"] = size
                self._layers[layer] = splitter.blobs
        except ValueError as error:
            await self._undo(splitter)
            raise SandboxError(
                f"layer {layer} could not be copied: its stream is no tar: {error}",
                kind="layer_copy",
                phase="command",
            ) from error
        except OSError as error:
            await self._undo(splitter)
            full = error.errno in NO_ROOM
            raise SandboxError(
                f"layer {layer} could not be copied to {self._place}: {error.strerror or error}",
                kind="layer_copy", phase="command", retryable=False,
                hint="make room there, or choose another place" if full else "",
            ) from error  # fmt: skip
        except BaseException:
            await self._undo(splitter)
            raise

    def _keep_blob(self, temporary: str, digest: str, size: int) -> None:
        name = f"blobs/{digest}"
        if not self._used[name]:
            self._place.publish(temporary, name)
            self._size[name] = size
        self._used[name] += 1

    async def _undo(self, splitter: _Splitter) -> None:
        splitter.close()
        await self._release(splitter.blobs)

    async def read(self, layer: str) -> AsyncGenerator[builtins.bytes, None]:
        """The tar stream that :meth:`save` was given.

        Raises:
            SandboxError: the copy is damaged or cannot be read (kind ``layer_copy``).
        """
        pieces = self._pieces(layer)
        try:
            while piece := await _in_thread(_batch, pieces):
                yield piece
        except (OSError, struct.error) as error:
            raise SandboxError(
                f"the copy of layer {layer} in {self._place} cannot be read: {error}",
                kind="layer_copy", phase="reset", retryable=False,
            ) from error  # fmt: skip
        finally:
            pieces.close()

    def _pieces(self, layer: str) -> Generator[builtins.bytes, None, None]:
        with self._place.open(f"layers/{layer}") as file:
            while kind := file.read(1):
                if kind == _RAW:
                    (length,) = struct.unpack("!I", file.read(4))
                    yield file.read(length)
                    continue
                digest, seen = file.read(32), hashlib.sha256()
                with self._place.open(f"blobs/{digest.hex()}") as blob:
                    while piece := blob.read(_PIECE):
                        seen.update(piece)
                        yield piece
                if seen.digest() != digest:
                    raise OSError(f"blob {digest.hex()} is damaged")

    async def drop(self, layer: str) -> None:
        """Forget a layer; what no other needs is removed."""
        async with self._lock:
            blobs = self._layers.pop(layer, None)
            if blobs is None:
                return
            self._size.pop(f"layers/{layer}", None)
            await _in_thread(self._place.remove, f"layers/{layer}")
            await self._release(blobs)

    async def _release(self, blobs: list[str]) -> None:
        for name in blobs:
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]
                self._size.pop(name, None)
                await _in_thread(self._place.remove, name)

    async def close(self) -> None:
        """Remove all."""
        self._layers.clear()
        await _in_thread(self._place.close)


class _Splitter:
    """A tar stream, piece by piece, into a skeleton and the bodies of large files."""

    def __init__(self, place: _Place, keep: Callable[[str, str, int], None]) -> None:
        self._place, self._keep = place, keep
        self.blobs: list[str] = []
        self._skeleton: IO[bytes] | None = None
        self._blob: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._pending = bytearray()
        self._left = 0  # of the body that passes now
        self._size = 0  # of the blob's file
        self._pax_left = -1
        self._pax = bytearray()
        self._next_size: int | None = None

    def begin(self) -> None:
        self._skeleton = self._place.temporary()

    def feed(self, data: bytes) -> None:
        self._pending += data
        while self._pending:
            if self._left:
                piece = bytes(self._pending[: self._left])
                del self._pending[: len(piece)]
                self._left -= len(piece)
                self._body(piece)
            elif len(self._pending) >= _BLOCK:
                header = bytes(self._pending[:_BLOCK])
                del self._pending[:_BLOCK]
                self._header(header)
            else:
                return

    def _header(self, header: bytes) -> None:
        self._raw(header)
        if not any(header):
            return
        size = _number(header[124:136])
        kind = header[156:157]
        if self._next_size is not None and kind not in (b"x", b"g"):
            size, self._next_size = self._next_size, None
        padded = -(-size // _BLOCK) * _BLOCK
        if kind == b"x":
            self._pax, self._pax_left = bytearray(), size
            self._left = padded
        elif kind in (b"0", b"\0") and size >= LARGE:
            self._blob, self._hash, self._size = self._place.temporary(), hashlib.sha256(), padded
            self._left = padded
        elif kind in (b"0", b"\0", b"g", b"L", b"K", b"S", b"7"):
            self._left = padded

    def _body(self, piece: bytes) -> None:
        if self._blob is not None:
            if piece.count(0) == len(piece):
                self._blob.seek(len(piece), os.SEEK_CUR)  # a hole, as it may well have been
            else:
                self._blob.write(piece)
            self._hash.update(piece)
            if not self._left:
                self._blob_ends()
            return
        self._raw(piece)
        if self._pax_left >= 0:
            self._pax += piece[: self._pax_left]
            self._pax_left -= min(len(piece), self._pax_left)
            if not self._left:
                self._next_size = _pax_size(bytes(self._pax))
                self._pax_left = -1

    def _blob_ends(self) -> None:
        blob, self._blob = self._blob, None
        assert blob is not None
        blob.truncate(self._size)
        blob.close()
        digest = self._hash.digest()
        try:
            self._keep(blob.name, digest.hex(), self._size)
        finally:
            _unlink(blob.name)
        self.blobs.append(f"blobs/{digest.hex()}")
        self._write(_BLOB + digest)

    def _raw(self, piece: bytes) -> None:
        self._write(_RAW + struct.pack("!I", len(piece)) + piece)

    def _write(self, record: bytes) -> None:
        assert self._skeleton is not None
        self._skeleton.write(record)

    def end(self, name: str) -> int:
        """The stream is over; the skeleton is published as *name*. Its bytes.

        Raises:
            SandboxError: the stream ended in mid-file.
        """
        if self._left or self._blob is not None:
            raise SandboxError("the stream of a layer ended too early", kind="layer_copy", phase="command")
        if self._pending:
            self._raw(bytes(self._pending))
            self._pending.clear()
        assert self._skeleton is not None
        size = self._skeleton.tell()
        self._skeleton.close()
        self._place.publish(self._skeleton.name, name)
        return size

    def close(self) -> None:
        for file in (self._skeleton, self._blob):
            if file is not None:
                with contextlib.suppress(OSError):  # what it still holds cannot be written either
                    file.close()
                _unlink(file.name)


def _batch(pieces: Iterator[bytes]) -> bytes:
    """The next pieces, together about as much as travels well; empty at the end."""
    out = bytearray()
    for piece in pieces:
        out += piece
        if len(out) >= _PIECE:
            break
    return bytes(out)


def _number(field: bytes) -> int:
    """A tar header's number: octal, or base 256."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.split(b"\0")[0].strip()
    return int(text, 8) if text else 0


def _pax_size(records: bytes) -> int | None:
    """``size`` of a pax header, when it says one."""
    while records:
        length, _, rest = records.partition(b" ")
        record = rest[: int(length) - len(length) - 2]
        key, _, value = record.partition(b"=")
        if key == b"size":
            return int(value)
        records = records[int(length) :]
    return None


class _Place:
    """A directory of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for part in ("layers", "blobs", "tmp"):
            private_directory(root / part)
        self._lock = open(root / "lock", "w")  # noqa: SIM115 - held while we live
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __str__(self) -> str:
        return str(self.root)

    def temporary(self) -> IO[bytes]:
        return tempfile.NamedTemporaryFile(dir=self.root / "tmp", delete=False)

    def publish(self, temporary: str, name: str) -> None:
        os.replace(temporary, self.root / name)

    def open(self, name: str) -> Any:
        return open(self.root / name, "rb")

    def remove(self, name: str) -> None:
        _unlink(str(self.root / name))

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()


class _Objects(_Place):
    """An object store by way of fsspec; what is written passes through a directory of this machine."""

    def __init__(self, root: Path, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise UnsupportedError(
                f"a store at {url} needs fsspec",
                kind="missing_extra",
                hint="pip install fsspec",
                phase="config",
            ) from error
        super().__init__(root)
        try:
            self._fs, self._base = fsspec.core.url_to_fs(url)
            self._fs.makedirs(self._base, exist_ok=True)
        except Exception as error:
            super().close()
            raise ConfigError(f"the store {url} cannot be used: {type(error).__name__}: {error}") from error
        self._url = url

    def __str__(self) -> str:
        return self._url

    def publish(self, temporary: str, name: str) -> None:
        try:
            self._fs.put_file(temporary, f"{self._base}/{name}")
        finally:
            _unlink(temporary)

    def open(self, name: str) -> Any:
        return self._fs.open(f"{self._base}/{name}", "rb")

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._base}/{name}")

    def close(self) -> None:
        try:
            self._fs.rm(self._base, recursive=True)
        finally:
            super().close()


def _place(where: str | os.PathLike[str] | None, run: str) -> _Place:
    text = None if where is None else os.fspath(where)
    url = text if text is not None and "://" in text else None
    above = Path(text) if text is not None and url is None else cache() / "layer-copies"
    above = private_directory(above.expanduser().absolute())
    _sweep(above)
    root = Path(tempfile.mkdtemp(prefix=f"{run}-", dir=above))
    return _Place(root) if url is None else _Objects(root, f"{url.rstrip('/')}/{root.name}")


def _sweep(above: Path) -> None:
    """Remove what dead runs left: nobody holds their lock any more."""
    for lock in above.glob("*/lock"):
        try:
            if age_s(lock) < _YOUNG_S:
                continue  # perhaps not locked yet
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # it lives, or somebody else was quicker


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """To its end, also when we are cancelled meanwhile: files are in a known state afterwards."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
