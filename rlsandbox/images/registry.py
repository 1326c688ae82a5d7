"""Which layers an image has, asked of its registry, many at once and no more."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._references import DIGEST
from .._registry import RegistryClient
from ..errors import ImageError
from .model import Image, Layer

_PACKED = re.compile(r"(\+|\.)(gzip|zstd)$")
_MOST = 1 << 53
"""Bytes that a layer says it has, at most."""


class Registries(RegistryClient):
    """Registries, asked which layers images have. See :class:`RegistryClient`."""

    async def images(
        self, names: Iterable[str], *, told: Callable[[Image], object] | None = None
    ) -> dict[str, Image]:
        """What the registries say of each; one that cannot be read has no layers and says ``why``.

        Args:
            names: of images.
            told: called with each as it is known.
        """
        found: dict[str, Image] = {}

        async def one(name: str) -> None:
            async with self._limit:
                try:
                    image = await self.image(name)
                except ImageError as error:
                    image = Image(name, None, why=error.message)
            found[name] = image
            if told is not None:
                told(image)

        async with asyncio.TaskGroup() as group:
            for name in dict.fromkeys(names):
                group.create_task(one(name))
        return found

    async def image(self, name: str) -> Image:
        """
        Raises:
            ImageError: there is no such image, it may not be read, or what came is none.
        """
        own, data = await self.manifest(name)
        return Image(name, _layers(name, data), digest=own, streams=_streams(data))


def _layers(name: str, manifest: Mapping[str, Any]) -> tuple[Layer, ...]:
    rows = manifest.get("layers")
    if not isinstance(rows, list):
        old = " (schema 1, which no node pulls any more)" if manifest.get("schemaVersion") == 1 else ""
        raise ImageError(f"image {name}: a manifest without layers{old}")
    found: list[Layer] = []
    for row in rows:
        size = row.get("size") if isinstance(row, dict) else None
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or not 0 <= size <= _MOST
            or not DIGEST.match(str(row.get("digest")))
        ):
            raise ImageError(f"image {name}: a layer without size and digest: {json.dumps(row)[:200]}")
        found.append(Layer(str(row["digest"]), size, bool(_PACKED.search(str(row.get("mediaType"))))))
    return tuple(found)


def _streams(manifest: Mapping[str, Any]) -> str:
    """The lazy format of an image, by what its layers say."""
    for row in manifest.get("layers") or ():
        notes = row["annotations"] if isinstance(row.get("annotations"), dict) else {}
        if any("stargz" in key for key in notes):
            return "estargz"
        if any("nydus" in key for key in notes):
            return "nydus"
        if "overlaybd" in str(row.get("mediaType")) or any("overlaybd" in key for key in notes):
            return "overlaybd"
    return ""
