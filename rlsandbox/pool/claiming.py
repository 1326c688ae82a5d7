"""Claims and demand: what :class:`~.pool.AsyncPool` does for those who want sandboxes."""

from __future__ import annotations

import asyncio
import math
import numbers
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .._portal import AwaitableCM
from .._sandbox.command import LONGEST_S
from ..errors import ConfigError, PrimeError
from ..hooks import Rollout
from ..metrics import Metrics, TtfcSample
from ..spec import Spec
from ..task import Task, layer_name
from .ahead import AsyncClaim, Need
from .driver import Driver
from .lending import Lease, Lender
from .model import PoolClaim, State
from .operations import Held
from .refusals import deleted, error_of

if TYPE_CHECKING:
    from ..sandbox import AsyncSandbox, AsyncSnapshot


class Claiming:
    """The half of a pool that takes claims; it is started by the first of them."""

    spec: Spec
    metrics: Metrics
    _driver: Driver | None
    _lender: Lender
    _issues: bool
    _places: bool
    _latest: dict[str, Task]
    """The task of a spec that asked last, where a plugin places sandboxes."""
    _specs: dict[tuple[str | None, Spec | None], Spec]
    _known: dict[str, Spec]
    _layer_tasks: dict[str, Task]
    _early: list[tuple[list[tuple[str, str | None, int]], bool]]

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    @abstractmethod
    def max_size(self) -> int: ...

    @property
    @abstractmethod
    def driver(self) -> Driver: ...

    @abstractmethod
    async def start(self) -> Driver: ...

    @abstractmethod
    def _check(self) -> None: ...

    # -- claiming ------------------------------------------------------------------------------------

    def claim(
        self,
        task: Task | AsyncSnapshot,
        *,
        timeout: float | None = None,
        rollout: Rollout | None = None,
        ahead: Need | None = None,
    ) -> AwaitableCM[AsyncSandbox]:
        """A ready, verified sandbox for *task*, or one with a snapshot's state.

        Use it with ``await``, and release it; or with ``async with``.

        Args:
            timeout: seconds until :class:`ClaimTimeoutError`, which says what it waited for.
            rollout: whose attempt it is for; credential hooks are told.
            ahead: it is asked for before it is needed; says when that is.

        Raises:
            ClaimTimeoutError: none by the deadline, or none ready and ``when_empty="fail"``.
            ProvisionError: sandboxes of its spec cannot be made.
            PrimeError: the task's setup does not work.
            PoolClosedError: the pool is closed, or belongs to another process.
        """

        async def make() -> AsyncSandbox:
            return await self._claim(task, timeout=timeout, rollout=rollout, ahead=ahead)

        return AwaitableCM(make, _release)

    def claim_ahead(self, task: Task | AsyncSnapshot) -> AsyncClaim:
        """Ask for a sandbox that is needed later; TTFC runs from ``result()`` on."""
        return AsyncClaim(self, task)

    async def _claim_within(self, task: Task | AsyncSnapshot, timeout: float | None) -> AsyncSandbox:
        return await self._claim(task, timeout=timeout)

    async def _claim(
        self,
        task: Task | AsyncSnapshot,
        *,
        timeout: float | None = None,
        rollout: Rollout | None = None,
        counted: bool = True,
        ahead: Need | None = None,
    ) -> AsyncSandbox:
        needed = asyncio.get_running_loop().time()
        task, spec, layer = self._resolve(task)
        try:
            claim, held = await self._obtain(layer, spec, timeout, task=task, rollout=rollout)
        except BaseException:
            if counted:
                self._censored(needed if ahead is None else ahead.needed)
            raise
        driver = self.driver
        member = driver.core.members[held_id(claim)]
        now = driver.now()
        if ahead is not None:
            needed = now if ahead.needed is None else ahead.needed
        lender = self._lender
        parts = lender.parts(member, needed, now)
        lease = Lease(claim, member.id, task, spec, rollout, needed, now, parts, counted, ahead=ahead)
        if not self._issues:
            return lender.sandbox(lease, held)
        try:
            sandbox = await lender.hand_over(lease, held)
        except BaseException:
            # Half-way: perhaps credentials are in it. Nobody gets it before it was reset and verified.
            await lender.abandon(lease)
            if counted and Need.there(ahead):
                self._censored(needed)
            raise
        lease.handed = driver.now()
        parts["connected"] = lease.handed - now
        return sandbox

    async def _obtain(
        self,
        layer: str | None,
        spec: Spec,
        timeout: float | None,
        *,
        task: Task,
        rollout: Rollout | None = None,
    ) -> tuple[PoolClaim, Held]:
        """A granted claim and its member."""
        self._check()
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + _seconds(timeout)
        driver = self._driver
        if driver is None or not driver.is_here():
            async with asyncio.timeout_at(deadline):
                driver = await self.start()
        batch = None if rollout is None else rollout.run
        claim = driver.ask(spec.digest, layer, deadline=deadline, batch=batch)
        if claim.member is None:
            refusal = await driver.wait(claim)
            if refusal is not None:
                raise error_of(refusal, task)
        held = driver.held[held_id(claim)]
        if layer is not None and held.link.mode == "replace":
            try:
                async with asyncio.timeout(driver.deadlines.prime):
                    await held.link.set_up(task)
            except BaseException as error:
                driver.release(claim, discard=True)
                if isinstance(error, TimeoutError):
                    said = f"its setup did not end within {driver.deadlines.prime:g} s"
                    raise PrimeError(said, kind="prime_timeout", task=task.id) from None
                raise
        return claim, held

    def _resolve(self, task: Task | AsyncSnapshot) -> tuple[Task, Spec, str | None]:
        """The task, its spec and the layer its episodes stand on."""
        if isinstance(task, Task):
            return task, *self._place(task)
        layer = getattr(task, "layer", None)
        own, spec = getattr(task, "task", None), getattr(task, "spec", None)
        if layer is None or not isinstance(own, Task) or not isinstance(spec, Spec):
            raise ConfigError(f"claim() takes a Task or a Snapshot, not {type(task).__name__}")
        if self._lender.snapshots.get(task.id) is not task:
            raise deleted(task.id)
        return own, spec, layer

    def _place(self, task: Task) -> tuple[Spec, str | None]:
        key = (task.image, task.spec)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = task.spec_over(self.spec)
            self._known.setdefault(spec.digest, spec)
        if self._places:
            self._latest[spec.digest] = task
        layer = layer_name(task, spec)
        if layer is not None:
            self._layer_tasks[layer] = task
        return spec, layer

    def _censored(self, needed: float | None) -> None:
        if needed is not None:
            waited = max(0.0, asyncio.get_running_loop().time() - needed)
            self.metrics.record_ttfc(TtfcSample(queued_s=waited, never_started=True))

    # -- demand --------------------------------------------------------------------------------------

    def expect(self, tasks: Iterable[Task], *, group_size: int = 1, replace: bool = False) -> None:
        """Say what will be claimed: the pool makes, moves and primes sandboxes ahead.

        Never waits. What is said adds up; each claim takes one off.

        Args:
            group_size: claims a task.
            replace: forget what was said before; ``expect([], replace=True)`` forgets everything.
        """
        self._check()
        self.tell_expected(self.demand(tasks, group_size), replace)

    def demand(self, tasks: Iterable[Task], group_size: int) -> list[tuple[str, str | None, int]]:
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ConfigError(f"group_size must be a whole number of at least 1, not {group_size!r}")
        if isinstance(tasks, (Task, str)):
            raise ConfigError("expect() takes a list of tasks", hint="put the one into a list")
        demand = []
        for task in tasks:
            if not isinstance(task, Task):
                raise ConfigError(f"expect() takes tasks, not {type(task).__name__}")
            spec, layer = self._place(task)
            demand.append((spec.digest, layer, group_size))
        return demand

    def tell_expected(self, demand: list[tuple[str, str | None, int]], replace: bool) -> None:
        if self._driver is None:
            self._early.append((demand, replace))
        else:
            self._driver.tell(self._driver.core.expect, demand, replace=replace)

    async def wait_ready(self, n: int | None = None, *, timeout: float | None = None) -> int:
        """Wait until *n* sandboxes are ready, and what is expected is in place; how many are ready then.

        Args:
            n: default: all that the pool keeps ready and are not claimed.
            timeout: seconds; the answer may be below *n* then.

        Raises:
            ProvisionError: none can be made.
        """
        driver = await self.start()
        core = driver.core
        if n is not None and n > self.max_size:
            raise ConfigError(f"wait_ready({n}) can never be met: the pool's ceiling is {self.max_size}")
        if n is not None and n < 0:
            raise ConfigError(f"wait_ready({n}): not a number of sandboxes")

        def ready() -> bool:
            wanted = n
            if wanted is None:
                wanted = max(0, min(self.size, self.max_size - core.n[State.CLAIMED]))
            enough = core.n[State.IDLE] >= wanted
            return core.hopeless() is not None or (enough and (n is not None or core.settled()))

        await driver.until(ready, None if timeout is None else _seconds(timeout))
        hopeless = core.hopeless()
        if hopeless is not None and core.n[State.IDLE] == 0:
            raise error_of(hopeless, Task(id="wait_ready"))
        return core.n[State.IDLE]


def held_id(claim: PoolClaim) -> str:
    assert claim.member is not None
    return claim.member


async def _release(sandbox: AsyncSandbox) -> None:
    await sandbox.release()


def _seconds(timeout: float) -> float:
    bad = (
        isinstance(timeout, bool)
        or not isinstance(timeout, numbers.Real)
        or math.isnan(timeout)
        or timeout < 0
    )
    if bad:
        raise ConfigError(f"timeout must be a number of seconds, not {timeout!r}")
    return float(min(timeout, LONGEST_S))
