"""Plots of samples, by matplotlib, which is imported only when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from .series import Series


def axes(ax: Any = None) -> Any:
    """*ax*, or the axes of a new figure that belongs to no window system."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib", kind="missing_extra", hint="pip install 'rlsandbox-pool[plots]'"
        ) from error
    return Figure(figsize=(7, 4), layout="constrained").add_subplot()


def plot_series(series: Series, ax: Any = None) -> Any:
    """The share of samples at or below each value, with the percentiles marked."""
    ax = axes(ax)
    samples = series.samples()
    ax.set_title(f"{series.name}: {len(samples)} samples" if len(samples) else f"{series.name}: no samples")
    ax.set_xlabel(f"{series.name} [{series.unit}]")
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
    if values[0] > 0 and values[-1] / values[0] > 50:
        ax.set_xscale("log")
    ax.set_ylim(0, 1.02)
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")
    return ax
