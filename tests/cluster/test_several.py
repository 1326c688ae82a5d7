"""Two clusters behind one pool: two namespaces, reached by two doors, one of which closes for a while."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox.backends import Clusters, Part
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.kube import Kube, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = "registry.test/test:1"


def test_one_cluster_is_away_for_a_while_and_no_rollout_is_lost(
    cluster: Cluster, kube: Kube, faults: Faults, make_namespace: Callable[..., str], tmp_path: Path
) -> None:
    spaces = [make_namespace("baseline"), make_namespace("baseline")]

    def part(door: str, space: str, name: str) -> Part:
        backend = Kubernetes(
            kubeconfig=str(cluster.kubeconfig("admin", door)), namespace=space, image=TEST, mode="userns"
        )
        return Part(backend, ceiling=4, name=name)

    both = Clusters([part("api", spaces[0], "first"), part("direct", spaces[1], "second")])
    tasks = [rls.Task(id=f"t{n}") for n in range(4)]

    def policy(sandbox: Any, task: Any) -> str:
        assert sandbox.run("echo hello").stdout == "hello\n"
        return str(sandbox.node).partition("/")[0]

    def where(report: Any) -> Counter[str]:
        assert [record.status for record in report.records] == ["completed"] * len(report.records)
        return Counter(record.value for record in report.records)

    with rls.Pool(both, size=4, max_size=6, ledger=tmp_path / "l.db", config=False) as pool:
        assert pool.wait_ready(4, timeout=180) == 4
        assert set(where(pool.run_rollouts(tasks, policy, group_size=4, concurrency=4))) == {
            "first",
            "second",
        }
        # The first one's API server is gone: what lives there dies, what is made is made in the second.
        with faults.rule(door="api", path=".*", cut=True):
            faults.cut(door="api")
            began = time.monotonic()
            while where(pool.run_rollouts(tasks, policy, group_size=2, concurrency=4)).keys() != {"second"}:
                assert time.monotonic() - began < 240, "rollouts are still given to the one that is away"
        until(
            "the first takes sandboxes again",
            lambda: "first" in where(pool.run_rollouts(tasks, policy, group_size=4, concurrency=6)),
            300,
        )
    for space in spaces:
        until(f"nothing is left in {space}", lambda space=space: not kube.items(pods(space)), 60)
