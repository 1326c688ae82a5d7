"""What a cluster offers for sandboxes, what is missing, and what to do about it.

Nothing is changed, but for a trial that was asked for. ``fail`` is a thing without which no sandbox can be
made, ``warn`` one without which something is weaker, or that could not be seen.
"""

from __future__ import annotations

import asyncio
import datetime
import re
from collections.abc import Awaitable, Callable
from typing import Any

from ...errors import SandboxError
from ..diagnosis import Diagnosis, Row
from . import modes, names
from .api import JSON, Api, ApiError
from .checkup import further
from .lease import server_time
from .names import Paths

_EXT = names.EXTENSIONS
RIGHTS: tuple[tuple[str, str, str, bool], ...] = (
    # group, resource, verbs, needed
    ("", "configmaps", "get create", True),
    ("", "pods", "get list watch", True),
    ("", "pods/exec", "get create", True),
    ("", "events", "list", False),
    ("", "nodes", "list watch", False),
    (_EXT, "sandboxtemplates", "get create patch", True),
    (_EXT, "sandboxwarmpools", "get create patch", True),
    (_EXT, "sandboxclaims", "get list watch create delete", True),
    ("coordination.k8s.io", "leases", "get list create patch delete", True),
)
_PACE = re.compile(r"refill|replenish|max-batch-size|concurrent-workers|kube-api-(qps|burst)")
"""The controller's flags that say how fast it works."""
_LEVELS = {
    "restricted": (
        "replace",
        "warn",
        "every rollout gets another pod: allow 'baseline' or 'privileged' there",
    ),
    "baseline": ("userns", "ok", ""),
    "privileged": ("overlay", "ok", ""),
}


async def examine(*, runtime_class: str | None = None, trial: str | None = None, **how: Any) -> Diagnosis:
    """Look at the cluster. *how*: as :meth:`Api.connect` takes it.

    *trial*: an image; three short pods of it show whether network policies are enforced.
    """
    try:
        api = await Api.connect(**how)
    except SandboxError as error:
        return Diagnosis((Row("credentials", "fail", error.message, error.hint),))
    try:
        rows = [await _server(api)]
        if rows[0].status == "fail":
            return Diagnosis(tuple(rows))
        looks: list[Callable[[Api], Awaitable[list[Row]]]] = [
            _clock,
            _namespace,
            _crds,
            _controller,
            _rights,
            _quota,
        ]
        for look in looks:
            rows += await look(api)
        nodes = await _nodes(api)
        rows += nodes_seen(nodes)
        level = await _level(api)
        if level is not None and nodes:
            rows += modes.on_nodes(level, nodes, await _handler(api, runtime_class))
        rows += await further(api, trial, nodes=nodes or [], level=level or "")
        if runtime_class is not None:
            rows.append(await _runtime_class(api, runtime_class))
        return Diagnosis(tuple(rows))
    finally:
        await api.close()


async def _server(api: Api) -> Row:
    try:
        version = await api.get("/version", timeout=10)
    except SandboxError as error:
        return Row(
            "API server", "fail", error.message, error.hint or "is the address right, and the cluster up?"
        )
    return Row(
        "API server", "ok", f"{version.get('gitVersion', '?')}, {api.where}, namespace {api.namespace}"
    )


async def _clock(api: Api) -> list[Row]:
    skew = abs((await server_time(api) - datetime.datetime.now(datetime.UTC)).total_seconds())
    if skew > 30:
        return [
            Row(
                "clocks",
                "warn",
                f"{skew:.0f} s apart",
                "set it: tokens and certificates seem expired, or not good yet, and the ledger's times are "
                "this machine's (claims and Leases go by the API server's clock)",
            )
        ]
    return [Row("clocks", "ok", f"{skew:.0f} s apart")]


