"""What a sandbox asks of the pool that lent it, and the handles that go to and fro between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .._portal import AwaitableCM
from ..errors import LimitReachedError
from ..spec import Limits

if TYPE_CHECKING:
    from .core import AsyncSandbox


class Host(Protocol):
    """The pool's side. All methods are called on its event loop."""

    async def release(self, sandbox: AsyncSandbox, *, discard: bool) -> None:
        """The sandbox comes back: reset and verify it, or dispose of it when *discard*."""
        ...

    async def snapshot(self, sandbox: AsyncSandbox, *, kill: bool, name: str | None) -> AsyncSnapshot:
        """Seal what the sandbox changed. ProcessesRunningError when processes live and not *kill*."""
        ...

    async def fork(self, snapshot: AsyncSnapshot, n: int, timeout: float | None) -> list[AsyncSandbox]:
        """*n* sandboxes on a snapshot: all or none."""
        ...

    async def renew(self, sandbox: AsyncSandbox) -> None:
        """Give its place up, find another at the task's primed state, and attach() that."""
        ...

    async def hibernate(self, sandbox: AsyncSandbox) -> None:
        """Save the files, give the place up."""
        ...

    async def restore(self, sandbox: AsyncSandbox, timeout: float | None) -> None:
        """Find a place again and :meth:`AsyncSandbox.attach` its keeper."""
        ...

    def command_started(self, sandbox: AsyncSandbox, waited_s: float) -> None:
        """The sandbox's first command runs; *waited_s* after it was asked for."""
        ...

    async def delete_snapshot(self, snapshot: AsyncSnapshot) -> None: ...


@dataclass(frozen=True)
class SandboxLimits:
    """The limits that hold for a sandbox. ``means`` says by which means each is held (``cgroup``,
    ``watchdog``, ``tmpfs``, ``rlimit`` ...); one that is ``none`` or not in it is not held at all."""

    attempt: Limits
    memory: int | None = None
    disk: int | None = None
    cpu: float | None = None
    pids: int | None = None
    means: Mapping[str, str] = field(default_factory=dict)


class Live:
    """Something that lives in a pool of this process: it cannot be pickled or copied, and says so."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} lives in the pool of this process and cannot be pickled or copied; "
            "hand pool.ref to another process, and claim there from Pool.connect(ref)"
        )


class AsyncSnapshot(Live):
    """A sandbox's files at one moment, kept until deleted."""

    def __init__(self, host: Host, *, id: str, bytes: int, task: object = None, spec: object = None) -> None:
        self.id = id
        self.bytes = bytes
        self.task = task
        self.spec = spec
        self._host = host

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.bytes} bytes>"

    def fork(self, n: int, *, timeout: float | None = None) -> AwaitableCM[AsyncSandboxes]:
        """*n* sandboxes with this state, all or none. With ``async with``, all are released at the end."""

        async def make() -> AsyncSandboxes:
            return AsyncSandboxes(await self._host.fork(self, n, timeout))

        return AwaitableCM(make, AsyncSandboxes.release)

    async def delete(self) -> None:
        """Give its room back. Sandboxes that were forked from it live on."""
        await self._host.delete_snapshot(self)


class AsyncSandboxes(list["AsyncSandbox"]):
    """Sandboxes that are released together."""

    async def release(self, *, discard: bool = False) -> None:
        """Release all; the first error is raised after every one was tried."""
        first: BaseException | None = None
        for sandbox in self:
            try:
                await sandbox.release(discard=discard)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


class Budget:
    """Counts an attempt's commands and time against its :class:`Limits`.

    ``sandbox.budget`` is one where limits are enforced (rollouts, environments); each command the acting
    agent runs spends a step.
    """

    def __init__(self, limits: Limits, *, clock: object = None) -> None:
        self.limits = limits
        self.steps = 0
        self.reached: str | None = None
        """The limit that refused a command: the attempt is truncated, whether or not its policy minds."""
        self._clock = clock if callable(clock) else time.monotonic
        self._start: float = self._clock()

    @property
    def left_s(self) -> float | None:
        """Seconds until the wall limit; None without one."""
        if self.limits.wall is None:
            return None
        used: float = self._clock() - self._start
        return max(0.0, self.limits.wall - used)

    @property
    def used_up(self) -> str | None:
        """The limit that the attempt has run into: a command was refused, or its time is over."""
        left = self.left_s
        return self.reached or ("wall" if left is not None and left <= 0 else None)

    def spend(self) -> float | None:
        """Spend a step; the seconds that are left.

        Raises:
            LimitReachedError: none is left.
        """
        limits = self.limits
        if limits.steps is not None and self.steps >= limits.steps:
            self.reached = "steps"
            raise LimitReachedError(f"all {limits.steps} steps of the attempt are used", limit="steps")
        left = self.left_s
        if left is not None and left <= 0:
            self.reached = "wall"
            raise LimitReachedError(f"the attempt's {limits.wall:g} s are over", limit="wall")
        self.steps += 1
        return left
