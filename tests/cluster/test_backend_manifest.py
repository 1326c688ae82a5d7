"""Mode ``manifest`` on real pods: baseline, RuntimeDefault, six capabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlsandbox as rls
from rlsandbox import errors
from rlsandbox.spec import Spec
from tests.cluster.kube import Kube, pods, until
from tests.cluster.test_backend import TEST, Kubernetes, host, run

AGENT = Spec(user="1000", network="host", memory="256MiB")


def test_recycled_by_the_list_of_inodes(
    any_kubeconfig: Path, make_namespace: Callable[..., str], kube: Kube
) -> None:
    namespace = make_namespace("baseline")
    backend = Kubernetes(kubeconfig=str(any_kubeconfig), namespace=namespace, image=TEST, mode="manifest")
    seen = []

    def policy(sandbox: rls.Sandbox, task: rls.Task) -> str:
        assert sandbox.reset_mode == "manifest"
        seen.append(sandbox.run("ls -A /tmp /dev/shm; pidof sleep; cat /tmp/primed").stdout)
        sandbox.run(
            "echo x > /tmp/x; echo y > /dev/shm/y; echo z >> /tmp/primed; mkdir -p /tmp/a/b;"
            "sleep 100 & (setsid sleep 101 &) ; (trap '' TERM; sleep 102 &)"
        )
        return sandbox.run("id -u; grep CapEff /proc/self/status; touch /etc/x", check=False).stdout

    with rls.Pool(backend, size=2, spec=AGENT, config=False) as pool:
        tasks = [
            rls.Task(
                id=f"t{i}", setup="echo primed > /tmp/primed", grader=rls.Grader(command="! pidof sleep")
            )
            for i in range(3)
        ]
        report = pool.run_rollouts(tasks, policy, group_size=4)
        assert [record.failure for record in report.records] == [None] * 12
        assert {record.reward for record in report.records} == {1.0}
        assert {record.value for record in report.records} == {"1000\nCapEff:\t0000000000000000\n"}
        assert set(seen) == {"/dev/shm:\n\n/tmp:\nprimed\nprimed\n"}
        stats = pool.stats()
        assert stats.recycled >= 9 and stats.quarantined == 0 and len(kube.items(pods(namespace))) == 2
    until("nothing is left", lambda: not kube.items(pods(namespace)), 60)


def test_the_pod_may_do_what_its_level_allows_and_no_more(
    any_kubeconfig: Path, make_namespace: Callable[..., str], kube: Kube
) -> None:
    namespace = make_namespace("baseline")

    async def body() -> None:
        async with host(any_kubeconfig, namespace, mode="manifest") as lone:
            sandbox = await lone.make(spec=AGENT)
            context = kube.items(pods(namespace))[0]["spec"]["containers"][0]["securityContext"]
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert sorted(context["capabilities"]["add"]) == [
                "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID",
            ]  # fmt: skip
            facts = lone.member(sandbox).facts
            assert (facts["mode"], facts["isolation"], facts["trees"]) == ("manifest", "user", "whole")
            denied = await sandbox.run("cat /.rlsandbox-run/s/keeper; ls /.rlsandbox-pristine; kill -9 1")
            assert denied.stdout == "" and not denied.ok
            with pytest.raises(
                errors.UnsupportedError, match="in mode manifest commands have one uid only, 1000"
            ):
                await sandbox.run("id", user="root")
            await sandbox.run("echo x > /tmp/x; echo more >> /dev/termination-log; kill -9 -1")
            await sandbox.client.reset("")
            assert await sandbox.client.changes("/") == []
            with pytest.raises(errors.ConfigError, match="another user than root"):
                await lone.make(spec=Spec(network="host"))
            with pytest.raises(errors.UnsupportedError, match="network='none'"):
                await lone.make(spec=Spec(user="1000"))

    run(body)


def test_the_next_best_where_namespaces_are_forbidden(
    any_kubeconfig: Path, make_namespace: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod for userns whose seccomp profile refuses that: commands have a user of their own, so not replace."""
    from rlsandbox.backends.kubernetes import manifests

    made = manifests._secure

    def secure(pod: Any, container: Any, *rest: Any, **more: Any) -> None:
        made(pod, container, *rest, **more)
        container["securityContext"]["seccompProfile"] = {"type": "RuntimeDefault"}

    monkeypatch.setattr(manifests, "_secure", secure)

    async def body() -> None:
        async with host(any_kubeconfig, make_namespace("baseline")) as lone:
            sandbox = await lone.make(spec=AGENT)
            assert sandbox.reset_mode == "manifest"
            assert "user namespace" in lone.member(sandbox).facts["why"]
            sandbox = await lone.make(spec=Spec(network="host"))
            assert sandbox.reset_mode == "replace"

    run(body)
