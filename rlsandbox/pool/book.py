"""The pool's books: members, claims, specs, layers, and every count, kept in step.

Nothing is decided here. :class:`Book` is the state that :mod:`.core` changes by events and that
:mod:`.matching` and :mod:`.spending` read and act on.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from random import Random

from .layers import LayerStore
from .model import (
    Action,
    CoreConfig,
    Counters,
    Grant,
    Layer,
    Note,
    PoolClaim,
    PoolMember,
    Refuse,
    Reset,
    SpecState,
    State,
)
from .refill import Backoff, Breaker, Cause, TokenBucket


class Book:
    """State and bookkeeping of a pool. :meth:`put` is the one place where a member changes its state."""

    def __init__(self, config: CoreConfig, *, seed: int = 0, prefix: str = "m") -> None:
        self.config = config
        self.rng = Random(seed)
        self.now = 0.0
        self.actions: list[Action] = []
        self.wake: float | None = None
        self.closing = False
        self.counters = Counters()
        self.members: dict[str, PoolMember] = {}
        self.claims: dict[int, PoolClaim] = {}
        self.specs: dict[str, SpecState] = {}
        self.layers = LayerStore(config.layer_budget)
        self.wanted_layers: dict[str, int] = {}
        self.layer_breakers: dict[tuple[str, str], Breaker] = {}
        self.bucket = TokenBucket(config.write_rate)
        self.throttle_backoff = Backoff(self.rng, base=0.5, cap=30.0)
        self.idle: OrderedDict[str, PoolMember] = OrderedDict()
        """Ready members, the longest unused first."""
        self.leaving: OrderedDict[str, PoolMember] = OrderedDict()
        """Members that must go and whose removal has not been asked for yet."""
        self._going: dict[str, PoolMember] = {}
        self._stuck: dict[str, PoolMember] = {}
        """Leaving members of both kinds: asked to go or not."""
        self.n: dict[State, int] = dict.fromkeys(State, 0)
        self.short = 0
        self.queued = 0
        self.last_made = -math.inf
        self.full_at: int | None = None
        """How many members the place seems to hold, where that is less than the ceiling."""
        self.full_until = -math.inf
        self.dirty: dict[str, SpecState] = {}
        self.needy: list[tuple[float, str]] = []
        self.ahead: OrderedDict[str, SpecState] = OrderedDict()
        self.favourite: str | None = config.home
        self._prefix = prefix
        self._next_member = 0
        self.next_claim = 0
        self.deadlines: list[tuple[float, int]] = []
        self.retries: list[tuple[float, str]] = []

    # -- questions -------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Members that exist or may exist: what the ceiling bounds."""
        return len(self.members)

    @property
    def ceiling(self) -> int:
        """How many members may exist at present."""
        return self.config.ceiling if self.full_at is None else min(self.config.ceiling, self.full_at)

    @property
    def waiting(self) -> int:
        return self.queued

    def going(self) -> int:
        """Members whose place is about to be free: leaving, and not for suspiciously long."""
        self.stuck()
        return len(self._going)

    def stuck(self) -> list[PoolMember]:
        """Members whose removal does not come to an end."""
        limit = self.config.stuck_s
        while self._going and (first := next(iter(self._going.values()))).since + limit <= self.now:
            del self._going[first.id]
            self._stuck[first.id] = first
        return list(self._stuck.values())

    def next_stuck(self) -> float | None:
        """When a place that claims count on is to be given up."""
        if not self.short or not self.going():
            return None
        return next(iter(self._going.values())).since + self.config.stuck_s

    def settled(self) -> bool:
        """Whether nothing expected or kept ready is still being made (``wait_ready``)."""
        return not (self.n[State.CREATING] or self.n[State.PRIMING] or self.n[State.RESETTING] or self.ahead)

    # -- changes -----------------------------------------------------------------------------------

    def room(self, spec: str) -> SpecState:
        room = self.specs.get(spec)
        if room is None:
            breaker = Breaker(
                self.rng, threshold=self.config.breaker_threshold, patience_s=self.config.patience_s
            )
            early = Breaker(self.rng, patience_s=self.config.patience_s)
            room = self.specs[spec] = SpecState(spec, breaker, early)
        return room

    def touch(self, room: SpecState) -> None:
        self.dirty[room.digest] = room

    def new_member(self, spec: str) -> PoolMember:
        self._next_member += 1
        name = f"{self._prefix}{self._next_member}"
        member = PoolMember(name, spec, State.CREATING, self.now, made_from=self.now)
        self.members[name] = member
        self._enter(member, self.room(spec))
        return member

    def grant(self, claim: PoolClaim, member: PoolMember) -> None:
        self.unqueue(claim)
        claim.member = member.id
        member.claim = claim.id
        member.used = True
        self.layers.touch(member.layer, self.now)
        self.put(member, State.CLAIMED)
        self.counters.granted += 1
        self.actions.append(Grant(claim.id, member.id))

    def reset(self, member: PoolMember, layer: str | None) -> None:
        self.counters.resets += member.used
        self.counters.relayered += not member.used
        member.prepared_from = self.now
        self.put(member, State.RESETTING, target=layer)
        self.actions.append(Reset(member.id, layer))

    def rest(self, member: PoolMember, layer: str | None) -> None:
        """Clean and ready on *layer*."""
        member.used = False
        self.layers.stand(member.layer, -1)
        member.layer = layer
        self.layers.stand(layer, +1)
        member.retry_at = self.now + self.config.idle_timeout_s * self.rng.uniform(0.9, 1.1)
        if member.unwanted:
            self.leave(member, member.unwanted)
        else:
            self.put(member, State.AWAY if member.doubt else State.IDLE)

    def leave(self, member: PoolMember, reason: str) -> None:
        member.reason = reason
        member.retry_at = self.now
        self.unclaim(member)
        self.put(member, State.LEAVING)
        self.leaving[member.id] = member

    def expects(self, layer: Layer) -> bool:
        """Whether claims wait for the layer or are expected for it."""
        return layer.name in self.wanted_layers or layer.name in self.specs[layer.spec].expected

    def unclaim(self, member: PoolMember) -> None:
        if member.claim is not None:
            self.claims.pop(member.claim, None)
            member.claim = None

    def forget(self, member: PoolMember) -> None:
        room = self.specs[member.spec]
        self._exit(member, room)
        self.layers.stand(member.layer, -1)  # not before: it stood on it until now
        self.leaving.pop(member.id, None)
        del self.members[member.id]
        self.touch(room)

    def put(self, member: PoolMember, state: State, *, target: str | None = None) -> None:
        """The one place where a member changes its state; every count follows from here."""
        room = self.specs[member.spec]
        self._exit(member, room)
        member.state, member.since, member.target = state, self.now, target
        self._enter(member, room)
        self.touch(room)

    def retry(self, at: float, what: str) -> None:
        heapq.heappush(self.retries, (at, what))

    def throttle(self, retry_after: float | None) -> None:
        self.counters.throttled += 1
        wait = self.throttle_backoff.next()
        self.bucket.throttle(self.now, wait if retry_after is None else retry_after + min(wait, 1.0))

    def note(self, kind: str, member: PoolMember, detail: str) -> None:
        self.actions.append(Note(kind, member.id, member.spec, detail))

    def clock(self, now: float) -> None:
        if now > self.now:  # a clock that went back is ignored until it has caught up
            self.now = now

    def _exit(self, member: PoolMember, room: SpecState) -> None:
        state = member.state
        self.n[state] -= 1
        if state is State.IDLE:
            shelf = room.idle[member.layer_shelf]
            del shelf[member.id], self.idle[member.id]
            if not shelf:
                del room.idle[member.layer_shelf]
            room.idle_n -= 1
        elif state is State.CLAIMED:
            room.claimed -= 1
        elif state is State.AWAY:
            room.away -= 1
        elif state is State.CREATING:
            room.creating -= 1
        elif state is State.LEAVING:
            room.leaving -= 1
            self._going.pop(member.id, None)
            self._stuck.pop(member.id, None)
        else:
            self.layers.stand(member.target, -1)
            _count(room.preparing, member.target, -1)
            room.preparing_n -= 1
            if state is State.PRIMING and member.target is not None:
                _count(room.priming, member.target, -1)

    def _enter(self, member: PoolMember, room: SpecState) -> None:
        state = member.state
        self.n[state] += 1
        if state is State.IDLE:
            member.layer_shelf = member.layer
            room.idle.setdefault(member.layer, {})[member.id] = member
            self.idle[member.id] = member
            room.idle_n += 1
        elif state is State.CLAIMED:
            room.claimed += 1
        elif state is State.AWAY:
            room.away += 1
        elif state is State.CREATING:
            room.creating += 1
        elif state is State.LEAVING:
            room.leaving += 1
            self._going[member.id] = member
        else:
            self.layers.stand(member.target, +1)
            _count(room.preparing, member.target, +1)
            room.preparing_n += 1
            if state is State.PRIMING and member.target is not None:
                _count(room.priming, member.target, +1)

    def unqueue(self, claim: PoolClaim) -> None:
        room = self.specs[claim.spec]
        if room.queue.pop(claim.id, None) is not None:
            self.queued -= 1
            if claim.layer is not None:
                _count(self.wanted_layers, claim.layer, -1)
            self.touch(room)

    def refuse(self, claim: PoolClaim, kind: str, message: str, cause: Cause | None = None) -> None:
        if kind == "timeout":
            self.counters.timeouts += 1
        else:
            self.counters.refused += 1
        self.unqueue(claim)
        self.claims.pop(claim.id, None)
        self.actions.append(Refuse(claim.id, kind, message, cause))  # type: ignore[arg-type]


def _count(counts: dict[str | None, int] | dict[str, int], key: str | None, by: int) -> None:
    left = counts.get(key, 0) + by  # type: ignore[arg-type]
    if left:
        counts[key] = left  # type: ignore[index]
    else:
        counts.pop(key, None)  # type: ignore[arg-type]
