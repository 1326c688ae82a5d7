"""Ctrl-C that hits a call of the portal at its worst moment: when the end has just been seen."""

from __future__ import annotations

import asyncio
import os
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
        await asyncio.sleep(0.01)  # longer than its caller's turn
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


@pytest.mark.timeout(20)
def test_an_interrupt_waits_for_the_end_of_a_turn() -> None:
    """What a step does is done whole, and KeyboardInterrupt comes right after it."""
    portal = Portal()
    done: list[str] = []

    async def interrupted(wait: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler would have run by now
            done.append("step")
        try:
            await asyncio.sleep(wait)
        finally:
            done.append("end")

    for wait in (0, 60):
        done.clear()
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            portal.call(interrupted, wait)
        assert done.count("step") == 1000
        assert done[-1] == "end"
        assert signal.getsignal(signal.SIGINT) is before
    portal.close()


@pytest.mark.timeout(20)
def test_two_signals_in_one_turn() -> None:
    portal = Portal()
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)
        raise LookupError(number)

    async def both() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not seen

    was = [signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        with pytest.raises(LookupError):
            portal.call(both)
        assert sorted(seen) == [signal.SIGUSR1, signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR1, was[0])
        signal.signal(signal.SIGUSR2, was[1])
        portal.close()
