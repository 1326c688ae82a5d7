"""Reading what nodes have, and bringing images to them, against an API server that lies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlsandbox.errors import SandboxError
from rlsandbox.images import Pull

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes
from rlsandbox.backends.kubernetes.api import Api
from rlsandbox.cli import main
from rlsandbox.images.hydrate import hydrate
from rlsandbox.images.inventory import quantity, read_inventory, room_of
from rlsandbox.spec import Spec
from tests.support.fake_apiserver import (
    JSON,
    FakeApi,
    Pods,
    Rule,
    api_server,
    kubeconfig,
    stand_in_for_keeper,
)

PODS = f"{Pods.CORE}/pods"
TOLERATED = [
    {"key": "gpu", "operator": "Exists", "effect": "NoExecute"},
    {"key": "gpu", "value": "2"},
    {"key": "mine", "value": "1", "effect": "NoSchedule"},
]


@pytest.fixture(autouse=True)
def _keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_keeper(tmp_path, monkeypatch)


def node(name: str, *, images: Any = (), ready: str = "True", arch: str = "amd64", **spec: Any) -> JSON:
    size = {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "100Gi", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": arch}},
        "spec": spec,
        "status": {
            "capacity": size,
            "allocatable": size,
            "conditions": [{"type": "Ready", "status": ready}],
            "images": list(images),
            "nodeInfo": {"architecture": arch},
        },
    }


def pod(name: str, on: str, image: str, **requests: str) -> JSON:
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": on, "containers": [{"image": image, "resources": {"requests": requests}}]},
        "status": {"containerStatuses": [{"image": image, "imageID": ""}]},
    }


class Kubelet:
    """Plays the kubelets: what comes of a pod, by its image."""

    def __init__(self, api: FakeApi) -> None:
        self.api, self.at_once, self.most, self.made = api, 0, 0, 0
        self.says: dict[str, JSON] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        api.on_change.append(self._changed)

    def _changed(self, kind: str, collection: str, item: JSON) -> None:
        if collection == PODS and kind == "ADDED":
            self.made += 1
            task = asyncio.get_running_loop().create_task(self._run(item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, item: JSON) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.02)
        self.at_once -= 1
        image = item["spec"]["containers"][0]["image"]
        ended = {"containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}], "phase": "Succeeded"}
        if item["metadata"]["name"] in self.api.objects.get(PODS, {}):
            self.api.put(PODS, {**item, "status": self.says.get(image, ended)})


def run(tmp_path: Path, body: Callable[[FakeApi, Api, Kubernetes], Awaitable[None]]) -> None:
    async def main_() -> None:
        async with asyncio.timeout(60), api_server() as fake:
            file = tmp_path / "config"
            file.write_text(kubeconfig(fake.url))
            backend = Kubernetes(kubeconfig=str(file), write_rate=1000, pull_secrets=["s"])
            api = await backend.connect_api()
            try:
                await body(fake, api, backend)
            finally:
                await api.close()

    asyncio.run(main_())


def kubelet_says(fake: FakeApi, name: str, percent: int = 80) -> None:
    summary = {
        "node": {"runtime": {"imageFs": {"capacityBytes": 1000, "availableBytes": 600, "usedBytes": 100}}}
    }
    fake.put(f"/api/v1/nodes/{name}/proxy/stats", {"metadata": {"name": "summary"}, **summary})
    config = {"kubeletconfig": {"imageGCHighThresholdPercent": percent}}
    fake.put(f"/api/v1/nodes/{name}/proxy", {"metadata": {"name": "configz"}, **config})


def test_what_nodes_have(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        images = [{"names": ["r/x@sha256:1", "r/x:1"], "sizeBytes": 70}, {"names": ["r/y:1"], "sizeBytes": 9}]
        for row in (
            node("a", images=images),
            node("b", unschedulable=True),
            node("c", ready="Unknown"),
            node("d", arch="arm64"),
            node("e", taints=[{"key": "gpu", "value": "1", "effect": "NoSchedule"}]),
            node(
                "f",
                taints=[
                    {"key": "mine", "value": "1", "effect": "NoSchedule"},
                    {"key": "x", "effect": "Prefer"},
                ],
            ),
        ):
            fake.put("/api/v1/nodes", row)
        fake.put("/api/v1/pods", pod("p", "a", "r/x:1", cpu="1500m", memory="2Gi"))
        fake.put("/api/v1/pods", pod("q", "a", "r/new:1"))
        kubelet_says(fake, "a")
        told = await read_inventory(
            api, spec=Spec(cpu=0.5, memory="1GiB"), arch="amd64", tolerations=TOLERATED
        )
        a, b, c, d, e, f = told.nodes
        assert a.images == {"r/x@sha256:1": 70, "r/x:1": 70, "r/y:1": 9, "r/new:1": 0}
        assert (a.in_use, a.busy) == (frozenset({"r/x:1", "r/new:1"}), 70)
        assert a.room == 1000 * 80 // 100 - (1000 - 600 - 100)
        assert a.sandboxes == 5  # (4 - 1.5) cores of half a core each; memory would allow 6
        assert [n.usable for n in (b, c, d, e, f)] == [
            "cordoned",
            "not ready",
            "its architecture is arm64",
            "its taint gpu is not tolerated",
            "",
        ]
        assert b.room == (100 << 30) * 85 // 100
        assert [n.name for n in told.usable] == ["a", "f"]
        assert told.notes == ("how full the disks of 2 nodes are is not known: their kubelets did not say",)

    run(tmp_path, body)


def test_what_may_not_be_read_is_said(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        fake.put(
            "/api/v1/nodes", node("a", images=[{"names": [f"i:{n}"], "sizeBytes": 1} for n in range(50)])
        )
        fake.rule("GET", "/api/v1/pods", status=403)
        fake.rule("GET", "/proxy/", status=403, times=9)
        told = await read_inventory(api)
        assert [note.partition(":")[0] for note in told.notes] == [
            "pods of other namespaces may not be listed (needs",
            "how full disks are is not known",
            "1 of 1 nodes name 50 images, the most a kubelet names (nodeStatusMaxImages)",
        ]
        fake.rule("GET", "/api/v1/nodes", status=403)
        with pytest.raises(SandboxError, match="forbids it"):
            await read_inventory(api)

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2Gi", 2 << 30), ("1e3", 1000), ("7", 7), ("3k", 3000), ("rubbish", 0), (4, 4)],
)
def test_quantities(text: Any, value: float) -> None:
    assert quantity(text) == value


def test_a_kubelet_that_says_nothing() -> None:
    assert room_of({}, {}) is None
    assert (
        room_of({"node": {"runtime": {"imageFs": {"capacityBytes": "x", "availableBytes": 1}}}}, {}) is None
    )


def pulls(*names: str, on: str = "a") -> list[Pull]:
    return [Pull(name, on, 1, 10) for name in names]


def test_images_are_brought_a_few_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        kubelets = Kubelet(fake)
        todo = [*pulls(*(f"i{n}" for n in range(6))), *pulls(*(f"i{n}" for n in range(6)), on="b")]
        told: list[str] = []
        done = await hydrate(
            todo, api, backend.shape, per_node=2, at_once=3, told=lambda row: told.append(row.pull.node)
        )
        assert len(done.rows) == len(told) == kubelets.made == 12
        assert not done.failed
        assert (done.bytes, 1 < kubelets.most <= 3) == (120, True)
        assert not fake.objects[PODS]
        assert not fake.objects["/apis/coordination.k8s.io/v1/namespaces/rls/leases"]
        made = [item for _, kind, path, item in fake.history if path == PODS and kind == "ADDED"]
        assert made[0]["spec"]["imagePullSecrets"] == [{"name": "s"}]
        assert made[0]["spec"]["containers"][0]["command"] == ["/.rlsandbox/keeper", "version"]
        order: dict[str, list[str]] = {"a": [], "b": []}
        for one in made:
            affinity = one["spec"]["affinity"]["nodeAffinity"]
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            order[term["matchFields"][0]["values"][0]].append(one["spec"]["containers"][0]["image"])
        for names in order.values():  # those that are under way at once may overtake each other
            assert all(abs(names.index(f"i{n}") - n) <= 2 for n in range(6)), names

    run(tmp_path, body)


def waiting(reason: str, message: str) -> JSON:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def test_what_cannot_be_brought_is_said_and_hinders_nothing_else(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        kubelets = Kubelet(fake)
        no_room = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes",
        }
        kubelets.says = {
            "gone": waiting("ErrImagePull", "gone: not found"),
            "slow": waiting("ImagePullBackOff", "back-off: 503"),
            "full": {"conditions": [no_room]},
            "evicted": {"phase": "Failed", "reason": "Evicted", "message": "low on disk"},
            # As kubelets tell of a container that never started, because its image filled the disk.
            "filled": {
                "phase": "Failed", "reason": "Evicted", "message": "disk pressure", "containerStatuses": [
                    {"imageID": "", "state": {"terminated": {"reason": "ContainerStatusUnknown", "exitCode": 137}}}
                ],
            },
        }  # fmt: skip
        done = await hydrate(
            pulls("gone", "slow", "full", "evicted", "filled", "good"), api, backend.shape, timeout=1
        )
        said = {row.pull.image: row.error.message if row.error else "" for row in done.rows}
        assert "gone: not found" in said["gone"]
        assert said["slow"].startswith("image slow was not on node a after 1 s: image slow cannot be had")
        assert "0/1 nodes" in said["full"]
        assert "low on disk" in said["evicted"]
        assert "disk pressure" in said["filled"]
        assert said["good"] == ""
        assert not fake.objects[PODS]

    run(tmp_path, body)


@pytest.mark.parametrize("impatient", [False, True])
def test_cancelled_half_way_nothing_is_left(tmp_path: Path, impatient: bool) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        kubelets = Kubelet(fake)
        kubelets.says = {f"i{n}": {} for n in range(4)}
        task = asyncio.create_task(hydrate(pulls("i0", "i1", "i2", "i3"), api, backend.shape, per_node=4))
        while len(fake.objects.get(PODS, {})) < 4:
            await asyncio.sleep(0.01)
        fake.rule("DELETE", "", times=99, late_s=0.05)
        task.cancel()
        while impatient and not task.done():
            await asyncio.sleep(0.005)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not fake.objects[PODS]
        assert not fake.objects["/apis/coordination.k8s.io/v1/namespaces/rls/leases"]

    run(tmp_path, body)


def test_a_creation_whose_answer_was_lost_is_made_once(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        kubelets = Kubelet(fake)
        lost: Rule = fake.rule("POST", "/pods", status=504, done=True)
        done = await hydrate(pulls("i"), api, backend.shape)
        assert (lost.times, kubelets.made, len(done.failed)) == (0, 1, 0)

    run(tmp_path, body)


def test_no_right_to_make_pods(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        words = 'pods is forbidden: User "u" cannot create resource "pods" in API group ""'
        fake.rule("POST", "/pods", status=403, times=99, message=words)
        done = await hydrate(pulls(*(f"i{n}" for n in range(20))), api, backend.shape, per_node=2)
        assert len(done.rows) == 20 and fake.count("POST", "/pods") == 2, "one try a lane"
        for row in done.rows:
            assert row.error is not None and "cannot create" in row.error.message
            assert "rlsandbox-plain-pods" in (row.error.hint or "")

    run(tmp_path, body)


def quota(fake: FakeApi, says: Callable[[JSON], str]) -> None:
    """Have creations of pods refused as the admission of quotas does, as long as *says* says why."""
    honest = fake._do

    async def do(request: web.Request) -> web.StreamResponse:
        if request.method == "POST" and request.path == PODS:
            why = says(await request.json())
            if why:
                body = {
                    "kind": "Status",
                    "reason": "Forbidden",
                    "code": 403,
                    "message": f'pods "x" is forbidden: {why}',
                }
                return web.json_response(body, status=403)
        return await honest(request)

    fake._do = do  # type: ignore[method-assign]


def test_pods_wait_for_their_turn_in_a_quota(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        kubelets = Kubelet(fake)
        full = "exceeded quota: few, requested: pods=1, used: pods=2, limited: pods=2"
        quota(fake, lambda _: full if len(fake.objects.get(PODS, {})) >= 2 else "")
        done = await hydrate(pulls(*(f"i{n}" for n in range(6))), api, backend.shape, per_node=6)
        assert (len(done.failed), kubelets.made) == (0, 6)
        assert kubelets.most <= 2
        quota(fake, lambda _: full)
        done = await hydrate(pulls("i"), api, backend.shape, timeout=1)
        assert done.rows[0].error is not None
        assert full in done.rows[0].error.message

    run(tmp_path, body)


def test_what_a_quota_wants_pods_to_say_is_said(tmp_path: Path) -> None:
    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        Kubelet(fake)

        def must(item: JSON) -> str:
            there = item["spec"]["containers"][0].get("resources", {})
            if there == {"limits": {"cpu": "10m", "memory": "32Mi"}, "requests": {"memory": "32Mi"}}:
                return ""
            return "failed quota: must: must specify limits.cpu for: image; limits.memory for: image; memory for: image"

        quota(fake, must)
        done = await hydrate(pulls("a", "b"), api, backend.shape)
        assert not done.failed
        quota(fake, lambda _: "failed quota: must: must specify requests.nvidia.com/gpu for: image")
        done = await hydrate(pulls("a"), api, backend.shape)
        assert done.rows[0].error is not None
        assert "nvidia.com/gpu" in done.rows[0].error.message

    run(tmp_path, body)


@pytest.mark.parametrize("isolation", ["auto", "gvisor"])
def test_the_settings_of_the_sandboxes_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], isolation: str
) -> None:
    """Image, sizes and RuntimeClass of the configuration: which nodes, how many sandboxes, which pods."""

    async def body(fake: FakeApi, api: Api, backend: Kubernetes) -> None:
        Kubelet(fake)
        fake.put("/api/v1/nodes", node("a"))
        taint = {"key": "sandboxed", "effect": "NoSchedule"}
        fake.put("/api/v1/nodes", node("b", taints=[taint]))
        fake.objects["/api/v1/nodes"]["b"]["metadata"]["labels"]["kind"] = "sandboxed"
        fake.objects["/api/v1/nodes"]["a"]["metadata"]["labels"]["kind"] = "plain"
        rules = {"nodeSelector": {"kind": "sandboxed"}, "tolerations": [{**taint, "operator": "Exists"}]}
        fake.put("/apis/node.k8s.io/v1/runtimeclasses", {"metadata": {"name": "safe"}, "scheduling": rules})
        key = "gvisor_class" if isolation == "gvisor" else "runtime_class"
        (tmp_path / "rl.toml").write_text(
            f'[pool.spec]\nimage = "x:1"\nmemory = "3GiB"\nisolation = "{isolation}"\n'
            f'[pool.backend]\nname = "kubernetes"\n{key} = "safe"\n'
        )
        (tmp_path / "t.jsonl").write_text(json.dumps({"id": "t", "prompt": "p"}) + "\n")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        how = [
            "plan",
            str(tmp_path / "t.jsonl"),
            "--config",
            str(tmp_path / "rl.toml"),
            "--offline",
            "--json",
        ]
        assert await asyncio.to_thread(main, [*how, "--group-size", "5", "--apply"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [(row["image"], row["node"]) for row in told["pulls"]] == [("x:1", "b")]
        assert any("5 rollouts and room for 2 sandboxes" in note for note in told["notes"])
        (made,) = [item for _, kind, path, item in fake.history if path == PODS and kind == "ADDED"]
        assert made["spec"]["tolerations"] == rules["tolerations"]
        fake.drop("/apis/node.k8s.io/v1/runtimeclasses", "safe")
        assert await asyncio.to_thread(main, how) == 2
        assert "no RuntimeClass 'safe'" in capsys.readouterr().err

    run(tmp_path, body)


# -- the command ------------------------------------------------------------------------------------


def tasks_file(tmp_path: Path, *images: str) -> str:
    file = tmp_path / "tasks.jsonl"
    rows = [json.dumps({"id": f"t{n}", "prompt": "p", "image": image}) for n, image in enumerate(images)]
    file.write_text("\n".join(rows) + "\n")
    return str(file)


def test_the_command_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tasks_file(tmp_path, "a:1", "a:1", "b:1")
    how = ["plan", file, "--nodes", "2", "--offline", "--group-size", "4", "--json"]
    assert main([*how, "--out", str(tmp_path / "plan.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["images"], told["rollouts"], told["unknown"]) == (2, 12, ["a:1", "b:1"])
    assert sum(row["rollouts"] for row in told["pulls"]) == 12
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
    assert main(["plan", file, "--nodes", "1", "--offline", "--node-disk", "4GiB"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit: b:1" in shown
    assert main(["plan", file, "--nodes", "1", "--offline", "--node-disk", "4GiB", "--split"]) == 0
    assert "in 2 waves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a task file"),
        (["TASKS", "--from", "x"], "name a task file"),
        (["--from", "x"], "--from FILE is for --apply"),
        (["TASKS", "--nodes", "1", "--apply"], "--nodes makes nodes up"),
        (["TASKS", "--nodes", "1", "--mirror", "x"], "--mirror must be HOST=URL"),
        (["TASKS", "--nodes", "1", "--offline", "--assume", "x"], "--assume"),
        (["TASKS", "--nodes", "1", "--offline", "--unpack", "nan"], "--unpack"),
        (["TASKS", "--nodes", "1", "--offline", "--out", "/nowhere/x"], "--out: there is no directory"),
        (["TASKS", "--nodes", "0"], "--nodes"),
        (["none.jsonl", "--nodes", "1"], "none.jsonl"),
        (["demo", "--nodes", "1", "--offline"], "names no image"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tasks_file(tmp_path, "a:1")
    assert main(["plan", *(file if word == "TASKS" else word for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
