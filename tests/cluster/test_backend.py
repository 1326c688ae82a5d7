"""The Kubernetes backend on a real cluster: modes, errors as they happen, cut streams, outages, rights, what dead runs leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.sandbox import AsyncSandbox
from rlsandbox.spec import Spec
from rlsandbox.testing.lone import LoneHost
from tests.cluster.cluster import Cluster
from tests.cluster.commands import reap
from tests.cluster.faults import Faults
from tests.cluster.kube import Kube, pods, until

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes
from rlsandbox.backends.kubernetes.doctor import examine

TEST = os.environ.get("RLSANDBOX_TEST_IMAGE", "registry.test/test:1")
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def host(kubeconfig: Path, namespace: str, **how: Any) -> AsyncIterator[LoneHost]:
    backend = Kubernetes(**{"kubeconfig": str(kubeconfig), "namespace": namespace, "image": TEST, **how})
    made = LoneHost(backend)
    try:
        yield made
    finally:
        await made.close()
        await backend.close()


def run(body: Callable[[], Awaitable[None]], seconds: float = 120) -> None:
    async def main() -> None:
        async with asyncio.timeout(seconds):
            await body()

    asyncio.run(main())


def pod_of(lone: LoneHost, sandbox: AsyncSandbox) -> str:
    return str(lone.backend._places[sandbox.id].pod)  # type: ignore[attr-defined]


# -- modes ------------------------------------------------------------------------------------------

LEVELS = [("privileged", "overlay", "own"), ("baseline", "userns", "foreign")]


@pytest.mark.parametrize(("level", "mode", "proc"), LEVELS)
def test_the_best_mode_that_the_level_allows(
    any_kubeconfig: Path, make_namespace: Callable[..., str], level: str, mode: str, proc: str
) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, make_namespace(level)) as lone:
            sandbox = await lone.make(spec=Spec(memory="512MiB", network="none"))
            facts = lone.member(sandbox).facts
            assert (sandbox.reset_mode, facts["proc"], facts["ids"]) == (mode, proc, "range")
            told = await sandbox.run(
                "grep CapEff /proc/self/status; ls /.rlsandbox-run 2>/dev/null | wc -l; id -u"
            )
            caps, seen, uid = told.stdout.replace("CapEff:", "").split()
            assert int(caps, 16) >> 21 & 1 == 0 and seen == "0" and uid == "0"
            await sandbox.run(
                "echo x > /etc/dirt; rm -f /etc/passwd; mkdir /opt/dirt; echo y > /dev/shm/dirt"
            )
            await sandbox.client.reset("")
            left = await sandbox.run("ls -d /etc/dirt /opt/dirt /dev/shm/dirt /etc/passwd 2>/dev/null")
            assert left.stdout == "/etc/passwd\n"

    run(body)


def test_restricted_means_replace_and_no_network_none(
    any_kubeconfig: Path, make_namespace: Callable[..., str]
) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, make_namespace("restricted")) as lone:
            sandbox = await lone.make(spec=Spec(network="host"))
            assert sandbox.reset_mode == "replace"
            assert (await sandbox.run("id -u")).stdout == "65534\n"
            with pytest.raises(errors.UnsupportedError, match="cannot be held by a pod whose network"):
                await lone.make(spec=Spec(network="none"))

    run(body)


@pytest.mark.parametrize("level", ["privileged", "baseline"])
def test_an_episode_reaches_nobody(
    any_kubeconfig: Path, make_namespace: Callable[..., str], level: str
) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, make_namespace(level)) as lone:
            a, b = await lone.make(spec=Spec()), await lone.make(spec=Spec(network="host"))
            neighbour = (await b.run("hostname -i")).stdout.split()[0]
            server = lone.backend._api._client.configuration.host.rpartition("/")[2]  # type: ignore[attr-defined]
            for place in ("169.254.169.254 80", f"{neighbour} 80", server.replace(":", " "), "10.96.0.1 443"):
                tried = await a.run(
                    f'python3 -c "import socket,sys; socket.create_connection(sys.argv[1:], 3)" {place}'
                )
                assert "unreachable" in tried.stderr or ("127.0.0.1" in place and not tried.ok), place
            links = (await a.run("cat /proc/net/dev")).stdout
            assert [line.split(":")[0].strip() for line in links.splitlines()[2:]] == ["lo"]
            # the keeper's socket, by every way there is to it
            for way in ("/.rlsandbox-run/s/keeper", "/proc/1/root/.rlsandbox-run/s/keeper"):
                assert not (await a.run(["test", "-e", way])).ok, way
            token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
            assert not (await a.run(["test", "-e", token])).ok
            assert "KUBERNETES" not in (await a.run("env")).stdout

    run(body)


# -- errors, within seconds of the event ------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (Spec(image="registry.test/nothing:1"), "image_not_found", "registry.test/nothing:1"),
        (Spec(image="not an image"), "image_not_found", "InvalidImageName"),
        (Spec(cpu=4000.0), "unschedulable", "Insufficient cpu"),
    ],
)
def test_what_cannot_become_a_sandbox_is_told_soon(
    any_kubeconfig: Path, namespace: str, spec: Spec, kind: str, words: str
) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, namespace) as lone:
            await lone.backend.capabilities()
            start = time.monotonic()
            with pytest.raises(errors.ProvisionError, match=words) as caught:
                await lone.make(spec=spec, timeout=90)
            assert caught.value.kind == kind and time.monotonic() - start < 45

    run(body)


def test_a_runtime_class_that_is_not_there(any_kubeconfig: Path, namespace: str) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, namespace, runtime_class="nope") as lone:
            with pytest.raises(errors.ConfigError, match="no RuntimeClass 'nope'"):
                await lone.make(timeout=40)

    run(body)


def test_memory_of_a_command_and_of_the_container(any_kubeconfig: Path, namespace: str) -> None:
    """The keeper outlives a command that takes too much; when the container dies all the same, that is said."""

    async def body() -> None:
        async with host(any_kubeconfig, namespace) as lone:
            sandbox = await lone.make(spec=Spec(memory="128MiB"))
            eater = 'x = []\nfor i in range(1000):\n    x.append(bytearray(b"1") * (1 << 20))'
            r = await sandbox.run(["python3", "-c", eater])
            assert r.oom_killed and r.exit_code == 137
            assert (await sandbox.run("echo still")).stdout == "still\n"

    run(body)


def test_a_pod_that_is_deleted_is_lost_at_once(any_kubeconfig: Path, namespace: str, kube: Kube) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, namespace) as lone:
            sandbox = await lone.make()
            command = asyncio.ensure_future(sandbox.run("sleep 60"))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(kube.delete, pods(namespace, pod_of(lone, sandbox)), grace=0)
            start = time.monotonic()
            with pytest.raises(errors.SandboxDiedError) as caught:
                await command
            assert caught.value.kind in ("pod_gone", "pod_removed", "container_ended")
            assert caught.value.retryable and time.monotonic() - start < 10

    run(body)


# -- streams and outages ----------------------------------------------------------------------------


def test_a_cut_stream_ends_nothing_and_repeats_nothing(
    cluster: Cluster, namespace: str, faults: Faults
) -> None:
    async def body() -> None:
        async with host(cluster.kubeconfig("admin", "api"), namespace) as lone:
            sandbox = await lone.make()
            long = asyncio.ensure_future(
                sandbox.run("echo begun; sleep 3; echo x >> /tmp/once; cat /tmp/once; exit 5")
            )
            much = asyncio.ensure_future(sandbox.run("seq 1 300000", output_limit="8MiB"))
            for _ in range(4):
                await asyncio.sleep(0.5)
                await asyncio.to_thread(faults.cut_exec, namespace)
            r = await long
            assert (r.exit_code, r.stdout) == (5, "begun\nx\n")
            assert (await much).stdout == "".join(f"{i}\n" for i in range(1, 300001))
            stream = lone.backend._places[sandbox.id].stream  # type: ignore[attr-defined]
            assert stream.cuts >= 1

    run(body)


def test_an_outage_of_the_api_server_ends_nothing(cluster: Cluster, namespace: str, faults: Faults) -> None:
    async def body() -> None:
        async with host(cluster.kubeconfig("admin", "api"), namespace) as lone:
            sandbox = await lone.make()
            command = asyncio.ensure_future(sandbox.run("sleep 30; echo x"))
            await asyncio.sleep(1)
            await asyncio.to_thread(cluster.kill, "kube-apiserver")
            await asyncio.sleep(20)
            await asyncio.to_thread(cluster.start, "kube-apiserver")
            r = await command
            assert (r.exit_code, r.stdout) == (0, "x\n")
            assert (await sandbox.run("echo on")).stdout == "on\n"

    run(body, 280)


def test_a_create_that_was_done_and_said_to_have_failed(
    cluster: Cluster, namespace: str, faults: Faults
) -> None:
    async def body() -> None:
        async with host(cluster.kubeconfig("admin", "api"), namespace) as lone:
            await lone.backend.capabilities()
            rule = faults.lost_answer("POST", ".*/sandboxclaims")
            sandbox = await lone.make()
            assert faults.hits(rule) == 1
            claims = cluster.kube().items(
                f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxclaims"
            )
            assert len(claims) == 1
            await sandbox.release()

    run(body)


def test_watches_that_are_cut_or_too_old(cluster: Cluster, namespace: str, faults: Faults) -> None:
    async def body() -> None:
        async with host(cluster.kubeconfig("admin", "api"), namespace) as lone:
            await lone.backend.capabilities()
            for i in range(3):
                if i == 1:
                    faults.watch_gone(times=2)
                await asyncio.to_thread(faults.cut_watches)
                await lone.make()

    run(body)


def test_a_dead_client_leaves_nothing_for_ever(any_kubeconfig: Path, namespace: str, kube: Kube) -> None:
    """kill -9 in mid-run: reap takes what was left, once the run's lease has run out, and nothing else."""
    program = (
        "import sys, time, rlsandbox as rls\n"
        "from rlsandbox.backends.kubernetes import Kubernetes\n"
        "pool = rls.Pool(Kubernetes(kubeconfig=sys.argv[1], namespace=sys.argv[2], image=sys.argv[3]), size=2, config=False)\n"
        "pool.wait_ready(2, timeout=60); print('ready', flush=True); time.sleep(600)\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", program, str(any_kubeconfig), namespace, TEST],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "ready\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    command = reap(namespace)
    env = {**os.environ, "KUBECONFIG": str(any_kubeconfig)}
    first = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert (first.returncode, "nothing is left" in first.stdout) == (0, True), first  # it may only be slow
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    name = kube.items(leases)[0]["metadata"]["name"]
    kube.patch(f"{leases}/{name}", {"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}})
    second = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 0 and "removed 3" in second.stdout, second
    until("the pods are gone", lambda: not kube.items(pods(namespace)), 60)
    assert not kube.items(leases)


# -- rights -----------------------------------------------------------------------------------------


def _service_account(kube: Kube, namespace: str, source: Path, to: Path, *, without: str = "") -> Path:
    """A kubeconfig of a service account with the rights that are shipped, but *without* those on one resource."""
    import json

    from tests.cluster.kube import _load  # the same file, with another user

    text = subprocess.run(
        [sys.executable, "-m", "rlsandbox", "template", "rbac"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    import yaml

    paths = {"ServiceAccount": f"/api/v1/namespaces/{namespace}/serviceaccounts"}
    for item in yaml.safe_load_all(text):
        if item["kind"] == "Role":
            item["rules"] = [rule for rule in item["rules"] if without not in rule["resources"]]
        if item["kind"] == "RoleBinding":
            item["subjects"][0]["namespace"] = namespace
        if item["kind"] == "ClusterRole":
            continue  # for `rlsandbox plan`; nobody is bound to it
        path = paths.get(
            item["kind"], f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/{item['kind'].lower()}s"
        )
        kube.create(path, item)
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    token = kube.create(f"{paths['ServiceAccount']}/rlsandbox/token", request)["status"]["token"]
    config = _load(source)
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    to.write_text(json.dumps(config))
    return to


def test_the_rights_that_are_shipped_suffice(
    any_kubeconfig: Path, namespace: str, kube: Kube, tmp_path: Path
) -> None:
    config = _service_account(kube, namespace, any_kubeconfig, tmp_path / "config")

    async def body() -> None:
        async with host(config, namespace, mode="overlay") as lone:
            sandbox = await lone.make()
            assert (await sandbox.run("echo x")).stdout == "x\n"
            await sandbox.release()
        found = await examine(kubeconfig=str(config), namespace=namespace)
        assert found.works, [row for row in found.rows if row.status == "fail"]

    run(body)


@pytest.mark.parametrize("resource", ["pods/exec", "configmaps", "leases"])
def test_a_right_that_is_missing_is_named(
    any_kubeconfig: Path, namespace: str, kube: Kube, tmp_path: Path, resource: str
) -> None:
    config = _service_account(kube, namespace, any_kubeconfig, tmp_path / "config", without=resource)

    async def body() -> None:
        async with host(config, namespace, mode="overlay") as lone:
            with pytest.raises(errors.SandboxError) as caught:
                await lone.make()
            assert caught.value.kind == "forbidden" and not caught.value.retryable
            assert resource in str(caught.value)
        found = await examine(kubeconfig=str(config), namespace=namespace)
        assert [row.name for row in found.rows if row.status == "fail"] == [f"right: {resource}"]

    run(body)


def test_a_wrong_token(any_kubeconfig: Path, namespace: str, tmp_path: Path) -> None:
    import json

    from tests.cluster.kube import _load

    config = _load(any_kubeconfig)
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": "expired"}}]
    (tmp_path / "config").write_text(json.dumps(config))

    async def body() -> None:
        with pytest.raises(errors.SandboxError, match="wrong or has expired") as caught:
            await Kubernetes(kubeconfig=str(tmp_path / "config"), namespace=namespace).capabilities()
        assert caught.value.kind == "unauthorized"

    run(body)


# -- the pool ---------------------------------------------------------------------------------------


def test_a_batch_on_recycled_sandboxes(any_kubeconfig: Path, namespace: str, kube: Kube) -> None:
    backend = Kubernetes(kubeconfig=str(any_kubeconfig), namespace=namespace, image=TEST)
    with rls.Pool(backend, size=4, config=False) as pool:
        assert pool.wait_ready(4, timeout=90) == 4
        before = dict(backend.requests)
        tasks = [rls.Task(id=f"t{i}") for i in range(16)]
        report = pool.run_rollouts(
            tasks, lambda sandbox, task: sandbox.run("echo $RANDOM > /tmp/x; ls /tmp").stdout, group_size=2
        )
        assert report.coverage == 1.0 and {record.value for record in report.records} == {"x\n"}
        after = backend.requests
        assert {verb: after.get(verb, 0) - before.get(verb, 0) for verb in ("POST", "DELETE")} == {
            "POST": 0,
            "DELETE": 0,
        }
        assert pool.stats().recycled >= 28 and len(kube.items(pods(namespace))) == 4
    until("nothing is left", lambda: not kube.items(pods(namespace)), 60)
    claims = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxclaims"
    assert not kube.items(claims)


def test_pods_deleted_behind_our_back_lose_no_rollout(
    cluster: Cluster, namespace: str, faults: Faults
) -> None:
    backend = Kubernetes(kubeconfig=str(cluster.kubeconfig("admin", "api")), namespace=namespace, image=TEST)
    struck: list[int] = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        if not struck:
            struck.append(1)
            faults.delete_pods(namespace)
        return sandbox.run("sleep 0.3; echo done").stdout

    with rls.Pool(backend, size=3, config=False) as pool:
        report = pool.run_rollouts([rls.Task(id=f"t{i}") for i in range(9)], policy, retries=3)
        assert report.coverage == 1.0 and len(report.records) == 9


def test_a_node_that_is_wished_for(cluster: Cluster, kube: Kube, make_namespace: Callable[..., str]) -> None:
    """``rlsandbox_place``: a wish, which the scheduler follows while it can; never a condition."""
    namespace, config = make_namespace("privileged"), cluster.kubeconfig("admin")
    small = Spec(memory="300MiB")  # nothing of it is ready before somebody asks

    class Far:
        def __init__(self, node: str) -> None:
            self.node, self.seen = node, list[tuple[str, ...]]()

        @rls.hookimpl
        def rlsandbox_place(self, task: rls.Task, nodes: Any) -> str:
            self.seen.append(tuple(nodes))
            return self.node

    for node in ("node-1", "node-0"):
        plugin = Far(node)
        backend = Kubernetes(kubeconfig=str(config), namespace=namespace, image=TEST)
        with (
            rls.Pool(backend, size=2, plugins=[plugin], config=False) as pool,
            pool.claim(rls.Task(id="t", spec=small), timeout=90) as one,
            pool.claim(rls.Task(id="u", spec=small), timeout=90) as two,
        ):
            assert (one.node, two.node) == (node, node)
            for pod in kube.items(pods(namespace)):
                wish = pod["spec"]["affinity"]["nodeAffinity"]
                rows = wish["preferredDuringSchedulingIgnoredDuringExecution"]
                assert rows[0]["preference"]["matchExpressions"][0]["values"] == [node]
        assert plugin.seen and all({"node-0", "node-1"} <= set(nodes) for nodes in plugin.seen)
        until("the pods are gone", lambda: not kube.items(pods(namespace)), 60)
    backend = Kubernetes(kubeconfig=str(config), namespace=namespace, image=TEST)
    with (
        rls.Pool(backend, size=1, plugins=[Far("no-such-node")], config=False) as pool,
        pool.claim(rls.Task(id="v", spec=small), timeout=90) as other,
    ):
        assert other.node in ("node-0", "node-1")
