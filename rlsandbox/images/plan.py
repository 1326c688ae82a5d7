"""A plan as data: which image goes to which node, in which wave; written to files and read from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._references import split_name
from ..errors import ConfigError
from .model import to_json

ASSUMED = 1 << 30
"""Bytes of an image of which nobody says how large it is."""


@dataclass(frozen=True)
class Pull:
    """An image that a node is to have.

    Args:
        image: its name.
        node: where.
        rollouts: how many of the demand are meant to run there.
        bytes: that travel: of the layers that the node has not, when its turn comes.
        there: the node has it already.
        wave: 0 first; a later wave is for when the rollouts of the earlier ones are over.
    """

    image: str
    node: str
    rollouts: int
    bytes: int
    there: bool = False
    wave: int = 0


@dataclass(frozen=True)
class NodeUse:
    """What a plan means for one node.

    Args:
        node: its name.
        rollouts: of the demand.
        images: different ones.
        bytes: that travel to it.
        working_set: bytes of its disk that the images of its fullest wave fill, with what runs there anyway.
        room: bytes that images may fill; None: not known.
    """

    node: str
    rollouts: int
    images: int
    bytes: int
    working_set: int
    room: int | None


@dataclass(frozen=True)
class Plan:
    """Where images go, in the order in which they are to be brought there.

    Args:
        pulls: by wave, most wanted first.
        nodes: what it means for each node that is used.
        refused: images that fit nowhere, with the reason.
        images: how many different ones are wanted.
        rollouts: how many want one.
        unique_bytes: of all layers of all images, each once.
        image_bytes: of all images, as if they shared nothing.
        unknown: images whose layers nobody told; they count as *assumed* bytes each.
        assumed: see there.
        notes: what one should know before carrying it out.
    """

    pulls: tuple[Pull, ...]
    nodes: tuple[NodeUse, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    images: int = 0
    rollouts: int = 0
    unique_bytes: int = 0
    image_bytes: int = 0
    unknown: tuple[str, ...] = ()
    assumed: int = ASSUMED
    notes: tuple[str, ...] = ()

    @property
    def waves(self) -> int:
        return 1 + max((pull.wave for pull in self.pulls), default=0)

    @property
    def bytes(self) -> int:
        """That travel to nodes, all waves together."""
        return sum(pull.bytes for pull in self.pulls)

    def missing(self, wave: int = 0) -> list[Pull]:
        """What is still to be brought in *wave*, in order."""
        return [pull for pull in self.pulls if pull.wave == wave and not pull.there]

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = to_json(self)
        return made | {"waves": self.waves, "bytes": self.bytes, "version": 1}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan that :meth:`save` wrote.

        Raises:
            ConfigError: the file is none.
        """
        try:
            data = json.loads(Path(path).read_text())
            if data["version"] != 1:
                raise ValueError(f"version {data['version']}, and this reads 1")
            own = {name: data[name] for name in cls.__dataclass_fields__}
            own["pulls"] = tuple(Pull(**row) for row in own["pulls"])
            own["nodes"] = tuple(NodeUse(**row) for row in own["nodes"])
            own["unknown"], own["notes"] = tuple(own["unknown"]), tuple(own["notes"])
            own["refused"] = dict(own["refused"])
            _check_types(cls(**own))
        except OSError as error:
            raise ConfigError(f"plan {path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no plan: {error!s}"[:300]) from error
        return cls(**own)


def _check_types(plan: Plan) -> None:
    """
    Raises:
        ValueError: something of a plan is not what it should be.
    """
    for row in (*plan.pulls, *plan.nodes, plan):
        for name, kind in type(row).__annotations__.items():
            value = getattr(row, name)
            wanted = {"str": str, "bool": bool, "int": int, "int | None": (int, type(None))}.get(kind)
            odd = kind.startswith("int") and (isinstance(value, bool) or (value or 0) < 0)
            if wanted is not None and (not isinstance(value, wanted) or odd):  # type: ignore[arg-type]
                raise ValueError(f"{name} of {type(row).__name__} is {value!r}")
    for pull in plan.pulls:
        split_name(pull.image)
        if not pull.node:
            raise ValueError("a pull without a node")
    words = (*plan.unknown, *plan.notes, *plan.refused, *plan.refused.values())
    if not all(isinstance(word, str) for word in words):
        raise ValueError("names and notes must be text")
