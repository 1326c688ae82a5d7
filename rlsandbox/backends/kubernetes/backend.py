"""The Kubernetes backend: a member is a pod, claimed through agent-sandbox; its first process: the keeper."""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from .nodes import pod_state
from .watch import condition

log = logging.getLogger("rlsandbox.kubernetes")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIFETIME_S = 86400.0
COLLECTED_S = 8.0
"""In which a pod goes whose claim has gone, usually."""
SLOW_S = 5.0
"""A sandbox that takes longer to start is looked after."""


@dataclass
class _Place:
    """A member that this backend makes or has made."""

    member: str
    name: str
    """Of its claim, or plain pod."""
    spec: Spec
    labels: dict[str, str]
    ready: asyncio.Future[None] = field(repr=False)
    gone: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    token: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    pod: str = ""
    container: str = names.CONTAINER
    facts: dict[str, str] = field(default_factory=dict)
    stream: Durable | None = field(default=None, repr=False)
    ended: SandboxDiedError | None = None
    timer: asyncio.TimerHandle | None = None
    verdict: str = ""
    """The kind of the verdict that the timer waits for."""
    leaving: bool = False
    asked: bool = False
    """Whether the API server has heard that it is to be removed."""
    helped: bool = False
    """Whether its pod's removal was asked for as well, since nobody collected it."""
    told: str = ""
    """What the pool was told of its place: ``away``, ``leaving``, or nothing."""
    wish: str = ""
    """The node that it should be on."""


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
        self._write_rate, self._lifetime, self._streams = write_rate, lifetime, streams
        self.max_resetting = max(streams, 1)
        self._run = default_run()
        self._api: Api | None = None
        self._cluster: Cluster | None = None
        self._lock = asyncio.Lock()
        self._places: dict[str, _Place] = {}
        self._by_name: dict[str, _Place] = {}
        self._env: dict[str, dict[str, str]] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._collected_at = 0.0
        """When a pod whose claim was removed went last without our help."""
        self.keeps_layers = keep is not False
        self._keep = keep if isinstance(keep, str) else None
        self._copies: LayerCopies | None = None
        self._named: str | None = None
        self._requests: Mapping[str, int] = {}
        """When it was closed."""
        self._tell: Tell | None = None

    def __repr__(self) -> str:
        where = (
            "not connected" if self._api is None else f"{self._api.where}, namespace {self._api.namespace}"
        )
        return f"Kubernetes({where}, {len(self._places)} members)"

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
        return sum(p.stream is not None and not p.stream.resting for p in self._places.values())

    async def _get(self) -> Cluster:
        async with self._lock:
            if self._cluster is None:
                if self._keep is not None:
                    self._kept()  # a place that cannot be used is told before work begins
                api = await Api.connect(**self._how, write_rate=self._write_rate)
                cluster: Cluster | None = None
                try:
                    named = self._template is not None or self._warm_pool is not None
                    cluster = await Cluster.open(
                        api, self._run, self._shape, mode=self._mode, named=named,
                        on_claim=self._on_claim, on_pod=self._on_pod, on_node=self._on_node,
                    )  # fmt: skip
                    if not named:
                        # Compiled the first time: no sandbox's deadline should pay for it.
                        await cluster.keeper()
                    else:
                        self._named = await cluster.named_pool(
                            self._warm_pool, self._template, carries_keeper=not self._inject
                        )
                except BaseException:
                    if cluster is not None:  # its Lease and watches
                        await cluster.close()
                    await api.close()
                    raise
                self._api, self._cluster = api, cluster
            return self._cluster

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
        place = _Place(member, name, spec, dict(labels), loop.create_future(), wish=node)
        try:
            async with asyncio.timeout(deadline):
                cluster = await self._get()
                body, path = await self._body(cluster, place)
                self._places[member] = self._by_name[name] = place
                await cluster.api.create(path, body, limit=deadline, throttle=True)
                await self._until_ready(cluster, place)
        except ThrottledError:
            self._forget(place)
            raise
        except TimeoutError:
            error = await self._late(place, deadline)
            self._clean(place)
            raise error from None
        except BaseException:
            self._clean(place)
            raise
        finally:
            if place.timer is not None:
                place.timer.cancel()
                place.timer = None
        found = self._pod(place).get("spec", {}).get("nodeName")
        place.facts |= Allowed.of(spec).facts(spec)
        return Member(id=member, node=found, facts=place.facts)

    async def _until_ready(self, cluster: Cluster, place: _Place) -> None:
        while not (await asyncio.wait({place.ready}, timeout=SLOW_S))[0]:
            try:
                await cluster.look_again()
            except SandboxError as error:
                log.debug("could not look why sandbox %s takes long: %s", place.member, error)
        try:
            place.ready.result()
        except SandboxError as error:
            if error.kind == "template_gone" and self._named is None:
                cluster.forget(place.spec)
            raise
        if self._named is not None:
            await cluster.check_template(self._pod(place))

    async def _body(self, cluster: Cluster, place: _Place) -> tuple[JSON, str]:
        how: dict[str, Any] = {"run": self._run, "member": place.member, "labels": place.labels}
        if not cluster.crds:
            pod = await cluster.pod_for(place.spec, place.wish)
            how["pod_labels"] = manifests.labels_for(place.spec, cluster.shape)
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

    async def _late(self, place: _Place, deadline: float) -> SandboxError:
        """The error of a sandbox that was not ready in time: with what is known of it."""
        assert self._cluster is not None or not self._places
        pod = self._pod(place)
        said = ""
        verdict = failures.of_pod(pod) if pod else None
        if verdict is None and self._cluster is not None and self._cluster.claims is not None:
            claim = self._cluster.claims.store.get(place.name)
            if claim is not None and not claim.get("status"):
                said = "no controller has taken it up: does agent-sandbox's run?"
            verdict = failures.of_claim(claim) if claim else None
            ready = condition(claim, "Ready") if claim else {}
            said = said or " ".join(f"{ready.get('reason', '')}: {ready.get('message', '')}".split()).strip(
                ": "
            )
        if verdict is not None:
            return verdict.error
        if self._cluster is not None:
            events = await self._cluster.events_of(place.pod or place.name)
            said = events[-1] if events else said
        return ProvisionError(
            f"the sandbox was not ready within {deadline:g} s" + (f": {said}" if said else ""),
            kind="provision_timeout", sandbox=place.member,
        )  # fmt: skip

    def _pod(self, place: _Place) -> JSON:
        if self._cluster is None or self._cluster.pods is None:
            return {}
        return self._cluster.pods.store.get(place.pod or place.name, {})

    def _forget(self, place: _Place) -> None:
        if self._places.get(place.member) is place:
            del self._places[place.member]
        for name in [name for name, other in self._by_name.items() if other is place]:
            del self._by_name[name]

    def _clean(self, place: _Place) -> None:
        """Remove what a creation that failed or was cancelled left; close() waits for it."""
        if self._cluster is None or place.leaving or place.member not in self._places:
            self._forget(place)
            return

        async def remove() -> None:
            try:
                await self._remove(place)
            except SandboxError as error:
                log.warning("sandbox %s could not be removed: %s", place.member, error)

        task = asyncio.get_running_loop().create_task(remove(), name=f"rlsandbox: remove {place.name}")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

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
        if manifests.by_policy(place.spec, cluster.shape):
            place.facts["network"] = "policy"
        self._env[place.spec.digest] = stream.env
        return stream.streams()

    async def dispose(self, member: Member) -> None:
        place = self._places.get(member.id)
        if place is None:
            if self._cluster is None:
                return  # nothing was ever made
            name = names.dns_label(f"rls-{self._run}-{member.id}")
            place = _Place(member.id, name, Spec(), {}, asyncio.get_running_loop().create_future())
            self._by_name.setdefault(name, place)
        await self._remove(place)

    async def _remove(self, place: _Place) -> None:
        """Delete it and wait until its pod is gone: until then it counts."""
        cluster = self._cluster
        assert cluster is not None
        place.leaving = True
        if place.stream is not None:
            place.stream.abort()
            await place.stream.wait_closed()
        watch = cluster.claims if cluster.crds else cluster.pods
        path = cluster.paths.claims if cluster.crds else cluster.paths.pods
        known = watch.store.get(place.name) if watch is not None else None
        # Who waited in vain comes again: a cluster that takes its time is not made slower by saying it twice.
        if not place.asked or (known is not None and not known["metadata"].get("deletionTimestamp")):
            there = await cluster.api.delete(f"{path}/{place.name}", throttle=True)
            place.asked = True
            if not there and not self._seen(place):
                self._forget(place)
                return
        await self._until_gone(cluster, place)
        self._forget(place)

    async def _until_gone(self, cluster: Cluster, place: _Place) -> None:
        now = asyncio.get_running_loop().time
        while self._seen(place):
            place.gone.clear()
            try:
                async with asyncio.timeout(None if place.helped else COLLECTED_S):
                    await place.gone.wait()
            except TimeoutError:
                if now() - self._collected_at >= COLLECTED_S:  # else the collector is at work
                    place.helped = await self._collect(cluster, place)
        if not place.helped:
            self._collected_at = now()

    async def _collect(self, cluster: Cluster, place: _Place) -> bool:
        """Remove the pod, whose claim is gone; whether that was tried.

        The cluster's garbage collector does it, but takes minutes after an outage of the API server.
        """
        pod = self._pod(place)
        claims = cluster.claims.store if cluster.claims is not None else {}
        if not pod or place.name in claims or pod["metadata"].get("deletionTimestamp"):
            return False
        try:
            await cluster.api.delete(f"{cluster.paths.pods}/{pod['metadata']['name']}", throttle=True)
        except SandboxError as error:
            log.debug("pod %s waits for the garbage collector: %s", place.pod, error)
            return False
        return True

    def _seen(self, place: _Place) -> bool:
        cluster = self._cluster
        if cluster is None:
            return False
        pods = cluster.pods.store if cluster.pods is not None else {}
        claims = cluster.claims.store if cluster.claims is not None else {}
        return (place.pod or place.name) in pods or place.name in claims

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
            place = self._by_name.get(meta["name"])
            id_ = (meta.get("annotations") or {}).get(names.MEMBER) or meta["name"]
            node = self._pod(place).get("spec", {}).get("nodeName") if place is not None else None
            found.append(Member(id=id_, node=node, facts=place.facts if place is not None else {}))
        return found

    def listen(self, tell: Tell) -> None:
        self._tell = tell

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
        if self._cleaning:
            await asyncio.wait(set(self._cleaning), timeout=30)
        for place in list(self._places.values()):
            if place.stream is not None:
                place.stream.abort()
                await place.stream.wait_closed()
        self._places.clear()
        self._by_name.clear()
        self._cluster = self._api = None
        await cluster.close()
        self._requests = dict(api.requests)
        await api.close()

    # -- what the cluster tells ----------------------------------------------------------------------

    def _on_claim(self, kind: str, claim: JSON) -> None:
        place = self._by_name.get(claim["metadata"]["name"])
        if place is None:
            return
        if kind == "gone":
            place.gone.set()
            if not place.ready.done() and not place.leaving:
                self._fail(
                    place, ProvisionError("its claim was removed by somebody else", kind="claim_removed")
                )
            return
        sandbox = ((claim.get("status") or {}).get("sandbox") or {}).get("name") or ""
        if sandbox and place.pod != sandbox:
            place.pod = sandbox
            self._by_name[sandbox] = place
        self._judge(place)

    def _on_pod(self, kind: str, pod: JSON) -> None:
        place = self._by_name.get(pod["metadata"]["name"])
        if place is None:
            return
        if kind == "gone":
            place.gone.set()
            died = failures.end_of_pod(pod) or SandboxDiedError("its pod is gone", kind="pod_gone")
            self._lose(place, died)
            return
        self._judge(place)

    def _on_node(self, node: str) -> None:
        for place in list(self._places.values()):
            if place.ready.done() and self._pod(place).get("spec", {}).get("nodeName") == node:
                self._whereabouts(place)

    def _whereabouts(self, place: _Place) -> None:
        """Tell the pool whether anything is heard of where it is, and whether it may stay there."""
        if self._tell is None or self._cluster is None or place.leaving or place.ended is not None:
            return
        pod = self._pod(place)
        node = pod.get("spec", {}).get("nodeName") or ""
        state, why = self._cluster.nodes.state(node) if self._cluster.nodes is not None else ("", "")
        if not state:
            state, why = pod_state(pod)
        before, place.told = place.told, state
        if state == before:
            return
        if before:
            self._tell(place.member, {"away": "back", "leaving": "staying"}[before], "")
        if state:
            self._tell(place.member, state, why)

    def _judge(self, place: _Place) -> None:
        """What follows from what the cluster says now."""
        if place.leaving:
            return
        pod = self._pod(place)
        claims = self._cluster.claims if self._cluster is not None else None
        if place.ready.done():
            died = failures.end_of_pod(pod) if pod else None
            if died is not None:
                self._lose(place, died)
            else:
                self._whereabouts(place)
            return
        if (
            pod
            and condition(pod, "Ready").get("status") == "True"
            and not pod["metadata"].get("deletionTimestamp")
        ):
            place.pod = pod["metadata"]["name"]
            place.container = pod["spec"]["containers"][0]["name"]
            place.ready.set_result(None)
            self._whereabouts(place)
            return
        verdict = failures.of_pod(pod) if pod else None
        if verdict is None and claims is not None and place.name in claims.store:
            verdict = failures.of_claim(claims.store[place.name])
        kind = verdict.error.kind if verdict is not None else ""
        if kind != place.verdict and place.timer is not None:
            place.timer.cancel()
            place.timer = None
        place.verdict = kind
        if verdict is None:
            return
        if verdict.after <= 0:
            self._fail(place, verdict.error)
        elif place.timer is None:
            loop = asyncio.get_running_loop()
            place.timer = loop.call_later(verdict.after, self._fail, place, verdict.error)

    def _fail(self, place: _Place, error: SandboxError) -> None:
        if not place.ready.done():
            error.sandbox = place.member
            place.ready.set_exception(error)
            place.ready.exception()  # seen, also when nobody waits any more

    def _lose(self, place: _Place, died: SandboxDiedError) -> None:
        if place.leaving or place.ended is not None:
            return
        died.sandbox = place.member
        place.ended = died
        if not place.ready.done():
            self._fail(place, ProvisionError(died.message, kind=died.kind, hint=died.hint))
        elif place.stream is not None:
            place.stream.fail(died)


def _isolation(facts: Mapping[str, str]) -> str:
    return {"replace": "none", "manifest": "user"}.get(facts.get("mode", ""), "namespaces")
