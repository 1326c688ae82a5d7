"""What a user holds: Sandbox and AsyncSandbox, their processes, sessions and snapshots."""

from __future__ import annotations

from ._portal import AwaitableCM
from ._sandbox.core import AsyncSandbox
from ._sandbox.host import AsyncSandboxes, AsyncSnapshot, Budget, Host, SandboxLimits
from ._sandbox.process import AsyncProcess
from ._sandbox.session import AsyncSession
from ._sandbox.sync import Process, Sandbox, Sandboxes, Session, Snapshot
from .errors import GradeError

__all__ = [
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxes",
    "AsyncSession",
    "AsyncSnapshot",
    "AwaitableCM",
    "Budget",
    "GradeError",
    "Host",
    "Process",
    "Sandbox",
    "SandboxLimits",
    "Sandboxes",
    "Session",
    "Snapshot",
]
