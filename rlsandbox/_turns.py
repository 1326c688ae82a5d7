"""An event loop that other threads may run for a moment while its own thread waits for events.

To wake another thread, and to be woken by it, costs as much as many a call takes. So a caller who finds the
loop waiting takes a turn: it runs callbacks on its own thread, as the loop, under the loop's baton. Promises:
one thread at a time runs callbacks; the loop's own thread goes on with what a turn left, and with timers
that it set; no handler of an interrupt, an alarm or the like raises in the middle of a turn: it is called
right after it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own wrappers take ten times as long
import asyncio
import contextlib
import math
import selectors
import signal
import sys
import threading
import time
from asyncio import events
from collections.abc import Callable
from typing import Any

# Those whose handlers raise where somebody has one that does: interrupts, ends that are asked for, alarms.
_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "VTALRM", "PROF", "XCPU")
_HANDLED = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))


class _Selector(selectors.DefaultSelector):
    """Gives the baton away while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.baton = threading.Lock()
        self.until = 0.0
        """When the loop's own thread looks again by itself."""
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self.until = math.inf if timeout is None else time.monotonic() + timeout
        turns = self.turns
        self.baton.release()
        try:
            found = super().select(timeout)
        finally:
            self.baton.acquire()
        if turns != self.turns:
            # What a turn took out or put anew is not what was found; what is still so is found again.
            # By number: to ask for a file that the turn has closed is an error.
            known = self.get_map()
            found = [event for event in found if known.get(event[0].fd) is event[0]]
        return found


class TurnLoop(asyncio.SelectorEventLoop):
    """See the module. Its own thread calls :meth:`serve`, others `enter`, `run`, `leave`."""

    def __init__(self) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)
        self._soonest = math.inf
        self._stopped = False
        self._running: int | None = None
        self._hooks: Any = (None, None)
        self._outer_hooks: Any = (None, None)
        self._possible = hasattr(self, "_ready") and hasattr(asyncio.Handle, "_run")

    def stop(self) -> None:
        self._stopped = True
        super().stop()

    def serve(self, broke: Callable[[Exception], object], end: Callable[[], object]) -> None:
        """Run until stopped, then *end*, and close. *broke* is told what else has ended it."""
        asyncio.set_event_loop(self)
        self._waiting.baton.acquire()
        try:
            self.call_soon(self._remember_hooks)
            while not self._stopped:
                # what a callback raises of these ends its task, which tells it; nobody else's
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.run_forever()
            self.run_until_complete(self.shutdown_asyncgens())
        except Exception as error:
            broke(error)
        finally:
            try:
                self.close()
                end()
            finally:
                self._waiting.baton.release()

    def _remember_hooks(self) -> None:
        self._hooks = sys.get_asyncgen_hooks()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if when < self._soonest:
            self._soonest = when
        return super().call_at(when, callback, *args, context=context)

    @property
    def runner(self) -> int | None:
        """The thread that has a turn."""
        return self._running

    def enter(self) -> bool:
        """Begin a turn; False when the loop is at work, or here it cannot be.

        A thread that runs another event loop has none: that one's callbacks must not think they run in this.
        Nor has any while the loop is debugged: it then sees to it that only its own thread uses it.
        """
        if not self._possible or self.get_debug() or events._get_running_loop() is not None:
            return False
        if not self._waiting.baton.acquire(blocking=False):
            return False
        if self.is_closed():
            self._waiting.baton.release()
            return False
        self._waiting.turns += 1
        self._running = threading.get_ident()
        self._soonest = math.inf
        self._outer_hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(*self._hooks)
        events._set_running_loop(self)
        return True

    def run(self, over: Callable[[], bool]) -> None:
        """Run what is ready until *over*, or until nothing is."""
        ready = self._ready  # type: ignore[attr-defined]
        while ready and not over():
            handle = ready.popleft()
            if not handle.cancelled():
                # a coroutine's own end by these is told by its task
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    handle._run()

    def leave(self) -> bool:
        """End the turn; True when the loop's own thread has to be woken for what it left."""
        events._set_running_loop(None)
        sys.set_asyncgen_hooks(*self._outer_hooks)
        left = bool(self._ready) or self._soonest < self._waiting.until  # type: ignore[attr-defined]
        self._running = None
        self._waiting.baton.release()
        return left


class Quiet:
    """While it is entered, no handler of an interrupt or alarm runs; those that were due run at its end."""

    __slots__ = ("_due", "_was")

    def __init__(self) -> None:
        self._was: list[tuple[int, Any]] = []
        self._due: list[int] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return  # handlers run on the main thread
        for number in _HANDLED:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._was.append((number, handler))
                _signal.signal(number, self._put_off)

    def _put_off(self, number: int, frame: object) -> None:
        self._due.append(number)

    def __exit__(self, *ended: object) -> None:
        if self._was:
            self._go_on()

    def _go_on(self) -> None:
        while self._was:
            _signal.signal(*self._was.pop())
        while self._due:
            try:
                signal.raise_signal(self._due.pop(0))
            finally:
                if self._due:
                    self._go_on()
