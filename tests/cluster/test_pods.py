"""Pods run as they do elsewhere: under runc, in user namespaces, under gVisor, on fake nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster import objects
from tests.cluster.cluster import Cluster
from tests.cluster.configs import METADATA
from tests.cluster.images import TEST
from tests.cluster.kube import Kube, pods
from tests.cluster.shortcuts import ready_pod, run_in, until_phase

SLEEP = ["sleep", "infinity"]
KINDS: dict[str, dict[str, Any]] = {
    "runc": {},
    "user namespace": {"hostUsers": False},
    "gvisor": {"runtimeClassName": "gvisor"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_runs_the_test_image(cluster: Cluster, kube: Kube, namespace: str, kind: str) -> None:
    ready_pod(kube, namespace, objects.pod("p", TEST, SLEEP, **KINDS[kind]))
    script = "id -u; readlink /bin; stat -c '%a %U' /usr/bin/setuid-busybox /home/agent; find /opt | wc -l; git --version; pwd"
    said = run_in(cluster, namespace, "p", ["sh", "-c", script])
    assert said.returncode == 0, said.stderr
    uid, link, setuid, home, files, git, where = said.stdout.splitlines()
    assert (uid, link, setuid, home, where) == ("0", "usr/bin", "4755 root", "755 agent", "/workspace")
    assert int(files) > 5000
    assert git.startswith("git version")


@pytest.mark.parametrize("kind", KINDS)
def test_which_kernel_and_which_users(cluster: Cluster, kube: Kube, namespace: str, kind: str) -> None:
    ready_pod(kube, namespace, objects.pod("p", TEST, SLEEP, **KINDS[kind]))
    outside = run_in(
        cluster, namespace, "p", ["sh", "-c", "cat /proc/self/uid_map; cat /proc/version"]
    ).stdout
    ids, version = outside.splitlines()[0].split(), outside.splitlines()[-1]
    assert (ids[:2] == ["0", "0"]) == (kind != "user namespace")
    here = open("/proc/version").read().strip()
    assert (version == here) == (kind != "gvisor")


def test_a_pods_exit_is_seen(kube: Kube, cluster: Cluster, namespace: str) -> None:
    for name, spec in KINDS.items():
        body = objects.pod(
            name.replace(" ", "-"), TEST, ["sh", "-c", "echo out; exit 3"], restartPolicy="Never", **spec
        )
        kube.create(pods(namespace), body)
    for name in KINDS:
        path = pods(namespace, name.replace(" ", "-"))
        until_phase(kube, path, "Failed")
        ended = kube.get(path)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert ended["exitCode"] == 3, name
        assert kube.get(path + "/log") == "out\n", name


def test_a_container_over_its_memory_is_told_as_oom(kube: Kube, cluster: Cluster, namespace: str) -> None:
    limits = {"resources": {"limits": {"memory": "32Mi"}}}
    command = ["python3", "-c", "b = b'x' * (200 << 20)"]
    kube.create(pods(namespace), objects.pod("p", TEST, command, restartPolicy="Never", container=limits))
    until_phase(kube, pods(namespace, "p"), "Failed")
    ended = kube.get(pods(namespace, "p"))["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_a_pod_reaches_its_neighbours_the_api_and_the_metadata_address(
    kube: Kube, cluster: Cluster, namespace: str
) -> None:
    """What a sandbox must not reach, a pod without isolation does reach here: else nothing would be proved."""
    serve = ["sh", "-c", "mkdir /tmp/w; echo hello > /tmp/w/index.html; httpd -f -p 8000 -h /tmp/w"]
    for number, node in enumerate(cluster.nodes()[:2]):
        ready_pod(kube, namespace, objects.pod(f"p{number}", TEST, serve, nodeName=node.name))
    address = kube.get(pods(namespace, "p1"))["status"]["podIP"]
    assert run_in(cluster, namespace, "p0", ["wget", "-qO-", f"http://{address}:8000/"]).stdout == "hello\n"
    targets = (f"{METADATA} 80", "$KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT")
    script = " && ".join([*(f"nc -w 2 {target} </dev/null" for target in targets), "echo both"])
    said = run_in(cluster, namespace, "p0", ["sh", "-c", script])
    assert said.stdout == "both\n", said.stderr


def test_a_service_account_reaches_the_api_from_within(kube: Kube, cluster: Cluster, namespace: str) -> None:
    body = objects.pod("p", TEST, SLEEP, automountServiceAccountToken=True)
    ready_pod(kube, namespace, body)
    script = (
        "import os, ssl, urllib.request as u; d = '/var/run/secrets/kubernetes.io/serviceaccount/';"
        "h = os.environ['KUBERNETES_SERVICE_HOST'];"
        "r = u.Request(f'https://{h}/version', headers={'Authorization': 'Bearer ' + open(d + 'token').read()});"
        "print(u.urlopen(r, context=ssl.create_default_context(cafile=d + 'ca.crt')).status)"
    )
    said = run_in(cluster, namespace, "p", ["python3", "-c", script])
    assert said.stdout == "200\n", said.stderr


def test_a_fake_node_runs_pods_and_answers_exec(cluster: Cluster, kube: Kube, namespace: str) -> None:
    ready_pod(kube, namespace, objects.pod("p", TEST, SLEEP, **objects.on_kwok()))
    assert kube.get(pods(namespace, "p"))["spec"]["nodeName"].startswith("kwok-")
    assert run_in(cluster, namespace, "p", ["echo", "from here"]).stdout == "from here\n"
