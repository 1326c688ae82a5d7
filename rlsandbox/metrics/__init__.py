"""Numbers, defined once: TTFC, resets, batch completion, accelerator idle ratio, and their exporters.

A leaf: imports nothing of rlsandbox but its errors, so that every room may record what it measures.
"""

from .core import Metrics, MetricsWindow, Snapshot
from .series import Samples, Series, SeriesWindow, Summary
from .ttfc import TtfcClock, TtfcSample

__all__ = [
    "Metrics",
    "MetricsWindow",
    "Samples",
    "Series",
    "SeriesWindow",
    "Snapshot",
    "Summary",
    "TtfcClock",
    "TtfcSample",
]
