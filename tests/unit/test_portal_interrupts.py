"""Ctrl-C that hits a call of the portal at its worst moment: when the end has just been seen."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest

from rlsandbox import _portal
from rlsandbox._portal import Portal


class InterruptedAfter:
    """A lock whose acquire by a caller is followed by KeyboardInterrupt, as a signal handler raises it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = False

    def acquire(self, timeout: float = -1) -> bool:
        got = self._lock.acquire(timeout=timeout)
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
        self._armed = True  # the first acquire is _Job's own
        return got

    def release(self) -> None:
        self._lock.release()


@pytest.mark.timeout(20)
def test_interrupted_when_the_end_was_just_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    portal = Portal()
    real = _portal._Job.__init__

    def made(self: Any, coro: Any) -> None:
        real(self, coro)
        self.done = InterruptedAfter()
        self.done.acquire()

    async def one() -> int:
        return 1

    with monkeypatch.context() as patch:
        patch.setattr(_portal._Job, "__init__", made)
        with pytest.raises(KeyboardInterrupt):
            portal.call(one)
    assert portal.call(one) == 1
    portal.close()


@pytest.mark.timeout(60)
def test_a_signal_that_does_not_break_the_wait_off_is_heard_all_the_same() -> None:
    """As one that comes just before the wait begins: here another thread gets it, and Python notes it down."""
    portal = Portal()
    ended = []

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    def heard(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, heard)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    sender = threading.Timer(0.5, lambda: signal.pthread_kill(other.ident or 0, signal.SIGUSR1))
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            portal.call(endless)
        assert ended == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)
        stop.set()
        sender.join()
        other.join()
        portal.close()
