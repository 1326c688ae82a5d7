"""A sandbox that outlives its keeper: what was done in it is done again in a fresh one, and compared.

A rollout is a conversation. When its sandbox dies, the files are gone but the model has seen what came of
them; a fresh sandbox alone would continue the conversation in a world that it does not describe. So each
operation is kept with a digest of its answer. In the fresh sandbox all are done again, in order; only when
each one answers as before (exit status, output, content) does the rollout go on. Otherwise, and whenever
something was done that cannot be done again alike, the rollout is missing.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import rlsandbox as rls
from rlsandbox.errors import SandboxError

RECORDED = ("run", "write_file", "read_file", "read_text", "list_dir", "changes")
UNREPEATABLE = (
    "popen", "session", "snapshot", "upload", "download", "pause", "resume", "hibernate", "restore",
)  # fmt: skip
"""They depend on more than the sandbox, or leave a handle on it behind."""


@dataclass(frozen=True)
class Step:
    """One operation and what came of it."""

    name: str
    args: tuple[Any, ...]
    how: dict[str, Any]
    answer: bytes


class Journal:
    """What was done in a rollout's sandbox. Safe from any thread."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.why = ""
        """Why this cannot be done again; empty when it can."""
        self._lock = threading.Lock()
        self._running = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one operation: the order of those that overlap is not known."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                self.why = "operations ran beside each other"
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def add(self, name: str, args: tuple[Any, ...], how: dict[str, Any], answer: bytes) -> None:
        how = {key: value for key, value in how.items() if key != "on_output"}
        with self._lock:
            self.steps.append(Step(name, args, how, answer))

    def replay(self, sandbox: rls.Sandbox, check: Callable[[], None]) -> None:
        """Do all of it again in *sandbox*; *check* is called before each step.

        Raises:
            SandboxError: the sandbox broke, or (``replay_differs``) answers otherwise.
        """
        for n, step in enumerate(list(self.steps), 1):
            check()
            try:
                answer = digest(getattr(rls.Sandbox, step.name)(sandbox, *step.args, **step.how))
            except SandboxError as error:
                if error.infrastructure:
                    raise
                answer = digest(error)
            if answer != step.answer:
                raise SandboxError(
                    f"a fresh sandbox answered otherwise to step {n} of {len(self.steps)} ({step.name})",
                    kind="replay_differs",
                    phase="command",
                    retryable=False,
                    hint="outputs with times, process ids or random numbers cannot be confirmed",
                    sandbox=sandbox.id,
                )


def digest(answer: Any) -> bytes:
    """What a caller could have seen of an answer, apart from times."""
    seen: Any
    if isinstance(answer, rls.CommandResult):
        seen = (answer.exit_code, answer.stdout_bytes, answer.stderr_bytes, answer.timed_out, answer.signal)
        seen += (answer.stdout_size, answer.stderr_size, answer.oom_killed)
    elif isinstance(answer, SandboxError):
        seen = (type(answer).__name__, answer.kind)
    elif isinstance(answer, list):  # of FileInfo: a file made anew has another time
        seen = [(info.name, info.kind, info.size, info.mode) for info in answer]
    else:
        seen = answer
    return hashlib.sha256(repr(seen).encode("utf-8", "surrogatepass")).digest()


class ReplayedSandbox(rls.Sandbox):
    """The sandbox of a rollout's present attempt.

    Args:
        sandbox: of the first attempt.
        journal: where its operations are kept.
        again: called with what broke an operation; a sandbox in which all earlier ones have been done
            again, or None when the rollout is lost.
    """

    def __init__(
        self, sandbox: rls.Sandbox, journal: Journal, again: Callable[[SandboxError], rls.Sandbox | None]
    ) -> None:
        vars(self).update(vars(sandbox))
        self._journal, self._again = journal, again

    def _perform(self, plain: Any, name: str, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        while True:
            try:
                with self._journal.one():
                    answer = plain(self, *args, **how)
            except SandboxError as error:
                if not error.infrastructure:
                    self._journal.add(name, args, how, digest(error))
                    raise
                fresh = self._again(error)
                if fresh is None:
                    raise
                vars(self).update(vars(fresh))
            else:
                self._journal.add(name, args, how, digest(answer))
                return answer


def _recorded(name: str) -> Any:
    plain = getattr(rls.Sandbox, name)

    @functools.wraps(plain)
    def method(self: ReplayedSandbox, *args: Any, **how: Any) -> Any:
        return self._perform(plain, name, args, how)

    return method


def _unrepeatable(name: str) -> Any:
    plain = getattr(rls.Sandbox, name)

    @functools.wraps(plain)
    def method(self: ReplayedSandbox, *args: Any, **how: Any) -> Any:
        self._journal.why = f"{name}() was used, which cannot be done again"
        return plain(self, *args, **how)

    return method


for _name in RECORDED:
    setattr(ReplayedSandbox, _name, _recorded(_name))
for _name in UNREPEATABLE:
    setattr(ReplayedSandbox, _name, _unrepeatable(_name))
