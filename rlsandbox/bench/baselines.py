"""What others do on the same cluster: a Job a rollout; or a claim a rollout and an exec call a command.

Both are measured as kindly as possible: one shared watch instead of a poll, the first byte instead of the
whole answer, everything for the pool's fill before the batch begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from ..backends.kubernetes import failures, manifests, names
from ..backends.kubernetes.api import JSON, Api, ApiError
from ..backends.kubernetes.exec import ExecStream
from ..backends.kubernetes.lease import RunLease
from ..backends.kubernetes.names import Paths
from ..backends.kubernetes.watch import Watch, condition
from ..errors import ImageError, SandboxError, UnsupportedError
from .ttfc import Batch, Plan, in_turn

BENCH = "rlsandbox-bench"
READY_S = 300.0
WAIT_S = 120.0


def container(image: str, command: list[str], pull_policy: str, runtime_class: str | None) -> JSON:
    """A pod's spec as anybody would write it."""
    pod: JSON = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": image, "imagePullPolicy": pull_policy, "command": command}],
    }
    return pod if runtime_class is None else {**pod, "runtimeClassName": runtime_class}


def labels(label: str) -> dict[str, str]:
    """By which what a killed benchmark left is found."""
    return {BENCH: label, names.MANAGED: "true", names.RUN: label, names.OWNER: names.owner()}


