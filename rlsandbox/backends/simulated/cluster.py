"""The simulated cluster: nodes with disks, an image registry, a scheduler, an API with limits, faults.

Everything is drawn from one seeded generator, in the order in which the event loop runs, so the same seed
gives the same history. Nothing is real but the waiting, and that is the event loop's.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ...errors import ProvisionError, ThrottledError
from ...spec import Spec


@dataclass(frozen=True, kw_only=True)
class Place:
    """How large and how fast it is. Times in seconds, sizes in bytes.

    Args:
        nodes, slots: how many nodes, and sandboxes a node.
        disk: bytes for images on a node; the least recently used go first.
        image: bytes of an image, as (least, most); drawn once for each image.
        pull_rate: bytes a second that a node pulls; pulls of a node share it, *pulls* at a time.
        registry_rate: bytes a second that the registry serves to all nodes together.
        writes: creations and deletions a second that the API takes; beyond it answers 429.
        schedules: placements a second.
        start: mean time from placed and pulled to ready; spread is half of it.
        stop: mean time that a deletion takes.
        lag: mean delay until the API's answer or event is seen.
        reset, verify, prime, exec: mean times of what happens inside a sandbox.
        list_lag: how many writes a listing is behind.
    """

    nodes: int = 64
    slots: int = 128
    disk: int = 2_000_000_000_000
    image: tuple[int, int] = (300_000_000, 3_000_000_000)
    pull_rate: float = 400e6
    registry_rate: float = 20e9
    pulls: int = 3
    writes: float | None = 100.0
    schedules: float = 100.0
    start: float = 1.5
    stop: float = 2.0
    lag: float = 0.1
    reset: float = 0.05
    verify: float = 0.02
    prime: float = 5.0
    exec: float = 0.02
    list_lag: int = 2


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, as shares of how often it could.

    Args:
        provision: creations that fail; half of them leave something behind.
        hang: creations that never answer.
        late: of those that hang and are given up, those that come into being all the same.
        dispose: deletions that fail and must be asked for again.
        stuck: deletions that never end.
        residue: resets that leave something.
        prime: setups that fail.
        death_per_s: deaths of a sandbox a second of its life.
        storms: bursts of 429 an hour, each *storm_s* long.
    """

    provision: float = 0.0
    hang: float = 0.0
    late: float = 0.5
    dispose: float = 0.0
    stuck: float = 0.0
    residue: float = 0.0
    prime: float = 0.0
    death_per_s: float = 0.0
    storms: float = 0.0
    storm_s: float = 5.0


@dataclass(slots=True)
class Node:
    name: str
    slots: int
    disk: int
    used: int = 0
    images: OrderedDict[str, int] = field(default_factory=OrderedDict)
    bytes: int = 0
    pulling: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    lanes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(3))


@dataclass(slots=True)
class Pod:
    name: str
    spec: Spec
    labels: dict[str, str]
    node: Node | None = None
    wish: str | None = None
    """The node that it would rather be on."""
    ready: bool = False
    lost: list[Callable[[BaseException], object]] = field(default_factory=list)
    doom: asyncio.TimerHandle | None = None
    dead: bool = False


