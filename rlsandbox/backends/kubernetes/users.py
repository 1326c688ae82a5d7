"""Whom commands run as where only the image says it: its USER, read from its registry."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from ..._loops import stands
from ..._registry import RegistryClient
from ...errors import ImageError
from ...spec import Spec
from .manifests import ARCH, Shape

LONGEST = 256
"""Characters of a user's and a group's name, more than any system takes."""


class Users:
    """What images say, each asked for once.

    Args:
        mirrors: where to ask instead of a registry, as :class:`RegistryClient` takes them.

    Raises:
        ConfigError: a mirror is no address, or docker's configuration cannot be read.
    """

    def __init__(self, shape: Shape, mirrors: Mapping[str, str]) -> None:
        RegistryClient(mirrors=mirrors)
        self._shape, self._mirrors = shape, mirrors
        self._asked: dict[str, asyncio.Task[str]] = {}

    def _image(self, spec: Spec) -> str | None:
        """The one that says who *spec*'s commands are; None: that is said already."""
        if spec.user is not None:
            return None
        return spec.image if spec.image is not None else self._shape.image

    def known(self, spec: Spec) -> Spec:
        """*spec* with the user of its image, as far as that was read."""
        asked = self._asked.get(self._image(spec) or "")
        user = asked.result() if asked is not None and asked.done() and stands(asked) else ""
        return replace(spec, user=user) if user else spec

    async def with_user(self, spec: Spec) -> Spec:
        """*spec* with the user of its image, when it names none itself.

        Raises:
            ImageError: what the image says cannot be read.
        """
        image = self._image(spec)
        if image is None:
            return spec
        asked = self._asked.get(image)
        if asked is None or not stands(asked):
            asked = self._asked[image] = asyncio.get_running_loop().create_task(
                self._ask(image), name="rlsandbox: read an image's USER"
            )
        await asyncio.shield(asked)
        return self.known(spec)

    async def _ask(self, image: str) -> str:
        try:
            async with RegistryClient(arch=ARCH[self._shape.arch], mirrors=self._mirrors) as registries:
                config = await registries.config(image)
        except ImageError as error:
            error.hint = error.hint or _HINT
            raise
        user = config.get("User") or ""
        if not isinstance(user, str) or not user.isprintable() or len(user) > LONGEST:
            raise ImageError(f"image {image}: its USER is none: {str(user)[:LONGEST]!r}", hint=_HINT)
        return user

    async def close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)


_HINT = "Spec(user=...), or Kubernetes(image_user=False): commands are root's then"
