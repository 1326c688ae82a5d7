"""Token bucket, back-off and breaker, each alone."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox.pool.refill import Backoff, Breaker, Cause, TokenBucket

OOPS = Cause("oops", "it went wrong")
FATAL = Cause("image", "no such image", retryable=False)


@given(
    rate=st.floats(1.0, 500.0),
    waits=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.03, 0.4, 3.0]), max_size=300),
    throttled=st.sets(st.integers(0, 300), max_size=4),
)
def test_no_second_sees_more_writes_than_the_rate(
    rate: float, waits: list[float], throttled: set[int]
) -> None:
    bucket, now, taken = TokenBucket(rate), 50.0, []
    for i, wait in enumerate(waits):
        now += wait
        if i in throttled:
            bucket.throttle(now, 0.5)
        while bucket.take(now):
            taken.append(now)
    for start in taken:
        assert sum(start <= t < start + 0.999 for t in taken) <= math.ceil(
            rate
        )  # half a write cannot be told apart from a whole one


@pytest.mark.parametrize("rate", [1.0, 7.0, 19.0, 20.0, 21.0, 40.0, 100.0, 500.0])
def test_whoever_takes_all_there_is_gets_the_rate_and_no_second_gets_more(rate: float) -> None:
    bucket, now, taken = TokenBucket(rate), 0.0, []
    while now < 4.0:
        now += bucket.wait(now)
        assert bucket.take(now)
        taken.append(now)
    assert len(taken) >= 0.9 * rate * 4
    for start in taken:
        assert sum(start <= t < start + 0.999 for t in taken) <= rate


def test_a_throttle_pauses_halves_and_is_forgotten_in_time() -> None:
    bucket = TokenBucket(10.0)
    bucket.throttle(100.0, retry_after=3.0)
    bucket.throttle(100.1)  # the same burst's other answers count once
    assert bucket.current_rate == 5.0
    assert bucket.wait(100.1) == pytest.approx(2.9)
    assert not bucket.take(102.9)
    assert bucket.take(103.5)
    bucket.wait(120.0)
    assert bucket.current_rate == 10.0
    assert bucket.throttled == 2


def test_an_unlimited_one_learns_from_429() -> None:
    bucket = TokenBucket(None)
    assert all(bucket.take(10.0 + i / 1000) for i in range(100))
    bucket.throttle(10.1)
    assert bucket.current_rate == 50.0
    assert not bucket.take(10.1)
    bucket.wait(200.0)
    bucket.wait(201.0)
    assert bucket.current_rate is None


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1.0)
    assert bucket.take(10.0)
    assert not bucket.take(3.0)
    assert bucket.take(11.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate)


def test_backoff_is_spread_over_all_of_its_limit() -> None:
    rng = Random(1)
    waits = []
    for _ in range(500):
        backoff = Backoff(rng, base=1.0, cap=8.0)
        waits.append([backoff.next() for _ in range(6)])
    for n, limit in enumerate([1.0, 2.0, 4.0, 8.0, 8.0, 8.0]):
        column = [row[n] for row in waits]
        assert max(column) <= limit
        assert min(column) < 0.05 * limit
        assert max(column) > 0.95 * limit


def test_a_breaker_opens_tries_one_at_a_time_and_closes() -> None:
    breaker, now = Breaker(Random(2), threshold=3, patience_s=60.0), 0.0
    assert breaker.allows(now, 5)
    for _ in range(3):
        assert not breaker.open
        breaker.failed(now, OOPS)
        now = max(now, breaker.retry_at)
    assert breaker.open
    assert breaker.trips == 1
    assert not breaker.allows(now, 1)
    assert breaker.allows(now, 0)
    assert not breaker.hopeless(now)
    assert breaker.hopeless(now + 60)
    breaker.succeeded()
    assert breaker.allows(now, 9)
    assert breaker.cause is None


def test_what_cannot_be_mended_is_hopeless_at_once_and_tried_again_later() -> None:
    breaker = Breaker(Random(3))
    breaker.failed(5.0, FATAL)
    assert breaker.open
    assert breaker.permanent
    assert breaker.hopeless(5.0)
    assert not breaker.allows(5.9, 0)
    assert breaker.allows(breaker.retry_at, 0)


def test_a_cause_says_more_than_the_key_that_was_missing() -> None:
    assert Cause.of(KeyError("small")).message == "KeyError: 'small'"
    assert Cause.of(OSError(28, "No space left on device")).message == "[Errno 28] No space left on device"
    assert Cause.of(RuntimeError()).message == "RuntimeError"
