"""Which image goes to which node.

Greedy, and good enough for thousands of images: family after family (images that share a large layer), each
image to the node that has the most of its layers already (in fact or by this plan), as long as that node's
share of the rollouts and its disk allow. So siblings stay together, and images that share layers gather on
the same nodes. The order in which images are then brought there goes by demand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..errors import ConfigError
from .model import PACKED, Demand, Image, Inventory, Layer
from .plan import ASSUMED, NodeUse, Plan, Pull


def plan_images(
    demand: Iterable[Demand],
    images: Mapping[str, Image],
    inventory: Inventory,
    *,
    split: bool = False,
    unpack: float = PACKED,
    assumed: int = ASSUMED,
) -> Plan:
    """Place *demand* on the nodes of *inventory*.

    Args:
        demand: see :func:`~rlsandbox.images.demand_of`.
        images: what is known of them, by name; one that is not in it counts as unknown.
        inventory: the nodes.
        split: what does not fit on disk at once goes into later waves, instead of being refused.
        unpack: bytes on disk per compressed byte.
        assumed: bytes that an image is taken for when its size is unknown.

    Raises:
        ConfigError: there is no node to use, or nothing is wanted.
    """
    rows = sorted(demand, key=lambda row: (-row.rollouts, row.image))
    if not rows:
        raise ConfigError("no task, so no image to plan for")
    if not inventory.usable:
        why = "; ".join(f"{node.name}: {node.usable}" for node in inventory.nodes[:3])
        raise ConfigError(f"no node can take images{f' ({why})' if why else ''}")
    work = _Work(inventory, images, sum(row.rollouts for row in rows), unpack, assumed)
    refused: dict[str, str] = {}
    waiting: Sequence[Demand] = work.by_family(rows)
    wave = 0
    while waiting:
        later = [left for row in waiting if (left := work.place(row, wave)) is not None]
        fits_never = [row for row in later if not split or not work.could(row)]
        for row in fits_never:
            refused[row.image] = work.why(row, split)
        waiting = [row for row in later if row.image not in refused]
        if waiting and len(waiting) == len(later) and not work.placed_in(wave):
            raise AssertionError("a wave that takes nothing")  # could() and place() disagree
        work.next_wave()
        wave += 1
    return work.plan(rows, refused)


class _Work:
    """The state of one planning: what each node will have, and how much of the demand it took."""

    def __init__(
        self, inventory: Inventory, images: Mapping[str, Image], rollouts: int, unpack: float, assumed: int
    ) -> None:
        self.nodes = inventory.usable
        self.images, self.unpack, self.assumed = images, unpack, assumed
        self.notes = list(inventory.notes)
        self.pulls: dict[tuple[int, str, str], Pull] = {}
        self.unknown: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.position = {node.name: at for at, node in enumerate(self.nodes)}
        count = len(self.nodes)
        self.held: dict[str, np.ndarray] = {}
        """By layer: which nodes have it, because it is there or will be."""
        self.counted: dict[str, np.ndarray] = {}
        """By layer: on which nodes ``disk`` counts it."""
        self.present: dict[str, np.ndarray] = {}
        self.disk = np.zeros(count)
        """Bytes that this plan's wave fills on each node, with what is in use there."""
        self.room = np.array([math.inf if node.room is None else node.room for node in self.nodes])
        self.filled = np.zeros(count)
        self.fullest = np.zeros(count)
        # Rollouts that a node takes: its part of all, by how many it can run at once.
        weight = np.array([max(node.sandboxes, 0) for node in self.nodes], dtype=float)
        if not weight.any():
            raise ConfigError("no node has room for one more sandbox")
        self.share = np.ceil(rollouts * weight / weight.sum())
        self.left = self.share.copy()
        self.able = weight > 0
        if rollouts > weight.sum():
            self.notes.append(
                f"{rollouts:,} rollouts and room for {int(weight.sum()):,} sandboxes: they go by turns"
            )
        self._there()

    def _there(self) -> None:
        """What nodes have already: layers of images that we know, and what may not be removed."""
        self.filled[:] = [node.busy for node in self.nodes]
        for image in self.images.values():
            there = self._has(image.name)
            used = np.array([node.uses(image) for node in self.nodes], dtype=bool)
            for layer in image.layers or () if there.any() else ():
                self._mask(self.held, layer.digest)[there] = True
                self._mask(self.counted, layer.digest)[there & used] = True
        self.disk, self.fullest = self.filled.copy(), self.filled.copy()
        self.first_held = {digest: mask.copy() for digest, mask in self.held.items()}
        self.first_counted = {digest: mask.copy() for digest, mask in self.counted.items()}

    def _mask(self, masks: dict[str, np.ndarray], digest: str) -> np.ndarray:
        return masks.setdefault(digest, np.zeros(len(self.nodes), dtype=bool))

    def layers(self, name: str) -> tuple[Layer, ...]:
        image = self.images.get(name)
        if image is None or image.layers is None:
            self.unknown.add(name)
            size = self.told(name)
            return (Layer(f"unknown:{name}", size),)
        return tuple({layer.digest: layer for layer in image.layers}.values())

    def told(self, name: str) -> int:
        """Bytes of an image whose layers nobody tells."""
        if name not in self.sizes:
            sizes = (node.size_of(name) for node in self.nodes)
            self.sizes[name] = next((size for size in sizes if size), self.assumed)
        return self.sizes[name]

    def by_family(self, rows: Sequence[Demand]) -> list[Demand]:
        """*rows* with images that share a large layer side by side, the families that share most first."""
        users: Counter[str] = Counter()
        for row in rows:
            users.update(layer.digest for layer in self.layers(row.image))

        def family(row: Demand) -> tuple[int, str]:
            shared = [
                (layer.size, layer.digest) for layer in self.layers(row.image) if users[layer.digest] > 1
            ]
            return max(shared, default=(0, row.image))

        weight: Counter[str] = Counter()
        key = {row.image: family(row) for row in rows}
        for row in rows:
            size, digest = key[row.image]
            weight[digest] += size
        return sorted(
            rows, key=lambda row: (-weight[key[row.image][1]], key[row.image][1], -row.rollouts, row.image)
        )

    def costs(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that would travel to each node, and bytes that would be added to its disk."""
        count = len(self.nodes)
        travel, disk = np.zeros(count), np.zeros(count)
        for layer in self.layers(name):
            held = self.held.get(layer.digest)
            travel += layer.size if held is None else np.where(held, 0, layer.size)
            size = layer.on_disk(self.unpack)
            counted = self.counted.get(layer.digest)
            disk += size if counted is None else np.where(counted, 0, size)
        travel[self._has(name)] = 0
        return travel, disk

    def place(self, row: Demand, wave: int) -> Demand | None:
        """Give *row* to nodes; what no node's disk could take is given back."""
        left = row.rollouts
        while left:
            travel, disk = self.costs(row.image)
            fits = self.able & (self.disk + disk <= self.room)
            open_ = fits & (self.left > 0)
            pool = open_ if open_.any() else fits
            if not pool.any():
                return Demand(row.image, left, row.group, row.tasks)
            # The least to bring; among equals the one that lacks most of its share.
            order = np.lexsort((np.arange(len(self.nodes)), -self.left, np.where(pool, travel, np.inf)))
            at = int(order[0])
            spare = max(int(self.left[at]), 0)
            whole = (
                math.ceil(spare / row.group) * row.group
            )  # a group is not torn for the sake of a remainder
            several = pool.sum() > 1
            take = min(left, max(whole, row.group)) if several else left
            self._take(row.image, at, take, int(travel[at]), wave)
            left -= take
        return None

    def _take(self, name: str, at: int, rollouts: int, travel: int, wave: int) -> None:
        node = self.nodes[at]
        for layer in self.layers(name):
            self._mask(self.held, layer.digest)[at] = True
            counted = self._mask(self.counted, layer.digest)
            if not counted[at]:
                counted[at] = True
                self.disk[at] += layer.on_disk(self.unpack)
        self.fullest[at] = max(self.fullest[at], self.disk[at])
        self.left[at] -= rollouts
        key = (wave, name, node.name)
        before = self.pulls.get(key)
        if before is not None:
            self.pulls[key] = replace(before, rollouts=before.rollouts + rollouts)
        else:
            self.pulls[key] = Pull(name, node.name, rollouts, travel, bool(self._has(name)[at]), wave)

    def _has(self, name: str) -> np.ndarray:
        """Which nodes have the image itself already."""
        found = self.present.get(name)
        if found is None:
            image = self.images.get(name, Image(name))
            found = self.present[name] = np.array([node.has(image) for node in self.nodes], dtype=bool)
        return found

    def could(self, row: Demand) -> bool:
        """Whether an empty disk of some node could take it."""
        need = sum(layer.on_disk(self.unpack) for layer in self.layers(row.image))
        return bool((self.able & (self.filled + need <= self.room)).any())

    def why(self, row: Demand, split: bool) -> str:
        need = sum(layer.on_disk(self.unpack) for layer in self.layers(row.image))
        largest = float((self.room - self.filled)[self.able].max())
        if need > largest:
            return f"needs {need:,} bytes of disk, and the largest node has room for {int(largest):,}"
        return f"{row.rollouts} rollouts: the disks of all nodes are full; it fits into a later wave (split)"

    def placed_in(self, wave: int) -> bool:
        return any(pull.wave == wave for pull in self.pulls.values())

    def next_wave(self) -> None:
        """The rollouts before are over: their images may go where room is needed."""
        self.disk = self.filled.copy()
        self.held = {digest: mask.copy() for digest, mask in self.first_held.items()}
        self.counted = {digest: mask.copy() for digest, mask in self.first_counted.items()}
        self.left = self.share.copy()

    def plan(self, rows: Sequence[Demand], refused: Mapping[str, str]) -> Plan:
        everything: dict[str, Layer] = {}
        total = 0
        for row in rows:
            own = self.layers(row.image)
            total += sum(layer.size for layer in own)
            everything |= {layer.digest: layer for layer in own}
        uses = []
        rollouts, images, moved = Counter[str](), Counter[str](), Counter[str]()
        for pull in self.pulls.values():
            rollouts[pull.node] += pull.rollouts
            images[pull.node] += 1
            moved[pull.node] += pull.bytes
        for node in self.nodes:
            if images[node.name]:
                at = self.position[node.name]
                uses.append(
                    NodeUse(
                        node.name, rollouts[node.name], images[node.name], moved[node.name],
                        round(self.fullest[at]), node.room,
                    )
                )  # fmt: skip
        lazily = sorted({image.streams for image in self.images.values() if image.streams})
        if lazily:
            self.notes.append(
                f"some images can be started before they are whole ({', '.join(lazily)}) where a node's"
                " snapshotter does that: the bytes are then an upper bound"
            )
        return Plan(
            pulls=tuple(sorted(self.pulls.values(), key=lambda pull: (pull.wave, -pull.rollouts))),
            nodes=tuple(uses),
            refused=dict(refused),
            images=len(rows),
            rollouts=sum(row.rollouts for row in rows),
            unique_bytes=sum(layer.size for layer in everything.values()),
            image_bytes=total,
            unknown=tuple(sorted(self.unknown)),
            assumed=self.assumed,
            notes=tuple(self.notes),
        )
