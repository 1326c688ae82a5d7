"""A backend of somebody else's, and the suite that says whether it keeps the promises.

This one keeps its sandboxes on this machine by means of the local backend and counts what it is asked for;
yours would call a cloud's API in ``provision`` and ``dispose`` and open a socket to the keeper there in
``connect``. In a package of its own it is found by name (``Pool("counted")``) through its entry point:

    [project.entry-points."rlsandbox.backends"]
    counted = "acme_backend:Counted"

    python backend.py          one task on it
    pytest backend.py          the conformance suite
"""

import asyncio
import collections
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

import rlsandbox as rls
from rlsandbox.backends import Backend, Capabilities, Local, Member
from rlsandbox.tasks.policies import canonical
from rlsandbox.testing import BackendConformance


class Counted(Backend):
    """Sandboxes of the local backend, with a count of every request."""

    name = "counted"

    def __init__(self, *, isolation: str = "auto") -> None:
        self.place = Local(isolation=isolation)
        self.asked: collections.Counter[str] = collections.Counter()

    async def capabilities(self) -> Capabilities:
        return await self.place.capabilities()

    async def provision(
        self, spec: rls.Spec, *, member: str, labels: Mapping[str, str], deadline: float
    ) -> Member:
        self.asked["provision"] += 1
        return await self.place.provision(spec, member=member, labels=labels, deadline=deadline)

    async def connect(self, member: Member) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.asked["connect"] += 1
        return await self.place.connect(member)

    async def dispose(self, member: Member) -> None:
        self.asked["dispose"] += 1
        await self.place.dispose(member)

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        return await self.place.list(labels)

    # These have defaults: a backend without them primes anew in each sandbox and cannot fork.
    async def give_layer(self, layer: str, member: Member) -> bool:
        return await self.place.give_layer(layer, member)

    async def drop_layer(self, layer: str) -> None:
        await self.place.drop_layer(layer)

    def environment(self, spec: rls.Spec) -> Mapping[str, str]:
        return self.place.environment(spec)

    async def close(self) -> None:
        await self.place.close()


class TestCounted(BackendConformance):
    skip: ClassVar[dict[str, str]] = {}  # name of a test to the reason why not

    @pytest.fixture
    def backend(self) -> Backend:
        return Counted()


def main() -> None:
    backend = Counted()
    with rls.Pool(backend, size=2) as pool:
        report = pool.run_rollouts(rls.load_tasks("demo", limit=4), canonical, group_size=2)
    print("reward", report.mean_reward, "coverage", report.coverage, "asked for", dict(backend.asked))
    assert backend.asked["provision"] == backend.asked["dispose"]


if __name__ == "__main__":
    main()
