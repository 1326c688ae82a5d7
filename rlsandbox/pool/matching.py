"""Which ready member serves which claim, and which layer a member should stand on next.

A claim is *covered* when a member is on its way to the claim's layer; an older claim that is neither
covered nor served stops every younger one, unless both are of one batch: there a claim whose layer is in
place may pass one whose layer is not.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from .model import PoolClaim, PoolMember, Prime, SpecState, State

if TYPE_CHECKING:
    from .book import Book

_LOOK = 256  # claims beyond the members at hand that one pass looks at


def assign(core: Book, room: SpecState) -> None:
    """Serve the spec's claims from its ready members; without claims, prepare for those that are expected."""
    if not room.queue:
        if not room.idle_n:
            return
        if room.expected:
            _prepare_ahead(core, room)
        elif room.recent:
            _follow(core, room)
        return
    if not room.idle_n:
        return
    window = list(islice(room.queue.values(), room.idle_n + room.preparing_n + _LOOK))
    covered = dict(room.preparing)
    passed: PoolClaim | None = None
    for place, claim in enumerate(window):
        if not room.idle_n:
            return
        if passed is not None and (claim.batch is None or claim.batch != passed.batch):
            return
        if ready := room.idle.get(claim.layer):
            core.grant(claim, next(iter(ready.values())))
        elif covered.get(claim.layer, 0) > 0:
            covered[claim.layer] -= 1
        elif may_prepare(core, room, claim.layer) and (member := _spare(room, claim, window[place:])):
            prepare(core, member, claim.layer)
        else:
            passed = passed or claim


def may_prepare(core: Book, room: SpecState, layer: str | None) -> bool:
    """Whether a member may start towards *layer* now: it is in place, or may be primed."""
    if layer is None:
        return True
    breaker = core.layer_breakers.get((room.digest, layer))
    if layer in core.layers:
        return breaker is None or breaker.allows(core.now, room.preparing.get(layer, 0))
    if core.config.shared_layers and layer in room.priming:
        return False  # one member primes it for all
    return breaker is None or breaker.allows(core.now, room.priming.get(layer, 0))


def in_place(core: Book, member: PoolMember, layer: str | None) -> bool:
    """Whether the member can be reset onto *layer* without priming."""
    if layer is None:
        return True
    known = core.layers.get(layer)
    if known is None or known.doomed:
        return False
    return core.config.shared_layers or known.pinned or layer in member.layers


def prepare(core: Book, member: PoolMember, layer: str | None) -> None:
    """Bring a ready member onto *layer*: a reset where the layer is in place, else a prime."""
    if layer is None or in_place(core, member, layer):
        core.reset(member, layer)
    else:
        member.prepared_from = core.now
        core.put(member, State.PRIMING, target=layer)
        core.actions.append(Prime(member.id, layer))


def _spare(room: SpecState, claim: PoolClaim, behind: list[PoolClaim]) -> PoolMember | None:
    """A ready member on a layer that the claims behind (and the expected ones) need least.

    None when claims of the same batch need every one of them where it is.
    """
    batch = claim.batch
    alike = takewhile(lambda c: c.batch is not None and c.batch == batch, behind)
    wanted = Counter(c.layer for c in alike)
    best: PoolMember | None = None
    best_cost = (0, 0)
    for layer, members in room.idle.items():
        if len(members) <= wanted[layer]:
            continue
        member = next(iter(members.values()))
        has = 0 if claim.layer in member.layers else 1
        cost = (has, room.expected.get(layer, 0))
        if best is None or cost < best_cost:
            best, best_cost = member, cost
    return best


def next_layer(core: Book, member: PoolMember, *, prefer: str | None = None) -> str | None:
    """The layer onto which a member that has to be reset anyway is reset."""
    room = core.specs[member.spec]
    stay = prefer if prefer is not None else member.layer
    if room.queue:
        covered = dict(room.preparing)
        if member.state is State.PRIMING and member.target is not None:
            covered[member.target] = covered.get(member.target, 0) - 1
        for layer, members in room.idle.items():
            covered[layer] = covered.get(layer, 0) + len(members)
        passed: PoolClaim | None = None
        for claim in islice(room.queue.values(), room.idle_n + room.preparing_n + _LOOK):
            if passed is not None and (claim.batch is None or claim.batch != passed.batch):
                break
            if covered.get(claim.layer, 0) > 0:
                covered[claim.layer] -= 1
            elif in_place(core, member, claim.layer):
                return claim.layer
            else:
                passed = passed or claim
    elif room.expected:
        desired = _desired(room, room.coming + 1)
        for layer, count in desired.items():
            have = len(room.idle.get(layer, ())) + room.preparing.get(layer, 0)
            if member.target == layer and member.state is State.PRIMING:
                have -= 1
            if have < count and in_place(core, member, layer):
                return layer
    return stay if stay is not None and in_place(core, member, stay) else None


