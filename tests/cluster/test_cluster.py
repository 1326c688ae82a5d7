"""The cluster itself: what it is made of, and that its parts can be lost and come back."""

from __future__ import annotations

import pytest

from tests.cluster import objects
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.images import TEST
from tests.cluster.kube import ApiError, Kube, condition, pods, until
from tests.cluster.shortcuts import ready_pod, run_in

SLEEP = ["sleep", "infinity"]


def test_nodes_are_ready_and_say_what_they_are(cluster: Cluster) -> None:
    nodes = {node["metadata"]["name"]: node for node in cluster.kube().items("/api/v1/nodes")}
    real = [node.name for node in cluster.nodes()]
    assert set(real) <= set(nodes)
    assert all(condition(node, "Ready") == "True" for node in nodes.values())
    for name in real:
        info = nodes[name]["status"]["nodeInfo"]
        assert info["kubeletVersion"].startswith("v1.37.")
        assert info["containerRuntimeVersion"].startswith("containerd://2.")
    assert any(name.startswith("kwok-") for name in nodes)


def test_a_role_may_do_what_it_was_granted_and_no_more(cluster: Cluster) -> None:
    for role in ("nobody", "pool", "agent-sandbox"):
        kube = cluster.kube(role)
        with pytest.raises(ApiError) as refused:
            kube.items("/api/v1/secrets")
        assert refused.value.status == 403
        assert f'User "{role}" cannot list' in str(refused.value)
    assert cluster.kube("agent-sandbox").items("/api/v1/pods") is not None


def test_a_node_may_not_touch_another_nodes_pods(cluster: Cluster, namespace: str) -> None:
    first, second = (node.name for node in cluster.nodes()[:2])
    ready_pod(cluster.kube(), namespace, objects.pod("p", TEST, SLEEP, nodeName=first))
    with pytest.raises(ApiError) as refused:
        cluster.kube(f"node-{second}").delete(pods(namespace, "p"), grace=0)
    assert refused.value.status == 403


def test_pod_security_levels_are_enforced(cluster: Cluster, make_namespace) -> None:  # type: ignore[no-untyped-def]
    body = objects.pod("p", TEST, SLEEP, container={"securityContext": {"privileged": True}})
    with pytest.raises(ApiError, match="violates PodSecurity"):
        cluster.kube().create(pods(make_namespace("baseline")), body)


@pytest.mark.parametrize(
    "part", ["kube-apiserver", "kube-scheduler", "kube-controller-manager", "agent-sandbox", "kwok"]
)
def test_a_part_is_killed_and_started_again(
    cluster: Cluster, faults: Faults, namespace: str, part: str
) -> None:
    before = cluster.parts()[part]["starts"]
    cluster.kill(part)
    assert cluster.parts()[part] | {"pid": 0} == cluster.parts()[part]
    assert cluster.parts()[part]["code"] == -9
    cluster.start(part)
    assert cluster.parts()[part]["starts"] == before + 1
    until("the API server is ready", cluster.kube().ready)
    ready_pod(cluster.kube(), namespace, objects.pod("p", TEST, SLEEP))


def test_an_etcd_that_is_paused_stops_writes_until_it_goes_on(
    cluster: Cluster, faults: Faults, namespace: str
) -> None:
    kube = cluster.kube()
    cluster.pause("etcd")
    with pytest.raises(OSError, match="timed out"):
        kube.call(
            "POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "a"}}, timeout=2
        )
    cluster.resume("etcd")
    body = {"metadata": {"name": "b"}}
    until("a write succeeds", lambda: kube.create(f"/api/v1/namespaces/{namespace}/configmaps", body), 30)


def test_containers_outlive_the_kubelet_and_containerd(
    cluster: Cluster, faults: Faults, namespace: str
) -> None:
    node = cluster.nodes()[0].name
    body = objects.pod("p", TEST, ["sh", "-c", "date > /tmp/at; sleep infinity"], nodeName=node)
    ready_pod(cluster.kube(), namespace, body)
    at = run_in(cluster, namespace, "p", ["cat", "/tmp/at"]).stdout
    cluster.restart(f"containerd-{node}")
    until("exec works again", lambda: run_in(cluster, namespace, "p", ["cat", "/tmp/at"]).stdout == at)
    cluster.restart(f"kubelet-{node}")
    until("exec works again", lambda: run_in(cluster, namespace, "p", ["cat", "/tmp/at"]).stdout == at)
    assert cluster.kube().get(pods(namespace, "p"))["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_lost_node_becomes_unready_and_its_pods_are_given_up(
    cluster: Cluster, faults: Faults, namespace: str
) -> None:
    node, kube = cluster.nodes()[-1].name, cluster.kube()
    ready_pod(kube, namespace, objects.pod("p", TEST, SLEEP, nodeName=node))
    with faults.lost_node(node):
        until("it is not Ready", lambda: condition(kube.get(f"/api/v1/nodes/{node}"), "Ready") != "True", 60)
        # Without a grace it goes from the API at once, though its container still runs there.
        until("its pod is deleted", lambda: not kube.items(pods(namespace)), 60)
    until("it is Ready again", lambda: condition(kube.get(f"/api/v1/nodes/{node}"), "Ready") == "True", 60)


def test_a_drained_node_is_empty_and_takes_nothing(cluster: Cluster, faults: Faults, namespace: str) -> None:
    node, kube = cluster.nodes()[0].name, cluster.kube()
    on_it = {"nodeSelector": {"kubernetes.io/hostname": node}}
    ready_pod(kube, namespace, objects.pod("p", TEST, SLEEP, **on_it))
    assert faults.drain(node, namespace) == 1
    until("it is gone", lambda: not kube.items(pods(namespace)), 30)
    kube.create(pods(namespace), objects.pod("q", TEST, SLEEP, **on_it))
    until("it has no place", lambda: condition(kube.get(pods(namespace, "q")), "PodScheduled") == "False", 30)
    faults.cordon(node, False)
    until("it has one", lambda: condition(kube.get(pods(namespace, "q")), "Ready") == "True", 60)


def test_pods_vanish_behind_the_back_of_their_owner(
    kube: Kube, cluster: Cluster, faults: Faults, namespace: str
) -> None:
    for name in ("a", "b"):
        body = objects.pod(name, TEST, SLEEP)
        body["metadata"]["labels"] = {"which": name}
        ready_pod(kube, namespace, body)
    assert faults.delete_pods(namespace, "which=a") == 1
    until("one is left", lambda: [p["metadata"]["name"] for p in kube.items(pods(namespace))] == ["b"], 30)
