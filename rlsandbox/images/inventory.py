"""What the nodes of a Kubernetes cluster have, from node status and pods; what their disks can still take.

With the right to ``nodes/proxy`` the kubelets themselves are asked for disk figures and thresholds; without
it the node's status is all there is, and that is said.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..backends.kubernetes.nodes import taints, tolerated
from ..errors import SandboxError
from ..spec import Spec
from .model import Inventory, Node

if TYPE_CHECKING:
    from ..backends.kubernetes.api import Api

JSON = Mapping[str, Any]
GC_PERCENT = 85
"""Of the disk: where kubelets begin to remove images when nobody has set it otherwise."""
LISTED = 50
"""Images that a kubelet names in its node's status when nobody has set it otherwise."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "m": 1e-3}
_UNITS |= {f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGTP", 1)}
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([kMGTPm]|[KMGTP]i)?\Z")
_STREAMING = ("stargz", "soci", "nydus", "overlaybd", "image-streaming", "gcfs")
_PULLS_AT_ONCE = 8


async def read_inventory(
    api: Api,
    *,
    spec: Spec | None = None,
    selector: str = "",
    arch: str = "",
    tolerations: Sequence[JSON] = (),
    ask_kubelets: bool = True,
) -> Inventory:
    """The nodes of *api*'s cluster.

    Args:
        spec: of the sandboxes: how many a node can run goes by what it asks for.
        selector: only nodes with these labels (``pool=sandboxes,disk=ssd``).
        arch: of the sandboxes (``amd64`` ..): nodes of another one are not used.
        tolerations: of the sandboxes' pods: nodes with other taints are not used.
        ask_kubelets: for disk figures, where that is allowed.

    Raises:
        SandboxError: nodes may not be listed (that needs a ClusterRole), the API server does not answer ...
    """
    rows = await api.list("/api/v1/nodes", {"labelSelector": selector} if selector else {})
    notes: list[str] = []
    try:
        pods = await api.list(
            "/api/v1/pods", {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
        )
    except SandboxError as error:
        if getattr(error, "status", 0) != 403:
            raise
        pods = await api.list(f"/api/v1/namespaces/{api.namespace}/pods", {})
        notes.append(
            "pods of other namespaces may not be listed (needs: list pods): what they use is not known"
        )
    running: dict[str, list[JSON]] = defaultdict(list)
    for pod in pods:
        running[pod.get("spec", {}).get("nodeName") or ""].append(pod)
    asked = [row["metadata"]["name"] for row in rows if not _why_not(row, tolerations)]
    disks = await _disks(api, asked, notes) if ask_kubelets else {}
    nodes = tuple(
        _node(row, running[row["metadata"]["name"]], spec, disks, arch=arch, tolerations=tolerations)
        for row in rows
    )
    cut = sorted(node.name for node in nodes if any("may have more" in note for note in node.notes))
    if cut:
        notes.append(
            f"{len(cut)} of {len(nodes)} nodes name {LISTED} images, the most a kubelet names"
            " (nodeStatusMaxImages): they may have more"
        )
    lazily = sorted({note for node in nodes for note in node.notes if note.startswith("streams")})
    if lazily:
        notes.append(
            f"some nodes start images before they are whole ({'; '.join(lazily)}): there it matters less"
        )
    if not disks and ask_kubelets is False:
        notes.append("kubelets were not asked: how full disks are is not known")
    return Inventory(nodes, tuple(notes))


async def scheduling(api: Api, name: str) -> tuple[dict[str, str], tuple[JSON, ...], tuple[str, ...]]:
    """What a RuntimeClass adds to its pods: labels of nodes, tolerations; and what could not be learned.

    Raises:
        ConfigError: there is none of that name.
    """
    found = await api.runtime_class(name)
    if found is None:
        return {}, (), (f"RuntimeClass {name} may not be read: on which nodes its pods run is not known",)
    rules = found.get("scheduling") or {}
    return dict(rules.get("nodeSelector") or {}), tuple(rules.get("tolerations") or ()), ()


async def _disks(api: Api, names: list[str], notes: list[str]) -> dict[str, tuple[int, int]]:
    """By node: bytes that images may fill, by the kubelet's own figures, and bytes that they fill."""
    found: dict[str, tuple[int, int]] = {}
    silent: list[str] = []
    forbidden = False
    limit = asyncio.Semaphore(_PULLS_AT_ONCE)

    async def one(name: str) -> None:
        nonlocal forbidden
        async with limit:
            if forbidden:
                return
            base = f"/api/v1/nodes/{name}/proxy"
            try:
                summary = await api.get(f"{base}/stats/summary", timeout=5)
                config = await api.get(f"{base}/configz", timeout=5)
            except SandboxError as error:
                forbidden = forbidden or getattr(error, "status", 0) == 403
                silent.append(name)
                return
        told = room_of(summary, config)
        if told is None:
            silent.append(name)
        else:
            found[name] = told

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name))
    if forbidden:
        notes.append("how full disks are is not known: kubelets may not be asked (needs: get nodes/proxy)")
    elif silent:
        notes.append(
            f"how full the disks of {len(silent)} nodes are is not known: their kubelets did not say"
        )
    return found


