"""An API server of our own, over real HTTP: enough of Kubernetes for the backend, and it lies as real ones do.

Answers can be late, an error although the thing was done (504 after a create), refused (429 with Retry-After), cut in
the middle of a watch, or never come; history can be forgotten (410). ``Pods`` plays controller and kubelet; with
*keepers* (a kind of tests.support.container) each pod is a real ``keeper init`` in namespaces of this machine, and exec
streams reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from tests.support.container import Container, Piped, container, dial
from tests.support.served import served

JSON = dict[str, Any]


@dataclass
class Rule:
    """What to do to requests that match; ``times`` of them."""

    method: str
    part: str
    times: int = 1
    status: int = 0
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = False
    """The thing is done, and the answer is the status all the same."""
    late_s: float = 0.0
    cut_after: int | None = None
    """Of a watch: bytes after which the connection is cut."""


class FakeApi:
    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[str, dict[str, JSON]] = {}
        """By collection path, by name."""
        self.history: list[tuple[int, str, str, JSON]] = []
        self.oldest = 0
        self.rules: list[Rule] = []
        self.seen: list[tuple[str, str]] = []
        self.groups = {"extensions.agents.x-k8s.io": "v1beta1"}
        self.twice = False
        """Each event of a watch comes twice."""
        self.exec: Callable[[str], Any] | None = None
        self.token: str | None = None
        self.ahead_s = 0.0
        """Of its clock before ours."""
        self._version = itertools.count(1)
        self._at = 0
        self._changed = asyncio.Condition()
        self.on_change: list[Callable[[str, str, JSON], None]] = []
        self._watching: set[asyncio.Task[Any]] = set()

    # -- state --------------------------------------------------------------------------------------

    def put(self, collection: str, item: JSON) -> JSON:
        old = self.objects.setdefault(collection, {}).get(item["metadata"]["name"])
        meta = item["metadata"]
        meta.setdefault("uid", old["metadata"]["uid"] if old else f"uid-{next(self._version)}")
        meta.setdefault("creationTimestamp", "2020-01-01T00:00:00Z")
        self._at = next(self._version)
        meta["resourceVersion"] = str(self._at)
        self.objects[collection][meta["name"]] = json.loads(json.dumps(item))
        self._tell("MODIFIED" if old else "ADDED", collection, item)
        return item

    def drop(self, collection: str, name: str) -> JSON | None:
        item = self.objects.get(collection, {}).pop(name, None)
        if item is not None:
            self._at = next(self._version)
            item["metadata"]["resourceVersion"] = str(self._at)
            self._tell("DELETED", collection, item)
        return item

    def _tell(self, kind: str, collection: str, item: JSON) -> None:
        self.history.append((self._at, kind, collection, json.loads(json.dumps(item))))
        for listener in self.on_change:
            listener(kind, collection, item)

        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def forget_history(self) -> None:
        """Watches from before now are too old."""
        self.history.clear()
        self._at = next(self._version)
        self.oldest = self._at

    def rule(self, method: str, part: str, **how: Any) -> Rule:
        made = Rule(method, part, **how)
        self.rules.append(made)
        return made

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in p for m, p in self.seen)

    # -- HTTP ---------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, method = request.path, request.method
        self.seen.append((method, request.path_qs))
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        rule = next(
            (
                r
                for r in self.rules
                if r.times > 0 and r.method in (method, "*") and r.part in request.path_qs
            ),
            None,
        )
        if rule is not None:
            rule.times -= 1
            if rule.late_s:
                await asyncio.sleep(rule.late_s)
            if rule.status:
                if rule.done:
                    await self._do(request)
                said = rule.message or f"as told: {rule.status}"
                return _status(rule.status, "Said", said, rule.headers)
        if "watch" in request.query:
            return await self._watch(request, rule.cut_after if rule else None)
        if path.endswith("/exec"):
            return await self._exec(request)
        return await self._do(request)

    async def _do(self, request: web.Request) -> web.StreamResponse:
        path, method = request.path, request.method
        if path == "/version":
            return web.json_response({"gitVersion": "v1.37.2"})
        for group, version in self.groups.items():
            if path == f"/apis/{group}":
                return web.json_response({"versions": [{"version": version}]})
            if path == f"/apis/{group}/{version}":
                return web.json_response({"resources": []})
        body: JSON = json.loads(await request.read() or b"{}")
        collection, _, name = path.rpartition("/")
        if method == "POST":
            there = self.objects.get(path, {})
            if body["metadata"]["name"] in there:
                return _status(409, "AlreadyExists", f"{body['metadata']['name']} already exists")
            return web.json_response(self.put(path, body), status=201)
        if method == "GET" and name in (
            "nodes",
            "pods",
            "sandboxclaims",
            "leases",
            "configmaps",
            "events",
            "sandboxes",
            "sandboxwarmpools",
            "sandboxtemplates",
            "jobs",
        ):
            if "sandboxclaims" in path and "extensions.agents.x-k8s.io" not in self.groups:
                return _status(404, "NotFound", "no such kind")
            rows = [
                row
                for row in self.objects.get(path, {}).values()
                if _matches(row, request.query.get("labelSelector"))
            ]
            return web.json_response({"items": rows, "metadata": {"resourceVersion": str(self._at)}})
        item = self.objects.get(collection, {}).get(name)
        if method == "PATCH" and "apply" in request.headers["Content-Type"]:
            return web.json_response(self.put(collection, body))
        if item is None:
            return _status(404, "NotFound", f"{name} not found")
        if method == "PATCH":
            return web.json_response(self.put(collection, _merged(item, body)))
        if method == "DELETE":
            self.drop(collection, name)
            return web.json_response({"status": "Success"})
        return web.json_response(item)

    async def _watch(self, request: web.Request, cut_after: int | None) -> web.StreamResponse:
        at = int(request.query.get("resourceVersion") or 0)
        if at < self.oldest:
            return _status(410, "Expired", "too old resource version")
        response = web.StreamResponse()
        await response.prepare(request)
        selector, sent, next_ = request.query.get("labelSelector"), 0, 0
        task = asyncio.current_task()
        assert task is not None
        self._watching.add(task)
        try:
            while True:
                for version, kind, collection, item in self.history[next_:]:
                    next_ += 1
                    if version <= at or collection != request.path or not _matches(item, selector):
                        continue
                    line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
                    for _ in range(2 if self.twice else 1):
                        if cut_after is not None and sent + len(line) > cut_after:
                            await response.write(line[: cut_after - sent])
                            assert request.transport is not None
                            request.transport.abort()
                            return response
                        await response.write(line)
                        sent += len(line)
                async with self._changed:
                    if next_ >= len(self.history):
                        await self._changed.wait()
                if next_ > len(self.history):
                    next_ = 0
        except (ConnectionResetError, asyncio.CancelledError):
            return response
        finally:
            self._watching.discard(task)

    def cut_watches(self) -> None:
        for task in list(self._watching):
            task.cancel()

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = request.path.split("/")[-2]
        try:
            raw: Piped | None = await self.exec(pod) if self.exec is not None else None
        except LookupError as error:  # a kubelet's words for a container that has ended
            return _status(500, "InternalError", f"container not found ({error})")
        if raw is None:
            return _status(404, "NotFound", f"pods {pod!r} not found")
        ws = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await ws.prepare(request)

        async def out() -> None:
            while data := await raw.recv():
                await ws.send_bytes(b"\1" + data)
            if raw.why:
                await ws.send_bytes(b"\2" + raw.why.encode())
            await ws.send_bytes(b"\3" + json.dumps({"status": "Success"}).encode())
            await ws.close()

        task = asyncio.ensure_future(out())
        try:
            async for message in ws:
                if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                    with contextlib.suppress(OSError):
                        await raw.send(message.data[1:])
        finally:
            await raw.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return ws


def _status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}
    return web.json_response(body, status=code, headers=headers)


def _matches(item: JSON, selector: str | None) -> bool:
    labels = item["metadata"].get("labels") or {}
    pairs = (part.partition("=") for part in (selector or "").split(",") if part)
    return all(labels.get(key) == value for key, _, value in pairs)


def _merged(item: JSON, patch: JSON) -> JSON:
    out = dict(item)
    for key, value in patch.items():
        out[key] = _merged(out.get(key) or {}, value) if isinstance(value, dict) else value
    return out


@asynccontextmanager
async def api_server() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    fake.put("/api/v1/namespaces", {"metadata": {"name": "rls"}})
    app = web.Application(client_max_size=8 << 20)
    app.router.add_route("*", "/{tail:.*}", fake.handle)

    async def date(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = formatdate(time.time() + fake.ahead_s, usegmt=True)

    app.on_response_prepare.append(date)
    async with served(app) as host:
        fake.url = f"http://{host}"
        try:
            yield fake
        finally:
            fake.cut_watches()


def stand_in_for_keeper(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the keeper's ConfigMap carries does not matter to whom no pod runs: nothing is compiled."""
    (place / "keeper").write_bytes(b"a keeper")
    monkeypatch.setattr(
        "rlsandbox.backends.kubernetes.cluster.keeper_binary", lambda arch, variant="": place / "keeper"
    )


