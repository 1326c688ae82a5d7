"""Single decisions of the core, and what the stateful test once found, as cases of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rlsandbox.pool.core import Core
from rlsandbox.pool.demand import Bursts
from rlsandbox.pool.model import (
    CoreConfig,
    Dispose,
    Grant,
    Prime,
    Provision,
    Refuse,
    Reset,
    State,
)
from rlsandbox.pool.refill import Cause

OOPS = Cause("oops", "it went wrong")


def core(**how: Any) -> Core:
    return Core(CoreConfig(**{"size": 0, "ceiling": 4, "home": "A", **how}))


def take(core: Core, kind: type) -> list[Any]:
    """The actions of one kind so far; the others are thrown away."""
    actions, core.actions = core.actions, []
    return [a for a in actions if isinstance(a, kind)]


def play(core: Core, now: float, rounds: int = 200) -> list[Any]:
    """Let everything succeed until nothing is left to do; what was done."""
    done = []
    for _ in range(rounds):
        if not core.actions:
            return done
        action = core.actions.pop(0)
        done.append(action)
        match action:
            case Provision(member):
                core.provisioned(member, now)
            case Dispose(member):
                core.disposed(member, now)
            case Prime(member, layer):
                core.primed(member, layer, 100, now)
            case Reset(member):
                core.prepared(member, now)
    raise AssertionError(f"no end: {done[-6:]}")


def test_priming_ahead_does_not_evict_what_is_expected_itself() -> None:
    """Two expected layers of which only one fits: they took turns for ever."""
    pool = core(layer_budget=150, size=2)
    pool.expect([("A", "1", 1), ("A", "2", 1)], 0.0)
    done = play(pool, 0.0)
    assert sum(isinstance(a, Prime) for a in done) <= 2


def test_a_batch_that_is_cut_by_another_claim_is_not_waited_for() -> None:
    """The head gave way to a claim of its batch that stood behind one of another: nobody was served."""
    pool = core(ceiling=1)
    held = pool.claim("A", None, 0.0)
    play(pool, 0.0)
    claims = [pool.claim("A", *c, 0.0) for c in (("1",), (None,))]
    claims.append(pool.claim("A", None, 0.0))
    claims[0].batch = claims[2].batch = "y"
    pool.release(held.id, 1.0)
    for _ in range(6):
        play(pool, 1.0)
        for claim in claims:
            if claim.member is not None:
                pool.release(claim.id, 1.0)
    assert all(claim.member is not None for claim in claims)


def test_a_member_on_its_way_to_a_deleted_snapshot_does_not_stay_on_it() -> None:
    pool = core()
    claim = pool.claim("A", None, 0.0)
    play(pool, 0.0)
    assert claim.member is not None
    pool.keep_layer("snap", "A", 10, 0.0, member=claim.member, parent=None)
    pool.release(claim.id, 1.0)
    play(pool, 1.0)
    fork = pool.claim("A", "snap", 1.0)  # it is what was claimed last
    play(pool, 1.0)
    pool.release(fork.id, 1.0)
    (reset,) = take(pool, Reset)
    assert reset.layer == "snap"
    pool.drop_layer("snap", 1.0)
    pool.prepared(claim.member, 2.0)
    play(pool, 2.0)
    assert pool.members[claim.member].layer is None
    assert len(pool.layers) == 0


def test_stuck_removals_do_not_keep_others_from_making_way() -> None:
    """As many stuck removals as creations may be in flight once meant that nothing ever moved again."""
    pool = core(ceiling=3, max_creating=1)
    held = [pool.claim("A", None, 0.0) for _ in range(3)]
    play(pool, 0.0)
    pool.release(held[0].id, 1.0, discard=True)
    assert take(pool, Dispose)  # and it never ends
    pool.release(held[1].id, 1.0)
    play(pool, 1.0)
    waiting = pool.claim("B", None, 2.0)
    play(pool, 2.0)
    assert pool.wake is not None
    pool.tick(100.0)
    play(pool, 100.0)
    assert waiting.member is not None
    assert len(pool.stuck()) == 1


def test_a_place_that_is_full_below_the_ceiling_makes_ready_members_move() -> None:
    pool = core(ceiling=10, spread_s=0.0)
    claim = pool.claim("A", None, 0.0)
    play(pool, 0.0)
    pool.release(claim.id, 1.0)
    play(pool, 1.0)
    waiting = pool.claim("B", None, 2.0, deadline=1000.0)
    (made,) = take(pool, Provision)
    pool.provision_failed(made.member, Cause("provision_timeout", "no end"), 62.0, gave_up=True)
    play(pool, 62.0)
    pool.tick(100.0)
    play(pool, 100.0)
    assert waiting.member is not None
    assert pool.counters.moved == 1


def test_writes_for_claims_come_before_refill() -> None:
    pool = core(size=3, ceiling=6, max_creating=6, write_rate=1.0)
    pool.tick(0.0)
    assert [a.spec for a in take(pool, Provision)] == ["A"]
    pool.claim("B", None, 0.5)
    pool.tick(1.0)
    assert [a.spec for a in take(pool, Provision)] == ["B"]


def test_a_claim_that_can_be_served_never_waits_for_one_that_cannot() -> None:
    pool = core(ceiling=2)
    bad = pool.claim("bad", None, 0.0)
    (made,) = take(pool, Provision)
    pool.provision_failed(made.member, OOPS, 0.0, exists=False)
    good = pool.claim("A", None, 0.0)
    play(pool, 0.0)
    assert good.member is not None
    assert bad.member is None
    assert "it went wrong" in pool.why(bad)


def test_a_permanent_cause_refuses_and_an_old_one_only_who_has_no_deadline() -> None:
    pool = core(patience_s=10.0, breaker_threshold=1)
    patient, endless = pool.claim("A", None, 0.0, deadline=900.0), pool.claim("A", None, 0.0)
    now = 0.0
    while not (refused := take(pool, Refuse)):
        for made in [m for m in pool.members.values() if m.state is State.CREATING]:
            pool.provision_failed(made.id, OOPS, now, exists=False)
        now += 1.0
        pool.tick(now)
        assert now < 200
        if any(isinstance(a, Refuse) for a in pool.actions):
            continue
    assert [r.claim for r in refused] == [endless.id]
    assert patient.id in pool.claims
    pool.actions.clear()
    while not any(m.state is State.CREATING for m in pool.members.values()):
        now += 5.0
        pool.tick(now)
    (made,) = [m for m in pool.members.values() if m.state is State.CREATING]
    pool.provision_failed(made.id, Cause("image", "gone", retryable=False), now, exists=False)
    assert [r.claim for r in take(pool, Refuse)] == [patient.id]


def test_an_idle_member_beyond_the_size_goes_after_a_while() -> None:
    pool = core(size=1, ceiling=3, idle_timeout_s=100.0)
    claims = [pool.claim("A", None, 0.0) for _ in range(3)]
    play(pool, 0.0)
    for claim in claims:
        pool.release(claim.id, 1.0)
    play(pool, 1.0)
    assert pool.n[State.IDLE] == 3
    pool.tick(300.0)
    play(pool, 300.0)
    assert pool.n[State.IDLE] == 1


@pytest.mark.parametrize("shared", [True, False])
def test_siblings_are_primed_once_where_layers_are_shared(shared: bool) -> None:
    pool = core(ceiling=4, shared_layers=shared)
    claims = [pool.claim("A", "L", 0.0) for _ in range(4)]
    done = play(pool, 0.0)
    assert sum(isinstance(a, Prime) for a in done) == (1 if shared else 4)
    assert sum(isinstance(a, Grant) for a in done) == 4
    assert all(c.member is not None for c in claims)


def test_advice_follows_the_bursts() -> None:
    bursts = Bursts()
    assert "no claim" in str(bursts.advice(size=4, ceiling=4, writes_each=1.0))
    for burst in range(5):
        for i in range(32):
            bursts.asked(100.0 * burst + i * 0.01, i + 1)
    advice = bursts.advice(size=8, ceiling=16, writes_each=1.0)
    assert len(bursts) == 5
    assert advice.size == 32
    assert advice.write_rate == pytest.approx(32 / 100, rel=0.05)
    assert "above the ceiling of 16" in str(advice)
    assert "never needed" in str(bursts.advice(size=40, ceiling=40, writes_each=0.0))


@pytest.mark.parametrize(("batch", "passes"), [(None, False), ("other", False), ("mine", True)])
def test_only_a_claim_of_the_same_batch_may_pass_one_that_waits_for_its_layer(
    batch: Any, passes: bool
) -> None:
    pool = core(size=2, ceiling=2)
    pool.tick(0.0)
    play(pool, 0.0)
    first = pool.claim("A", "L", 0.0, batch="mine")
    second = pool.claim("A", "L", 0.0, batch="mine")
    (prime,) = take(pool, Prime)
    assert pool.n[State.IDLE] == 1
    third = pool.claim("A", None, 0.0, batch=batch)
    assert (third.member is not None) is passes
    pool.primed(prime.member, "L", 100, 1.0)
    play(pool, 1.0)
    assert first.member is not None
    assert (second.member is not None) is not passes, "the member that was kept for it"


def test_a_member_with_residue_is_never_handed_out_again() -> None:
    pool = core(ceiling=1)
    first = pool.claim("A", None, 0.0)
    play(pool, 0.0)
    dirty = first.member
    pool.release(first.id, 1.0)
    (reset,) = take(pool, Reset)
    pool.residue(reset.member, "file /tmp/x", 2.0)
    second = pool.claim("A", None, 2.0)
    assert second.member is None
    play(pool, 2.0)
    assert second.member is not None
    assert second.member != dirty
    assert dirty not in pool.members
    assert pool.counters.quarantined == 1


def test_a_layer_somebody_stands_on_is_kept_over_the_budget() -> None:
    pool = core(ceiling=2, layer_budget=150)
    held = pool.claim("A", "1", 0.0)
    play(pool, 0.0)
    other = pool.claim("A", "2", 1.0)
    play(pool, 1.0)
    assert held.member is not None
    assert other.member is not None
    assert pool.layers.names() == ["1", "2"], "both are in use"
    assert pool.layers.over
    pool.release(held.id, 2.0, discard=True)
    play(pool, 2.0)
    assert pool.layers.names() == ["2"]
    assert pool.counters.layers_evicted == 1


def test_a_creation_that_failed_counts_until_it_is_removed() -> None:
    """It may exist all the same: its place is not free before its removal was confirmed."""
    pool = core(ceiling=1)
    pool.claim("A", None, 0.0)
    (made,) = take(pool, Provision)
    pool.provision_failed(made.member, OOPS, 0.0)
    pool.tick(30.0)
    actions = [type(a) for a in pool.actions]
    assert Dispose in actions
    assert Provision not in actions
    assert pool.live == 1
    pool.disposed(made.member, 31.0)
    pool.tick(90.0)
    assert len(take(pool, Provision)) == 1


def test_a_layer_that_is_gone_is_primed_again() -> None:
    """A hub that died took its layers along; resets onto them failed for ever."""
    pool = core(size=1, ceiling=1, shared_layers=True)
    pool.claim("A", "1", 0.0)
    play(pool, 0.0)
    (member,) = pool.members
    pool.release(1, 1.0)
    pool.layer_gone("1", 1.0)
    pool.lost(member, Cause("layer_gone", "layer 1 is gone"), 1.0)
    pool.claim("A", "1", 1.0)
    done = play(pool, 1.0)
    assert any(isinstance(action, Prime) for action in done)
    assert any(isinstance(action, Grant) for action in done)


def test_a_snapshot_that_is_gone_is_refused_at_once() -> None:
    pool = core(size=0, ceiling=1, shared_layers=True)
    pool.claim("A", None, 0.0)
    play(pool, 0.0)
    (member,) = pool.members
    pool.keep_layer("s", "A", 10, 0.0, member=member, parent=None)
    waiting = pool.claim("A", "s", 0.0)
    pool.layer_gone("s", 0.0)
    (refused,) = take(pool, Refuse)
    assert refused.claim == waiting.id and "lost" in refused.message


def test_members_that_never_get_ready_are_not_replaced_as_fast_as_the_machine_can() -> None:
    pool = core(size=1, ceiling=1, shared_layers=True)
    pool.claim("A", "1", 0.0)
    play(pool, 0.0)
    (member,) = pool.members
    pool.release(1, 0.0)
    pool.lost(member, OOPS, 0.0)
    claim = pool.claim("A", "1", 0.0)
    now, made, refused = 0.0, 0, []
    while now < 30.0 and not refused:
        while pool.actions and not refused:
            match action := pool.actions.pop(0):
                case Provision(member):
                    made += 1
                    pool.provisioned(member, now)
                case Reset(member):
                    pool.lost(member, OOPS, now)
                case Dispose(member):
                    pool.disposed(member, now)
                case Refuse():
                    refused.append(action)
        assert pool.wake is not None
        now = max(now + 0.01, min(pool.wake, now + 1.0))
        pool.tick(now)
    assert [r.claim for r in refused] == [claim.id]
    assert "it went wrong" in refused[0].message
    assert made < 10


def lifetimes(pool: Core, seconds: float, life: float) -> int:
    """Let every ready member die *life* seconds after it was made; how many were made."""
    made, now, born = 0, 0.0, {}
    while now < seconds:
        actions, pool.actions = pool.actions, []
        for action in actions:
            match action:
                case Provision(member):
                    pool.provisioned(member, now)
                    made, born[member] = made + 1, now
                case Dispose(member):
                    pool.disposed(member, now)
        for name in [n for n, at in born.items() if now - at >= life]:
            del born[name]
            pool.lost(name, Cause("sandbox_died", "its keeper is gone"), now)
        now += 0.001 if pool.actions else 0.01
        pool.tick(now)
    return made


def test_members_that_die_as_soon_as_they_are_ready_are_replaced_ever_more_slowly() -> None:
    """An image whose first process ends at once, a machine that kills what is new."""
    pool = core(size=4)
    pool.tick(0.0)
    assert 5 <= lifetimes(pool, 60.0, 0.001) < 100  # (by the thousand without a pause)
    assert "it dies soon after it was made: its keeper is gone" in pool.why(pool.claim("A", None, 60.0))


def test_members_that_die_later_are_replaced_at_once() -> None:
    pool = core(size=1)
    pool.tick(0.0)
    assert lifetimes(pool, 60.0, 6.0) >= 9


def test_many_that_die_young_in_one_moment_are_one_failure() -> None:
    """A hub that is killed takes all along: that says nothing about the next one's."""
    pool = core(size=4)
    pool.tick(0.0)
    play(pool, 0.0)
    for name in list(pool.idle):
        pool.lost(name, OOPS, 1.0)
    play(pool, 1.0)
    pool.tick(1.3)
    play(pool, 1.3)
    assert pool.n[State.IDLE] == 4
