"""The Kubernetes backend: a member is a pod, claimed through agent-sandbox; its first process: the keeper."""

from __future__ import annotations

import asyncio
import datetime
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any

from ...errors import (
    ConfigError,
    ProvisionError,
    SandboxDiedError,
    SandboxError,
    ThrottledError,
    UnsupportedError,
)
from ...keeper.build import machine
from ...keeper.durable import Durable
from ...spec import Spec
from ..base import Backend, Capabilities, Member, Tell
from ..copies import LayerCopies
from . import failures, inject, manifests, names
from .api import JSON, Api
from .cluster import Cluster, default_run
from .exec import ExecStream
from .manifests import MODES, Allowed, Shape
from .places import Place, Places
from .removal import Removal
from .users import Users
from .watch import condition

log = logging.getLogger("rlsandbox.kubernetes")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIFETIME_S = 86400.0
SLOW_S = 5.0
"""A sandbox that takes longer to start is looked after."""


class Kubernetes(Backend):
    """Sandboxes on a cluster.

    Args:
        namespace: where they live; the context's own otherwise.
        context: of the kubeconfig.
        template: a SandboxTemplate of the platform team's, used as it is.
        warm_pool: a SandboxWarmPool of theirs, likewise.
        runtime_class: of all pods.
        gvisor_class: the RuntimeClass for specs with ``isolation="gvisor"``.
        kubeconfig: a file; $KUBECONFIG, ~/.kube/config or the pod's service account otherwise.
        image: for specs that name none.
        mode: the reset mode to make pods for: ``overlay``, ``userns``, ``manifest`` (for specs with a user
            other than root), ``replace``; ``auto``: the best that the namespace's Pod Security level allows.
        arch: of the nodes, ``x86_64`` or ``aarch64``; this machine's otherwise.
        pull_policy, pull_secrets, node_selector, tolerations: of all pods.
        write_rate: writes a second that the API server is asked for at most, of all kinds.
        lifetime: seconds after which a claim ends by itself, should everything else fail.
        grace: seconds for which what runs lives on without its stream.
        keep: where snapshots, checkpoints and what hibernates are kept, so that they outlive their pods: a
            directory, or the URL of an object store that fsspec knows; by default a directory in the cache of
            rlsandbox on this machine; False: they are not.
        streams: exec streams kept open to sandboxes in which nothing is under way; those of more are closed
            after 10 s, and opened again (some 50 ms) when something is. So many sandboxes are reset at once.
        image_user: whether commands of specs that name no user run as the USER of their image, read from its
            registry with the credentials of ``~/.docker/config.json``; what cannot be read is an error.
            False: as root, in mode ``replace`` as uid 65534.
        mirrors: where to ask for that instead, by registry: ``{"docker.io": "https://mirror.example"}``.
        keeper: how it comes into the pods of a named template or warm pool: by the ``stanza`` it carries,
            or by ``inject``: written into each pod that runs already, in mode ``replace``.
    """

    name = "kubernetes"
    max_creating = 32

    def __init__(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        template: str | None = None,
        warm_pool: str | None = None,
        runtime_class: str | None = None,
        gvisor_class: str | None = None,
        kubeconfig: str | None = None,
        image: str | None = None,
        mode: str = "auto",
        arch: str | None = None,
        pull_policy: str = "IfNotPresent",
        pull_secrets: Sequence[str] = (),
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        write_rate: float = 50.0,
        lifetime: float = LIFETIME_S,
        grace: int = 60,
        keep: str | bool = True,
        streams: int = 128,
        image_user: bool = False,
        mirrors: Mapping[str, str] | None = None,
        keeper: str = "stanza",
    ) -> None:
        if mode not in ("auto", *MODES):
            raise ConfigError(f"Kubernetes: mode must be auto, {', '.join(MODES)}, not {mode!r}")
        if keeper not in ("stanza", "inject"):
            raise ConfigError(f"Kubernetes: keeper must be 'stanza' or 'inject', not {keeper!r}")
        if keeper == "inject" and template is None and warm_pool is None:
            raise ConfigError("Kubernetes: keeper='inject' is for a named template or warm pool: name one")
        if keeper == "inject" and mode not in ("auto", "replace"):
            raise ConfigError("Kubernetes: keeper='inject' can only be mode replace")
        if template is not None and warm_pool is not None:
            raise ConfigError("Kubernetes: a warm pool has its own template; name one of the two")
        for what, value in (
            ("namespace", namespace), ("template", template), ("warm_pool", warm_pool),
            ("runtime_class", runtime_class), ("gvisor_class", gvisor_class),
            *(("pull_secrets", name) for name in pull_secrets),
        ):  # fmt: skip
            if value is not None:
                names.check_name(value, f"Kubernetes: {what}", dots=what != "namespace")
        arch = machine() if arch is None else arch
        if arch not in manifests.ARCH:
            raise ConfigError(f"Kubernetes: arch must be one of {', '.join(manifests.ARCH)}, not {arch!r}")
        if write_rate <= 0 or lifetime <= 0 or grace <= 0:
            raise ConfigError("Kubernetes: write_rate, lifetime and grace must be above 0")
        if streams < 0:
            raise ConfigError(f"Kubernetes: streams must be a number of exec streams, not {streams}")
        self._shape = Shape(
            mode="", arch=arch, image=image, runtime_class=runtime_class, gvisor_class=gvisor_class,
            pull_policy=pull_policy, pull_secrets=tuple(pull_secrets),
            node_selector=dict(node_selector or {}), tolerations=tuple(tolerations), grace=grace,
        )  # fmt: skip
        self._inject = keeper == "inject"
        mode = "replace" if self._inject else mode
        self._mode, self._template, self._warm_pool = mode, template, warm_pool
        self._how = {"kubeconfig": kubeconfig, "context": context, "namespace": namespace}
        if image_user and (template is not None or warm_pool is not None):
            raise ConfigError(
                "Kubernetes: image_user is not for a named template or warm pool: its own args say it"
            )
        if mirrors and not image_user:
            raise ConfigError("Kubernetes: mirrors are asked for images' users only: image_user=True")
        self._users = Users(self._shape, mirrors or {}) if image_user else None
        self._write_rate, self._lifetime, self._streams = write_rate, lifetime, streams
        self.max_resetting = max(streams, 1)
        self._run = default_run()
        self._api: Api | None = None
        self._lock = asyncio.Lock()
        self._places = Places()
        self._removal = Removal(self._places)
        self._env: dict[str, dict[str, str]] = {}
        self.keeps_layers = keep is not False
        self._keep = keep if isinstance(keep, str) else None
        self._copies: LayerCopies | None = None
        self._named: str | None = None
        self._requests: Mapping[str, int] = {}
        """When it was closed."""

    def __repr__(self) -> str:
        where = (
            "not connected" if self._api is None else f"{self._api.where}, namespace {self._api.namespace}"
        )
        return f"Kubernetes({where}, {len(self._places)} members)"

    @property
    def _cluster(self) -> Cluster | None:
        """Once it is connected."""
        return self._places.cluster

    @property
    def shape(self) -> Shape:
        """What its pods have in common."""
        return self._shape

    async def connect_api(self) -> Api:
        """A connection of its own to this backend's cluster, to be closed by the caller."""
        return await Api.connect(**self._how, write_rate=self._write_rate)

    @property
    def requests(self) -> Mapping[str, int]:
        """How many requests were made of the API server, by verb."""
        return self._requests if self._api is None else dict(self._api.requests)

    @property
    def open_streams(self) -> int:
        """Exec streams that are open now."""
        return sum(p.stream is not None and not p.stream.resting for p in self._places)

    async def _get(self) -> Cluster:
        async with self._lock:
            cluster = self._cluster
            if cluster is None:
                if self._keep is not None:
                    self._kept()  # a place that cannot be used is told before work begins
                api = await Api.connect(**self._how, write_rate=self._write_rate)
                try:
                    cluster = await self._open(api)
                except BaseException:
                    await api.close()
                    raise
                self._api, self._places.cluster = api, cluster
            return cluster

    async def _open(self, api: Api) -> Cluster:
        named = self._template is not None or self._warm_pool is not None
        cluster = await Cluster.open(
            api, self._run, self._shape, mode=self._mode, named=named, on_claim=self._places.on_claim,
            on_pod=self._places.on_pod, on_node=self._places.on_node, users=self._users,
        )  # fmt: skip
        try:
            if not named:
                # Compiled the first time: no sandbox's deadline should pay for it.
                await cluster.keeper()
            else:
                self._named = await cluster.named_pool(
                    self._warm_pool, self._template, carries_keeper=not self._inject
                )
        except BaseException:
            await cluster.close()  # its Lease and watches
            raise
        return cluster

    async def capabilities(self) -> Capabilities:
        cluster = await self._get()
        mode = cluster.shape.mode
        # What a pod turns out to be is told by its keeper; a pod made for overlay may still be less.
        modes = {
            "overlay": {"overlay", "userns", "manifest", "replace"},
            "userns": {"userns", "manifest", "replace"},
            "manifest": {"manifest"},
        }.get(mode, {"replace"})
        return Capabilities(
            reset_modes=frozenset(modes),
            adopt=False,
            pause=True,
            snapshot=mode in ("overlay", "userns"),
            max_writes_per_s=self._write_rate * 0.8,
        )

    # -- members -------------------------------------------------------------------------------------

    async def provision(
        self, spec: Spec, *, member: str, labels: Mapping[str, str], deadline: float, node: str = ""
    ) -> Member:
        loop = asyncio.get_running_loop()
        name = names.dns_label(f"rls-{self._run}-{member}")
        place = Place(member, name, spec, dict(labels), loop.create_future(), wish=node)
        try:
            async with asyncio.timeout(deadline):
                cluster = await self._get()
                body, path = await self._body(cluster, place)
                self._places.add(place)
                await cluster.api.create(path, body, limit=deadline, throttle=True)
                await self._until_ready(cluster, place)
        except ThrottledError:
            self._places.forget(place)
            raise
        except TimeoutError:
            error = await self._late(place, deadline)
            self._removal.clean(place)
            raise error from None
        except BaseException:
            self._removal.clean(place)
            raise
        finally:
            place.stop_timer()
        place.facts |= Allowed.of(spec).facts(spec)
        return Member(id=member, node=self._places.node(place), facts=place.facts)

    async def _until_ready(self, cluster: Cluster, place: Place) -> None:
        while not (await asyncio.wait({place.ready}, timeout=SLOW_S))[0]:
            try:
                await cluster.look_again()
            except SandboxError as error:
                log.debug("could not look why sandbox %s takes long: %s", place.member, error)
            pod = self._places.pod(place)
            if pod and (stuck := cluster.events.verdict(pod)) is not None:
                place.fail(stuck)
        try:
            place.ready.result()
        except SandboxError as error:
            if error.kind == "template_gone" and self._named is None:
                cluster.forget(place.spec)
            raise
        if self._named is not None:
            await cluster.check_template(self._places.pod(place))
        elif cluster.crds:
            await cluster.check_own(place.spec, place.wish, self._places.pod(place))

    async def _body(self, cluster: Cluster, place: Place) -> tuple[JSON, str]:
        how: dict[str, Any] = {"run": self._run, "member": place.member, "labels": place.labels}
        if not cluster.crds:
            pod = await cluster.pod_for(place.spec, place.wish)
            how["pod_labels"] = manifests.labels_for(cluster.known(place.spec), cluster.shape)
            how["lifetime_s"] = self._lifetime
            return manifests.plain_pod(place.name, pod, **how), cluster.paths.pods
        if self._named is not None:
            if place.spec.image is not None:
                raise ConfigError(
                    f"image {place.spec.image!r}: the images of a named template or warm pool are its own",
                    hint="leave image out, or use no template and no warm_pool",
                )
            if self._inject and place.spec.network == "none":
                raise UnsupportedError(
                    "network='none' cannot be held by a keeper that was injected", phase="config",
                    hint="Spec(network='host'), or a template that carries the keeper",
                )  # fmt: skip
            pool = self._named
        else:
            pool = await cluster.pool_for(place.spec, place.wish)
        ends = cluster.api.now() + datetime.timedelta(seconds=self._lifetime)
        return manifests.claim(place.name, pool, ends=ends, **how), cluster.paths.claims

    async def _late(self, place: Place, deadline: float) -> SandboxError:
        """The error of a sandbox that was not ready in time: with what is known of it."""
        pod = self._places.pod(place)
        said = ""
        verdict = failures.of_pod(pod) if pod else None
        if verdict is None and (claim := self._places.claim(place)):
            if not claim.get("status"):
                said = "no controller has taken it up: does agent-sandbox's run?"
            verdict = failures.of_claim(claim)
            ready = condition(claim, "Ready")
            said = said or " ".join(f"{ready.get('reason', '')}: {ready.get('message', '')}".split()).strip(
                ": "
            )
        if verdict is not None:
            return verdict.error
        if self._cluster is not None:
            events = await self._cluster.events.of(place.pod or place.name)
            said = events[-1] if events else said
        return ProvisionError(
            f"the sandbox was not ready within {deadline:g} s" + (f": {said}" if said else ""),
            kind="provision_timeout", sandbox=place.member,
        )  # fmt: skip

    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        place, cluster = self._places.get(member.id), self._cluster
        if place is None or cluster is None or place.leaving:
            raise SandboxDiedError("it is not there any more", sandbox=member.id)
        if place.ended is not None:
            raise place.ended
        if place.stream is not None:
            raise SandboxDiedError("its keeper was connected to before", sandbox=member.id)

        async def dial() -> ExecStream:
            if place.ended is not None:
                raise place.ended
            way = inject.CONNECT if self._inject else names.CONNECT
            return await ExecStream.open(cluster.api, place.pod, place.container, way)

        if self._inject:
            options = manifests.keeper_options(place.spec, self._shape)
            await inject.inject(cluster.api, place.pod, place.container, self._shape.arch, options)
        stream = await Durable.open(
            dial, token=place.token, grace=self._shape.grace, rest=lambda: self.open_streams > self._streams
        )
        if place.ended is not None:
            stream.abort()
            raise place.ended
        place.stream = stream
        place.facts |= {**stream.facts, "isolation": _isolation(stream.facts)}
        known = cluster.known(place.spec)
        if manifests.by_policy(known, cluster.shape):
            place.facts["network"] = "policy"
        if known.user is not None and stream.facts["mode"] != "replace":  # there the pod is one user's
            place.facts["user"] = known.user
        self._env[place.spec.digest] = stream.env
        return stream.streams()

    async def dispose(self, member: Member) -> None:
        place = self._places.get(member.id)
        if place is None:
            if self._cluster is None:
                return  # nothing was ever made
            name = names.dns_label(f"rls-{self._run}-{member.id}")
            place = Place(member.id, name, Spec(), {}, asyncio.get_running_loop().create_future())
            self._places.add_stranger(place)
        await self._removal.remove(place)

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        cluster = self._cluster
        if cluster is None:
            return []
        watch = cluster.claims if cluster.claims is not None else cluster.pods
        assert watch is not None
        found = []
        for item in watch.store.values():
            meta = item["metadata"]
            if meta.get("deletionTimestamp") or not labels.items() <= names.labels_of(item).items():
                continue
            place = self._places.named(meta["name"])
            id_ = (meta.get("annotations") or {}).get(names.MEMBER) or meta["name"]
            node = self._places.node(place) if place is not None else None
            found.append(Member(id=id_, node=node, facts=place.facts if place is not None else {}))
        return found

    def listen(self, tell: Tell) -> None:
        self._places.tell = tell

    def nodes(self) -> Sequence[str]:
        """Ready, not being cleared, of the right kind; none where nodes may not be looked at."""
        cluster = self._cluster
        if cluster is None or cluster.nodes is None or self._named is not None:
            return ()
        return cluster.nodes.usable(cluster.shape)

    async def keep_layer(self, layer: str, tar: AsyncIterable[bytes]) -> None:
        await self._kept().save(layer, tar)

    def kept_layer(self, layer: str) -> AsyncGenerator[bytes, None] | None:
        copies = self._copies
        return copies.read(layer) if copies is not None and layer in copies else None

    async def drop_layer(self, layer: str) -> None:
        if self._copies is not None:
            await self._copies.drop(layer)

    def _kept(self) -> LayerCopies:
        if self._copies is None:
            self._copies = LayerCopies(self._keep, self._run)
        return self._copies

    def environment(self, spec: Spec) -> Mapping[str, str]:
        return {"PATH": PATH, **self._env.get(spec.digest, {})}

    async def close(self) -> None:
        if self._copies is not None:
            await self._copies.close()
            self._copies = None
        cluster, api = self._cluster, self._api
        if cluster is None or api is None:
            return
        await self._removal.settle(30)
        for place in self._places:
            if place.stream is not None:
                place.stream.abort()
                await place.stream.wait_closed()
        self._places.clear()
        self._places.cluster = self._api = None
        await cluster.close()
        self._requests = dict(api.requests)
        await api.close()


def _isolation(facts: Mapping[str, str]) -> str:
    if facts.get("isolation") == "chroot":
        return "chroot"  # gVisor without mount namespaces
    return {"replace": "none", "manifest": "user"}.get(facts.get("mode", ""), "namespaces")
