"""The synchronous door to the asynchronous house: one event loop on a thread of its own.

``Portal.call`` runs a coroutine function on the loop's thread and gives its result. Promises: any number of
threads may call at once; KeyboardInterrupt cancels the coroutine and waits for its clean-up; a forked child
and a closed portal get PoolClosedError at once; the thread never keeps the interpreter from exiting.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
import time
import weakref
from asyncio import tasks as _tasks
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from .errors import PoolClosedError

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0
SLICE_S = 0.5
"""How long the main thread waits without a look. A signal that comes just before a wait for a lock begins
does not break it off: its handler runs, and Ctrl-C is heard, when the wait is over."""


class _Job:
    """One call: made on the caller's thread, run on the loop's."""

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

    def succeeded(self, result: Any) -> None:
        self.result = result
        self.task = None
        self.over = True
        self.done.release()

    def finished(self, task: asyncio.Task[Any]) -> None:
        if self.over:
            return
        if task.cancelled():
            self.error = asyncio.CancelledError()
        else:
            self.error = task.exception()
            if self.error is None:
                self.result = task.result()
        self.task = None
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


_enter: Callable[[Any, Any], None] | None = getattr(_tasks, "_enter_task", None)
_leave: Callable[[Any, Any], None] | None = getattr(_tasks, "_leave_task", None)


class _Driven(Coroutine[Any, Any, Any]):
    """A job's coroutine as its task sees it.

    A round of an event loop costs as much as a small operation, and a call through the portal had five of
    them. So the first step is taken right where the loop was woken for the job (:meth:`begin`), and a result
    is handed over by the step that made it; errors and cancellation take the task's own way.
    """

    __slots__ = ("_coro", "_ended", "_first", "_job")

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._coro = job.coro
        self._first: Any = None
        self._ended: BaseException | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        """Take the first step, as the task and in its context, before the loop comes to it."""
        if _enter is None or _leave is None:
            return
        _enter(loop, task)
        try:
            first = self._job.ctx.run(self.send, None)
            self._first = _GAVE_WAY if first is None else first
        except BaseException as ended:  # the task says it once more, in its own step
            self._ended = ended
        finally:
            _leave(loop, task)

    def send(self, value: Any) -> Any:
        if self._first is not None or self._ended is not None:
            return self._begun()
        try:
            return self._coro.send(value)
        except StopIteration as stop:
            self._job.succeeded(stop.value)
            raise

    def throw(self, *error: Any) -> Any:
        first = self._first
        if self._ended is not None or (first not in (None, _GAVE_WAY) and first.cancel()):
            return self._begun()  # what it waits for is cancelled, as by any task; that comes back to it
        self._first = None
        try:
            return self._coro.throw(*error)
        except StopIteration as stop:
            self._job.succeeded(stop.value)
            raise

    def _begun(self) -> Any:
        """What the first step came to."""
        first, self._first = self._first, None
        ended, self._ended = self._ended, None
        if ended is None:
            return None if first is _GAVE_WAY else first
        try:
            raise ended
        finally:
            del ended  # no cycle through the traceback

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("only a task drives it")


_GAVE_WAY = object()


class Portal:
    """An event loop on a daemon thread. Close it when done; interpreter exit does it otherwise."""

    def __init__(self, name: str = "rlsandbox") -> None:
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._closing: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        # A wake-up of the loop's own costs a handle, a context and two reads more.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if hasattr(os, "eventfd") else -1
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=name, daemon=True)
        self._thread.start()
        ready.wait()
        _open.add(self)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        if self._bell >= 0:
            self.loop.add_reader(self._bell, self._rung)
        self.loop.call_soon(ready.set)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            if self._bell >= 0:  # nobody rings any more: the portal is closed
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
            raise PoolClosedError("the pool is closed")
        if threading.get_ident() == self._thread.ident:
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
            self._submit(job)
            done = job.ended(within)
        except BaseException:
            # KeyboardInterrupt, or an exception of a signal handler: see the coroutine's end first. A second
            # one leaves at once; the clean-up goes on in the loop's thread.
            if not job.submitted:
                job.coro.close()
            elif self._cancel(job):
                job.wait()
            raise
        if not done:
            self._cancel(job)
            job.ended()
            if isinstance(job.error, asyncio.CancelledError):
                raise TimeoutError(f"not done within {within:g} s")
        return cast(T, self._take(job))

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
                raise PoolClosedError("the pool is closed")
            self._jobs.append(job)
            job.submitted = True
            # One wake-up for any number of jobs that came meanwhile.
            if len(self._jobs) == 1:
                if self._bell >= 0:
                    os.eventfd_write(self._bell, 1)
                else:
                    self.loop.call_soon_threadsafe(self._start)

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._start()

    def _start(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            driven = _Driven(job)
            job.task = task = self.loop.create_task(driven, context=job.ctx)
            task.add_done_callback(job.finished)
            driven.begin(self.loop, task)

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
            job.error = PoolClosedError("the pool was closed before this call ran")
            job.done.release()
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
