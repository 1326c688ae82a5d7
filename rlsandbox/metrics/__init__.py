"""Numbers, defined once: TTFC, resets, batch completion, accelerator idle ratio, and their exporters.

A leaf: imports nothing of rlsandbox but its errors, so that every room may record what it measures.
"""

from .batch import BatchClock
from .core import Metrics, MetricsWindow, Snapshot
from .device import DeviceBusy
from .idle import IdleMeter, IdleWindow, idle_window
from .series import Samples, Series, SeriesWindow, Summary
from .ttfc import TtfcClock, TtfcSample

__all__ = [
    "BatchClock",
    "DeviceBusy",
    "IdleMeter",
    "IdleWindow",
    "Metrics",
    "MetricsWindow",
    "Samples",
    "Series",
    "SeriesWindow",
    "Snapshot",
    "Summary",
    "TtfcClock",
    "TtfcSample",
    "idle_window",
]
