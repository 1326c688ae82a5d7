"""The pool's data: what goes into :class:`~rlsandbox.pool.core.Core`, what comes out, what it keeps.

Times are seconds on one clock that the caller reads; specs are known by their digest, layers by a name
that is unique in the pool. Nothing here waits, reads or writes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Literal

from .refill import Breaker, Cause

_RECENT = 64
WhenEmpty = Literal["create", "wait", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The pool's numbers.

    Args:
        size: members kept ready.
        ceiling: members that may exist at once, in whatever state, terminating ones too.
        when_empty: what a claim does that finds nothing ready: create, wait for what comes back or is
            refilled, or fail at once.
        max_creating: creations in flight at once.
        write_rate: writes a second of all kinds together; None: no bound.
        home: digest of the spec that an undemanded pool is filled with.
        shared_layers: a layer primed in one member can be given to any other.
        layer_budget: bytes of primed layers kept; None: no bound.
        breaker_threshold: failures in a row that open a spec's breaker.
        patience_s: how long a spec may keep failing before claims for it fail without their deadline.
        spread_s: how long a claim gives way to specs that have fewer members, per member of its own spec.
        idle_timeout_s: how long a ready member beyond *size* is kept.
        full_s: how long a place that seemed full is taken to hold no more.
        young_s: a ready member that dies unused within this time was made badly: its successor waits.
        stuck_s: how long a removal may take before nobody counts on its place any more.
    """

    size: int
    ceiling: int
    when_empty: WhenEmpty = "create"
    max_creating: int = 8
    write_rate: float | None = None
    home: str | None = None
    shared_layers: bool = True
    layer_budget: int | None = None
    breaker_threshold: int = 5
    patience_s: float = 120.0
    spread_s: float = 5.0
    idle_timeout_s: float = 300.0
    stuck_s: float = 15.0
    full_s: float = 120.0
    young_s: float = 5.0

    def __post_init__(self) -> None:
        if self.ceiling < 1 or self.size < 0 or self.max_creating < 1:
            raise ValueError("ceiling and max_creating must be at least 1, size at least 0")


class State(Enum):
    """What a member is doing. Every one of them counts against the ceiling."""

    CREATING = "creating"
    IDLE = "ready"
    PRIMING = "priming"
    RESETTING = "resetting"
    CLAIMED = "claimed"
    AWAY = "away"
    """Nothing is heard of its place: it may come back, and is handed to nobody until then."""
    LEAVING = "leaving"


@dataclass(slots=True)
class PoolMember:
    """A member as the core sees it."""

    id: str
    spec: str
    state: State
    since: float
    layer: str | None = None
    """What its episode stands on; None: the bare spec."""
    target: str | None = None
    """The layer it is being primed with or reset onto."""
    used: bool = False
    """An episode ran since it was last verified."""
    layers: set[str] = field(default_factory=set)
    """Layers it holds, where members do not share them."""
    layer_shelf: str | None = None
    """The layer under which it is kept ready."""
    claim: int | None = None
    doubt: str = ""
    """Why it is handed to nobody at present; empty: it may be."""
    once: bool = False
    """It cannot be put back (mode ``replace``): after its episode comes another."""
    unwanted: str = ""
    """Why it is not used again (its place is being cleared)."""
    reason: str = ""
    asked_to_leave: bool = False
    leave_attempts: int = 0
    stays: str = ""
    """Why its removal failed the last time."""
    retry_at: float = 0.0
    """Leaving: when to ask again. Ready: when it expires."""
    made_from: float = 0.0
    made_at: float = 0.0
    prepared_from: float = 0.0
    prepared_at: float = 0.0


@dataclass(slots=True)
class PoolClaim:
    """A claim from being asked for until it ends."""

    id: int
    spec: str
    layer: str | None
    asked: float
    deadline: float | None
    batch: object
    member: str | None = None
    warm: bool = False
    """It was granted in the instant in which it was asked for."""


