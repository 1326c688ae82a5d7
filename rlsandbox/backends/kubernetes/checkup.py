"""Further rows of the doctor: what makes a cluster slow or fail under load, though one sandbox works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import SandboxError
from ..diagnosis import Row
from . import policy
from .api import JSON, Api, ApiError
from .modes import by_seccomp
from .names import Paths

LOOKED_AT = 5
"""Nodes that are asked for their settings and disks; a cluster's are alike."""
_SECRETS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
_KNOWN = (
    ("cilium", "Cilium"), ("calico", "Calico"), ("antrea", "Antrea"), ("kube-router", "kube-router"),
    ("weave-net", "Weave"), ("canal", "Canal"), ("ovnkube", "OVN-Kubernetes"), ("kindnet", "kindnet"),
    ("aws-node", "AWS VPC CNI"), ("flannel", "flannel (enforces none)"),
)  # fmt: skip


async def pull_secrets(api: Api) -> list[Row]:
    """Those that pods of the namespace's default service account pull with."""
    core = Paths(api.namespace).namespace
    try:
        account = await api.get(f"{core}/serviceaccounts/default")
    except ApiError:
        return [Row("pull secrets", "warn", "the default service account may not be read")]
    named = [str(row.get("name")) for row in account.get("imagePullSecrets") or ()]
    if not named:
        said = "none in the default service account: images must be public, or the nodes' own to pull"
        return [Row("pull secrets", "ok", said, "Kubernetes(pull_secrets=[...]) names others")]
    rows = []
    for name in named:
        try:
            secret = await api.get(f"{core}/secrets/{name}")
        except ApiError as error:
            if error.status == 404:
                fix = f"kubectl -n {api.namespace} create secret docker-registry {name} ..."
                rows.append(Row(f"pull secret {name}", "fail", "named, and not there", fix))
            else:
                rows.append(Row(f"pull secret {name}", "warn", "named; may not be looked at"))
            continue
        kind = str(secret.get("type"))
        if kind in _SECRETS:
            rows.append(Row(f"pull secret {name}", "ok", kind))
        else:
            rows.append(
                Row(f"pull secret {name}", "fail", f"its type is {kind}", f"it must be {_SECRETS[0]}")
            )
    return rows


async def kubelets(api: Api, nodes: Sequence[str], level: str) -> list[Row]:
    """From when on kubelets remove images, how near to it they are, and which seccomp profile they give."""
    rows: list[Row] = []
    seccomp: dict[str, bool] = {}
    refused = False
    for node in nodes[:LOOKED_AT]:
        try:
            config = (await api.get(f"/api/v1/nodes/{node}/proxy/configz", timeout=10)).get(
                "kubeletconfig"
            ) or {}
            usage = await api.get(f"/api/v1/nodes/{node}/proxy/stats/summary", timeout=10)
        except SandboxError as error:
            refused = refused or getattr(error, "status", 0) == 403
            continue
        rows.append(_disk(node, config, usage.get("node") or {}))
        seccomp[node] = bool(config.get("seccompDefault"))
    if rows:
        return rows + by_seccomp(level, seccomp)
    why = "the right get on nodes/proxy is missing" if refused else "no kubelet answered"
    fix = "watch DiskPressure, and that images of a step fit on a node: rlsandbox plan"
    return [Row("image removal on nodes", "warn", f"not known: {why}", fix)]


def _disk(node: str, config: JSON, usage: JSON) -> Row:
    high = int(config.get("imageGCHighThresholdPercent") or 85)
    low = int(config.get("imageGCLowThresholdPercent") or 80)
    disk = (usage.get("runtime") or {}).get("imageFs") or usage.get("fs") or {}
    size, free = int(disk.get("capacityBytes") or 0), int(disk.get("availableBytes") or 0)
    said = f"images are removed from {high} % on, down to {low} %"
    name = f"disk of {node}"
    if not size:
        return Row(name, "ok", said)
    used = 100 * (size - free) / size
    room = max(0.0, size * high / 100 - (size - free)) / (1 << 30)
    said = f"{used:.0f} % of {size / (1 << 30):.0f} GiB used; {said}: room for {room:.0f} GiB of images"
    if used >= high:
        return Row(name, "warn", said, "images are removed while rollouts need them: make room")
    if used >= high - 10:
        return Row(name, "warn", said, "little room: rlsandbox plan tasks.jsonl says what a step needs")
    return Row(name, "ok", said)


