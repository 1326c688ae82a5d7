"""From a Spec to what the cluster is asked for: ConfigMap, pod, template, warm pool, claim."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ...spec import Spec
from . import names
from .api import JSON
from .policy import CLOSED

MIB = 1 << 20
MEMORY = 2048 * MIB
"""Of a sandbox whose spec says nothing: held by the keeper, not asked of the scheduler."""
MARGIN = 64 * MIB
"""Of a pod's limit above the sandbox's: room for the keeper, so that it outlives what the sandbox does."""
PIDS, NOFILE = 1024, 65536
LARGEST = MIB - 8192
"""A ConfigMap holds 1 MiB."""
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
MODES = ("overlay", "userns", "manifest", "replace")
LEVELS = {"overlay": "privileged", "userns": "baseline", "manifest": "baseline", "replace": "restricted"}
SHARED_NETWORK = ("manifest", "replace")
"""Modes in which commands share the pod's network."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What the keeper needs where it may isolate nothing and commands are another user's."""


@dataclass(frozen=True)
class Shape:
    """What all pods of a backend have in common."""

    mode: str
    arch: str = "x86_64"
    image: str | None = None
    runtime_class: str | None = None
    gvisor_class: str | None = None
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    grace: int = 60


@dataclass(frozen=True)
class Allowed:
    """A sandbox's limits."""

    memory: int
    disk: int
    pids: int

    @classmethod
    def of(cls, spec: Spec) -> Allowed:
        memory = spec.memory_bytes if spec.memory_bytes is not None else MEMORY
        disk = spec.disk_bytes if spec.disk_bytes is not None else memory // 2
        return cls(memory, disk, spec.pids if spec.pids is not None else PIDS)

    def facts(self, spec: Spec) -> dict[str, str]:
        told = {
            "memory_bytes": str(self.memory),
            "disk_bytes": str(self.disk),
            "pids": str(self.pids),
            "nofile": str(NOFILE),
        }
        if spec.cpu is not None:
            told |= {"cpu_milli": str(round(spec.cpu * 1000)), "limit.cpu": "cgroup"}
        return told


def keeper_config_map(binary: Path, arch: str) -> JSON:
    """The keeper as an immutable ConfigMap, named by its content.

    Raises:
        UnsupportedError: it is too large for one.
    """
    content = binary.read_bytes()
    if len(content) > LARGEST:
        raise UnsupportedError(
            f"the keeper for {arch} is {len(content):,} bytes; a ConfigMap holds {LARGEST:,}",
            phase="provision",
            hint="install musl-tools, or: pip install ziglang (both build a smaller one)",
        )
    name = f"{names.KEEPERS}{ARCH[arch]}-{hashlib.sha256(content).hexdigest()[:12]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {names.MANAGED: "true"}},
        "immutable": True,
        "binaryData": {"keeper": base64.b64encode(content).decode()},
    }


def mode_of(spec: Spec, shape: Shape) -> str:
    if spec.isolation == "none":
        return "replace"
    if spec.isolation == "gvisor" and shape.gvisor_class is None:
        raise UnsupportedError(
            "isolation 'gvisor' needs the name of a RuntimeClass",
            phase="config",
            hint='Kubernetes(gvisor_class="gvisor")',
        )
    if spec.isolation == "gvisor" and shape.mode != "overlay":
        return "replace"  # no user namespaces for userns, and too slow a look at every inode for manifest
    if shape.mode == "manifest" and not other_user(spec):
        raise ConfigError(
            "mode manifest needs commands to run as another user than root",
            hint='Spec(user="1000"): what root does there cannot be put back',
        )
    return shape.mode


def other_user(spec: Spec) -> str | None:
    """Whom commands run as, when that is said and is not root."""
    who = (spec.user or "").partition(":")[0]
    return spec.user if who and who != "root" and not (who.isdecimal() and int(who) == 0) else None


