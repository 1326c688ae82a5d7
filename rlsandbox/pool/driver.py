"""Carries the core's actions out on asyncio and tells it what became of them.

Promises: no task outlives :meth:`Driver.close`; a task that breaks is logged with what it was doing and ends
nothing else; every operation has a deadline, and what does not end by it is given up, counted and cleaned up;
a claim that is cancelled at any await is either taken back or released. All times are the event loop's, so
that a loop with a virtual clock makes all of it virtual.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..backends.base import Backend, Member
from ..errors import ConfigError, SandboxDiedError, ThrottledError, UnsupportedError
from ..hooks import Credentials
from ..spec import Spec
from ..task import Task
from .core import Core
from .demand import Bursts
from .link import Link
from .model import Dispose, DropLayer, Grant, Note, PoolClaim, Prime, Provision, Refuse, Reset, State
from .refill import Cause
from .watching import LONG_WAIT_S, Watching

if TYPE_CHECKING:
    from ..metrics import Metrics

log = logging.getLogger("rlsandbox.pool")

GRACE_S = 5.0
"""What a cancelled operation gets to end before nobody waits for it any more."""
SLOW_S = 3.0
"""After which removals at the pool's end are slow: the backend looks at what does not answer."""
_GRAIN_S = 1e-5
_SOON_S = 5e-3  # the claimant's first command has started by then
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


