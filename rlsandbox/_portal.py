"""The synchronous door to the asynchronous house: one event loop on a thread of its own.

``Portal.call`` runs a coroutine function on the loop and gives its result; its first steps on the caller's
own thread where the loop just waits (:mod:`._turns`). Promises: any number of threads may call at once;
KeyboardInterrupt cancels the coroutine and waits for its clean-up; a forked child and a closed portal
get PoolClosedError at once; the thread never keeps the interpreter from exiting.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from ._turns import Quiet, TurnLoop
from .errors import PoolClosedError

log = logging.getLogger("rlsandbox")
T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0
SLICE_S = 0.5
"""How long the main thread waits without a look. A signal that comes just before a wait for a lock begins
does not break it off: its handler runs, and Ctrl-C is heard, when the wait is over."""


class _Job:
    """One call: made on the caller's thread, run on the loop."""

    __slots__ = ("coro", "ctx", "done", "error", "over", "result", "submitted", "task")

    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self.coro = coro
        self.ctx = contextvars.copy_context()
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None
        self.result: Any = None
        self.task: asyncio.Task[Any] | None = None
        self.submitted = False
        self.over = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any]:
        self.task = loop.create_task(self.coro, context=self.ctx)
        return self.task

    def finished(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.end(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.end(error)
        else:
            self.result = task.result()
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Whoever waits goes on, with *error* or the result. Only the first end counts."""
        self.task = None
        if not self.over:
            self.error = error
            self.over = True
            self.done.release()

    def wait(self) -> None:
        """For whoever was interrupted while waiting: perhaps after the end was seen, so do not ask twice."""
        if not self.over:
            self.ended()

    def ended(self, within: float | None = None) -> bool:
        """Whether the end has come *within* so many seconds; without, it is waited for."""
        end = None if within is None else time.monotonic() + within
        slice_s = SLICE_S if threading.get_ident() == threading.main_thread().ident else threading.TIMEOUT_MAX
        while True:
            left = slice_s if end is None else min(slice_s, max(end - time.monotonic(), 0))
            if self.done.acquire(timeout=left):
                return True
            if end is not None and time.monotonic() >= end:
                return False


class Portal:
    """An event loop on a daemon thread. Close it when done; interpreter exit does it otherwise."""

    def __init__(self, name: str = "rlsandbox") -> None:
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self.broken = ""
        """What ended the loop, if it was not :meth:`close`."""
        self._jobs: deque[_Job] = deque()
        self._under_way: set[_Job] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.loop = TurnLoop()
        # A wake-up of the loop's own costs a handle, a context and two reads more.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if hasattr(os, "eventfd") else -1
        self._bell_lock = threading.Lock()
        self._deaf = False
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=name, daemon=True)
        self._thread.start()
        ready.wait()
        _open.add(self)

    def _run(self, ready: threading.Event) -> None:
        if self._bell >= 0:
            self.loop.add_reader(self._bell, self._rung)
        self.loop.call_soon(ready.set)
        self.loop.serve(self._broke, self._ended)

    def _broke(self, error: Exception) -> None:
        """The loop itself has failed, which is an error of ours: nobody shall wait for it."""
        log.critical("the event loop of a pool broke", exc_info=error)
        with self._lock:
            self._closed, self.broken = True, f"{type(error).__name__}: {error}"
            waiting = [*self._jobs, *self._under_way]
            self._jobs.clear()
        _open.discard(self)
        for job in waiting:
            job.end(self._refusal())

    def _refusal(self) -> PoolClosedError:
        if self.broken:
            return PoolClosedError(f"the pool is closed: its event loop broke ({self.broken})", kind="broken")
        return PoolClosedError("the pool is closed")

    def _ended(self) -> None:
        with self._bell_lock:
            self._deaf = True
            if self._bell >= 0:
                os.close(self._bell)

    @property
    def closed(self) -> bool:
        return self._closed or os.getpid() != self._pid

    def check(self) -> None:
        """Raise unless calls are possible here and now."""
        if os.getpid() != self._pid:
            raise PoolClosedError(
                "this pool belongs to another process: it was made before a fork",
                kind="forked",
                hint="make the pool in the child, or hand it pool.ref and use Pool.connect(ref)",
            )
        if self._closed:
            raise self._refusal()
        if threading.get_ident() in (self._thread.ident, self.loop.runner):
            raise RuntimeError(
                "a synchronous call from inside the pool's own event loop would wait for itself; "
                "use the Async classes there"
            )

    def call(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        within: float | None = None,
        **kwargs: Any,
    ) -> T:
        """Run ``fn(*args, **kwargs)`` on the loop and give its result.

        Args:
            within: seconds, after which the coroutine is cancelled and TimeoutError raised. (Not named
                ``timeout``: that of *fn* would end here and never reach it.)
        """
        self.check()
        job = _Job(fn(*args, **kwargs))
        try:
            with Quiet():
                if self.loop.enter():
                    try:
                        self._begin(job)
                    finally:
                        if self.loop.leave():
                            self._ring()
            if not job.submitted:
                self._submit(job)
            done = job.over or job.ended(within)
        except BaseException:
            # KeyboardInterrupt, or an exception of a signal handler: see the coroutine's end first. A second
            # one leaves at once; the clean-up goes on in the loop's thread.
            if not job.submitted:
                job.coro.close()
            elif not job.over and self._cancel(job):
                job.wait()
            raise
        if not done:
            self._cancel(job)
            job.wait()
            if isinstance(job.error, asyncio.CancelledError):
                raise TimeoutError(f"not done within {within:g} s")
        return cast(T, self._take(job))

    def _begin(self, job: _Job) -> None:
        """In a turn: the job's first steps."""
        if self._closed:
            return
        task = job.begin(self.loop)
        job.submitted = True
        self.loop.run(task.done)
        if task.done():
            job.finished(task)
        else:
            self._follow(job, task)

    def _ring(self) -> None:
        with self._bell_lock:
            if self._deaf:
                return  # closed since the turn: its number may be another file's by now
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)
            else:
                self.loop.call_soon_threadsafe(self._start)

    def _take(self, job: _Job) -> Any:
        error = job.error
        if error is None:
            return job.result
        if isinstance(error, asyncio.CancelledError) and self._closed:
            error = PoolClosedError("the pool was closed during this call")
        try:
            raise error
        finally:
            del error, job  # no cycle through the traceback

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise self._refusal()
            self._jobs.append(job)
            job.submitted = True
            # One wake-up for any number of jobs that came meanwhile.
            if len(self._jobs) == 1:
                self._ring()

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._start()

    def _start(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._follow(job, job.begin(self.loop))

    def _follow(self, job: _Job, task: asyncio.Task[Any]) -> None:
        self._under_way.add(job)

        def ended(task: asyncio.Task[Any]) -> None:
            self._under_way.discard(job)
            job.finished(task)

        task.add_done_callback(ended)

    def _cancel(self, job: _Job) -> bool:
        """Ask for the job's end; False when the loop is gone and there is nothing to wait for."""

        def cancel() -> None:
            self._start()  # the interrupt may have hit before the loop was woken for it
            if job.task is not None:
                job.task.cancel()

        with self._lock:
            if not self._closed:
                self.loop.call_soon_threadsafe(cancel)
        return self._thread.is_alive()

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a plain function on the loop soon; after closing, do nothing."""
        if os.getpid() != self._pid:
            return  # before the lock: the fork may have copied it locked
        with self._lock:
            if not self._closed:
                self.loop.call_soon_threadsafe(fn, *args)

    def iterate(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """An asynchronous iterator as a plain one; leaving it early closes it."""
        iterator = make()

        async def step() -> tuple[bool, Any]:
            try:
                return True, await iterator.__anext__()
            except StopAsyncIteration:
                return False, None

        async def close() -> None:
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                await aclose()

        try:
            while True:
                more, item = self.call(step)
                if not more:
                    return
                yield item
        finally:
            if threading.get_ident() == self._thread.ident:  # collected there
                self._closing.add(self.loop.create_task(close()))
            elif not self.closed:
                self.call(close)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Cancel what still runs, stop the loop, join its thread. Twice is fine; a forked child does nothing.

        Tasks that ignore their cancellation keep the thread, not the caller, beyond *timeout* seconds.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self.loop.call_soon_threadsafe(self._shutdown, waiting)
        _open.discard(self)
        if threading.get_ident() != self._thread.ident:
            self._thread.join(timeout)

    def _shutdown(self, waiting: list[_Job]) -> None:
        for job in waiting:
            job.coro.close()
            job.end(PoolClosedError("the pool was closed before this call ran"))
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if not tasks:
            self.loop.stop()
            return
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self.loop.stop())


_open: weakref.WeakSet[Portal] = weakref.WeakSet()


def _close_all() -> None:
    for portal in list(_open):
        portal.close(timeout=5)


atexit.register(_close_all)


class AwaitableCM(AbstractAsyncContextManager[T], Awaitable[T], Generic[T]):
    """What ``claim``, ``popen``, ``session`` and ``fork`` give: works with ``await`` and with ``async with``.

    Args:
        make: makes the thing; called once, when awaited or entered.
        leave: gives it back when the block is left.
    """

    __slots__ = ("_leave", "_make", "_thing")

    def __init__(
        self, make: Callable[[], Coroutine[Any, Any, T]], leave: Callable[[T], Awaitable[object]]
    ) -> None:
        self._make = make
        self._leave = leave
        self._thing: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._make().__await__()

    async def __aenter__(self) -> T:
        self._thing = await self._make()
        return self._thing

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thing, self._thing = self._thing, None
        if thing is not None:
            await self._leave(thing)
