"""For tests of one's own: the suite that every backend runs, and time that passes when told to.

Names are loaded when they are used: the suite needs pytest, the rest does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock import VirtualClock
    from .conformance import BackendConformance

_WHERE = {"BackendConformance": "conformance", "VirtualClock": "clock"}

__all__ = ["BackendConformance", "VirtualClock"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
