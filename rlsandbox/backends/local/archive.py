"""Reads images: an OCI layout (directory or tar) or a ``docker save`` archive, compressed or not.

Promises: every digest that the image states is checked, blobs are found by digest or by a name inside the
archive only, and whatever is wrong is one :class:`ImageError` that says what and where. Runs in the worker
process.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from ...errors import ImageError

BLOCK = 1 << 20


@dataclass(frozen=True)
class LayerBlob:
    """One layer of an image: where its bytes are and what they must hash to."""

    name: str
    diff_id: str
    digest: str | None  # of the bytes as stored; None in a docker archive, which only states diff ids


class _Member(tarfile.TarInfo):
    """A header whose size is negative sends older tarfile modules round for ever."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise ValueError("a member has a negative size")
        return super()._block(count)  # type: ignore[misc, no-any-return, unused-ignore]


def open_tar(path: Path, shown: str) -> tarfile.TarFile:
    """The plain tar at *path* with all of its members read, whole to its end.

    tarfile takes a broken header for the end of the archive; here it is an error.
    """
    try:
        tar = tarfile.open(path, "r:", tarinfo=_Member)  # noqa: SIM115 - the caller's, when all is well
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise ImageError(f"{shown} is no readable tar archive: {error or 'it is cut off'}") from error
    try:
        members = tar.getmembers()
        _check_whole(tar, members, path, shown)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        tar.close()
        raise ImageError(f"{shown} is no readable tar archive: {error or 'it is cut off'}") from error
    except BaseException:
        tar.close()
        raise
    return tar


def _check_whole(tar: tarfile.TarFile, members: Sequence[tarfile.TarInfo], path: Path, shown: str) -> None:
    last = members[-1].name if members else "its start"
    with open(path, "rb") as file:
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise ImageError(f"{shown} is damaged or cut off after {last!r}")
    size = path.stat().st_size
    for member in members:
        holes = holes_of(member)
        stored = sum(part for _, part in holes) if holes is not None else member.size
        if member.isreg() and member.offset_data + stored > size:
            raise ImageError(f"{shown} is cut off in the middle of {member.name!r}")


def holes_of(member: tarfile.TarInfo) -> list[tuple[int, int]] | None:
    """(offset, size) of what a sparse member stores; None for an ordinary one."""
    found: list[tuple[int, int]] | None = getattr(member, "sparse", None)
    return found


class Store(Protocol):
    """A bag of named blobs."""

    def open(self, name: str) -> IO[bytes]: ...
    def names(self) -> Sequence[str]: ...


class DirectoryStore:
    """Blobs of an OCI layout directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> IO[bytes]:
        root = self._root.resolve()
        try:
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise ImageError(f"{self._root}: {name} lies outside the image")
            # Not blocking: a fifo would wait for ever, a device might never end.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ImageError(f"{self._root}: {name} is missing; the layout is not whole") from None
        except (OSError, RuntimeError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise ImageError(f"{self._root}: {name} cannot be read: {said}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImageError(f"{self._root}: {name} is no file")
        return open(fd, "rb")

    def names(self) -> Sequence[str]:
        return os.listdir(self._root)


class TarStore:
    """Blobs of a tar archive that lies uncompressed in a file."""

    def __init__(self, path: Path, shown: str) -> None:
        self._shown = shown
        self._tar = open_tar(path, shown)
        self._members = {posixpath.normpath(member.name): member for member in self._tar.getmembers()}

    def open(self, name: str) -> IO[bytes]:
        name = posixpath.normpath(name)
        for _ in range(8):  # old docker writes a layer that it has written before as a link to it
            member = self._members.get(name)
            if member is None or not member.issym():
                break
            name = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        data = self._tar.extractfile(member) if member is not None and not member.issym() else None
        if data is None:
            raise ImageError(f"{self._shown}: {name} is missing; the archive is cut off or no image")
        return data

    def names(self) -> Sequence[str]:
        return list(self._members)


def decompressed(raw: IO[bytes], what: str) -> IO[bytes]:
    """*raw* without its compression, recognised by its first bytes (media types lie)."""
    head = raw.read(6)
    raw.seek(-len(head), os.SEEK_CUR)
    if head.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return _zstd(raw, what)
    if head.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    if head.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(raw)
    return raw


def _zstd(raw: IO[bytes], what: str) -> IO[bytes]:
    try:
        from compression.zstd import ZstdFile  # type: ignore[import-not-found, unused-ignore]

        return ZstdFile(raw)  # type: ignore[no-any-return, unused-ignore]
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ImageError(
            f"{what} is compressed with zstd, which this Python cannot read", hint="pip install zstandard"
        ) from None
    reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return reader


class _Hashing:
    """A reader that hashes what passes; the decompressors read from it."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self._seen = 0  # bytes hashed so far: a decompressor may look at the first ones twice

    def read(self, size: int = -1) -> bytes:
        at = self._raw.tell()
        data = self._raw.read(size)
        self._hash.update(data[max(0, self._seen - at) :])
        self._seen = max(self._seen, at + len(data))
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    @property
    def closed(self) -> bool:
        return False

    def digest(self) -> str:
        while self.read(BLOCK):
            pass
        return "sha256:" + self._hash.hexdigest()


