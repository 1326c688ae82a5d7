"""The Kubernetes backend against an API server that lies: late, twice, half, never."""

from __future__ import annotations

import asyncio
import copy
import datetime
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsandbox import errors
from rlsandbox.spec import Spec

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from aiohttp import web

from rlsandbox.backends.kubernetes import Kubernetes, failures, manifests, names, policy
from rlsandbox.backends.kubernetes.api import Api, ApiError, Bucket
from rlsandbox.backends.kubernetes.lease import YOUNG_S, RunLease, leftovers, reap, server_time
from rlsandbox.backends.kubernetes.stanza import problems
from rlsandbox.backends.kubernetes.unused import InUseError, unused
from rlsandbox.backends.kubernetes.watch import Watch, slim
from tests.support.fake_apiserver import JSON, FakeApi, Pods, api_server, kubeconfig, stand_in_for_keeper

SPEC = Spec(image="img")
CLAIMS = f"{Pods.EXT}/sandboxclaims"
PODS = f"{Pods.CORE}/pods"
RUNNING: JSON = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


@pytest.fixture(autouse=True)
def _keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_keeper(tmp_path, monkeypatch)


class World:
    def __init__(self, api: FakeApi, pods: Pods, file: Path) -> None:
        self.api, self.pods, self.file = api, pods, file

    def backend(self, **how: Any) -> Kubernetes:
        how.setdefault("write_rate", 1000)
        return Kubernetes(kubeconfig=str(self.file), **{"mode": "userns", **how})

    async def client(self) -> Api:
        return await Api.connect(kubeconfig=str(self.file), write_rate=1000)


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with api_server() as api, Pods(api) as pods:
        file = tmp_path / "config"
        file.write_text(kubeconfig(api.url))
        yield World(api, pods, file)


def run(tmp_path: Path, body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), world(tmp_path) as w:
            await body(w)

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


async def make(backend: Kubernetes, member: str = "m1", deadline: float = 20, **how: Any) -> Any:
    return await backend.provision(
        how.pop("spec", SPEC), member=member, labels={"run": "r"}, deadline=deadline
    )


# -- the way it should go ---------------------------------------------------------------------------


