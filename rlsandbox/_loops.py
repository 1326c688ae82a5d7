"""What coroutines must say to the event loop they run on."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager
from typing import Any


def outside() -> AbstractContextManager[None]:
    """Around an ``await`` for something that is done outside the loop (a thread): virtual time stands still.

    A loop of :class:`rlsandbox.testing.VirtualClock` would otherwise jump to its next timer meanwhile.
    """
    hold = getattr(asyncio.get_running_loop(), "hold", None)
    return contextlib.nullcontext() if hold is None else hold()


def stands(task: asyncio.Future[Any] | None) -> bool:
    """Whether it is under way, or has ended well: then nobody has to begin it again."""
    return task is not None and not (task.done() and (task.cancelled() or task.exception() is not None))


async def see_through(*work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for the end of *work*, whoever cancels the wait: what it holds would be nobody's.

    The last cancellation is returned, to be raised when all is put away. What *work* raised stays in it.
    """
    cancelled = None
    while any(not future.done() for future in work):
        try:
            await asyncio.wait(work)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