def unreadable(image: object, error: OSError | RuntimeError) -> ImageError:
    """No permission, a name too long, no such user's home: the same again would be no better."""
    why = error.strerror if isinstance(error, OSError) else error
    return ImageError(f"image {str(image)!r:.300} cannot be read: {why}", kind="image_unreadable")


@contextmanager
def open_store(path: Path, scratch: Path) -> Iterator[Store]:
    """The blobs at *path*; a compressed archive is first unpacked into *scratch*."""
    if path.is_dir():
        yield DirectoryStore(path)
        return
    if path.exists() and not path.is_file():
        raise ImageError(f"image {str(path)!r} is neither a directory nor a file")
    try:
        raw = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise ImageError(f"image {str(path)!r}: no such file or directory") from None
    except OSError as error:
        raise unreadable(path, error) from None
    with raw:
        plain = decompressed(raw, str(path))
        if plain is raw:
            yield TarStore(path, str(path))
            return
        unpacked = scratch / "archive.tar"
        with open(unpacked, "wb") as out:
            _copy(plain, out, str(path), _room(scratch))
    try:
        yield TarStore(unpacked, str(path))
    finally:
        unpacked.unlink()


def fetch_layer(store: Store, layer: LayerBlob, out: Path, shown: str) -> None:
    """Write the plain tar of *layer* to *out*; both digests have been checked when this returns."""
    what = f"{shown}: layer {layer.name}"
    with store.open(layer.name) as blob:
        stored = _Hashing(blob)
        plain = decompressed(stored, what)  # type: ignore[arg-type]
        with open(out, "wb") as file:
            diff_id = _copy(plain, file, what, _room(out.parent))
        digest = stored.digest()
    if layer.digest is not None and digest != layer.digest:
        raise ImageError(f"{what} is damaged: its content hashes to {digest}")
    if diff_id != layer.diff_id:
        raise ImageError(f"{what} is damaged: it should hash to {layer.diff_id} and hashes to {diff_id}")


def _room(directory: Path) -> int:
    """Bytes that may be written: a compressed bomb must not fill the disk to the last byte."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize * 9 // 10


def _copy(source: IO[bytes], out: IO[bytes], what: str, room: int) -> str:
    state = hashlib.sha256()
    written = 0
    try:
        while block := source.read(BLOCK):
            written += len(block)
            if written > room:
                raise ImageError(f"{what} is larger than the room on this disk ({room >> 20} MiB)")
            state.update(block)
            out.write(block)
    except ImageError:
        raise
    except Exception as error:  # each decompressor has errors of its own
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the archive
        raise ImageError(f"{what} is cut off or damaged: {error}") from error
    return "sha256:" + state.hexdigest()