class Driver(Watching):
    """One pool's hands. Everything runs on the loop on which :meth:`start` was called."""

    def __init__(
        self,
        core: Core,
        backend: Backend,
        open_link: Opener,
        *,
        labels: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        metrics: Metrics | None = None,
        note: Callable[[Note], object] | None = None,
        adopt: bool = False,
    ) -> None:
        self.core, self.backend = core, backend
        self.held: dict[str, Held] = {}
        self.specs: dict[str, Spec] = {}
        self.tasks: dict[str, Task] = {}
        """Of layers that may have to be primed."""
        self.labels = dict(labels or {})
        self.deadlines = deadlines or Deadlines()
        self.bursts = Bursts()
        self._open_link, self._metrics, self._note, self._adopt = open_link, metrics, note, adopt
        self._loop = asyncio.get_running_loop()
        self._ops: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: dict[str, asyncio.Task[Any]] = {}
        """Creations that were given up and have not ended."""
        self._given_up: set[str] = set()
        self._cut: asyncio.Future[Any] = self._loop.create_future()
        """Done when the pool closes and waits no longer for creations to end by themselves."""
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._refused: dict[int, Refuse] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._watchers: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._long_wait: asyncio.TimerHandle | None = None
        self._pumping = False
        self.choose: Callable[[Spec], Awaitable[dict[str, Any]]] | None = None
        """Further arguments for the creation of a member: the node that a plugin wishes."""
        self.rested: Callable[[Held], object] | None = None
        """Called when a member lies ready and nobody waits for it."""

    # -- claims --------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._loop.time()

    def ask(self, spec: str, layer: str | None, *, deadline: float | None, batch: object) -> PoolClaim:
        """Ask the core; :meth:`wait` for the answer unless it is granted at once."""
        now = self._loop.time()
        core = self.core
        self.bursts.asked(now, core.n[State.CLAIMED] + core.queued + 1)
        claim = core.claim(spec, layer, now, deadline=deadline, batch=batch, settle=False)
        if claim.warm:
            # Its Grant needs no carrying out, and the refill can wait until somebody has the sandbox.
            if len(core.actions) == 1:
                core.actions.clear()
            if self._timer is None or self._timer.when() > now + _SOON_S:
                self._wake_at(now + _SOON_S)
            return claim
        self._waiters[claim.id] = self._loop.create_future()
        if self._long_wait is None:
            self._long_wait = self._loop.call_later(LONG_WAIT_S, self._tell_long_waits)
        self.pump()
        return claim

    async def wait(self, claim: PoolClaim) -> Refuse | None:
        """Until the claim is granted (None) or refused. Cancelled, it leaves nothing behind."""
        waiter = self._waiters.get(claim.id)
        if waiter is None:
            return None  # granted at once
        try:
            await waiter
        except BaseException:
            if claim.member is not None:  # granted in the same moment: nobody is there to take it
                self.release(claim)
            else:
                self.core.cancel(claim.id, self._loop.time())
                self.pump()
            raise
        finally:
            self._waiters.pop(claim.id, None)
        return self._refused.pop(claim.id, None)

    def release(self, claim: PoolClaim, *, discard: bool = False) -> None:
        self.core.release(claim.id, self._loop.time(), discard=discard)
        self.pump()

    # -- events --------------------------------------------------------------------------------------

    def tell(self, event: Callable[..., None], *args: Any, **kw: Any) -> None:
        """Give the core an event (a method of it, called with *args* and the time); act on what follows."""
        event(*args, self._loop.time(), **kw)
        self.pump()

    def pump(self) -> None:
        """Carry out what the core has decided."""
        if self._pumping:
            return
        self._pumping = True
        core = self.core
        try:
            while core.actions:
                actions, core.actions = core.actions, []
                for action in actions:
                    self._carry_out(action)
        finally:
            self._pumping = False
        if self._watchers:
            self._look()
        timer, wake = self._timer, core.wake
        if wake is None:
            if timer is not None:
                timer.cancel()
                self._timer = None
        elif timer is None or timer.when() > wake:
            # Never at once: should the core ask for a time that has passed, others run in between.
            self._wake_at(max(wake, self._loop.time() + _GRAIN_S))

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.core.tick(self._loop.time())
        self.pump()

    def _carry_out(self, action: Any) -> None:
        match action:
            case Grant(claim):
                self._answer(claim)
            case Refuse(claim):
                self._refused[claim] = action
                self._answer(claim)
            case Reset(member, layer):
                self._op(member, self._reset(member, layer), f"reset {member}")
            case Prime(member, layer):
                self._op(member, self._prime(member, layer), f"prime {layer} in {member}")
            case Provision(member, spec):
                self._op(member, self._provision(member, spec), f"provision {member}")
            case Dispose(member, reason):
                self._spawn(self._dispose(member, reason), f"dispose of {member}")
            case DropLayer(layer):
                self._spawn(self._drop_layer(layer), f"drop layer {layer}")
            case Note():
                self._noted(action)

    def _answer(self, claim: int) -> None:
        waiter = self._waiters.get(claim)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _noted(self, note: Note) -> None:
        level = logging.DEBUG if note.kind == "lost" and "closing" in note.detail else logging.WARNING
        log.log(level, "%s: sandbox %s: %s", note.kind, note.member, note.detail)
        if self._note is not None:
            self._note(note)

    # -- operations ----------------------------------------------------------------------------------

    def _spawn(self, coro: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await coro
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("could not %s: an error of rlsandbox itself", what)

        task = self._loop.create_task(guarded(), name=f"rlsandbox: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _op(self, member: str, coro: Coroutine[Any, Any, None], what: str) -> None:
        before = self._ops.get(member)

        async def after() -> None:
            # The end of one operation may start the next before the first one's task has ended.
            if before is not None and not before.done():
                await asyncio.wait({before})
            await coro

        task = self._spawn(coro if before is None or before.done() else after(), what)
        self._ops[member] = task
        task.add_done_callback(lambda done: self._op_ended(member, done))

    def _op_ended(self, member: str, task: asyncio.Task[None]) -> None:
        if self._ops.get(member) is task:
            del self._ops[member]

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
            link.sources, link.lost_layer = self._layer_at, self._layer_lost
        held.link.on_lost(lambda error: self._lost(name, error))
        self.tell(self.core.provisioned, name, once=held.link.mode == "replace")

    def _layer_at(self, layer: str) -> list[Any]:
        """Links to the members that have the layer."""
        links = (held.link for held in self.held.values())
        return [link for link in links if getattr(link, "has", lambda _: False)(layer)]

    def _layer_lost(self, layer: str) -> bool:
        links = (held.link for held in self.held.values())
        return not any(getattr(link, "owns", lambda _: True)(layer) for link in links)

    def _lost(self, name: str, error: BaseException) -> None:
        held = self.held.get(name)
        if held is not None and not self.core.closing:
            self.tell(self.core.lost, name, Cause.of(error))

    def _heard(self, name: str, what: str, why: str) -> None:
        """The backend says what is so with a member's place."""
        core = self.core
        match what:
            case "away":
                self.tell(lambda now: core.doubted(name, why, now))
            case "back":
                self.tell(core.trusted, name)
            case "leaving" | "staying":
                self.tell(lambda now: core.unwanted(name, why if what == "leaving" else "", now))

    async def _prime(self, name: str, layer: str) -> None:
        held, task = self.held[name], self.tasks[layer]
        started = self._loop.time()
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
        started = self._loop.time()
        try:
            async with asyncio.timeout(self.deadlines.reset):
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

    def is_here(self) -> bool:
        """Whether this is the event loop that it runs on."""
        return asyncio.get_running_loop() is self._loop

    def start(self) -> None:
        """Begin to fill the pool."""
        self.backend.listen(self._heard)
        self.tell(self.core.tick)
        self._spawn(self.look_for_strays(), "look for strays")

    async def close(self, timeout: float | None) -> bool:
        """Dispose of everything; False when something was left after *timeout* seconds."""
        self.tell(self.core.close)
        began = self._loop.time()
        gone = await self.until(
            lambda: not self.core.members, SLOW_S if timeout is None else min(timeout, SLOW_S)
        )
        if not gone and (timeout is None or timeout > SLOW_S):
            await self.backend.hurry(SLOW_S if timeout is None else min(SLOW_S, timeout - SLOW_S))
            if not self._cut.done():
                self._cut.set_result(None)
            left_s = None if timeout is None else max(0.0, timeout - (self._loop.time() - began))
            gone = await self.until(lambda: not self.core.members, left_s)
        if not gone:
            left = sorted(self.core.members)
            log.warning("%d sandboxes are left behind: %s", len(left), ", ".join(left[:5]))
        for handle in (self._timer, self._long_wait):
            if handle is not None:
                handle.cancel()
        ending: set[asyncio.Task[Any]] = {*self._tasks, *self._late.values()} - {asyncio.current_task()}
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=GRACE_S)
        for held in self.held.values():
            await held.link.close()
        self.held.clear()
        return gone


def _failed(core: Core, name: str, cause: Cause, **how: Any) -> Callable[[float], None]:
    return lambda now: core.provision_failed(name, cause, now, **how)
