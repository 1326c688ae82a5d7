"""Sandboxes under gVisor: its own kernel, without mount namespaces, pidfds and subreapers (that of Debian 12).

Where the namespace allows SYS_ADMIN each episode is a chroot and is reset in place; elsewhere every rollout gets another pod.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.keeper.client import KeeperClient
from rlsandbox.spec import Spec
from tests.cluster.cluster import Cluster
from tests.cluster.kube import Kube, pods, until
from tests.cluster.shortcuts import run_in
from tests.cluster.test_backend import TEST, Kubernetes, host, pod_of, run

GVISOR = Spec(isolation="gvisor", network="host", memory="256MiB")


@pytest.fixture(params=["privileged", "baseline", "restricted"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rollouts_under_gvisor(
    any_kubeconfig: Path, make_namespace: Callable[..., str], kube: Kube, level: str
) -> None:
    """Claim, run, grade, release: in place where the level allows that, else every rollout in a pod of its own."""
    namespace = make_namespace(level)
    backend = Kubernetes(
        kubeconfig=str(any_kubeconfig), namespace=namespace, image=TEST, gvisor_class="gvisor"
    )
    mode = "overlay" if level == "privileged" else "replace"
    solved = rls.Grader(command="grep -q '^done by' /tmp/work && ! pidof sleep")
    seen = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        assert sandbox.reset_mode == mode
        seen.append(sandbox.run("cat /proc/version; ls /tmp").stdout)
        # Left behind in every way that there is: grading must find none of them alive.
        left = sandbox.run(
            "sleep 100 & (setsid sleep 101 &) ; (sleep 102 &) ; setsid sleep 103 >/dev/null 2>&1 &"
        )
        assert left.ok
        return sandbox.run("id -u; echo done by $(id -u) > /tmp/work", check=True).stdout

    with rls.Pool(backend, size=2, spec=GVISOR, config=False) as pool:
        tasks = [rls.Task(id=f"t{i}", grader=solved) for i in range(4)]
        report = pool.run_rollouts(tasks, policy)
        assert [record.failure for record in report.records] == [None] * 4
        assert [record.reward for record in report.records] == [1.0] * 4
        uid = "65534\n" if level == "restricted" else "0\n"
        assert {record.value for record in report.records} == {uid}
        assert all("gvisor" in text.lower() or "4.4.0" in text for text in seen) and len(seen) == 4
        assert not any("work" in text for text in seen)
        stats = pool.stats()
        assert stats.quarantined == 0
        assert (stats.recycled == 0) == (mode == "replace")
    until("nothing is left", lambda: not kube.items(pods(namespace)), 60)


@pytest.mark.parametrize("mode", ["overlay", "replace"])
def test_commands_under_gvisor(any_kubeconfig: Path, namespace: str, mode: str) -> None:
    proc = {"overlay": "own", "replace": "foreign"}[mode]

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor", mode=mode) as lone:
            sandbox = await lone.make(spec=GVISOR)
            facts = lone.member(sandbox).facts
            assert (sandbox.reset_mode, facts["trees"], facts["proc"]) == (mode, "session", proc)
            got = await sandbox.run("cat; echo err >&2; exit 3", stdin="in\n")
            assert (got.stdout, got.stderr, got.exit_code) == ("in\n", "err\n", 3)
            await sandbox.write_file("/tmp/bytes", bytes(range(256)) * 4096)
            assert await sandbox.read_file("/tmp/bytes") == bytes(range(256)) * 4096
            # A command that runs too long is ended with what it started, and nothing else is.
            other = await sandbox.popen("sleep 7")
            late = await sandbox.run("trap '' TERM; sleep 201 & (sleep 202 &) ; sleep 203", timeout=2)
            assert late.timed_out and late.exit_code == 137
            alive = (await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
            assert "sleep 20" not in alive and "sleep 7" in alive
            await other.kill()
            assert (await other.wait(10)).exit_code == 137
            big = await sandbox.run("dd if=/dev/zero bs=1M count=20 2>/dev/null | cat", output_limit=32 << 20)
            assert big.stdout_size == 20 << 20
            if mode == "replace":
                with pytest.raises(errors.UnsupportedError, match="mode replace"):
                    await sandbox.snapshot()
            assert (await sandbox.run("echo still here")).stdout == "still here\n"

    run(body)


def test_network_none_is_not_promised_in_replace(any_kubeconfig: Path, namespace: str) -> None:
    """Its commands share the pod's network, and no policy is enforced here."""

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor", mode="replace") as lone:
            with pytest.raises(errors.UnsupportedError, match="network"):
                await lone.make(spec=replace(GVISOR, network="none"))

    run(body)


LEFT = """
echo x > /tmp/left; rm /etc/passwd; mkdir /dev/shm/left; ln -s / /left
for n in 1 2 3 4 5 6 7 8; do (setsid sh -c 'trap "" TERM HUP; (sleep 1000 &); sleep 1000' >/dev/null 2>&1 &); done
"""