async def _namespace(api: Api) -> list[Row]:
    try:
        found = await api.get(Paths(api.namespace).namespace)
    except ApiError as error:
        if error.status == 404:
            return [
                Row(
                    "namespace",
                    "fail",
                    f"there is no {api.namespace!r}",
                    f"kubectl create namespace {api.namespace}",
                )
            ]
        return [
            Row(
                "Pod Security level",
                "warn",
                "may not be read",
                "the mode is then guessed: Kubernetes(mode=...)",
            )
        ]
    level = names.level_of(found)
    mode, status, fix = _LEVELS.get(level, ("overlay", "ok", ""))
    what = f"{level or 'none enforced'}: reset mode {mode} is expected"
    if mode == "userns":
        what += (
            "; manifest where the nodes' seccomp profile forbids that and Spec(user=...) is none of root's"
            "; replace under gVisor"
        )
    return [Row("Pod Security level", status, what, fix)]  # type: ignore[arg-type]


async def _crds(api: Api) -> list[Row]:
    try:
        await api.get(f"/apis/{_EXT}/{names.VERSION}")
    except ApiError as error:
        if error.status == 404:
            fix = "install agent-sandbox v1.0; without, sandboxes are plain pods (role rlsandbox-plain-pods)"
            return [Row("agent-sandbox CRDs", "warn", f"no {_EXT}/{names.VERSION}", fix)]
        return [Row("agent-sandbox CRDs", "warn", error.message)]
    return [Row("agent-sandbox CRDs", "ok", f"{_EXT}/{names.VERSION}")]


async def _controller(api: Api) -> list[Row]:
    """Alive when some pod of it runs and is ready; its flags where they may be read."""
    name = "agent-sandbox controller"
    try:
        found = await api.get(
            "/api/v1/pods", {"labelSelector": "app=agent-sandbox-controller", "limit": "20"}
        )
    except ApiError as error:
        if error.status == 403:
            return [
                Row(
                    name,
                    "warn",
                    "this user may not look",
                    "ask whether it runs; a claim that stays without conditions says no",
                )
            ]
        raise
    pods = found.get("items") or []
    ready = [
        pod
        for pod in pods
        if any(
            c["type"] == "Ready" and c["status"] == "True"
            for c in pod.get("status", {}).get("conditions", ())
        )
    ]
    if not pods:
        return [
            Row(
                name,
                "warn",
                "no pod of it was found",
                "it may run elsewhere; a claim that stays without conditions says no",
            )
        ]
    if not ready:
        return [
            Row(
                name,
                "fail",
                "its pod is not ready",
                f"kubectl -n {pods[0]['metadata']['namespace']} get pods",
            )
        ]
    args = [
        arg for c in ready[0]["spec"]["containers"] for arg in (*c.get("command", ()), *c.get("args", ()))
    ]
    if not any(re.fullmatch(r"--?extensions(=(1|t|true))?", arg, re.IGNORECASE) for arg in args):
        fix = "add --extensions to its args: without it no claim is ever taken up"
        return [Row(name, "fail", "ready, but it does not serve claims, templates and warm pools", fix)]
    flags = [arg.lstrip("-") for arg in args if _PACE.search(arg)]
    said = "ready, " + (
        ", ".join(flags) if flags else "warm pools are refilled at once, without a bound of its own"
    )
    return [Row(name, "ok", said)]


