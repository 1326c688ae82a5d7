"""Plots of samples, by matplotlib, which is imported only when one is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ..errors import ConfigError, UnsupportedError
from .series import Series


def axes(ax: Any = None) -> Any:
    """*ax*, or the axes of a new figure: one of pyplot's where somebody uses that (so that ``show()`` and
    notebooks show it), else one that belongs to no window system."""
    if ax is not None:
        return ax
    figure = figure_class()
    if "matplotlib.pyplot" in sys.modules:
        from matplotlib import pyplot

        return pyplot.figure(figsize=(7, 4), layout="constrained").add_subplot()
    return figure(figsize=(7, 4), layout="constrained").add_subplot()


def figure_class() -> Any:
    """matplotlib's Figure, made displayable where a notebook is."""
    try:
        from matplotlib.figure import Figure

        if "ipykernel" in sys.modules:  # a notebook shows figures once pyplot is there
            from matplotlib import pyplot as pyplot
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib", kind="missing_extra", hint="pip install 'rlsandbox-pool[plots]'"
        ) from error
    return Figure


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise unless a plot can have the format that *path* ends in, told before there is anything to plot."""
    known = set(figure_class()().canvas.get_supported_filetypes()) - {"pgf", "raw", "rgba"}
    ending = os.path.splitext(os.fspath(path))[1]
    if ending[1:].lower() not in known:
        raise ConfigError(
            f"cannot write the plot to {os.fspath(path)}: its name must end in"
            f" .png, .svg, .pdf or another format of matplotlib's{f', not in {ending}' if ending else ''}"
        )


def _legend(ax: Any) -> None:
    """Below the axes, where it covers nothing; its lines thick enough to see their colour."""
    legend = ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize="small"
    )
    for line in legend.get_lines():
        line.set(linewidth=3, linestyle="-")


def plot_series(series: Series, ax: Any = None) -> Any:
    """The share of samples at or below each value, with the percentiles marked."""
    ax = axes(ax)
    samples = series.samples()
    name = series.name.replace("ttfc", "TTFC")
    ax.set_title(f"{name}: {len(samples)} samples" if len(samples) else f"{name}: no samples")
    ax.set_xlabel(f"{name} [{series.unit}]")
    ax.set_ylabel("share of samples")
    if not len(samples):
        return ax
    values = sorted(samples.values)
    n = len(values)
    ax.step([values[0], *values], [0.0, *((i + 1) / n for i in range(n))], where="post", linewidth=1.5)
    summary = samples.summary()
    for name, color in (("p50", "tab:green"), ("p95", "tab:orange"), ("p99", "tab:red")):
        ax.axvline(getattr(summary, name), color=color, linestyle="--", linewidth=1,
                   label=f"{name} {summary.text(name)}")  # fmt: skip
    long_tail = values[-1] > 50 * values[n // 2]  # would press all else to the left edge
    if values[0] > 0 and long_tail:
        ax.set_xscale("log")
    else:
        ax.set_xlim(left=0)
    ax.set_ylim(0, 1.02)
    ax.grid(alpha=0.3)
    _legend(ax)
    return ax


class RolloutRow(Protocol):
    """What a timeline needs of a rollout's record."""

    @property
    def started_at(self) -> float: ...
    @property
    def ended_at(self) -> float: ...
    @property
    def ttfc_s(self) -> float | None: ...
    @property
    def status(self) -> str: ...


COLORS: Final = {
    "waiting": "#f2b134",
    "completed": "#2f7fbf",
    "failed": "#c8372d",
    "lost": "#7b3294",
    "cancelled": "#9a9a9a",
}


def plot_batch(records: Sequence[RolloutRow], ax: Any = None, *, origin: float | None = None) -> Any:
    """The timeline of a batch: a line a rollout in the order of requests, waiting, then working."""
    ax = axes(ax)
    rows = sorted(records, key=lambda r: (r.started_at, r.ended_at))
    ax.set_title(f"{len(rows)} rollouts" if rows else "no rollouts")
    ax.set_xlabel("seconds since the first request")
    ax.set_ylabel("rollout")
    if not rows:
        return ax
    start = origin if origin is not None else rows[0].started_at
    spans: dict[str, list[tuple[int, float, float]]] = {}
    for y, row in enumerate(rows):
        begin, end = row.started_at - start, max(row.ended_at, row.started_at) - start
        waited = end - begin if row.ttfc_s is None else min(row.ttfc_s, end - begin)
        if waited > 0 and row.ttfc_s is not None:
            spans.setdefault("waiting", []).append((y, begin, begin + waited))
        else:
            waited = 0.0
        spans.setdefault(row.status, []).append((y, begin + waited, end))
    # As thick as a row is high, so that neither 4 nor 18,000 rollouts leave gaps or cover each other.
    width = max(0.4, min(8.0, 200 / len(rows)))
    for name in (*COLORS, *(set(spans) - set(COLORS))):
        if name in spans:
            ys, begins, ends = zip(*spans[name], strict=True)
            label = f"{name} ({len(ys)})" if name != "waiting" else "waiting for the first command"
            ax.hlines(ys, begins, ends, color=COLORS.get(name, "black"), linewidth=width, label=label)
    ax.set_ylim(len(rows) - 0.5 + len(rows) * 0.02, -0.5 - len(rows) * 0.02)
    ax.set_xlim(left=0)
    _legend(ax)
    return ax


def save_run(records: Sequence[RolloutRow], path: str | os.PathLike[str] | None = None) -> Any:
    """TTFC distribution and timeline of a run on one figure, written to *path* when given.

    Rollouts that ended without a started command are the part of the distribution that is missing at 1.
    """
    if path is not None:
        check_format(path)
    figure = figure_class()(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = Series("TTFC")
    for record in records:
        if record.ttfc_s is not None:
            series.add(record.ttfc_s)
    plot_series(series, left)
    missing = len(records) - series.count
    if missing:
        left.set_title(f"{left.get_title()}, {missing} rollouts never started a command")
    plot_batch(records, right)
    if path is not None:
        try:
            figure.savefig(os.fspath(path), dpi=120)
        except OSError as error:
            raise ConfigError(f"cannot write the plot to {os.fspath(path)}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"cannot write the plot to {os.fspath(path)}: {error}") from error
    return figure
