"""Sandboxes for verl: an agent loop with one sandbox a trajectory, from one pool a job.

Importing this imports neither verl nor ray; they are needed from the first use on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import to_parquet
    from .loop import SandboxAgentLoop
    from .manager import SandboxAgentLoopManager
    from .reward import compute_score
    from .tools import SandboxTool

_LAZY = {
    "SandboxAgentLoop": "loop",
    "SandboxAgentLoopManager": "manager",
    "SandboxTool": "tools",
    "compute_score": "reward",
    "to_parquet": "dataset",
}

__all__ = ["SandboxAgentLoop", "SandboxAgentLoopManager", "SandboxTool", "compute_score", "to_parquet"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
