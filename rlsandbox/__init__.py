"""Warm, verified sandboxes for reinforcement learning of LLM agents.

Importing this starts no thread, reads and writes nothing and loads no plugin. What is large is imported when
it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from .env import register_with_gymnasium
from .hooks import Credentials, Inspector, Resetter, Residue, Rollout, hookimpl
from .results import CommandResult, Failure, FileInfo, Outcome, Record
from .spec import Limits, Spec
from .task import Grader, Task

if TYPE_CHECKING:
    from . import backends, errors, hooks, metrics, testing
    from .env import SandboxEnv, SandboxVectorEnv
    from .ledger.report import Report
    from .metrics import Metrics, Series, Summary
    from .pool import AsyncClaim, AsyncEpisode, AsyncPool, Claim, Episode, Pool, PoolRef, PoolStats
    from .pool.policy import AsyncRollout
    from .sandbox import (
        AsyncProcess,
        AsyncSandbox,
        AsyncSandboxes,
        AsyncSession,
        AsyncSnapshot,
        Process,
        Sandbox,
        Sandboxes,
        Session,
        Snapshot,
    )
    from .tasks import load_tasks

_LAZY = {
    "AsyncClaim": "pool",
    "AsyncEpisode": "pool",
    "AsyncPool": "pool",
    "AsyncProcess": "sandbox",
    "AsyncRollout": "pool.policy",
    "AsyncSandbox": "sandbox",
    "AsyncSandboxes": "sandbox",
    "AsyncSession": "sandbox",
    "AsyncSnapshot": "sandbox",
    "Claim": "pool",
    "Episode": "pool",
    "Metrics": "metrics",
    "Pool": "pool",
    "PoolRef": "pool",
    "PoolStats": "pool",
    "Process": "sandbox",
    "Report": "ledger.report",
    "Sandbox": "sandbox",
    "SandboxEnv": "env",
    "SandboxVectorEnv": "env",
    "Sandboxes": "sandbox",
    "Series": "metrics",
    "Session": "sandbox",
    "Snapshot": "sandbox",
    "Summary": "metrics",
    "load_tasks": "tasks",
}
"""Public name to the module it lives in."""
_MODULES = ("backends", "errors", "hooks", "metrics", "testing")

__all__ = [
    "AsyncClaim",
    "AsyncEpisode",
    "AsyncPool",
    "AsyncProcess",
    "AsyncRollout",
    "AsyncSandbox",
    "AsyncSandboxes",
    "AsyncSession",
    "AsyncSnapshot",
    "Claim",
    "CommandResult",
    "Credentials",
    "Episode",
    "Failure",
    "FileInfo",
    "Grader",
    "Inspector",
    "Limits",
    "Metrics",
    "Outcome",
    "Pool",
    "PoolRef",
    "PoolStats",
    "Process",
    "Record",
    "Report",
    "Resetter",
    "Residue",
    "Rollout",
    "Sandbox",
    "SandboxEnv",
    "SandboxVectorEnv",
    "Sandboxes",
    "Series",
    "Session",
    "Snapshot",
    "Spec",
    "Summary",
    "Task",
    "backends",
    "errors",
    "hookimpl",
    "hooks",
    "load_tasks",
    "metrics",
    "testing",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
register_with_gymnasium()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
