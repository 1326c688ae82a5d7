"""``network="none"`` where the episode cannot have a network of its own: a NetworkPolicy, and a trial of it.

A NetworkPolicy is only a wish: the API server takes it whether or not anything in the cluster acts on it. So
one is never relied on before a pod under it was seen not to reach another that a pod without it reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from ..._loops import see_through
from ...errors import SandboxError, UnsupportedError
from . import names
from .api import JSON, Api, ApiError
from .names import Paths

CLOSED = "sandbox.users.io/rlsandbox-closed"
"""On pods that may reach nobody and be reached by nobody."""
NAME = "rlsandbox-closed"
PORT = 7799
START_S = 50.0
"""Of each of two rounds of pods: together less than what ``reap`` leaves a run that is just beginning."""
SETTLE_S, TRY_S = 4, 4
"""A policy may take a moment to reach a new pod."""


def policy() -> JSON:
    """Pods labelled CLOSED reach nobody, and nobody reaches them (exec streams are another network)."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME, "labels": {names.MANAGED: "true"}},
        "spec": {"podSelector": {"matchLabels": {CLOSED: "true"}}, "policyTypes": ["Ingress", "Egress"]},
    }


def _pod(
    name: str, image: str, config_map: str, args: list[str], like: JSON, run: str, *, closed: bool = False
) -> JSON:
    labels = {names.MANAGED: "true", names.RUN: run, names.OWNER: names.owner()}
    if closed:
        labels[CLOSED] = "true"
    container = {
        "name": "trial",
        "image": image,
        "command": [names.COMMAND[0], *args],
        "volumeMounts": [{"name": names.KEEPER_VOLUME, "mountPath": names.KEEPER_DIR, "readOnly": True}],
        "securityContext": {
            "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 65534,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "imagePullPolicy": "IfNotPresent",
    }  # fmt: skip
    kept = ("nodeSelector", "tolerations", "imagePullSecrets", "runtimeClassName")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            **{key: like[key] for key in kept if key in like},
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": 180,
            "containers": [container],
            "volumes": [
                {"name": names.KEEPER_VOLUME, "configMap": {"name": config_map, "defaultMode": 0o555}}
            ],
        },
    }


async def enforced(
    api: Api, image: str, config_map: str, like: JSON | None = None, *, run: str | None = None
) -> bool:
    """Try it, with three pods that are gone afterwards; what a killed trial leaves is reaped with its *run*.

    Raises:
        SandboxError: it could not be tried (a right is missing, a pod did not start, none reaches another).
    """
    paths = Paths(api.namespace)
    await api.apply(f"{paths.policies}/{NAME}", policy())
    trial, shape = f"rls-trial-{secrets.token_hex(4)}", like or {}
    made: list[str] = []

    async def make(role: str, args: list[str], *, closed: bool = False) -> str:
        name = f"{trial}-{role}"
        made.append(name)
        pod = _pod(name, image, config_map, args, shape, run or trial, closed=closed)
        await api.create(paths.pods, pod)
        return name

    try:
        listener = await make("listens", ["listen", str(PORT), "170"])
        address = (await _until(api, f"{paths.pods}/{listener}", _address))["status"]["podIP"]
        dial = ["dial", address, str(PORT), str(SETTLE_S), str(TRY_S)]
        dials = [await make("open", dial), await make("closed", dial, closed=True)]
        ended = [await _until(api, f"{paths.pods}/{name}", _ended) for name in dials]
        free, held = (pod["status"]["phase"] == "Succeeded" for pod in ended)
        if not free:
            raise SandboxError(
                "no pod of the namespace reaches another: whether the policy does anything cannot be seen",
                kind="policy_untried", phase="config",
            )  # fmt: skip
        return not held
    finally:
        removing = asyncio.ensure_future(_remove(api, [f"{paths.pods}/{name}" for name in made]))
        cancelled = await see_through(removing)
        removing.result()
        if cancelled is not None:
            raise cancelled


async def _remove(api: Api, pods: Sequence[str]) -> None:
    for pod in pods:
        with contextlib.suppress(SandboxError):  # they end by themselves, and are reaped
            await api.delete(pod, limit=10)


async def demand(api: Api, image: str, config_map: str, like: JSON, *, run: str) -> None:
    """
    Raises:
        UnsupportedError: network "none" cannot be held by a policy here.
    """
    hint = "Spec(network='host'), or a namespace whose Pod Security level allows overlay or userns"
    try:
        held = await enforced(api, image, config_map, like, run=run)
    except ApiError as error:
        if error.status != 403:
            raise
        raise UnsupportedError(
            "network='none' in a pod whose network commands share needs a NetworkPolicy and a trial of it: "
            + error.message,
            phase="config", kind="forbidden",
            hint=f"rlsandbox template rbac --closed, or {hint}",
        ) from error  # fmt: skip
    if not held:
        raise UnsupportedError(
            "network='none' cannot be held by a pod whose network commands share: policies do nothing here "
            "(a pod under one reached another pod)",
            phase="config",
            hint=hint,
        )


def _address(pod: JSON) -> Any:
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and status.get("podIP")


def _ended(pod: JSON) -> Any:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


async def _until(api: Api, path: str, true: Any) -> JSON:
    loop = asyncio.get_running_loop()
    end = loop.time() + START_S
    while True:
        pod = await api.get(path)
        if true(pod):
            return pod
        if loop.time() > end:
            raise SandboxError(
                f"the trial of the network policy did not end: pod {pod['metadata']['name']} is "
                f"{(pod.get('status') or {}).get('phase', 'not there')} after {START_S:g} s",
                kind="policy_untried", phase="config", retryable=True,
            )  # fmt: skip
        await asyncio.sleep(0.5)
