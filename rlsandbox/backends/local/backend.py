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
from ...keeper.build import keeper_binary
from ...keeper.connection import KeeperFailure, facts_of
from ...keeper.hubclient import HubClient
from ...keeper.wire import Tag
from ...spec import Spec
from ..base import Backend, Capabilities, Member
from . import limits, state, worker
from .advice import advice
from .ids import chosen, detect
from .roots import Root, Roots
from .state import RunState

log = logging.getLogger("rlsandbox.local")

_STREAM_LIMIT = 1 << 18


@dataclass
class _Place:
    """A member that this backend has made."""

    labels: Mapping[str, str]
    member: Member
    stream: socket.socket | None = field(repr=False)


class Local(Backend):
    """Sandboxes on this machine.

    Args:
        isolation: for specs that leave it at ``"auto"``: ``"auto"`` and ``"namespaces"`` isolate
            by namespaces or refuse; ``"none"`` runs commands unisolated, with a warning.
        base: an image for specs that name none; None: the host's own programs, by an allow-list.
        mode: the reset mode, ``"overlay"`` or ``"userns"``; empty: the best that works here.
        upper: where what an episode writes is kept: ``"tmpfs"``, or a directory on a disk.
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
        self._hub_lock = asyncio.Lock()
        self._hub: HubClient | None = None
        self._places: dict[str, _Place] = {}
        self._roots: Roots | None = None
        self._run: RunState | None = None
        self._upper_place: Path | None = None

    def __repr__(self) -> str:
        state = "idle" if self._hub is None else f"{len(self._places)} members"
        return f"Local({state})"

    async def capabilities(self) -> Capabilities:
        hub = await self._started()
        facts = await hub.probe()
        modes = {name for name in ("overlay", "userns") if facts.get(f"mode.{name}", "ok") == "ok"}
        return Capabilities(
            reset_modes=frozenset({self._mode} if self._mode else modes),
            adopt=False,
            pause=True,
            snapshot=True,
            max_writes_per_s=None,
            shared_layers=True,
        )

    async def provision(
        self, spec: Spec, *, member: str, labels: Mapping[str, str], deadline: float
    ) -> Member:
        isolation = self._isolation_of(spec)
        try:
            async with asyncio.timeout(deadline):
                hub = await self._started()
                assert self._roots is not None
                root = await self._roots.get(self._filled(spec))
                stream, reply = await hub.create(member, **self._fields(spec, root, isolation))
        except TimeoutError:
            raise ProvisionError(f"sandbox {member} was not made within {deadline:g} s") from None
        except KeeperFailure as error:
            raise _explained(error) from error
        facts = {**limits.of(spec).facts(), **facts_of(reply), **root.facts}
        facts |= {"mode": reply.text(Tag.MODE), "isolation": isolation}
        made = Member(id=member, node=platform.node(), facts=facts)
        self._places[member] = _Place(dict(labels), made, stream)
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
        hub = self._hub
        if hub is None or hub.lost.done():
            return  # the hub took all of them along
        try:
            await hub.dispose(member.id)
        except KeeperFailure as error:
            if error.errno != errno.ENOENT:
                raise
        except ProvisionError:
            if not hub.lost.done():
                raise

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        hub = self._hub
        if hub is None or hub.lost.done():
            return []
        alive = set(await hub.members())
        return [
            place.member
            for name, place in self._places.items()
            if name in alive and labels.items() <= place.labels.items()
        ]

    async def give_layer(self, layer: str, member: Member) -> bool:
        if self._hub is None or self._hub.lost.done():
            return False
        try:
            await self._hub.give_layer(layer, member.id)
        except KeeperFailure as error:
            log.warning("layer %s could not be given to sandbox %s: %s", layer, member.id, error)
            return False
        return True

    async def drop_layer(self, layer: str) -> None:
        if self._hub is None or self._hub.lost.done():
            return
        try:
            await self._hub.drop_layer(layer)
        except KeeperFailure as error:
            if error.errno != errno.ENOENT:
                raise

    def environment(self, spec: Spec) -> Mapping[str, str]:
        return self._roots.environment(self._filled(spec)) if self._roots is not None else {}

    def check_size(self, size: int, spec: Spec) -> None:
        """Raise ConfigError when *size* sandboxes of *spec* can never fit this machine."""
        limits.check_size(size, spec)

    async def close(self) -> None:
        hub, self._hub = self._hub, None
        for place in self._places.values():
            if place.stream is not None:
                place.stream.close()
        self._places.clear()
        if hub is not None:
            await hub.aclose()
        run, self._run = self._run, None
        if run is not None:
            await self._forget(run)

    # The hub

    async def _forget(self, run: RunState) -> None:
        """The hub is gone, and with it all that used the run's directories."""
        if self._upper_place is not None:
            await worker.call("remove", {"path": str(self._upper_place)}, detect())
        self._upper_place = None
        run.end()

    async def _started(self) -> HubClient:
        async with self._hub_lock:
            if self._hub is not None and self._hub.lost.done():
                log.warning("%s; starting another one", self._hub.lost.result())
                await self._hub.aclose()
                self._hub = None
                self._places.clear()
            if self._hub is None:
                if self._run is None:
                    self._run = await asyncio.to_thread(RunState.begin)
                    await self._reap()
                    if self._upper != "tmpfs":
                        self._upper_place = await asyncio.to_thread(self._run.place, self._upper)
                binary = await asyncio.to_thread(keeper_binary)
                self._hub = await self._start(binary)
                # Files on disk must fit the map of ids that the hub has chosen.
                self._roots = Roots(chosen(self._hub.facts.get("ids", "")))
            return self._hub

    @staticmethod
    async def _reap() -> None:
        """Remove what dead runs have left. That some of it stays is no reason not to work."""
        try:
            await state.reap(detect())
        except OSError as error:
            log.warning("the state of dead runs could not be read: %s", error)

    @staticmethod
    async def _start(binary: Path) -> HubClient:
        try:
            return await HubClient.start(binary)
        except ProvisionError as error:
            hint = advice(error.message)
            if error.kind != "hub_failed":
                raise
            raise UnsupportedError(
                f"no sandbox can be made on this machine: {error.message}",
                phase="provision",
                hint=hint or "rlsandbox doctor",
            ) from error

    def _filled(self, spec: Spec) -> Spec:
        return spec if spec.image is not None or self._base is None else Spec(image=self._base).over(spec)

    def _isolation_of(self, spec: Spec) -> str:
        isolation = spec.isolation if spec.isolation != "auto" else self._isolation
        if isolation == "gvisor":
            raise UnsupportedError(
                "the local backend has no gvisor isolation",
                hint='isolation="auto", or the kubernetes backend with a gvisor runtime class',
            )
        if isolation == "none":
            text = "isolation='none': commands run unisolated, with this user's rights over this machine"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            log.warning("%s", text)
        return isolation

    def _fields(self, spec: Spec, root: Root, isolation: str) -> dict[str, Any]:
        allowed = limits.of(spec)
        return {
            "root": list(root.lowers),
            "overlay": [f"{target}={lower}" for target, lower in root.overlays],
            "bind": [f"{target}={source}" for target, source in root.binds],
            "upper": "tmpfs" if self._upper_place is None else f"disk:{self._upper_place}",
            "upper_bytes": allowed.disk,
            "upper_inodes": allowed.inodes,
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
