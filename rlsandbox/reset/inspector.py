"""What hooks hold: :class:`OutsideInspector` for verification, :class:`OutsideResetter` for reset policies.

Both answer from one gathered snapshot of the keeper's facts; only the content of files and the list of
changes cost another round trip, and that list is asked for only when some writable tree is not empty. Nothing
here runs a program of the image or takes the episode's word for anything.

Hooks are synchronous and the keeper's client is not: a call that needs the client goes through a
:class:`Bridge` to the event loop that is waiting for the hook. With ``bridge=None`` such a call raises
:class:`NeedsThread` instead, so that cheap checks may run on the loop itself.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import SandboxError, UnsupportedError
from ..hooks import Credentials, ProcessInfo, SocketInfo
from ..keeper.client import Changes, KeeperFailure, Look
from ..results import CommandResult, FileInfo
from .facts import Facts

if TYPE_CHECKING:
    from ..task import Task
    from .baseline import Baseline

_T = TypeVar("_T")

MAX_CHANGES = 20_000
"""Changed paths asked for at once: what a hook gets to see of a rollout that wrote a million files."""


class Keeper(Protocol):
    """The part of :class:`~rlsandbox.keeper.client.KeeperClient` that this room uses."""

    async def reset(self, layer: str = "") -> object: ...
    async def reset_and_look(self, layer: str = "") -> Look: ...
    async def inspect(self) -> list[tuple[str, str]]: ...
    async def changes(self, path: str = "/", *, limit: int | None = None) -> Changes: ...
    async def outside_read(
        self, path: str, *, baseline: bool = False, limit: int | None = None
    ) -> bytes | None: ...
    async def outside_remove(self, path: str) -> None: ...
    async def kill_all(self) -> None: ...


class Bridge(Protocol):
    """Carries a call from a hook's thread to the loop and its result back."""

    def __call__(self, make: Callable[[], Awaitable[_T]]) -> _T: ...


class NeedsThread(Exception):
    """A hook that runs on the event loop asked for something that must be waited for."""


async def inspect(keeper: Keeper) -> Facts:
    return Facts.of_lines(await keeper.inspect())


class OutsideInspector:
    """The view of one sandbox from outside; see :class:`rlsandbox.hooks.Inspector`."""

    def __init__(
        self,
        keeper: Keeper,
        facts: Facts,
        baseline: Baseline,
        *,
        task: Task | None = None,
        credentials: Sequence[Credentials] = (),
        bridge: Bridge | None = None,
    ) -> None:
        self._keeper = keeper
        self._facts = facts
        self._baseline = baseline
        self._bridge = bridge
        self._changes: list[FileInfo] | None = [] if facts.files_clean else None
        self.more_changes = 0
        """How many changed paths there are beyond those that :meth:`changed` tells."""
        self.task = task
        self.mode = baseline.mode
        self.credentials = tuple(credentials)

    def changed(self, under: str = "/") -> list[FileInfo]:
        entries = self._all_changes()
        prefix = under.rstrip("/")
        if not prefix:
            return list(entries)
        return [e for e in entries if e.name == prefix or e.name.startswith(prefix + "/")]

    def processes(self) -> list[ProcessInfo]:
        return [
            ProcessInfo(
                pid=int(row[0]),
                ppid=int(row[1]),
                uid=int(row[2]),
                state=row[3],
                command=row[4],
                argv=tuple(row[5].removesuffix("\0").split("\0")) if row[5] else (),
            )
            for row in self._facts.rows("process", 6)
        ]

    def sockets(self) -> list[SocketInfo]:
        return [SocketInfo(*row[:4]) for row in self._facts.rows("socket", 4)]

    def facts(self, kind: str) -> tuple[str, ...]:
        return self._facts.of(kind)

    def baseline_facts(self, kind: str) -> tuple[str, ...]:
        layer = self._baseline.layer
        if kind == "layer" and layer is not None:
            return (layer,) if layer else ()
        return self._baseline.facts.of(kind)

    def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        return self._call(lambda: self._keeper.outside_read(path, limit=limit))

    def baseline(self, path: str, limit: int = 1 << 20) -> bytes | None:
        return self._call(lambda: self._keeper.outside_read(path, baseline=True, limit=limit))

    def _all_changes(self) -> list[FileInfo]:
        if self._changes is None:
            found = self._call(lambda: self._keeper.changes("/", limit=MAX_CHANGES))
            self._changes = list(found)
            self.more_changes = max(found.total - len(found), int(found.truncated))
        return self._changes

    def _call(self, make: Callable[[], Awaitable[_T]]) -> _T:
        if self._bridge is None:
            raise NeedsThread
        return self._bridge(make)


class OutsideResetter(OutsideInspector):
    """An inspector that may also undo; see :class:`rlsandbox.hooks.Resetter`.

    Args:
        trusted: runs a program in the baseline view, where this reset mode has one.
    """

    def __init__(
        self,
        keeper: Keeper,
        facts: Facts,
        baseline: Baseline,
        *,
        task: Task | None = None,
        credentials: Sequence[Credentials] = (),
        bridge: Bridge | None = None,
        trusted: Callable[[list[str]], Awaitable[CommandResult]] | None = None,
    ) -> None:
        super().__init__(keeper, facts, baseline, task=task, credentials=credentials, bridge=bridge)
        self._trusted = trusted

    def remove(self, path: str) -> None:
        if not path.startswith("/") or ".." in path.split("/"):
            raise SandboxError(
                f"remove: {path!r} must be absolute and without '..'", kind="reset_policy", phase="reset"
            )
        gone = path.rstrip("/")
        if not gone:
            raise SandboxError("remove: '/' cannot be put back in one go", kind="reset_policy", phase="reset")
        if self._facts.files_clean:
            return
        try:
            self._call(lambda: self._keeper.outside_remove(gone))
        except KeeperFailure as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
        if self._changes is not None:
            self._changes = [e for e in self._changes if e.name != gone and not e.name.startswith(gone + "/")]
            if not self._changes and self.more_changes:
                self._changes, self.more_changes = None, 0

    def kill_all(self) -> None:
        self._call(self._keeper.kill_all)
        self._look_again()

    def run_trusted(self, argv: list[str]) -> CommandResult:
        if self._trusted is None:
            raise UnsupportedError(
                f"run_trusted: reset mode {self.mode!r} has no baseline view to run {argv[0]!r} in",
                phase="reset",
            )
        trusted = self._trusted
        result = self._call(lambda: trusted(argv))
        self._look_again()
        return result

    def _look_again(self) -> None:
        self._facts = self._call(lambda: inspect(self._keeper))
        self._changes = [] if self._facts.files_clean else None
