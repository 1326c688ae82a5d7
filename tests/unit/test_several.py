"""Several places behind one pool: who gets what, who is left out, who comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.backends import Clusters, Member, Part, Simulated
from rlsandbox.backends.registry import load_backend
from rlsandbox.errors import ConfigError, ImageError, ProvisionError, SandboxError
from rlsandbox.spec import Spec
from rlsandbox.testing import LyingBackend, VirtualClock


def cluster(seed: int = 0, **how: Any) -> Simulated:
    return Simulated(
        seed=seed,
        **{
            "nodes": 4,
            "list_lag": 0,
            "lag": 0.001,
            "start": 0.01,
            "image": (1000, 1000),
            "writes": None,
            **how,
        },
    )


class Moody(LyingBackend):
    """Fails with ``error`` while there is one."""

    def __init__(self, inner: Simulated) -> None:
        super().__init__(inner, list_lag=0)
        self.error: BaseException | None = None
        self.asked = 0
        self.wishes: list[str | None] = []

    async def capabilities(self) -> Any:
        if self.error is not None:
            raise self.error
        return await self.inner.capabilities()

    async def provision(
        self, spec: Spec, *, member: str, labels: Mapping[str, str], deadline: float, node: str | None = None
    ) -> Member:
        self.asked += 1
        self.wishes.append(node)
        if self.error is not None:
            raise self.error
        return await super().provision(spec, member=member, labels=labels, deadline=deadline)

    async def list(self, labels: Mapping[str, str]) -> Any:
        if self.error is not None:
            raise self.error
        return await super().list(labels)


def down(kind: str = "api_unreachable") -> ProvisionError:
    return ProvisionError("no answer", kind=kind)


def run(body: Callable[[], Awaitable[None]]) -> None:
    VirtualClock().run(body())


async def make(backend: Clusters, name: str, deadline: float = 600, **how: Any) -> Member:
    return await backend.provision(Spec(), member=name, labels={"run": "r"}, deadline=deadline, **how)


async def many(backend: Clusters, count: int, prefix: str = "m") -> Counter[str]:
    made = await asyncio.gather(*(make(backend, f"{prefix}{n}") for n in range(count)))
    return Counter((row.node or "").partition("/")[0] for row in made)


def test_weights_and_ceilings() -> None:
    async def body() -> None:
        backend = Clusters(
            [
                Part(cluster(), weight=3, name="a"),
                Part(cluster(1), name="b"),
                Part(cluster(2), ceiling=1, name="c"),
            ]
        )
        await backend.capabilities()
        assert await many(backend, 21) == {"a": 15, "b": 5, "c": 1}
        told = await backend.list({"run": "r"})
        assert Counter((row.node or "").partition("/")[0] for row in told) == {"a": 15, "b": 5, "c": 1}
        assert repr(backend) == "Clusters(a: 15, b: 5, c: 1)"

    run(body)


def test_all_full_waits_for_room_and_not_for_ever() -> None:
    async def body() -> None:
        backend = Clusters([Part(cluster(), ceiling=1, name="a"), Part(cluster(1), ceiling=1, name="b")])
        first, _ = await make(backend, "m0"), await make(backend, "m1")
        waiting = asyncio.create_task(make(backend, "m2"))
        await asyncio.sleep(30)
        assert not waiting.done()
        await backend.dispose(first)
        assert (await waiting).node.partition("/")[0] == first.node.partition("/")[0]
        with pytest.raises(ProvisionError, match=r"every cluster is full .* a \(1\), b \(1\)"):
            await make(backend, "m3", deadline=5)
        waiting = asyncio.create_task(make(backend, "m4"))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert sorted(row.id for row in await backend.list({})) == ["m1", "m2"]

    run(body)


@pytest.mark.parametrize("kind", ["api_unreachable", "unauthorized", "quota", "unschedulable"])
def test_one_that_fails_is_left_out_and_comes_back(kind: str) -> None:
    async def body() -> None:
        a = Moody(cluster())
        backend = Clusters([Part(a, name="a", weight=100), Part(cluster(1), name="b")])
        await backend.capabilities()
        await make(backend, "m0")
        a.error = down(kind)
        assert await many(backend, 5, "n") == {"b": 5}
        assert a.asked <= 1 + 5  # those that were under way; nobody after them
        asked = a.asked
        assert await many(backend, 5, "o") == {"b": 5}
        assert a.asked == asked
        assert "a: 1 (left out)" in repr(backend)
        assert {row.id for row in await backend.list({})} >= {"m0", "n0"}  # what it had is not taken for gone
        await asyncio.sleep(7)
        await make(backend, "p0")
        assert a.asked == asked + 1
        await asyncio.sleep(7)  # longer each time
        await make(backend, "p1")
        assert a.asked == asked + 1
        a.error = None
        await asyncio.sleep(10)
        assert (await make(backend, "q0")).node.startswith("a/")
        assert "left out" not in repr(backend)

    run(body)


def test_an_odd_failure_is_tried_elsewhere_and_three_in_a_row_are_too_many() -> None:
    async def body() -> None:
        a = Moody(cluster())
        backend = Clusters([Part(a, name="a", weight=100), Part(cluster(1), name="b")])
        a.error = ProvisionError("odd")
        for number in range(5):
            assert (await make(backend, f"m{number}")).node.startswith("b/")
        assert a.asked == 3

    run(body)


def test_what_no_cluster_can_help_is_not_tried_everywhere() -> None:
    async def body() -> None:
        a, b = Moody(cluster()), Moody(cluster(1))
        backend = Clusters([Part(a, name="a", weight=2), Part(b, name="b")])
        a.error = ImageError("no such image", kind="image_not_found", infrastructure=False)
        with pytest.raises(ImageError):
            await make(backend, "m0")
        assert (a.asked, b.asked) == (1, 0)
        assert "left out" not in repr(backend)

    run(body)


def test_all_down() -> None:
    async def body() -> None:
        a, b = Moody(cluster()), Moody(cluster(1))
        a.error, b.error = down(), down("unauthorized")
        backend = Clusters([Part(a, name="a"), Part(b, name="b")])
        with pytest.raises(ProvisionError, match="no cluster takes sandboxes: a: no answer; b: no answer"):
            await backend.capabilities()
        with pytest.raises(ProvisionError, match="no cluster takes sandboxes") as caught:
            await make(backend, "m0")
        assert caught.value.retryable

    run(body)


def test_one_that_is_away_at_the_start_and_one_that_is_set_up_wrongly() -> None:
    async def body() -> None:
        a = Moody(cluster())
        backend = Clusters([Part(a, name="a"), Part(cluster(1), name="b")])
        a.error = down()
        told = await backend.capabilities()
        assert told.reset_modes == {"overlay"} and not told.shared_layers
        a.error = ConfigError("no such context")
        with pytest.raises(ConfigError, match="no such context"):
            await backend.capabilities()

    run(body)


def test_a_cancelled_creation_counts_no_more() -> None:
    async def body() -> None:
        a = Moody(cluster())
        a.creates_hang = 1
        backend = Clusters([Part(a, ceiling=1, name="a")])
        task = asyncio.create_task(make(backend, "m0"))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await make(backend, "m1")).id == "m1"

    run(body)


def test_what_was_made_although_it_failed_is_removed_everywhere() -> None:
    async def body() -> None:
        a = Moody(cluster())
        a.creates_lie = 1
        backend = Clusters([Part(a, name="a", weight=9), Part(cluster(1), name="b")])
        made = await make(backend, "m0")
        assert made.node.startswith("b/") and "m0" in a.exists
        await backend.dispose(made)
        await backend.dispose(Member("m0", None))
        assert not a.exists and not await backend.list({})

    run(body)


def test_nodes_are_named_with_their_cluster() -> None:
    async def body() -> None:
        a, b = Moody(cluster()), Moody(cluster(1))
        backend = Clusters([Part(a, name="a"), Part(b, name="b")])
        assert not backend.nodes()  # neither says any
        plain = Clusters([Part(cluster(nodes=2), name="x"), Part(cluster(1, nodes=1), name="y")])
        assert len(plain.nodes()) == 3
        wish = next(node for node in plain.nodes() if node.startswith("y/"))
        assert (await make(plain, "m0", node=wish)).node == wish
        assert (await make(plain, "m1", node="z/gone")).node
        await make(backend, "m2", node="b/n")
        assert (a.wishes, b.wishes) == ([], ["n"])

    run(body)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "at least one part"),
        ("ab", "must be a list"),
        ([7], "a Part, a Backend or a table, not int"),
        ([Part(cluster(), weight=0)], "weight must be a number above 0, not 0"),
        ([Part(cluster(), weight=float("nan"))], "weight"),
        ([Part(cluster(), ceiling=0)], "ceiling"),
        ([Part(cluster(), ceiling=1.5)], "whole number"),  # type: ignore[arg-type]
        ([Part(cluster(), name="a"), Part(cluster(), name="a")], "two parts are called 'a'"),
        ([Part(cluster(), name="a/b")], "no '/'"),
        ([{"name": "simulated", "nods": 3}], "nods"),
    ],
)
def test_bad_parts(parts: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Clusters(parts)


def test_from_a_configuration() -> None:
    made = load_backend(
        "clusters",
        {
            "parts": [
                {"name": "simulated", "called": "east", "weight": 2, "ceiling": 5},
                {"name": "simulated", "seed": 4},
            ],
            "nodes": 3,
        },
    )
    assert repr(made) == "Clusters(east: 0, cluster-1: 0)"
    with pytest.raises(ConfigError, match="max_size=9, and the ceilings of the clusters add up to 5"):
        Clusters([Part(cluster(), ceiling=5)]).check_size(9, Spec())


def test_a_pool_over_two_machines_places(tmp_path: Any) -> None:
    """The whole pool, with real sandboxes: two local backends stand for two clusters."""
    from rlsandbox.backends import Local

    two = Clusters([Part(Local(), name="a", ceiling=2), Part(Local(), name="b", ceiling=2)])
    tasks = [rls.Task(id=f"t{n}", setup=f"echo {n} > /tmp/primed") for n in range(6)]
    with rls.Pool(two, size=4, ledger=tmp_path / "l.db", config=False) as pool:

        def policy(sandbox: Any, task: Any) -> str:
            assert sandbox.run("cat /tmp/primed").stdout == f"{task.id[1:]}\n"
            return str(sandbox.node)

        report = pool.run_rollouts(tasks, policy, group_size=4)
        assert [record.status for record in report.records] == ["completed"] * 24
        with pool.claim(tasks[0]) as first:
            first.run("echo 1 > /tmp/a")
            snapshot = first.snapshot()
            with snapshot.fork(2) as forks:
                assert [fork.run("cat /tmp/a").stdout for fork in forks] == ["1\n"] * 2
    with pytest.raises(SandboxError):
        pool.claim(tasks[0])
