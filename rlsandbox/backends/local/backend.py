"""The local backend: sandboxes on this machine, made by one keeper process, the hub.

The calling process (a trainer: large, threaded, holding an accelerator) is never forked; it starts the hub,
and the hub makes the sandboxes. When the calling process ends, however it ends, the hub and all of them end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import platform
import socket
import warnings
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError, ProvisionError, SandboxDiedError, SandboxError, UnsupportedError
from ...keeper.connection import KeeperFailure, facts_of
from ...keeper.hubclient import HubClient
from ...keeper.liveness import answers
from ...keeper.wire import Tag
from ...spec import Spec
from ..base import Backend, Capabilities, Member
from . import limits
from .advice import advice, mounts
from .hubs import Hubs
from .roots import Root
from .state import forget

log = logging.getLogger("rlsandbox.local")

_STREAM_LIMIT = 1 << 18


@dataclass
class _Place:
    """A member that this backend has made."""

    labels: Mapping[str, str]
    member: Member
    stream: socket.socket | None = field(repr=False)
    workdir: str | None = None  # without isolation: to be removed with the member


class Local(Backend):
    """Sandboxes on this machine.

    Args:
        isolation: for specs that leave it at ``"auto"``: ``"auto"`` and ``"namespaces"`` isolate
            by namespaces or refuse; ``"none"`` runs commands unisolated, with a warning.
        base: an image for specs that name none; None: the host's own programs, by an allow-list.
        mode: the reset mode, ``"overlay"`` or ``"userns"``; empty: the best that works here.
        upper: where what an episode writes is kept: ``"tmpfs"``, or a directory on a disk, which has room for
            more than memory but holds no ``Spec.disk``.
    """

    name = "local"

    def __init__(
        self, *, isolation: str = "auto", base: str | None = None, mode: str = "", upper: str = "tmpfs"
    ) -> None:
        if isolation not in ("auto", "namespaces", "none"):
            raise ConfigError(f"Local: isolation must be auto, namespaces or none, not {isolation!r}")
        if mode not in ("", "overlay", "userns"):
            raise ConfigError(f"Local: mode must be overlay or userns, not {mode!r}")
        if upper != "tmpfs" and not os.path.isdir(upper):
            raise ConfigError(f"Local: upper must be 'tmpfs' or a directory, not {upper!r}")
        self._isolation = isolation
        self._base = base
        self._mode = mode
        self._upper = upper
        self._hubs = Hubs(upper)
        self._places: dict[str, _Place] = {}
        self._warned = False

    def __repr__(self) -> str:
        state = "idle" if self._hubs.alive is None else f"{len(self._places)} members"
        return f"Local({state})"

    @property
    def _hub(self) -> HubClient | None:
        return self._hubs.alive

    async def capabilities(self) -> Capabilities:
        hub = await self._hubs.get(self._isolation)
        bare = self._isolation == "none"
        return Capabilities(
            reset_modes=frozenset({"replace"} if bare else self._modes(await hub.probe())),
            adopt=False,
            pause=True,
            snapshot=not bare,
            max_writes_per_s=None,
            shared_layers=not bare,
        )

    async def provision(
        self, spec: Spec, *, member: str, labels: Mapping[str, str], deadline: float
    ) -> Member:
        isolation = self._isolation_of(spec)
        if self._upper != "tmpfs" and spec.disk is not None:
            raise UnsupportedError(
                f"disk={spec.disk!r} cannot be held in {self._upper}: only a tmpfs has a size",
                phase="provision",
                hint='leave disk out, or Local(upper="tmpfs")',
            )
        try:
            async with asyncio.timeout(deadline):
                hub = await self._hubs.get(isolation)
                root = await self._root(self._filled(spec), member, isolation)
                stream, reply = await hub.create(member, **self._fields(spec, root, isolation))
        except TimeoutError:
            raise ProvisionError(f"sandbox {member} was not made within {deadline:g} s") from None
        except KeeperFailure as error:
            raise _explained(error) from error
        facts = {**limits.of(spec).facts(), **facts_of(reply), **root.facts}
        facts |= {"mode": reply.text(Tag.MODE), "isolation": isolation}
        if isolation == "none":
            facts["files"] = "machine"  # what an episode writes is written here
        if self._upper != "tmpfs":
            del facts["disk_bytes"]  # told is what holds
        made = Member(id=member, node=platform.node(), facts=facts)
        workdir = facts["workdir"] if isolation == "none" else None
        self._places[member] = _Place(dict(labels), made, stream, workdir)
        return made

    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        place = self._places.get(member.id)
        if place is None or place.stream is None:
            raise SandboxDiedError("its keeper is gone or was connected to before", sandbox=member.id)
        stream, place.stream = place.stream, None
        try:
            return await asyncio.open_connection(sock=stream, limit=_STREAM_LIMIT)
        except BaseException:
            stream.close()
            raise

    async def dispose(self, member: Member) -> None:
        place = self._places.pop(member.id, None)
        if place is not None and place.stream is not None:
            place.stream.close()
            place.stream = None
        try:
            await self._end(member.id)
        except BaseException:
            if place is not None:  # it may live, and whoever asks again shall find what belongs to it
                self._places.setdefault(member.id, place)
            raise
        if place is not None and place.workdir is not None:  # nobody writes there any more
            await asyncio.to_thread(forget, Path(place.workdir))

    async def _end(self, member: str) -> None:
        """When this returns the sandbox is gone for certain."""
        hub = self._hubs.alive
        if hub is None:
            return  # it took all of them along
        try:
            await hub.dispose(member)
        except KeeperFailure as error:
            if error.errno != errno.ENOENT:
                raise
        except ProvisionError:
            if not hub.lost.done():
                raise

    async def hurry(self, within: float) -> None:
        hub = self._hubs.alive
        if hub is not None and not await answers(hub, within):
            hub.give_up("it does not answer")

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        hub = self._hubs.alive
        if hub is None:
            return []
        alive = set(await hub.members())
        return [
            place.member
            for name, place in self._places.items()
            if name in alive and labels.items() <= place.labels.items()
        ]

    async def give_layer(self, layer: str, member: Member) -> bool:
        hub = self._hubs.alive
        if hub is None:
            return False
        try:
            await hub.give_layer(layer, member.id)
        except KeeperFailure as error:
            if error.errno == errno.ENOENT and layer not in await hub.layers():
                # The hub that had sealed it died, and its layers with it: it has to be made again.
                raise SandboxError(
                    f"layer {layer} is gone", kind="layer_gone", phase="reset", retryable=True,
                    sandbox=member.id,
                ) from error  # fmt: skip
            log.warning("layer %s could not be given to sandbox %s: %s", layer, member.id, error)
            return False
        return True

    async def drop_layer(self, layer: str) -> None:
        hub = self._hubs.alive
        if hub is None:
            return
        try:
            await hub.drop_layer(layer)
        except KeeperFailure as error:
            if error.errno != errno.ENOENT:
                raise

    def environment(self, spec: Spec) -> Mapping[str, str]:
        if self._isolation_of(spec) == "none":
            return {"PATH": os.environ.get("PATH", os.defpath)}
        roots = self._hubs.roots
        return roots.environment(self._filled(spec)) if roots is not None else {}

    def check_size(self, size: int, spec: Spec) -> None:
        """Raise ConfigError when *size* sandboxes of *spec* can never fit this machine."""
        limits.check_size(size, spec)

    async def close(self) -> None:
        for place in self._places.values():
            if place.stream is not None:
                place.stream.close()
        self._places.clear()
        await self._hubs.close()

    def _modes(self, probed: Mapping[str, str]) -> set[str]:
        """The reset modes that work here and are wanted."""
        wanted = (self._mode,) if self._mode else ("overlay", "userns")
        working = {mode for mode in wanted if probed.get(f"mode.{mode}", "ok") == "ok"}
        if not working:
            said = ", ".join(f"{mode}: {probed[f'mode.{mode}']}" for mode in wanted)
            raise UnsupportedError(
                f"episodes cannot be reset on this machine ({said})", phase="provision", hint=mounts()
            )
        return working

    def _filled(self, spec: Spec) -> Spec:
        return spec if spec.image is not None or self._base is None else Spec(image=self._base).over(spec)

    def _isolation_of(self, spec: Spec) -> str:
        isolation = spec.isolation if spec.isolation != "auto" else self._isolation
        if isolation == "gvisor":
            raise UnsupportedError(
                "the local backend has no gvisor isolation",
                hint='isolation="auto", or the kubernetes backend with a gvisor runtime class',
            )
        return isolation

    async def _root(self, spec: Spec, member: str, isolation: str) -> Root:
        if isolation != "none":
            assert self._hubs.roots is not None
            return await self._hubs.roots.get(spec)
        if spec.image is not None:
            raise UnsupportedError(
                "an image cannot be used without isolation: commands run on this machine's own files",
                hint='leave image out, or isolation="auto"',
            )
        if not self._warned:
            self._warned = True
            text = "isolation='none': commands run unisolated, with this user's rights over this machine"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            log.warning("%s", text)
        # Nothing can be put back, but at least each sandbox begins in an empty directory of its own.
        assert self._hubs.run is not None
        workdir = self._hubs.run.path / "work" / member
        await asyncio.to_thread(workdir.mkdir, mode=0o700, parents=True)
        return Root(facts={"base": "machine", "workdir": str(workdir)})

    def _fields(self, spec: Spec, root: Root, isolation: str) -> dict[str, Any]:
        allowed = limits.of(spec)
        place = self._hubs.upper_place
        return {
            "root": list(root.lowers),
            "overlay": [f"{target}={lower}" for target, lower in root.overlays],
            "bind": [f"{target}={source}" for target, source in root.binds],
            "upper": "tmpfs" if place is None else f"disk:{place}",
            "upper_bytes": allowed.disk if place is None else None,
            "upper_inodes": allowed.inodes if place is None else None,
            "memory_bytes": allowed.memory,
            "cpu_milli": allowed.cpu_milli,
            "pids": allowed.pids,
            "nofile": allowed.nofile,
            "network": spec.network,
            "hostname": "sandbox",
            "mode": self._mode,
            "isolation": isolation,
        }


def _explained(error: KeeperFailure) -> SandboxError:
    """What the hub could not do, with what to do about it."""
    text = f"a sandbox could not be made: {error.message}"
    hint = advice(error.message)
    if hint:
        return UnsupportedError(text, phase="provision", hint=hint)
    return ProvisionError(text, hint="rlsandbox doctor")
