"""Numbers, defined once: TTFC, resets, batch completion, accelerator idle ratio, and their exporters.

A leaf: imports nothing of rlsandbox but its errors, so that every room may record what it measures.
"""

from .batch import BatchClock
from .core import Metrics, MetricsWindow, Snapshot
from .device import DeviceBusy
from .exporter import Exporter
from .idle import IdleMeter, IdleWindow, idle_window
from .jsonl import JsonLines
from .otel import export_otel
from .prometheus import serve_prometheus
from .series import Samples, Series, SeriesWindow, Summary
from .table import counters_table, metrics_table
from .ttfc import TtfcSample

__all__ = [
    "BatchClock",
    "DeviceBusy",
    "Exporter",
    "IdleMeter",
    "IdleWindow",
    "JsonLines",
    "Metrics",
    "MetricsWindow",
    "Samples",
    "Series",
    "SeriesWindow",
    "Snapshot",
    "Summary",
    "TtfcSample",
    "counters_table",
    "export_otel",
    "idle_window",
    "metrics_table",
    "serve_prometheus",
    "start_exporters",
]


def start_exporters(
    metrics: Metrics,
    *,
    prometheus_port: int | None = None,
    prometheus_host: str = "127.0.0.1",
    otlp_endpoint: str | None = None,
) -> list[Exporter]:
    """The exporters that a pool's ``[metrics]`` settings ask for; closing the pool closes them.

    When one cannot be started, none stays behind.
    """
    started: list[Exporter] = []
    try:
        if prometheus_port is not None:
            started.append(serve_prometheus(metrics, port=prometheus_port, host=prometheus_host))
        if otlp_endpoint is not None:
            started.append(export_otel(metrics, endpoint=otlp_endpoint))
    except BaseException:
        for exporter in started:
            exporter.close()
        raise
    return started
