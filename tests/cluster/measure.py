"""``python -m tests.cluster measure``: what the cluster itself takes, so that the product's figures can be read against it.

``shield``: measuring on a machine that has other things to do. ``chrt`` before a client reaches neither the parts of
the cluster nor the pods, whose processes have the weight 2 where any other process has 1,024.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

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


PODS = Path("/sys/fs/cgroup/cpu/k8s.io")
HEAVY, LIGHT = 262144, 1024
PRIORITY = 4


def _parts(cluster: Handle) -> Iterator[int]:
    """All processes of the cluster but those in pods, and runc: a real-time process cannot enter a pod's control group."""
    todo = [cluster.supervisor()]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):  # it has ended
            inside = "/k8s.io/" in Path(f"/proc/{pid}/cgroup").read_text()
            if inside or Path(f"/proc/{pid}/comm").read_text().startswith("runc"):
                continue
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
            yield pid


def shield(cluster: Handle, on: bool = True) -> None:
    """Give the cluster's parts and pods the processor before everything else, as if the machine did nothing else.

    Parts run at real-time priority 4 (what they start does not inherit it); the pods' control group weighs as much as
    256 others, and each pod in it as much as a process. What is made later is as it is without: see :func:`keep_shielded`.
    """
    how = os.SCHED_RR | os.SCHED_RESET_ON_FORK if on else os.SCHED_OTHER
    for pid in _parts(cluster):
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                os.sched_setscheduler(int(task), how, os.sched_param(PRIORITY if on else 0))
    if not PODS.is_dir():
        return
    (PODS / "cpu.shares").write_text(str(HEAVY if on else LIGHT))
    for group in PODS.iterdir() if on else ():
        with contextlib.suppress(OSError):  # it ends meanwhile; files are no groups
            (group / "cpu.shares").write_text(str(LIGHT))


def keep_shielded(cluster: Handle) -> None:
    """:func:`shield` again and again, for the pods and shims that are made meanwhile; until interrupted."""
    known: set[str] = set()
    try:
        while True:
            there = {group.name for group in PODS.iterdir()} if PODS.is_dir() else set()
            if there - known:
                shield(cluster)
            known = there
            time.sleep(0.5)
    finally:
        shield(cluster, False)


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
