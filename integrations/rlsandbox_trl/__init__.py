"""Sandboxes for TRL's GRPOTrainer: two lines in a training script.

Importing this imports neither trl nor torch; they are needed from the first use on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback import SandboxCallback
    from .environment import SandboxEnvironment
    from .lookahead import look_ahead
    from .missing import leave_out_missing
    from .parallel import parallel_tools
    from .rewards import sandbox_reward
    from .training import SandboxTraining

_LAZY = {
    "SandboxCallback": "callback",
    "SandboxEnvironment": "environment",
    "SandboxTraining": "training",
    "leave_out_missing": "missing",
    "look_ahead": "lookahead",
    "parallel_tools": "parallel",
    "sandbox_reward": "rewards",
}

__all__ = [
    "SandboxCallback",
    "SandboxEnvironment",
    "SandboxTraining",
    "leave_out_missing",
    "look_ahead",
    "parallel_tools",
    "sandbox_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
