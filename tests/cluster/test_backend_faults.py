"""A pool on a real cluster while parts of it fail: no rollout is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.spec import Spec
from tests.cluster.cluster import Cluster
from tests.cluster.commands import theirs
from tests.cluster.faults import Faults
from tests.cluster.kube import Kube, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")
ROOT = Path(__file__).parents[2]
EXT = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces"
SPECS = (Spec(), Spec(pids=500), Spec(pids=600))
"""More than one: sandboxes of one have to make way for another's, so that claims are made and removed all the time."""


@pytest.fixture
def backend(cluster: Cluster, namespace: str) -> Kubernetes:
    return Kubernetes(kubeconfig=str(cluster.kubeconfig("admin", "api")), namespace=namespace, image=TEST)


@pytest.fixture
def nothing_left(cluster: Cluster, namespace: str) -> Iterator[Callable[[], None]]:
    """To be called once the pool is closed: claims, sandboxes, pods and Leases are gone."""
    kube = cluster.kube()
    kinds = (
        pods(namespace),
        f"{EXT}/{namespace}/sandboxclaims",
        f"/apis/agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxes",
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    )

    def left() -> list[str]:
        return [
            f"{kind.rpartition('/')[2]} {one['metadata']['name']}, deletion {one['metadata'].get('deletionTimestamp')}"
            for kind in kinds
            for one in kube.items(kind)
        ]

    def check() -> None:
        try:
            until("nothing is left", lambda: not left(), 60)
        except TimeoutError:
            raise AssertionError(f"left after 60 s: {left()}") from None

    return check  # type: ignore[return-value]


def tasks(n: int) -> list[rls.Task]:
    return [rls.Task(id=f"t{i}", spec=SPECS[i % len(SPECS)]) for i in range(n)]


