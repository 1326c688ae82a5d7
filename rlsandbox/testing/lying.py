"""A backend that lies in the ways that real ones do.

A control plane answers an error and makes the thing all the same; a listing is behind; a deletion never ends;
a sandbox is gone without a word. A pool on top has to keep its promises, and this is how to see that it does.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..backends.base import Backend, Capabilities, Member
from ..errors import ProvisionError, ThrottledError
from ..spec import Spec


class LyingBackend(Backend):
    """Another backend, with lies to be told one after the other.

    Each count is how many of the next calls lie; set them at any time.

    Args:
        inner: the backend that does the work; default ``Local()``.
        list_lag: how many writes (or looks) a listing is behind.
    """

    name = "lying"

    def __init__(self, inner: Backend | None = None, *, list_lag: int = 2) -> None:
        if inner is None:
            from ..backends import Local

            inner = Local()
        self.inner = inner
        self.list_lag = list_lag
        self.creates_fail = 0
        """Answer an error, and nothing was made."""
        self.creates_lie = 0
        """Answer an error, and it was made."""
        self.creates_hang = 0
        """Never answer; nothing is made."""
        self.creates_come_late = 0
        """Never answer, and when nobody waits any more it is there."""
        self.throttled = 0
        """Answer 429 to writes."""
        self.retry_after: float | None = None
        self.deletes_fail = 0
        self.deletes_hang = 0
        """Never end, until :meth:`relent`."""
        self.exists: dict[str, Member] = {}
        """What is there in truth."""
        self.most = 0
        """The most that ever were there at once, half-made ones included."""
        self.log: list[tuple[str, str]] = []
        self._making = 0
        self._listings: deque[dict[str, Member]] = deque(maxlen=list_lag + 1)
        self._listings.append({})
        self._labels: dict[str, Mapping[str, str]] = {}
        self._relent = asyncio.Event()
        self._late: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        # What a backend may have beyond the seam (open_link, check_size) is the inner one's.
        if name in ("inner", "_inner"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    async def capabilities(self) -> Capabilities:
        return await self.inner.capabilities()

    def _tell(self, count: str) -> bool:
        left: int = getattr(self, count)
        if left > 0:
            setattr(self, count, left - 1)
            return True
        return False

    def _write(self, what: str, who: str) -> None:
        self.log.append((what, who))
        if self._tell("throttled"):
            error = ThrottledError(f"429 for {what} {who}")
            error.retry_after = self.retry_after
            raise error

    def _changed(self) -> None:
        self._listings.append(dict(self.exists))

    async def _make(self, spec: Spec, member: str, labels: Mapping[str, str], deadline: float) -> Member:
        self._making += 1
        self.most = max(self.most, len(self.exists) + self._making)
        try:
            made = await self.inner.provision(spec, member=member, labels=labels, deadline=deadline)
        finally:
            self._making -= 1
        self.exists[member] = made
        self._labels[member] = dict(labels)
        self._changed()
        return made

    async def provision(
        self, spec: Spec, *, member: str, labels: Mapping[str, str], deadline: float
    ) -> Member:
        self._write("create", member)
        if self._tell("creates_fail"):
            raise ProvisionError(f"{member}: the control plane had an error")
        if self._tell("creates_hang"):
            await asyncio.Event().wait()
        if self._tell("creates_come_late"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                late = asyncio.ensure_future(self._come_late(spec, member, labels, deadline))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
                raise
        lies = self._tell("creates_lie")
        made = await self._make(spec, member, labels, deadline)
        if lies:
            raise ProvisionError(f"{member}: the control plane says it had an error")
        return made

    async def _come_late(self, spec: Spec, member: str, labels: Mapping[str, str], deadline: float) -> None:
        await asyncio.sleep(0.05)
        await self._make(spec, member, labels, deadline)

    async def connect(self, member: Member) -> tuple[StreamReader, StreamWriter]:
        return await self.inner.connect(member)

    async def dispose(self, member: Member) -> None:
        self._write("delete", member.id)
        if self._tell("deletes_fail"):
            raise ProvisionError(f"{member.id}: the control plane could not delete it")
        if self._tell("deletes_hang"):
            await self._relent.wait()
        await self.inner.dispose(self.exists.get(member.id, member))
        if self.exists.pop(member.id, None) is not None:
            self._changed()

    def relent(self) -> None:
        """Let every deletion that hangs go on."""
        self._relent.set()

    async def lose(self, member: str) -> None:
        """A member is gone, and nobody was told."""
        await self.inner.dispose(self.exists.pop(member))
        self._changed()

    async def list(self, labels: Mapping[str, str]) -> Sequence[Member]:
        shown = self._listings[0]
        self._changed()  # it catches up in time, also when nothing is written
        return [m for name, m in shown.items() if labels.items() <= self._labels[name].items()]

    async def give_layer(self, layer: str, member: Member) -> bool:
        return await self.inner.give_layer(layer, member)

    async def drop_layer(self, layer: str) -> None:
        await self.inner.drop_layer(layer)

    def environment(self, spec: Spec) -> Mapping[str, str]:
        return self.inner.environment(spec)

    async def close(self) -> None:
        for task in list(self._late):
            task.cancel()
        await self.inner.close()
