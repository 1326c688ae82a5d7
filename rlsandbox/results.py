"""What comes back: the result of a command, a file's facts, a grade, a failure, a rollout's record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from .errors import CommandError, CommandTimeoutError
from .spec import _Data

Stream = Literal["stdout", "stderr"]
Status = Literal["completed", "failed", "lost", "cancelled"]
RolloutOutcome = Literal[
    "rewarded", "unrewarded", "failed_by_task", "failed_by_infrastructure", "never_ran", "lost", "cancelled"
]


_NAMED = 80


def brief(command: str) -> str:
    """A command as errors name it: its first 80 characters, on one line and in quotes."""
    line = " ".join(command.split())
    return repr(line if len(line) <= _NAMED else f"{line[: _NAMED - 3]}...")


@dataclass(frozen=True)
class CommandResult(_Data):
    """How a command ended and what it printed.

    ``stdout`` and ``stderr`` are text with undecodable bytes replaced; ``*_bytes`` are exact. When more
    was printed than the output limit, head and tail are kept with a marker line between them,
    ``truncated`` is set, and ``*_size`` tell the true number of bytes.
    """

    exit_code: int
    """As a shell tells it: 128 + signal when killed, 137 on timeout or out of memory; never None."""
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_size: int = 0
    stderr_size: int = 0
    truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False
    signal: int | None = None
    duration_s: float = field(default=0.0, compare=False)
    merged: str = field(default="", repr=False, compare=False)
    command: str = field(default="", repr=False, compare=False)
    """How the command begins, for errors."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """stdout and stderr together, in the order they arrived."""
        return self.merged

    def check(self) -> Self:
        """This result, or :class:`CommandError` / :class:`CommandTimeoutError` when it is not ``ok``."""
        if self.ok:
            return self
        named = f"command {brief(self.command)}" if self.command else "command"
        if self.timed_out:
            raise CommandTimeoutError(f"{named} timed out after {self.duration_s:.3g} s")
        tail = self.stderr.strip().splitlines()[-1:] or self.stdout.strip().splitlines()[-1:]
        why = " out of memory" if self.oom_killed else ""
        said = f": {tail[0][:300]}" if tail else ""
        raise CommandError(f"{named} exited with {self.exit_code}{why}{said}")


@dataclass(frozen=True)
class FileInfo(_Data):
    """A directory entry, or one path that changed. ``name`` is a full path in lists of changes."""

    name: str
    size: int
    mode: int
    kind: Literal["file", "dir", "symlink", "other", "deleted"]
    mtime_ns: int = 0
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Outcome(_Data):
    """A grade.

    Args:
        reward: None when it could not be measured: never a made-up 0.
        put_back: what the rollout had changed that is no work but what graders trust (programs, settings):
            it was put back before the grader ran.
    """

    reward: float | None
    passed: bool | None
    result: CommandResult | None = None
    put_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure(_Data):
    """Why a rollout did not complete.

    ``cause`` is one line for people. Where an exception was behind it, ``error`` is its type as
    ``module.Class``, ``message`` its text and ``traceback`` its printed traceback.
    """

    kind: str
    phase: str
    cause: str
    retryable: bool
    infrastructure: bool
    error: str = ""
    message: str = field(default="", repr=False)
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True)
class Record(_Data):
    """The one end of one rollout that was asked for.

    Args:
        attempts: attempts that were begun, those that never got a sandbox too.
        reward: None when there is no grader or nothing could be measured; never a made-up 0.
        truncated: the limit that ended the attempt (``"steps"``, ``"wall"``), else None.
        ran: whether a policy was ever started for it.
    """

    task_id: str
    index: int
    attempts: int
    status: Status
    reward: float | None = None
    passed: bool | None = None
    value: Any = None
    failure: Failure | None = None
    ttfc_s: float | None = None
    group: str | None = None
    run: str = ""
    id: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    node: str | None = None
    image: str | None = None
    truncated: str | None = None
    ran: bool = True

    @property
    def outcome(self) -> RolloutOutcome:
        """How it ended, in one word: what a trainer may and may not learn from."""
        if self.status == "lost":
            return "lost"  # killed: what ran last need not be on record
        if not self.ran:
            return "never_ran"
        if self.status == "completed":
            return "unrewarded" if self.reward is None else "rewarded"
        if self.status == "failed":
            innocent = self.failure is None or self.failure.infrastructure
            return "failed_by_infrastructure" if innocent else "failed_by_task"
        return self.status
