"""Calling a policy: async on the loop, sync on a thread of its own; until it ends or its time is over.

Whatever a policy raises, SystemExit and KeyboardInterrupt too, comes back as a value and reaches nobody
else. A policy that is cut off gets a grace to clean up; one that will not end is left behind, with a
warning and with its sandbox taken away.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .._loops import outside
from ..task import Task
from .closing import pool_of_policy

if TYPE_CHECKING:
    from ..sandbox import AsyncSnapshot

T = TypeVar("T")
Policy = Callable[[Any, Task], Any]
log = logging.getLogger("rlsandbox.pool.rollouts")

GRACE_S = 5.0
"""What a policy that is cut off gets to clean up, before its sandbox is taken away and once more after."""


class SyncSide(Protocol):
    """What turns the asynchronous side into what a synchronous policy holds."""

    portal: Any

    def sandbox(self, sandbox: Any) -> Any:
        """The :class:`~rlsandbox.Sandbox` for an AsyncSandbox."""
        ...

    def snapshot(self, snapshot: Any) -> Any:
        """The :class:`~rlsandbox.Snapshot` for an AsyncSnapshot."""
        ...


@dataclass
class AsyncRollout:
    """``sandbox.rollout`` inside an async policy: which attempt of what this is.

    Args:
        state: what the last checkpoint of an earlier attempt kept, None when there was none.
    """

    run: str
    task: Task
    index: int
    group: str
    attempt: int
    id: str
    state: Any
    _checkpoint: Callable[[Any], Awaitable[Any]]

    async def checkpoint(self, state: Any = None) -> AsyncSnapshot:
        """Keep the sandbox's files and a copy of *state*: if this attempt breaks, the next one starts there.

        It replaces the checkpoint before it, whose snapshot is deleted.

        Raises:
            ProcessesRunningError: commands still run; nothing has changed.
            ConfigError: *state* cannot be copied.
        """
        snapshot: AsyncSnapshot = await self._checkpoint(state)
        return snapshot


@dataclass
class Ended:
    """How a policy ended."""

    value: Any = None
    error: BaseException | None = None
    cut: str | None = None
    """The limit that ended it, when it did not end by itself."""
    done: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def settled(self) -> bool:
        """Give a policy that was cut off its grace; whether it has ended."""
        if not self.done.is_set():
            waiting = asyncio.ensure_future(self.done.wait())
            await asyncio.wait({waiting}, timeout=GRACE_S)
            waiting.cancel()
        return self.done.is_set()


class Call:
    """One call of a policy.

    Args:
        pool: the pool that runs it, which it cannot close.
        take_away: ends the sandbox under the policy, so that whatever it does there raises.
        shut_out: whether what follows a cut (grading) shuts the policy out by itself.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        name: str,
        *,
        pool: object = None,
        take_away: Callable[[], Awaitable[None]],
        shut_out: Callable[[], bool],
    ) -> None:
        self._policy = policy
        self._task = task
        self._name = name
        self._pool = pool
        self._take_away = take_away
        self._shut_out = shut_out

    async def on_loop(self, sandbox: Any, wait_s: float | None, cut: str) -> Ended:
        """Await an async policy for *wait_s*; then it is cut off by the limit *cut*."""
        ended = Ended()

        async def guarded() -> None:
            # Nothing may escape: a task that ends with SystemExit or KeyboardInterrupt ends the loop.
            try:
                value = self._policy(sandbox, self._task)
                ended.value = await value if inspect.isawaitable(value) else value
            except BaseException as error:
                ended.error = error

        context = self._context()
        policy = asyncio.create_task(guarded(), name=f"policy {self._name}", context=context)
        _running.add(policy)
        policy.add_done_callback(_running.discard)
        policy.add_done_callback(lambda _: ended.done.set())
        try:
            await asyncio.wait({policy}, timeout=wait_s)
            if not policy.done():
                ended.cut = cut
                policy.cancel()
                if not await ended.settled() and not self._shut_out():
                    await self._take_away()
                    policy.cancel()
        except asyncio.CancelledError:
            policy.cancel()
            if not await ended.settled():
                await self._take_away()
                policy.cancel()
                await self._last_grace(ended)
            raise
        return ended

    def _context(self) -> contextvars.Context:
        """The policy's own, in which it can be told from whoever may close the pool."""
        context = contextvars.copy_context()
        context.run(pool_of_policy.set, self._pool)
        return context

    async def _last_grace(self, ended: Ended) -> None:
        if not await ended.settled():
            log.warning("the policy of rollout %s does not end; it is left behind", self._name)

    async def on_thread(self, sandbox: Any, wait_s: float | None, cut: str) -> Ended:
        """Run a plain policy on a daemon thread for *wait_s*; then its sandbox is shut to it."""
        loop = asyncio.get_running_loop()
        ended = Ended()

        def main() -> None:
            value, error = None, None
            try:
                value = self._policy(sandbox, self._task)
                if inspect.iscoroutine(value):
                    value.close()
                    raise TypeError(
                        "the policy is async, the pool is not (use AsyncPool or a plain function)"
                    )
            except BaseException as raised:  # SystemExit, KeyboardInterrupt: this thread's, not the process's
                value, error = None, raised
            _tell(loop, lambda: settle(value, error))

        def settle(value: Any, error: BaseException | None) -> None:
            ended.value, ended.error = value, error
            ended.done.set()

        context = self._context()
        thread = threading.Thread(target=context.run, args=(main,), name=f"policy {self._name}", daemon=True)
        thread.start()
        waiting = asyncio.ensure_future(ended.done.wait())
        try:
            await asyncio.wait({waiting}, timeout=wait_s)
            if not ended.done.is_set():
                ended.cut = cut
                if not self._shut_out():
                    await self._take_away()
        except asyncio.CancelledError:
            await self._take_away()
            await self._last_grace(ended)
            raise
        finally:
            waiting.cancel()
        return ended


_running: set[asyncio.Task[None]] = set()
"""The loop keeps tasks by weak references only."""


async def in_thread(work: Callable[[], T], timeout: float) -> T:
    """Run *work* on a daemon thread of its own; TimeoutError when it takes longer (it is left behind)."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Callable[[], T]] = loop.create_future()

    def settle(result: Callable[[], T]) -> None:
        if not answer.done():
            answer.set_result(result)

    def main() -> None:
        try:
            value = work()
        except BaseException as raised:
            error = (
                raised
                if isinstance(raised, Exception)
                else RuntimeError(f"{type(raised).__name__} in a hook")
            )

            def result() -> T:
                raise error
        else:

            def result() -> T:
                return value

        _tell(loop, lambda: settle(result))

    threading.Thread(target=main, name="rlsandbox-hook", daemon=True).start()
    with outside():
        async with asyncio.timeout(timeout):
            result = await answer
    return result()


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        log.debug("a thread ended after its event loop")


def real_interrupt() -> bool:
    """Whether a KeyboardInterrupt seen here may be the user's.

    ``asyncio.run`` turns Ctrl-C into a cancellation; only on a loop that is run otherwise, on the main
    thread, does it come up in whatever code runs.
    """
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
