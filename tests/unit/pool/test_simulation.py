"""The production core and driver at a size that no laptop has, in virtual time."""

from __future__ import annotations

import pytest

from rlsandbox.backends.simulated import Faults, Place, Simulated
from rlsandbox.pool.model import CoreConfig
from rlsandbox.pool.operations import Deadlines
from rlsandbox.pool.simulation import Simulation, Workload, simulate
from rlsandbox.spec import Spec
from rlsandbox.testing.clock import VirtualClock

HOME = Spec().digest
TROUBLE = Faults(
    provision=0.01, hang=0.001, dispose=0.01, residue=0.001, death_per_s=1e-5, storms=60
)  # fmt: skip


def run(
    work: Workload, *, faults: Faults = TROUBLE, ceiling: int, seed: int = 1, **place: float
) -> Simulation:
    backend = Simulated(faults=faults, seed=seed, **place)
    config = CoreConfig(size=0, ceiling=ceiling, max_creating=256, write_rate=80.0, home=HOME)
    clock = VirtualClock()
    result = clock.run(simulate(backend, config, work, deadlines=Deadlines(dispose=20.0), seed=seed))
    assert result.missing == 0
    assert result.peak <= ceiling + result.counters["strays"]
    assert result.left == 0
    return result


def test_the_whole_batch_of_the_field_with_faults_has_every_record() -> None:
    result = run(Workload(specs=4578, siblings=4), ceiling=5869)
    assert result.requested == 18312
    assert result.completed == 18312
    assert result.counters["create_failed"] > 50
    assert result.counters["create_gave_up"] > 0
    assert result.throttled > 0


@pytest.mark.parametrize("ahead", [True, False])
def test_same_seed_same_history(ahead: bool) -> None:
    work = Workload(specs=150, siblings=4, think=20.0, ahead=ahead)
    first, again = run(work, ceiling=120, seed=7), run(work, ceiling=120, seed=7)
    assert first.digest == again.digest
    assert first.waits == again.waits
    other = run(work, ceiling=120, seed=8)
    assert other.digest != first.digest


def test_a_ceiling_far_below_the_number_of_specs_serves_all_of_them() -> None:
    result = run(Workload(specs=200, siblings=3, think=5.0), ceiling=8)
    assert result.completed == 600
    assert result.counters["moved"] > 150


def test_siblings_share_sandboxes_when_places_are_few() -> None:
    result = run(Workload(specs=100, siblings=8, think=5.0), ceiling=100, faults=Faults())
    assert result.completed == 800
    assert result.members < 400, "most rollouts run in a sandbox that was used before"


def test_sandboxes_die_all_the_time_and_every_rollout_still_has_its_end() -> None:
    faults = Faults(death_per_s=0.01, provision=0.1, residue=0.1, dispose=0.2)
    result = run(Workload(specs=50, siblings=4, think=30.0, retries=2), ceiling=64, faults=faults)
    assert result.retried > 20
    assert result.counters["died_claimed"] > 20
    assert result.records == 200


def test_deletions_that_never_end_cost_places_but_stop_nothing() -> None:
    result_faults = Faults(stuck=0.02)
    backend = Simulated(faults=result_faults, seed=3)
    config = CoreConfig(size=0, ceiling=60, max_creating=32, write_rate=80.0, home=HOME)
    work = Workload(specs=150, siblings=2, think=5.0)
    result = VirtualClock().run(simulate(backend, config, work, deadlines=Deadlines(dispose=20.0), seed=3))
    assert result.missing == 0
    assert result.completed == 300
    assert result.counters["dispose_failed"] > 0


def test_a_small_cluster_is_full_and_claims_wait_for_it() -> None:
    place = Place(nodes=2, slots=4, writes=None)
    config = CoreConfig(size=0, ceiling=50, max_creating=50, home=HOME)
    work = Workload(specs=20, siblings=2, think=2.0, claim_timeout=3600)
    result = VirtualClock().run(
        simulate(Simulated(place=place), config, work, deadlines=Deadlines(provision=60.0))
    )
    assert result.missing == 0
    assert result.completed == 40
