"""The pool's decisions: events in, actions out. No I/O, no clock, no randomness but a seeded one.

Promises (each has a stateful test in ``tests/property``):

- members that exist, in whatever state, never exceed the ceiling; creations in flight and writes a second
  never exceed their limits; refill gives way to claims;
- a claim is granted a member that was verified after its last episode, or is refused with a reason, and
  by its deadline; claims of one spec are served first in, first out, except that within one batch a claim
  may be passed by one whose layer is in place; no claim starves;
- a spec, or a layer, that keeps failing is tried rarely, says why, and holds up nothing else;
- whatever may exist is disposed of, and counts until that is confirmed.

Every public method is an event: it changes the state, settles what follows from it, and leaves actions in
:attr:`Core.actions` for the driver to carry out, and in :attr:`Core.wake` the time of the next
:meth:`Core.tick`. Who gets what is decided in :mod:`.matching`; what is written and when in :mod:`.spending`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from . import matching, spending
from .model import DropLayer, PoolClaim, Refuse, SpecState, State
from .outcomes import Outcomes
from .refill import Cause


class Core(Outcomes):
    """See the module. Not thread-safe: one owner calls it."""

    # -- what a claim's owner says ---------------------------------------------------------------

    def claim(
        self,
        spec: str,
        layer: str | None,
        now: float,
        *,
        deadline: float | None = None,
        batch: object = None,
        settle: bool = True,
    ) -> PoolClaim:
        """A sandbox is needed. Ends in Grant or Refuse.

        Without *settle* what follows from a claim that is served at once is put off until the next event:
        the caller has something more urgent to do, and sees to it that there is one soon.
        """
        self.clock(now)
        room = self.room(spec)
        self.next_claim += 1
        claim = PoolClaim(self.next_claim, spec, layer, self.now, deadline, batch)
        self.counters.claims += 1
        self.favourite = spec
        room.claimed_on(layer)
        left = room.expected.get(layer, 0)
        if left > 1:
            room.expected[layer] = left - 1
        elif left == 1:
            del room.expected[layer]
        if self.closing:
            self.refuse(claim, "closed", "the pool is closed")
            return claim
        if layer is not None:
            known = layer in self.layers
            self.counters.layer_hits += known
            self.counters.layer_misses += not known
        if not room.queue and (ready := room.idle.get(layer)):
            # The warm path, kept short: somebody is waiting for it and nobody stands in front.
            self.claims[claim.id] = claim
            claim.warm = True
            self.counters.warm_hits += 1
            self.grant(claim, next(iter(ready.values())))
            if settle:
                self._settle()
            return claim
        why = self._hopeless(room) if deadline is None or room.breaker.permanent else None
        why = why or self._layer_hopeless(room, layer)
        if why is not None:
            self.refuse(claim, *why)
            return claim
        if self.config.when_empty == "fail" and room.idle_n <= len(room.queue):
            self.refuse(claim, "empty", f"no sandbox is ready; {self.why(claim)}")
            return claim
        self.claims[claim.id] = claim
        room.queue[claim.id] = claim
        self.queued += 1
        if layer is not None:
            self.wanted_layers[layer] = self.wanted_layers.get(layer, 0) + 1
        if deadline is not None:
            heapq.heappush(self.deadlines, (deadline, claim.id))
        self.touch(room)
        self._settle()
        if claim.member is not None:
            claim.warm = True
            self.counters.warm_hits += 1
        return claim

    def cancel(self, claim_id: int, now: float) -> None:
        """Nobody waits for the claim any more. One that was granted has to be released instead."""
        self.clock(now)
        claim = self.claims.get(claim_id)
        if claim is None or claim.member is not None:
            return
        self.counters.cancelled += 1
        self.unqueue(claim)
        del self.claims[claim_id]
        self._settle()

    def release(self, claim_id: int, now: float, *, discard: bool = False) -> None:
        """The claim's episode is over. The member is put back and verified, or disposed of."""
        self.clock(now)
        claim = self.claims.get(claim_id)
        member = None if claim is None or claim.member is None else self.members[claim.member]
        if member is None or member.state is not State.CLAIMED:
            return  # given back before; or it died, or the pool was closed: then it is leaving
        self.counters.released += 1
        if member.once and not discard:
            self.leave(member, "mode replace: its episode was its only one")
        elif discard or member.unwanted:
            self.leave(member, "discarded" if discard else member.unwanted)
        elif member.doubt:
            self.unclaim(member)
            self.put(member, State.AWAY)  # reset once its place is heard of again
        else:
            self.unclaim(member)
            if spending.wanted_elsewhere(self, self.specs[member.spec]):
                self.counters.moved += 1
                self.leave(member, "moved to another spec")
            else:
                self.reset(member, matching.next_layer(self, member))
        self._settle()

    def expect(
        self, demand: Iterable[tuple[str, str | None, int]], now: float, *, replace: bool = False
    ) -> None:
        """Claims that will come: (spec, layer, how many). Adds up; *replace* forgets what was said before."""
        self.clock(now)
        if replace:
            for room in self.specs.values():
                if room.expected:
                    room.expected = {}
                    self.touch(room)
        for spec, layer, count in demand:
            if count > 0:
                room = self.room(spec)
                room.expected[layer] = room.expected.get(layer, 0) + count
                self.touch(room)
        self._settle()

    # -- layers of snapshots ---------------------------------------------------------------------

    def keep_layer(
        self, name: str, spec: str, size: int, now: float, *, member: str, parent: str | None
    ) -> None:
        """A snapshot was sealed from a claimed member, whose episode goes on on top of it."""
        self.clock(now)
        self.layers.add(name, spec, size, self.now, pinned=True, parent=parent)
        held = self.members.get(member)
        if held is not None:
            held.layers.add(name)
            if held.state is State.CLAIMED:
                self.layers.stand(held.layer, -1)
                held.layer = name
                self.layers.stand(name, +1)
        self._settle()

    def drop_layer(self, name: str, now: float, *, why: str = "") -> None:
        """A snapshot was deleted (or *why*): its layer goes when nobody stands on it."""
        self.clock(now)
        layer = self.layers.get(name)
        if layer is None:
            return
        self.layers.doom(layer)
        room = self.specs.get(layer.spec)
        if room is not None:
            for claim in [c for c in room.queue.values() if c.layer == name]:
                self.refuse(claim, "prime", why or f"snapshot {name} was deleted")
            for member in list(room.idle.get(name, {}).values()):
                self.reset(member, None)
            self.touch(room)
        self._settle()

    # -- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed (at least :attr:`wake` was reached, or anybody says so)."""
        self.clock(now)
        self._settle()

    def throttled(self, now: float, retry_after: float | None = None) -> None:
        """The place answered 429 to something that is not a creation or removal of ours."""
        self.clock(now)
        self.throttle(retry_after)
        self._settle()

    def close(self, now: float) -> None:
        """Refuse every waiting claim and dispose of every member, claimed ones too."""
        self.clock(now)
        self.closing = True
        for claim in list(self.claims.values()):
            if claim.member is None:
                self.refuse(claim, "closed", "the pool was closed while this claim waited")
        for member in list(self.members.values()):
            if member.state not in (State.CREATING, State.LEAVING):
                self.leave(member, "closing")
        for room in self.specs.values():
            room.expected = {}
        self.ahead.clear()
        self._settle()

    # -- inside ----------------------------------------------------------------------------------

    def why(self, claim: PoolClaim) -> str:
        """What the claim waits for, for people."""
        return matching.why(self, claim)

    def hopeless(self) -> Refuse | None:
        """Why nothing at all can be made; None while something may be."""
        if self.idle or self.n[State.CREATING]:
            return None
        whys = [why for room in self.specs.values() if (why := self._hopeless(room)) is not None]
        return Refuse(0, "breaker", whys[0][1], whys[0][2]) if whys else None

    def _layer_hopeless(self, room: SpecState, layer: str | None) -> tuple[str, str, Cause | None] | None:
        if layer is None:
            return None
        known = self.layers.get(layer)
        if known is not None and known.doomed:
            return "prime", f"snapshot {layer} was deleted", None
        breaker = self.layer_breakers.get((room.digest, layer))
        if breaker is None or not breaker.open or self.now >= breaker.retry_at or breaker.cause is None:
            return None
        return "prime", breaker.cause.message, breaker.cause

    def _settle(self) -> None:
        self._expire()
        while self.retries and self.retries[0][0] <= self.now:
            what = heapq.heappop(self.retries)[1]
            if what == "f" and self.now >= self.full_until:
                self.full_at = None
            room = self.specs.get(what[1:]) if what[0] == "s" else None
            if room is not None:
                self.touch(room)
        while self.dirty:
            _, room = self.dirty.popitem()
            if not self.closing:
                matching.assign(self, room)
            spending.reckon(self, room)
        blocked = spending.spend(self)
        if self.layers.over or self.layers.doomed:
            self._trim()
        while self.dirty:  # an eviction may have changed a spec; it brings no claim closer
            spending.reckon(self, self.dirty.popitem()[1])
        # What waits for a token is looked at again when there is one: an expiry before that changes nothing.
        soon = blocked if blocked is not None else spending.next_expiry(self)
        times = [t for t in (soon, self.next_stuck()) if t is not None]
        if self.deadlines:
            times.append(self.deadlines[0][0])
        if self.retries:
            times.append(self.retries[0][0])
        self.wake = min(times) if times else None

    def _expire(self) -> None:
        heap = self.deadlines
        while heap and heap[0][0] <= self.now:
            claim = self.claims.get(heapq.heappop(heap)[1])
            if claim is not None and claim.member is None:
                room = self.specs[claim.spec]
                waited = self.now - claim.asked
                text = f"no sandbox after {waited:.1f} s: {self.why(claim)}"
                self.refuse(claim, "timeout", text, room.breaker.cause)
        while heap and ((claim := self.claims.get(heap[0][1])) is None or claim.member is not None):
            heapq.heappop(heap)

    def _trim(self) -> None:
        while gone := self.layers.gone():  # a layer may have held the one below it
            for layer in gone:
                self._drop(layer.name)
        while self.layers.over:
            victim = self.layers.evictable(self.expects)
            if victim is None:
                victim = self.layers.evictable(lambda layer: layer.name in self.wanted_layers)
            if victim is None:
                return
            self.counters.layers_evicted += 1
            self._drop(victim.name)

    def _drop(self, name: str) -> None:
        self.layers.remove(name)
        holders = [m for m in self.members.values() if name in m.layers]
        for member in holders:
            member.layers.discard(name)
        shared = self.config.shared_layers
        self.actions.append(DropLayer(name, () if shared else tuple(m.id for m in holders)))
