from __future__ import annotations

from rlsandbox.metrics import BatchClock, Metrics


class Time:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_from_the_first_request_to_the_last_record() -> None:
    time, metrics = Time(), Metrics()
    batch = BatchClock(metrics.batch, clock=time)
    time.now += 100  # before the first request nothing counts
    for _ in range(3):
        batch.requested()
        time.now += 1
    assert batch.completion_s is None
    for _ in range(3):
        time.now += 10
        batch.recorded()
    time.now += 50  # after the last record nothing counts
    assert batch.completion_s == 33
    assert batch.close() == 33
    assert batch.close() == 33
    summary = metrics.batch.summary()
    assert (summary.n, summary.max, summary.censored) == (1, 33, 0)


def test_a_batch_closed_with_rollouts_open_is_a_lower_bound() -> None:
    time, metrics = Time(), Metrics()
    batch = BatchClock(metrics.batch, clock=time)
    batch.requested()
    batch.requested()
    batch.recorded()
    time.now += 7
    assert batch.close() == 7
    assert metrics.batch.summary().text("max") == ">=7 s"


def test_a_batch_without_requests_has_no_number() -> None:
    metrics = Metrics()
    assert BatchClock(metrics.batch).close() is None
    assert metrics.batch.summary().n == 0
