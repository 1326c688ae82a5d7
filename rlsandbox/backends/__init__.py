"""Where sandboxes live: the seam (:class:`Backend`) and the places we know.

Names are loaded when they are used: importing this imports no backend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Backend, Capabilities, Member

if TYPE_CHECKING:
    from ..keeper.build import keeper_binary
    from .local import Local
    from .several import Clusters, Part

_LAZY = {
    "Clusters": ".several",
    "Local": ".local",
    "Part": ".several",
    "Simulated": ".simulated",
    "keeper_binary": "..keeper.build",
}

__all__ = ["Backend", "Capabilities", "Clusters", "Local", "Member", "Part", "keeper_binary"]


def __getattr__(name: str) -> Any:
    if name == "Kubernetes":  # the same answer as by name, where it or what it needs is not installed
        from .registry import backend_class

        return backend_class("kubernetes")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)