class SpecState:
    """What the core knows about one spec."""

    __slots__ = (
        "ahead", "away", "breaker", "claimed", "creating", "digest", "early", "expected", "idle", "idle_n",
        "leaving", "need_key", "preparing", "preparing_n", "priming", "queue", "recent", "recent_n", "short",
    )  # fmt: skip

    def __init__(self, digest: str, breaker: Breaker, early: Breaker) -> None:
        self.digest = digest
        self.queue: dict[int, PoolClaim] = {}
        self.idle: dict[str | None, dict[str, PoolMember]] = {}
        self.idle_n = 0
        self.creating = 0
        self.away = 0
        self.preparing: dict[str | None, int] = {}
        """Members on their way to a layer, by that layer."""
        self.preparing_n = 0
        self.priming: dict[str, int] = {}
        self.claimed = 0
        self.leaving = 0
        self.expected: dict[str | None, int] = {}
        self.recent: deque[str | None] = deque()
        """Layers of the last claims, and how often each is among them."""
        self.recent_n: dict[str | None, int] = {}
        self.breaker = breaker
        self.early = early
        """Of members that die soon after they were made, before anybody used them."""
        self.short = 0
        """Claims beyond what is ready or coming."""
        self.need_key: float | None = None
        self.ahead = False
        """It stands in line for members that are made ahead."""

    def claimed_on(self, layer: str | None) -> None:
        """Remember which layers claims have asked for lately."""
        if len(self.recent) == _RECENT:
            old = self.recent.popleft()
            left = self.recent_n[old] - 1
            if left:
                self.recent_n[old] = left
            else:
                del self.recent_n[old]
        self.recent.append(layer)
        self.recent_n[layer] = self.recent_n.get(layer, 0) + 1

    @property
    def coming(self) -> int:
        """Members that are or will become ready without anybody giving one back."""
        return self.idle_n + self.creating + self.preparing_n

    @property
    def members(self) -> int:
        """Those that may serve a claim now or later."""
        return self.coming + self.claimed

    @property
    def expected_n(self) -> int:
        return sum(self.expected.values())


@dataclass(slots=True)
class Layer:
    """A sealed layer: primed (may be evicted, can be made again) or a snapshot's (kept until deleted)."""

    name: str
    spec: str
    bytes: int
    used: float
    pinned: bool = False
    parent: str | None = None
    children: int = 0
    doomed: bool = False


# -- actions: what the driver must do -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provision:
    member: str
    spec: str


@dataclass(frozen=True, slots=True)
class Dispose:
    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prime:
    member: str
    layer: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Put the member on *layer* and verify that it is clean."""

    member: str
    layer: str | None


@dataclass(frozen=True, slots=True)
class Grant:
    """The member is the claim's now."""

    claim: int
    member: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The claim ends without a member."""

    claim: int
    kind: Literal["timeout", "breaker", "prime", "empty", "closed"]
    message: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class DropLayer:
    layer: str
    members: tuple[str, ...]
    """Members that hold it, where members do not share layers."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something to be recorded: quarantine, death, give-up, eviction."""

    kind: str
    member: str | None
    spec: str | None
    detail: str


Action = Provision | Dispose | Prime | Reset | Grant | Refuse | DropLayer | Note


@dataclass(slots=True)
class Counters:
    """Everything that happened since the pool was made."""

    claims: int = 0
    granted: int = 0
    timeouts: int = 0
    refused: int = 0
    cancelled: int = 0
    released: int = 0
    warm_hits: int = 0
    created: int = 0
    create_failed: int = 0
    create_gave_up: int = 0
    disposed: int = 0
    dispose_failed: int = 0
    recycled: int = 0
    resets: int = 0
    """Used members that were to be put back."""
    relayered: int = 0
    """Clean members that were put onto another layer, after priming it or for a claim that needs it."""
    reset_failed: int = 0
    primed: int = 0
    prime_failed: int = 0
    quarantined: int = 0
    died_idle: int = 0
    died_claimed: int = 0
    died_preparing: int = 0
    moved: int = 0
    strays: int = 0
    throttled: int = 0
    writes: int = 0
    layer_hits: int = 0
    layer_misses: int = 0
    layers_evicted: int = 0
    breaker_trips: int = 0

    def to_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
