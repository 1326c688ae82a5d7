"""What is done to members, each with a deadline: created, primed, reset and verified, disposed of.

What does not end by its deadline is given up, counted and cleaned up; how each ended is told to the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..backends.base import Member
from ..errors import ConfigError, SandboxDiedError, ThrottledError, UnsupportedError
from ..hooks import Credentials
from ..spec import Spec
from ..task import Task
from .core import Core
from .link import Link
from .refill import Cause
from .watching import Watching

if TYPE_CHECKING:
    from ..metrics import Metrics

log = logging.getLogger("rlsandbox.pool")

GRACE_S = 5.0
"""What a cancelled operation gets to end before nobody waits for it any more."""
_REMEMBERED = 10_000
_NOTHING_MADE = (ThrottledError, UnsupportedError, ConfigError)


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that an operation may take."""

    provision: float = 120.0
    prime: float = 1800.0
    reset: float = 60.0
    dispose: float = 30.0
    list_every: float = 60.0
    late: float = 10.0
    """How long after a creation was given up it may still come into being."""


@dataclass(slots=True)
class Held:
    """A member that exists, and the way to it."""

    member: Member
    link: Link
    spec: Spec
    task: Task | None = None
    """Whose episode it ran last: verification looks with its eyes."""
    credentials: list[Credentials] = field(default_factory=list)
    """What its episodes held, newest last."""
    at_hand: Any = None
    """A sandbox object made while the member lay ready, for a claim of the same task."""


Opener = Callable[[Member, Spec], Awaitable[Link]]


