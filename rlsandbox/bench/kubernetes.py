"""``bench ttfc`` on a cluster: our pool's scenarios and what others do, and what the cluster is made of."""

from __future__ import annotations

from typing import Any

from ..backends.kubernetes import Kubernetes
from ..backends.kubernetes.api import JSON, Api
from ..backends.kubernetes.names import Paths
from ..errors import ConfigError, SandboxError
from ..spec import Spec
from .baselines import Baselines
from .pools import PoolBench
from .ttfc import Batch, Plan

TYPE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")


class KubernetesBench:
    """All scenarios.

    Args:
        how: kubeconfig, context, namespace.
        image: of scenarios for which the plan names none.
        options: further ones of :class:`~rlsandbox.backends.Kubernetes`.
        pool: arguments of the pool.
    """

    def __init__(
        self,
        how: dict[str, Any],
        *,
        image: str | None = None,
        pull_policy: str = "IfNotPresent",
        runtime_class: str | None = None,
        write_rate: float = 50.0,
        spec: Spec | None = None,
        options: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
    ) -> None:
        self._how, self._image = how, image
        self._settings = {
            "pull policy": pull_policy, "runtime class": runtime_class, "write rate": write_rate,
            **(options or {}), **(pool or {}),
        }  # fmt: skip

        def backend() -> Kubernetes:
            return Kubernetes(
                **how, image=image, pull_policy=pull_policy, runtime_class=runtime_class,
                write_rate=write_rate, **(options or {}),
            )  # fmt: skip

        self._make = backend
        self._pools = PoolBench(backend, spec=spec, **(pool or {}))
        self._others = Baselines(
            how, pull_policy=pull_policy, runtime_class=runtime_class, write_rate=write_rate
        )
        self._images: set[str] = {image} if image is not None else set()

    async def check(self, plan: Plan) -> None:
        if not plan.images and self._image is None:
            for scenario in plan.scenarios:
                if scenario != "high-cardinality":
                    raise ConfigError(
                        f"scenario {scenario!r} needs an image", hint="--image registry.example/task:1"
                    )
        backend = self._make()
        try:
            await backend.capabilities()  # namespace, credentials, RuntimeClass
            if "peer" in plan.scenarios:
                await self._others.check()
        finally:
            await backend.close()

    async def batch(self, scenario: str, image: str | None, plan: Plan) -> Batch:
        image = image or self._image
        self._images |= {*plan.many, *([image] if image is not None else [])}
        if scenario == "job":
            return await self._others.job(str(image), plan)
        if scenario == "peer":
            return await self._others.peer(str(image), plan)
        batch = await self._pools.batch(scenario, image, plan)
        if scenario in ("cold", "high-cardinality"):
            batch.notes += await self._pulls()
        return batch

    async def close(self) -> None:
        await self._pools.close()

    async def facts(self) -> dict[str, Any]:
        found = await self._pools.facts()
        api = await Api.connect(**self._how)
        try:
            nodes = await _items(api, "/api/v1/nodes")
            found["nodes"] = [_node(node) for node in nodes] if nodes is not None else "may not be read"
            found["images"] = _images(nodes or [], self._images)
            version = await _maybe(api, "/version")
            found["kubernetes"] = version.get("gitVersion", "")
            group = await _maybe(api, "/apis/extensions.agents.x-k8s.io")
            found["agent-sandbox"] = [row["version"] for row in group.get("versions") or ()]
            found["where"] = f"{api.where}, namespace {api.namespace}"
        finally:
            await api.close()
        return {**found, "settings": self._settings}

    async def _pulls(self) -> list[str]:
        """What kubelets said of pulls just now: it tells whether images really had to be pulled."""
        api = await Api.connect(**self._how)
        try:
            rows = await _items(api, Paths(api.namespace).events, {"fieldSelector": "reason=Pulled"}) or []
        finally:
            await api.close()
        said = [" ".join(str(row.get("message", "")).split()) for row in rows]
        pulled = [text for text in said if "Successfully pulled" in text]
        return [f"{len(pulled)} of the namespace's {len(said)} pods so far pulled their image", *pulled[-3:]]


async def _maybe(api: Api, path: str, query: dict[str, str] | None = None) -> JSON:
    """What is there and may be read; else nothing."""
    try:
        return await api.get(path, query, timeout=15)
    except SandboxError:
        return {}


async def _items(api: Api, path: str, query: dict[str, str] | None = None) -> list[JSON] | None:
    found = await _maybe(api, path, query)
    rows: list[JSON] | None = found.get("items")
    return rows


def _node(node: JSON) -> dict[str, Any]:
    labels, status = node["metadata"].get("labels") or {}, node.get("status") or {}
    info = status.get("nodeInfo") or {}
    return {
        "name": node["metadata"]["name"],
        "machine type": next((labels[key] for key in TYPE if key in labels), "unknown"),
        "cpu": (status.get("capacity") or {}).get("cpu", ""),
        "memory": (status.get("capacity") or {}).get("memory", ""),
        "architecture": info.get("architecture", ""),
        "kernel": info.get("kernelVersion", ""),
        "os": info.get("osImage", ""),
        "kubelet": info.get("kubeletVersion", ""),
        "runtime": info.get("containerRuntimeVersion", ""),
    }


def _images(nodes: list[JSON], wanted: set[str]) -> dict[str, int | None]:
    """Bytes of each image as the nodes tell them; None where no node has it (any more)."""
    sizes = {
        name: int(row.get("sizeBytes", 0))
        for node in nodes
        for row in (node.get("status") or {}).get("images") or ()
        for name in row.get("names") or ()
    }

    def size(name: str) -> int | None:
        """Nodes list an image of docker.io with its registry in front."""
        return sizes.get(name) or next((sizes[it] for it in sizes if it.endswith(f"/{name}")), None)

    return {name: size(name) for name in sorted(wanted)}
