"""Faults on demand: answers of the API server and the registry that go wrong, cut streams, lost nodes and pods.

Killing, pausing and restarting of parts is in handle.py. Rules are obeyed by the doors "api" and "registry": a client
that comes in by "direct" does not feel them.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tests.cluster.handle import ClusterError, Handle
from tests.cluster.kube import ApiError, pods, until

WATCH = "(.*&)?watch=(true|1)(&.*)?"
WHICH = {"door", "method", "path", "query", "agent", "skip", "times"}
WHAT = {"delay", "hang", "status", "reason", "message", "headers", "cut", "after", "cut_at", "rate", "gone"}


@dataclass(frozen=True)
class Request:
    """One request that came through a door that looks at requests."""

    n: int
    time: float
    door: str
    method: str
    path: str
    query: str
    agent: str
    status: int  # 0: none yet, or cut off before one
    rule: int  # which rule acted on it; 0: none
    seconds: float
    open: bool

    @property
    def verb(self) -> str:
        """As RBAC calls it, as far as a request shows."""
        if self.method == "GET":
            return "watch" if re.fullmatch(WATCH, self.query) else "get"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(
            self.method, self.method
        )


class Faults:
    """The control socket of the doors, and what goes wrong elsewhere, of one cluster."""

    def __init__(self, cluster: Handle) -> None:
        self.cluster = cluster

    # -- answers

    def add(self, **rule: Any) -> int:
        """Set a rule; its number. Patterns (door, method, path, query, agent) are regular expressions for the whole.

        *skip* requests pass first, then it acts on *times* (0: all). What it does: *delay* seconds; *hang* until it is
        removed; *status* with *reason*, *message*, *headers*; *cut* the connection; *after*: only once the target has
        done it; *cut_at* so many bytes of the answer; *rate* of the answer in bytes a second; *gone*: a watch's 410.
        """
        if wrong := set(rule) - WHICH - WHAT:
            raise ValueError(f"no such thing in a rule: {', '.join(sorted(wrong))}")
        number: int = self._ask("POST", "/rules", rule)["id"]
        return number

    def remove(self, number: int | None = None) -> None:
        """Take a rule away, or all of them; what hangs goes on."""
        self._ask("DELETE", "/rules" + ("" if number is None else f"?id={number}"))

    def rules(self) -> list[dict[str, Any]]:
        """All that are set, with their ``hits``."""
        found: list[dict[str, Any]] = self._ask("GET", "/rules")
        return found

    def hits(self, number: int) -> int:
        """On how many requests a rule has acted."""
        for rule in self.rules():
            if rule["id"] == number:
                return int(rule["hits"])
        raise LookupError(f"no rule {number}")

    @contextmanager
    def rule(self, **rule: Any) -> Iterator[int]:
        """A rule for the time of a block."""
        number = self.add(**rule)
        try:
            yield number
        finally:
            self.remove(number)

    def too_many(self, path: str = ".*", *, retry_after: int = 1, times: int = 0, **more: Any) -> int:
        """429 with Retry-After."""
        said = {"reason": "TooManyRequests", "message": "too many requests, please try again later"}
        headers = {"Retry-After": str(retry_after)}
        return self.add(door="api", path=path, status=429, headers=headers, times=times, **said, **more)

    def failing(self, status: int = 503, path: str = ".*", *, times: int = 0, **more: Any) -> int:
        """5xx, before anything is done."""
        return self.add(door="api", path=path, status=status, times=times, **more)

    def lost_answer(
        self, method: str = "POST", path: str = ".*", *, status: int = 504, times: int = 1
    ) -> int:
        """It is done, and the client hears 504 (*status* 0: its connection ends)."""
        what: dict[str, Any] = {"status": status, "reason": "Timeout"} if status else {"cut": True}
        return self.add(door="api", method=method, path=path, after=True, times=times, **what)

    def slow(self, seconds: float, path: str = ".*", **more: Any) -> int:
        """Each answer begins so much later."""
        return self.add(door="api", path=path, delay=seconds, **more)

    def watch_gone(self, path: str = ".*", *, times: int = 1) -> int:
        """The next watch is told that the version it starts from is no longer there (410)."""
        return self.add(door="api", path=path, query=WATCH, gone=True, times=times)

    def registry(self, repository: str = ".*", **more: Any) -> int:
        """For pulls of a repository: *status* 401, 404, 429; *rate*; *cut_at* ..."""
        return self.add(door="registry", path=f"/v2/{repository}/(manifests|blobs)/.*", **more)

    # -- connections

    def cut(self, *, door: str = "api", path: str = ".*", query: str = "", agent: str = "") -> int:
        """End the connections of requests that are not answered whole; how many there were."""
        words = {"door": door, "path": path, "query": query, "agent": agent}
        cut: int = self._ask("POST", f"/cut?{urlencode(words)}")["cut"]
        return cut

    def cut_watches(self, path: str = ".*") -> int:
        return self.cut(path=path, query=WATCH)

    def cut_exec(self, namespace: str = "[^/]+", pod: str = "[^/]+") -> int:
        """End the exec streams into a pod (patterns)."""
        return self.cut(path=f"/api/v1/namespaces/{namespace}/pods/{pod}/(exec|attach|portforward)")

    def requests(self, since: int = 0) -> list[Request]:
        """What came through the doors that look at requests, oldest first, after number *since*."""
        return [Request(**entry) for entry in self._ask("GET", f"/requests?since={since}")["requests"]]

    def count(self) -> int:
        """The number of the newest request: what *since* wants."""
        number: int = self._ask("GET", f"/requests?since={1 << 60}")["count"]
        return number

    # -- pods and nodes

    def delete_pods(self, namespace: str, selector: str = "") -> int:
        """Delete pods behind the back of whoever holds them, without grace; how many."""
        kube = self.cluster.kube()
        query = {"labelSelector": selector} if selector else {}
        found = kube.items(pods(namespace), **query)
        return sum(kube.delete(pods(namespace, pod["metadata"]["name"]), grace=0) for pod in found)

    def cordon(self, node: str, on: bool = True) -> None:
        self.cluster.kube().patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": on}})

    def drain(self, node: str, namespace: str | None = None, seconds: float = 60) -> int:
        """Cordon a node and evict its pods (those of a namespace), as kubectl drain does; how many."""
        self.cordon(node)
        kube = self.cluster.kube()
        path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        evicted = 0
        for pod in kube.items(path, fieldSelector=f"spec.nodeName={node}"):
            name, where = pod["metadata"]["name"], pod["metadata"]["namespace"]
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": where},
            }

            def evict(
                path: str = pods(where, name) + "/eviction", body: Mapping[str, Any] = eviction
            ) -> bool:
                try:
                    kube.create(path, dict(body))
                except ApiError as error:
                    if error.status == 404:
                        return True
                    raise
                return True

            until(f"{name} may be evicted", evict, seconds, 0.2)
            evicted += 1
        return evicted

    @contextmanager
    def lost_node(self, node: str) -> Iterator[None]:
        """The node's kubelet is stopped for the time of a block: its pods run on, and nobody hears of them."""
        self.cluster.pause(f"kubelet-{node}")
        try:
            yield
        finally:
            self.cluster.resume(f"kubelet-{node}")

    def remove_image(self, node: str, image: str) -> None:
        """Take an image from a node under all its names, so that the next pod there has to pull it again.

        Layers that other images of the node have too stay; an image that is not there is none to remove.
        """
        rows = [line.split() for line in self.cluster.ctr(node, "images", "ls").splitlines()[1:]]
        digests = {row[2] for row in rows if row[0] == image}
        names = [row[0] for row in rows if row[2] in digests]
        if names:
            self.cluster.ctr(node, "images", "rm", "--sync", *names)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(10)
            try:
                plain.connect(str(self.cluster.state / "doors.sock"))
            except OSError as error:
                raise ClusterError(f"the doors do not answer ({error})") from None
            connection = http.client.HTTPConnection("doors")
            connection.sock = plain
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            said = answer.read()
        if answer.status != 200:
            raise ClusterError(f"doors: {said.decode().strip()}")
        return json.loads(said)