async def _rights(api: Api) -> list[Row]:
    async def may(group: str, resource: str, verb: str) -> bool:
        main, _, sub = resource.partition("/")
        asked = {
            "namespace": "" if resource == "nodes" else api.namespace,
            "group": group,
            "resource": main,
            "subresource": sub,
            "verb": verb,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        told = await api.ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return bool((told.get("status") or {}).get("allowed"))

    rows: list[Row] = []
    for group, resource, verbs, needed in RIGHTS:
        wanted = verbs.split()
        try:
            given = await asyncio.gather(*(may(group, resource, verb) for verb in wanted))
        except SandboxError as error:
            return [Row("rights", "warn", f"could not be asked for: {error.message}")]
        missing = [verb for verb, ok in zip(wanted, given, strict=True) if not ok]
        what, which = f"right: {resource}", " --nodes" if resource == "nodes" else ""
        if not missing:
            rows.append(Row(what, "ok", verbs.replace(" ", ", ")))
        else:
            rows.append(
                Row(
                    what,
                    "fail" if needed else "warn",
                    f"may not {', '.join(missing)}",
                    f"rlsandbox template rbac{which} | kubectl apply -f -",
                )
            )
    return rows


async def _quota(api: Api) -> list[Row]:
    try:
        found = await api.get(f"/api/v1/namespaces/{api.namespace}/resourcequotas")
    except ApiError:
        return [Row("quotas", "warn", "may not be read")]
    rows = []
    for quota in found.get("items") or ():
        hard, used = quota.get("status", {}).get("hard") or {}, quota.get("status", {}).get("used") or {}
        said = ", ".join(f"{key} {used.get(key, '?')} of {value}" for key, value in sorted(hard.items()))
        advice = "a pool larger than this waits for ever"
        named = {
            word for word in ("cpu", "memory") if hard.keys() & {word, f"requests.{word}", f"limits.{word}"}
        }
        if named:  # a quota of these refuses pods that do not say how much they take
            advice += f"; refuses specs without {' and '.join(f'{word}=' for word in sorted(named))}"
        rows.append(Row(f"quota {quota['metadata']['name']}", "warn", said, advice))
    return rows or [Row("quotas", "ok", "none")]


async def _level(api: Api) -> str | None:
    """Of Pod Security; None: it may not be read."""
    try:
        found = await api.get(Paths(api.namespace).namespace)
    except ApiError:
        return None
    return names.level_of(found)


async def _handler(api: Api, runtime_class: str | None) -> str:
    """What nodes call the runtime of that class; empty: their own."""
    if runtime_class is None:
        return ""
    try:
        found = await api.get(f"/apis/node.k8s.io/v1/runtimeclasses/{runtime_class}")
    except ApiError:
        return ""
    return str(found.get("handler") or "")


async def _nodes(api: Api) -> list[JSON] | None:
    """Real ones; None: they may not be looked at."""
    try:
        found = (await api.get("/api/v1/nodes")).get("items") or []
    except ApiError:
        return None
    return [
        node
        for node in found
        if (node["metadata"].get("annotations") or {}).get("kwok.x-k8s.io/node") != "fake"
    ]


def nodes_seen(real: list[JSON] | None) -> list[Row]:
    if real is None:
        return [Row("nodes", "warn", "may not be looked at: kernels, runtimes and disks are not known")]
    ready = [node for node in real if _is(node, "Ready")]
    pressed = [node["metadata"]["name"] for node in real if _is(node, "DiskPressure")]
    infos = [node.get("status", {}).get("nodeInfo", {}) for node in real]
    runtimes = sorted({info.get("containerRuntimeVersion", "?") for info in infos})
    kernels = sorted({info.get("kernelVersion", "?") for info in infos})
    rows = [
        Row(
            "nodes",
            "ok" if ready else "fail",
            f"{len(ready)} of {len(real)} ready; {', '.join(runtimes)}; Linux {', '.join(kernels)}",
        )
    ]
    if pressed:
        rows.append(
            Row(
                "node disks",
                "warn",
                f"pressure on {', '.join(pressed[:5])}",
                "images are removed there and pulled again",
            )
        )
    return rows


def _is(node: JSON, kind: str) -> bool:
    return any(
        c["type"] == kind and c["status"] == "True" for c in node.get("status", {}).get("conditions", ())
    )


async def _runtime_class(api: Api, name: str) -> Row:
    try:
        found = await api.get(f"/apis/node.k8s.io/v1/runtimeclasses/{name}")
    except ApiError as error:
        if error.status == 404:
            return Row("RuntimeClass", "fail", f"there is no {name!r}", "kubectl get runtimeclasses")
        return Row("RuntimeClass", "warn", f"{name!r} may not be read")
    return Row("RuntimeClass", "ok", f"{name}, handler {found.get('handler')}")
