"""Snapshots that outlive their pods: a file each, on the client's disk (or on a path that others share).

A sealed layer lies in the pod that sealed it. What hibernates, and what a rollout's next attempt is to start
from, must be there when that pod and its node are not; so every snapshot is streamed here when it is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import BinaryIO

from ..._paths import private_directory
from ...errors import SandboxError

CHUNK = 1 << 18
SPARE = 256 << 20
"""Of the disk, that is left to others."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Vault:
    """Layers by name, as files of *place*, which is made when the first one comes."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._kept: set[str] = set()

    def __contains__(self, layer: str) -> bool:
        return layer in self._kept

    async def keep(self, layer: str, tar: AsyncIterable[bytes]) -> int:
        """Write *tar*; its bytes. What does not arrive whole is not kept.

        Raises:
            SandboxError: there is no room, or it cannot be written.
        """
        path = self._path(layer)
        part = path.with_suffix(".part")
        size = 0
        try:
            await asyncio.to_thread(private_directory, self._place)
            file = await asyncio.to_thread(open, part, "wb")
            try:
                async for chunk in tar:
                    size += len(chunk)
                    await asyncio.to_thread(self._add, file, chunk)
            finally:
                await asyncio.to_thread(file.close)
            await asyncio.to_thread(os.replace, part, path)
        except OSError as error:
            raise SandboxError(
                f"a snapshot could not be kept in {self._place}: {error.strerror or error}",
                kind="vault", phase="command", retryable=False,
                hint="make room, or Kubernetes(keep=...) another directory",
            ) from error  # fmt: skip
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
        self._kept.add(layer)
        return size

    def _add(self, file: BinaryIO, chunk: bytes) -> None:
        if shutil.disk_usage(self._place).free < SPARE:
            raise OSError(28, f"less than {SPARE >> 20} MiB are left")
        file.write(chunk)

    async def read(self, layer: str) -> AsyncGenerator[bytes, None]:
        file = await asyncio.to_thread(open, self._path(layer), "rb")
        try:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk
        finally:
            await asyncio.to_thread(file.close)

    async def drop(self, layer: str) -> None:
        if layer in self._kept:
            self._kept.discard(layer)
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(self._path(layer).unlink)

    async def close(self) -> None:
        """Snapshots end with their pool."""
        for layer in list(self._kept):
            await self.drop(layer)
        with contextlib.suppress(OSError):  # not there, or not ours alone
            await asyncio.to_thread(self._place.rmdir)

    def _path(self, layer: str) -> Path:
        if _NAME.fullmatch(layer) is None or layer.startswith("."):
            raise ValueError(f"not a layer's name: {layer!r}")
        return self._place / f"{layer}.tar"
