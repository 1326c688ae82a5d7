"""Carries the core's actions out on asyncio and tells it what became of them.

Promises: no task outlives :meth:`Driver.close`; a task that breaks is logged with what it was doing and ends
nothing else; every operation has a deadline, and what does not end by it is given up, counted and cleaned up;
a claim that is cancelled at any await is either taken back or released. All times are the event loop's, so
that a loop with a virtual clock makes all of it virtual.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from ..backends.base import Backend
from ..spec import Spec
from ..task import Task
from .core import Core
from .demand import Bursts
from .model import Dispose, DropLayer, Grant, Note, PoolClaim, Prime, Provision, Refuse, Reset, State
from .operations import GRACE_S, Deadlines, Held, Opener, Operations
from .watching import LONG_WAIT_S

if TYPE_CHECKING:
    from ..metrics import Metrics

log = logging.getLogger("rlsandbox.pool")

SLOW_S = 3.0
"""After which removals at the pool's end are slow: the backend looks at what does not answer."""
_GRAIN_S = 1e-5
_SOON_S = 5e-3  # the claimant's first command has started by then


class Driver(Operations):
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
        bound = backend.max_resetting
        self._resets = contextlib.nullcontext() if bound is None else asyncio.Semaphore(bound)
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

    def forget(self, layer: str) -> None:
        """Have a layer dropped that the core never knew."""
        self._spawn(self._drop_layer(layer), f"drop layer {layer}")

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
