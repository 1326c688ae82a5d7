"""What is written to the place, and in which order.

Each pass takes the most urgent write that is allowed, until the tokens, the ceiling or the wishes run
out: creations that a claim waits for, then removals (they hold places), then refill.
"""

from __future__ import annotations

import heapq
from itertools import islice
from typing import TYPE_CHECKING

from .model import Dispose, PoolMember, Provision, SpecState, State

if TYPE_CHECKING:
    from .book import Book

_LOOK = 256


def reckon(core: Book, room: SpecState) -> None:
    """Bring a spec's wishes up to date after it changed."""
    short = max(0, len(room.queue) - room.coming)
    core.short += short - room.short
    room.short = short
    if short:
        key = _key(core, room)
        if room.need_key is None or key < room.need_key:
            room.need_key = key
            heapq.heappush(core.needy, (key, room.digest))
    if _unmet(room) > 0 and not room.ahead and not core.closing:
        room.ahead = True
        core.ahead[room.digest] = room


def _key(core: Book, room: SpecState) -> float:
    """Oldest first; a spec that has members already gives way to younger claims of specs that have none."""
    head = next(iter(room.queue.values()))
    return head.asked + core.config.spread_s * room.members


def _unmet(room: SpecState) -> int:
    """Expected claims for which no member is at hand."""
    return room.expected_n - max(0, room.coming - len(room.queue)) if room.expected else 0


def spend(core: Book) -> float | None:
    """Emit the writes that are allowed now. Returns when the next one may be, if one waits for its token."""
    config, n = core.config, core.n
    while True:
        room = None if core.closing or config.when_empty == "wait" else _neediest(core)
        if room is not None and core.live < core.ceiling and n[State.CREATING] < config.max_creating:
            if not _token(core):
                return _when(core)
            _create(core, room)
            continue
        if room is not None and core.live >= core.ceiling and _may_move(core):
            victim = _victim(core, room, expected_too=True)
            if victim is not None:
                core.counters.moved += 1
                core.leave(victim, "moved to another spec")
                _reckon_dirty(core)
                continue
        leaver = _next_leaver(core)
        if leaver is not None:
            if not _token(core):
                return _when(core)
            leaver.asked_to_leave = True
            del core.leaving[leaver.id]
            core.actions.append(Dispose(leaver.id, leaver.reason))
            continue
        if core.closing:
            return None
        wish = _refill(core) or _surplus(core)
        if wish is None:
            return None
        if isinstance(wish, PoolMember):
            core.leave(wish, "idle for too long" if _expired(core, wish) else "moved to another spec")
            _reckon_dirty(core)
            continue
        if not _token(core):
            return _when(core)
        _create(core, wish)


def _token(core: Book) -> bool:
    if core.bucket.take(core.now):
        core.counters.writes += 1
        return True
    return False


def _when(core: Book) -> float:
    # Never "now": a wait below the clock's grain would make the driver spin.
    return core.now + max(core.bucket.wait(core.now), 1e-4)


def _create(core: Book, room: SpecState) -> None:
    member = core.new_member(room.digest)
    core.actions.append(Provision(member.id, room.digest))
    core.touch(room)
    _reckon_dirty(core)


def _reckon_dirty(core: Book) -> None:
    # Only numbers change here: nothing became ready, so no claim has to be looked at.
    while core.dirty:
        reckon(core, core.dirty.popitem()[1])


def _may_create(core: Book, room: SpecState) -> bool:
    return room.breaker.allows(core.now, room.creating) and room.early.allows(core.now, room.creating)


def _neediest(core: Book) -> SpecState | None:
    """The spec whose claim has the best right to the next creation."""
    heap = core.needy
    while heap:
        key, digest = heap[0]
        room = core.specs[digest]
        if room.need_key != key:
            heapq.heappop(heap)
            continue
        if not room.short or not _may_create(core, room):
            heapq.heappop(heap)
            room.need_key = None  # looked at again when it changes, or when its breaker lets it
            continue
        now_key = _key(core, room)
        if now_key > key:
            room.need_key = now_key
            heapq.heapreplace(heap, (now_key, digest))
            continue
        return room
    return None


def _may_move(core: Book) -> bool:
    """Whether one more ready member should go to make a place: as many as are short, few at a time."""
    going = core.going()
    return going < core.short and going + core.n[State.CREATING] < core.config.max_creating


def wanted_elsewhere(core: Book, room: SpecState) -> bool:
    """Whether a member of *room* that was given back serves better as a free place than reset."""
    if room.queue or room.expected or core.live < core.ceiling or core.config.when_empty == "wait":
        return False
    needy = _neediest(core)
    return needy is not None and needy is not room and _may_move(core)


def _victim(core: Book, for_room: SpecState, *, expected_too: bool) -> PoolMember | None:
    """The longest unused ready member of another spec that no claim needs, nor (rather) an expected one."""
    second: PoolMember | None = None
    for member in islice(core.idle.values(), _LOOK):
        room = core.specs[member.spec]
        if room is for_room or room.queue:
            continue
        if not room.expected or room.coming > room.expected_n:
            return member
        second = second or member
    if second is None and len(core.idle) > _LOOK:
        second = next((m for m in core.idle.values() if not core.specs[m.spec].queue), None)
    return second if expected_too else None


def _next_leaver(core: Book) -> PoolMember | None:
    for member in core.leaving.values():
        if member.retry_at <= core.now:
            return member
    return None


def _refill(core: Book) -> SpecState | PoolMember | None:
    """A spec of which one more should be made ahead, or a ready member that has to make way for it."""
    config, n = core.config, core.n
    if n[State.CREATING] >= config.max_creating:
        return None
    coming = n[State.IDLE] + n[State.CREATING] + n[State.PRIMING] + n[State.RESETTING]
    if config.when_empty == "wait" and (needy := _neediest(core)) is not None:
        if coming < max(1, config.size) and core.live < core.ceiling:
            return needy
        return _victim(core, needy, expected_too=True) if _may_move(core) else None
    for _ in range(len(core.ahead)):
        digest, room = next(iter(core.ahead.items()))
        if _unmet(room) <= 0 or not _may_create(core, room):
            room.ahead = False
            del core.ahead[digest]
            continue
        if core.live < core.ceiling:
            core.ahead.move_to_end(digest)  # one each, then a second each
            return room
        if core.going():
            return None
        return _victim(core, room, expected_too=False)
    if coming < config.size and core.live < core.ceiling:
        for wish in (core.favourite, config.home):
            if wish is not None and _may_create(core, room := core.room(wish)):
                return room
    return None


def _expired(core: Book, member: PoolMember) -> bool:
    return member.retry_at <= core.now


def _surplus(core: Book) -> PoolMember | None:
    """A ready member beyond the size that nobody used for long."""
    if core.n[State.IDLE] <= core.config.size:
        return None
    member = next(iter(core.idle.values()))
    room = core.specs[member.spec]
    return member if _expired(core, member) and not room.queue and not room.expected else None


def next_expiry(core: Book) -> float | None:
    """When the longest unused ready member beyond the size expires."""
    if core.closing or core.n[State.IDLE] <= core.config.size:
        return None
    member = next(iter(core.idle.values()))
    room = core.specs[member.spec]
    return None if room.queue or room.expected else max(member.retry_at, core.now + 1e-3)