class Operations(Watching):
    """The half of :class:`~.driver.Driver` that works on members."""

    specs: dict[str, Spec]
    tasks: dict[str, Task]
    rested: Callable[[Held], object] | None
    choose: Callable[[Spec], Awaitable[dict[str, Any]]] | None
    _open_link: Opener
    _metrics: Metrics | None
    _adopt: bool
    _resets: AbstractAsyncContextManager[None]
    _ops: dict[str, asyncio.Task[None]]
    _given_up: set[str]
    _cut: asyncio.Future[Any]

    async def _provision(self, name: str, digest: str) -> None:
        spec, limit = self.specs[digest], self.deadlines.provision
        made: asyncio.Task[Held] = self._loop.create_task(self._make(name, spec, limit))
        try:
            either: set[asyncio.Future[Any]] = {made, self._cut}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                made.cancel()
                await asyncio.wait({made}, timeout=GRACE_S)
        except asyncio.CancelledError:
            made.cancel()
            await asyncio.wait({made}, timeout=GRACE_S)
            self._ended_late(name, made)
            raise
        if not made.done() or made.cancelled():
            self._ended_late(name, made)
            said = "the pool was closed" if self._cut.done() else f"creation did not end within {limit:g} s"
            cause = Cause("provision_timeout", said)
            self._given_up.add(name)
            self.tell(_failed(self.core, name, cause, gave_up=True))
            return
        error = made.exception()
        if error is None:
            self._arrived(name, made.result())
        elif isinstance(error, ThrottledError):
            retry = error.retry_after
            failed = _failed(
                self.core, name, Cause.of(error), exists=False, throttled=True, retry_after=retry
            )
            self.tell(failed)
        else:
            exists = not isinstance(error, _NOTHING_MADE)
            self.tell(_failed(self.core, name, Cause.of(error), exists=exists))

    def _ended_late(self, name: str, made: asyncio.Task[Held]) -> None:
        """A creation that goes on although it was given up: what comes of it is disposed of."""
        if made.done():
            if not made.cancelled() and made.exception() is None:
                self._arrived_late(name, made.result())
            return
        log.warning("the creation of sandbox %s does not end although it was cancelled", name)
        self._late[name] = made

        def ended(task: asyncio.Task[Held]) -> None:
            self._late.pop(name, None)
            if not task.cancelled() and task.exception() is None:
                self._arrived_late(name, task.result())

        made.add_done_callback(ended)

    def _arrived_late(self, name: str, held: Held) -> None:
        self.held[name] = held
        self.tell(self.core.provisioned, name)

    async def _make(self, name: str, spec: Spec, limit: float) -> Held:
        member = None
        if self._adopt:
            member = await self.backend.adopt(spec, labels=self.labels, deadline=limit)
        if member is None:
            where = {} if self.choose is None else await self.choose(spec)
            member = await self.backend.provision(
                spec, member=name, labels=self.labels, deadline=limit, **where
            )
        link = await self._open_link(member, spec)
        return Held(member, link, spec)

    def _arrived(self, name: str, held: Held) -> None:
        self.held[name] = held
        link: Any = held.link
        if hasattr(link, "sources"):
            link.sources, link.lost_layer, link.below = self._layer_at, self._layer_lost, self._primed_below
        held.link.on_lost(lambda error: self._lost(name, error))
        self.tell(self.core.provisioned, name, once=held.link.mode == "replace")

    def _layer_at(self, layer: str) -> list[Any]:
        """Links to the members that have the layer."""
        links = (held.link for held in self.held.values())
        return [link for link in links if getattr(link, "has", lambda _: False)(layer)]

    def _primed_below(self, layer: str) -> str | None:
        known = self.core.layers.get(layer)
        while known is not None and known.parent is not None:
            known = self.core.layers.get(known.parent)
            if known is not None and not known.pinned:
                return known.name
        return None

    def _layer_lost(self, layer: str) -> bool:
        links = (held.link for held in self.held.values())
        return not any(getattr(link, "owns", lambda _: True)(layer) for link in links)

    def _lost(self, name: str, error: BaseException) -> None:
        held = self.held.get(name)
        if held is not None and not self.core.closing:
            self.tell(self.core.lost, name, Cause.of(error))

    async def _prime(self, name: str, layer: str) -> None:
        held, task = self.held[name], self.tasks[layer]
        started = self._loop.time()
        known = self.core.layers.get(layer)
        if known is not None and getattr(held.link, "owns", lambda _: False)(layer):
            # It came with a snapshot that was sealed on it.
            size = known.bytes
            self.tell(lambda now: self.core.primed(name, layer, size, now, made=False))
            return
        try:
            async with asyncio.timeout(self.deadlines.prime):
                size = await held.link.prime(task, layer)
        except Exception as error:
            cause = Cause.of(error)
            if isinstance(error, TimeoutError):
                cause = Cause(
                    "prime_timeout", f"priming did not end within {self.deadlines.prime:g} s", False
                )
            dead = cause.kind in ("sandbox_died", "closed", "prime_timeout")
            self.tell(lambda now: self.core.prime_failed(name, cause, now, alive=not dead))
            return
        if self._metrics is not None:
            self._metrics.prime.add(self._loop.time() - started)
        self.tell(lambda now: self.core.primed(name, layer, size, now))

    async def _reset(self, name: str, layer: str | None) -> None:
        held = self.held[name]
        member = self.core.members.get(name)
        used = member is not None and member.used
        try:
            async with self._resets:  # the wait for its turn is no part of what it may take
                started = self._loop.time()
                async with self._moving(held.link, self.deadlines.reset):
                    await held.link.reset(layer, task=held.task, credentials=held.credentials)
                    put_back = self._loop.time()
                    residue = await held.link.verify(layer, task=held.task, credentials=held.credentials)
        except Exception as error:
            cause = Cause.of(error)
            if isinstance(error, TimeoutError):
                limit = self.deadlines.reset
                cause = Cause("reset_timeout", f"reset and verification did not end within {limit:g} s")
            if cause.kind == "layer_gone" and layer is not None:
                self.tell(self.core.layer_gone, layer)
            self.tell(self.core.lost, name, cause)
            return
        if self._metrics is not None:
            if used:  # else it was clean, and only its layer changed
                self._metrics.reset.add(put_back - started)
            self._metrics.verify.add(self._loop.time() - put_back)
        if residue:
            shown = ", ".join(f"{r.kind} {r.what}" for r in residue[:5])
            more = f" and {len(residue) - 5} more" if len(residue) > 5 else ""
            self.tell(self.core.residue, name, shown + more)
        else:
            self.tell(self.core.prepared, name)
            if self.rested is not None and held.at_hand is None and name in self.core.idle:
                self.rested(held)

    @asynccontextmanager
    async def _moving(self, link: Any, limit: float) -> AsyncIterator[None]:
        """A deadline that is put off while a layer is on its way to the member: large ones take longer."""
        async with asyncio.timeout(limit) as clock:

            def arriving() -> None:
                if not clock.expired():
                    clock.reschedule(self._loop.time() + limit)

            link.arriving = arriving
            try:
                yield
            finally:
                link.arriving = lambda: None

    async def _dispose(self, name: str, reason: str) -> None:
        running = self._ops.get(name)
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=GRACE_S)
        held = self.held.pop(name, None)
        member = held.member if held is not None else Member(id=name, node=None)
        limit = self.deadlines.dispose
        log.debug("disposing of sandbox %s: %s", name, reason)
        try:
            async with asyncio.timeout(limit):
                if held is not None:
                    await held.link.close()
                await self.backend.dispose(member)
        except Exception as error:
            if held is not None:
                self.held.setdefault(name, held)
            cause = Cause.of(error)
            if isinstance(error, TimeoutError):
                cause = Cause("dispose_timeout", f"removal did not end within {limit:g} s")
            throttled = isinstance(error, ThrottledError)
            retry = error.retry_after if isinstance(error, ThrottledError) else None
            self.tell(
                lambda now: self.core.dispose_failed(name, cause, now, throttled=throttled, retry_after=retry)
            )
            return
        if name in self._given_up:
            # It may still come into being: its place is free when it was removed once more after that.
            self._given_up.discard(name)
            await asyncio.sleep(self.deadlines.late)
            self.tell(self.core.dispose_again, name)
            return
        self._removed[name] = None
        if len(self._removed) > _REMEMBERED:
            self._removed.popitem(last=False)
        self.tell(self.core.disposed, name)

    async def _drop_layer(self, layer: str) -> None:
        self.tasks.pop(layer, None)
        # All at once: whoever makes the layer anew meanwhile begins with a reset, which takes longer.
        forgets = [getattr(held.link, "forget_layer", None) for held in self.held.values()]
        dropped = await asyncio.gather(
            self.backend.drop_layer(layer),
            *(forget(layer) for forget in forgets if forget is not None),
            return_exceptions=True,
        )
        for error in dropped:
            if isinstance(error, SandboxDiedError):
                continue  # gone with its member
            if isinstance(error, Exception):
                log.warning("layer %s could not be dropped: %s", layer, error)


def _failed(core: Core, name: str, cause: Cause, **how: Any) -> Callable[[float], None]:
    return lambda now: core.provision_failed(name, cause, now, **how)