@contextmanager
def meanwhile(begin: threading.Event, *steps: Callable[[], object]) -> Iterator[None]:
    """Take *steps* on a thread once *begin* is set; they are over at the block's end."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            begin.wait()
            for step in steps:
                step()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        begin.set()
        thread.join()
    assert not failed, failed


def pause(seconds: float) -> Callable[[], object]:
    """How long a fault lasts."""
    return lambda: time.sleep(seconds)


def batch(
    backend: Kubernetes, *steps: Callable[[], object], rollouts: int = 12, size: int = 2, seconds: float = 0.5
) -> tuple[Any, rls.PoolStats]:
    """Rollouts that make and remove sandboxes, with *steps* taken from the third of them on; report and stats."""
    begin, seen = threading.Event(), []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        seen.append(1)
        if len(seen) == 3:
            begin.set()
        return sandbox.run(f"sleep {seconds}; echo x >> /tmp/once; cat /tmp/once").stdout

    with rls.Pool(backend, size=size, config=False) as pool, meanwhile(begin, *steps):
        report = pool.run_rollouts(tasks(rollouts), policy, retries=3, concurrency=size)
        stats = pool.stats()
    assert report.coverage == 1.0 and len(report.records) == rollouts
    assert {record.value for record in report.records} == {"x\n"}
    return report, stats


def test_an_api_server_that_is_away(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    away = (
        lambda: cluster.kill("kube-apiserver"),
        pause(20),
        lambda: cluster.start("kube-apiserver"),
    )
    batch(backend, *away, rollouts=9)
    nothing_left()


@pytest.mark.parametrize("part", ["etcd", "agent-sandbox", "kube-controller-manager", "kube-scheduler"])
def test_a_part_that_hangs(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None], part: str
) -> None:
    """During claims and releases."""
    batch(backend, lambda: cluster.pause(part), pause(12), lambda: cluster.resume(part))
    nothing_left()


def test_a_controller_that_dies(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    batch(backend, lambda: cluster.kill("agent-sandbox"), pause(8), lambda: cluster.start("agent-sandbox"))
    nothing_left()


def test_exec_streams_that_are_cut_all_the_time(
    backend: Kubernetes, namespace: str, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    def cut() -> None:
        for _ in range(12):
            faults.cut_exec(namespace)
            time.sleep(0.4)

    report, _ = batch(backend, cut)
    assert all(record.attempts == 1 for record in report.records)
    nothing_left()


def test_watches_that_end_and_forget(
    backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    def cut() -> None:
        for _ in range(6):
            faults.watch_gone()
            faults.cut_watches()
            time.sleep(0.5)

    batch(backend, cut)
    nothing_left()


def test_answers_that_are_lost(
    backend: Kubernetes, namespace: str, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """504 of what was done all the same: nothing is made twice, nothing stays."""
    made: list[int] = []

    def lose() -> None:
        made.append(faults.lost_answer("POST", ".*/sandboxclaims", times=3))
        made.append(faults.lost_answer("DELETE", ".*/sandboxclaims/.*", times=3))
        made.append(faults.lost_answer("POST", ".*/sandboxclaims", status=0, times=2))

    batch(backend, lose)
    assert faults.hits(made[0]) and faults.hits(made[1])
    nothing_left()


def test_a_storm_of_429(backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]) -> None:
    _, stats = batch(backend, lambda: faults.too_many(".*/sandboxclaims.*", method="(POST|DELETE)", times=12))
    assert stats.throttled >= 1
    nothing_left()


def test_what_sandboxes_are_made_from_is_deleted(
    cluster: Cluster, backend: Kubernetes, namespace: str, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """ConfigMap, templates and warm pools: made again."""
    kube = cluster.kube()

    def delete() -> None:
        for path in (
            f"/api/v1/namespaces/{namespace}/configmaps",
            f"{EXT}/{namespace}/sandboxwarmpools",
            f"{EXT}/{namespace}/sandboxtemplates",
        ):
            for item in kube.items(path):
                kube.delete(f"{path}/{item['metadata']['name']}")

    batch(backend, delete)
    nothing_left()


def test_nodes_that_are_drained(
    cluster: Cluster, backend: Kubernetes, namespace: str, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """One after the other: rollouts are retried elsewhere, and nobody gets a sandbox on a node that is cleared."""
    first, second = (node.name for node in cluster.nodes())

    def there(node: str) -> list[Any]:
        return cluster.kube().items(pods(namespace), fieldSelector=f"spec.nodeName={node}")

    batch(
        backend,
        lambda: faults.drain(first, namespace),
        pause(3),
        lambda: faults.cordon(first, False),
        lambda: faults.drain(second, namespace),
        lambda: until("it is empty", lambda: not there(second), 60),
        lambda: faults.cordon(second, False),
        rollouts=15,
    )  # fmt: skip
    nothing_left()


def test_a_cordoned_node_has_had_its_last_episode(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    first = cluster.nodes()[0].name
    with rls.Pool(backend, size=4, config=False) as pool:
        assert pool.wait_ready(4, timeout=90) == 4
        held = [pool.claim(rls.Task(id=f"t{i}")) for i in range(4)]
        assert {sandbox.node for sandbox in held} == {node.name for node in cluster.nodes()}
        faults.cordon(first)
        until("the backend knows", lambda: first not in backend.nodes(), 20)
        for sandbox in held:
            assert sandbox.run("echo x").stdout == "x\n"  # an episode is not cut off
            sandbox.release()
        until("others are ready", lambda: pool.stats().ready == 4, 60)
        again = [pool.claim(rls.Task(id=f"u{i}")) for i in range(4)]
        assert first not in {sandbox.node for sandbox in again}
        for sandbox in again:
            sandbox.release()
        faults.cordon(first, False)
    nothing_left()


def test_a_heartbeat_that_is_late(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """Sandboxes of a node that is not heard of are handed to nobody; when it is back, none has failed."""
    first = cluster.nodes()[0].name
    with rls.Pool(backend, size=4, config=False) as pool:
        assert pool.wait_ready(4, timeout=90) == 4
        with faults.lost_node(first):
            until("it is noticed", lambda: pool.stats().away, 40)
            away = pool.stats().away
            held = [pool.claim(rls.Task(id=f"t{i}"), timeout=5) for i in range(4 - away)]
            assert first not in {sandbox.node for sandbox in held}
            with pytest.raises(errors.ClaimTimeoutError, match=f"{away} on nodes of which nothing is heard"):
                pool.claim(rls.Task(id="one more"), timeout=0.5)
        for sandbox in held:
            sandbox.release()
        until("all are ready again", lambda: pool.stats().ready == 4, 60)
        stats = pool.stats()
        assert (stats.away, stats.died_idle, stats.reset_failed, stats.created) == (0, 0, 0, 4)
        held = [pool.claim(rls.Task(id=f"u{i}")) for i in range(4)]
        assert first in {sandbox.node for sandbox in held}
        assert all(sandbox.run("echo x").stdout == "x\n" for sandbox in held)
        for sandbox in held:
            sandbox.release()
    nothing_left()


def test_a_node_that_is_lost(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """Its kubelet is away until the cluster gives its pods up: their rollouts are retried on the other."""
    first = cluster.nodes()[0].name
    kubelet = f"kubelet-{first}"
    report, _ = batch(
        backend, lambda: cluster.pause(kubelet), pause(35), lambda: cluster.resume(kubelet),
        rollouts=8, size=4, seconds=8,
    )  # fmt: skip
    kinds = {attempt.failure.kind for record in report.records for attempt in getattr(record, "log", ())}
    assert kinds <= {"node_lost", "pod_gone", "pod_removed", "evicted"}
    nothing_left()


def test_a_warm_pool_of_theirs_scaled_to_nothing(
    cluster: Cluster, namespace: str, faults: Faults, tmp_path: Path
) -> None:
    kube, config = cluster.kube(), str(cluster.kubeconfig("admin", "api"))
    path = theirs(kube, namespace, TEST)["SandboxWarmPool"]
    backend = Kubernetes(kubeconfig=config, namespace=namespace, warm_pool="rlsandbox-example")
    with rls.Pool(backend, size=2, config=False) as pool:
        assert pool.wait_ready(2, timeout=90) == 2
        kube.patch(path, {"spec": {"replicas": 0}})
        report = pool.run_rollouts(
            [rls.Task(id=f"t{i}") for i in range(4)], lambda sandbox, task: sandbox.run("echo x").stdout
        )
        assert report.coverage == 1.0
        sandbox = pool.claim(rls.Task(id="t"))
        sandbox.release(discard=True)  # its successor has to be made with the warm pool empty
        until("another is ready", lambda: pool.stats().ready == 2 and pool.stats().created == 3, 60)
    assert kube.get(path)["spec"]["replicas"] == 0  # theirs is theirs
    until("no claim is left", lambda: not kube.items(f"{EXT}/{namespace}/sandboxclaims"), 30)


def test_a_claim_that_nobody_takes_up(
    cluster: Cluster, backend: Kubernetes, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    async def body() -> None:
        await backend.capabilities()
        cluster.pause("agent-sandbox")
        with pytest.raises(errors.ProvisionError, match="no controller has taken it up") as caught:
            await backend.provision(Spec(), member="m", labels={}, deadline=6)
        assert caught.value.kind == "provision_timeout" and caught.value.retryable
        cluster.resume("agent-sandbox")
        await backend.close()

    asyncio.run(body())
    nothing_left()


def test_a_pod_that_does_not_end(
    cluster: Cluster, backend: Kubernetes, namespace: str, faults: Faults, nothing_left: Callable[[], None]
) -> None:
    """It counts against the ceiling, and stats say so, until it is gone."""
    kube = cluster.kube()
    with rls.Pool(backend, size=2, config=False) as pool:
        assert pool.wait_ready(2, timeout=90) == 2
        sandbox = pool.claim(rls.Task(id="t"))
        pod = backend._places[sandbox.id].pod
        kube.patch(pods(namespace, pod), {"metadata": {"finalizers": ["example.com/stays"]}})
        sandbox.release(discard=True)
        until("it is stuck", lambda: sandbox.id in pool.stats().stuck, 60)
        stats = pool.stats()
        assert (stats.live, stats.ready, stats.terminating) == (2, 1, 1)
        with pool.claim(rls.Task(id="u")), pytest.raises(errors.ClaimTimeoutError, match="1 of them stuck"):
            pool.claim(rls.Task(id="v"), timeout=0.5)
        assert len(kube.items(pods(namespace))) == 2
        kube.patch(pods(namespace, pod), {"metadata": {"finalizers": None}})
        until("its place is used", lambda: pool.stats().ready == 2, 90)
        assert not pool.stats().stuck
    nothing_left()


PROGRAM = """
import sys, rlsandbox as rls
from rlsandbox.backends.kubernetes import Kubernetes
config, namespace, image, ledger = sys.argv[1:]
pool = rls.Pool(Kubernetes(kubeconfig=config, namespace=namespace, image=image), size=2, config=False,
                run="killed", ledger=ledger)
