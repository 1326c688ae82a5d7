"""What goes wrong on demand does so as it was told, and right after it is right again."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster import objects
from tests.cluster.build import parts
from tests.cluster.cluster import Cluster
from tests.cluster.faults import Faults
from tests.cluster.images import TEST, Registry
from tests.cluster.kube import ApiError, Kube, pods, until
from tests.cluster.shortcuts import ready_pod, until_phase

SLEEP = ["sleep", "infinity"]


@pytest.fixture
def api(cluster: Cluster) -> Kube:
    """Through the door that obeys rules."""
    return cluster.kube("admin", "api")


def _maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def test_429_with_retry_after_for_as_often_as_told(api: Kube, cluster: Cluster, faults: Faults) -> None:
    rule = faults.too_many("/api/v1/nodes", retry_after=3, times=2)
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            api.get("/api/v1/nodes")
        assert refused.value.status == 429
    assert api.items("/api/v1/nodes")
    assert faults.hits(rule) == 2
    faults.remove(rule)
    with faults.rule(door="api", status=429, headers={"Retry-After": "7"}):
        connection = http.client.HTTPSConnection(api.host, api.port, context=api.tls)
        connection.request("GET", "/api/v1/nodes", headers=api.headers)
        answer = connection.getresponse()
        said = json.loads(answer.read())
        assert answer.headers["Retry-After"] == "7"
        assert said["details"]["retryAfterSeconds"] == 7
    assert cluster.kube("admin", "direct").items("/api/v1/nodes"), "the other door does not care"


def test_a_rule_lets_some_pass_first(api: Kube, faults: Faults) -> None:
    faults.failing(500, "/api/v1/nodes", skip=1, times=1)
    outcomes: list[object] = []
    for _ in range(3):
        try:
            outcomes.append(len(api.items("/api/v1/nodes")) > 0)
        except ApiError as error:
            outcomes.append(error.status)
    assert outcomes == [True, 500, True]


def test_a_create_happens_and_the_client_hears_504(api: Kube, faults: Faults, namespace: str) -> None:
    faults.lost_answer("POST", _maps(namespace))
    with pytest.raises(ApiError) as lost:
        api.create(_maps(namespace), {"metadata": {"name": "made"}})
    assert lost.value.status == 504
    assert api.get(_maps(namespace) + "/made")["metadata"]["name"] == "made"
    faults.lost_answer("POST", _maps(namespace), status=0)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        api.create(_maps(namespace), {"metadata": {"name": "made-too"}})
    assert api.get(_maps(namespace) + "/made-too")["metadata"]["name"] == "made-too"


def test_slow_and_hanging_answers(api: Kube, faults: Faults) -> None:
    with faults.rule(door="api", delay=0.5):
        begun = time.monotonic()
        api.get("/version")
        assert time.monotonic() - begun >= 0.5
    rule = faults.add(door="api", path="/version", hang=True)
    with pytest.raises(TimeoutError):
        api.call("GET", "/version", timeout=0.5)
    heard: list[object] = []
    waiting = threading.Thread(target=lambda: heard.append(api.get("/version")))
    waiting.start()
    until("it hangs", lambda: faults.hits(rule) == 2, 10)
    faults.remove(rule)
    waiting.join(10)
    assert heard, "it goes on when the rule is gone"


class Watch:
    """A watch of a namespace's config maps, read by a thread."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.events: list[dict] = []  # type: ignore[type-arg]
        self.ended: str | None = None
        connection = http.client.HTTPSConnection(kube.host, kube.port, context=kube.tls, timeout=60)
        connection.request("GET", _maps(namespace) + "?watch=true", headers=kube.headers)
        self.answer = connection.getresponse()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            text = b""
            while some := self.answer.read1():  # unlike readline it tells an end that comes too early
                *lines, text = (text + some).split(b"\n")
                self.events += [json.loads(line) for line in lines]
            self.ended = "end"
        except (OSError, http.client.HTTPException) as error:
            self.ended = type(error).__name__


def test_watches_are_cut_in_the_middle(api: Kube, faults: Faults, namespace: str) -> None:
    watch = Watch(api, namespace)
    api.create(_maps(namespace), {"metadata": {"name": "seen"}})
    until("it is seen", lambda: any(e["object"]["metadata"]["name"] == "seen" for e in watch.events), 10)
    assert faults.cut_watches(_maps(namespace)) == 1
    until("it has ended", lambda: watch.ended, 10)
    assert watch.ended != "end", "cut, not ended in good order"


def test_a_watch_is_told_that_it_is_too_old(api: Kube, faults: Faults, namespace: str) -> None:
    faults.watch_gone(_maps(namespace))
    watch = Watch(api, namespace)
    until("it has ended", lambda: watch.ended, 10)
    assert watch.ended == "end"
    assert [(event["type"], event["object"]["code"]) for event in watch.events] == [("ERROR", 410)]


