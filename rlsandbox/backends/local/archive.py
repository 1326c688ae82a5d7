"""Reads images: an OCI layout (directory or tar) or a ``docker save`` archive, compressed or not.

Promises: every digest that the image states is checked, blobs are found by digest or by a name inside the
archive only, and whatever is wrong is one :class:`ImageError` that says what and where. Runs in the worker
process.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from ...errors import ImageError

BLOCK = 1 << 20
MAX_JSON = 32 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class LayerBlob:
    """One layer of an image: where its bytes are and what they must hash to."""

    name: str
    diff_id: str
    digest: str | None  # of the bytes as stored; None in a docker archive, which only states diff ids


@dataclass(frozen=True)
class ImageInfo:
    """What an image says about itself."""

    config: dict[str, Any]
    layers: tuple[LayerBlob, ...]


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
        try:
            return open(self._root / name, "rb")
        except FileNotFoundError:
            raise ImageError(f"{self._root}: {name} is missing; the layout is not whole") from None

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


@contextmanager
def open_store(path: Path, scratch: Path) -> Iterator[Store]:
    """The blobs at *path*; a compressed archive is first unpacked into *scratch*."""
    if path.is_dir():
        yield DirectoryStore(path)
        return
    try:
        with open(path, "rb") as raw:
            plain = decompressed(raw, str(path))
            if plain is raw:
                yield TarStore(path, str(path))
                return
            unpacked = scratch / "archive.tar"
            with open(unpacked, "wb") as out:
                _copy(plain, out, str(path), _room(scratch))
    except FileNotFoundError:
        raise ImageError(f"image {str(path)!r}: no such file or directory") from None
    try:
        yield TarStore(unpacked, str(path))
    finally:
        unpacked.unlink()


def read_info(store: Store, shown: str, ref: str | None, machine: str) -> ImageInfo:
    """What the image in *store* is made of; *ref* picks one of several, *machine* one of its platforms."""
    names = store.names()
    if "manifest.json" in names and (ref is not None or "index.json" not in names):
        config_name, layer_names = _docker_manifest(_json(store, "manifest.json", shown), shown, ref)
        raw = _bytes(store, config_name, shown)
        stem = posixpath.basename(config_name).removesuffix(".json")
        if re.fullmatch(r"[0-9a-f]{64}", stem):
            _check("sha256:" + stem, raw, f"{shown}: {config_name}")
        digests: list[str | None] = [None] * len(layer_names)
    elif "index.json" in names:
        manifest = _oci_manifest(store, _json(store, "index.json", shown), shown, ref, machine)
        raw = _blob(store, manifest.get("config"), shown)
        layers = manifest.get("layers")
        if not isinstance(layers, list):
            raise ImageError(f"{shown}: the manifest names no layers")
        digests = [_digest_of(layer, shown) for layer in layers]
        layer_names = [_blob_name(digest) for digest in digests if digest]
    else:
        raise ImageError(
            f"{shown} is no image: neither index.json (OCI layout) nor manifest.json (docker save) is in it"
        )
    config = _parse(raw, f"{shown}: the image's config")
    diff_ids = config.get("rootfs", {}).get("diff_ids") if isinstance(config.get("rootfs"), dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != len(layer_names):
        raise ImageError(
            f"{shown}: the config lists {len(diff_ids or [])} layers, the manifest {len(layer_names)}"
        )
    for diff_id in diff_ids:
        if not isinstance(diff_id, str) or not _DIGEST.fullmatch(diff_id):
            raise ImageError(f"{shown}: {diff_id!r} is no sha256 digest")
    wanted = _ARCHITECTURES.get(machine, machine)
    if config.get("architecture") not in (None, "", wanted):
        raise ImageError(f"{shown} is made for {config['architecture']}, this machine is {wanted}")
    blobs = zip(layer_names, diff_ids, digests, strict=True)
    return ImageInfo(config, tuple(LayerBlob(*blob) for blob in blobs))


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


def chain_ids(layers: Sequence[LayerBlob]) -> list[str]:
    """The OCI chain id of each layer (hex): equal exactly when it and all below are equal."""
    chain: list[str] = []
    for layer in layers:
        text = f"sha256:{chain[-1]} {layer.diff_id}" if chain else layer.diff_id
        chain.append(
            hashlib.sha256(text.encode()).hexdigest() if chain else layer.diff_id.removeprefix("sha256:")
        )
    return chain


def _docker_manifest(data: Any, shown: str, ref: str | None) -> tuple[str, list[str]]:
    images = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    tags = [tag for item in images for tag in item.get("RepoTags") or []]
    if ref is not None:
        images = [item for item in images if ref in (item.get("RepoTags") or [])]
    if len(images) != 1:
        _pick(shown, ref, tags, len(images))
    config, layers = images[0].get("Config"), images[0].get("Layers")
    if not isinstance(config, str) or not isinstance(layers, list):
        raise ImageError(f"{shown}: manifest.json names no config or no layers")
    return config, [str(layer) for layer in layers]


def _oci_manifest(store: Store, index: Any, shown: str, ref: str | None, machine: str) -> dict[str, Any]:
    for _ in range(4):  # an index may point to another one, per platform
        entries = index.get("manifests") if isinstance(index, dict) else None
        if entries is None:
            return index if isinstance(index, dict) else {}
        entries = [entry for entry in entries if isinstance(entry, dict)]
        names = {_ref_name(entry): entry for entry in entries if _ref_name(entry)}
        if ref is not None and names:
            if ref not in names:
                _pick(shown, ref, list(names), 0)
            entries, ref = [names[ref]], None
        wanted = [entry for entry in entries if _platform_fits(entry, machine)]
        if len(wanted) != 1:
            if entries and not wanted:
                raise ImageError(f"{shown} holds no image for {_ARCHITECTURES.get(machine, machine)}")
            _pick(shown, ref, list(names), len(wanted))
        index = _parse(_blob(store, wanted[0], shown), f"{shown}: a manifest")
    raise ImageError(f"{shown}: indexes are nested too deep")


def _ref_name(entry: dict[str, Any]) -> str:
    notes = entry.get("annotations")
    return str(notes.get("org.opencontainers.image.ref.name") or "") if isinstance(notes, dict) else ""


def _platform_fits(entry: dict[str, Any], machine: str) -> bool:
    platform = entry.get("platform")
    if not isinstance(platform, dict):
        return True
    return (
        platform.get("architecture") == _ARCHITECTURES.get(machine, machine) and platform.get("os") == "linux"
    )


def _pick(shown: str, ref: str | None, names: list[str], count: int) -> None:
    known = ", ".join(names) or "none has a name"
    if ref is not None:
        raise ImageError(f"{shown} holds no image {ref!r}; it holds: {known}")
    if count == 0:
        raise ImageError(f"{shown} holds no image")
    raise ImageError(
        f"{shown} holds {count} images ({known})", hint=f"name one: {shown}#{(names or ['NAME'])[0]}"
    )


def _digest_of(entry: Any, shown: str) -> str:
    digest = entry.get("digest") if isinstance(entry, dict) else None
    # Checked before it becomes part of a path.
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ImageError(f"{shown}: {digest!r} is no sha256 digest")
    return digest


def _blob_name(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")


def _blob(store: Store, entry: Any, shown: str) -> bytes:
    digest = _digest_of(entry, shown)
    data = _bytes(store, _blob_name(digest), shown)
    _check(digest, data, f"{shown}: {_blob_name(digest)}")
    return data


def _check(digest: str, data: bytes, what: str) -> None:
    found = "sha256:" + hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ImageError(f"{what} is damaged: its content hashes to {found}")


def _bytes(store: Store, name: str, shown: str) -> bytes:
    with store.open(name) as blob:
        data = blob.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise ImageError(f"{shown}: {name} is over {MAX_JSON >> 20} MiB, too long for what it should be")
    return data


def _json(store: Store, name: str, shown: str) -> Any:
    data = _bytes(store, name, shown)
    try:
        return json.loads(data)
    except ValueError as error:
        raise ImageError(f"{shown}: {name} is no JSON: {error}") from error


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ImageError(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ImageError(f"{what} is no JSON object")
    return value


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
