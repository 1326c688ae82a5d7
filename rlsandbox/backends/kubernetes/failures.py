"""What pods and claims say of themselves, as errors: which kind, whose fault, whether to try again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import ConfigError, ImageError, ProvisionError, SandboxDiedError, SandboxError
from .api import JSON
from .watch import condition

_IMAGE_WAITS = frozenset(
    [
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    ]
)
_PERMANENT = re.compile(
    r"not found|manifest unknown|unauthorized|authentication required|denied|forbidden|\b40[134]\b|"
    r"invalid reference|couldn't parse image|no match for platform|never pull|pull policy",
    re.IGNORECASE,
)
_CONTAINER_WAITS = frozenset(
    [
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
        "StartError",
    ]
)


@dataclass(frozen=True)
class Verdict:
    """What to do about a sandbox that is not ready. ``after``: seconds for which it may still get better."""

    error: SandboxError
    after: float = 0.0


def of_pod(pod: JSON, image: str = "") -> Verdict | None:
    """Why this pod will not become ready; None while it may."""
    status, name = pod.get("status") or {}, pod["metadata"]["name"]
    node = pod.get("spec", {}).get("nodeName")
    where = f" on node {node}" if node else ""
    for row in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = row.get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), " ".join((waiting.get("message") or "").split())
        if reason in _IMAGE_WAITS:
            permanent = reason in ("InvalidImageName", "ErrImageNeverPull") or bool(
                _PERMANENT.search(message)
            )
            error = ImageError(
                f"image {row.get('image') or image} cannot be had{where}: {reason}: {message}",
                kind="image_not_found" if permanent else "image_pull",
                retryable=not permanent, infrastructure=True, sandbox=name,
                hint="check the name, and that the node's pull secrets may read it" if permanent else "",
            )  # fmt: skip
            if permanent or reason == "ImagePullBackOff":
                # A back-off says nothing new: the pull before it said what failed.
                return Verdict(error, 0.0 if permanent else 5.0)
            return Verdict(error, 20.0)
        if reason in _CONTAINER_WAITS:
            return Verdict(
                ProvisionError(
                    f"the container could not be started{where}: {reason}: {message}",
                    kind="container_start", sandbox=name, retryable=reason == "RunContainerError",
                ),
                3.0,
            )  # fmt: skip
    died = end_of_pod(pod)
    if died is not None:
        return Verdict(
            ProvisionError(
                died.message, kind=died.kind, retryable=died.retryable, hint=died.hint, sandbox=name
            )
        )
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Verdict(
            ProvisionError(
                f"no node for the pod: {' '.join((scheduled.get('message') or '').split())}",
                kind="unschedulable", sandbox=name, hint="fewer or smaller sandboxes, or more nodes",
            ),
            10.0,
        )  # fmt: skip
    return None


def end_of_pod(pod: JSON) -> SandboxDiedError | None:
    """Why a pod that ran has ended, or is about to; None while it runs."""
    status, meta = pod.get("status") or {}, pod["metadata"]
    node = pod.get("spec", {}).get("nodeName")
    where = f" on node {node}" if node else ""
    name = meta["name"]
    for row in status.get("containerStatuses") or ():
        for state in (row.get("state") or {}, row.get("lastState") or {}):
            ended = state.get("terminated")
            if not ended:
                continue
            if ended.get("reason") == "OOMKilled":
                return SandboxDiedError(
                    f"its container was ended for memory{where}", kind="oom", sandbox=name,
                    hint="give it more: Spec(memory=...)",
                )  # fmt: skip
            if status.get("reason") == "Evicted":
                break
            said = " ".join((ended.get("message") or "").split())
            if said.startswith("cannot "):  # the keeper's own words: it will say the same the next time
                return SandboxDiedError(
                    f"its keeper could not start{where}: {said}",
                    kind="keeper_start", sandbox=name, retryable=False,
                )  # fmt: skip
            return SandboxDiedError(
                f"its container ended{where} with {ended.get('exitCode')}"
                + (f": {said}" if said else f" ({ended.get('reason')})" if ended.get("reason") else ""),
                kind="container_ended", sandbox=name,
            )  # fmt: skip
        if row.get("restartCount"):
            return SandboxDiedError(f"its container was restarted{where}", kind="restarted", sandbox=name)
    for row in status.get("initContainerStatuses") or ():
        ended = (row.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode") and status.get("phase") == "Failed" and status.get("reason") != "Evicted":
            said = " ".join((ended.get("message") or ended.get("reason") or "").split())
            return SandboxDiedError(
                f"its init container {row.get('name')} ended{where} with {ended['exitCode']}"
                + (f": {said}" if said else ""),
                kind="container_start", sandbox=name,
            )  # fmt: skip
    if status.get("reason") == "Evicted" or condition(pod, "DisruptionTarget").get("status") == "True":
        target = condition(pod, "DisruptionTarget")
        # Taints drive pods from lost nodes (whose pods are not Ready), and from any that somebody gave one.
        driven = target.get("reason") == "DeletionByTaintManager"
        lost = driven and condition(pod, "Ready").get("status") != "True"
        lost = lost or target.get("reason") == "DeletionByPodGC"
        said = " ".join((target.get("message") or status.get("message") or "").split())
        return SandboxDiedError(
            f"its pod was {'lost with its node' if lost else 'evicted'}{where}: {said or 'no reason given'}",
            kind="node_lost" if lost else "evicted", sandbox=name,
        )  # fmt: skip
    if status.get("reason") == "NodeLost":
        return SandboxDiedError(f"its node was lost{where}", kind="node_lost", sandbox=name)
    if meta.get("deletionTimestamp"):
        return SandboxDiedError(
            f"its pod was removed by somebody else{where}", kind="pod_removed", sandbox=name
        )
    if status.get("phase") in ("Failed", "Succeeded"):
        said = " ".join((status.get("message") or status.get("reason") or "").split())
        return SandboxDiedError(
            f"its pod has ended{where}: {said or status['phase']}", kind="pod_ended", sandbox=name
        )
    return None


def of_claim(claim: JSON) -> Verdict | None:
    """Why this claim will not become ready; None while it may."""
    ready, name = condition(claim, "Ready"), claim["metadata"]["name"]
    if ready.get("status") != "False":
        return None
    reason, message = ready.get("reason", ""), " ".join((ready.get("message") or "").split())
    if reason in ("TemplateNotFound", "WarmPoolNotFound"):
        # A controller that was cut off from the API server opens its watches again after up to half a minute,
        # and has not heard of a new one before.
        return Verdict(ProvisionError(message, kind="template_gone", sandbox=name), 32.0)
    if reason in ("InvalidMetadata", "EnvVarsInjectionRejected", "VolumeClaimTemplatesError"):
        return Verdict(ConfigError(f"the claim was refused: {message}", kind="claim_refused", sandbox=name))
    if reason in ("ClaimExpired", "SandboxExpired"):
        return Verdict(
            ProvisionError(f"the claim has expired: {message}", kind="claim_expired", sandbox=name)
        )
    if reason == "ReconcilerError":
        if "RuntimeClass" in message and "not found" in message:
            found = re.search(r'RuntimeClass "?([^" ]+)"? not found', message)
            return Verdict(
                ProvisionError(
                    f"the cluster has no RuntimeClass {found[1] if found else ''}".rstrip(),
                    kind="no_runtime_class", retryable=False, sandbox=name,
                )
            )  # fmt: skip
        if "violates PodSecurity" in message:
            rule = message.partition("violates ")[2]
            return Verdict(
                ProvisionError(
                    f"the namespace's Pod Security level forbids the pod: {rule}",
                    kind="pod_security", retryable=False, sandbox=name,
                    hint='another level for the namespace, or Kubernetes(mode="userns") or "replace"',
                )
            )  # fmt: skip
        refused = "forbidden" in message or "Invalid value" in message or "exceeded quota" in message
        kind = "quota" if "exceeded quota" in message else "refused" if refused else "controller"
        error = ProvisionError(
            f"the pod was not made: {message}", kind=kind, retryable=kind != "refused", sandbox=name
        )
        return Verdict(error, 1.0 if refused else 10.0)
    return None
