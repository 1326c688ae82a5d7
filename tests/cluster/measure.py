"""``python -m tests.cluster measure``: what the cluster itself takes, so that the product's figures can be read against it."""

from __future__ import annotations

import os
import statistics
import time

from tests.cluster import objects
from tests.cluster.handle import Handle
from tests.cluster.images import TEST
from tests.cluster.kube import Kube, until
from tests.cluster.shortcuts import EXTENSIONS, ready_pod, template, warm

KINDS: dict[str, dict[str, object]] = {
    "runc": {},
    "user namespace": {"hostUsers": False},
    "gvisor": {"runtimeClassName": "gvisor"},
}
SLEEP = ["sleep", "infinity"]


def measured(cluster: Handle, rounds: int, sandboxes: int) -> None:
    """Print it all, beside how busy the machine was."""
    kube = cluster.kube()
    space = f"measure-{os.getpid()}"
    kube.create("/api/v1/namespaces", objects.namespace(space))
    try:
        account = f"/api/v1/namespaces/{space}/serviceaccounts/default"
        until("the namespace", lambda: kube.get(account))
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"started in {cluster.facts().get('seconds')} s")
        for kind, spec in KINDS.items():
            took = [_pod(kube, space, f"p{number}", spec) for number in range(rounds)]
            print(
                f"a pod created to Ready, {kind}: median {statistics.median(took):.2f} s, max {max(took):.2f} s"
            )
        if sandboxes:
            begun = time.monotonic()
            warm(kube, space, template("w", TEST, SLEEP, **objects.on_kwok()), sandboxes, 900)
            print(
                f"{sandboxes} sandboxes of a warm pool Ready on fake nodes: {time.monotonic() - begun:.1f} s"
            )
        for name, size in sorted(cluster.memory().items(), key=lambda item: -item[1]):
            print(f"{name:26} {size:8.1f} MB")
        kube.delete(f"{EXTENSIONS}/{space}/sandboxwarmpools/w")
    finally:
        kube.delete(f"/api/v1/namespaces/{space}")


def _pod(kube: Kube, space: str, name: str, spec: dict[str, object]) -> float:
    begun = time.monotonic()
    ready_pod(kube, space, objects.pod(name, TEST, SLEEP, **spec))
    took = time.monotonic() - begun
    kube.delete(f"/api/v1/namespaces/{space}/pods/{name}", grace=0)
    until(f"{name} is gone", lambda: not kube.items(f"/api/v1/namespaces/{space}/pods"))
    return took