async def volumes(api: Api) -> list[Row]:
    """Volumes that only one node can have at a time keep a sandbox from being restored on another."""
    paths = Paths(api.namespace)
    try:
        found = (await api.get(paths.templates)).get("items") or []
    except ApiError:
        found = []
    bound: list[str] = []
    for item in found:
        spec = item["spec"]
        claims = spec.get("volumeClaimTemplates") or []
        modes = {mode for claim in claims for mode in (claim.get("spec") or {}).get("accessModes") or ()}
        pod = (spec.get("podTemplate") or {}).get("spec") or {}
        shared = [
            row["persistentVolumeClaim"]["claimName"]
            for row in pod.get("volumes") or ()
            if "persistentVolumeClaim" in row
        ]
        for claim in shared:
            try:
                seen = await api.get(f"{paths.namespace}/persistentvolumeclaims/{claim}")
            except ApiError:
                continue
            modes |= set((seen.get("spec") or {}).get("accessModes") or ())
        if modes & {"ReadWriteOnce", "ReadWriteOncePod"}:
            bound.append(str(item["metadata"]["name"]))
    if bound:
        said = f"templates with a volume of one node at a time: {', '.join(bound[:5])}"
        fix = "their sandboxes wait for that volume when they are restored on another node: use no volume"
        return [Row("volumes", "warn", said, fix)]
    return [Row("volumes", "ok", "no template has a volume that only one node can have (ReadWriteOnce)")]


async def priority(api: Api) -> list[Row]:
    """Into which queue of the API server a run's requests go."""
    response = await api.stream("/version", {}, silent_s=10)
    schema, level = (
        response.headers.get(f"X-Kubernetes-PF-{what}-UID", "") for what in ("FlowSchema", "PriorityLevel")
    )
    response.close()
    name = "API priority"
    if not schema:
        return [Row(name, "warn", "priority and fairness are off: everybody's requests share one limit")]
    group = "/apis/flowcontrol.apiserver.k8s.io/v1"
    try:
        schemas = (await api.get(f"{group}/flowschemas")).get("items") or []
        levels = (await api.get(f"{group}/prioritylevelconfigurations")).get("items") or []
    except ApiError:
        return [Row(name, "ok", "priority and fairness are on; which queue is ours may not be read")]
    ours = next((row for row in schemas if row["metadata"].get("uid") == schema), None)
    row = next((row for row in levels if row["metadata"].get("uid") == level), None)
    if ours is None or row is None:
        return [Row(name, "ok", "priority and fairness are on")]
    limited = (row.get("spec") or {}).get("limited") or {}
    shares = limited.get("nominalConcurrencyShares", "no limit")
    said = f"flow schema {ours['metadata']['name']}, level {row['metadata']['name']} (shares: {shares})"
    if ours["metadata"]["name"] in ("global-default", "catch-all"):
        fix = "a FlowSchema of its own for this user keeps other people's requests from delaying claims"
        return [Row(name, "warn", said + ": shared with whoever has no other", fix)]
    return [Row(name, "ok", said)]


async def network(api: Api, image: str | None, trial: bool) -> list[Row]:
    """Which CNI there is, and (with *trial*, which makes three pods) whether it acts on NetworkPolicies."""
    said = "network='none' is a network namespace of the episode's own in overlay and userns"
    rows = [Row("network", "ok", said, "in manifest and replace it needs a NetworkPolicy that is enforced")]
    try:
        found = (await api.get("/api/v1/namespaces/kube-system/pods", {"limit": "500"})).get("items") or []
    except ApiError:
        found = []
    words = " ".join(str(pod["metadata"]["name"]) for pod in found)
    known = [name for word, name in _KNOWN if word in words]
    cni = f"CNI: {', '.join(known)}" if known else "which CNI there is cannot be seen"
    if not trial:
        fix = "rlsandbox doctor --trial IMAGE makes three short pods and sees"
        return [
            *rows,
            Row("NetworkPolicy", "warn", f"{cni}; whether it enforces policies was not tried", fix),
        ]
    try:
        held = await policy.enforced(api, str(image), await _keeper(api))
    except SandboxError as error:
        return [
            *rows,
            Row("NetworkPolicy", "warn", f"{cni}; it could not be tried: {error.message}", error.hint),
        ]
    if held:
        return [
            *rows,
            Row("NetworkPolicy", "ok", f"{cni}; enforced: a pod under one did not reach another pod"),
        ]
    said = f"{cni}; not enforced: a pod under one reached another pod"
    return [*rows, Row("NetworkPolicy", "warn", said, "manifest and replace cannot hold network='none' here")]


async def _keeper(api: Api) -> str:
    from ...keeper.build import keeper_binary, machine
    from .manifests import keeper_config_map

    body: dict[str, Any] = keeper_config_map(keeper_binary(machine()), machine())
    await api.create(Paths(api.namespace).config_maps, body)
    return str(body["metadata"]["name"])


async def further(api: Api, image: str | None, *, nodes: Sequence[JSON], level: str) -> list[Row]:
    """All of them.

    Args:
        image: of the pods with which network policies are tried; None: they are not.
        nodes: real ones.
        level: of Pod Security.
    """
    rows = await pull_secrets(api)
    rows += await kubelets(api, [str(node["metadata"]["name"]) for node in nodes], level)
    rows += await volumes(api)
    rows += await priority(api)
    return rows + await network(api, image, trial=image is not None)
