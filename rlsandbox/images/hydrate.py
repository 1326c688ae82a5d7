"""A plan carried out: short pods bring images to nodes, at a bounded rate, and are removed again.

A pod's only program is the keeper, which runs in any image and ends at once. Everything carries the run's
labels and has a Lease, so that ``rlsandbox reap`` finds what a killed run left.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._loops import see_through
from ..errors import ConfigError, ImageError, ProvisionError, SandboxError
from .plan import Pull

if TYPE_CHECKING:
    from ..backends.kubernetes.api import Api
    from ..backends.kubernetes.manifests import Shape

log = logging.getLogger("rlsandbox.images")

PER_NODE, AT_ONCE, TIMEOUT_S = 2, 32, 900.0


@dataclass(frozen=True)
class Hydrated:
    """How one image came to one node; ``error``: why it did not."""

    pull: Pull
    seconds: float
    error: SandboxError | None = None


@dataclass
class Hydration:
    """The outcome of :func:`hydrate`."""

    rows: list[Hydrated] = field(default_factory=list)
    seconds: float = 0.0
    requests: int = 0

    @property
    def failed(self) -> list[Hydrated]:
        return [row for row in self.rows if row.error is not None]

    @property
    def bytes(self) -> int:
        return sum(row.pull.bytes for row in self.rows if row.error is None)


async def hydrate(
    pulls: Sequence[Pull],
    api: Api,
    shape: Shape,
    *,
    per_node: int = PER_NODE,
    at_once: int = AT_ONCE,
    timeout: float = TIMEOUT_S,
    told: Callable[[Hydrated], object] | None = None,
) -> Hydration:
    """Bring *pulls* to their nodes, in their order.

    Args:
        pulls: of one wave: :meth:`Plan.missing`.
        api: of the cluster; its write rate bounds how fast pods are made.
        shape: of the pods: tolerations, pull secrets and so on are those of sandboxes.
        per_node: pulls at once on one node.
        at_once: pulls at once on all.
        timeout: seconds for one image on one node.
        told: called with each as it ends.

    Raises:
        SandboxError: the cluster does not let pods be made at all.
    """
    for name, value in (("per_node", per_node), ("at_once", at_once)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    work = _Work(api, shape, timeout)
    began = time.monotonic()
    report = Hydration()
    async with work:
        queues: dict[str, list[Pull]] = defaultdict(list)
        for pull in pulls:
            queues[pull.node].append(pull)
        slots = asyncio.Semaphore(at_once)

        async def lane(queue: list[Pull]) -> None:
            while queue:
                pull = queue.pop(0)
                async with slots:
                    row = await work.one(pull)
                report.rows.append(row)
                if told is not None:
                    told(row)

        async with asyncio.TaskGroup() as group:
            for queue in queues.values():
                for _ in range(min(per_node, len(queue))):
                    group.create_task(lane(queue))
    report.seconds = time.monotonic() - began
    report.requests = sum(count for verb, count in api.requests.items() if verb.isupper())
    return report


class _Work:
    """Pods of one hydration: made, watched, removed."""

    def __init__(self, api: Api, shape: Shape, timeout: float) -> None:
        from ..backends.kubernetes import names
        from ..backends.kubernetes.cluster import Cluster, default_run
        from ..backends.kubernetes.watch import Watch

        self.api, self.shape, self.timeout = api, shape, timeout
        self.run = f"hydrate-{default_run()}"
        self.cluster = Cluster(api, shape, self.run)
        self.paths = self.cluster.paths
        self.watch = Watch(
            api, self.paths.pods, selector=f"{names.POD_RUN}={self.run}", changed=self._changed
        )
        self._ends: dict[str, asyncio.Future[JSON]] = {}
        self._number = 0
        self._no_right: SandboxError | None = None
        """Pods may not be made at all: it is no use to try that with each image."""
        self._refused: dict[str, str] = {}
        """By pod: why there is no room for it yet."""
        self._asked: set[tuple[str, str]] = set()
        """What pods ask for because a quota of the namespace demands it: ``("limits", "cpu")`` ..."""

    async def __aenter__(self) -> _Work:
        await self.cluster.lease.begin()
        try:
            await self.watch.start()
        except BaseException:
            await _in_any_case(self.cluster.close())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await _in_any_case(self._end())

    async def _end(self) -> None:
        await self.watch.close()
        await self.cluster.close()

    async def one(self, pull: Pull) -> Hydrated:
        if self._no_right is not None:
            return Hydrated(pull, 0.0, self._no_right)
        began = time.monotonic()
        self._number += 1
        name = f"rlsandbox-{self.run}-{self._number}"
        error: SandboxError | None = None
        try:
            async with asyncio.timeout(self.timeout):
                await self._pull(name, pull)
        except TimeoutError:
            error = ImageError(
                f"image {pull.image} was not on node {pull.node} after {self.timeout:.0f} s"
                + self._last_word(name, pull.image),
                kind="image_pull", retryable=True, infrastructure=True,
            )  # fmt: skip
        except SandboxError as failure:
            error = failure
        finally:
            self._ends.pop(name, None)
            await _in_any_case(self.api.delete(f"{self.paths.pods}/{name}", limit=30))
        return Hydrated(pull, time.monotonic() - began, error)

    async def _pull(self, name: str, pull: Pull) -> None:
        from ..backends.kubernetes.api import ApiError

        keeper = await self.cluster.keeper()
        ended: asyncio.Future[JSON] = asyncio.get_running_loop().create_future()
        self._ends[name] = ended
        delay = _FIRST_S
        while True:
            asked = set(self._asked)
            try:
                await self.api.create(self.paths.pods, self._pod(name, pull, keeper), limit=self.timeout)
                break
            except ApiError as error:
                if "exceeded quota" in error.message:  # others' pods end, and ours: it waits for its turn
                    self._refused[name] = error.message
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(delay * 2, _LONGEST_S)
                    continue
                if self._demanded(error.message) - asked:
                    continue
                failed = ProvisionError(
                    f"a pod on node {pull.node} could not be made: {error.message}", kind=error.kind,
                    retryable=error.retryable, hint=error.hint or _RIGHTS,
                )  # fmt: skip
                if "cannot create resource" in error.message:
                    self._no_right = failed
                raise failed from error
        self._refused.pop(name, None)
        await ended

    def _demanded(self, message: str) -> set[tuple[str, str]]:
        """What a quota wants pods to ask for; from now on they do."""
        found = _MUST.findall(message.partition("must specify")[2])
        wanted = {(kind or "requests", what) for kind, what in found}
        self._asked |= wanted
        return wanted

    def _changed(self, what: str, pod: JSON) -> None:
        """By the watch: has this pod's image come?"""
        from ..backends.kubernetes import failures

        ended = self._ends.get(pod["metadata"]["name"])
        if ended is None or ended.done():
            return
        status = pod.get("status") or {}
        if what == "gone":
            ended.set_exception(
                ProvisionError(
                    f"pod {pod['metadata']['name']} was removed by somebody else", kind="pod_removed"
                )
            )
            return
        for row in status.get("containerStatuses") or ():
            state = row.get("state") or {}
            died = state.get("terminated")
            ran = state.get("running") or (died and died.get("reason") != _NEVER_RAN)
            if ran or row.get("imageID"):
                ended.set_result(pod)  # what is run in an image is there
                return
        if status.get("phase") in ("Succeeded", "Failed"):
            said = " ".join(str(status.get("message") or status.get("reason") or status["phase"]).split())
            ended.set_exception(ProvisionError(f"its pod ended without it: {said}", kind="pod_ended"))
            return
        verdict = failures.of_pod(pod, pod["spec"]["containers"][0]["image"])
        if verdict is not None and (not verdict.error.retryable or verdict.error.kind == "unschedulable"):
            ended.set_exception(verdict.error)

    def _last_word(self, name: str, image: str) -> str:
        from ..backends.kubernetes import failures

        if name in self._refused:
            return f": {self._refused.pop(name)}"
        pod = self.watch.store.get(name)
        verdict = failures.of_pod(pod, image) if pod is not None else None
        return f": {verdict.error.message}" if verdict is not None else ""

    def _pod(self, name: str, pull: Pull, config_map: str) -> JSON:
        from ..backends.kubernetes import names

        shape = self.shape
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [pull.node]}]}
        spec: JSON = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "dnsPolicy": "Default",
            "activeDeadlineSeconds": max(int(self.timeout), 1),
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
                }
            },
            "containers": [
                {
                    "name": "image",
                    "image": pull.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [f"{names.KEEPER_DIR}/keeper", "version"],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "runAsNonRoot": True,
                        "runAsUser": 65534,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "volumeMounts": [
                        {"name": names.KEEPER_VOLUME, "mountPath": names.KEEPER_DIR, "readOnly": True}
                    ],
                }
            ],
            "volumes": [
                {"name": names.KEEPER_VOLUME, "configMap": {"name": config_map, "defaultMode": 0o555}}
            ],
        }
        for kind, what in self._asked:
            spec["containers"][0].setdefault("resources", {}).setdefault(kind, {})[what] = _LITTLE[what]
        if shape.tolerations:
            spec["tolerations"] = [dict(row) for row in shape.tolerations]
        if shape.pull_secrets:
            spec["imagePullSecrets"] = [{"name": secret} for secret in shape.pull_secrets]
        labels = {
            names.MANAGED: "true",
            names.RUN: self.run,
            names.POD_RUN: self.run,
            names.OWNER: names.owner(),
        }
        return {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec,
        }  # fmt: skip


JSON = dict[str, Any]
_FIRST_S, _LONGEST_S = 0.5, 10.0
_NEVER_RAN = "ContainerStatusUnknown"
"""What a kubelet says of the containers of a pod that it gave up, also of those that it never started."""
_LITTLE = {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "16Mi"}
_MUST = re.compile(r"(?:(requests|limits)\.)?(cpu|memory|ephemeral-storage) for:")
_RIGHTS = "hydration makes and removes pods: bind the role rlsandbox-plain-pods of `rlsandbox template rbac`"


async def _in_any_case(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Also when we are cancelled meanwhile: what was made is removed. What cannot be, `reap` finds."""
    task = asyncio.ensure_future(coroutine)
    cancelled = await see_through(task)
    if (error := task.exception()) is not None:
        if not isinstance(error, SandboxError):
            raise error
        log.warning("what the hydration made could not be removed: %s", error)
    if cancelled is not None:
        raise cancelled
