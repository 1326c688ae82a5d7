"""From ``Spec.image`` to lower directories on this machine, each image unpacked once.

``Spec.image`` is a path (OCI layout directory, ``docker save`` archive, either with ``#name`` when it holds
several images) or a registry reference, which ``skopeo`` pulls where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import _paths
from ...errors import ImageError
from ...keeper.build import machine
from . import worker
from .archive import unreadable
from .ids import IdMap

_REFERENCE = re.compile(
    r"[a-z0-9]+(?:[._-][a-z0-9]+)*(?::[0-9]+)?(?:/[a-zA-Z0-9._-]+)*(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?"
)
STALE_S = 3600.0
_ARCHIVE = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2", ".oci")


@dataclass(frozen=True)
class Image:
    """An unpacked image.

    Args:
        lowers: its directories, topmost first.
        digest: the chain id of its top layer.
        env: the environment that it names.
        workdir, user: as it names them; empty when it does not.
        entrypoint, cmd: what its container would have run; a sandbox does not run them.
    """

    lowers: tuple[str, ...]
    digest: str
    env: Mapping[str, str]
    workdir: str
    user: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]


class Images:
    """The images of one backend; each is looked at once, however many members ask at the same time."""

    def __init__(self, ids: IdMap, cache: Path | None = None) -> None:
        self._ids = ids
        self._cache = cache if cache is not None else _paths.cache()
        self._locks: dict[str, asyncio.Lock] = {}
        self._done: dict[tuple[str, object], Image] = {}

    async def get(self, image: str) -> Image:
        """Unpack *image* if need be.

        Raises:
            ImageError: it is missing, broken, hostile, for another machine, or cannot be pulled.
        """
        async with self._locks.setdefault(image, asyncio.Lock()):
            path, name = await self._found(image)
            key = (image, _state(path))
            found = self._done.get(key)
            if found is None:
                _paths.private_directory(self._cache)
                arguments = {
                    "path": str(path),
                    "ref": name,
                    "machine": machine(),
                    "cache": str(self._cache),
                    "key": self._ids.key,
                    "owners": self._ids.kind != "one",
                }
                found = _image(await worker.call("image", arguments, self._ids))
                self._done[key] = found
            return found

    def _locate(self, image: str) -> tuple[Path, str | None] | None:
        for text, name in ((image, None), tuple(image.rsplit("#", 1)) if "#" in image else (image, None)):
            try:
                path = Path(text).expanduser()
                if path.exists():
                    return path.absolute(), name
            except (OSError, RuntimeError) as error:  # no permission; a name too long; no such user's home
                raise unreadable(image, error) from None
        return None

    async def _found(self, image: str) -> tuple[Path, str | None]:
        place = self._locate(image)
        if place is not None:
            return place
        looks_local = image.startswith(("/", ".", "~")) or "#" in image or image.lower().endswith(_ARCHIVE)
        if looks_local or not _REFERENCE.fullmatch(image):
            raise ImageError(f"image {image!r}: no such file or directory", kind="image_not_found")
        return await self._pull(image), None

    async def _pull(self, reference: str) -> Path:
        """The OCI layout of *reference*, pulled once; remove it from the cache to pull again."""
        layout = self._cache / "pulls" / hashlib.sha256(reference.encode()).hexdigest()[:32]
        if layout.is_dir():
            return layout
        skopeo = shutil.which("skopeo")
        if skopeo is None:
            raise ImageError(
                f"image {reference!r} is no file here, and skopeo, which would pull it, is not installed",
                kind="image_not_found",
                hint="install skopeo, or give the path of a saved image (docker save -o image.tar NAME)",
            )
        _paths.private_directory(layout.parent)
        await asyncio.to_thread(_remove_halves, layout)
        half = layout.with_name(f"{layout.name}.{os.getpid()}.{os.urandom(4).hex()}")
        # With a digest the tag says nothing, and skopeo refuses both.
        source = f"docker://{re.sub(r':[^:/@]+@', '@', reference)}"
        process = await asyncio.create_subprocess_exec(
            skopeo, "copy", "--quiet", source, f"oci:{half}:image", stdout=PIPE, stderr=PIPE
        )
        try:
            _, said = await process.communicate()
            if not worker.succeeded(process, (half / "index.json").is_file):  # it is written last
                raise ImageError(f"skopeo could not pull {reference!r}: {_last_word(said)}")
            try:
                half.rename(layout)
            except OSError:  # somebody else was faster
                if not layout.is_dir():
                    raise
        finally:
            if process.returncode is None:
                process.kill()
            await worker.ended(process)
            shutil.rmtree(half, ignore_errors=True)
        return layout


def _last_word(said: bytes) -> str:
    """What a program said last, without what its logger puts around it."""
    lines = said.decode(errors="replace").strip().splitlines()
    if not lines:
        return "no word"
    logged = re.search(r'msg=("(?:[^"\\]|\\.)*")', lines[-1])
    with contextlib.suppress(ValueError):
        return str(json.loads(logged[1])) if logged else lines[-1]
    return lines[-1]


def _remove_halves(layout: Path) -> None:
    """What pulls of *layout* left whose process was killed: not here, and long without a write.

    (A cache may be shared with another container, whose processes are not seen.)
    """
    for half in layout.parent.glob(f"{layout.name}.*.*"):
        if os.path.exists(f"/proc/{half.name.split('.')[1]}"):
            continue
        with contextlib.suppress(OSError):
            places = [half, *(half / "blobs").glob("**/*")]
            if min(_paths.age_s(place) for place in places) > STALE_S:
                shutil.rmtree(half)


def _state(path: Path) -> object:
    """Changes when the image at *path* was replaced."""
    index = path / "index.json"
    try:
        if path.is_dir() and not index.exists():
            index = path / "manifest.json"
        status = (index if path.is_dir() else path).stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _image(data: Mapping[str, Any]) -> Image:
    config = data["config"]
    env: dict[str, str] = {}
    for item in _texts(config.get("Env")):
        name, equals, value = item.partition("=")
        if equals and name and "\0" not in item:
            env[name] = value
    return Image(
        lowers=tuple(data["lowers"]),
        digest=data["digest"],
        env=env,
        workdir=_text(config.get("WorkingDir")),
        user=_text(config.get("User")),
        entrypoint=_texts(config.get("Entrypoint")),
        cmd=_texts(config.get("Cmd")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) and "\0" not in value else ""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
