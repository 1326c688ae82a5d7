"""What the cluster says of pods in events only: a kubelet that cannot begin with one tells nobody else."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ...errors import ProvisionError, SandboxError
from .api import JSON, Api
from .names import Paths

log = logging.getLogger("rlsandbox.kubernetes")

PATIENCE_S = 10.0
"""For which a kubelet may try again: addresses that ran out, a volume that comes."""
_BEGINS = ("FailedCreatePodSandBox", "FailedMount", "FailedAttachVolume", "FailedCreatePodContainer")
_SELECTED = "type=Warning,involvedObject.kind=Pod,reason!=FailedScheduling,reason!=BackOff,reason!=Unhealthy"


class Events:
    """Those of one namespace, as far as they may be read."""

    def __init__(self, api: Api) -> None:
        self._api, self._path = api, Paths(api.namespace).events
        self._failing: dict[str, tuple[float, str, str]] = {}
        """By pod: since when it has been seen not to begin, and why."""

    async def of(self, name: str) -> list[str]:
        """What was said of an object, newest last; empty where that may not be read."""
        rows = await self._read({"fieldSelector": f"involvedObject.name={name}"})
        rows = [row for row in rows if row.get("type") == "Warning"]
        return [f"{row.get('reason')}: {_words(row)}" for row in rows]

    async def look(self) -> None:
        """See which pods do not begin: one request, for all of them."""
        rows = await self._read({"fieldSelector": _SELECTED, "limit": "500"})
        now, seen = asyncio.get_running_loop().time(), self._failing
        self._failing = {}
        for row in rows:
            if row.get("reason") in _BEGINS:
                name = str(row["involvedObject"].get("name"))
                since = seen.get(name, (now, "", ""))[0]
                self._failing[name] = since, str(row["reason"]), _words(row)

    def verdict(self, pod: JSON) -> ProvisionError | None:
        """Why nothing comes of a pod that is on a node, of which no container has begun."""
        since, reason, said = self._failing.get(pod["metadata"]["name"], (0.0, "", ""))
        status = pod.get("status") or {}
        begun = any(
            "waiting" not in (row.get("state") or {}) for row in status.get("containerStatuses") or ()
        )
        if not reason or begun or asyncio.get_running_loop().time() - since < PATIENCE_S:
            return None
        node = pod.get("spec", {}).get("nodeName")
        no_handler = "no runtime for" in said or "is not known" in said
        hint = ""
        if no_handler:
            hint = "the RuntimeClass names a handler that the node's runtime does not have"
        elif "user namespace" in said:
            hint = 'the node cannot give pods user namespaces: Kubernetes(mode="userns") or "replace"'
        return ProvisionError(
            f"the pod could not be started{f' on node {node}' if node else ''}: {reason}: {said}",
            kind="no_runtime_class" if no_handler else "pod_start",
            sandbox=pod["metadata"]["name"], hint=hint,
        )  # fmt: skip

    async def _read(self, query: dict[str, str]) -> list[dict[str, Any]]:
        try:
            found = await self._api.get(self._path, query, timeout=5)
        except SandboxError as error:
            log.debug("events may not be read: %s", error)
            return []
        rows: list[dict[str, Any]] = found.get("items") or []
        return sorted(rows, key=lambda row: row.get("lastTimestamp") or row.get("eventTime") or "")


def _words(row: dict[str, Any]) -> str:
    return " ".join((row.get("message") or "").split())
