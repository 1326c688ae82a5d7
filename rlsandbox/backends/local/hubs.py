"""The one hub process of a backend: started when it is needed, replaced when it dies, ended by close()."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from ...errors import ProvisionError, UnsupportedError
from ...keeper.build import keeper_binary
from ...keeper.hubclient import HubClient
from . import cgroups, state, worker
from .advice import advice
from .ids import chosen, detect
from .roots import Roots
from .state import RunState

_SOON_S = 1.0
log = logging.getLogger("rlsandbox.local")


class Hubs:
    """Args:
    upper: ``tmpfs`` or a directory on a disk.
    """

    def __init__(self, upper: str) -> None:
        self._upper = upper
        self._lock = asyncio.Lock()
        self._hub: HubClient | None = None
        self._refused: UnsupportedError | None = None  # why the hub can only do without isolation
        self.run: RunState | None = None
        self.roots: Roots | None = None
        self.upper_place: Path | None = None

    @property
    def alive(self) -> HubClient | None:
        """The hub, when there is one and it lives."""
        return self._hub if self._hub is not None and not self._hub.lost.done() else None

    async def get(self, isolation: str) -> HubClient:
        """The hub; where no isolation is possible only for *isolation* ``none``.

        Raises:
            UnsupportedError: this machine does not allow what is needed; it says what to do.
            ProvisionError: the hub could not be started.
        """
        async with self._lock:
            if self._hub is not None and self._hub.lost.done():
                log.warning("%s; starting another one", self._hub.lost.result())
                await _ended(self._hub)
                self._hub = None
            if self._hub is None:
                await self._begin()
                binary = await _keeper()
                self._refused = None
                try:
                    self._hub = await _start(binary)
                except UnsupportedError as error:
                    if isolation != "none":
                        raise
                    self._refused = error
                    self._hub = await HubClient.start(binary, args=("hub", "--isolation", "none"))
                # Files on disk must fit the map of ids that the hub has chosen.
                self.roots = Roots(chosen(self._hub.facts.get("ids", "")))
            if self._refused is not None and isolation != "none":
                raise self._refused
            return self._hub

    async def _begin(self) -> None:
        if self.run is not None:
            return
        self.run = await asyncio.to_thread(RunState.begin)
        try:
            await state.reap(detect())
        except OSError as error:  # that something stays is no reason not to work
            log.warning("the state of dead runs could not be read: %s", error)
        if self._upper != "tmpfs":
            self.upper_place = await asyncio.to_thread(self.run.place, self._upper)

    async def close(self) -> None:
        """End the hub, and with it every sandbox; then forget the run."""
        hub, self._hub = self._hub, None
        if hub is not None:
            await _ended(hub)
        run, self.run = self.run, None
        if run is not None:
            if self.upper_place is not None:
                await worker.call("remove", {"path": str(self.upper_place)}, detect())
            self.upper_place = None
            await asyncio.to_thread(run.end)


async def _keeper() -> Path:
    """The keeper's program; where it has to be compiled first, that is said: it may take a minute."""
    finding = asyncio.ensure_future(asyncio.to_thread(keeper_binary))
    done, _ = await asyncio.wait({finding}, timeout=_SOON_S)
    if not done:
        note = "compiling the keeper, once for this version: up to a minute on a busy machine"
        log.warning("%s", note)
        if sys.stderr is not None and sys.stderr.isatty():
            print(f"rlsandbox: {note}", file=sys.stderr)
    return await finding


async def _ended(hub: HubClient) -> None:
    """End a hub; one that was killed could not remove its control groups."""
    await hub.aclose()
    if hub.process is not None and hub.process.returncode:
        await asyncio.to_thread(_ungroup, hub.process.pid)


def _ungroup(pid: int) -> None:
    for owner, group in cgroups.dead():
        if owner == pid:
            state.remove_group(group)


async def _start(binary: Path) -> HubClient:
    try:
        return await HubClient.start(binary)
    except ProvisionError as error:
        if error.kind != "hub_failed":
            raise
        raise UnsupportedError(
            f"no sandbox can be made on this machine: {error.message}",
            phase="provision",
            hint=advice(error.message) or "rlsandbox doctor",
        ) from error
