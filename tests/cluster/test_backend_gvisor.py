"""Sandboxes under gVisor: its own kernel, without mount namespaces, pidfds and subreapers (that of Debian 12)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.spec import Spec
from tests.cluster.kube import Kube, pods, until
from tests.cluster.test_backend import TEST, Kubernetes, host, run

GVISOR = Spec(isolation="gvisor", network="host", memory="256MiB")


@pytest.fixture(params=["privileged", "baseline", "restricted"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rollouts_under_gvisor(
    any_kubeconfig: Path, make_namespace: Callable[..., str], kube: Kube, level: str
) -> None:
    """Claim, run, grade, release: every rollout in a pod of its own."""
    namespace = make_namespace(level)
    backend = Kubernetes(
        kubeconfig=str(any_kubeconfig), namespace=namespace, image=TEST, gvisor_class="gvisor"
    )
    solved = rls.Grader(command="grep -q '^done by' /tmp/work && ! pidof sleep")
    seen = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        assert sandbox.reset_mode == "replace"
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
        assert pool.stats().recycled == 0
    until("nothing is left", lambda: not kube.items(pods(namespace)), 60)


def test_commands_under_gvisor(any_kubeconfig: Path, namespace: str) -> None:
    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            sandbox = await lone.make(spec=GVISOR)
            facts = lone.member(sandbox).facts
            assert (sandbox.reset_mode, facts["trees"], facts["proc"]) == ("replace", "session", "foreign")
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
            with pytest.raises(errors.UnsupportedError, match="mode replace"):
                await sandbox.snapshot()
            assert (await sandbox.run("echo still here")).stdout == "still here\n"

    run(body)


def test_network_none_is_not_promised_under_gvisor(any_kubeconfig: Path, namespace: str) -> None:
    """Its commands share the pod's network, and no policy is enforced here."""

    async def body() -> None:
        async with host(any_kubeconfig, namespace, gvisor_class="gvisor") as lone:
            with pytest.raises(errors.UnsupportedError, match="network"):
                await lone.make(spec=replace(GVISOR, network="none"))

    run(body)
