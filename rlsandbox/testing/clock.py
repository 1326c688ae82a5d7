"""Virtual time: an event loop on which a wait takes no time.

``VirtualClock().run(main())`` runs a coroutine on a loop of its own whose clock jumps to the next timer
whenever nothing is left to do. Everything that takes its time from the loop (``asyncio.sleep``, timeouts,
the pool, the simulated backend) is virtual on it, and as fast as the processor; the same program runs the
same way every time.

What works in real time must not be waited for in virtual time: work given to the loop's executor holds the
clock until it is done, and so does every block under :meth:`VirtualClock.hold`. Sockets and subprocesses
belong on a real loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class ClockStalledError(RuntimeError):
    """Everything waits, and nothing is left that could end the waiting."""


class VirtualClock:
    """A clock that stands still while something runs and jumps while everything waits.

    Args:
        start: its first reading, in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self.now = float(start)
        self.jumps = 0
        self._held = 0

    def __repr__(self) -> str:
        return f"VirtualClock({self.now:.6f})"

    def time(self) -> float:
        """What it reads, in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass at once, as when a machine was suspended: timers that are due fire late."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self.now += seconds

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Do not jump: something is being done outside the loop."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """An event loop that reads this clock."""
        return _Loop(self)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Like ``asyncio.run``, in virtual time."""
        with asyncio.Runner(loop_factory=self.new_event_loop) as runner:
            return runner.run(main)


class _Selector(selectors.BaseSelector):
    """The real selector, except that waiting for a timer moves the clock instead."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        clock = self._clock
        if clock._held:
            return self._real.select(None)  # whoever holds it wakes the loop
        if timeout is None:
            raise ClockStalledError("everything waits and no timer is set: this would wait for ever")
        clock.now += timeout
        clock.jumps += 1
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Any:
        return self._real.get_map()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Selector(clock))
        self.virtual_clock = clock

    def time(self) -> float:
        return self.virtual_clock.now

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`VirtualClock.hold`."""
        return self.virtual_clock.hold()

    async def shutdown_default_executor(self, *args: Any, **kw: Any) -> None:
        with self.hold():
            await super().shutdown_default_executor(*args, **kw)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        clock = self.virtual_clock
        clock._held += 1
        try:
            future = super().run_in_executor(executor, func, *args)
        except BaseException:
            clock._held -= 1
            raise
        future.add_done_callback(lambda _: setattr(clock, "_held", clock._held - 1))
        return future