def test_two_writes_a_sandbox(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        first = await make(backend)
        assert first.node == "node-1" and first.facts["memory_bytes"] == str(2 << 30)
        (claim,), (pod,) = w.api.objects[CLAIMS].values(), w.api.objects[PODS].values()
        whose = {"run": backend._run, "owner": names.owner()}
        for item, prefix in ((claim, "rlsandbox/"), (pod, "sandbox.users.io/rlsandbox-")):
            assert {prefix + key: value for key, value in whose.items()}.items() <= item["metadata"][
                "labels"
            ].items()
        before = dict(backend.requests)
        await make(backend, "m2")
        await backend.dispose(first)
        after = backend.requests
        writes = [after.get(verb, 0) - before.get(verb, 0) for verb in ("POST", "PATCH", "DELETE")]
        assert writes == [1, 0, 1] and after["GET"] == before["GET"]
        assert [m.id for m in await backend.list({"run": "r"})] == ["m2"]
        assert await backend.list({"run": "other"}) == []
        await backend.dispose(first)  # twice is fine
        await backend.dispose((await backend.list({}))[0])
        await backend.close()
        assert not w.api.objects[CLAIMS] and not w.api.objects[PODS]
        assert not w.api.objects["/apis/coordination.k8s.io/v1/namespaces/rls/leases"]

    run(tmp_path, body)


def test_equal_specs_share_what_is_made_for_them(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        a, b = w.backend(), w.backend()
        await asyncio.gather(*(make(backend, f"m{i}") for backend in (a, b) for i in range(4)))
        assert len(w.api.objects[f"{Pods.EXT}/sandboxtemplates"]) == 1
        assert len(w.api.objects[f"{Pods.CORE}/configmaps"]) == 1
        pool = next(iter(w.api.objects[f"{Pods.EXT}/sandboxwarmpools"].values()))
        assert pool["spec"]["replicas"] == 0
        await make(a, "other", spec=Spec(image="img", memory="1GiB"))
        assert len(w.api.objects[f"{Pods.EXT}/sandboxtemplates"]) == 2
        await a.close()
        await b.close()

    run(tmp_path, body)


def test_pods_hold_what_a_sandbox_needs_and_nothing_else(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend(mode="overlay")
        await make(backend, spec=Spec(image="img", memory="1GiB", cpu=0.5, pids=77))
        pod = next(iter(w.api.objects[PODS].values()))["spec"]
        box = pod["containers"][0]
        assert pod["hostUsers"] is False and box["securityContext"]["capabilities"] == {"add": ["SYS_ADMIN"]}
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
        assert box["resources"]["limits"] == {"memory": str((1 << 30) + (64 << 20)), "cpu": "500m"}
        assert box["args"][box["args"].index("--pids") + 1] == "77"
        await backend.close()

    run(tmp_path, body)


# -- answers that lie -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        {"status": 504, "done": True},  # done, and said to have failed
        {"status": 500},
        {"status": 503, "times": 3},
        {"late_s": 0.3},
    ],
)
def test_a_claim_is_made_once_whatever_the_answer(tmp_path: Path, rule: dict[str, Any]) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        w.api.rule("POST", "sandboxclaims", **rule)
        await make(backend)
        assert len(w.api.objects[CLAIMS]) == len(w.api.objects[PODS]) == 1
        await backend.close()

    run(tmp_path, body)


def test_429_is_the_pools_affair_and_others_wait(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        w.api.rule("PATCH", "sandboxtemplates", status=429, headers={"Retry-After": "0.2"})
        w.api.rule("POST", "sandboxclaims", status=429, headers={"Retry-After": "7"})
        with pytest.raises(errors.ThrottledError) as caught:
            await make(backend)
        assert caught.value.retry_after == 7 and backend.requests["throttled"] == 2
        assert not w.api.objects.get(CLAIMS)
        await backend.close()

    run(tmp_path, body)


def test_a_removal_whose_answer_is_lost_is_done(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        member = await make(backend)
        w.api.rule("DELETE", "sandboxclaims", status=504, done=True)
        await backend.dispose(member)
        assert not w.api.objects[CLAIMS]
        await backend.close()

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("mode", "adds"), [("overlay", ["SYS_ADMIN", "SYS_CHROOT"]), ("userns", None), ("replace", None)]
)
def test_pods_under_gvisor_ask_for_rights_where_overlay_is_allowed(mode: str, adds: list[str] | None) -> None:
    shape = manifests.Shape(mode=mode, image="i", gvisor_class="runsc")
    pod = manifests.pod_spec(Spec(isolation="gvisor", network="host"), shape, "cm")
    context = pod["containers"][0]["securityContext"]
    assert (pod["runtimeClassName"], "hostUsers" in pod) == ("runsc", False)
    assert (context.get("capabilities") or {}).get("add") == adds
    assert (context["runAsUser"] == 0) == (mode != "replace")
    assert "appArmorProfile" not in context
    assert ("--mode" in pod["containers"][0]["args"]) == (adds is None)
    assert problems(pod) == []


def test_a_removal_takes_as_long_as_the_pod(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        member = await make(backend)
        w.api.on_change.remove(w.pods._changed)  # nobody removes the pod
        removal = asyncio.ensure_future(backend.dispose(member))
        await until(lambda: not w.api.objects[CLAIMS])
        await asyncio.sleep(0.1)
        assert not removal.done()
        w.api.drop(PODS, next(iter(w.api.objects[PODS])))
        await removal
        w.api.on_change.append(w.pods._changed)
        await backend.close()

    run(tmp_path, body)


def test_a_slow_collector_is_asked_once_and_helped_only_when_it_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsandbox.backends.kubernetes.removal.COLLECTED_S", 2.0)

    async def body(w: World) -> None:
        backend = w.backend()
        members = [await make(backend, f"m{i}") for i in range(12)]
        names = list(w.api.objects[PODS])
        w.api.on_change.remove(w.pods._changed)  # nobody removes the pods

        async def given_up(member: Any) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await backend.dispose(member)

        await asyncio.gather(*map(given_up, members))
        again = [asyncio.ensure_future(backend.dispose(member)) for member in members]
        for name in names[:10]:  # for longer than it may stand still
            await asyncio.sleep(0.25)
            w.api.drop(PODS, name)
        assert w.api.count("DELETE", "sandboxclaims") == 12 and w.api.count("DELETE", "/pods/") == 0
        await asyncio.gather(*again)
        assert w.api.count("DELETE", "sandboxclaims") == 12 and w.api.count("DELETE", "/pods/") == 2
        w.api.on_change.append(w.pods._changed)
        await backend.close()

    run(tmp_path, body)


def test_a_pod_that_is_helped_away_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the collector stands still its Sandbox is there as well, and agent-sandbox makes a new pod for that."""
    monkeypatch.setattr("rlsandbox.backends.kubernetes.removal.COLLECTED_S", 0.1)
    sandboxes = "/apis/agents.x-k8s.io/v1beta1/namespaces/rls/sandboxes"

    async def body(w: World) -> None:
        backend = w.backend()
        member = await make(backend)
        (pod,) = w.api.objects[PODS].values()
        w.api.on_change.remove(w.pods._changed)
        w.api.put(sandboxes, {"metadata": {"name": pod["metadata"]["name"]}})

        def controller(kind: str, collection: str, item: JSON) -> None:
            if (kind, collection) == ("DELETED", PODS) and w.api.objects[sandboxes]:
                asyncio.get_running_loop().call_soon(
                    w.api.put, PODS, {**pod, "metadata": {**pod["metadata"]}}
                )

        w.api.on_change.append(controller)
        await backend.dispose(member)
        await asyncio.sleep(0.1)
        assert not w.api.objects[PODS] and not w.api.objects[sandboxes]
        w.api.on_change[:] = [w.pods._changed]
        await backend.close()

    run(tmp_path, body)


# -- watches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["twice", "cut", "half", "history"])
def test_no_readiness_is_lost(tmp_path: Path, lie: str) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        await backend.capabilities()
        if lie == "twice":
            w.api.twice = True
        elif lie == "half":  # in the middle of an event
            w.api.rule("GET", "watch=1", times=6, cut_after=300)
            w.api.cut_watches()
        for i in range(5):
            if lie in ("cut", "history"):
                w.api.cut_watches()
            if lie == "history":
                w.api.forget_history()
            await make(backend, f"m{i}")
        assert backend._cluster is not None and backend._cluster.claims is not None
        seen = backend._cluster.claims.store
        await until(lambda: len(seen) == 5)  # a list may lag behind
        await backend.close()

    run(tmp_path, body)


def test_what_happened_while_nobody_watched_is_found_by_listing(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        api, seen = await w.client(), []
        for name in ("a", "b", "c"):
            w.api.put(PODS, {"metadata": {"name": name, "labels": {"x": "1"}}, "spec": {}, "status": {}})
        watch = Watch(
            api,
            PODS,
            selector="x=1",
            changed=lambda kind, item: seen.append((kind, item["metadata"]["name"])),
        )
        await watch.start()
        await until(lambda: w.api.count("GET", "watch=1") == 1)
        lost = w.api.rule("GET", "watch=1", status=410)
        w.api.drop(PODS, "b")
        w.api.put(PODS, {"metadata": {"name": "d", "labels": {"x": "1"}}, "spec": {}, "status": {}})
        w.api.forget_history()
        w.api.cut_watches()
        await until(lambda: set(watch.store) == {"a", "c", "d"})
        assert ("gone", "b") in seen and seen.count(("set", "a")) == 1 and lost.times == 0
        await watch.close()
        await api.close()

    run(tmp_path, body)


def test_an_older_event_changes_nothing() -> None:
    told: list[Any] = []
    watch = Watch(None, "", selector="", changed=lambda *change: told.append(change))  # type: ignore[arg-type]

    def item(version: str, uid: str = "u", **more: Any) -> JSON:
        return {"metadata": {"name": "n", "resourceVersion": version, "uid": uid}, **more}

    watch._set(item("10"))
    watch._set(item("9", status="old"))
    watch._gone(item("11", uid="another"))
    assert watch.store["n"]["metadata"]["resourceVersion"] == "10" and len(told) == 1


def test_little_is_held_of_what_there_are_thousands_of() -> None:
    """Volumes, probes, tolerations, addresses: nobody here reads them."""
    watch = Watch(None, "", selector="", changed=lambda *_: None, keep=slim)  # type: ignore[arg-type]
    condition = {"type": "Ready", "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-01-01"}
    watch._set(
        {
            "metadata": {"name": "n", "uid": "u", "resourceVersion": "1", "ownerReferences": [{"name": "o"}]},
            "spec": {"nodeName": "node", "volumes": [{}], "containers": [{"name": "c", "args": ["--long"]}]},
            "status": {"phase": "Running", "podIPs": [{}], "conditions": [condition]},
        }
    )
    assert watch.store["n"] == {
        "metadata": {"name": "n", "uid": "u", "resourceVersion": "1"},
        "spec": {"nodeName": "node", "containers": [{"name": "c"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


# -- what goes wrong in the cluster -----------------------------------------------------------------


def waiting(reason: str, message: str) -> JSON:
    return {
        "phase": "Pending",
        "containerStatuses": [
            {"name": "sandbox", "image": "img", "state": {"waiting": {"reason": reason, "message": message}}}
        ],
    }


@pytest.mark.parametrize(
    ("reason", "ready", "kind"),
    [
        ("DeletionByPodGC", "True", "node_lost"),
        ("DeletionByTaintManager", "False", "node_lost"),
        ("DeletionByTaintManager", "True", "evicted"),  # by a taint that somebody gave a node that is well
        ("EvictionByEvictionAPI", "True", "evicted"),
        ("PreemptionByScheduler", "True", "evicted"),
    ],
)
def test_whether_a_pod_was_lost_with_its_node(reason: str, ready: str, kind: str) -> None:
    rows = [("DisruptionTarget", "True", reason), ("Ready", ready, "")]
    conditions = [{"type": what, "status": status, "reason": why} for what, status, why in rows]
    died = failures.end_of_pod({"metadata": {"name": "p"}, "status": {"conditions": conditions}})
    assert died is not None and (died.kind, died.retryable) == (kind, True)


@pytest.mark.parametrize(
    ("status", "error", "kind", "retryable"),
    [
        (waiting("ErrImagePull", "manifest unknown: not found"), errors.ImageError, "image_not_found", False),
        (waiting("ErrImagePull", "failed: 401 Unauthorized"), errors.ImageError, "image_not_found", False),
        (waiting("InvalidImageName", "couldn't parse"), errors.ImageError, "image_not_found", False),
        (waiting("CreateContainerConfigError", 'configmap "x" not found'), errors.ProvisionError, "container_start", False),
        ({"phase": "Pending", "initContainerStatuses": waiting("ErrImagePull", "manifest unknown")["containerStatuses"]}, errors.ImageError, "image_not_found", False),
        (
            {"phase": "Failed", "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 3}}}]},
            errors.ProvisionError, "container_start", True,
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, errors.ProvisionError, "evicted", True),
        (
            {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 1, "message": "cannot hold SYS_ADMIN over the node: x"}}}]},
            errors.ProvisionError, "keeper_start", False,
        ),
    ],
)  # fmt: skip
def test_pods_that_will_not_become_ready(
    tmp_path: Path, status: JSON, error: type[errors.SandboxError], kind: str, retryable: bool
) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        w.pods.status = lambda pod: status
        with pytest.raises(error) as caught:
            await make(backend, deadline=30)
        assert (caught.value.kind, caught.value.retryable, caught.value.phase) == (
            kind,
            retryable,
            "provision",
        )
        await until(lambda: not w.api.objects[CLAIMS])  # nothing is left of it
        await backend.close()

    run(tmp_path, body)


def test_a_template_of_ours_that_somebody_changed_is_made_again(tmp_path: Path) -> None:
    """And no sandbox of another image is handed out. A cluster that rewrites images is no such thing."""
    templates = f"{Pods.EXT}/sandboxtemplates"

    async def body(w: World) -> None:
        backend = w.backend()
        await make(backend, "m1")
        (made,) = copy.deepcopy(list(w.api.objects[templates].values()))
        made["spec"]["podTemplate"]["spec"]["containers"][0]["image"] = "other"
        w.api.put(templates, made)
        with pytest.raises(
            errors.ProvisionError, match="image is other, not img; it is made again"
        ) as caught:
            await make(backend, "m2")
        assert (caught.value.kind, caught.value.retryable) == ("template_changed", True)
        await make(backend, "m3")
        pods = w.api.objects[PODS]
        assert pods[f"rls-{backend._run}-m3"]["spec"]["containers"][0]["image"] == "img"
        asked = w.api.count("GET", "sandboxtemplates/")
        put = w.api.put

        def rewriting(collection: str, item: JSON) -> JSON:
            if collection == PODS:
                item["spec"] = copy.deepcopy(item["spec"])
                item["spec"]["containers"][0]["image"] = "mirror/img"
            return put(collection, item)

        w.api.put = rewriting  # type: ignore[method-assign]
        for n in (4, 5):
            await make(backend, f"m{n}")
        assert pods[f"rls-{backend._run}-m5"]["spec"]["containers"][0]["image"] == "mirror/img"
        assert w.api.count("GET", "sandboxtemplates/") == asked + 1
        await backend.close()

    run(tmp_path, body)


def test_a_pod_that_its_kubelet_cannot_begin_is_told_by_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No status says so. Not at once: addresses may come. And of other pods' troubles nothing is taken over."""
    monkeypatch.setattr("rlsandbox.backends.kubernetes.backend.SLOW_S", 0.05)
    monkeypatch.setattr("rlsandbox.backends.kubernetes.cluster.LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr("rlsandbox.backends.kubernetes.events.PATIENCE_S", 0.3)
    creating = {
        "containerStatuses": [{"name": "sandbox", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    }

    async def body(w: World) -> None:
        def fails(n: int, reason: str, message: str) -> None:
            name = f"rls-{backend._run}-m{n}"
            row = {"type": "Warning", "reason": reason, "message": message, "involvedObject": {"name": name}}
            w.api.put(f"{Pods.CORE}/events", {"metadata": {"name": f"e{n}"}, **row})

        backend = w.backend()
        w.pods.status = lambda pod: {"phase": "Pending", **creating}
        others = asyncio.ensure_future(make(backend, "m1"))
        for n, message, kind in (
            (2, 'no runtime for "kata" is configured', "no_runtime_class"),
            (3, "cni: no addresses\nleft", "pod_start"),
        ):
            fails(n, "FailedCreatePodSandBox", message)
            with pytest.raises(
                errors.ProvisionError, match="on node node-1: FailedCreatePodSandBox: "
            ) as caught:
                await make(backend, f"m{n}")
            assert caught.value.kind == kind and caught.value.retryable and "\n" not in str(caught.value)
        assert not others.done()
        fails(1, "FailedCreatePodSandBox", "cni: not yet")
        await asyncio.sleep(0.1)
        pod = w.api.objects[PODS][f"rls-{backend._run}-m1"]
        w.api.put(PODS, {**pod, "status": RUNNING})
        await others
        asked = w.api.count("GET", "/events?")
        await asyncio.sleep(0.3)
        assert w.api.count("GET", "/events?") == asked  # nobody waits: nothing is asked
        await backend.close()

    run(tmp_path, body)


def test_a_pull_that_may_get_better_gets_its_time(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        w.pods.status = lambda pod: waiting("ErrImagePull", "429 Too Many Requests")
        making = asyncio.ensure_future(make(backend))
        await until(lambda: any("status" in pod for pod in w.api.objects.get(PODS, {}).values()))
        await asyncio.sleep(0.1)
        pod = next(iter(w.api.objects[PODS].values()))
        w.api.put(PODS, {**pod, "status": RUNNING})
        await making
        await backend.close()

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("ready", "error", "kind"),
    [
        (("InvalidMetadata", "label domain not allowed"), errors.ConfigError, "claim_refused"),
        (
            ("ReconcilerError", 'pods "x" is forbidden: violates PodSecurity "baseline:latest": hostUsers'),
            errors.ProvisionError,
            "pod_security",
        ),
        (("ReconcilerError", 'RuntimeClass "nope" not found'), errors.ProvisionError, "no_runtime_class"),
        (("ReconcilerError", "forbidden: exceeded quota: pods"), errors.ProvisionError, "quota"),
        (("ClaimExpired", "x"), errors.ProvisionError, "claim_expired"),
    ],
)
def test_claims_that_will_not_become_ready(
    tmp_path: Path, ready: tuple[str, str], error: type[errors.SandboxError], kind: str
) -> None:
    async def body(w: World) -> None:
        backend = w.backend()

        async def refused(claim: JSON) -> None:
            condition = {"type": "Ready", "status": "False", "reason": ready[0], "message": ready[1]}
            w.api.put(CLAIMS, {**claim, "status": {"conditions": [condition]}})

        w.pods._claimed = refused  # type: ignore[method-assign]
        with pytest.raises(error) as caught:
            await make(backend)
        assert caught.value.kind == kind
        await backend.close()

    run(tmp_path, body)


def test_not_ready_in_time_says_what_is_known(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        await backend.capabilities()
        w.pods.status = lambda pod: {"phase": "Pending"}
        event = {
            "type": "Warning",
            "reason": "FailedMount",
            "message": "no such volume",
            "lastTimestamp": "x",
        }
        w.api.put(f"{Pods.CORE}/events", {"metadata": {"name": "e"}, **event})
        with pytest.raises(errors.ProvisionError, match="FailedMount: no such volume"):
            await make(backend, deadline=0.5)
        await backend.close()

    run(tmp_path, body)


def test_a_cancelled_creation_leaves_nothing(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        backend = w.backend()
        w.pods.status = lambda pod: {"phase": "Pending"}
        making = asyncio.ensure_future(make(backend))
        await until(lambda: bool(w.api.objects.get(CLAIMS)))
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await backend.close()
        assert not w.api.objects[CLAIMS]

    run(tmp_path, body)


# -- before work starts -----------------------------------------------------------------------------


def test_no_crds_means_plain_pods_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(w: World) -> None:
        w.api.groups = {"extensions.agents.x-k8s.io": "v1alpha1"}
        backend = w.backend()
        member = await make(backend)
        assert "another version (v1alpha1; wanted: v1beta1): sandboxes are plain pods" in " ".join(
            caplog.text.split()
        )
        assert [m.id for m in await backend.list({"run": "r"})] == ["m1"]
        await backend.dispose(member)
        await backend.close()
        assert not w.api.objects[PODS] and not w.api.objects.get(CLAIMS)
        named = w.backend(warm_pool="theirs")
        with pytest.raises(errors.UnsupportedError, match="there are no templates and warm pools"):
            await named.capabilities()

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"kubeconfig": "/no/such"}, errors.ConfigError, "no cluster to talk to"),
        ({"context": "wrong"}, errors.ConfigError, "wrong"),
        ({"namespace": "elsewhere"}, errors.ConfigError, "no namespace 'elsewhere'"),
        ({"warm_pool": "theirs"}, errors.ConfigError, "no SandboxWarmPool 'theirs'"),
    ],
)
def test_one_clear_line_before_work_starts(
    tmp_path: Path, how: dict[str, Any], error: type[errors.SandboxError], match: str
) -> None:
    async def body(w: World) -> None:
        backend = Kubernetes(**{"kubeconfig": str(w.file), **how})
        with pytest.raises(error, match=match) as caught:
            await backend.capabilities()
        assert "\n" not in str(caught.value)
        await backend.close()

    run(tmp_path, body)


@pytest.mark.parametrize(
    "how",
    [
        {"namespace": "Not A Name"},
        {"namespace": "a.b"},
        {"template": "../sandboxclaims/x.y"},
        {"warm_pool": ""},
        {"runtime_class": "a..b"},
        {"mode": "best"},
        {"arch": "pdp11"},
        {"write_rate": 0},
        {"template": "a", "warm_pool": "b"},
    ],
)
def test_wrong_arguments_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        Kubernetes(**how)


def test_credentials_that_expire_are_read_anew(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        w.api.token = "t"
        backend = w.backend()
        await make(backend)
        w.api.token = "new"
        with pytest.raises(ApiError, match="wrong or has expired") as caught:
            await make(backend, "m2")
        assert caught.value.kind == "unauthorized" and not caught.value.retryable
        w.file.write_text(kubeconfig(w.api.url, token="new"))
        await make(backend, "m3")
        await backend.close()

    run(tmp_path, body)


def test_a_token_file_is_followed(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        token = tmp_path / "token"
        token.write_text("one")
        text = kubeconfig(w.api.url).replace('"token": "t"', f'"tokenFile": "{token}"')
        w.file.write_text(text)
        w.api.token = "one"
        backend = w.backend()
        await make(backend)
        token.write_text("two")
        w.api.token = "two"
        await make(backend, "m2")
        await backend.close()

    run(tmp_path, body)


def test_a_named_pool_must_carry_the_keeper(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        pod: JSON = {"containers": [{"name": "c", "image": "i", "command": ["sleep"]}]}
        w.api.put(
            f"{Pods.EXT}/sandboxtemplates",
            {"metadata": {"name": "t"}, "spec": {"podTemplate": {"spec": pod}}},
        )
        w.api.put(
            f"{Pods.EXT}/sandboxwarmpools",
            {"metadata": {"name": "p"}, "spec": {"sandboxTemplateRef": {"name": "t"}}},
        )
        with pytest.raises(errors.ConfigError, match="does not carry the keeper") as caught:
            await w.backend(warm_pool="p").capabilities()
        assert caught.value.hint.startswith("rlsandbox template check t;")
        ours = w.backend()
        await make(ours)
        good = next(
            t for t in w.api.objects[f"{Pods.EXT}/sandboxtemplates"].values() if t["metadata"]["name"] != "t"
        )
        w.api.put(f"{Pods.EXT}/sandboxtemplates", {"metadata": {"name": "t"}, "spec": good["spec"]})
        mounted = next(v for v in good["spec"]["podTemplate"]["spec"]["volumes"] if "configMap" in v)
        keeper = w.api.drop(f"{Pods.CORE}/configmaps", mounted["configMap"]["name"])
        assert keeper is not None
        with pytest.raises(errors.ConfigError, match="there is no ConfigMap 'rlsandbox-keeper"):
            await w.backend(warm_pool="p").capabilities()
        w.api.put(f"{Pods.CORE}/configmaps", {**keeper, "binaryData": {"other": "eA=="}})
        with pytest.raises(errors.ConfigError, match="holds no keeper"):
            await w.backend(warm_pool="p").capabilities()
        w.api.put(f"{Pods.CORE}/configmaps", keeper)
        named = w.backend(warm_pool="p")
        before = len(w.api.objects[f"{Pods.EXT}/sandboxwarmpools"])
        await make(named, "m9", spec=Spec())
        assert len(w.api.objects[f"{Pods.EXT}/sandboxwarmpools"]) == before
        with pytest.raises(errors.ConfigError, match="are its own"):
            await make(named, "m10", spec=SPEC)
        theirs = copy.deepcopy(good["spec"])
        cluster = await named._get()
        asked = w.api.count("GET", "/sandboxtemplates/t")
        rewritten = copy.deepcopy(theirs["podTemplate"]["spec"])
        rewritten["containers"][0]["image"] = "mirror.test/i@sha256:1"
        for _ in range(3):
            await cluster.check_template({"spec": rewritten})
        assert w.api.count("GET", "/sandboxtemplates/t") == asked + 1
        (container,) = theirs["podTemplate"]["spec"]["containers"]
        was, container["image"] = container["image"], "registry.test/new:2"
        w.api.put(f"{Pods.EXT}/sandboxtemplates", {"metadata": {"name": "t"}, "spec": theirs})
        words = f"'t' was changed since .* '{container['name']}' was {was} and is registry.test/new:2"
        with pytest.raises(errors.ProvisionError, match=words) as changed:
            await make(named, "m11", spec=Spec())
        assert (changed.value.kind, changed.value.retryable) == ("template_changed", False)
        await named.close()
        await ours.close()

    run(tmp_path, body)


# -- what dead runs leave ---------------------------------------------------------------------------


def test_reap_takes_what_is_dead_and_spares_the_rest(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        live, dead = w.backend(), w.backend()
        await make(live, "alive")
        await make(dead, "left")
        w.api.put(
            CLAIMS,
            {
                "metadata": {"name": "somebodys", "labels": {"app": "x"}},
                "spec": {"warmPoolRef": {"name": "x"}},
            },
        )
        assert dead._cluster is not None
        leases = "/apis/coordination.k8s.io/v1/namespaces/rls/leases"
        lease = dict(w.api.objects[leases][dead._cluster.lease.name])
        lease["spec"] = {**lease["spec"], "renewTime": "2020-01-01T00:00:00.000000Z"}
        w.api.put(leases, lease)
        api = await w.client()
        found = await leftovers(api)
        assert {(one.kind, one.run) for one in found} == {("Lease", dead._run), ("SandboxClaim", dead._run)}
        gone, kept = await reap(api, found)
        assert (
            len(gone) == 2
            and not kept
            and set(w.api.objects[CLAIMS]) == {"somebodys", f"rls-{live._run}-alive"}
        )
        assert await leftovers(api) == []
        await api.close()
        await live.close()
        await dead.close()

    run(tmp_path, body)


@pytest.mark.parametrize("lives", [True, False])
def test_reap_after_an_outage_spares_what_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """All Leases have run out then, and a CronJob may be quicker than the runs are at renewing theirs."""
    monkeypatch.setattr("rlsandbox.backends.kubernetes.lease.SECOND_LOOK_S", 0.5)
    monkeypatch.setattr("rlsandbox.backends.kubernetes.lease.AGAIN_S", 0.01)
    leases = "/apis/coordination.k8s.io/v1/namespaces/rls/leases"

    async def body(w: World) -> None:
        api = await w.client()
        now = await server_time(api)
        lapsed = f"{now - datetime.timedelta(seconds=400):%Y-%m-%dT%H:%M:%S.%fZ}"
        lease = RunLease(api, leases, "one")
        w.api.rule("PATCH", "leases/", status=403, times=3)  # its tries fail, until they do not any more
        monkeypatch.setattr("rlsandbox.backends.kubernetes.lease.RENEW_S", 0.1 if lives else 600.0)
        await lease.begin()
        row = dict(w.api.objects[leases][lease.name])
        w.api.put(leases, {**row, "spec": {**row["spec"], "renewTime": lapsed}})
        assert [one.name for one in await leftovers(api)] == ([] if lives else [lease.name])
        await lease.end()
        await api.close()

    run(tmp_path, body)


def test_what_no_run_uses_any_more_is_removed_when_it_is_old(tmp_path: Path) -> None:
    ext, maps = f"{Pods.EXT}/sandbox", f"{Pods.CORE}/configmaps"

    async def body(w: World) -> None:
        backend, api = w.backend(), await w.client()
        member = await make(backend)
        (keeper,) = w.api.objects[maps]
        (template,) = w.api.objects[f"{ext}templates"]

        def age(days: int) -> None:
            made = f"{api.now() - datetime.timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}"
            for path in (maps, f"{ext}templates", f"{ext}warmpools"):
                for row in list(w.api.objects[path].values()):
                    w.api.put(path, {**row, "metadata": {**row["metadata"], "creationTimestamp": made}})

        age(40)
        with pytest.raises(InUseError, match=f"a run uses namespace rls, .*{backend._run}"):
            await unused(api, older_s=86400)
        await backend.dispose(member)
        await backend.close()

        async def found(days: float = 30) -> list[str]:
            return [f"{one.kind} {one.name}" for one in await unused(api, older_s=days * 86400)]

        own = [f"SandboxWarmPool {template}", f"SandboxTemplate {template}", f"ConfigMap {keeper}"]
        assert await found() == own and await found(50) == []
        # What others have built on ours, or what is not ours, stays.
        theirs = copy.deepcopy(w.api.objects[f"{ext}templates"][template])
        theirs["metadata"] = {"name": "theirs", "creationTimestamp": "2020-01-01T00:00:00Z"}
        w.api.put(f"{ext}templates", theirs)
        assert await found() == own[:2]
        await api.delete(f"{ext}templates/theirs")
        on_ours = {"replicas": 0, "sandboxTemplateRef": {"name": template}}
        w.api.put(f"{ext}warmpools", {"metadata": {"name": "theirs"}, "spec": on_ours})
        assert await found() == own[:1]
        await api.delete(f"{ext}warmpools/theirs")
        ours = w.api.objects[f"{ext}warmpools"][template]
        w.api.put(f"{ext}warmpools", {**ours, "spec": {**ours["spec"], "replicas": 2}})
        assert await found() == []
        w.api.put(f"{ext}warmpools", ours)
        w.api.put(CLAIMS, {"metadata": {"name": "somebodys"}, "spec": {"warmPoolRef": {"name": template}}})
        assert await found() == []
        await api.delete(f"{CLAIMS}/somebodys")
        gone, kept = await reap(api, await unused(api, older_s=86400))
        assert ([f"{one.kind} {one.name}" for one in gone], kept) == (own, [])
        again = w.backend()  # and the next run makes it all again
        await make(again)
        assert list(w.api.objects[maps]) == [keeper] and list(w.api.objects[f"{ext}templates"]) == [template]
        await again.close()
        await api.close()

    run(tmp_path, body)


def test_what_a_killed_trial_of_a_policy_left_is_reaped(tmp_path: Path) -> None:
    """Its pods end by themselves, and would lie there for ever."""

    async def body(w: World) -> None:
        api = await w.client()
        now = f"{await server_time(api):%Y-%m-%dT%H:%M:%SZ}"
        for trial, made in (("rls-trial-1", "2020-01-01T00:00:00Z"), ("rls-trial-2", now)):
            pod = policy._pod(f"{trial}-closed", "i", "c", ["dial"], {}, trial, closed=True)
            pod["metadata"]["creationTimestamp"] = made
            w.api.put(f"{Pods.CORE}/pods", pod)
        assert [one.name for one in await leftovers(api)] == ["rls-trial-1-closed"]
        assert 2 * policy.START_S + policy.SETTLE_S + policy.TRY_S < YOUNG_S
        await api.close()

    run(tmp_path, body)


@pytest.mark.parametrize("impatient", [False, True])
def test_a_trial_of_a_policy_that_is_cancelled_leaves_no_pod(tmp_path: Path, impatient: bool) -> None:
    async def body(w: World) -> None:
        api, pods = await w.client(), f"{Pods.CORE}/pods"
        trial = asyncio.create_task(policy.enforced(api, "i", "c"))
        while not any(name.endswith("-listens") for name in w.api.objects.get(pods, {})):
            await asyncio.sleep(0.01)
        w.api.rule("DELETE", "", times=99, late_s=0.05)
        trial.cancel()
        while impatient and not trial.done():
            await asyncio.sleep(0.005)
            trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        assert not w.api.objects[pods]
        await api.close()

    run(tmp_path, body)


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_machine_whose_clock_is_wrong_is_not_taken_for_dead(tmp_path: Path, ahead_s: float) -> None:
    async def body(w: World) -> None:
        w.api.ahead_s = ahead_s
        live = w.backend(lifetime=1800)
        await make(live, "alive")
        api = await w.client()
        assert await leftovers(api) == []
        now, (lease,) = (
            api.now(),
            w.api.objects["/apis/coordination.k8s.io/v1/namespaces/rls/leases"].values(),
        )
        renewed = datetime.datetime.fromisoformat(lease["spec"]["renewTime"])
        assert abs((now - renewed).total_seconds()) < 30  # and once dead, it is not alive for an hour more
        (claim,) = w.api.objects[CLAIMS].values()
        ends = datetime.datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"])
        assert 1700 < (ends - now).total_seconds() <= 1801
        await api.close()
        await live.close()

    run(tmp_path, body)


@pytest.mark.parametrize("told", ["3600", "inf", "1e308"])
def test_a_server_that_says_never_again_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """And a request whose turn does not come in its own time ends, instead of waiting behind the others."""
    monkeypatch.setattr("rlsandbox.backends.kubernetes.api._LONGEST_PAUSE_S", 0.4)
    # The longest that the pause, drawn at random, may be.
    monkeypatch.setattr("rlsandbox.backends.kubernetes.api.random.uniform", lambda low, high: high)

    async def body(w: World) -> None:
        api = await w.client()
        w.api.rule("POST", "/pods", status=429, times=1, headers={"Retry-After": told})
        with pytest.raises(errors.ThrottledError) as caught:
            await api.create(PODS, {"metadata": {"name": "a"}}, throttle=True)
        assert caught.value.retry_after == 0.4
        with pytest.raises(ApiError, match=r"not asked: .* for 0.1 s") as late:
            await api.delete(f"{PODS}/a", limit=0.1)
        assert late.value.retryable
        assert not await api.delete(f"{PODS}/a", limit=10)
        await api.close()

    run(tmp_path, body)


def test_another_object_of_the_same_name_is_another(tmp_path: Path) -> None:
    """agent-sandbox makes pods that were deleted anew under their names; a list after a gap shows only these."""

    async def body(w: World) -> None:
        leases = f"{Pods.CORE}/leases"  # what the double of a controller does not act on
        api, told = await w.client(), list[tuple[str, str]]()
        watch = Watch(
            api, leases, selector="", changed=lambda kind, pod: told.append((kind, pod["metadata"]["uid"]))
        )
        for _ in range(2):
            w.api.drop(leases, "a")
            w.api.put(leases, {"metadata": {"name": "a"}})
            await watch._list()
        assert [kind for kind, _ in told] == ["set", "gone", "set"]
        assert told[0][1] == told[1][1] != told[2][1]
        await api.close()

    run(tmp_path, body)


@pytest.mark.parametrize("how", ["gone", "nothing"])
def test_a_watch_that_never_tells_anything_is_not_opened_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A server whose watches are always too old; a proxy that ends each answer at once."""
    delays: list[float] = []
    monkeypatch.setattr(
        "rlsandbox.backends.kubernetes.watch.random.uniform", lambda low, high: delays.append(high) or 0.0
    )

    async def body(w: World) -> None:
        api = await w.client()
        serve = w.api._watch

        async def ends(request: web.Request, cut: int | None) -> web.StreamResponse:
            if how == "gone":
                return web.json_response({"code": 410}, status=410)
            response = web.StreamResponse()
            await response.prepare(request)
            return response

        monkeypatch.setattr(w.api, "_watch", ends)
        watch = Watch(api, PODS, selector="", changed=lambda *_: None)
        await watch.start()
        await until(lambda: len(delays) >= 8)
        assert delays[:8] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
        monkeypatch.setattr(w.api, "_watch", serve)
        w.api.put(PODS, {"metadata": {"name": "a"}, "status": {}})
        await until(lambda: "a" in watch.store)  # nothing was missed
        del delays[:]
        w.api.put(PODS, {"metadata": {"name": "b"}, "status": {}})
        await until(lambda: "b" in watch.store)
        w.api.rule("GET", "watch=1", status=503)
        w.api.cut_watches()
        await until(lambda: bool(delays))
        assert delays[0] == 0.2  # one that told something: the first wait again
        await watch.close()
        await api.close()

    run(tmp_path, body)


def test_the_bucket_never_lets_more_through() -> None:
    async def main() -> None:
        loop, times = asyncio.get_running_loop(), []
        bucket = Bucket(100)
        start = loop.time()
        for _ in range(31):
            await bucket.take()
            times.append(loop.time() - start)
        assert times[-1] >= 0.19  # 31 writes at 100/s, ten of them saved up at most

    asyncio.run(main())


def test_nothing_of_the_cluster_is_asked_before_it_is_needed() -> None:
    backend = Kubernetes(kubeconfig=f"/nowhere/{os.getpid()}")

    async def main() -> None:
        assert await backend.list({}) == [] and backend.requests == {}
        await backend.close()

    asyncio.run(main())
