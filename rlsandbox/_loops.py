"""What coroutines must say to the event loop they run on."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractContextManager


def outside() -> AbstractContextManager[None]:
    """Around an ``await`` for something that is done outside the loop (a thread): virtual time stands still.

    A loop of :class:`rlsandbox.testing.VirtualClock` would otherwise jump to its next timer meanwhile.
    """
    hold = getattr(asyncio.get_running_loop(), "hold", None)
    return contextlib.nullcontext() if hold is None else hold()
