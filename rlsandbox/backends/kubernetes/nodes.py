"""What is known of nodes: which may take sandboxes, of which nothing is heard, which is being cleared.

Seeing nodes takes a right of its own (``rlsandbox template rbac``, the ClusterRole). Without it a pod's own
condition Ready, which the cluster takes away when its node is not heard of, is all there is, and there is
nothing to choose from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from .api import JSON, Api, ApiError
from .manifests import ARCH, Shape
from .watch import Watch, condition

log = logging.getLogger("rlsandbox.kubernetes")

PATH = "/api/v1/nodes"
CLEARED_BY = ("ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption")


class Nodes:
    """One watch of all nodes. *changed* is called with a node's name."""

    def __init__(self, api: Api, changed: Callable[[str], object]) -> None:
        self._watch = Watch(api, PATH, selector="", changed=lambda _, node: changed(node["metadata"]["name"]))
        self.seen = False
        """Whether they may be looked at."""

    async def start(self) -> None:
        try:
            await self._watch.start()
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            log.debug("nodes may not be looked at: %s", error)
        else:
            self.seen = True

    async def close(self) -> None:
        await self._watch.close()

    def state(self, name: str) -> tuple[str, str]:
        """``away`` or ``leaving`` and why; both empty of a node that is as it should be (or unknown)."""
        node = self._watch.store.get(name) if self.seen else None
        if node is None:
            return "", ""
        why = _cleared(node)
        if why:
            return "leaving", f"node {name} is being cleared: {why}"
        ready = condition(node, "Ready")
        if ready.get("status") != "True":
            said = " ".join((ready.get("message") or ready.get("reason") or "").split())
            return "away", f"node {name} is not ready" + (f": {said}" if said else "")
        return "", ""

    def usable(self, shape: Shape) -> tuple[str, ...]:
        """Those on which a pod of this shape may be put now."""
        if not self.seen:
            return ()
        wanted = {"kubernetes.io/arch": ARCH[shape.arch], **shape.node_selector}
        return tuple(
            sorted(
                name
                for name, node in self._watch.store.items()
                if self.state(name) == ("", "")
                and wanted.items() <= (node["metadata"].get("labels") or {}).items()
                and all(tolerated(taint, shape.tolerations) for taint in taints(node))
            )
        )


def taints(node: Mapping[str, Any]) -> list[JSON]:
    """Those that keep pods away."""
    rows: list[JSON] = (node.get("spec") or {}).get("taints") or []
    return [taint for taint in rows if taint.get("effect") in ("NoSchedule", "NoExecute")]


def _cleared(node: JSON) -> str:
    if (node.get("spec") or {}).get("unschedulable"):
        return "it was cordoned"
    for taint in taints(node):
        if taint["key"] in CLEARED_BY:
            return f"taint {taint['key']}"
    return ""


def tolerated(taint: JSON, tolerations: Any) -> bool:
    """Whether one of a pod's *tolerations* answers the taint."""
    for row in tolerations:
        if row.get("effect") not in (None, "", taint["effect"]):
            continue
        if row.get("operator") == "Exists":
            if row.get("key") in (None, "", taint["key"]):
                return True
        elif row.get("key") == taint["key"] and (row.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def pod_state(pod: JSON) -> tuple[str, str]:
    """The same, as far as a pod that runs tells it."""
    ready = condition(pod, "Ready")
    if ready.get("status") in ("False", "Unknown"):
        node = (pod.get("spec") or {}).get("nodeName") or "?"
        said = " ".join((ready.get("message") or ready.get("reason") or "").split())
        return "away", f"its pod on node {node} is not ready" + (f": {said}" if said else "")
    return "", ""
