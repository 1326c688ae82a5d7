"""A signal that would end the process at once interrupts the command: what it holds is given back.

Closing is bounded and is not broken off by more of the same: ``timeout``, shells, terminals and service
managers send a signal twice, or another after it. A person who presses Ctrl-C again, a second later, leaves
at once. This module imports little: its handlers are in place before the commands are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
AGAIN_S = 1.0
"""A Ctrl-C that comes sooner after the first signal is the same one."""
_RETRY_S = 0.05


def say(line: str, file: TextIO | None = None) -> None:
    """Print *line* (on stderr) if anybody can still read it: the terminal may be gone, the pipe broken.

    What could not be written must not fail again, with a status of its own, when the interpreter ends.
    """
    to = sys.stderr if file is None else file
    try:
        print(line, file=to, flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, to.fileno())
            os.close(nowhere)


class Stop:
    """Which signal has ended the command, if one has."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.ledger: str | None = None
        """What the ledger calls the rollouts that the command has asked for."""
        self.cancel: Callable[[], object] | None = None
        """How the event loop that runs on the main thread is interrupted."""
        self._at = 0.0
        self._lost: tuple[threading.Timer, signal.Signals] | None = None

    @property
    def status(self) -> int:
        return 128 + (self.number or signal.SIGINT)

    @property
    def said(self) -> str:
        number = self.number or signal.SIGINT
        said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        if self.ledger is None:
            return said
        return f"{said}; what ran is on record: rlsandbox ledger report {self.ledger}"

    def tell(self, argv: Sequence[str] | None) -> int:
        """Say what has ended the command, as errors are said; its exit status."""
        say(f"rlsandbox: {self.said}")
        if "--json" in (sys.argv if argv is None else argv):
            number = self.number or signal.SIGINT
            error = {"message": self.said, "type": "KeyboardInterrupt", "kind": number.name.lower()}
            say(json.dumps({"error": error, "exit_status": self.status}), sys.stdout)
        return self.status

    def on(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self.number is None:
            self.number, self._at = signal.Signals(number), time.monotonic()
            if self.cancel is None:
                raise KeyboardInterrupt
            self.cancel()
        elif number == signal.SIGINT and time.monotonic() - self._at > AGAIN_S:
            self._leave()

    def swallowed(self) -> bool:
        """The interruption was raised where none gets out: it comes again, a moment later.

        Python runs handlers between any two steps of the main thread: those of a ``__del__`` or of a weak
        reference's callback as well, out of which an exception is only told.
        """
        number, self.number = self.number, None
        if number is None:
            return False
        timer = threading.Timer(_RETRY_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        self._lost = timer, number
        return True

    def over(self) -> None:
        """The command has come to its end: an interruption that has not come again yet is not lost."""
        lost, self._lost = self._lost, None
        if lost is not None:
            lost[0].cancel()
            if self.number is None:
                self.number = lost[1]

    def _leave(self) -> None:
        said = f"rlsandbox: {self.said}; left at once: the next start removes what is left over\n"
        if sys.stderr is not None and sys.stderr.isatty():
            said = "\x1b[?25h" + said  # the cursor, which a progress bar has hidden
        with contextlib.suppress(OSError):
            os.write(2, said.encode())
        os._exit(self.status)


_stop: Stop | None = None


@contextlib.contextmanager
def ended_by_signals(stop: Stop, *, whole: bool) -> Iterator[None]:
    """Handle what would end the process; what is ignored stays so, and so does a handler of somebody else's.

    Args:
        whole: whether the process ends with the command: what comes after an ending signal is ignored then.
    """
    global _stop
    outer = _stop
    taken: dict[int, Any] = {}
    ours = threading.current_thread() is threading.main_thread()
    if ours:
        before = {number: signal.getsignal(number) for number in ENDING}
        usual = (signal.SIG_DFL, signal.default_int_handler)
        taken = {number: handler for number, handler in before.items() if handler in usual}
    hook = sys.unraisablehook

    def unraisable(told: Any, /) -> None:
        if not (issubclass(told.exc_type, KeyboardInterrupt) and stop.swallowed()):
            hook(told)

    try:
        if ours:
            _stop = stop
            sys.unraisablehook = unraisable
            for number in taken:
                signal.signal(number, stop.on)
        yield
    finally:
        _stop = outer
        if sys.unraisablehook is unraisable:
            sys.unraisablehook = hook
        stop.over()
        for number, handler in taken.items():
            signal.signal(number, signal.SIG_IGN if whole and stop.number is not None else handler)


def on_record(pool: Any) -> None:
    """From now on the rollouts that the command asks for are in the ledger of *pool*."""
    from .._paths import home

    if _stop is not None:
        ledger = getattr(pool, "_pool", pool).ledger.path
        _stop.ledger = pool.run if ledger == home() / f"{pool.run}.db" else shlex.quote(str(ledger))


def run_async(work: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] | None = None) -> T:
    """``asyncio.run`` (or another such *run*), whose task is cancelled by a signal that ends the command.

    Raises:
        KeyboardInterrupt: it was, whatever the work has made of that.
    """
    import asyncio
    import logging

    stop = _stop

    async def main() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        if stop is None or task is None:
            return await work
        stop.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await work
        finally:
            stop.cancel = None

    try:
        result = (run or asyncio.run)(main())
    except (asyncio.CancelledError, Exception) as error:
        if stop is None or stop.number is None:
            raise
        if isinstance(error, Exception):
            logging.getLogger("rlsandbox.cli").info("what was interrupted ended with: %s", error)
        raise KeyboardInterrupt from None
    if stop is not None and stop.number is not None:
        raise KeyboardInterrupt
    return result
