"""What is kept outlives the pod and the node that it was made on: checkpoints, what hibernates, snapshots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.kube import pods

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")


def node_of(cluster: Cluster, namespace: str, backend: Kubernetes, sandbox: Any) -> str:
    pod = cluster.kube().get(pods(namespace, backend._places[sandbox.id].pod))
    return str(pod["spec"]["nodeName"])


@pytest.fixture
def backend(cluster: Cluster, namespace: str, tmp_path: Path) -> Kubernetes:
    config = str(cluster.kubeconfig("admin", "api"))
    return Kubernetes(kubeconfig=config, namespace=namespace, image=TEST, keep=str(tmp_path / "kept"))


def test_an_attempt_starts_from_the_checkpoint_of_a_node_that_is_gone(
    cluster: Cluster, namespace: str, backend: Kubernetes, faults: Faults, tmp_path: Path
) -> None:
    seen: list[tuple[str, Any, str]] = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        about = sandbox.rollout
        assert about is not None
        node = node_of(cluster, namespace, backend, sandbox)
        had = sandbox.run("cat /opt/work 2>/dev/null").stdout
        seen.append((node, about.state, had))
        if about.attempt == 1:
            sandbox.run("echo half > /opt/work; rm /etc/passwd", check=True)
            about.checkpoint({"messages": ["one"]})
            sandbox.run("echo lost > /opt/work", check=True)
            faults.drain(node, namespace)
            sandbox.run("sleep 60")
        return sandbox.run("cat /opt/work; test ! -e /etc/passwd && echo gone").stdout

    with rls.Pool(backend, size=2, config=False, ledger=tmp_path / "ledger", run="kept") as pool:
        report = pool.run_rollouts([rls.Task(id="t")], policy, retries=2)
        assert [record.value for record in report.records] == ["half\ngone\n"], report.records
        (_, state, had), (second, kept, work) = seen
        assert (state, had) == (None, "") and (kept, work) == ({"messages": ["one"]}, "half\n")
        assert second != seen[0][0]
        first, last = next(iter(pool._pool.ledger.book().rollouts.values())).attempts
        assert first.failure is not None and first.failure.infrastructure
        assert last.from_checkpoint == first.checkpoint and last.checkpoint is None
    assert not list((tmp_path / "kept").iterdir())


def test_what_hibernates_needs_no_pod(
    cluster: Cluster, namespace: str, backend: Kubernetes, faults: Faults, tmp_path: Path
) -> None:
    with rls.Pool(backend, size=1, config=False) as pool:
        sandbox = pool.claim(rls.Task(id="t"))
        sandbox.run("seq 1 100000 > /opt/work; ln -s work /opt/link; chmod 4711 /opt/work", check=True)
        before = sandbox.run("md5sum < /opt/link; stat -c '%a %u' /opt/work").stdout
        sandbox.hibernate()
        assert len(list((tmp_path / "kept").glob("*/layers/*"))) == 1
        pool.wait_ready(1, timeout=60)
        faults.delete_pods(namespace)
        sandbox.restore(timeout=90)
        assert sandbox.run("md5sum < /opt/link; stat -c '%a %u' /opt/work").stdout == before
        sandbox.release()
        assert pool.stats().created >= 2


def test_a_snapshot_is_forked_after_its_pod(
    cluster: Cluster, namespace: str, backend: Kubernetes, faults: Faults
) -> None:
    with rls.Pool(backend, size=2, config=False) as pool:
        sandbox = pool.claim(rls.Task(id="t"))
        sandbox.run("echo x > /opt/work", check=True)
        snapshot = sandbox.snapshot()
        faults.delete_pods(namespace)
        sandbox.release(discard=True)
        with snapshot.fork(2, timeout=90) as forks:
            assert [fork.run("cat /opt/work").stdout for fork in forks] == ["x\n", "x\n"]
        snapshot.delete()


def test_a_snapshot_that_is_kept_nowhere_is_lost_at_once(
    cluster: Cluster, namespace: str, faults: Faults
) -> None:
    config = str(cluster.kubeconfig("admin", "api"))
    backend = Kubernetes(kubeconfig=config, namespace=namespace, image=TEST, keep=False)
    with rls.Pool(backend, size=1, config=False) as pool:
        sandbox = pool.claim(rls.Task(id="t"))
        snapshot = sandbox.snapshot()
        faults.delete_pods(namespace)
        sandbox.release(discard=True)
        with pytest.raises(errors.SandboxStateError, match="is lost"):
            pool.claim(snapshot, timeout=60)
