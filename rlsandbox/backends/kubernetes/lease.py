"""A run's Lease, by which others see that it lives; and the removal of what dead runs left."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import random
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from ...errors import SandboxError
from . import names
from .api import JSON, Api, ApiError
from .names import Paths
from .tidy import PROCESS, this_process

log = logging.getLogger("rlsandbox.kubernetes")

DURATION_S = 120
RENEW_S, AGAIN_S = 30.0, 5.0
"""Between renewals, and before another try of one that failed."""
LATELY_S, SECOND_LOOK_S = 3600.0, 45.0
"""After an outage of the API server the Leases of all runs have run out. Those that did lately are looked at
again after so long, in which a run that lives has renewed its own."""
_OF_BENCHMARKS = frozenset(["SandboxWarmPool", "SandboxTemplate", "Job"])
YOUNG_S = 120.0
"""What is younger may belong to a run that is just beginning."""


class RunLease:
    """Renewed while the run lives, removed at its end. That it cannot be renewed for a while ends nothing."""

    def __init__(self, api: Api, path: str, run: str) -> None:
        self.name = f"rlsandbox-{run}"
        self._api, self._path, self._run = api, path, run
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self.name,
                "labels": {names.MANAGED: "true", names.RUN: self._run, names.OWNER: names.owner()},
                "annotations": {PROCESS: this_process()},
            },
            "spec": {
                "holderIdentity": f"{names.owner()}.{os.getpid()}",
                "leaseDurationSeconds": DURATION_S,
                "acquireTime": self._now(),
                "renewTime": self._now(),
            },
        }
        await self._api.create(self._path, body)
        self._task = asyncio.get_running_loop().create_task(
            self._renew(), name="rlsandbox: renew the run's lease"
        )

    def _now(self) -> str:
        """By the clock by which it is judged, however wrong this machine's is."""
        return self._api.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    async def _renew(self) -> None:
        wait = RENEW_S
        while True:
            await asyncio.sleep(wait * random.uniform(0.8, 1.0))
            wait = AGAIN_S
            try:
                await self._api.merge(
                    f"{self._path}/{self.name}", {"spec": {"renewTime": self._now()}}, limit=RENEW_S
                )
            except SandboxError as error:
                log.warning("the run's lease could not be renewed: %s", error)
            else:
                wait = RENEW_S

    async def end(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with contextlib.suppress(SandboxError):  # it runs out by itself
            await self._api.delete(f"{self._path}/{self.name}", limit=5)


@dataclass(frozen=True)
class Leftover:
    """Something of a run that does not live any more."""

    kind: str
    name: str
    run: str
    owner: str
    age_s: float
    path: str


async def leftovers(api: Api, *, older_s: float = 0.0) -> list[Leftover]:
    """What dead runs left in the namespace. Only what carries our labels is looked at.

    A run is dead when its Lease has run out by the API server's own clock, or is not there although the
    object is older than two minutes. Where one ran out lately this takes a while.
    """

    paths = Paths(api.namespace)
    now = await server_time(api)
    leases = await _ours(api, "Lease", paths.leases)
    if any(has_run_out(row, now) and not has_run_out(row, now, since=LATELY_S) for row in leases):
        log.warning("a Lease ran out lately: in %g s it is seen whether its run lives", SECOND_LOOK_S)
        await asyncio.sleep(SECOND_LOOK_S)
        now = await server_time(api)
        leases = await _ours(api, "Lease", paths.leases)
    alive = {_label(row, names.RUN) for row in leases if not has_run_out(row, now)}
    found = [
        leftover("Lease", row, paths.leases, now) for row in leases if _label(row, names.RUN) not in alive
    ]
    for kind, path in _kinds(paths):
        for row in await _ours(api, kind, path):
            run = _label(row, names.RUN)
            if not run or run in alive or row["metadata"].get("deletionTimestamp"):
                continue
            one = leftover(kind, row, path, now)
            if one.age_s >= YOUNG_S or any(_label(lease, names.RUN) == run for lease in leases):
                found.append(one)
    return [one for one in found if one.age_s >= older_s]


async def of_runs(api: Api, runs: set[str]) -> list[Leftover]:
    """Everything of these runs."""

    paths = Paths(api.namespace)
    now = await server_time(api)
    found: list[Leftover] = []
    for kind, path in (*_kinds(paths), ("Lease", paths.leases)):
        rows = await _ours(api, kind, path)
        found += [leftover(kind, row, path, now) for row in rows if _label(row, names.RUN) in runs]
    return found


async def reap(api: Api, found: list[Leftover]) -> tuple[list[Leftover], list[Leftover]]:
    """Remove them, the Leases last; those that are gone, and those that could not be removed."""
    gone: list[Leftover] = []
    kept: list[Leftover] = []
    for one in sorted(found, key=lambda one: one.kind == "Lease"):  # else as they were found
        if one.kind == "Lease" and any(other.run == one.run for other in kept):
            kept.append(one)
            continue
        try:
            await api.delete(f"{one.path}/{one.name}")
            gone.append(one)
        except SandboxError as error:
            log.warning("%s %s could not be removed: %s", one.kind, one.name, error)
            kept.append(one)
    return gone, kept


async def server_time(api: Api) -> datetime.datetime:
    """The API server's clock: leases are not judged by this machine's."""
    response = await api.stream("/version", {}, silent_s=10)
    try:
        date = response.headers.get("Date")
    finally:
        response.close()
    return parsedate_to_datetime(date) if date else datetime.datetime.now(datetime.UTC)


def _kinds(paths: Paths) -> tuple[tuple[str, str], ...]:
    """What runs make, in the order in which it is removed: what makes others first."""
    return (
        ("SandboxWarmPool", paths.warm_pools),  # these three: of benchmarks, which label them with their run
        ("SandboxTemplate", paths.templates),
        ("Job", paths.jobs),
        ("SandboxClaim", paths.claims),
        ("Pod", paths.pods),
    )


async def listed(api: Api, path: str, *, ours: bool = False) -> list[JSON]:
    """All of a kind, or those that carry our label; none where there are no CRDs."""
    try:
        return await api.list(path, {"labelSelector": f"{names.MANAGED}=true"} if ours else {})
    except ApiError as error:
        if error.status == 404 and path.startswith(f"/apis/{names.EXTENSIONS}/"):
            return []
        raise


async def _ours(api: Api, kind: str, path: str) -> list[JSON]:
    """Those that carry our label; none where there is no right to these."""
    try:
        return await listed(api, path, ours=True)
    except ApiError as error:
        if kind in _OF_BENCHMARKS and error.status == 403:
            return []
        raise


def _label(row: JSON, name: str) -> str:
    return str((row["metadata"].get("labels") or {}).get(name, ""))


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def has_run_out(lease: JSON, now: datetime.datetime, since: float = 0.0) -> bool:
    """Whether it has, *since* so many seconds."""
    spec = lease.get("spec") or {}
    renewed = _time(spec.get("renewTime") or lease["metadata"]["creationTimestamp"])
    return (now - renewed).total_seconds() > float(spec.get("leaseDurationSeconds") or DURATION_S) + since


def leftover(kind: str, row: JSON, path: str, now: datetime.datetime) -> Leftover:
    """An object as it lies there."""
    meta = row["metadata"]
    age = (now - _time(meta["creationTimestamp"])).total_seconds()
    return Leftover(kind, meta["name"], _label(row, names.RUN), _label(row, names.OWNER), age, path)
