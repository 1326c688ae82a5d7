"""What a plan is made from: images and their layers, nodes and their disks, the demand of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._references import split_name
from ..errors import ConfigError
from ..spec import Spec
from ..task import Task

PACKED = 3.5
"""Bytes on a node's disk per compressed byte of a layer: the blob stays beside what was unpacked from it."""
PLAIN = 2.0
"""The same for a layer that is not compressed."""


@dataclass(frozen=True)
class Layer:
    """A part of an image, the same wherever its digest is the same.

    Args:
        digest: ``sha256:...``.
        size: bytes that travel.
        packed: whether these are compressed.
    """

    digest: str
    size: int
    packed: bool = True

    def on_disk(self, factor: float = PACKED) -> int:
        """Bytes that a node's disk needs for it; *factor*: per compressed byte."""
        return round(self.size * (factor if self.packed else PLAIN))


@dataclass(frozen=True)
class Image:
    """An image as its registry describes it.

    Args:
        name: as tasks name it.
        layers: None when nobody could say.
        digest: of the manifest for the nodes' platform.
        streams: the format by which a snapshotter may start it before it is whole (``estargz`` ..); or empty.
        why: why its layers are not known.
    """

    name: str
    layers: tuple[Layer, ...] | None = None
    digest: str | None = None
    streams: str = ""
    why: str = ""

    @property
    def size(self) -> int | None:
        """Bytes that travel to a node that has none of it."""
        return None if self.layers is None else sum({row.digest: row.size for row in self.layers}.values())


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Args:
        name: of the node.
        arch: ``amd64`` ..
        images: bytes of each image that it has, by every name that it knows for it.
        in_use: names of images that pods on it use now: these are not given up.
        busy: bytes of its disk that those fill.
        room: bytes of disk that images may fill before the kubelet begins to remove some; None: not known.
        sandboxes: how many more it can run.
        usable: why nothing may be put on it (cordoned, not ready ..), or empty.
        notes: what one should know of it.
    """

    name: str
    arch: str = "amd64"
    images: Mapping[str, int] = field(default_factory=dict)
    in_use: frozenset[str] = frozenset()
    busy: int = 0
    room: int | None = None
    sandboxes: int = 110
    usable: str = ""
    notes: tuple[str, ...] = ()

    def has(self, image: Image) -> bool:
        """Whether the image is there under its name, or by its digest under another."""
        return _among(image, self.images)

    def uses(self, image: Image) -> bool:
        """Whether pods on it use the image, whatever they call it."""
        return _among(image, self.in_use)

    def size_of(self, name: str) -> int | None:
        """Bytes of an image, as this node tells; None: it does not."""
        return next((size for alias in aliases(name) if (size := self.images.get(alias))), None)


@dataclass(frozen=True)
class Inventory:
    """All nodes of a place; ``notes``: what could not be learned, and what follows from it."""

    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if not node.usable)


@dataclass(frozen=True)
class Demand:
    """How many rollouts want an image.

    Args:
        image: its name.
        rollouts: of all its tasks together.
        group: rollouts of one task, which are kept on one node where that can be.
        tasks: how many tasks name it.
    """

    image: str
    rollouts: int
    group: int = 1
    tasks: int = 1


def demand_of(
    tasks: Iterable[Task], *, group_size: int = 1, spec: Spec | None = None, default: str | None = None
) -> list[Demand]:
    """The images that *tasks* name and the rollouts that want each, most wanted first.

    Args:
        tasks: those of a batch, or of a whole run.
        group_size: rollouts of each task.
        spec: of the pool; its image counts where a task names none.
        default: the backend's image, where neither names one.

    Raises:
        ConfigError: a task has no image at all.
    """
    if group_size < 1:
        raise ConfigError(f"group_size must be at least 1, not {group_size}")
    counted: Counter[str] = Counter()
    for task in tasks:
        own = task.spec.image if task.spec is not None else None
        image = own or task.image or (spec.image if spec is not None else None) or default
        if image is None:
            raise ConfigError(
                f"task {task.id!r} names no image",
                hint="Task(image=...), or an image for all: Spec(image=...), --image",
            )
        counted[image] += 1
    rows = [Demand(image, count * group_size, group_size, count) for image, count in counted.items()]
    return sorted(rows, key=lambda row: (-row.rollouts, row.image))


def _among(image: Image, names: Collection[str]) -> bool:
    if any(alias in names for alias in aliases(image.name)):
        return True
    return image.digest is not None and any(name.endswith("@" + image.digest) for name in names)


def aliases(name: str) -> tuple[str, ...]:
    """Names under which a node may list the image *name*: with the registry and tag that are meant."""
    host, rest, tag, digest = split_name(name)
    whole = f"{host}/{rest}"
    made = [name, f"{whole}@{digest}" if digest else f"{whole}:{tag}"]
    return tuple(dict.fromkeys(made))


def to_json(value: Any) -> Any:
    """Dataclasses, sets and tuples as JSON has them."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): to_json(row) for key, row in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [to_json(row) for row in value]
    return value
