"""Which image goes to which node: what is brought, what stays together, what a disk cannot take."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsandbox as rls
from rlsandbox._references import split_name
from rlsandbox.errors import ConfigError
from rlsandbox.images import (
    Demand,
    Image,
    Inventory,
    Layer,
    Node,
    Plan,
    PlannedPlacement,
    Pull,
    demand_of,
    plan_images,
)
from rlsandbox.images.model import aliases

MIB = 1 << 20

SHA = "sha256:" + "1" * 64


def image(name: str, **layers: int) -> Image:
    return Image(name, tuple(Layer(f"sha256:{key}", size) for key, size in layers.items()))


def catalog(*images: Image) -> dict[str, Image]:
    return {row.name: row for row in images}


def test_images_that_share_layers_gather_and_siblings_stay_together() -> None:
    images = catalog(
        *(image(f"a{n}", base=10 * MIB, fa=500 * MIB, **{f"oa{n}": MIB}) for n in range(4)),
        *(image(f"b{n}", base=10 * MIB, fb=400 * MIB, **{f"ob{n}": MIB}) for n in range(4)),
    )
    plan = plan_images([Demand(name, 4, 4) for name in images], images, Inventory((Node("n0"), Node("n1"))))
    where = {pull.image: pull.node for pull in plan.pulls}
    assert len(plan.pulls) == 8 and all(pull.rollouts == 4 for pull in plan.pulls)
    assert len({where[f"a{n}"] for n in range(4)}) == 1 and len({where[f"b{n}"] for n in range(4)}) == 1
    assert where["a0"] != where["b0"]
    assert plan.bytes == (10 + 500 + 4 + 10 + 400 + 4) * MIB
    assert plan.unique_bytes == (10 + 500 + 400 + 8) * MIB
    assert plan.image_bytes == (4 * 511 + 4 * 411) * MIB


def test_what_is_there_is_not_brought_again() -> None:
    images = catalog(image("x:1", base=100, own=7), image("y:1", base=100, other=9))
    node = Node("n0", images={"docker.io/library/x:1": 107})
    plan = plan_images([Demand("x:1", 2), Demand("y:1", 1)], images, Inventory((node,)))
    assert {(p.image, p.bytes, p.there) for p in plan.pulls} == {("x:1", 0, True), ("y:1", 9, False)}
    assert [p.image for p in plan.missing()] == ["y:1"]


def test_a_node_that_has_it_under_its_digest() -> None:
    known = Image("r.example/x:1", (Layer("sha256:l", 5),), digest="sha256:d")
    node = Node("n0", images={"mirror.example/x@sha256:d": 5})
    plan = plan_images([Demand(known.name, 1)], catalog(known), Inventory((node,)))
    assert plan.pulls[0].there and plan.bytes == 0


def test_an_image_that_everybody_wants_goes_to_every_node() -> None:
    images = catalog(image("x", a=100))
    plan = plan_images([Demand("x", 64, 4)], images, Inventory(tuple(Node(f"n{i}") for i in range(4))))
    assert Counter(p.node for p in plan.pulls) == Counter({f"n{i}": 1 for i in range(4)})
    assert [p.rollouts for p in plan.pulls] == [16] * 4


def test_shares_go_by_how_many_sandboxes_a_node_can_run() -> None:
    images = catalog(*(image(f"x{n}", **{f"l{n}": 10}) for n in range(40)))
    nodes = (Node("small", sandboxes=10), Node("big", sandboxes=30), Node("none", sandboxes=0))
    plan = plan_images([Demand(name, 1) for name in images], images, Inventory(nodes))
    assert {use.node: use.rollouts for use in plan.nodes} == {"small": 10, "big": 30}


def test_a_disk_that_is_too_small_is_refused_or_split() -> None:
    images = catalog(*(image(f"x{n}", **{f"l{n}": 100}) for n in range(3)))
    demand, nodes = [Demand(name, 1) for name in images], (Node("n0", room=2 * 350),)
    plan = plan_images(demand, images, Inventory(nodes))
    assert len(plan.pulls) == 2 and plan.waves == 1
    assert list(plan.refused.values()) == [
        "1 rollouts: the disks of all nodes are full; it fits into a later wave (split)"
    ]
    plan = plan_images(demand, images, Inventory(nodes), split=True)
    assert not plan.refused and plan.waves == 2 and [p.wave for p in plan.pulls] == [0, 0, 1]
    assert plan.nodes[0].working_set == 700
    images["huge"] = image("huge", h=1000)
    plan = plan_images([*demand, Demand("huge", 1)], images, Inventory(nodes), split=True)
    assert plan.refused == {"huge": "needs 3,500 bytes of disk, and the largest node has room for 700"}


def test_what_runs_on_a_node_is_not_given_up() -> None:
    images = catalog(image("x", a=100), image("y", b=100))
    busy = Node("n0", images={"x": 100}, in_use=frozenset({"x"}), busy=350, room=699)
    plan = plan_images([Demand("y", 1)], images, Inventory((busy,)), split=True)
    assert list(plan.refused) == ["y"]
    plan = plan_images([Demand("x", 1)], images, Inventory((busy,)))
    assert plan.nodes[0].working_set == 350  # counted once


def test_nodes_that_may_not_be_used() -> None:
    images = catalog(image("x", a=1))
    with pytest.raises(ConfigError, match=r"no node can take images \(n0: cordoned\)"):
        plan_images([Demand("x", 1)], images, Inventory((Node("n0", usable="cordoned"),)))
    with pytest.raises(ConfigError, match="one more sandbox"):
        plan_images([Demand("x", 1)], images, Inventory((Node("n0", sandboxes=0),)))
    with pytest.raises(ConfigError, match="no task"):
        plan_images([], images, Inventory((Node("n0"),)))


def test_unknown_sizes_are_said_and_never_called_free() -> None:
    plan = plan_images(
        [Demand("x", 1), Demand("y", 1)],
        {"x": Image("x", None, why="401")},
        Inventory((Node("n0"),)),
        assumed=50,
    )
    assert plan.unknown == ("x", "y") and plan.bytes == 100


def test_a_plan_through_a_file(tmp_path: Path) -> None:
    images = catalog(image("x", a=100))
    plan = plan_images([Demand("x", 2)], images, Inventory((Node("n0"),), ("a word",)))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for text in ("", "[]", '{"version": 2}', '{"version": 1}', '{"version": 1, "pulls": [{}]}', "\0"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ConfigError, match="is no plan"):
            Plan.load(tmp_path / "bad")
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path)


def test_a_pool_places_by_the_plan() -> None:
    images = catalog(image("x", a=100))
    plan = plan_images(
        [Demand("x", 30, 1)], images, Inventory((Node("n0", sandboxes=10), Node("n1", sandboxes=20)))
    )
    hook = PlannedPlacement(plan)
    task = rls.Task(id="t", image="x")
    given_ = Counter(hook.rlsandbox_place(task, ["n0", "n1", "n2"]) for _ in range(30))
    assert given_ == {"n0": 10, "n1": 20}
    assert hook.rlsandbox_place(task, ["n2"]) is None
    assert hook.rlsandbox_place(rls.Task(id="u", image="other"), ["n0"]) is None
    assert hook.rlsandbox_place(rls.Task(id="v"), ["n0"]) is None
    east = PlannedPlacement(plan, cluster="east", default_image="x")
    assert east.rlsandbox_place(task, ["west/n0", "west/n1", "east/n1"]) == "east/n1"
    assert east.rlsandbox_place(rls.Task(id="v"), ["west/n0", "n0"]) is None


def test_the_demand_of_tasks() -> None:
    tasks = [rls.Task(id=str(n), image="a" if n < 3 else None) for n in range(4)]
    assert demand_of(tasks, group_size=4, spec=rls.Spec(image="b")) == [
        Demand("a", 12, 4, 3),
        Demand("b", 4, 4, 1),
    ]
    with pytest.raises(ConfigError, match="task '3' names no image"):
        demand_of(tasks)
    with pytest.raises(ConfigError, match="group_size"):
        demand_of(tasks, group_size=0, default="x")
    own = rls.Task(id="t", image="a", spec=rls.Spec(image="c"))
    assert demand_of([own], default="d")[0].image == "c"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("busybox", ("docker.io", "library/busybox", "latest", "")),
        ("a/b:1", ("docker.io", "a/b", "1", "")),
        ("r.example:5000/a/b", ("r.example:5000", "a/b", "latest", "")),
        (f"localhost/a@{SHA}", ("localhost", "a", "latest", SHA)),
        (f"r.example/a__b:1@{SHA}", ("r.example", "a__b", "1", SHA)),
    ],
)
def test_names_of_images(name: str, parts: tuple[str, ...]) -> None:
    assert split_name(name) == parts
    assert name in aliases(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "a//b",
        "a b",
        "A/b",
        "r.example/",
        "x@",
        "x\n",
        "a/:1",
        "x:",
        "x@sha256:",
        "\u00e4:1",
        "a/../b",
        "x:-1",
    ],
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="no name of an image"):
        split_name(name)


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 40)),
        min_size=1,
        max_size=25,
    ),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4000) | st.none()), min_size=1, max_size=5),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_rollout_has_one_place_and_no_disk_is_overfilled(
    wanted: list[tuple[set[int], int]], machines: list[tuple[int, int | None]], group: int, split: bool
) -> None:
    images = catalog(
        *(Image(f"i{n}", tuple(Layer(f"sha256:{key}", 10 + 37 * key) for key in sorted(keys)))
          for n, (keys, _) in enumerate(wanted))
    )  # fmt: skip
    demand = [Demand(f"i{n}", count, group) for n, (_, count) in enumerate(wanted)]
    nodes = tuple(Node(f"n{i}", sandboxes=count, room=room) for i, (count, room) in enumerate(machines))
    if not any(node.sandboxes for node in nodes):
        with pytest.raises(ConfigError):
            plan_images(demand, images, Inventory(nodes), split=split)
        return
    plan = plan_images(demand, images, Inventory(nodes), split=split)
    placed: Counter[str] = Counter()
    for pull in plan.pulls:
        placed[pull.image] += pull.rollouts
    for row in demand:
        if row.image not in plan.refused:
            assert placed[row.image] == row.rollouts
        else:
            assert placed[row.image] < row.rollouts
    for node in nodes:
        for wave in range(plan.waves):
            mine = [p for p in plan.pulls if p.node == node.name and p.wave == wave]
            assert not mine or node.sandboxes
            layers = {layer for p in mine for layer in images[p.image].layers or ()}
            assert node.room is None or sum(layer.on_disk() for layer in layers) <= node.room
            assert sum(p.bytes for p in mine) == sum(layer.size for layer in layers)
    assert len({(p.image, p.node, p.wave) for p in plan.pulls}) == len(plan.pulls)


def test_sizes_are_told_under_any_name_of_an_image() -> None:
    listed = Node("a", images={"docker.io/library/ubuntu:22.04": 70}, room=10**12)
    running = Node("b", images={"ubuntu:22.04": 0}, in_use=frozenset({"ubuntu:22.04"}), room=10**12)
    other = Node("c", room=10**12)
    demand = [Demand("ubuntu:22.04", 9, 3, 3)]
    told = plan_images(demand, {}, Inventory((running, listed, other)))
    assert told.unique_bytes == 70
    assert {pull.node: pull.bytes for pull in told.pulls} == {"a": 0, "b": 0, "c": 70}
    nobody = plan_images(demand, {}, Inventory((running, other)), assumed=1000)
    assert nobody.unique_bytes == 1000  # that it runs somewhere does not make it free elsewhere


def test_what_runs_under_another_name_of_an_image_is_counted_once() -> None:
    layer = Layer("sha256:" + "2" * 64, 100)
    used = Node(
        "a",
        images={"docker.io/library/x:1": 100},
        in_use=frozenset({"docker.io/library/x:1"}),
        busy=350,
        room=400,
    )
    told = plan_images([Demand("x:1", 1)], {"x:1": Image("x:1", (layer,))}, Inventory((used,)))
    assert not told.refused
    assert told.nodes[0].working_set == 350


def changed(**how: Any) -> dict[str, Any]:
    """A plan's JSON with something else in its first pull, or in itself."""
    pull = {"image": "a", "node": "n", "rollouts": 1, "bytes": 1, "there": False, "wave": 0}
    own = {name: value for name, value in how.items() if name in pull}
    plain = Plan((Pull(**{**pull, "rollouts": 1}),), ()).to_json()
    return {**plain, "pulls": [{**pull, **own}], **{k: v for k, v in how.items() if k not in own}}


@pytest.mark.parametrize(
    "how",
    [
        {"image": 5}, {"image": "BAD NAME"}, {"node": None}, {"node": ""}, {"wave": "x"}, {"wave": -1},
        {"bytes": "x"}, {"bytes": True}, {"rollouts": None}, {"there": 1}, {"refused": 3}, {"notes": [5]},
        {"refused": {"a": 1}}, {"pulls": None}, {"pulls": [1]}, {"nodes": [{"node": "n"}]}, {"images": "x"},
        {"version": "1"},
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan_is_told_when_it_is_read(tmp_path: Path, how: dict[str, Any]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed()))
    assert Plan.load(file).pulls[0].node == "n"
    file.write_text(json.dumps(changed(**how)))
    with pytest.raises(ConfigError, match="is no plan"):
        Plan.load(file)
