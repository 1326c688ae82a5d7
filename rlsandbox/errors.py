"""One tree of errors.

Every error says what happened, to which sandbox and task, in which phase, whose fault it is
(``infrastructure``: ours or the machine's, never the rollout's), whether a retry can help, and what
to do next (``hint``). All of them survive pickling with every field.
"""

from __future__ import annotations

import copyreg
import errno
from typing import Any, ClassVar


class SandboxError(Exception):
    """Base of everything that rlsandbox raises.

    Args:
        message: one line: what happened. Another error instead (``type(error)(error)``, as Gymnasium's
            AsyncVectorEnv raises what happened in a worker): all that it says is taken over.
        kind: short machine-readable name of the failure (``"oom"``, ``"image_not_found"`` ...).
        phase: ``config``, ``provision``, ``prime``, ``claim``, ``reset``, ``verify``, ``command``,
            ``grade``, ``release`` or ``policy``.
        retryable: whether the same request may succeed in a fresh sandbox.
        infrastructure: whether the rollout is innocent; such failures are never scored.
        hint: what the reader can do about it; empty when there is nothing to do.
        sandbox: id of the sandbox it happened to.
        task: id of the task it happened to.
    """

    default_kind: ClassVar[str] = "sandbox_error"
    default_phase: ClassVar[str] = "claim"
    default_retryable: ClassVar[bool] = False
    default_infrastructure: ClassVar[bool] = True

    kind: str
    phase: str
    retryable: bool
    infrastructure: bool
    hint: str
    sandbox: str | None
    task: str | None

    def __init__(
        self,
        message: str | SandboxError = "",
        *args: Any,
        kind: str | None = None,
        phase: str | None = None,
        retryable: bool | None = None,
        infrastructure: bool | None = None,
        hint: str = "",
        sandbox: str | None = None,
        task: str | None = None,
    ) -> None:
        told = message if isinstance(message, SandboxError) else None
        if told is not None:
            super().__init__(*(told.args or ("",)))
            self.__dict__.update(told.__dict__)
            return
        super().__init__(message, *args)
        self.message = str(message)
        self.kind = kind if kind is not None else self.default_kind
        self.phase = phase if phase is not None else self.default_phase
        self.retryable = retryable if retryable is not None else self.default_retryable
        self.infrastructure = infrastructure if infrastructure is not None else self.default_infrastructure
        self.hint = hint
        self.sandbox = sandbox
        self.task = task

    def __str__(self) -> str:
        where = " ".join(
            f"{name} {value}" for name, value in (("sandbox", self.sandbox), ("task", self.task)) if value
        )
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ calls the class with args only and would lose keyword fields.
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]


class ConfigError(SandboxError, ValueError):
    """A value given by the caller (argument, variable, file) is wrong. Nothing was started."""

    default_kind = "config"
    default_phase = "config"
    default_infrastructure = False


class UnsupportedError(SandboxError):
    """This backend, machine or reset mode cannot do what was asked."""

    default_kind = "unsupported"


class PoolClosedError(SandboxError, RuntimeError):
    """The pool is closed, or belongs to another process (a forked child)."""

    default_kind = "pool_closed"


class ClaimTimeoutError(SandboxError, TimeoutError):
    """No ready, verified sandbox by the claim's deadline."""

    default_kind = "claim_timeout"
    default_retryable = True


class ProvisionError(SandboxError):
    """A sandbox could not be made."""

    default_kind = "provision"
    default_phase = "provision"
    default_retryable = True


class ThrottledError(ProvisionError):
    """Asked too much of the control plane (HTTP 429); nothing was made. ``retry_after``: seconds, if told."""

    default_kind = "throttled"
    retry_after: float | None = None


class ImageError(ProvisionError):
    """The image is missing, broken or hostile."""

    default_kind = "image"
    default_retryable = False


class PrimeError(SandboxError):
    """A task's setup or files could not be put in place; the task's fault unless it says otherwise."""

    default_kind = "prime"
    default_phase = "prime"
    default_infrastructure = False


