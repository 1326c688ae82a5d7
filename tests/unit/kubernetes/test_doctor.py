"""The doctor's rows about what the test cluster cannot be: old nodes, other systems, wrong clocks, a controller of many kinds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.diagnosis import Row
from rlsandbox.backends.kubernetes import doctor, modes
from rlsandbox.backends.kubernetes.api import JSON, Api
from tests.support.fake_apiserver import FakeApi, api_server, kubeconfig


def node(
    name: str, *, system: str = "Talos (v1.11)", kernel: str = "6.12.5", runtime: str = "containerd://2.1.4",
    handlers: dict[str, bool] | None = None,
) -> JSON:  # fmt: skip
    info = {"osImage": system, "kernelVersion": kernel, "containerRuntimeVersion": runtime}
    status: JSON = {"nodeInfo": info}
    if handlers is not None:
        status["runtimeHandlers"] = [
            {"name": name, "features": {"userNamespaces": can}} for name, can in handlers.items()
        ]
    return {"metadata": {"name": name}, "status": status}


GOOD = node("good", handlers={"": True, "kata": False})


@pytest.mark.parametrize(
    ("bad", "handler", "said"),
    [
        (node("b", handlers={"": False}), "", "b: containerd://2.1.4 gives none"),
        (node("b", runtime="containerd://1.7.27"), "", "b: containerd://1.7.27 knows no hostUsers: false"),
        (node("b", kernel="5.15.0-1084-gke"), "", "b: Linux 5.15 is too old"),
        (node("b", handlers={"": True, "kata": False}), "kata", "b, good: containerd://2.1.4 gives none"),
    ],
)
def test_nodes_that_give_pods_no_user_namespace(bad: JSON, handler: str, said: str) -> None:
    def rows(level: str, *nodes: JSON) -> list[Row]:
        return [row for row in modes.on_nodes(level, nodes, handler) if "user namespaces" in row.name]

    (some,) = rows("", GOOD, bad)
    assert some.found == f"pods of mode overlay do not start: {said}" and 'mode="userns"' in some.fix
    assert some.status == ("fail" if handler else "warn")
    assert rows("privileged", bad)[0].status == "fail"
    assert rows("baseline", bad) == rows("restricted", bad) == []
    assert handler or rows("", GOOD) == []


@pytest.mark.parametrize(
    ("system", "level", "name", "status"),
    [
        ("Ubuntu 24.04.3 LTS", "", "AppArmor", "ok"),
        ("Container-Optimized OS from Google", "baseline", "AppArmor", "warn"),
        ("Red Hat Enterprise Linux CoreOS 418", "privileged", "SELinux", "warn"),
        ("Bottlerocket OS 1.50", "baseline", "SELinux", "warn"),
        ("Talos (v1.11)", "", "security modules", "warn"),
    ],
)
def test_what_may_forbid_mounts_on_a_system(system: str, level: str, name: str, status: str) -> None:
    (row,) = modes.on_nodes(level, [node(f"n{i}", system=system) for i in range(5)])
    assert (row.name, row.status) == (name, status)
    assert name == "security modules" or f"n0, n1, n2 and 2 more ({system})" in row.found
    assert modes.on_nodes("restricted", [node("n", system=system)]) == []


def test_a_seccomp_profile_that_nobody_asked_for() -> None:
    (row,) = modes.by_seccomp("baseline", {"a": True, "b": False})
    assert row.status == "warn" and row.found.startswith("a: pods get the profile RuntimeDefault")
    assert modes.by_seccomp("baseline", {"b": False})[0].status == "ok"
    assert modes.by_seccomp("", {"a": True}) == modes.by_seccomp("baseline", {}) == []


def asked(tmp_path: Path, look: Any, prepare: Any) -> Row:
    async def body() -> Row:
        async with asyncio.timeout(30), api_server() as fake:
            prepare(fake)
            (tmp_path / "config").write_text(kubeconfig(fake.url))
            api = await Api.connect(kubeconfig=str(tmp_path / "config"))
            try:
                (row,) = await look(api)
            finally:
                await api.close()
            return row

    return asyncio.run(body())


@pytest.mark.parametrize(("ahead", "status"), [(0, "ok"), (-20, "ok"), (90, "warn"), (-86400, "warn")])
def test_clocks_apart(tmp_path: Path, ahead: float, status: str) -> None:
    def prepare(fake: FakeApi) -> None:
        fake.ahead_s = ahead

    row = asked(tmp_path, doctor._clock, prepare)
    assert row.status == status and abs(float(row.found.split()[0]) - abs(ahead)) <= 3


READY = {"conditions": [{"type": "Ready", "status": "True"}]}


@pytest.mark.parametrize(
    ("args", "status", "found"),
    [
        (["--leader-elect=true"], "fail", "does not serve claims"),
        (["--extensions=false"], "fail", "does not serve claims"),
        (["--extensions"], "ok", "warm pools are refilled at once, without a bound"),
        (
            ["--extensions=true", "--sandbox-warm-pool-max-refill-rate=5", "-sandbox-claim-concurrent-workers=9"],
            "ok", "ready, sandbox-warm-pool-max-refill-rate=5, sandbox-claim-concurrent-workers=9",
        ),
    ],
)  # fmt: skip
def test_the_controllers_flags(tmp_path: Path, args: list[str], status: str, found: str) -> None:
    def prepare(fake: FakeApi) -> None:
        meta = {"name": "c", "namespace": "s", "labels": {"app": "agent-sandbox-controller"}}
        fake.put(
            "/api/v1/pods", {"metadata": meta, "spec": {"containers": [{"args": args}]}, "status": READY}
        )

    row = asked(tmp_path, doctor._controller, prepare)
    assert row.status == status and found in row.found


def test_a_controller_that_is_not_ready(tmp_path: Path) -> None:
    def prepare(fake: FakeApi) -> None:
        meta = {"name": "c", "namespace": "s", "labels": {"app": "agent-sandbox-controller"}}
        fake.put("/api/v1/pods", {"metadata": meta, "spec": {"containers": []}, "status": {}})

    assert asked(tmp_path, doctor._controller, prepare).status == "fail"