def kubeconfig(url: str, *, namespace: str = "rls", token: str = "t") -> str:
    """The text of one, in JSON, which is YAML."""
    return json.dumps(
        {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        }
    )  # fmt: skip


class Pods:
    """Controller and kubelet: what becomes of claims and pods. Use as ``async with``."""

    EXT = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/rls"
    CORE = "/api/v1/namespaces/rls"

    def __init__(self, api: FakeApi, *, keepers: str | Callable[..., Any] = "") -> None:
        """*keepers*: what a pod's container is like (tests.support.container), or what makes one of arguments."""
        self.api, self.keepers = api, keepers
        self.status: Callable[[JSON], JSON | None] = lambda pod: None
        """Another status for a pod than Running and Ready."""
        self.containers: dict[str, tuple[Container, AsyncExitStack]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Pods:
        self.api.on_change.append(self._changed)
        if self.keepers:
            self.api.exec = self._exec
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.api.on_change.remove(self._changed)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=60)
        for _, stack in list(self.containers.values()):
            await stack.aclose()

    def _spawn(self, coro: Any) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self, kind: str, collection: str, item: JSON) -> None:
        name = item["metadata"]["name"]
        if collection == f"{self.EXT}/sandboxclaims":
            if kind == "ADDED":
                self._spawn(self._claimed(item))
            elif kind == "DELETED":
                self._spawn(self._ended(name))
        elif collection == f"{self.CORE}/pods" and kind == "ADDED" and "status" not in item:
            self._spawn(self._run(item))
        elif collection == f"{self.CORE}/pods" and kind == "DELETED":
            self._spawn(self._ended(name))

    async def _claimed(self, claim: JSON) -> None:
        name = claim["metadata"]["name"]
        pool = self.api.objects.get(f"{self.EXT}/sandboxwarmpools", {}).get(
            claim["spec"]["warmPoolRef"]["name"]
        )
        if pool is None:
            ready = {
                "type": "Ready",
                "status": "False",
                "reason": "WarmPoolNotFound",
                "message": "no such pool",
            }
            self.api.put(f"{self.EXT}/sandboxclaims", {**claim, "status": {"conditions": [ready]}})
            return
        made = self.api.objects[f"{self.EXT}/sandboxtemplates"][pool["spec"]["sandboxTemplateRef"]["name"]]
        labels = claim["spec"]["additionalPodMetadata"]["labels"]
        pod = {
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": made["spec"]["podTemplate"]["spec"],
        }
        self.api.put(f"{self.EXT}/sandboxclaims", {**claim, "status": {"sandbox": {"name": name}}})
        self.api.put(f"{self.CORE}/pods", pod)

    async def _run(self, pod: JSON) -> None:
        name = pod["metadata"]["name"]
        if self.keepers:
            args = list(pod["spec"]["containers"][0].get("args", ()))
            stack = AsyncExitStack()
            kind = self.keepers
            begun = container(kind, *args) if isinstance(kind, str) else kind(*args)
            made = await stack.enter_async_context(begun)
            held = self.containers[name] = (made, stack)
        if name not in self.api.objects.get(f"{self.CORE}/pods", {}):
            return
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        status = self.status(pod) or ready
        spec = {**pod["spec"], "nodeName": "node-1"}
        self.api.put(f"{self.CORE}/pods", {**pod, "spec": spec, "status": status})
        if self.keepers:
            # (another pod of that name may have come meanwhile)
            while self.containers.get(name) is held and made.process.poll() is None:
                await asyncio.sleep(0.05)
            if self.containers.get(name) is held and name in self.api.objects.get(f"{self.CORE}/pods", {}):
                ended = {"state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
                status = {"phase": "Failed", "containerStatuses": [ended]}
                self.api.put(f"{self.CORE}/pods", {**pod, "spec": spec, "status": status})

    async def _ended(self, name: str) -> None:
        self.api.drop(f"{self.CORE}/pods", name)
        held = self.containers.pop(name, None)
        if held is not None:
            await held[1].aclose()

    async def _exec(self, pod: str) -> Piped | None:
        held = self.containers.get(pod)
        return await dial(held[0]) if held is not None else None
