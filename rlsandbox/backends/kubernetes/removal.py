"""Members of a Kubernetes backend are removed, and count until they are gone."""

from __future__ import annotations

import asyncio
import logging

from ...errors import SandboxError
from .cluster import Cluster
from .places import Place, Places

log = logging.getLogger("rlsandbox.kubernetes")

COLLECTED_S = 8.0
"""In which a pod goes whose claim has gone, usually."""


class Removal:
    """What leaves."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._cleaning: set[asyncio.Task[None]] = set()
        self._collected_at = 0.0
        """When a pod whose claim was removed went last without our help."""

    def clean(self, place: Place) -> None:
        """Remove what a creation that failed or was cancelled left; settle() waits for it."""
        if self._places.cluster is None or place.leaving or place not in self._places:
            self._places.forget(place)
            return

        async def remove() -> None:
            try:
                await self.remove(place)
            except SandboxError as error:
                log.warning("sandbox %s could not be removed: %s", place.member, error)

        task = asyncio.get_running_loop().create_task(remove(), name=f"rlsandbox: remove {place.name}")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def settle(self, timeout: float) -> None:
        """Wait for what is being cleaned, for so many seconds at most."""
        if self._cleaning:
            await asyncio.wait(set(self._cleaning), timeout=timeout)

    async def remove(self, place: Place) -> None:
        """Delete it and wait until its pod is gone: until then it counts."""
        cluster = self._places.cluster
        assert cluster is not None
        place.leaving = True
        if place.stream is not None:
            place.stream.abort()
            await place.stream.wait_closed()
        path = cluster.paths.claims if cluster.crds else cluster.paths.pods
        known = self._places.claim(place) if cluster.crds else self._places.pod(place)
        # Who waited in vain comes again: a cluster that takes its time is not made slower by saying it twice.
        if not place.asked or (known and not known["metadata"].get("deletionTimestamp")):
            there = await cluster.api.delete(f"{path}/{place.name}", throttle=True)
            place.asked = True
            if not there and not self._places.seen(place):
                self._places.forget(place)
                return
        await self._until_gone(cluster, place)
        self._places.forget(place)

    async def _until_gone(self, cluster: Cluster, place: Place) -> None:
        now = asyncio.get_running_loop().time
        while self._places.seen(place):
            place.gone.clear()
            try:
                async with asyncio.timeout(None if place.helped else COLLECTED_S):
                    await place.gone.wait()
            except TimeoutError:
                if now() - self._collected_at >= COLLECTED_S:  # else the collector is at work
                    place.helped = await self._collect(cluster, place)
        if not place.helped:
            self._collected_at = now()

    async def _collect(self, cluster: Cluster, place: Place) -> bool:
        """Remove the pod, whose claim is gone; whether that was tried.

        The cluster's garbage collector does it, but takes minutes after an outage of the API server.
        """
        pod = self._places.pod(place)
        if not pod or self._places.claim(place) or pod["metadata"].get("deletionTimestamp"):
            return False
        name = pod["metadata"]["name"]
        if cluster.crds:
            # The Sandbox waits for the collector as well, and its controller would make the pod anew.
            await self._delete(cluster, f"{cluster.paths.sandboxes}/{name}")
        return await self._delete(cluster, f"{cluster.paths.pods}/{name}")

    async def _delete(self, cluster: Cluster, path: str) -> bool:
        try:
            await cluster.api.delete(path, throttle=True)
        except SandboxError as error:
            log.debug("%s waits for the garbage collector: %s", path, error)
            return False
        return True
