"""Numbers as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core import Metrics, Snapshot
from .exporter import metrics_of
from .series import STATISTICS

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = {
    "ttfc": "TTFC",
    "ttfc_queued": "  queued",
    "ttfc_provisioned": "  provisioned",
    "ttfc_reset": "  reset",
    "ttfc_connected": "  connected",
    "ttfc_started": "  started",
    "ttfc_idle": "  (idle)",
    "batch": "batch completion",
}


def metrics_table(source: Any, *, title: str | None = None) -> Table:
    """A rich table of times: a row for each series that has samples, TTFC by part.

    Args:
        source: a Pool, an AsyncPool, Metrics, or the Snapshot of a window.
        title: above the table.
    """
    from rich.table import Table

    snapshot = _snapshot(source)
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right", no_wrap=True)
    order = [*_TITLES, *(name for name in snapshot.samples if name not in _TITLES)]
    for name in order:
        samples = snapshot.samples.get(name)
        if samples is None or not len(samples):
            continue
        summary = samples.summary()
        cells = [summary.text(statistic) for statistic in STATISTICS]
        table.add_row(_TITLES.get(name, name), f"{summary.n:,}", *cells)
        if name == "ttfc" and summary.censored:
            table.add_row("  never started", f"{summary.censored:,}", style="red")
    return table


def counters_table(source: Any, *, title: str | None = None) -> Table:
    """A rich table of events and failures by kind."""
    from rich.markup import escape
    from rich.table import Table

    snapshot = _snapshot(source)
    table = Table(title=title, title_justify="left")
    table.add_column("event", no_wrap=True)
    table.add_column("n", justify="right")
    for name, n in sorted(snapshot.counters.items(), key=lambda item: ("/" in item[0], item[0])):
        if not n:
            continue
        style = "red" if name.startswith("failures/") else None
        table.add_row(escape(name), f"{n:,}", style=style)
    if snapshot.idle is not None and snapshot.idle.ratio is not None:
        table.add_row("accelerator idle ratio", f"{snapshot.idle.ratio:.1%}")
    return table


def _snapshot(source: Any) -> Snapshot:
    if isinstance(source, Snapshot):
        return source
    metrics = metrics_of(source)
    return (metrics or Metrics()).snapshot()
