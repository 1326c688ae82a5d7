"""Rows of the doctor: which reset mode to expect on the nodes, and what stands in the way of a better one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..diagnosis import Row
from .api import JSON

_APPARMOR = re.compile(r"ubuntu|debian|container-optimized|suse", re.IGNORECASE)
_SELINUX = re.compile(
    r"red ?hat|centos|fedora|rocky|alma|oracle linux|coreos|amazon linux|bottlerocket", re.IGNORECASE
)
OLDEST = (6, 3)
"""The Linux from which on pods with user namespaces may have tmpfs volumes."""


def on_nodes(level: str, nodes: Sequence[JSON], handler: str = "") -> list[Row]:
    """What the nodes say of themselves.

    Args:
        level: of Pod Security; empty: none is enforced.
        nodes: real ones.
        handler: of the RuntimeClass that pods will have; empty: the nodes' own.
    """
    infos = {str(node["metadata"]["name"]): node.get("status", {}).get("nodeInfo", {}) for node in nodes}
    rows: list[Row] = []
    if level not in ("baseline", "restricted"):
        rows += _user_namespaces(nodes, infos, handler)
    if level == "restricted":
        return rows
    systems = {name: str(info.get("osImage", "?")) for name, info in infos.items()}
    apparmor = {name: text for name, text in systems.items() if _APPARMOR.search(text)}
    selinux = {name: text for name, text in systems.items() if _SELINUX.search(text)}
    mode = "userns" if level == "baseline" else "overlay"
    try_it = "try one sandbox there: its reset mode and the fact `why` tell"
    if apparmor:
        said = (
            f"{_some(apparmor)} ({_some(apparmor.values())}) may have AppArmor, whose profile for containers "
            "forbids mounts: "
        )
        if mode == "overlay":
            rows.append(Row("AppArmor", "ok", said + "pods of mode overlay ask for none", try_it))
        else:
            said += "mode userns is then manifest or replace (baseline allows no pod without the profile)"
            rows.append(Row("AppArmor", "warn", said, f"the level privileged; or {try_it}"))
    if selinux:
        said = (
            f"{_some(selinux)} ({_some(selinux.values())}) may have SELinux, whose type for containers may "
            f"forbid the mounts of mode {mode}"
        )
        fix = f"{try_it}; a template of your own may name another seLinuxOptions.type"
        rows.append(Row("SELinux", "warn", said, fix))
    if not apparmor and not selinux:
        said = "AppArmor and SELinux are not seen from here; both may forbid mounts"
        rows.append(Row("security modules", "warn", said, try_it))
    return rows


def by_seccomp(level: str, default: Mapping[str, bool]) -> list[Row]:
    """*default*: by node, whether its kubelet gives pods that name no seccomp profile RuntimeDefault."""
    names = [name for name, on in default.items() if on]
    if level != "baseline" or not default:
        return []
    if not names:
        return [Row("seccomp", "ok", "kubelets give pods no profile that they did not ask for")]
    said = f"{_some(names)}: pods get the profile RuntimeDefault (seccompDefault), which forbids mode userns"
    return [
        Row(
            "seccomp",
            "warn",
            said,
            'mode manifest with Spec(user="1000") resets in place there; else replace',
        )
    ]


def _user_namespaces(nodes: Sequence[JSON], infos: Mapping[str, JSON], handler: str) -> list[Row]:
    name = "user namespaces of pods"
    why: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        own = str(node["metadata"]["name"])
        info = infos[own]
        told = (node.get("status") or {}).get("runtimeHandlers") or ()
        runtime = str(info.get("containerRuntimeVersion", ""))
        found = next((row for row in told if (row.get("name") or "") == handler), None)
        old = re.match(r"containerd://1\.", runtime)
        if found is not None and not (found.get("features") or {}).get("userNamespaces"):
            why[f"{runtime or 'its runtime'} gives none"].append(own)
        elif found is None and old:
            why[f"{runtime} knows no hostUsers: false"].append(own)
        kernel = re.match(r"(\d+)\.(\d+)", str(info.get("kernelVersion", "")))
        if kernel is not None and (int(kernel[1]), int(kernel[2])) < OLDEST:
            why[f"Linux {kernel[0]} is too old"].append(own)
    if not why:
        return []
    said = "; ".join(f"{_some(names)}: {text}" for text, names in sorted(why.items()))
    affected = {own for names in why.values() for own in names}
    fix = 'Linux 6.3, containerd 2 and runc 1.2 there; or Kubernetes(mode="userns")'
    said = f"pods of mode overlay do not start: {said}"
    return [Row(name, "fail" if len(affected) == len(nodes) else "warn", said, fix)]


def _some(names: Iterable[str]) -> str:
    found = sorted(set(names))
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
