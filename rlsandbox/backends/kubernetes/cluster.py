"""One namespace of one cluster, as a run uses it: what is there, what was made for each spec."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace

from ..._loops import stands
from ...errors import ConfigError, ProvisionError, UnsupportedError
from ...keeper.build import keeper_binary
from ...spec import Spec
from . import manifests, names, policy
from .api import JSON, Api, ApiError
from .events import Events
from .lease import RunLease
from .manifests import Shape
from .names import Paths
from .nodes import Nodes
from .stanza import missing_keeper, problems
from .tidy import tidy_quietly
from .users import Users
from .watch import Watch, slim

log = logging.getLogger("rlsandbox.kubernetes")


LOOK_AGAIN_S = 5.0


class Cluster:
    """Make one with :meth:`open`."""

    def __init__(self, api: Api, shape: Shape, run: str) -> None:
        self.api, self.shape, self.run = api, shape, run
        self.paths = Paths(api.namespace)
        self.crds = True
        self.nodes: Nodes | None = None
        self.claims: Watch | None = None
        self.pods: Watch | None = None
        self.lease = RunLease(api, self.paths.leases, run)
        self.events = Events(api)
        self.users: Users | None = None
        self._made: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._keeper: asyncio.Task[str] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._closed: asyncio.Task[None] | None = None
        self._looked = -LOOK_AGAIN_S
        self._theirs: tuple[str, dict[str, str]] | None = None
        """Somebody's template: its name, and the images it had when the run began."""
        self._rewritten: set[tuple[tuple[str, str], ...]] = set()

    @classmethod
    async def open(
        cls,
        api: Api,
        run: str,
        shape: Shape,
        *,
        mode: str,
        named: bool,
        on_claim: Callable[[str, JSON], object],
        on_pod: Callable[[str, JSON], object],
        on_node: Callable[[str], object],
        users: Users | None = None,
    ) -> Cluster:
        """See what there is and begin to watch it.

        Raises:
            ConfigError: no such namespace. SandboxError: rights are missing, credentials have expired ...
        """
        self = cls(api, shape, run)
        self.users = users
        level = await self._look()
        if mode == "auto":
            mode = {"restricted": "replace", "baseline": "userns"}.get(level, "overlay")
        self.shape = replace(shape, mode=mode)
        for runtime in (shape.runtime_class, shape.gvisor_class):
            await self._has_runtime(runtime)
        for secret in shape.pull_secrets:
            await self._has_secret(secret)
        self.crds = await self._has_crds(named)
        selector = f"{names.RUN}={run}"
        self.pods = Watch(api, self.paths.pods, selector=f"{names.POD_RUN}={run}", changed=on_pod, keep=slim)
        if self.crds:
            self.claims = Watch(api, self.paths.claims, selector=selector, changed=on_claim, keep=slim)
        self.nodes = Nodes(api, on_node)
        await self.lease.begin()
        try:
            self._tidying = asyncio.get_running_loop().create_task(tidy_quietly(api), name="rlsandbox: tidy")
            await self.nodes.start()
            await self.pods.start()
            if self.claims is not None:
                await self.claims.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.cancel()
            await asyncio.gather(self._closed, return_exceptions=True)
        for made in (*self._made.values(), *([self._keeper] if self._keeper else [])):
            made.cancel()
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        for watch in (self.claims, self.pods, self.nodes):
            if watch is not None:
                await watch.close()
        if self.users is not None:
            await self.users.close()
        await self.lease.end()

    async def _look(self) -> str:
        """Whether the namespace is there, and its Pod Security level (empty: unknown)."""
        missing = ConfigError(
            f"{self.api.where} has no namespace {self.api.namespace!r}", hint="Kubernetes(namespace=...)"
        )
        found = await self.api.look(self.paths.namespace, missing, timeout=15)
        if found is None:
            return ""  # this right is only a convenience
        return names.level_of(found)

    async def _has_runtime(self, name: str | None) -> None:
        """
        Raises:
            ConfigError: there is none of that name. Who may not look hears of it from the first pod.
        """
        if name is None:
            return
        await self.api.runtime_class(name)

    async def _has_secret(self, name: str) -> None:
        """
        Raises:
            ConfigError: there is none of that name: kubelets pull without it, and only tell a refusal.
                Who may not look (our own role does not let one) hears of it from the first pod.
        """
        missing = ConfigError(
            f"namespace {self.api.namespace!r} has no Secret {name!r} to pull images with",
            kind="no_pull_secret",
            hint=f"kubectl -n {self.api.namespace} create secret docker-registry {name} ...",
        )
        await self.api.look(f"{self.paths.namespace}/secrets/{name}", missing)

    async def _has_crds(self, named: bool) -> bool:
        try:
            await self.api.get(f"/apis/{names.EXTENSIONS}/{names.VERSION}")
        except ApiError as error:
            if error.status not in (403, 404):
                raise
        else:
            return True
        try:
            group = await self.api.get(f"/apis/{names.EXTENSIONS}")
            there = ", ".join(row["version"] for row in group.get("versions") or ())
        except ApiError:
            there = ""
        said = f"{self.api.where} has " + (
            f"agent-sandbox of another version ({there}; wanted: {names.VERSION})"
            if there
            else "no agent-sandbox CRDs"
        )
        if named:
            raise UnsupportedError(
                f"{said}: there are no templates and warm pools", phase="config",
                hint="install agent-sandbox v1.0 with its extensions",
            )  # fmt: skip
        log.warning("%s: sandboxes are plain pods", said)
        return False

    # -- what sandboxes are made from ----------------------------------------------------------------

    async def keeper(self) -> str:
        """The name of the keeper's ConfigMap, which is there."""
        keeper = self._keeper
        if keeper is None or not stands(keeper):
            keeper = self._keeper = asyncio.get_running_loop().create_task(self._make_keeper())
        return await asyncio.shield(keeper)

    async def _make_keeper(self) -> str:
        arch = self.shape.arch
        binary = await asyncio.to_thread(keeper_binary, arch)
        body = await asyncio.to_thread(manifests.keeper_config_map, binary, arch)
        name: str = body["metadata"]["name"]
        try:
            await self.api.get(f"{self.paths.config_maps}/{name}")
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            await self.api.create(self.paths.config_maps, body)
        return name

    async def look_again(self) -> None:
        """Sandboxes take long to start: why, and is the ConfigMap there still, without which none does?"""
        now = asyncio.get_running_loop().time()
        if now - self._looked < LOOK_AGAIN_S:
            return
        self._looked = now
        await self.events.look()
        if self._keeper is None:
            return
        name = await self.keeper()
        try:
            await self.api.get(f"{self.paths.config_maps}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            log.warning("ConfigMap %s was deleted by somebody else: it is made again", name)
            self._keeper = None
            await self.keeper()

    def forget(self, spec: Spec) -> None:
        """What was made for *spec* is gone: the next sandbox makes it again."""
        for key in [key for key in self._made if key[0] == spec.digest]:
            del self._made[key]

    async def pool_for(self, spec: Spec, node: str = "") -> str:
        """The warm pool from which sandboxes of *spec* are claimed; made once, shared by equal specs."""
        key = spec.digest, node
        made = self._made.get(key)
        if made is None or not stands(made):
            made = self._made[key] = asyncio.get_running_loop().create_task(self._make_pool(spec, node))
        return await asyncio.shield(made)

    def known(self, spec: Spec) -> Spec:
        """*spec* with what its image says of it, as far as that was asked for."""
        return spec if self.users is None else self.users.known(spec)

    async def pod_for(self, spec: Spec, node: str = "") -> JSON:
        """
        Raises:
            ConfigError, UnsupportedError: it cannot be what *spec* asks for. ImageError: its image's USER is
                wanted and cannot be read.
        """
        keeper = await self.keeper()
        if self.users is not None:
            spec = await self.users.with_user(spec)
        closed = manifests.by_policy(spec, self.shape)
        pod = manifests.pod_spec(spec, self.shape, keeper, node, closed_by_policy=closed)
        if closed:
            if self._closed is None or not stands(self._closed):
                image = pod["containers"][0]["image"]
                trial = policy.demand(self.api, image, keeper, pod, run=self.run)
                self._closed = asyncio.get_running_loop().create_task(trial, name="rlsandbox: try a policy")
            await asyncio.shield(self._closed)
        return pod

    async def _make_pool(self, spec: Spec, node: str) -> str:
        pod = await self.pod_for(spec, node)
        labels = manifests.labels_for(self.known(spec), self.shape)
        name = f"rlsandbox-{names.digest([pod, labels] if labels else pod)}"
        template = manifests.template(name, pod, labels)
        await self.api.apply(f"{self.paths.templates}/{name}", template)
        await self.api.apply(f"{self.paths.warm_pools}/{name}", manifests.warm_pool(name, name, 0))
        return name

    async def named_pool(
        self, warm_pool: str | None, template: str | None, *, carries_keeper: bool = True
    ) -> str:
        """A warm pool that somebody else made, or one of ours over somebody's template; looked at first."""
        if warm_pool is not None:
            pool = await self._named(self.paths.warm_pools, "SandboxWarmPool", warm_pool)
            template = pool["spec"]["sandboxTemplateRef"]["name"]
        assert template is not None
        found = await self._named(self.paths.templates, "SandboxTemplate", template)
        pod = found["spec"]["podTemplate"]["spec"]
        wrong = problems(pod) if carries_keeper else []
        if carries_keeper and (missing := await missing_keeper(self.api, self.paths, pod)):
            wrong.append(missing)
        if wrong:
            raise ConfigError(
                f"SandboxTemplate {template!r} does not carry the keeper: {wrong[0]}"
                + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
                hint=f"rlsandbox template check {template}; or Kubernetes(keeper='inject'), mode replace",
            )
        self._theirs = (template, _images(pod))
        if warm_pool is not None:
            return warm_pool
        name = names.dns_label(f"rlsandbox-{template}")
        await self.api.apply(f"{self.paths.warm_pools}/{name}", manifests.warm_pool(name, template, 0))
        return name

    async def check_own(self, spec: Spec, node: str, pod: JSON) -> None:
        """Whether a pod is of the template that was made here for *spec*: of another image nobody's may be.

        Raises:
            ProvisionError: somebody else has changed it. The next sandbox makes it again.
        """
        made = self._made.get((spec.digest, node))
        seen = _images(pod.get("spec") or {}).get(names.CONTAINER)
        wanted = spec.image if spec.image is not None else str(self.shape.image)
        if made is None or seen is None:
            return
        template = await asyncio.shield(made)
        if await self._images_now(template, {names.CONTAINER: wanted}, pod) is None:
            return
        self.forget(spec)
        raise ProvisionError(
            f"SandboxTemplate {template!r} of rlsandbox was changed by somebody else: the image is "
            f"{seen}, not {wanted}; it is made again",
            kind="template_changed", retryable=True,
        )  # fmt: skip

    async def check_template(self, pod: JSON) -> None:
        """Whether a pod of somebody's template is of the one that the run began with.

        Raises:
            ProvisionError: the template was changed since; this run's other sandboxes are of the old one.
        """
        assert self._theirs is not None
        template, images = self._theirs
        now = await self._images_now(template, images, pod)
        if now is None:
            return
        name = next(name for name in sorted({*images, *now}) if images.get(name) != now.get(name))
        raise ProvisionError(
            f"SandboxTemplate {template!r} was changed since the run began: the image of its "
            f"container {name!r} was {images.get(name, 'none')} and is {now.get(name, 'none')}",
            kind="template_changed", retryable=False,
            hint="end the run and start another one: its sandboxes would be of two kinds",
        )  # fmt: skip

    async def _images_now(self, template: str, images: dict[str, str], pod: JSON) -> dict[str, str] | None:
        """A template's, when they are not *images* any more, which *pod* was to have; None: they are.

        Only a pod with other images makes us look: a cluster may rewrite them in every pod it admits.
        """
        seen = {name: image for name, image in _images(pod.get("spec") or {}).items() if name in images}
        rows = tuple(sorted(seen.items()))
        if seen == images or rows in self._rewritten:
            return None
        found = await self._named(self.paths.templates, "SandboxTemplate", template)
        now = _images(found["spec"]["podTemplate"]["spec"])
        if now != images:
            return now
        self._rewritten.add(rows)
        return None

    async def _named(self, path: str, kind: str, name: str) -> JSON:
        try:
            return await self.api.get(f"{path}/{name}")
        except ApiError as error:
            if error.status == 404:
                raise ConfigError(f"namespace {self.api.namespace!r} has no {kind} {name!r}") from error
            raise


def _images(spec: JSON) -> dict[str, str]:
    """By container."""
    return {str(row["name"]): str(row.get("image", "")) for row in spec.get("containers") or ()}


def default_run() -> str:
    return f"{os.getpid() % 46656:x}{os.urandom(4).hex()}"
