"""Every promise of the pool's core, against a world that fails in every way it can.

The machine plays the driver and the place together. It keeps its own account of what exists, what is
clean and who waits, and compares after every event; it never asks the core whether the core is right.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsandbox.pool.core import Core
from rlsandbox.pool.model import (
    CoreConfig,
    Dispose,
    DropLayer,
    Grant,
    Note,
    Prime,
    Provision,
    Refuse,
    Reset,
    State,
)
from rlsandbox.pool.refill import Cause

OOPS = Cause("oops", "it went wrong")
FATAL = Cause("image_not_found", "no such image", retryable=False)
SPECS = ("A", "B", "C", "D")
LAYERS = (None, "1", "2", "3")


class World(RuleBasedStateMachine):
    """The driver, the place and the pool's users in one."""

    core: Core

    @initialize(
        ceiling=st.integers(1, 6),
        size=st.integers(0, 6),
        specs=st.integers(1, 4),
        creating=st.integers(1, 3),
        rate=st.sampled_from([None, 1.0, 2.0, 5.0, 20.0, 100.0]),
        when_empty=st.sampled_from(["create", "create", "create", "wait", "fail"]),
        shared=st.booleans(),
        budget=st.sampled_from([None, 150, 350]),
        seed=st.integers(0, 3),
    )
    def start(self, ceiling, size, specs, creating, rate, when_empty, shared, budget, seed) -> None:  # type: ignore[no-untyped-def]
        self.config = CoreConfig(
            size=min(size, ceiling), ceiling=ceiling, when_empty=when_empty, max_creating=creating,
            write_rate=rate, home="A", shared_layers=shared, layer_budget=budget, patience_s=20.0,
        )  # fmt: skip
        self.core = Core(self.config, seed=seed)
        self.now = 100.0
        self.specs = SPECS[:specs]
        self.ops: dict[str, Any] = {}
        self.exists: set[str] = set()
        self.on: dict[str, str | None] = {}
        self.holds: dict[str, set[str]] = {}
        self.layers: set[str] = set()
        self.snapshots: dict[str, str] = {}
        self.clean: set[str] = set()
        self.strays: set[str] = set()
        self.gone: list[str] = []
        self.away: set[str] = set()
        self.cleared: set[str] = set()
        self.waiting: dict[int, Any] = {}
        self.held: dict[int, str] = {}
        self.ended: Counter[int] = Counter()
        self.writes: list[float] = []
        self.calm = False
        self.n_snapshots = 0
        self.core.tick(self.now)
        self.carry_out()

    # -- carrying actions out ----------------------------------------------------------------------

    def carry_out(self) -> None:
        actions, self.core.actions = self.core.actions, []
        grants = []
        for action in actions:
            match action:
                case Provision(member):
                    assert member not in self.ops
                    assert len(self.core.members) - len(self.strays) <= self.config.ceiling
                    self.ops[member] = action
                    self.writes.append(self.core.now)
                case Dispose(member):
                    assert not isinstance(self.ops.get(member), Provision), (
                        "a creation in flight is waited for"
                    )
                    self.ops[member] = action
                    self.writes.append(self.core.now)
                case Prime(member, layer):
                    assert member not in self.ops
                    assert member in self.clean
                    if self.config.shared_layers:
                        assert layer not in self.layers, "primed twice"
                    self.clean.discard(member)
                    self.ops[member] = action
                case Reset(member, layer):
                    assert member not in self.ops
                    assert self.has_layer(member, layer), "a reset onto a layer that is not there"
                    self.clean.discard(member)
                    self.ops[member] = action
                case Grant(claim, member):
                    self.ended[claim] += 1
                    asked = self.waiting.pop(claim)
                    assert member in self.exists
                    assert member in self.clean, "handed over dirty"
                    assert member not in self.away, "handed over although nothing is heard of it"
                    assert member not in self.cleared, "handed over although its place is being cleared"
                    assert self.on[member] == asked.layer
                    self.clean.discard(member)
                    self.held[claim] = member
                    grants.append(asked)
                case Refuse(claim, kind, message):
                    self.ended[claim] += 1
                    asked = self.waiting.pop(claim)
                    assert message
                    if kind == "timeout":
                        assert asked.deadline is not None
                        assert asked.deadline <= self.core.now
                    else:
                        assert not self.calm or kind in ("closed", "empty")
                case DropLayer(layer):
                    assert layer in self.layers
                    assert layer not in self.snapshots
                    users = [m for m in self.exists if self.on.get(m) == layer and m in self.clean]
                    assert not users, "a layer was dropped under a member"
                    coming = [o for o in self.ops.values() if isinstance(o, Reset) and o.layer == layer]
                    assert not coming
                    self.layers.discard(layer)
                    for held in self.holds.values():
                        held.discard(layer)
                case Note():
                    assert action.detail
        for asked in grants:
            self.check_order(asked)

    def has_layer(self, member: str, layer: str | None) -> bool:
        if layer is None:
            return True
        if layer in self.snapshots or self.config.shared_layers:
            return layer in self.layers
        return layer in self.holds.get(member, set())

    def check_order(self, served: Any) -> None:
        """Older claims of the spec have their member under way, or are of the same batch."""
        coming = Counter(
            op.layer
            for member, op in self.ops.items()
            if isinstance(op, (Prime, Reset)) and self.core.members[member].spec == served.spec
        )
        for older in sorted(self.waiting.values(), key=lambda c: c.id):
            if older.spec != served.spec or older.id > served.id:
                continue
            if coming[older.layer] > 0:
                coming[older.layer] -= 1
                continue
            assert older.batch is not None, f"{served} passed {older}"
            assert older.batch == served.batch, f"{served} passed {older}"

    # -- users ---------------------------------------------------------------------------------------

    def name(self, spec: str, layer: str | None) -> str | None:
        return None if layer is None else f"{spec}{layer}"

    def ask(self, spec: str, layer: str | None, timeout: float | None, batch: str | None) -> None:
        self.core._next = self.core.next_claim + 1  # type: ignore[attr-defined]
        expected = type("Asked", (), {})
        deadline = None if timeout is None else self.now + timeout
        asked = expected()
        asked.id, asked.spec, asked.layer = self.core.next_claim + 1, spec, layer
        asked.deadline, asked.batch = deadline, batch
        self.waiting[asked.id] = asked
        claim = self.core.claim(spec, layer, self.now, deadline=deadline, batch=batch)
        assert claim.id == asked.id
        self.carry_out()

    @rule(
        spec=st.sampled_from(SPECS),
        layer=st.sampled_from(LAYERS),
        timeout=st.sampled_from([None, None, 0.5, 5.0, 60.0]),
        batch=st.sampled_from([None, None, "x", "y"]),
        count=st.integers(1, 4),
    )
    def claim(self, spec, layer, timeout, batch, count) -> None:  # type: ignore[no-untyped-def]
        spec = spec if spec in self.specs else self.specs[0]
        for _ in range(count):
            self.ask(spec, self.name(spec, layer), timeout, batch)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data) -> None:  # type: ignore[no-untyped-def]
        claim = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[claim]
        self.ended[claim] += 1
        self.core.cancel(claim, self.now)
        self.carry_out()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), discard=st.sampled_from([False, False, False, True]))
    def release(self, data, discard) -> None:  # type: ignore[no-untyped-def]
        self.give_back(data.draw(st.sampled_from(sorted(self.held))), discard)

    def give_back(self, claim: int, discard: bool) -> None:
        del self.held[claim]
        self.core.release(claim, self.now, discard=discard)
        self.carry_out()

    @rule(
        demand=st.lists(
            st.tuples(st.sampled_from(SPECS), st.sampled_from(LAYERS), st.integers(1, 4)), max_size=4
        ),
        replace=st.booleans(),
    )
    def expect(self, demand, replace) -> None:  # type: ignore[no-untyped-def]
        told = [(s, self.name(s, la), n) for s, la, n in demand if s in self.specs]
        self.core.expect(told, self.now, replace=replace)
        self.carry_out()

    def alive(self) -> list[str]:
        known = self.core.members
        return sorted(m for m in self.held.values() if m in known and known[m].state is State.CLAIMED)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), size=st.integers(0, 200))
    def snapshot(self, data, size) -> None:  # type: ignore[no-untyped-def]
        member = data.draw(st.sampled_from(self.alive()))
        self.n_snapshots += 1
        name, spec = f"snap{self.n_snapshots}", self.core.members[member].spec
        self.snapshots[name] = spec
        self.layers.add(name)
        parent = self.on[member]
        self.on[member] = name
        self.core.keep_layer(name, spec, size, self.now, member=member, parent=parent)
        self.carry_out()

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), timeout=st.sampled_from([None, 5.0]))
    def fork(self, data, timeout) -> None:  # type: ignore[no-untyped-def]
        name = data.draw(st.sampled_from(sorted(self.snapshots)))
        for _ in range(2):
            self.ask(self.snapshots[name], name, timeout, name)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def delete_snapshot(self, data) -> None:  # type: ignore[no-untyped-def]
        name = data.draw(st.sampled_from(sorted(self.snapshots)))
        del self.snapshots[name]
        self.calm, calm = False, self.calm
        self.core.drop_layer(name, self.now)
        self.carry_out()
        self.calm = calm

    # -- the place -----------------------------------------------------------------------------------

    def pick(self, data: Any, kind: type) -> str | None:
        members = sorted(m for m, op in self.ops.items() if isinstance(op, kind))
        return data.draw(st.sampled_from(members)) if members else None

    def finish(self, member: str) -> None:
        """What *member* is in the middle of succeeds."""
        op = self.ops.pop(member)
        match op:
            case Provision():
                self.exists.add(member)
                self.on[member], self.holds[member] = None, set()
                self.clean.add(member)
                self.core.provisioned(member, self.now)
            case Prime(_, layer):
                if member not in self.exists:
                    self.ops[member] = op
                    return self.die(member)
                self.layers.add(layer)
                self.holds[member].add(layer)
                self.core.primed(member, layer, 100, self.now)
            case Reset(_, layer):
                if member not in self.exists:
                    self.ops[member] = op
                    return self.die(member)
                self.on[member] = layer
                self.clean.add(member)
                self.core.prepared(member, self.now)
            case Dispose():
                self.remove(member)
                self.core.disposed(member, self.now)
        self.carry_out()
        return None

    def remove(self, member: str) -> None:
        self.exists.discard(member)
        self.clean.discard(member)
        self.strays.discard(member)
        self.gone.append(member)

    def die(self, member: str) -> None:
        op = self.ops.pop(member, None)
        self.exists.discard(member)
        self.clean.discard(member)
        if isinstance(op, Dispose):
            self.ops[member] = op
            return
        if isinstance(op, Prime):
            self.core.prime_failed(member, Cause("sandbox_died", "died"), self.now, alive=False)
        else:
            self.core.lost(member, Cause("sandbox_died", "died"), self.now)
        self.carry_out()

    @precondition(lambda self: self.ops)
    @rule(data=st.data())
    def succeed(self, data) -> None:  # type: ignore[no-untyped-def]
        self.finish(data.draw(st.sampled_from(sorted(self.ops))))

    @precondition(lambda self: self.ops)
    @rule(most=st.integers(1, 8))
    def things_go_well(self, most) -> None:  # type: ignore[no-untyped-def]
        """Several operations succeed in a row: without it few examples come as far as a second episode."""
        for _ in range(most):
            if self.ops:
                self.finish(min(self.ops))

    @precondition(lambda self: self.held)
    @rule()
    def everybody_gives_back(self) -> None:
        for claim in sorted(self.held):
            self.give_back(claim, False)

    @precondition(lambda self: any(isinstance(op, Provision) for op in self.ops.values()))
    @rule(
        data=st.data(),
        how=st.sampled_from(["rejected", "fatal", "error", "error but exists", "hung", "429", "429 later"]),
    )
    def provision_fails(self, data, how) -> None:  # type: ignore[no-untyped-def]
        member = self.pick(data, Provision)
        assert member is not None
        del self.ops[member]
        if how == "error but exists":
            self.exists.add(member)
            self.on[member], self.holds[member] = None, set()
        self.core.provision_failed(
            member,
            FATAL if how == "fatal" else OOPS,
            self.now,
            exists=how in ("error", "error but exists", "hung"),
            gave_up=how == "hung",
            throttled=how.startswith("429"),
            retry_after=3.0 if how == "429 later" else None,
        )
        self.carry_out()

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def late_success(self, data) -> None:  # type: ignore[no-untyped-def]
        """A creation that was given up, and removed, is there in the end."""
        member = data.draw(st.sampled_from(sorted(self.gone)))
        if member in self.core.members:
            return
        self.exists.add(member)
        self.strays.add(member)
        self.core.provisioned(member, self.now)
        self.carry_out()

    @precondition(lambda self: any(isinstance(op, Prime) for op in self.ops.values()))
    @rule(
        data=st.data(), cause=st.sampled_from([OOPS, Cause("prime", "setup exited with 1", retryable=False)])
    )
    def prime_fails(self, data, cause) -> None:  # type: ignore[no-untyped-def]
        member = self.pick(data, Prime)
        assert member is not None
        if member not in self.exists:
            return self.die(member)
        del self.ops[member]
        self.core.prime_failed(member, cause, self.now)
        self.carry_out()
        return None

    @precondition(lambda self: any(isinstance(op, Reset) for op in self.ops.values()))
    @rule(data=st.data(), error=st.booleans())
    def reset_fails(self, data, error) -> None:  # type: ignore[no-untyped-def]
        member = self.pick(data, Reset)
        assert member is not None
        del self.ops[member]
        if error:
            self.core.lost(member, OOPS, self.now)
        else:
            self.core.residue(member, "file /tmp/.x", self.now)
        self.carry_out()

    @precondition(lambda self: any(isinstance(op, Dispose) for op in self.ops.values()))
    @rule(data=st.data(), throttled=st.booleans())
    def dispose_fails(self, data, throttled) -> None:  # type: ignore[no-untyped-def]
        member = self.pick(data, Dispose)
        assert member is not None
        del self.ops[member]
        self.core.dispose_failed(member, OOPS, self.now, throttled=throttled)
        self.carry_out()

    @precondition(lambda self: self.exists)
    @rule(data=st.data())
    def dies(self, data) -> None:  # type: ignore[no-untyped-def]
        """Idle, claimed, in reset, while it is primed."""
        self.die(data.draw(st.sampled_from(sorted(self.exists))))

    @precondition(lambda self: self.core.members)
    @rule(data=st.data())
    def its_place_is_not_heard_of(self, data) -> None:  # type: ignore[no-untyped-def]
        member = data.draw(st.sampled_from(sorted(self.core.members)))
        self.away.add(member)
        self.core.doubted(member, "its node is not ready", self.now)
        assert self.core.members[member].state is not State.IDLE
        self.carry_out()

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def its_place_is_heard_of_again(self, data) -> None:  # type: ignore[no-untyped-def]
        member = data.draw(st.sampled_from(sorted(self.away)))
        self.away.discard(member)
        self.core.trusted(member, self.now)
        self.carry_out()

    @precondition(lambda self: self.core.members)
    @rule(data=st.data(), cleared=st.booleans())
    def its_place_is_cleared(self, data, cleared) -> None:  # type: ignore[no-untyped-def]
        member = data.draw(st.sampled_from(sorted(self.core.members)))
        (self.cleared.add if cleared else self.cleared.discard)(member)
        self.core.unwanted(member, "its node is being drained" if cleared else "", self.now)
        assert not cleared or self.core.members[member].state not in (State.IDLE, State.AWAY)
        self.carry_out()

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.2, 1.0, 5.0, 30.0, 400.0, 1e6]))
    def time_passes(self, seconds) -> None:  # type: ignore[no-untyped-def]
        self.now += seconds
        self.core.tick(self.now)
        self.carry_out()

    @rule(seconds=st.sampled_from([0.5, 10.0, 1e6]))
    def clock_goes_back(self, seconds) -> None:  # type: ignore[no-untyped-def]
        before = self.core.now
        self.core.tick(self.now - seconds)
        assert self.core.now == before
        self.carry_out()

    # -- invariants ----------------------------------------------------------------------------------

    @invariant()
    def never_above_the_ceiling(self) -> None:
        if not hasattr(self, "core"):
            return
        in_flight = {m for m, op in self.ops.items() if isinstance(op, Provision)}
        real = (self.exists | in_flight) - self.strays
        assert len(real) <= self.config.ceiling
        assert len(in_flight) <= self.config.max_creating
        assert self.exists <= set(self.core.members), "something exists that nobody counts"

    @invariant()
    def never_more_writes_a_second(self) -> None:
        if not hasattr(self, "core") or self.config.write_rate is None:
            return
        self.writes = [t for t in self.writes if t >= self.core.now - 2.0]
        for start in self.writes:
            window = [t for t in self.writes if start <= t < start + 0.999]
            assert len(window) <= self.config.write_rate

    @invariant()
    def every_claim_ends_once_and_by_its_deadline(self) -> None:
        if not hasattr(self, "core"):
            return
        assert all(n == 1 for n in self.ended.values())
        for asked in self.waiting.values():
            assert asked.deadline is None or asked.deadline > self.core.now
            assert asked.id in self.core.claims
            assert self.core.why(self.core.claims[asked.id])
        assert {c.id for c in self.core.claims.values() if c.member is None} == set(self.waiting)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "core"):
            check_books(self.core)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """Whatever is not finished has somebody who works on it, or a time at which it goes on."""
        if not hasattr(self, "core"):
            return
        for member in self.core.members.values():
            busy = member.state in (State.CREATING, State.PRIMING, State.RESETTING)
            if busy or member.asked_to_leave:
                assert member.id in self.ops
            if member.state is State.LEAVING and not member.asked_to_leave:
                assert self.core.wake is not None

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for member in sorted(self.away):
            self.away.discard(member)
            self.core.trusted(member, self.now)
            self.carry_out()
        self.calm = True
        self.until_nobody_waits()
        for name in list(self.snapshots):
            del self.snapshots[name]
            self.core.drop_layer(name, self.now)
            self.carry_out()
        self.settle(lambda: not self.ops and not self.core.n[State.LEAVING])
        assert not [name for name in self.core.layers.names() if name.startswith("snap")]
        self.core.close(self.now)
        self.carry_out()
        self.held.clear()
        self.settle(lambda: not self.core.members)
        assert not self.exists
        assert not self.core.claims
        check_books(self.core)

    def until_nobody_waits(self) -> None:
        """No claim starves once the world works and users give back what they hold."""

        def done() -> bool:
            for claim in list(self.held):
                self.give_back(claim, False)
            return not self.waiting

        self.core.layer_breakers.clear()
        self.settle(done)

    def settle(self, done: Any) -> None:
        for _ in range(3000):
            if done():
                return
            if self.ops:
                self.finish(min(self.ops))
            elif self.core.wake is not None:
                self.now = max(self.now, self.core.wake)
                self.core.tick(self.now)
                self.carry_out()
            elif not done():
                raise AssertionError(
                    f"nothing goes on: {[self.core.why(c) for c in self.core.claims.values()]}"
                )
        raise AssertionError("no end")


