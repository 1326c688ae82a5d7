from __future__ import annotations

import pickle
import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox.errors import ConfigError
from rlsandbox.metrics import Samples, Series, Summary
from rlsandbox.metrics.series import nearest_rank, quantity

finite = st.floats(min_value=0, max_value=1e9)


@given(st.integers(1, 5000), st.sampled_from([50, 95, 99]))
def test_nearest_rank_is_the_smallest_rank_that_covers_the_percentage(n: int, percent: int) -> None:
    rank = nearest_rank(n, percent)
    assert Fraction(rank, n) >= Fraction(percent, 100)
    assert Fraction(rank - 1, n) < Fraction(percent, 100)


def test_known_percentiles() -> None:
    summary = Samples.of(range(1, 101)).summary()
    assert (summary.n, summary.p50, summary.p95, summary.p99, summary.max) == (100, 50, 95, 99, 100)
    assert summary.mean == 50.5
    assert Samples.of([7.0]).summary().p99 == 7.0
    assert Samples.of(range(1, 21)).summary().p95 == 19  # 0.95 * 20 in floats is a little over 19


def test_an_empty_window_has_no_numbers() -> None:
    summary = Series("ttfc").summary()
    assert summary == Summary(0)
    assert summary.mean is summary.p50 is summary.p95 is summary.p99 is summary.max is None
    assert summary.to_dict("ttfc/") == {}
    assert summary.text("p50") == "-"
    assert str(summary) == "no samples"


@given(st.lists(finite, min_size=1), st.lists(finite), st.lists(st.floats(0, 1e9), min_size=1))
def test_what_is_not_marked_as_a_lower_bound_is_true_whatever_the_censored_were(
    exact: list[float], censored: list[float], extra: list[float]
) -> None:
    told = Samples.of(exact, censored=censored).summary()
    truth = Samples.of([*exact, *(c + extra[i % len(extra)] for i, c in enumerate(censored))]).summary()
    assert told.censored == len(censored)
    for name in ("p50", "p95", "p99", "max"):
        seen, true = getattr(told, name), getattr(truth, name)
        if name in told.lower_bounds:
            assert seen <= true
            assert told.text(name).startswith(">=")
        else:
            assert seen == true
            assert not told.text(name).startswith(">=")


def test_a_censored_sample_bounds_only_the_percentiles_it_reaches() -> None:
    summary = Samples.of([1.0] * 97, censored=[30.0] * 3).summary()
    assert summary.lower_bounds == {"mean", "p99", "max"}
    assert summary.text("p99") == ">=30 s"
    assert summary.text("p95") == "1 s"
    assert "3 never started" in str(summary)


@given(st.lists(st.tuples(st.lists(finite), st.lists(finite)), max_size=4))
def test_merging_the_samples_of_processes_is_exact(parts: list[tuple[list[float], list[float]]]) -> None:
    there = [pickle.dumps(Samples.of(exact, censored=late)) for exact, late in parts]
    merged = Samples.merge(pickle.loads(part) for part in there).summary()
    whole = Samples.of([v for e, _ in parts for v in e], censored=[v for _, c in parts for v in c])
    assert merged == whole.summary()


@given(st.lists(finite, min_size=1))
def test_the_mean_never_leaves_the_range(values: list[float]) -> None:
    summary = Samples.of(values).summary()
    assert summary.mean is not None
    assert min(values) <= summary.mean <= max(values)


def test_windows_see_each_sample_once_and_do_not_disturb_each_other() -> None:
    series = Series("reset")
    series.add(1.0)
    step, exporter = series.window(), series.window()
    series.add(2.0)
    assert list(step.pop().values) == [2.0]
    series.add(3.0)
    assert list(step.peek().values) == [3.0]
    assert list(step.pop().values) == [3.0]
    assert list(step.pop().values) == []
    assert list(exporter.pop().values) == [2.0, 3.0]
    assert series.values() == [1.0, 2.0, 3.0]


def test_old_samples_leave_the_window_but_not_the_totals() -> None:
    series = Series("reset", kept=100)
    window = series.window()
    for i in range(1000):
        series.add(float(i))
    assert series.count == 1000
    assert series.sum == sum(range(1000))
    kept = series.values()
    assert 100 <= len(kept) <= 113
    assert kept[-1] == 999.0
    assert list(window.pop().values) == kept  # later than the window keeps: what is left, once
    series.add(1000.0)
    assert list(window.pop().values) == [1000.0]


def test_threads_lose_no_sample() -> None:
    series = Series("ttfc")
    window = series.window()
    seen: list[float] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.extend(window.pop().values)

    writers = [
        threading.Thread(target=lambda k=k: [series.add(k * 2000 + i) for i in range(2000)]) for k in range(4)
    ]
    reader = threading.Thread(target=read)
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    seen.extend(window.pop().values)
    assert sorted(seen) == list(range(8000))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sample_that_is_no_number_is_refused(value: float) -> None:
    series = Series("ttfc")
    with pytest.raises(ConfigError, match="ttfc"):
        series.add(value)
    assert series.count == 0


def test_unknown_statistic() -> None:
    with pytest.raises(ConfigError, match="p90"):
        Summary(0).text("p90")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.00087, "870 us"), (0.0012, "1.2 ms"), (0.9999, "1 s"), (1.2345, "1.23 s"),
     (100.4, "100 s"), (119, "119 s"), (450, "7.5 min")],
)  # fmt: skip
def test_quantity(seconds: float, text: str) -> None:
    assert quantity(seconds) == text


def test_quantity_of_another_unit() -> None:
    assert quantity(0.25, "") == "0.25"
