"""What a refused claim raises: the type says whose fault it is, the text what it waited for."""

from __future__ import annotations

from ..errors import (
    ClaimTimeoutError,
    ConfigError,
    PoolClosedError,
    PrimeError,
    ProvisionError,
    SandboxError,
    SandboxStateError,
)
from ..task import Task
from .model import Refuse


def error_of(refusal: Refuse, task: Task) -> SandboxError:
    """A new error for every claim; what made it is its ``__cause__``."""
    cause = refusal.cause
    origin = cause.error if cause is not None else None
    error: SandboxError
    if refusal.kind == "closed":
        error = PoolClosedError(refusal.message, task=task.id)
    elif refusal.kind == "timeout":
        error = ClaimTimeoutError(refusal.message, task=task.id)
    elif refusal.kind == "empty":
        hint = "when_empty='wait' or 'create' waits or makes one; expect() tells the pool ahead"
        error = ClaimTimeoutError(refusal.message, kind="pool_empty", task=task.id, hint=hint)
    elif cause is None:
        error = SandboxStateError(refusal.message, kind="snapshot_deleted", phase="claim", task=task.id)
    else:
        kind = type(origin) if isinstance(origin, SandboxError) else None
        if kind is None or issubclass(kind, OSError):
            kind = PrimeError if refusal.kind == "prime" else ProvisionError
        error = kind(
            refusal.message,
            kind=cause.kind,
            phase="prime" if refusal.kind == "prime" else "provision",
            retryable=cause.retryable,
            infrastructure=cause.infrastructure,
            hint=getattr(origin, "hint", ""),
            task=task.id,
        )
    if origin is not None:
        error.__cause__ = origin
    return error


def deleted(id: str) -> ConfigError:
    """A snapshot that the pool does not have."""
    return ConfigError(f"snapshot {id} was deleted, or belongs to another pool")