def job(name: str, label: str, pod: JSON) -> JSON:
    """docs/benchmarks.md shows it as YAML."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels(label)},
        "spec": {
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": {BENCH: label}},
                "spec": {**pod, "restartPolicy": "Never"},
            },
        },
    }


class Seen:
    """A watch whose objects can be waited for."""

    def __init__(self, api: Api, path: str, selector: str) -> None:
        self.uids: set[str] = set()
        self._watch = Watch(api, path, selector=selector, changed=self._changed)
        self._waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self.store = self._watch.store

    async def __aenter__(self) -> Seen:
        await self._watch.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._watch.close()

    def _changed(self, kind: str, item: JSON) -> None:
        self.uids.add(item["metadata"].get("uid", ""))
        for look, waits in list(self._waiting):
            if waits.done():
                continue
            try:
                if found := look():
                    waits.set_result(found)
            except SandboxError as error:
                waits.set_exception(error)

    async def until(self, look: Callable[[], Any], seconds: float, what: str) -> Any:
        """What *look* finds, once it finds something; it may raise when it never will."""
        found = look()
        if found:
            return found
        entry = (look, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(seconds):
                return await entry[1]
        except TimeoutError:
            raise SandboxError(f"{what}: not within {seconds:g} s", kind="bench_timeout") from None
        finally:
            self._waiting.remove(entry)


class Baselines:
    """Runs ``job`` and ``peer`` in a namespace."""

    def __init__(
        self, how: dict[str, Any], *, pull_policy: str, runtime_class: str | None, write_rate: float
    ) -> None:
        self._how, self._rate = how, write_rate
        self._pull_policy, self._runtime_class = pull_policy, runtime_class

    @contextlib.asynccontextmanager
    async def _api(self, batch: Batch) -> AsyncIterator[tuple[Api, Paths, str]]:
        """And a Lease, by which `rlsandbox reap` sees that what carries the label is still wanted."""
        api = await Api.connect(**self._how, write_rate=self._rate)
        paths, label = Paths(api.namespace), secrets.token_hex(4)
        lease = RunLease(api, paths.leases, label)
        try:
            await lease.begin()
            yield api, paths, label
        finally:
            await lease.end()
            batch.requests = Counter(api.requests)
            await api.close()

    async def check(self) -> None:
        """
        Raises:
            UnsupportedError: the cluster has no warm pools to be claimed from.
        """
        api = await Api.connect(**self._how)
        try:
            await api.get(f"/apis/{names.EXTENSIONS}/{names.VERSION}")
        except ApiError as error:
            if error.status != 404:
                raise
            raise UnsupportedError(
                f"scenario 'peer' needs agent-sandbox ({names.VERSION}), and {api.where} has none",
                phase="config", hint="--scenario job --scenario recycled ..., or install it",
            ) from error  # fmt: skip
        finally:
            await api.close()

    # -- a Job for each rollout ----------------------------------------------------------------------

    async def job(self, image: str, plan: Plan) -> Batch:
        batch, loop = Batch(), asyncio.get_running_loop()
        pod = container(image, list(plan.command), self._pull_policy, self._runtime_class)
        async with self._api(batch) as (api, paths, label):
            jobs = f"/apis/batch/v1/namespaces/{api.namespace}/jobs"
            async with Seen(api, paths.pods, f"{BENCH}={label}") as pods:

                async def one(i: int) -> None:
                    name, begun = f"{BENCH}-{label}-{i}", loop.time()
                    try:
                        await api.create(jobs, job(name, label, pod), limit=WAIT_S)
                        found = await pods.until(
                            lambda: _begun(pods.store, name), WAIT_S, f"the pod of {name}"
                        )
                        await _first_line(
                            api, f"{paths.pods}/{found}/log", WAIT_S, lambda: _ended(pods.store.get(found))
                        )
                        batch.ttfc_s.append(loop.time() - begun)
                        if plan.think:
                            await asyncio.sleep(plan.think)
                    except SandboxError as error:
                        batch.failures[error.kind] += 1
                    finally:
                        await api.delete(f"{jobs}/{name}", body=_BACKGROUND)

                begun = loop.time()
                await in_turn(plan.rollouts, plan.concurrency, one)
                batch.batch_s = loop.time() - begun
                batch.requests_during = Counter(api.requests)
                batch.sandboxes = len(pods.uids)
                await pods.until(lambda: not pods.store, READY_S, "the Jobs' pods are gone")
        return batch

    # -- a claim for each rollout, an exec call a command ---------------------------------------------

    async def peer(self, image: str, plan: Plan) -> Batch:
        batch, loop = Batch(), asyncio.get_running_loop()
        pod = container(image, ["sleep", "infinity"], self._pull_policy, self._runtime_class)
        async with self._api(batch) as (api, paths, label):
            name = f"{BENCH}-{label}"
            template = manifests.template(name, pod)
            template["spec"]["podTemplate"]["metadata"]["labels"][BENCH] = label
            pool = manifests.warm_pool(name, name, plan.pool_size)
            for made in (template, pool):
                made["metadata"]["labels"] |= labels(label)
            async with (
                Seen(api, paths.pods, f"{BENCH}={label}") as pods,
                Seen(api, paths.claims, f"{names.RUN}={label}") as claims,
            ):

                def ready() -> bool:
                    return sum(map(_ready, pods.store.values())) >= plan.pool_size

                begun = loop.time()
                await api.apply(f"{paths.templates}/{name}", template)
                await api.apply(f"{paths.warm_pools}/{name}", pool)
                try:
                    await pods.until(ready, READY_S, "the warm pool is ready")
                    batch.fill_s = loop.time() - begun
                    filled, begun = Counter(api.requests), loop.time()
                    peer = _Peer(api, paths, name, label, claims)
                    await in_turn(plan.rollouts, plan.concurrency, lambda i: peer.rollout(i, plan, batch))
                    batch.batch_s = loop.time() - begun
                    batch.requests_during = Counter(api.requests) - filled
                    batch.sandboxes = len(pods.uids)
                    await peer.commands(plan, batch)
                finally:
                    await api.delete(f"{paths.warm_pools}/{name}")
                    await api.delete(f"{paths.templates}/{name}")
                await pods.until(lambda: not pods.store, READY_S, "the warm pool's pods are gone")
        return batch


class _Peer:
    def __init__(self, api: Api, paths: Paths, pool: str, label: str, claims: Seen) -> None:
        self.api, self.paths, self.pool, self.label, self.claims = api, paths, pool, label, claims

    async def rollout(self, i: int, plan: Plan, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with self._claimed(f"r{i}") as pod:
                await self._run(pod, plan, lambda: batch.ttfc_s.append(loop.time() - begun))
                if plan.think:
                    await asyncio.sleep(plan.think)
        except (SandboxError, OSError) as error:
            batch.failures[getattr(error, "kind", "exec")] += 1

    async def commands(self, plan: Plan, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._claimed("commands") as pod:
                for number in range(min(plan.commands, 20) + 1):
                    begun = loop.time()
                    await self._run(pod, plan)
                    if number:
                        batch.command_s.append(loop.time() - begun)
        except (SandboxError, OSError) as error:
            batch.notes.append(f"further commands failed: {error}")

    @contextlib.asynccontextmanager
    async def _claimed(self, member: str) -> AsyncIterator[str]:
        name = f"{self.pool}-{member}"
        ends = self.api.now() + datetime.timedelta(hours=1)
        body = manifests.claim(name, self.pool, run=self.label, member=member, labels={}, ends=ends)
        try:
            await self.api.create(self.paths.claims, body, limit=WAIT_S)

            def bound() -> str:
                claim = self.claims.store.get(name) or {}
                there = condition(claim, "Ready").get("status") == "True"
                return (
                    str(((claim.get("status") or {}).get("sandbox") or {}).get("name") or "") if there else ""
                )

            yield await self.claims.until(bound, WAIT_S, f"claim {name} is ready")
        finally:
            await self.api.delete(f"{self.paths.claims}/{name}")

    async def _run(self, pod: str, plan: Plan, first: Callable[[], object] = lambda: None) -> None:
        """One exec call, to its end; *first* is told of the first byte."""
        stream = await ExecStream.open(self.api, pod, "main", list(plan.command))
        try:
            while await stream.recv():
                first()
                first = _nothing
        finally:
            await stream.close()
        if stream.why or first is not _nothing:
            raise SandboxError(f"exec in {pod}: {stream.why or 'it printed nothing'}", kind="exec")


def _nothing() -> None:
    return None


_BACKGROUND: JSON = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}


def _begun(pods: dict[str, JSON], job_name: str) -> str:
    """The pod of the Job whose container runs, or has run."""
    for name, pod in pods.items():
        labels = pod["metadata"].get("labels") or {}
        if labels.get("batch.kubernetes.io/job-name", labels.get("job-name")) == job_name:
            states = (pod.get("status") or {}).get("containerStatuses") or ()
            if any(row["state"].keys() & {"running", "terminated"} for row in states):
                return name
            _hopeful(pod)
    return ""


def _hopeful(pod: JSON) -> None:
    """
    Raises:
        ImageError: its image cannot be had, whatever one waits.
    """
    verdict = failures.of_pod(pod)
    if verdict is not None and isinstance(verdict.error, ImageError) and not verdict.error.retryable:
        raise verdict.error


def _ready(pod: JSON) -> bool:
    _hopeful(pod)
    return condition(pod, "Ready").get("status") == "True"


def _ended(pod: JSON | None) -> str:
    """How its container ended; empty while it has not."""
    for row in ((pod or {}).get("status") or {}).get("containerStatuses") or ():
        if how := (row.get("state") or {}).get("terminated"):
            said = " ".join(str(how.get("message") or how.get("reason") or "").split())
            return f"it ended with {how.get('exitCode')}" + (f" ({said})" if said else "")
    return "" if pod is not None else "its pod is gone"


async def _first_line(api: Api, path: str, seconds: float, ended: Callable[[], str]) -> None:
    try:
        async with asyncio.timeout(seconds):
            while True:
                how = ended()
                response = await api.stream(path, {"follow": "true"}, silent_s=seconds)
                try:
                    if await response.content.readany():
                        return
                finally:
                    response.close()
                if how:
                    raise SandboxError(f"a Job's command printed nothing: {how}", kind="exec")
                await asyncio.sleep(0.01)  # it has not come from the container's runtime yet
    except (TimeoutError, OSError, aiohttp.ClientError) as error:
        raise SandboxError(f"a Job's first line did not come: {error!r}", kind="bench_timeout") from error
