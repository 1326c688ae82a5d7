"""A call's first steps are taken on the caller's thread while the loop waits: all else is as in any task."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from rlsandbox._portal import Portal

VAR: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="")
pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal("test-portal")
    yield portal
    portal.close()


def test_results_and_errors_of_every_step(portal: Portal) -> None:
    async def at_once() -> tuple[int, int]:
        return 1, 2

    async def after(n: int) -> StopIteration:
        for _ in range(n):
            await asyncio.sleep(0)
        return StopIteration("a value that looks like an end")

    async def fails(n: int) -> None:
        await after(n)
        raise LookupError(n)

    assert portal.call(at_once) == (1, 2)
    for n in range(4):
        assert portal.call(after, n).value == "a value that looks like an end"
        with pytest.raises(LookupError):
            portal.call(fails, n)


def test_the_first_step_is_the_tasks_own(portal: Portal) -> None:
    async def who() -> bool:
        first = asyncio.current_task()
        VAR.set(VAR.get() + " seen")
        await asyncio.sleep(0)
        return first is not None and first is asyncio.current_task() and VAR.get() == "caller's seen"

    token = VAR.set("caller's")
    try:
        assert portal.call(who)
        assert VAR.get() == "caller's"
    finally:
        VAR.reset(token)


def test_timeouts_and_groups_that_begin_in_the_first_step(portal: Portal) -> None:
    async def late() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            pass
        async with asyncio.TaskGroup() as group:
            one = group.create_task(asyncio.sleep(0, "one"))
        return one.result()

    async def group_first() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            group.create_task(broken())

    async def broken() -> None:
        raise LookupError

    assert portal.call(late) == "one"
    with pytest.raises(BaseExceptionGroup):
        portal.call(group_first)


def test_cancelled_between_the_first_step_and_the_next(portal: Portal) -> None:
    """What it waits for is cancelled too, as for any task."""
    seen: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("child")
            raise

    async def waits() -> None:
        task = asyncio.ensure_future(child())
        own = asyncio.current_task()
        assert own is not None
        portal.loop.call_soon(own.cancel)  # comes before the task's own first step
        try:
            await task
        except asyncio.CancelledError:
            seen.append("itself")
            raise

    with pytest.raises(asyncio.CancelledError):
        portal.call(waits)
    assert seen in (["child", "itself"], ["itself"])  # one that has not begun is cancelled without a word
    with pytest.raises(TimeoutError):
        portal.call(asyncio.sleep, 60, within=0.01)


def test_many_threads(portal: Portal) -> None:
    got: list[int] = []

    async def double(n: int) -> int:
        if n % 3:
            await asyncio.sleep(0)
        return 2 * n

    def many(start: int) -> None:
        got.extend(portal.call(double, start + i) for i in range(300))

    threads = [threading.Thread(target=many, args=(1000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(2 * (1000 * i + j) for i in range(8) for j in range(300))


def test_nothing_is_kept(portal: Portal) -> None:
    class Thing:
        pass

    def call() -> weakref.ref[Any]:
        thing = Thing()

        async def fails() -> None:
            raise LookupError(thing)

        with pytest.raises(LookupError):
            portal.call(fails)
        return weakref.ref(thing)

    kept = call()
    portal.call(asyncio.sleep, 0)
    gc.collect()
    assert kept() is None


def idle(portal: Portal) -> None:
    """Until the loop's own thread waits."""
    while portal.loop._waiting.baton.locked():
        time.sleep(0.001)


def test_whose_thread(portal: Portal) -> None:
    portal.loop.set_debug(False)  # it takes no turns while it is debugged

    async def steps() -> list[int]:
        seen = [threading.get_ident()]
        await asyncio.sleep(0)
        seen.append(threading.get_ident())
        await asyncio.sleep(0.01)
        return [*seen, threading.get_ident()]

    idle(portal)
    me, own = threading.get_ident(), portal._thread.ident
    assert portal.call(steps) == [me, me, own]


def test_what_a_turn_leaves_goes_on(portal: Portal) -> None:
    came: list[str] = []
    told = threading.Event()

    async def leaves() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, came.append, "timer")
        loop.call_later(0.02, told.set)
        loop.call_soon(loop.call_soon, came.append, "soon")

    for _ in range(20):
        came.clear()
        told.clear()
        idle(portal)
        portal.call(leaves)
        assert told.wait(10)
        assert came == ["soon", "timer"]


def test_asynchronous_generators_of_a_turn_are_the_loops(portal: Portal) -> None:
    async def numbers() -> Any:
        try:
            yield 1
        finally:
            closed.append(threading.get_ident())

    closed: list[int] = []
    kept: list[Any] = []

    async def begin() -> None:
        kept.append(numbers())
        await anext(kept[0])

    hooks = sys.get_asyncgen_hooks()
    idle(portal)
    portal.call(begin)
    assert sys.get_asyncgen_hooks() == hooks
    portal.close()
    assert closed == [portal._thread.ident]


def test_from_a_thread_with_a_loop_of_its_own(portal: Portal) -> None:
    async def inside() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def outer() -> tuple[bool, bool]:
        idle(portal)
        theirs = portal.call(inside)
        return theirs is portal.loop, asyncio.get_running_loop() is portal.loop

    assert asyncio.run(outer()) == (True, False)


def test_a_reader_that_is_replaced_while_its_event_is_on_the_way(portal: Portal) -> None:
    """The loop's thread has found it readable and waits for the baton: the new reader must stay."""
    ours, theirs = socket.socketpair()
    got: list[bytes] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        theirs.send(b"x")  # wakes the loop's thread, which has to wait for this turn's end
        time.sleep(0.002)
        loop.remove_reader(ours.fileno())
        loop.add_reader(ours.fileno(), lambda: got.append(ours.recv(100)))

    async def first() -> None:
        asyncio.get_running_loop().add_reader(ours.fileno(), lambda: got.append(ours.recv(100)))

    portal.call(first)
    for n in range(1, 31):
        idle(portal)
        portal.call(watch)
        deadline = time.monotonic() + 10
        while len(got) < n:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    async def last() -> None:
        asyncio.get_running_loop().remove_reader(ours.fileno())

    portal.call(last)
    ours.close()
    theirs.close()


def test_debuggers_and_callbacks_cannot_call_from_inside_a_turn(portal: Portal) -> None:
    async def inside() -> None:
        portal.call(inside)

    idle(portal)
    with pytest.raises(RuntimeError, match="own event loop"):
        portal.call(inside)
