"""`rlsandbox plan` on real nodes: images come from a real registry, which refuses and is slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.kube import Kube, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")


def plan(cluster: Cluster, namespace: str, *arguments: str) -> tuple[int, Any, str]:
    """Exit status, JSON and stderr of ``rlsandbox plan``."""
    command = [sys.executable, "-m", "rlsandbox", "plan", *arguments, "--namespace", namespace, "--json"]
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig("admin", "api"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def task_file(path: Path, names: list[str]) -> str:
    rows = [json.dumps({"id": f"t{n}", "prompt": "p", "image": name}) for n, name in enumerate(names)]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_images_are_where_the_plan_says_before_a_rollout_wants_them(
    cluster: Cluster, kube: Kube, faults: Faults, make_namespace: Callable[..., str], tmp_path: Path
) -> None:
    namespace = make_namespace("restricted")
    door = cluster.port("registry")
    with images.Registry(door) as registry:
        names = registry.task_images(12)
    for node in cluster.nodes():
        for name in names:
            faults.remove_image(node.name, name)
    mirror = f"{images.HOST}=http://127.0.0.1:{door}"
    missing = f"{images.HOST}/task/none:1"
    file = task_file(tmp_path / "tasks.jsonl", [*names, missing])
    status, told, err = plan(cluster, namespace, file, "--mirror", mirror, "--group-size", "4")
    assert status == 0, err
    assert (told["images"], told["rollouts"], told["unknown"]) == (13, 52, [missing])
    assert "has none of that name" in err
    nodes = {row["node"] for row in told["pulls"]}
    assert nodes == {"node-0", "node-1"}  # the fake ones are tainted
    assert all(row["room"] for row in told["nodes"])

    # The registry is busy at first, and cuts an answer off: kubelets try again, and so it is only late.
    faults.registry("task/00[1-3]", status=429, times=2)
    faults.add(door="registry", path="/v2/task/004/blobs/.*", cut_at=1000, times=1)
    status, told, err = plan(
        cluster, namespace, file, "--mirror", mirror, "--group-size", "4", "--apply", "--timeout", "180"
    )
    rows = {row["image"]: row for row in told["applied"]["pulls"]}
    assert status == 1
    assert [row["image"] for row in rows.values() if row["error"]] == [missing], err
    assert "not found" in rows[missing]["error"]
    assert not kube.items(pods(namespace))

    def there() -> bool:
        status, again, _ = plan(cluster, namespace, file, "--mirror", mirror, "--group-size", "4")
        return status == 0 and [row["image"] for row in again["pulls"] if not row["there"]] == [missing]

    until("nodes list what was brought", there, 120)
