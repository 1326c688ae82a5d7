"""AsyncPool: sandboxes that are ready before they are asked for.

Promises: a claim gets a verified sandbox or a typed error that says why; making the pool starts nothing but
what checks its arguments and opens its ledger (members are made from the first await on); closing disposes
of everything; a closed or forked pool says so at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from .._portal import AwaitableCM
from ..backends.registry import load_backend
from ..config import load_config
from ..errors import ConfigError, PoolClosedError
from ..hooks import Rollout, plugin_manager
from ..ledger import Ledger, new_run_name
from ..metrics import Metrics, TtfcSample, start_exporters
from ..results import Record
from ..spec import Spec
from ..task import Task
from . import settings
from .ahead import AsyncClaim
from .core import Core
from .driver import Deadlines, Driver, Held
from .lending import Lease, Lender
from .link import KeeperLink, Link
from .model import CoreConfig, Note, PoolClaim, State
from .policy import in_thread
from .refusals import error_of
from .stats import PoolStats, stats_of

if TYPE_CHECKING:
    from os import PathLike

    from ..backends.base import Backend, Member
    from ..ledger.report import Report
    from ..sandbox import AsyncSandbox, AsyncSnapshot
    from .owner import Owner, PoolRef

log = logging.getLogger("rlsandbox.pool")

AsyncPolicy = Callable[["AsyncSandbox", Task], Awaitable[Any]]
CLOSE_S = 30.0


class AsyncPool:
    """A pool of warm sandboxes.

    Args:
        backend: a name (``local``, ``kubernetes``, ``simulated``, or one that a package brings) or a Backend.
        size: sandboxes kept ready.
        max_size: sandboxes that may exist at once, in whatever state; default *size*.
        spec: what sandboxes are made of unless a task says otherwise.
        when_empty: what a claim does that finds none ready: ``create`` one, ``wait`` for one, or ``fail``.
        max_creating: creations in flight at once.
        write_rate: creations and removals a second, together; default what the backend stands.
        run: name of the run, in the ledger and on everything that is made.
        ledger: where records go: a ``.db`` file or a directory; default ``$RLSANDBOX_HOME``.
        plugins: further plugins, before the installed ones.
        block: built-in or installed plugins to leave out, by name.
        config: a file instead of ``rlsandbox.toml``; False ignores files and variables.
        profile: section ``[profiles.NAME]`` of the configuration.

    Raises:
        ConfigError: an argument, variable or file is wrong, or the pool can never fit the machine.
    """

    def __init__(
        self,
        backend: str | Backend | None = None,
        *,
        size: int | None = None,
        max_size: int | None = None,
        spec: Spec | None = None,
        when_empty: Literal["create", "wait", "fail"] | None = None,
        max_creating: int | None = None,
        write_rate: float | None = None,
        run: str | None = None,
        ledger: str | PathLike[str] | None = None,
        plugins: Sequence[object] = (),
        block: Sequence[str] = (),
        config: str | PathLike[str] | Literal[False] | None = None,
        profile: str | None = None,
    ) -> None:
        given = {
            "backend": backend, "size": size, "max_size": max_size, "spec": spec, "when_empty": when_empty,
            "max_creating": max_creating, "write_rate": write_rate, "run": run, "block": tuple(block),
            "ledger": None if ledger is None else os.fspath(ledger),
        }  # fmt: skip
        self.config = load_config(config, profile, given)
        choice = self.config.backend
        self.backend = choice.instance or load_backend(choice.name, choice.options)
        self._numbers = settings.numbers_of(self.config, self.backend)
        self.spec = self.config.spec
        self.plugins = plugin_manager(plugins, block=self.config.pool.block)
        self.manager = self.plugins
        self.run = self.config.pool.run or new_run_name()
        self.metrics = Metrics(run=self.run, gauges=self._gauges, totals=self._totals)
        self._issues = bool(self.plugins.hook.rlsandbox_issue_credentials.get_hookimpls())
        self.closed = False
        self._pid = os.getpid()
        self._driver: Driver | None = None
        self._starting: asyncio.Lock | None = None
        self._lender = Lender(self)
        self._owner: Owner | None = None
        self._specs: dict[tuple[str | None, Spec | None], Spec] = {}
        self._early: list[tuple[list[tuple[str, str | None, int]], bool]] = []
        self._known: dict[str, Spec] = {}
        self._layer_tasks: dict[str, Task] = {}
        self._residue: deque[str] = deque(maxlen=20)
        facts = {"backend": self.backend.name, "size": self.size, "max_size": self.max_size}
        facts["isolation"] = self.spec.isolation
        self.ledger = Ledger.open(self.run, self.config.pool.ledger, facts=facts)
        try:
            wished = self.config.metrics
            self._exporters = start_exporters(
                self.metrics,
                prometheus_port=wished.prometheus_port,
                prometheus_host=wished.prometheus_host,
                otlp_endpoint=wished.otlp_endpoint,
            )
        except BaseException:
            self.ledger.close()
            raise

    # -- what it is ----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self._numbers.size

    @property
    def max_size(self) -> int:
        return self._numbers.max_size

    deadlines = Deadlines()
    """Seconds that operations may take; set it before the pool is started."""

    def __repr__(self) -> str:
        if self.closed:
            state = "closed"
        elif self._driver is None:
            state = "not started"
        else:
            core = self._driver.core
            state = f"{core.n[State.IDLE]} ready, {core.n[State.CLAIMED]} claimed, {core.waiting} waiting"
        return f"<{type(self).__name__} {self.backend.name} {self.run}: {state}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pool cannot be pickled; hand pool.ref to another process and use Pool.connect(ref)"
        )

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise PoolClosedError("the pool was not started", hint="await something of it first")
        return self._driver

    def now(self) -> float:
        return self.driver.now()

    @property
    def ref(self) -> PoolRef:
        """How other processes of this machine find the pool; it pickles. Ask for it on the event loop.

        Hand it to ranks, ray workers or spawned processes, which use ``connect``: one ceiling, one refill,
        owned by this process.
        """
        self._check()
        if self._owner is None:
            from .owner import Owner

            self._owner = Owner(self)
        return self._owner.ref

    @classmethod
    def connect(cls, ref: PoolRef) -> AsyncPool:
        """The pool of another process. Closing it gives back what this process holds, and no more."""
        from .remote import RemotePool

        return RemotePool(ref)

    # -- starting ------------------------------------------------------------------------------------

    async def start(self) -> Driver:
        """Begin to fill the pool. Claims do it by themselves.

        Raises:
            UnsupportedError: the backend cannot work here.
        """
        self._check()
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._driver is None:
                self._driver = await self._start()
        return self._driver

    async def _start(self) -> Driver:
        capabilities = await self.backend.capabilities()
        numbers, pool = self._numbers, self.config.pool
        core = Core(
            CoreConfig(
                size=numbers.size,
                ceiling=numbers.max_size,
                when_empty=pool.when_empty,
                max_creating=numbers.max_creating,
                write_rate=settings.write_rate(self.config, capabilities),
                home=self.spec.digest,
                shared_layers=capabilities.shared_layers,
                layer_budget=numbers.layer_budget,
            ),
            seed=secrets.randbits(32),
            prefix=f"rls-{secrets.token_hex(3)}-",
        )
        labels = {"rlsandbox.run": self.run, "rlsandbox.owner": secrets.token_hex(8)}
        driver = Driver(
            core, self.backend, self._link, labels=labels, metrics=self.metrics, note=self._noted,
            deadlines=self.deadlines,
            adopt=capabilities.adopt,
        )  # fmt: skip
        driver.rested = self._lender.lay_out
        driver.specs = self._known
        driver.tasks = self._layer_tasks
        self._known[self.spec.digest] = self.spec
        core.now = driver.now()
        for demand, replace in self._early:
            driver.tell(core.expect, demand, replace=replace)
        self._early.clear()
        driver.start()
        return driver

    async def _link(self, member: Member, spec: Spec) -> Link:
        own = getattr(self.backend, "open_link", None)
        if own is not None:
            link: Link = await own(member)
            return link
        return await KeeperLink.open(self.backend, member, spec, self.plugins)

    def _noted(self, note: Note) -> None:
        if note.kind == "quarantined":
            self._residue.append(f"{note.member}: {note.detail}")
        elif note.kind == "lost" and "closing" in note.detail:
            return
        spec = self._known.get(note.spec or "")
        image = spec.image if spec is not None else None
        self.ledger.note(note.kind, note.detail, sandbox=note.member, image=image)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise PoolClosedError(
                "this pool belongs to another process: it was made before a fork",
                kind="forked",
                hint="make the pool in the child, or hand it pool.ref and use Pool.connect(ref)",
            )
        if self.closed:
            raise PoolClosedError("the pool is closed")

    # -- claiming ------------------------------------------------------------------------------------

    def claim(
        self, task: Task | AsyncSnapshot, *, timeout: float | None = None, rollout: Rollout | None = None
    ) -> AwaitableCM[AsyncSandbox]:
        """A ready, verified sandbox for *task*, or one with a snapshot's state.

        Use it with ``await``, and release it; or with ``async with``.

        Args:
            timeout: seconds until :class:`ClaimTimeoutError`, which says what it waited for.
            rollout: whose attempt it is for; credential hooks are told.

        Raises:
            ClaimTimeoutError: none by the deadline, or none ready and ``when_empty="fail"``.
            ProvisionError: sandboxes of its spec cannot be made.
            PrimeError: the task's setup does not work.
            PoolClosedError: the pool is closed, or belongs to another process.
        """

        async def make() -> AsyncSandbox:
            return await self._claim(task, timeout=timeout, rollout=rollout)

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
        ahead: AsyncClaim | None = None,
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
        lease = Lease(claim, member.id, task, spec, rollout, needed, now, parts, counted)
        if not self._issues:
            return lender.sandbox(lease, held)
        try:
            sandbox = await lender.hand_over(lease, held)
        except BaseException:
            # Half-way: perhaps credentials are in it. Nobody gets it before it was reset and verified.
            await lender.abandon(lease)
            if counted:
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
        if driver is None:
            async with asyncio.timeout_at(deadline):
                driver = await self.start()
        batch = None if rollout is None else rollout.run
        claim = driver.ask(spec.digest, layer, deadline=deadline, batch=batch)
        if claim.member is None:
            refusal = await driver.wait(claim)
            if refusal is not None:
                raise error_of(refusal, task)
        return claim, driver.held[held_id(claim)]

    def _resolve(self, task: Task | AsyncSnapshot) -> tuple[Task, Spec, str | None]:
        """The task, its spec and the layer its episodes stand on."""
        if isinstance(task, Task):
            return task, *self._place(task)
        layer = getattr(task, "layer", None)
        own, spec = getattr(task, "task", None), getattr(task, "spec", None)
        if layer is None or not isinstance(own, Task) or not isinstance(spec, Spec):
            raise ConfigError(f"claim() takes a Task or a Snapshot, not {type(task).__name__}")
        if self._lender.snapshots.get(task.id) is not task:
            raise ConfigError(f"snapshot {task.id} was deleted, or belongs to another pool")
        return own, spec, layer

    def _place(self, task: Task) -> tuple[Spec, str | None]:
        key = (task.image, task.spec)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = task.spec_over(self.spec)
            self._known.setdefault(spec.digest, spec)
        if task.layer_key is None:
            return spec, None
        layer = f"p{spec.digest[:8]}-{task.layer_key}"
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

    # -- rollouts ------------------------------------------------------------------------------------

    def rollouts(
        self,
        tasks: Iterable[Task],
        policy: AsyncPolicy,
        *,
        group_size: int = 1,
        concurrency: int | None = None,
        retries: int = 2,
        timeout: float | None = None,
        resume: bool = False,
    ) -> AsyncIterator[Record]:
        """Run *policy* on every task, *group_size* times each, and give records as rollouts end.

        See :func:`rlsandbox.pool.rollouts.rollouts`.
        """
        from .rollouts import rollouts

        return rollouts(
            self, tasks, policy, group_size=group_size, concurrency=concurrency, retries=retries,
            timeout=timeout, resume=resume,
        )  # fmt: skip

    async def run_rollouts(
        self,
        tasks: Iterable[Task],
        policy: AsyncPolicy,
        *,
        group_size: int = 1,
        concurrency: int | None = None,
        retries: int = 2,
        timeout: float | None = None,
        resume: bool = False,
        progress: bool | None = None,
    ) -> Report:
        """:meth:`rollouts` to the end, as a report."""
        from .rollouts import run_rollouts

        return await run_rollouts(
            self, tasks, policy, group_size=group_size, concurrency=concurrency, retries=retries,
            timeout=timeout, resume=resume, progress=progress,
        )  # fmt: skip

    async def _recorded(self, record: Record) -> None:
        """A rollout that somebody else drove has ended: tell the plugins."""
        await self.ledger.flush()
        hook = self.plugins.hook.rlsandbox_record
        if hook.get_hookimpls():
            try:
                await in_thread(lambda: hook(record=record), 10.0)
            except Exception:
                log.warning("a plugin's rlsandbox_record failed for %s", record.id, exc_info=True)

    def report(self) -> Report:
        """The whole run so far."""
        return self.ledger.report()

    # -- looking at it -------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """What is so now, every counter, and advice on size and refill."""
        driver = self.driver
        names = {d: s.image or ("default" if d == self.spec.digest else d) for d, s in self._known.items()}
        return stats_of(driver.core, driver.bursts, driver.now(), list(self._residue), names)

    async def stats_now(self) -> PoolStats:
        """:meth:`stats`, also where they are another process's."""
        return self.stats()

    async def snapshots_now(self) -> list[AsyncSnapshot]:
        """:meth:`snapshots`, also where they are another process's."""
        return self.snapshots()

    def snapshots(self) -> list[AsyncSnapshot]:
        """Those that were not deleted."""
        asleep = {id(lease.asleep) for lease in self._lender.leases if lease.asleep is not None}
        return [s for s in self._lender.snapshots.values() if id(s) not in asleep]

    def _gauges(self) -> Mapping[str, float]:
        if self._driver is None or self.closed:
            return {}
        core = self._driver.core
        gauges = {state.value: float(core.n[state]) for state in State}
        return {
            **gauges,
            "waiting": float(core.waiting),
            "size": float(self.size),
            "max_size": float(self.max_size),
        }

    def _totals(self) -> Mapping[str, int]:
        return {} if self._driver is None else self._driver.core.counters.to_dict()

    # -- closing -------------------------------------------------------------------------------------

    async def close(self, timeout: float | None = CLOSE_S) -> None:
        """Stop what runs, dispose of every sandbox, close the ledger. Twice is fine.

        Args:
            timeout: seconds; what is not gone by then is left to ``rlsandbox reap``, and a warning says so.
        """
        if self.closed or os.getpid() != self._pid:
            return
        await self.end(timeout)
        try:
            await in_thread(self.ledger.close, 30.0)
        except RuntimeError:  # the interpreter ends: no thread can be started any more
            self.ledger.close()

    async def end(self, timeout: float | None = CLOSE_S) -> None:
        """:meth:`close` but for the ledger."""
        from .rollouts import stop_batches

        await stop_batches(self)
        self.closed = True
        if self._owner is not None:
            await self._owner.close()
        for lease in list(self._lender.leases):
            await self._lender.revoke(lease)
        self._lender.leases.clear()
        try:
            if self._driver is not None:
                await self._driver.close(timeout)
        finally:
            await self.backend.close()
            for exporter in self._exporters:
                exporter.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


def held_id(claim: PoolClaim) -> str:
    assert claim.member is not None
    return claim.member


async def _release(sandbox: AsyncSandbox) -> None:
    await sandbox.release()


def _seconds(timeout: float) -> float:
    bad = (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or math.isnan(timeout)
        or timeout < 0
    )
    if bad:
        raise ConfigError(f"timeout must be a number of seconds, not {timeout!r}")
    return timeout
