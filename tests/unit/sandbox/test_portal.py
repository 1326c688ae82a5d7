"""The portal: results, errors, threads, interrupts, forks, closing."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator

import pytest

from rlsandbox._portal import AwaitableCM, Portal
from rlsandbox.errors import PoolClosedError


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.close()


async def double(x: int, *, delay: float = 0) -> int:
    await asyncio.sleep(delay)
    return 2 * x


async def fail() -> None:
    raise LookupError("inside")


def test_call(portal: Portal) -> None:
    assert portal.call(double, 4) == 8
    with pytest.raises(LookupError, match="inside"):
        portal.call(fail)
    assert portal.call(double, 5, delay=0.01) == 10


def test_many_threads(portal: Portal) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: got.extend(portal.call(double, i * 100 + j) for j in range(50)))  # type: ignore[misc]
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [2 * (i * 100 + j) for i in range(16) for j in range(50)]


def test_calls_overlap(portal: Portal) -> None:
    barrier: list[asyncio.Event] = []

    async def meet() -> None:
        if not barrier:
            barrier.append(asyncio.Event())
            await barrier[0].wait()
        else:
            barrier[0].set()

    thread = threading.Thread(target=portal.call, args=(meet,))
    thread.start()
    while not barrier:
        time.sleep(0.001)
    portal.call(meet)
    thread.join(10)
    assert not thread.is_alive()


def test_timeout(portal: Portal) -> None:
    cleaned = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    with pytest.raises(TimeoutError):
        portal.call(slow, within=0.05)
    assert cleaned == [1]


def test_context_variables_come_along(portal: Portal) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="none")
    variable.set("mine")

    async def look() -> str:
        return variable.get()

    assert portal.call(look) == "mine"


def test_from_its_own_thread(portal: Portal) -> None:
    async def inside() -> None:
        portal.call(double, 1)

    with pytest.raises(RuntimeError, match="own event loop"):
        portal.call(inside)


def test_exceptions_are_not_kept(portal: Portal) -> None:
    """The error's traceback must not hold the caller's frames for ever."""
    import gc
    import weakref

    class Thing:
        pass

    thing = Thing()
    seen = weakref.ref(thing)
    with pytest.raises(LookupError):
        portal.call(fail)
    del thing
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("delay", [0.05, 0.15])
def test_keyboard_interrupt_waits_for_the_clean_up(portal: Portal, delay: float) -> None:
    state: list[str] = []

    async def work() -> None:
        state.append("begun")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            state.append("cleaned")
            raise

    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        portal.call(work)
    assert state == ["begun", "cleaned"]
    assert portal.call(double, 2) == 4


def test_interrupt_while_nothing_hangs(portal: Portal) -> None:
    """Interrupts at any instant of many calls: each call ends, the portal goes on."""
    stop = threading.Event()

    def interrupts() -> None:
        while not stop.wait(0.002):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupts)
    caught = 0
    thread.start()
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                while time.monotonic() < deadline:
                    assert portal.call(double, 3, delay=0.001) == 6
            except KeyboardInterrupt:
                caught += 1
    except KeyboardInterrupt:
        caught += 1
    finally:
        for _ in range(3):
            try:
                stop.set()
                thread.join()
                break
            except KeyboardInterrupt:
                continue
    assert caught > 10
    assert portal.call(double, 3) == 6
    assert portal.call(_tasks) == 1


async def _tasks() -> int:
    return len(asyncio.all_tasks())


def test_close(portal: Portal) -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(1)

    errors: list[BaseException] = []

    def call() -> None:
        try:
            portal.call(work)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while portal.call(_tasks) < 2:
        time.sleep(0.001)
    portal.close()
    portal.close()
    thread.join(10)
    assert cleaned == [1]
    assert isinstance(errors[0], PoolClosedError)
    assert portal.closed
    with pytest.raises(PoolClosedError, match="closed"):
        portal.call(double, 1)
    portal.post(lambda: None)
    assert not portal._thread.is_alive()


def test_forked_child(portal: Portal) -> None:
    assert portal.call(double, 1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            portal.call(double, 1)
        except PoolClosedError as error:
            code = 0 if "fork" in str(error) and portal.closed else 2
        portal.close()
        portal.post(lambda: None)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert portal.call(double, 2) == 4


def test_interpreter_exit_never_hangs() -> None:
    script = """if 1:
        import asyncio, threading
        from rlsandbox._portal import Portal
        p = Portal()
        async def work():
            try:
                await asyncio.sleep(600)
            finally:
                print("cleaned", flush=True)
        threading.Thread(target=p.call, args=(work,), daemon=True).start()
        async def n(): return len(asyncio.all_tasks())
        while p.call(n) < 2: pass
        print("end", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "end\ncleaned\n"


def test_iterate(portal: Portal) -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for i in range(5):
                await asyncio.sleep(0)
                yield i
        finally:
            closed.append(1)

    assert list(portal.iterate(numbers)) == [0, 1, 2, 3, 4]
    some = portal.iterate(numbers)
    assert next(some) == 0
    some.close()  # type: ignore[attr-defined]
    assert closed == [1, 1]


async def test_awaitable_cm() -> None:
    events: list[str] = []

    async def make() -> str:
        events.append("made")
        return "thing"

    async def leave(thing: str) -> None:
        events.append(f"left {thing}")

    assert await AwaitableCM(make, leave) == "thing"
    assert events == ["made"]
    async with AwaitableCM(make, leave) as thing:
        assert thing == "thing"
    assert events == ["made", "made", "left thing"]
    with pytest.raises(LookupError):
        async with AwaitableCM(make, leave):
            raise LookupError
    assert events[-1] == "left thing"


def test_a_timeout_of_the_function_itself_reaches_it(portal: Portal) -> None:
    async def takes(timeout: float) -> float:
        await asyncio.sleep(0.05)
        return timeout

    assert portal.call(takes, timeout=0.01) == 0.01


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="the loop is woken by itself here")
def test_a_call_that_a_close_overtakes_rings_nobody_elses_bell(
    portal: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its turn and its ring the loop may end, and the bell's number be another file's."""
    portal.loop.set_debug(False)  # it takes no turns while it is debugged
    leave, bell = portal.loop.leave, portal._bell
    another = os.eventfd(0, os.EFD_NONBLOCK)

    def overtaken() -> bool:
        leave()
        portal.close()
        assert not portal._thread.is_alive()
        os.dup2(another, bell)
        return True

    monkeypatch.setattr(portal.loop, "leave", overtaken)
    while portal.loop._waiting.baton.locked():  # the loop is not yet waiting: no turn could be had
        time.sleep(0.001)
    with pytest.raises(PoolClosedError):
        portal.call(asyncio.sleep, 60)
    try:
        assert os.fstat(bell)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(another)
    finally:
        os.close(bell)
        os.close(another)
