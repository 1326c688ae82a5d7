"""What is in the cluster from the start: runtime class, rights of the roles, fake nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Object = dict[str, Any]
RBAC = "rbac.authorization.k8s.io"


def runtime_class() -> Object:
    """gVisor, on the nodes that have it."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "gvisor"},
        "handler": "runsc",
        "scheduling": {"nodeSelector": {"rlsandbox.test/gvisor": "true"}},
    }


def cluster_role(name: str, *rules: tuple[list[str], list[str], list[str]]) -> Object:
    """Rules are (groups, resources, verbs)."""
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [{"apiGroups": a, "resources": b, "verbs": c} for a, b, c in rules],
    }


def binding(role: str, user: str) -> Object:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{user}-{role}"},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }


def rights() -> list[Object]:
    """RBAC beyond what Kubernetes brings along. The rights of agent-sandbox's roles come with it."""
    every = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return [
        cluster_role(
            "kwok",
            ([""], ["nodes", "pods"], ["delete", "get", "list", "patch", "update", "watch"]),
            ([""], ["nodes/status", "pods/status"], ["patch", "update"]),
            (["", "events.k8s.io"], ["events"], ["create", "patch", "update"]),
            (["coordination.k8s.io"], ["leases"], every),
        ),
        binding("kwok", "kwok"),
        binding("agent-sandbox-controller", "agent-sandbox"),
        binding("agent-sandbox-controller-extensions", "agent-sandbox"),
    ]


def kwok_nodes(numbers: Iterable[int], address: str, pods: int = 1000) -> list[Object]:
    """Fake nodes behind KWOK's *address*; tainted, so that only what asks for them is put there."""
    size = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "500Gi", "pods": str(pods)}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": f"kwok-{number}",
                "labels": {
                    "rlsandbox.test/kwok": "true",
                    "kubernetes.io/hostname": f"kwok-{number}",
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                },
            },
            "spec": {"taints": [{"key": "rlsandbox.test/kwok", "effect": "NoSchedule"}]},
            "status": {
                "addresses": [
                    {"type": "InternalIP", "address": address},
                    {"type": "Hostname", "address": f"kwok-{number}"},
                ],
                "allocatable": size,
                "capacity": size,
            },
        }
        for number in numbers
    ]


def namespace(name: str, level: str = "privileged") -> Object:
    """A namespace that enforces a Pod Security *level*."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def pod(name: str, image: str, command: list[str] | None = None, **spec: Any) -> Object:
    """A pod as the tests want it: gone at once when deleted, without a token."""
    container: Object = {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent"}
    if command:
        container["command"] = command
    container |= spec.pop("container", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "dnsPolicy": "Default",
            "containers": [container],
        }
        | spec,
    }


def on_kwok() -> Object:
    """The part of a pod's spec that puts it on a fake node."""
    return {
        "nodeSelector": {"rlsandbox.test/kwok": "true"},
        "tolerations": [{"key": "rlsandbox.test/kwok", "operator": "Exists", "effect": "NoSchedule"}],
    }
