"""A sandbox that ends under its user: by what, on which node, and that it may be tried again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.sandbox import AsyncSandbox
from rlsandbox.spec import Spec
from tests.cluster.cluster import Cluster
from tests.cluster.commands import theirs
from tests.cluster.kube import Kube, pods

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes
from tests.cluster.test_backend import TEST, host, pod_of, run

OTHER = "registry.test/pause:1"

SMALL = Spec(memory="128MiB")
MEMORY = Path("/sys/fs/cgroup/memory")
# Joins argv[1], takes up 50 MiB, and stays.
HOG = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
x = b"x" * (50 << 20)
time.sleep(60)
"""


@asynccontextmanager
async def placed(
    cluster: Cluster, kube: Kube, namespace: str, spec: Spec | None = None
) -> AsyncIterator[tuple[AsyncSandbox, str, str]]:
    """A sandbox, its pod and its node."""
    async with host(cluster.kubeconfig("admin", "direct"), namespace) as lone:
        sandbox = await lone.make(spec=spec)
        pod = pod_of(lone, sandbox)
        yield sandbox, pod, kube.get(pods(namespace, pod))["spec"]["nodeName"]


async def group_of(cluster: Cluster, node: str, pod: str) -> Path:
    """The memory group of the container of *pod*."""
    (group,) = MEMORY.rglob(await asyncio.to_thread(container_of, cluster, node, pod))
    return group


@contextmanager
def hogs(number: int, procs: Path) -> Iterator[None]:
    words = [sys.executable, "-c", HOG, str(procs)]
    started = [subprocess.Popen(words) for _ in range(number)]
    try:
        yield
    finally:
        for hog in started:
            hog.kill()
            hog.wait()


def container_of(cluster: Cluster, node: str, pod: str) -> str:
    """What containerd calls the container of *pod*."""
    for line in cluster.ctr(node, "tasks", "ls").splitlines()[1:]:
        found: str = line.split()[0]
        labels = json.loads(cluster.ctr(node, "containers", "info", found))["Labels"]
        if (
            labels.get("io.kubernetes.pod.name") == pod
            and labels.get("io.cri-containerd.kind") == "container"
        ):
            return found
    raise LookupError(pod)


def evict(cluster: Cluster, namespace: str, pod: str, node: str) -> None:
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    cluster.kube().create(f"{pods(namespace, pod)}/eviction", body)


def kill_container(cluster: Cluster, namespace: str, pod: str, node: str) -> None:
    cluster.ctr(node, "tasks", "kill", "-s", "SIGKILL", container_of(cluster, node, pod))


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (evict, "evicted", "evicted on node node-"),
        (kill_container, "container_ended", "its container ended on node node-[01] with 137"),
    ],
)
def test_ended_by_somebody(
    cluster: Cluster,
    namespace: str,
    kube: Kube,
    how: Callable[[Cluster, str, str, str], None],
    kind: str,
    words: str,
) -> None:
    async def body() -> None:
        async with placed(cluster, kube, namespace) as (sandbox, pod, node):
            async with sandbox.popen("echo on; sleep 600") as command:
                await command.next_chunk()
                await asyncio.to_thread(how, cluster, namespace, pod, node)
                with pytest.raises(errors.SandboxDiedError, match=words) as caught:
                    await command.wait()
                assert (caught.value.kind, caught.value.retryable) == (kind, True)
                assert caught.value.infrastructure
            with pytest.raises(errors.SandboxDiedError, match=words):
                await sandbox.run("true")

    run(body)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="reaches into a container's memory group of cgroup v1")
def test_a_container_that_is_ended_for_memory(cluster: Cluster, namespace: str, kube: Kube) -> None:
    """All that is in it has to be killed for that, the keeper too: here by what does not belong there."""

    async def body() -> None:
        async with placed(cluster, kube, namespace, SMALL) as (sandbox, pod, node):
            procs = await group_of(cluster, node, pod) / "cgroup.procs"
            theirs = set(procs.read_text().split())
            for pid in theirs:
                Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            with hogs(5, procs):
                while theirs & set(procs.read_text().split()):
                    await asyncio.sleep(0.02)
            with pytest.raises(errors.SandboxDiedError, match="ended for memory on node") as caught:
                await sandbox.run("true", timeout=60)
            assert (caught.value.kind, caught.value.retryable) == ("oom", True)
            assert "Spec(memory=" in (caught.value.hint or "")

    run(body)


def test_memory_taken_faster_than_the_keeper_looks(cluster: Cluster, namespace: str, kube: Kube) -> None:
    """Whoever is faster, the keeper or the kernel at the container's own limit: the command ends so, and the keeper stays."""
    one = ["python3", "-c", "x = b'x' * (500 << 20); print('held')"]
    small = "python3 -c \"x = b'x' * (40 << 20); import time; time.sleep(9)\""
    many = f"for i in 1 2 3 4 5 6 7 8; do {small} & done; wait; echo all"

    async def body() -> None:
        async with placed(cluster, kube, namespace, SMALL) as (sandbox, _, _):
            for command in [one, many] * 4:
                result = await sandbox.run(command)
                assert (result.exit_code, result.oom_killed, result.stdout) == (137, True, "")
            assert (await sandbox.run("echo still")).stdout == "still\n"

    run(body)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="reaches into a container's memory group of cgroup v1")
def test_a_command_that_the_kernel_kills_is_told_so(cluster: Cluster, namespace: str, kube: Kube) -> None:
    """Memory that the keeper's looks do not see as the episode's brings the container to its limit."""

    async def body() -> None:
        async with placed(cluster, kube, namespace, SMALL) as (sandbox, pod, node):
            group = await group_of(cluster, node, pod)
            own = [
                "python3",
                "-c",
                "x = b'x' * (70 << 20); print('on', flush=True); import time; time.sleep(600)",
            ]
            async with sandbox.popen(own) as command, sandbox.popen("read x; echo innocent") as other:
                await command.next_chunk()
                with hogs(3, group / "cgroup.procs"):
                    result = await command.wait(timeout=60)
                assert (result.exit_code, result.oom_killed) == (137, True)
                await other.write("\n")
                result = await other.wait(timeout=60)
                assert (result.exit_code, result.stdout, result.oom_killed) == (0, "innocent\n", False)

    run(body)


def test_a_template_that_is_changed_in_mid_run(cluster: Cluster, namespace: str, kube: Kube) -> None:
    """Sandboxes of two kinds in one run are nobody's wish."""
    path = theirs(kube, namespace, TEST)["SandboxTemplate"]
    config = str(cluster.kubeconfig("admin", "direct"))
    backend = Kubernetes(kubeconfig=config, namespace=namespace, template=path.rpartition("/")[2])
    with rls.Pool(backend, size=1, max_size=1, config=False) as pool:
        with pool.claim(rls.Task(id="t1"), timeout=90) as first:
            containers = kube.get(path)["spec"]["podTemplate"]["spec"]["containers"]
            containers[0]["image"] = OTHER
            kube.patch(path, {"spec": {"podTemplate": {"spec": {"containers": containers}}}})
            assert first.run("echo on").stdout == "on\n"
        with pool.claim(rls.Task(id="t2"), timeout=90) as again:  # what there was goes on
            assert again.id == first.id
            again.release(discard=True)
        with pytest.raises(errors.ProvisionError, match=f"was {TEST} and is {OTHER}") as caught:
            pool.claim(rls.Task(id="t3"), timeout=90)
        assert (caught.value.kind, caught.value.retryable) == ("template_changed", False)