def test_resets_in_place_leave_nothing(
    cluster: Cluster, any_kubeconfig: Path, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 of them: no mount, no process, no file; prints how long one takes."""
    took: list[float] = []

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            sandbox = await lone.make(spec=replace(GVISOR, network="none"))
            pod = pod_of(lone, sandbox)

            async def outside(command: str) -> str:
                return (
                    await asyncio.to_thread(run_in, cluster, namespace, pod, ["sh", "-c", command])
                ).stdout

            async def reset(how: str) -> None:
                assert (await sandbox.run(how)).ok
                begun = time.perf_counter()
                await sandbox.client.reset("")
                took.append(time.perf_counter() - begun)

            async def held() -> str:
                """Mounts and processes of the whole container; of an unused episode, which has no next one."""
                await sandbox.client.reset("")
                return await outside("wc -l < /proc/mounts; ls /proc | grep -c ^[0-9]")

            for _ in range(5):
                await reset(LEFT)
            before = {await held() for _ in range(3)}  # with what was put away already, and what was not
            for number in range(200):
                await reset(LEFT if number % 10 == 0 else "echo x > /tmp/left")
            seen = await sandbox.run("ls -A /tmp /dev/shm /left; ps ax | grep -c 'slee[p]'; id root")
            assert "left" not in seen.stdout.replace("/left", "") and "uid=0(root)" in seen.stdout, seen
            assert seen.stdout.splitlines()[-2] == "0"
            await sandbox.client.reset("")
            assert await sandbox.client.changes("/") == []
            facts = [kind for kind, _ in await sandbox.client.inspect()]
            assert "process" not in facts and "episode" in facts
            deadline = time.monotonic() + 20
            while (now := await held()) not in before and time.monotonic() < deadline:
                pass
            assert now in before, await outside("cat /proc/mounts; ps ax")

    run(body, 400)
    took.sort()
    with capsys.disabled():
        print(
            f"\nreset under gVisor, ms: median {took[len(took) // 2] * 1e3:.1f}, "
            f"P95 {took[len(took) * 95 // 100] * 1e3:.1f}, of {len(took)}"
        )


def test_what_must_not_be_in_a_view(any_kubeconfig: Path, namespace: str) -> None:
    """The pod's volumes, which an old gVisor shows inside its root: the keeper's own and a platform team's."""

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            sandbox = await lone.make(spec=GVISOR)
            assert lone.member(sandbox).facts["isolation"] == "chroot"
            seen = await sandbox.run("ls -A /.rlsandbox /.rlsandbox-run; cat /proc/mounts")
            assert seen.stdout.startswith("/.rlsandbox:\n\n/.rlsandbox-run:\nnone / overlay"), seen.stdout
            assert "9p" not in seen.stdout, seen.stdout
            # What is written there is the episode's own.
            assert (await sandbox.run("echo x > /.rlsandbox/keeper; echo x > /etc/hosts")).ok
            await sandbox.client.reset("")
            assert (await sandbox.run("cat /.rlsandbox/keeper")).exit_code == 1
            assert "localhost" in (await sandbox.run("cat /etc/hosts")).stdout

    run(body)


def test_a_killed_keeper_ends_its_sandbox(cluster: Cluster, any_kubeconfig: Path, namespace: str) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            sandbox = await lone.make(spec=GVISOR)
            pod = pod_of(lone, sandbox)
            killed = "for p in /proc/[0-9]*; do grep -q rls-keeper $p/comm && kill -9 ${p#/proc/}; done; true"
            await asyncio.to_thread(run_in, cluster, namespace, pod, ["sh", "-c", killed])
            with pytest.raises(errors.SandboxDiedError):
                while True:
                    await sandbox.run("sleep 0.1")

    run(body)


def test_another_session_gets_another_sandbox(cluster: Cluster, any_kubeconfig: Path, namespace: str) -> None:
    """In the same pod: the keeper before is gone, and so are its mounts."""

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            sandbox = await lone.make(spec=GVISOR)
            pod, member = pod_of(lone, sandbox), lone.member(sandbox)

            async def mounts() -> list[str]:
                ran = await asyncio.to_thread(run_in, cluster, namespace, pod, ["cat", "/proc/mounts"])
                return [line.split()[1] for line in ran.stdout.splitlines()]

            assert (await sandbox.run("echo x > /tmp/left; (setsid sleep 1000 &)")).ok
            place = lone.backend._places[member.id]  # type: ignore[attr-defined]
            place.stream.close()
            place.stream = None
            client = await KeeperClient.open(*await lone.backend.connect(member), member=member.id)
            try:
                assert await client.changes("/") == []
                told = await client.inspect()
                assert ("episode", "1") in told and not [rest for kind, rest in told if kind == "process"]
                left = await mounts()
                assert left.count("/.rlsandbox-run/place") == 1, left
                views = [path for path in left if re.search("/k/v/[0-9]+$", path)]
                assert views == ["/.rlsandbox-run/place/k/v/1"], left
            finally:
                await client.aclose()

    run(body)


def test_the_reason_is_told_where_it_cannot_be(
    any_kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that was to be reset in place, without the right to chroot."""
    from rlsandbox.backends.kubernetes import manifests

    made = manifests._secure

    def secure(pod: Any, container: Any, *rest: Any, **more: Any) -> None:
        made(pod, container, *rest, **more)
        container["securityContext"]["capabilities"] = {"add": ["SYS_ADMIN"], "drop": ["SYS_CHROOT"]}

    monkeypatch.setattr(manifests, "_secure", secure)

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            sandbox = await lone.make(spec=GVISOR)
            facts = lone.member(sandbox).facts
            assert sandbox.reset_mode == "replace" and "chroot" in facts["why"], facts
            assert (await sandbox.run("cat /proc/mounts")).stdout.count("/place") == 0
            caps = (await sandbox.run("grep CapBnd /proc/self/status")).stdout.split()[1]
            assert not int(caps, 16) >> 21 & 1, "SYS_ADMIN was only there to isolate"
            with pytest.raises((errors.ProvisionError, errors.SandboxDiedError), match="network none"):
                await lone.make(spec=replace(GVISOR, network="none"))

    run(body)
