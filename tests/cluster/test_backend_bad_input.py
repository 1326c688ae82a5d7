"""What is asked for and cannot be: one clear line each, before anything is made."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.spec import Spec
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.images import Registry
from tests.cluster.kube import Kube, _load

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")


def no_cluster(cluster: Cluster, tmp: Path) -> dict[str, Any]:
    return {"kubeconfig": str(tmp / "none")}


def a_cluster_that_is_not_up(cluster: Cluster, tmp: Path) -> dict[str, Any]:
    config = _load(cluster.kubeconfig("admin", "direct"))
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (tmp / "config").write_text(json.dumps(config))
    return {"kubeconfig": str(tmp / "config")}


def an_expired_token(cluster: Cluster, tmp: Path) -> dict[str, Any]:
    config = _load(cluster.kubeconfig("admin", "direct"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": "expired"}}]
    (tmp / "config").write_text(json.dumps(config))
    return {"kubeconfig": str(tmp / "config")}


CASES: list[tuple[Any, type[Exception], str]] = [
    (no_cluster, errors.ConfigError, "no cluster to talk to: .*/none does not exist"),
    (a_cluster_that_is_not_up, errors.SandboxError, "no answer from the API server"),
    (an_expired_token, errors.SandboxError, "the token is wrong or has expired"),
    ({"context": "nowhere"}, errors.ConfigError, "nowhere.*contexts there: admin"),
    ({"namespace": "not-there"}, errors.ConfigError, "has no namespace 'not-there'"),
    ({"namespace": "Not_A_Name"}, errors.ConfigError, "'Not_A_Name' cannot be a name"),
    ({"template": "nope"}, errors.ConfigError, "no SandboxTemplate 'nope'"),
    ({"warm_pool": "nope"}, errors.ConfigError, "no SandboxWarmPool 'nope'"),
    ({"runtime_class": "nope"}, errors.ConfigError, "no RuntimeClass 'nope'"),
    ({"pull_secrets": ["nope"]}, errors.ConfigError, "no Secret 'nope' to pull images with"),
    ({"gvisor_class": "No Class"}, errors.ConfigError, "'No Class' cannot be a name"),
    ({"mode": "best"}, errors.ConfigError, "mode must be auto"),
    ({"arch": "z80"}, errors.ConfigError, "arch must be one of"),
]


@pytest.mark.parametrize(("how", "kind", "words"), CASES)
def test_one_line_before_anything_is_made(
    cluster: Cluster, tmp_path: Path, how: Any, kind: type[Exception], words: str
) -> None:
    given = how(cluster, tmp_path) if callable(how) else how
    leases = "/apis/coordination.k8s.io/v1/leases"
    before = {row["metadata"]["name"] for row in cluster.kube().items(leases)}
    options = {"kubeconfig": str(cluster.kubeconfig("admin", "direct")), "image": TEST, **given}
    with pytest.raises(kind, match=words) as caught, rls.Pool(Kubernetes(**options), size=1, config=False):
        pass
    assert "\n" not in str(caught.value)
    assert not {row["metadata"]["name"] for row in cluster.kube().items(leases)} - before


def test_an_image_that_does_not_exist(cluster: Cluster, namespace: str) -> None:
    config = str(cluster.kubeconfig("admin", "direct"))
    backend = Kubernetes(kubeconfig=config, namespace=namespace)
    spec = Spec(image="registry.test/not/there:1")
    with (
        rls.Pool(backend, size=1, spec=spec, config=False) as pool,
        pytest.raises(errors.ImageError, match=r"registry\.test/not/there:1 cannot be had on node") as caught,
    ):
        pool.wait_ready(1, timeout=60)
    assert "\n" not in str(caught.value) and not caught.value.retryable


def _greet(sandbox: rls.Sandbox, task: rls.Task) -> str:
    return sandbox.run("echo hi", check=True).stdout


def _ends(report: rls.Report) -> dict[str, set[tuple[str, int, str]]]:
    """By task: how its rollouts ended, after how many attempts, with which kind of failure."""
    found: dict[str, set[tuple[str, int, str]]] = {}
    for record in report.records:
        kind = record.failure.kind if record.failure is not None else ""
        found.setdefault(record.task_id, set()).add((record.status, record.attempts, kind))
    return found


def test_a_batch_with_an_image_that_does_not_exist(cluster: Cluster, namespace: str) -> None:
    """Its rollouts are over at the kubelet's first word, without another try; the others' go on."""
    config = str(cluster.kubeconfig("admin", "direct"))
    backend = Kubernetes(kubeconfig=config, namespace=namespace, image=TEST)
    tasks = [rls.Task(id="bad", image="registry.test/not/there:1"), rls.Task(id="good")]
    with rls.Pool(backend, size=2, config=False) as pool:
        report = pool.run_rollouts(tasks, _greet, group_size=2)
    assert _ends(report) == {
        "bad": {("failed", 1, "image_not_found")},
        "good": {("completed", 1, "")},
    }
    failure = next(record.failure for record in report.records if record.failure is not None)
    assert "registry.test/not/there:1 cannot be had on node" in failure.cause and not failure.retryable


def test_a_registry_that_does_not_know_the_pull_secret(
    cluster: Cluster, kube: Kube, namespace: str, faults: Faults
) -> None:
    with Registry(cluster.port("registry")) as registry:
        image = registry.task_images(3)[1]
    for node in cluster.nodes():
        faults.remove_image(node.name, image)
    words = base64.b64encode(b'{"auths": {"registry.test": {"auth": "d3Jvbmc6d3Jvbmc="}}}').decode()
    secret = {
        "metadata": {"name": "wrong"},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": words},
    }
    kube.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
    faults.registry("task/001", status=401)
    config = str(cluster.kubeconfig("admin", "direct"))
    backend = Kubernetes(kubeconfig=config, namespace=namespace, pull_secrets=["wrong"])
    with rls.Pool(backend, size=1, spec=Spec(image=image), config=False) as pool:
        report = pool.run_rollouts([rls.Task(id="t")], _greet, group_size=2)
    assert _ends(report) == {"t": {("failed", 1, "image_not_found")}}
    failure = report.records[0].failure
    assert failure is not None and "unauthorized" in failure.cause.lower()


def test_without_the_crds_sandboxes_are_plain_pods(
    cluster: Cluster, namespace: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.add(door="api", path="/apis/extensions.agents.x-k8s.io.*", status=404, reason="NotFound")
    config = str(cluster.kubeconfig("admin", "api"))
    caplog.set_level(logging.WARNING, "rlsandbox.kubernetes")
    backend = Kubernetes(kubeconfig=config, namespace=namespace, image=TEST)
    with rls.Pool(backend, size=1, config=False) as pool, pool.claim(rls.Task(id="t")) as sandbox:
        assert sandbox.run("echo x").stdout == "x\n"
    assert [
        r.message for r in caplog.records if "no agent-sandbox CRDs: sandboxes are plain pods" in r.message
    ]


def test_crds_of_another_version_are_named(
    cluster: Cluster, namespace: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.add(door="api", path="/apis/extensions.agents.x-k8s.io/v1beta1", status=404, reason="NotFound")
    config = str(cluster.kubeconfig("admin", "api"))

    async def body() -> None:
        backend = Kubernetes(kubeconfig=config, namespace=namespace, template="theirs")
        with pytest.raises(errors.UnsupportedError, match=r"another version.*install agent-sandbox v1.0"):
            await backend.capabilities()
        await backend.close()

    asyncio.run(body())


def test_a_template_without_the_keeper(cluster: Cluster, make_namespace: Callable[..., str]) -> None:
    namespace = make_namespace()
    path = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxtemplates"
    template = {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "theirs"},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": TEST}]}}},
    }
    made = cluster.kube().create(path, template)
    config = str(cluster.kubeconfig("admin", "direct"))
    backend = Kubernetes(kubeconfig=config, namespace=namespace, template="theirs")
    words = "SandboxTemplate 'theirs' does not carry the keeper: .*rlsandbox template check theirs"
    with pytest.raises(errors.ConfigError, match=words), rls.Pool(backend, size=1, config=False):
        pass
    found = cluster.kube().get(f"{path}/theirs")
    assert found["metadata"]["generation"] == made["metadata"]["generation"]  # untouched


def test_a_keeper_that_is_injected_on_request(cluster: Cluster, make_namespace: Callable[..., str]) -> None:
    """Mode replace, in a pod that runs a program of its own; the template stays as it is."""
    namespace = make_namespace("restricted")
    path = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxtemplates"
    container = {
        "name": "c",
        "image": TEST,
        "command": ["sleep", "600"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    template = {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "theirs"},
        "spec": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}}},
    }
    made = cluster.kube().create(path, template)
    how = {"kubeconfig": str(cluster.kubeconfig("admin", "direct")), "namespace": namespace}
    backend = Kubernetes(**how, template="theirs", keeper="inject")
    with rls.Pool(backend, size=1, spec=Spec(network="host"), config=False) as pool:
        seen = []
        for i in range(2):
            with pool.claim(rls.Task(id=f"t{i}"), timeout=90) as sandbox:
                assert sandbox.reset_mode == "replace"
                seen.append(sandbox.run("id -u; ls /tmp/mark 2>/dev/null; touch /tmp/mark").stdout)
        assert seen == ["1000\n", "1000\n"] and pool.stats().created >= 2
        with pytest.raises(errors.UnsupportedError, match="keeper that was injected"):
            pool.claim(rls.Task(id="closed", spec=Spec(network="none")), timeout=30)
    assert cluster.kube().get(f"{path}/theirs")["metadata"]["generation"] == made["metadata"]["generation"]
    with pytest.raises(errors.ConfigError, match="for a named template or warm pool"):
        Kubernetes(keeper="inject")