class Cluster:
    """State and history. Create it on the event loop it is to run on."""

    def __init__(self, place: Place, faults: Faults, seed: int) -> None:
        self.place, self.faults = place, faults
        self.rng = Random(seed)
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()
        self.nodes = [Node(f"node-{i}", place.slots, place.disk) for i in range(place.nodes)]
        for node in self.nodes:
            node.lanes = asyncio.Semaphore(place.pulls)
        self.pods: dict[str, Pod] = {}
        self.history: list[tuple[float, str, str]] = []
        self.peak = 0
        self.refused = 0
        self.pulled = 0
        self._changes: list[tuple[bool, Pod]] = []
        """What came (True) and went, in order; only as much as a listing may lag."""
        self._marks: list[int] = []
        """Where in it the last writes fell."""
        self._image_sizes: dict[str, int] = {}
        self._free = asyncio.Event()
        self._next_slot = 0.0
        self._api_tokens = place.writes or 0.0
        self._api_at = self.began
        self._storm_until = -math.inf
        self._next_storm = self._draw_storm(self.began)

    # -- small things --------------------------------------------------------------------------------

    def note(self, what: str, who: str) -> None:
        self.history.append((round(self.loop.time() - self.began, 6), what, who))

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    async def pause(self, mean: float) -> None:
        """Wait about *mean* seconds: half of it for certain, the rest with a tail."""
        if mean > 0:
            await asyncio.sleep(mean * 0.5 + min(self.rng.expovariate(1 / (mean * 0.5)), mean * 8))

    def _draw_storm(self, now: float) -> float:
        per_s = self.faults.storms / 3600
        return now + self.rng.expovariate(per_s) if per_s > 0 else math.inf

    # -- the API -------------------------------------------------------------------------------------

    async def write(self, what: str, who: str) -> None:
        """One write to the API: answered after the lag, or 429."""
        now = self.loop.time()
        if now >= self._next_storm:
            self._storm_until = self._next_storm + self.faults.storm_s
            self._next_storm = self._draw_storm(max(now, self._storm_until))
        if now < self._storm_until:
            self._refuse(what, who, self._storm_until - now)
        if self.place.writes is not None:
            rate = self.place.writes
            self._api_tokens = min(rate, self._api_tokens + (now - self._api_at) * rate)
            self._api_at = now
            if self._api_tokens < 1:
                self._refuse(what, who, 1.0)
            self._api_tokens -= 1
        self._marks.append(len(self._changes))
        if len(self._marks) > self.place.list_lag:
            gone = self._marks[-self.place.list_lag] if self.place.list_lag else len(self._changes)
            self._marks = [mark - gone for mark in self._marks[-self.place.list_lag :]]
            del self._changes[:gone]
        self.note(what, who)
        await self.pause(self.place.lag)

    def _refuse(self, what: str, who: str, retry_after: float) -> None:
        self.refused += 1
        self.note("429 " + what, who)
        error = ThrottledError(f"429 for {what} {who}")
        error.retry_after = round(retry_after, 3)
        raise error

    def listed(self) -> dict[str, Pod]:
        """What a listing shows: the state of some writes ago."""
        pods = dict(self.pods)
        if self.place.list_lag:
            for came, pod in reversed(self._changes):
                if came:
                    pods.pop(pod.name, None)
                else:
                    pods[pod.name] = pod
        return pods

    # -- pods ----------------------------------------------------------------------------------------

    async def create(self, name: str, spec: Spec, labels: dict[str, str], *, wish: str | None = None) -> Pod:
        await self.write("create", name)
        fails, hangs = self.chance(self.faults.provision), self.chance(self.faults.hang)
        if fails and self.rng.random() < 0.5:
            self.note("failed", name)
            raise ProvisionError(f"{name}: admission webhook failed", kind="admission")
        pod = self.pods[name] = Pod(name, spec, labels, wish=wish)
        self._changes.append((True, pod))
        self.peak = max(self.peak, len(self.pods))
        if hangs:
            self.note("hangs", name)
            try:
                await asyncio.Event().wait() if not self.place.nodes else await asyncio.sleep(10**9)
            finally:
                if self.rng.random() >= self.faults.late:
                    self._gone(pod)
        await self._schedule(pod)
        await self._pull(pod)
        await self.pause(self.place.start)
        if fails:
            self.note("failed", name)
            raise ProvisionError(f"{name}: the container exits at once", kind="crash_loop")
        if pod.dead or name not in self.pods:
            raise ProvisionError(f"{name} was deleted before it was ready", kind="deleted")
        await self.pause(self.place.lag)
        pod.ready = True
        self.note("ready", name)
        if self.faults.death_per_s > 0:
            life = self.rng.expovariate(self.faults.death_per_s)
            pod.doom = self.loop.call_later(life, self.kill, name)
        return pod

    async def _schedule(self, pod: Pod) -> None:
        now = self.loop.time()
        turn = max(now, self._next_slot)
        self._next_slot = turn + 1 / self.place.schedules
        if turn > now:
            await asyncio.sleep(turn - now)
        image = pod.spec.image or "base"
        while True:
            free = [node for node in self.nodes if node.used < node.slots]
            if free:
                break
            self._free.clear()
            await self._free.wait()
        warm = [node for node in free if image in node.images or image in node.pulling]
        wished = [node for node in free if node.name == pod.wish]
        pod.node = min(wished or warm or free, key=lambda node: node.used)
        pod.node.used += 1

    async def _pull(self, pod: Pod) -> None:
        node, image = pod.node, pod.spec.image or "base"
        assert node is not None
        if image in node.images:
            node.images.move_to_end(image)
            return
        if image in node.pulling:
            await asyncio.shield(node.pulling[image])
            return
        done: asyncio.Future[None] = self.loop.create_future()
        node.pulling[image] = done
        try:
            async with node.lanes:
                size = self._size_of(image)
                busy = sum(bool(n.pulling) for n in self.nodes)
                rate = min(self.place.pull_rate, self.place.registry_rate / max(1, busy))
                await asyncio.sleep(size / rate)
            while node.images and node.bytes + size > node.disk:
                node.bytes -= node.images.popitem(last=False)[1]
            node.images[image] = size
            node.bytes += size
            self.pulled += size
        finally:
            del node.pulling[image]
            done.set_result(None)

    def _size_of(self, image: str) -> int:
        size = self._image_sizes.get(image)
        if size is None:
            size = self._image_sizes[image] = self.rng.randint(*self.place.image)
        return size

    async def delete(self, name: str) -> None:
        await self.write("delete", name)
        pod = self.pods.get(name)
        if pod is None:
            return
        if self.chance(self.faults.stuck):
            self.note("stuck", name)
            await asyncio.sleep(10**9)
        if self.chance(self.faults.dispose):
            raise ProvisionError(f"deleting {name}: internal error", kind="api_error")
        await self.pause(self.place.stop)
        self._gone(pod)
        self.note("gone", name)

    def _gone(self, pod: Pod) -> None:
        if self.pods.get(pod.name) is not pod:
            return
        del self.pods[pod.name]
        self._changes.append((False, pod))
        pod.dead = True
        if pod.doom is not None:
            pod.doom.cancel()
        if pod.node is not None:
            pod.node.used -= 1
            self._free.set()

    def kill(self, name: str) -> None:
        """The sandbox dies, as of itself; its pod has to be deleted all the same."""
        pod = self.pods.get(name)
        if pod is None or pod.dead:
            return
        from ...errors import SandboxDiedError

        self.note("died", name)
        pod.dead = True
        for tell in pod.lost:
            tell(SandboxDiedError(f"sandbox {name} died", sandbox=name))

    def lose_node(self, node: str) -> None:
        """A node goes, with everything on it."""
        for pod in [p for p in self.pods.values() if p.node is not None and p.node.name == node]:
            self.kill(pod.name)

    def facts(self) -> dict[str, Any]:
        return {"pods": len(self.pods), "peak": self.peak, "refused": self.refused, "pulled": self.pulled}
