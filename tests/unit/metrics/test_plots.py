from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsandbox.errors import ConfigError, UnsupportedError
from rlsandbox.metrics import Series
from rlsandbox.metrics.plots import plot_batch, save_run
from rlsandbox.results import Record


def record(i: int, *, status: str = "completed", ttfc: float | None = 0.2, length: float = 2.0) -> Record:
    return Record(
        task_id=f"t{i}", index=i, attempts=1, status=status, ttfc_s=ttfc,  # type: ignore[arg-type]
        started_at=1000.0 + i * 0.01, ended_at=1000.0 + i * 0.01 + length,
    )  # fmt: skip


def test_a_series_draws_every_sample_and_its_percentiles() -> None:
    series = Series("ttfc")
    for i in range(1, 101):
        series.add(i / 100)
    ax = series.plot()
    steps = ax.lines[0]
    assert list(steps.get_xdata()) == [0.01, *(i / 100 for i in range(1, 101))]
    assert list(steps.get_ydata())[-1] == 1.0
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "p50 500 ms", "p95 950 ms", "p99 990 ms",
    ]  # fmt: skip
    assert series.plot(ax) is ax


def test_an_empty_series_says_so() -> None:
    assert Series("ttfc").plot().get_title() == "TTFC: no samples"
    assert plot_batch([]).get_title() == "no rollouts"


def test_a_batch_draws_each_rollout_waiting_then_working() -> None:
    records = [record(0), record(1, status="failed", ttfc=None), record(2, ttfc=99.0)]
    ax = plot_batch(records)
    lines = {c.get_label(): [seg.tolist() for seg in c.get_segments()] for c in ax.collections}
    assert lines["waiting for the first command"][0] == [[0.0, 0], [pytest.approx(0.2), 0]]
    assert lines["failed (1)"] == [[[pytest.approx(0.01), 1], [pytest.approx(2.01), 1]]]
    assert lines["waiting for the first command"][1][1][0] == pytest.approx(2.02)  # never past its end


@pytest.mark.parametrize("n", [0, 1, 5000])
def test_a_run_is_saved(tmp_path: Path, n: int) -> None:
    path = tmp_path / "run.png"
    save_run([record(i, ttfc=None if i % 7 == 3 else 0.1) for i in range(n)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        save_run([], tmp_path / "nowhere" / "run.png")
    for name in ("run.nonsense", "run", "run.pgf"):
        with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
            save_run([], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"rlsandbox-pool\[plots\]"):
        Series("ttfc").plot()
