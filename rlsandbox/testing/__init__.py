"""For tests of what is built on rlsandbox: a virtual clock, a backend that lies, the conformance suite.

Nothing here is imported before it is used: the suite needs pytest, the rest does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock import ClockStalledError, VirtualClock
    from .conformance import BackendConformance
    from .lying import LyingBackend

_LAZY = {
    "BackendConformance": "conformance",
    "ClockStalledError": "clock",
    "LyingBackend": "lying",
    "VirtualClock": "clock",
}

__all__ = ["BackendConformance", "ClockStalledError", "LyingBackend", "VirtualClock"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
