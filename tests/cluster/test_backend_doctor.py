"""The doctor's rows on a real cluster, and network policies: tried before one is relied on."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import errors
from rlsandbox.backends.diagnosis import Row
from rlsandbox.spec import Spec
from rlsandbox.testing.lone import LoneHost
from tests.cluster.cluster import Cluster
from tests.cluster.kube import Kube, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes
from rlsandbox.backends.kubernetes.doctor import examine
from rlsandbox.backends.kubernetes.policy import CLOSED

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")


def rows(kubeconfig: Path, namespace: str, **how: Any) -> dict[str, Row]:
    found = asyncio.run(examine(kubeconfig=str(kubeconfig), namespace=namespace, **how))
    return {row.name: row for row in found.rows}


def test_what_fails_under_load_has_its_row(cluster: Cluster, namespace: str, kube: Kube) -> None:
    core = f"/api/v1/namespaces/{namespace}"
    config = cluster.kubeconfig("admin", "direct")
    before = rows(config, namespace)
    assert before["pull secrets"].status == "ok" and before["volumes"].status == "ok"
    node = cluster.nodes()[0].name
    assert "GiB used; images are removed from" in before[f"disk of {node}"].found
    assert before["API priority"].found.startswith("flow schema exempt")
    assert before["clocks"].status == before["right: nodes"].status == "ok"
    assert "was not tried" in before["NetworkPolicy"].found
    # each of them wrong
    kube.create(
        f"{core}/secrets",
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "opaque"}, "type": "Opaque"},
    )
    secrets = {"imagePullSecrets": [{"name": "opaque"}, {"name": "missing"}]}
    kube.patch(f"{core}/serviceaccounts/default", secrets)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "one-node"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kube.create(f"{core}/persistentvolumeclaims", claim)
    pod = {
        "containers": [{"name": "c", "image": TEST}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "one-node"}}],
    }
    template = {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "theirs"},
        "spec": {"podTemplate": {"spec": pod}},
    }
    kube.create(f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxtemplates", template)
    after = rows(config, namespace)
    assert (after["pull secret opaque"].status, after["pull secret missing"].status) == ("fail", "fail")
    assert "kubernetes.io/dockerconfigjson" in after["pull secret opaque"].fix
    assert after["volumes"].status == "warn" and "theirs" in after["volumes"].found


def test_a_quota_says_what_it_refuses(cluster: Cluster, namespace: str, kube: Kube) -> None:
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    for name, hard in (("few", {"pods": "2"}), ("must", {"limits.cpu": "2", "memory": "1Gi"})):
        kube.create(
            path,
            {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}},
        )
    until("quotas count", lambda: all(row.get("status", {}).get("used") for row in kube.items(path)), 30)
    found = rows(cluster.kubeconfig("admin", "direct"), namespace)
    assert found["quota few"].fix == "a pool larger than this waits for ever"
    assert found["quota must"].fix.endswith("; refuses specs without cpu= and memory=")


def test_who_may_see_little_is_told_so(cluster: Cluster, namespace: str) -> None:
    found = rows(cluster.kubeconfig("nobody", "direct"), namespace)
    assert found["right: sandboxclaims"].status == "fail"
    assert "image removal on nodes" in found and found["right: nodes"].status == "warn"
    assert found["pull secrets"].status == "warn"


def test_policies_that_nobody_enforces_are_not_relied_on(
    cluster: Cluster, make_namespace: Callable[..., str], kube: Kube
) -> None:
    namespace = make_namespace("restricted")
    config = cluster.kubeconfig("admin", "direct")
    assert "not enforced" in rows(config, namespace, trial=TEST)["NetworkPolicy"].found

    async def body() -> None:
        backend = Kubernetes(kubeconfig=str(config), namespace=namespace, image=TEST)
        lone = LoneHost(backend)
        try:
            with pytest.raises(
                errors.UnsupportedError, match=r"policies do nothing here \(a pod under one reached"
            ):
                await lone.make(spec=Spec(network="none"))
        finally:
            await lone.close()
            await backend.close()

    asyncio.run(body())
    assert not [pod for pod in kube.items(pods(namespace)) if not pod["metadata"].get("deletionTimestamp")]


@pytest.fixture
def enforcer(cluster: Cluster, kube: Kube) -> Iterator[set[str]]:
    """What a CNI with policies does, for this one policy: the links of pods under it are cut; whose are."""
    over = threading.Event()
    cut: set[str] = set()

    def look() -> None:
        for pod in kube.items("/api/v1/pods", labelSelector=f"{CLOSED}=true"):
            uid, address = pod["metadata"]["uid"], (pod.get("status") or {}).get("podIP")
            if uid in cut or not address:
                continue
            node = pod["spec"]["nodeName"]
            told = cluster.inside(["sh", "-c", "cat /var/lib/cni/results/*"], node).stdout.decode()
            decoder, at = json.JSONDecoder(), 0
            while at < len(told):
                entry, at = decoder.raw_decode(told, at)
                at += len(told[at:]) - len(told[at:].lstrip())
                result = entry.get("result", entry)
                if any(row["address"].split("/")[0] == address for row in result.get("ips", ())):
                    link = next(i["name"] for i in result["interfaces"] if i["name"].startswith("veth"))
                    cluster.inside(["ip", "link", "set", link, "down"], check=True)
                    cut.add(uid)

    def work() -> None:
        while not over.wait(0.2):
            look()

    thread = threading.Thread(target=work)
    thread.start()
    yield cut
    over.set()
    thread.join()


@pytest.mark.parametrize(
    ("level", "mode", "spec"),
    [("restricted", "replace", Spec()), ("baseline", "manifest", Spec(user="1000"))],
    ids=["replace", "manifest"],
)
def test_a_policy_that_is_enforced_holds_network_none(
    cluster: Cluster,
    make_namespace: Callable[..., str],
    kube: Kube,
    enforcer: set[str],
    level: str,
    mode: str,
    spec: Spec,
) -> None:
    """In pods whose commands share the pod's network. What no isolated episode reaches, these do not either."""
    namespace = make_namespace(level)
    config = cluster.kubeconfig("admin", "direct")

    async def body() -> None:
        backend = Kubernetes(kubeconfig=str(config), namespace=namespace, image=TEST, mode=mode)
        lone = LoneHost(backend)
        try:
            other = await lone.make(spec=Spec(network="host").over(spec))
            sandbox = await lone.make(spec=Spec(network="none").over(spec))
            assert (sandbox.reset_mode, lone.member(sandbox).facts["network"]) == (mode, "policy")
            address = (await other.run("hostname -i")).stdout.split()[0]
            listener = await other.popen(["/.rlsandbox/keeper", "listen", "7798", "60"])
            dial = ["/.rlsandbox/keeper", "dial", address, "7798", "0", "3"]
            assert (await other.run(dial)).exit_code == 0
            uid = kube.get(pods(namespace, backend._places[sandbox.id].pod))["metadata"]["uid"]
            await asyncio.to_thread(
                until, "a new pod is under the policy a moment later", lambda: uid in enforcer
            )
            assert (await sandbox.run(dial)).exit_code == 1
            server = backend._api._client.configuration.host.rpartition("/")[2]  # type: ignore[attr-defined]
            for place in ("169.254.169.254 80", server.replace(":", " "), "10.96.0.1 443"):
                tried = await sandbox.run(
                    f'python3 -c "import socket,sys; socket.create_connection(sys.argv[1:], 3)" {place}'
                )
                assert not tried.ok, place
            for way in ("/.rlsandbox-run/s/keeper", "/proc/1/root/.rlsandbox-run/s/keeper"):
                assert mode == "replace" or not (await sandbox.run(["test", "-e", way])).ok, way
            assert not (await sandbox.run(["test", "-e", "/var/run/secrets/kubernetes.io"])).ok
            assert (await sandbox.run("echo x")).stdout == "x\n"
            await listener.kill()
        finally:
            await lone.close()
            await backend.close()

    asyncio.run(body())
