"""Work on threads that nobody has to wait for: a call that is stuck in a stalled sandbox holds up nothing."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LateError(Exception):
    """The deadline came first; the call goes on without us."""


def spawn(fn: Callable[[], T], name: str = "rlsandbox-trl") -> Future[T]:
    """Call *fn* on a daemon thread of its own, in this context."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(fn))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def before(deadline: float, future: Future[T]) -> T:
    """Its result, by *deadline* on the monotonic clock.

    Raises:
        LateError: it was not done.
    """
    # Not result(timeout=): what the call itself raises may be a TimeoutError too.
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic())):
        raise LateError
    return future.result()


def within(deadline: float, fn: Callable[[], Any]) -> Any:
    """``fn()``, on this thread when there is no deadline."""
    return fn() if deadline == math.inf else before(deadline, spawn(fn))


async def by(deadline: float, awaited: Awaitable[T]) -> T:
    """What is awaited, by *deadline* on the monotonic clock; after that it is cancelled and not waited for.

    Raises:
        LateError: it was not done.
    """
    acting = asyncio.ensure_future(awaited)
    try:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        done, _ = await asyncio.wait({acting}, timeout=left)
    except asyncio.CancelledError:
        acting.cancel()
        raise
    if not done:
        acting.cancel()
        raise LateError
    return acting.result()
