"""What tests do again and again in a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from subprocess import CompletedProcess
from typing import Any

from tests.cluster import objects
from tests.cluster.handle import Handle
from tests.cluster.kube import Kube, Object, condition, pods, until

EXTENSIONS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces"
SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces"


def ready_pod(kube: Kube, namespace: str, body: Object, seconds: float = 60) -> Object:
    """Make a pod and wait until it is Ready."""
    kube.create(pods(namespace), body)
    return wait_ready(kube, namespace, body["metadata"]["name"], seconds)


def wait_ready(kube: Kube, namespace: str, name: str, seconds: float = 60) -> Object:
    seen: Object = {}

    def look() -> bool:
        seen.clear()
        seen.update(kube.get(pods(namespace, name)))
        return condition(seen, "Ready") == "True"

    try:
        until(f"pod {name} is Ready", look, seconds)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; status: {json.dumps(seen.get('status'))}") from None
    return seen


def until_phase(kube: Kube, path: str, phase: str, seconds: float = 60) -> None:
    until(f"{path} is {phase}", lambda: kube.get(path)["status"]["phase"] == phase, seconds)


def run_in(
    cluster: Handle, namespace: str, pod: str, command: Sequence[str], stdin: str | None = None
) -> CompletedProcess[str]:
    """Run a command in a pod by kubectl."""
    flags = ["-i"] if stdin is not None else []
    return cluster.kubectl("-n", namespace, "exec", *flags, pod, "--", *command)


def template(name: str, image: str, command: list[str] | None = None, **spec: Any) -> Object:
    """A SandboxTemplate."""
    body = objects.pod(name, image, command, **spec)["spec"]
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": body, "metadata": {}}, "networkPolicyManagement": "Unmanaged"},
    }


def warm_pool(name: str, replicas: int) -> Object:
    """A SandboxWarmPool of the template of the same name."""
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": name}},
    }


def claim(name: str, pool: str) -> Object:
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim",
        "metadata": {"name": name},
        "spec": {"warmPoolRef": {"name": pool}},
    }


def warm(kube: Kube, namespace: str, body: Object, replicas: int, seconds: float = 60) -> None:
    """Make a template and a pool of it, and wait until all its sandboxes are Ready."""
    name = body["metadata"]["name"]
    kube.create(f"{EXTENSIONS}/{namespace}/sandboxtemplates", body)
    kube.create(f"{EXTENSIONS}/{namespace}/sandboxwarmpools", warm_pool(name, replicas))
    path = f"{EXTENSIONS}/{namespace}/sandboxwarmpools/{name}"
    until(
        f"{replicas} sandboxes of {name} are Ready",
        lambda: kube.get(path).get("status", {}).get("readyReplicas", 0) >= replicas,
        seconds,
    )
