"""What the pool asks of a backend beyond making and removing: where to place, what to adopt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import AsyncPool, Spec, Task, hookimpl
from rlsandbox.backends.base import Capabilities, Member
from rlsandbox.backends.simulated import Simulated
from rlsandbox.errors import ProvisionError
from rlsandbox.pool.operations import Deadlines
from rlsandbox.testing.clock import VirtualClock


class Placer:
    """Chooses by a task's metadata."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[str]]] = []

    @hookimpl
    def rlsandbox_place(self, task: Task, nodes: Sequence[str]) -> str | None:
        self.asked.append((task.id, nodes))
        wish = task.metadata.get("node")
        if wish == "raise":
            raise RuntimeError("no map of the nodes")
        return None if wish is None else str(wish)


def run(main: Any) -> Any:
    return VirtualClock().run(main())


def pool_of(backend: Simulated, tmp_path: Path, **how: Any) -> AsyncPool:
    return AsyncPool(backend, config=False, ledger=tmp_path, **{"size": 1, "max_size": 8, **how})


def task_on(wish: str | None, name: str = "t") -> Task:
    return Task(id=name, spec=Spec(labels={"task": name}), metadata={"node": wish} if wish else {})


def test_a_plugin_places_the_sandboxes_of_a_task(tmp_path: Path) -> None:
    placer = Placer()

    async def main() -> list[str | None]:
        found = []
        async with pool_of(Simulated(nodes=4, slots=8), tmp_path, plugins=[placer]) as pool:
            for i, wish in enumerate(["node-3", "node-3", "node-1"]):
                sandbox = await pool.claim(task_on(wish, f"t{i}"))
                found.append(sandbox.node)
        return found

    assert run(main) == ["node-3", "node-3", "node-1"]
    asked = dict(placer.asked)
    assert set(asked) == {"t0", "t1", "t2"}
    assert asked["t0"] == ("node-0", "node-1", "node-2", "node-3")


@pytest.mark.parametrize("wish", [None, "elsewhere", "raise"])
def test_what_a_plugin_cannot_say_is_left_to_the_backend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wish: str | None
) -> None:
    async def main() -> str | None:
        async with pool_of(Simulated(nodes=2), tmp_path, plugins=[Placer()]) as pool:
            node: str | None = (await pool.claim(task_on(wish))).node
            return node

    with caplog.at_level(logging.WARNING, "rlsandbox.pool"):
        assert run(main) in ("node-0", "node-1")
    said = [r.message for r in caplog.records if "rlsandbox_place" in r.message]
    assert len(said) == (wish is not None)


class Warm(Simulated):
    """A place that keeps some sandboxes ready by itself, under names of its own."""

    def __init__(self, stock: int, *, breaks: int = 0) -> None:
        super().__init__(nodes=4)
        self.stock, self.breaks = stock, breaks
        self.made: list[str] = []
        self.removed: list[str] = []

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            reset_modes=frozenset({"overlay"}), adopt=True, pause=True, snapshot=True,
            max_writes_per_s=None, shared_layers=True,
        )  # fmt: skip

    async def adopt(self, spec: Spec, *, labels: Mapping[str, str], deadline: float) -> Member | None:
        if self.breaks:
            self.breaks -= 1
            raise ProvisionError("the claim was refused")
        if not self.stock:
            return None
        self.stock -= 1
        return await super().provision(spec, member=f"warm-{self.stock}", labels=labels, deadline=deadline)

    async def provision(self, spec: Spec, *, member: str, **how: Any) -> Member:
        self.made.append(member)
        return await super().provision(spec, member=member, **how)

    async def dispose(self, member: Member) -> None:
        self.removed.append(member.id)
        await super().dispose(member)


def test_what_a_place_keeps_ready_is_adopted_before_anything_is_made(tmp_path: Path) -> None:
    backend = Warm(2)

    async def main() -> list[str]:
        async with pool_of(backend, tmp_path, size=3, max_size=3) as pool:
            assert await pool.wait_ready() == 3
            names = [(await pool.claim(Task(id=f"t{i}"))).id for i in range(3)]
            await pool.driver.until(lambda: False, 700)  # longer than it takes to look for strays
            assert pool.stats().strays == 0
            return names

    names = run(main)
    assert {"warm-0", "warm-1"} < set(names)
    assert len(backend.made) == 1
    assert {"warm-0", "warm-1", *backend.made} == set(backend.removed)


def test_an_adoption_that_fails_is_a_creation_that_failed(tmp_path: Path) -> None:
    backend = Warm(1, breaks=2)

    async def main() -> tuple[str, int]:
        async with pool_of(backend, tmp_path) as pool:
            sandbox = await pool.claim(Task(id="t"), timeout=300)
            return sandbox.id, pool.stats().create_failed

    assert run(main) == ("warm-0", 2)


def test_requests_are_counted_a_claim(tmp_path: Path) -> None:
    async def main() -> tuple[Any, Any]:
        backend = Simulated(nodes=1, slots=8)
        backend.requests = {"POST": 3, "DELETE": 1, "GET": 4, "repeated": 5}  # type: ignore[attr-defined]
        async with pool_of(backend, tmp_path, size=2) as pool:
            await pool.wait_ready(2)
            before = pool.stats()
            for i in range(4):
                async with pool.claim(Task(id=f"t{i}")):
                    pass
            return before, pool.stats()

    before, after = run(main)
    assert before.requests_each is None, "nothing was claimed: no number, not 0"
    assert after.requests_each == 2.0 and after.to_dict()["requests"]["repeated"] == 5


@pytest.mark.parametrize("bound", [None, 2])
def test_as_many_are_reset_at_once_as_the_place_stands(tmp_path: Path, bound: int | None) -> None:
    """Who waits for its turn does not use up the time that a reset may take."""
    backend = Simulated(nodes=4, slots=8)
    backend.max_resetting = bound

    async def main() -> tuple[int, int]:
        now = most = 0
        async with pool_of(backend, tmp_path, size=8) as pool:
            assert await pool.wait_ready() == 8
            pool.driver.deadlines = Deadlines(reset=1.5)

            def slow(link: Any) -> None:
                reset = link.reset

                async def counted(*args: Any, **how: Any) -> None:
                    nonlocal now, most
                    now += 1
                    most = max(most, now)
                    try:
                        await asyncio.sleep(1.0)
                        await reset(*args, **how)
                    finally:
                        now -= 1

                link.reset = counted

            for held in pool.driver.held.values():
                slow(held.link)
            for sandbox in [await pool.claim(Task(id=f"t{i}")) for i in range(8)]:
                await sandbox.release()
            assert await pool.wait_ready(8, timeout=60) == 8
            stats = pool.stats()
            assert (stats.reset_failed, stats.created) == (0, 8)
            return most, stats.resets

    assert run(main) == (bound or 8, 8)
