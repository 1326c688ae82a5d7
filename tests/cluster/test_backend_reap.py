"""The CronJob that removes what dead runs left: its rights suffice, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kube import Kube, _load, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")
COLLECTIONS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "CronJob": "/apis/batch/v1/namespaces/{}/cronjobs",
}


def lease(run: str, renewed: str) -> dict[str, Any]:
    labels = {"rlsandbox/managed": "true", "rlsandbox/run": run}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": f"rlsandbox-{run}", "labels": labels},
        "spec": {"holderIdentity": "x", "leaseDurationSeconds": 120, "renewTime": renewed},
    }


def pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": TEST, "command": ["sleep", "600"]}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def test_the_cron_job_reaps_with_its_own_rights(
    any_kubeconfig: Path, namespace: str, kube: Kube, tmp_path: Path
) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "template", "reap", "--image", "registry.example/rl:1"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    items = list(yaml.safe_load_all(shown))
    for item in items:
        if item["kind"] == "RoleBinding":
            item["subjects"][0]["namespace"] = namespace  # as kubectl apply -n does
        kube.create(COLLECTIONS[item["kind"]].format(namespace), item)
    job = items[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    command = job["containers"][0]["command"]
    assert command[:3] == ["python3", "-m", "rlsandbox"]
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/{job['serviceAccountName']}/token"
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    token = kube.create(account, request)["status"]["token"]
    config = _load(any_kubeconfig)
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    (tmp_path / "config").write_text(json.dumps(config))

    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    kube.create(leases, lease("dead", "2020-01-01T00:00:00.000000Z"))
    kube.create(leases, lease("alive", "2099-01-01T00:00:00.000000Z"))
    for run in ("dead", "alive"):
        kube.create(pods(namespace), pod(run, {"rlsandbox/managed": "true", "rlsandbox/run": run}))
    kube.create(pods(namespace), pod("theirs", {"rlsandbox/run": "dead"}))
    done = subprocess.run(
        [sys.executable, *command[1:], "--namespace", namespace],
        env=os.environ | {"KUBECONFIG": str(tmp_path / "config")},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, "removed 2" in done.stdout) == (0, True), done
    until(
        "it is gone",
        lambda: {p["metadata"]["name"] for p in kube.items(pods(namespace))} == {"alive", "theirs"},
    )
    assert [row["metadata"]["name"] for row in kube.items(leases)] == ["rlsandbox-alive"]
