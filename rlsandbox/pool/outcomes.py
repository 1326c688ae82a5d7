"""What became of the core's actions: the events that the driver tells it."""

from __future__ import annotations

from abc import abstractmethod

from . import matching
from .book import Book
from .model import PoolMember, Reset, SpecState, State
from .refill import Backoff, Breaker, Cause

_LONG_AGO_S = 60.0


class Outcomes(Book):
    """The half of :class:`~.core.Core` that hears how things went. Every method is an event."""

    @abstractmethod
    def _settle(self) -> None:
        """Draw the consequences of what has changed."""

    @abstractmethod
    def drop_layer(self, name: str, now: float, *, why: str = "") -> None:
        """A snapshot's layer is to go."""

    def provisioned(self, member_id: str, now: float, *, once: bool = False) -> None:
        """A creation succeeded; the member is on its bare spec and clean. *once*: it cannot be put back."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None:  # given up, removed, and there all the same
            self.found(member_id, now)
            return
        self.throttle_backoff.reset()
        if member.state is not State.CREATING:
            return  # given up in the meantime: it is leaving
        self.counters.created += 1
        member.once = once
        member.made_at = self.last_made = self.now
        if self.full_at is not None:
            self.full_at += 1
        room = self.specs[member.spec]
        room.breaker.succeeded()
        if self.closing:
            self.leave(member, "closing")
        else:
            self.rest(member, None)
        self._settle()

    def provision_failed(
        self, member_id: str, cause: Cause, now: float, *, exists: bool = True, gave_up: bool = False,
        throttled: bool = False, retry_after: float | None = None,
    ) -> None:  # fmt: skip
        """A creation failed. Unless it is certain that nothing *exists*, the member has to be disposed of.

        *throttled*: the place was asked too much; that is nobody's fault and trips no breaker.
        """
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state is not State.CREATING:
            return
        room = self.specs[member.spec]
        if throttled:
            self.throttle(retry_after)
        else:
            self.counters.create_failed += 1
            self.counters.create_gave_up += gave_up
            trips = room.breaker.trips
            room.breaker.failed(self.now, cause)
            self.counters.breaker_trips += room.breaker.trips - trips
            if self.closing:  # it was given up: no fault of the place
                self.note("lost", member, f"closing: {cause.message}")
            else:
                self.note("provision_failed", member, cause.message)
            self.retry(room.breaker.retry_at, "s" + room.digest)
            if gave_up and self.last_made < member.made_from:
                self._looks_full()
        if exists:
            self.leave(member, "creation failed")
        else:
            self.forget(member)
        why = self._hopeless(room)
        if why is not None:
            for claim in list(room.queue.values()):
                if claim.deadline is None or room.breaker.permanent:
                    self.refuse(claim, *why)
        self._settle()

    def primed(self, member_id: str, layer: str, size: int, now: float, *, made: bool = True) -> None:
        """A layer is sealed. The member is put onto it (or onto what is needed sooner) and verified.

        *made*: False: it was there already, brought from elsewhere.
        """
        self.clock(now)
        member = self.members.get(member_id)
        if member is None:
            return
        self.counters.primed += made
        self.layer_breakers.pop((member.spec, layer), None)
        self.layers.add(layer, member.spec, size, self.now)
        member.layers.add(layer)
        if member.state is State.PRIMING:
            self.counters.relayered += 1
            self.put(member, State.RESETTING, target=matching.next_layer(self, member, prefer=layer))
            self.actions.append(Reset(member.id, member.target))
        self._settle()

    def prime_failed(self, member_id: str, cause: Cause, now: float, *, alive: bool = True) -> None:
        """Setup did not work. Claims for the layer are refused when trying again cannot help."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state is not State.PRIMING or member.target is None:
            return
        layer, room = member.target, self.specs[member.spec]
        self.counters.prime_failed += 1
        self.note("prime_failed", member, cause.message)
        breaker = self._layer_breaker(room, layer)
        breaker.failed(self.now, cause)
        self.retry(breaker.retry_at, "s" + room.digest)
        if alive:
            self.reset(member, matching.next_layer(self, member))
        else:
            self.leave(member, "died while it was primed")
        # Three setups that end badly are enough, whoever's fault: a claim does not wait for a fourth.
        if breaker.open:
            for claim in [c for c in room.queue.values() if c.layer == layer]:
                self.refuse(claim, "prime", cause.message, cause)
        self._settle()

    def prepared(self, member_id: str, now: float) -> None:
        """The member was reset and verification found nothing."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state is not State.RESETTING:
            return
        self.counters.recycled += member.used
        self.specs[member.spec].early.succeeded()
        if member.target is not None and not member.used:
            self.layer_breakers.pop((member.spec, member.target), None)
        member.prepared_at = self.now
        if member.target is not None and member.target not in self.layers:
            member.used = False
            self.reset(member, None)  # the snapshot was deleted while the member was on its way to it
        else:
            self.rest(member, member.target)
        self._settle()

    def residue(self, member_id: str, what: str, now: float) -> None:
        """Verification found something: quarantined, recorded, replaced."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state is not State.RESETTING:
            return
        self.counters.quarantined += 1
        self.note("quarantined", member, what)
        fresh, layer = not member.used, member.target
        self.leave(member, "quarantined: " + what)
        if fresh:
            self._never_ready(member, layer, Cause("residue", f"verification found {what}"))
        self._settle()

    def layer_gone(self, name: str, now: float) -> None:
        """A layer is no longer where it was sealed. One of a task is primed again; a snapshot is lost."""
        self.clock(now)
        layer = self.layers.get(name)
        if layer is None or layer.doomed:
            return
        if layer.pinned:
            self.drop_layer(name, now, why=f"snapshot {name} is lost: what held it has died")
            return
        self.layers.remove(name)
        for member in self.members.values():
            member.layers.discard(name)
        if layer.spec in self.specs:
            self.touch(self.specs[layer.spec])
        self._settle()

    def lost(self, member_id: str, cause: Cause, now: float) -> None:
        """The member is gone, or a reset of it failed: it cannot be used again."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state in (State.CREATING, State.LEAVING):
            return
        if member.state is State.PRIMING:
            self.counters.died_preparing += 1
            self.prime_failed(member_id, cause, now, alive=False)
            return
        if member.state in (State.IDLE, State.AWAY):
            self.counters.died_idle += 1
            if (
                member.state is State.IDLE
                and not member.used
                and self.now - member.made_at < self.config.young_s
            ):
                self._died_young(member, cause)
        elif member.state is State.CLAIMED:
            self.counters.died_claimed += 1
        elif cause.kind == "sandbox_died":
            self.counters.died_preparing += 1
        else:
            self.counters.reset_failed += 1
        self.note("lost", member, f"{member.state.value}: {cause.message}")
        fresh = member.state is State.RESETTING and not member.used
        layer = member.target
        self.leave(member, cause.message)
        if fresh:
            self._never_ready(member, layer, cause)
        self._settle()

    def doubted(self, member_id: str, why: str, now: float) -> None:
        """Nothing is heard of the member's place. It is handed to nobody, and has not failed either."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None:
            return
        member.doubt = why
        if member.state is State.IDLE:
            self.note("away", member, why)
            self.put(member, State.AWAY)
        self._settle()

    def trusted(self, member_id: str, now: float) -> None:
        """Its place is back: it is reset and verified before anybody gets it."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None:
            return
        member.doubt = ""
        if member.state is State.AWAY:
            self.reset(member, matching.next_layer(self, member))
        self._settle()

    def unwanted(self, member_id: str, why: str, now: float) -> None:
        """The member's place is being cleared (*why*; empty: no longer): its episode is its last."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None:
            return
        member.unwanted = why
        if why and member.state in (State.IDLE, State.AWAY):
            self.counters.moved += 1
            self.leave(member, why)
        self._settle()

    def _died_young(self, member: PoolMember, cause: Cause) -> None:
        """What was just made is gone: its successor waits, or they would come and go as fast as they can."""
        early = self.specs[member.spec].early
        if early.failed_at is not None and member.made_from <= early.failed_at:
            return  # what ended many at once counts once
        if early.failed_at is not None and self.now - early.failed_at > _LONG_AGO_S:
            early.succeeded()
        early.failed(self.now, Cause(cause.kind, f"it dies soon after it was made: {cause.message}"))
        self.retry(early.retry_at, "s" + member.spec)

    def _never_ready(self, member: PoolMember, layer: str | None, cause: Cause) -> None:
        """A member that nobody had used could not be brought onto *layer*: its successor may not either.

        Without a pause members would be made and thrown away as fast as the machine can. What broke many at
        once counts once: only a preparation that began after the last failure is a new attempt.
        """
        room = self.specs[member.spec]
        breaker = room.breaker if layer is None else self._layer_breaker(room, layer)
        if breaker.failed_at is not None and member.prepared_from <= breaker.failed_at:
            return
        trips = breaker.trips
        breaker.failed(self.now, cause)
        self.counters.breaker_trips += breaker.trips - trips
        self.retry(breaker.retry_at, "s" + room.digest)
        if layer is not None and breaker.open:
            for claim in [c for c in room.queue.values() if c.layer == layer]:
                self.refuse(claim, "prime", f"sandboxes cannot be reset to it: {cause.message}", cause)

    def _layer_breaker(self, room: SpecState, layer: str) -> Breaker:
        breaker = self.layer_breakers.get((room.digest, layer))
        if breaker is None:
            breaker = Breaker(self.rng, threshold=3, patience_s=self.config.patience_s)
            self.layer_breakers[room.digest, layer] = breaker
        return breaker

    def disposed(self, member_id: str, now: float) -> None:
        """The member is gone for certain: its place is free."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None:
            return
        self.throttle_backoff.reset()
        self.counters.disposed += 1
        self.forget(member)
        self._settle()

    def dispose_failed(
        self, member_id: str, cause: Cause, now: float, *, throttled: bool = False,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        """It may still be there; it is asked to go again, later, and counts until it is gone."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state is not State.LEAVING or not member.asked_to_leave:
            return
        if throttled:
            self.throttle(retry_after)
        else:
            self.counters.dispose_failed += 1
            member.stays = cause.message
            self.note("dispose_failed", member, cause.message)
        backoff = Backoff(self.rng, base=0.5, cap=60.0)
        backoff.failures = member.leave_attempts
        member.leave_attempts += 1
        member.asked_to_leave = False
        member.retry_at = self.now + backoff.next()
        self.leaving[member.id] = member
        self.retry(member.retry_at, "m" + member.id)
        self._settle()

    def dispose_again(self, member_id: str, now: float) -> None:
        """Its removal succeeded and is no proof that it is gone for good: it is asked to go once more."""
        self.clock(now)
        member = self.members.get(member_id)
        if member is None or member.state is not State.LEAVING or not member.asked_to_leave:
            return
        member.asked_to_leave = False
        member.retry_at = self.now
        self.leaving[member.id] = member
        self._settle()

    def found(self, member_id: str, now: float) -> None:
        """The place lists a member that nobody here knows: it counts and has to go."""
        self.clock(now)
        if member_id in self.members:
            return
        self.counters.strays += 1
        room = self.room(self.config.home or "")
        member = PoolMember(member_id, room.digest, State.LEAVING, self.now, reason="stray")
        self.members[member_id] = member
        self._enter(member, room)
        self.leaving[member_id] = member
        self.note("stray", member, "listed, but not known")
        self._settle()

    def adopted(self, member_id: str, spec: str, now: float) -> None:
        """A member that exists already joins, clean and on its bare spec."""
        self.clock(now)
        room = self.room(spec)
        member = PoolMember(member_id, spec, State.IDLE, self.now, made_from=self.now, made_at=self.now)
        self.members[member_id] = member
        self._enter(member, room)
        self.touch(room)
        self._settle()

    # -- inside ----------------------------------------------------------------------------------

    def _looks_full(self) -> None:
        """A creation did not end, and none did since it began: the place may hold no more than it does.

        Ready members that nobody needs then make way, as they do at the ceiling. Forgotten after a while.
        """
        there = self.n[State.IDLE] + self.n[State.CLAIMED] + self.n[State.PRIMING] + self.n[State.RESETTING]
        self.full_at = max(1, there)
        self.full_until = self.now + self.config.full_s
        self.retry(self.full_until, "f")

    def _hopeless(self, room: SpecState) -> tuple[str, str, Cause | None] | None:
        """Why nobody need wait for this spec; None while anything may still come of it."""
        breaker = room.breaker
        if room.members or not breaker.hopeless(self.now) or self.now >= breaker.retry_at:
            return None
        said = breaker.cause.message if breaker.cause else "unknown"
        again = max(0.0, breaker.retry_at - self.now)
        times = "once" if breaker.failures == 1 else f"{breaker.failures} times in a row"
        text = f"creation failed {times}: {said}"
        if breaker.cause is None or breaker.cause.retryable:  # else the same again would be no better
            text += f"; next try in {again:.1f} s"
        return "breaker", text, breaker.cause
