"""What ``pool.stats()`` says: what is so now, and everything that has happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .demand import Advice, Bursts
from .model import Counters, State

if TYPE_CHECKING:
    from .core import Core


@dataclass(kw_only=True)
class PoolStats(Counters):
    """One look at the pool. Counters (those of the core) count from its start; the rest is so now.

    Args:
        size: members to be kept ready; ``max_size``: the ceiling; ``live``: members of any state.
        ready: clean and free; ``claimed``: lent; ``waiting``: claims without a sandbox.
        away: members of whose place nothing is heard: handed to nobody, not lost either.
        creating, resetting, priming, terminating: members on their way.
        stuck: ``{member: seconds}`` of removals that do not end; they count against the ceiling.
        quarantined: members in which verification found residue; ``residue``: the last few, in words.
        resets: members that were used and are put back; ``recycled``: those of them that were verified clean.
        relayered: clean members put onto another layer; ``warm_hits``: claims served at once.
        granted, timeouts, refused, cancelled: how claims ended; ``longest_wait_s``: of those that wait.
        create_failed, dispose_failed: attempts; ``create_gave_up``: those of them that took too long.
        died_idle, died_claimed, died_preparing: members that died, by what they did; ``strays``: found at the
            place, known to nobody, removed.
        moved: members that made room for another spec, or whose node is being cleared.
        layer_hits, layer_misses: claims of tasks with a layer that was there, or was not yet.
        writes: creations and removals; ``throttled``: those that the place refused for being too many.
        failing: ``{spec: why}`` of specs that keep failing; ``breaker_trips``: how often one began to.
        specs: ready, claimed and waiting by spec.
        layers, layer_bytes: primed layers and snapshots that are kept.
        write_rate: writes a second that are allowed at present; None: no bound.
        requests: made of the cluster's API server, by verb; ``requests_each``: a claim, all told.
        advice: size and refill from the bursts that were seen.
    """

    size: int
    max_size: int
    live: int
    ready: int
    claimed: int
    waiting: int
    creating: int
    resetting: int
    priming: int
    terminating: int
    away: int
    stuck: dict[str, float]
    expected: int
    layers: int
    layer_bytes: int
    write_rate: float | None
    paused_s: float
    failing: dict[str, str]
    specs: dict[str, dict[str, int]]
    residue: list[str]
    longest_wait_s: float
    requests: dict[str, int] = field(default_factory=dict)
    requests_each: float | None = None
    advice: Advice = field(default_factory=lambda: Advice(0, None, ""))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def stats_of(
    core: Core,
    bursts: Bursts,
    now: float,
    residue: list[str],
    names: dict[str, str],
    requests: Mapping[str, int] | None = None,
) -> PoolStats:
    """Take the look.

    Args:
        names: what to call a spec in words, by digest.
        requests: made by the backend, by verb.
    """
    requests = dict(requests or {})
    made = sum(n for verb, n in requests.items() if verb not in ("repeated", "throttled"))
    n, config, counters = core.n, core.config, core.counters
    each = counters.writes / counters.granted if counters.granted else 0.0
    waits = [now - next(iter(r.queue.values())).asked for r in core.specs.values() if r.queue]
    return PoolStats(
        size=config.size,
        max_size=config.ceiling,
        live=core.live,
        ready=n[State.IDLE],
        claimed=n[State.CLAIMED],
        waiting=core.waiting,
        creating=n[State.CREATING],
        resetting=n[State.RESETTING],
        priming=n[State.PRIMING],
        terminating=n[State.LEAVING],
        away=n[State.AWAY],
        stuck={m.id: round(now - m.since, 1) for m in core.stuck()},
        expected=sum(room.expected_n for room in core.specs.values()),
        layers=len(core.layers),
        layer_bytes=core.layers.bytes,
        write_rate=core.bucket.current_rate,
        paused_s=max(0.0, core.bucket.paused_until - now),
        failing={
            names.get(d, d): r.breaker.cause.message
            for d, r in core.specs.items()
            if r.breaker.cause is not None
        },
        specs={
            names.get(d, d): {"ready": r.idle_n, "claimed": r.claimed, "waiting": len(r.queue)}
            for d, r in core.specs.items()
            if r.members or r.queue
        },
        residue=list(residue),
        longest_wait_s=max(waits, default=0.0),
        requests=requests,
        requests_each=made / counters.granted if made and counters.granted else None,
        advice=bursts.advice(size=config.size, ceiling=config.ceiling, writes_each=each),
        **counters.to_dict(),
    )