@pytest.fixture
def streaming(cluster: Cluster, kube: Kube, namespace: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A pod with an exec stream on which cat answers, through the door that obeys rules."""
    ready_pod(kube, namespace, objects.pod("p", TEST, SLEEP))
    command = [
        str(parts()["plane"].program()),
        "kubectl",
        "--kubeconfig",
        str(cluster.kubeconfig("admin", "api")),
    ]
    command += ["-n", namespace, "exec", "-i", "p", "--", "cat"]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, bufsize=1)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("one\n")
    assert process.stdout.readline() == "one\n"
    yield namespace, process
    process.kill()
    process.communicate()


def test_an_exec_stream_is_cut(faults: Faults, streaming: tuple[str, subprocess.Popen[str]]) -> None:
    namespace, process = streaming
    assert faults.cut_exec(namespace, "other") == 0
    assert faults.cut_exec(namespace, "p") == 1
    assert process.wait(10) != 0


def test_the_record_of_requests(api: Kube, faults: Faults, namespace: str) -> None:
    before = faults.count()
    with (
        faults.rule(door="api", path=_maps(namespace), method="POST", status=503, times=1),
        pytest.raises(ApiError),
    ):
        api.create(_maps(namespace), {"metadata": {"name": "a"}})
    api.create(_maps(namespace), {"metadata": {"name": "a"}})
    api.delete(_maps(namespace) + "/a")
    found = [r for r in faults.requests(before) if r.path.startswith(_maps(namespace))]
    assert [(r.verb, r.status, r.rule > 0) for r in found] == [
        ("create", 503, True), ("create", 201, False), ("delete", 200, False),
    ]  # fmt: skip


def test_a_mistyped_rule_is_refused(faults: Faults) -> None:
    with pytest.raises(ValueError, match="stauts"):
        faults.add(stauts=500)
    with pytest.raises(Exception, match="missing closing"):
        faults.add(path="(")


@pytest.fixture(scope="session")
def task_image(cluster: Cluster) -> str:
    with Registry(cluster.port("registry")) as registry:
        return registry.task_images(3)[0]


def _pulled(kube: Kube, namespace: str, name: str, image: str, node: str) -> None:
    kube.create(pods(namespace), objects.pod(name, image, SLEEP, nodeName=node))


def _waiting(kube: Kube, namespace: str, name: str) -> dict:  # type: ignore[type-arg]
    status = kube.get(pods(namespace, name))["status"]
    found: dict = (status.get("containerStatuses") or [{}])[0].get("state", {}).get("waiting", {})  # type: ignore[type-arg]
    return found


@pytest.mark.parametrize(
    ("status", "says"), [(401, "unauthorized"), (404, "not found"), (429, "429 Too Many Requests")]
)
def test_a_registry_refuses_until_it_does_not(
    cluster: Cluster, kube: Kube, faults: Faults, namespace: str, task_image: str, status: int, says: str
) -> None:
    node = cluster.nodes()[0].name
    faults.remove_image(node, task_image)
    rule = faults.registry("task/000", status=status)
    _pulled(kube, namespace, "p", task_image, node)
    until("the pull fails", lambda: _waiting(kube, namespace, "p").get("reason") == "ErrImagePull", 30)
    assert says.lower() in _waiting(kube, namespace, "p")["message"].lower()
    faults.remove(rule)
    until_phase(kube, pods(namespace, "p"), "Running")


def test_a_pull_is_cut_off_and_a_pull_is_slow(
    cluster: Cluster, kube: Kube, faults: Faults, namespace: str, task_image: str
) -> None:
    node = cluster.nodes()[-1].name
    faults.remove_image(node, task_image)
    cut = faults.add(door="registry", path="/v2/task/000/blobs/.*", cut=True)
    _pulled(kube, namespace, "p", task_image, node)
    until("the pull fails", lambda: _waiting(kube, namespace, "p").get("reason") == "ErrImagePull", 60)
    assert "EOF" in _waiting(kube, namespace, "p")["message"]
    faults.remove(cut)
    # Cut off in the middle of a layer: the runtime asks for the rest, slowly given.
    part = faults.add(door="registry", path="/v2/task/000/blobs/.*", cut_at=1000, times=2)
    slow = faults.add(door="registry", path="/v2/task/000/blobs/.*", rate=400_000)
    until("layers are cut off", lambda: faults.hits(part) == 2, 60)
    until("a layer comes slowly", lambda: faults.hits(slow) > 0, 60)
    assert kube.get(pods(namespace, "p"))["status"]["phase"] == "Pending"
    faults.remove(slow)
    until_phase(kube, pods(namespace, "p"), "Running")
