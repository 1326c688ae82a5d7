"""pytest fixtures for tests that need a Kubernetes.

``RLSANDBOX_TEST_CLUSTER=1`` (what ``make test-cluster`` sets): the test cluster of this machine; one that runs is used and
left running, else one is started for the session and stopped after it. ``RLSANDBOX_TEST_KUBECONFIG=<file>``: any
cluster; tests that need faults on demand are skipped there. Neither: all of them are skipped, and say so.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import objects
from tests.cluster.cluster import Cluster, cannot_run
from tests.cluster.faults import Faults
from tests.cluster.kube import Kube, until

OWN = "RLSANDBOX_TEST_CLUSTER"
FOREIGN = "RLSANDBOX_TEST_KUBECONFIG"
NONE = f"needs a Kubernetes: make test-cluster, or {FOREIGN}=<kubeconfig file>"


@pytest.fixture(scope="session")
def any_kubeconfig(request: pytest.FixtureRequest) -> Path:
    """A kubeconfig with an administrator's rights: that of the environment, else the test cluster's."""
    if given := os.environ.get(FOREIGN):
        path = Path(given)
        if not path.is_file():
            pytest.fail(f"{FOREIGN}={given} is no file")
        return path
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster.kubeconfig("admin", "api")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The test cluster of this machine: for tests that need its faults, nodes, registry or roles."""
    if os.environ.get(OWN) != "1":
        if os.environ.get(FOREIGN):
            pytest.skip(f"needs the test cluster of tests/cluster, and {FOREIGN} names another")
        pytest.skip(NONE)
    own = Cluster()
    if own.running:
        yield own
        return
    if (why := cannot_run()) is not None:
        pytest.skip(why)
    own.up()
    try:
        yield own
    finally:
        own.down()


@pytest.fixture
def faults(cluster: Cluster) -> Iterator[Faults]:
    """Faults on demand; whatever was left set, paused, ended or cordoned is put right after the test."""
    found = Faults(cluster)
    yield found
    for name, part in cluster.parts().items():
        if part["state"] == "paused":
            cluster.resume(name)
        elif part["state"] == "ended":
            cluster.start(name)
    until("the doors answer", lambda: found.rules() is not None, 10)
    found.remove()
    until("the API server is ready", cluster.kube().ready, 30)
    for node in cluster.kube().items("/api/v1/nodes"):
        if node["spec"].get("unschedulable"):
            found.cordon(node["metadata"]["name"], False)
    cluster.wait_ready()


@pytest.fixture
def kube(any_kubeconfig: Path) -> Kube:
    """A plain client with an administrator's rights."""
    return Kube(any_kubeconfig)


@pytest.fixture
def namespace(kube: Kube, make_namespace: Callable[..., str]) -> str:
    """A new namespace in which every pod is allowed."""
    return make_namespace()


@pytest.fixture
def make_namespace(kube: Kube) -> Iterator[Callable[..., str]]:
    """Make namespaces (``make_namespace(level="restricted")``); they are deleted after the test, pods first."""
    made: list[str] = []

    def make(level: str = "privileged") -> str:
        name = f"t-{secrets.token_hex(4)}"
        kube.create("/api/v1/namespaces", objects.namespace(name, level))
        made.append(name)
        until(f"namespace {name}", lambda: kube.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"))
        return name

    yield make
    for name in made:
        kube.delete(f"/api/v1/namespaces/{name}")
