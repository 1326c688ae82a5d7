"""Whether the other side of a stream still answers, asked only while somebody waits for it.

A process that was stopped (SIGSTOP, a debugger, a machine that swaps to death) closes nothing: without a
question its callers would wait for ever. So each stream on which requests are in flight is pinged every
:data:`EVERY_S`, and is lost when it has not answered by the next time. One timer a loop, none while nothing
is watched; what is between two requests costs nothing.
"""

from __future__ import annotations

import asyncio
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

EVERY_S = 15.0
ANSWER_S = 4.0
"""What a ping may take where somebody's deadline has passed already."""


class Watched(Protocol):
    @property
    def waited_for(self) -> bool:
        """Whether a request is in flight."""
        ...

    @property
    def gone(self) -> bool: ...

    @property
    def away(self) -> bool:
        """Whether the way to it is cut just now, by its transport's own word: then silence says nothing."""
        ...

    def knock(self) -> asyncio.Future[None]:
        """Send a ping: done when it is answered, or when the stream is lost."""
        ...

    def give_up(self, why: str) -> None:
        """Treat the other side as lost."""
        ...


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: WeakSet[Watched] = WeakSet()
        self._asked: WeakKeyDictionary[Watched, asyncio.Future[None]] = WeakKeyDictionary()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Watched) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for stream in list(self._streams):
            asked = self._asked.pop(stream, None)
            if stream.gone:
                self._streams.discard(stream)
            elif asked is not None and not asked.done() and stream.away:
                self._asked[stream] = asked
            elif asked is not None and not asked.done():
                stream.give_up(f"it has not answered for {EVERY_S:g} s")
                self._streams.discard(stream)
            elif stream.waited_for:
                self._asked[stream] = stream.knock()
        if self._streams:
            self._timer = self._loop.call_later(EVERY_S, self._look)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()


def watch(stream: Watched, loop: asyncio.AbstractEventLoop) -> None:
    """Ask *stream* from time to time, until it is gone."""
    found = _watches.get(loop)
    if found is None:
        found = _watches[loop] = _Watch(loop)
    found.add(stream)


async def answers(stream: Watched, within: float = ANSWER_S) -> bool:
    """Whether *stream* answers a ping in time."""
    if stream.gone:
        return False
    done, _ = await asyncio.wait({stream.knock()}, timeout=within)
    return bool(done) and not stream.gone
