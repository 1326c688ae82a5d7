"""The members of a Kubernetes backend, and what becomes of them by what the cluster tells."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...errors import ProvisionError, SandboxDiedError, SandboxError
from ...keeper.durable import Durable
from ...spec import Spec
from ..base import Tell
from . import failures, names
from .api import JSON
from .cluster import Cluster
from .nodes import pod_state
from .watch import condition


@dataclass
class Place:
    """A member that a backend makes or has made."""

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

    def fail(self, error: SandboxError) -> None:
        """It will not be ready."""
        if not self.ready.done():
            error.sandbox = self.member
            self.ready.set_exception(error)
            self.ready.exception()  # seen, also when nobody waits any more

    def lose(self, died: SandboxDiedError) -> None:
        """It is not there any more, and nobody here has wished that."""
        if self.leaving or self.ended is not None:
            return
        died.sandbox = self.member
        self.ended = died
        if not self.ready.done():
            self.fail(ProvisionError(died.message, kind=died.kind, hint=died.hint))
        elif self.stream is not None:
            self.stream.fail(died)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Places:
    """All members, by their number and by the names of their claims and pods."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.tell: Tell | None = None
        self._by_member: dict[str, Place] = {}
        self._by_name: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._by_member)

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._by_member.values()))

    def __contains__(self, place: Place) -> bool:
        return self._by_member.get(place.member) is place

    def __getitem__(self, member: str) -> Place:
        return self._by_member[member]

    def get(self, member: str) -> Place | None:
        return self._by_member.get(member)

    def named(self, name: str) -> Place | None:
        """The member whose claim or pod has this name."""
        return self._by_name.get(name)

    def add(self, place: Place) -> None:
        self._by_member[place.member] = self._by_name[place.name] = place

    def add_stranger(self, place: Place) -> None:
        """One that is only to be removed: it is no member."""
        self._by_name.setdefault(place.name, place)

    def forget(self, place: Place) -> None:
        if place in self:
            del self._by_member[place.member]
        for name in [name for name, other in self._by_name.items() if other is place]:
            del self._by_name[name]

    def clear(self) -> None:
        self._by_member.clear()
        self._by_name.clear()

    def pod(self, place: Place) -> JSON:
        """Its pod, as last heard of; empty when there is none."""
        if self.cluster is None or self.cluster.pods is None:
            return {}
        return self.cluster.pods.store.get(place.pod or place.name, {})

    def claim(self, place: Place) -> JSON:
        """Its claim, as last heard of; empty when there is none."""
        if self.cluster is None or self.cluster.claims is None:
            return {}
        return self.cluster.claims.store.get(place.name, {})

    def node(self, place: Place) -> str | None:
        """The node that its pod is bound to."""
        found: str | None = self.pod(place).get("spec", {}).get("nodeName")
        return found

    def seen(self, place: Place) -> bool:
        """Whether anything of it is still there, as far as was heard."""
        return bool(self.pod(place) or self.claim(place))

    # -- what the cluster tells ----------------------------------------------------------------------

    def on_claim(self, kind: str, claim: JSON) -> None:
        place = self.named(claim["metadata"]["name"])
        if place is None:
            return
        if kind == "gone":
            place.gone.set()
            if not place.leaving:
                place.fail(ProvisionError("its claim was removed by somebody else", kind="claim_removed"))
            return
        sandbox = ((claim.get("status") or {}).get("sandbox") or {}).get("name") or ""
        if sandbox and place.pod != sandbox:
            place.pod = sandbox
            self._by_name[sandbox] = place
        self._judge(place)

    def on_pod(self, kind: str, pod: JSON) -> None:
        place = self.named(pod["metadata"]["name"])
        if place is None:
            return
        if kind == "gone":
            place.gone.set()
            place.lose(failures.end_of_pod(pod) or SandboxDiedError("its pod is gone", kind="pod_gone"))
            return
        self._judge(place)

    def on_node(self, node: str) -> None:
        for place in self:
            if place.ready.done() and self.node(place) == node:
                self._whereabouts(place)

    def _whereabouts(self, place: Place) -> None:
        """Tell the pool whether anything is heard of where it is, and whether it may stay there."""
        if self.tell is None or self.cluster is None or place.leaving or place.ended is not None:
            return
        pod = self.pod(place)
        nodes = self.cluster.nodes
        state, why = nodes.state(self.node(place) or "") if nodes is not None else ("", "")
        if not state:
            state, why = pod_state(pod)
        before, place.told = place.told, state
        if state == before:
            return
        if before:
            self.tell(place.member, {"away": "back", "leaving": "staying"}[before], "")
        if state:
            self.tell(place.member, state, why)

    def _judge(self, place: Place) -> None:
        """What follows from what the cluster says now."""
        if place.leaving:
            return
        pod = self.pod(place)
        if place.ready.done():
            died = failures.end_of_pod(pod) if pod else None
            if died is not None:
                place.lose(died)
            else:
                self._whereabouts(place)
        elif _is_ready(pod):
            place.pod = pod["metadata"]["name"]
            place.container = pod["spec"]["containers"][0]["name"]
            place.ready.set_result(None)
            self._whereabouts(place)
        else:
            self._doubt(place, pod)

    def _doubt(self, place: Place, pod: JSON) -> None:
        """Whether one that is not ready ever will be: some verdicts hold at once, some when they last."""
        verdict = failures.of_pod(pod) if pod else None
        if verdict is None and (claim := self.claim(place)):
            verdict = failures.of_claim(claim)
        kind = verdict.error.kind if verdict is not None else ""
        if kind != place.verdict:
            place.stop_timer()
        place.verdict = kind
        if verdict is None:
            return
        if verdict.after <= 0:
            place.fail(verdict.error)
        elif place.timer is None:
            place.timer = asyncio.get_running_loop().call_later(verdict.after, place.fail, verdict.error)


def _is_ready(pod: JSON) -> bool:
    return (
        bool(pod)
        and condition(pod, "Ready").get("status") == "True"
        and not pod["metadata"].get("deletionTimestamp")
    )
