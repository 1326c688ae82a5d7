"""Tokens revoked and certificates that expire in the middle of a run: the exec plugin is asked again."""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rlsandbox as rls
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.kube import Kube, _load

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = "registry.test/test:1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
VERSION = "client.authentication.k8s.io/v1"


def plugin(config: Path, base: Path, script: str) -> Path:
    """A kubeconfig whose user comes from *script*, which lies beside it."""
    login = config.parent / "login"
    login.write_text(f"#!/bin/sh\ncd '{config.parent}'\necho call >> calls\n{script}\n")
    login.chmod(0o755)
    text = _load(base)
    how = {"apiVersion": VERSION, "command": "./login", "interactiveMode": "Never"}
    text["users"] = [{"name": text["users"][0]["name"], "user": {"exec": how}}]
    config.write_text(json.dumps(text))
    return config


def account(kube: Kube, namespace: str, name: str) -> str:
    """A new service account that may do all; its token."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    kube.create(path, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    kube.create(
        f"{RBAC}/namespaces/{namespace}/rolebindings",
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    )  # fmt: skip
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    token: str = kube.create(f"{path}/{name}/token", body)["status"]["token"]
    return token


def batch(pool: rls.Pool, count: int) -> None:
    tasks = [rls.Task(id=f"t{n}") for n in range(count)]
    report = pool.run_rollouts(tasks, lambda sandbox, task: sandbox.run("echo hello").stdout, concurrency=4)
    assert [(row.status, row.value) for row in report.records] == [("completed", "hello\n")] * count
    assert all(row.attempts == 1 for row in report.records)


def test_a_token_that_is_revoked_in_the_middle_of_a_run(
    cluster: Cluster, kube: Kube, faults: Faults, make_namespace: Callable[..., str], tmp_path: Path
) -> None:
    namespace = make_namespace("privileged")
    (tmp_path / "token").write_text(account(kube, namespace, "first"))
    script = f"""printf '{{"apiVersion":"{VERSION}","status":{{"token":"%s"}},"kind":"ExecCredential"}}' "$(cat token)" """
    config = plugin(tmp_path / "config", cluster.kubeconfig("admin", "api"), script)
    backend = Kubernetes(kubeconfig=str(config), namespace=namespace, image=TEST)
    with rls.Pool(backend, size=4, max_size=4, ledger=tmp_path / "l.db", config=False) as pool:
        assert pool.wait_ready(4, timeout=180) == 4
        with pool.claim(rls.Task(id="long")) as held:
            process = held.popen("sleep 15; echo once >> /tmp/once; cat /tmp/once")
            (tmp_path / "token").write_text(account(kube, namespace, "second"))
            kube.delete(f"/api/v1/namespaces/{namespace}/serviceaccounts/first")
            time.sleep(12)  # for so long the API server may remember a token that was good
            faults.cut(door="api")  # streams and watches: all are opened anew, with what is not good any more
            assert b"".join(data for _, data in process) == b"once\n"
            assert process.wait().exit_code == 0
        batch(pool, 8)
        assert 2 <= len((tmp_path / "calls").read_text().splitlines()) <= 4
    assert not kube.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector="rlsandbox/managed=true")


def certificate(secrets: Path, place: Path, seconds: float) -> None:
    """``client.crt`` and ``client.key`` of an administrator in *place*, good for so long."""
    for name in ("index", "index.attr"):
        (place / name).write_text("")
    (place / "ca.conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={place}/index\nnew_certs_dir={place}\nrand_serial=yes\n"
        f"default_md=sha256\npolicy=p\ncertificate={secrets}/ca.crt\nprivate_key={secrets}/ca.key\n"
        "unique_subject=no\nx509_extensions=e\n[p]\norganizationName=optional\ncommonName=supplied\n"
        "[e]\nextendedKeyUsage=clientAuth\n"
    )

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=place, check=True, capture_output=True)

    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "client.key")
    openssl("req", "-new", "-key", "client.key", "-subj", "/O=system:masters/CN=short", "-out", "client.csr")
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    openssl(
        "ca", "-batch", "-notext", "-config", "ca.conf", "-in", "client.csr", "-out", "client.crt",
        "-startdate", "20200101000000Z", "-enddate", end.strftime("%Y%m%d%H%M%SZ"),
    )  # fmt: skip


def test_a_certificate_that_expires_in_the_middle_of_a_run(
    cluster: Cluster, kube: Kube, make_namespace: Callable[..., str], tmp_path: Path
) -> None:
    namespace = make_namespace("privileged")
    certificate(cluster.kubeconfig("admin", "api").parent, tmp_path, 60)
    script = """python3 -c 'import json; print(json.dumps({"apiVersion": "%s", "kind": "ExecCredential",
    "status": {"clientCertificateData": open("client.crt").read(), "clientKeyData": open("client.key").read()}}))'"""
    config = plugin(tmp_path / "config", cluster.kubeconfig("admin", "direct"), script % VERSION)
    began = time.monotonic()
    backend = Kubernetes(kubeconfig=str(config), namespace=namespace, image=TEST)
    with rls.Pool(backend, size=2, max_size=4, ledger=tmp_path / "l.db", config=False) as pool:
        assert pool.wait_ready(2, timeout=50) == 2
        certificate(cluster.kubeconfig("admin", "api").parent, tmp_path, 3600)
        time.sleep(max(began + 62 - time.monotonic(), 0))
        with pool.claim(rls.Task(id="a")), pool.claim(rls.Task(id="b")):
            batch(pool, 2)  # needs others: they are made with the new one
        assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert not kube.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector="rlsandbox/managed=true")