class SandboxDiedError(SandboxError, ConnectionError):
    """The sandbox is gone: its keeper was killed, its node was lost, the stream was cut."""

    default_kind = "sandbox_died"
    default_phase = "command"
    default_retryable = True


class CommandError(SandboxError):
    """A command failed and the caller asked for an exception (``check=True``)."""

    default_kind = "command"
    default_phase = "command"
    default_infrastructure = False


class CommandTimeoutError(CommandError, TimeoutError):
    """A command reached its timeout and the caller asked for an exception."""

    default_kind = "command_timeout"


class CommandStartError(CommandError):
    """A program given as argv could not be started (not found, not executable, bad cwd)."""

    default_kind = "command_start"


class SessionDiedError(SandboxError):
    """The session's shell has ended; its state is gone."""

    default_kind = "session_died"
    default_phase = "command"
    default_infrastructure = False


class SandboxStateError(SandboxError):
    """The sandbox is not in a state that allows this (released, graded, paused ...)."""

    default_kind = "sandbox_state"
    default_infrastructure = False


class ProcessesRunningError(SandboxStateError):
    """A snapshot was asked for while processes run and ``kill`` was false; nothing changed."""

    default_kind = "processes_running"


class LimitReachedError(SandboxError):
    """The attempt has used up one of its :class:`~rlsandbox.Limits`: truncated, and graded as it is.

    ``limit`` says which one: ``"steps"`` or ``"wall"``.
    """

    default_kind = "limit"
    default_phase = "command"
    default_infrastructure = False
    limit: str = "steps"

    def __init__(
        self, message: str | SandboxError = "", *args: Any, limit: str = "steps", **fields: Any
    ) -> None:
        super().__init__(message, *args, **fields)
        self.__dict__.setdefault("limit", limit)


class GradeError(SandboxError):
    """The grader gave no usable answer: the task's fault, not the work's. There is no reward."""

    default_kind = "grader"
    default_phase = "grade"
    default_infrastructure = False


class LedgerError(SandboxError):
    """The ledger cannot be written or read. Raised before work starts; during work it is a warning."""

    default_kind = "ledger"
    default_phase = "config"


class SandboxFileError(SandboxError, OSError):
    """A file operation inside a sandbox failed. ``errno`` and ``filename`` are set.

    Raised as a subclass that is also the matching builtin (``FileNotFoundError`` ...): see
    :func:`file_error`.
    """

    default_kind = "file"
    default_phase = "command"
    default_infrastructure = False
    path: str

    def __init__(self, message: str | SandboxError = "", *args: Any, **fields: Any) -> None:
        super().__init__(message, *args, **fields)
        if isinstance(message, SandboxFileError):
            self.errno, self.strerror, self.filename = message.errno, message.strerror, message.filename

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remake_file_error, (self.errno, self.path, self.__dict__))


def _remake_file_error(code: int, path: str, state: dict[str, Any]) -> SandboxFileError:
    error = file_error(code, path)
    error.__dict__.update(state)
    return error


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of errors that say that a disk is full."""


def shared_disk_full(error: SandboxError) -> SandboxError:
    """*error* (no room) where sandboxes share one disk: whoever filled that, it was not this one."""
    error.kind, error.infrastructure, error.retryable = "disk_full", True, True
    error.hint = "the disk that the sandboxes' upper layers share is full"
    return error


_FILE_CLASSES: dict[type[OSError], type[SandboxFileError]] = {}


def file_error(code: int, path: str, *, message: str = "", sandbox: str | None = None) -> SandboxFileError:
    """The error for ``errno`` value *code* at *path*: also an instance of the builtin class for it."""
    import os

    text = message or f"{path}: {os.strerror(code)}"
    builtin = type(OSError(code, text))
    cls = _FILE_CLASSES.get(builtin)
    if cls is None:
        if builtin is OSError:
            cls = SandboxFileError
        else:
            cls = type(f"Sandbox{builtin.__name__}", (SandboxFileError, builtin), {})
        _FILE_CLASSES[builtin] = cls
    error = cls(text, sandbox=sandbox)
    error.errno = code
    error.strerror = os.strerror(code)
    error.filename = path
    error.path = path
    return error