def check_books(core: Core) -> None:
    """Every count equals what counting says."""
    states = Counter(m.state for m in core.members.values())
    assert {s: n for s, n in core.n.items() if n} == dict(states)
    assert set(core.idle) == {m.id for m in core.members.values() if m.state is State.IDLE}
    stand: Counter[str | None] = Counter()
    short = 0
    for spec, room in core.specs.items():
        mine = [m for m in core.members.values() if m.spec == spec]
        states = Counter(m.state for m in mine)
        assert room.idle_n == states[State.IDLE] == sum(len(s) for s in room.idle.values())
        for layer, shelf in room.idle.items():
            assert shelf
            assert all(m.layer == layer and m.state is State.IDLE for m in shelf.values())
        assert room.creating == states[State.CREATING]
        assert room.claimed == states[State.CLAIMED]
        assert room.away == states[State.AWAY]
        assert room.leaving == states[State.LEAVING]
        preparing = Counter(m.target for m in mine if m.state in (State.PRIMING, State.RESETTING))
        assert room.preparing == dict(preparing)
        assert room.preparing_n == sum(preparing.values())
        assert room.priming == dict(Counter(m.target for m in mine if m.state is State.PRIMING))
        assert room.short == max(0, len(room.queue) - room.coming)
        short += room.short
        for m in mine:
            stand[m.layer] += 1
            if m.state in (State.PRIMING, State.RESETTING):
                stand[m.target] += 1
    assert core.short == short
    for name in core.layers.names():
        assert core.layers.standing(name) == stand[name], name
    assert core.layers.bytes == sum(core.layers.get(n).bytes for n in core.layers.names())  # type: ignore[union-attr]
    wanted = Counter(c.layer for r in core.specs.values() for c in r.queue.values() if c.layer is not None)
    assert core.wanted_layers == dict(wanted)


World.TestCase.settings = settings(
    max_examples=int(os.environ.get("RLSANDBOX_TEST_EXAMPLES", "150")),
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestWorld = pytest.mark.timeout(600)(World.TestCase)
