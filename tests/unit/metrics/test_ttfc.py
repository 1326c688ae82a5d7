from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox.errors import SandboxStateError
from rlsandbox.metrics import Metrics, TtfcClock, TtfcSample


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_parts_of_a_claim() -> None:
    time = Time()
    clock = TtfcClock(clock=time)
    time.now += 1
    clock.now("provisioned")
    time.now += 2
    clock.now("reset")
    time.now += 4
    clock.now("connected")
    time.now += 8
    clock.handed_over()
    time.now += 100
    clock.run_called()
    time.now += 16
    sample = clock.started()
    assert sample == TtfcSample(
        queued_s=1, provisioned_s=2, reset_s=4, connected_s=8, started_s=16, idle_s=100
    )
    assert sample.ttfc_s == 31
    clock.run_called()
    assert clock.started() is None
    assert clock.abandoned() is None


def test_a_claim_asked_for_ahead_counts_from_the_moment_it_is_awaited() -> None:
    time = Time()
    clock = TtfcClock(needed=False, clock=time)
    time.now += 5
    clock.now("provisioned")
    time.now += 5
    clock.needed()
    clock.needed()
    time.now += 2
    clock.handed_over()
    clock.run_called()
    time.now += 0.5
    sample = clock.started()
    assert sample == TtfcSample(provisioned_s=2, started_s=0.5)


def test_a_claim_that_was_ready_before_it_was_needed_waits_nothing() -> None:
    time = Time()
    clock = TtfcClock(needed=False, clock=time)
    time.now += 5
    clock.handed_over()
    time.now += 7
    clock.run_called()
    sample = clock.started()
    assert sample is not None
    assert sample.ttfc_s == 0
    assert sample.idle_s == 7


def test_a_claim_that_never_starts_is_censored_at_the_time_waited() -> None:
    time = Time()
    metrics = Metrics()
    clock = TtfcClock(clock=time)
    time.now += 30
    sample = clock.abandoned()
    assert sample == TtfcSample(queued_s=30, never_started=True)
    metrics.record_ttfc(sample)
    metrics.record_ttfc(TtfcSample(queued_s=1, started_s=0.25))
    summary = metrics.ttfc.summary()
    assert (summary.n, summary.censored, summary.max) == (2, 1, 30)
    assert summary.text("max") == ">=30 s"
    assert summary.text("p50") == "1.25 s"
    assert metrics.to_dict()["never_started"] == 1
    assert metrics.series()["ttfc_started"].values() == [0.25]


def test_a_claim_nobody_waited_for_gives_no_sample() -> None:
    clock = TtfcClock(needed=False, clock=Time())
    assert clock.abandoned() is None
    clock.needed()
    assert clock.abandoned() is None


def test_a_first_command_that_could_not_be_started_counts_until_one_does() -> None:
    time = Time()
    clock = TtfcClock(clock=time)
    clock.handed_over()
    clock.run_called()
    time.now += 3
    clock.run_failed()
    time.now += 10
    clock.run_called()
    time.now += 1
    assert clock.started() == TtfcSample(started_s=4, idle_s=10)


def test_started_without_run_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(SandboxStateError):
        TtfcClock().started()


moments = st.lists(
    st.sampled_from(
        ["provisioned", "reset", "connected", "needed", "handed_over", "run_called", "run_failed"]
    )
)


@given(moments, st.booleans())
def test_the_parts_add_up_to_the_time_since_it_was_needed(events: list[str], needed: bool) -> None:
    time = Time()
    clock = TtfcClock(needed=needed, clock=time)
    since = time.now if needed else None
    for event in events:
        time.now += 1
        if event in ("provisioned", "reset", "connected"):
            clock.now(event)  # type: ignore[arg-type]
        elif event == "handed_over":
            if clock._part in ("idle", "started"):
                continue
            clock.handed_over()
            since = time.now if since is None else since
        else:
            getattr(clock, event)()
            if event == "needed" and since is None:
                since = time.now
    sample = clock.abandoned()
    if since is None:
        assert sample is None
    else:
        assert sample is not None
        assert sample.ttfc_s + sample.idle_s == time.now - since