def keeper_options(spec: Spec, shape: Shape) -> list[str]:
    """Limits, as ``keeper init`` takes them."""
    allowed = Allowed.of(spec)
    args = ["--memory", str(allowed.memory), "--disk", str(allowed.disk), "--pids", str(allowed.pids)]
    args += ["--inodes", str(max(allowed.disk // 4096, 4096)), "--nofile", str(NOFILE)]
    return [*args, "--grace", str(shape.grace)]


def by_policy(spec: Spec, shape: Shape) -> bool:
    """Whether only a NetworkPolicy can hold ``network="none"``: its commands share the pod's network."""
    return spec.network == "none" and spec.isolation != "none" and mode_of(spec, shape) in SHARED_NETWORK


def pod_spec(
    spec: Spec, shape: Shape, config_map: str, node: str = "", *, closed_by_policy: bool = False
) -> JSON:
    """A pod of one container, the keeper's; on *node*, if that can be.

    Args:
        closed_by_policy: one that holds ``network="none"`` was tried, and does.

    Raises:
        ConfigError, UnsupportedError: it cannot be what the spec asks for.
    """
    image = spec.image if spec.image is not None else shape.image
    if image is None:
        raise ConfigError(
            "a sandbox on a cluster needs an image",
            hint='Spec(image="..."), Task(image="..."), or Kubernetes(image="...")',
        )
    if spec.expose:
        raise UnsupportedError(
            f"expose={list(spec.expose)!r}: this machine's paths are not on the cluster's nodes",
            phase="config",
        )
    mode = mode_of(spec, shape)
    if by_policy(spec, shape) and not closed_by_policy:
        raise UnsupportedError(
            f"network='none' cannot be held in mode {mode}: its commands share the pod's network",
            phase="config",
            hint="Spec(network='host'), or a namespace that allows overlay or userns",
        )
    allowed = Allowed.of(spec)
    network = "host" if closed_by_policy else spec.network
    args = [*keeper_options(spec, shape), "--network", network]
    if mode in ("manifest", "replace"):
        args += ["--mode", mode]
    user = other_user(spec)
    if user is not None and mode != "replace":
        args += ["--user", user]
    container: JSON = {
        "name": names.CONTAINER,
        "image": image,
        "imagePullPolicy": shape.pull_policy,
        "command": list(names.COMMAND),
        "args": args,
        "volumeMounts": [
            {"name": names.KEEPER_VOLUME, "mountPath": names.KEEPER_DIR, "readOnly": True},
            {"name": names.RUN_VOLUME, "mountPath": names.RUN_DIR},
        ],
    }
    resources: JSON = {}
    if spec.memory_bytes is not None:
        resources.setdefault("limits", {})["memory"] = str(allowed.memory + MARGIN)
        resources.setdefault("requests", {})["memory"] = str(allowed.memory + MARGIN)
    if spec.cpu is not None:
        resources.setdefault("limits", {})["cpu"] = f"{round(spec.cpu * 1000)}m"
        resources.setdefault("requests", {})["cpu"] = f"{round(spec.cpu * 1000)}m"
    if resources:
        container["resources"] = resources
    pod: JSON = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "dnsPolicy": "Default",
        "nodeSelector": {"kubernetes.io/arch": ARCH[shape.arch], **shape.node_selector},
        "containers": [container],
        "volumes": [
            {"name": names.KEEPER_VOLUME, "configMap": {"name": config_map, "defaultMode": 0o555}},
            {"name": names.RUN_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ],
    }
    gvisor = spec.isolation == "gvisor"
    _secure(pod, container, mode, spec, gvisor=gvisor, root=gvisor and shape.mode != "replace")
    runtime = shape.gvisor_class if gvisor else shape.runtime_class
    if runtime is not None:
        pod["runtimeClassName"] = runtime
    if node:
        where = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        wish = {"weight": 100, "preference": {"matchExpressions": [where]}}
        pod["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    if shape.tolerations:
        pod["tolerations"] = [dict(row) for row in shape.tolerations]
    if shape.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in shape.pull_secrets]
    return pod


def _secure(
    pod: JSON, container: JSON, mode: str, spec: Spec, *, gvisor: bool = False, root: bool = False
) -> None:
    """What each mode needs, and not more.

    Args:
        gvisor: whether the pod runs under gVisor, where SYS_ADMIN is none over the node.
        root: whether a pod in mode replace is root's: under gVisor, where the level allows it.
    """
    if mode == "overlay":
        container["securityContext"] = {
            "runAsUser": 0,
            "runAsGroup": 0,
            "capabilities": {"add": ["SYS_ADMIN", "SYS_CHROOT"] if gvisor else ["SYS_ADMIN"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        if not gvisor:
            pod["hostUsers"] = False  # SYS_ADMIN counts within the pod's own user namespace only
            # The usual profile for containers forbids mounts; where there is no AppArmor this says nothing.
            container["securityContext"]["appArmorProfile"] = {"type": "Unconfined"}
    elif mode == "userns":
        # No seccomp profile is asked for: RuntimeDefault forbids what is needed, and naming none is baseline.
        container["securityContext"] = {"runAsUser": 0, "runAsGroup": 0}
    elif mode == "manifest":
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    elif spec.isolation == "none":
        container["securityContext"] = {"allowPrivilegeEscalation": False}
    elif root:
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    else:
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        user = (spec.user or "").partition(":")[0]
        container["securityContext"]["runAsUser"] = int(user) if user.isdecimal() and user != "0" else 65534


def labels_for(spec: Spec, shape: Shape) -> dict[str, str]:
    """Of a pod."""
    return {CLOSED: "true"} if by_policy(spec, shape) else {}


def template(name: str, pod: JSON, labels: Mapping[str, str] | None = None) -> JSON:
    """A SandboxTemplate. The network is the episode's affair, so no policy is managed for it."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "SandboxTemplate",
        "metadata": {"name": name, "labels": {names.MANAGED: "true"}},
        "spec": {
            "podTemplate": {"metadata": {"labels": {names.MANAGED: "true", **(labels or {})}}, "spec": pod},
            "networkPolicyManagement": "Unmanaged",
        },
    }


def warm_pool(name: str, template_name: str, replicas: int) -> JSON:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "SandboxWarmPool",
        "metadata": {"name": name, "labels": {names.MANAGED: "true"}},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": template_name}},
    }


def _metadata(name: str, run: str, member: str, labels: Mapping[str, str]) -> JSON:
    return {
        "name": name,
        "labels": {
            names.MANAGED: "true",
            names.RUN: run,
            names.OWNER: names.owner(),
            names.MEMBER: names.dns_label(member),
        },
        "annotations": {names.LABELS: json.dumps(dict(labels), sort_keys=True), names.MEMBER: member},
    }


def claim(
    name: str, pool: str, *, run: str, member: str, labels: Mapping[str, str], ends: datetime.datetime
) -> JSON:
    """A SandboxClaim that ends by itself, by the cluster's clock, should everything else fail."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "SandboxClaim",
        "metadata": _metadata(name, run, member, labels),
        "spec": {
            "warmPoolRef": {"name": pool},
            "lifecycle": {"shutdownTime": ends.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"},
            "additionalPodMetadata": {"labels": {names.POD_RUN: run, names.POD_OWNER: names.owner()}},
        },
    }


def plain_pod(
    name: str, pod: JSON, *, run: str, member: str, labels: Mapping[str, str], lifetime_s: float,
    pod_labels: Mapping[str, str] | None = None,
) -> JSON:  # fmt: skip
    """A pod by itself, where there are no CRDs."""
    metadata = _metadata(name, run, member, labels)
    metadata["labels"] |= {names.POD_RUN: run, **(pod_labels or {})}
    spec = {**pod, "activeDeadlineSeconds": int(lifetime_s)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