def room_of(summary: JSON, config: JSON) -> tuple[int, int] | None:
    """Bytes that images may fill before the kubelet removes some, and that they fill; None: not told."""
    runtime = ((summary.get("node") or {}).get("runtime") or {}).get("imageFs") or {}
    capacity, free = runtime.get("capacityBytes"), runtime.get("availableBytes")
    if not isinstance(capacity, int) or not isinstance(free, int):
        return None
    filled = int(runtime.get("usedBytes") or 0)
    percent = (config.get("kubeletconfig") or {}).get("imageGCHighThresholdPercent")
    high = percent if isinstance(percent, int) and 0 < percent <= 100 else GC_PERCENT
    others = max(capacity - free - filled, 0)
    return max(capacity * high // 100 - others, 0), filled


def _node(
    row: JSON,
    pods: list[JSON],
    spec: Spec | None,
    disks: Mapping[str, tuple[int, int]],
    *,
    arch: str,
    tolerations: Sequence[JSON],
) -> Node:
    name, status = row["metadata"]["name"], row.get("status") or {}
    labels = row["metadata"].get("labels") or {}
    images: dict[str, int] = {}
    sizes: dict[str, int] = {}
    listed = status.get("images") or ()
    for image in listed:
        names = [str(text) for text in image.get("names") or ()]
        for text in names:
            images[text] = int(image.get("sizeBytes") or 0)
        if names:
            sizes[names[0]] = int(image.get("sizeBytes") or 0)
    used: set[str] = set()
    for pod in pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            used |= {str(container.get("image") or ""), str(container.get("imageID") or "")}
        used |= {str(one.get("image") or "") for one in (pod.get("spec") or {}).get("containers") or ()}
    used.discard("")
    for text in used:
        images.setdefault(text, 0)  # it runs there, so it is there, whether the status names it or not
    first = {
        text: str((image.get("names") or [text])[0]) for image in listed for text in image.get("names") or ()
    }
    busy = sum(sizes.get(key, 0) for key in {first.get(text, text) for text in used})
    room = disks[name][0] if name in disks else _room_by_status(status)
    notes: list[str] = []
    if len(listed) >= LISTED:
        notes.append("may have more images than it names")
    hints = {hint for hint in _STREAMING for text in (*labels, *labels.values()) if hint in str(text)}
    notes += [f"streams images, it seems ({hint})" for hint in sorted(hints)]
    told = status.get("nodeInfo") or {}
    own = str(told.get("architecture") or labels.get("kubernetes.io/arch") or arch or "amd64")
    return Node(
        name,
        arch=own,
        images=images,
        in_use=frozenset(used),
        busy=busy,
        room=room,
        sandboxes=_sandboxes(status.get("allocatable") or {}, pods, spec),
        usable=_why_not(row, tolerations) or (f"its architecture is {own}" if arch and own != arch else ""),
        notes=tuple(notes),
    )


def _why_not(row: JSON, tolerations: Sequence[JSON]) -> str:
    spec, status = row.get("spec") or {}, row.get("status") or {}
    if spec.get("unschedulable"):
        return "cordoned"
    ready: JSON = next((one for one in status.get("conditions") or () if one.get("type") == "Ready"), {})
    if ready.get("status") != "True":
        return "not ready"
    pressure = [one["type"] for one in status.get("conditions") or () if one.get("status") == "True"]
    if "DiskPressure" in pressure:
        return "its disk is under pressure"
    for taint in taints(row):
        if not tolerated(taint, tolerations):
            return f"its taint {taint.get('key')} is not tolerated"
    return ""


def _room_by_status(status: JSON) -> int | None:
    total = (status.get("capacity") or {}).get("ephemeral-storage")
    return None if total is None else int(quantity(total) * GC_PERCENT / 100)


def _sandboxes(allocatable: JSON, pods: list[JSON], spec: Spec | None) -> int:
    """How many more pods of *spec* fit by what is asked for."""
    free = int(quantity(allocatable.get("pods", "110"))) - len(pods)
    wanted = {"cpu": spec.cpu if spec else None, "memory": spec.memory_bytes if spec else None}
    for kind, each in wanted.items():
        if not each or kind not in allocatable:
            continue
        asked = sum(
            quantity(((one.get("resources") or {}).get("requests") or {}).get(kind, "0"))
            for pod in pods
            for one in (pod.get("spec") or {}).get("containers") or ()
        )
        free = min(free, int((quantity(allocatable[kind]) - asked) / each))
    return max(free, 0)


def quantity(text: str | float) -> float:
    """A quantity as Kubernetes writes it (``500m``, ``2Gi``, ``1e3``) as a number; 0 for what is none."""
    match = _QUANTITY.match(str(text).strip())
    return float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
