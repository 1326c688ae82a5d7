"""The simulated backend: the seam over a :class:`~.cluster.Cluster`, with links and sandboxes of its own."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..._settings import nearest
from ...errors import ConfigError, UnsupportedError
from ...spec import Spec
from ..base import Backend, Capabilities, Member
from .cluster import Cluster, Faults, Place
from .link import SimulatedLink


class Simulated(Backend):
    """A cluster that exists only in time.

    Args:
        place: how large and how fast it is; or its fields by name (``nodes=16``).
        faults: what goes wrong; or its fields by name, prefixed: ``fault_provision=0.01``.
        seed: the same seed gives the same history.
    """

    name = "simulated"
    max_creating = 256

    def __init__(
        self, *, place: Place | None = None, faults: Faults | None = None, seed: int = 0, **options: Any
    ) -> None:
        place_names = {f.name for f in fields(Place)}
        fault_names = {f"fault_{f.name}" for f in fields(Faults)}
        for name in options:
            if name not in place_names | fault_names:
                raise ConfigError(
                    f"Simulated: unknown option {name!r}{nearest(name, place_names | fault_names)}"
                )
        wrong = {k.removeprefix("fault_"): v for k, v in options.items() if k in fault_names}
        self.place = replace(place or Place(), **{k: v for k, v in options.items() if k in place_names})
        self.faults = replace(faults or Faults(), **wrong)
        self.seed = seed
        self._cluster: Cluster | None = None

    def __repr__(self) -> str:
        return f"Simulated({self.place.nodes} nodes, seed {self.seed})"

    @property
    def cluster(self) -> Cluster:
        """Made on the event loop that first asks."""
        if self._cluster is None:
            self._cluster = Cluster(self.place, self.faults, self.seed)
        return self._cluster

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            reset_modes=frozenset({"overlay"}),
            adopt=False,
            pause=True,
            snapshot=True,
            max_writes_per_s=None if self.place.writes is None else self.place.writes * 0.8,
            shared_layers=True,
        )

    async def provision(
        self,
        spec: Spec,
        *,
        member: str,
        labels: Mapping[str, str],
        deadline: float,
        node: str | None = None,
    ) -> Member:
        pod = await self.cluster.create(member, spec, dict(labels), wish=node)
        return Member(id=member, node=pod.node.name if pod.node else None)

    def nodes(self) -> Sequence[str]:
        return [node.name for node in self.cluster.nodes if node.used < node.slots]

    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        raise UnsupportedError("a simulated sandbox has no keeper to connect to")

    async def open_link(self, member: Member) -> SimulatedLink:
        """How the pool reaches a member."""
        return SimulatedLink(self.cluster, self.cluster.pods[member.id])

    async def dispose(self, member: Member) -> None:
        await self.cluster.delete(member.id)

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        return [
            Member(id=pod.name, node=pod.node.name if pod.node else None)
            for pod in self.cluster.listed().values()
            if labels.items() <= pod.labels.items()
        ]
