"""The pool's owner, as it is without ray around it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlsandbox_verl.numbers import Ended
from rlsandbox_verl.owner import PoolOwner
from rlsandbox_verl.settings import Settings

import rlsandbox as rls
from rlsandbox.errors import ConfigError, SandboxError


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[PoolOwner]:
    lines = [{"id": f"t{i}", "workdir": "/work"} for i in range(2)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pool = {"size": 2, "config": False, "ledger": str(tmp_path)}
    made = PoolOwner(Settings(pool=pool, tasks=str(tmp_path / "x.jsonl"), give_up=2), "a-run")
    yield made
    made.close()


def test_a_rollout_gets_its_task_and_the_way_to_the_pool(owner: PoolOwner) -> None:
    owner.begin_batch("val", ["u"], 2)
    assert owner.begin("t1", None, "u").mode == "val"
    owner.begin_batch("train", ["v"], 2)
    begun = owner.begin("t0", "elsewhere", "v")
    assert (begun.task.id, begun.mode) == ("t0", "train")
    with rls.Pool.connect(begun.ref) as pool, pool.claim(begun.task, timeout=60) as sandbox:
        assert sandbox.run("pwd").stdout == "/work\n"
    assert owner.pop()["train"].snapshot.counters["claims"] == 1


def test_what_is_expected_is_primed(owner: PoolOwner) -> None:
    owner.expect([("t0", None), ("t1", None)], 1)
    assert owner.wait_ready(60) == 2
    assert owner.pop()["train"].snapshot.samples["prime"].summary().n >= 1


def test_a_mistake_that_every_rollout_meets_ends_the_training(owner: PoolOwner) -> None:
    owner.begin_batch("train", [], 4)
    for _ in range(7):
        with pytest.raises(ConfigError, match="no task of"):
            owner.begin("t9", None, "u")
    owner.begin_batch("train", [], 4)
    owner.refused("once more")
    with pytest.raises(SandboxError, match=r"the last 8 rollouts all broke .*once more") as raised:
        owner.begin_batch("train", [], 4)
    assert raised.value.kind == "all_lost"
    owner.ended(Ended("1", "g", "b", 0.0, 1.0, completed=True, graded=False))
    owner.begin_batch("train", [], 4)


def test_a_pool_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """To everybody who asks: what an actor's making raises, ray tells as a death."""
    made = PoolOwner(Settings(pool={"size": "four", "config": False}), "a-run")
    for ask in (made.pid, made.ref, lambda: made.begin("one", None, "uid"), made.pop):
        with pytest.raises(ConfigError, match="size must be a whole number"):
            ask()
    made.close()