def _desired(room: SpecState, members: int) -> dict[str | None, int]:
    """How many of *members* should stand on which layer for the claims that are expected next."""
    desired: dict[str | None, int] = {}
    for layer, count in room.expected.items():
        if members <= 0:
            break
        desired[layer] = min(count, members)
        members -= count
    return desired


def _prepare_ahead(core: Book, room: SpecState) -> None:
    """Place ready members on the layers of expected claims, and prime those that are not there yet.

    At most half of the members prime at a time, so that a claim that comes early finds some ready.
    """
    warm = room.idle_n + room.preparing_n
    desired = _desired(room, warm)
    priming = sum(room.priming.values())
    surplus = [
        member
        for layer, members in room.idle.items()
        for member in islice(members.values(), _beyond(room, layer, members, desired))
    ]
    for layer, count in desired.items():
        lack = count - len(room.idle.get(layer, ())) - room.preparing.get(layer, 0)
        while lack > 0 and surplus and may_prepare(core, room, layer):
            member = _pop_holder(surplus, layer)
            if not in_place(core, member, layer):
                if priming >= max(1, warm // 2) or not core.layers.fits(layer or "", core.expects):
                    surplus.append(member)
                    break
                priming += 1
            prepare(core, member, layer)
            lack -= 1
    if not core.config.shared_layers or priming >= warm // 4:
        return
    for layer in room.expected:  # further ahead, with a quarter of them, while the budget is not full
        if layer is None or layer in core.layers or not may_prepare(core, room, layer):
            continue
        if priming >= warm // 4 or not room.idle_n or not core.layers.fits(layer, core.expects):
            return
        prepare(core, next(iter(next(iter(room.idle.values())).values())), layer)
        priming += 1


def _follow(core: Book, room: SpecState) -> None:
    """Nothing is expected: members on layers that nobody asked for lately move to what was claimed last."""
    latest = room.recent[-1]
    if len(room.idle) == 1 and latest in room.idle:
        return
    if latest is not None and latest not in core.layers:
        return
    for layer in [layer for layer in room.idle if layer not in room.recent_n]:
        for member in list(room.idle[layer].values()):
            if in_place(core, member, latest):
                core.reset(member, latest)


def _beyond(
    room: SpecState, layer: str | None, members: dict[str, PoolMember], desired: dict[str | None, int]
) -> int:
    return max(0, min(len(members), len(members) + room.preparing.get(layer, 0) - desired.get(layer, 0)))


def _pop_holder(members: list[PoolMember], layer: str | None) -> PoolMember:
    for i, member in enumerate(members):
        if layer in member.layers:
            return members.pop(i)
    return members.pop()


def why(core: Book, claim: PoolClaim) -> str:
    """What a claim waits for."""
    room = core.specs.get(claim.spec)
    if room is None:
        return "nothing of its spec exists"
    n, config = core.n, core.config
    parts: list[str] = []
    breaker = room.breaker
    if breaker.cause is not None:
        times = "once" if breaker.failures == 1 else f"{breaker.failures} times in a row"
        parts.append(f"creating it failed {times}: {breaker.cause.message}")
    if room.early.cause is not None and core.now < room.early.retry_at:
        parts.append(room.early.cause.message)
    if claim.layer is not None:
        layer_breaker = core.layer_breakers.get((room.digest, claim.layer))
        if layer_breaker is not None and layer_breaker.cause is not None:
            parts.append(f"its setup failed: {layer_breaker.cause.message}")
        if claim.layer in room.priming:
            parts.append("its setup is running")
    if room.creating:
        parts.append(f"{room.creating} being made")
    if room.preparing_n:
        parts.append(f"{room.preparing_n} being reset or primed")
    if room.away:
        parts.append(f"{room.away} on nodes of which nothing is heard")
    if core.live >= config.ceiling:
        stuck = core.stuck()
        gone = f"{n[State.LEAVING]} terminating" + (f", {len(stuck)} of them stuck" if stuck else "")
        if why_not := next((member.stays for member in stuck if member.stays), ""):
            gone += f": {why_not}"
        parts.append(f"the ceiling of {config.ceiling} is reached ({n[State.CLAIMED]} claimed, {gone})")
    elif core.live >= core.ceiling:
        parts.append(f"creations do not end: the place seems to hold no more than {core.ceiling}")
    elif room.short and n[State.CREATING] >= config.max_creating:
        parts.append(f"{n[State.CREATING]} creations are in flight, the limit is {config.max_creating}")
    if core.bucket.paused_until > core.now:
        parts.append(f"the control plane asked to wait {core.bucket.paused_until - core.now:.1f} s (429)")
    elif room.short and core.bucket.wait(core.now) > 0:
        parts.append(f"writes are limited to {core.bucket.current_rate:.3g} a second")
    if config.when_empty == "wait" and room.short:
        parts.append("when_empty='wait' makes none for a claim")
    ahead = next((i for i, c in enumerate(room.queue) if c == claim.id), 0)
    if ahead:
        parts.append(f"{ahead} claims are ahead of it")
    return "; ".join(parts) or f"{room.claimed} of its spec are claimed"