tasks = [rls.Task(id=f"t{i}") for i in range(10)]
with pool:
    for record in pool.rollouts(tasks, lambda s, t: s.run("sleep 0.5; echo x").stdout, resume=True):
        print(record.task_id, record.status, flush=True)
"""


def test_a_client_that_is_killed_in_mid_batch(
    cluster: Cluster, namespace: str, nothing_left: Callable[[], None], tmp_path: Path
) -> None:
    """Started again it does what is missing, and what the first had left is gone at once."""
    config = str(cluster.kubeconfig("admin", "api"))
    command = [sys.executable, "-c", PROGRAM, config, namespace, TEST, str(tmp_path)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    done = [first.stdout.readline().split() for _ in range(3)]
    first.send_signal(signal.SIGKILL)
    first.wait()
    kube = cluster.kube()
    assert len(kube.items(pods(namespace))) == 2
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert second.returncode == 0, second.stderr
    done += [line.split() for line in second.stdout.splitlines()]
    ended = {task for task, status in done if status == "completed"}
    assert ended == {f"t{i}" for i in range(10)}, (done, second.stderr)
    nothing_left()


def test_a_run_that_lives_is_not_taken_for_a_dead_one(cluster: Cluster, namespace: str, kube: Kube) -> None:
    config = str(cluster.kubeconfig("admin", "api"))

    def backend() -> Kubernetes:
        return Kubernetes(kubeconfig=config, namespace=namespace, image=TEST)

    with rls.Pool(backend(), size=1, config=False) as one, rls.Pool(backend(), size=1, config=False) as two:
        one.wait_ready(1, timeout=90)
        two.wait_ready(1, timeout=90)
        for pool in (one, two):
            with pool.claim(rls.Task(id="t")) as sandbox:
                assert sandbox.run("echo x").stdout == "x\n"
        assert (one.stats().created, two.stats().created) == (1, 1)
