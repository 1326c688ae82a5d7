"""The agent-sandbox controller in the test cluster: pools become warm, claims become Ready."""

from __future__ import annotations

import pytest

from tests.cluster import objects
from tests.cluster.cluster import Cluster
from tests.cluster.images import TEST
from tests.cluster.kube import Kube, condition, pods, until
from tests.cluster.shortcuts import EXTENSIONS, SANDBOXES, claim, run_in, template, warm

SLEEP = ["sleep", "infinity"]


@pytest.mark.parametrize("runtime", ["runc", "gvisor"])
def test_a_claim_of_a_warm_pool_becomes_ready(
    cluster: Cluster, kube: Kube, namespace: str, runtime: str
) -> None:
    spec = {"runtimeClassName": "gvisor"} if runtime == "gvisor" else {}
    warm(kube, namespace, template("w", TEST, SLEEP, **spec), 2)
    before = {pod["metadata"]["name"] for pod in kube.items(pods(namespace))}
    path = f"{EXTENSIONS}/{namespace}/sandboxclaims"
    kube.create(path, claim("c", "w"))
    until("the claim is Ready", lambda: condition(kube.get(f"{path}/c"), "Ready") == "True")
    name = kube.get(f"{path}/c")["status"]["sandbox"]["name"]
    sandbox = kube.get(f"{SANDBOXES}/{namespace}/sandboxes/{name}")
    pod = sandbox["metadata"].get("annotations", {}).get("agents.x-k8s.io/pod-name", name)
    assert pod in before, "a member of the pool is taken, not a new pod"
    assert run_in(cluster, namespace, pod, ["echo", "hello"]).stdout == "hello\n"
    kube.delete(f"{path}/c")
    until(
        "its sandbox is gone",
        lambda: name not in {s["metadata"]["name"] for s in _sandboxes(kube, namespace)},
    )


def test_a_pool_on_fake_nodes(cluster: Cluster, kube: Kube, namespace: str) -> None:
    warm(kube, namespace, template("w", TEST, SLEEP, **objects.on_kwok()), 20)
    assert len(_sandboxes(kube, namespace)) == 20


def _sandboxes(kube: Kube, namespace: str) -> list[dict]:  # type: ignore[type-arg]
    return kube.items(f"{SANDBOXES}/{namespace}/sandboxes")
